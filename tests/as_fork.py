"""Run a module as a fork of a process that has imported torch: `python -m tests.as_fork MODULE ARGUMENTS…`.

The fork gets all signals of this process, and is killed with it. This process ends with the exit code or the signal of
the fork. `replace_agents` starts torch's agent in this way, and tests/distributed/rank.py the ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from tests import forks

if TYPE_CHECKING:
    from collections.abc import Callable

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
AGENT = "torch.distributed.run"


def main(arguments: list[str]) -> int:
    """Run the module, and return its exit code."""
    line = forks.request_program(os.environ[forks.ADDRESS_VARIABLE], ["-m", *arguments], os.environ, (0, 1, 2))
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda signal_number, _: line.send(str(int(signal_number)).encode()))
    code = forks.wait_for_exit_code(line)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def replace_agents(put: Callable[[object, str, object], None]) -> None:
    """Replace torch's agent by a fork, which need not import torch; `put` has the signature of setattr."""
    from dcpbench.launch import torchrun

    make_original = torchrun._make_command
    if forks.ADDRESS_VARIABLE not in os.environ:
        forks.start_server()

    def make_command(*job: object) -> list[str]:
        words = make_original(*job)
        place = words.index(AGENT)
        return [*words[:place], __name__, "tests.cli.agent", *words[place + 1 :]]

    put(torchrun, "_make_command", make_command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
