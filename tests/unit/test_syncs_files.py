"""Test which files of a folder are traces, and which other files are left out."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import OutputError, TraceError, UsageError
from dcpbench.syncs import files
from dcpbench.syncs.traces.reading import is_other_json

if TYPE_CHECKING:
    from pathlib import Path

TRACE = b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1}]}'
OTHERS = (b"{}", b'{"sites": [{"op": "aten::item"}]}', b'[{"name": "x"}]', b"3", b'{"traceEvents": null}')
DAMAGED = (
    b"",
    b'{"schemaVersion": 1, "deviceProp',
    b"\x1f\x8b\x08nonsense",
    b'[{"name',
    b"<html>",
    gzip.compress(b"{}", mtime=0)[:-9],
)


@pytest.mark.parametrize("text", OTHERS)
def test_complete_json_without_events_is_other_json(tmp_path: Path, text: bytes) -> None:
    for name, content in (("a.json", text), ("a.json.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(content)
        assert is_other_json(tmp_path / name)


def test_events_under_a_damaged_key_are_a_damaged_trace(tmp_path: Path) -> None:
    """If the file were left out of a folder, the report would be clean without its waits."""
    event = b'{"ph": "X", "cat": "kernel", "name": "a", "ts": 1, "dur": 1}'
    (tmp_path / "a.json").write_bytes(b'{"schemaVersion": 1, "traceEventr": [' + event + b"]}")
    assert not is_other_json(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["b.json.xz", "b.json.zip", "b.json.tar.gz"])
def test_compressed_traces_of_a_folder_are_included(name: str, tmp_path: Path) -> None:
    """The reader names their format and the command that unpacks them."""
    (tmp_path / "a.json").write_bytes(TRACE)
    (tmp_path / name).write_bytes(b"\xfd7zXZ\x00")
    assert [path.name for path in files.expand_names([str(tmp_path)])] == ["a.json", name]


@pytest.mark.parametrize("text", [TRACE, TRACE[: TRACE.index(b"[") + 1], b'[{"ph": "X"}', b"[]", *DAMAGED])
def test_damaged_trace_is_not_left_out(tmp_path: Path, text: bytes) -> None:
    """A rank with a full disk must not vanish from a clean report."""
    path = tmp_path / "rank0.json"
    path.write_bytes(text)
    assert not is_other_json(path)


def test_reports_among_traces_are_left_out_and_listed(tmp_path: Path) -> None:
    for name in ("r1.json", "r0.json"):
        (tmp_path / name).write_bytes(TRACE)
    (tmp_path / "report.json").write_text(json.dumps({"traces": []}))
    for given in (str(tmp_path), str(tmp_path / "r*.json")):
        left_out: list[Path] = []
        assert [path.name for path in files.expand_names([given], left_out.append)] == ["r0.json", "r1.json"]
        assert [path.name for path in left_out] == ["report.json"]


def test_explicitly_named_file_is_never_left_out(tmp_path: Path) -> None:
    """The file is read alone and in addition to its folder, so that an error in it is reported."""
    (tmp_path / "r0.json").write_bytes(TRACE)
    (tmp_path / "report.json").write_text("{}")
    named = str(tmp_path / "report.json")
    assert [path.name for path in files.expand_names([named])] == ["report.json"]
    assert {path.name for path in files.expand_names([str(tmp_path), named])} == {"r0.json", "report.json"}


def test_folder_with_other_json_only_is_an_error_that_names_a_file(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(TraceError, match=re.escape(f"{tmp_path} holds no Kineto trace") + ".*report.json"):
        files.expand_names([str(tmp_path)])


class TestCopies:
    """Test copies of a trace, which would be counted as the waits of two ranks."""

    @staticmethod
    def drop(folder: Path, *names: str) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the names that are kept, and pairs of each dropped name and the first with its text."""
        dropped: list[tuple[str, str]] = []
        kept = files.drop_copies([folder / name for name in names], lambda a, b: dropped.append((a.name, b.name)))
        return [path.name for path in kept], dropped

    def test_links_and_copies_of_a_trace_are_dropped(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_bytes(TRACE)
        (tmp_path / "copy.json").write_bytes(TRACE)
        (tmp_path / "hard.json").hardlink_to(tmp_path / "a.json")
        (tmp_path / "soft.json").symlink_to(tmp_path / "a.json")
        names = ("a.json", "copy.json", "hard.json", "soft.json")
        assert self.drop(tmp_path, *names) == (["a.json"], [(name, "a.json") for name in names[1:]])

    def test_compressed_copy_of_a_trace_is_dropped(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_bytes(TRACE)
        (tmp_path / "a.json.gz").write_bytes(gzip.compress(TRACE))
        assert self.drop(tmp_path, "a.json", "a.json.gz") == (["a.json"], [("a.json.gz", "a.json")])

    def test_different_traces_of_the_same_length_are_kept(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_bytes(TRACE)
        (tmp_path / "b.json").write_bytes(TRACE.replace(b'"ts": 1', b'"ts": 2'))
        (tmp_path / "c.json").write_bytes(TRACE + b"\n")
        (tmp_path / "bad.json.gz").write_bytes(gzip.compress(TRACE)[:20])
        names = ("a.json", "b.json", "c.json", "bad.json.gz", "gone.json")
        assert self.drop(tmp_path, *names) == (list(names), [])


def test_empty_name_is_refused() -> None:
    """An unset variable of a script would otherwise scan the current folder."""
    with pytest.raises(UsageError, match="The name of a trace is empty"):
        files.expand_names([""])


def test_suggested_glob_for_nested_folders_finds_their_traces(tmp_path: Path) -> None:
    """The glob is quoted for a shell, including spaces."""
    folder = tmp_path / "my traces"
    (folder / "rank 0").mkdir(parents=True)
    (folder / "rank 0" / "t.json.gz").write_bytes(gzip.compress(TRACE))
    (folder / "rank 0" / "u.json").write_bytes(TRACE)
    with pytest.raises(UsageError, match="give a trace, or ") as refused:
        files.expand_names([str(folder)])
    (glob,) = shlex.split(str(refused.value).partition("give a trace, or ")[2].removesuffix("."))
    assert [path.name for path in files.expand_names([glob])] == ["t.json.gz", "u.json"]


def test_missing_output_folder_error_quotes_the_mkdir_command(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as refused:
        files.check_output(tmp_path / "my dir" / "out.json", force=False)
    command = shlex.split(str(refused.value).partition("make it with ")[2].removesuffix("."))
    assert command == ["mkdir", "-p", str(tmp_path / "my dir")]


def test_folder_that_cannot_be_written_is_refused_before_a_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the report of a long run would be lost; a device is written in place."""
    files.check_output(tmp_path / "a.json", force=False)
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(
        OutputError, match=re.escape(f"No file can be made in {tmp_path}; give a file in another folder")
    ):
        files.check_output(tmp_path / "a.json", force=False)
    (tmp_path / "link.json").symlink_to("/dev/null")
    files.check_output(tmp_path / "link.json", force=True)


def test_subfolder_that_cannot_be_read_is_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for the traces directly in it."""
    (tmp_path / "a.json").write_bytes(TRACE)
    (tmp_path / "private").mkdir()
    exists = type(tmp_path).exists

    def refuse(path: Path) -> bool:
        if path.parent.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(type(tmp_path), "exists", refuse)
    assert [path.name for path in files.expand_names([str(tmp_path)])] == ["a.json"]
