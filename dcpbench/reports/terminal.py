"""Render the tables that a terminal shows after a sweep, as plain text if piped.

They fit 80 columns, drop columns on narrower terminals, and never cut a number.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dcpbench.points.names import CLOSED, GAMMA, TRACE, TRACE_TIMES
from dcpbench.records.metrics import DECODE
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import answer, floors, marks, rule
from dcpbench.reports.frames import commonest_first
from dcpbench.reports.tables import whole
from dcpbench.reports.words import FEW_SAMPLES
from dcpbench.show.numbers import ABSENT, missing, number
from dcpbench.show.text import capital, counted, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from dcpbench.reports.frames import Frames

MOST = 2_000
"""Maximum number of rows of all tables; more would scroll by for minutes."""
MOST_NAMED = 8
"""Maximum number of loads named per layout that misses the SLO."""
KINDS = {CLOSED: "closed loop", GAMMA: "open loop", TRACE: TRACE_TIMES}
LOADS = {CLOSED: "conc.", GAMMA: "req/s"}
SCATTER = (
    "scatter: 95 % interval of the median within one launch. Another launch differs by more, with dcpbench's own engine by up "
    f"to {REPEATS_AGREE_WITHIN * 100:g} %; `dcpbench compare` measures it from four launches of each side."
)
IMPLIED = ("cpu", "oversubscribed")
"""Warnings that the title and the layout already express."""
LONGEST_WORD = 24
"""Maximum width of a word of a label, in terminal columns."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def render(frames: Frames) -> Group:
    """Return a note on models that do not fit, a table for each run and model, the points that did not run, and the
    headline.

    Served points have a table for each mode and kind of load.
    """
    tables = (frames.points, frames.served, frames.others)
    points, served, others = (table.head(MOST) for table in tables)
    points, served = (found.assign(shown=shown_marks(found)) if len(found) else found for found in (points, served))
    no_fit = [] if frames.everything.empty else rule.held(frames.everything)
    parts: list[RenderableType] = [plain(f"{capital(text)}.", "yellow") for text in no_fit]
    for key, group in points.groupby(["run", "model"], sort=False) if len(points) else ():
        title = _title(frames, key, "", group)
        parts.append(Fitted(title, list(group["label"]), _decode_columns(group), list(group["shown"])))
    by = ["run", "model", "mode", "load_arrival", "rest"]
    for key, group in served.groupby(by, sort=False) if len(served) else ():
        mode, arrival, rest = map(str, key[2:])
        title = _title(frames, key, f", {mode}: {KINDS.get(arrival, arrival)} · {rest}", group)
        parts.append(Fitted(title, list(group["label"]), _served_columns(arrival, group), gap=1))
        parts += [plain(sentence) for sentence in _below(group)]
    parts += [plain(SCATTER, "dim")] if len(points) else []
    more = sum(map(len, tables)) - len(points) - len(served) - len(others)
    parts += [plain(f"{more:,} points more; `dcpbench report` writes all into points.csv.", "yellow")] if more else []
    parts += [plain(said) for found in (points, served) if len(found) for said in _of_all(found) + _misses(found)]
    same = ["model", "layout", "outcome", "told"]
    for (model, layout, outcome, _), group in commonest_first(others).groupby(same, sort=False):
        reason = group["reason"].iloc[0]
        parts.append(plain(f"{outcome}: {counted(len(group), 'point')} of {model} {layout}: {reason}", "yellow"))
    parts += [plain(f"• {sentence}") for sentence in answer.sentences(frames) + floors.told(frames)]
    return Group(*parts)


def _misses(points: pd.DataFrame) -> list[str]:
    """Return the points that miss the SLO, grouped by layout."""
    notes = []
    missed = points[points["slo_excess"] > 1]
    for (model, mode, label), group in missed.groupby(["model", "mode", "label"], sort=False):
        loads = list(dict.fromkeys(group["load"]))
        more = f"; {len(loads) - MOST_NAMED:,} more" if loads[MOST_NAMED:] else ""
        who = model if mode == "decode" else f"{model}, {mode}"
        notes.append(f"misses the SLO: {who}: {label} at {'; '.join(loads[:MOST_NAMED])}{more}")
    return notes


def _title(frames: Frames, key: tuple[Any, ...], kind: str, points: pd.DataFrame) -> str:
    run, model = key[:2]
    where = f"{model}, run {run}" if len(frames.runs) > 1 else str(model)
    return where + kind + (" (CPU: functional run)" if points["cpu"].all() else "")


def _numbers(name: str, values: pd.Series[Any], digits: int = 3, drop: int | None = None, said: str = "") -> Column:
    return Column(name, [number(v, digits) for v in values], drop, said)


def _decode_columns(points: pd.DataFrame) -> list[Column]:
    return [
        Column("context", [f"{v:,}" for v in points["context"]]),
        Column("conc.", [f"{v:,}" for v in points["concurrency"]]),
        _numbers("tok/s", points["output_tok_s"], 4),
        Column("scatter", [_half_width(p) for _, p in points.iterrows()], drop=3, said="scatter within a launch"),
        _numbers("/GPU", points["output_tok_s_per_gpu"], drop=2, said="tok/s per GPU"),
        _numbers("/user", points["tok_s_per_user"], drop=0, said="tok/s per user"),
        _numbers("ITL ms", points["itl_p50_ms"]),
        _numbers("p99", points["itl_p99_ms"], drop=1, said="ITL p99"),
    ]


def _half_width(point: pd.Series[Any]) -> str:
    """Return the wider side of the interval as a share of the median; widths below 0.05 % are not shown as zero."""
    median, low, high = (point[f"output_tok_s{x}"] for x in ("", "_low", "_high"))
    if missing(median):
        return ABSENT
    share = f"{max(high - median, median - low) / median * 100:.1f}%"
    return "<0.1%" if share == "0.0%" else share


def _served_columns(arrival: str, points: pd.DataFrame) -> list[Column]:
    load = [Column(LOADS[arrival], [_load(p) for _, p in points.iterrows()])] if arrival in LOADS else []
    goodput = points["goodput_s"]
    return [
        *load,
        _numbers("tok/s", points["output_tok_s"], 4),
        _numbers("/GPU", points["output_tok_s_per_gpu"], drop=0, said="tok/s per GPU"),
        _numbers("TTFT ms", points["ttft_p50_ms"], drop=4),
        _numbers("p99", points["ttft_p99_ms"], drop=1, said="TTFT p99"),
        _numbers("ITL ms", points["itl_p50_ms"]),
        _numbers("p99", points["itl_p99_ms"], drop=2, said="ITL p99"),
        *([_numbers("good/s", goodput, 2, drop=3)] if goodput.notna().any() else []),
    ]


def _load(point: pd.Series[Any]) -> str:
    if point["load_arrival"] == CLOSED:
        return f"{point['concurrency']:,}"
    burst = "" if point["load_burstiness"] == 1 else f" γ{point['load_burstiness']:g}"
    return f"{point['load_request_rate']:g}{burst}"


def _below(points: pd.DataFrame) -> list[str]:
    """Return notes below a table: warnings, requests that were not served, preemptions, and the objectives behind
    goodput.
    """
    marked: dict[str, list[str]] = {}
    for text, (_, p) in zip(points["shown"], points.iterrows(), strict=True):
        if said := ", ".join(mark for mark in text.split(", ") if mark and mark != FEW_SAMPLES):
            marked.setdefault(said, []).append(f"{p['label']} at {p['arrival']}")
    notes = _bounds(points)
    notes += [f"{mark}: {', '.join(where) if len(where) < len(points) else 'all'}" for mark, where in marked.items()]
    preempted = points[points["preemptions"] > 0]
    clauses = [f"{p['label']} at {p['arrival']} {whole(p['preemptions'])}" for _, p in preempted.iterrows()]
    notes += [f"preemptions: {', '.join(clauses)}"] if clauses else []
    cut, rejected = points["cancelled"].sum(), points["rejected"].sum()
    notes += (
        [f"not served: {counted(int(cut), 'request')} cut off, {rejected:,.0f} that can never fit"]
        if cut or rejected
        else []
    )
    slos = [slo for slo in dict.fromkeys(points["slo"]) if slo]
    return notes + ([f"good/s: requests per second with {'; or '.join(slos)}"] if slos else [])


def _of_all(points: pd.DataFrame) -> list[str]:
    """Return the warnings that all points of a run and mode have, which no row shows, and by how much clocks fell."""
    notes = []
    for (run, mode), group in points.groupby(["run", "mode"], sort=False):
        where = "" if len(set(points["run"])) == 1 else f" of {run}"
        where += "" if mode == DECODE else f" {mode}"
        everyone = [mark for mark in marks.shared(group) if mark not in (*marks.STAY, *IMPLIED)]
        notes += [f"marks of all {len(group):,} points{where}: {', '.join(everyone)}"] if everyone else []
        clocks = marks.clocks(group)
        notes += [f"throttled{where}: {clocks}"] if clocks else []
    return notes


def _bounds(points: pd.DataFrame) -> list[str]:
    """Return what limits the requests in flight of an open loop; a closed loop's clients are in the table."""
    found: dict[str, list[str]] = {}
    for _, p in points[(points["load_arrival"] != CLOSED) & points["instances"].isna()].iterrows():
        asked, held, sent = p["concurrency"], p["room_for"], p["load_requests"]
        if not missing(held) and held < min(asked, sent):
            bound = f"{whole(held)} of full length by KV space ({asked:,} by --concurrency)"
        elif asked < sent:
            bound = f"{asked:,} by --concurrency"
        else:
            bound = f"all {sent:,}"
        found.setdefault(bound, []).append(str(p["label"]))
    clauses = [f"{', '.join(dict.fromkeys(labels))} {bound}" for bound, labels in found.items()]
    return [f"requests at once, at most: {'; '.join(clauses)}"] if clauses else []


@dataclasses.dataclass(frozen=True)
class Column:
    """Hold numbers ready to print."""

    name: str
    cells: Sequence[str]
    drop: int | None = None
    """Rank for dropping: on narrow terminals the columns with the lowest values go first; None means never."""
    said: str = ""
    """Name of the column in the list of dropped columns, if its heading alone is unclear."""

    text: bool = False

    @property
    def width(self) -> int:
        """Return the width in terminal columns."""
        return max(len(self.name), *map(len, self.cells))


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Render a table with the layout in its first column in the form that fits the terminal."""

    title: str
    labels: Sequence[str]
    columns: Sequence[Column]
    marks: Sequence[str] = ()
    """Warnings of each row as one text, empty for rows without; printed as letters with a legend if the text does not
    fit.
    """
    gap: int = 2
    """Number of spaces between columns; more than one if the width allows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts of the table to Rich."""
        yield plain(self.title, "bold")
        marks = dict.fromkeys(mark for text in self.marks for mark in text.split(", ") if mark)
        legend = {mark: LETTERS[i % len(LETTERS)] for i, mark in enumerate(marks)}
        columns = [*self.columns, *([Column("marks", self.marks, text=True)] if legend else [])]
        for gap in (self.gap, 1):
            if self._needs(columns, gap) <= options.max_width:
                yield self._table(columns, gap)
                return
        letters = ["".join(legend[mark] for mark in text.split(", ") if mark) for text in self.marks]
        columns = [*self.columns, *([Column("", letters, text=True)] if legend else [])]
        gap = 1 if self._needs(columns, 1) <= options.max_width else 0
        left_out = self._too_many(columns, options.max_width) if gap == 0 else []
        yield self._table([c for c in columns if c not in left_out], gap)
        if left_out:
            yield plain(f"left out, as it is narrow here: {', '.join(c.said or c.name for c in left_out)}", "dim")
        if legend:
            yield plain(f"marks: {', '.join(f'{letter} {mark}' for mark, letter in legend.items())}")

    def _too_many(self, columns: Sequence[Column], width: int) -> list[Column]:
        """Return the columns to drop, the least important first."""
        kept, gone = list(columns), []
        for column in sorted((c for c in columns if c.drop is not None), key=lambda c: c.drop or 0):
            if self._needs(kept, 0) <= width:
                break
            kept.remove(column)
            gone.append(column)
        return gone

    def _needs(self, columns: Sequence[Column], gap: int) -> int:
        """Return the terminal columns that are needed without cutting a number or a word of a label."""
        words = [word for label in self.labels for word in str(label).split()]
        first = max(min(max(map(len, words), default=0), LONGEST_WORD), len("layout"))
        return first + sum(c.width + gap + 1 for c in columns)

    def _table(self, columns: Sequence[Column], gap: int) -> Table:
        padding = (0, max(gap - 1, 0), 0, min(gap, 1))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=False)
        table.add_column("layout", overflow="fold")
        for column in columns:
            table.add_column(column.name, justify="left" if column.text else "right", no_wrap=True)
        for i, label in enumerate(self.labels):
            table.add_row(plain(label), *(plain(c.cells[i]) for c in columns))
        return table


def shown_marks(points: pd.DataFrame) -> list[str]:
    """Return the warnings of each point, without those that the title, the layout, or all points of its run and mode
    have.
    """
    return [", ".join(m for m in marks.of(text) if m not in IMPLIED) for text in marks.telling(points, falls=False)]


def plain(text: object, style: str = "") -> Text:
    """Return the text without markup and without control characters that would control the terminal."""
    return Text(printable(str(text)), style=style)
