"""Select the warnings that distinguish a point from the others of its run, and report by how much clocks fell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.names import REPLAY
from dcpbench.records.record import WRONG_RESULTS
from dcpbench.reports.load_labels import FEW_SAMPLES
from dcpbench.show.numbers import is_missing
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

THROTTLED = "throttled"
STAY = ("cpu", *WRONG_RESULTS)  # shown at every number, so that readers of a single one see them
REASONS = {  # text for each cause of lowered clocks
    "sw_power_cap": "the power limit",
    "hw_slowdown": "the hardware's slowdown",
    "sw_thermal": "heat",
    "hw_thermal": "heat, by the hardware",
    "hw_power_brake": "the power brake",
}


def list_shown(warnings: Iterable[str]) -> list[str]:
    """Return the warnings without the one that dashes already express."""
    return [warning for warning in warnings if warning not in ("", FEW_SAMPLES)]


def list_distinct_warnings(points: pd.DataFrame) -> list[list[str]]:
    """Return for each point the warnings that not all points of its run and mode have."""
    found: list[list[str]] = [[]] * len(points)
    for _, group in points.reset_index(drop=True).groupby(["run", "mode"], sort=False) if len(points) else ():
        everyone = set(find_shared_warnings(group)) - set(STAY)
        for place, warnings in group["warnings"].items():
            found[int(str(place))] = [warning for warning in list_shown(warnings) if warning not in everyone]
    return found


def format_distinct_warnings(points: pd.DataFrame) -> list[str]:
    """Return for each point, as text, its distinct warnings, with how far clocks fell: `noisy, throttled −27 %`."""
    falls = points["clock_fall"] if len(points) else ()
    return [
        ", ".join(f"{m} −{fall * 100:.2g} %" if m == THROTTLED and not is_missing(fall) else m for m in warnings)
        for warnings, fall in zip(list_distinct_warnings(points), falls, strict=True)
    ]


def find_shared_warnings(points: pd.DataFrame) -> list[str]:
    """Return the warnings that all of at least two points have, and that therefore distinguish none of them."""
    found = [list_shown(warnings) for warnings in points["warnings"]]
    return [warning for warning in found[0] if all(warning in warnings for warnings in found)] if len(found) > 1 else []


def summarize_warnings(points: pd.DataFrame, most: int) -> str:
    """Return counts of at most `most` kinds, such as `25 throttled (the power limit: …), 3 noisy` or `all throttled`."""
    names = [warning for warnings in points["warnings"] for warning in list_shown(warnings)]
    everyone = set(find_shared_warnings(points))
    counts = []
    for name in list(dict.fromkeys(names))[:most]:
        why = describe_clocks(points) if name == THROTTLED else ""
        counts.append(f"{'all' if name in everyone else names.count(name)} {name}{f' ({why})' if why else ''}")
    return ", ".join(counts) + (" and others" if len(set(names)) > most else "")


def has_warning(points: pd.DataFrame, warning: str) -> pd.Series[bool]:
    """Return a mask of the points that have a warning."""
    return points["warnings"].map(lambda warnings: warning in warnings).astype(bool)


def find_wrong(points: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the points that computed wrong results, of which the speed counts for nothing."""
    return points["warnings"].map(lambda warnings: not set(WRONG_RESULTS).isdisjoint(warnings)).astype(bool)


def describe_wrong(points: pd.DataFrame) -> str:
    """Return `2 of 12 points computed wrong results (graph_differs) and are not compared`; empty if there are none."""
    wrong = points[find_wrong(points)] if len(points) else points
    if wrong.empty:
        return ""
    names = sorted({name for warnings in wrong["warnings"] for name in warnings if name in WRONG_RESULTS})
    many = f"{len(wrong):,} of {format_count(len(points), 'point')}"
    return f"{many} computed wrong results ({format_list(names)}) and {'is' if len(wrong) == 1 else 'are'} not compared"


def describe_clocks(points: pd.DataFrame) -> str:
    """Return by how much clocks fell at throttled points, and the cause; a replay has no clocks.

    Example: `by the power limit: lowest SM clock 0.8–27 % below the highest, 1,455 of 1,980 MHz`.
    """
    slowed = points[has_warning(points, THROTTLED)]
    if slowed.empty:
        return ""
    known = slowed[slowed["clock_fall"].notna()]
    found = []
    if len(known):
        reasons = sorted({reason for found_there in known["throttle_reasons"] for reason in found_there})
        by = f"by {format_list([REASONS.get(reason, reason) for reason in reasons])}: " if reasons else ""
        worst = known.sort_values("clock_fall", kind="stable").iloc[-1]
        ends = list(dict.fromkeys(f"{fall * 100:.2g}" for fall in (known["clock_fall"].min(), worst["clock_fall"])))
        at = f"{worst['sm_clock_mhz_max'] * (1 - worst['clock_fall']):,.0f} of {worst['sm_clock_mhz_max']:,.0f} MHz"
        found.append(f"{by}lowest SM clock {'–'.join(ends)} % below the highest, {at}{' at worst' if ends[1:] else ''}")
    unknown = slowed[slowed["clock_fall"].isna()]
    if len(unknown):
        replayed = ", as a replay has no clocks of its own" if (unknown["mode"] == REPLAY).all() else ""
        found.append(f"the lowest SM clock is unknown at {format_count(len(unknown), 'point')}{replayed}")
    return "; ".join(found)
