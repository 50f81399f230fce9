"""Write every figure of a report as PNG and SVG, and as PDF on request, with matplotlib: one per model and question.

If a figure cannot hold all points, it shows evenly picked lengths and loads, and the fastest layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import TYPE_CHECKING, Any

from dcpbench.points.names import CLOSED
from dcpbench.reports import (
    engine_steps,
    engine_steps_figure,
    engines,
    figures,
    findings,
    gains,
    gains_figure,
    overview,
    routing_figure,
    style,
)
from dcpbench.show.figure_style import apply_style, save_figure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

    from dcpbench.reports.dataframes import Frames

    Draw = Callable[..., Figure]

MAX_MODELS, MAX_RUNS = 12, 6  # models and runs with figures of their own at most
MAX_LENGTHS, SOME_LENGTHS = 9, 6  # panels at most, and panels that are shown if there are more: fewer are as readable
MAX_LOADS, SOME_LOADS = 48, 24  # points of a line at most, and points that are shown if there are more
MAX_LINES = 16  # lines of a panel at most
FORMATS = ("png", "svg")  # file formats of every figure
OVERVIEW, BREAK_EVEN, KV, PHASES, ENGINES, STEPS = "overview", "break-even", "kv", "phases", "engines", "engine-steps"
ROUTINGS, GAINS = "routings", "gains"  # figures that are not in figures.LINES; the first two show all models


@dataclasses.dataclass(frozen=True)
class Picture:
    """Describe one drawn figure."""

    subject: str  # one of SUBJECTS of figures, or of the subjects above
    mode: str  # `live` or `replay`, of served requests; empty for `decode`, and for what does not depend on it
    title: str
    alt: str  # alternative text of the figure
    png: Path
    svg: Path
    pdf: Path | None = None


def draw_all(
    read: Frames, folder: Path, *, drawn: bool = True, pdf: bool = False, watch: Callable[[str], None] = lambda _: None
) -> list[Picture]:
    """Draw every figure that the points allow into `folder`, with `pdf` also as PDF; with `drawn=False` only return the list.

    `watch` is called with the figure in progress.
    """
    if read.everything.empty:
        return []
    formats = (*FORMATS, "pdf") if pdf else FORMATS
    looks = assign_looks(read)
    all_of_them = _draw_figures(read, FigureWriter(folder, looks, drawn=False, formats=formats))
    if not drawn:
        return all_of_them
    folder.mkdir(parents=True, exist_ok=True)
    return _draw_figures(read, FigureWriter(folder, looks, formats=formats, of=len(all_of_them), watch=watch))


def assign_looks(read: Frames) -> dict[bool, style.Style]:
    """Return the style of figures of `decode` (True) and of served points (False), which have lines of their own."""
    whole = style.Style.from_points(read.everything)
    looks = {}
    for decode, table in ((True, read.points), (False, read.served)):
        known = table[table["output_tok_s"].notna()] if len(table) else table
        lines = style.Style.from_points(known).lines if len(known) else whole.lines
        looks[decode] = dataclasses.replace(whole, lines=lines)
    return looks


def _draw_figures(read: Frames, studio: FigureWriter) -> list[Picture]:
    """Return the pictures of a studio after adding every figure to it."""
    _draw_engines(read, studio)
    _draw_engine_steps(read, studio)
    _draw_overview(read, studio)
    _draw_lines(read.points, studio)
    _draw_lines(read.served, studio)
    _draw_break_even(read, studio)
    _draw_gains(read, studio)
    _draw_routings(read.points, studio)
    for points in _group_by_model(read.points):
        few, _ = sample_points(points)
        _draw_bars(few, studio, PHASES, "Where a step's time goes", figures.draw_phases, figures.has_phases)
    for points in _group_by_model(read.everything):
        _draw_bars(
            points,
            studio,
            KV,
            "KV cache capacity by layout",
            figures.draw_capacity,
            lambda t: bool(t["kv_tokens_per_gib"].notna().any()),
        )
    return studio.pictures


def _group_by_model(points: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the points of each model, for the models with most points."""
    return [points[points["model"] == name] for name in find_most_frequent(points, "model", MAX_MODELS)]


def _draw_bars(
    points: pd.DataFrame,
    studio: FigureWriter,
    subject: str,
    title: str,
    draw: Draw,
    wanted: Callable[[pd.DataFrame], bool],
) -> None:
    """Draw a figure per model for each run that has the wanted values."""
    for run in find_most_frequent(points, "run", MAX_RUNS):
        of_run, note = sample_points(points[points["run"] == run])
        where = style.format_label(points["model"].iloc[0])
        where += f", {style.format_label(of_run['run_label'].iloc[0])}" if len(set(points["run"])) > 1 else ""
        if wanted(of_run):
            studio.add_figure(subject, f"{title}, {where}{note}", of_run, draw)


def _draw_lines(points: pd.DataFrame, studio: FigureWriter) -> None:
    """Draw figures of rates and latencies; live runs and replays have separate figures, each labelled with its mode."""
    known = points if points.empty else points[points["output_tok_s"].notna()]
    if known.empty:
        return
    along = known[known["load_arrival"].isin(figures.AXIS_OF_ARRIVAL)]
    shown = along[along["model"].isin(find_most_frequent(along, "model", MAX_MODELS))]
    for (mode, model, _), found in shown.groupby(["mode", "model", "load_arrival"], sort=False):
        load, decode = figures.get_load_axis(found), mode == "decode"
        group, note = sample_points(found, load.column)
        for subject, title, draw in figures.LINES:
            if not figures.find_missing_values(subject, group):
                where = style.format_label(model) if decode else f"{style.format_label(model)}, {mode}"
                full_title = f"{title.format(load.against)}, {where}{note}"
                studio.add_figure(subject, full_title, group, draw)


def _draw_engines(read: Frames, studio: FigureWriter) -> None:
    """Draw engines at equal layout and load: a figure for each model and mode."""
    rows = engines.compare_engines(read).rows
    for (model, mode), own in list(rows.groupby(["model", "mode"], sort=False))[:MAX_MODELS] if len(rows) else ():
        where = style.format_label(model) + ("" if mode == "decode" else f", {mode}")
        kept = len(own.drop_duplicates("cell"))
        note = (
            f" (the first {figures.MAX_ENGINE_CELLS} of {kept} layouts and loads)"
            if kept > figures.MAX_ENGINE_CELLS
            else ""
        )
        title = f"Engines at equal layout and load, {where}{note}"
        studio.add_figure(ENGINES, title, own, figures.draw_engines, figures.format_alt_engines(title, own))


def _draw_engine_steps(read: Frames, studio: FigureWriter) -> None:
    """Draw the decode steps of the engines by part: a figure for each model."""
    rows = engine_steps.compare_steps(read).rows
    for model, own in list(rows.groupby("model", sort=False))[:MAX_MODELS] if len(rows) else ():
        title = f"{engine_steps.TITLE}, {style.format_label(model)}{engine_steps_figure.format_left_out(own)}"
        alt = engine_steps_figure.format_alt_engine_steps(title, own)
        studio.add_figure(STEPS, title, own, engine_steps_figure.draw_engine_steps, alt)


def _draw_overview(read: Frames, studio: FigureWriter) -> None:
    """Draw each layout relative to the best other one."""
    draw = functools.partial(figures.draw_overview, lost=overview.select_rejected_for_memory(read))
    for mode, group, note in _sample_modes(read.findings.against_others):
        title = (
            f"Output of each layout, relative to the best other layout{'' if mode == 'decode' else f', {mode}'}{note}"
        )
        studio.add_figure(OVERVIEW, title, group, draw, figures.format_alt_overview(title, group))


def _draw_break_even(read: Frames, studio: FigureWriter) -> None:
    """Draw DCP over its baseline."""
    ratios = read.findings.ratios
    loops = ratios[ratios["ratio"].notna() & (ratios["load_arrival"] == CLOSED)] if len(ratios) else ratios
    for mode, group, note in _sample_modes(loops):
        title = f"Output tok/s with DCP over the same layout without it, {mode}{findings.format_slo_aside(group)}{note}"
        studio.add_figure(
            BREAK_EVEN, title, group, figures.draw_break_even, figures.format_alt_break_even(title, group)
        )


def _draw_gains(read: Frames, studio: FigureWriter) -> None:
    """Draw the gain of DCP by cause: a figure for each model."""
    rows = gains.build_rows(read)
    for model, own in list(rows.groupby("model", sort=False))[:MAX_MODELS] if len(rows) else ():
        some = (
            "" if len(own) <= gains_figure.MAX_PANELS else f" (the first {gains_figure.MAX_PANELS} of {len(own)} loads)"
        )
        title = f"{gains.TITLE}, {style.format_label(model)}, replay{some}"
        studio.add_figure(GAINS, title, own, gains_figure.draw_gains, gains_figure.format_alt_gains(title, own))


def _draw_routings(points: pd.DataFrame, studio: FigureWriter) -> None:
    """Draw steps against the distribution of experts: a figure for each model that ran with several."""
    rows = routing_figure.select_skewed(points)
    for model, own in list(rows.groupby("model", sort=False))[:MAX_MODELS] if len(rows) else ():
        title = f"Step time by distribution of experts, {style.format_label(model)}"
        studio.add_figure(
            ROUTINGS, title, own, routing_figure.draw_routings, routing_figure.format_alt_routings(title, own)
        )


def _sample_modes(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame, str]]:
    """Return the rows of a figure over all models for decode, live runs and replays, and what of them it shows."""
    groups = rows.groupby("mode", sort=False) if len(rows) else ()
    return [(str(mode), *sample_points(_select_sides(found), rate="ratio")) for mode, found in groups]


def _select_sides(found: pd.DataFrame) -> pd.DataFrame:
    """Return the points of the models and runs with most points, as many as a figure has rows or panels for."""
    named = found.assign(side=figures.get_sides(found))
    return found[named["side"].isin(find_most_frequent(named, "side", MAX_LENGTHS))]


@dataclasses.dataclass
class FigureWriter:
    """Draw figures into a folder, and keep a list of them."""

    folder: Path
    looks: Mapping[bool, style.Style]  # style of figures of `decode` (True), and of served points
    drawn: bool = True
    formats: tuple[str, ...] = FORMATS
    of: int = 0  # total number of figures
    watch: Callable[[str], None] = lambda _: None
    pictures: list[Picture] = dataclasses.field(default_factory=list)

    def add_figure(self, subject: str, title: str, points: pd.DataFrame, draw: Draw, alt: str = "") -> None:
        """Draw one figure and write it."""
        mode = points["mode"].iloc[0]
        mode = "" if subject == KV or mode == "decode" else str(mode)
        path = self.folder / self._make_name(subject, mode, points)
        if self.drawn:
            self.watch(f"figure {len(self.pictures) + 1} of {self.of}: {title}")
            self.write_figure(path, title, points, draw)
        files = [path.with_suffix(f".{form}") for form in self.formats]
        self.pictures.append(Picture(subject, mode, title, alt or figures.format_alt(subject, title, points), *files))

    def write_figure(self, path: Path, title: str, points: pd.DataFrame, draw: Draw) -> None:
        """Write a figure in all formats."""
        with apply_style():
            save_figure(draw(points, self.looks[points["mode"].iloc[0] == "decode"], title), path, *self.formats)

    def _make_name(self, subject: str, mode: str, points: pd.DataFrame) -> str:
        """Return a unique file name of plain letters for any model name."""
        parts = ["serve", subject, mode] if mode else [subject]
        parts += [points["load_arrival"].iloc[0]] if mode and subject not in (BREAK_EVEN, OVERVIEW) else []
        kind = "-".join(parts)
        model = "all" if subject in (BREAK_EVEN, OVERVIEW) else points["model"].iloc[0]
        run = points["run"].iloc[:1] if subject in (PHASES, KV) and len(self.looks[True].runs) > 1 else ()
        name = "-".join(
            re.sub(r"[^A-Za-z0-9_]+", "-", str(part)).strip("-")[:40] or "unnamed" for part in (kind, model, *run)
        )
        taken = {picture.png.stem for picture in self.pictures}
        others = (f"{name}-{number}" for number in itertools.count(2))
        return next(unique for unique in itertools.chain([name], others) if unique not in taken)


def sample_points(
    points: pd.DataFrame, along: str = "concurrency", *, rate: str = "output_tok_s"
) -> tuple[pd.DataFrame, str]:
    """Return the points that a figure shows, and how many of what that is in words; empty if it is all of them."""
    if len(points) <= min(MAX_LENGTHS, MAX_LOADS, MAX_LINES):
        return points, ""
    notes: list[str] = []
    for column, by, most, some in (
        ("rest", ["input_typical", "rest"], MAX_LENGTHS, SOME_LENGTHS),
        (along, [along], MAX_LOADS, SOME_LOADS),
    ):
        narrow = points[list(dict.fromkeys([column, *by]))]  # every step copies all columns, of which there are 200
        values = narrow.drop_duplicates(column).sort_values(by, kind="stable")[column].dropna().tolist()
        kept = sample_evenly(values, some) if len(values) > most else values
        if len(kept) < len(values):
            notes.append(f"{len(kept)} of {len(values):,} {'lengths' if column == 'rest' else 'loads'}")
            points = points[points[column].isin(set(kept))]
    series = points["run"].astype(str).str.cat(points["label"].astype(str), sep="\n")
    fastest = points[rate].astype(float).groupby(series).max().sort_values(ascending=False, kind="stable")
    if len(fastest) > MAX_LINES:
        points = points[series.isin(set(fastest.index[:MAX_LINES]))]
        notes.append(f"the {MAX_LINES} fastest of {len(fastest):,} layouts")
    return points, f" (shown: {', '.join(notes)}; all in points.csv)" if notes else ""


def sample_evenly(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` values: the first, the last and evenly picked ones between."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(i * step)] for i in range(most)]


def find_most_frequent(points: pd.DataFrame, column: str, most: int) -> list[Any]:
    """Return the values of a column that have the most points, in order of appearance."""
    if points.empty:
        return []
    counts = points[column].value_counts(sort=True)
    kept = set(counts.index[:most])
    return [value for value in dict.fromkeys(points[column]) if value in kept]
