"""formulas.py: every formula with its arithmetic worked out."""

import math

import pytest

from dcpbench.errors import UsageError
from dcpbench.points.speculation import Speculation
from dcpbench.records import formulas
from dcpbench.records.formulas import RequestTimes, compute_decode_metrics
from dcpbench.records.record import Latencies

ONE = RequestTimes(1.0, (1.5, 1.6, 1.8))  # t0 = 1.0, t1 = 1.5, tn = 1.8, n = 3


def test_ttft_includes_the_queue() -> None:
    """t1 - t0 = 1.5 - 1.0 s = 500 ms."""
    assert formulas.compute_ttft_ms(ONE) == pytest.approx(500)


def test_itl_is_one_gap_per_token_after_the_first() -> None:
    """1.6 - 1.5 = 100 ms, 1.8 - 1.6 = 200 ms."""
    assert formulas.compute_itl_ms(ONE) == pytest.approx([100, 200])


def test_tpot_is_the_mean_gap_and_is_absent_for_a_single_token() -> None:
    """(1.8 - 1.5) / (3 - 1) = 150 ms; n = 1 has no gap."""
    assert formulas.compute_tpot_ms(ONE) == pytest.approx(150)
    assert formulas.compute_tpot_ms(RequestTimes(0.0, (1.0,))) is None
    assert len(formulas.compute_itl_ms(RequestTimes(0.0, (1.0,)))) == 0


def test_e2el_runs_from_submission_to_the_last_token() -> None:
    """1.8 - 1.0 = 800 ms."""
    assert formulas.compute_e2el_ms(ONE) == pytest.approx(800)


def test_the_wall_time_counts_ramp_and_drain() -> None:
    """The wall time runs from 0.0 s (first submission) to 2.0 s (last token)."""
    assert formulas.compute_wall_s([ONE, RequestTimes(0.0, (2.0,))]) == 2


def ramp() -> list[RequestTimes]:
    """Two requests in flight from 1 s to 3 s, one before and after: tokens at 1, 2, 3 and at 2, 3, 4."""
    return [RequestTimes(0.0, (1.0, 2.0, 3.0)), RequestTimes(1.0, (2.0, 3.0, 4.0))]


def test_steady_throughput_leaves_out_ramp_and_drain() -> None:
    """Window 1-3 s; tokens in (1, 3]: 2, 3 and 2, 3 = 4 tokens / 2 s = 2 tok/s."""
    assert formulas.find_steady_window(ramp(), 2) == (1.0, 3.0)
    assert formulas.compute_tok_s_within(ramp(), (1.0, 3.0)) == pytest.approx(2)


def test_steady_throughput_is_absent_when_the_target_is_never_reached() -> None:
    """Two requests are 2/3 of a target of 3, below 95 %."""
    assert formulas.find_steady_window(ramp(), 3) is None


def test_a_request_that_starts_when_another_ends_does_not_break_the_window() -> None:
    """Closed loop with one request in flight: 0-1 s, then 1-3 s, is one window of 3 s."""
    assert formulas.find_steady_window([RequestTimes(0.0, (1.0,)), RequestTimes(1.0, (3.0,))], 1) == (0.0, 3.0)


def test_a_target_that_is_reached_for_no_time_at_all_is_not_reached() -> None:
    """One of two requests ends at 1 s and the other one starts: two for a moment of 0 s, which has no rate."""
    assert formulas.find_steady_window([RequestTimes(0.0, (1.0,)), RequestTimes(1.0, (3.0,))], 2) is None


def test_a_client_that_takes_a_moment_to_send_its_next_request_does_not_break_the_window() -> None:
    """0-1 s, then 1.0005-3 s: half a millisecond is no dip, and the window is 3 s. From 1.002 s on it is one."""
    first = RequestTimes(0.0, (1.0,))
    assert formulas.find_steady_window([first, RequestTimes(1.0005, (3.0,))], 1) == (0.0, 3.0)
    assert formulas.find_steady_window([first, RequestTimes(1.002, (3.0,))], 1) == (1.002, 3.0)
    chain = [RequestTimes(i + 0.0005, (i + 1.0,)) for i in range(4)]
    assert formulas.find_steady_window(chain, 1) == (0.0005, 4.0)


def test_the_longest_of_several_steady_windows_counts() -> None:
    """0-1 s and 2-5 s with a gap between: the second is longer."""
    assert formulas.find_steady_window([RequestTimes(0.0, (1.0,)), RequestTimes(2.0, (5.0,))], 1) == (2.0, 5.0)


def test_ninety_five_percent_of_the_target_is_steady() -> None:
    """19 of 20 requests are exactly 95 %."""
    requests = [RequestTimes(0.0, (1.0,))] * 19
    assert formulas.find_steady_window(requests, 20) == (0.0, 1.0)
    assert formulas.find_steady_window(requests[:18], 20) is None


def test_a_request_that_was_cut_off_is_in_flight_until_the_run_ends() -> None:
    """One from 0 s to 4 s, one from 1 s whose last token came at 2 s, one from 2 s without any: two in flight from 1 s.

    With the second one alone in flight to 4 s the window is 1-4 s; tokens in (1, 4]: 2, 3, 4 and 2 = 4 / 3 s.
    """
    requests = [RequestTimes(0.0, (1.0, 2.0, 3.0, 4.0)), RequestTimes(1.0, (2.0,), finished=False)]
    assert formulas.find_steady_window(requests, 2) == (1.0, 4.0)
    assert formulas.compute_tok_s_within(requests, (1.0, 4.0)) == pytest.approx(4 / 3)
    assert formulas.find_steady_window(requests, 3, waiting_s=[2.0]) == (2.0, 4.0)
    assert not formulas.has_met_slo(requests[1], {})


def test_throughput_per_gpu_divides_by_tp() -> None:
    """800 tok/s on tp8 = 100 tok/s/GPU, whatever dcp is."""
    assert formulas.compute_tok_s_per_gpu(800, 8) == 100


def test_a_user_sees_the_inverse_of_the_median_itl() -> None:
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
    """Two requests in 2 s. One: TTFT 500, TPOT 150. The other: TTFT 2000, no TPOT, so it cannot miss that one."""
    assert formulas.compute_goodput([ONE, RequestTimes(0.0, (2.0,))], slo) == rate


@pytest.mark.parametrize(
    ("gaps", "long", "met"),
    [(99, 0, True), (99, 1, False), (100, 1, True), (100, 2, False), (299, 3, False), (300, 3, True)],
)
def test_one_gap_in_a_hundred_may_miss_an_itl_objective(gaps: int, long: int, met: bool) -> None:
    """Gaps of 1/16 s, `long` of them 1/2 s, against 100 ms. The mean gap, TPOT, would hide every one of these."""
    times = [0.0]
    for i in range(gaps):
        times.append(times[-1] + (0.5 if i < long else 0.0625))
    request = RequestTimes(0.0, times)
    assert formulas.has_met_slo(request, {"itl": 100}) is met
    assert formulas.has_met_slo(request, {"tpot": 100})


def test_a_request_without_gaps_meets_any_itl_objective() -> None:
    """One token: it is its TTFT that counts."""
    assert formulas.has_met_slo(RequestTimes(0.0, (9.0,)), {"itl": 1})


def test_objectives_come_by_name_in_ms() -> None:
    """What --slo takes and a record holds."""
    assert formulas.validate_objectives({"ttft": 500, "itl": 50.5}) == {"ttft": 500, "itl": 50.5}
    assert formulas.validate_objectives({}) == {}
    with pytest.raises(UsageError, match="ttft, itl, tpot, e2el"):
        formulas.validate_objectives({"latency": 5})
    with pytest.raises(UsageError, match="above 0"):
        formulas.validate_objectives({"ttft": 0})


def test_latencies_have_a_mean_and_the_percentiles_that_samples_allow() -> None:
    """1 … 130: mean and p50 65.5; p90 at place 116.1 from 0: 117.1; p95 at 122.55: 123.55; 662 are needed for p99."""
    found = formulas.summarize_latencies(range(1, 131))
    assert (found.mean, found.p50, found.samples, found.p99) == (65.5, 65.5, 130, None)
    assert (found.p90, found.p95) == (pytest.approx(117.1), pytest.approx(123.55))
    assert formulas.summarize_latencies(range(129)).p95 is None
    assert formulas.summarize_latencies([7.0] * 662).p99 == 7
    assert formulas.summarize_latencies([]) == Latencies()
    with pytest.raises(UsageError):
        formulas.summarize_latencies([1.0, math.nan])


@pytest.mark.parametrize("samples", [[3.0], [4.0, 1.0], list(range(700)), [float(i * i % 97) for i in range(200)]])
def test_percentiles_of_arrays_are_those_of_lists(samples: list[float]) -> None:
    """Two ways of computing them, one definition."""
    fast, plain = formulas.summarize_latencies(samples), formulas.compute_percentiles(samples)
    for name in ("p50", "p90", "p95", "p99"):
        assert getattr(fast, name) == pytest.approx(getattr(plain, name))


def test_an_objective_that_is_met_exactly_is_met() -> None:
    """TTFT 250 ms and two gaps of 500 ms, 1,250 ms in all, against these very limits (exact in binary)."""
    request = RequestTimes(0.0, (0.25, 0.75, 1.25))
    assert formulas.has_met_slo(request, {"ttft": 250, "itl": 500, "tpot": 500, "e2el": 1250})


@pytest.mark.parametrize("times", [(), (0.5,), (2.0, 1.5), (math.nan,)])
def test_times_that_cannot_be_are_refused(times: tuple[float, ...]) -> None:
    """No tokens, a token before submission, tokens out of order, NaN."""
    with pytest.raises(UsageError):
        RequestTimes(1.0, times)


def test_rates_of_nothing_are_refused() -> None:
    """No requests, no time, no GPUs, no latency, no concurrency."""
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
    """Steps of 19, 20, 21 ms, 32 requests, tp4: 32/0.020 = 1600 tok/s [32/0.021, 32/0.019], 400 per GPU, 50 a user."""
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


def test_steps_that_verify_drafts_yield_several_tokens():
    """Acceptance 0.85, 0.6, 0.4: 1 + 0.85 + 0.85·0.6 + 0.85·0.6·0.4 = 2.564 tokens a step.

    8 requests in 20 ms: 8·2.564/0.02 = 1025.6 tok/s, of one user 128.2, of each of 4 GPUs 256.4. Of 100 steps there are 100
    gaps of 20 ms and 156 of 0, so that the median gap is 0 and the 90th percentile 20.
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
def test_decode_metrics_refuse_what_was_not_measured(samples: list[float], concurrency: int, tp: int) -> None:
    """No samples, a step that took no time, NaN, no requests."""
    with pytest.raises(UsageError):
        compute_decode_metrics(samples, concurrency, tp)
