"""Draw the gain of DCP by cause as a waterfall: from the layout without DCP over each part to the one with it, a panel per load."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from dcpbench.reports.figures import make_grid
from dcpbench.serving.gain_split import HEADINGS, OUTPUT, format_share
from dcpbench.show.figure_style import choose_columns, draw_legend_below
from dcpbench.show.numbers import format_number

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dcpbench.reports.style import Style
    from dcpbench.serving.gain_split import Causes, GainSplit

MAX_PANELS = 6
TOTAL, BETTER, WORSE = "#777777", "#009E73", "#D55E00"
BAR_INCHES, MARGIN_INCHES = 0.36, 1.2
NAME_CHARS, TITLE_CHARS = 22, 40
HEADROOM = 1.28  # of the longest bar, for the numbers behind the bars


def draw_gains(rows: pd.DataFrame, style: Style, title: str) -> Figure:  # noqa: ARG001 - same call for all
    """Draw the gains of gains.build_rows for one model."""
    from matplotlib.patches import Patch

    shown = rows.iloc[:MAX_PANELS]
    causes = _list_causes([row["split"] for row in shown.to_dict("records")])
    columns = choose_columns(len(shown))
    size = (max(3.4 * columns + 1.8, 6.4), BAR_INCHES * (len(causes) + 2) + 0.9)
    figure, axes = make_grid(title, len(shown), columns, size, MARGIN_INCHES)
    for n, (ax, row) in enumerate(zip(axes, shown.to_dict("records"), strict=True)):
        _draw_panel(ax, row["split"], causes, named=n % columns == 0)
        load = f"{row['load']}, {row['run']}" if len(set(shown["run"])) > 1 else str(row["load"])
        ax.set_title("\n".join(textwrap.wrap(load, TITLE_CHARS)))
    draw_legend_below(
        figure,
        [Patch(color=BETTER, label="gain"), Patch(color=WORSE, label="loss"), Patch(color=TOTAL, label="layout")],
    )
    return figure


def _list_causes(splits: list[GainSplit]) -> list[Causes]:
    """Return the causes of the parts that any panel shows, in their order."""
    shown = {part.causes for split in splits for part in split.list_shown()}
    return [part.causes for part in splits[0].parts if part.causes in shown]


def _draw_panel(ax: Axes, split: GainSplit, causes: list[Causes], *, named: bool) -> None:
    """Draw a bar for each end and for each part, which begins where the one above it ends."""
    parts = {part.causes: part for part in split.parts}
    last = len(causes) + 1
    for y, side in ((0, split.baseline), (last, split.layout)):
        ax.barh(y, side.value, color=TOTAL, height=0.7)
        ax.text(side.value, y, f" {format_number(side.value, 3)}\n {side.layout}", va="center", fontsize=9)
    level, longest = split.baseline.value, max(split.baseline.value, split.layout.value)
    for y, each in enumerate(causes, 1):
        difference = parts[each].difference
        better = (difference > 0) == (split.metric == OUTPUT)
        ax.barh(y, difference, left=level, color=BETTER if better else WORSE, height=0.7)
        end = max(level, level + difference)
        ax.text(end, y, f" {format_share(split.compute_share(parts[each]))}", va="center", fontsize=9)
        ax.plot([level] * 2, [y - 1, y], color="#AAAAAA", linewidth=0.8)
        level += difference
        longest = max(longest, end)
    ax.plot([level] * 2, [last - 1, last], color="#AAAAAA", linewidth=0.8)
    names = ["without DCP", *(_format_causes(each) for each in causes), "with DCP"]
    ax.set_yticks(range(last + 1), names if named else [""] * (last + 1), fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(0, longest * HEADROOM)
    ax.set_xlabel(HEADINGS[split.metric])
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def _format_causes(causes: Causes) -> str:
    if len(causes) == 1:
        return causes[0]
    return "\n".join(textwrap.wrap(f"interaction: {', '.join(causes)}", NAME_CHARS))


def format_alt_gains(title: str, rows: pd.DataFrame) -> str:
    """Return the alternative text: the gain of each drawn load by cause."""
    shown = rows.iloc[:MAX_PANELS].to_dict("records")
    return " ".join([f"{title}.", *(f"{row['load']}: {row['split'].format()}" for row in shown)])
