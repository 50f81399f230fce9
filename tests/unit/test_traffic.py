"""Test when requests are sent and what is recorded: closed-loop clients, and open-loop arrivals."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dcpbench.errors import UsageError
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.traffic import Traffic
from tests.unit.serving_builder import check_books, make_config, make_request

TOO_LONG = 40  # more prompt tokens than the default pool of eight pages of four tokens holds


def make_traffic(load: list[ServeRequest], concurrency: int | None, **changes: object) -> Traffic:
    """Return traffic into the default scheduler."""
    return Traffic(load, Scheduler(make_config(**changes)), concurrency)


def serve(flow: Traffic, step_s: float = 1.0) -> None:
    """Run steps of `step_s` seconds in virtual time until all requests are answered."""
    now = 0.0
    while not flow.is_done:
        flow.submit(*flow.count_due(now), now)
        step = flow.scheduler.plan_step()
        if step is None:
            now = max(now, flow.find_next_arrival_s() or now)
        else:
            now += step_s
            flow.record_tokens(step, now)


class TestClosedLoop:
    def test_client_sends_its_next_request_after_the_last_answer(self) -> None:
        """Use two clients, prompts of 4 and two output tokens: each pair takes a prefill step and a decode step."""
        flow = make_traffic([make_request(n, 4, 2) for n in range(5)], 2)
        serve(flow)
        assert [s.submitted_s for s in flow.samples] == [0, 0, 2, 2, 4]
        assert [s.token_s for s in flow.samples] == [[1, 2], [1, 2], [3, 4], [3, 4], [5, 6]]
        assert all(s.is_finished and s.sequence for s in flow.samples)

    def test_submission_time_is_the_time_of_the_clients_last_answer(self) -> None:
        """Answer at 1 s, and let the server accept new requests at 3 s."""
        flow = make_traffic([make_request(n, 4, 1) for n in range(2)], 1)
        flow.submit(*flow.count_due(0.0), 0.0)
        flow.record_tokens(flow.scheduler.plan_step(), 1.0)
        flow.submit(*flow.count_due(3.0), 3.0)
        assert [s.submitted_s for s in flow.samples] == [0, 1]

    def test_closed_loop_ignores_arrival_times(self) -> None:
        flow = make_traffic([make_request(0, 4, 1, arrival_s=9.0)], 1)
        assert (flow.count_due(0.0), flow.find_next_arrival_s()) == ((0, 1), None)
        serve(flow)
        assert (flow.samples[0].submitted_s, flow.samples[0].token_s) == (0, [1])

    def test_client_sends_its_next_request_after_a_rejection(self) -> None:
        """Reject the first two of three requests, which can never be served."""
        flow = make_traffic([make_request(0, TOO_LONG), make_request(1, TOO_LONG), make_request(2, 4)], 1)
        serve(flow)
        assert [bool(s.rejected) for s in flow.samples] == [True, True, False]
        assert [s.is_finished for s in flow.samples] == [False, False, True]
        assert "request 0 has 40 prompt and 1 output tokens" in flow.samples[0].rejected


class TestOpenLoop:
    def test_open_loop_requests_arrive_on_time_despite_unanswered_ones(self) -> None:
        """Send at 0, 0.5 and 2.5 s; a prompt of 8 fills a step, so the second request is answered at 2 s."""
        flow = make_traffic([make_request(n, 8, 1, arrival_s=at) for n, at in enumerate((0.0, 0.5, 2.5))], None)
        assert [flow.count_due(at) for at in (0.0, 0.49, 0.5, 9.0)] == [(0, 1), (0, 1), (0, 2), (0, 3)]
        serve(flow)
        assert [s.token_s for s in flow.samples] == [[1], [2], [3.5]]

    def test_submission_time_is_the_arrival_time_during_a_step(self) -> None:
        flow = make_traffic([make_request(0, 8, 1, arrival_s=0.25)], None)
        flow.submit(*flow.count_due(1.0), 1.0)
        assert flow.samples[0].submitted_s == 0.25

    def test_find_next_arrival_returns_the_next_due_time(self) -> None:
        flow = make_traffic([make_request(0, 4, arrival_s=1.5)], None)
        assert (flow.count_due(1.0), flow.find_next_arrival_s()) == ((0, 0), 1.5)
        flow.submit(0, 1, 1.5)
        assert flow.find_next_arrival_s() is None


class TestStop:
    def test_stop_keeps_samples_of_finished_requests_and_drops_the_others(self) -> None:
        """Stop while one of three requests is answered, one is running and one was never sent."""
        flow = make_traffic([make_request(0, 4, 1), make_request(1, 4, 9), make_request(2, 4, 1)], 2)
        flow.submit(0, 2, 0.0)
        flow.record_tokens(flow.scheduler.plan_step(), 1.0)
        flow.stop()
        assert [(s.is_finished, len(s.token_s)) for s in flow.samples] == [(True, 1), (False, 1)]
        assert flow.samples[1].sequence is not None
        assert (flow.is_done, flow.count_due(9.0), flow.in_flight, flow.scheduler.unfinished) == (True, (0, 0), 0, [])
        assert flow.cut_off

    @pytest.mark.parametrize("later_s", [None, 9.0])
    def test_load_is_cut_off_if_only_requests_to_be_sent_are_left(self, later_s: float | None) -> None:
        """Stop when the first request is answered: the second one is due later, or there is none."""
        flow = make_traffic(
            [make_request(0, 4, 1, arrival_s=0.0), *([make_request(1, 4, 1, arrival_s=later_s)] if later_s else [])],
            None,
        )
        flow.submit(0, 1, 0.0)
        flow.record_tokens(flow.scheduler.plan_step(), 1.0)
        flow.stop()
        assert flow.cut_off == bool(later_s)

    def test_traffic_without_requests_raises_an_error_with_the_fix(self) -> None:
        with pytest.raises(UsageError, match="give --num-requests 1 or more"):
            make_traffic([], 1)

    def test_zero_concurrency_raises_an_error_instead_of_running_forever(self) -> None:
        with pytest.raises(UsageError, match="try --concurrency 1"):
            make_traffic([make_request(0, 4)], 0)


LOADS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=15)
"""(prompt, output, seconds after the request before)"""


@settings(max_examples=100, deadline=None)
@given(load=LOADS, concurrency=st.sampled_from([None, 1, 2, 5]), replicas=st.integers(1, 2))
def test_every_request_is_answered_or_rejected_and_every_token_recorded(load, concurrency, replicas):
    """Use open and closed loops on pools of eight pages, which some requests exceed."""
    at, requests = 0.0, []
    for number, (prompt, output, gap) in enumerate(load):
        at += gap
        requests.append(make_request(number, prompt, output, arrival_s=at))
    flow = make_traffic(requests, concurrency, replicas=replicas)
    serve(flow)
    assert [s.request.number for s in flow.samples] == list(range(len(load)))
    for sample in flow.samples:
        assert sample.is_finished != bool(sample.rejected)
        assert sample.token_s == sorted(sample.token_s)
        assert all(t >= sample.submitted_s for t in sample.token_s)
        assert bool(sample.rejected) == (sample.request.kv_tokens > 8 * 4)
    assert (flow.in_flight, flow.scheduler.unfinished) == (0, [])
    for replica in flow.scheduler.replicas:
        check_books(replica)
