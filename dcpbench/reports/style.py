"""Define how figures distinguish layouts, variants, runs and phases, so that each looks the same in every figure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from dcpbench.points.layout import DEGREES
from dcpbench.points.names import EXCHANGES
from dcpbench.reports.load_labels import list_unique
from dcpbench.show.figure_style import LINES, MARKERS, get_line_style, get_marker
from dcpbench.show.layouts import UNKNOWN_DEGREES, Degrees, find_marker_index, get_colours
from dcpbench.show.text import fit_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from dcpbench.points.point import Point

PHASE_COLOURS = {  # Paul Tol's muted palette in stacking order; last five: engines' parts, as the phases they match
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
    "exchange": "#AA4499",
    "all-reduce": "#117733",
    "projections": "#DDCC77",
    "experts": "#88CCEE",
    "unknown": "#1A1A1A",
}
REST_COLOUR = "#777777"
IDLE_COLOUR = "#DDDDDD"
FLOOR_LOOK: dict[str, Any] = {"facecolor": "#FFFFFF", "edgecolor": "#1A1A1A", "linewidth": 0.5}  # seen on each of these

UNLIKE = 3  # distance in figures.MARKERS between consecutive variants: neighbours are hard to distinguish


class DrawnLayout(NamedTuple):
    """Hold what determines the look of a layout's lines."""

    degrees: Degrees = UNKNOWN_DEGREES
    name: str = ""  # name of the degrees
    ep: str = ""  # `ep8` if the layout's name has the expert parallel degree
    instances: str = ""  # `1P2D` or `×3` if there are several instances


def describe_layout(point: Point) -> DrawnLayout:
    """Return what determines the look of a point's layout."""
    named = point.dp > 1 and point.ep_degree is not None and point.tp
    return DrawnLayout(
        degrees=Degrees(point.tp, point.dp, point.dcp),
        name=point.degrees_name,
        ep=f"ep{point.ep_degree}" if named else "",
        instances=point.instances.label if point.disaggregate else "",
    )


@dataclasses.dataclass(frozen=True)
class Style:
    """Assign a colour to each layout, a dash and a marker to each variant; of several runs, markers to runs.

    A variant is an exchange, a backend, a server of an import, or how instances share the work: anything that
    distinguishes two lines of one layout.
    """

    lines: list[tuple[str, str]]  # layout and variant of each that was run, in the order of legends
    runs: list[str]
    layouts: Mapping[str, DrawnLayout] = dataclasses.field(default_factory=dict)  # by name

    @classmethod
    def from_points(cls, points: pd.DataFrame) -> Style:
        """Return the style for the points of one kind: of `decode`, of served points, or of both."""
        ordered = points.sort_values([*DEGREES], kind="stable")
        pairs = zip(ordered["layout"].astype(str), ordered["variant"].astype(str), strict=True)
        layouts = list_unique(ordered["layout"])
        lines = sorted(dict.fromkeys(pairs), key=lambda line: layouts.index(line[0]))
        drawn = dict(zip(ordered["layout"].astype(str), ordered["drawn_layout"], strict=True))
        return cls(lines, list_unique(points["run"]), drawn)

    def find_degrees(self, layout: str) -> Degrees:
        """Return the degrees of a layout by its name."""
        return self._find_layout(layout).degrees

    def _find_layout(self, layout: str) -> DrawnLayout:
        return self.layouts.get(layout, DrawnLayout(name=layout))

    @cached_property
    def _turns(self) -> dict[str, int]:
        """Return the index of each variant; exchanges are in the order of EXCHANGES, and the first is drawn solid."""
        lines = [self._split_layout(*line) for line in self.lines]
        named = list(dict.fromkeys(variant for _, variant in lines if variant))
        named.sort(key=lambda name: EXCHANGES.index(first) if (first := name.split(" ")[0]) in EXCHANGES else 0)
        has_unnamed = any((layout, "") in lines for layout, variant in lines if variant)
        return {"": 0} | {name: place + has_unnamed for place, name in enumerate(named)}

    def find_places(self, layout: str, variant: str, run: str) -> tuple[int, int]:
        """Return the indices of a line's dash in figures.LINES and of its marker in figures.MARKERS."""
        turn, of_run = self._turns.get(self._split_layout(layout, variant)[1], 0), self.runs.index(run)
        turns = max(self._turns.values()) + 1
        sign = of_run if len(self.runs) > 1 else find_marker_index(self.find_degrees(layout)) + UNLIKE * turn
        return (turn + turns * of_run) % len(LINES), sign % len(MARKERS)

    @cached_property
    def _several(self) -> set[str]:
        """Return the degrees that are drawn with several expert parallel degrees."""
        found = {self._find_layout(layout)[:3] for layout, _ in self.lines}
        drawn = Counter(name for _, name, _ in found)
        return {degrees for degrees, count in drawn.items() if count > 1}

    def _split_layout(self, layout: str, variant: str) -> tuple[str, str]:
        """Return the degrees of an instance, which have one colour, and the name that distinguishes its lines."""
        drawn = self._find_layout(layout)
        ep = drawn.ep if drawn.name in self._several else ""
        return drawn.name, " ".join(filter(None, (drawn.instances, ep, variant)))

    def get_look(self, layout: str, variant: str, run: str) -> dict[str, Any]:
        """Return the keyword arguments with which matplotlib draws a line."""
        dash, sign = self.find_places(layout, variant, run)
        return {
            "color": get_colours(self.find_degrees(layout))[0],
            "linestyle": get_line_style(dash),
            "marker": get_marker(sign),
        }


def format_label(text: object, most: int = 48) -> str:
    """Return any string as a label: no mathematics, one line, limited length."""
    return fit_line(str(text), most).replace("$", r"\$")
