"""`python -m tests.as_fork MODULE ARGUMENTS…`: a module as a fork of a process with torch, that looks like one of its own.

It gets the signals that this process gets, is killed where this one is, and this one ends as it does. Ranks of a job and
torch's agent can be started so: see `ranks` and `agents`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from tests import forks

if TYPE_CHECKING:
    from collections.abc import Callable

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
AGENT = "torch.distributed.run"


def main(arguments: list[str]) -> int:
    """Run the module, and return its exit code."""
    line = forks.ask(os.environ[forks.ADDRESS], ["-m", *arguments], os.environ, (0, 1, 2))
    for number in PASSED_ON:
        signal.signal(number, lambda signal_number, _: line.send(str(int(signal_number)).encode()))
    code = forks.answer(line)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def agents(put: Callable[[object, str, object], None]) -> None:
    """Use `put`, a function like setattr, to replace torch's agent by a fork that does not import torch again."""
    from dcpbench.launch import torchrun

    own = torchrun._make_command
    if forks.ADDRESS not in os.environ:
        forks.serving()

    def command(*job: object) -> list[str]:
        words = own(*job)
        place = words.index(AGENT)
        return [*words[:place], __name__, "tests.cli.agent", *words[place + 1 :]]

    put(torchrun, "_make_command", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
