"""Timing the scanner: that the trace made for it is a longer run of the same program, and what errors say."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench.commands import syncs
from dcpbench.errors import TraceError, UsageError
from dcpbench.syncs.scan import scan_traces
from tests.unit.nsys_builder import Export
from tools.syncs import checks
from tools.syncs.__main__ import main
from tools.syncs.speed import measure, repeat_export, repeat_trace

ROOT = Path(__file__).parents[2]
H200 = ROOT / "tests" / "data" / "h200_stacks.trace.json.gz"


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """(trace, events, copies) of about 2 MB."""
    target = tmp_path_factory.mktemp("speed") / "repeated.json"
    return target, *repeat_trace(H200, target, 2_000_000)


def test_it_is_about_as_large_as_asked_for(repeated) -> None:
    """The file is larger by at most one copy, of 0.36 MB."""
    assert 2_000_000 <= repeated[0].stat().st_size < 2_400_000


def test_it_has_the_same_sites_so_many_times_over(repeated) -> None:
    """Ids and times are new in each copy, so nothing is linked or waited for across copies: 18 waits in each, and the
    window's own last one once, as only the last copy's ends the trace.
    """
    target, events, copies = repeated
    one, many = scan_traces([H200], root=Path.cwd()), scan_traces([target], root=Path.cwd())
    assert events == copies * len(json.loads(gzip.decompress(H200.read_bytes()))["traceEvents"])
    assert many.totals.syncs == copies * one.totals.syncs
    assert {s.fingerprint: s.count for s in many.sites} == {s.fingerprint: copies * s.count for s in one.sites}
    assert many.totals.wait_us == pytest.approx(copies * one.totals.wait_us, rel=1e-3)


def write_export(folder: Path) -> Path:
    return Export().add_trace(json.loads(gzip.decompress(H200.read_bytes()))["traceEvents"]).write(folder, "sqlite")


def test_an_export_of_nsys_has_the_same_sites_so_many_times_over(tmp_path: Path) -> None:
    """Ids and times are new in each copy, as in a trace; 542 rows in each."""
    source, target = write_export(tmp_path), tmp_path / "repeated.sqlite"
    events, copies = repeat_export(source, target, 2_000_000)
    one, many = scan_traces([source], root=Path.cwd()), scan_traces([target], root=Path.cwd())
    assert 1_800_000 <= target.stat().st_size < 2_200_000
    assert events == copies * (196 + 75 + 18 + 19 + 234)
    assert {s.fingerprint: s.count for s in many.sites} == {s.fingerprint: copies * s.count for s in one.sites}
    assert many.totals.wait_us == pytest.approx(copies * one.totals.wait_us, rel=1e-3)


@pytest.mark.parametrize("content", [b"SQLite format 3\0", b"SQLite format 3\0" + bytes(5000)])
def test_an_export_that_cannot_be_repeated_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(content)
    with pytest.raises(TraceError, match="nsys export --type sqlite"):
        repeat_export(tmp_path / "x.sqlite", tmp_path / "y.sqlite", 1000)


def test_memory_grows_by_little_for_each_event_of_an_export(tmp_path: Path) -> None:
    """Columns keep some 50 bytes of an event, and a block of rows takes the same in both; 18 of 542 events are waits."""
    source = write_export(tmp_path)
    small, large = (measure(source, size, runs=1) for size in (3_000_000, 9_000_000))
    assert [found.timings[0].found for found in (small, large)] == [18 * found.copies for found in (small, large)]
    grown = large.timings[0].peak_bytes - small.timings[0].peak_bytes
    assert grown / (large.events - small.events) < 400


def test_scan_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    """With its memory, and what it found, so that a fast wrong answer is seen."""
    found = measure(H200, 500_000, runs=2, keep=tmp_path / "kept.json")
    (timing,) = found.timings
    assert (timing.tool, timing.found, len(timing.runs_wall_s)) == ("scan", 18 * found.copies, 2)
    assert timing.wall_s == min(timing.runs_wall_s) > 0
    assert timing.peak_bytes >= timing.base_bytes > 0
    assert (tmp_path / "kept.json").stat().st_size == found.trace_bytes


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"traceEvents": []}', b"\x1f\x8bnonsense", b"\xff\xfe"])
def test_what_cannot_be_repeated_is_refused(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "x.json"
    source.write_bytes(content)
    with pytest.raises(TraceError, match=r"torch\.profiler"):
        repeat_trace(source, tmp_path / "y.json", 1000)


def test_a_trace_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        repeat_trace(tmp_path / "no.json", tmp_path / "y.json", 1000)


def test_a_python_without_hta_is_told_what_to_install() -> None:
    """This environment has none, which is as good as any other Python without it."""
    with pytest.raises(UsageError, match="pip install HolisticTraceAnalysis"):
        measure(H200, 100_000, hta=Path(sys.executable), runs=1)


@pytest.mark.parametrize(("text", "size"), [("140MB", 140_000_000), ("1 GiB", 1 << 30), ("1.5kb", 1500), ("7", 7)])
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert checks.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "0", "1 XB", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="140MB"):
        checks.parse_size(text)


class TestCommand:
    """`python -m tools.syncs speed`."""

    def test_a_trace_larger_than_the_disk_is_not_begun(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["speed", str(H200), "--size", "99999999GB"])
        assert ended.value.code == 2
        assert "give a smaller --size" in capsys.readouterr().err

    def test_both_commands_are_no_part_of_dcpbench(self) -> None:
        """They test the tool itself, and lie beside the package."""
        for name in ("corpus", "speed"):
            done = subprocess.run(
                [sys.executable, "-m", "tools.syncs", name, "--help"],
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
            )
            assert f"Usage: python -m tools.syncs {name}" in done.stdout
        assert not {"corpus", "speed"} & {command.callback.__name__ for command in syncs.app.registered_commands}
