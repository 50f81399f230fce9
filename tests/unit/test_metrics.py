"""Formulas of metrics, with their arithmetic worked out."""

import math

import pytest

from dcpbench.errors import UsageError
from dcpbench.points.speculation import Speculation
from dcpbench.records import formulas
from dcpbench.records.formulas import RequestTimes, compute_decode_metrics
from dcpbench.records.record import Latencies

ONE = RequestTimes(1.0, (1.5, 1.6, 1.8))  # t0 = 1.0, t1 = 1.5, tn = 1.8, n = 3


def test_ttft_includes_queueing() -> None:
    """t1 - t0 = 1.5 - 1.0 s = 500 ms."""
    assert formulas.compute_ttft_ms(ONE) == pytest.approx(500)


def test_itl_is_one_gap_per_token_after_the_first() -> None:
    """1.6 - 1.5 = 100 ms, 1.8 - 1.6 = 200 ms."""
    assert formulas.compute_itl_ms(ONE) == pytest.approx([100, 200])


def test_tpot_is_the_mean_gap_and_absent_for_a_single_token() -> None:
    """(1.8 - 1.5) / (3 - 1) = 150 ms; n = 1 has no gap."""
    assert formulas.compute_tpot_ms(ONE) == pytest.approx(150)
    assert formulas.compute_tpot_ms(RequestTimes(0.0, (1.0,))) is None
    assert len(formulas.compute_itl_ms(RequestTimes(0.0, (1.0,)))) == 0


def test_e2el_runs_from_submission_to_the_last_token() -> None:
    """1.8 - 1.0 = 800 ms."""
    assert formulas.compute_e2el_ms(ONE) == pytest.approx(800)


def test_wall_time_includes_ramp_and_drain() -> None:
    """The wall time is from 0.0 s (first submission) to 2.0 s (last token)."""
    assert formulas.compute_wall_s([ONE, RequestTimes(0.0, (2.0,))]) == 2


def make_ramp() -> list[RequestTimes]:
    """Return two requests, both in flight from 1 s to 3 s: tokens at 1, 2, 3 and at 2, 3, 4."""
    return [RequestTimes(0.0, (1.0, 2.0, 3.0)), RequestTimes(1.0, (2.0, 3.0, 4.0))]


def test_steady_throughput_excludes_ramp_and_drain() -> None:
    """Window 1-3 s; tokens in (1, 3]: 2, 3 and 2, 3 = 4 tokens / 2 s = 2 tok/s."""
    assert formulas.find_steady_window(make_ramp(), 2) == (1.0, 3.0)
    assert formulas.compute_tok_s_within(make_ramp(), (1.0, 3.0)) == pytest.approx(2)


def test_steady_window_is_absent_if_the_target_is_never_reached() -> None:
    """Two requests are 2/3 of a target of 3, below 95 %."""
    assert formulas.find_steady_window(make_ramp(), 3) is None


def test_request_that_starts_when_another_ends_continues_the_window() -> None:
    """A closed loop with one request in flight at 0-1 s and then at 1-3 s has one window of 3 s."""
    assert formulas.find_steady_window([RequestTimes(0.0, (1.0,)), RequestTimes(1.0, (3.0,))], 1) == (0.0, 3.0)


def test_target_reached_for_zero_seconds_gives_no_window() -> None:
    """One request ends at 1 s when the other one starts; two requests for 0 s have no rate."""
    assert formulas.find_steady_window([RequestTimes(0.0, (1.0,)), RequestTimes(1.0, (3.0,))], 2) is None


def test_short_pause_of_a_client_does_not_end_the_window() -> None:
    """0-1 s and 1.0005-3 s are one window of 3 s, as half a millisecond does not count; a pause until 1.002 s does."""
    first = RequestTimes(0.0, (1.0,))
    assert formulas.find_steady_window([first, RequestTimes(1.0005, (3.0,))], 1) == (0.0, 3.0)
    assert formulas.find_steady_window([first, RequestTimes(1.002, (3.0,))], 1) == (1.002, 3.0)
    chain = [RequestTimes(i + 0.0005, (i + 1.0,)) for i in range(4)]
    assert formulas.find_steady_window(chain, 1) == (0.0005, 4.0)


def test_longest_of_several_steady_windows_is_used() -> None:
    """The second of 0-1 s and 2-5 s, with a pause between, is longer."""
    assert formulas.find_steady_window([RequestTimes(0.0, (1.0,)), RequestTimes(2.0, (5.0,))], 1) == (2.0, 5.0)


def test_ninety_five_percent_of_the_target_is_steady() -> None:
    """19 of 20 requests are exactly 95 %."""
    requests = [RequestTimes(0.0, (1.0,))] * 19
    assert formulas.find_steady_window(requests, 20) == (0.0, 1.0)
    assert formulas.find_steady_window(requests[:18], 20) is None


def test_cancelled_request_is_in_flight_until_the_end_of_the_run() -> None:
    """One request is from 0 s to 4 s, one from 1 s with its last token at 2 s, one from 2 s without any token: two are
    in flight from 1 s. With the second one in flight to 4 s the window is 1-4 s; tokens in (1, 4]: 2, 3, 4 and 2 = 4 /
    3 s.
    """
    requests = [RequestTimes(0.0, (1.0, 2.0, 3.0, 4.0)), RequestTimes(1.0, (2.0,), finished=False)]
    assert formulas.find_steady_window(requests, 2) == (1.0, 4.0)
    assert formulas.compute_tok_s_within(requests, (1.0, 4.0)) == pytest.approx(4 / 3)
    assert formulas.find_steady_window(requests, 3, waiting=[(2.0, None)]) == (2.0, 4.0)
    assert not formulas.has_met_slo(requests[1], {})


def test_failed_request_is_in_flight_until_its_last_token() -> None:
    """The client of the request that failed at 2 s sends nothing else."""
    requests = [
        RequestTimes(0.0, (1.0, 2.0, 3.0, 4.0)),
        RequestTimes(1.0, (2.0,), finished=False, failed=True),
    ]
    assert formulas.find_steady_window(requests, 2) == (1.0, 2.0)


def test_requests_of_sub_agents_are_in_flight_as_one_client() -> None:
    """Client 1 has two requests at once until 4 s, client 2 one until 2 s: both are in flight for 2 s."""
    requests = [RequestTimes(0.0, (end,), turn=turn) for end, turn in ((4.0, (1, 0)), (3.0, (1, 0)), (2.0, (2, 0)))]
    assert formulas.find_steady_window(requests, 2) == (0.0, 2.0)
    assert formulas.find_steady_window(requests, 2, waiting=[(1.0, (2, 0))]) == (0.0, 4.0)


def test_throughput_per_gpu_divides_by_tp() -> None:
    """800 tok/s on tp8 = 100 tok/s/GPU, for any dcp."""
    assert formulas.compute_tok_s_per_gpu(800, 8) == 100


def test_rate_of_a_user_is_the_inverse_of_the_median_itl() -> None:
    """1000 / 20 ms = 50 tok/s."""
    assert formulas.compute_tok_s_per_user(20) == 50


@pytest.mark.parametrize(
    ("slo", "rate"),
    [
        ({}, 1.0),
        ({"ttft": 600}, 0.5),
        ({"tpot": 100}, 0.5),
        ({"ttft": 600, "tpot": 100}, 0.0),
        ({"e2el": 2000}, 1.0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(slo: dict[str, float], rate: float) -> None:
    """Two requests in 2 s have TTFT 500 and TPOT 150, and TTFT 2000 without TPOT, so the second cannot miss that
    objective.
    """
    assert formulas.compute_goodput([ONE, RequestTimes(0.0, (2.0,))], slo) == rate


@pytest.mark.parametrize(
    ("gaps", "long", "met"),
    [(99, 0, True), (99, 1, False), (100, 1, True), (100, 2, False), (299, 3, False), (300, 3, True)],
)
def test_one_gap_in_a_hundred_may_miss_an_itl_objective(gaps: int, long: int, met: bool) -> None:
    """Gaps are 1/16 s, `long` of them 1/2 s, and the objective is 100 ms. The mean gap, TPOT, would hide all long gaps."""
    times = [0.0]
    for i in range(gaps):
        times.append(times[-1] + (0.5 if i < long else 0.0625))
    request = RequestTimes(0.0, times)
    assert formulas.has_met_slo(request, {"itl": 100}) is met
    assert formulas.has_met_slo(request, {"tpot": 100})


def test_request_without_gaps_meets_any_itl_objective() -> None:
    """A request with one token only has a TTFT."""
    assert formulas.has_met_slo(RequestTimes(0.0, (9.0,)), {"itl": 1})


def test_objectives_are_validated_by_name_in_ms() -> None:
    """--slo and records have this form."""
    assert formulas.validate_objectives({"ttft": 500, "itl": 50.5}) == {"ttft": 500, "itl": 50.5}
    assert formulas.validate_objectives({}) == {}
    with pytest.raises(UsageError, match="ttft, itl, tpot, e2el"):
        formulas.validate_objectives({"latency": 5})
    with pytest.raises(UsageError, match="above 0"):
        formulas.validate_objectives({"ttft": 0})


def test_latencies_have_a_mean_and_percentiles_with_enough_samples() -> None:
    """1 … 130: mean and p50 65.5; p90 at place 116.1 from 0: 117.1; p95 at 122.55: 123.55; p99 needs 662 samples."""
    found = formulas.summarize_latencies(range(1, 131))
    assert (found.mean, found.p50, found.samples, found.p99) == (65.5, 65.5, 130, None)
    assert (found.p90, found.p95) == (pytest.approx(117.1), pytest.approx(123.55))
    assert formulas.summarize_latencies(range(129)).p95 is None
    assert formulas.summarize_latencies([7.0] * 662).p99 == 7
    assert formulas.summarize_latencies([]) == Latencies()
    with pytest.raises(UsageError):
        formulas.summarize_latencies([1.0, math.nan])


@pytest.mark.parametrize("samples", [[3.0], [4.0, 1.0], list(range(700)), [float(i * i % 97) for i in range(200)]])
def test_percentiles_of_arrays_equal_those_of_lists(samples: list[float]) -> None:
    fast, plain = formulas.summarize_latencies(samples), formulas.compute_percentiles(samples)
    for name in ("p50", "p90", "p95", "p99"):
        assert getattr(fast, name) == pytest.approx(getattr(plain, name))


def test_objective_met_exactly_is_met() -> None:
    """TTFT is 250 ms with two gaps of 500 ms, 1,250 ms in all, and the objectives are equal (exact in binary)."""
    request = RequestTimes(0.0, (0.25, 0.75, 1.25))
    assert formulas.has_met_slo(request, {"ttft": 250, "itl": 500, "tpot": 500, "e2el": 1250})


@pytest.mark.parametrize("times", [(), (0.5,), (2.0, 1.5), (math.nan,)])
def test_impossible_times_raise_usage_error(times: tuple[float, ...]) -> None:
    """There are no tokens, a token before submission, tokens out of order, or NaN."""
    with pytest.raises(UsageError):
        RequestTimes(1.0, times)


def test_rates_without_requests_time_or_gpus_raise_usage_error() -> None:
    for call in (
        lambda: formulas.compute_wall_s([]),
        lambda: formulas.compute_wall_s([RequestTimes(1.0, (1.0,))]),
        lambda: formulas.compute_tok_s_per_gpu(1, 0),
        lambda: formulas.compute_tok_s_per_user(0),
        lambda: formulas.compute_tok_s_per_user(math.nan),
        lambda: formulas.find_steady_window([], 0),
    ):
        with pytest.raises(UsageError):
            call()


def test_decode_metrics_follow_from_the_step_time() -> None:
    """Steps of 19, 20, 21 ms with 32 requests on tp4: 32/0.020 = 1600 tok/s [32/0.021, 32/0.019], 400 per GPU, 50 per
    user.
    """
    m = compute_decode_metrics([21.0, 19.0, 20.0], concurrency=32, tp=4)
    assert (m.step_ms.low, m.step_ms.median, m.step_ms.high) == (19, 20, 21)
    assert m.output_tok_s.median == pytest.approx(1600)
    assert m.output_tok_s.low == pytest.approx(32e3 / 21)
    assert m.output_tok_s.high == pytest.approx(32e3 / 19)
    assert m.output_tok_s_per_gpu == pytest.approx(400)
    assert m.tok_s_per_user == pytest.approx(50)
    assert m.step_samples_ms == [21.0, 19.0, 20.0]
    assert m.ttft_ms is None


def test_decode_itl_samples_are_steps_not_tokens() -> None:
    """63 steps of 128 requests are 8,064 tokens but 63 samples: one too few for p90."""
    m = compute_decode_metrics([10.0] * 63, concurrency=128, tp=8)
    assert m.itl_ms.samples == 63
    assert m.itl_ms.p50 == 10
    assert m.itl_ms.p90 is None
    assert compute_decode_metrics([10.0] * 64, concurrency=128, tp=8).itl_ms.p90 == 10


def test_steps_with_drafts_give_several_tokens():
    """Acceptance 0.85, 0.6, 0.4: 1 + 0.85 + 0.85·0.6 + 0.85·0.6·0.4 = 2.564 tokens per step. 8 requests in 20 ms:
    8·2.564/0.02 = 1025.6 tok/s, 128.2 per user, 256.4 per GPU of 4. 100 steps have 100 gaps of 20 ms and 156 of 0, so
    the median gap is 0 and the 90th percentile 20.
    """
    tokens = Speculation(3, (0.85, 0.6, 0.4)).expected_tokens
    m = compute_decode_metrics([20.0] * 100, concurrency=8, tp=4, tokens=tokens)
    assert m.step_ms.median == 20
    assert m.output_tok_s.median == pytest.approx(1025.6)
    assert m.tok_s_per_user == pytest.approx(128.2)
    assert m.output_tok_s_per_gpu == pytest.approx(256.4)
    assert (m.itl_ms.p50, m.itl_ms.p90) == (0, 20)


@pytest.mark.parametrize(
    ("samples", "concurrency", "tp"), [([], 1, 1), ([0.0], 1, 1), ([math.nan], 1, 1), ([1.0], 0, 1)]
)
def test_decode_metrics_without_valid_samples_raise_usage_error(
    samples: list[float], concurrency: int, tp: int
) -> None:
    """There are no samples, a step without time, NaN, or no requests."""
    with pytest.raises(UsageError):
        compute_decode_metrics(samples, concurrency, tp)
