"""Report how prompt chunks delay concurrent decodes: which layout meets the ITL objective under which load, and with which chunk.

Here a load is the same for every value of `--prefill chunk` that it was served with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.points.instances import parse_instances
from dcpbench.reports import findings
from dcpbench.reports.load_labels import list_unique
from dcpbench.reports.tables import Table, format_cut, make_table, make_text_columns
from dcpbench.show.numbers import ABSENT, format_number, format_percent, is_missing
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.reports.dataframes import Frames

CHUNK = "load_chunk"
MAX_LOADS = 4  # maximum number of loads that the sentence names
MAX_CHUNKS = 12  # maximum number of columns of the table
BEYOND_P99 = 0.01  # share of steps that hold chunks; below it p99 may be smaller than all gaps that the chunks lengthen
HALF = 0.5  # share of steps that hold chunks; above it the median gap is one of the lengthened ones


def describe_stalls(points: pd.DataFrame) -> str:
    """Name the loads in which no layout meets the ITL objective, or in which only some chunks do, with the reason; else empty."""
    judged = _select_judged(points)
    if judged.empty:
        return ""
    several, clauses = len(set(judged["gpus"])) > 1, []
    for _, load in judged.groupby(["load", "gpus"], sort=False):
        gpus = f" on {format_count(int(load['gpus'].iloc[0]), 'GPU')}" if several else ""
        clauses += [text] if (text := _describe_load(load, gpus)) else []
    if not clauses:
        return ""
    limit, more = judged["limit"].iloc[0], len(clauses) - MAX_LOADS
    joined = "; ".join(clauses[:MAX_LOADS]) + (f"; and {more:,} more loads" if more > 0 else "")
    return f"ITL ≤ {limit:,g} ms: {joined}."


def build_table(frames: Frames) -> Table:
    """Build a table of ITL and output with a column for each known chunk; empty if there is only one."""
    points = findings.select_timed(frames.served)
    points = points[points[CHUNK] > 0] if len(points) else points
    chunks = sorted(set(points[CHUNK])) if len(points) else []
    title = f"ITL p99 ms (output tok/s) by the tokens of a chunk{format_cut((MAX_CHUNKS, len(chunks), 'chunks'))}"
    if len(chunks) < 2:  # noqa: PLR2004 - nothing to compare
        return Table(title, [], [])
    points = points.assign(load=points["load_with_any_chunk"])
    rows = []
    for (run, model, mode, load, label), own in points.groupby([*findings.SCOPE, "load", "label"], sort=False):
        cells = {
            f"{r[CHUNK]:,}": f"{format_number(r['itl_p99_ms'], 3)} ({format_number(r['output_tok_s'], 3)})"
            for r in own.to_dict("records")
        }
        rows.append({"run": run, "model": model, "mode": mode, "load": load, "layout": label} | cells)
    names = [f"{chunk:,}" for chunk in chunks[:MAX_CHUNKS]]
    found = pd.DataFrame(rows).reindex(columns=["run", "model", "mode", "load", "layout", *names]).fillna(ABSENT)
    return make_table(title, found, make_text_columns("model", "mode", "load", "layout", *names), text_columns=4)


def _select_judged(points: pd.DataFrame) -> pd.DataFrame:
    """Return the served points with an ITL objective: `limit`, the judged `value`, and its percentile `at`."""
    if points.empty or "slo_itl_at" not in points or CHUNK not in points:
        return pd.DataFrame()
    points = points[(points["slo_itl_at"] != "") & (points["mode"] != "decode")]
    value = [row[f"itl_{row['slo_itl_at']}_ms"] for row in points.to_dict("records")]
    limit = [limits["itl"] for limits in points["slo_limits"]]
    found = points.assign(value=value, limit=limit, at=points["slo_itl_at"], load=points["load_with_any_chunk"])
    return found[found["value"].notna()].assign(keeps=lambda t: t["value"] <= t["limit"])


def _describe_load(load: pd.DataFrame, gpus: str) -> str:
    """Describe a load on one number of GPUs; empty if all points meet the objective, or chunks change nothing."""
    chunks = sorted(set(load[CHUNK].astype(int)))
    several = f" with chunks of {format_list([f'{c:,}' for c in chunks], 'or')}" if len(chunks) > 1 else ""
    where = f"at {load['load'].iloc[0]}{gpus} "
    kept, missed = (load[load["keeps"] == own].sort_values("output_tok_s", kind="stable") for own in (True, False))
    if kept.empty:
        near = load.sort_values("value", kind="stable").to_dict("records")[0]
        return f"{where}no layout keeps it{several}{_explain_stall(near)}; nearest is {_format_layout(near, chunks)} ({_format_figures(near)})"
    of_kept, of_missed = kept.to_dict("records")[-1], missed.to_dict("records")[-1] if len(missed) else None
    if (
        of_missed is None
        or of_missed["output_tok_s"] <= of_kept["output_tok_s"]
        or not (why := _explain_stall(of_missed))
    ):
        return ""
    others = [label for label in list_unique(load["label"]) if label not in set(kept["label"])]
    none = f"; {format_list(others)} with none" if others and several else ""
    pair = (
        f"{_format_layout(row, chunks)} {does} ({_format_figures(row)})"
        for row, does in ((of_kept, "keeps it"), (of_missed, "does not"))
    )
    return f"{where}{', and '.join(pair)}{why}{none}"


def _format_layout(row: Mapping[Any, Any], chunks: list[int]) -> str:
    """Return `tp4 with 2,048`, without the chunk if there is only one."""
    return f"{row['label']} with {int(row[CHUNK]):,}" if len(chunks) > 1 else str(row["label"])


def _format_figures(row: Mapping[Any, Any]) -> str:
    """Return `p99 131 ms, 185 tok/s`."""
    return f"{row['at']} {format_number(row['value'], 3)} ms, {format_number(row['output_tok_s'], 3)} tok/s"


def _explain_stall(row: Mapping[Any, Any]) -> str:
    """Return `, since chunks of prompts stall decodes (8.3 % of steps, median gap 65.2 ms)` if that holds; else empty."""
    if (
        is_missing(row["steps"])
        or not row["steps"]
        or parse_instances(row["disaggregate"]).disaggregated
        or row["preemptions"]
    ):
        return ""
    share = 1 - row["decode_steps"] / row["steps"]
    if share < BEYOND_P99 or (row["itl_p50_ms"] > row["limit"] and share < HALF):
        return ""
    return (
        f", since chunks of prompts stall decodes ({format_percent(share)} of steps have some, the median gap is "
        f"{format_number(row['itl_p50_ms'], 3)} ms)"
    )
