"""Test traces of older torch versions, other GPUs and other calls: which calls block, which do not, and which may."""

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
from tests.unit.trace_builder import (
    HOST,
    PAGEABLE,
    PINNED,
    TO_GPU,
    Trace,
    compute_exit_code,
    get_only_site,
    select_counted,
)

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def trace() -> Trace:
    """Return a trace of two kernels, long before the events that a test adds."""
    return Trace().work()


class TestTorchOf2021:
    """Test traces of torch 1.8: other categories, `external id`, threads as text or numbers, and steps as operators."""

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

    def test_item_of_each_step_is_found(self, tmp_path: Path) -> None:
        report = self.report(tmp_path)
        site = get_only_site(report)
        assert (site.rule, site.op_chain) == ("SYNC001", ["aten::item", "aten::_local_scalar_dense"])
        assert (site.count, site.count_per_step, site.direction, site.bytes) == (3, 1, "DtoH pageable", 24)

    def test_steps_and_coverage_of_torch_1_8_are_known(self, tmp_path: Path) -> None:
        trace = self.report(tmp_path).traces[0]
        assert (trace.steps, trace.coverage.steps_from) == (3, "ProfilerStep#")
        assert (trace.coverage.gpu_events, trace.coverage.runtime_events, trace.coverage.ops) == (6, 9, 9)
        assert trace.gpu_busy_us == 3 * (170 + 1)


class TestLinks:
    """Test `External id`, which names the operator, but in torch 1.12 to 2.0 may just repeat the correlation."""

    def test_external_id_links_a_call_on_another_thread_to_its_operator(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::nonzero", 0, 100, **{"External id": 77})
        trace.call("cudaStreamSynchronize", 10, 90, tid=4711, **{"External id": 77})
        assert get_only_site(trace.scan(tmp_path)).op_chain == ["aten::nonzero"]

    def test_external_id_that_repeats_the_correlation_links_nothing(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::nonzero", 0, 100, **{"External id": 77})
        trace.call("cudaStreamSynchronize", 200, 290, correlation=77, **{"External id": 77})
        site = get_only_site(trace.scan(tmp_path))
        assert (site.op_chain, site.kind) == ([], "stream-sync")

    def test_containing_operator_takes_precedence_over_external_id(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::nonzero", 0, 100, **{"External id": 77})
        trace.op("aten::item", 200, 300, **{"External id": 78})
        trace.call("cudaStreamSynchronize", 210, 290, **{"External id": 77})
        assert get_only_site(trace.scan(tmp_path)).op_chain == ["aten::item"]

    def test_external_ids_of_zero_and_minus_one_link_nothing(self, trace: Trace, tmp_path: Path) -> None:
        """Both values mean `none`, so that events without an id are not linked to each other."""
        trace.op("aten::nonzero", 0, 100, **{"External id": 0})
        trace.call("cudaStreamSynchronize", 200, 290, **{"External id": 0})
        for none in (0, -1, None):
            trace.add("gpu_memcpy", PAGEABLE, 400, 401, pid=0, tid=7, correlation=none, bytes=1)
            trace.add("cuda_runtime", "cudaMemcpyAsync", 300, 301, correlation=none)
        assert get_only_site(trace.scan(tmp_path)).op_chain == []


class TestCallStacks:
    def test_call_stack_of_an_operator_gives_file_function_and_line(self, trace: Trace, tmp_path: Path) -> None:
        """Torch 1.8 to 1.11 store frames with the operator, innermost first, including those of the framework."""
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
    def test_empty_call_stack_counts_as_no_stack(self, empty: str, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::item", 0, 100, **{"Call stack": empty})
        trace.call("cudaStreamSynchronize", 10, 90)
        report = trace.scan(tmp_path)
        assert get_only_site(report).stack == []
        assert report.traces[0].coverage.stacks == "none"
        assert any("with_stack=True" in note for note in report.traces[0].coverage.notes)

    def test_empty_call_stack_does_not_hide_that_of_an_outer_operator(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::item", 0, 100, **{"Call stack": "run.py(9): main;"})
        trace.op("aten::_local_scalar_dense", 5, 95, **{"Call stack": ""})
        trace.call("cudaStreamSynchronize", 10, 90)
        assert get_only_site(trace.scan(tmp_path)).function == "main"


class TestHip:
    def test_hip_item_is_one_scalar_read_despite_its_copy_name(self, trace: Trace, tmp_path: Path) -> None:
        """In ROCm, `.item()` copies with hipMemcpyWithStream, which waits by itself; the copy may be named DtoD."""
        for t in (0, 1000):
            trace.op("aten::item", t, t + 100)
            trace.op("aten::_local_scalar_dense", t + 1, t + 99)
            trace.copy(
                "Memcpy DtoD (Device -> Device)", (t + 5, t + 90), (t + 80, t + 82), runtime="hipMemcpyWithStream"
            )
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.count, site.call, site.wait_us) == ("SYNC001", 2, "hipMemcpyWithStream", 170)

    def test_hip_copy_named_device_to_host_has_a_direction(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::copy_", 0, 100)
        trace.copy("CopyDeviceToHost", (5, 90), (80, 82), runtime="hipMemcpyWithStream", stream=0)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.kind, site.direction) == ("copy-to-host", "DtoH")

    def test_hip_asynchronous_copy_that_returns_after_a_kernel_blocks(self, trace: Trace, tmp_path: Path) -> None:
        """The kind of memory is unknown, but the call returned after a kernel had ended and the copy begun. Copies have
        their own stream.
        """
        trace.kernel(0, 5, 80)
        trace.copy("CopyDeviceToHost", (10, 90), (81, 82), runtime="hipMemcpyAsync", stream=0)
        assert get_only_site(trace.scan(tmp_path)).call == "hipMemcpyAsync"

    def test_hip_asynchronous_copy_that_returns_at_once_does_not_block(self, trace: Trace, tmp_path: Path) -> None:
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
    def test_hip_calls_have_the_rules_of_their_cuda_counterparts(
        self, name: str, rule: str, trace: Trace, tmp_path: Path
    ) -> None:
        trace.call(name, 0, 50)
        trace.op("aten::add", 90, 95)  # so that the call does not end the window
        assert get_only_site(trace.scan(tmp_path)).rule == rule


class TestXpu:
    def test_waits_of_the_xpu_runtime_are_found(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::item", 0, 100)
        trace.op("aten::_local_scalar_dense", 1, 99)
        trace.call("urEventWait", 10, 90, cat="xpu_runtime")
        trace.call("urEnqueueKernelLaunch", 100, 101, cat="xpu_runtime")
        report = trace.scan(tmp_path)
        assert get_only_site(report).rule == "SYNC001"
        assert report.traces[0].coverage.runtime_events == 4


class TestOtherAccelerators:
    """Test traces of accelerators for which it is unknown which calls wait."""

    @pytest.mark.parametrize(
        "category", ["mtia_runtime", "mtia_ccp_events", "hpu_op", "privateuse1_driver", "async_npu", "xla_op"]
    )
    def test_unknown_accelerator_is_named_and_the_trace_cannot_answer(self, category: str, tmp_path: Path) -> None:
        trace = Trace()
        trace.op("aten::add", 0, 10)
        trace.add(category, "run", 0, 10, correlation=1)
        report = trace.scan(tmp_path)
        (reason,) = compute_verdict(report, Gate(root=tmp_path)).reasons
        assert f"({category})" in reason
        assert "dcpbench syncs dry-run" in reason
        assert not any("ProfilerActivity.CUDA" in note for note in report.traces[0].coverage.notes)

    def test_runtime_without_known_calls_cannot_answer(self, tmp_path: Path) -> None:
        """The trace has kernels and calls, but it is unknown if musaStreamSynchronize waits."""
        trace = Trace()
        launch = trace.call("musaLaunchKernel", 0, 5, cat="privateuse1_runtime")
        trace.gpu("gemm", 10, 20, launch)
        trace.call("musaStreamSynchronize", 30, 90, cat="privateuse1_runtime")
        verdict = compute_verdict(trace.scan(tmp_path), Gate(root=tmp_path))
        assert verdict.exit_code == 3
        assert "musaLaunchKernel, musaStreamSynchronize" in verdict.reasons[0]

    def test_events_of_another_accelerator_do_not_change_the_verdict_with_cuda(
        self, trace: Trace, tmp_path: Path
    ) -> None:
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

    def test_driver_api_wait_in_an_operator_has_its_line(self, trace: Trace, tmp_path: Path) -> None:
        """No runtime call has the correlation of the wait. The field `tid` is the number of the stream plus a million."""
        trace.frame("lib.py(5): solve", 0, 100)
        trace.op("my::solve", 0, 100, **{"External id": 12})
        self.event(trace, "Stream Sync", 10, 90, 9001, 7, **{"External id": 12})
        site = get_only_site(trace.scan(tmp_path))
        assert (site.function, site.op, site.wait_us, site.call) == ("solve", "my::solve", 80, "Stream Sync")

    def test_wait_outside_any_operator_is_attributed_to_a_library(self, trace: Trace, tmp_path: Path) -> None:
        self.event(trace, "Stream Sync", 10, 90, 9001, 7, **{"External id": 9001})
        trace.op("aten::add", 100, 110)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.threads, site.may_block) == ("SYNC010", [], False)

    def test_wait_with_a_call_and_a_sync_event_is_counted_once(self, trace: Trace, tmp_path: Path) -> None:
        correlation = trace.call("cudaStreamSynchronize", 10, 90)
        self.event(trace, "Stream Sync", 11, 89, correlation, 7)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.call, site.count, site.wait_us) == ("cudaStreamSynchronize", 1, 80)

    @pytest.mark.parametrize("without", ["event", "call", "both"])
    def test_wait_with_a_call_and_a_sync_event_is_counted_once_without_ids(
        self, without: str, trace: Trace, tmp_path: Path
    ) -> None:
        """The 19 calls and 19 events are matched one to one by their times."""
        for n in range(19):
            correlation = trace.call("cudaStreamSynchronize", 100 * n, 100 * n + 90)
            if without != "event":
                del trace.events[-1]["args"]
            self.event(trace, "Stream Sync", 100 * n + 1, 100 * n + 89, correlation, 7)
            if without != "call":
                del trace.events[-1]["args"]
        site = get_only_site(trace.scan(tmp_path))
        assert (site.call, site.count) == ("cudaStreamSynchronize", 19)

    def test_sync_events_without_ids_go_to_the_calls_of_similar_length(self, trace: Trace, tmp_path: Path) -> None:
        """A short wait lies within a long one on another thread; its event comes first and is not that of the long one."""
        for tid, start, end in ((5, 20, 30), (6, 10, 90)):
            trace.call("cudaStreamSynchronize", start, end, tid=tid)
            trace.add("cuda_sync", "Stream Sync", start + 1, end - 1, pid=0, tid=7)
        assert sum(site.count for site in trace.scan(tmp_path).sites) == 2

    def test_second_sync_event_without_an_id_within_one_call_is_another_wait(
        self, trace: Trace, tmp_path: Path
    ) -> None:
        """The second event is that of a library on another thread."""
        trace.call("cudaStreamSynchronize", 0, 90)
        for start in (1, 40):
            trace.add("cuda_sync", "Stream Sync", start, start + 20, pid=0, tid=7)
        assert trace.scan(tmp_path).totals.syncs == 2

    @pytest.mark.parametrize("name", ["cudaStream\u00d3ynchronize", "INVALID", "cudaLaunchKernel"])
    def test_sync_event_with_a_call_of_another_name_is_counted(self, name: str, trace: Trace, tmp_path: Path) -> None:
        """The name of the call is damaged, unknown to the profiler, or of another process with the same id."""
        trace.frame("lib.py(5): solve", 0, 100)
        for n in range(19):
            self.event(trace, "Stream Sync", 5 * n + 1, 5 * n + 3, trace.call(name, 5 * n, 5 * n + 4), 7)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.count, site.function) == (19, "solve")

    def test_event_and_stream_queries_are_no_waits(self, trace: Trace, tmp_path: Path) -> None:
        """CUPTI writes the same events for cudaEventQuery and cudaStreamQuery as for a synchronisation."""
        for name, kind in (("cudaEventQuery", "Event Sync"), ("cudaStreamQuery", "Stream Sync")):
            self.event(trace, kind, 11, 12, trace.call(name, 10, 13), -1)
        assert trace.scan(tmp_path).sites == []

    def test_short_sync_event_without_a_call_may_block(self, trace: Trace, tmp_path: Path) -> None:
        """A query of the driver leaves the same event, but takes only a few microseconds."""
        self.event(trace, "Event Sync", 10, 12, 9001, -1)
        self.event(trace, "Event Sync", 100, 900, 9002, -1)
        report = trace.scan(tmp_path)
        assert sorted((s.wait_us, s.may_block) for s in report.sites) == [(2, True), (800, False)]
        assert all(render_report(report, form, root=tmp_path) is not None for form in FORMATS)
        assert msgspec.json.decode(encode_json(report), type=Report).sites == report.sites

    def test_stream_wait_event_is_no_wait_of_the_host(self, trace: Trace, tmp_path: Path) -> None:
        self.event(trace, "Stream Wait Event", 10, 90, trace.call("cudaStreamWaitEvent", 10, 11), 7)
        self.event(trace, "Stream Wait Event", 10, 90, 9001, 7)
        assert trace.scan(tmp_path).sites == []


class TestCopies:
    def test_copy_to_pageable_memory_waits_by_itself(self, trace: Trace, tmp_path: Path) -> None:
        """After `.to("cpu", non_blocking=True)`, no synchronisation follows."""
        trace.op("aten::copy_", 0, 100)
        trace.copy(PAGEABLE, (10, 90), (80, 85))
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.may_block, site.wait_us, site.call) == ("SYNC005", False, 80, "cudaMemcpyAsync")

    def test_copy_to_pinned_memory_does_not_wait(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::copy_", 0, 100)
        trace.copy(PINNED, (10, 14), (80, 85))
        assert trace.scan(tmp_path).sites == []

    def test_later_event_synchronisation_is_not_attributed_to_the_copy(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::copy_", 0, 20)
        trace.copy(PINNED, (10, 14), (80, 85))
        trace.call("cudaEventRecord", 22, 23)
        trace.call("cudaEventSynchronize", 25, 90)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.direction, site.bytes) == ("SYNC007", "", None)

    def test_small_copy_from_pageable_memory_may_block(self, trace: Trace, tmp_path: Path) -> None:
        """The call returns before the copy begins, although the GPU is busy: CUDA staged the data at once."""
        trace.kernel(0, 2, 80)
        trace.op("aten::copy_", 5, 20)
        trace.copy(TO_GPU, (10, 14), (81, 82), size=4096)
        report = trace.scan(tmp_path)
        assert get_only_site(report).may_block
        assert report.totals.syncs == 0

    def test_large_copy_that_waits_for_the_gpu_blocks(self, trace: Trace, tmp_path: Path) -> None:
        trace.kernel(0, 2, 80)
        trace.op("aten::copy_", 5, 100)
        trace.copy(TO_GPU, (10, 95), (81, 110), size=4 * MIB)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.may_block, site.direction) == ("SYNC005", False, "HtoD pageable")

    def test_work_of_another_stream_does_not_block_a_copy(self, trace: Trace, tmp_path: Path) -> None:
        """The call takes long because the host copies 4 MiB; stream 8, busy all the time, is unrelated."""
        trace.kernel(0, 2, 500, stream=8)
        trace.op("aten::copy_", 5, 200)
        trace.copy(TO_GPU, (10, 190), (60, 195), size=4 * MIB)
        assert get_only_site(trace.scan(tmp_path)).may_block

    def test_copy_and_the_following_wait_are_one_synchronisation(self, trace: Trace, tmp_path: Path) -> None:
        """Driver queries of torch in between change nothing."""
        trace.op("aten::copy_", 0, 100)
        trace.copy(TO_GPU, (10, 14), (30, 31))
        trace.call("cudaStreamIsCapturing", 15, 16)
        trace.call("cudaStreamGetCaptureInfo_v2", 17, 18)
        trace.call("cudaStreamSynchronize", 20, 40)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.count, site.direction, site.wait_us) == ("SYNC004", 1, "HtoD pageable", 4 + 20)

    @pytest.mark.parametrize(
        ("within", "gap_us", "merged"), [(True, 500, True), (False, 49, True), (False, 50, False), (False, 500, False)]
    )
    def test_wait_is_merged_with_a_copy_in_its_operator_or_within_50_us(
        self, within: bool, gap_us: int, merged: bool, trace: Trace, tmp_path: Path
    ) -> None:
        """The operator is the first of the trace; outside of operators, a larger gap means two separate calls."""
        if within:
            trace.op("aten::copy_", 0, 1000)
        trace.copy(PAGEABLE, (10, 15), (11, 12))
        trace.call("cudaStreamSynchronize", 15 + gap_us, 20 + gap_us)
        if not within:
            trace.op("aten::add", 2000, 2001)
        assert sorted(s.rule for s in trace.scan(tmp_path).sites) == (["SYNC003"] if merged else ["SYNC005", "SYNC006"])

    def test_wait_in_another_operator_than_the_copy_is_separate(self, trace: Trace, tmp_path: Path) -> None:
        trace.op("aten::copy_", 0, 20)
        trace.copy(PAGEABLE, (10, 15), (11, 12))
        trace.op("my::wait", 20, 100)
        trace.call("cudaStreamSynchronize", 21, 90)
        assert sorted(s.rule for s in trace.scan(tmp_path).sites) == ["SYNC005", "SYNC006"]

    def test_wait_after_a_device_to_device_copy_is_a_device_sync(self, trace: Trace, tmp_path: Path) -> None:
        """In `b.copy_(a); torch.cuda.synchronize()`, the host does not wait for the copy itself."""
        trace.copy("Memcpy DtoD (Device -> Device)", (10, 14), (30, 31))
        trace.call("cudaDeviceSynchronize", 16, 40)
        trace.op("aten::add", 50, 51)
        site = get_only_site(trace.scan(tmp_path))
        assert site.rule == "SYNC008"

    def test_device_to_device_copy_does_not_wait(self, trace: Trace, tmp_path: Path) -> None:
        trace.copy("Memcpy DtoD (Device -> Device)", (10, 14), (30, 31), runtime="cudaMemcpy")
        assert trace.scan(tmp_path).sites == []


class TestMemory:
    def test_free_blocks_and_pinning_may_block(self, trace: Trace, tmp_path: Path) -> None:
        trace.call("cudaFree", 10, 90)
        trace.call("cudaHostAlloc", 100, 190)
        trace.call("cudaMalloc", 200, 210)
        trace.call("cudaFreeAsync", 220, 221)
        sites = {s.call: (s.rule, s.may_block) for s in trace.scan(tmp_path).sites}
        assert sites == {"cudaFree": ("SYNC009", False), "cudaHostAlloc": ("SYNC009", True)}


class TestGraphs:
    def test_graph_replay_with_copies_is_no_wait(self, trace: Trace, tmp_path: Path) -> None:
        """The kernels and copies of a replay share the correlation of cudaGraphLaunch."""
        graph = trace.call("cudaGraphLaunch", 10, 20)
        trace.gpu("node", 30, 40, graph)
        trace.gpu(PAGEABLE, 41, 42, graph, cat="gpu_memcpy", bytes=8)
        assert trace.scan(tmp_path).sites == []


class TestOwn:
    def test_final_wait_of_the_profiler_is_recognised_without_a_stack(self, trace: Trace, tmp_path: Path) -> None:
        """The program's own wait comes before it, also after the last work."""
        trace.call("cudaDeviceSynchronize", 100, 110)
        trace.call("cudaDeviceSynchronize", 200, 210)
        report = trace.scan(tmp_path)
        assert sorted((s.example.ts, s.own) for s in report.sites if s.example) == [(100, False), (200, True)]

    @pytest.mark.parametrize("end", [210.5, 1e6], ids=["still open", "ends beyond the trace"])
    def test_open_profiler_step_does_not_hide_the_final_wait_of_the_profiler(
        self, end: float, trace: Trace, tmp_path: Path
    ) -> None:
        """The profiler was stopped within a step: the range ends with the window, or later."""
        trace.range("ProfilerStep#4", -2000, 50)
        trace.range("ProfilerStep#5", 50, end)
        trace.op("aten::add", 60, 70)
        trace.call("cudaDeviceSynchronize", 200, 210)
        report = trace.scan(tmp_path)
        assert get_only_site(report).own
        assert compute_exit_code(report, tmp_path) == 0

    def test_open_profiler_step_as_operator_does_not_hide_the_final_wait(self, trace: Trace, tmp_path: Path) -> None:
        """In torch 1.8, the range is an operator, and contains the call."""
        trace.op("ProfilerStep#5", 50, 1e6)
        trace.op("aten::add", 60, 70)
        trace.call("cudaDeviceSynchronize", 200, 210)
        report = trace.scan(tmp_path)
        assert get_only_site(report).own
        assert compute_exit_code(report, tmp_path) == 0

    def test_wait_of_the_program_in_an_open_profiler_step_is_a_finding(self, trace: Trace, tmp_path: Path) -> None:
        trace.range("ProfilerStep#5", 50, 1e6)
        trace.call("cudaDeviceSynchronize", 100, 110)
        trace.call("cudaDeviceSynchronize", 200, 210)
        report = trace.scan(tmp_path)
        assert sorted((s.example.ts, s.own) for s in report.sites if s.example) == [(100, False), (200, True)]
        assert compute_exit_code(report, tmp_path) == 1

    @pytest.mark.parametrize("name", ["ProfilerStep#5", "decode_step"])
    def test_last_wait_in_a_closed_range_is_that_of_the_program(self, name: str, trace: Trace, tmp_path: Path) -> None:
        """An event follows the range; or the range is not that of the profiler, and a program may end with it."""
        trace.range(name, 50, 220)
        trace.call("cudaDeviceSynchronize", 200, 210)
        if name.startswith("Profiler"):
            trace.call("cudaEventRecord", 230, 231)
        assert not get_only_site(trace.scan(tmp_path)).own

    def test_wait_within_a_user_frame_is_that_of_the_user(self, trace: Trace, tmp_path: Path) -> None:
        trace.frame("train.py(1): main", 0, 300)
        trace.frame("torch/cuda/__init__.py(9): synchronize", 99, 111)
        trace.call("cudaDeviceSynchronize", 100, 110)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.own, site.function, site.explicit) == (False, "main", True)

    def test_wait_within_a_profiler_frame_is_that_of_the_profiler(self, trace: Trace, tmp_path: Path) -> None:
        trace.frame("train.py(1): main", 0, 300)
        trace.frame("torch/profiler/profiler.py(9): step", 99, 111)
        trace.call("cudaDeviceSynchronize", 100, 110)
        trace.op("aten::add", 200, 210)
        assert get_only_site(trace.scan(tmp_path)).own

    def test_wait_in_a_user_handler_of_the_profiler_is_that_of_the_user(self, trace: Trace, tmp_path: Path) -> None:
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
    def test_rank_is_read_from_the_file_name(self, name: str, rank: int | None, trace: Trace, tmp_path: Path) -> None:
        assert trace.scan(tmp_path, name).traces[0].rank == rank

    def test_rank_in_the_trace_takes_precedence_over_the_file_name(self, trace: Trace, tmp_path: Path) -> None:
        trace.top["distributedInfo"] = {"backend": "nccl", "rank": 6, "world_size": 8, "pg_config": [{"ranks": [0]}]}
        assert trace.scan(tmp_path, "rank3.json").traces[0].rank == 6

    def test_count_per_step_is_that_of_the_slowest_rank(self, tmp_path: Path) -> None:
        """Rank 0 waits once per step and rank 1 twice: three waits in all, two per step."""
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
    def test_wait_kind_ignores_the_version_of_a_call(self, call: str, kind: str | None) -> None:
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
    def test_direction_is_parsed_from_the_name_of_a_copy(self, name: str, direction: str) -> None:
        assert parse_direction(name) == direction


def test_item_of_a_host_tensor_is_no_synchronisation(trace: Trace, tmp_path: Path) -> None:
    """The table of operators explains recorded waits and never reports one by itself."""
    for t in range(0, 1000, 10):
        trace.op("aten::item", t, t + 5)
        trace.op("aten::_local_scalar_dense", t + 1, t + 4)
    trace.op("aten::nonzero", 1000, 1100)
    assert select_counted(trace.scan(tmp_path)) == []


@pytest.mark.parametrize(("ends", "kept"), [(1000.0, False), (999.0, True)])
def test_profiler_step_that_ends_after_all_other_events_is_left_out(ends: float, kept: bool, tmp_path: Path) -> None:
    """Python frames, which are closed even later, do not count; a kernel ends at 999.5."""
    trace = Trace()
    trace.range("ProfilerStep#0", 0, ends)
    trace.kernel(10, 900, 999.5)
    trace.frame("a.py(1): f", 0, 2000)
    (tmp_path / "t.json").write_text(trace.text())
    reader = TraceReader(tmp_path / "t.json")
    columns = read_columns(reader.read_blocks(), reader.problems)
    step = np.array([name.startswith("ProfilerStep") for name in columns.names])
    assert bool(len(scan_module._select_closed_ranges(columns, step))) is kept
