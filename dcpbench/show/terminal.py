"""Output of commands to a terminal, a pipe or a log: Rich's console, single lines, and progress."""

from __future__ import annotations

import io
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, ParamSpec, Self

from dcpbench.points.redaction import redact
from dcpbench.show.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

P = ParamSpec("P")
PLAIN_WIDTH = 160
"""Width in columns without a terminal: enough for the widest table."""
QUIET_SECONDS = 2.0
"""Minimum interval in s between progress lines where they cannot be overwritten."""


def console(*, error: bool = False) -> Console:
    """Return Rich's console, on stderr with `error`."""
    found = _console(stderr=error)
    if not found.is_terminal:
        found.width = PLAIN_WIDTH
    return found


def drawn(draw: Callable[[Console], None], width: int, *, colour: bool) -> str:
    """Return the output of `draw` on a console of `width` columns; colours and hyperlinks only with `colour`."""
    out = io.StringIO()
    system = "standard" if colour else None
    draw(_console(file=out, width=width, force_terminal=colour, color_system=system, legacy_windows=False))
    return "".join(f"{line if colour else line.rstrip()}\n" for line in out.getvalue().splitlines())


def _console(**more: Any) -> Console:  # noqa: ANN401 - as of Rich's
    """Return a console without markup and emoji, because names are untrusted."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **more)


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def now_and_then(tell: Callable[P, None], seconds: float = QUIET_SECONDS) -> Callable[P, None]:
    """Return `tell` limited to one call per `seconds`, the first after that time, so that quick work prints no
    progress.
    """
    last = time.monotonic()

    def sometimes(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            tell(*args, **kwargs)

    return sometimes


class ProgressLine:
    """Progress on stderr: one line that is overwritten on a terminal, an occasional line elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = False
        self._line = now_and_then(say)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, message: str) -> None:
        """Show one message, unless the last one was too recent."""
        if not self._terminal:
            self._line(printable(message))
            return
        sys.stderr.write("\r\x1b[K" + printable(redact(message))[: shutil.get_terminal_size().columns - 1])
        sys.stderr.flush()
        self._shown = True
