"""Test how `syncs run` finds the function of --step, and its notes if the function is not found."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

from dcpbench.syncs import run as runs
from dcpbench.syncs.recorder.recording import Recorder
from dcpbench.syncs.run import Note, Recording

if TYPE_CHECKING:
    from pathlib import Path

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
    assert not made.found
    script.step = lambda: "result"
    made._handle_cuda_init()
    assert made.found
    assert script.step() == "result"


def test_missing_step_function_note_does_not_mention_warm_up() -> None:
    why = runs.explain_notes([Note(pid=1, cuda=True, found=False)], Recording(step="__main__:f", warmup=2))[0]
    assert "__main__:f was never found" in why
    assert "define it before CUDA is first used" in why
    assert "leave --step, --steps and --warmup out" in why


def test_step_function_that_was_never_called_has_its_own_note() -> None:
    why = runs.explain_notes([Note(pid=1, cuda=True)], Recording(step="__main__:f", steps=3))[0]
    assert "__main__:f was never called" in why
    assert "--warmup" not in why


def test_program_without_modules_note_suggests_the_step_option() -> None:
    assert "--step MODULE:FUNCTION" in runs.explain_notes([Note(pid=1, cuda=True)], Recording(warmup=2))[0]


def test_too_few_steps_note_mentions_warm_up() -> None:
    why = runs.explain_notes([Note(pid=1, cuda=True, steps=2)], Recording(step="a:b", warmup=2))[0]
    assert "after 2 steps, and --warmup 2 leaves none" in why


def test_recorder_writes_if_it_found_the_step_function(tmp_path: Path) -> None:
    recorder(tmp_path, "nowhere:step").write_note()
    assert [note.found for note in runs.read_notes(tmp_path)] == [False]
