"""What is said of installed packages, and what finding it out may cost."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from dcpbench import environment

if TYPE_CHECKING:
    import pytest


def test_all_packages_are_looked_up_in_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading every installed package takes most of a second; every rank asks for ten of them."""
    read = importlib.metadata.packages_distributions
    calls = []
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: calls.append(1) or read())
    environment._distributions.cache_clear()
    found = environment.probe().packages
    environment.probe()
    assert calls == [1]
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["pynvml"] == importlib.metadata.version("nvidia-ml-py"), "named otherwise than it is imported"


def test_a_missing_package_has_no_version() -> None:
    """Absent is null, not an error."""
    assert environment._version("no_such_package") is None
