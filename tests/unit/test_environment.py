"""Versions of installed packages, and the cost of finding them."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.measuring import environment

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def test_all_packages_are_looked_up_in_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading every installed package takes most of a second; every rank looks up ten of them."""
    read = importlib.metadata.packages_distributions
    calls = []
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: calls.append(1) or read())
    environment._list_distributions.cache_clear()
    found = environment.get_hardware().packages
    environment.get_hardware()
    assert calls == [1]
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["pynvml"] == importlib.metadata.version("nvidia-ml-py"), (
        "its distribution has another name than its module"
    )


def test_missing_package_is_reported_with_the_install_command_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test covers each package of each user extra; `dcpbench[…]` is in no package index."""
    monkeypatch.setattr(environment, "_get_version", lambda _: None)
    problems = environment.get_hardware().problems
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "pip install '.[flashinfer]'" in (ROOT / "README.md").read_text(encoding="utf-8")
    for extra in ("flashinfer", "flashmla", "dashboard"):
        for package in project["optional-dependencies"][extra]:
            distribution = re.split(r"[<=>]", package)[0]
            name = {"sgl-flash-mla": "flash_mla", "flashinfer-python": "flashinfer"}.get(distribution, distribution)
            (problem_text,) = (problem for problem in problems if problem.startswith(f"{name} is missing"))
            assert f"pip install '.[{extra}]'" in problem_text


def test_no_text_names_an_extra_of_a_package_index() -> None:
    texts = [*(ROOT / "dcpbench").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert [path.name for path in texts if "'dcpbench[" in path.read_text(encoding="utf-8")] == []


def test_missing_package_has_version_none() -> None:
    assert environment._get_version("no_such_package") is None
