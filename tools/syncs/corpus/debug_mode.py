"""Emulate `torch.cuda.set_sync_debug_mode` in a dry run: warn, or raise, at the same waits as on a GPU.

On a GPU the mode reports waits of torch for a stream. It reports no waits for events, for the device or in cudaFree, and no non-blocking
copies through pageable memory. A test compares the emulated reports with those of an H200 in the published record of the corpus.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from dcpbench.syncs.dry_run import dry_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.syncs.sites import Sync

TEXT = "called a synchronizing CUDA operation"
MODES = {"default": 0, "warn": 1, "error": 2}
REPORTED_CALL = "cudaStreamSynchronize"
DISPATCH_FILES = (
    "_ops.py",
    "_python_dispatch.py",
    "overrides.py",
)  # files of torch with frames that only a dry run has


class DebugMode:
    """Hold the mode, and the lines at which it has warned."""

    def __init__(self) -> None:
        self.mode = 0
        self.shown: set[tuple[str, int]] = set()

    def set_mode(self, mode: int | str) -> None:
        """Replace torch.cuda.set_sync_debug_mode."""
        self.mode = MODES[mode] if isinstance(mode, str) else mode
        self.shown.clear()

    def get_mode(self) -> int:
        """Replace torch.cuda.get_sync_debug_mode."""
        return self.mode

    def report(self, sync: Sync) -> None:
        """Warn at the line that waits, or raise RuntimeError, if the mode sees this wait."""
        if not self.mode or sync.call != REPORTED_CALL or sync.may_block:
            return
        if self.mode == MODES["error"]:
            raise RuntimeError(TEXT)
        at = next(f for f in reversed(sync.frames) if Path(f.file).name not in DISPATCH_FILES)
        # Python forgets which lines have warned, because torch changes the warning filters often in a dry run.
        if warnings.filters[0][0] == "always" or (at.file, at.line) not in self.shown:
            self.shown.add((at.file, at.line))
            warnings.warn_explicit(TEXT, UserWarning, at.file, at.line)


class _Reported(list["Sync"]):
    """Report each wait as it is recorded."""

    def __init__(self, mode: DebugMode) -> None:
        super().__init__()
        self.mode = mode

    def append(self, sync: Sync) -> None:
        super().append(sync)
        self.mode.report(sync)


@contextlib.contextmanager
def emulate_debug_mode() -> Iterator[None]:
    """Run the body in a dry run in which the mode can be set."""
    mode = DebugMode()
    with (
        dry_run() as run,
        patch.object(torch.cuda, "set_sync_debug_mode", mode.set_mode),
        patch.object(torch.cuda, "get_sync_debug_mode", mode.get_mode),
    ):
        run.syncs = _Reported(mode)
        yield
