"""Checks of `dcpbench verify`, as they are written to checks.jsonl."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dcpbench.launch.jobs import Check
from dcpbench.points.names import NO_EXCHANGE

if TYPE_CHECKING:
    from dcpbench.points.point import Point


def make_check(point: Point, name: str, error: float, limit: float, detail: str) -> Check:
    """Return a check that is ok if its error is finite and at most the limit."""
    finite = math.isfinite(error)
    return Check(
        name=name,
        layout=str(point.layout),
        ep=point.ep_degree,
        backend=point.backend,
        exchange=point.format_exchange_label() or NO_EXCHANGE,
        all_reduce=point.all_reduce,
        dtype=point.precision,
        error=error if finite else None,
        limit=limit if math.isfinite(limit) else None,
        ok=finite and error <= limit,
        detail=detail,
    )
