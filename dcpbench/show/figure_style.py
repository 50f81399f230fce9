"""Define the shared style of figures: colours, markers and axes, the CPU watermark, and the file formats."""

from __future__ import annotations

import contextlib
import math
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

from dcpbench.show.numbers import format_integer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, distinguishable with any kind of colour vision; its yellow is too pale for lines on white."""
GREY = "#555555"  # colour of elements that belong to no series: limits, and symbols in a legend
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
Line = str | tuple[int, tuple[int, ...]]
LINES: tuple[Line, ...] = ("-", "--", ":", "-.", (0, (8, 2)), (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1)), (0, (3, 4)))
WATERMARK = "CPU: functional run,\nnot performance"
BEHIND_MARKS = 0.9  # Matplotlib z-order: bands and bars have 1, lines and markers 2
LOG_RANGE = 20  # an axis becomes logarithmic when its values span more than this factor
RC: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titley": 1.0,  # the default position, as a panel has no axis on top; the automatic placement is slow
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.hashsalt": "dcpbench",
}


DPI = 150  # resolution of PNGs


@contextlib.contextmanager
def apply_style(more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Apply the common style to all figures drawn and saved in the block, with `more` of matplotlib's settings."""
    import matplotlib as mpl

    with mpl.rc_context({**RC, **(more or {})}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in letters that the font lacks
        yield


def save_figure(figure: Figure, path: Path, *formats: str) -> list[Path]:
    """Write a figure in formats, of `png`, `svg` and `pdf`, which end the name of `path`; returns the files.

    Everything finds its place once, as the first format needs it, and each format is drawn once: Figure.savefig would
    lay out and draw everything twice for each.
    """
    from matplotlib.backends import backend_agg, backend_pdf, backend_svg

    written: dict[str, Callable[[Path], object]] = {
        "png": lambda file: _write_png(backend_agg.FigureCanvasAgg(figure), file),
        "svg": lambda file: backend_svg.FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None}),
        "pdf": lambda file: backend_pdf.FigureCanvasPdf(figure).print_pdf(file, metadata={"CreationDate": None}),
    }
    backend_agg.FigureCanvasAgg(figure)
    figure.set_dpi(DPI)
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine("none")
    paths = [path.with_suffix(f".{form}") for form in formats]
    for form, target in zip(formats, paths, strict=True):
        written[form](target)
    return paths


def _write_png(canvas: FigureCanvasAgg, file: Path) -> None:
    """Write a PNG in 256 colours, each off by a dozen shades at most, with a third of the bytes."""
    from PIL import Image

    canvas.draw()
    drawn = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    few = drawn.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, dpi=(DPI, DPI), optimize=True)


def get_colour(place: int) -> str:
    """Return the colour of the series at this index."""
    return COLOURS[place % len(COLOURS)]


def get_marker(place: int) -> str:
    """Return the marker of a series, which distinguishes it in addition to the colour."""
    return MARKERS[place % len(MARKERS)]


def get_line_style(place: int) -> Line:
    """Return the line style of a series."""
    return LINES[place % len(LINES)]


def set_axis_labels(figure: Figure, x: str, y: str) -> None:
    """Label the x axis of every panel and the y axis of the first in each row."""
    for ax in figure.axes:
        ax.set_xlabel(format_axis_label(x, ax.get_xscale()))
        spec = ax.get_subplotspec()
        if spec is None or spec.is_first_col():
            ax.set_ylabel(format_axis_label(y, ax.get_yscale()))


def format_axis_label(label: str, scale: str) -> str:
    """Return the label, with a note in brackets if the axis is logarithmic."""
    if scale != "log":
        return label
    return f"{label.removesuffix(')')}, log scale)" if label.endswith(")") else f"{label} (log scale)"


AXIS_LETTERS = 26  # of tick labels, next to each other below the narrowest panel
LETTERS_IN_AN_INCH = 11  # of a title
MAX_TITLE_COLUMNS = 90


def set_headline(figure: Figure, title: str) -> None:
    """Set the title of a figure, broken into lines that fit the figure's width."""
    columns = min(MAX_TITLE_COLUMNS, int(figure.get_figwidth() * LETTERS_IN_AN_INCH))
    figure.suptitle("\n".join(textwrap.wrap(title, columns, break_on_hyphens=False)), fontsize=12)


LEGEND_LINES = 4  # lines of a legend that a figure has room for
LEGEND_LINE_INCHES = 0.2  # height that each further line adds to the figure


def draw_legend_below(figure: Figure, handles: list[Any]) -> None:
    """Draw a legend below the panels, in as many columns as fit the figure, which grows with a long one."""
    labels = [str(handle.get_label()).splitlines() for handle in handles]
    longest = max(len(line) for lines in labels for line in lines)
    columns = max(1, min(int(figure.get_figwidth() * 72 / (longest * 5.4 + 48)), len(handles)))
    more = max(0, -(-len(handles) // columns) * max(map(len, labels)) - LEGEND_LINES)
    figure.set_figheight(figure.get_figheight() + more * LEGEND_LINE_INCHES)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)


def make_hollow_entry(means: str, line: Line = "") -> Line2D:
    """Return a legend entry that explains a hollow marker, with or without a line."""
    from matplotlib.lines import Line2D

    label = f"hollow, dashed: {means}" if line else f"hollow: {means}"
    return Line2D([], [], color=GREY, label=label, marker="o", markerfacecolor="white", linestyle=line)


def choose_columns(panels: int) -> int:
    """Return the number of panels side by side: one for a single panel, two for two or four, else three."""
    return {1: 1, 2: 2, 4: 2}.get(panels, 3)


def draw_watermark(ax: Axes) -> None:
    """Write across a panel, behind its contents, that its numbers are no performance claim."""
    ax.text(
        0.5,
        0.5,
        WATERMARK,
        transform=ax.transAxes,
        ha="center",
        va="center",
        rotation=15,
        fontsize=13,
        color="#666666",
        alpha=0.6,
        zorder=BEHIND_MARKS,
    )


def draw_watermark_below(ax: Axes) -> None:
    """Write the watermark below the axis of a panel with bars, which would cover it."""
    text = WATERMARK.replace("\n", " ")
    ax.set_xlabel("\n".join(filter(None, (ax.get_xlabel(), text))))


def set_measured_ticks(ax: Axes, values: Iterable[float]) -> None:
    """Put the ticks of the x axis at the measured values, logarithmic if the values are far apart.

    Values with labels that would overlap that of the next larger tick have no tick.
    """
    ticks = sorted(set(values))
    is_log = bool(ticks) and ticks[0] > 0 and ticks[-1] / ticks[0] >= 4  # noqa: PLR2004 - two doublings
    if is_log:
        ax.set_xscale("log", base=2)
    if ticks and ticks[0] == ticks[-1]:
        ax.set_xlim(ticks[0] * 0.5, ticks[0] * 1.5)
    place = math.log if is_log else float
    kept = ticks[-1:]
    names = {tick: format_integer(tick) if float(tick).is_integer() else f"{tick:g}" for tick in ticks}
    for tick in reversed(ticks[:-1]):
        letters = (len(names[tick]) + len(names[kept[0]])) / 2 + 0.25
        if (place(kept[0]) - place(tick)) * AXIS_LETTERS >= letters * (place(ticks[-1]) - place(ticks[0])):
            kept.insert(0, tick)
    ax.set_xticks(kept, [names[tick] for tick in kept])
    ax.minorticks_off()


def set_value_axis(ax: Axes, values: Iterable[float], axis: str) -> None:
    """Start an axis at 0, or make it logarithmic if the values span more than LOG_RANGE."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    known = [v for v in values if v > 0]
    target = getattr(ax, f"{axis}axis")
    if known and max(known) / min(known) > LOG_RANGE:
        getattr(ax, f"set_{axis}scale")("log")
        getattr(ax, f"set_{axis}lim")(min(known) / 1.2, max(known) * 1.5)
        target.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        ax.minorticks_off()
    else:
        getattr(ax, f"set_{axis}lim")(0, max(known, default=1) * 1.08)
        target.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    target.set_major_formatter(FuncFormatter(lambda v, _: format_integer(v) if v >= 10 or v == 0 else f"{v:g}"))  # noqa: PLR2004
