"""Compute what a layout's weights and KV cache take of each GPU, and how many requests of a load fit. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.errors import InsufficientMemoryError
from dcpbench.points.budget import measure_whole_model, plan_engine
from dcpbench.records.record import Kv

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Hold what a layout takes of each GPU and how much KV it holds, all layers of the model included."""

    weight_bytes: int  # of each GPU
    missing_bytes: int = 0  # by which weights, the smallest KV cache and buffers exceed a GPU
    kv_tokens: int | None = None  # over all replicas; None if the whole model does not fit
    requests: int | None = None  # of the load's longest request that fit at once


def measure_capacity(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> Capacity:
    """Return the capacity of a layout for requests of the point's context."""
    whole = measure_whole_model(point, settings, shape, probe)
    only = Capacity(weight_bytes=whole.weight_bytes, missing_bytes=whole.missing_bytes)
    if whole.missing_bytes:
        return only
    try:
        plan = plan_engine([point], settings, shape, probe)
    except InsufficientMemoryError:
        return only
    kv = Kv.from_plan(plan, point.context)
    return dataclasses.replace(only, kv_tokens=kv.capacity_tokens, requests=kv.capacity_requests)
