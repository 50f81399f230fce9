"""Provide parts of web pages: frame, styles, scripts, and data escaped so that browsers do not read it as markup.

`plotly-basic.min.js` is plotly.js-basic-dist-min 4.1.1 as published on npm (MIT, see plotly-license.txt): lines, bars
and points. Pages embed it or ship with it, because they must open without a network.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from dcpbench.show.numbers import drop_non_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import jinja2

STYLE = "theme.css"
PLOTLY = "plotly-basic.min.js"
LICENSE = "plotly-license.txt"
SCRIPTS = ("page.js", "table.js", "chart.js")  # scripts of all pages in load order; scripts of a page come after
FRAME = "frame.html.j2"  # the template that pages extend: head with policy, title and button for the theme


@cache
def read_asset(name: str, package: str = __name__) -> str:
    """Return the text of an asset: of all pages, or of the package to which a page belongs."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def render_template(
    template: str, values: dict[str, object], filters: dict[str, Callable[..., object]] | None = None
) -> str:
    """Return the page that a template which extends FRAME makes of the values, escaped."""
    return _load_template(template, tuple((filters or {}).items())).render(values)


@cache
def _load_template(template: str, filters: tuple[tuple[str, Callable[..., object]], ...]) -> jinja2.Template:
    """Compile a template once, because a site has hundreds of pages from it."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.DictLoader({FRAME: read_asset(FRAME)}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= dict(filters)
    return environment.from_string(template)


def build_content_policy(scripts: Iterable[str] = (), *, own_files: bool = False, script_files: bool = False) -> str:
    """Return a Content-Security-Policy that allows exactly these inline scripts, and no other loads.

    `own_files`: also allow scripts, styles and data in the folder of the page; `script_files`: also allow scripts
    there.
    """
    digests = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    if own_files or script_files:
        hashes = f"'self' {hashes}".strip()
    sources = {
        "default-src": "'none'",
        "img-src": "data: blob:",
        "style-src": "'self' 'unsafe-inline'" if own_files else "'unsafe-inline'",
        "script-src": hashes or "'none'",
        "connect-src": "'self'" if own_files else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {allowed}" for name, allowed in sources.items())


def format_json_block(data: object) -> str:
    """Return `data` as JSON for use inside `<script type="application/json">`; its strings cannot end the element.

    NaN and infinity, which JSON does not have, become null.
    """
    write = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text = write(data)
    except ValueError:  # checking all values first would take as long as writing them
        text = write(drop_non_finite(data))
    return encode_markup(text)


def encode_markup(text: str) -> str:
    """Return JSON with the characters escaped that could end a script or begin markup."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
