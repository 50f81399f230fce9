"""Judge points by service level objectives (SLOs), and choose the percentile for each objective.

An objective bounds p99, as goodput lets one gap in 100 miss it. If p99 lacks samples it bounds the highest of p95, p90
and p50 that all points of one load have, so that compared layouts are judged by the same percentile, which the report
names. The workload decode has ITL alone. Nothing is judged on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.records import metrics
from dcpbench.records.stats import compute_min_samples
from dcpbench.reports.findings import LOAD, SCOPE, list_keys
from dcpbench.reports.load_labels import OBJECTIVES
from dcpbench.show.numbers import format_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.records.record import Record

    Limits = Mapping[str, float]

PERCENTILES = metrics.PERCENTILES[::-1]
NARROWLY = 0.02  # relative distance to a limit that counts as narrow, as repeats may differ by as much


def get_recorded_slo(record: Record) -> dict[str, float]:
    """Return the objectives that a record was measured with (`--slo` of its run); empty without any."""
    if record.serve and record.serve.slo_ms:
        return dict(record.serve.slo_ms)
    found = record.measured_with.get("slo")
    return {name: float(limit) for name, limit in found.items()} if isinstance(found, dict) else {}


def add_limits(table: pd.DataFrame, given: Limits) -> pd.DataFrame:
    """Add the column `slo_limits`: the given objectives, or those that all points of a run, model and mode were measured with.

    If points of a scope have different objectives, the scope has none.
    """
    if given:
        limits = pd.Series([dict(given)] * len(table), table.index)
    else:
        recorded = table["record"].map(get_recorded_slo)
        texts = recorded.map(lambda slo: repr(sorted(slo.items())))
        same = texts.groupby([table[name] for name in SCOPE]).transform("nunique") == 1
        limits = recorded.where(same, pd.Series([{}] * len(table), table.index))
    return table.assign(slo_limits=limits)


def add_slo_results(table: pd.DataFrame, given: Limits) -> pd.DataFrame:
    """Add the columns `slo_excess`, `slo_result` and `slo_missed`.

    `slo_excess` is the largest value / limit, so that 1 or less meets all; missing if nothing is judged. `slo_result` is
    `meets`, `meets at p50` if p99 of an objective lacks samples, or `misses: ITL p99 414 ms`, with `narrowly` within
    NARROWLY of the limit, or what is not known; `slo_missed` is `ITL p99 414 ms` alone.
    """
    if table.empty:
        return table
    table = add_limits(table, given)
    names = [n for n in OBJECTIVES if any(n in limits for limits in table["slo_limits"]) and f"{n}_p50_ms" in table]
    loads = [table[name] for name in LOAD]
    excess = pd.DataFrame(index=table.index)
    descriptions = pd.DataFrame(index=table.index)
    ranks = pd.DataFrame(index=table.index)
    for name in names:
        limit = pd.Series([limits.get(name) for limits in table["slo_limits"]], table.index, dtype=float)
        # `decode` has no TTFT, TPOT or E2EL to be missed
        applies = table["output_tok_s"].notna() & ((table["workload"] != "decode") | (name == "itl"))
        limit = limit.where(applies & ~table["cpu"])
        value, at = _find_shared_percentile(table, name, loads)
        excess[name] = value / limit
        excess.loc[limit.notna() & value.isna(), name] = float("inf")
        descriptions[name] = [
            f"{OBJECTIVES[name]} {p} {format_number(ms, 3)} ms" if p else f"{OBJECTIVES[name]} not known"
            for p, ms in zip(at, value, strict=True)
        ]
        table[f"slo_{name}_at"] = at.where(limit.notna(), "")
        ranks[name] = table[f"slo_{name}_at"].map({p: rank for rank, p in enumerate(PERCENTILES)}).astype(float)
    worst = excess.max(axis=1) if names else pd.Series(float("nan"), table.index)
    results, missed = [], []
    for top, texts, overs, rank in zip(
        worst, descriptions.to_numpy(), excess.to_numpy(), ranks.max(axis=1).fillna(0), strict=True
    ):
        which = ", ".join(text for text, over in zip(texts, overs, strict=True) if over > 1)
        narrowly = " narrowly" if abs(top - 1) <= NARROWLY else ""
        meets = f"meets{narrowly}" + (f" at {PERCENTILES[int(rank)]}" if rank else "")
        results.append("" if pd.isna(top) else meets if top <= 1 else f"misses{narrowly}: {which}")
        missed.append(which)
    return table.assign(slo_excess=worst, slo_result=results, slo_missed=missed)


def describe_objectives(table: pd.DataFrame, given: Limits) -> str:
    """State which objectives are in force, by which percentiles they are judged, and where they come from, in one sentence."""
    timed = table if table.empty else table[~table["cpu"]]
    if timed.empty:
        return ""
    same = timed["slo_limits"].map(lambda limits: repr(sorted(limits.items())))
    clauses = {_format_limits(points): _format_judged(points) for _, points in timed.groupby(same, sort=False)}
    if not any(clauses):
        reason = (
            f"--slo {','.join(given)} bounds nothing that these points have"
            if given
            else "No SLO was given (set one with --slo ttft=2000,itl=60, in ms)"
        )
        return f"{reason}, so the best layout is the one with the highest output throughput."
    source = "--slo" if given else "as the runs were measured with"
    limits_text = "; ".join(f"{who}: {text or 'none'}" for text, who in clauses.items())
    if len(clauses) == 1:
        limits_text = next(iter(clauses))
    missing = [OBJECTIVES[name] for name in given if not _find_percentiles(timed, name)]
    left = f" These points have no {' or '.join(missing)}." if missing else ""
    return f"SLO ({source}): {limits_text}.{left}"


def explain_unjudged(table: pd.DataFrame, given: Limits) -> str:
    """State that the objectives judge nothing if all points ran on a CPU; else empty."""
    if table.empty or not table["cpu"].all() or not (given or any(table["slo_limits"])):
        return ""
    source = "--slo " + ",".join(f"{name}={ms:g}" for name, ms in given.items()) if given else "the SLO of the run"
    return f"No point is compared with {source}: latencies on a CPU do not reflect GPU performance."


def _format_judged(points: pd.DataFrame) -> str:
    """Return the names of the judged points, such as `deepseek-v3 live, kimi-k2 live`."""
    pairs = dict.fromkeys(list_keys(points, SCOPE))
    several = len({run for run, _, _ in pairs}) > 1
    return ", ".join(f"{model} {mode}{f', run {run}' if several else ''}" for run, model, mode in pairs)


def _format_limits(points: pd.DataFrame) -> str:
    """Return the limits, such as `TTFT ≤ 2,000 ms at p95, ITL ≤ 60 ms at p99`."""
    limits = points["slo_limits"].iloc[0]
    parts = []
    for name, limit in limits.items():
        used = _find_percentiles(points, name)
        if not used:
            continue
        needed = f"p99, which needs {compute_min_samples(99)} samples"
        lower = (
            "" if used == ["p99"] else f" (not at {needed})" if "p99" not in used else f" (lower where not at {needed})"
        )
        parts.append(f"{OBJECTIVES[name]} ≤ {limit:,g} ms at {' or '.join(used)}{lower}")
    return ", ".join(parts)


def _find_percentiles(points: pd.DataFrame, name: str) -> list[str]:
    """Return the percentiles by which an objective is judged, highest first; empty if no point has such a latency."""
    column = f"slo_{name}_at"
    return [p for p in PERCENTILES if column in points and (points[column] == p).any()]


def _find_shared_percentile(
    table: pd.DataFrame, name: str, loads: list[pd.Series[Any]]
) -> tuple[pd.Series[Any], pd.Series[Any]]:
    """Return value and name of the highest percentile that all points of a load have, of the points that have any."""
    value = pd.Series(float("nan"), table.index)
    at = pd.Series("", table.index, dtype=object)
    some = table[f"{name}_p50_ms"].notna()
    for p in PERCENTILES:
        column = table[f"{name}_{p}_ms"].astype(float)
        everyone = (column.notna() | ~some).groupby(loads).transform("all")
        take = everyone & some & (at == "")
        value, at = value.mask(take, column), at.mask(take, p)
    return value, at
