"""The scatter of token times in replays of another engine."""

from __future__ import annotations

import statistics

import msgspec
import numpy as np
import pytest

from dcpbench.serving.delivery import list_delays_s, scatter_tokens
from dcpbench.serving.step_times import CHECK, Case, Chunks, Decodes, MeasuredCase, StepTimes
from dcpbench.serving.traffic import RequestResult
from tests.unit.serving_builder import make_request
from tests.unit.step_times_builder import make_step_times


def make_times(cases: list[MeasuredCase]) -> StepTimes:
    return msgspec.structs.replace(make_step_times(), cases=cases)


def make_sample(*token_s: float) -> RequestResult:
    return RequestResult(make_request(0, 10, len(token_s)), 0.0, token_s=list(token_s))


def test_delays_are_deviations_of_decode_steps_only() -> None:
    """Two deliveries make a gap, so that a delay deviates by 1 / √2 of it. Steps with chunks and checks are left out."""
    times = make_times(
        [
            MeasuredCase(case=Case(decodes=(Decodes(1, 100),)), samples_ms=[2.0, 3.0, 5.0]),
            MeasuredCase(case=Case(decodes=(Decodes(4, 100),), use=CHECK), samples_ms=[1.0, 9.0]),
            MeasuredCase(case=Case(chunks=(Chunks(1, 64, 0),)), samples_ms=[1.0, 9.0]),
        ]
    )
    assert list_delays_s(times) == pytest.approx([-1e-3 / 2**0.5, 0.0, 2e-3 / 2**0.5])


def test_tokens_of_a_step_have_one_delay() -> None:
    first, second = make_sample(1.0, 2.0, 3.0), make_sample(2.0, 3.0, 4.0)
    scatter_tokens([first, second], [-0.1, 0.0, 0.1, 0.2])
    assert first.token_s[1:] == second.token_s[:2]
    assert all(abs(late - exact) <= 0.2001 for late, exact in zip(first.token_s, (1.0, 2.0, 3.0), strict=True))


def test_tokens_keep_their_order() -> None:
    """A delay longer than a step also moves the tokens after it."""
    steps = [0.01 * i for i in range(500)]
    one = make_sample(*steps)
    scatter_tokens([one], [-0.05, 0.05], seed=1)
    assert one.token_s != steps
    assert all(gap >= 0 for gap in np.diff(one.token_s))


def test_gaps_scatter_like_measured_steps() -> None:
    measured = np.random.default_rng(0).normal(4.0, 0.2, 400).tolist()
    times = make_times([MeasuredCase(case=Case(decodes=(Decodes(8, 100),)), samples_ms=measured)])
    one = make_sample(*(4e-3 * i for i in range(4000)))
    scatter_tokens([one], list_delays_s(times))
    gaps = np.diff(one.token_s) * 1e3
    assert statistics.median(gaps) == pytest.approx(4.0, rel=0.01)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.1)


def test_tokens_are_not_delayed_without_measured_steps() -> None:
    one = make_sample(1.0, 2.0)
    scatter_tokens([one], [])
    assert one.token_s == [1.0, 2.0]
