"""Progress of a long scan, on stderr: results go to stdout."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Self

from dcpbench.syncs.words import plain

QUIET_SECONDS = 2.0
"""Progress is told no more often than this where nothing can be overwritten."""


class Progress:
    """Tells on stderr what is being read: one line that is overwritten on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, message: str) -> None:
        """Show one message, as long as it is not too soon after the last."""
        now = time.monotonic()
        if self._terminal:
            sys.stderr.write("\r\x1b[K" + plain(message)[: shutil.get_terminal_size().columns - 1])
            self._shown = True
        elif now - self._last >= QUIET_SECONDS:
            self._last = now
            sys.stderr.write(f"{plain(message)}\n")
        sys.stderr.flush()
