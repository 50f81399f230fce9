"""Test that the step model never predicts less time for more work, despite noise in measurements."""

import pytest

from dcpbench.points.batches import compute_chunk_rows
from dcpbench.serving.step_model import (
    MixedTimes,
    PiecewiseLinear,
    PrefillTimes,
    ReplicaBatch,
    StepModel,
    UnevenSavings,
)

SIZES = (512, 1024)


def make_chunk(tokens: int, prefix: int = 0, chunks: int = 1) -> ReplicaBatch:
    """Return a step of chunks only, each with the same prefix."""
    return ReplicaBatch.from_requests(0, 0, [(tokens // chunks, prefix)] * chunks)


def make_cases(
    per_prefix_token: float, works: list[ReplicaBatch], begin_ms: float = 0.0
) -> list[tuple[ReplicaBatch, float]]:
    """Return cases of an engine that needs 10 ms, 0.01 per row, 1e-6 per pair, `begin_ms` for any prefix and
    `per_prefix_token` for each of its tokens.
    """
    return [
        (
            w,
            10
            + 0.01 * compute_chunk_rows(w.tokens)
            + 1e-6 * w.pairs
            + (begin_ms + per_prefix_token * w.prefix if w.prefix else 0),
        )
        for w in works
    ]


LINE = [make_chunk(n, prefix) for n in SIZES for prefix in (0, 2048, 4096)]
GATHER = [make_chunk(1024, 4096, chunks=4)]


class TestGatheringAPrefix:
    def test_stored_token_has_its_measured_cost(self) -> None:
        """The cost is 1e-3 ms per token: 4 chunks with prefixes of 4,096 gather 16,384 tokens."""
        times = PrefillTimes(make_cases(1e-3, LINE), make_cases(1e-3, GATHER), 0)
        assert times.gather_ms == pytest.approx(1e-3, rel=1e-6)

    @pytest.mark.parametrize("gather", [GATHER, []], ids=["by-separate-cases", "along-the-lines"])
    def test_negative_cost_of_a_prefix_counts_as_zero(self, gather: list[ReplicaBatch]) -> None:
        """Cases are faster by 1e-3 ms for each stored token, but a longer prefix is not predicted to save time."""
        times = PrefillTimes(make_cases(-1e-3, LINE), make_cases(-1e-3, gather), 0)
        assert times.gather_ms == 0
        assert times(1024, 2e6, 16384) == times(1024, 2e6, 1024)

    def test_having_a_prefix_never_saves_time(self) -> None:
        """A prefix of any length was 2 ms faster than none: `begin` is 0, not -2."""
        times = PrefillTimes(make_cases(0.0, LINE, begin_ms=-2.0), [], 0)
        assert min(times.begin.ys) == 0
        assert PrefillTimes(make_cases(0.0, LINE, begin_ms=2.0), [], 0).begin.ys == [pytest.approx(2, rel=0.05)] * 2


def test_shorter_prompts_are_not_predicted_slower_than_longer_ones() -> None:
    """A prompt of 512 tokens took longer than two of 256: the line of 1,024 tokens, which has one length of prompts, is
    constant for shorter ones.
    """
    cases = [(make_chunk(512, chunks=2), 16.0), (make_chunk(512), 15.0), (make_chunk(1024), 20.0)]
    times = PrefillTimes(cases, [], 0)
    assert times(1024, make_chunk(1024).pairs / 4, 0) == pytest.approx(20.0)


class TestSparedTime:
    def test_missing_rows_of_a_replica_never_add_time(self) -> None:
        """Due to noise, a step with all rows on one of two replicas took 3 ms longer than one with as many on both."""
        prefill = PrefillTimes(make_cases(0.0, LINE), [], 0)
        slower = [(w, ms + 3.0) for w, ms in make_cases(0.0, [make_chunk(512), make_chunk(1024)])]
        works = [make_chunk(1024), ReplicaBatch.from_requests(0, 0, [])]
        assert UnevenSavings(slower, prefill)(works) == 0
        faster = [(w, ms - 3.0) for w, ms in make_cases(0.0, [make_chunk(512), make_chunk(1024)])]
        assert UnevenSavings(faster, prefill)(works) == pytest.approx(3.0)

    def test_single_replica_has_no_spared_time(self) -> None:
        prefill = PrefillTimes(make_cases(0.0, LINE), [], 0)
        faster = [(w, ms - 3.0) for w, ms in make_cases(0.0, [make_chunk(512), make_chunk(1024)])]
        assert UnevenSavings(faster, prefill)([make_chunk(1024)]) == 0


def test_decode_rows_add_a_constant_time_beyond_the_measured_chunks() -> None:
    """The time is 5 ms with 512 tokens and 9 with 1,024: with 256 and 2,048 it stays 5 and 9, and 7 is half-way."""
    prefill = PrefillTimes(make_cases(0.0, [make_chunk(n) for n in (256, 512, 1024, 2048)]), [], 8)
    cases = []
    for tokens, more in ((512, 5.0), (1024, 9.0)):
        batch = ReplicaBatch.from_requests(8, 80, [(tokens, 0)])
        cases.append((batch, prefill(batch.rows + batch.tokens, batch.pairs, 0) + more))
    times = MixedTimes(cases, prefill)
    found = [times(ReplicaBatch.from_requests(8, 80, [(tokens, 0)])) for tokens in (256, 512, 768, 1024, 2048)]
    assert found == pytest.approx([5, 5, 7, 9, 9])


def test_chunk_step_is_not_predicted_faster_than_the_fastest_measured() -> None:
    """A step of 64 tokens took 5 ms as two chunks and 95 as one: the line through both is below 0 for 64 chunks of one
    token.
    """
    cases = [(ReplicaBatch.from_requests(1, 10, []), 4.0), (make_chunk(64, chunks=2), 5.0), (make_chunk(64), 95.0)]
    model = StepModel(cases)
    many = make_chunk(64, chunks=64)
    assert model.prefill(64, many.pairs, 0) < 0
    assert model.predict_step_ms([many]) == 5.0


def test_line_is_constant_beyond_its_ends() -> None:
    line = PiecewiseLinear([(1.0, 3.0), (2.0, 5.0)])
    assert [line.predict_clamped(x) for x in (-7.0, 1.5, 9.0)] == [3.0, 4.0, 5.0]
