"""Version of dcpbench on ranks: ranks must run the same files as the command that started them."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dcpbench
from dcpbench.commands import submit
from dcpbench.errors import UsageError, WorkerError
from dcpbench.launch import launcher, version_check
from dcpbench.launch.version_check import Package, check_same_package, read_package

PACKAGE = Path(dcpbench.__file__).parent


def copy_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy some modules of dcpbench, and make this process belong to the copy."""
    copy = folder / "dcpbench"
    shutil.copytree(PACKAGE / "launch", copy / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(dcpbench.__file__, copy)
    monkeypatch.setattr(version_check, "dcpbench", SimpleNamespace(__file__=str(copy / "__init__.py")))
    return copy


def test_copies_of_the_package_are_equal_until_a_module_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders may have different names on several machines; compiled files do not matter."""
    first = copy_package(tmp_path / "one", monkeypatch)
    wanted = read_package()
    second = copy_package(tmp_path / "other", monkeypatch)
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "subprocess_guard.pyc").write_bytes(b"compiled")
    assert (wanted.folder, read_package().folder) == (str(first), str(second))
    check_same_package(wanted)
    module = second / "launch" / "subprocess_guard.py"
    for change in (
        lambda: module.write_text("other"),
        (second / "new.py").touch,
        (second / "launch" / "new.cu").touch,
        lambda: module.rename(second / "x.py"),
    ):
        before = read_package()
        change()
        with pytest.raises(WorkerError) as error:
            check_same_package(before)
        assert f"dcpbench's files in {second} have changed since the command began" in str(error.value)
    with pytest.raises(WorkerError) as error:
        check_same_package(wanted)
    assert f"run the dcpbench in {second}, whose files are not those of the command, in {first}" in str(error.value)


def test_lock_file_of_an_editor_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_package(tmp_path, monkeypatch)
    wanted = read_package()
    (copy / "launch" / ".#subprocess_guard.py").symlink_to("nobody@nowhere.1:2")
    check_same_package(wanted)


def test_module_edited_after_the_command_began_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise later jobs of a sweep would run another program."""
    copy = copy_package(tmp_path, monkeypatch)
    monkeypatch.setattr(
        version_check, "get_started_package", functools.cache(version_check.get_started_package.__wrapped__)
    )
    with pytest.raises(WorkerError, match="could not describe this machine"):
        launcher.run_probe("no_worker")
    (copy / "launch" / "subprocess_guard.py").write_text("edited")
    with pytest.raises(WorkerError, match="have changed since the command began"):
        check_same_package(version_check.get_started_package())


def test_working_directory_is_searched_only_if_it_has_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout used with `python -m dcpbench` is on no other path."""
    monkeypatch.chdir(tmp_path)
    assert version_check.get_environment() == {"PYTHONSAFEPATH": "1"}
    monkeypatch.chdir(PACKAGE.parent)
    assert version_check.get_environment() == {}
    (tmp_path / "link").symlink_to(PACKAGE.parent)
    monkeypatch.chdir(tmp_path / "link")
    assert version_check.get_environment() == {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcpbench").symlink_to(PACKAGE)
    monkeypatch.setattr(version_check, "dcpbench", SimpleNamespace(__file__=str(tmp_path / "dcpbench" / "__init__.py")))
    assert version_check.get_environment() == {}


def test_package_has_a_folder_and_a_digest_of_its_modules() -> None:
    assert read_package() == Package(folder=str(PACKAGE), sha256=read_package().sha256)
    assert len(read_package().sha256) == 64


def test_submitted_job_needs_this_dcpbench_or_a_named_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m dcpbench submit` may run in a checkout, with another dcpbench installed for the same Python."""
    script = tmp_path / "bin" / "dcpbench"
    script.parent.mkdir()
    script.touch()
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    for other, refused in ((str(PACKAGE), False), ("/opt/dcpbench", True), ("", True)):
        monkeypatch.setattr(version_check, "find_script_folder", lambda other=other: other)
        if refused:
            with pytest.raises(
                UsageError, match=f"{script}, which belongs to the dcpbench in .*{PACKAGE}.*--dcpbench 'PROGRAM'"
            ):
                submit._find_program(None, inside=False)
        else:
            assert submit._find_program(None, inside=False) == (str(script),)
        assert submit._find_program("other --dcpbench", inside=False) == ("other", "--dcpbench")


def test_script_folder_ignores_a_package_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dcpbench").mkdir()
    (tmp_path / "dcpbench" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    assert version_check.find_script_folder() == str(PACKAGE)
