"""Colours, marks and axes shared by all figures, so that a layout looks the same wherever it appears."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any

from dcpbench.show.numbers import count
from dcpbench.show.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAYOUT_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart with any kind of colour vision; its yellow is too pale for lines on white."""
PHASE_COLOURS = {
    "attention": "#332288",
    "q_gather": "#AA4499",
    "merge": "#CC6677",
    "qkv_proj": "#999933",
    "o_proj": "#DDCC77",
    "attn_reduce": "#117733",
    "dp_gather": "#44AA99",
    "moe": "#88CCEE",
    "dense_mlp": "#882255",
    "mlp_reduce": "#6699CC",
}
"""Paul Tol's muted palette and one blue more, for areas: the phases worth telling apart, in stacking order."""
REST_COLOUR = "#777777"
IDLE_COLOUR = "#DDDDDD"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
Line = str | tuple[int, tuple[int, ...]]
LINES: tuple[Line, ...] = (
    "-",
    "--",
    ":",
    "-.",
    (0, (8, 2)),
    (0, (1, 3)),
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (3, 4)),
)
WATERMARK = "CPU: functional run,\nnot performance"
LOG_RANGE = 20
"""An axis becomes logarithmic when its values span more than this factor."""
RC: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.hashsalt": "dcpbench",
}


@dataclasses.dataclass(frozen=True)
class Style:
    """Colour by layout, line by variant, marker by run (by layout where there is one run).

    Where one layout was run in several variants, colours and markers are theirs.
    """

    layouts: list[str]
    variants: list[str]
    runs: list[str]

    @classmethod
    def of(cls, points: pd.DataFrame) -> Style:
        """The style of a whole report."""
        ordered = points.sort_values(["tp", "dp", "dcp"], kind="stable")
        return cls(
            *(
                list(dict.fromkeys(map(str, t[c])))
                for t, c in ((ordered, "layout"), (points, "variant"), (points, "run"))
            )
        )

    @property
    def by_variant(self) -> bool:
        """Whether colours tell variants apart, as there is but one layout."""
        return len(self.layouts) == 1 and len(self.variants) > 1

    def colour(self, layout: str, variant: str = "") -> str:
        """Colour of a layout; of a variant where colours are variants'."""
        return LAYOUT_COLOURS[self._place(layout, variant) % len(LAYOUT_COLOURS)]

    def _place(self, layout: str, variant: str) -> int:
        return self.variants.index(variant) if self.by_variant and variant else self.layouts.index(layout)

    def line(self, variant: str) -> Line:
        """Line style of a backend or an exchange with its options."""
        return LINES[self.variants.index(variant) % len(LINES)]

    def marker(self, layout: str, run: str, variant: str = "") -> str:
        """Marker of a run; of what the colour stands for where there is only one run, as a second sign beside it."""
        index = self.runs.index(run) if len(self.runs) > 1 else self._place(layout, variant)
        return MARKERS[index % len(MARKERS)]


def plain(text: object, most: int = 48) -> str:
    """Any string as a label: no mathematics, one line, not endless."""
    return one_line(str(text), most).replace("$", r"\$")


def headline(figure: Figure, title: str, *, width: int = 90) -> None:
    """Title of a figure, broken into lines of at most `width` characters."""
    figure.suptitle("\n".join(textwrap.wrap(title, width)), fontsize=12)


LEGEND_LINES = 4
LEGEND_LINE_INCHES = 0.2
"""Lines of a legend that a figure has room for, and how much taller each further one makes it."""


def legend_below(figure: Figure, handles: list[Any]) -> None:
    """A legend outside the panels, in as many columns as the figure is wide, which grows with a long one."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(int(figure.get_figwidth() * 72 / (longest * 5.4 + 48)), len(handles)))
    more = max(0, -(-len(handles) // columns) - LEGEND_LINES)
    figure.set_figheight(figure.get_figheight() + more * LEGEND_LINE_INCHES)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)


def columns_for(panels: int) -> int:
    """Panels side by side: one on a small screen, else up to three, and no single one left over from four."""
    return {1: 1, 2: 2, 4: 2}.get(panels, 3)


def watermark(ax: Axes) -> None:
    """Say across a panel that its numbers are no performance claim, without hiding what is drawn below."""
    from matplotlib.patheffects import withStroke

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
        alpha=0.85,
        zorder=5,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )


def measured_ticks(ax: Axes, values: Iterable[float]) -> None:
    """Put the ticks of the x axis where something was measured, logarithmic when the values are far apart."""
    ticks = sorted(set(values))
    if ticks and ticks[0] > 0 and ticks[-1] / ticks[0] >= 4:  # noqa: PLR2004 - two doublings
        ax.set_xscale("log", base=2)
    if ticks and ticks[0] == ticks[-1]:
        ax.set_xlim(ticks[0] * 0.5, ticks[0] * 1.5)
    most = 7
    ticks = ticks if len(ticks) <= most else [*ticks[:: -(-len(ticks) // most)], ticks[-1]]
    ax.set_xticks(ticks, [count(t) for t in ticks])
    ax.minorticks_off()


def value_axis(ax: Axes, values: Iterable[float], axis: str) -> None:
    """Start an axis at 0, or make it logarithmic where the values span more than LOG_RANGE."""
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
    target.set_major_formatter(FuncFormatter(lambda v, _: count(v) if v >= 10 or v == 0 else f"{v:g}"))  # noqa: PLR2004
