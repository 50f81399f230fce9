"""Served points as a tidy table: what a row has beyond the columns that every point has (frames.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from dcpbench.points.layout import DEGREES
from dcpbench.points.memory import GIB
from dcpbench.points.names import CLOSED
from dcpbench.points.point import LOAD_AXES
from dcpbench.records.metrics import LATENCIES, METRIC, STATISTICS
from dcpbench.records.provenance import OURS
from dcpbench.records.record import Interval, ServeMetrics
from dcpbench.reports.merge import in_order, median, merged, spread
from dcpbench.reports.serving import words
from dcpbench.show.numbers import missing

if TYPE_CHECKING:
    from dcpbench.records.record import Record

VARIES = {
    "at_once": "{:,.0f} at once",
    **{axis.name: axis.label for axis in LOAD_AXES if axis.label},
    "kv_memory_gib": "{:g} GiB of KV",
    "limit_seconds": "ended at {:g} s",
}
"""What else of a load, or of the settings it was served with, may tell two points of a report apart, as printed."""
SOME_HAVE = tuple(name for name in VARIES if name not in ("kv_memory_gib", "limit_seconds"))
"""Of these, what only some points have: that the others have none tells nothing new. No import says any but
`requests`."""
SERVED = [name for name in ServeMetrics.__struct_fields__ if name in METRIC and name != "goodput_s"]
"""Metrics of a served point alone, in the order of a record; goodput is told with its objectives."""


def columns(records: list[Record]) -> dict[str, Any]:
    """Of one point, its repeats merged: medians, and for the output rate what it reached from repeat to repeat."""
    point = records[0].point
    load = point.load
    assert load is not None
    measured = [r.serve for r in records if r.serve]
    rates = [m.output_tok_s for m in measured]
    row: dict[str, Any] = {f"load_{name}": getattr(load, name) for name in load.__struct_fields__ if name != "mode"}
    settings = records[0].measured_with
    limit, kv_memory = settings.get("limit_seconds"), settings.get("kv_memory_bytes")
    row |= {
        "load_at_once": None if load.arrival == CLOSED else point.concurrency,
        "load_kv_memory_gib": kv_memory / GIB if isinstance(kv_memory, int) else None,
        "load_limit_seconds": limit if isinstance(limit, float | int) else None,
        "mode": load.mode,
        "arrival": words.arrival(point),
        "shape": words.shape(load),
        "input_typical": words.typical(load.input_tokens),
        "same_load": same_load(records[0]),
        "output_tok_s_low": min(rates, default=None),
        "output_tok_s_high": max(rates, default=None),
        "spread": spread([once(rate) for rate in rates]),
        "step_error": max((e for r in records if r.honesty and (e := r.honesty.step_error) is not None), default=None),
    }
    row |= merged(records, *SERVED)
    for name in LATENCIES:
        row |= merged(records, *(f"{name}_{statistic}_ms" for statistic in STATISTICS))
        row[f"{name}_samples"] = max((getattr(m, f"{name}_ms").samples for m in measured), default=0)
    row |= merged(records, "cached_share")
    return row | _objectives(measured)


def same_load(record: Record) -> str:
    """The same for all that were sent the same requests, in whichever mode, with the same KV memory and limit."""
    load = record.point.load
    assert load is not None
    sent = msgspec.json.encode(msgspec.structs.replace(load, mode="")).decode()
    settings = [record.measured_with.get(name) for name in ("limit_seconds", "kv_memory_bytes")]
    return f"{record.point.concurrency} {sent} {settings}"


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """With `load` in words, and in reading order: modes apart, then loads from light to heavy, then layouts."""
    if table.empty:
        return table
    # columns that may be unknown in every row, which pandas would not take for numbers
    table = table.assign(**{name: pd.to_numeric(table[name]) for name in METRIC if name in table})
    parts = [table["shape"].tolist()]
    for name, form in VARIES.items():
        told = _told(table, name).tolist()
        loads = table[f"load_{name}"].tolist()
        values = [None if v == "" or missing(v) or not said else v for v, said in zip(loads, told, strict=True)]
        if len(set(values) - ({None} if name in SOME_HAVE else set())) > 1:
            parts.append(["" if v is None else form.format(_word(v)) for v in values])
    rest = [words.SEPARATOR.join(filter(None, texts)) for texts in zip(*parts, strict=True)]
    table = table.assign(
        rest=rest, load=[f"{a}{words.SEPARATOR}{r}" for a, r in zip(table["arrival"], rest, strict=True)]
    )
    order = [
        "run",
        "model",
        "mode",
        "load_arrival",
        "input_typical",
        "rest",
        "load_request_rate",
        "concurrency",
        *DEGREES,
        "variant",
    ]
    return table.sort_values(order, kind="stable", ignore_index=True, key=in_order)


def _told(table: pd.DataFrame, name: str) -> pd.Series:
    """Of which points it is said. How many requests an import sent is, where nothing else tells two points apart.

    Other tools send as many as a load needs, often a multiple of the clients: the points are of one curve all the same.
    """
    ours = table["origin"].eq(OURS)
    if name == "requests":
        return ours | table.duplicated(["run", "model", "mode", "label", "arrival", "shape"], keep=False)
    return ours | (name not in SOME_HAVE)


def _word(value: object) -> object:
    return ("on" if value else "off") if isinstance(value, bool) else value


def once(value: float) -> Interval:
    """A rate that one run had: nothing is known of how far another would lie from it."""
    return Interval(median=value, low=value, high=value, samples=1)


def _objectives(measured: list[ServeMetrics]) -> dict[str, Any]:
    """Goodput and what it means; repeats with different objectives have none in common."""
    slos = list({words.objectives(m.slo_ms) for m in measured})
    if len(slos) != 1:
        return {"slo": "", "goodput_s": None}
    return {"slo": slos[0], "goodput_s": median(m.goodput_s for m in measured)}
