"""Events that are not as they should be, text that is not JSON, and files that are large: what can be read is."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench.errors import TraceError
from dcpbench.syncs.traces import reading
from tests.unit.trace_builder import PAGEABLE, Trace, exit_code, mine, only, scanned, sync_with

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For property tests, whose examples share it."""
    return tmp_path_factory.mktemp("traces")


class TestOddEvents:
    @pytest.mark.parametrize(
        ("changes", "wait"),
        [
            ({"args": None}, 50), ({"args": "missing"}, 50), ({"args": {}}, 50), ({"dur": "missing"}, 0),
            ({"dur": None}, 0), ({"dur": -5}, 0), ({"dur": "50"}, 50), ({"dur": "long"}, 0), ({"tid": "missing"}, 50),
            ({"tid": None}, 50), ({"pid": "p", "tid": 1.5}, 50), ({"tid": 1 << 70}, 50), ({"ts": -1e15}, 50),
            ({"args": {"correlation": None}}, 50), ({"args": {"correlation": "x"}}, 50),
            ({"args": {"correlation": 1 << 200}}, 50), ({"args": {"correlation": -(1 << 70)}}, 50),
            ({"args": {"correlation": 1.5e300}}, 50), ({"args": {"External id": ""}}, 50),
            ({"args": {"unknown": {"deep": [{"a": [{}]}]}}}, 50),
        ],
        ids=lambda v: repr(v)[:60],
    )  # fmt: skip
    def test_what_can_be_read_is_kept(self, changes: dict[str, Any], wait: float, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(sync_with(**changes))
        report = trace.scan(tmp_path)
        assert only(report).wait_us == pytest.approx(wait)
        assert exit_code(report, tmp_path) == 1

    @pytest.mark.parametrize(
        "changes",
        [
            {"args": []}, {"args": [1]}, {"args": "text"}, {"args": 3}, {"name": None}, {"name": 7}, {"ts": "missing"},
            {"ts": None}, {"ts": "soon"}, {"ts": "nan"}, {"ts": "inf"}, {"ts": []}, {"ph": None}, {"cat": ["a"]},
            {"args": {"correlation": []}}, {"args": {"correlation": True}},
        ],
        ids=lambda v: repr(v)[:60],
    )  # fmt: skip
    def test_what_cannot_is_counted_and_makes_no_clean(self, changes: dict[str, Any], tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(sync_with(**changes))
        report = trace.scan(tmp_path)
        assert report.sites == []
        assert report.traces[0].coverage.unreadable_events == 1
        assert exit_code(report, tmp_path) == 3

    @pytest.mark.parametrize("event", ["null", "3", '"x"', "[]", '[{"ph": "X"}]', "{}"])
    def test_an_element_that_is_no_event_takes_no_event_along(self, event: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events += [sync_with(), {"HERE": 1}, sync_with(ts=300)]
        report = scanned(tmp_path, trace.text().replace('{"HERE": 1}', event))
        assert only(report).count == 2

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "nan", "-inf"])
    @pytest.mark.parametrize("field", ['"dur": 50', '"External id": 77'])
    def test_numbers_that_json_does_not_have_are_none(self, number: str, field: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(sync_with(args={"correlation": 9, "External id": 77}))
        text = trace.text().replace(field, f"{field.partition(':')[0]}: {number}", 2)
        report = scanned(tmp_path, text)
        assert only(report).count == 1
        assert report.traces[0].coverage.complete

    def test_infinite_times_end_in_no_infinite_wait(self, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events.append(sync_with(dur="inf"))
        trace.events.append(sync_with(dur=1e308, ts=1e308))
        report = trace.scan(tmp_path)
        assert exit_code(report, tmp_path) in {1, 3}
        assert all(s.wait_us is not None and s.wait_us < 1e300 for s in report.sites)

    @settings(max_examples=40)
    @given(
        times=st.lists(st.tuples(st.integers(-50, 300), st.integers(-20, 200)), min_size=1, max_size=12),
        order=st.randoms(use_true_random=False),
    )
    def test_overlapping_events_in_any_order_are_all_counted(
        self, times: list[tuple[int, int]], order: Any, folder: Path
    ) -> None:
        trace = Trace().work()
        for start, length in times:
            trace.op("aten::x", start - 5, start + length - 3)
            trace.frame("a.py(1): f", start - 9, start + length - 7)
            trace.call("cudaStreamSynchronize", start, start + length)
        order.shuffle(trace.events)
        assert trace.scan(folder).totals.syncs == len(times)


class TestBrokenText:
    """Names that a profiler did not escape."""

    @pytest.mark.parametrize(
        "name",
        [b"\xff\xfe", b"caf\xe9", b"C:\\dir", b"a\\", b"\\x41", b"\x01\x02", b"\\ud800", b"\\u12", b"\xc3", b"\x00"],
    )
    def test_what_can_be_repaired_is(self, name: bytes, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.frame("NAME", 90, 200)
        trace.events.append(sync_with())
        report = scanned(tmp_path, trace.text().encode().replace(b"NAME", name + b"(1): f"))
        assert only(report).count == 1
        coverage = report.traces[0].coverage
        assert coverage.complete
        assert any("repaired" in note for note in coverage.notes)

    def test_escapes_that_are_right_survive_a_repair(self, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.frame('C:\\new\\"x".py(7): caf\u00e9', 90, 200)
        trace.frame("BAD", 95, 190)
        trace.events.append(sync_with())
        report = scanned(tmp_path, trace.text().encode().replace(b"BAD", b"\\q\xff"))
        assert only(report).function == "caf\u00e9"

    def test_an_unescaped_quote_costs_one_event(self, tmp_path: Path) -> None:
        """The events around it are read; that one is missing is said, so that the trace is not clean."""
        trace = Trace().work()
        trace.events.append(sync_with())
        trace.frame("NAME", 200, 300)
        trace.events += [sync_with(ts=400 + n) for n in range(3)]
        report = scanned(tmp_path, trace.text().replace("NAME", 'lib "quoted" name'))
        assert only(report).count == 4
        assert report.traces[0].coverage.unreadable_events == 1
        assert not report.traces[0].coverage.complete

    def test_names_that_look_like_the_end_of_an_event_are_names(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for n, name in enumerate(["},{", "}, {", "}]", '"},{"', "]}", "[]", "}\n,\n{"] * 3):
            trace.frame(name, 90 - n, 400 - n)
        trace.events.append(sync_with())
        report = trace.scan(tmp_path)
        assert only(report).count == 1
        assert report.traces[0].coverage.complete

    @pytest.mark.parametrize("filler", [1, 7, 11])
    def test_blocks_end_anywhere(self, filler: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With blocks of a few hundred bytes every event is cut at some place, nested ones and strings too."""
        monkeypatch.setattr(reading, "BLOCK_BYTES", 200 + filler)
        trace = Trace().work()
        for n in range(60):
            trace.add("cpu_op", "}, {" * (n % 3), 10 * n, 10 * n + 5, x=[{"a": [[], [{}]]}, {"b": "},{"}], y=[])
            trace.events.append(sync_with(ts=100 * n, dur=50))
        report = trace.scan(tmp_path)
        assert report.totals.syncs == 60
        assert report.traces[0].coverage.ops == 60
        assert report.traces[0].coverage.complete

    @settings(max_examples=40)
    @given(junk=st.binary(min_size=1, max_size=12), at=st.integers(0, 400))
    def test_junk_between_the_events_never_makes_them_clean(self, junk: bytes, at: int, folder: Path) -> None:
        trace = Trace().work()
        trace.events += [sync_with(ts=100 * n, dur=50) for n in range(6)]
        text = trace.text().encode()
        at += text.index(b"cudaStreamSynchronize")
        try:
            report = scanned(folder, text[:at] + junk + text[at:])
        except TraceError:
            return
        assert exit_code(report, folder) in {1, 3}


LIMITED = """
import resource, sys
from pathlib import Path
from dcpbench.syncs.scan import scan
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]),) * 2)
report = scan([Path(sys.argv[1])], root=Path("."))
print(report.totals.syncs, report.traces[0].coverage.complete)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited by RLIMIT_AS")
class TestMemory:
    def test_what_is_of_no_use_takes_no_memory(self, tmp_path: Path) -> None:
        """200 MB of flows and other events that are skipped, and 500 waits, in 100 MB more than Python begins with."""
        flow = json.dumps(
            {
                "ph": "s",
                "id": 1,
                "pid": 0,
                "tid": 7,
                "ts": 1.5,
                "cat": "ac2g",
                "name": "ac2g",
                "bp": "e",
                "pad": "x" * 60,
            }
        )
        self.run(tmp_path, [flow], 1_200_000, 100 << 20)

    def test_frames_take_their_columns_and_no_more(self, tmp_path: Path) -> None:
        """100 MB of 640,000 frames: 24 bytes each, twice while blocks are put together."""
        frames = [
            json.dumps({"cat": "python_function", "ph": "X",
                        "name": f"a.py({n}): f", "pid": 1, "tid": 1, "ts": 7.25 + n,
                        "dur": 0.5, "args": {"Python id": n, "Python parent id": n, "Python thread": 0}})
            for n in range(64)
        ]  # fmt: skip
        self.run(tmp_path, frames, 10_000, 130 << 20)

    @staticmethod
    def run(folder: Path, events: list[str], times: int, limit: int) -> None:
        path = folder / "large.json"
        trace = Trace().work()
        for n in range(500):
            trace.events.append(sync_with(ts=100 * n, dur=50))
        block = ",\n".join(events)
        with path.open("w") as f:
            f.write(trace.text()[:-2] + ",\n")
            for _ in range(times // 100):
                f.write(",\n".join(itertools.repeat(block, 100)) + ",\n")
            f.write(block + "]}")
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(path), str(limit)], capture_output=True, text=True, check=False,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        )  # fmt: skip
        assert done.stdout.split() == ["500", "True"], done.stderr[-2000:]


def test_a_call_whose_copy_cannot_be_read_makes_no_clean(tmp_path: Path) -> None:
    """The copy to pageable memory is what would have said that the call blocks."""
    trace = Trace().work()
    trace.copy(PAGEABLE, (10, 90), (80, 85))
    assert len(mine(trace.scan(tmp_path))) == 1
    trace.events[-1]["args"] = [1]
    report = trace.scan(tmp_path)
    assert mine(report) == []
    assert exit_code(report, tmp_path) == 3
