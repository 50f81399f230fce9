"""Render the tables that a terminal shows after a sweep, as plain text if piped.

They fit 80 columns, drop columns on narrower terminals, and never cut a number.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dcpbench.points.names import CLOSED, GAMMA, TRACE, TRACE_TIMES
from dcpbench.records.metrics import DECODE
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import answer, engine_steps, floors, load_labels, point_warnings, recommendation
from dcpbench.reports.dataframes import sort_commonest_first
from dcpbench.reports.step_parts import ATTENTION, COMMUNICATION, EXCHANGE, IDLE, MATRIX_PRODUCTS, NORMS, OTHERS
from dcpbench.reports.tables import format_whole
from dcpbench.show.numbers import ABSENT, format_number, format_ratio, format_with_unit, is_missing
from dcpbench.show.text import format_capitalized, format_count, format_list, make_printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from dcpbench.reports.dataframes import Frames

MAX_ROWS = 2_000  # maximum number of rows of all tables; more would scroll by for minutes
MAX_NAMED_LOADS = 8  # maximum number of loads named per layout that misses the SLO
KINDS = {CLOSED: "closed loop", GAMMA: "open loop", TRACE: TRACE_TIMES}
LOADS = {CLOSED: "conc.", GAMMA: "req/s"}
SCATTER = (
    "scatter: longer side of the 95 % interval of the median within one launch, or of all repeats. Another launch differs by more, with dcpbench's own engine by up "
    f"to {REPEATS_AGREE_WITHIN * 100:g} %; `dcpbench compare` measures it from four launches of each side."
)
SERVED_OUTPUT = "tok/s: output of all requests over the whole load, with prefills. ITL ms: median gap between two tokens of one request."
GAPS_WITH_PREFILLS = " Gaps with prefills are longer, so that tok/s is below concurrency × 1000 / ITL."
GAPS_WITH_DRAFTS = " With drafts, the tokens of a step come at once, with gaps of 0: compare TPOT instead."
IMPLIED = ("cpu", "oversubscribed")  # warnings that the title and the layout already express
TOKENS = ((1e6, "M"), (1e3, "k"), (1.0, ""))  # units of KV capacities, largest first
MAX_WORD_WIDTH = 24  # maximum width of a word of a label, in terminal columns
STEP_COLUMNS = {  # short headings of parts of a step in the terminal
    ATTENTION: "attn",
    EXCHANGE: "exch.",
    COMMUNICATION: "exch.+red.",
    MATRIX_PRODUCTS: "proj.+exp.",
    NORMS: "norms",
    OTHERS: "other",
    IDLE: "idle",
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def render(frames: Frames) -> Group:
    """Return a note on models that do not fit, a table for each run and model, the points that did not run, and the headline.

    Served points have a table for each mode and kind of load.
    """
    tables = (frames.points, frames.served, frames.others)
    points, served, others = (table.head(MAX_ROWS) for table in tables)
    points, served = (
        found.assign(shown=pd.Series(_list_shown_warnings(found), found.index)) if len(found) else found
        for found in (points, served)
    )
    no_fit = [] if frames.everything.empty else recommendation.format_no_fit_notes(frames.everything)
    parts: list[RenderableType] = [make_plain_text(f"{format_capitalized(text)}.", "yellow") for text in no_fit]
    for key, group in points.groupby(["run", "model"], sort=False) if len(points) else ():
        title = _format_title(frames, key, "", group)
        parts.append(FittedTable(title, list(group["label"]), _make_decode_columns(group), list(group["shown"])))
    by = ["run", "model", "mode", "load_arrival", "rest"]
    for key, group in served.groupby(by, sort=False) if len(served) else ():
        mode, arrival, rest = map(str, key[2:])
        title = _format_title(frames, key, f", {mode}: {KINDS.get(arrival, arrival)} · {rest}", group)
        parts.append(FittedTable(title, list(group["label"]), _make_served_columns(arrival, group), gap=1))
        parts += [make_plain_text(sentence) for sentence in _format_notes(group)]
    parts += [make_plain_text(SCATTER, "dim")] if len(points) else []
    parts += [make_plain_text(_format_served_output(served), "dim")] if len(served) else []
    parts += _render_engine_steps(frames)
    more = sum(map(len, tables)) - len(points) - len(served) - len(others)
    if more:
        parts.append(make_plain_text(f"{more:,} points more; `dcpbench report` writes all into points.csv.", "yellow"))
    parts += [
        make_plain_text(note)
        for found in (points, served)
        if len(found)
        for note in _format_shared_warnings(found) + _list_misses(found)
    ]
    same = ["model", "layout", "outcome", "message", *(["run"] if frames.engines else [])]
    for (model, layout, outcome, _, *engine), group in sort_commonest_first(others).groupby(same, sort=False):
        reason, who = group["reason"].iloc[0], " ".join(map(str, (model, *engine, layout)))
        parts.append(make_plain_text(f"{outcome}: {format_count(len(group), 'point')} of {who}: {reason}", "yellow"))
    parts += [
        make_plain_text(f"• {sentence}")
        for sentence in answer.format_top_sentences(frames) + floors.format_floor_sentences(frames)
    ]
    return Group(*parts)


def _format_served_output(served: pd.DataFrame) -> str:
    """Return what output and ITL are, and how ITL is related to output in closed loops and with drafts."""
    drafted = served["tokens_per_step"].notna()
    prefills = GAPS_WITH_PREFILLS if ((served["load_arrival"] == CLOSED) & ~drafted).any() else ""
    return SERVED_OUTPUT + prefills + (GAPS_WITH_DRAFTS if drafted.any() else "")


def _render_engine_steps(frames: Frames) -> list[RenderableType]:
    """Return the table of the engines' decode steps by part with its notes; empty unless several engines were profiled."""
    found = engine_steps.compare_steps(frames)
    if found.rows.empty:
        return []
    rows = found.rows.head(MAX_ROWS)
    parts = [name for name in engine_steps.list_shown_parts(found) if name not in engine_steps.ONLY_IN_SUMS]
    columns = [
        Column("conc.", [f"{v:,}" for v in rows["concurrency"]]),
        Column("context", [f"{v:,}" for v in rows["context"]]),
        Column("engine", list(map(str, rows["run"])), text=True),
        _make_number_column("step", rows["step_ms"], 3),
        Column("×", [format_ratio(v, 2) for v in rows["step_times"]]),
        Column("profiled", _format_profiled_ms(rows), drop=len(parts) + 1, full_name="profiled step"),
        *(
            Column(
                STEP_COLUMNS.get(name, name),
                [format_number(of[name] / 1e3, 3) if name in of else ABSENT for of in rows["parts"]],
                drop=len(parts) - i,
                full_name=name,
            )
            for i, name in enumerate(parts)
        ),
        Column("unknown", [engine_steps.format_unknown_share(row) for row in rows.to_dict("records")], drop=len(parts)),
    ]
    title = f"{engine_steps.TITLE}: ms, and × of the step over {found.reference}"
    texts = [*engine_steps.describe_differences(frames), *engine_steps.describe_limits(frames)]
    notes = [make_plain_text(text) for text in texts]
    return [FittedTable(title, list(rows["layout"]), columns, gap=1), *notes]


def _format_profiled_ms(rows: pd.DataFrame) -> list[str]:
    """Return each profiled step in ms, with a star if the profiler prolongs it."""
    return [
        f"{format_number(us / 1e3, 3)}{engine_steps.PROLONGED_STAR if engine_steps.is_prolonged(times) else ''}"
        for us, times in zip(rows["profiled_us"], rows["profiled_times"], strict=True)
    ]


def _list_misses(points: pd.DataFrame) -> list[str]:
    """Return the points that miss the SLO, grouped by layout."""
    notes = []
    missed = points[points["slo_excess"] > 1]
    for (model, mode, label), group in missed.groupby(["model", "mode", "label"], sort=False):
        loads = list(dict.fromkeys(group["load"]))
        more = f"; {len(loads) - MAX_NAMED_LOADS:,} more" if loads[MAX_NAMED_LOADS:] else ""
        who = model if mode == "decode" else f"{model}, {mode}"
        notes.append(f"misses the SLO: {who}: {label} at {'; '.join(loads[:MAX_NAMED_LOADS])}{more}")
    return notes


def _format_title(frames: Frames, key: tuple[Any, ...], kind: str, points: pd.DataFrame) -> str:
    return frames.format_scope(*key[:2]) + kind + (" (CPU: functional run)" if points["cpu"].all() else "")


def _make_number_column(
    name: str, values: pd.Series[Any], digits: int = 3, drop: int | None = None, full_name: str = ""
) -> Column:
    return Column(name, [format_number(v, digits) for v in values], drop, full_name)


def _make_decode_columns(points: pd.DataFrame) -> list[Column]:
    return [
        Column("context", list(map(load_labels.format_context, points["context"], points["routing"]))),
        Column("conc.", [f"{v:,}" for v in points["concurrency"]]),
        _make_number_column("tok/s", points["output_tok_s"], 4),
        Column(
            "scatter",
            [_format_half_width(p) for _, p in points.iterrows()],
            drop=3,
            full_name="scatter within a launch",
        ),
        _make_number_column("/GPU", points["output_tok_s_per_gpu"], drop=2, full_name="tok/s per GPU"),
        _make_number_column("/user", points["tok_s_per_user"], drop=0, full_name="tok/s per user"),
        _make_number_column("ITL ms", points["itl_p50_ms"]),
        _make_number_column("p99", points["itl_p99_ms"], drop=1, full_name="ITL p99"),
    ]


def _format_half_width(point: pd.Series[Any]) -> str:
    """Return the wider side of the interval as a share of the median; widths below 0.05 % are not shown as zero."""
    median, low, high = (point[f"output_tok_s{x}"] for x in ("", "_low", "_high"))
    if is_missing(median):
        return ABSENT
    share = f"{max(high - median, median - low) / median * 100:.1f}%"
    return "<±0.1%" if share == "0.0%" else f"±{share}"


def _make_served_columns(arrival: str, points: pd.DataFrame) -> list[Column]:
    load = [Column(LOADS[arrival], [_format_load(p) for _, p in points.iterrows()])] if arrival in LOADS else []
    goodput, kv = points["request_goodput"], points["kv_tokens_of_all"]
    with_drafts = [  # tell more than ITL if steps verify drafts, with which most gaps between tokens are 0
        _make_number_column("TPOT ms", points["tpot_p50_ms"]),
        _make_number_column("/user", points["tok_s_per_user"], drop=0, full_name="tok/s per user"),
    ]
    return [
        *load,
        _make_number_column("tok/s", points["output_tok_s"], 4),
        _make_number_column("/GPU", points["output_tok_s_per_gpu"], drop=0, full_name="tok/s per GPU"),
        _make_number_column("TTFT ms", points["ttft_p50_ms"], drop=5),
        _make_number_column("p99", points["ttft_p99_ms"], drop=1, full_name="TTFT p99"),
        _make_number_column("ITL ms", points["itl_p50_ms"]),
        _make_number_column("p99", points["itl_p99_ms"], drop=2, full_name="ITL p99"),
        *(with_drafts if points["tokens_per_step"].notna().any() else []),
        *([_make_number_column("good/s", goodput, 2, drop=4)] if goodput.notna().any() else []),
        *([Column("KV tokens", _format_capacities(points), drop=3)] if kv.notna().any() else []),
    ]


def _format_capacities(points: pd.DataFrame) -> list[str]:
    """Return the tokens that the KV caches of all serving instances of each point hold, in thousands or millions: `655 k`, `11.5 M`."""
    return [
        ABSENT if is_missing(n) else format_with_unit(float(n), TOKENS).rstrip() for n in points["kv_tokens_of_all"]
    ]


def _format_load(point: pd.Series[Any]) -> str:
    if point["load_arrival"] == CLOSED:
        return f"{point['concurrency']:,}"
    burst = "" if point["load_burstiness"] == 1 else f" γ{point['load_burstiness']:g}"
    return f"{point['load_request_rate']:g}{burst}"


def _format_notes(points: pd.DataFrame) -> list[str]:
    """Return notes below a table: warnings, requests that were not served, preemptions, and the objectives behind goodput."""
    marked: dict[str, list[str]] = {}
    for names, (_, p) in zip(points["shown"], points.iterrows(), strict=True):
        if warnings := ", ".join(names):
            marked.setdefault(warnings, []).append(f"{p['label']} at {p['arrival']}")
    notes = _format_bounds(points)
    notes += [
        f"{warning}: {', '.join(where) if len(where) < len(points) else 'all'}" for warning, where in marked.items()
    ]
    preempted = points[points["preemptions"] > 0]
    clauses = [f"{format_whole(p['preemptions'])} with {p['label']} at {p['arrival']}" for _, p in preempted.iterrows()]
    notes += [f"preemptions: {', '.join(clauses)}"] if clauses else []
    ended_early = points[point_warnings.has_warning(points, "cut_off")]
    unsent = (ended_early["load_requests"] - ended_early["submitted"]).sum()
    cut, rejected = points["cancelled"].sum(), points["rejected"].sum()
    if cut or rejected or unsent:
        notes.append(
            f"not served: {format_count(int(cut), 'request')} cut off, {unsent:,.0f} never sent, {rejected:,.0f} that can never fit"
        )
    slos = [slo for slo in dict.fromkeys(points["slo"]) if slo]
    return notes + ([f"good/s: requests per second with {'; or '.join(slos)}"] if slos else [])


def _format_shared_warnings(points: pd.DataFrame) -> list[str]:
    """Return the warnings that all points of a run and mode have, which no row shows, and by how much clocks fell."""
    notes = []
    for (run, mode), group in points.groupby(["run", "mode"], sort=False):
        where = "" if len(set(points["run"])) == 1 else f" of {run}"
        where += "" if mode == DECODE else f" {mode}"
        everyone = [
            warning
            for warning in point_warnings.find_shared_warnings(group)
            if warning not in (*point_warnings.STAY, *IMPLIED)
        ]
        notes += [f"warnings of all {len(group):,} points{where}: {', '.join(everyone)}"] if everyone else []
        clocks = point_warnings.describe_clocks(group)
        notes += [f"throttled{where}: {clocks}"] if clocks else []
    return notes


def _format_bounds(points: pd.DataFrame) -> list[str]:
    """Return what limits the requests in flight of an open loop; a closed loop's clients are in the table."""
    found: dict[str, list[str]] = {}
    for _, p in points[(points["load_arrival"] != CLOSED) & points["instances"].isna()].iterrows():
        concurrency, held, sent = p["concurrency"], p["room_for"], p["load_requests"]
        if not is_missing(held) and held < min(concurrency, sent):
            bound = f"{format_whole(held)} of full length by KV space ({concurrency:,} by --concurrency)"
        elif concurrency < sent:
            bound = f"{concurrency:,} by --concurrency"
        else:
            bound = f"all {sent:,}"
        found.setdefault(bound, []).append(str(p["label"]))
    clauses = [f"{bound} with {format_list(list(dict.fromkeys(labels)))}" for bound, labels in found.items()]
    return [f"requests at once, at most: {'; '.join(clauses)}"] if clauses else []


@dataclasses.dataclass(frozen=True)
class Column:
    """Hold numbers ready to print."""

    name: str
    cells: Sequence[str]
    drop: int | None = None  # rank: narrow terminals drop the columns with the lowest first; None means never
    full_name: str = ""  # name of the column in the list of dropped columns, if its heading alone is unclear

    text: bool = False

    @property
    def width(self) -> int:
        """Return the width in terminal columns."""
        return max(len(self.name), *map(len, self.cells))


@dataclasses.dataclass(frozen=True)
class FittedTable:
    """Render a table with the layout in its first column in the form that fits the terminal."""

    title: str
    labels: Sequence[str]
    columns: Sequence[Column]
    warnings: Sequence[Sequence[str]] = ()  # warnings of each row; printed as letters with a legend if they do not fit
    gap: int = 2  # number of spaces between columns; more than one if the width allows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts of the table to Rich."""
        yield make_plain_text(self.title, "bold")
        known = dict.fromkeys(warning for warnings in self.warnings for warning in warnings)
        legend = {warning: LETTERS[i % len(LETTERS)] for i, warning in enumerate(known)}
        texts = [", ".join(warnings) for warnings in self.warnings]
        columns = [*self.columns, *([Column("warnings", texts, text=True)] if legend else [])]
        for gap in (self.gap, 1):
            if self._compute_width(columns, gap) <= options.max_width:
                yield self._build_table(columns, gap)
                return
        letters = ["".join(legend[warning] for warning in warnings) for warnings in self.warnings]
        columns = [*self.columns, *([Column("", letters, text=True)] if legend else [])]
        gap = 1 if self._compute_width(columns, 1) <= options.max_width else 0
        left_out = self._choose_dropped(columns, options.max_width) if gap == 0 else []
        yield self._build_table([c for c in columns if c not in left_out], gap)
        if left_out:
            yield make_plain_text(
                f"left out, as it is narrow here: {', '.join(c.full_name or c.name for c in left_out)}", "dim"
            )
        if legend:
            yield make_plain_text(f"warnings: {', '.join(f'{letter} {warning}' for warning, letter in legend.items())}")

    def _choose_dropped(self, columns: Sequence[Column], width: int) -> list[Column]:
        """Return the columns to drop, the least important first."""
        kept, gone = list(columns), []
        for column in sorted((c for c in columns if c.drop is not None), key=lambda c: c.drop or 0):
            if self._compute_width(kept, 0) <= width:
                break
            kept.remove(column)
            gone.append(column)
        return gone

    def _compute_width(self, columns: Sequence[Column], gap: int) -> int:
        """Return the terminal columns that are needed without cutting a number or a word of a label."""
        words = [word for label in self.labels for word in str(label).split()]
        first = max(min(max(map(len, words), default=0), MAX_WORD_WIDTH), len("layout"))
        return first + sum(c.width + gap + 1 for c in columns)

    def _build_table(self, columns: Sequence[Column], gap: int) -> Table:
        padding = (0, max(gap - 1, 0), 0, min(gap, 1))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=False)
        table.add_column("layout", overflow="fold")
        for column in columns:
            table.add_column(column.name, justify="left" if column.text else "right", no_wrap=True)
        for i, label in enumerate(self.labels):
            table.add_row(make_plain_text(label), *(make_plain_text(c.cells[i]) for c in columns))
        return table


def _list_shown_warnings(points: pd.DataFrame) -> list[list[str]]:
    """Return the warnings of each point but those that the title, the layout, or all points of its run and mode have."""
    return [[m for m in warnings if m not in IMPLIED] for warnings in point_warnings.list_distinct_warnings(points)]


def make_plain_text(text: object, style: str = "") -> Text:
    """Return the text without markup and without control characters that would control the terminal."""
    return Text(make_printable(str(text)), style=style)
