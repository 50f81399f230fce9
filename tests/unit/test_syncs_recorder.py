"""How `syncs run` finds the function of --step, and what it says where it does not; whole programs run in tests/cli."""

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
    """A recorder that has seen neither torch nor CUDA."""
    return Recorder({"folder": str(folder), "warmup": 2, "steps": None, "cpu": False, "step": step})


def test_a_function_of_the_script_is_found_when_cuda_is_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module is called in such a script, and none is imported after the function was defined."""
    made, script = recorder(tmp_path, "script:step"), types.ModuleType("script")
    monkeypatch.setitem(sys.modules, "script", script)
    assert not made.found
    script.step = lambda: "result"
    made._handle_cuda_init()
    assert made.found
    assert script.step() == "result"


def test_a_function_that_was_never_found_is_not_blamed_on_the_warmup() -> None:
    why = runs.explain_notes([Note(pid=1, cuda=True, found=False)], Recording(step="__main__:f", warmup=2))[0]
    assert "__main__:f was never found" in why
    assert "define it before CUDA is first used" in why
    assert "leave --step, --steps and --warmup out" in why


def test_a_function_that_was_found_and_not_called_is_told_apart() -> None:
    why = runs.explain_notes([Note(pid=1, cuda=True)], Recording(step="__main__:f", steps=3))[0]
    assert "__main__:f was never called" in why
    assert "--warmup" not in why


def test_a_program_without_modules_is_told_to_name_its_step() -> None:
    assert "--step MODULE:FUNCTION" in runs.explain_notes([Note(pid=1, cuda=True)], Recording(warmup=2))[0]


def test_too_few_steps_are_still_blamed_on_the_warmup() -> None:
    why = runs.explain_notes([Note(pid=1, cuda=True, steps=2)], Recording(step="a:b", warmup=2))[0]
    assert "after 2 steps, and --warmup 2 leaves none" in why


def test_the_recorder_writes_whether_it_found_the_function(tmp_path: Path) -> None:
    recorder(tmp_path, "nowhere:step").write_note()
    assert [note.found for note in runs.read_notes(tmp_path)] == [False]
