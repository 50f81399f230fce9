"""The gain of DCP by cause: replays of random loads by the real schedulers, with synthetic step times. Nothing is
measured.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from dcpbench.serving import gain_split
from dcpbench.serving.gain_split import CAPACITY, CAUSES, HITS, STEP_TIME, GainSplit, Side
from dcpbench.serving.outcome import compute_serve_metrics
from dcpbench.serving.policies import make_scheduler
from dcpbench.serving.replay import replay_requests
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.step_model import Slowdown
from tests.unit import serve_record_builder as served
from tests.unit.virtual_serving import make_config

if TYPE_CHECKING:
    from dcpbench.serving.requests import Step

DCP, PLAIN = served.make_point(served.DCP), served.make_point(served.TP)
POLICIES = ("mixed", "vllm", "sglang")


@dataclasses.dataclass
class FakeStepTimes:
    """Step times of `floor_ms`, `row_ms` for each row, and `kv_ms` for each KV token that decodes attend to."""

    floor_ms: float = 10.0
    row_ms: float = 0.1
    kv_ms: float = 0.01
    is_blocking = False
    slowdown = Slowdown([])

    def predict_duration_ms(self, step: Step, _heat: float = 0.0) -> float:
        parts = step.replicas
        rows = sum(len(p.decodes) + sum(c.tokens for c in p.chunks) for p in parts)
        return self.floor_ms + self.row_ms * rows + self.kv_ms * sum(sum(p.positions) for p in parts)

    def get_begin_ms(self, _step: Step) -> float:
        return 0.0

    def predict_host_ms(self, _step: Step) -> float:
        return 0.0


FAST, SLOW = FakeStepTimes(kv_ms=0.005), FakeStepTimes()


def make_side(times: FakeStepTimes = SLOW, pages: int = 40, **changes: Any) -> Side:
    """Return a side with a pool of 39 pages of 16 tokens on each rank."""
    return Side(config=make_config(pages=pages, **changes), times=times)  # type: ignore[arg-type]


def draw_requests(seed: int, count: int = 40, *, groups: int = 0, rate: float | None = None) -> list[ServeRequest]:
    """Return requests with 20 to 200 prompt tokens; with groups they begin with one of as many prefixes of 96 tokens."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(1_000, 2_000, (groups, 96), dtype=np.int32)
    due = np.cumsum(rng.exponential(1 / rate, count)).tolist() if rate else [None] * count
    found = []
    for number in range(count):
        own = rng.integers(2_000, 1_000_000, int(rng.integers(20, 200)), dtype=np.int32)
        prompt = np.concatenate((prefixes[rng.integers(groups)], own)) if groups else own
        found.append(
            ServeRequest(number=number, prompt=prompt, output_tokens=int(rng.integers(2, 60)), arrival_s=due[number])
        )
    return found


def split_gain(requests: list[ServeRequest], baseline: Side, layout: Side, clients: int | None = 8) -> GainSplit:
    changes = {} if clients else {"load": served.make_load(arrival="gamma", request_rate=1.0)}
    point, plain = (msgspec.structs.replace(p, concurrency=clients or 8, **changes) for p in (DCP, PLAIN))
    return gain_split.split_gain(point, plain, requests, {plain.layout_name: baseline, point.layout_name: layout})


def replay_alone(requests: list[ServeRequest], one_side: Side, clients: int | None = 8) -> Any:
    """Replay the load by itself, as `serve --mode replay` does."""
    found = replay_requests(requests, make_scheduler(one_side.config), clients, one_side.times)
    return compute_serve_metrics(found.traffic.samples, gpus=4, concurrency=clients, slo={}, steps=found.counts)


def get_parts(found: GainSplit) -> dict[tuple[str, ...], float]:
    return {part.causes: part.difference for part in found.parts}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_differences_sum_to_the_gain_of_two_separate_replays(policy: str, seed: int) -> None:
    """The sum is within 2 % of the gain between replays without any switch; each layout's own value is exactly theirs."""
    requests = draw_requests(seed, groups=seed % 4)
    baseline, layout = make_side(policy=policy), make_side(FAST, page_size=4 << seed % 3, dcp=4, policy=policy)
    found = split_gain(requests, baseline, layout)
    before, after = (replay_alone(requests, one) for one in (baseline, layout))
    gain = after.output_tok_s - before.output_tok_s
    assert sum(part.difference for part in found.parts) == pytest.approx(gain, rel=0.02)
    assert (found.baseline.value, found.layout.value) == (before.output_tok_s, after.output_tok_s)
    assert (found.baseline.preemptions, found.layout.preemptions) == (before.preemptions, after.preemptions)
    assert found.layout.hit_share == after.cached_tokens / after.input_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_gain_with_equal_steps_is_all_capacity(policy: str) -> None:
    """Steps are equal and prompts share nothing: a larger capacity avoids preemptions and queueing."""
    found = split_gain(draw_requests(1), make_side(policy=policy), make_side(pages=157, policy=policy))
    parts = get_parts(found)
    assert parts.pop((CAPACITY,)) == pytest.approx(found.difference)
    assert found.difference > 0.1 * found.baseline.value
    assert list(parts.values()) == pytest.approx([0.0] * 6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_capacity_has_no_part_where_each_pool_is_large_enough(policy: str, seed: int) -> None:
    """Prompts are cut at multiples of 16 and of 64 tokens, so that the steps differ: no request waits for a page in either."""
    baseline, layout = (
        make_side(pages=400, chunk=80, policy=policy),
        make_side(pages=400, dcp=4, chunk=80, policy=policy),
    )
    parts = get_parts(split_gain(draw_requests(seed), baseline, layout))
    assert parts[STEP_TIME,] != 0 or policy != "mixed"
    assert [part for causes, part in parts.items() if CAPACITY in causes] == [0.0] * 4


def test_gain_with_equal_pools_is_all_step_time() -> None:
    found = split_gain(draw_requests(2), make_side(pages=400), make_side(FAST, pages=400))
    parts = get_parts(found)
    assert parts.pop((STEP_TIME,)) == pytest.approx(found.difference)
    assert found.difference > 0
    assert list(parts.values()) == pytest.approx([0.0] * 6)


@pytest.mark.parametrize("policy", POLICIES)
def test_gain_of_a_single_client_is_all_prefix_hits(policy: str) -> None:
    """A single client never waits for a page: a larger pool only keeps more prefixes.

    The pool of 39 pages holds at most one of six prefixes next to a running request.
    """
    requests = draw_requests(3, groups=6)
    found = split_gain(requests, make_side(pages=24, policy=policy), make_side(pages=400, policy=policy), clients=1)
    parts = get_parts(found)
    assert found.layout.hit_share > found.baseline.hit_share + 0.1
    assert parts[HITS,] == pytest.approx(found.difference, rel=1e-9)
    assert found.difference > 0
    assert [parts[c,] for c in (CAPACITY, STEP_TIME)] == pytest.approx([0.0, 0.0])


def test_gain_of_a_cause_is_the_loss_without_it() -> None:
    """Without the cause, the layout has 624 tokens as the baseline, in ten pages of 64 next to the padding page. Hits are 0, so
    that no hit has to be fixed.
    """
    requests = draw_requests(4)
    baseline, layout = make_side(), make_side(FAST, dcp=4)
    without = replay_alone(requests, dataclasses.replace(layout, config=dataclasses.replace(layout.config, pages=11)))
    found = split_gain(requests, baseline, layout)
    assert get_parts(found)[CAPACITY,] == pytest.approx(found.layout.value - without.output_tok_s)


def test_shared_gain_of_causes_is_a_part_of_its_own() -> None:
    """The output is 100 with all causes, 90 without A or without B, 60 without both: A and B share 40 - 10 - 10 = 20."""
    a, b, c = CAUSES
    results = {(): 100.0, (a,): 90.0, (b,): 90.0, (c,): 100.0, (a, b): 60.0, (a, c): 85.0, (b, c): 90.0, CAUSES: 50.0}
    parts = {part.causes: part.difference for part in gain_split.separate_parts(results)}
    assert parts == {(a,): 10, (b,): 10, (c,): 0, (a, b): 20, (a, c): 5, (b, c): 0, CAUSES: 5}
    assert math.fsum(parts.values()) == 50


def test_open_loop_is_split_by_its_latency() -> None:
    """The output of an open loop follows the arrivals, so that capacity gives shorter queues only."""
    requests = draw_requests(5, rate=2.0)
    found = split_gain(requests, make_side(), make_side(pages=157), clients=None)
    assert found.metric == gain_split.LATENCY
    assert found.difference < 0
    assert get_parts(found)[CAPACITY,] == pytest.approx(found.difference)


def test_step_times_are_extrapolated_to_the_pool_of_the_other_layout() -> None:
    """Lines in KV tokens are extended; for a layout by itself they are refused beyond a fifth."""
    calls: list[str] = []
    times = SLOW
    vars(times)["model"] = SimpleNamespace(extrapolate=lambda: calls.append("model"))
    try:
        split_gain(draw_requests(6, 4), make_side(times), make_side(times))
    finally:
        del vars(times)["model"]
    assert calls == ["model", "model"]


def test_only_served_dcp_points_of_one_instance_are_split() -> None:
    assert gain_split.is_splittable(DCP)
    assert not gain_split.is_splittable(PLAIN)
    assert not gain_split.is_splittable(msgspec.structs.replace(DCP, disaggregate="1:1"))
    assert gain_split.make_baseline_key(DCP) == gain_split.make_baseline_key(PLAIN)
    other = msgspec.structs.replace(PLAIN, concurrency=9)
    assert gain_split.make_baseline_key(DCP) != gain_split.make_baseline_key(other)


def test_sentence_names_all_parts_and_shared_parts() -> None:
    """Shares are of the baseline's 200 tok/s; shared parts of 0 are left out."""
    a, b, c = CAUSES
    lost = {(a,): 60.0, (b,): 0.0, (c,): 20.0, (a, b): 60.0, (a, c): 74.0, (b, c): 20.0, CAUSES: 74.0}
    results = {(): 274.0} | {off: 274.0 - value for off, value in lost.items()}
    ends = [
        gain_split.SideResult(layout=name, value=value, preemptions=0, hit_share=0.0)
        for name, value in (("tp8", 200.0), ("tp8·dcp8", 274.0))
    ]
    found = GainSplit(
        metric=gain_split.OUTPUT, baseline=ends[0], layout=ends[1], parts=gain_split.separate_parts(results)
    )
    assert found.format() == (
        "From tp8 to tp8·dcp8, output tok/s in replay changes by +37 %: +30 % from KV capacity (requests that run at once), 0 % from prefix-cache "
        "hits, +10 % from step time (steps of the same requests) and −3 % from the interaction of KV capacity and step time."
    )
