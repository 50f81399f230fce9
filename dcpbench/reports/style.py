"""How a report's figures tell layouts, variants, runs and phases apart, so that each looks the same wherever it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dcpbench.points.layout import DEGREES
from dcpbench.records.record import OURS
from dcpbench.reports.words import unique
from dcpbench.show.figures import COLOURS, Line, colour, dashes, marker
from dcpbench.show.text import one_line

if TYPE_CHECKING:
    import pandas as pd

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
FLOOR_LOOK: dict[str, Any] = {"facecolor": "#FFFFFF", "edgecolor": "#1A1A1A", "linewidth": 0.5}
"""Seen on each of these."""


@dataclasses.dataclass(frozen=True)
class Style:
    """Colour by layout, line by variant, marker by run (by layout where there is one run).

    Where one layout was run in several variants, colours and markers are theirs. Among imports each configuration of a
    server has a colour: engine, hardware and precision tell more than the layout, which many share.
    """

    layouts: list[str]
    variants: list[str]
    runs: list[str]
    servers: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Layout and variant of each configuration; empty without imports."""

    @classmethod
    def of(cls, points: pd.DataFrame) -> Style:
        """The style of a whole report."""
        ordered = points.sort_values([*DEGREES], kind="stable")
        columns = (ordered["layout"], points["variant"], points["run"])
        layouts, variants, runs = (unique(column) for column in columns)
        imports = "origin" in points and bool((points["origin"] != OURS).any())
        pairs = zip(ordered["layout"].astype(str), ordered["variant"].astype(str), strict=True)
        return cls(layouts, variants, runs, list(dict.fromkeys(pairs)) if imports else [])

    @property
    def by_variant(self) -> bool:
        """Whether colours tell variants apart, as there is but one layout."""
        return len(self.layouts) == 1 and len(self.variants) > 1

    def colour(self, layout: str, variant: str = "") -> str:
        """Colour of a layout; of a variant where colours are variants'."""
        return colour(self._place(layout, variant))

    def _place(self, layout: str, variant: str) -> int:
        if (layout, variant) in self.servers:
            return self.servers.index((layout, variant))
        return self.variants.index(variant) if self.by_variant and variant else self.layouts.index(layout)

    def line(self, variant: str, layout: str = "") -> Line:
        """Line style of a backend or an exchange with its options; of servers only where colours come again."""
        if (layout, variant) in self.servers:
            return dashes(self._place(layout, variant) // len(COLOURS))
        return dashes(self.variants.index(variant))

    def marker(self, layout: str, run: str, variant: str = "") -> str:
        """Marker of a run; of what the colour stands for where there is only one run, as a second sign beside it."""
        return marker(self.runs.index(run) if len(self.runs) > 1 else self._place(layout, variant))


def plain(text: object, most: int = 48) -> str:
    """Any string as a label: no mathematics, one line, not endless."""
    return one_line(str(text), most).replace("$", r"\$")
