"""Files of records: a truncated last line costs only that line, and all other damage is an error."""

import io
import json
import re
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.errors import LayoutError, RecordsError
from dcpbench.launch.jobs import Check, read_checks, write_checks
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.records import checksums, file
from dcpbench.records.file import RecordFile, is_last_line_cut_short, iter_records, parse_records, read_records
from dcpbench.records.folder import CHECKS_FILE, RECORDS_FILE, TRUNCATED_LINES_FILE
from dcpbench.records.record import SCHEMA_VERSION, Candidate, Choice, Interval, Metrics, Percentiles, Rates, Record
from dcpbench.records.runs import compute_measurement_digest, read_run, remove_samples
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve
from tests.unit.kept_runs import RUNS, RUNS_WITH_REMOVED_OPTIONS

POINT = Point(model="tiny", tp=8, dcp=8, concurrency=4, context=128, exchange="ag_rs", backend="triton", dtype="fp32")
FULL = Record(
    point=POINT,
    outcome="ok",
    warnings=["cpu"],
    metrics=Metrics(
        step_ms=Interval(median=1.25, low=1.2, high=1.3, samples=40),
        itl_ms=Percentiles(p50=1.25, samples=40),
        output_tok_s=Interval(median=3200.0, low=3100.0, high=3300.0, samples=40),
        output_tok_s_per_gpu=400.0,
        tok_s_per_user=800.0,
        step_samples_ms=[1.25, 1.2, 1.3],
    ),
)
FAILED = Record(point=POINT, outcome="failed", reason="rank 3 died (tp8·dcp8)", detail={"exit code": "-9"})


def written(folder: Path, *records: Record) -> Path:
    """Return the file of these records."""
    file = RecordFile(folder)
    for record in records:
        file.append(record)
    return file.path


def test_appended_records_are_read_back(tmp_path: Path) -> None:
    path = written(tmp_path, FULL, FAILED)
    assert read_records(tmp_path) == [FULL, FAILED]
    assert read_records(path) == [FULL, FAILED], "the path of the file is accepted, too"
    assert path.read_bytes().count(b"\n") == 2, "one line each"


def test_absent_measurements_are_null_and_never_zero(tmp_path: Path) -> None:
    line = msgspec.json.decode(written(tmp_path, FAILED).read_bytes())
    assert line["metrics"] is None
    assert line["host_syncs_per_step"] is None
    assert line["schema_version"] == SCHEMA_VERSION


@pytest.mark.parametrize("folder", RUNS_WITH_REMOVED_OPTIONS, ids=lambda p: p.parent.name)
def test_run_with_a_removed_option_is_refused_with_a_message(folder: Path) -> None:
    with pytest.raises(
        RecordsError,
        match=r"records\.jsonl, line 1: its point has the option `overlap`, which this version of dcpbench does not know\. Read",
    ):
        read_records(folder)


@pytest.mark.parametrize("place", [["point"], ["point", "load"]])
def test_point_with_an_unknown_option_is_refused(tmp_path: Path, place: list[str]) -> None:
    """A later dcpbench may write one."""
    line = msgspec.json.decode(
        msgspec.json.encode(serve.make_served_record(serve.make_point()) if "load" in place else FULL)
    )
    inner = line
    for name in place:
        inner = inner[name]
    inner["halves"] = 2
    (tmp_path / RECORDS_FILE).write_bytes(msgspec.json.encode(line) + b"\n")
    with pytest.raises(
        RecordsError, match=r"line 1: its point has the option `halves`, which this version of dcpbench does not know"
    ):
        read_records(tmp_path)


def test_exchange_label_contains_its_options() -> None:
    """Without an exchange the label is empty."""
    changed = msgspec.structs.replace(POINT, exchange="a2a", q_replicate=True, project_first=True)
    assert changed.format_exchange_label() == "a2a +q-replicate +project-first"
    assert POINT.format_exchange_label() == "ag_rs"
    assert msgspec.structs.replace(POINT, dcp=1, exchange="none").format_exchange_label() == ""


def test_blank_lines_are_ignored(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    path.write_bytes(b"\n" + path.read_bytes() + b"\n\n")
    assert read_records(tmp_path) == [FULL]


class TestCutShort:
    @given(cut=st.integers(1, len(msgspec.json.encode(FAILED)) - 1))
    def test_cut_last_line_is_kept_aside_and_the_rest_is_used(
        self, cut: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """`·` in the reason takes two bytes, so some cuts leave half a character."""
        folder = tmp_path_factory.mktemp("run")
        path = written(folder, FULL)
        half = msgspec.json.encode(FAILED)[:cut]
        with path.open("ab") as f:
            f.write(half)
        assert read_records(folder) == [FULL]

        RecordFile(folder).append(FAILED)
        assert read_records(folder) == [FULL, FAILED]
        assert (folder / TRUNCATED_LINES_FILE).read_bytes() == half + b"\n"

    def test_reading_does_not_change_an_incomplete_line(self, tmp_path: Path) -> None:
        """Another process may still be writing the line."""
        path = written(tmp_path, FULL)
        before = path.read_bytes() + b'{"schema_ver'
        path.write_bytes(before)
        read_records(tmp_path)
        assert path.read_bytes() == before
        assert not (tmp_path / TRUNCATED_LINES_FILE).exists()

    def test_complete_line_without_newline_is_kept_in_place(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL)
        path.write_bytes(path.read_bytes().rstrip())
        assert read_records(tmp_path) == [FULL]
        RecordFile(tmp_path).append(FAILED)
        assert read_records(tmp_path) == [FULL, FAILED]
        assert not (tmp_path / TRUNCATED_LINES_FILE).exists()

    def test_two_cut_lines_are_both_kept_aside(self, tmp_path: Path) -> None:
        for _ in range(2):
            with (tmp_path / RECORDS_FILE).open("ab") as f:
                f.write(b'{"half')
            RecordFile(tmp_path).append(FULL)
        assert (tmp_path / TRUNCATED_LINES_FILE).read_bytes() == b'{"half\n{"half\n'
        assert read_records(tmp_path) == [FULL, FULL]


class TestPowerCut:
    """NULs replace the last bytes of a file if only its new size reached the disk."""

    @pytest.mark.parametrize("half", [b"", b'{"schema_ver', msgspec.json.encode(FAILED)[:200]], ids=["", "a", "b"])
    @pytest.mark.parametrize("nuls", [1, 4096], ids=["one", "a page"])
    def test_nuls_at_the_end_are_a_line_cut_short(self, half: bytes, nuls: int, tmp_path: Path) -> None:
        path = written(tmp_path, FULL)
        with path.open("ab") as f:
            f.write(half + bytes(nuls))
        assert read_records(tmp_path) == [FULL]
        assert is_last_line_cut_short(tmp_path), "the cut is detected"

        RecordFile(tmp_path).append(FAILED)
        assert read_records(tmp_path) == [FULL, FAILED]
        assert (tmp_path / TRUNCATED_LINES_FILE).read_bytes() == half + b"\n"

    def test_complete_line_before_nuls_is_kept(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL, FAILED)
        path.write_bytes(path.read_bytes().rstrip(b"\n") + bytes(100))
        assert read_records(tmp_path) == [FULL, FAILED]
        RecordFile(tmp_path).append(FULL)
        assert read_records(tmp_path) == [FULL, FAILED, FULL]

    def test_nuls_before_another_line_raise_records_error(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL, FAILED)
        first, second, _ = path.read_bytes().split(b"\n")
        path.write_bytes(first + b"\n" + bytes(100) + second + b"\n")
        with pytest.raises(RecordsError, match=r"records\.jsonl, line 2: "):
            read_records(tmp_path)


EVERYTHING = msgspec.structs.replace(
    build.make_ok_record(
        build.make_point(Layout(4, 1, 4)), steps=9, reason="a reason", detail={"log": "last lines\nof JOB*"}
    ),
    serve=serve.make_served_record(serve.make_point(Layout(4, 1, 4))).serve,
    choice=Choice(backend="triton", exchange="symm", candidates=[Candidate(backend="triton", exchange="symm")]),
)
"""A record with each of its parts, and letters that are one bit away from a newline."""


class TestChecksum:
    """A line begins with "checked" and ends with the CRC-32 of all bytes before its last field."""

    @pytest.mark.parametrize("next_line", [b"", msgspec.json.encode(FULL) + b"\n"], ids=["last", "with a next line"])
    @pytest.mark.sample(2)
    def test_every_single_flipped_bit_is_detected(self, next_line: bytes, tmp_path: Path) -> None:
        """A flipped bit anywhere in the line of a full record, in keys, checksum or newline, is refused with the file
        and the line.
        """
        path = written(tmp_path, EVERYTHING)
        line = path.read_bytes()
        unnoticed = []
        for bit in range(len(line) * 8):
            flipped = bytearray(line)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                found = list(parse_records(io.BytesIO(flipped + next_line), path))
            except RecordsError as e:
                assert str(e).startswith(f"{path}, line "), str(e)  # noqa: PT017 - for each bit
            else:
                unnoticed.append((bit, len(found)))
        assert list(parse_records(io.BytesIO(line), path)) == [(0, EVERYTHING)], (
            "the line without a flipped bit is read"
        )
        assert unnoticed == []

    def test_checksum_is_the_crc_32_of_all_bytes_before_its_field(self, tmp_path: Path) -> None:
        """The line is one JSON object with the checksum as a field, so that jq can read it."""
        line = written(tmp_path, FULL).read_bytes()
        body = line[: line.index(b',"crc32"')]
        assert json.loads(line)["crc32"] == f"{zlib.crc32(body):08x}"
        assert json.loads(line)["checked"] == "crc32"
        assert list(json.loads(line))[1:3] == ["schema_version", "point"]

    def test_line_can_be_decoded_without_checking_the_checksum(self, tmp_path: Path) -> None:
        assert msgspec.json.decode(written(tmp_path, FULL).read_bytes(), type=Record) == FULL

    def test_lines_with_and_without_checksum_are_read(self, tmp_path: Path) -> None:
        (tmp_path / RECORDS_FILE).write_bytes(msgspec.json.encode(FULL) + b"\n")
        written(tmp_path, FAILED)
        assert read_records(tmp_path) == [FULL, FAILED]

    def test_damage_is_reported_with_file_line_and_remedy(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL, FULL)
        path.write_bytes(path.read_bytes().replace(b'"concurrency":4', b'"concurrency":5', 1))
        with pytest.raises(RecordsError) as raised:
            read_records(tmp_path)
        assert str(raised.value) == (
            f"{path}, line 1: its checksum (crc32) does not match: the line was damaged after it was "
            "written. Put a copy of the file in its place, or remove the line, and measure its point again with "
            "--resume. Where it was changed on purpose, take the checksums out, in its folder: "
            "jq -c 'del(.checked, .crc32)' records.jsonl > new.jsonl && mv new.jsonl records.jsonl. "
            f"To take it out, and keep a copy of the file: dcpbench records repair {path}"
        )

    def test_damaged_line_is_not_decoded(self, tmp_path: Path) -> None:
        """The decoder would report the deep nesting of brackets."""
        path = written(tmp_path, FULL)
        path.write_bytes(path.read_bytes().replace(b'"warnings":["cpu"]', b'"warnings":' + b"[" * 10**5))
        with pytest.raises(RecordsError, match="its checksum"):
            read_records(tmp_path)

    def test_line_rewritten_by_another_program_suggests_removing_the_checksum(self, tmp_path: Path) -> None:
        """The bytes of the line differ, so its values cannot be checked."""
        path = written(tmp_path, FULL)
        fields = json.loads(path.read_bytes())
        path.write_text(json.dumps(fields) + "\n")
        with pytest.raises(RecordsError, match=r"line 1: another program rewrote it.*jq -c"):
            read_records(tmp_path)
        del fields["checked"], fields["crc32"]
        path.write_text(json.dumps(fields) + "\n")
        assert read_records(tmp_path) == [FULL]

    @given(cut=st.integers(1, 400), nuls=st.booleans())
    def test_cut_last_line_with_checksum_is_cut_short(
        self, cut: int, nuls: bool, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("run")
        path = written(folder, FULL, FAILED)
        path.write_bytes(path.read_bytes()[: -1 - cut] + bytes(9 * nuls))
        assert (read_records(folder), is_last_line_cut_short(folder)) == ([FULL], True)


class TestDamage:
    @pytest.mark.parametrize("damage", [b'{"half', b"\xff\xfe", b"[]", b"{}", b'{"a": 1}', b"7"], ids=repr)
    def test_damage_before_the_last_line_is_an_error_with_its_line_number(self, damage: bytes, tmp_path: Path) -> None:
        path = written(tmp_path, FULL, FULL)
        first, second, _ = path.read_bytes().split(b"\n")
        path.write_bytes(b"\n".join([first, damage, second, b""]))
        with pytest.raises(RecordsError, match=r"records\.jsonl, line 2: "):
            read_records(tmp_path)

    @pytest.mark.parametrize("end", [b"\n", b""], ids=["newline", "no newline"])
    def test_unknown_schema_version_is_named_even_on_the_last_line(self, end: bytes, tmp_path: Path) -> None:
        path = written(tmp_path, FULL)
        with path.open("ab") as f:
            f.write(b'{"schema_version": 99, "point": "of another shape"}' + end)
        with pytest.raises(RecordsError, match="line 2: schema_version 99, while this dcpbench reads 1"):
            read_records(tmp_path)

    def test_folder_without_records_is_refused_with_a_suggestion(self, tmp_path: Path) -> None:
        """A sweep is suggested for an empty folder, but not for /etc."""
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc" / "passwd").touch()
        (tmp_path / "empty").mkdir()
        for name, message in (
            ("etc", "holds no records.jsonl, so it is no run; name the folder of one, such as those in runs/."),
            (
                "empty",
                f"is empty; `dcpbench sweep -o {tmp_path}/empty` would fill it, or name the folder of a run, such ",
            ),
            ("nowhere", "does not exist; name the folder of a run, such as those in runs/."),
        ):
            with pytest.raises(RecordsError) as caught:
                read_records(tmp_path / name)
            assert str(caught.value).startswith(f"{tmp_path / name} {message}")

    def test_started_run_without_a_record_refers_to_top(self, tmp_path: Path) -> None:
        (tmp_path / ".lock").touch()
        with pytest.raises(RecordsError, match=r"holds no record yet; `dcpbench top .*` shows what its run is at\.$"):
            read_records(tmp_path)


class TestPoint:
    def test_key_names_every_field(self) -> None:
        names = [part.partition("=")[0] for part in POINT.get_key().split("/")]
        assert names == list(POINT.__struct_fields__)

    def test_repeats_differ_only_in_their_key(self) -> None:
        again = msgspec.structs.replace(POINT, repeat=1)
        assert again.get_key() != POINT.get_key()
        assert again.get_key_without_repeat() == POINT.get_key_without_repeat() == POINT.get_key()

    def test_layout_of_a_point_raises_layout_error_if_impossible(self) -> None:
        assert str(POINT.layout) == "tp8·dcp8"
        with pytest.raises(LayoutError):
            _ = msgspec.structs.replace(POINT, dcp=3).layout


@pytest.mark.parametrize("folder", RUNS, ids=lambda p: p.name)
def test_only_records_of_servers_have_an_origin(folder: Path) -> None:
    records = read_records(folder)
    assert records
    assert all((b'"origin"' in msgspec.json.encode(record)) == bool(record.server) for record in records)


def test_record_read_and_written_again_has_the_same_bytes(tmp_path: Path) -> None:
    line = written(tmp_path, FULL).read_bytes()
    (tmp_path / "again").mkdir()
    assert written(tmp_path / "again", *read_records(tmp_path)).read_bytes() == line


def test_origin_of_an_import_is_written_and_read(tmp_path: Path) -> None:
    record = msgspec.structs.replace(FULL, origin="vllm")
    assert msgspec.json.decode(written(tmp_path, record).read_bytes())["origin"] == "vllm"
    assert read_records(tmp_path) == [record]
    assert not FULL.origin, "a measured record has no origin"


def test_unknown_layout_is_named_unknown() -> None:
    """An import without degrees has 0 in their place."""
    unknown = msgspec.structs.replace(POINT, tp=0, dp=0, dcp=0)
    assert unknown.layout_name == "layout unknown"
    assert POINT.layout_name == "tp8·dcp8"
    assert msgspec.structs.replace(POINT, tp=4, dcp=3).layout_name == "tp4·dp1·dcp3", (
        "an impossible layout is named as requested"
    )


CHECK = Check(
    name="tokens", layout="tp2·dcp2", backend="triton", exchange="ag_rs", dtype="fp32", error=0.0, limit=0.0, ok=True
)


class TestChecks:
    """Checks of `verify`, which are lines of a file like records."""

    def test_written_checks_are_read_back(self, tmp_path: Path) -> None:
        assert read_checks(tmp_path) == []
        for _ in range(2):
            write_checks(tmp_path, [CHECK, CHECK])
        assert read_checks(tmp_path) == [CHECK] * 4

    def test_check_changed_on_the_disk_is_detected(self, tmp_path: Path) -> None:
        write_checks(tmp_path, [CHECK, msgspec.structs.replace(CHECK, ok=False)])
        path = tmp_path / CHECKS_FILE
        path.write_bytes(path.read_bytes().replace(b'"ok":false', b'"ok":true'))
        with pytest.raises(RecordsError, match=r"checks\.jsonl, line 2: its checksum.*Repeat the verification"):
            read_checks(tmp_path)

    def test_check_without_a_checksum_is_read(self, tmp_path: Path) -> None:
        (tmp_path / CHECKS_FILE).write_bytes(msgspec.json.encode(CHECK) + b"\n")
        assert read_checks(tmp_path) == [CHECK]


class TestDeleted:
    """The folder of a run is deleted while it is read."""

    def test_end_of_a_missing_file_raises_records_error(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match=r"gone.* cannot be read: .*No such file.*name another folder"):
            is_last_line_cut_short(tmp_path / "gone")

    def test_file_deleted_before_reading_raises_records_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file existed when it was looked up."""
        monkeypatch.setattr(Path, "is_file", lambda _: True)
        with pytest.raises(RecordsError, match=r"records\.jsonl.* cannot be read: .*No such file"):
            read_records(tmp_path / "records.jsonl")

    def test_open_file_is_read_to_its_end_after_deletion(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL, FAILED)
        found = (record for _, record in iter_records(tmp_path))
        assert next(found) == FULL
        path.unlink()
        tmp_path.rmdir()
        assert list(found) == [FAILED]


class TestRun:
    """Runs as they are read for reports and comparisons."""

    def test_samples_and_replaced_records_are_not_kept(self, tmp_path: Path) -> None:
        """The last of three records is kept, without its samples, which can be loaded one record at a time."""
        changed = msgspec.structs.replace(FULL, started_at="later")
        written(tmp_path, FULL, FAILED, changed)
        run = read_run(tmp_path)
        (record,) = run.records
        assert (record.started_at, run.replaced, run.truncated) == ("later", 2, False)
        assert record.metrics is not None
        assert record.metrics.step_samples_ms == []
        assert run.load_with_samples(record) == changed

    def test_run_replaced_while_it_is_read_raises_records_error(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL)
        run = read_run(tmp_path)
        path.unlink()
        written(tmp_path, msgspec.structs.replace(FULL, started_at="later"))
        with pytest.raises(RecordsError, match="was changed while it was read"):
            run.load_with_samples(run.records[0])

    def test_each_line_is_decoded_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The check at the end of the file, after three records, decodes nothing."""
        written(tmp_path, FULL, FAILED, FULL)
        lines: list[bytes] = []
        decode = file.decode_record
        monkeypatch.setattr(file, "decode_record", lambda line, **more: (lines.append(line), decode(line, **more))[1])
        read_run(tmp_path)
        assert len([line for line in lines if line]) == 3

    def test_only_records_appended_by_a_job_are_read_after_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file has many earlier records and half a last line, which the next append puts aside."""
        path = written(tmp_path, *[FULL] * 20)
        with path.open("ab") as f:
            f.write(b'{"half')
        record_file = RecordFile(tmp_path)
        begin = record_file.get_end_offset()
        record_file.append(FAILED)
        lines: list[bytes] = []
        decode = file.decode_record
        monkeypatch.setattr(file, "decode_record", lambda line, **more: (lines.append(line), decode(line, **more))[1])
        assert list(record_file.read_since(begin)) == [FAILED]
        assert len(lines) == 1

    def test_damage_in_appended_lines_has_its_line_number(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL, FULL)
        begin = RecordFile(tmp_path).get_end_offset()
        with path.open("ab") as f:
            f.write(b"[]\n")
        with pytest.raises(RecordsError, match=r"records\.jsonl, line 3: "):
            list(RecordFile(tmp_path).read_since(begin))
        assert list(RecordFile(tmp_path / "none").read_since(0)) == []

    def test_fp8_rates_have_a_higher_limit_than_other_numbers(self, tmp_path: Path) -> None:
        """An H200 multiplies 1.5e15 fp8 numbers per second, above the limit of other numbers in a record."""
        path = tmp_path / RECORDS_FILE
        for rate, message in ((1.53e15, ""), (1.53e18, "rates.matmul_fp8_flop_s is above 1e+18")):
            record = msgspec.structs.replace(FULL, rates=Rates(read_bytes_s=4.6e12, matmul_fp8_flop_s=rate))
            path.write_bytes(checksums.add_checksum(msgspec.json.encode(record)) + b"\n")
            if message:
                with pytest.raises(RecordsError, match=re.escape(message)):
                    read_records(tmp_path)
            else:
                assert read_records(tmp_path)[0].rates == record.rates
            path.unlink()

    def test_samples_are_checked_unless_read_run_skips_them(self, tmp_path: Path) -> None:
        """A sample of 0, below 0 or of 1e16 ms is refused; `read_run` skips samples of lines with a checksum."""
        assert FULL.metrics is not None
        path = tmp_path / RECORDS_FILE
        for wrong in (0.0, -1.0, 1e16):
            metrics = msgspec.structs.replace(FULL.metrics, step_samples_ms=[1.0, wrong])
            line = msgspec.json.encode(msgspec.structs.replace(FULL, metrics=metrics))
            for text in (line, checksums.add_checksum(line)):
                path.write_bytes(text + b"\n")
                with pytest.raises(RecordsError, match=r"metrics\.step_samples_ms is"):
                    read_records(tmp_path)
            assert read_run(tmp_path).records == [remove_samples(FULL)]
            path.write_bytes(line + b"\n")
            with pytest.raises(RecordsError, match=r"metrics\.step_samples_ms is"):
                read_run(tmp_path)

    def test_measurement_digest_ignores_repeat_and_samples(self) -> None:
        assert FULL.metrics is not None
        again = msgspec.structs.replace(FULL, point=msgspec.structs.replace(POINT, repeat=3))
        assert (
            compute_measurement_digest(again)
            == compute_measurement_digest(remove_samples(FULL))
            == compute_measurement_digest(FULL)
        )
        assert compute_measurement_digest(
            msgspec.structs.replace(FULL, started_at="later")
        ) != compute_measurement_digest(FULL)
