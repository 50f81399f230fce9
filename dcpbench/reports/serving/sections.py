"""The parts of a report that are about served requests alone, in reading order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.reports import explain
from dcpbench.reports.section import Section
from dcpbench.reports.serving import findings as found
from dcpbench.reports.serving import tables
from dcpbench.show.text import counted

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.reports.frames import Frames
    from dcpbench.reports.tables import Table


def sections(frames: Frames) -> list[Section]:
    """Every live point, every replayed one, and how far these lie from each other."""
    served = frames.served
    if served.empty:
        return []
    told = []
    for mode, title in (("live", "Serving, live"), ("replay", "Serving, replayed in virtual time")):
        points = served[served["mode"] == mode]
        if len(points):
            told.append(
                Section(
                    slug=f"serving-{mode}",
                    title=title,
                    paragraphs=[*_objectives(frames, mode), *_step_times(points), *tables.absent(points)],
                    bullets=explain.marks(points),
                    tables=[tables.points(served, mode), tables.details(served, mode)],
                )
            )
    compared = found.replay_against_live(served)
    told.append(Section(slug="serving-replay-error", title="Replay against live", tables=[tables.replay(compared)]))
    return told


def repeats(frames: Frames) -> Table:
    """Points whose repeats disagree."""
    return tables.repeats(found.repeats(frames.served))


def _step_times(points: pd.DataFrame) -> list[str]:
    """How well the steps of a replay were predicted."""
    known = points["step_error"].dropna()
    if known.empty:
        return []
    among = f"known for {len(known)} of {counted(len(points), 'point')}"
    return [f"Steps that were measured to check their prediction were up to {known.max() * 100:.2g} % off ({among})."]


def _objectives(frames: Frames, mode: str) -> list[str]:
    """What goodput stands for."""
    points = frames.served[frames.served["mode"] == mode]
    slos = [slo for slo in dict.fromkeys(points["slo"]) if slo]
    if not slos:
        return ["No objective was given (--slo), so there is no goodput."]
    without = " (not all points)" if (points["slo"] == "").any() else ""
    return [f"Objectives behind goodput{without}: {'; or '.join(slos)}."]
