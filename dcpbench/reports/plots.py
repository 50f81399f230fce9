"""Every figure of a report, written as PNG, SVG and PDF by matplotlib without a display: one per model and question."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import TYPE_CHECKING

import matplotlib as mpl

from dcpbench.points.names import CLOSED
from dcpbench.reports import bars, findings, lines, style, thinning
from dcpbench.reports.serving import figures
from dcpbench.show.numbers import count

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

    from dcpbench.reports.frames import Frames

    Draw = Callable[..., Figure]

BREAK_EVEN = "break-even"
"""Kind of the figures that show all models at once."""
SUBJECTS = (BREAK_EVEN, "throughput", "ttft", "itl", "frontier")
LINES = (
    ("throughput", "Output throughput against concurrency", lines.draw_throughput),
    ("itl", "Inter-token latency against concurrency", lines.draw_itl),
    ("frontier", "Throughput per GPU against speed per user", lines.draw_frontier),
)


@dataclasses.dataclass(frozen=True)
class Picture:
    """One drawn figure."""

    kind: str
    title: str
    alt: str
    """What it shows, for those who cannot see it."""
    png: Path
    svg: Path
    pdf: Path | None = None

    @property
    def subject(self) -> str:
        """The kind without workload, mode and arrival: `throughput`, `ttft`, `itl`, `frontier`, `break-even`."""
        return next((name for name in SUBJECTS if name in self.kind), self.kind)


def draw_all(read: Frames, folder: Path) -> list[Picture]:
    """Draw every figure that the points allow into `folder`."""
    if read.everything.empty:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    studio = Studio(folder, style.Style.of(read.everything))
    _draw_steps(read.points, studio)
    _draw_served(read.served, studio)
    _draw_break_even(read, studio)
    for _, points in _by_model(read.everything):
        _draw_bars(points, studio, "kv", "KV cache capacity by layout", bars.draw_capacity, bars.has_capacity)
    return studio.pictures


def _by_model(points: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The points of each model, of those that have the most."""
    names = thinning.first_of(points, "model", thinning.MOST_MODELS)
    return [(name, points[points["model"] == name]) for name in names]


def _draw_steps(points: pd.DataFrame, studio: Studio) -> None:
    """Figures of the workload `decode`."""
    if points.empty:
        return
    studio.look = dataclasses.replace(studio.look, variants=style.Style.of(points).variants)
    for model, found in _by_model(points):
        of_model, note = thinning.thinned(found)
        if of_model["output_tok_s"].notna().any():
            for kind, title, draw in LINES:
                studio.add(kind, f"{title}, {style.plain(model)}{note}", of_model, draw)
        _draw_bars(of_model, studio, "phases", "Where a step's time goes", bars.draw_phases, bars.has_phases)


def _draw_bars(
    points: pd.DataFrame, studio: Studio, kind: str, title: str, draw: Draw, wanted: Callable[[pd.DataFrame], bool]
) -> None:
    """A figure of a model for each run that has what it shows."""
    for run in thinning.first_of(points, "run", thinning.MOST_RUNS):
        of_run, note = thinning.thinned(points[points["run"] == run])
        where = style.plain(points["model"].iloc[0])
        where += f", run {style.plain(run)}" if len(studio.look.runs) > 1 else ""
        if wanted(of_run):
            studio.add(kind, f"{title}, {where}{note}", of_run, draw)


def _draw_served(served: pd.DataFrame, studio: Studio) -> None:
    """Figures of the workload `serve`: live runs and replays in figures of their own, each of which says what it is."""
    known = served if served.empty else served[served["output_tok_s"].notna()]
    if known.empty:
        return
    studio.look = dataclasses.replace(studio.look, variants=style.Style.of(known).variants)
    along = known[known["load_arrival"].isin(figures.ALONG)]
    shown = along[along["model"].isin(thinning.first_of(along, "model", thinning.MOST_MODELS))]
    for key, found in shown.groupby(["mode", "model", "load_arrival"], sort=False):
        mode, model, arrival = map(str, key)
        group, note = thinning.thinned(found, figures.ALONG[arrival].column)
        for kind, title, draw in figures.LINES:
            if figures.lacks(kind, group):
                continue
            told = f"{title.format(figures.ALONG[arrival].against)}, {style.plain(model)}, {mode}{note}"
            studio.add(f"serve-{kind}-{mode}-{arrival}", told, group, draw, figures.alt(told, group))


def _draw_break_even(read: Frames, studio: Studio) -> None:
    """DCP over its baseline: a figure for decode, one for live runs and one for replays, over all models."""
    ratios = findings.dcp_against_baseline(findings.rivals(read))
    loops = ratios[ratios["ratio"].notna() & (ratios["load_arrival"] == CLOSED)] if len(ratios) else ratios
    models = thinning.first_of(loops, "model", thinning.MOST_LENGTHS)
    for mode, found in loops[loops["model"].isin(models)].groupby("mode", sort=False) if len(loops) else ():
        group, note = thinning.thinned(found, rate="ratio")
        told = f"Output tok/s with DCP over the same layout without it, {mode}{findings.slo_aside(group)}{note}"
        kind = BREAK_EVEN if mode == "decode" else f"serve-{BREAK_EVEN}-{mode}"
        studio.add(kind, told, group, figures.draw_break_even, figures.alt_break_even(told, group))


@dataclasses.dataclass
class Studio:
    """Draws figures into a folder, all in one look, and remembers them."""

    folder: Path
    look: style.Style
    pictures: list[Picture] = dataclasses.field(default_factory=list)

    def add(self, kind: str, title: str, points: pd.DataFrame, draw: Draw, alt: str = "") -> None:
        """Draw one figure and write it."""
        path = self.folder / self._name(kind, points)
        self.draw(path, title, points, draw)
        png, svg, pdf = (path.with_suffix(end) for end in (".png", ".svg", ".pdf"))
        alt = alt or _alt(kind, title, points)
        self.pictures.append(Picture(kind, title, alt, png, svg, pdf))

    def draw(self, path: Path, title: str, points: pd.DataFrame, draw: Draw) -> None:
        """Write a figure in all formats."""
        with mpl.rc_context(style.RC), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in letters that the font lacks
            figure = draw(points, self.look, title)
            figure.savefig(path.with_suffix(".png"), dpi=150)
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
            figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})

    def _name(self, kind: str, points: pd.DataFrame) -> str:
        """A file name of plain letters, whatever the model is called, and no name twice."""
        model = "all" if BREAK_EVEN in kind else points["model"].iloc[0]
        parts = [kind, model, *(points["run"].iloc[:1] if kind in ("phases", "kv") else ())]
        parts = parts if len(self.look.runs) > 1 else parts[:2]
        name = "-".join(re.sub(r"[^A-Za-z0-9_]+", "-", str(part)).strip("-")[:40] or "unnamed" for part in parts)
        taken = {picture.png.stem for picture in self.pictures}
        number = 2
        unique = name
        while unique in taken:
            unique, number = f"{name}-{number}", number + 1
        return unique


def _alt(kind: str, title: str, points: pd.DataFrame) -> str:
    """A sentence with what a reader would take from the picture; the full numbers stand in the tables."""
    shown = ", ".join(style.plain(label) for label in dict.fromkeys(map(str, points["label"])))
    contexts = ", ".join(count(c) for c in sorted(points["context"].unique()))
    text = f"{title}. Layouts: {shown}. Contexts: {contexts} tokens."
    known = points[points["output_tok_s"].notna()]
    if kind in ("throughput", "frontier") and len(known):
        top = known.sort_values("output_tok_s", kind="stable").iloc[-1]
        text += (
            f" Highest: {top['label']} with {top['output_tok_s']:,.0f} tok/s at context {top['context']:,} "
            f"and concurrency {top['concurrency']}."
        )
    if bool(points["cpu"].any()):
        text += " CPU: functional run, not performance."
    return text
