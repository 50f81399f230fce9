"""Test `[tool.dcpbench.syncs]`: its valid settings, where it is looked for, and errors for invalid settings."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import UsageError
from dcpbench.syncs.gating.config import Config, find_config, find_root

if TYPE_CHECKING:
    from pathlib import Path

FULL = """
[tool.dcpbench.syncs]
max-per-step = 2
max-bubble-us = 500.5
baseline = "ci/syncs-baseline.json"
step-range = "^decode_step"

[[tool.dcpbench.syncs.allow]]
function = "engine.sampler.*"
reason = "tokens leave the GPU here"
expires = 2026-12-31

[[tool.dcpbench.syncs.allow]]
range = "load"
file = "python/*"
reason = "once"
"""


def read_settings(folder: Path, text: str) -> Config:
    """Return the settings of a folder with this pyproject.toml."""
    (folder / "pyproject.toml").write_text(text)
    return find_config(folder, folder)


def test_all_settings_are_read(tmp_path: Path) -> None:
    found = read_settings(tmp_path, FULL)
    assert (found.max_per_step, found.max_bubble_us, found.step_range) == (2.0, 500.5, "^decode_step")
    assert found.baseline == tmp_path / "ci/syncs-baseline.json"
    sampler, load = found.allow
    assert (sampler.function, sampler.expires, sampler.source) == (
        "engine.sampler.*",
        dt.date(2026, 12, 31),
        "allow[0]",
    )
    assert (load.range, load.file, load.reason, load.expires) == ("load", "python/*", "once", None)


@pytest.mark.parametrize("text", ["", "[tool.other]\nx = 1", "[tool.dcpbench]\n", "tool = 3"])
def test_project_without_the_table_has_no_settings(tmp_path: Path, text: str) -> None:
    assert read_settings(tmp_path, text) == Config()


WRONG = [
    ('max-per-step = "2"', "max-per-step must be a number"),
    ("max-per-step = true", "max-per-step must be a number"),
    ("max-bubble-us = -1", "not negative"),
    ("max-bubble-us = nan", "not negative"),
    ("max-per-step = inf", "max-per-step must be a number that a limit can be"),
    ("baseline = 3", "baseline must be a text"),
    ("step-range = ['x']", "step-range must be a text"),
    ("step-range = '('", "step-range '(' is no regular expression"),
    ("max_per_step = 2", "unknown key max_per_step; it knows allow, max-per-step"),
    ('allow = "f"', "allow must be a list of tables"),
    ('allow = ["f"]', "allow[0] must be a table"),
    ('allow = [{ function = "f" }]', "allow[0] has no reason"),
    ('allow = [{ function = "f", reason = " " }]', "allow[0] has no reason"),
    ('allow = [{ reason = "r" }]', "allow[0] allows nothing: give function, range or file"),
    ('allow = [{ function = 1, reason = "r" }]', "allow[0]: function must be a text"),
    ('allow = [{ function = "f", why = "r" }]', "allow[0]: unknown key why"),
    ('allow = [{ function = "f", reason = "r", expires = "2026-12-31" }]', "a date without quotes"),
    ('allow = [{ function = "f", reason = "r", expires = 2026-12-31T10:00:00 }]', "a date without quotes"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_invalid_setting_is_named_with_its_valid_values(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_settings(tmp_path, f"[tool.dcpbench.syncs]\n{line}\n")
    assert "pyproject.toml" in str(caught.value)


@pytest.mark.parametrize("text", [b"[tool", b"\xff", b"[tool.dcpbench]\nsyncs = 1\n"])
def test_invalid_toml_file_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(text)
    with pytest.raises(UsageError, match=r"pyproject\.toml"):
        find_config(tmp_path, tmp_path)


def test_nearest_file_with_the_table_up_to_the_root_is_used(tmp_path: Path) -> None:
    """A package of a monorepo can have its own file; files without the table, and those above the root, are ignored."""
    inner = tmp_path / "repo" / "pkg" / "src"
    inner.mkdir(parents=True)
    root = tmp_path / "repo"
    (tmp_path / "pyproject.toml").write_text("[tool.dcpbench.syncs]\nmax-per-step = 9\n")
    (inner.parent / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_config(inner, root) == Config()
    (root / "pyproject.toml").write_text("[tool.dcpbench.syncs]\nmax-per-step = 1\n")
    assert find_config(inner, root).max_per_step == 1.0
    (inner.parent / "pyproject.toml").write_text("[tool.dcpbench.syncs]\nmax-per-step = 2\n")
    assert find_config(inner, root).max_per_step == 2.0


def test_root_is_the_repository_of_a_folder(tmp_path: Path) -> None:
    inner = tmp_path / "repo" / "pkg"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").touch()
    assert find_root(inner) == inner
    (tmp_path / "repo" / ".git").mkdir()
    assert find_root(inner) == tmp_path / "repo"
