"""Test the comparison of steps of a served load with their floors: fields of a step, and ratios of sums."""

from types import SimpleNamespace

import pytest

from dcpbench.models import SHAPES
from dcpbench.points.layout import Layout
from dcpbench.points.roofline import Sharding, StepRows, compute_step_floors, compute_step_matmul_s
from dcpbench.records.record import Rates
from dcpbench.serving.requests import Chunk, ReplicaStep, Step
from dcpbench.workloads.served_floors import Shares, compute_shares
from dcpbench.workloads.serving_loop import TimedStep

SHARDING = Sharding(shape=SHAPES["tiny"], layout=Layout(1), itemsize=2)
RATES = Rates(read_bytes_s=1e9, copy_bytes_s=1e9, matmul_flop_s=1e12)


def compute_floor_ms(rows: StepRows) -> float:
    return sum(compute_step_floors(SHARDING, rows, RATES.limits).values()) / 1e3


def launched(*replicas: ReplicaStep, ms: float | None = 7.0) -> SimpleNamespace:
    """Return a step with events `ms` apart, or without events, as on a CPU, for None."""
    event = SimpleNamespace(elapsed_time=lambda _: ms) if ms is not None else None
    return SimpleNamespace(step=Step(0, list(replicas)), started=event, ended=event)


class TestTimed:
    def test_timed_step_has_the_work_of_its_busiest_replica(self):
        """Two decodes at positions 9 and 20 attend to 10 and 21 rows, on average 15.5, recorded as 15; a chunk of 4
        tokens after 8 ends its prompt. The other replica has one row.
        """
        sequence = SimpleNamespace()
        busy = ReplicaStep(
            decodes=[sequence] * 2, slots=[1, 2], positions=[9, 20], chunks=[Chunk(sequence, 3, 8, 12, samples=True)]
        )
        other = ReplicaStep(decodes=[sequence], slots=[1], positions=[3])
        timed = TimedStep.from_launched(launched(other, busy))
        assert timed == TimedStep(ms=7.0, decodes=2, queries=1, context=15, chunks=((4, 8),), sampled=3, tokens=7)
        assert timed.to_step_rows() == StepRows(decodes=(15, 15), chunks=((4, 8),), sampled=3, tokens=7)

    def test_no_step_is_recorded_on_cpu(self):
        assert TimedStep.from_launched(launched(ReplicaStep(), ms=None)) is None


class TestShares:
    def test_share_is_the_sum_of_floors_over_the_sum_of_times(self):
        """Two steps with chunks take 2 and 5 times their floors, and a decode step takes 4 times its own."""
        short, long = StepRows(chunks=((64, 0),), sampled=1, tokens=64), StepRows(chunks=((512, 64),), tokens=512)
        decode = StepRows(decodes=(100,) * 3, sampled=3, tokens=3)
        steps = [
            TimedStep(
                ms=2 * compute_floor_ms(short), decodes=0, queries=1, context=0, chunks=((64, 0),), sampled=1, tokens=64
            ),
            TimedStep(
                ms=5 * compute_floor_ms(long),
                decodes=0,
                queries=1,
                context=0,
                chunks=((512, 64),),
                sampled=0,
                tokens=512,
            ),
            TimedStep(
                ms=4 * compute_floor_ms(decode), decodes=3, queries=1, context=100, chunks=(), sampled=3, tokens=3
            ),
        ]
        found = compute_shares(SHARDING, steps, RATES)
        spent_ms = 2 * compute_floor_ms(short) + 5 * compute_floor_ms(long)
        assert found.prefill_floor_share == pytest.approx((compute_floor_ms(short) + compute_floor_ms(long)) / spent_ms)
        assert found.decode_floor_share == pytest.approx(0.25)
        flops = sum(compute_step_matmul_s(SHARDING, rows, {"matmul": 1.0}) for rows in (short, long))
        assert found.prefill_matmul_share == pytest.approx(flops / (spent_ms / 1e3 * 1e12))

    def test_kind_of_step_that_did_not_run_has_no_share(self):
        found = compute_shares(
            SHARDING, [TimedStep(ms=1, decodes=1, queries=1, context=4, chunks=(), sampled=1, tokens=1)], RATES
        )
        assert (found.prefill_floor_share, found.prefill_matmul_share) == (None, None)
        assert found.decode_floor_share is not None

    @pytest.mark.parametrize("rates", [None, Rates(read_bytes_s=1e9)])
    def test_no_shares_without_rates(self, rates):
        step = TimedStep(ms=1, decodes=1, queries=1, context=4, chunks=((8, 0),), sampled=1, tokens=9)
        assert compute_shares(SHARDING, [step], rates) == Shares()
