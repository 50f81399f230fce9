"""The grid of step times contains every step that a scheduler can decide for its engine and loads."""

import msgspec
import numpy as np
import pytest

from dcpbench.serving.deployment import Disaggregated, Link
from dcpbench.serving.replay import replay_requests
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.step_cases import Extent, make_cases
from dcpbench.serving.step_times import MeasuredCase
from tests.unit.step_times_builder import compute_true_ms, make_step_times


def prompts(rng: np.random.Generator, count: int, context: int, share: float, rate: float | None) -> list[ServeRequest]:
    """Return prompts of any lengths that fit, with a common beginning."""
    common, found, at = rng.integers(0, 1000, context, dtype=np.int32), [], 0.0
    for number in range(count):
        output = int(rng.integers(1, max(2, min(60, context // 3))))
        length = int(rng.integers(1, context - output + 1))
        shared = int(share * length)
        own = rng.integers(0, 1000, length - shared, dtype=np.int32)
        at += 0.0 if rate is None else float(rng.exponential(1 / rate))
        found.append(
            ServeRequest(
                number=number,
                prompt=np.concatenate([common[:shared], own]),
                output_tokens=output,
                arrival_s=None if rate is None else at,
            )
        )
    return found


@pytest.mark.parametrize("disaggregated", [False, True], ids=["aggregated", "disaggregated"])
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.long
def test_any_load_within_the_extent_can_be_replayed(seed: int, disaggregated: bool) -> None:
    """Layout, pool of at least 3 pages, chunk, policy, sharing and arrival are random, and every request is answered;
    also by disaggregated instances, which have chunks of a single token.
    """
    rng = np.random.default_rng(seed)
    replicas, dcp, page_size = (int(rng.choice(choices)) for choices in ([1, 1, 2, 4], [1, 2, 4], [1, 2, 16, 64]))
    page, slots = page_size * dcp, int(rng.choice([1, 2, 3, 8, 17, 48, 64]))
    context = int(rng.choice([60, 300, 1000, 5500, 20_000]))
    chunk = max(page, int(rng.choice([16, 64, 256, 1000, 2048, 8192])))
    pages = max(3, int(-(-context // page) * rng.choice([1, 1.3, 2, 4, slots + 1])))
    share, rate = float(rng.choice([0, 0, 0.5, 0.95])), None if rng.random() < 0.7 else 3.0
    extent = Extent(
        requests=slots,
        context=context,
        pages=pages,
        virtual_page=page,
        chunk=chunk,
        open_loop=rate is not None,
        targets=() if rate else (slots,),
        shared=share > 0,
    )
    setup = SchedulerConfig(
        replicas=replicas,
        pages=pages + 1,
        page_size=page_size,
        dcp=dcp,
        max_requests=slots,
        chunk=chunk,
        policy=str(rng.choice(["mixed", "prefill-first"])),
        max_context=context + 1,
    )
    cases = [MeasuredCase(case=case, samples_ms=[compute_true_ms(case.compute_work())]) for case in make_cases(extent)]
    times = msgspec.structs.replace(make_step_times(), cases=cases)
    load = prompts(rng, 40, context, share, rate)
    link = Link(bytes_s=float(rng.choice([1e4, 1e9])), page_bytes=1000)
    served = (
        Disaggregated(setup, int(rng.integers(1, 4)), int(rng.integers(1, 4)), link)
        if disaggregated
        else Scheduler(setup)
    )
    found = replay_requests(load, served, None if rate else slots * replicas, times)
    assert all(sample.is_finished for sample in found.traffic.samples)
