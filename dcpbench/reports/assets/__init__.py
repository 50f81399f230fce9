"""What pages are made of beside their text: scripts, styles, and data that no browser takes for markup.

`plotly-basic.min.js` is plotly.js-basic-dist-min 4.1.1 as npm has it (MIT, see plotly-license.txt): lines, bars and
points. Pages carry it inside, because they must open without a network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PLOTLY = "plotly-basic.min.js"


@cache
def read(name: str) -> str:
    """The text of an asset."""
    return resources.files("dcpbench.reports.assets").joinpath(name).read_text(encoding="utf-8")


def policy(scripts: Iterable[str] = (), *, connect: str = "") -> str:
    """A Content-Security-Policy under which exactly these inline scripts run, and nothing is loaded from anywhere.

    `connect`: where scripts may fetch data from, such as 'self'; nowhere by default.
    """
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    sources = {
        "default-src": "'none'",
        "img-src": "data: blob:",
        "style-src": "'unsafe-inline'",
        "script-src": hashes or "'none'",
        "connect-src": connect or "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {allowed}" for name, allowed in sources.items())


def json_block(data: object) -> str:
    """`data` as JSON to stand inside `<script type="application/json">`: whatever its strings say, they end nothing.

    NaN and infinity, which JSON does not have, become null.
    """
    return inert(json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def inert(text: str) -> str:
    """JSON of any kind with the characters escaped that could end a script or begin markup."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
