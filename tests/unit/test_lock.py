"""requirements.lock agrees with pyproject.toml and constraints.txt, and CI installs it."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock

TEXT = lock.LOCK.read_text(encoding="utf-8")


def test_lock_satisfies_project_and_constraints() -> None:
    """If this fails, `make lock` writes it again."""
    assert lock.find_problems(TEXT, lock.read_requirements(), lock.read_constraints()) == []


def test_lock_has_the_torch_entry_of_make_lock() -> None:
    assert lock.format_torch_entry() in TEXT


def test_lock_contains_no_package_index_or_url() -> None:
    """Each machine chooses its package index."""
    assert re.findall(r"://|--(?:extra-)?index-url|--find-links|@ ", TEXT) == []


def test_requirements_of_locked_packages_are_locked() -> None:
    """Otherwise pip fails in CI. Requirements are read from packages installed here in the version of the lock."""
    pins = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin, _ in lock.parse_lock(TEXT)}
    missing = []
    for dist in importlib.metadata.distributions():
        name = canonicalize_name(dist.metadata["Name"])
        if pins.get(name) != dist.version.partition("+")[0]:
            continue
        requirements = [Requirement(line) for line in dist.requires or []]
        missing += [
            f"{requirement} of {name}"
            for requirement in requirements
            if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
            and canonicalize_name(requirement.name) not in pins
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
def test_problems_of_an_outdated_lock_are_named(text: str, problem: str) -> None:
    """The project requires a>=1 and b>=2, and pins b at 2.0."""
    requirements, pinned = [Requirement("a>=1"), Requirement("b>=2")], [Requirement("b==2.0")]
    assert problem in lock.find_problems(text, requirements, pinned)
