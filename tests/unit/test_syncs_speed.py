"""Test the timing of the scanner: its trace is a longer run of the same program, and errors are clear."""

import functools
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dcpbench.commands import syncs
from dcpbench.errors import TraceError, UsageError
from dcpbench.syncs.call_lines import add_call_lines
from dcpbench.syncs.formats import FORMATS, render_report
from dcpbench.syncs.gating.baseline import build_baseline
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.site_changes import Thresholds, compare_reports
from dcpbench.syncs.sites import find_worst_step
from dcpbench.syncs.sync_report import Report
from tests.unit import syncs_builder as build
from tests.unit.nsys_builder import Export
from tools.syncs import checks
from tools.syncs.__main__ import main
from tools.syncs.speed import measure_programs, repeat_export, repeat_trace

ROOT = Path(__file__).parents[2]
H200 = ROOT / "tests" / "data" / "h200_stacks.trace.json.gz"


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """Return (trace, events, copies) of about 2 MB."""
    target = tmp_path_factory.mktemp("speed") / "repeated.json"
    return target, *repeat_trace(H200, target, 2_000_000)


def test_repeated_trace_has_about_the_requested_size(repeated) -> None:
    """The file is larger by at most one copy, of 0.36 MB."""
    assert 2_000_000 <= repeated[0].stat().st_size < 2_400_000


def test_repeated_trace_has_the_same_sites_in_each_copy(repeated) -> None:
    """Ids and times are new in each copy, so that nothing is linked across copies: each has 18 waits, and only the last
    copy has the final wait of the window.
    """
    target, events, copies = repeated
    one, many = scan_traces([H200], root=Path.cwd()), scan_traces([target], root=Path.cwd())
    assert events == copies * len(json.loads(gzip.decompress(H200.read_bytes()))["traceEvents"])
    assert many.totals.syncs == copies * one.totals.syncs
    assert {s.fingerprint: s.count for s in many.sites} == {s.fingerprint: copies * s.count for s in one.sites}
    assert many.totals.wait_us == pytest.approx(copies * one.totals.wait_us, rel=1e-3)


def write_export(folder: Path) -> Path:
    return Export().add_trace(json.loads(gzip.decompress(H200.read_bytes()))["traceEvents"]).write(folder, "sqlite")


def test_repeated_nsys_export_has_the_same_sites_in_each_copy(tmp_path: Path) -> None:
    """Ids and times are new in each copy, as in a trace; each has 542 rows."""
    source, target = write_export(tmp_path), tmp_path / "repeated.sqlite"
    events, copies = repeat_export(source, target, 2_000_000)
    one, many = scan_traces([source], root=Path.cwd()), scan_traces([target], root=Path.cwd())
    assert 1_800_000 <= target.stat().st_size < 2_200_000
    assert events == copies * (196 + 75 + 18 + 19 + 234)
    assert {s.fingerprint: s.count for s in many.sites} == {s.fingerprint: copies * s.count for s in one.sites}
    assert many.totals.wait_us == pytest.approx(copies * one.totals.wait_us, rel=1e-3)


@pytest.mark.parametrize("content", [b"SQLite format 3\0", b"SQLite format 3\0" + bytes(5000)])
def test_invalid_export_for_repetition_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(content)
    with pytest.raises(TraceError, match="nsys export --type sqlite"):
        repeat_export(tmp_path / "x.sqlite", tmp_path / "y.sqlite", 1000)


def test_memory_per_event_of_an_export_is_small(tmp_path: Path) -> None:
    """Columns store about 50 bytes of an event, and a block of rows takes the same in both; 18 of 542 events are waits."""
    source = write_export(tmp_path)
    small, large = (measure_programs(source, size, runs=1) for size in (3_000_000, 9_000_000))
    assert [found.timings[0].found for found in (small, large)] == [18 * found.copies for found in (small, large)]
    grown = large.timings[0].peak_bytes - small.timings[0].peak_bytes
    assert grown / (large.events - small.events) < 400


def test_scan_is_timed_in_a_separate_process(tmp_path: Path) -> None:
    """The result includes memory and findings, so that a fast wrong answer is detected."""
    found = measure_programs(H200, 500_000, runs=2, keep=tmp_path / "kept.json")
    (timing,) = found.timings
    assert (timing.tool, timing.found, len(timing.runs_wall_s)) == ("scan", 18 * found.copies, 2)
    assert timing.wall_s == min(timing.runs_wall_s) > 0
    assert timing.peak_bytes >= timing.base_bytes > 0
    assert (tmp_path / "kept.json").stat().st_size == found.trace_bytes


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"traceEvents": []}', b"\x1f\x8bnonsense", b"\xff\xfe"])
def test_invalid_trace_for_repetition_is_refused(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "x.json"
    source.write_bytes(content)
    with pytest.raises(TraceError, match=r"torch\.profiler"):
        repeat_trace(source, tmp_path / "y.json", 1000)


def test_missing_trace_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        repeat_trace(tmp_path / "no.json", tmp_path / "y.json", 1000)


def test_missing_hta_error_names_the_package() -> None:
    """The environment of the tests lacks it, as any other Python without it."""
    with pytest.raises(UsageError, match="pip install HolisticTraceAnalysis"):
        measure_programs(H200, 100_000, hta=Path(sys.executable), runs=1)


@pytest.mark.parametrize(("text", "size"), [("140MB", 140_000_000), ("1 GiB", 1 << 30), ("1.5kb", 1500), ("7", 7)])
def test_sizes_are_parsed_with_their_units(text: str, size: int) -> None:
    assert checks.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "0", "1 XB", "1e3"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="140MB"):
        checks.parse_size(text)


class TestCommand:
    """Test `python -m tools.syncs speed`."""

    def test_trace_larger_than_the_disk_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["speed", str(H200), "--size", "99999999GB"])
        assert ended.value.code == 2
        assert "give a smaller --size" in capsys.readouterr().err

    def test_tool_commands_are_not_in_the_package(self) -> None:
        """These commands test the tool itself."""
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


def count_lines(run: Callable[[], object]) -> int:
    """Count the lines of the package that are executed; each turn of a comprehension is one."""
    count = 0

    def see(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "dcpbench" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def write_program(folder: Path, functions: int) -> Report:
    """Write a program of so many functions, and return a report in which each of them waits, judged by no limit."""
    body = "def f{0}(x):\n    x.item()  # dcpbench: allow-sync\n\n"
    (folder / "m.py").write_text("".join(body.format(i) for i in range(functions)))
    sites = [build.make_site(f"{i}", function=f"f{i}", file="m.py", line=3 * i + 1) for i in range(functions)]
    return build.make_report(*sites)


@pytest.mark.parametrize("step", ["call lines", "verdict", "baseline", "per step", "diff", *FORMATS])
def test_work_grows_with_the_number_of_sites_and_not_faster(step: str, tmp_path: Path) -> None:
    """Twice the sites are twice the lines that run, at most; with quadratic work it is four times, in the limit."""
    gate, counts = Gate(root=tmp_path), []
    for functions in (150, 300):
        report, other = (write_program(tmp_path, functions) for _ in range(2))
        add_call_lines(report, [tmp_path])
        report.verdict = compute_verdict(report, gate)
        limits = Gate(root=tmp_path, baseline=build_baseline(report.sites[:1]), max_per_step=1.0)
        for site in other.sites:
            site.fingerprint, site.file = f"other {site.fingerprint}", "n.py"
        steps: dict[str, Callable[[], object]] = {
            "call lines": lambda report=report: add_call_lines(report, [tmp_path]),
            "verdict": lambda report=report: compute_verdict(report, gate),
            "baseline": lambda report=report, limits=limits: compute_verdict(report, limits),
            "per step": lambda report=report: find_worst_step(report.sites),
            "diff": lambda report=report, other=other: compare_reports(report, other, Thresholds()),
        }
        render = functools.partial(render_report, report, step, root=tmp_path)
        counts.append(count_lines(steps.get(step, render)))
    assert counts[0] >= 150
    assert counts[1] <= 2.1 * counts[0]
