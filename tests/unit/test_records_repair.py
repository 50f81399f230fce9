"""A damaged file of records is told line by line, and repaired without the loss of a record that can be read."""

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

RECORDS = [build.ok(build.point(Layout(4), concurrency=n), steps=3) for n in (1, 2, 4)]
ROOT = Path(__file__).parents[2]
EARLIEST = ROOT / "results" / "decode_4xH200/decode-deepseek-v3-kimi-k2_4xH200_2026-11-20" / "run1"
"""Version 1 before checksums: the first records that were kept."""


def lines_of(folder: Path) -> list[bytes]:
    """Three sealed records, as lines without their ends."""
    for record in RECORDS:
        RecordFile(folder).append(record)
    return (folder / RECORDS_FILE).read_bytes().splitlines()


def put(folder: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    """The file of these lines."""
    path = folder / RECORDS_FILE
    path.write_bytes(b"\n".join(lines) + end)
    return path


def test_a_whole_file_is_left_alone(tmp_path: Path) -> None:
    before = put(tmp_path, *lines_of(tmp_path)).read_bytes()
    done = repair_file(tmp_path)
    assert (done.kept, done.taken_out, done.backup) == (3, [], "")
    assert [p.name for p in tmp_path.iterdir()] == [RECORDS_FILE]
    assert (tmp_path / RECORDS_FILE).read_bytes() == before


def test_a_damaged_line_is_told_and_taken_out_and_the_others_stay_byte_for_byte(tmp_path: Path) -> None:
    one, two, three = lines_of(tmp_path)
    before = put(tmp_path, one, two.replace(b'"concurrency":2', b'"concurrency":3'), three).read_bytes()
    (fault,) = audit_file(tmp_path).faults
    assert (fault.line, fault.kind) == (2, DAMAGED)
    assert "its checksum" in fault.why
    done = repair_file(tmp_path)
    assert (tmp_path / RECORDS_FILE).read_bytes() == one + b"\n" + three + b"\n"
    assert Path(done.backup).read_bytes() == before
    assert read_records(tmp_path) == [RECORDS[0], RECORDS[2]]


@settings(max_examples=25)
@given(byte=st.binary(max_size=9), seed=st.integers(0, 99))
def test_records_that_damage_joined_to_one_line_get_lines_of_their_own(
    byte: bytes, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The newline between two records became something else: both are whole, and both are kept."""
    folder = tmp_path_factory.mktemp("run")
    lines = lines_of(folder)
    random.Random(seed).shuffle(lines)
    between = byte.replace(b"\n", b"").replace(b"{", b"")
    put(folder, (between or b"\x0b").join(lines))
    assert repair_file(folder).kept == 3
    assert (folder / RECORDS_FILE).read_bytes().splitlines() == lines


def test_half_a_line_before_a_whole_one_costs_that_half_alone(tmp_path: Path) -> None:
    """Whoever appended after a crash without a look at the end of the file."""
    one, two, three = lines_of(tmp_path)
    put(tmp_path, one[: len(one) // 2] + two, bytes(40) + three)
    assert [fault.held for fault in audit_file(tmp_path).faults] == [1, 1]
    repair_file(tmp_path)
    assert read_records(tmp_path) == RECORDS[1:]


@pytest.mark.parametrize("end", [b'{"checked":"crc32","schema_ver', bytes(4096)], ids=["half a line", "NULs"])
def test_a_last_line_that_was_cut_short_is_taken_out(end: bytes, tmp_path: Path) -> None:
    put(tmp_path, *lines_of(tmp_path), end=b"\n" + end)
    assert [fault.kind for fault in audit_file(tmp_path).faults] == [CUT_SHORT]
    repair_file(tmp_path)
    assert audit_file(tmp_path).faults == []
    assert read_records(tmp_path) == RECORDS


def test_a_line_of_another_version_is_no_damage_and_stays_until_that_is_asked_for(tmp_path: Path) -> None:
    other = b'{"schema_version":2,"point":"of another shape"}'
    before = put(tmp_path, *lines_of(tmp_path), other, b"{damaged").read_bytes()
    done = repair_file(tmp_path)
    assert [(fault.line, fault.kind) for fault in done.left] == [(4, STRANGE)]
    assert [fault.kind for fault in done.taken_out] == [DAMAGED]
    assert (tmp_path / RECORDS_FILE).read_bytes() == before.removesuffix(b"{damaged\n")
    assert repair_file(tmp_path).taken_out == [], "the line stays however often it is repaired"
    assert [fault.kind for fault in repair_file(tmp_path, strange=True).taken_out] == [STRANGE]
    assert read_records(tmp_path) == RECORDS


def test_a_second_repair_keeps_the_copy_of_the_first(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    names = []
    for number in (1, 2):
        put(tmp_path, *lines, b"{damaged %d" % number)
        names.append(Path(repair_file(tmp_path).backup))
    assert [name.name for name in names] == [RECORDS_FILE + BACKUP, f"{RECORDS_FILE}{BACKUP}-2"]
    assert b"damaged 1" in names[0].read_bytes()


@settings(max_examples=25)
@given(data=st.data())
def test_records_without_a_checksum_that_damage_joined_get_lines_of_their_own(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Sealed ones and older ones in one line, with something else than a newline between them, and half of one in front."""
    folder = tmp_path_factory.mktemp("run")
    sealed = lines_of(folder)
    lines = [
        line if data.draw(st.booleans()) else msgspec.json.encode(r) for line, r in zip(sealed, RECORDS, strict=True)
    ]
    between = data.draw(st.sampled_from([b"", b" ", b"\0", b"\xff", b"{", b"},", b'"']))
    half = msgspec.json.encode(RECORDS[0])[: data.draw(st.integers(0, 300))]
    put(folder, half + between + between.join(lines))
    (fault,) = audit_file(folder).faults
    assert (fault.kind, fault.held) == (DAMAGED, 3)
    repair_file(folder)
    assert (folder / RECORDS_FILE).read_bytes().splitlines() == lines


@settings(max_examples=40)
@given(data=st.data())
def test_no_flipped_bits_take_a_record_that_they_do_not_touch(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Up to eight bits flip in one line of three: each flip is noticed, and the other two lines survive the repair."""
    folder = tmp_path_factory.mktemp("run")
    lines = lines_of(folder)
    hit = data.draw(st.integers(0, 2))
    line = bytearray(lines[hit])
    for bit in data.draw(st.sets(st.integers(0, len(line) * 8 - 1), min_size=1, max_size=8)):
        line[bit // 8] ^= 1 << bit % 8
    put(folder, *(bytes(line) if n == hit else text for n, text in enumerate(lines)))
    assert audit_file(folder).faults, "noticed"
    repair_file(folder, strange=True)
    assert read_records(folder) == [record for n, record in enumerate(RECORDS) if n != hit]


@pytest.mark.parametrize(
    ("piece", "count"),
    [(b'{"a":', 200_000), (b'{"a":[1,1,1],', 80_000), (b'{"a', 300_000), (b'{"a":[' + b"1," * 2000, 200)],
    ids=["nested", "no-key", "open-names", "open-lists"],
)
def test_a_line_full_of_beginnings_is_given_up(piece: bytes, count: int, tmp_path: Path) -> None:
    """A megabyte; each beginning costs a look at all that follows, so that all of them would take minutes."""
    found = audit_file(put(tmp_path, lines_of(tmp_path)[0], piece * count))
    assert [(fault.line, fault.kind, fault.held) for fault in found.faults] == [(2, DAMAGED, 0)]


class TestOneWriter:
    def test_an_append_waits_for_another_and_then_refuses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(tmp_path, *lines_of(tmp_path))
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
        monkeypatch.setattr("dcpbench.launch.folders.ENDING_S", 0.0)
        before = put(tmp_path, *lines_of(tmp_path), b"{damaged").read_bytes()
        with lock_folder(tmp_path):
            code, _, err = typed(capsys, "repair", str(tmp_path))
        assert (code, "a run is still writing here" in err) == (2, True)
        assert (tmp_path / RECORDS_FILE).read_bytes() == before


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `dcpbench records …`."""
    with pytest.raises(SystemExit) as end:
        cli.main(["records", *words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


class TestCommand:
    def test_check_ends_with_1_where_a_line_cannot_be_read_and_0_after_the_repair(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = put(tmp_path, *lines_of(tmp_path), b"{damaged")
        code, out, _ = typed(capsys, "check", str(tmp_path))
        assert code == 1
        assert f"{path}, line 4: damaged: " in out
        assert f"{path}: 3 records of 3 points can be read.\n" in out
        assert out.endswith(f"dcpbench records repair {path}\n")
        code, _, err = typed(capsys, "repair", str(tmp_path))
        assert (code, "3 records kept. The file as it was: " in err) == (0, True)
        assert typed(capsys, "check", str(tmp_path))[0] == 0
        assert "nothing was changed" in typed(capsys, "repair", str(path))[2]

    def test_the_command_that_check_suggests_is_one_that_repairs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """In a folder with a blank in its name, beside a line of another version."""
        folder = tmp_path / "my run"
        folder.mkdir()
        put(folder, *lines_of(folder), b'{"schema_version":99}', b"{damaged")
        code, out, _ = typed(capsys, "check", str(folder))
        assert code == 1
        assert "Some of it was damaged" in out
        words = shlex.split(out.rpartition(": ")[2])
        assert words[:3] == ["dcpbench", "records", "repair"]
        assert "line 4, strange: left unchanged (schema_version 99" in typed(capsys, "repair", str(folder))[2]
        assert typed(capsys, *words[2:])[0] == 0
        assert read_records(folder) == RECORDS

    @pytest.mark.parametrize("odd", [b"{damaged", b"hi", b'{"schema_version":1}'])
    def test_the_command_that_the_error_of_a_reader_ends_with_is_one_that_repairs(
        self, odd: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Damage, no JSON, and what is no record of this version, which needs --strange; in a folder with a blank."""
        folder = tmp_path / "my run"
        folder.mkdir()
        put(folder, odd, *lines_of(folder))
        with pytest.raises(RecordsError) as raised:
            read_records(folder)
        words = shlex.split(str(raised.value).rpartition(": ")[2])
        assert words[:3] == ["dcpbench", "records", "repair"]
        assert typed(capsys, *words[2:])[0] == 0
        assert read_records(folder) == RECORDS

    def test_a_line_of_another_version_is_not_called_one_to_take_out(self, tmp_path: Path) -> None:
        """The version that wrote it reads it."""
        put(tmp_path, b'{"schema_version":99}', *lines_of(tmp_path))
        with pytest.raises(RecordsError, match=r"read it with the version that wrote it\.$"):
            read_records(tmp_path)

    @pytest.mark.parametrize("data", [b"hi", b"", b"{damaged\n"])
    def test_a_file_of_no_record_is_refused_and_left_as_it_is(
        self, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / RECORDS_FILE
        path.write_bytes(data)
        code, out, err = typed(capsys, "check", str(path))
        assert (code, "records repair" in out, "holds no record" in err) == (2, False, True)
        assert typed(capsys, "repair", "--strange", str(path))[0] == 2
        assert path.read_bytes() == data

    @pytest.mark.parametrize("data", [b"root:x:0:0\n", b'{"name":"dcpbench"}\n', b"{\n", b"\x7fELF\n\x00\n"])
    def test_what_is_no_file_of_records_is_called_that_and_no_repair_is_offered(
        self, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The file may be JSON or not: repair would find nothing in it, and reports that."""
        path = tmp_path / "file"
        path.write_bytes(data)
        with pytest.raises(RecordsError, match=r"is no file of records.*; name the folder of a run") as raised:
            read_records(path)
        assert "records repair" not in str(raised.value)
        code, out, err = typed(capsys, "check", str(path))
        assert (code, "repair" in out, "take the line out" in out, "holds no record" in err) == (2, False, False, True)

    def test_the_only_record_of_a_file_is_not_offered_to_a_repair_that_refuses_it(self, tmp_path: Path) -> None:
        """It was a record, so what to do about it is said, and no more."""
        one, *_ = lines_of(tmp_path)
        put(tmp_path, one.replace(b'"concurrency":1', b'"concurrency":3'))
        with pytest.raises(RecordsError, match="its checksum") as raised:
            read_records(tmp_path)
        assert "records repair" not in str(raised.value)
        assert audit_file(tmp_path).advice
        with pytest.raises(RecordsError, match="holds no record"):
            repair_file(tmp_path)

    def test_a_record_inside_damage_is_enough_for_a_repair(self, tmp_path: Path) -> None:
        one, two, _ = lines_of(tmp_path)
        put(tmp_path, one[:99] + two)
        with pytest.raises(RecordsError, match="dcpbench records repair"):
            read_records(tmp_path)
        assert repair_file(tmp_path).kept == 1

    def test_of_many_damaged_lines_the_first_are_told_and_what_to_do_once(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        damaged = [b"{damaged"] * (MAX_FAULTS + 3)
        path = put(tmp_path, *lines_of(tmp_path), *damaged, b'{"schema_version":99}')
        code, out, _ = typed(capsys, "check", str(tmp_path))
        assert code == 1
        assert len([line for line in out.splitlines() if line.startswith(f"{path}, line ")]) == MAX_FAULTS
        assert f"{path}: 4 more lines cannot be read (3 damaged, 1 strange); --json has all.\n" in out
        assert out.count("take the line out") == out.count("read it with the version that wrote it") == 1
        (found,) = json.loads(typed(capsys, "check", str(tmp_path), "--json")[1])
        assert (len(found["faults"]), len(found["advice"])) == (len(damaged) + 1, 2)

    def test_both_answer_in_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        put(tmp_path, *lines_of(tmp_path), b"{damaged")
        (found,) = json.loads(typed(capsys, "check", str(tmp_path), "--json")[1])
        assert (found["records"], found["points"], found["faults"][0]["line"]) == (3, 3, 4)
        assert json.loads(typed(capsys, "repair", str(tmp_path), "--json")[1])["kept"] == 3

    @pytest.mark.parametrize("verb", ["check", "repair"])
    def test_a_folder_without_records_is_refused_and_left_as_it_is(
        self, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert typed(capsys, verb, str(tmp_path))[0] == 2
        assert not list(tmp_path.iterdir()), "no lock either"


def test_samples_that_a_record_names_and_nobody_finds_are_told(tmp_path: Path) -> None:
    """One file is there, one is not."""
    found = [serve_build.served(serve_build.point(concurrency=n)) for n in (8, 32)]
    named = [
        msgspec.structs.replace(r, serve=msgspec.structs.replace(r.serve, samples_file=f"samples-{i}.parquet"))
        for i, r in enumerate(found)
    ]
    build.write(tmp_path, named)
    (tmp_path / "samples-0.parquet").touch()
    assert audit_file(tmp_path).samples_missing == ["samples-1.parquet"]
