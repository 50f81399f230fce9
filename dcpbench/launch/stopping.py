"""End a command on Ctrl-C, SIGTERM or a lost terminal (SIGHUP) after the running work has cleaned up, with a sentence."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

from dcpbench.errors import ExitCode
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def print_when_stopped(text: str | Callable[[], str]) -> Iterator[None]:
    """End the command with this text, unless it is empty, if it is stopped in this block; a function is called then."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop_command)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as e:
        with contextlib.suppress(OSError):  # the terminal may be gone
            if words := text if isinstance(text, str) else text():
                print_stderr(f"\n{words}")
        sys.exit(e.code if isinstance(e, SystemExit) else ExitCode.INTERRUPTED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def delay_signals() -> Iterator[None]:
    """Delay signals that would stop the command until the end of this block."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _stop_command(number: int, _: object) -> None:
    """End as by Ctrl-C, once: a closing shell sends SIGHUP twice, and the second must not end the clean-up."""
    for repeated in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(repeated, signal.SIG_IGN)
    sys.exit(128 + number)
