"""Report how prompt chunks delay concurrent decodes: which layout meets the ITL objective under which load, and with
which chunk.

Here a load is the same for every value of `--chunk` that it was served with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.points.instances import parse
from dcpbench.reports import findings
from dcpbench.reports.tables import Table, make_table, named, read_rows
from dcpbench.reports.words import SEPARATOR, unique
from dcpbench.show.numbers import ABSENT, missing, number, percent
from dcpbench.show.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.reports.frames import Frames

CHUNK = "load_chunk"
MOST_LOADS = 4
"""Maximum number of loads that the sentence names."""
MOST_CHUNKS = 12
"""Maximum number of columns of the table."""
BEYOND_P99 = 0.01
"""Share of steps that hold chunks; below it p99 may be smaller than all gaps that the chunks lengthen."""
HALF = 0.5
"""Share of steps that hold chunks; above it the median gap is one of the lengthened ones."""


def words(points: pd.DataFrame) -> str:
    """Name the loads in which no layout meets the ITL objective, or in which only some chunks do, with the reason; else
    empty.
    """
    judged = _judged(points)
    if judged.empty:
        return ""
    several, said = len(set(judged["gpus"])) > 1, []
    for _, load in judged.groupby(["load", "gpus"], sort=False):
        gpus = f" on {counted(int(load['gpus'].iloc[0]), 'GPU')}" if several else ""
        said += [text] if (text := _of_load(load, gpus)) else []
    if not said:
        return ""
    limit, more = judged["limit"].iloc[0], len(said) - MOST_LOADS
    told = "; ".join(said[:MOST_LOADS]) + (f"; and {more:,} more loads" if more > 0 else "")
    return f"ITL ≤ {limit:,g} ms: {told}."


def table(frames: Frames) -> Table:
    """Build a table of ITL and output of each load and layout, with a column for each chunk; empty if there is only one
    chunk.
    """
    points = findings.timed(frames.served)
    title = "ITL p99 ms (output tok/s) by the tokens of a chunk"
    chunks = sorted(set(points[CHUNK])) if len(points) else []
    if len(chunks) < 2:  # noqa: PLR2004 - nothing to compare
        return Table(title, [], [])
    points = _without_chunk(points)
    rows = []
    for (run, model, mode, load, label), own in points.groupby([*findings.SCOPE, "load", "label"], sort=False):
        cells = {
            f"{r[CHUNK]:,}": f"{number(r['itl_p99_ms'], 3)} ({number(r['output_tok_s'], 3)})"
            for r in read_rows(own)
        }
        rows.append({"run": run, "model": model, "mode": mode, "load": load, "layout": label} | cells)
    names = [f"{chunk:,}" for chunk in chunks[:MOST_CHUNKS]]
    found = pd.DataFrame(rows).reindex(columns=["run", "model", "mode", "load", "layout", *names]).fillna(ABSENT)
    return make_table(title, found, named("model", "mode", "load", "layout", *names), text_columns=4)


def _without_chunk(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points with `load` without its chunk, in the order of loads."""
    rest = [SEPARATOR.join(p for p in text.split(SEPARATOR) if not p.startswith("chunk ")) for text in points["rest"]]
    return points.assign(load=[f"{a}{SEPARATOR}{r}" for a, r in zip(points["arrival"], rest, strict=True)])


def _judged(points: pd.DataFrame) -> pd.DataFrame:
    """Return the served points with an ITL objective: `limit`, the judged `value`, and its percentile `at`."""
    if points.empty or "slo_itl_at" not in points or CHUNK not in points:
        return pd.DataFrame()
    points = points[(points["slo_itl_at"] != "") & (points["mode"] != "decode")]
    value = [row[f"itl_{row['slo_itl_at']}_ms"] for row in read_rows(points)]
    limit = [limits["itl"] for limits in points["slo_limits"]]
    found = _without_chunk(points.assign(value=value, limit=limit, at=points["slo_itl_at"]))
    return found[found["value"].notna()].assign(keeps=lambda t: t["value"] <= t["limit"])


def _of_load(load: pd.DataFrame, gpus: str) -> str:
    """Describe the points of a load with all its chunks on one number of GPUs; empty if all meet the objective, or
    chunks change nothing.
    """
    chunks = sorted(set(load[CHUNK].astype(int)))
    several = f" with chunks of {listed([f'{c:,}' for c in chunks], 'or')}" if len(chunks) > 1 else ""
    where = f"at {load['load'].iloc[0]}{gpus} "
    kept, missed = (load[load["keeps"] == own].sort_values("output_tok_s", kind="stable") for own in (True, False))
    if kept.empty:
        near = read_rows(load.sort_values("value", kind="stable"))[0]
        return f"{where}no layout keeps it{several}{_why(near)}; nearest is {_named(near, chunks)} ({_figures(near)})"
    of_kept, of_missed = read_rows(kept)[-1], read_rows(missed)[-1] if len(missed) else None
    if of_missed is None or of_missed["output_tok_s"] <= of_kept["output_tok_s"] or not (why := _why(of_missed)):
        return ""
    others = [label for label in unique(load["label"]) if label not in set(kept["label"])]
    none = f"; {listed(others)} with none" if others and several else ""
    pair = (
        f"{_named(row, chunks)} {does} ({_figures(row)})"
        for row, does in ((of_kept, "keeps it"), (of_missed, "does not"))
    )
    return f"{where}{', and '.join(pair)}{why}{none}"


def _named(row: Mapping[str, Any], chunks: list[int]) -> str:
    """Return `tp4 with 2,048`, without the chunk if there is only one."""
    return f"{row['label']} with {int(row[CHUNK]):,}" if len(chunks) > 1 else str(row["label"])


def _figures(row: Mapping[str, Any]) -> str:
    """Return `p99 131 ms, 185 tok/s`."""
    return f"{row['at']} {number(row['value'], 3)} ms, {number(row['output_tok_s'], 3)} tok/s"


def _why(row: Mapping[str, Any]) -> str:
    """Return `, since chunks of prompts stall decodes (8.3 % of steps, median gap 65.2 ms)` if that
    holds; else empty.
    """
    if missing(row["steps"]) or not row["steps"] or parse(row["disaggregate"]).disaggregated or row["preemptions"]:
        return ""
    share = 1 - row["decode_steps"] / row["steps"]
    if share < BEYOND_P99 or (row["itl_p50_ms"] > row["limit"] and share < HALF):
        return ""
    return (
        f", since chunks of prompts stall decodes ({percent(share)} of steps have some, the median gap is "
        f"{number(row['itl_p50_ms'], 3)} ms)"
    )
