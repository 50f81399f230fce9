"""Fills the template: sections as text, charts as data for scripts, pictures for those who run none."""

from __future__ import annotations

import base64
import gzip
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from dcpbench.reports import assets
from dcpbench.reports.page.charts import chart_of, charts_of
from dcpbench.reports.page.points import MOST_POINTS, page_data
from dcpbench.reports.page.words import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.reports.frames import Frames
    from dcpbench.reports.section import Section

TEMPLATE = "page.html.j2"
SCRIPTS = ("chart.js", "page.js", "report-points.js", "report-charts.js", "report-table.js", "report.js")
MOST_ROWS = 1000
"""Rows of a table that the page prints; points.csv has all points."""


def render(
    title: str, sections: Sequence[Section], frames: Frames, *, most: int = MOST_POINTS, pictures: bool = True
) -> str:
    """The page, with charts of `most` points, and `pictures` of them for those who run no script.

    What comes from records is escaped here, or by assets.json_block.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"data_uri": _data_uri, "brief": brief}
    environment.globals |= {"charts_of": charts_of, "chart_of": chart_of, "most_rows": MOST_ROWS}
    data = page_data(frames, most)
    drawn = [chart for section in sections for chart in charts_of(section.pictures)]
    data["charts"] = [{"slug": c.slug, "kind": c.kind, "workload": c.workload, "mode": c.mode} for c in drawn]
    scripts = [assets.read(name) for name in SCRIPTS]
    source = resources.files("dcpbench.reports.page").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=title,
        sections=sections,
        pictures=pictures,
        explore_after=_last_with_charts(sections),
        data=data,
        block=assets.json_block(data),
        theme=assets.read("theme.css"),
        style=assets.read("report.css"),
        scripts=scripts,
        plotly=_packed(assets.PLOTLY),
        policy=assets.policy([*scripts, assets.read(assets.PLOTLY)]),
    )


def _last_with_charts(sections: Sequence[Section]) -> str:
    """After this section comes what a reader makes of the points himself."""
    with_charts = [section.slug for section in sections if charts_of(section.pictures)]
    return (with_charts or [section.slug for section in sections[:1]] or [""])[-1]


@cache
def _packed(name: str) -> str:
    """A script that the page unpacks; half of a report would otherwise be its plotting library."""
    return base64.b64encode(gzip.compress(assets.read(name).encode("utf-8"), mtime=0)).decode("ascii")


def _data_uri(svg: bytes) -> Markup:
    """An SVG as an address between double quotes that an image can show; scripts inside an image never run."""
    return Markup("data:image/svg+xml," + quote(_shortened(svg), safe=READABLE))  # noqa: S704 - quoted: no " or &


READABLE = " <>=/:;,.()'!?*+@$|{}[]-_~^`"
"""What an address in an attribute can hold as it is, which keeps it a quarter shorter than base64."""


def _shortened(svg: bytes) -> bytes:
    """Without comments, metadata and indents; outlines to a tenth of their unit, a tenth of a point at most."""
    svg = re.sub(rb"<!--.*?-->|<metadata>.*?</metadata>", b"", svg, flags=re.DOTALL)
    svg = re.sub(rb' d="[^"]*"', lambda d: re.sub(rb"(\d+\.\d)\d+", rb"\1", d[0]), svg)
    return re.sub(rb">\s+<", b"><", re.sub(rb"\s*\n\s*", b" ", svg))
