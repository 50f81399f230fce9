"""Served points in a terminal: a table for each run, model, mode and kind of load, in 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.points.names import CLOSED, GAMMA, TRACE
from dcpbench.reports.serving.tables import FEW_SAMPLES
from dcpbench.reports.serving.words import MODES
from dcpbench.reports.tables import whole
from dcpbench.reports.terminal_parts import Column, Fitted, plain, shown_marks
from dcpbench.show.numbers import missing, number

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from dcpbench.reports.frames import Frames

KINDS = {CLOSED: "closed loop", GAMMA: "open loop", TRACE: "at the trace's times"}
LOADS = {CLOSED: "conc.", GAMMA: "req/s"}


def served(frames: Frames) -> list[RenderableType]:
    """The tables, live runs and replays apart, each with what must be known of it below."""
    parts: list[RenderableType] = []
    points = frames.served
    several = len(frames.runs) > 1
    keys = ["run", "model", "mode", "load_arrival", "rest"]
    for key, group in points.groupby(keys, sort=False) if len(points) else ():
        run, model, mode, arrival, rest = map(str, key)
        where = f"{model}, run {run}" if several else model
        title = f"{where}, {MODES.get(mode, mode)}: {KINDS.get(arrival, arrival)} · {rest}"
        parts.append(_table(title + (" (CPU: functional run)" if group["cpu"].all() else ""), arrival, group))
        parts += [plain(sentence) for sentence in _below(group)]
    return parts


def _table(title: str, arrival: str, points: pd.DataFrame) -> Fitted:
    columns = [Column(LOADS[arrival], [_load(p) for _, p in points.iterrows()])] if arrival in LOADS else []
    columns += [
        Column("tok/s", [number(v) for v in points["output_tok_s"]]),
        Column("/GPU", [number(v, 3) for v in points["output_tok_s_per_gpu"]], drop=0, said="tok/s per GPU"),
        Column("TTFT ms", [number(v, 3) for v in points["ttft_p50_ms"]], drop=4),
        Column("p99", [number(v, 3) for v in points["ttft_p99_ms"]], drop=1, said="TTFT p99"),
        Column("ITL ms", [number(v, 3) for v in points["itl_p50_ms"]]),
        Column("p99", [number(v, 3) for v in points["itl_p99_ms"]], drop=2, said="ITL p99"),
    ]
    if points["goodput_s"].notna().any():
        columns.append(Column("good/s", [number(v, 2) for v in points["goodput_s"]], drop=3))
    return Fitted(title, list(points["label"]), columns, gap=1)


def _load(point: pd.Series[Any]) -> str:
    if point["load_arrival"] == CLOSED:
        return f"{point['concurrency']:,}"
    burst = "" if point["load_burstiness"] == 1 else f" γ{point['load_burstiness']:g}"
    return f"{point['load_request_rate']:g}{burst}"


def _below(points: pd.DataFrame) -> list[str]:
    """Marks, what was not served, what was preempted, and what goodput stands for."""
    notes = []
    marks: dict[str, list[str]] = {}
    for text, (_, p) in zip(shown_marks(points), points.iterrows(), strict=True):
        if said := ", ".join(mark for mark in text.split(", ") if mark and mark != FEW_SAMPLES):
            marks.setdefault(said, []).append(f"{p['label']} at {p['arrival']}")
    notes += _bounds(points)
    notes += [f"{mark}: {', '.join(where) if len(where) < len(points) else 'all'}" for mark, where in marks.items()]
    preempted = points[points["preemptions"] > 0]
    clauses = [f"{p['label']} at {p['arrival']} {whole(p['preemptions'])}" for _, p in preempted.iterrows()]
    notes += [f"preemptions: {', '.join(clauses)}"] if clauses else []
    cut, rejected = points["cancelled"].sum(), points["rejected"].sum()
    notes += [f"not served: {cut:,.0f} requests cut off, {rejected:,.0f} that can never fit"] if cut or rejected else []
    slos = [slo for slo in dict.fromkeys(points["slo"]) if slo]
    return notes + ([f"good/s: requests per second with {'; or '.join(slos)}"] if slos else [])


def _bounds(points: pd.DataFrame) -> list[str]:
    """What keeps an open loop from serving more at once. A closed loop's clients stand in the table."""
    found: dict[str, list[str]] = {}
    for _, p in points[points["load_arrival"] != CLOSED].iterrows():
        asked, held, sent = p["concurrency"], p["kv_capacity_requests"], p["load_requests"]
        if not missing(held) and held < min(asked, sent):
            bound = f"{whole(held)} of full length by KV space ({asked:,} by --concurrency)"
        elif asked < sent:
            bound = f"{asked:,} by --concurrency"
        else:
            bound = f"all {sent:,}"
        found.setdefault(bound, []).append(str(p["label"]))
    clauses = [f"{', '.join(dict.fromkeys(labels))} {bound}" for bound, labels in found.items()]
    return [f"requests at once, at most: {'; '.join(clauses)}"] if clauses else []
