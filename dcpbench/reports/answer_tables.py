"""Build the answer as tables: a row per request length, a column per concurrency, and the same point by point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.points.names import CLOSED
from dcpbench.records.metrics import METRIC
from dcpbench.reports import answer, launch_bands
from dcpbench.reports.findings import (
    BEST_OF,
    SCOPE,
    find_best_per_layout,
    format_plain_layout,
    format_slo_aside,
    list_keys,
)
from dcpbench.reports.load_labels import find_shared_shape, make_short_shapes
from dcpbench.reports.plots import sample_evenly
from dcpbench.reports.tables import (
    FOLD_ABOVE,
    LOADED,
    Table,
    format_cut,
    make_columns,
    make_table,
    make_text_columns,
    select_mode,
)
from dcpbench.show.numbers import ABSENT, format_number, format_ratio, format_with_interval, is_missing
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

    from dcpbench.reports.dataframes import Frames
    from dcpbench.reports.findings import Findings

MAX_COLUMNS = 9  # concurrencies with a column at most: of more the first, the last and some between
MAX_LAYOUTS = 12  # maximum number of layout columns in the table of the highest output within the SLO
MAX_ROWS = 40  # maximum number of rows of a grid; larger grids are left to the long tables


def build_grids(frames: Frames) -> list[Table]:
    """Build the grids of each model and mode: highest output within the SLO, best layouts, DCP over its baseline."""
    found = frames.findings
    tables = []
    for scope in dict.fromkeys([*list_keys(found.best, SCOPE), *list_keys(found.ratios, SCOPE)]):
        won, points, over = (
            answer.select_scope(table, *scope) for table in (found.best, found.points, add_rivals(found))
        )
        where = f": {answer.format_scope(frames, *scope)}"
        tables += [_build_maximum_grid(points, where), _build_best_grid(won, where), _build_ratio_grid(over, where)]
    return [table for table in tables if table.rows]


def add_rivals(found: Findings) -> pd.DataFrame:
    """Return each DCP point against its baseline, and as `rival` against the best layout without DCP."""
    if found.ratios.empty:
        return found.ratios
    return found.ratios.assign(rival=found.against_best["rival"], rival_ratio=found.against_best["ratio"])


def build_best_table(found: pd.DataFrame, mode: str) -> Table:
    """Return the best layout per load, point by point."""
    found = select_mode(found, mode)
    single = launch_bands.has_single_launches(found)
    several = len(found) and len(set(found["gpus"])) > 1
    return make_table(
        f"Highest output throughput of each load{_format_mode(mode)}{launch_bands.format_launches(found)}",
        found,
        [
            *make_text_columns("model", "load"),
            *([("GPUs", "gpus")] if several else []),
            ("fastest layout" if single else "best layout", _format_best_label),
            *make_text_columns("next"),
            ("output tok/s [95 %]", _format_rate),
            ("over the next", lambda r: format_ratio(r["lead"])),
            *make_columns(METRIC[name] for name in ("ttft_p50_ms", "itl_p50_ms")),
        ],
        text_columns=5 if several else 4,
        optional=("TTFT p50 ms",),
        fold=len(found) > FOLD_ABOVE // 2,
    )


def build_ratios_table(found: pd.DataFrame, mode: str) -> Table:
    """Return DCP against its baseline, point by point."""
    found = select_mode(found, mode)
    return make_table(
        f"DCP over the same layout without it{_format_mode(mode)}{launch_bands.format_launches(found)}",
        found,
        [
            *LOADED,
            *make_text_columns("baseline", "verdict"),
            ("SLO", "slo_result"),
            ("baseline's", "baseline_slo"),
            ("output tok/s [widest]", lambda r: format_with_interval(r["ratio"], r["low"], r["high"], 3)),
            ("TTFT p50", lambda r: format_ratio(r["ttft_ratio"])),
            ("ITL p50", lambda r: format_ratio(r["itl_ratio"])),
        ],
        text_columns=7,
        optional=("SLO", "baseline's", "TTFT p50"),
        fold=len(found) > FOLD_ABOVE // 2,
    )


def _build_best_grid(found: pd.DataFrame, where: str) -> Table:
    found = found[found["load_arrival"] == CLOSED] if len(found) else found
    kind = f"Fastest layout {launch_bands.IN_ONE_LAUNCH}" if launch_bands.has_single_launches(found) else "Best layout"
    title = f"{kind}, tok/s, and its lead over the next{where}"
    varying = [name for name in BEST_OF if len(found) and len(set(found[name])) > 1]
    names = [{"gpus": "GPUs", "mtp": "drafts", "emulate": "emulated on"}.get(name, name) for name in varying]
    return _build_grid(title, found, ["rest", *varying], ["load", *names], _format_best_cell)


def _build_maximum_grid(points: pd.DataFrame, where: str) -> Table:
    """Build the grid of each layout's highest output and its load; `none` if the layout never meets the SLO."""
    judged = points[points["slo_excess"].notna()] if len(points) else points
    if judged.empty:
        return Table("", [], [])
    tops = {(row["rest"], row["label"]): row for _, row in find_best_per_layout(judged).iterrows()}
    labels = list(dict.fromkeys(judged["label"]))
    ran = set(list_keys(judged, ["rest", "label"]))
    short, shared = make_short_shapes(judged), find_shared_shape(judged)

    def format_cell(rest: str, label: str) -> str:
        best = tops.get((rest, label))
        if best is None:
            return "none" if (rest, label) in ran else ABSENT
        at = f"{best['concurrency']:,}" if best["load_arrival"] == CLOSED else str(best["arrival"])
        return f"{format_number(best['output_tok_s'], 3)} at {at}"

    rests, load = (
        list(dict.fromkeys(judged["rest"])),
        "concurrency" if judged["load_arrival"].eq(CLOSED).all() else "load",
    )
    cut = format_cut((MAX_ROWS, len(rests), "lengths"), (MAX_LAYOUTS, len(labels), "layouts"))
    title = f"Maximum output tok/s within the SLO, at which {load} of those that ran{where}{cut}"
    columns = ["load", *labels[:MAX_LAYOUTS]]
    rows = [[short[rest], *(format_cell(rest, label) for label in columns[1:])] for rest in rests[:MAX_ROWS]]
    return Table(f"{title}; {shared}" if shared else title, columns, rows, len(columns))


def _build_ratio_grid(found: pd.DataFrame, where: str) -> Table:
    found = found[(found["load_arrival"] == CLOSED)] if len(found) else found
    if found.empty or found["ratio"].isna().all():
        return Table("", [], [])
    title = f"DCP over the same layout without it, output tok/s{format_slo_aside(found)}{where}"
    return _build_grid(title, found, ["rest", "label"], ["load", "layout"], _format_ratio_cell)


def _build_grid(
    title: str, found: pd.DataFrame, keys: list[str], names: list[str], cell: Callable[[Any], str]
) -> Table:
    """Build a grid with a row for each value of `keys`, the first of which is the request length, and a column per concurrency."""
    if found.empty:
        return Table(title, [], [])
    short, shared = make_short_shapes(found), find_shared_shape(found)
    every = sorted(set(map(int, found["concurrency"])))
    loads, groups = sample_evenly(every, MAX_COLUMNS), list(found.groupby(keys, sort=False))
    title += format_cut((MAX_ROWS, len(groups), "rows"), (len(loads), len(every), "concurrencies"))
    rows = []
    for key, group in groups[:MAX_ROWS]:
        cells = {int(r["concurrency"]): cell(r) for _, r in group.iterrows() if int(r["concurrency"]) in loads}
        rows.append([short[str(key[0])], *map(str, key[1:]), *(cells.get(n, ABSENT) for n in loads)])
    columns = [*names, *(f"{n:,}" if i else f"concurrency {n:,}" for i, n in enumerate(loads))]
    return Table(f"{title}; {shared}" if shared else title, columns, rows, len(columns))


def _format_best_cell(row: pd.Series[Any]) -> str:
    if not row["meets"]:
        return f"none; nearest {row['label']}"  # the rows of each load further down name the missed objective
    value = f"{format_number(row['output_tok_s'], 3)}"
    if is_missing(row["next"]):
        return f"only {row['label']}: {value}"
    return f"{row['label']}: {value}, {row['lead']:.2f}×" if row["clear"] else f"{' ≈ '.join(row['level'])}: {value}"


def _format_ratio_cell(row: pd.Series[Any]) -> str:
    if is_missing(row["ratio"]):
        rival = "" if is_missing(row["rival"]) else f"; {row['rival_ratio']:.2f}× {row['rival']}"
        return f"no {format_plain_layout(row['tp'], row['dp'], row['ep'], row['disaggregate'])}{rival}"
    sign = {"higher": "▲ ", "lower": "▼ "}.get(row["verdict"], "≈ ")
    return f"{sign}{row['ratio']:.2f}×"


def _format_best_label(row: pd.Series[Any]) -> str:
    if not row["meets"]:
        return f"none meets the SLO; nearest {row['label']} ({row['slo_result']})"
    if is_missing(row["next"]):
        return f"{row['label']} (the only one that meets the SLO)"
    if row["clear"]:
        return str(row["label"])
    return f"{format_list(row['level'])} ({row['how']})"


def _format_rate(row: pd.Series[Any]) -> str:
    low, high = row["output_tok_s_low"], row["output_tok_s_high"]
    return format_number(row["output_tok_s"]) if low == high else format_with_interval(row["output_tok_s"], low, high)


def _format_mode(mode: str) -> str:
    return "" if mode == "decode" else f", {mode}"
