"""Fills the template: sections as text, charts as data for scripts, pictures for those who run none."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import re
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import quote

from markupsafe import Markup

from dcpbench.reports.page.points import MOST_POINTS, brief, page_data
from dcpbench.reports.plots import KV
from dcpbench.reports.sections import FOLDED
from dcpbench.show import web

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.reports.frames import Frames
    from dcpbench.reports.plots import Picture
    from dcpbench.reports.sections import Section

OWN_SCRIPTS = ("points.js", "charts.js", "report.js")
NO_BREAK = "\N{NO-BREAK SPACE}"
MOST_ROWS = 1000
"""Rows of a table that the page prints; points.csv has all points."""
TITLES = {
    "throughput": "Output throughput against load",
    "ttft": "Time to first token, p50 and p99",
    "itl": "Inter-token latency, p50 and p99",
    "frontier": "Throughput per GPU against speed per user",
    "overview": "Output of each layout over the best other one",
    "break-even": "Output with DCP over that of the same layout without it",
    "kv": "KV cache capacity by layout",
    "phases": "Where a step's time goes",
}
"""Of the charts that the page draws in place of the pictures of these subjects."""


@dataclasses.dataclass
class Chart:
    """A chart that the page draws itself, with a panel for each thing that lines must not share."""

    kind: str
    """What charts.js draws: the subject of its pictures."""
    workload: str
    """`decode`, `serve`, or empty for both."""
    mode: str
    """Of `serve`: `live` or `replay`, which no chart mixes."""
    alts: list[str] = dataclasses.field(default_factory=list)
    """What it shows, for those who cannot see it."""

    @property
    def title(self) -> str:
        """What it shows, in a few words."""
        return TITLES[self.kind] + (f", {self.mode}" if self.mode else "")

    @property
    def slug(self) -> str:
        """Its name in the page and in the fragment of its address."""
        return "-".join(filter(None, (self.kind, self.workload if self.mode else "", self.mode)))


def charts_of(pictures: Iterable[Picture]) -> list[Chart]:
    """The charts that stand for these pictures, each once; the page shows other pictures as they are."""
    found: dict[tuple[str, str], Chart] = {}
    for p in pictures:
        if p.subject in TITLES:
            workload = "" if p.subject == KV else "serve" if p.mode else "decode"
            found.setdefault((p.subject, p.mode), Chart(p.subject, workload, p.mode)).alts.append(p.alt)
    return list(found.values())


def render(
    title: str,
    sections: Sequence[Section],
    frames: Frames,
    *,
    most: int = MOST_POINTS,
    pictures: bool = True,
    plotly: str = "",
) -> str:
    """The page, with charts of `most` points, and `pictures` of them for those who run no script.

    `plotly` is the address, from the page, of a plotly.js that several pages share; without one the page carries it.
    What comes from records is escaped here, or by web.json_block.
    """
    data = page_data(frames, most)
    drawn = [chart for section in sections for chart in charts_of([*section.first, *section.pictures])]
    with_charts = [section.slug for section in sections if charts_of(section.pictures)]
    data["charts"] = [{"slug": c.slug, "kind": c.kind, "workload": c.workload, "mode": c.mode} for c in drawn]
    scripts = [*map(web.read, web.SCRIPTS), *map(own, OWN_SCRIPTS)]
    values = {
        "title": brief(title),
        "main": "main",
        "main_called": "report",
        "sections": sections,
        "pictures": pictures,
        # after this section comes what a reader makes of the points himself
        "explore_after": (with_charts or [section.slug for section in sections[:1]] or [""])[-1],
        "data": data,
        "block": web.json_block(data),
        "theme": web.read(web.STYLE),
        "style": own("report.css"),
        "scripts": scripts,
        "beside": plotly,
        "plotly": "" if plotly else _packed(web.PLOTLY),
        "policy": web.policy(scripts if plotly else [*scripts, web.read(web.PLOTLY)], script_files=bool(plotly)),
        "charts_of": charts_of,
        "folded": FOLDED,
        "titles": {section.title for section in sections},
        "charted": TITLES,
        "most_rows": MOST_ROWS,
    }
    return web.fill(own("page.html.j2"), values, {"data_uri": _data_uri, "brief": brief, "tied": tied})


def tied(text: str) -> str:
    """The same with numbers and signs that no end of a line parts: `25 %`, `ITL ≤ 150 ms`, `4 × H200`."""
    return re.sub(r"(?<=\d) (?=(?:%|×|ms\b))|(?<=\S) (?=[≤≥])|(?<=[≤≥×]) (?=\S)", NO_BREAK, text)


def own(name: str) -> str:
    """The text of one of the report's own assets."""
    return web.read(name, __package__)


@cache
def _packed(name: str) -> str:
    """A script that the page unpacks; half of a report would otherwise be its plotting library."""
    return base64.b64encode(gzip.compress(web.read(name).encode("utf-8"), mtime=0)).decode("ascii")


def _data_uri(svg: bytes) -> Markup:
    """An SVG as an address between double quotes that an image can show; scripts inside an image never run.

    Without comments, metadata and indents; outlines to a tenth of their unit, a tenth of a point at most.
    """
    svg = re.sub(rb"<!--.*?-->|<metadata>.*?</metadata>", b"", svg, flags=re.DOTALL)
    svg = re.sub(rb' d="[^"]*"', lambda d: re.sub(rb"(\d+\.\d)\d+", rb"\1", d[0]), svg)
    svg = re.sub(rb">\s+<", b"><", re.sub(rb"\s*\n\s*", b" ", svg))
    return Markup("data:image/svg+xml," + quote(svg, safe=READABLE))  # noqa: S704 - quoted: no " or &


READABLE = " <>=/:;,.()'!?*+@$|{}[]-_~^`"
"""What an address in an attribute can hold as it is, which keeps it a quarter shorter than base64."""
