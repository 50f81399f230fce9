"""Check and repair of damaged record files, without loss of any readable record."""

from __future__ import annotations

import fcntl
import json
import random
import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench import cli
from dcpbench.commands.records import MAX_FAULTS
from dcpbench.errors import OutputError, RecordsError
from dcpbench.launch.folders import lock_folder
from dcpbench.points.layout import Layout
from dcpbench.records import file
from dcpbench.records.file import RecordFile, read_records
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.repair import BACKUP, CUT_SHORT, DAMAGED, STRANGE, audit_file, repair_file
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve_build

RECORDS = [build.make_ok_record(build.make_point(Layout(4), concurrency=n), steps=3) for n in (1, 2, 4)]
ROOT = Path(__file__).parents[2]
EARLIEST = ROOT / "results" / "decode_4xH200/decode-deepseek-v3-kimi-k2_4xH200_2026-11-20" / "run1"
"""Oldest records in results/, of version 1 before checksums."""


def make_lines(folder: Path) -> list[bytes]:
    """Return three records with checksums, as lines without newlines."""
    for record in RECORDS:
        RecordFile(folder).append(record)
    return (folder / RECORDS_FILE).read_bytes().splitlines()


def write_lines(folder: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    """Write these lines to the file of records; return its path."""
    path = folder / RECORDS_FILE
    path.write_bytes(b"\n".join(lines) + end)
    return path


def test_undamaged_file_is_left_unchanged(tmp_path: Path) -> None:
    before = write_lines(tmp_path, *make_lines(tmp_path)).read_bytes()
    done = repair_file(tmp_path)
    assert (done.kept, done.taken_out, done.backup) == (3, [], "")
    assert [p.name for p in tmp_path.iterdir()] == [RECORDS_FILE]
    assert (tmp_path / RECORDS_FILE).read_bytes() == before


def test_line_with_an_unknown_outcome_is_removed(tmp_path: Path) -> None:
    """A record cannot lack its outcome, so that the line is not mended."""
    one, two, three = make_lines(tmp_path)
    fields = msgspec.json.decode(two) | {"outcome": "lost"}
    changed = msgspec.json.encode({name: value for name, value in fields.items() if name not in ("checked", "crc32")})
    write_lines(tmp_path, one, changed, three)
    (fault,) = audit_file(tmp_path).faults
    assert (fault.line, fault.whole_records) == (2, 0)
    assert "outcome is 'lost', none of ok, failed" in fault.why


def test_damaged_line_is_removed_and_others_keep_their_bytes(tmp_path: Path) -> None:
    one, two, three = make_lines(tmp_path)
    before = write_lines(tmp_path, one, two.replace(b'"concurrency":2', b'"concurrency":3'), three).read_bytes()
    (fault,) = audit_file(tmp_path).faults
    assert (fault.line, fault.kind) == (2, DAMAGED)
    assert "its checksum" in fault.why
    done = repair_file(tmp_path)
    assert (tmp_path / RECORDS_FILE).read_bytes() == one + b"\n" + three + b"\n"
    assert Path(done.backup).read_bytes() == before
    assert read_records(tmp_path) == [RECORDS[0], RECORDS[2]]


@settings(max_examples=25)
@given(byte=st.binary(max_size=9), seed=st.integers(0, 99))
def test_records_joined_by_damage_are_separated(
    byte: bytes, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The newline between two records is replaced by other bytes; both records are complete and kept."""
    folder = tmp_path_factory.mktemp("run")
    lines = make_lines(folder)
    random.Random(seed).shuffle(lines)
    between = byte.replace(b"\n", b"").replace(b"{", b"")
    write_lines(folder, (between or b"\x0b").join(lines))
    assert repair_file(folder).kept == 3
    assert (folder / RECORDS_FILE).read_bytes().splitlines() == lines


def test_incomplete_line_before_a_complete_one_is_removed(tmp_path: Path) -> None:
    """A program may append after a crash without checking the end of the file."""
    one, two, three = make_lines(tmp_path)
    write_lines(tmp_path, one[: len(one) // 2] + two, bytes(40) + three)
    assert [fault.whole_records for fault in audit_file(tmp_path).faults] == [1, 1]
    repair_file(tmp_path)
    assert read_records(tmp_path) == RECORDS[1:]


@pytest.mark.parametrize("end", [b'{"checked":"crc32","schema_ver', bytes(4096)], ids=["half a line", "NULs"])
def test_truncated_last_line_is_removed(end: bytes, tmp_path: Path) -> None:
    write_lines(tmp_path, *make_lines(tmp_path), end=b"\n" + end)
    assert [fault.kind for fault in audit_file(tmp_path).faults] == [CUT_SHORT]
    repair_file(tmp_path)
    assert audit_file(tmp_path).faults == []
    assert read_records(tmp_path) == RECORDS


def test_line_of_another_version_is_kept_without_the_strange_option(tmp_path: Path) -> None:
    other = b'{"schema_version":2,"point":"of another shape"}'
    before = write_lines(tmp_path, *make_lines(tmp_path), other, b"{damaged").read_bytes()
    done = repair_file(tmp_path)
    assert [(fault.line, fault.kind) for fault in done.left] == [(4, STRANGE)]
    assert [fault.kind for fault in done.taken_out] == [DAMAGED]
    assert (tmp_path / RECORDS_FILE).read_bytes() == before.removesuffix(b"{damaged\n")
    assert repair_file(tmp_path).taken_out == [], "a second repair keeps the line, too"
    assert [fault.kind for fault in repair_file(tmp_path, strange=True).taken_out] == [STRANGE]
    assert read_records(tmp_path) == RECORDS


def test_second_repair_keeps_the_backup_of_the_first(tmp_path: Path) -> None:
    lines = make_lines(tmp_path)
    names = []
    for number in (1, 2):
        write_lines(tmp_path, *lines, b"{damaged %d" % number)
        names.append(Path(repair_file(tmp_path).backup))
    assert [name.name for name in names] == [RECORDS_FILE + BACKUP, f"{RECORDS_FILE}{BACKUP}-2"]
    assert b"damaged 1" in names[0].read_bytes()


@settings(max_examples=25)
@given(data=st.data())
def test_joined_records_without_checksum_are_separated(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The line has records with and without checksum, other bytes instead of newlines, and half a record in front."""
    folder = tmp_path_factory.mktemp("run")
    sealed = make_lines(folder)
    lines = [
        line if data.draw(st.booleans()) else msgspec.json.encode(r) for line, r in zip(sealed, RECORDS, strict=True)
    ]
    between = data.draw(st.sampled_from([b"", b" ", b"\0", b"\xff", b"{", b"},", b'"']))
    half = msgspec.json.encode(RECORDS[0])[: data.draw(st.integers(0, 300))]
    write_lines(folder, half + between + between.join(lines))
    (fault,) = audit_file(folder).faults
    assert (fault.kind, fault.whole_records) == (DAMAGED, 3)
    repair_file(folder)
    assert (folder / RECORDS_FILE).read_bytes().splitlines() == lines


@settings(max_examples=40)
@given(data=st.data())
def test_flipped_bits_cost_only_the_record_that_has_them(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Up to eight bits flip in one line of three: the damage is detected, and the other two lines survive the repair."""
    folder = tmp_path_factory.mktemp("run")
    lines = make_lines(folder)
    hit = data.draw(st.integers(0, 2))
    line = bytearray(lines[hit])
    for bit in data.draw(st.sets(st.integers(0, len(line) * 8 - 1), min_size=1, max_size=8)):
        line[bit // 8] ^= 1 << bit % 8
    write_lines(folder, *(bytes(line) if n == hit else text for n, text in enumerate(lines)))
    assert audit_file(folder).faults, "the damage is detected"
    repair_file(folder, strange=True)
    assert read_records(folder) == [record for n, record in enumerate(RECORDS) if n != hit]


@pytest.mark.parametrize(
    ("beginning", "count"),
    [(b'{"a":', 200_000), (b'{"a":[1,1,1],', 80_000), (b'{"a', 300_000), (b'{"a":[' + b"1," * 2000, 200)],
    ids=["nested", "no-key", "open-names", "open-lists"],
)
def test_search_for_records_in_a_damaged_line_is_limited(beginning: bytes, count: int, tmp_path: Path) -> None:
    """The line has a megabyte of possible beginnings of records, and trying all of them would take minutes."""
    found = audit_file(write_lines(tmp_path, make_lines(tmp_path)[0], beginning * count))
    assert [(fault.line, fault.kind, fault.whole_records) for fault in found.faults] == [(2, DAMAGED, 0)]


class TestOneWriter:
    """Locks of record files against a second writer."""

    def test_append_waits_for_another_writer_and_then_raises_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_lines(tmp_path, *make_lines(tmp_path))
        monkeypatch.setattr(file, "WAIT_S", 0.0)
        with (tmp_path / RECORDS_FILE).open("ab") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(OutputError, match="another process has been writing a record"):
                RecordFile(tmp_path).append(RECORDS[0])
        RecordFile(tmp_path).append(RECORDS[0])
        assert len(read_records(tmp_path)) == 4

    def test_repair_is_refused_while_a_run_writes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("dcpbench.launch.folders.END_TIMEOUT_S", 0.0)
        before = write_lines(tmp_path, *make_lines(tmp_path), b"{damaged").read_bytes()
        with lock_folder(tmp_path):
            code, _, err = run_records(capsys, "repair", str(tmp_path))
        assert (code, "a run is still writing here" in err) == (2, True)
        assert (tmp_path / RECORDS_FILE).read_bytes() == before


def run_records(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `dcpbench records …`."""
    with pytest.raises(SystemExit) as end:
        cli.main(["records", *words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


class TestCommand:
    def test_check_exits_with_1_for_damage_and_0_after_repair(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_lines(tmp_path, *make_lines(tmp_path), b"{damaged")
        code, out, _ = run_records(capsys, "check", str(tmp_path))
        assert code == 1
        assert f"{path}, line 4: damaged: " in out
        assert f"{path}: 3 records of 3 points can be read.\n" in out
        assert out.endswith(f"dcpbench records repair {path}\n")
        code, _, err = run_records(capsys, "repair", str(tmp_path))
        assert (code, "3 records kept. The file as it was: " in err) == (0, True)
        assert run_records(capsys, "check", str(tmp_path))[0] == 0
        assert "nothing was changed" in run_records(capsys, "repair", str(path))[2]

    def test_command_suggested_by_check_repairs_the_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The name of the folder contains a space, and the file also has a line of another version."""
        folder = tmp_path / "my run"
        folder.mkdir()
        write_lines(folder, *make_lines(folder), b'{"schema_version":99}', b"{damaged")
        code, out, _ = run_records(capsys, "check", str(folder))
        assert code == 1
        assert "The line is damaged" in out
        words = shlex.split(out.rpartition(": ")[2])
        assert words[:3] == ["dcpbench", "records", "repair"]
        assert "line 4, strange: left unchanged (schema_version 99" in run_records(capsys, "repair", str(folder))[2]
        assert run_records(capsys, *words[2:])[0] == 0
        assert read_records(folder) == RECORDS

    @pytest.mark.parametrize("odd", [b"{damaged", b"hi", b'{"schema_version":1}'])
    def test_command_suggested_by_a_read_error_repairs_the_file(
        self, odd: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The line is damaged, no JSON, or no record of this version, which needs --strange; the name of the folder
        contains a space.
        """
        folder = tmp_path / "my run"
        folder.mkdir()
        write_lines(folder, odd, *make_lines(folder))
        with pytest.raises(RecordsError) as raised:
            read_records(folder)
        words = shlex.split(str(raised.value).rpartition(": ")[2])
        assert words[:3] == ["dcpbench", "records", "repair"]
        assert run_records(capsys, *words[2:])[0] == 0
        assert read_records(folder) == RECORDS

    def test_error_for_a_line_of_another_version_suggests_no_repair(self, tmp_path: Path) -> None:
        """The version that wrote the line can read it."""
        write_lines(tmp_path, b'{"schema_version":99}', *make_lines(tmp_path))
        with pytest.raises(RecordsError, match=r"read it with the version that wrote it\.$"):
            read_records(tmp_path)

    @pytest.mark.parametrize("data", [b"hi", b"", b"{damaged\n"])
    def test_file_without_records_is_refused_and_unchanged(
        self, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / RECORDS_FILE
        path.write_bytes(data)
        code, out, err = run_records(capsys, "check", str(path))
        assert (code, "records repair" in out, "holds no record" in err) == (2, False, True)
        assert run_records(capsys, "repair", "--strange", str(path))[0] == 2
        assert path.read_bytes() == data

    @pytest.mark.parametrize("data", [b"root:x:0:0\n", b'{"name":"dcpbench"}\n', b"{\n", b"\x7fELF\n\x00\n"])
    def test_other_files_are_named_as_such_without_suggesting_repair(
        self, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Repair would find no record in such a file, whether JSON or not."""
        path = tmp_path / "file"
        path.write_bytes(data)
        with pytest.raises(RecordsError, match=r"is not a records file.*; name the folder of a run") as raised:
            read_records(path)
        assert "records repair" not in str(raised.value)
        code, out, err = run_records(capsys, "check", str(path))
        assert (code, "repair" in out, "remove the line" in out, "holds no record" in err) == (2, False, False, True)

    def test_repair_is_not_suggested_for_a_single_damaged_record(self, tmp_path: Path) -> None:
        """The error has other advice, as repair refuses a file without readable records."""
        one, *_ = make_lines(tmp_path)
        write_lines(tmp_path, one.replace(b'"concurrency":1', b'"concurrency":3'))
        with pytest.raises(RecordsError, match="its checksum") as raised:
            read_records(tmp_path)
        assert "records repair" not in str(raised.value)
        assert audit_file(tmp_path).advice
        with pytest.raises(RecordsError, match="holds no record"):
            repair_file(tmp_path)

    def test_record_inside_a_damaged_line_is_repaired(self, tmp_path: Path) -> None:
        one, two, _ = make_lines(tmp_path)
        write_lines(tmp_path, one[:99] + two)
        with pytest.raises(RecordsError, match="dcpbench records repair"):
            read_records(tmp_path)
        assert repair_file(tmp_path).kept == 1

    def test_check_lists_the_first_damaged_lines_and_the_advice_once(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        damaged = [b"{damaged"] * (MAX_FAULTS + 3)
        path = write_lines(tmp_path, *make_lines(tmp_path), *damaged, b'{"schema_version":99}')
        code, out, _ = run_records(capsys, "check", str(tmp_path))
        assert code == 1
        assert len([line for line in out.splitlines() if line.startswith(f"{path}, line ")]) == MAX_FAULTS
        assert f"{path}: 4 more lines cannot be read (3 damaged, 1 strange); --json has all.\n" in out
        assert out.count("remove the line") == out.count("read it with the version that wrote it") == 1
        (found,) = json.loads(run_records(capsys, "check", str(tmp_path), "--json")[1])
        assert (len(found["faults"]), len(found["advice"])) == (len(damaged) + 1, 2)

    def test_check_and_repair_have_json_output(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_lines(tmp_path, *make_lines(tmp_path), b"{damaged")
        (found,) = json.loads(run_records(capsys, "check", str(tmp_path), "--json")[1])
        assert (found["records"], found["points"], found["faults"][0]["line"]) == (3, 3, 4)
        assert json.loads(run_records(capsys, "repair", str(tmp_path), "--json")[1])["kept"] == 3

    @pytest.mark.parametrize("verb", ["check", "repair"])
    def test_folder_without_records_is_refused_and_unchanged(
        self, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_records(capsys, verb, str(tmp_path))[0] == 2
        assert not list(tmp_path.iterdir()), "no lock file is left"


def test_missing_sample_files_are_listed(tmp_path: Path) -> None:
    """One of two named files exists."""
    found = [serve_build.make_served_record(serve_build.make_point(concurrency=n)) for n in (8, 32)]
    named = [
        msgspec.structs.replace(r, serve=msgspec.structs.replace(r.serve, samples_file=f"samples-{i}.parquet"))
        for i, r in enumerate(found)
    ]
    build.write_records(tmp_path, named)
    (tmp_path / "samples-0.parquet").touch()
    assert audit_file(tmp_path).samples_missing == ["samples-1.parquet"]
