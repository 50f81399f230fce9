"""Test that programs of tools/ refuse input that is missing or malformed with a message and exit code 2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit import record_builder as build
from tools import floors, lock, results, routing_check, versions_table
from tools.syncs import count_calls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTENTS = {
    "text": b"hello",
    "list": b"[]",
    "object": b'{"a": 1}',
    "empty": b"",
    "binary": b"\xff\xfe",
    "nested": b"[" * 10**5,
    "gzip": b"\x1f\x8bno",
}
TOOLS: dict[str, tuple[Callable[[list[str]], object], str]] = {
    "versions_table": (versions_table.main, "name a file that tools.attention_versions"),
    "floors": (lambda files: floors.main([files[0], *files]), "name the folder"),
    "lock": (lock.main, "type: make lock"),
    "results pack": (lambda files: results.main(["pack", *files]), "name the folder of a result"),
    "results unpack": (lambda files: results.main(["unpack", *files]), "name a folder under results/"),
    "count_calls": (count_calls.main, "that torch.profiler wrote"),
}


def check_refused(call: Callable[[], object], remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a call ends with exit code 2 and this remedy."""
    with pytest.raises(SystemExit) as end:
        call()
    assert (end.value.code, remedy in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", ["missing", "folder", *CONTENTS])
def test_input_that_cannot_be_read_is_refused(
    tool: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "input"
    if kind == "folder":
        path.mkdir()
    elif kind in CONTENTS:
        path.write_bytes(CONTENTS[kind])
    main, remedy = TOOLS[tool]
    check_refused(lambda: main([str(path)]), remedy, capsys)


def test_run_of_routing_check_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["routing_check", str(tmp_path / "none")])
    check_refused(routing_check.main, "name the folder of a run", capsys)


def test_damaged_files_of_a_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build.write_records(tmp_path / "run", [build.make_ok_record(build.make_point())])
    (run / "bench-moe.json").write_bytes(b"{")
    check_refused(lambda: floors.main([str(run), str(run)]), "repeat dcpbench bench", capsys)
    (run / results.ARCHIVE).write_bytes(b"damaged")
    check_refused(lambda: results.main(["unpack", str(run)]), "git checkout", capsys)


def test_layers_of_a_file_without_layers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "heads.jsonl"
    file.write_text('{"sizes": {"heads": 8}, "versions": {"now": {"median_us": 1.0}}}\n')
    check_refused(lambda: versions_table.main([str(file), "--layers", "o"]), "tools.linear_versions", capsys)


def test_program_that_resolves_nothing_writes_no_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "LOCK", tmp_path / "requirements.lock")
    for program in ("true", "false"):
        check_refused(lambda: lock.main([program]), "no versions that fit together", capsys)  # noqa: B023 - called at once
    assert not lock.LOCK.exists()
