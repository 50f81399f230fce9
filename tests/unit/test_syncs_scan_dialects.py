"""Traces of other years, other GPUs and other calls: what blocks, what does not, and what only may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from dcpbench.syncs import scan as scan_module
from dcpbench.syncs.formats import FORMATS, render_report
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.sync_report import Report, encode_json
from dcpbench.syncs.traces.blocking import get_wait_kind, parse_direction
from dcpbench.syncs.traces.columns import read_columns
from dcpbench.syncs.traces.reading import TraceReader
from tests.unit.trace_builder import HOST, PAGEABLE, PINNED, TO_GPU, Trace, exit_code, get_only_site, select_counted

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def trace() -> Trace:
    """Two kernels, long before what a test adds."""
    return Trace().work()


class TestTorchOf2021:
    """Torch 1.8: other categories, `external id`, threads as text here and as numbers there, steps as operators."""

    @staticmethod
    def report(folder: Path) -> Report:
        trace = Trace()
        for step in range(3):
            t = 1000.0 * step
            trace.add("Operator", f"ProfilerStep#{step + 4}", t, t + 900, tid="100", pid=HOST)
            trace.add("Operator", "aten::item", t + 90, t + 220, tid="100", **{"external id": str(step + 50)})
            trace.add(
                "Operator", "aten::_local_scalar_dense", t + 95, t + 215, tid="100", **{"external id": str(step + 60)}
            )
            launch, copy, wait = (10 * step + n for n in (1, 2, 3))
            trace.add("Runtime", "cudaLaunchKernel", t + 10, t + 15, tid=100, correlation=launch)
            trace.add("Kernel", "gemm", t + 20, t + 190, pid=0, tid="stream 7", device=0, correlation=launch)
            trace.add("Runtime", "cudaMemcpyAsync", t + 100, t + 110, tid=100, correlation=copy)
            trace.add("Memcpy", PAGEABLE, t + 191, t + 192, pid=0, tid="stream 7", device=0, correlation=copy, bytes=8)
            trace.add("Runtime", "cudaStreamSynchronize", t + 120, t + 200, tid=100, correlation=wait)
        return trace.scan(folder)

    def test_an_item_per_step_is_found(self, tmp_path: Path) -> None:
        report = self.report(tmp_path)
        site = get_only_site(report)
        assert (site.rule, site.op_chain) == ("SYNC001", ["aten::item", "aten::_local_scalar_dense"])
        assert (site.count, site.count_per_step, site.direction, site.bytes) == (3, 1, "DtoH pageable", 24)

    def test_its_steps_and_coverage_are_known(self, tmp_path: Path) -> None:
        trace = self.report(tmp_path).traces[0]
        assert (trace.steps, trace.coverage.steps_from) == (3, "ProfilerStep#")
        assert (trace.coverage.gpu_events, trace.coverage.runtime_events, trace.coverage.ops) == (6, 9, 9)
        assert trace.gpu_busy_us == 3 * (170 + 1)


class TestLinks:
    """`External id` names the operator, but for torch 1.12 to 2.0 it may just repeat the correlation."""

    def test_a_call_on_a_thread_of_another_name_is_linked_to_its_operator(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::nonzero", 0, 100, **{"External id": 77})
        trace.call("cudaStreamSynchronize", 10, 90, tid=4711, **{"External id": 77})
        assert get_only_site(trace.scan(tmp_path)).op_chain == ["aten::nonzero"]

    def test_an_external_id_that_repeats_the_correlation_is_no_link(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::nonzero", 0, 100, **{"External id": 77})
        trace.call("cudaStreamSynchronize", 200, 290, correlation=77, **{"External id": 77})
        site = get_only_site(trace.scan(tmp_path))
        assert (site.op_chain, site.kind) == ([], "stream-sync")

    def test_what_contains_the_call_in_time_is_believed_first(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::nonzero", 0, 100, **{"External id": 77})
        trace.op("aten::item", 200, 300, **{"External id": 78})
        trace.call("cudaStreamSynchronize", 210, 290, **{"External id": 77})
        assert get_only_site(trace.scan(tmp_path)).op_chain == ["aten::item"]

    def test_ids_of_zero_and_minus_one_link_nothing(self, trace: Trace, tmp_path: Path) -> None:
        """Both stand for `none`: a copy that has no id is not the first other event without one."""
        trace.op("aten::nonzero", 0, 100, **{"External id": 0})
        trace.call("cudaStreamSynchronize", 200, 290, **{"External id": 0})
        for none in (0, -1, None):
            trace.add("gpu_memcpy", PAGEABLE, 400, 401, pid=0, tid=7, correlation=none, bytes=1)
            trace.add("cuda_runtime", "cudaMemcpyAsync", 300, 301, correlation=none)
        assert get_only_site(trace.scan(tmp_path)).op_chain == []


class TestCallStacks:
    def test_a_call_stack_of_an_operator_is_a_stack_with_lines_of_calls(self, trace: Trace, tmp_path: Path) -> None:
        """Torch 1.8 to 1.11: frames on the operator, innermost first, the framework's own among them."""
        (tmp_path / "engine").mkdir()
        (tmp_path / "engine" / "model.py").touch()
        stack = "torch/_tensor.py(31): wrapped;engine/model.py(57): sample;run.py(9): <module>;"
        trace.op("aten::item", 0, 100, **{"Call stack": stack})
        trace.op("aten::_local_scalar_dense", 5, 95)
        trace.call("cudaStreamSynchronize", 10, 90)
        report = trace.scan(tmp_path)
        site = get_only_site(report)
        assert (site.file, site.function, site.line, site.line_is) == ("engine/model.py", "sample", 57, "call")
        assert site.stack[0] == "run.py(9): <module>"
        assert report.traces[0].coverage.stacks == "call stack"

    @pytest.mark.parametrize("empty", ["", ";", " ; "])
    def test_an_empty_call_stack_is_none(self, empty: str, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::item", 0, 100, **{"Call stack": empty})
        trace.call("cudaStreamSynchronize", 10, 90)
        report = trace.scan(tmp_path)
        assert get_only_site(report).stack == []
        assert report.traces[0].coverage.stacks == "none"
        assert any("with_stack=True" in note for note in report.traces[0].coverage.notes)

    def test_an_empty_call_stack_hides_no_other(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::item", 0, 100, **{"Call stack": "run.py(9): main;"})
        trace.op("aten::_local_scalar_dense", 5, 95, **{"Call stack": ""})
        trace.call("cudaStreamSynchronize", 10, 90)
        assert get_only_site(trace.scan(tmp_path)).function == "main"


class TestHip:
    def test_an_item_is_one_call_that_names_the_copy_wrongly(self, trace: Trace, tmp_path: Path) -> None:
        """`.item()` copies by hipMemcpyWithStream, which waits by itself; the copy may say DtoD."""
        for t in (0, 1000):
            trace.op("aten::item", t, t + 100)
            trace.op("aten::_local_scalar_dense", t + 1, t + 99)
            trace.copy(
                "Memcpy DtoD (Device -> Device)", (t + 5, t + 90), (t + 80, t + 82), runtime="hipMemcpyWithStream"
            )
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.count, site.call, site.wait_us) == ("SYNC001", 2, "hipMemcpyWithStream", 170)

    def test_a_copy_to_the_host_has_a_direction_in_words(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::copy_", 0, 100)
        trace.copy("CopyDeviceToHost", (5, 90), (80, 82), runtime="hipMemcpyWithStream", stream=0)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.kind, site.direction) == ("copy-to-host", "DtoH")

    def test_an_asynchronous_copy_that_was_held_up_blocks(self, trace: Trace, tmp_path: Path) -> None:
        """Memory is not named: that the call returned after a kernel had ended and the copy begun says it. Copies lie
        on a stream of their own.
        """
        trace.kernel(0, 5, 80)
        trace.copy("CopyDeviceToHost", (10, 90), (81, 82), runtime="hipMemcpyAsync", stream=0)
        assert get_only_site(trace.scan(tmp_path)).call == "hipMemcpyAsync"

    def test_an_asynchronous_copy_that_returns_at_once_does_not(self, trace: Trace, tmp_path: Path) -> None:
        trace.kernel(0, 5, 80)
        trace.copy("CopyDeviceToHost", (10, 15), (81, 82), runtime="hipMemcpyAsync", stream=0)
        assert trace.scan(tmp_path).sites == []

    @pytest.mark.parametrize(
        ("name", "rule"),
        [
            ("hipStreamSynchronize", "SYNC006"),
            ("hipEventSynchronize", "SYNC007"),
            ("hipDeviceSynchronize", "SYNC008"),
            ("hipFree", "SYNC009"),
        ],
    )
    def test_calls_have_the_rules_of_their_cousins(self, name: str, rule: str, trace: Trace, tmp_path: Path) -> None:
        trace.call(name, 0, 50)
        trace.op("aten::add", 90, 95)  # so that the call does not end the window
        assert get_only_site(trace.scan(tmp_path)).rule == rule


class TestXpu:
    def test_waits_of_its_runtime_are_found(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::item", 0, 100)
        trace.op("aten::_local_scalar_dense", 1, 99)
        trace.call("urEventWait", 10, 90, cat="xpu_runtime")
        trace.call("urEnqueueKernelLaunch", 100, 101, cat="xpu_runtime")
        report = trace.scan(tmp_path)
        assert get_only_site(report).rule == "SYNC001"
        assert report.traces[0].coverage.runtime_events == 4


class TestOtherAccelerators:
    """None of them is a program without a GPU, and of none it is known which calls wait."""

    @pytest.mark.parametrize(
        "category", ["mtia_runtime", "mtia_ccp_events", "hpu_op", "privateuse1_driver", "async_npu", "xla_op"]
    )
    def test_its_events_are_named_and_the_trace_cannot_answer(self, category: str, tmp_path: Path) -> None:
        trace = Trace()
        trace.op("aten::add", 0, 10)
        trace.add(category, "run", 0, 10, correlation=1)
        report = trace.scan(tmp_path)
        (reason,) = compute_verdict(report, Gate(root=tmp_path)).reasons
        assert f"({category})" in reason
        assert "dcpbench syncs dry-run" in reason
        assert not any("ProfilerActivity.CUDA" in note for note in report.traces[0].coverage.notes)

    def test_a_runtime_of_which_no_call_is_known_cannot_answer(self, tmp_path: Path) -> None:
        """Kernels and calls are there, but whether musaStreamSynchronize waits is in no list of ours."""
        trace = Trace()
        launch = trace.call("musaLaunchKernel", 0, 5, cat="privateuse1_runtime")
        trace.gpu("gemm", 10, 20, launch)
        trace.call("musaStreamSynchronize", 30, 90, cat="privateuse1_runtime")
        verdict = compute_verdict(trace.scan(tmp_path), Gate(root=tmp_path))
        assert verdict.exit_code == 3
        assert "musaLaunchKernel, musaStreamSynchronize" in verdict.reasons[0]

    def test_beside_cuda_they_change_no_answer(self, trace: Trace, tmp_path: Path) -> None:
        trace.add("mtia_ccp_events", "run", 0, 10)
        report = trace.scan(tmp_path)
        assert compute_verdict(report, Gate(root=tmp_path)).exit_code == 0
        assert any("another accelerator (mtia_ccp_events)" in note for note in report.traces[0].coverage.notes)


class TestCudaSyncEvents:
    @staticmethod
    def event(trace: Trace, name: str, start: float, end: float, correlation: int, stream: int, **args: Any) -> None:
        trace.add(
            "cuda_sync",
            name,
            start,
            end,
            pid=0,
            tid=stream + 1_000_000 if stream >= 0 else -1,
            correlation=correlation,
            stream=stream,
            cuda_sync_kind=name,
            **args,
        )

    def test_a_wait_of_the_driver_api_in_an_operator_is_on_its_line(self, trace: Trace, tmp_path: Path) -> None:
        """No runtime call has its correlation. `tid` is the stream's number plus a million."""
        trace.frame("lib.py(5): solve", 0, 100)
        trace.op("my::solve", 0, 100, **{"External id": 12})
        self.event(trace, "Stream Sync", 10, 90, 9001, 7, **{"External id": 12})
        site = get_only_site(trace.scan(tmp_path))
        assert (site.function, site.op, site.wait_us, site.call) == ("solve", "my::solve", 80, "Stream Sync")

    def test_a_wait_outside_any_operator_is_a_librarys(self, trace: Trace, tmp_path: Path) -> None:
        self.event(trace, "Stream Sync", 10, 90, 9001, 7, **{"External id": 9001})
        trace.op("aten::add", 100, 110)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.threads, site.may_block) == ("SYNC010", [], False)

    def test_the_same_wait_is_not_counted_twice(self, trace: Trace, tmp_path: Path) -> None:
        correlation = trace.call("cudaStreamSynchronize", 10, 90)
        self.event(trace, "Stream Sync", 11, 89, correlation, 7)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.call, site.count, site.wait_us) == ("cudaStreamSynchronize", 1, 80)

    @pytest.mark.parametrize("without", ["event", "call", "both"])
    def test_nor_where_ids_are_missing(self, without: str, trace: Trace, tmp_path: Path) -> None:
        """19 of each, whose times belong together, one to one."""
        for n in range(19):
            correlation = trace.call("cudaStreamSynchronize", 100 * n, 100 * n + 90)
            if without != "event":
                del trace.events[-1]["args"]
            self.event(trace, "Stream Sync", 100 * n + 1, 100 * n + 89, correlation, 7)
            if without != "call":
                del trace.events[-1]["args"]
        site = get_only_site(trace.scan(tmp_path))
        assert (site.call, site.count) == ("cudaStreamSynchronize", 19)

    def test_two_events_without_an_id_within_one_call_are_not_both_of_that_call(
        self, trace: Trace, tmp_path: Path
    ) -> None:
        """The second is a library's, on another thread."""
        trace.call("cudaStreamSynchronize", 0, 90)
        for start in (1, 40):
            trace.add("cuda_sync", "Stream Sync", start, start + 20, pid=0, tid=7)
        assert trace.scan(tmp_path).totals.syncs == 2

    @pytest.mark.parametrize("name", ["cudaStream\u00d3ynchronize", "INVALID", "cudaLaunchKernel"])
    def test_one_beside_a_call_that_is_no_wait_by_its_name_counts(
        self, name: str, trace: Trace, tmp_path: Path
    ) -> None:
        """A damaged name, a call that the profiler could not name, or another process's with the same id."""
        trace.frame("lib.py(5): solve", 0, 100)
        for n in range(19):
            self.event(trace, "Stream Sync", 5 * n + 1, 5 * n + 3, trace.call(name, 5 * n, 5 * n + 4), 7)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.count, site.function) == (19, "solve")

    def test_an_event_that_is_only_asked_is_no_wait(self, trace: Trace, tmp_path: Path) -> None:
        """CUPTI writes for cudaEventQuery and cudaStreamQuery what it writes for a synchronisation."""
        for name, kind in (("cudaEventQuery", "Event Sync"), ("cudaStreamQuery", "Stream Sync")):
            self.event(trace, kind, 11, 12, trace.call(name, 10, 13), -1)
        assert trace.scan(tmp_path).sites == []

    def test_one_without_a_call_only_may_have_waited(self, trace: Trace, tmp_path: Path) -> None:
        """The driver's own query leaves the same event, but is over in a few microseconds."""
        self.event(trace, "Event Sync", 10, 12, 9001, -1)
        self.event(trace, "Event Sync", 100, 900, 9002, -1)
        report = trace.scan(tmp_path)
        assert sorted((s.wait_us, s.may_block) for s in report.sites) == [(2, True), (800, False)]
        assert all(render_report(report, form, root=tmp_path) is not None for form in FORMATS)
        assert msgspec.json.decode(encode_json(report), type=Report).sites == report.sites

    def test_a_stream_that_waits_for_a_stream_is_no_matter_of_the_host(self, trace: Trace, tmp_path: Path) -> None:
        self.event(trace, "Stream Wait Event", 10, 90, trace.call("cudaStreamWaitEvent", 10, 11), 7)
        self.event(trace, "Stream Wait Event", 10, 90, 9001, 7)
        assert trace.scan(tmp_path).sites == []


class TestCopies:
    def test_to_pageable_memory_the_call_itself_waits(self, trace: Trace, tmp_path: Path) -> None:
        """`.to("cpu", non_blocking=True)`: no synchronisation follows."""
        trace.op("aten::copy_", 0, 100)
        trace.copy(PAGEABLE, (10, 90), (80, 85))
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.may_block, site.wait_us, site.call) == ("SYNC005", False, 80, "cudaMemcpyAsync")

    def test_to_pinned_memory_it_does_not(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::copy_", 0, 100)
        trace.copy(PINNED, (10, 14), (80, 85))
        assert trace.scan(tmp_path).sites == []

    def test_an_event_that_is_waited_for_later_is_another_matter_than_the_copy(
        self, trace: Trace, tmp_path: Path
    ) -> None:
        trace.op("aten::copy_", 0, 20)
        trace.copy(PINNED, (10, 14), (80, 85))
        trace.call("cudaEventRecord", 22, 23)
        trace.call("cudaEventSynchronize", 25, 90)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.direction, site.bytes) == ("SYNC007", "", None)

    def test_a_small_one_from_pageable_memory_only_may_block(self, trace: Trace, tmp_path: Path) -> None:
        """It returns before its copy begins, although the GPU is at work: CUDA took the data at once."""
        trace.kernel(0, 2, 80)
        trace.op("aten::copy_", 5, 20)
        trace.copy(TO_GPU, (10, 14), (81, 82), size=4096)
        report = trace.scan(tmp_path)
        assert get_only_site(report).may_block
        assert report.totals.syncs == 0

    def test_a_large_one_that_the_gpu_holds_up_blocks(self, trace: Trace, tmp_path: Path) -> None:
        trace.kernel(0, 2, 80)
        trace.op("aten::copy_", 5, 100)
        trace.copy(TO_GPU, (10, 95), (81, 110), size=4 * MIB)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.may_block, site.direction) == ("SYNC005", False, "HtoD pageable")

    def test_work_of_another_stream_holds_up_no_copy(self, trace: Trace, tmp_path: Path) -> None:
        """The call takes long as the host copies 4 MiB; stream 8 is busy all the while and beside the point."""
        trace.kernel(0, 2, 500, stream=8)
        trace.op("aten::copy_", 5, 200)
        trace.copy(TO_GPU, (10, 190), (60, 195), size=4 * MIB)
        assert get_only_site(trace.scan(tmp_path)).may_block

    def test_a_copy_and_the_wait_behind_it_are_one(self, trace: Trace, tmp_path: Path) -> None:
        """What torch asks the driver in between changes nothing."""
        trace.op("aten::copy_", 0, 100)
        trace.copy(TO_GPU, (10, 14), (30, 31))
        trace.call("cudaStreamIsCapturing", 15, 16)
        trace.call("cudaStreamGetCaptureInfo_v2", 17, 18)
        trace.call("cudaStreamSynchronize", 20, 40)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.count, site.direction, site.wait_us) == ("SYNC004", 1, "HtoD pageable", 4 + 20)

    @pytest.mark.parametrize(
        ("within", "apart", "one"), [(True, 500, True), (False, 49, True), (False, 50, False), (False, 500, False)]
    )
    def test_a_wait_is_for_the_copy_before_it_in_an_operator_or_within_50_us(
        self, within: bool, apart: int, one: bool, trace: Trace, tmp_path: Path
    ) -> None:
        """The operator is the first of the trace; outside of all, what lies far apart is of two calls."""
        if within:
            trace.op("aten::copy_", 0, 1000)
        trace.copy(PAGEABLE, (10, 15), (11, 12))
        trace.call("cudaStreamSynchronize", 15 + apart, 20 + apart)
        if not within:
            trace.op("aten::add", 2000, 2001)
        assert sorted(s.rule for s in trace.scan(tmp_path).sites) == (["SYNC003"] if one else ["SYNC005", "SYNC006"])

    def test_a_wait_in_another_operator_is_another_one(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::copy_", 0, 20)
        trace.copy(PAGEABLE, (10, 15), (11, 12))
        trace.op("my::wait", 20, 100)
        trace.call("cudaStreamSynchronize", 21, 90)
        assert sorted(s.rule for s in trace.scan(tmp_path).sites) == ["SYNC005", "SYNC006"]

    def test_a_wait_after_a_copy_on_the_gpu_is_a_wait_for_the_stream(self, trace: Trace, tmp_path: Path) -> None:
        """`b.copy_(a); torch.cuda.synchronize()`: nobody on the host waits for the copy itself."""
        trace.copy("Memcpy DtoD (Device -> Device)", (10, 14), (30, 31))
        trace.call("cudaDeviceSynchronize", 16, 40)
        trace.op("aten::add", 50, 51)
        site = get_only_site(trace.scan(tmp_path))
        assert site.rule == "SYNC008"

    def test_a_copy_on_the_gpu_waits_for_nothing(self, trace: Trace, tmp_path: Path) -> None:
        trace.copy("Memcpy DtoD (Device -> Device)", (10, 14), (30, 31), runtime="cudaMemcpy")
        assert trace.scan(tmp_path).sites == []


class TestMemory:
    def test_freeing_waits_and_pinning_may(self, trace: Trace, tmp_path: Path) -> None:
        trace.call("cudaFree", 10, 90)
        trace.call("cudaHostAlloc", 100, 190)
        trace.call("cudaMalloc", 200, 210)
        trace.call("cudaFreeAsync", 220, 221)
        sites = {s.call: (s.rule, s.may_block) for s in trace.scan(tmp_path).sites}
        assert sites == {"cudaFree": ("SYNC009", False), "cudaHostAlloc": ("SYNC009", True)}


class TestGraphs:
    def test_a_replay_with_copies_in_it_is_no_wait(self, trace: Trace, tmp_path: Path) -> None:
        """Its kernels and copies share the correlation of cudaGraphLaunch."""
        graph = trace.call("cudaGraphLaunch", 10, 20)
        trace.gpu("node", 30, 40, graph)
        trace.gpu(PAGEABLE, 41, 42, graph, cat="gpu_memcpy", bytes=8)
        assert trace.scan(tmp_path).sites == []


class TestOwn:
    def test_the_profilers_wait_at_the_end_needs_no_stack_to_be_known(self, trace: Trace, tmp_path: Path) -> None:
        """The program's own wait comes before it, after the last work as well."""
        trace.call("cudaDeviceSynchronize", 100, 110)
        trace.call("cudaDeviceSynchronize", 200, 210)
        report = trace.scan(tmp_path)
        assert sorted((s.example.ts, s.own) for s in report.sites if s.example) == [(100, False), (200, True)]

    @pytest.mark.parametrize("end", [210.5, 1e6], ids=["still open", "ends beyond the trace"])
    def test_a_step_that_has_not_ended_is_no_work_after_it(self, end: float, trace: Trace, tmp_path: Path) -> None:
        """The profiler was stopped in the middle of a step: its range ends with the window, or is said to end later."""
        trace.range("ProfilerStep#4", -2000, 50)
        trace.range("ProfilerStep#5", 50, end)
        trace.op("aten::add", 60, 70)
        trace.call("cudaDeviceSynchronize", 200, 210)
        report = trace.scan(tmp_path)
        assert get_only_site(report).own
        assert exit_code(report, tmp_path) == 0

    def test_nor_is_one_that_is_an_operator(self, trace: Trace, tmp_path: Path) -> None:
        """Torch 1.8: the range is an operator, and contains the call."""
        trace.op("ProfilerStep#5", 50, 1e6)
        trace.op("aten::add", 60, 70)
        trace.call("cudaDeviceSynchronize", 200, 210)
        report = trace.scan(tmp_path)
        assert get_only_site(report).own
        assert exit_code(report, tmp_path) == 0

    def test_the_programs_own_wait_in_such_a_step_stays_a_finding(self, trace: Trace, tmp_path: Path) -> None:
        trace.range("ProfilerStep#5", 50, 1e6)
        trace.call("cudaDeviceSynchronize", 100, 110)
        trace.call("cudaDeviceSynchronize", 200, 210)
        report = trace.scan(tmp_path)
        assert sorted((s.example.ts, s.own) for s in report.sites if s.example) == [(100, False), (200, True)]
        assert exit_code(report, tmp_path) == 1

    @pytest.mark.parametrize("name", ["ProfilerStep#5", "decode_step"])
    def test_the_last_wait_in_a_range_that_has_ended_is_the_programs(
        self, name: str, trace: Trace, tmp_path: Path
    ) -> None:
        """Something comes behind the range; or the range is not the profiler's, and a program may end with it."""
        trace.range(name, 50, 220)
        trace.call("cudaDeviceSynchronize", 200, 210)
        if name.startswith("Profiler"):
            trace.call("cudaEventRecord", 230, 231)
        assert not get_only_site(trace.scan(tmp_path)).own

    def test_a_wait_with_a_users_frame_around_it_is_the_users(self, trace: Trace, tmp_path: Path) -> None:
        trace.frame("train.py(1): main", 0, 300)
        trace.frame("torch/cuda/__init__.py(9): synchronize", 99, 111)
        trace.call("cudaDeviceSynchronize", 100, 110)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.own, site.function, site.explicit) == (False, "main", True)

    def test_a_wait_in_the_profiler_is_its_own_wherever_it_is(self, trace: Trace, tmp_path: Path) -> None:
        trace.frame("train.py(1): main", 0, 300)
        trace.frame("torch/profiler/profiler.py(9): step", 99, 111)
        trace.call("cudaDeviceSynchronize", 100, 110)
        trace.op("aten::add", 200, 210)
        assert get_only_site(trace.scan(tmp_path)).own

    def test_a_handler_that_the_profiler_calls_is_the_users(self, trace: Trace, tmp_path: Path) -> None:
        trace.frame("torch/profiler/profiler.py(9): step", 99, 111)
        trace.frame("train.py(1): on_trace_ready", 99.5, 110.5)
        trace.call("cudaStreamSynchronize", 100, 110)
        assert not get_only_site(trace.scan(tmp_path)).own


class TestRanks:
    @pytest.mark.parametrize(
        ("name", "rank"),
        [
            ("rank3.json", 3),
            ("trace_rank_12.json", 12),
            ("1699-TP-5.trace.json", 5),
            ("step3.json", None),
            ("http2.json", None),
            ("t.json", None),
        ],
    )
    def test_a_file_name_may_say_it(self, name: str, rank: int | None, trace: Trace, tmp_path: Path) -> None:
        assert trace.scan(tmp_path, name).traces[0].rank == rank

    def test_the_trace_itself_knows_better(self, trace: Trace, tmp_path: Path) -> None:
        trace.top["distributedInfo"] = {"backend": "nccl", "rank": 6, "world_size": 8, "pg_config": [{"ranks": [0]}]}
        assert trace.scan(tmp_path, "rank3.json").traces[0].rank == 6

    def test_a_step_is_as_slow_as_its_slowest_rank(self, tmp_path: Path) -> None:
        """Rank 0 waits once per step, rank 1 twice: three waits in all, two per step."""
        paths = []
        for rank, times in ((0, 1), (1, 2)):
            trace = Trace().work()
            for step in range(2):
                trace.range(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900)
                for n in range(times):
                    trace.item(1000 * step + 100 * n, 1000 * step + 100 * n + 50)
            paths.append(tmp_path / f"rank{rank}.json")
            paths[-1].write_text(trace.text())
        site = get_only_site(scan_traces(paths, root=tmp_path))
        assert (site.count, site.count_per_step, len(site.traces)) == (6, 2, 2)


class TestNames:
    @pytest.mark.parametrize(
        ("call", "kind"),
        [
            ("cudaStreamSynchronize", "stream"),
            ("cudaStreamSynchronize_ptsz", "stream"),
            ("cuCtxSynchronize", "device"),
            ("cudaLaunchKernel", None),
            ("cuMemcpyDtoH_v2", "copy"),
            ("cuMemFree_v2", "free"),
            ("cudaMemcpy2DAsync_v3020", "async copy"),
            ("hipHostMalloc", "pin"),
            ("cudaEventQuery", None),
            ("cudaStreamWaitEvent", None),
            ("cudaMallocAsync", None),
            ("custom", None),
            ("", None),
        ],
    )
    def test_a_call_is_known_with_and_without_a_version(self, call: str, kind: str | None) -> None:
        assert get_wait_kind(call) == kind

    @pytest.mark.parametrize(
        ("name", "direction"),
        [
            (PINNED, "DtoH pinned"),
            (TO_GPU, "HtoD pageable"),
            ("Memcpy DtoD (Device -> Device)", "DtoD"),
            ("Memcpy PtoP", "PtoP"),
            ("CopyHostToDevice", "HtoD"),
            ("Memcpy DtoH (Device -> Array)", "DtoH"),
            ("gemm", ""),
        ],
    )
    def test_a_copy_says_its_direction(self, name: str, direction: str) -> None:
        assert parse_direction(name) == direction


def test_an_item_on_the_host_is_no_synchronisation(trace: Trace, tmp_path: Path) -> None:
    """The table of operators is a hint about waits that were seen, never a reason to report one."""
    for t in range(0, 1000, 10):
        trace.op("aten::item", t, t + 5)
        trace.op("aten::_local_scalar_dense", t + 1, t + 4)
    trace.op("aten::nonzero", 1000, 1100)
    assert select_counted(trace.scan(tmp_path)) == []


@pytest.mark.parametrize(("ends", "kept"), [(1000.0, False), (999.0, True)])
def test_a_step_in_which_the_profiler_stopped_is_none_whatever_python_frames_do(
    ends: float, kept: bool, tmp_path: Path
) -> None:
    """It ends behind all else, but for frames, which are closed later still; a kernel ends at 999.5."""
    trace = Trace()
    trace.range("ProfilerStep#0", 0, ends)
    trace.kernel(10, 900, 999.5)
    trace.frame("a.py(1): f", 0, 2000)
    (tmp_path / "t.json").write_text(trace.text())
    reader = TraceReader(tmp_path / "t.json")
    columns = read_columns(reader.read_blocks(), reader.trouble)
    step = np.array([name.startswith("ProfilerStep") for name in columns.names])
    assert bool(len(scan_module._select_closed_ranges(columns, step))) is kept
