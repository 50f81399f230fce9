"""The sentences that a report opens with, and how well repeats agree, over all workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.reports import exchanges, findings
from dcpbench.reports.serving import findings as serving

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames


def sentences(frames: Frames) -> list[str]:
    """In reading order: what ran, who is fastest, where DCP pays, what exchanges cost, and how far to trust it."""
    return [
        *findings.headline(frames),
        *exchanges.sentences(exchanges.frame(findings.timed(frames)), frames),
        *serving.sentences(frames),
        *findings.closing(frames, apart(frames)),
    ]


def apart(frames: Frames) -> list[float]:
    """By how much repeats differ, of each point that was measured more than once."""
    tables = (findings.repeats(frames), serving.repeats(frames.served))
    return [float(value) for table in tables if len(table) for value in table["apart"]]
