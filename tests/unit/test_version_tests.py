"""Test tools/version_tests.py: installed versions, packages visible in an environment, and exit codes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from tools import version_tests

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def test_lowest_versions_are_the_lower_bounds_of_the_project() -> None:
    pins = dict(pin.split("==") for pin in version_tests.list_packages(version_tests.LOWEST))
    assert {"pandas", "matplotlib", "typer", "msgspec", "numpy", "rich", "starlette"} <= pins.keys()
    assert not pins.keys() & {"torch", "triton"}
    for required in version_tests.read_requirements():
        assert required.specifier.contains(pins[required.name])


def test_contributing_guide_names_the_lowest_versions() -> None:
    pins = dict(pin.split("==") for pin in version_tests.list_packages(version_tests.LOWEST))
    guide = (version_tests.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in ("pandas", "Matplotlib", "Typer", "Rich", "msgspec", "NumPy"):
        assert f"{name} {pins[name.lower()]}" in " ".join(guide.split())


def test_newest_versions_are_not_pinned() -> None:
    assert all(name.replace("-", "").isalnum() for name in version_tests.list_packages(version_tests.NEWEST))


def test_lower_bound_is_pinned_without_its_environment_marker() -> None:
    assert version_tests.pin_lowest(Requirement("pandas>=2.2.2; sys_platform == 'linux'")) == "pandas==2.2.2"


@pytest.mark.parametrize("line", ["pandas", "pandas==2.2.2", "pandas<3"])
def test_requirement_without_a_lower_bound_is_rejected(line: str) -> None:
    with pytest.raises(ValueError, match=r"write pandas>=VERSION"):
        version_tests.pin_lowest(Requirement(line))


def test_every_pattern_matches_test_files() -> None:
    """Check the patterns, so that a renamed file does not drop out of the selection."""
    assert [pattern for pattern in version_tests.TESTS if not list(version_tests.ROOT.glob(pattern))] == []
    files = version_tests.find_test_files()
    assert len(files) == len(set(files))


def test_environment_prefers_its_own_packages_and_shares_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a fake pip that writes a `pandas` of one line; packaging comes from the present environment."""
    run = subprocess.run

    def install(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        packages = next((tmp_path / "lowest").glob("lib/python*/site-packages"))
        assert not list(packages.glob("*.pth"))
        (packages / "pandas.py").write_text("OWN = True\n", encoding="utf-8")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(version_tests, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(version_tests.subprocess, "run", install)
    python = version_tests.create_environment(version_tests.LOWEST)
    program = "import pandas, packaging, dcpbench; print(pandas.OWN, packaging.__file__, dcpbench.__file__)"
    done = run([str(python), "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    own, packaging, package = done.stdout.split()
    assert own == "True"
    assert not packaging.startswith(str(tmp_path))
    assert package == str(version_tests.ROOT / "dcpbench" / "__init__.py")


def test_versions_that_cannot_be_installed_give_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(version_tests, "create_environment", lambda _: None)
    assert version_tests.main([]) == 1
    message = capsys.readouterr().err
    assert "The lowest versions cannot be installed together" in message
    assert "The newest versions cannot be installed together" in message


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ([], [("lowest", []), ("newest", [])]),
        (["newest", "-k", "help"], [("newest", ["-k", "help"])]),
        (["-k", "lowest"], [("lowest", ["-k", "lowest"]), ("newest", ["-k", "lowest"])]),
    ],
    ids=["both", "one", "neither named first"],
)
def test_first_argument_selects_the_versions(
    arguments: list[str], runs: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    monkeypatch.setattr(version_tests, "run_tests", lambda which, rest: done.append((which, list(rest))) or 0)
    assert version_tests.main(arguments) == 0
    assert done == runs


@pytest.mark.parametrize("failing", ["lowest", "newest"])
def test_failure_with_either_versions_gives_exit_code_1(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use pytest's exit code 5, for no tests found; it is 1 if a test failed."""
    monkeypatch.setattr(version_tests, "run_tests", lambda which, _: 5 if which == failing else 0)
    assert version_tests.main([]) == 1
