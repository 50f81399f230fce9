"""List every layout that was considered for a load, in order, as rows of facts and as cells of a table. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.points.memory import GIB
from dcpbench.points.names import CLOSED, UNKNOWN
from dcpbench.recommend.layout_choice import MAX_TIE, OTHER, TOO_MANY, compute_price, compute_tok_s_per_gpu
from dcpbench.show import numbers
from dcpbench.show.numbers import ABSENT, format_number
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.points.point import Point
    from dcpbench.recommend.advise import Query
    from dcpbench.recommend.capacity import Capacity
    from dcpbench.recommend.forecast import Forecast
    from dcpbench.recommend.layout_choice import Choice, Refusal

TENSOR_PARALLEL, EXPERT_PARALLEL = "tensor parallel", "expert parallel"
RECOMMENDED, LEVEL = "→ ", "= "  # before the name of a layout
TTFT, ITL = "TTFT p50\ns", "ITL p50\nms"
DRAFTED = ("TPOT p50\nms", "tok/s\nper user")
COLUMNS = (
    "layout",
    "experts",
    "tok/s",
    "tok/s\nper GPU",
    TTFT,
    ITL,
    "KV tokens",
    "KV\nrequests",
    "weights\nGiB/GPU",
    "fits",
    "evidence",
)
DROPPED_FIRST = ("weights\nGiB/GPU", "experts", "KV tokens", "tok/s\nper GPU", "KV\nrequests", "evidence", ITL, TTFT)
"""Columns that a narrow terminal leaves out, in this order."""
LEGEND = (
    f"{RECOMMENDED.strip()} recommended, {LEVEL.strip()} not clearly behind the fastest. Among these, the layout with the most KV capacity is "
    f"recommended if its output is at most {round(MAX_TIE * 100)} % lower; capacity beyond twice the load does not count. Most errors are common "
    "to all layouts, so the difference between two layouts is more certain than their bands suggest. Output in tok/s is an average over the load, with prefills; ITL is the median gap between two tokens of a "
    "request, and 0 if most tokens arrive together with others (--mtp). KV requests: requests of the longest length that fit at once, in whole pages; the last token of an "
    "answer needs no KV. dpN: N attention replicas inside tp, each of tp / N GPUs. The evidence column names every engine except dcpbench's own."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Hold a layout under a load: its forecast, or the reason why it has none."""

    layout: str
    point: Point
    forecast: Forecast | None = None
    refusal: Refusal | None = None
    capacity: Capacity | None = None
    recommended: bool = False
    level: bool = False  # not clearly behind the fastest

    @property
    def experts(self) -> str:
        """Placement of the experts in words."""
        return {None: UNKNOWN, 1: TENSOR_PARALLEL}.get(self.point.ep_degree, EXPERT_PARALLEL)


def list_rows(choice: Choice) -> list[Row]:
    """Return the layouts with a forecast in the order of Choice.ranked, then those without."""
    recommended = choice.tied if choice.meets else []
    level = choice.level
    rows = [
        Row(
            layout=f.label,
            point=f.point,
            forecast=f,
            capacity=choice.capacities.get(f.label),
            recommended=f in recommended[:2],
            level=len(level) > 1 and f in level,
        )
        for f in choice.ranked
    ]
    return rows + [
        Row(layout=who, point=choice.refused_points[who], refusal=one, capacity=choice.capacities.get(who))
        for who, one in choice.refused.items()
        if who in choice.refused_points
    ]


def list_columns(query: Query) -> list[str]:
    """Return the column headings of `format_row` with their units, on two lines if a terminal has no space for one."""
    names = [name for name in COLUMNS if name != TTFT or not _is_decode_only(query)]
    if query.mtp:  # most gaps between tokens are 0
        names[names.index(ITL) + 1 : names.index(ITL) + 1] = DRAFTED
    return [*names, *(["SLO"] if query.slo else []), *(["$/M output\ntokens"] if query.price is not None else [])]


def format_row(query: Query, choice: Choice, row: Row) -> list[str]:
    """Return the cells of a row, with the columns of `list_columns`."""
    mark = RECOMMENDED if row.recommended else LEVEL if row.level else ""
    f, capacity = row.forecast, row.capacity
    cells = [f"{mark}{row.layout}", row.experts]
    cells += [
        "" if f is None else numbers.format_tok_s(f.tok_s, *f.output_bounds_tok_s, unit=""),
        "" if f is None else format_number(compute_tok_s_per_gpu(f), 3),
    ]
    if not _is_decode_only(query):
        cells.append("" if f is None else _format_seconds(f.ttft_ms.p50, f.ttft_bounds_ms))
    cells += [
        "" if f is None else format_p50(f.itl_ms.p50, f.itl_bounds_ms),
        *(_format_drafted(f) if query.mtp else ()),
        ABSENT if capacity is None or capacity.kv_tokens is None else f"{capacity.kv_tokens:,}",
        ABSENT if capacity is None or capacity.requests is None else f"{capacity.requests:,}",
        ABSENT if capacity is None else f"{capacity.weight_bytes / GIB:.1f}",
        _format_fit(choice, row),
        f.origin if f is not None else "",
    ]
    if query.slo:
        cells.append("" if f is None else _format_objectives(query, choice, f))
    if query.price is not None:
        cells.append("" if f is None else _format_price(query.price, f))
    return cells


def choose_column_widths(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> dict[str, int]:
    """Return the width of each column that fits into a terminal without breaking a word; the first is never wrapped.

    If the longest words of all columns are wider than the terminal, columns are left out in the order DROPPED_FIRST.
    """
    cells = {name: [name, *(row[n] for row in rows)] for n, name in enumerate(names)}
    most = {name: max(len(line) for text in column for line in text.split("\n")) for name, column in cells.items()}
    least = {name: max((len(w) for text in column for w in text.split()), default=0) for name, column in cells.items()}
    least[names[0]] = most[names[0]]
    kept = dict(least)
    for name in DROPPED_FIRST:
        if sum(kept.values()) + 2 * len(kept) <= width:  # two columns between and around cells
            break
        kept.pop(name, None)
    for _ in range(width - sum(kept.values()) - 2 * len(kept)):
        name = max(kept, key=lambda name: most[name] / kept[name])  # the column with the tallest cells
        kept[name] += most[name] > kept[name]
    return kept


def _format_drafted(f: Forecast | None) -> tuple[str, str]:
    """Return the cells of the median TPOT, and of the speed for a user that follows from it."""
    if f is None or not f.tpot_ms.p50:
        return "", ""
    return format_number(f.tpot_ms.p50, 3), format_number(1e3 / f.tpot_ms.p50, 3)


def _is_decode_only(query: Query) -> bool:
    """Return True if all loads are decode steps, which have no TTFT."""
    return bool(query.loads) and all(load is None for _, _, load in query.loads)


def format_p50(ms: float | None, ends: tuple[float, float] | None) -> str:
    """Return a median latency with the ends of its band, if it has one."""
    return format_number(ms, 3) if ms is None or ends is None else numbers.format_tok_s(ms, *ends, unit="")


def _format_seconds(ms: float | None, ends: tuple[float, float] | None) -> str:
    """Return a median latency in s, with the ends of its band, if it has one."""
    seconds = None if ms is None else ms / 1e3
    return format_p50(seconds, None if ends is None else (ends[0] / 1e3, ends[1] / 1e3))


def _format_fit(choice: Choice, row: Row) -> str:
    """Return whether the whole model and its load fit, or what is missing on each GPU."""
    capacity = row.capacity
    if capacity is not None and capacity.missing_bytes:
        return f"no, {capacity.missing_bytes / GIB:,.1f} GiB short"
    if row.refusal is not None:
        return {OTHER: "not judged", TOO_MANY: "no, too many"}.get(row.refusal.kind, "no")
    load = row.point.load
    waits = load is None or load.arrival == CLOSED
    if capacity is None or capacity.requests is None or not waits or capacity.requests >= choice.concurrency:
        return "yes"
    return f"{capacity.requests:,} of {choice.concurrency:,} at once"


def _format_objectives(query: Query, choice: Choice, f: Forecast) -> str:
    """Return the objectives that a layout misses or meets, with the percentile that was judged."""
    if missed := choice.misses.get(f.label):
        return f"misses {', '.join(missed)}"
    return f"meets {format_list([judged.format() for judged in f.judge(query.slo)])}"


def _format_price(price: float, f: Forecast) -> str:
    cost, low, high = compute_price(price, f)
    return f"{cost:.2f} [{low:.2f}–{high:.2f}]"
