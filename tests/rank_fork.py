"""A rank that is a fork of a process with torch: `python -m tests.rank_fork JOB` in place of `-m dcpbench.worker JOB`.

Torch's agent, which would import it, too, is not needed then: quick_torchrun.py starts the ranks.
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


def main(arguments: list[str]) -> int:
    """Ask for a rank and be it, as far as others can tell: it gets our signals and we end as it does."""
    line = forks.ask(os.environ[forks.ADDRESS], ["-m", "tests.distributed.rank", *arguments], os.environ, (0, 1, 2))
    for number in PASSED_ON:
        signal.signal(number, lambda told, _: line.send(str(int(told)).encode()))
    code = forks.answer(line)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def install(put: Callable[[object, str, object], None]) -> None:
    """`put`, which is like setattr, such ranks in place of those of commands and of `launcher.Work`."""
    from dcpbench.commands import runs
    from dcpbench.launch import torchrun

    own = torchrun._command

    def command(*job: object) -> list[str]:
        """Of the job, without torch's agent."""
        return ["tests.cli.quick_torchrun" if word == "torch.distributed.run" else word for word in own(*job)]

    if forks.ADDRESS not in os.environ:
        forks.serving()
    put(runs, "WORKER", __name__)
    put(torchrun, "_command", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
