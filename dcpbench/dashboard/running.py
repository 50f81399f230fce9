"""Read the progress of the runs below a folder that are at work, as `dcpbench top` reads it; locks are never touched."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.dashboard.series import fit_label
from dcpbench.launch import processes
from dcpbench.records.folder import LOCK_FILE
from dcpbench.top.facts import Facts
from dcpbench.top.state import compute_state

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NOTE_CHARS = 200


@dataclasses.dataclass(frozen=True)
class RunningRun:
    """Describe the progress of a run."""

    run: str
    done: int
    """Number of points that were recorded or have failed."""
    failed: int
    of: int
    left_s: float | None
    """Estimated remaining seconds; null before the first point is done."""
    stage: str
    point: str
    note: str


class RunningRuns:
    """Read the progress of all runs below a folder; each call reads only what was added since the last one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._facts: dict[Path, Facts] = {}
        self._lock = threading.Lock()  # several browsers may ask at once

    def read_progress(self, now: float | None = None) -> list[RunningRun]:
        """Return the progress of every run with living processes, in order of folders."""
        with self._lock:
            folders = list(_iter_alive_folders(self._root))
            self._facts = {folder: self._facts.get(folder) or Facts(folder) for folder, *_ in folders}
            found = [self._describe_run(*one, time.time() if now is None else now) for one in folders]
        return [run for run in found if run is not None]

    def _describe_run(self, folder: Path, alive: str, began: float | None, now: float) -> RunningRun | None:
        """Return a run's progress; None before its first job and after its last point."""
        facts = self._facts[folder]
        facts.read_updates()
        state = compute_state(facts, now, alive=alive, began=began)
        if state.total is None or state.now is None:
            return None
        return RunningRun(
            run=fit_label(str(folder.relative_to(self._root)) if folder != self._root else folder.name),
            done=state.ok + state.failed,
            failed=state.failed,
            of=state.total,
            left_s=state.eta.seconds if state.eta else None,
            stage=fit_label(state.now.stage),
            point=fit_label(state.now.point),
            note=fit_label(state.now.note, MAX_NOTE_CHARS),
        )


def _iter_alive_folders(root: Path) -> Iterator[tuple[Path, str, float | None]]:
    """Yield the folders with living processes, each with what lives and the time at which the command began."""
    for name, below, files in os.walk(root):
        below[:] = sorted(inside for inside in below if not inside.startswith("."))
        if LOCK_FILE in files:
            alive, began = processes.find_alive(Path(name))
            if alive != processes.NONE:
                yield Path(name), alive, began
