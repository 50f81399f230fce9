"""What commands write to a terminal, a pipe or a log: Rich's console, single lines, and how far something is."""

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
"""Columns where nobody's terminal says how many there are: room for the widest table."""
QUIET_SECONDS = 2.0
"""Progress is shown no more often than this where nothing can be overwritten."""


def console(*, error: bool = False) -> Console:
    """Rich's console, on stderr with `error`."""
    found = _console(stderr=error)
    if not found.is_terminal:
        found.width = PLAIN_WIDTH
    return found


def drawn(draw: Callable[[Console], None], width: int, *, colour: bool) -> str:
    """What `draw` prints on a console of so many columns; colours and hyperlinks only with `colour`."""
    out = io.StringIO()
    system = "standard" if colour else None
    draw(_console(file=out, width=width, force_terminal=colour, color_system=system, legacy_windows=False))
    return "".join(f"{line if colour else line.rstrip()}\n" for line in out.getvalue().splitlines())


def _console(**more: Any) -> Console:  # noqa: ANN401 - as of Rich's
    """Names come from others, so nothing is markup and `:key:` no picture."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **more)


def say(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def now_and_then(tell: Callable[P, None], seconds: float = QUIET_SECONDS) -> Callable[P, None]:
    """`tell`, but no more often than this, and not before so long: what is quick says nothing."""
    last = time.monotonic()

    def sometimes(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            tell(*args, **kwargs)

    return sometimes


class ProgressLine:
    """What is at work, on stderr: one line that is overwritten on a terminal, a line now and then elsewhere."""

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
        """Show one message, as long as it is not too soon after the last."""
        if not self._terminal:
            self._line(printable(message))
            return
        sys.stderr.write("\r\x1b[K" + printable(redact(message))[: shutil.get_terminal_size().columns - 1])
        sys.stderr.flush()
        self._shown = True
