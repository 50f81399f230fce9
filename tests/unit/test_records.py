"""Records survive the disk; a line cut short costs that line only; everything else that is wrong is said."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.errors import LayoutError, RecordsError
from dcpbench.records import (
    ASIDE_FILE,
    RECORDS_FILE,
    SCHEMA_VERSION,
    Interval,
    Metrics,
    Percentiles,
    Point,
    Record,
    RecordFile,
    read_records,
)

POINT = Point(model="tiny", tp=8, dcp=8, concurrency=4, context=128, exchange="ag_rs", backend="triton", dtype="fp32")
FULL = Record(
    point=POINT,
    outcome="ok",
    marks=["cpu"],
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
    """The file that these records make."""
    file = RecordFile(folder)
    for record in records:
        file.append(record)
    return file.path


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = written(tmp_path, FULL, FAILED)
    assert read_records(tmp_path) == [FULL, FAILED]
    assert read_records(path) == [FULL, FAILED], "the file itself may be named, too"
    assert path.read_bytes().count(b"\n") == 2, "one line each"


def test_absent_measurements_are_null_and_never_zero(tmp_path: Path) -> None:
    line = msgspec.json.decode(written(tmp_path, FAILED).read_bytes())
    assert line["metrics"] is None
    assert line["host_syncs_per_step"] is None
    assert line["schema_version"] == SCHEMA_VERSION


def test_records_from_before_an_option_was_there_match_points_that_leave_it_off(tmp_path: Path) -> None:
    """--resume compares keys: a line without these fields has the key of the same point of today."""
    line = msgspec.json.decode(msgspec.json.encode(FULL))
    for name in ("q_replicate", "project_first", "overlap", "all_reduce"):
        del line["point"][name]
    (tmp_path / RECORDS_FILE).write_bytes(msgspec.json.encode(line) + b"\n")
    (old,) = read_records(tmp_path)
    assert old.point.key() == POINT.key()
    assert msgspec.structs.replace(POINT, overlap=True).key() != POINT.key()


def test_an_exchange_is_called_by_its_options_too() -> None:
    """Without an exchange there is nothing to call."""
    changed = msgspec.structs.replace(POINT, exchange="a2a", q_replicate=True, overlap=True)
    assert changed.exchange_label() == "a2a +q-replicate +overlap"
    assert POINT.exchange_label() == "ag_rs"
    assert msgspec.structs.replace(POINT, dcp=1, exchange="none").exchange_label() == ""


def test_blank_lines_are_no_damage(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    path.write_bytes(b"\n" + path.read_bytes() + b"\n\n")
    assert read_records(tmp_path) == [FULL]


class TestCutShort:
    @given(cut=st.integers(1, len(msgspec.json.encode(FAILED)) - 1))
    def test_wherever_the_last_line_is_cut_the_rest_is_used_and_nothing_is_lost(
        self, cut: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """`·` in the reason takes two bytes, so that some cuts leave half a character."""
        folder = tmp_path_factory.mktemp("run")
        path = written(folder, FULL)
        half = msgspec.json.encode(FAILED)[:cut]
        with path.open("ab") as f:
            f.write(half)
        assert read_records(folder) == [FULL]

        RecordFile(folder).append(FAILED)
        assert read_records(folder) == [FULL, FAILED]
        assert (folder / ASIDE_FILE).read_bytes() == half + b"\n"

    def test_reading_changes_nothing_as_the_line_may_be_in_the_writing(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL)
        before = path.read_bytes() + b'{"schema_ver'
        path.write_bytes(before)
        read_records(tmp_path)
        assert path.read_bytes() == before
        assert not (tmp_path / ASIDE_FILE).exists()

    def test_a_whole_line_without_its_newline_is_kept_in_place(self, tmp_path: Path) -> None:
        path = written(tmp_path, FULL)
        path.write_bytes(path.read_bytes().rstrip())
        assert read_records(tmp_path) == [FULL]
        RecordFile(tmp_path).append(FAILED)
        assert read_records(tmp_path) == [FULL, FAILED]
        assert not (tmp_path / ASIDE_FILE).exists()

    def test_lines_cut_twice_are_both_kept_aside(self, tmp_path: Path) -> None:
        for _ in range(2):
            with (tmp_path / RECORDS_FILE).open("ab") as f:
                f.write(b'{"half')
            RecordFile(tmp_path).append(FULL)
        assert (tmp_path / ASIDE_FILE).read_bytes() == b'{"half\n{"half\n'
        assert read_records(tmp_path) == [FULL, FULL]


class TestDamage:
    @pytest.mark.parametrize("damage", [b'{"half', b"\xff\xfe", b"[]", b"{}", b'{"a": 1}', b"7"], ids=repr)
    def test_damage_before_the_last_line_is_an_error_with_its_line_number(self, damage: bytes, tmp_path: Path) -> None:
        path = written(tmp_path, FULL, FULL)
        first, second, _ = path.read_bytes().split(b"\n")
        path.write_bytes(b"\n".join([first, damage, second, b""]))
        with pytest.raises(RecordsError, match=r"records\.jsonl, line 2: "):
            read_records(tmp_path)

    @pytest.mark.parametrize("end", [b"\n", b""], ids=["newline", "no newline"])
    def test_another_schema_version_is_named_even_on_the_last_line(self, end: bytes, tmp_path: Path) -> None:
        path = written(tmp_path, FULL)
        with path.open("ab") as f:
            f.write(b'{"schema_version": 99, "point": "of another shape"}' + end)
        with pytest.raises(RecordsError, match="line 2: schema_version 99, while this dcpbench reads 1"):
            read_records(tmp_path)

    def test_a_folder_that_is_no_run_is_told_as_what_it_is(self, tmp_path: Path) -> None:
        """A sweep is advised where one could be: in an empty folder, not in /etc."""
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc" / "passwd").touch()
        (tmp_path / "empty").mkdir()
        for name, said in (
            ("etc", "holds no records.jsonl, so it is no run; name the folder of one, such as those in runs/."),
            (
                "empty",
                f"is empty; `dcpbench sweep -o {tmp_path}/empty` would fill it, or name the folder of a run, such ",
            ),
            ("nowhere", "does not exist; name the folder of a run, such as those in runs/."),
        ):
            with pytest.raises(RecordsError) as caught:
                read_records(tmp_path / name)
            assert str(caught.value).startswith(f"{tmp_path / name} {said}")

    def test_a_run_that_has_begun_without_a_record_is_told_as_that(self, tmp_path: Path) -> None:
        (tmp_path / ".lock").touch()
        with pytest.raises(RecordsError, match=r"holds no record yet; `dcpbench top .*` shows what its run is at\.$"):
            read_records(tmp_path)


class TestPoint:
    def test_a_key_names_every_field(self) -> None:
        key = POINT.key()
        assert all(f"{name}={getattr(POINT, name)}" in key for name in POINT.__struct_fields__)

    def test_repeats_differ_in_key_only(self) -> None:
        again = msgspec.structs.replace(POINT, repeat=1)
        assert again.key() != POINT.key()
        assert again.same_but_repeat() == POINT.same_but_repeat() == POINT.key()

    def test_a_point_knows_its_layout_or_says_why_it_has_none(self) -> None:
        assert str(POINT.layout) == "tp8·dcp8"
        with pytest.raises(LayoutError):
            _ = msgspec.structs.replace(POINT, dcp=3).layout


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("**/records.jsonl")), ids=lambda p: p.parent.name)
def test_a_record_of_our_own_names_no_origin(path: Path) -> None:
    assert not any(b'"origin"' in msgspec.json.encode(record) for record in read_records(path))


def test_a_record_written_today_is_the_same_bytes_when_it_is_read_and_written_again(tmp_path: Path) -> None:
    line = written(tmp_path, FULL).read_bytes().rstrip(b"\n")
    assert msgspec.json.encode(read_records(tmp_path)[0]) == line


def test_an_import_names_its_origin_and_keeps_it(tmp_path: Path) -> None:
    record = msgspec.structs.replace(FULL, origin="vllm")
    assert msgspec.json.decode(written(tmp_path, record).read_bytes())["origin"] == "vllm"
    assert read_records(tmp_path) == [record]
    assert not FULL.origin, "ours has none, and that is no name"


def test_a_layout_that_nobody_knows_says_so() -> None:
    """An import of which the degrees were not told has 0 in their place."""
    unknown = msgspec.structs.replace(POINT, tp=0, dp=0, dcp=0)
    assert unknown.layout_name == "layout unknown"
    assert POINT.layout_name == "tp8·dcp8"
    assert msgspec.structs.replace(POINT, tp=4, dcp=3).layout_name == "tp4·dp1·dcp3", "as it was asked for"
