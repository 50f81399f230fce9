"""Write the output of commands to a terminal, a pipe or a log: Rich's console, single lines, and progress."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, ParamSpec, Self

from dcpbench.points.redaction import redact
from dcpbench.show.text import make_printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

P = ParamSpec("P")
PLAIN_WIDTH = 160  # width in columns without a terminal: enough for the widest table
QUIET_SECONDS = 2.0  # minimum interval in s between progress lines where they cannot be overwritten
SLOWER = 2.0  # factor by which the pause between lines of progress grows outside a terminal
MAX_QUIET_SECONDS = 60.0


def make_console(*, error: bool = False) -> Console:
    """Return Rich's console, on stderr with `error`."""
    found = _build_console(stderr=error)
    if not found.is_terminal:
        found.width = PLAIN_WIDTH
    return found


def render_to_text(draw: Callable[[Console], None], width: int, *, colour: bool) -> str:
    """Return the output of `draw` on a console of `width` columns; colours and hyperlinks only with `colour`."""
    out = io.StringIO()
    system = "standard" if colour else None
    draw(_build_console(file=out, width=width, force_terminal=colour, color_system=system, legacy_windows=False))
    return "".join(f"{line if colour else line.rstrip()}\n" for line in out.getvalue().splitlines())


def _build_console(**more: Any) -> Console:  # noqa: ANN401 - as of Rich's
    """Return a console without markup and emoji, because names are untrusted."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **more)


def print_stderr(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def make_rate_limited(
    tell: Callable[P, None], seconds: float = QUIET_SECONDS, *, slower: float = 1.0
) -> Callable[P, None]:
    """Return `tell` limited to one call in `seconds`, which also pass before the first; a quick command prints nothing.

    After each call the pause is `slower` times as long, up to MAX_QUIET_SECONDS.
    """
    last, pause = time.monotonic(), seconds

    def run_if_due(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal last, pause
        if time.monotonic() - last >= pause:
            last, pause = time.monotonic(), min(pause * slower, max(MAX_QUIET_SECONDS, seconds))
            tell(*args, **kwargs)

    return run_if_due


def _count_columns() -> int:
    """Return the width of the terminal of stderr; stdout may be a pipe or another terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or shutil.get_terminal_size().columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


class ProgressLine:
    """Show progress on stderr: one line that is overwritten on a terminal, else lines at increasing intervals."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = False
        self._line = make_rate_limited(print_stderr, slower=SLOWER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, message: str) -> None:
        """Show one message, unless the last one was too recent."""
        if not self._terminal:
            self._line(make_printable(message))
            return
        sys.stderr.write("\r\x1b[K" + make_printable(redact(message))[: _count_columns() - 1])
        sys.stderr.flush()
        self._shown = True
