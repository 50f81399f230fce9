"""Test that a marked test may synchronise where its repository allows it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import UsageError
from dcpbench.syncs.live.checked import SyncCheck

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """import torch


def decode(lengths):
    return lengths.tolist()  {comment}


def sample(logits):
    return logits.argmax().item()
"""
ALLOWED = "# dcpbench: allow-sync(the one read of a step)"


def count_syncs(folder: Path, *functions: str, comment: str = "", project: str = "") -> int:
    """Return what a dry run of these functions counts in a repository with this comment and pyproject.toml."""
    (folder / ".git").mkdir()
    (folder / "pyproject.toml").write_text(project)
    path = folder / "engine.py"
    path.write_text(SOURCE.format(comment=comment))
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None
    assert spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    check = SyncCheck("dry-run", threads="current", allow=(), root=folder)
    check.start()
    try:
        import torch

        values = torch.ones(4, device="cuda")
        with check.record_call():
            for function in functions:
                getattr(engine, function)(values)
        return check.count
    finally:
        check.stop()


@pytest.mark.parametrize(("comment", "count"), [("", 2), (ALLOWED, 1), ("# dcpbench: allow-sync", 2)])
def test_comment_with_a_reason_allows_its_line(comment: str, count: int, tmp_path: Path) -> None:
    assert count_syncs(tmp_path, "decode", "sample", comment=comment) == count


def test_functions_allowed_by_the_project_do_not_count(tmp_path: Path) -> None:
    project = '[[tool.dcpbench.syncs.allow]]\nfunction = "engine.sam*"\nreason = "tokens leave the GPU here"\n'
    assert count_syncs(tmp_path, "decode", "sample", project=project) == 1


def test_expired_permission_allows_nothing(tmp_path: Path) -> None:
    project = '[[tool.dcpbench.syncs.allow]]\nfunction = "sample"\nreason = "for now"\nexpires = 2020-01-01\n'
    assert count_syncs(tmp_path, "sample", project=project) == 1


def test_invalid_settings_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="allow must be a list"):
        count_syncs(tmp_path, project="[tool.dcpbench.syncs]\nallow = 3\n")
