"""The report as one HTML file that needs nothing else: no network, no scripts, pictures inside."""

from __future__ import annotations

import base64
from importlib import resources
from typing import TYPE_CHECKING

import jinja2

if TYPE_CHECKING:
    from dcpbench.reports.section import Section

TEMPLATE = "report.html.j2"


def render(title: str, sections: list[Section], *, cpu: bool) -> str:
    """The page. Everything that comes from records is escaped by the template."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["data_uri"] = _data_uri
    source = resources.files("dcpbench.reports").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(title=title, sections=sections, cpu=cpu)


def _data_uri(svg: bytes) -> str:
    """An SVG as an address that an image can show; scripts inside an image never run."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")
