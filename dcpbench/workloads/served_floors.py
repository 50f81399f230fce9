"""How far the steps of a served load are from their floors, and how busy prompts keep the matrix units."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.points.floors import step_floors, step_matmul_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.points.floors import Sharding
    from dcpbench.records.record import Rates
    from dcpbench.workloads.serving_loop import Timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Of all steps of a kind together: sums over sums. None where no step was timed or a rate is missing."""

    prefill_floor_share: float | None = None
    """Floors of steps with chunks of prompts over their times; decodes beside them count."""
    prefill_matmul_share: float | None = None
    """The time of their operations at the matrix rates over their times."""
    decode_floor_share: float | None = None
    """Floors of steps without chunks over their times."""


def shares(sharding: Sharding, steps: Sequence[Timed], rates: Rates | None) -> Shares:
    """What `steps` took, against what they could at the `rates` of their machine; experts are hit as expected."""
    if rates is None or not steps:
        return Shares()
    limits = rates.limits
    prompts, decodes = ([step for step in steps if bool(step.chunks) == kind] for kind in (True, False))
    return Shares(
        prefill_floor_share=_floor_share(sharding, prompts, limits),
        prefill_matmul_share=_matmul_share(sharding, prompts, limits),
        decode_floor_share=_floor_share(sharding, decodes, limits),
    )


def _floor_share(sharding: Sharding, steps: Sequence[Timed], limits: dict[str, float]) -> float | None:
    spent, least = sum(step.ms for step in steps), 0.0
    for step in steps:
        floors = step_floors(sharding, step.rows(), limits)
        if floors is None:
            return None
        least += sum(floors.values()) / 1e3
    return least / spent if spent else None


def _matmul_share(sharding: Sharding, steps: Sequence[Timed], limits: dict[str, float]) -> float | None:
    spent_s, least_s = sum(step.ms for step in steps) / 1e3, 0.0
    for step in steps:
        seconds = step_matmul_s(sharding, step.rows(), limits)
        if seconds is None:
            return None
        least_s += seconds
    return least_s / spent_s if spent_s else None
