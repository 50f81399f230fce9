"""Test how `syncs run` finds the function of --step, and its notes if the function is not found."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.syncs import run as runs
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.recorder.recording import Recorder
from dcpbench.syncs.run import Note, Recording
from dcpbench.syncs.sync_report import Report

if TYPE_CHECKING:
    import pytest


def recorder(folder: Path, step: str) -> Recorder:
    """Return a recorder before any use of torch or CUDA."""
    return Recorder({"folder": str(folder), "warmup": 2, "steps": None, "cpu": False, "step": step})


def test_step_function_of_the_script_is_found_when_cuda_is_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a script calls no module, and imports none after the definition of the function."""
    made, script = recorder(tmp_path, "script:step"), types.ModuleType("script")
    monkeypatch.setitem(sys.modules, "script", script)
    assert not made.step_found
    script.step = lambda: "result"
    made._handle_cuda_init()
    assert made.step_found
    assert script.step() == "result"


def explain_missing_trace(note: Note, recording: Recording) -> str:
    """Return why a process that used CUDA has no trace, as the verdict states it."""
    report = Report()
    runs.add_notes(report, [note], recording)
    (reason,) = compute_verdict(report, Gate(root=Path("/nonexistent"))).reasons
    assert reason.startswith("process 1 () has left no trace: ")
    assert reason.endswith(".")
    assert ".." not in reason
    return reason


def test_missing_step_function_note_does_not_mention_warm_up() -> None:
    why = explain_missing_trace(Note(pid=1, cuda=True, step_found=False), Recording(step="__main__:f", warmup=2))
    assert "__main__:f was never found" in why
    assert "define it before CUDA is first used" in why
    assert "leave --step, --steps and --warmup out" in why


def test_step_function_that_was_never_called_has_its_own_note() -> None:
    why = explain_missing_trace(Note(pid=1, cuda=True), Recording(step="__main__:f", steps=3))
    assert "__main__:f was never called" in why
    assert "--warmup" not in why


def test_program_without_modules_note_suggests_the_step_option() -> None:
    assert "--step MODULE:FUNCTION" in explain_missing_trace(Note(pid=1, cuda=True), Recording(warmup=2))


def test_too_few_steps_note_mentions_warm_up() -> None:
    why = explain_missing_trace(Note(pid=1, cuda=True, steps=2), Recording(step="a:b", warmup=2))
    assert "after 2 steps, and --warmup 2 leaves none" in why


def test_recorder_writes_if_it_found_the_step_function(tmp_path: Path) -> None:
    recorder(tmp_path, "nowhere:step").write_note()
    assert [note.step_found for note in runs.read_notes(tmp_path)] == [False]
