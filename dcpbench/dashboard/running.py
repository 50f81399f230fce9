"""Show the runs below a folder that are at work, in the words of `dcpbench top`; locks are never touched."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.dashboard.series import fit_label
from dcpbench.launch import processes
from dcpbench.records.folder import LOCK_FILE
from dcpbench.top import state_text
from dcpbench.top.watch import StateReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.top.state import State


class RunningRuns:
    """Read the states of all runs below a folder; each call reads only what was added since the last one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._readers: dict[Path, StateReader] = {}
        self._lock = threading.Lock()  # several browsers may ask at once

    def read_states(self) -> list[State]:
        """Return the states of the runs with living processes between their first job and their last point, by folder."""
        with self._lock:
            self._readers = {f: self._readers.get(f) or StateReader(f) for f in _iter_alive_folders(self._root)}
            states = [(folder, reader.read_state()) for folder, reader in self._readers.items()]
        return [
            msgspec.structs.replace(state, folder=self._format_name(folder))
            for folder, state in states
            if state.total is not None and state.now is not None
        ]

    def _format_name(self, folder: Path) -> str:
        return fit_label(str(folder.relative_to(self._root)) if folder != self._root else folder.name)


def render_job(state: State) -> dict[str, Any]:
    """Return what the page shows of a run: a title, a note, and how many of its points are done."""
    assert state.now is not None
    title = " · ".join(filter(None, (state_text.format_counts(state), state_text.format_rates(state))))
    note = " · ".join(filter(None, (state.now.point, state_text.format_stage(state.now))))
    return {"title": f"{state.folder}: {title}", "note": note, "done": state.ok + state.failed, "total": state.total}


def _iter_alive_folders(root: Path) -> Iterator[Path]:
    for name, below, files in os.walk(root):
        below[:] = sorted(inside for inside in below if not inside.startswith("."))
        if LOCK_FILE in files and processes.find_alive(Path(name))[0] != processes.NONE:
            yield Path(name)
