"""Every figure of a report, written as PNG and SVG by matplotlib without a display: one per model and question."""

from __future__ import annotations

import dataclasses
import io
import re
import warnings
from typing import TYPE_CHECKING

import matplotlib as mpl

from dcpbench.reports import bars, lines, style

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

    Draw = Callable[..., Figure]

LINES = (
    ("throughput", "Output throughput against concurrency", lines.draw_throughput),
    ("itl", "Inter-token latency against concurrency", lines.draw_itl),
    ("frontier", "Throughput per GPU against speed per user", lines.draw_frontier),
)
BARS = (
    ("phases", "Where a step's time goes", bars.draw_phases, bars.has_phases),
    ("kv", "KV cache capacity by layout", bars.draw_capacity, bars.has_capacity),
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
    narrow_svg: bytes
    """The same with its panels below each other, for small screens."""


def draw_all(points: pd.DataFrame, folder: Path) -> list[Picture]:
    """Draw every figure that the points allow into `folder`."""
    if points.empty:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    look = style.Style.of(points)
    studio = _Studio(folder, look)
    for model, of_model in points.groupby("model", sort=False):
        if of_model["output_tok_s"].notna().any():
            for kind, title, draw in LINES:
                studio.add(kind, f"{title}, {style.plain(model)}", of_model, draw)
        for run, of_run in of_model.groupby("run", sort=False):
            where = style.plain(model) + (f", run {style.plain(run)}" if len(look.runs) > 1 else "")
            for kind, title, draw, wanted in BARS:
                if wanted(of_run):
                    studio.add(kind, f"{title}, {where}", of_run, draw)
    return studio.pictures


@dataclasses.dataclass
class _Studio:
    folder: Path
    look: style.Style
    pictures: list[Picture] = dataclasses.field(default_factory=list)

    def add(self, kind: str, title: str, points: pd.DataFrame, draw: Draw) -> None:
        """Draw one figure in both widths and write it."""
        path = self.folder / self._name(kind, points)
        with mpl.rc_context(style.RC), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in letters that the font lacks
            wide = draw(points, self.look, title, narrow=False)
            wide.savefig(path.with_suffix(".png"), dpi=150)
            path.with_suffix(".svg").write_bytes(_svg(wide))
            narrow = _svg(draw(points, self.look, title, narrow=True))
        alt = _alt(kind, title, points)
        self.pictures.append(Picture(kind, title, alt, path.with_suffix(".png"), path.with_suffix(".svg"), narrow))

    def _name(self, kind: str, points: pd.DataFrame) -> str:
        """A file name of plain letters, whatever the model is called, and no name twice."""
        parts = [kind, points["model"].iloc[0], *(points["run"].iloc[:1] if kind in ("phases", "kv") else ())]
        parts = parts if len(self.look.runs) > 1 else parts[:2]
        name = "-".join(re.sub(r"[^A-Za-z0-9_]+", "-", str(part)).strip("-")[:40] or "unnamed" for part in parts)
        taken = {picture.png.stem for picture in self.pictures}
        number = 2
        unique = name
        while unique in taken:
            unique, number = f"{name}-{number}", number + 1
        return unique


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _alt(kind: str, title: str, points: pd.DataFrame) -> str:
    """A sentence with what a reader would take from the picture; the full numbers stand in the tables."""
    shown = ", ".join(dict.fromkeys(map(str, points["label"])))
    contexts = ", ".join(style.count(c) for c in sorted(points["context"].unique()))
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
