"""Format a load, such as `closed 48 · 4,000 in · 1,500 out`, and the objectives of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.points.names import CLOSED, GAMMA, LIVE, REPLAY, TRACE_TIMES
from dcpbench.points.point import AXES
from dcpbench.records.formulas import GAPS_PER_MISS
from dcpbench.records.metrics import LATENCIES
from dcpbench.serving.load_words import format_drawn, format_sessions
from dcpbench.show.model_fit import format_no_fit
from dcpbench.show.numbers import format_value_range

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pandas as pd

    from dcpbench.points.point import Load, Point
    from dcpbench.records.record import Record

SERVED = {LIVE: "Served live", REPLAY: "Replay: the scheduler in virtual time, over step times measured before"}
"""Headings of the tables of points."""
FEW_SAMPLES = "few_samples"  # warning that dashes already express, and percentile by which an SLO is judged
OBJECTIVES = {name: latency.label for name, latency in LATENCIES.items()}
SEPARATOR = " · "
_ROUTING = next(axis for axis in AXES if axis.name == "routing")
OF_SESSIONS = (  # printed only if requests are turns of sessions
    "turns",
    "turn_tokens",
    "think_time",
    "system_tokens",
    "branch",
    "subagents",
)


def format_arrival(point: Point) -> str:
    """Return the arrival of requests: `closed 48`, `2 req/s Poisson`, `2 req/s gamma 0.5`, `trace times`.

    `2 req/s Poisson, as drawn` means that gaps were kept as drawn (`load.paced` is False).
    """
    load = _get_load(point)
    if load.arrival == CLOSED:
        return f"closed {point.concurrency:,}"
    if load.arrival == GAMMA:
        kind = "Poisson" if load.burstiness == 1 else f"gamma {load.burstiness:g}"
        return f"{load.request_rate or 0:g} req/s {kind}{format_drawn(load)}"
    return TRACE_TIMES


def format_shape(load: Load) -> str:
    """Return the shape of requests: `4,000 in · 1,500 out · 50 % shared by 4 groups` or `requests of chat.jsonl`."""
    return SEPARATOR.join(list_shape_parts(load))


def list_shape_parts(load: Load) -> list[str]:
    """Return the parts of format_shape: lengths, shared prefix and sessions."""
    parts = [f"{format_lengths(load.input_tokens)} in", f"{format_lengths(load.output_tokens)} out"]
    if load.trace:
        parts = [f"requests of {load.trace}"]
    if load.prefix_share:
        groups = f" by {load.prefix_groups:,} groups" if load.prefix_groups > 1 else ""
        parts.append(f"{load.prefix_share * 100:g} % shared{groups}")
    if load.sessions:
        parts.append(format_sessions(load))
    return parts


def format_routing(routing: str) -> str:
    """Return `zipf:1 routing`, or the name of the file; empty if the router decides."""
    return _ROUTING.format_value(routing)


def format_context(context: int, routing: str) -> str:
    """Return the context of a point of `decode` with its routing: `4,000`; `4,000 · zipf:1 routing`."""
    return SEPARATOR.join(filter(None, (f"{context:,}", format_routing(routing))))


def format_served_load(point: Point) -> str:
    """Return arrival and shape: `closed 48 · 4,000 in · 1,500 out`."""
    return f"{format_arrival(point)}{SEPARATOR}{format_shape(_get_load(point))}"


def format_lengths(spec: str) -> str:
    """Format `4000` as `4,000`, `uniform:1000-7000` as `1,000–7,000`, `lognormal:4000:0.5` as `≈4,000 (σ 0.5)`.

    Lengths that an import defines itself, such as `mean:3552`, become `3,552 on average`.
    """
    kind, _, rest = spec.partition(":")
    try:
        if kind == "uniform":
            return "–".join(f"{int(n):,}" for n in rest.split("-"))
        if kind == "lognormal":
            median, _, sigma = rest.partition(":")
            return f"≈{int(median):,} (σ {sigma})"
        if kind == "mean":
            return f"{int(rest):,} on average"
        return f"{int(spec):,}"
    except ValueError:
        return spec


def get_typical_length(spec: str) -> float | None:
    """Return the middle of such lengths; None if a file defines them."""
    kind, _, rest = spec.partition(":")
    try:
        if kind == "uniform":
            low, high = rest.split("-")
            return (int(low) + int(high)) / 2
        return float(rest.partition(":")[0] if kind in ("lognormal", "mean") else spec)
    except ValueError:
        return None


def format_objectives(slo_ms: Mapping[str, float]) -> str:
    """Format objectives: `TTFT ≤ 500 ms, ITL ≤ 50 ms in 99 of 100 gaps`; empty without any."""
    return ", ".join(
        f"{OBJECTIVES.get(name, name)} ≤ {limit:,g} ms"
        + (f" in {GAPS_PER_MISS - 1} of {GAPS_PER_MISS} gaps" if name == "itl" else "")
        for name, limit in slo_ms.items()
    )


def make_short_shapes(rows: pd.DataFrame) -> dict[str, str]:
    """Return the part that distinguishes request lengths: `4,000 in` of `4,000 in · 500 out` if all have 500 out.

    The keys are the texts in the column `rest`, in order; their parts are in the column `rest_parts`.
    """
    parts = _collect_parts(rows)
    shared = _find_shared(parts)
    return {rest: SEPARATOR.join(p for p in own if p not in shared) or rest for rest, own in parts.items()}


def find_shared_shape(rows: pd.DataFrame) -> str:
    """Return the part that all request lengths share, such as `500 out`; empty for a single one, or if they share nothing."""
    return SEPARATOR.join(_find_shared(_collect_parts(rows)))


def _collect_parts(rows: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    return dict(zip(rows["rest"], rows["rest_parts"], strict=True))


def _find_shared(parts: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the parts that all have, in order; none for a single one, which shares everything with itself."""
    first, *others = parts.values()
    return [p for p in first if all(p in other for other in others)] if others else []


def describe_layers_held(records: Iterable[Record]) -> str:
    """Return format_no_fit of repeats of a point, by the fewest layers that one of them held; empty if all held all, or if unknown."""
    fewer = [(h.layers_held, h.layers) for r in records if (h := r.conditions) and h.layers_held < h.layers]
    return format_no_fit(*map(str, min(fewer))) if fewer else ""


def _get_load(point: Point) -> Load:
    assert point.load is not None
    return point.load


def format_clients(rows: pd.DataFrame) -> str:
    """Return the requests in flight and the lengths of closed loops: `8–48 requests of 4,000–128,000 tokens`."""
    clients, lengths = rows["concurrency"], rows["input_typical"]
    of = f" of {format_value_range(lengths, '{:,.0f}')} tokens" if lengths.notna().all() else ""
    return f"{format_value_range(clients, '{:,.0f}')} {'request' if clients.max() == 1 else 'requests'}{of}"


def list_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table, each by the names of its columns."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def list_unique(values: Iterable[object]) -> list[str]:
    """Return each value once, as text, in order of first appearance."""
    return list(dict.fromkeys(map(str, values)))
