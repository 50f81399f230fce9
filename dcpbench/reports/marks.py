"""Select the warnings that distinguish a point from the others of its run, and report by how much clocks fell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.names import REPLAY
from dcpbench.reports.words import FEW_SAMPLES
from dcpbench.show.numbers import missing
from dcpbench.show.text import counted as numbered
from dcpbench.show.text import listed

if TYPE_CHECKING:
    import pandas as pd

THROTTLED = "throttled"
STAY = ("cpu", "graph_differs", "inaccurate")
"""Warnings shown at every number, even if all points have them, because a reader of a single number
must not miss them.
"""
REASONS = {
    "sw_power_cap": "the power limit",
    "hw_slowdown": "the hardware's slowdown",
    "sw_thermal": "heat",
    "hw_thermal": "heat, by the hardware",
    "hw_power_brake": "the power brake",
}
"""Text for each cause of lowered clocks."""


def of(text: str) -> list[str]:
    """Return `noisy, throttled` as a list, without the warning that dashes already express."""
    return [mark for mark in text.split(", ") if mark not in ("", FEW_SAMPLES)]


def telling(points: pd.DataFrame, *, falls: bool = True) -> list[str]:
    """Return for each point, as text, the warnings that not all points of its run and mode have; with `falls`, how far
    clocks fell.
    """
    told = [""] * len(points)
    for _, group in points.reset_index(drop=True).groupby(["run", "mode"], sort=False) if len(points) else ():
        everyone = set(shared(group)) - set(STAY)
        for place, text, fall in zip(group.index, group["marks"], group["clock_fall"], strict=True):
            told[int(str(place))] = ", ".join(
                f"{mark}{_fall(fall)}" if falls and mark == THROTTLED else mark
                for mark in of(text)
                if mark not in everyone
            )
    return told


def shared(points: pd.DataFrame) -> list[str]:
    """Return the warnings that all of at least two points have, and that therefore distinguish none of them."""
    found = [of(text) for text in points["marks"]]
    return [mark for mark in found[0] if all(mark in marks for marks in found)] if len(found) > 1 else []


def counted(points: pd.DataFrame, most: int) -> str:
    """Return counts such as `25 throttled (the power limit: …), 3 noisy` or `all throttled`; of more than `most` kinds
    the first ones.
    """
    names = [mark for text in points["marks"] for mark in of(text)]
    everyone = set(shared(points))
    said = []
    for name in list(dict.fromkeys(names))[:most]:
        why = clocks(points) if name == THROTTLED else ""
        said.append(f"{'all' if name in everyone else names.count(name)} {name}{f' ({why})' if why else ''}")
    return ", ".join(said) + (" and others" if len(set(names)) > most else "")


def throttled(points: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the points with lowered clocks, in their own measurement or in the step
    times of their replay.
    """
    return marked(points, THROTTLED)


def marked(points: pd.DataFrame, mark: str) -> pd.Series[bool]:
    """Return a mask of the points that have a warning."""
    return points["marks"].map(of).map(lambda marks: mark in marks).astype(bool)


def clocks(points: pd.DataFrame) -> str:
    """Return by how much clocks fell at throttled points, and the cause; a replay has no clocks.

    Example: `by the power limit: lowest SM clock 0.8–27 % below the highest, 1,455 of 1,980 MHz`.
    """
    slowed = points[throttled(points)]
    if slowed.empty:
        return ""
    known = slowed[slowed["clock_fall"].notna()]
    found = []
    if len(known):
        reasons = sorted({reason for text in known["throttle_reasons"] for reason in text.split(", ") if reason})
        by = f"by {listed([REASONS.get(reason, reason) for reason in reasons])}: " if reasons else ""
        worst = known.sort_values("clock_fall", kind="stable").iloc[-1]
        ends = list(dict.fromkeys(f"{fall * 100:.2g}" for fall in (known["clock_fall"].min(), worst["clock_fall"])))
        at = f"{worst['sm_clock_mhz_max'] * (1 - worst['clock_fall']):,.0f} of {worst['sm_clock_mhz_max']:,.0f} MHz"
        found.append(f"{by}lowest SM clock {'–'.join(ends)} % below the highest, {at}{' at worst' if ends[1:] else ''}")
    unknown = slowed[slowed["clock_fall"].isna()]
    if len(unknown):
        replayed = ", as a replay has no clocks of its own" if (unknown["mode"] == REPLAY).all() else ""
        found.append(f"by how much is not known of {numbered(len(unknown), 'point')}{replayed}")
    return "; ".join(found)


def _fall(share: float | None) -> str:
    return "" if missing(share) or share is None else f" −{share * 100:.2g} %"
