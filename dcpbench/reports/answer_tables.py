"""Build the answer as tables: a row per request length, a column per concurrency, and the same point by point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.points.names import CLOSED
from dcpbench.reports import answer, launch_bands
from dcpbench.reports.findings import SCOPE, keys, most_per_layout, plain_layout, slo_aside
from dcpbench.reports.plots import evenly
from dcpbench.reports.tables import FOLD_ABOVE, LOADED, Table, make_table, named, of_mode
from dcpbench.reports.words import shared_shape, short_shapes
from dcpbench.show.numbers import ABSENT, missing, number, times, with_interval
from dcpbench.show.text import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd

    from dcpbench.reports.findings import Findings
    from dcpbench.reports.frames import Frames

MOST_COLUMNS = 9
"""Maximum number of concurrency columns; with more concurrencies the first, the last and some between are shown."""
MOST_LAYOUTS = 12
"""Maximum number of layout columns in the table of the highest output within the SLO."""
MOST_ROWS = 40
"""Maximum number of rows of a grid; larger grids are left to the long tables."""


def grids(frames: Frames) -> list[Table]:
    """Build the grids of each model and mode: the highest output of each layout within the SLO and, for closed loops, the
    best layout of each load and DCP over the baseline.
    """
    found = frames.findings
    tables = []
    for scope in dict.fromkeys([*keys(found.best, SCOPE), *keys(found.ratios, SCOPE)]):
        won, points, over = (answer.of(table, *scope) for table in (found.best, found.points, with_rivals(found)))
        where = f": {answer.scope_name(frames, *scope)}"
        tables += [_most_grid(points, where), _best_grid(won, where), _ratio_grid(over, where)]
    return [table for table in tables if table.rows]


def with_rivals(found: Findings) -> pd.DataFrame:
    """Return each DCP point against its baseline and against the best layout without DCP, the latter as `rival` and
    `rival_ratio`.
    """
    if found.ratios.empty:
        return found.ratios
    return found.ratios.assign(rival=found.against_best["rival"], rival_ratio=found.against_best["ratio"])


def best(found: pd.DataFrame, mode: str) -> Table:
    """Return the best layout per load, point by point."""
    found = of_mode(found, mode)
    single = launch_bands.are_single(found)
    return make_table(
        f"Highest output throughput of each load{_said(mode)}{_launches(found)}",
        found,
        [
            *named("model", "load"),
            ("fastest layout" if single else "best layout", _best_label),
            *named("next"),
            ("output tok/s [95 %]", _rate),
            ("over the next", lambda r: times(r["lead"])),
            ("TTFT p50 ms", lambda r: number(r["ttft_p50_ms"])),
            ("ITL p50 ms", lambda r: number(r["itl_p50_ms"])),
        ],
        text_columns=4,
        optional=("TTFT p50 ms",),
        fold=len(found) > FOLD_ABOVE // 2,
    )


def ratios(found: pd.DataFrame, mode: str) -> Table:
    """Return DCP against its baseline, point by point."""
    found = of_mode(found, mode)
    return make_table(
        f"DCP over the same layout without it{_said(mode)}{_launches(found)}",
        found,
        [
            *LOADED,
            *named("baseline", "verdict"),
            ("SLO", "slo_said"),
            ("baseline's", "baseline_slo"),
            ("output tok/s [widest]", lambda r: with_interval(r["ratio"], r["low"], r["high"], 3)),
            ("TTFT p50", lambda r: times(r["ttft_ratio"])),
            ("ITL p50", lambda r: times(r["itl_ratio"])),
        ],
        text_columns=7,
        optional=("SLO", "baseline's", "TTFT p50"),
        fold=len(found) > FOLD_ABOVE // 2,
    )


def _best_grid(found: pd.DataFrame, where: str) -> Table:
    found = found[found["load_arrival"] == CLOSED] if len(found) else found
    kind = f"Fastest layout {launch_bands.IN_ONE_LAUNCH}" if launch_bands.are_single(found) else "Best layout"
    title = f"{kind}, tok/s, and its lead over the next{where}"
    return _grid(title, found, ["rest"], ["load"], _best_cell)


def _most_grid(points: pd.DataFrame, where: str) -> Table:
    """Build the grid of the highest output of each layout and the load at which it has it; `none` if the layout ran and
    never meets the SLO.
    """
    judged = points[points["slo_excess"].notna()] if len(points) else points
    if judged.empty:
        return Table("", [], [])
    tops = {(row["rest"], row["label"]): row for _, row in most_per_layout(judged).iterrows()}
    labels = list(dict.fromkeys(judged["label"]))[:MOST_LAYOUTS]
    ran = set(keys(judged, ["rest", "label"]))
    short, shared = short_shapes(judged["rest"]), shared_shape(judged["rest"])

    def cell(rest: str, label: str) -> str:
        best = tops.get((rest, label))
        if best is None:
            return "none" if (rest, label) in ran else ABSENT
        at = f"{best['concurrency']:,}" if best["load_arrival"] == CLOSED else str(best["arrival"])
        return f"{number(best['output_tok_s'], 3)} at {at}"

    rows = [[short[rest], *(cell(rest, label) for label in labels)] for rest in dict.fromkeys(judged["rest"])]
    title = f"Maximum output tok/s within the SLO, at which concurrency of those that ran{where}"
    if (judged["load_arrival"] != CLOSED).any():
        title = title.replace("concurrency", "load")
    columns = ["load", *labels]
    return Table(f"{title}; {shared}" if shared else title, columns, rows[:MOST_ROWS], len(columns))


def _ratio_grid(found: pd.DataFrame, where: str) -> Table:
    found = found[(found["load_arrival"] == CLOSED)] if len(found) else found
    if found.empty or found["ratio"].isna().all():
        return Table("", [], [])
    title = f"DCP over the same layout without it, output tok/s{slo_aside(found)}{where}"
    return _grid(title, found, ["rest", "label"], ["load", "layout"], _ratio_cell)


def _grid(title: str, found: pd.DataFrame, keys: list[str], names: list[str], cell: Callable[[Any], str]) -> Table:
    """Build a grid with a row for each value of `keys`, the first of which is the request length, and a column per
    concurrency.
    """
    if found.empty:
        return Table(title, [], [])
    short, shared = short_shapes(found["rest"]), shared_shape(found["rest"])
    loads = evenly(sorted(set(map(int, found["concurrency"]))), MOST_COLUMNS)
    rows = []
    for key, group in list(found.groupby(keys, sort=False))[:MOST_ROWS]:
        cells = {int(r["concurrency"]): cell(r) for _, r in group.iterrows() if int(r["concurrency"]) in loads}
        rows.append([short[str(key[0])], *map(str, key[1:]), *(cells.get(n, ABSENT) for n in loads)])
    columns = [*names, *(f"{n:,}" if i else f"concurrency {n:,}" for i, n in enumerate(loads))]
    return Table(f"{title}; {shared}" if shared else title, columns, rows, len(columns))


def _best_cell(row: pd.Series[Any]) -> str:
    if not row["meets"]:
        return f"none; nearest {row['label']}"  # the rows of each load further down name the missed objective
    value = f"{number(row['output_tok_s'], 3)}"
    if missing(row["next"]):
        return f"only {row['label']}: {value}"
    return f"{row['label']}: {value}, {row['lead']:.2f}×" if row["clear"] else f"{' ≈ '.join(row['level'])}: {value}"


def _ratio_cell(row: pd.Series[Any]) -> str:
    if missing(row["ratio"]):
        beside = "" if missing(row["rival"]) else f"; {row['rival_ratio']:.2f}× {row['rival']}"
        return f"no {plain_layout(row['tp'], row['dp'], row['ep'], row['disaggregate'])}{beside}"
    sign = {"higher": "▲ ", "lower": "▼ "}.get(row["verdict"], "≈ ")
    return f"{sign}{row['ratio']:.2f}×"


def _best_label(row: pd.Series[Any]) -> str:
    if not row["meets"]:
        return f"none meets the SLO; nearest {row['label']} ({row['slo_said']})"
    if missing(row["next"]):
        return f"{row['label']} (the only one that meets the SLO)"
    if row["clear"]:
        return str(row["label"])
    how = launch_bands.NOT_DISTINGUISHABLE if missing(row[launch_bands.COLUMN]) else "not clearly"
    return f"{listed(row['level'], 'or')} ({how})"


def _rate(row: pd.Series[Any]) -> str:
    low, high = row["output_tok_s_low"], row["output_tok_s_high"]
    return number(row["output_tok_s"]) if low == high else with_interval(row["output_tok_s"], low, high)


def _launches(found: pd.DataFrame) -> str:
    """Return `, in one launch each` if a server's launches are not known to agree."""
    return f", {launch_bands.IN_ONE_LAUNCH}" if launch_bands.are_single(found) else ""


def _said(mode: str) -> str:
    return "" if mode == "decode" else f", {mode}"
