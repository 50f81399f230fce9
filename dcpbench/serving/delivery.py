"""Scatter the times at which a client receives the tokens of another engine's steps, as its measured steps scatter. No torch.

Steps of another engine are measured by the tokens that a client receives, so that their times contain the delays of the host, of
HTTP and of the client. Replayed steps of equal work take equal times. Without these delays the median gap between tokens jumps
from one kind of step to the next where a server's gaps pass smoothly, above all if batches are padded to few sizes.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING

from dcpbench.serving.step_times import LINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.serving.step_times import StepTimes
    from dcpbench.serving.traffic import RequestResult


def list_delays_s(times: StepTimes) -> list[float]:
    """Return delays of the tokens of a step, around 0, from the measured steps of decodes alone.

    A measured step is the gap between two deliveries with a delay each, so that its deviation from the median of its case is
    that of a delay times the square root of 2.
    """
    cases = [m for m in times.select_cases(LINE) if m.case.decodes and not m.case.chunks]
    return [(ms - m.median_ms) / math.sqrt(2) / 1e3 for m in cases for ms in m.samples_ms]


def scatter_tokens(samples: Iterable[RequestResult], delays_s: Sequence[float], seed: int = 0) -> None:
    """Add a delay, drawn from `delays_s`, to the tokens of each step; tokens of a request keep their order."""
    samples = list(samples)
    if not delays_s:
        return
    source = random.Random(seed)
    steps = sorted({time for sample in samples for time in sample.token_s})
    delayed = {time: time + source.choice(delays_s) for time in steps}
    for sample in samples:
        sample.token_s[:] = itertools.accumulate((delayed[time] for time in sample.token_s), max)
