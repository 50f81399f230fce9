"""Served points in a terminal: a table for each run, model, mode and kind of load, in 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.choices import CLOSED, GAMMA, TRACE
from dcpbench.reports.serving.tables import FEW_SAMPLES, whole
from dcpbench.reports.serving.words import MODES
from dcpbench.reports.tables import number
from dcpbench.reports.terminal_parts import empty, plain, told_marks

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
    from rich.table import Table

    from dcpbench.reports.frames import Frames

KINDS = {CLOSED: "closed loop", GAMMA: "open loop", TRACE: "at the trace's times"}
LOADS = {CLOSED: "conc.", GAMMA: "req/s"}
NUMBERS = ("tok/s", "/GPU", "TTFT ms", "p99", "ITL ms", "p99")


def served(frames: Frames) -> list[RenderableType]:
    """The tables, live runs and replays apart, each with what must be known of it below."""
    told: list[RenderableType] = []
    points = frames.served
    several = len(frames.runs) > 1
    keys = ["run", "model", "mode", "load_arrival", "rest"]
    for key, group in points.groupby(keys, sort=False) if len(points) else ():
        run, model, mode, arrival, rest = map(str, key)
        where = f"{model}, run {run}" if several else model
        title = f"{where}, {MODES.get(mode, mode)}: {KINDS.get(arrival, arrival)} · {rest}"
        told.append(_table(title + (" (CPU: functional run)" if group["cpu"].all() else ""), arrival, group))
        told += [plain(sentence) for sentence in _below(group)]
    return told


def _table(title: str, arrival: str, points: pd.DataFrame) -> Table:
    goodput = bool(points["goodput_s"].notna().any())
    loads = [LOADS[arrival]] if arrival in LOADS else []
    table = empty(title, (*loads, *NUMBERS, *(["good/s"] if goodput else [])), gap=1)
    for _, p in points.iterrows():
        table.add_row(
            plain(p["label"]),
            *([_load(p)] if loads else []),
            number(p["output_tok_s"]),
            number(p["output_tok_s_per_gpu"], 3),
            *(number(p[name], 3) for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")),
            *([number(p["goodput_s"], 2)] if goodput else []),
        )
    return table


def _load(point: pd.Series[Any]) -> str:
    if point["load_arrival"] == CLOSED:
        return f"{point['concurrency']:,}"
    burst = "" if point["load_burstiness"] == 1 else f" γ{point['load_burstiness']:g}"
    return f"{point['load_request_rate']:g}{burst}"


def _below(points: pd.DataFrame) -> list[str]:
    """Marks, what was not served, what was preempted, and what goodput stands for."""
    told = []
    marks: dict[str, list[str]] = {}
    for text, (_, p) in zip(told_marks(points), points.iterrows(), strict=True):
        if said := ", ".join(mark for mark in text.split(", ") if mark and mark != FEW_SAMPLES):
            marks.setdefault(said, []).append(f"{p['label']} at {p['arrival']}")
    told += [f"{mark}: {', '.join(where) if len(where) < len(points) else 'all'}" for mark, where in marks.items()]
    preempted = points[points["preemptions"] > 0]
    clauses = [f"{p['label']} at {p['arrival']} {whole(p['preemptions'])}" for _, p in preempted.iterrows()]
    told += [f"preemptions: {', '.join(clauses)}"] if clauses else []
    cut, rejected = points["cancelled"].sum(), points["rejected"].sum()
    told += [f"not served: {cut:,.0f} requests cut off, {rejected:,.0f} that can never fit"] if cut or rejected else []
    slos = [slo for slo in dict.fromkeys(points["slo"]) if slo]
    return told + ([f"good/s: requests per second with {'; or '.join(slos)}"] if slos else [])
