"""Traces that are damaged, hostile or no traces: a clear error or a clear part of the result, never a wrong `clean`.

Everything goes through the command line as well, in which a traceback would be an exception here.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcpbench import cli
from dcpbench.errors import TraceError
from dcpbench.syncs import reading
from dcpbench.syncs.gate import Gate, judge
from dcpbench.syncs.scan import scan
from tests.unit.trace_builder import PAGEABLE, Trace, mine, only

if TYPE_CHECKING:
    from dcpbench.syncs.model import Report

H200 = Path(__file__).parents[1] / "data" / "h200_stacks.trace.json.gz"
TEXT = gzip.decompress(H200.read_bytes())
PACKED = gzip.compress(TEXT)
TRUE_TIMES = {
    e["ts"] for e in json.loads(TEXT)["traceEvents"]
    if e["name"] in {"cudaStreamSynchronize", "cudaDeviceSynchronize"} or e.get("cat") == "cuda_sync"
}  # fmt: skip
TRUE_SITES = {s.fingerprint for s in scan([H200], root=H200.parent).sites}
FORMATS = ("table", "json", "sarif", "junit", "github", "markdown")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For property tests, whose examples share it."""
    return tmp_path_factory.mktemp("traces")


def scanned(folder: Path, data: bytes | str, name: str = "trace.json") -> Report:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return scan([path], root=folder)


def nothing_is_made_up(report: Report) -> bool:
    """Only true waits, and each once. Where copies or frames are lost, so are directions and functions of sites."""
    times = {s.example.ts for s in report.sites if s.example}
    return times <= TRUE_TIMES and sum(s.count for s in report.sites) <= 19


def exit_code(report: Report, folder: Path) -> int:
    return judge(report, Gate(root=folder)).exit_code


def command(*args: str) -> int:
    """Exit code of `dcpbench syncs ARGS`; anything but an exit is an exception."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["syncs", *args])
    return int(ended.value.code or 0)


class TestCutShort:
    @settings(max_examples=60)
    @given(cut=st.integers(0, len(TEXT) - 1))
    @example(cut=TEXT.rindex(b"}"))
    @example(cut=TEXT.rindex(b"]"))
    @example(cut=TEXT.rindex(b"]") + 1)
    def test_a_file_that_ends_anywhere_never_says_more_than_the_whole(self, cut: int, folder: Path) -> None:
        """Before the first event it is no trace; after the last nothing is lost; in between it says that it is cut."""
        try:
            report = scanned(folder, TEXT[:cut])
        except TraceError:
            assert cut <= TEXT.index(b'"traceEvents"') + 20
            return
        assert nothing_is_made_up(report)
        if report.traces[0].coverage.complete:
            assert cut > TEXT.rindex(b"]")
            assert {s.fingerprint for s in report.sites} == TRUE_SITES
        else:
            assert exit_code(report, folder) in {1, 3}

    @pytest.mark.parametrize("at", range(4))
    def test_a_cut_between_two_events_loses_none_before_it(self, at: int, tmp_path: Path) -> None:
        """`…},` and `…}` at the end: every event that is whole is read."""
        trace = Trace().work()
        for n in range(5):
            trace.call("cudaStreamSynchronize", 100 * n, 100 * n + 50)
        parts = trace.text().split(', {"ph"')
        text = ', {"ph"'.join(parts[: 5 + at])
        for end in ("", ",", ", ", ",\n"):
            report = scanned(tmp_path, text + end)
            assert sum(s.count for s in report.sites) == 1 + at
            assert report.traces[0].coverage.complete is False

    @settings(max_examples=40)
    @given(cut=st.integers(1, len(PACKED) - 1))
    def test_gzip_that_ends_early_is_part_of_a_trace_or_none(self, cut: int, folder: Path) -> None:
        try:
            report = scanned(folder, PACKED[:cut])
        except TraceError:
            return
        assert not report.traces[0].coverage.complete
        assert nothing_is_made_up(report)
        assert exit_code(report, folder) in {1, 3}

    @settings(max_examples=60)
    @given(at=st.integers(10, len(PACKED) - 1), byte=st.integers(1, 255))
    @example(at=len(PACKED) - 6, byte=1)  # the checksum
    def test_gzip_with_a_wrong_byte_is_never_complete(self, at: int, byte: int, folder: Path) -> None:
        """The checksum at the end is looked at although the events end before it."""
        data = bytearray(PACKED)
        data[at] ^= byte
        try:
            report = scanned(folder, bytes(data))
        except TraceError:
            return
        assert not report.traces[0].coverage.complete
        assert exit_code(report, folder) in {1, 3}


class TestNoTrace:
    @pytest.mark.parametrize(
        "data",
        [
            b"", b" \n", b"hello", b"\x89PNG\r\n\x1a\n" + bytes(100), b"{}", b'{"a": [1, 2]}', b"[1, 2, 3]", b'["a"]',
            b"[[]]", b"null", b'"traceEvents": []', b'{"traceEvents": 3}', b'{"traceEvents": null}', b"\x1f\x8b",
            b"[INFO]",
            b"\x1f\x8b" + bytes(50), gzip.compress(b""), gzip.compress(b"hello"), bytes(3 << 20), b" " * (3 << 20),
            "trace".encode("utf-16"), b"PK\x03\x04" + bytes(50),
        ],
        ids=lambda data: repr(data[:20]),
    )  # fmt: skip
    def test_it_is_refused(self, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "trace.json"
        path.write_bytes(data)
        assert command("scan", str(path)) == 2
        assert capsys.readouterr().err.startswith("error:")

    @pytest.mark.parametrize(
        "data", [b"[]", b'{"traceEvents": []}', b"[{}]", b'[{"a": 1}, {"b": [1]}]', b"[", b'{"traceEvents": [']
    )
    def test_a_trace_without_a_gpu_cannot_answer(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        path.write_bytes(data)
        assert command("scan", str(path)) == 3

    @pytest.mark.parametrize("lost", ["kernel", "cuda_runtime"])
    def test_a_trace_without_gpu_events_or_without_calls_cannot_answer(self, lost: str, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.events = [e for e in trace.events if e["cat"] != lost]
        trace.op("aten::add", 0, 10)
        report = trace.scan(tmp_path)
        assert exit_code(report, tmp_path) == 3

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="is no file"):
            scan([tmp_path], root=tmp_path)
        assert command("scan", str(tmp_path)) == 2

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "trace.json")
        assert command("scan", str(tmp_path / "trace.json")) == 2

    def test_a_file_that_is_gone_or_forbidden_is_said_to_be(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="cannot be read: No such file"):
            scan([tmp_path / "gone.json"], root=tmp_path)

    def test_an_error_while_reading_is_an_error_of_ours(self, tmp_path: Path) -> None:
        """A file whose bytes cannot be had, as on a failing disk."""
        broken = Path("/proc/self/mem")
        if not broken.exists():  # only Linux has such a file
            broken = tmp_path
        with pytest.raises(TraceError):
            scan([broken], root=tmp_path)


class TestBombs:
    def test_zeros_that_expand_are_refused(self, tmp_path: Path) -> None:
        """100 MiB of them in 100 KB, behind a head that looks like a trace's."""
        data = gzip.compress(b'{"traceEvents": [' + bytes(100 << 20))
        with pytest.raises(TraceError, match="no end of an event within 64 MiB"):
            scanned(tmp_path, data)

    @pytest.mark.parametrize("inside", [b" ", b"[", b"{", b'"', b"{},{", b"\\", b"},{"])
    def test_text_without_an_event_is_refused_or_incomplete(self, inside: bytes, tmp_path: Path) -> None:
        text = b'{"traceEvents": [' + inside * ((6 << 20) // len(inside))
        try:
            report = scanned(tmp_path, text)
        except TraceError:
            return
        assert exit_code(report, tmp_path) == 3

    def test_events_that_expand_without_bound_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The limit stands at 16 MiB here, as 256 MiB take a while."""
        monkeypatch.setattr(reading, "RATIO_FROM", 16 << 20)
        one = b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"pid":0,"tid":7,"args":{"correlation":1}},'
        data = gzip.compress(b'{"traceEvents": [' + one * ((40 << 20) // len(one)))
        with pytest.raises(TraceError, match="expands more than 200-fold"):
            scanned(tmp_path, data)

    def test_an_event_that_never_ends_is_refused(self, tmp_path: Path) -> None:
        """A name of more than 64 MiB."""
        with pytest.raises(TraceError, match="64 MiB"):
            scanned(tmp_path, '{"traceEvents": [{"ph": "X", "name": "' + "a" * (67 << 20))

    def test_deep_nesting_is_not_followed(self, tmp_path: Path) -> None:
        deep = "[" * 100_000 + "]" * 100_000
        text = Trace().work().text().replace('"device": 0', f'"device": 0, "x": {deep}', 1)
        report = scanned(tmp_path, text)
        assert not report.traces[0].coverage.complete


def sync_with(**changes: Any) -> dict[str, Any]:
    """One wait of 50 µs."""
    event: dict[str, Any] = {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 100, "tid": 100, "ts": 100, "dur": 50,
        "args": {"correlation": 9},
    }  # fmt: skip
    return {k: v for k, v in {**event, **changes}.items() if v != "missing"}


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
        assert command("scan", str(tmp_path / "trace.json"), "--format", "json") in {1, 3}

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


NASTY = (
    "\x1b[31mred\x1b]8;;http://x\x07link", "<script>alert(1)</script>", "[bold red]x[/]", "[/]",
    "::error::pwned\n::warning::",
    "a\r\nb", "\u202egnp", "]]></failure>", "`|*_#", "%0A::error::", "\x9b2J", "{0}%s{", "a" * 5000, "\ufffe\uffff",
)  # fmt: skip


class TestHostileNames:
    @pytest.mark.parametrize("form", FORMATS)
    def test_no_name_gets_through_unescaped(
        self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """From the trace to the terminal, the page and the log; what each format escapes how is tested with it."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
        trace = Trace().work()
        for n, name in enumerate(NASTY):
            t = 1000 * n
            trace.frame(f"{name}.py(3): {name}", t, t + 900)
            trace.op(name, t + 1, t + 899)
            trace.range(name, t + 2, t + 890)
            trace.gpu(name, t + 10, t + 190, trace.call("cudaLaunchKernel", t + 3, t + 4))
            trace.call("cudaStreamSynchronize", t + 100, t + 200)
        (tmp_path / "t.json").write_text(trace.text())
        assert command("scan", "t.json", "--format", form) == 1
        out = capsys.readouterr()
        assert not set("\x1b\x07\x9b\r\u202e") & set(out.out + out.err)
        assert "\n::error::pwned" not in out.out
        if form in {"json", "sarif"}:
            assert json.loads(out.out)
        if form in {"markdown", "junit"}:
            assert "<script>" not in out.out


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


def test_one_damaged_trace_among_good_ones_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.json").write_text(Trace().work().text())
    (tmp_path / "bad.json").write_text(Trace().work().text()[:-5])
    assert command("scan", str(tmp_path)) == 3
    assert "bad.json ends early" in capsys.readouterr().out
