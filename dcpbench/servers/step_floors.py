"""Compute floors of an engine's decode steps from rates that dcpbench's own engine measured on the same machine. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import ModelError, UsageError
from dcpbench.models import load_shape
from dcpbench.models.weight_formats import PAPER_FORMATS
from dcpbench.points.budget import ITEMSIZE
from dcpbench.points.memory import HEADROOM_TOKENS
from dcpbench.points.names import MOE_TP, UNKNOWN, WEIGHT_FORMATS
from dcpbench.points.roofline import Sharding, StepRows, compute_step_floors
from dcpbench.records.record import ENGINE_DTYPES, Floor
from dcpbench.records.runs import read_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.point import Point
    from dcpbench.records.record import EngineSettings, Rates

PHASES_OF_PARTS = {"attention": ("attention",), "KV cache write": ("kv_write",)}  # our phases by equal engine part
QUANTISERS = ("compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4", "gpt_oss_mxfp4")
"""Names of engines for quantisations of several formats, of which a model's configuration states one."""
REDUCE, REDUCE_PHASES = "all-reduce", ("attn_reduce", "mlp_reduce")  # the same without attention data parallelism


def read_rates(run: Path, device: str) -> dict[int, Rates]:
    """Return the rates in the records of a run, by the number of GPUs that took part in their measurement.

    Raise UsageError if the run has none, or if it was measured on another GPU than `device`; an empty name is not compared.
    """
    records = [record for record in read_run(run).records if record.rates is not None]
    if not records:
        raise UsageError(
            f"--rates {run}: no point of this run has measured rates; name a run of dcpbench sweep on GPUs of this machine."
        )
    names = {record.environment.device for record in records if record.environment}
    if device and names - {device}:
        raise UsageError(
            f"--rates {run} was measured on {', '.join(sorted(names))}, and this machine has {device}; name a run of this machine."
        )
    return {record.point.tp: record.rates for record in records if record.rates is not None}


def compute_engine_floor(
    point: Point, settings: EngineSettings | None, rates: Mapping[int, Rates]
) -> tuple[Rates, Floor] | None:
    """Return the floor of an engine's decode point with the rates behind it, for evenly distributed experts.

    None without rates of as many GPUs, for a model of unknown sizes, and for a data type that the engine's log does not state or
    that has no floor. Only parts with the same work as phases of our own step have a separate floor.
    """
    if point.tp not in rates:
        return None
    try:
        shape = load_shape(point.model)
    except ModelError:
        return None
    stored = _find_precisions(settings, shape)
    if stored is None:
        return None
    known = msgspec.structs.replace(point, **stored, ep=MOE_TP if point.ep == UNKNOWN else point.ep)
    rows = -(-point.concurrency // point.dp)
    step = StepRows(decodes=(point.context + HEADROOM_TOKENS,) * rows, sampled=rows, tokens=point.concurrency)
    found = compute_step_floors(Sharding.from_point(known, shape), step, rates[point.tp].limits)
    if found is None:
        return None
    parts = PHASES_OF_PARTS | ({REDUCE: REDUCE_PHASES} if point.dp == 1 else {})
    of_parts = {part: sum(found.get(phase, 0.0) for phase in phases) for part, phases in parts.items()}
    floor = Floor(
        floor_ms=sum(found.values()) / 1e3,
        phase_floor_us={part: us for part, us in of_parts.items() if us},
        experts="expected",
    )
    return rates[point.tp], floor


def _find_precisions(settings: EngineSettings | None, shape: ModelShape) -> dict[str, str] | None:
    """Return the precisions of an engine as a point has them, None if one is unknown; a cache without its own has that of activations.

    Engines name the library of a quantisation (`compressed-tensors`, `modelopt`): the weights then have the format of the model.
    """
    if settings is None or settings.dtype is None:
        return None
    dtype = ENGINE_DTYPES.get(settings.dtype, settings.dtype)
    weights = ENGINE_DTYPES.get(settings.weights_dtype or settings.dtype, settings.weights_dtype or dtype)
    if weights in QUANTISERS and shape.published.name in PAPER_FORMATS:
        weights = shape.published.name
    found = {
        "dtype": dtype,
        "weights_dtype": weights,
        "kv_dtype": ENGINE_DTYPES.get(settings.kv_dtype or settings.dtype, settings.kv_dtype or dtype),
    }
    known = {*ITEMSIZE, *WEIGHT_FORMATS}
    return found if known.issuperset(found.values()) and found["kv_dtype"] in ITEMSIZE else None
