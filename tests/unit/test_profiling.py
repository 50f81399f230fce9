"""Profiled passes of hand-made traces: phases of each microsecond, and host calls that wait."""

import itertools
import random
import tempfile
from pathlib import Path

import msgspec
import pytest

from dcpbench.measuring import profiling
from dcpbench.measuring.profiling import _match_phases, _split_time, profile_cpu_step, profile_step
from dcpbench.measuring.ranges import record_range
from dcpbench.records.record import Phases, SyncSite
from dcpbench.syncs.recorded import build_sync_sites


class TraceBuilder:
    """Builds a Kineto trace event by event; times in microseconds, host thread 1."""

    def __init__(self):
        self.events = []
        self.correlations = itertools.count(1)

    def host(self, name, start, end, cat="user_annotation", tid=1, **args):
        """Add a range, or a call with cat cuda_runtime."""
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}
        )
        return self

    def step(self, start, end):
        """Add the range of a step."""
        return self.host(profiling.STEP_RANGE, start, end)

    def gpu(self, name, launched, start, end, *, cat="kernel", call="cudaLaunchKernel", tid=1):
        """Add GPU work from `start` to `end`, launched by a host call at `launched`."""
        number = next(self.correlations)
        self.host(call, launched, launched + 1, "cuda_runtime", tid, correlation=number)
        return self.host(name, start, end, cat, tid=7, correlation=number)

    def graph(self, launched, *work):
        """Add work (name, start, end) of one graph launch, which has one correlation number."""
        number = next(self.correlations)
        self.host("cudaGraphLaunch", launched, launched + 1, "cuda_runtime", correlation=number)
        for name, start, end in work:
            self.host(name, start, end, "kernel", tid=7, correlation=number)
        return self

    def kernels(self):
        """Return the kernels as read from a file of the profiler."""
        extra = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, {"ph": "i", "name": "no duration"}]
        return self.read(extra).kernels

    def read(self, extra=()):
        """Return kernels and sites of synchronisation as read from a file of the profiler."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            path.write_bytes(msgspec.json.encode({"schemaVersion": 1, "traceEvents": [*extra, *self.events]}))
            return profiling.read_pass(path)


def make_eager_trace():
    """Return three eager steps: gather outside any range, attention in its range, two kernels in that of moe."""
    trace = TraceBuilder()
    for at in (0, 1000, 2000):
        trace.step(at, at + 500)
        trace.gpu("gather", at + 10, at + 20, at + 30)
        trace.host("attention", at + 40, at + 60).gpu("mla", at + 50, at + 100, at + 200)
        trace.host("moe", at + 70, at + 99)
        trace.gpu("gemm", at + 71, at + 200, at + 250).gpu("gemm", at + 80, at + 300, at + 320)
    return trace


def make_replay_trace(*steps, period=1000):
    """Return replayed steps, given as lists of (name, start, end) relative to their start; one starts every `period`
    µs.
    """
    trace = TraceBuilder()
    for i, work in enumerate(steps):
        at = period * i
        trace.step(at, at + 20).graph(at + 5, *[(name, at + start, at + end) for name, start, end in work])
    return trace


@pytest.fixture
def profiled(monkeypatch):
    """Return a `profile_step` of given traces, the eager one first; `named` is an eager trace with stacks, if they are
    requested.
    """

    def run(eager, replay, steps, named=None):
        traces = iter([eager.read(), replay.read(), *([named.read()] if named else [])])
        counts = []

        def record(_step, count, *, enabled, stacks):
            assert enabled
            assert stacks is (len(counts) == 2), "stacks are recorded only after a wait was found"
            counts.append(count)
            return next(traces)

        monkeypatch.setattr(profiling, "record_steps", record)
        found = profile_step(lambda: None, lambda: None, steps, enabled=True, agree=bool)
        again = [3] if named else []
        assert counts == [3, steps + 2, *again], "the first of each pass and the last replay are not used"
        return found

    return run


class TestPhases:
    def test_replayed_kernels_get_the_phases_of_eager_kernels(self, profiled):
        """The first replay is left out. The second has gather 10, gap 5, mla 85, gemm 50, gap 10, gemm 40, until 230.
        The third one's first kernel starts 250 µs after the second's at 30, so another 50 µs are idle. other is 10,
        attention 85, moe 50 + 40 = 90, idle 5 + 10 + 50 = 65; 65 / 250 = 0.26.
        """
        work = [("gather", 30, 40), ("mla", 45, 130), ("gemm", 130, 180), ("gemm", 190, 230)]
        slow_start = [(name, 2 * start, 2 * end) for name, start, end in work]
        phases, blocking = profiled(make_eager_trace(), make_replay_trace(slow_start, work, work, period=250), steps=1)
        assert phases.phase_us == {"attention": 85, "moe": 90, "other": 10}
        assert phases.idle_us == 65
        assert phases.idle_fraction == 0.26
        assert phases.step_us == 250
        assert (phases.kernels, phases.steps) == (4, 1)
        assert msgspec.json.decode(msgspec.json.encode(phases), type=Phases) == phases
        assert blocking == []

    def test_several_steps_are_averaged(self, profiled):
        """mla takes 100 and 40 µs, 70 on average; gather takes 10 and each gemm 5; the rest of 200 µs is idle. The
        first and the last replay, with 150 and 170 µs of mla, do not count.
        """

        def work(mla):
            return [
                ("gather", 0, 10),
                ("mla", 10, 10 + mla),
                ("gemm", 10 + mla, 15 + mla),
                ("gemm", 15 + mla, 20 + mla),
            ]

        replay = make_replay_trace(work(150), work(100), work(40), work(170), period=200)
        phases, _ = profiled(make_eager_trace(), replay, steps=2)
        assert phases.phase_us == {"attention": 70, "moe": 10, "other": 10}
        assert (phases.idle_us, phases.step_us, phases.steps) == (110, 200, 2)

    def test_phases_are_in_the_order_of_a_layer(self, profiled):
        """Durations do not matter; kernels outside any range are last."""
        work = [("gather", 0, 500), ("mla", 500, 501), ("gemm", 501, 502), ("gemm", 502, 600)]
        phases, _ = profiled(make_eager_trace(), make_replay_trace(work, work, work), steps=1)
        assert list(phases.phase_us) == ["attention", "moe", "other"]

    def test_additional_kernel_of_the_replay_is_other(self, profiled):
        """Kernels before and after a memset of 7 µs between attention and moe keep their phases."""
        work = [("gather", 0, 1), ("mla", 1, 21), ("memset", 21, 28), ("gemm", 28, 38), ("gemm", 38, 48)]
        phases, _ = profiled(make_eager_trace(), make_replay_trace(work, work, work), steps=1)
        assert phases.phase_us == {"attention": 20, "moe": 20, "other": 8}

    def test_kernel_missing_in_the_replay_does_not_shift_phases(self, profiled):
        """Without mla both gemms are still moe, not attention and moe."""
        work = [("gather", 0, 1), ("gemm", 1, 11), ("gemm", 11, 21)]
        phases, _ = profiled(make_eager_trace(), make_replay_trace(work, work, work), steps=1)
        assert phases.phase_us == {"moe": 20, "other": 1}

    def test_ranks_without_profiler_run_the_same_number_of_steps(self, monkeypatch):
        """Such ranks take part in the collectives of 3 eager and 3 + 2 replayed steps and return nothing."""
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
        ran = []
        assert (
            profile_step(lambda: ran.append("eager"), lambda: ran.append("replay"), 3, enabled=False, agree=bool)
            is None
        )
        assert ran == ["eager"] * 3 + ["replay"] * 5


def make_kernels(*times):
    """Return GPU events (start, end) as the kernels of a step."""
    return make_replay_trace([("k", start, end) for start, end in times]).kernels().steps[0]


class TestAttribution:
    def test_overlap_is_counted_once_for_the_earlier_kernel(self):
        """a runs at 0-10 and b at 4-15: a gets 10, b the 5 that follow."""
        assert _split_time(make_kernels((0, 10), (4, 15)), ["a", "b"], 15) == {"idle": 0, "a": 10, "b": 5}

    def test_kernel_inside_another_adds_nothing(self):
        """b at 2-5 is inside a at 0-10, and the gap of 3 before c at 13-14 begins at a's end."""
        sums = _split_time(make_kernels((0, 10), (2, 5), (13, 14)), ["a", "b", "c"], 14)
        assert sums == {"idle": 3, "a": 10, "b": 0, "c": 1}

    def test_consecutive_kernels_have_no_gap(self):
        """The same label twice is one sum."""
        assert _split_time(make_kernels((5, 10), (10, 12)), ["a", "a"], 12) == {"idle": 0, "a": 7}

    def test_gap_before_the_next_step_is_idle(self):
        """The host launches the next step late, so this step is idle from 12 to 20."""
        assert _split_time(make_kernels((5, 10), (10, 12)), ["a", "a"], 20) == {"idle": 8, "a": 7}

    @pytest.mark.parametrize("seed", range(20))
    def test_times_add_up_to_the_span(self, seed):
        """From the first start to the next step at 200 every microsecond counts once, for any overlaps."""
        rng = random.Random(seed)
        starts = [rng.randrange(100) for _ in range(12)]
        kernels = make_kernels(*[(start, start + rng.randrange(1, 30)) for start in starts])
        sums = _split_time(kernels, [rng.choice("abc") for _ in kernels], 200)
        assert min(sums.values()) >= 0
        assert sum(sums.values()) == 200 - min(k.ts for k in kernels)

    def test_events_are_sorted_by_start(self):
        """A trace lists them in any order."""
        kernels = TraceBuilder().step(0, 10).graph(1, ("late", 50, 60), ("early", 20, 30)).kernels()
        assert [e.name for e in kernels.steps[0]] == ["early", "late"]

    def test_kernels_without_a_match_are_other(self):
        """No phase is guessed."""
        assert _match_phases(make_kernels((0, 1), (1, 2)), [("x", "moe"), ("y", "moe")]) == ["other", "other"]


class TestStepBoundaries:
    def test_work_launched_outside_of_steps_is_left_out(self):
        """A warm-up kernel that still runs during the step was launched before it."""
        trace = TraceBuilder().gpu("warm-up", 0, 100, 200).step(50, 60).gpu("mine", 55, 200, 210)
        assert [[e.name for e in step] for step in trace.kernels().steps] == [["mine"]]

    def test_launches_of_another_thread_are_left_out(self):
        """The profiler sees all threads of the process."""
        trace = TraceBuilder().step(0, 100).gpu("mine", 5, 10, 20).gpu("theirs", 6, 20, 30, tid=2)
        assert [[e.name for e in step] for step in trace.kernels().steps] == [["mine"]]

    def test_copies_and_memsets_are_gpu_work(self):
        """Copies and memsets keep a GPU busy like kernels."""
        trace = TraceBuilder().step(0, 100)
        trace.gpu("Memset (Device)", 1, 10, 20, cat="gpu_memset", call="cudaMemsetAsync")
        trace.gpu("Memcpy DtoD (Device -> Device)", 3, 20, 30, cat="gpu_memcpy", call="cudaMemcpyAsync")
        assert len(trace.kernels().steps[0]) == 2


class TestHostSyncs:
    def test_wait_in_every_step_is_a_site_with_its_count(self, profiled):
        """Steps 2 and 3 of the eager pass count: two waits in each, of 10 and 20 µs, with median 15."""
        work = [("gather", 0, 1), ("mla", 1, 2), ("gemm", 2, 3), ("gemm", 3, 4)]
        eager, replay = make_eager_trace(), make_replay_trace(work, work, work)
        for start in (0, 1000, 2000):
            eager.host("cudaStreamSynchronize", start + 300, start + 310, "cuda_runtime")
            eager.host("cudaStreamSynchronize", start + 320, start + 340, "cuda_runtime")
        _, sites = profiled(eager, replay, steps=1, named=eager)
        (site,) = sites
        assert msgspec.json.decode(msgspec.json.encode(site), type=SyncSite) == site
        assert (site.found_in, site.kind, site.call) == ("eager", "stream-sync", "cudaStreamSynchronize")
        assert (site.per_step, site.wait_us) == (2.0, 15.0)

    def test_all_ranks_run_the_pass_with_stacks_if_one_found_a_wait(self, monkeypatch):
        """Otherwise their collectives would wait for each other."""
        passes = []
        monkeypatch.setattr(profiling, "record_steps", lambda _, count, **options: passes.append((count, options)))
        assert profile_step(lambda: None, lambda: None, 1, enabled=False, agree=lambda mine: not mine) is None
        assert [count for count, _ in passes] == [3, 3, 3]
        assert passes[-1][1] == {"enabled": False, "stacks": True}

    def test_wait_in_only_the_first_step_is_warm_up(self, profiled):
        """This step loads kernels and fills caches."""
        work = [("gather", 0, 1), ("mla", 1, 2), ("gemm", 2, 3), ("gemm", 3, 4)]
        eager, replay = make_eager_trace(), make_replay_trace(work, work, work)
        eager.host("cudaDeviceSynchronize", 1, 2, "cuda_runtime")
        replay.host("cudaDeviceSynchronize", 1, 2, "cuda_runtime")
        assert profiled(eager, replay, steps=1)[1] == []

    def test_freed_memory_counts_only_in_replayed_steps(self, profiled):
        """The caching allocator may grow in an eager step; a replayed step owns its memory."""
        work = [("gather", 0, 1), ("mla", 1, 2), ("gemm", 2, 3), ("gemm", 3, 4)]
        eager, replay = make_eager_trace(), make_replay_trace(work, work, work)
        eager.host("cudaFree", 1003, 1004, "cuda_runtime")
        replay.host("cudaFree", 1003, 1004, "cuda_runtime")
        (site,) = profiled(eager, replay, steps=1)[1]
        assert (site.found_in, site.call, site.per_step) == ("replay", "cudaFree", 0.5)

    def test_wait_at_the_end_of_the_pass_is_ignored(self):
        """The wait follows the last step."""
        trace = TraceBuilder()
        for at in (0, 200, 400):
            trace.step(at, at + 100)
        trace.host("cudaDeviceSynchronize", 600, 700, "cuda_runtime")
        assert build_sync_sites(trace.read().sites, "replay") == []

    def test_sites_are_sorted_by_gpu_time_lost(self):
        """After the first wait the GPU has 10 µs without work, after the second 300, of which the wait can have caused
        its own 80.
        """
        trace = TraceBuilder().step(0, 2000)
        trace.gpu("a", 5, 10, 100).host("cudaStreamSynchronize", 20, 100, "cuda_runtime")
        trace.gpu("b", 101, 110, 200).host("cudaEventSynchronize", 120, 200, "cuda_runtime").gpu("c", 490, 500, 600)
        sites = build_sync_sites(trace.read().sites, "replay")
        assert [s.bubble_us for s in sites] == [80.0, 10.0]
        assert [s.call for s in sites] == ["cudaEventSynchronize", "cudaStreamSynchronize"]


class TestOnCpu:
    def test_cpu_time_is_divided_by_range_and_adds_up(self):
        """Each of two steps has two ranges, and the rest is idle."""
        ran = []

        def step():
            ran.append(1)
            for name in ("attention", "moe", "attention"):
                with record_range(name):
                    sorted(range(1000))

        phases = profile_cpu_step(step, 2, enabled=True)
        assert len(ran) == 2
        assert list(phases.phase_us) == ["attention", "moe"]
        assert all(us > 0 for us in phases.phase_us.values())
        assert sum(phases.phase_us.values()) + phases.idle_us == pytest.approx(phases.step_us)
        assert phases.idle_fraction == pytest.approx(phases.idle_us / phases.step_us)
        assert (phases.kernels, phases.steps) == (0, 2)

    def test_cpu_ranks_without_profiler_only_run_the_steps(self):
        """Such ranks run as many steps as the rank with the profiler."""
        ran = []
        assert profile_cpu_step(lambda: ran.append(1), 3, enabled=False) is None
        assert len(ran) == 3
