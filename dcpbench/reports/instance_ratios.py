"""Compare ratios of prefill to decode instances: which ratio gives most output per GPU under which load, and what bounds it.

Ratios have different numbers of GPUs, so they are compared per GPU, and each one with the same number of GPUs as
instances that do both prefill and decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.models import get_title
from dcpbench.points.axes import COMPUTES, Role
from dcpbench.points.instances import parse_instances
from dcpbench.points.point import select_point_axes
from dcpbench.records import metrics
from dcpbench.records.launches import is_clearly_ahead
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import findings, launch_bands
from dcpbench.reports.load_labels import make_short_shapes
from dcpbench.reports.tables import (
    FOLD_ABOVE,
    LOADED,
    Column,
    Table,
    format_cut,
    make_columns,
    make_table,
    make_text_columns,
    select_mode,
)
from dcpbench.show.numbers import ABSENT, format_number, format_percent, format_ratio, is_missing
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from dcpbench.reports.dataframes import Frames

Row = dict[Any, Any]
SAME_BUT_INSTANCES = [  # columns shared with the point on as many GPUs in which all instances do both
    *findings.LOAD,
    "gpus",
    *(a.name for a in select_point_axes(COMPUTES, but=Role.DEPLOYED) if a.name != "model"),
]
COMPARED_LATENCIES = ("itl_p99_ms", "ttft_p50_ms")  # latencies that are reported for both if they differ
MAX_COLUMNS = 16
MAX_LOADS = 6  # maximum number of loads that sentences name; the table has all
UNEVEN = 0.2  # difference of the busy shares of both sides from which one is reported as the bottleneck


def compare_ratios(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points of loads that some prefill:decode ratio served.

    `split` is True if instances only prefill or decode. `over_…` and `ratio` compare the point with instances that do
    both on the same number of GPUs.
    """
    if points.empty:
        return points
    split = [parse_instances(text).disaggregated for text in points["disaggregate"]]
    if not any(split):
        return points.iloc[:0]
    points = points.assign(split=split)
    ran = set(findings.list_keys(points[points["split"]], findings.LOAD))
    points = points[[key in ran for key in findings.list_keys(points, findings.LOAD)]]
    unsplit = points[~points["split"]]
    return findings.add_ratios(points, unsplit, SAME_BUT_INSTANCES, "output_tok_s", "label", *COMPARED_LATENCIES)


def describe_best_ratios(points: pd.DataFrame) -> list[str]:
    """Return, for each load, the ratio with most output per GPU within the SLO, compared with instances that do both."""
    found = compare_ratios(points)
    texts = []
    for scope, own in found.groupby(findings.SCOPE, sort=False) if len(found) else ():
        loads = [_describe_load(load) for _, load in own.groupby("load", sort=False)]
        more = len(loads) - MAX_LOADS
        clauses = "; ".join(loads[:MAX_LOADS]) + (f"; {more:,} more loads are in the table" if more > 0 else "")
        launches = f" {launch_bands.IN_ONE_LAUNCH}" if launch_bands.has_single_launches(own) else ""
        texts.append(
            f"Prefill apart from decode, {get_title(str(scope[1]))}, most output for each GPU{launches}: {clauses}."
        )
    return texts


def build_grids(frames: Frames) -> list[Table]:
    """Build grids of output per GPU: a row for each load, a column for each ratio and for instances that do both."""
    found = compare_ratios(findings.select_timed(frames.served))
    tables = []
    for scope, own in found.groupby(findings.SCOPE, sort=False) if len(found) else ():
        labels = list(dict.fromkeys(own.sort_values(["split", "gpus"], kind="stable")["label"]))
        short = make_short_shapes(own)
        rows = []
        for _, load in own.groupby("load", sort=False):
            best = _find_best(load)
            cells = {row["label"]: _format_cell(row, best) for row in load.to_dict("records")}
            first = load.iloc[0]
            rows.append({"load": f"{first['arrival']} · {short[first['rest']]}"} | cells)
        shown = labels[:MAX_COLUMNS]
        table = pd.DataFrame(rows).reindex(columns=["load", *shown]).fillna(ABSENT)
        where = f", {scope[1]}, {scope[2]}" + (f", {scope[0]}" if len(set(found["run"])) > 1 else "")
        judged = "; in brackets: misses the SLO" if (own["slo_excess"] > 1).any() else ""
        title = f"Output tok/s for each GPU{where}: ▲ the most of a load{judged}"
        title += format_cut((len(shown), len(labels), "columns"))
        tables.append(make_table(title, table, make_text_columns("load", *shown)))
    return tables


def build_table(frames: Frames, mode: str) -> Table:
    """Build a table of all such points: output per GPU, busy shares of both sides, and cost of transfers."""
    found = compare_ratios(select_mode(frames.served, mode))
    if len(found):
        places = {load: place for place, load in enumerate(dict.fromkeys(found["load"]))}
        found = found.assign(place=found["load"].map(places))
        found = found.sort_values(["run", "model", "place", "split", "gpus"], kind="stable")
    shown: list[Column] = [
        *LOADED,
        ("GPUs", lambda r: f"{r['gpus']:,}"),
        *make_columns([metrics.METRIC["output_tok_s_per_gpu"]]),
        ("output over instances that do both", lambda r: format_ratio(r["ratio"]) if r["split"] else ABSENT),
        *make_columns(metrics.METRIC[name] for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")),
        *make_columns(metrics.INSTANCES),
        ("SLO", "slo_result"),
    ]
    return make_table(
        f"Instances that prefill and instances that decode, {mode}; the GPUs of all count",
        found,
        shown,
        text_columns=3,
        optional=("SLO", "output over instances that do both", "transfer waiting p50 ms"),
        fold=len(found) > FOLD_ABOVE,
    )


def _find_best(load: pd.DataFrame) -> Row | None:
    """Return the point with most output per GPU of those within the SLO."""
    fits = load[~(load["slo_excess"] > 1)].sort_values("output_tok_s_per_gpu", kind="stable")
    return None if fits.empty else fits.to_dict("records")[-1]


def _describe_load(load: pd.DataFrame) -> str:
    """Return `at closed 48 · 4,000 in · 1,500 out tp4 1P1D, 47.9 tok/s (…)`, and the comparison with others."""
    where = f"at {load['load'].iloc[0]} "
    best = _find_best(load)
    if best is None:
        near = load.sort_values("slo_excess", kind="stable").iloc[0]
        return f"{where}none is within the SLO, nearest {near['label']}"
    level = load[~(load["slo_excess"] > 1)]
    ratio = best["output_tok_s_per_gpu"] / level["output_tok_s_per_gpu"]
    low = (
        ratio * (best["output_tok_s_low"] / best["output_tok_s"]) * (level["output_tok_s"] / level["output_tok_s_high"])
    )
    level = level[~is_clearly_ahead(ratio, low, launch_bands.find_largest(load))]
    names = [best["label"], *(name for name in level["label"] if name != best["label"])]
    text = (
        f"{where}{format_list(names, 'or')}, {format_number(best['output_tok_s_per_gpu'], 3)} tok/s{_format_busy(best)}"
    )
    if best["split"]:
        return text + _format_comparison(best)
    split = _find_best(load[load["split"]])
    if split is None:
        return f"{text}; no ratio is within the SLO"
    if split["label"] in names:
        return text
    return f"{text}; of ratios {split['label']}, {format_number(split['output_tok_s_per_gpu'], 3)}{_format_busy(split)}{_format_comparison(split)}"


def _format_comparison(row: Row) -> str:
    """Return `, 0.93× tp4 ×2 with ITL p99 86 instead of 150 ms`."""
    if is_missing(row["ratio"]):
        return ""
    differences = []
    for name in COMPARED_LATENCIES:
        own, other = row[name], row[f"over_{name}"]
        if not is_missing(own) and not is_missing(other) and abs(own / other - 1) > REPEATS_AGREE_WITHIN:
            differences.append(
                f"{metrics.METRIC[name].label} {format_number(own, 3)} instead of {format_number(other, 3)} ms"
            )
    return f", {row['ratio']:.2f}× {row['over_label']}" + (f" with {format_list(differences)}" if differences else "")


def _format_busy(row: Row) -> str:
    """Return ` (prefill 20 % busy, decode 99 %: decode bounds it)`; empty if all instances do both."""
    prefill, decode = row["prefill_busy_share"], row["decode_busy_share"]
    if not row["split"] or is_missing(prefill) or is_missing(decode):
        return ""
    bound = "" if abs(prefill - decode) <= UNEVEN else f": {'prefill' if prefill > decode else 'decode'} bounds it"
    return f" (prefill {format_percent(prefill)} busy, decode {format_percent(decode)}{bound})"


def _format_cell(row: Row, best: Row | None) -> str:
    value = format_number(row["output_tok_s_per_gpu"], 3)
    if row["slo_excess"] > 1:
        return f"({value})"
    return f"▲ {value}" if best is not None and row["label"] == best["label"] else value
