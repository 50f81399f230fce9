"""Compute the shares of the floors in the step times of a served load, and the utilisation of the matrix units by
prompts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.points.roofline import compute_step_floors, compute_step_matmul_s

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    return Shares(
        prefill_floor_share=_compute_floor_share(sharding, prompts, limits),
        prefill_matmul_share=_compute_matmul_share(sharding, prompts, limits),
        decode_floor_share=_compute_floor_share(sharding, decodes, limits),
    )


def _compute_floor_share(sharding: Sharding, steps: Sequence[TimedStep], limits: dict[str, float]) -> float | None:
    spent, least = sum(step.ms for step in steps), 0.0
    for step in steps:
        floors = compute_step_floors(sharding, step.to_step_rows(), limits)
        if floors is None:
            return None
        least += sum(floors.values()) / 1e3
    return least / spent if spent else None


def _compute_matmul_share(sharding: Sharding, steps: Sequence[TimedStep], limits: dict[str, float]) -> float | None:
    spent_s, least_s = sum(step.ms for step in steps) / 1e3, 0.0
    for step in steps:
        seconds = compute_step_matmul_s(sharding, step.to_step_rows(), limits)
        if seconds is None:
            return None
        least_s += seconds
    return least_s / spent_s if spent_s else None
