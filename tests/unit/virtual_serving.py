"""Serve a load in virtual time with the real scheduler and traffic, and synthetic step times. Nothing here is
measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dcpbench.serving.outcome import StepCounts
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.serving.requests import Step


def make_config(**changes: Any) -> SchedulerConfig:
    """Return the configuration of one replica with room for 1,600 tokens, in chunks of 64."""
    plain = {
        "replicas": 1,
        "pages": 101,
        "page_size": 16,
        "dcp": 1,
        "max_requests": 64,
        "chunk": 64,
        "max_context": 100_000,
    }
    return SchedulerConfig(**(plain | changes))


def make_request(number: int, inputs: int = 32, outputs: int = 8, **changes: Any) -> ServeRequest:
    """Return a request with a prompt that shares nothing with others'."""
    prompt = np.arange(inputs, dtype=np.int32) + 100_000 * number
    return ServeRequest(number=number, prompt=prompt, output_tokens=outputs, **changes)


def serve(
    requests: list[ServeRequest],
    *,
    concurrency: int | None = None,
    seconds: Callable[[Step], float] = lambda _: 1.0,
    until_s: float = float("inf"),
    **changes: Any,
) -> tuple[Traffic, StepCounts]:
    """Serve until all requests are done, or until the clock passes `until_s`; a step takes `seconds(step)`."""
    scheduler = Scheduler(make_config(**changes))
    traffic, counts, now = Traffic(requests, scheduler, concurrency), StepCounts(), 0.0
    while not traffic.is_done and now < until_s:
        traffic.submit(*traffic.count_due(now), now)
        step = scheduler.plan_step()
        if step is None:
            now = max(now, traffic.find_next_arrival_s() or now)  # or what came was rejected, and the next one can come
            continue
        now += seconds(step)
        counts.add_step(step)
        traffic.record_tokens(step, now)
    if not traffic.is_done:
        traffic.stop()
    return traffic, counts
