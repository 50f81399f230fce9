"""Test that exports of nsys have the sites of the equivalent torch.profiler trace, and that damaged exports are never
clean.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpbench import cli
from dcpbench.errors import TraceError
from dcpbench.syncs import files
from dcpbench.syncs.kernel_time import measure_steps
from dcpbench.syncs.nsys import schema
from dcpbench.syncs.scan import scan_traces
from tests.unit.nsys_builder import FORMATS, Export, make_global_tid
from tests.unit.program_traces import Program
from tests.unit.trace_builder import PAGEABLE, PINNED, TO_GPU, Trace, compute_exit_code, get_only_site, select_counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.sync_report import Report

H200 = Path(__file__).parents[1] / "data" / "h200_stacks.trace.json.gz"
EVENTS = json.loads(gzip.decompress(H200.read_bytes()))["traceEvents"]
SHARED = "fingerprint rule function file op op_chain range direction call may_block own explicit count count_per_step warmup_only waited"


def describe(report: Report) -> list[tuple[Any, ...]]:
    """Return the properties that must be equal: sites in any order, with times to a nanosecond of each call."""
    sites = []
    for s in report.sites:
        times = [None if us is None else pytest.approx(us, abs=0.01) for us in (s.wait_us, s.bubble_us)]
        sites.append((*(getattr(s, name) for name in SHARED.split()), s.bytes, times))
    return sorted(sites, key=lambda site: site[0])


def write_export(folder: Path, events: list[dict[str, Any]], form: str) -> Path:
    """Write the events in a format; only samples give jsonlines Python stacks."""
    export = Export().add_trace(events)
    return (export.add_samples() if form == "jsonlines" else export).write(folder, form)


def run_command(*args: object) -> int:
    """Return the exit code of `dcpbench syncs ARGS`; anything except an exit is an exception."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["syncs", *map(str, args)])
    return int(ended.value.code or 0)


def loop(steps: int = 4) -> Program:
    """Return a trace of an engine that reads a value in each step, within a function."""
    program = Program()
    for n in range(steps):
        with program.range(f"step {n}"), program.function("engine/loop.py(12): step"):
            program.work(6)
            program.read()
    return program


def copies() -> Trace:
    """Return a trace with every kind of wait."""
    trace = Trace().work()
    trace.range("step 0", 90, 1000)
    trace.item(100, 160)
    trace.op("aten::to", 200, 300)
    trace.op("aten::_to_copy", 201, 299)
    trace.copy(PAGEABLE, (205, 260), (250, 258), size=64)
    trace.copy(TO_GPU, (310, 314), (316, 318), size=1 << 10)
    trace.copy(PINNED, (320, 323), (325, 326), size=16)
    trace.call("cudaStreamSynchronize", 340, 420)
    trace.kernel(425, 430, 470)
    trace.call("cudaEventSynchronize", 440, 480)
    trace.call("cudaEventElapsedTime", 482, 483)
    trace.call("cudaFree", 500, 540)
    trace.kernel(550, 555, 620)
    trace.call("cudaDeviceSynchronize", 560, 625)
    trace.call("cuStreamSynchronize", 640, 660, cat="cuda_driver")
    trace.add("cuda_sync", "Stream Sync", 700, 780, tid=7, correlation=9001)
    trace.kernel(800, 805, 900)
    trace.gpu("Memset (Device)", 905, 908, trace.call("cudaMemsetAsync", 810, 813), cat="gpu_memset", bytes=4096)
    trace.kernel(1100, 1105, 1200)
    return trace


class TestSameEvents:
    @pytest.mark.parametrize("form", FORMATS)
    def test_export_of_an_h200_profile_has_the_sites_of_its_trace(self, form: str, tmp_path: Path) -> None:
        """The 18 waits in three steps have the same functions, operators, copies, waits and bubbles."""
        expected = scan_traces([H200], root=tmp_path)
        report = scan_traces([write_export(tmp_path, EVENTS, form)], root=tmp_path)
        assert describe(report) == describe(expected)
        assert len(report.sites) == 5
        (trace,), (reference,) = report.traces, expected.traces
        seen = trace.coverage
        assert (trace.steps, seen.steps_from, seen.complete) == (3, reference.coverage.steps_from, True)
        for name in ("gpu_events", "runtime_events", "driver_events", "sync_events", "ops"):
            assert getattr(seen, name) == getattr(reference.coverage, name), name
        assert trace.gpu_busy_us == pytest.approx(reference.gpu_busy_us, abs=0.1)

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("make", [loop, copies], ids=["loop", "copies"])
    def test_export_of_a_program_has_the_sites_of_its_trace(
        self, make: Callable[[], Any], form: str, tmp_path: Path
    ) -> None:
        events = make().events
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
        expected = scan_traces([tmp_path / "trace.json"], root=tmp_path)
        report = scan_traces([write_export(tmp_path, events, form)], root=tmp_path)
        assert describe(report) == describe(expected)
        assert report.sites

    def test_backtrace_rows_are_not_counted_as_calls(self, tmp_path: Path) -> None:
        """The option `--cudabacktrace` writes a row of class 67 for each traced call; 196 calls stay 196."""
        report = scan_traces([Export().add_trace(EVENTS).repeat_backtraces().write(tmp_path, "sqlite")], root=tmp_path)
        assert describe(report) == describe(scan_traces([H200], root=tmp_path))
        assert report.traces[0].coverage.runtime_events == 196

    @pytest.mark.parametrize("form", FORMATS)
    def test_samples_during_a_wait_name_its_line(self, form: str, tmp_path: Path) -> None:
        report = scan_traces([Export().add_trace(EVENTS).add_samples().write(tmp_path, form)], root=tmp_path)
        assert {(s.function, s.line_is) for s in report.sites} == {
            (s.function, "call") for s in scan_traces([H200], root=tmp_path).sites
        }

    def test_baseline_of_a_trace_applies_to_its_export(self, tmp_path: Path) -> None:
        """Fingerprints are equal, so that the gate, `diff` and `baseline` accept either."""
        path, baseline = write_export(tmp_path, EVENTS, "sqlite"), tmp_path / "baseline.json"
        assert run_command("baseline", H200, "-o", baseline) == 0
        assert run_command("scan", path, "--baseline", baseline) == 0
        assert run_command("scan", path, "--max-per-step", 5) == 1
        assert run_command("diff", H200, path) == 0

    @pytest.mark.parametrize("form", FORMATS)
    def test_kernels_of_an_export_are_those_of_the_trace(self, form: str, tmp_path: Path) -> None:
        program = loop()
        expected = measure_steps(program.write(tmp_path / "trace.json"), step_range="^step ")
        found = measure_steps(write_export(tmp_path, program.events, form), step_range="^step ")
        assert [(step.kind, step.steps, step.part_us) for step in found] == [
            (step.kind, step.steps, pytest.approx(step.part_us)) for step in expected
        ]


class TestWhatIsMissing:
    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize(
        ("missing", "says"),
        [
            ((schema.CALLS,), "no calls of the CUDA runtime"),
            ((schema.KERNELS, schema.COPIES, schema.FILLS), "no GPU events"),
        ],
    )
    def test_export_without_calls_or_gpu_work_cannot_answer(
        self, missing: tuple[str, ...], says: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        events = [e for e in EVENTS if e.get("cat") != "cuda_sync"]
        path = Export().add_trace(events).drop(*missing).write(tmp_path, form)
        assert compute_exit_code(scan_traces([path], root=tmp_path), tmp_path) == (3 if schema.CALLS in missing else 1)
        assert run_command("scan", path, "--max-per-step", 100) == 3
        assert says in capsys.readouterr().out

    @pytest.mark.parametrize("form", FORMATS)
    def test_steps_are_unknown_without_ranges(self, form: str, tmp_path: Path) -> None:
        report = scan_traces([Export().add_trace(EVENTS).drop(schema.RANGES).write(tmp_path, form)], root=tmp_path)
        bare = [e for e in EVENTS if e.get("cat") not in ("cpu_op", "user_annotation")]
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": bare}))
        expected = scan_traces([tmp_path / "trace.json"], root=tmp_path)
        assert report.traces[0].steps is expected.traces[0].steps is None
        assert sum(s.count for s in report.sites) == sum(s.count for s in expected.sites)
        assert compute_exit_code(report, tmp_path) == compute_exit_code(expected, tmp_path) == 1
        assert any("torch.cuda.nvtx.range" in note for note in report.traces[0].coverage.notes)

    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("table", [schema.KERNELS, schema.COPIES])
    def test_calls_without_gpu_work_indicate_a_lost_table(self, table: str, form: str, tmp_path: Path) -> None:
        """Only the copies and kernels of calls show which of them waited."""
        report = scan_traces([Export().add_trace(EVENTS).drop(table).write(tmp_path, form)], root=tmp_path)
        assert not report.traces[0].coverage.complete
        assert table in " ".join(report.traces[0].coverage.damage)

    @pytest.mark.parametrize("form", ["sqlite", "parquetdir"])
    def test_calls_without_names_are_unreadable(self, form: str, tmp_path: Path) -> None:
        """StringIds lacks the strings, as in an incomplete copy."""
        export = Export().add_trace(EVENTS)
        export.strings = {text: number for text, number in export.strings.items() if "Synchronize" not in text}
        report = scan_traces([export.write(tmp_path, form)], root=tmp_path)
        assert report.traces[0].coverage.unreadable_events >= 18
        assert compute_exit_code(report, tmp_path) != 0

    @pytest.mark.parametrize("form", FORMATS)
    def test_unclosed_range_ends_with_the_recording(self, form: str, tmp_path: Path) -> None:
        """The recording ended within the last step."""
        export = Export().add_trace(loop().events)
        last = max((row for row in export.tables[schema.RANGES] if "textId" in row), key=lambda row: row["start"])
        del last["end"]
        report = scan_traces([export.write(tmp_path, form)], root=tmp_path, step_range="^step ")
        assert (report.traces[0].steps, get_only_site(report).count_per_step) == (4, 1.0)


class TestNsysItself:
    @pytest.mark.parametrize("form", FORMATS)
    def test_each_process_of_an_export_is_a_trace(self, form: str, tmp_path: Path) -> None:
        """Two ranks have calls with the same ids, and another process only queries the number of GPUs."""
        export = Export().add_trace(loop().events, pid=41).add_trace(loop().events, pid=42)
        name, thread = export.string("cudaGetDeviceCount_v3020"), make_global_tid(43, 43)
        row = {"eventClass": 0, "correlationId": 5, "nameId": name, "returnValue": 0, "globalTid": thread}
        export.add(schema.CALLS, start=10, end=20, **row)
        report = scan_traces([export.write(tmp_path, form)], root=tmp_path, step_range="^step ")
        assert [re.search(r"\((.*)\)$", trace.path)[1] for trace in report.traces] == ["process 41", "process 42"]
        assert [trace.steps for trace in report.traces] == [4, 4]
        assert (get_only_site(report).count, get_only_site(report).count_per_step) == (8, 1.0)

    @pytest.mark.parametrize("form", ["sqlite", "parquetdir"])
    def test_graph_that_is_recorded_as_one_activity_is_gpu_work(self, form: str, tmp_path: Path) -> None:
        """By default, nsys records one activity for each launch of a CUDA graph, and none for its kernels."""
        trace = Trace().work()
        correlation = trace.call("cudaGraphLaunch", 100, 105)
        trace.call("cudaStreamSynchronize", 110, 500)
        trace.kernel(510, 520, 530)
        export = Export().add_trace(trace.events)
        ids = {"deviceId": 0, "streamId": 7, "correlationId": correlation, "globalPid": make_global_tid(100)}
        export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=106_000, end=495_000, graphId=3, graphExecId=4, **ids)
        site = get_only_site(scan_traces([export.write(tmp_path, form)], root=tmp_path))
        assert (site.waited, site.example.waited_for, site.wait_us) == (1, "CUDA graph", 390.0)

    @pytest.mark.parametrize("form", FORMATS)
    def test_unified_memory_migrations_belong_to_no_call(self, form: str, tmp_path: Path) -> None:
        """Many migrations, which have no call, would look like lost calls."""
        export = Export().add_trace(copies().events)
        expected = scan_traces([export.write(tmp_path, form, "plain")], root=tmp_path)
        ids = {"deviceId": 0, "streamId": 9, "correlationId": 0, "globalPid": make_global_tid(100)}
        for n in range(100):
            kinds = {"copyKind": 11, "srcKind": 4, "dstKind": 4, "bytes": 4096}
            export.add(schema.COPIES, start=100_000 + n, end=100_500 + n, **ids, **kinds)
        report = scan_traces([export.write(tmp_path, form)], root=tmp_path)
        assert describe(report) == describe(expected)
        assert report.traces[0].coverage.complete

    @pytest.mark.parametrize("form", ["sqlite", "parquetdir"])
    def test_nsys_warning_is_a_note_on_its_process(self, form: str, tmp_path: Path) -> None:
        """Complete recordings have the warning, too, so that it is no damage."""
        export = Export().add_trace(loop().events, pid=41).add_trace(loop().events, pid=42)
        text = "Not all CUDA events might have been collected."
        export.add("DIAGNOSTIC_EVENT", timestamp=1, source=3, severity=2, text=text, globalPid=make_global_tid(42))
        traces = scan_traces([export.write(tmp_path, form)], root=tmp_path).traces
        assert [any(text in note for note in trace.coverage.notes) for trace in traces] == [False, True]
        assert all(trace.coverage.complete for trace in traces)

    def test_every_format_shows_several_processes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = Export().add_trace(loop().events, pid=41).add_trace(loop().events, pid=42).write(tmp_path, "sqlite")
        for form in ("table", "json", "sarif", "junit", "github", "markdown"):
            assert run_command("scan", path, "--step-range", "^step ", "--format", form) == 1
            assert "scalar-read" in capsys.readouterr().out

    def test_gil_ranges_of_nsys_are_ignored(self, tmp_path: Path) -> None:
        """The ranges mark which thread holds the GIL; a wait would lie in such a range."""
        export = Export().add_trace(copies().events)
        expected = scan_traces([export.write(tmp_path, "sqlite", "plain")], root=tmp_path)
        thread = make_global_tid(100, 100)
        export.add(schema.RANGES, start=0, eventType=75, globalTid=thread, domainId=2, text="GIL Trace")
        where = {"eventType": 59, "globalTid": thread, "domainId": 2, "text": "Holding GIL"}
        export.add(schema.RANGES, start=95_000, end=700_000, **where)
        assert describe(scan_traces([export.write(tmp_path, "sqlite")], root=tmp_path)) == describe(expected)

    @pytest.mark.parametrize(
        ("text", "name", "kind"),
        [
            ("aten::mm, seq = 12, op_id = 7", "aten::mm", "ops"),
            ("aten::mm, op_id = 7, sizes = [[2, 3], [3, 4]]", "aten::mm", "ops"),
            ("aten::add, seq = 1, op_id = 3, sizes = [[1], []], input_op_ids = [(1, 0)]", "aten::add", "ops"),
            ("vllm::unified_attention", "vllm::unified_attention", "ops"),
            ("step 3, op_id = 9", "step 3", "ranges"),
            ("decode: 3 requests", "decode: 3 requests", "ranges"),
        ],
    )
    def test_range_names_are_those_of_torch(self, text: str, name: str, kind: str) -> None:
        assert schema.parse_range(text) == (name, kind)

    @pytest.mark.parametrize(
        ("name", "plain", "damaged"),
        [
            ("cudaStreamSynchronize_v3020", "cudaStreamSynchronize", False),
            ("cudaMemcpyAsync_ptsz_v7000", "cudaMemcpyAsync_ptsz", False),
            ("cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2", False),
            ("cudaStreamSynchronize_v30r0", "cudaStreamSynchronize_v30r0", True),
            ("cudaLaunchKernel_v7000", "cudaLaunchKernel", False),
        ],
    )
    def test_call_names_lose_the_version_of_the_runtime(self, name: str, plain: str, damaged: bool) -> None:
        assert schema.normalise_call(name) == plain
        assert schema.is_damaged_call(plain) is damaged

    @pytest.mark.parametrize("form", FORMATS)
    def test_stream_synchronisation_named_stream_wait_is_counted(self, form: str, tmp_path: Path) -> None:
        """Exports of some versions use this name; only a wait of a stream for another one has an event."""
        trace = Trace().work()
        trace.add("cuda_sync", "Stream Wait Event", 100, 180, tid=7, correlation=9001)
        trace.kernel(300, 305, 400)
        export = Export().add_trace(trace.events)
        path = export.write(tmp_path, form, "waits")
        assert scan_traces([path], root=tmp_path).sites == []
        export.tables[schema.SYNCS][0]["eventId"] = schema.NO_EVENT
        assert get_only_site(scan_traces([export.write(tmp_path, form)], root=tmp_path)).kind == "library-sync"


def make_program(waits: int) -> Program:
    """Return a program with its only wait in its last part, after all steps."""
    program = Program()
    for n in range(40):
        with program.range(f"step {n}"):
            program.work(20)
    program.read(waits)
    program.work(2)
    return program


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return exports of a program with one wait; without that wait they are clean."""
    folder = tmp_path_factory.mktemp("whole")
    return {form: write_export(folder, make_program(1).events, form) for form in FORMATS}


class TestDamage:
    """Test that lost data never leave a clean report: the exit code is 3 or 2, or 1 for a site that is still found."""

    @pytest.mark.parametrize("form", FORMATS)
    def test_program_without_its_wait_is_clean(self, form: str, whole: dict[str, Path], tmp_path: Path) -> None:
        assert run_command("scan", write_export(tmp_path, make_program(0).events, form)) == 0
        assert run_command("scan", whole[form]) == 1

    @settings(max_examples=40, deadline=None)
    @given(share=st.floats(0, 0.999))
    def test_truncated_database_is_never_clean(
        self, share: float, whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        path = tmp_path_factory.mktemp("cut") / "report1.sqlite"
        data = whole["sqlite"].read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        assert run_command("scan", path) != 0

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_database_with_lost_pages_is_never_clean(
        self, data: st.DataObject, whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """A sparse copy has zeros instead of a page."""
        content = bytearray(whole["sqlite"].read_bytes())
        size = int.from_bytes(content[16:18])
        page = data.draw(st.integers(0, len(content) // size - 1))
        content[page * size : (page + 1) * size] = bytes(size)
        path = tmp_path_factory.mktemp("hole") / "report1.sqlite"
        path.write_bytes(content)
        assert run_command("scan", path) != 0

    @settings(max_examples=40, deadline=None)
    @given(share=st.floats(0, 0.999))
    def test_jsonlines_truncated_within_a_line_are_never_clean(
        self, share: float, whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """A cut between two lines cannot be detected."""
        path = tmp_path_factory.mktemp("cut") / "report1.jsonl"
        data = whole["jsonlines"].read_bytes()
        cut = int(len(data) * share)
        while data[cut - 1 : cut] in (b"\n", b"}") or data[cut : cut + 1] == b"\n":
            cut -= 1
        path.write_bytes(data[: max(cut, 0)])
        assert run_command("scan", path) != 0

    @pytest.mark.parametrize("table", ["StringIds", schema.CALLS, schema.KERNELS, schema.COPIES])
    @pytest.mark.parametrize("how", ["gone", "empty", "cut", "zeros"])
    def test_folder_with_a_damaged_table_is_never_clean(
        self, how: str, table: str, whole: dict[str, Path], tmp_path: Path
    ) -> None:
        folder = tmp_path / "report1_pqtdir"
        shutil.copytree(whole["parquetdir"], folder)
        path = folder / f"{table}.parquet"
        content = path.read_bytes()
        middle = len(content) // 3
        kept = {"empty": b"", "cut": content[:-20], "zeros": content[:middle] + bytes(64) + content[middle + 64 :]}
        path.unlink() if how == "gone" else path.write_bytes(kept[how])
        assert run_command("scan", folder) != 0

    def test_interrupted_export_is_never_clean(self, tmp_path: Path) -> None:
        """SQLite leaves a journal in the same folder."""
        path = Export().add_trace(EVENTS).write(tmp_path, "sqlite")
        path.with_name("report1.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9")
        assert "report1.sqlite-journal" in scan_traces([path], root=tmp_path).traces[0].coverage.damage[0]

    @pytest.mark.parametrize("value", ["soon", 1.5e300, None])
    def test_invalid_numbers_are_counted(self, value: object, tmp_path: Path) -> None:
        path = write_export(tmp_path, EVENTS, "sqlite")
        with sqlite3.connect(path) as db:
            db.execute(f"UPDATE {schema.CALLS} SET start = ? WHERE rowid = 30", [value])  # noqa: S608 -- a constant
        db.close()
        seen = scan_traces([path], root=tmp_path).traces[0].coverage
        assert not seen.complete
        assert seen.unreadable_events >= 1

    def test_large_string_ids_are_read(self, tmp_path: Path) -> None:
        """Some rows have ids of strings beyond 22 bits."""
        path = write_export(tmp_path, EVENTS, "sqlite")
        with sqlite3.connect(path) as db:
            query = "SELECT id FROM StringIds WHERE value = 'cudaStreamSynchronize_v3020'"
            (number,) = db.execute(query).fetchone()
            db.execute("UPDATE StringIds SET id = ? WHERE id = ?", [1 << 40, number])
            db.execute(f"UPDATE {schema.CALLS} SET nameId = ? WHERE nameId = ?", [1 << 40, number])  # noqa: S608
        db.close()
        assert describe(scan_traces([path], root=tmp_path)) == describe(scan_traces([H200], root=tmp_path))

    @pytest.mark.parametrize("column", ["eventClass", "syncType", "eventType"])
    def test_unknown_kinds_are_counted(self, column: str, tmp_path: Path) -> None:
        """One bit is flipped: 0 to 64 of a call, 3 to 11 of a synchronisation, 59 to 58 of a range."""
        table = {"eventClass": schema.CALLS, "syncType": schema.SYNCS, "eventType": schema.RANGES}[column]
        path = write_export(tmp_path, EVENTS, "sqlite")
        with sqlite3.connect(path) as db:
            bit = {"eventClass": 64, "syncType": 8, "eventType": 1}[column]
            flip = f"({column} | {bit}) - ({column} & {bit})"
            db.execute(f"UPDATE {table} SET {column} = {flip} WHERE rowid = 3")  # noqa: S608 -- constants
        db.close()
        assert scan_traces([path], root=tmp_path).traces[0].coverage.unreadable_events == 1

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            (b"SQLite format 3\0", "ends within its first 100 bytes"),
            (b"SQLite format 3\0" + bytes(5000), "damaged or ends early"),
            (b'{"data":["a"]}\n', "holds no event"),
            (b'{"Type":48,"TraceProcessEvent":{"startNs":"1"', "holds no event"),
        ],
    )
    def test_empty_export_is_refused(self, data: bytes, says: str, tmp_path: Path) -> None:
        (tmp_path / "report1.sqlite").write_bytes(data)
        with pytest.raises(TraceError, match=says):
            scan_traces([tmp_path / "report1.sqlite"], root=tmp_path)

    def test_invalid_json_lines_are_counted(self, tmp_path: Path) -> None:
        path = write_export(tmp_path, EVENTS, "jsonlines")
        lines = path.read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if '"TraceProcessEvent"' in line)
        lines[at] = lines[at].replace('"TraceProcessEvent"', '"TraceProcessEveNt"')
        lines[at + 1] = lines[at + 1].replace(":", ";", 1)
        path.write_text("\n".join(lines) + "\n")
        assert scan_traces([path], root=tmp_path).traces[0].coverage.unreadable_events == 2


class TestFiles:
    def test_folder_contributes_its_exports_without_their_reports(self, tmp_path: Path) -> None:
        for form in FORMATS:
            Export().add_trace(EVENTS).write(tmp_path, form, f"of_{form}")
        for name in ("of_sqlite.nsys-rep", "other.nsys-rep", "notes.txt"):
            (tmp_path / name).write_bytes(b"\x01")
        (tmp_path / "records.jsonl").write_text('{"tokens": 3}\n')
        with sqlite3.connect(tmp_path / "other.sqlite") as db:
            db.execute("CREATE TABLE t (a INTEGER)")
        db.close()
        skipped: list[Path] = []
        names = {path.name for path in files.expand_names([str(tmp_path)], skipped.append)}
        assert names == {"of_sqlite.sqlite", "of_jsonlines.jsonl", "of_parquetdir_pqtdir"}
        assert {path.name for path in skipped} == {"records.jsonl", "other.sqlite"}

    def test_report_without_an_export_is_not_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "report1.nsys-rep").write_bytes(b"\x01\x02")
        assert [path.name for path in files.expand_names([str(tmp_path)])] == ["report1.nsys-rep"]

    def test_folder_written_by_nsys_is_one_trace(self, tmp_path: Path) -> None:
        path = Export().add_trace(EVENTS).write(tmp_path, "parquetdir")
        assert files.expand_names([str(path)]) == [path]
        assert files.expand_names([str(tmp_path / "*_pqtdir")]) == [path]

    def test_compressed_lines_are_read(self, tmp_path: Path) -> None:
        path = write_export(tmp_path, EVENTS, "jsonlines")
        packed = tmp_path / "report1.jsonl.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert describe(scan_traces([packed], root=tmp_path)) == describe(scan_traces([path], root=tmp_path))

    @pytest.mark.parametrize(
        ("name", "data", "says"),
        [
            ("a.nsys-rep", b"\x01\x02\x03", "a report of Nsight Systems: type `nsys export --type sqlite"),
            ("a.qdrep", b"\x01\x02\x03", "a report of Nsight Systems: type `nsys export --type sqlite"),
            ("a.ncu-rep", b"NVR\0\x01", "a report of Nsight Compute"),
            ("renamed", b"NVR\0\x01", "a report of Nsight Compute"),
            ("a.pftrace", b"\n\x20\x08\x01\x00", "a Perfetto trace: type `traceconv json"),
            ("renamed", b"\n\x20\x08\x01\x00", "a Perfetto trace: type `traceconv json"),
            ("host.xplane.pb", b"\n\x20\x08\x01\x00", "an XPlane profile of XLA: type `nsys profile"),
            ("a.h5", b"\x89HDF\r\n\x1a\n", "an HDF5 export of nsys: type `nsys export --type sqlite"),
            ("a.arrow", b"ARROW1\0\0", "an Arrow export of nsys: type `nsys export --type sqlite"),
            ("t.parquet", b"PAR1\x15", "one table of an export: type `dcpbench syncs scan FOLDER`"),
            ("r.json", b'{"rocprofiler-sdk-tool": [{}]}', "a result of rocprofv3: type `dcpbench syncs run"),
            ("r.csv", b'"Kind","Agent_Id","Queue_Id"\n', "a table of rocprof: type `dcpbench syncs run"),
        ],
    )
    def test_other_recordings_are_named_with_the_command(
        self, name: str, data: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / name).write_bytes(data)
        assert run_command("scan", tmp_path / name) == 2
        assert says in " ".join(capsys.readouterr().err.split())

    @pytest.mark.parametrize(
        ("tables", "says"),
        [
            (("rocpd_api", "rocpd_op", "rocpd_string"), "a database of RPD: type `rpd2tracing.py"),
            (("rocpd_region_00ab", "rocpd_string_00ab"), "a database of rocprofv3: type `dcpbench syncs run"),
            (("users",), "an SQLite database without tables of nsys: type `nsys export --type sqlite"),
        ],
    )
    def test_other_databases_are_named_with_the_command(
        self, tables: tuple[str, ...], says: str, tmp_path: Path
    ) -> None:
        with sqlite3.connect(tmp_path / "results.db") as db:
            for table in tables:
                db.execute(f"CREATE TABLE {table} (id INTEGER)")
        db.close()
        with pytest.raises(TraceError, match=re.escape(says)):
            scan_traces([tmp_path / "results.db"], root=tmp_path)

    def test_scan_does_not_change_an_export(self, tmp_path: Path) -> None:
        """No journal is written either."""
        path = write_export(tmp_path, EVENTS, "sqlite")
        before = path.read_bytes()
        scan_traces([path], root=tmp_path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["report1.sqlite"]

    def test_columns_of_other_types_are_read(self, tmp_path: Path) -> None:
        """Other versions of nsys write narrower integers, and names as a dictionary."""
        path = Export().add_trace(EVENTS).write(tmp_path, "parquetdir")
        for table, column, kind in (
            (schema.CALLS, "correlationId", pa.uint32()),
            (schema.CALLS, "globalTid", pa.uint64()),
            ("StringIds", "value", pa.dictionary(pa.int32(), pa.string())),
        ):
            file = path / f"{table}.parquet"
            found = pq.read_table(file)
            at = found.schema.get_field_index(column)
            pq.write_table(found.set_column(at, column, found[column].cast(kind)), file)
        assert describe(scan_traces([path], root=tmp_path)) == describe(scan_traces([H200], root=tmp_path))

    def test_export_with_two_names_is_counted_once(self, tmp_path: Path) -> None:
        path = write_export(tmp_path, EVENTS, "sqlite")
        report = scan_traces(files.expand_names([str(path), str(tmp_path)]), root=tmp_path)
        assert sum(s.count for s in select_counted(report)) == 18
