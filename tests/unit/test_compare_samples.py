"""Requests of a served run that count for the uncertainty of each metric."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from dcpbench.compare import resampling
from dcpbench.compare.sampling_error import NO_REQUESTS, WINDOWS, Requests, estimate_error, read_record_requests
from dcpbench.records import formulas
from dcpbench.records.formulas import RequestTimes
from dcpbench.records.metrics import METRICS, SERVE
from dcpbench.serving.outcome import CANCELLED, FINISHED, REJECTED, Row
from dcpbench.serving.samples import write_samples
from tests.unit import serve_record_builder as served

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.metrics import Metric

CLIENTS = 4
RECORD = served.make_served_record(served.make_point(concurrency=CLIENTS))


def get_metric(name: str) -> Metric:
    return next(m for m in METRICS if m.name == name)


def make_finished(count: int = 40) -> list[RequestTimes]:
    """Return consecutive requests, with latencies around 1 s and 8 gaps around 0.1 s."""
    rng = np.random.default_rng(0)
    starts = np.arange(count) * 2.0
    return [
        RequestTimes(start, start + np.cumsum([rng.uniform(0.9, 1.1), *rng.uniform(0.08, 0.12, 8)])) for start in starts
    ]


def make_cut_off(count: int = 40) -> list[RequestTimes]:
    """Return requests with latencies and gaps a hundred times as long, cut off by the end of the run."""
    return [RequestTimes(i * 2.0, (i * 2.0 + 100.0, i * 2.0 + 110.0), finished=False) for i in range(count)]


@pytest.mark.parametrize("name", ["ttft_p50_ms", "e2el_p50_ms", "tpot_p50_ms", "itl_p50_ms"])
def test_latency_errors_use_finished_requests_only(name: str) -> None:
    """Cut-off requests have no latency: the uncertainty of a metric is the same with and without them."""
    kind = get_metric(name).errors[SERVE]
    alone = estimate_error(get_metric(name), kind, RECORD, Requests(make_finished(), []), 1)
    mixed = estimate_error(get_metric(name), kind, RECORD, Requests([*make_finished(), *make_cut_off()], []), 1)
    assert alone is not None
    assert mixed is not None
    assert (mixed.variance, mixed.df) == (alone.variance, alone.df)


def test_tokens_of_cut_off_requests_count_as_output() -> None:
    requests = Requests([*make_finished(), *make_cut_off()], [])
    found = estimate_error(get_metric("output_tok_s"), "tokens", RECORD, requests, 1)
    times = np.concatenate([t.token_times_s for t in requests.times])
    counts, _ = np.histogram(times, WINDOWS, (0.0, max(t.end_s for t in requests.times)))
    expected = resampling.estimate_error(counts.astype(float), resampling.compute_mean, 1, requests=True)
    assert found is not None
    assert expected is not None
    assert found.variance == expected.variance


def test_cut_off_request_meets_no_objective() -> None:
    """20 of 40 requests finished within the objective, and 20 were cut off: the share has the uncertainty of a coin."""
    record = msgspec.structs.replace(RECORD, serve=msgspec.structs.replace(RECORD.serve, slo_ms={"ttft": 1e9}))
    requests = Requests([t for pair in zip(make_finished(20), make_cut_off(20), strict=True) for t in pair], [])
    found = estimate_error(get_metric("request_goodput"), "objectives", record, requests, 1)
    expected = resampling.estimate_error(np.array([1.0, 0.0] * 20), resampling.compute_mean, 1, requests=True)
    assert found is not None
    assert expected is not None
    assert found.variance == expected.variance > 0
    assert (
        estimate_error(get_metric("request_goodput"), "objectives", record, Requests(make_finished(), []), 1).variance
        == 0
    )


def make_rows() -> list[Row]:
    """Return rows of four clients: three decode from 0 to 64 s; the fourth decodes until 32 s, and then waits in vain.

    The end of the run at 64 s cuts off that request, which has waited for 32 s, and the one of the third client.
    """
    times = [float(t) for t in range(1, 65)]

    def row(number: int, outcome: str, submitted_s: float, token_s: list[float]) -> Row:
        return Row(
            number=number,
            outcome=outcome,
            submitted_s=submitted_s,
            first_token_s=token_s[0] if token_s else None,
            end_s=token_s[-1] if outcome == FINISHED else None,
            input_tokens=1,
            output_tokens=len(token_s),
            token_s=token_s,
        )

    return [
        *(row(i, FINISHED, 0.0, times) for i in range(2)),
        row(2, CANCELLED, 0.0, times),
        row(3, FINISHED, 0.0, times[:32]),
        row(4, CANCELLED, 32.0, []),
        row(5, REJECTED, 33.0, []),
    ]


@pytest.fixture
def record_requests(tmp_path: Path) -> Requests:
    """Return the requests of these rows, from a samples file of a record."""
    name = write_samples(tmp_path, RECORD.point, make_rows())
    record = msgspec.structs.replace(RECORD, serve=msgspec.structs.replace(RECORD.serve, samples_file=name))
    return read_record_requests(record, tmp_path)


def test_requests_cut_off_before_their_first_token_are_in_flight(record_requests: Requests) -> None:
    """A rejected request never is in flight. All four clients are busy for 64 s, not for 32."""
    assert [t.finished for t in record_requests.times] == [True, True, False, True]
    assert record_requests.waiting == [(32.0, None)]
    assert formulas.find_steady_window(record_requests.times, CLIENTS) == (0.0, 32.0)
    assert formulas.find_steady_window(record_requests.times, CLIENTS, record_requests.waiting) == (0.0, 64.0)


def test_steady_window_is_that_of_the_record(record_requests: Requests) -> None:
    """All 64 s are steady; in the second half three tokens a second come instead of four."""
    found = estimate_error(get_metric("steady_tok_s"), "steady tokens", RECORD, record_requests, 1)
    times = np.concatenate([t.token_times_s for t in record_requests.times])
    whole, half = (
        resampling.estimate_error(
            np.histogram(times, WINDOWS, span)[0] * 1.0, resampling.compute_mean, 1, requests=True
        )
        for span in ((0.0, 64.0), (0.0, 32.0))
    )
    assert found is not None
    assert whole is not None
    assert half is not None
    assert found.variance == whole.variance != half.variance


def test_record_without_a_samples_file_has_no_requests(tmp_path: Path) -> None:
    assert read_record_requests(msgspec.structs.replace(RECORD, serve=None), tmp_path) == NO_REQUESTS
