"""Compute the shares of the floors in the step times of a served load, and the utilisation of the matrix units by
prompts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.points.roofline import compute_step_floors, compute_step_matmul_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.points.roofline import Sharding
    from dcpbench.records.record import Rates
    from dcpbench.workloads.serving_loop import TimedStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares over all steps of a kind: ratios of sums. None if no step was timed or a rate is missing."""

    prefill_floor_share: float | None = None  # floors over times of steps with prompt chunks, decode rows included
    prefill_matmul_share: float | None = None  # the time of their operations at the matrix rates over their times
    decode_floor_share: float | None = None  # floors of steps without chunks over their times


def compute_shares(sharding: Sharding, steps: Sequence[TimedStep], rates: Rates | None) -> Shares:
    """Return the shares of `steps` at the `rates` of their machine; the number of experts hit is the expected one."""
    if rates is None or not steps:
        return Shares()
    limits = rates.limits
    prompts, decodes = ([step for step in steps if bool(step.chunks) == kind] for kind in (True, False))

    def compute_floor_ms(step: TimedStep) -> float | None:
        floors_us = compute_step_floors(sharding, step.to_step_rows(), limits)
        return None if floors_us is None else sum(floors_us.values()) / 1e3

    def compute_matmul_ms(step: TimedStep) -> float | None:
        seconds = compute_step_matmul_s(sharding, step.to_step_rows(), limits)
        return None if seconds is None else seconds * 1e3

    return Shares(
        prefill_floor_share=_compute_share(prompts, compute_floor_ms),
        prefill_matmul_share=_compute_share(prompts, compute_matmul_ms),
        decode_floor_share=_compute_share(decodes, compute_floor_ms),
    )


def _compute_share(steps: Sequence[TimedStep], compute_ms: Callable[[TimedStep], float | None]) -> float | None:
    """Return the sum of `compute_ms` over the time of the steps; None without steps, or if it is unknown for one."""
    least_ms = [compute_ms(step) for step in steps]
    known_ms = [ms for ms in least_ms if ms is not None]
    return sum(known_ms) / sum(step.ms for step in steps) if steps and len(known_ms) == len(steps) else None
