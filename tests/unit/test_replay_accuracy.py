"""Error of interpolated step times: a model of an engine with non-linear times, compared with a replay from its
measured grid.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from dcpbench.points.batches import compute_chunk_rows
from dcpbench.serving.outcome import compute_serve_metrics
from dcpbench.serving.replay import replay_requests
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.step_cases import Extent, make_cases
from dcpbench.serving.step_model import Slowdown, compute_step_works
from dcpbench.serving.step_times import Case, MeasuredCase
from tests.unit.step_times_builder import make_step_times

if TYPE_CHECKING:
    from dcpbench.records.record import ServeMetrics
    from dcpbench.serving.requests import Step
    from dcpbench.serving.step_times import StepTimes


def compute_curved_ms(rows: int, live: float, decode_rows: int, kv_tokens: int, chunks: list[tuple[int, int]]) -> float:
    """Return the time of a step. More tokens hit more experts, at first quickly: 1 - (1 - 1/32)^live of them, 116 ms
    for all; from some 3,000 rows on products take longer than reading weights, four fifths of them those of experts.
    Attention of short chunks is less efficient, the first stored token before any chunk takes 4 ms, and each chunk 0.3.
    `live` is the mean number of rows of a replica that go to experts.
    """
    base = float(np.hypot(17.6 + 116 * (1 - (1 - 1 / 32) ** live), 0.008 * rows + 0.032 * live))
    if not chunks:
        return base + 1e-4 * kv_tokens
    attention = sum(c * (p + c / 2) * 3.1e-6 * (1 + 150 / (c + 50)) + 0.3 for c, p in chunks)
    prefix = sum(p for _, p in chunks)
    decodes = 9 + 1e-4 * kv_tokens + 0.03 * decode_rows if decode_rows else 0
    return base + attention + (4 + 1.5e-3 * prefix if prefix else 0) + decodes


def compute_case_ms(case: Case, replicas: int) -> float:
    batch = case.compute_work()
    chunks = [(c.tokens, c.prefix) for c in case.chunks for _ in range(c.chunks)]
    rows = compute_chunk_rows(batch.rows + batch.tokens) if chunks else batch.rows
    return compute_curved_ms(rows, rows * (case.replicas or replicas) / replicas, batch.rows, batch.kv_tokens, chunks)


@dataclasses.dataclass
class Engine:
    """The engine itself."""

    launch_ms: float = 2.0
    is_blocking: bool = False
    slowdown: Slowdown = dataclasses.field(default_factory=lambda: Slowdown([]))

    def predict_host_ms(self, _step: Step) -> float:
        return 0.0

    def get_begin_ms(self, _step: Step) -> float:
        return self.launch_ms

    def predict_duration_ms(self, step: Step, _heat: float = 0.0) -> float:
        works = compute_step_works(step)
        each = (
            [compute_chunk_rows(w.rows + w.tokens) for w in works] if step.has_chunks else [max(w.rows for w in works)]
        )
        rows, live = max(each), sum(each) / len(each)
        return max(
            compute_curved_ms(rows, live, w.rows, w.kv_tokens, [(c.tokens, c.start) for c in replica.chunks])
            for w, replica in zip(works, step.replicas, strict=True)
        )


def served(requests: list[ServeRequest], setup: SchedulerConfig, clients: int | None, times: StepTimes) -> ServeMetrics:
    found = replay_requests(requests, Scheduler(setup), clients, times)
    return compute_serve_metrics(found.traffic.samples, gpus=4, concurrency=clients, slo={}, steps=found.counts)


def requests(count: int, sigma: float = 0.0, shared: int = 0, rate: float | None = None) -> list[ServeRequest]:
    """Return prompts of 4,000 tokens, or with this median, and answers of 50 to 250; the first `shared` tokens are the
    same for all.
    """
    rng = np.random.default_rng(0)
    at = np.cumsum(rng.exponential(1 / rate, count)).tolist() if rate else [None] * count
    lengths = np.clip(4000 * np.exp(sigma * rng.standard_normal(count)), shared + 1, 16_000).astype(int)
    prefix = rng.integers(0, 100_000, shared, dtype=np.int32)
    return [
        ServeRequest(
            number=i,
            prompt=np.concatenate([prefix, rng.integers(0, 100_000, n - shared, dtype=np.int32)]),
            output_tokens=int(rng.integers(50, 250)),
            arrival_s=at[i],
        )
        for i, n in enumerate(lengths)
    ]


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests and limits of a replay, with pages of 64 tokens."""

    requests: list[ServeRequest]
    clients: int | None
    slots: int
    pages: int = 1300
    context: int = 4250
    dp: int = 1
    chunk: int = 8192
    policy: str = "mixed"


LOADS = {
    "8-clients": Load(requests(40), 8, 8),
    "48-clients": Load(requests(140), 48, 48),
    "kv-pressure": Load(requests(140), 48, 48, pages=400),
    "small-chunks": Load(requests(80), 48, 48, chunk=1024),
    "prefill-first": Load(requests(80), 48, 48, policy="prefill-first"),
    "shared-prefix": Load(requests(140, shared=3600), 48, 48),
    "open-loop": Load(requests(500, sigma=0.8, rate=1.0), None, 128, pages=2000, context=16_250),
    "dp4": Load(requests(80), 48, 12, dp=4, chunk=2048),
    "dp4-few": Load(requests(40), 6, 2, dp=4, chunk=4096),
    "dp2-lengths": Load(requests(80, sigma=0.8), 24, 12, dp=2, context=16_250),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_replay_from_the_grid_is_within_two_percent_of_the_engine(load: Load) -> None:
    """Throughput, TTFT and ITL are compared, p50 and mean; most agree within 0.3 %, and real measurements add noise."""
    dcp = 4 // load.dp
    extent = Extent(
        requests=load.slots,
        context=load.context,
        pages=load.pages,
        virtual_page=64 * dcp,
        chunk=load.chunk,
        replicas=load.dp,
        targets=(load.slots,) if load.clients else (),
        open_loop=not load.clients,
        prompts=(4000,),
    )
    setup = SchedulerConfig(
        replicas=load.dp,
        pages=load.pages + 1,
        page_size=64,
        dcp=dcp,
        max_requests=load.slots,
        chunk=load.chunk,
        policy=load.policy,
        max_context=load.context + 1,
    )
    cases = [MeasuredCase(case=case, samples_ms=[compute_case_ms(case, load.dp)]) for case in make_cases(extent)]
    times = msgspec.structs.replace(make_step_times(), cases=cases)
    expected, found = (served(load.requests, setup, load.clients, source) for source in (Engine(), times))
    assert found.output_tok_s == pytest.approx(expected.output_tok_s, rel=0.005)
    for name in ("ttft_ms", "itl_ms", "e2el_ms"):
        actual, wanted = getattr(found, name), getattr(expected, name)
        assert (actual.p50, actual.mean) == (pytest.approx(wanted.p50, rel=0.02), pytest.approx(wanted.mean, rel=0.02))
    assert found.itl_ms.p99 == pytest.approx(expected.itl_ms.p99, rel=0.02)
