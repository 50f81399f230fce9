"""Estimate the times of steps of several tokens from measured steps of one token. No torch.

A step that verifies N drafts of each request has N + 1 query rows of it: attention reads its KV rows once and computes N + 1 rows,
all other parts see as many rows more. Behind it the layer that drafts tokens, if the model has one, runs N times. The measured time
of a step is multiplied by

    (floor of the step with drafts + floors of the passes that draft) / floor of the measured step

where a floor is the least time of memory and products at the nominal rates of the GPU (points/roofline.py), without calls between
ranks. This assumes that both reach the same share of their floors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from dcpbench.points.cluster_specs import MEASURED_ON, get_limits, load_machine
from dcpbench.points.gpus import GPUS
from dcpbench.points.roofline import Sharding, compute_local_us

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.points.point import Point
    from dcpbench.serving.step_times import Case, StepTimes


def estimate_draft_steps(times: StepTimes, point: Point) -> tuple[StepTimes, str]:
    """Return the step times of a point with drafts, and how they were obtained; empty if its own steps were measured.

    Raise UsageError for step times of another engine, or of steps with other drafts.
    """
    if times.path["mtp"] == point.mtp:
        return times, ""
    if times.engine is not None or times.path["mtp"]:
        raise UsageError(
            f"--mtp {point.mtp}: these step times are of {'another engine' if times.engine else 'steps with other drafts'}; name a file of "
            "dcpbench's engine that was measured with --mtp 0, or with these drafts."
        )
    gpu = find_gpu(times, point)
    ratios = DraftRatios(point, get_limits(load_machine(gpu)))
    cases = [
        msgspec.structs.replace(
            m,
            samples_ms=[ms * ratio for ms in m.samples_ms],
            host_ms=[ms * ratio for ms in m.host_ms],
        )
        for m in times.cases
        for ratio in [ratios.compute(m.case)]
    ]
    path = {**times.path, "mtp": point.mtp}
    how = f"estimated: measured steps of one token times the ratio of floors at the rates of {gpu}"
    return msgspec.structs.replace(times, path=path, cases=cases), how


def find_gpu(times: StepTimes, point: Point) -> str:
    """Return the GPU of the step times; on the CPU, where times do not reflect performance, the one with published steps."""
    if point.emulate:
        return load_machine(point.emulate).gpu
    return next((gpu.name for gpu in GPUS if gpu.device == times.environment.device), MEASURED_ON)


class DraftRatios:
    """Ratios of the floors of a case with drafts and without."""

    def __init__(self, point: Point, limits: Mapping[str, float]) -> None:
        self.point, self.limits = point, limits
        self.sharding = Sharding.from_point(point, load_shape(point.model))
        self.draft_layer = self.sharding.make_draft_layer()

    def compute(self, case: Case) -> float:
        """Return the factor by which the step of a case is longer with drafts."""
        rows = case.compute_rows(self.point.dp, self.point.mtp + 1)
        drafts = [(self.draft_layer, of) for of in rows.make_draft_passes()] if self.draft_layer else []
        longer = sum(compute_local_us(*one, self.limits) for one in [(self.sharding, rows), *drafts])
        return longer / compute_local_us(self.sharding, case.compute_rows(self.point.dp), self.limits)
