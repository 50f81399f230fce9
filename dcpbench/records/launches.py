"""Measure by how much launches of the same point differ, for each thing that measured points. No torch, no numpy."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, TypeVar, overload

from dcpbench.records.record import OURS, get_origin
from dcpbench.records.runs import compute_measurement_digest
from dcpbench.records.stats import REPEATS_AGREE_WITHIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run

T = TypeVar("T")


def measure_bands(runs: Sequence[Run]) -> dict[str, float]:
    """Return for each origin the share by which two launches of a point may differ; a run's folder is one launch.

    For dcpbench's own engine this is REPEATS_AGREE_WITHIN (docs/reading-a-report.md). For any other origin it is the largest
    difference between launches of one of its points in these runs, and at least REPEATS_AGREE_WITHIN, because the next pair
    of launches often differs by more than a single pair. The origin is left out if no point was launched twice. An exact
    copy of a record is no launch.
    """
    seen: set[bytes] = set()
    launches: dict[tuple[str, str], dict[int, list[float]]] = {}
    for number, run in enumerate(runs):
        for record in run.records:
            rate = _get_tok_s(record)
            if rate is None or (one := compute_measurement_digest(record)) in seen:
                continue
            seen.add(one)
            key = (get_origin(record), f"{record.point.get_key_without_repeat()} {record.measured_with}")
            launches.setdefault(key, {}).setdefault(number, []).append(rate)
    bands: dict[str, float] = {}
    for (name, _), of_point in launches.items():
        if len(of_point) > 1:
            rates = [statistics.median(found) for found in of_point.values()]
            bands[name] = max(bands.get(name, REPEATS_AGREE_WITHIN), max(rates) / min(rates) - 1)
    return bands | {OURS: REPEATS_AGREE_WITHIN}


@overload
def is_clearly_ahead(ratio: float, low: float, band: float) -> bool: ...


@overload
def is_clearly_ahead(ratio: T, low: T, band: T | float) -> T: ...


def is_clearly_ahead(ratio, low, band):  # type: ignore[no-untyped-def]
    """Return whether something is clearly ahead: the whole interval of the ratio is above 1, and the lead exceeds `band`.

    `low` is the lower end of the interval, `band` the share by which launches may differ (measure_bands). Reports, forecasts and
    recommendations decide by this function alone; it takes numbers or columns.
    """
    return (low > 1) & (ratio > 1 + band)


def _get_tok_s(record: Record) -> float | None:
    if record.outcome != "ok":
        return None
    rate = record.serve.output_tok_s if record.serve else record.metrics.output_tok_s.median if record.metrics else None
    return rate if rate and rate > 0 else None
