"""Draw the forest plot: every ratio with its interval, and the margin within which two sides are the same."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from dcpbench.compare.comparison_text import format_forecast_note, format_label, format_summary
from dcpbench.show.figure_style import WATERMARK, apply_style, get_colour, save_figure
from dcpbench.show.text import fit_text

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from dcpbench.compare.comparison import Comparison, PointResult, Row

NAME, FORMATS = "forest", ("png", "svg")  # files of the picture
MAX_ROWS = 60  # maximum number of rows of the picture, worst first
COLOURS = {"SLOWER": get_colour(1), "FASTER": get_colour(2), "SAME": "#777777", "UNDECIDED": get_colour(0)}
"""Colour of each verdict; each has its own marker, too."""
MARKERS = {"SLOWER": "v", "FASTER": "^", "SAME": "s", "UNDECIDED": "o"}
ROW_INCHES, WIDE, LABEL = 0.24, 9.0, 120
PLOT_INCHES, LETTER_INCHES = 4.8, 0.057  # width of the intervals, and of a character of the rows' names
WRAP = 60  # maximum number of characters per line of the title, in a line as wide as the intervals
FURTHEST = 3.0  # maximum factor that is drawn; longer intervals are cut there


def draw(c: Comparison, folder: Path) -> list[Path]:
    """Write forest.png and forest.svg; neither if no ratio has an interval: then those of an older comparison are removed."""
    found = [(p, row) for p in c.points for row in p.rows if row.low is not None and row.ratio and row.ratio > 0]
    if not found:
        for form in FORMATS:
            (folder / f"{NAME}.{form}").unlink(missing_ok=True)
        return []
    rows = found[:MAX_ROWS]
    longest = max(len(_format_row_name(p, row)) for p, row in rows)
    with apply_style({"text.parse_math": False}):
        wide = max(WIDE, PLOT_INCHES + LETTER_INCHES * longest)
        figure = Figure(figsize=(wide, 1.5 + ROW_INCHES * len(rows)), layout="constrained")
        axes = figure.subplots()
        _draw_rows(axes, rows)
        _draw_frame(axes, rows, c, len(found))
        if c.cpu:
            figure.text(0.5, 0.5, WATERMARK, ha="center", va="center", fontsize=28, color="#BBBBBB", alpha=0.5)
        return save_figure(figure, folder / NAME, *FORMATS)


def _format_row_name(point: PointResult, row: Row) -> str:
    return f"{fit_text(point.name, LABEL)} · {format_label(row)}"


def _draw_rows(axes: Axes, rows: list[tuple[PointResult, Row]]) -> None:
    for y, (_, row) in enumerate(rows):
        low, ratio, high = (_limit_ratio(x) for x in (row.low, row.ratio, row.high))
        axes.plot([low, high], [y, y], color=COLOURS[row.verdict], linewidth=1.6, solid_capstyle="butt")
        axes.plot(ratio, y, MARKERS[row.verdict], color=COLOURS[row.verdict], markersize=5)


def _draw_frame(axes: Axes, rows: list[tuple[PointResult, Row]], c: Comparison, count: int) -> None:
    axes.axvspan(1 / (1 + c.margin), 1 + c.margin, color="#EEEEEE", zorder=0)
    axes.axvline(1, color="#444444", linewidth=0.8)
    axes.set_xscale("log")
    ends = [abs(math.log(_limit_ratio(x))) for _, row in rows for x in (row.low, row.high, row.ratio)]
    reach = max(*ends, 2 * math.log1p(c.margin)) * 1.08
    axes.set_xlim(math.exp(-reach), math.exp(reach))
    ticks = [t for t in _choose_ticks(reach) if abs(math.log(t)) <= reach]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [_format_row_name(p, row) for p, row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"B / A, with its corrected interval (log scale); grey: within {c.margin * 100:g} %")
    cut = f"The worst {len(rows)} of {count:,} ratios; compare.json has all." if count > len(rows) else ""
    texts = (format_summary(c), format_forecast_note(c), cut)
    lines = [line for text in texts for line in textwrap.wrap(text, WRAP)]
    axes.set_title("\n".join(lines), loc="left")
    for verdict in dict.fromkeys(row.verdict for _, row in rows):
        axes.plot([], [], MARKERS[verdict], color=COLOURS[verdict], markersize=5, label=verdict)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, fontsize=8, borderaxespad=0.2)
    axes.set_title(axes.get_title(loc="left"), loc="left", pad=22)


def _choose_ticks(reach: float) -> list[float]:
    """Return round ratios, closer together for narrower ranges."""
    for step in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25):
        if reach / step <= 5:  # noqa: PLR2004 -- labels on either side
            return [round(1 + step * k, 4) for k in range(-6, 7) if 1 + step * k > 0]
    return [0.25, 0.5, 1, 2, 4]


def _limit_ratio(x: float | None) -> float:
    return 1.0 if x is None else min(max(x, 1 / FURTHEST), FURTHEST)
