"""requirements.lock: it is what pyproject.toml and constraints.txt ask for, and what CI installs."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock

TEXT = lock.LOCK.read_text(encoding="utf-8")


def test_the_lock_fits_what_the_project_asks_for() -> None:
    """Where this fails, `make lock` writes it again."""
    assert lock.problems(TEXT, lock.wanted(), lock.constraints()) == []


def test_the_lock_is_what_make_lock_wrote_for_torch() -> None:
    assert lock.torch_entry() in TEXT


def test_no_package_comes_from_a_place_that_the_lock_names() -> None:
    """Where packages come from is whose machine it is to say."""
    assert re.findall(r"://|--(?:extra-)?index-url|--find-links|@ ", TEXT) == []


def test_what_a_locked_package_asks_for_is_locked_too() -> None:
    """The requirements are those of the packages installed here in the version of the lock; else pip would refuse in CI."""
    pins = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin, _ in lock.locked(TEXT)}
    missing = []
    for dist in importlib.metadata.distributions():
        name = canonicalize_name(dist.metadata["Name"])
        if pins.get(name) != dist.version.partition("+")[0]:
            continue
        asked = [Requirement(line) for line in dist.requires or []]
        missing += [
            f"{of} of {name}"
            for of in asked
            if (of.marker is None or of.marker.evaluate({"extra": ""})) and canonicalize_name(of.name) not in pins
        ]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a==1.5 \\\n    --hash=sha256:00\n", "b>=2 is not in it"),
        ("a==0.5 --hash=sha256:00\nb==2 --hash=sha256:00\n", "a==0.5 is not a>=1"),
        ("a==1.5 --hash=sha256:00\nb==2.1 --hash=sha256:00\n", "b==2.1 is not b==2.0"),
        ("a==1.5\nb==2.0 --hash=sha256:00\n", "a==1.5 has no hash"),
        ("a>=1.5 --hash=sha256:00\nb==2.0 --hash=sha256:00\n", "a>=1.5 is no exact version"),
    ],
    ids=["absent", "too old", "not as pinned", "no hash", "no version"],
)
def test_a_lock_that_no_longer_fits_is_told_with_what_is_wrong(text: str, problem: str) -> None:
    """The project asks for a>=1 and b>=2, and pins b at 2.0."""
    asked, pinned = [Requirement("a>=1"), Requirement("b>=2")], [Requirement("b==2.0")]
    assert problem in lock.problems(text, asked, pinned)
