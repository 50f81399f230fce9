"""Test the idle time of the GPU that a synchronisation causes, on traces of a few events. Times are microseconds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcpbench.syncs.formats import FORMATS, render_report
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.site_text import format_sentence
from dcpbench.syncs.traces import intervals
from dcpbench.syncs.traces.blocking import find_blocking_calls
from dcpbench.syncs.traces.bubbles import compute_bubbles, compute_busy_and_idle
from dcpbench.syncs.traces.columns import read_columns
from dcpbench.syncs.traces.reading import Args, Event, ReadProblems
from tests.unit.syncs_simulation import Run, Step, make_trace, run_program
from tests.unit.trace_builder import HOST, PINNED, Trace, get_only_site, select_counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.syncs.traces.columns import Columns


def scan_bubbles(trace: Trace, folder: Path) -> list[float | None]:
    """Return the bubble of each site, in order of first occurrence."""
    sites = sorted(trace.scan(folder).sites, key=lambda s: s.example.ts if s.example else 0)
    return [s.bubble_us for s in sites]


class TestUnknown:
    """Test incomplete traces of a wait of 85 µs after which the GPU idles for 15: a missing value is unknown, not 0."""

    @pytest.fixture
    def trace(self) -> Trace:
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.kernel(110, 115, 200)
        return trace

    def test_bubble_of_a_complete_trace_is_known(self, trace: Trace, tmp_path: Path) -> None:
        assert format_sentence(get_only_site(trace.scan(tmp_path))).endswith("1 in all, bubble at most 15 µs")

    def test_bubble_is_unknown_without_correlation_ids(self, trace: Trace, tmp_path: Path) -> None:
        for event in trace.events:
            del event["args"]["correlation"]
        report = trace.scan(tmp_path)
        site = get_only_site(report)
        assert (site.bubble_us, site.wait_us, site.waited, report.totals.bubble_us) == (None, 85, 1, None)
        assert format_sentence(site).endswith("1 in all, bubble not known")

    def test_bubble_is_unknown_without_runtime_calls(self, trace: Trace, tmp_path: Path) -> None:
        trace.events = [event for event in trace.events if event["cat"] == "kernel"]
        trace.add("cuda_sync", "Stream Sync", 20, 105)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.bubble_us, site.wait_us) == (None, 85)

    @pytest.mark.parametrize("category", ["cuda_runtime", "kernel"])
    def test_bubble_is_unknown_without_durations(self, trace: Trace, category: str, tmp_path: Path) -> None:
        """Without durations of calls, no wait is known; without those of kernels, the wait is known, but not what ended
        during it.
        """
        for event in trace.events:
            if event["cat"] == category:
                del event["dur"]
        report = trace.scan(tmp_path)
        site = get_only_site(report)
        assert (site.bubble_us, site.waited) == (None, None)
        assert site.wait_us == (85 if category == "kernel" else None)
        for form in FORMATS:
            text = render_report(report, form, root=tmp_path)
            assert not re.search(r"\b0 µs", text)
            assert "of 1 waited" not in text
            assert "bubble at most" not in text

    def test_limit_on_an_unknown_bubble_cannot_be_checked(self, trace: Trace, tmp_path: Path) -> None:
        for event in trace.events:
            del event["args"]["correlation"]
        verdict = compute_verdict(trace.scan(tmp_path), Gate(root=tmp_path, max_bubble_us=1e9))
        assert verdict.exit_code == 3
        assert "The bubble of stream-sync in cudaStreamSynchronize is not known" in " ".join(verdict.reasons)


class TestWorkedOut:
    def test_bubble_is_the_gap_from_the_last_kernel_to_the_next(self, tmp_path: Path) -> None:
        """A kernel ends at 100, its wait returns at 105, and the next kernel, launched at 110, begins at 115: 15 µs."""
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.kernel(110, 115, 200)
        assert scan_bubbles(trace, tmp_path) == [15]

    def test_bubble_excludes_idle_time_before_the_wait(self, tmp_path: Path) -> None:
        """The GPU idles from 50 to 115, and the wait lasts from 80 to 85: its bubble is 5 of the 65 µs."""
        trace = Trace()
        trace.kernel(0, 10, 50)
        trace.call("cudaStreamSynchronize", 80, 85)
        trace.kernel(110, 115, 200)
        assert scan_bubbles(trace, tmp_path) == [5]

    @pytest.mark.parametrize(("duration_us", "bubbles"), [(10, [26, 10]), (10.5, [8, 10.5])])
    def test_call_of_up_to_10_us_ends_no_lead(self, duration_us: float, bubbles: list[float], tmp_path: Path) -> None:
        """The first call waits for the kernel that ends at 100, and the next begins at 108: 8 µs. That kernel ends at
        112, during the second call from 110 on. If the second call waited for it, the idle time from 112 to 130 is not
        that of the first.
        """
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.kernel(106, 108, 112)
        trace.call("cudaEventSynchronize", 110, 110 + duration_us)
        trace.kernel(125, 130, 200)
        assert scan_bubbles(trace, tmp_path) == bubbles

    def test_wait_while_another_stream_has_work_has_no_bubble(self, tmp_path: Path) -> None:
        """Stream 7 is idle from 100, stream 8 works from 50 to 300, and the next kernel begins at 115."""
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.kernel(2, 50, 300, stream=8)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.kernel(110, 115, 200)
        assert scan_bubbles(trace, tmp_path) == [0]

    @pytest.mark.parametrize(("follows", "bubble"), [(True, 2), (False, 190)], ids=["after a kernel", "on its own"])
    def test_wait_for_a_copy_after_a_kernel_limits_the_bubble_of_an_earlier_wait(
        self, follows: bool, bubble: float
    ) -> None:
        """Asynchronous scheduling waits for a copy on a separate stream that follows each step's last kernel.

        Without the first wait, of 190 µs, the host reaches the second one earlier; the copy is not earlier, as the kernel before it
        ends when it did, and only the 2 µs are left by which the wait ends after the copy. A copy that follows no kernel can be earlier by
        all of it. The GPU is idle from 900 on.
        """
        trace = Trace()
        for launch, start, end in ((0, 10, 300), (20, 300, 600), (330, 600, 900)):
            trace.kernel(launch, start, end)
        trace.copy(PINNED, (5, 7), (302, 304), stream=9)
        trace.call("cudaEventSynchronize", 120, 310)
        begin = 602 if follows else 640
        trace.copy(PINNED, (340, 342), (begin, begin + 2), stream=9)
        trace.call("cudaEventSynchronize", 400, begin + 4)
        trace.kernel(1500, 1510, 1520)
        trace.kernel(2500, 2510, 2520)
        columns = read_trace_columns(trace)
        assert compute_bubbles(columns, find_blocking_calls(columns))[0] == pytest.approx(bubble, abs=0.01)

    def test_work_queued_before_the_wait_has_no_bubble(self, tmp_path: Path) -> None:
        """The kernel that ends the gap was launched at 15, before the wait."""
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.kernel(15, 130, 200)
        trace.call("cudaEventSynchronize", 20, 105)
        assert scan_bubbles(trace, tmp_path) == [0]

    def test_launch_from_another_thread_has_no_bubble(self, tmp_path: Path) -> None:
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.kernel(110, 115, 200, tid=HOST + 1)
        assert scan_bubbles(trace, tmp_path) == [0]

    def test_bubble_of_a_short_call_in_a_long_gap_is_its_duration(self, tmp_path: Path) -> None:
        """The GPU idles from 100 on, and 499 ms later a call takes 8 µs: without it the next kernel would begin 8 µs
        earlier.
        """
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 499_100, 499_108)
        trace.kernel(500_100, 500_105, 500_200)
        assert scan_bubbles(trace, tmp_path) == [8]

    def test_two_calls_in_one_gap_have_separate_bubbles(self, tmp_path: Path) -> None:
        """Both return in the gap from 100 to 135. Without the first, the second still waits until 100, and everything
        after it is 10 µs earlier; without the second, 2 µs.
        """
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.call("cudaDeviceSynchronize", 110, 112)
        trace.kernel(120, 135, 200)
        trace.op("aten::add", 119, 140)
        assert scan_bubbles(trace, tmp_path) == [10, 2]

    def test_bubble_includes_later_gaps_until_the_next_wait(self, tmp_path: Path) -> None:
        """After a wait of 85 µs there are gaps of 15 and 20, then a wait of 25 and a gap of 30: 35 and 25."""
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.kernel(110, 115, 200)
        trace.kernel(215, 220, 300)
        trace.call("cudaDeviceSynchronize", 280, 305)
        trace.kernel(325, 330, 400)
        assert scan_bubbles(trace, tmp_path) == [15 + 20, 25]

    def test_call_before_any_work_has_no_bubble(self, tmp_path: Path) -> None:
        """Without the call, both kernels begin earlier: the gap between them is unchanged."""
        trace = Trace()
        trace.call("cudaStreamSynchronize", 0, 50)
        trace.kernel(60, 65, 100)
        trace.kernel(160, 165, 200)
        assert scan_bubbles(trace, tmp_path) == [0]

    def test_short_call_does_not_limit_the_bubble_of_an_earlier_wait(self, tmp_path: Path) -> None:
        """The wait on stream 7 lasts 85 µs; then stream 8 happens to end during a call of 3 µs. Without the wait, the
        kernel of 120 begins at 100, which removes the 10 µs from 110 on; without the short call, it begins 3 µs
        earlier.
        """
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.kernel(5, 10, 110, stream=8)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.call("cudaEventSynchronize", 108, 111)
        trace.kernel(115, 120, 200)
        assert scan_bubbles(trace, tmp_path) == [10, 3]

    def test_gap_between_queued_kernels_is_in_no_bubble(self, tmp_path: Path) -> None:
        """Both kernels after the wait were launched by 112; the second still begins 2 µs after the first."""
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 20, 105)
        trace.kernel(110, 115, 200)
        trace.kernel(111, 202, 300)
        assert scan_bubbles(trace, tmp_path) == [15]

    def test_call_that_may_block_takes_no_bubble_from_a_blocking_call(self, tmp_path: Path) -> None:
        """A call that pins memory returns in the gap first, at 103; the wait from 104 to 112 keeps its 8 µs."""
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaHostAlloc", 15, 103)
        trace.call("cudaStreamSynchronize", 104, 112)
        trace.kernel(113, 115, 200)
        assert [s.bubble_us for s in select_counted(trace.scan(tmp_path))] == [8]

    def test_graph_launch_after_the_wait_ends_its_bubble(self, tmp_path: Path) -> None:
        """All kernels of a replay have the correlation of its cudaGraphLaunch: 130 - 100."""
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.call("cudaStreamSynchronize", 20, 105)
        graph = trace.call("cudaGraphLaunch", 110, 120)
        for start in (130, 141, 152):
            trace.gpu("node", start, start + 10, graph)
        assert scan_bubbles(trace, tmp_path) == [30]

    def test_bubble_of_a_pageable_copy_begins_with_its_call(self, tmp_path: Path) -> None:
        """The copy blocks from 20 until the GPU idles at 101; the synchronisation after it begins only at 104."""
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.op("aten::copy_", 19, 108)
        trace.copy("Memcpy DtoH (Device -> Pageable)", (20, 103), (100, 101))
        trace.call("cudaStreamSynchronize", 104, 106)
        trace.kernel(110, 115, 200)
        site = next(iter(trace.scan(tmp_path).sites))
        assert site.bubble_us == 14
        assert site.wait_us == 83 + 2

    def test_bubble_is_unknown_without_gpu_events(self, tmp_path: Path) -> None:
        trace = Trace()
        trace.call("cudaStreamSynchronize", 20, 105)
        assert scan_bubbles(trace, tmp_path) == [None]

    def test_wait_after_the_last_work_has_no_bubble(self, tmp_path: Path) -> None:
        trace = Trace()
        trace.kernel(0, 10, 100)
        trace.kernel(3, 100, 120)
        trace.call("cudaStreamSynchronize", 20, 125)
        assert scan_bubbles(trace, tmp_path) == [0]

    def test_busy_time_counts_overlapping_work_once(self) -> None:
        """The GPU is busy from 10 to 40 and from 60 to 70; the 20 µs in between are idle."""
        trace = Trace()
        trace.kernel(0, 10, 30)
        trace.kernel(1, 20, 40, stream=8)
        trace.kernel(2, 60, 70)
        assert compute_busy_and_idle(read_trace_columns(trace)) == (40, 20)


def read_trace_columns(trace: Trace) -> Columns:
    events = [
        Event(
            ph="X",
            cat=e["cat"],
            name=e["name"],
            pid=e["pid"],
            tid=e["tid"],
            ts=e["ts"],
            dur=e["dur"],
            args=Args(correlation=e["args"].get("correlation", -1)),
        )
        for e in trace.events
    ]
    return read_columns([events], ReadProblems())


def compute_bubble_of_steps(program: Sequence[Step], done: Run) -> dict[int, float]:
    """Return the bubble of each step that waits."""
    columns = read_trace_columns(make_trace(program, done))
    blocking = find_blocking_calls(columns)
    assert len(blocking) == len(done.waits)
    order = np.argsort(blocking.start, kind="stable")
    return dict(zip(done.waits, compute_bubbles(columns, blocking)[order].tolist(), strict=True))


def draw_programs(streams: int) -> st.SearchStrategy[list[Step]]:
    """Return a strategy for programs of up to 24 steps on up to `streams` streams; lengths are microseconds."""
    stream = st.integers(1, streams)
    return st.lists(
        st.one_of(
            st.builds(Step, st.just("work"), st.integers(0, 60)),
            st.builds(Step, st.just("launch"), st.integers(1, 60), stream, st.none() | stream),
            st.builds(Step, st.just("item"), st.integers(1, 3), stream),
            st.builds(Step, st.just("stream"), st.just(0), stream),
            st.builds(Step, st.just("device")),
            st.builds(Step, st.just("event"), st.integers(0, 3)),
        ),
        max_size=24,
    )


class TestBubbleIsAnUpperBound:
    """Test with a simulated host, with and without a wait, that the GPU never gains more than the bubble."""

    @settings(max_examples=400)
    @given(program=draw_programs(1))
    def test_removing_a_call_on_one_stream_saves_at_most_its_bubble(self, program: list[Step]) -> None:
        """The bubble limits both the idle time and the time of the whole program."""
        done = run_program(program)
        for step, bubble in compute_bubble_of_steps(program, done).items():
            without = run_program(program, without={step})
            assert done.idle - without.idle <= bubble
            assert done.length - without.length <= bubble

    @settings(max_examples=400)
    @given(program=draw_programs(3))
    @example(
        program=[
            Step("item", 1, 1),
            Step("launch", 5, 1),
            Step("event", 1),
            Step("launch", 1, 2),
            Step("stream", 0, 1),
            Step("launch", 1, 1),
        ]
    )
    def test_removing_a_call_saves_at_most_its_bubble_and_those_of_later_waits(self, program: list[Step]) -> None:
        """In the example the bubble of the first call is 6, and 7 are saved.

        Work of the other stream moves by less, so that less idle time follows the later wait, too.
        """
        done = run_program(program)
        bubbles = compute_bubble_of_steps(program, done)
        for step in bubbles:
            later = sum(bubble for other, bubble in bubbles.items() if other >= step)
            assert done.idle - run_program(program, without={step}).idle <= later

    @settings(max_examples=400)
    @given(program=draw_programs(3))
    def test_bubble_does_not_exceed_the_call_or_the_idle_time(self, program: list[Step]) -> None:
        """This includes calls that begin while the GPU is idle and nothing is queued."""
        done = run_program(program)
        for step, bubble in compute_bubble_of_steps(program, done).items():
            start, end = done.waits[step]
            assert 0 <= bubble <= min(end - start, done.idle)

    def test_simulated_program_has_calls_with_busy_and_idle_gpu(self) -> None:
        """During the first wait the GPU has work left; at the second one it is idle and nothing is queued."""
        program = [Step("launch", 50, 1), Step("stream", 0, 1), Step("work", 90), Step("device"), Step("launch", 9, 1)]
        done = run_program(program)
        assert done.dry == {1: False, 3: True}
        assert done.waits == {1: (2, 57), 3: (147, 149)}
        assert compute_bubble_of_steps(program, done) == {1: 55, 3: 2}


TIME = st.integers(0, 400)
LENGTH = st.integers(0, 60)


class TestInvariants:
    @given(
        kernels=st.lists(
            st.tuples(TIME, TIME, LENGTH, st.sampled_from([7, 8]), st.sampled_from([HOST, 1])), max_size=8
        ),
        waits=st.lists(
            st.tuples(TIME, LENGTH, st.sampled_from(["cudaStreamSynchronize", "cudaFree", "cudaHostAlloc"])), max_size=8
        ),
    )
    def test_bubble_is_between_zero_and_the_idle_time(
        self, kernels: list[tuple[int, int, int, int, int]], waits: list[tuple[int, int, str]]
    ) -> None:
        trace = Trace()
        for launch, start, length, stream, thread in kernels:
            trace.kernel(launch, start, start + length, stream=stream, tid=thread)
        for start, length, name in waits:
            trace.call(name, start, start + length)
        columns = read_trace_columns(trace)
        blocking = find_blocking_calls(columns)
        found = compute_bubbles(columns, blocking)
        assert len(found) == len(waits)
        assert (found >= 0).all()
        assert (found <= compute_busy_and_idle(columns)[1]).all()
        assert (found <= blocking.end - blocking.start).all()
        late = np.where(found > 0, columns.tables["gpu"].start.max(initial=0) - blocking.start, 0)
        assert (found <= late).all()


def test_item_and_its_copy_are_one_synchronisation(tmp_path: Path) -> None:
    """The copy ends at 101, `.item()` returns at 106, and the next kernel begins at 150: 150 - 101."""
    trace = Trace()
    trace.kernel(0, 10, 100)
    trace.item(20, 101)
    trace.kernel(140, 150, 200)
    report = trace.scan(tmp_path)
    assert [(s.kind, s.count, s.bubble_us, s.direction) for s in report.sites] == [
        ("scalar-read", 1, 49, "DtoH pinned")
    ]
    assert report.sites[0].bytes == 8
    assert report.sites[0].example is not None
    assert report.sites[0].example.waited_for == "gemm"


@pytest.mark.parametrize("kernels", [0, 1])
def test_bubble_is_zero_or_unknown_with_fewer_than_two_kernels(kernels: int, tmp_path: Path) -> None:
    trace = Trace()
    for _ in range(kernels):
        trace.kernel(0, 10, 100)
    trace.call("cudaStreamSynchronize", 20, 105)
    assert trace.scan(tmp_path).sites[0].bubble_us in (None, 0)


class TestIntervals:
    """Test operations on intervals, at and between their ends."""

    @pytest.mark.parametrize(
        ("spans", "disjoint"),
        [
            ([], []),
            ([(3, 4), (0, 1)], [(0, 1), (3, 4)]),
            ([(0, 2), (2, 3)], [(0, 3)]),
            ([(0, 9), (1, 2), (3, 4), (9, 10), (11, 12)], [(0, 10), (11, 12)]),
        ],
    )
    def test_touching_intervals_are_merged(
        self, spans: list[tuple[float, float]], disjoint: list[tuple[float, float]]
    ) -> None:
        start, end = (np.array([span[i] for span in spans], float) for i in (0, 1))
        found = intervals.merge_intervals(start, end)
        assert list(zip(*(ends.tolist() for ends in found), strict=True)) == disjoint

    def test_covered_time_is_summed_up_to_each_moment(self) -> None:
        """The intervals are 1–3 and 5–6."""
        start, end, moments = np.array([1.0, 5.0]), np.array([3.0, 6.0]), np.array([0, 1, 2, 3, 4, 5, 5.5, 6, 9.0])
        assert intervals.sum_covered_time(start, end, moments).tolist() == [0, 0, 1, 2, 2, 2, 2.5, 3, 3]
        assert intervals.sum_covered_time(np.zeros(0), np.zeros(0), moments).tolist() == [0] * 9

    def test_match_keys_finds_the_first_of_equal_keys(self) -> None:
        """No position is found for a key that is absent."""
        keys = np.array([7, 5, -1, 5, 0])
        assert intervals.match_keys(keys, np.array([5, 0, 7, -1, 6, 8])).tolist() == [1, 4, 0, -1, -1, -1]
        assert intervals.match_keys(keys[:0], np.array([5])).tolist() == [-1]

    def test_intervals_contain_their_start_and_not_their_end(self) -> None:
        """Intervals are sorted from the outermost to the innermost: of two with the same start, the longer one is
        first.
        """
        start, end = np.array([0.0, 0.0, 2.0, 5.0]), np.array([4.0, 9.0, 4.0, 5.0])
        moment, interval = intervals.find_containing(start, end, np.array([4.0, 2.0, 9.0, 0.0, 5.0]))
        assert list(zip(moment.tolist(), interval.tolist(), strict=True)) == [
            (0, 1),
            (1, 1),
            (1, 0),
            (1, 2),
            (3, 1),
            (3, 0),
            (4, 1),
        ]
