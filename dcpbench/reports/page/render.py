"""Fill the page's template: sections as text, charts as data for scripts, pictures for readers without scripts."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import re
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import quote

from markupsafe import Markup

from dcpbench.reports.answer import describe_functional
from dcpbench.reports.page.points import build_page_data, format_brief
from dcpbench.reports.plots import KV
from dcpbench.reports.sections import FOLDED
from dcpbench.show import web

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.reports.dataframes import Frames
    from dcpbench.reports.plots import Picture
    from dcpbench.reports.sections import Section

OWN_SCRIPTS = ("points.js", "charts.js", "report.js")
NO_BREAK = "\N{NO-BREAK SPACE}"
MAX_ROWS = 1000  # maximum number of rows of a table that the page prints; points.csv has all points
TITLES = {  # titles of the charts that the page draws instead of the pictures of these subjects
    "throughput": "Output throughput against load",
    "ttft": "Time to first token, p50 and p99",
    "itl": "Inter-token latency, p50 and p99",
    "frontier": "Throughput per GPU against speed per user",
    "overview": "Output of each layout, relative to the best other layout",
    "break-even": "Output with DCP over that of the same layout without it",
    "kv": "KV cache capacity by layout",
    "phases": "Where a step's time goes",
}


@dataclasses.dataclass
class Chart:
    """Describe a chart that the page draws itself, with a panel for each group of lines."""

    kind: str  # kind of chart for charts.js: the subject of its pictures
    workload: str  # `decode`, `serve`, or empty for both
    mode: str  # mode of `serve`, `live` or `replay`, which no chart mixes
    alts: list[str] = dataclasses.field(default_factory=list)  # alternative texts of the chart

    @property
    def title(self) -> str:
        """Return the title of the chart."""
        return TITLES[self.kind] + (f", {self.mode}" if self.mode else "")

    @property
    def slug(self) -> str:
        """Return the chart's name in the page and in the fragment of its address."""
        return "-".join(filter(None, (self.kind, self.workload if self.mode else "", self.mode)))


def list_charts(pictures: Iterable[Picture]) -> list[Chart]:
    """Return the charts that replace these pictures, each once; the page shows other pictures as they are."""
    found: dict[tuple[str, str], Chart] = {}
    for p in pictures:
        if p.subject in TITLES:
            workload = "" if p.subject == KV else "serve" if p.mode else "decode"
            found.setdefault((p.subject, p.mode), Chart(p.subject, workload, p.mode)).alts.append(p.alt)
    return list(found.values())


def render_page(
    title: str, sections: Sequence[Section], frames: Frames, *, pictures: bool = True, plotly: str = ""
) -> str:
    """Return the page, with charts of up to points.MAX_POINTS points, and with `pictures` for readers without scripts.

    `plotly` is the address, from the page, of a plotly.js that several pages share; without one the page contains it.
    Strings from records are escaped here, or by web.format_json_block.
    """
    data = build_page_data(frames)
    drawn = [chart for section in sections for chart in list_charts([*section.first, *section.pictures])]
    with_charts = [section.slug for section in sections if list_charts(section.pictures)]
    data["charts"] = [{"slug": c.slug, "kind": c.kind, "workload": c.workload, "mode": c.mode} for c in drawn]
    scripts = [*map(web.read_asset, web.SCRIPTS), *map(read_own_asset, OWN_SCRIPTS)]
    values = {
        "title": format_brief(title),
        "main": "main",
        "main_called": "report",
        "sections": sections,
        "pictures": pictures,
        # after this section comes what a reader makes of the points himself
        "explore_after": (with_charts or [section.slug for section in sections[:1]] or [""])[-1],
        "data": data,
        "functional": describe_functional(frames) or "CPU: functional run.",
        "block": web.format_json_block(data),
        "theme": web.read_asset(web.STYLE),
        "style": read_own_asset("report.css"),
        "scripts": scripts,
        "plotly_address": plotly,
        "plotly": "" if plotly else _pack_script(web.PLOTLY),
        "policy": web.build_content_policy(
            scripts if plotly else [*scripts, web.read_asset(web.PLOTLY)], script_files=bool(plotly)
        ),
        "charts_of": list_charts,
        "folded": FOLDED,
        "titles": {section.title for section in sections},
        "charted": TITLES,
        "most_rows": MAX_ROWS,
    }
    return web.render_template(
        read_own_asset("page.html.j2"),
        values,
        {"data_uri": _encode_data_uri, "brief": format_brief, "tied": add_no_break_spaces},
    )


def add_no_break_spaces(text: str) -> str:
    """Return the text with non-breaking spaces between numbers and signs: `25 %`, `ITL ≤ 150 ms`, `4 × H200`."""
    return re.sub(r"(?<=\d) (?=(?:%|×|ms\b))|(?<=\S) (?=[≤≥])|(?<=[≤≥×]) (?=\S)", NO_BREAK, text)


def read_own_asset(name: str) -> str:
    """Return the text of one of the report's own assets."""
    return web.read_asset(name, __package__)


@cache
def _pack_script(name: str) -> str:
    """Return a compressed script that the page unpacks; otherwise half of a report would be its plotting library."""
    return base64.b64encode(gzip.compress(web.read_asset(name).encode("utf-8"), mtime=0)).decode("ascii")


def _encode_data_uri(svg: bytes) -> Markup:
    """Return an SVG as a data URI for an image in double quotes; scripts inside an image never run.

    Comments, metadata and indents are removed; outlines are rounded to a tenth of their unit, at most a tenth of a
    point.
    """
    svg = re.sub(rb"<!--.*?-->|<metadata>.*?</metadata>", b"", svg, flags=re.DOTALL)
    svg = re.sub(rb' d="[^"]*"', lambda d: re.sub(rb"(\d+\.\d)\d+", rb"\1", d[0]), svg)
    svg = re.sub(rb">\s+<", b"><", re.sub(rb"\s*\n\s*", b" ", svg))
    return Markup("data:image/svg+xml," + quote(svg, safe=READABLE))  # noqa: S704 - quoted: no " or &


READABLE = " <>=/:;,.()'!?*+@$|{}[]-_~^`"  # characters that an address in an attribute can hold unescaped
