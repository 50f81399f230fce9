"""Test sites: their description, their cause and caller, and the merging of the same site of two ranks."""

from __future__ import annotations

import copy
import html
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dcpbench.syncs import recorded, site_text, sites
from dcpbench.syncs.formats import FORMATS, render_report
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.python_frames import Frame
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.sites import Sync, group_into_sites, merge_sites
from dcpbench.syncs.sync_report import Example
from dcpbench.syncs.traces import blocking
from tests.unit import syncs_builder as build
from tests.unit.trace_builder import PAGEABLE, PINNED, TO_GPU, Trace, compute_exit_code, get_only_site, select_counted

if TYPE_CHECKING:
    from dcpbench.syncs.sync_report import Report, Site

NOWHERE = Path("/nonexistent")


@pytest.fixture
def trace() -> Trace:
    """Return a trace of two kernels, long before the events that a test adds."""
    return Trace().work()


def merge(*changes: dict[str, Any]) -> Site:
    """Return the merged site of two ranks."""
    (site,) = merge_sites([[build.make_site(**change)] for change in changes])
    return site


class TestTwoRanks:
    def test_merged_counts_waits_bubbles_and_bytes_are_sums(self) -> None:
        """The sums are 10 + 4 calls, 420 + 80 µs of wait, 300 + 20 µs of bubble, 10 + 4 bytes, and 10 + 3 calls that
        waited.
        """
        site = merge({"waited": 10}, {"count": 4, "wait_us": 80.0, "bubble_us": 20.0, "bytes": 4, "waited": 3})
        assert (site.count, site.wait_us, site.bubble_us, site.bytes, site.waited) == (14, 500.0, 320.0, 14, 13)

    @pytest.mark.parametrize("unknown", [0, 1])
    def test_unknown_value_of_one_rank_is_taken_from_the_other(self, unknown: int) -> None:
        ranks: list[dict[str, Any]] = [{}, {}]
        ranks[unknown] = {"wait_us": None, "bubble_us": None, "bytes": None, "count_per_step": None}
        site = merge(*ranks)
        assert (site.wait_us, site.bubble_us, site.bytes, site.count_per_step) == (420.0, 300.0, 10, 1.0)

    @pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)], ids=str)
    def test_occurrences_in_a_trace_without_steps_are_outside_of_the_steps_of_others(
        self, order: tuple[int, ...]
    ) -> None:
        """Scan three traces, two without steps: their 30 and 12 occurrences exceed the 4 outside of the steps of the other one."""
        ranks: list[dict[str, Any]] = [
            {"outside": 4},
            {"count_per_step": None, "count": 30},
            {"count_per_step": None, "count": 12},
        ]
        site = merge(*(ranks[n] for n in order))
        assert (site.count_per_step, site.outside) == (1.0, 42)
        assert merge(*ranks[1:]).outside == 0

    def test_merged_number_of_waits_is_unknown_if_one_rank_lacks_it(self) -> None:
        """Otherwise, it would be a share of the calls of both ranks."""
        assert merge({"waited": 3}, {"waited": None}).waited is None
        assert merge({"waited": None}, {"waited": 3}).waited is None

    @pytest.mark.parametrize(("a", "b"), [(3.0, 2.0), (2.0, 3.0)])
    def test_merged_count_per_step_is_that_of_the_worst_rank(self, a: float, b: float) -> None:
        """A step is as slow as its slowest rank: three per step exceed a limit of two."""
        site = merge({"count_per_step": a}, {"count_per_step": b})
        assert site.count_per_step == 3.0
        assert compute_verdict(build.make_report(site), Gate(root=NOWHERE, max_per_step=2.0)).exit_code == 1

    @pytest.mark.parametrize("first", [0, 1])
    def test_rank_without_phases_counts_towards_a_limit(self, first: int) -> None:
        """One rank waits once or twice per phase, and the other, with steps of unknown phase, five times per step."""
        ranks = [{"count_per_step": 2.0, "count_per_phase": {"decode": 1.0, "prefill": 2.0}}, {"count_per_step": 5.0}]
        site = merge(ranks[first], ranks[1 - first])
        assert compute_verdict(build.make_report(site), Gate(root=NOWHERE, max_per_step=4.0)).exit_code == 1
        assert merge(ranks[0], {"count_per_step": None}).count_per_phase == {"decode": 1.0, "prefill": 2.0}

    @pytest.mark.parametrize(("a", "b"), [(9.0, 7.0), (7.0, 9.0)])
    def test_merged_wait_percentiles_are_those_of_the_worst_rank(self, a: float, b: float) -> None:
        site = merge({"wait_median_us": a, "wait_p99_us": 2 * a}, {"wait_median_us": b, "wait_p99_us": 2 * b})
        assert (site.wait_median_us, site.wait_p99_us) == (9.0, 18.0)

    @pytest.mark.parametrize(("a", "b", "expected"), [(True, False, False), (False, True, False), (True, True, True)])
    def test_merged_flags_require_both_ranks(self, a: bool, b: bool, expected: bool) -> None:
        assert merge({"explicit": a}, {"explicit": b}).explicit is expected
        assert merge({"warmup_only": a}, {"warmup_only": b}).warmup_only is expected

    @pytest.mark.parametrize("first", [0, 1])
    def test_merged_worst_example_has_the_larger_bubble(self, first: int) -> None:
        worst = [Example(trace="r0", bubble_us=5.0, wait_us=1.0), Example(trace="r1", bubble_us=2.0, wait_us=9.0)]
        site = merge({"worst": worst[first]}, {"worst": worst[1 - first]})
        assert site.worst == worst[0]

    def test_merging_a_trace_with_itself_doubles_the_sums(self, trace: Trace, tmp_path: Path) -> None:
        """The same file of two ranks doubles every sum and changes nothing else."""
        trace.item(100, 150)
        trace.kernel(170, 175, 300)
        single = get_only_site(trace.scan(tmp_path, "rank0.json"))
        (tmp_path / "rank1.json").write_text(trace.text())
        site = get_only_site(scan_traces([tmp_path / "rank0.json", tmp_path / "rank1.json"], root=tmp_path))
        for name in ("count", "wait_us", "bubble_us", "bytes", "waited"):
            assert getattr(site, name) == 2 * getattr(single, name) > 0, name
        assert site.wait_median_us == single.wait_median_us


class TestRules:
    def test_innermost_operator_determines_the_rule(self, trace: Trace, tmp_path: Path) -> None:
        """No copy is recorded: `item` within a custom operator is a read, and a wait of a custom operator within `item`
        is a wait.
        """
        trace.op("my::sample", 0, 100)
        trace.op("aten::item", 5, 95)
        trace.call("cudaStreamSynchronize", 10, 90)
        trace.op("aten::item", 1000, 1100)
        trace.op("my::wait", 1005, 1095)
        trace.call("cudaStreamSynchronize", 1010, 1090)
        rules = {tuple(s.op_chain): s.kind for s in trace.scan(tmp_path).sites}
        assert rules == {("my::sample", "aten::item"): "scalar-read", ("aten::item", "my::wait"): "stream-sync"}

    @pytest.mark.parametrize("runtime", ["cuda", "hip"])
    @pytest.mark.parametrize("call", ["EventSynchronize", "DeviceSynchronize", "StreamSynchronize"])
    def test_wait_before_a_timer_is_read_is_timing(self, runtime: str, call: str, trace: Trace, tmp_path: Path) -> None:
        """The method `elapsed_time()` queries both events first."""
        trace.call(f"{runtime}{call}", 10, 90)
        for start in (91, 92):
            trace.call(f"{runtime}EventQuery", start, start + 0.5)
        trace.call(f"{runtime}EventElapsedTime", 93, 94)
        trace.op("aten::add", 100, 101)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.rule, site.kind) == ("SYNC012", "timing")

    def test_wait_before_other_work_or_on_another_thread_is_not_timing(self, trace: Trace, tmp_path: Path) -> None:
        trace.call("cudaDeviceSynchronize", 10, 90)
        trace.kernel(91, 95, 99)
        trace.call("cudaEventElapsedTime", 93, 94)
        trace.call("cudaDeviceSynchronize", 110, 190, tid=7)
        trace.call("cudaEventElapsedTime", 193, 194)
        trace.op("aten::add", 200, 201)
        assert {s.kind for s in trace.scan(tmp_path).sites} == {"device-sync"}

    def test_timing_has_its_own_advice(self, trace: Trace, tmp_path: Path) -> None:
        trace.call("cudaEventSynchronize", 10, 90)
        trace.call("cudaEventElapsedTime", 93, 94)
        report = trace.scan(tmp_path)
        text = render_report(report, "table", root=tmp_path)
        assert "SYNC012 timing" in text
        assert "Keep the events of several steps and read them once all steps are done" in " ".join(text.split())

    def test_wait_for_a_copy_of_unknown_direction_is_a_blocking_copy(self, trace: Trace, tmp_path: Path) -> None:
        """The GPU side of the copy is not recorded. A wait for the whole device stays a device-sync."""
        trace.op("aten::to", 0, 100)
        trace.call("cudaMemcpyAsync", 5, 10)
        trace.call("cudaStreamSynchronize", 12, 90)
        trace.op("aten::to", 1000, 1100)
        trace.call("cudaMemcpyAsync", 1005, 1010)
        trace.call("cudaDeviceSynchronize", 1012, 1090)
        assert {s.call: s.kind for s in trace.scan(tmp_path).sites} == {
            "cudaStreamSynchronize": "blocking-copy",
            "cudaDeviceSynchronize": "device-sync",
        }

    def test_copy_in_the_first_row_of_gpu_work_is_found(self, tmp_path: Path) -> None:
        """Row 0 is valid, so that direction and memory are known."""
        trace = Trace()
        trace.op("aten::copy_", 0, 100)
        trace.copy(PAGEABLE, (10, 90), (80, 85), size=64)
        trace.kernel(200, 210, 220)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.kind, site.direction, site.bytes) == ("pageable-copy", "DtoH pageable", 64)


class TestExplicit:
    def test_wait_without_a_stack_is_not_explicit(self, trace: Trace, tmp_path: Path) -> None:
        trace.call("cudaDeviceSynchronize", 10, 90)
        trace.op("aten::add", 100, 101)
        assert not get_only_site(trace.scan(tmp_path)).explicit

    @pytest.mark.parametrize(("function", "explicit"), [("synchronize", True), ("wait_for_all", False)])
    def test_wait_is_explicit_if_its_stack_has_synchronize(
        self, function: str, explicit: bool, trace: Trace, tmp_path: Path
    ) -> None:
        trace.frame("train.py(1): main", 0, 300)
        trace.frame(f"torch/cuda/__init__.py(9): {function}", 9, 91)
        trace.call("cudaDeviceSynchronize", 10, 90)
        trace.op("aten::add", 100, 101)
        assert get_only_site(trace.scan(tmp_path)).explicit is explicit


class TestWaited:
    def report(self, trace: Trace, folder: Path) -> Report:
        """Scan a trace with a kernel that ends during the first of three waits."""
        trace.kernel(0, 5, 80)
        for start, end in ((10, 85), (100, 102), (110, 112)):
            trace.call("cudaStreamSynchronize", start, end)
        return trace.scan(folder)

    def test_sentence_has_the_number_of_calls_that_waited(self, trace: Trace, tmp_path: Path) -> None:
        site = get_only_site(self.report(trace, tmp_path))
        assert (site.count, site.waited) == (3, 1)
        assert "3 in all (1 of 3 waited)" in site_text.format_sentence(site)

    def test_sentence_has_thousands_separators_and_omits_waited_if_all_did(self) -> None:
        assert "1,360 in all (550 of 1,360 waited)" in site_text.format_sentence(
            build.make_site(count=1360, waited=550)
        )
        assert "waited" not in site_text.format_sentence(build.make_site(count=10, waited=10))
        assert "waited" not in site_text.format_sentence(build.make_site(count=10, waited=None))

    @pytest.mark.parametrize("form", FORMATS)
    def test_every_format_shows_the_number_of_calls_that_waited(self, form: str, trace: Trace, tmp_path: Path) -> None:
        report = self.report(trace, tmp_path)
        report.verdict = compute_verdict(report, Gate(root=tmp_path))
        text = render_report(report, form, root=tmp_path)
        assert re.search(r'1 waited|1 of 3 waited|"waited": 1', text)

    def test_number_of_waits_is_unknown_without_gpu_events(self, tmp_path: Path) -> None:
        trace = Trace()
        trace.call("cudaStreamSynchronize", 10, 85)
        assert get_only_site(trace.scan(tmp_path)).waited is None


class TestWaitedFor:
    def test_waited_for_is_the_last_kernel_that_ended_during_the_call(self, tmp_path: Path) -> None:
        """A kernel that ended before or after the call does not count, nor does a copy if there is a kernel."""
        trace = Trace()
        for n, (name, end) in enumerate({"before": 9, "first": 50, "last": 80, "after": 95}.items()):
            trace.gpu(name, end - 1, end, trace.call("cudaLaunchKernel", n, n + 1))
        trace.gpu(PINNED, 82, 83, trace.call("cudaMemcpyAsync", 8, 9), cat="gpu_memcpy")
        trace.call("cudaEventSynchronize", 10, 90)
        site = get_only_site(trace.scan(tmp_path))
        assert site.example is not None
        assert site.example.waited_for == "last"

    def test_short_call_during_which_nothing_ended_did_not_wait(self, trace: Trace, tmp_path: Path) -> None:
        """A long call must have waited for something that was not recorded."""
        trace.call("cudaEventSynchronize", 10, 14)
        trace.call("cudaEventSynchronize", 100, 190)
        site = get_only_site(trace.scan(tmp_path))
        assert site.example is not None
        assert (site.example.waited_for, site.count, site.waited) == ("", 2, 1)

    def test_waited_for_is_searched_among_the_last_64_events(self, trace: Trace, tmp_path: Path) -> None:
        """A kernel before 64 copies is not found; before 63 it is."""
        for start, copies in ((0, 63), (1000, 64)):
            trace.gpu("gemm", start + 10, start + 11, trace.call("cudaLaunchKernel", start, start + 1))
            for n in range(copies):
                trace.gpu(TO_GPU, start + 12 + n, start + 12.5 + n, 10_000 + start + n, cat="gpu_memcpy")
            trace.op(f"my::op{copies}", start + 4, start + 96)
            trace.call("cudaEventSynchronize", start + 5, start + 95)
        names = {s.op: s.example.waited_for for s in trace.scan(tmp_path).sites if s.example}
        assert names == {"my::op63": "gemm", "my::op64": TO_GPU}


class TestCalledFrom:
    """Test the caller of a site; `numpy` stands for any installed package."""

    def site(self, trace: Trace, folder: Path, *frames: str) -> Site:
        for n, frame in enumerate(frames):
            trace.frame(frame, n, 300 - n)
        trace.item(100, 150)
        return get_only_site(trace.scan(folder))

    @pytest.mark.parametrize(
        "library", ["numpy/core/generate.py(7): sample", "/opt/v/lib/python3.11/site-packages/gen/g.py(7): sample"]
    )
    def test_site_in_a_library_names_the_calling_line_of_user_code(
        self, library: str, trace: Trace, tmp_path: Path
    ) -> None:
        """The caller is the innermost such line, past libraries in between, torch and Python's own modules."""
        site = self.site(
            trace,
            tmp_path,
            "run.py(3): <module>",
            "app/serve.py(40): step",
            "numpy/hub/hook.py(5): forward",
            "contextlib.py(9): inner",
            "torch/nn/modules/module.py(8): _call_impl",
            library,
        )
        assert site.function == "sample"
        assert site.called_from == "app/serve.py(40): step"
        assert "called from app/serve.py(40): step" in site_text.format_sentence(site)

    def test_site_in_user_code_has_no_caller(self, trace: Trace, tmp_path: Path) -> None:
        site = self.site(trace, tmp_path, "run.py(3): <module>", "app/serve.py(40): step")
        assert (site.function, site.called_from) == ("step", "")

    def test_caller_is_in_another_package_without_user_code(self, trace: Trace, tmp_path: Path) -> None:
        """A process of an engine has frames of packages only: SGLang calls FlashInfer, through torch and Python."""
        site = self.site(
            trace,
            tmp_path,
            "threading.py(1030): _bootstrap",
            "sglang/srt/model_executor/model_runner.py(9): forward",
            "sglang/srt/layers/attention/flashinfer_mla_backend.py(883): call_begin_forward",
            "torch/nn/modules/module.py(8): _call_impl",
            "contextlib.py(9): inner",
            "flashinfer/api_logging.py(5): wrapper",
            "flashinfer/mla/_core.py(1565): plan",
        )
        assert site.function == "plan"
        assert site.called_from == "sglang/srt/layers/attention/flashinfer_mla_backend.py(883): call_begin_forward"

    def test_site_in_the_engine_itself_has_no_caller(self, trace: Trace, tmp_path: Path) -> None:
        site = self.site(
            trace, tmp_path, "vllm/v1/engine/core.py(3): run", "vllm/v1/worker/gpu_model_runner.py(307): get_output"
        )
        assert (site.function, site.called_from) == ("get_output", "")

    def test_package_inside_the_repository_is_user_code(self, trace: Trace, tmp_path: Path) -> None:
        (tmp_path / "numpy").mkdir()
        (tmp_path / "numpy" / "gen.py").touch()
        assert self.site(trace, tmp_path, "run.py(3): <module>", "numpy/gen.py(7): sample").called_from == ""

    @pytest.mark.parametrize("form", FORMATS)
    def test_every_format_shows_the_caller_and_the_fingerprint_ignores_it(
        self, form: str, trace: Trace, tmp_path: Path
    ) -> None:
        other = copy.deepcopy(trace)
        site = self.site(trace, tmp_path, "run.py(3): main", "numpy/gen.py(7): sample")
        assert site.fingerprint == self.site(other, tmp_path, "app.py(4): go", "numpy/gen.py(7): sample").fingerprint
        report = trace.scan(tmp_path)
        report.verdict = compute_verdict(report, Gate(root=tmp_path))
        text = html.unescape(render_report(report, form, root=tmp_path))
        assert re.search(r'called.?from(?:": ")? ?(?:<code>)?run\.py\(3\): main', text, re.IGNORECASE)

    def test_live_detection_and_dry_run_name_the_caller(self) -> None:
        """The caller has the line of the call; frames of torch are no callers."""
        library = Frame("/opt/v/lib/python3.11/site-packages/gen/g.py", 7, "sample")
        torch = Frame("/opt/v/lib/python3.11/site-packages/torch/nn/m.py", 8, "_call_impl")
        own_frame = Frame("/srv/app/serve.py", 41, "step")
        (site,) = group_into_sites(
            [Sync(rule="SYNC001", frames=(own_frame, torch, library), user=library)], root=Path("/srv"), trace="t"
        )
        assert site.called_from == "app/serve.py(41): step"
        (site,) = group_into_sites([Sync(rule="SYNC001", frames=(own_frame, torch), user=own_frame)], root=Path("/srv"))
        assert site.called_from == ""


class TestFrees:
    @staticmethod
    def freed(trace: Trace, frees: int, allocations: int, runtime: str = "cuda") -> None:
        for n in range(max(frees, allocations)):
            if n < allocations:
                trace.call(f"{runtime}Malloc", 10 * n, 10 * n + 2)
            if n < frees:
                trace.call(f"{runtime}Free", 10 * n + 4, 10 * n + 8)

    @pytest.mark.parametrize("runtime", ["cuda", "hip"])
    def test_frees_and_allocations_in_pairs_have_the_disabled_allocator_as_cause(
        self, runtime: str, trace: Trace, tmp_path: Path
    ) -> None:
        """Each tensor is allocated and freed, 40 times."""
        self.freed(trace, 40, 40, runtime)
        report = trace.scan(tmp_path)
        site = get_only_site(report)
        assert site.cause.startswith("40 frees and 40 allocations in one trace: PyTorch's caching allocator is off")
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in site.cause
        assert compute_exit_code(report, tmp_path) == 1
        for form in FORMATS:
            report.verdict = compute_verdict(report, Gate(root=tmp_path))
            text = render_report(report, form, root=tmp_path).replace("\\", "").replace("\n", " ")
            assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in " ".join(text.split()), form

    @pytest.mark.parametrize(("frees", "allocations"), [(3, 3), (40, 2)], ids=["few", "empty_cache"])
    def test_few_frees_or_those_of_empty_cache_have_no_cause(
        self, frees: int, allocations: int, trace: Trace, tmp_path: Path
    ) -> None:
        self.freed(trace, frees, allocations)
        assert [s.cause for s in select_counted(trace.scan(tmp_path))] == [""]


@pytest.mark.parametrize(("line", "shown"), [(1, [1, 2, 3]), (4, [2, 3, 4, 5, 6]), (7, [5, 6, 7])])
def test_source_excerpt_has_two_lines_on_either_side(line: int, shown: list[int], tmp_path: Path) -> None:
    """The file has seven lines."""
    file = tmp_path / "seven.py"
    file.write_text("".join(f"line_{n}()\n" for n in range(1, 8)))
    sync = SimpleNamespace(line=line, file=str(file))
    assert sites._format_source(sync) == [f"{'>' if n == line else ' '} {n:5d} | line_{n}()" for n in shown]  # type: ignore[arg-type]


def test_recorded_site_without_steps_and_known_wait_has_zeros() -> None:
    """An unknown bubble stays unknown; of a known one, the mean is kept."""
    site = build.make_site(count_per_step=None, wait_median_us=None, bubble_us=None, count=4)
    (found,) = recorded.build_sync_sites([site], "replay")
    assert (found.per_step, found.wait_us, found.bubble_us) == (0.0, 0.0, None)
    priced = build.make_site(count_per_step=2.0, wait_median_us=30.0, bubble_us=100.0, count=4)
    (found,) = recorded.build_sync_sites([priced], "replay")
    assert (found.per_step, found.wait_us, found.bubble_us) == (2.0, 30.0, 25.0)


def test_external_id_that_equals_the_correlation_is_ignored() -> None:
    events = SimpleNamespace(external=np.array([3, 4, -1]), correlation=np.array([3, 9, 5]))
    assert blocking._get_external_ids(events).tolist() == [-1, 4, -1]  # type: ignore[arg-type]


def test_copy_as_the_first_gpu_event_has_its_size(tmp_path: Path) -> None:
    trace = Trace()
    trace.op("aten::copy_", 10, 40)
    trace.copy(PAGEABLE, (12, 38), (15, 30), size=4096)
    (site,) = trace.scan(tmp_path).sites
    assert site.example is not None
    assert site.bytes == 4096


@pytest.mark.parametrize("recorded_waits", [True, False])
def test_trace_without_sync_events_has_a_note_on_recording_them(recorded_waits: bool, tmp_path: Path) -> None:
    trace = Trace().work()
    trace.call("cudaStreamSynchronize", 20, 105)
    if recorded_waits:
        trace.add("cuda_sync", "Stream Synchronize", 20, 105, pid=0, tid=7, correlation=99, stream=7)
    (summary,) = trace.scan(tmp_path).traces
    assert any(note.startswith("No cuda_sync events: ") for note in summary.coverage.notes) is not recorded_waits
