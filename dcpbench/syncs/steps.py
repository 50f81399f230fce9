"""Which annotations mark the steps of a program, and in which step a moment lies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PROFILER_STEP = re.compile(r"^(ProfilerStep[#*]?)(\d+)$")
NUMBERED = re.compile(r"^(.*?\D|)(\d+)$")
HOW_TO_MARK = (
    'prof.step() marks steps only where profile() has schedule=; or wrap each step in record_function(f"step {n}").'
)
STEADY = 3
"""Steps from which the first counts as warm-up."""


class Range(NamedTuple):
    """One annotation."""

    name: str
    start: float
    end: float
    empty: bool = False
    """Nothing was given to the GPU in it, and nothing waited."""


class Steps(NamedTuple):
    """Steps in order of time."""

    marked_by: str
    """What their names have in common, such as `ProfilerStep#`; empty where there are none."""
    start: NDArray[np.float64]
    end: float
    """End of the last one, or start of one that is left out behind it."""

    def __len__(self) -> int:
        return len(self.start)

    def of(self, moments: Sequence[float] | NDArray[Any]) -> list[int | None]:
        """Index of the step of each moment: what lies between two steps belongs to the earlier, what lies before the
        first or after the last to none.
        """
        at = np.searchsorted(self.start, moments, "right") - 1
        return [None if i < 0 or m > self.end else int(i) for i, m in zip(at, moments, strict=True)]


def find_steps(ranges: Sequence[Range], pattern: str | None = None) -> Steps:
    """Steps among annotations.

    `ProfilerStep#N` of torch.profiler, else names that differ in a number at their end alone, each number once: of
    several such families the one that covers most time, as layers lie in steps and not steps in layers.
    Where a regular expression is given, the annotations of the trace that it matches are the steps, and no others.
    The last `ProfilerStep#N` is none where it is empty: the last `prof.step()` opened it, and the profiler's end closed it.
    """
    if pattern is not None:
        return _steps(pattern, [r for r in ranges if re.search(pattern, r.name)])
    profiler = {r.name: r for r in reversed(ranges) if PROFILER_STEP.match(r.name)}
    if profiler:
        return _steps("ProfilerStep#", list(profiler.values()))
    families: dict[str, dict[str, list[Range]]] = {}
    for r in ranges:
        numbered = NUMBERED.match(r.name)
        if numbered:
            families.setdefault(numbered[1], {}).setdefault(numbered[2], []).append(r)
    candidates = [
        (sum(r[0].end - r[0].start for r in members.values()), name, [r[0] for r in members.values()])
        for name, members in families.items()
        if len(members) > 1 and all(len(r) == 1 for r in members.values())
    ]
    _, name, members = max(candidates, key=lambda c: c[0], default=(0.0, "", []))
    return _steps(name, members)


def _steps(marked_by: str, ranges: list[Range]) -> Steps:
    if not ranges:
        return Steps("", np.zeros(0), 0.0)
    last, end = max(ranges, key=lambda r: r.start), max(r.end for r in ranges)
    others = [r for r in ranges if r.name != last.name]
    if others and last.empty and PROFILER_STEP.match(last.name):
        ranges, end = others, last.start
    return Steps(marked_by, np.unique([r.start for r in ranges]), end)


def per_step(steps_of_site: Sequence[int | None], steps: int) -> tuple[float | None, bool]:
    """(mean count over the steps of steady state, whether none of it is steady state).

    With at least three steps the first is warm-up, as caches fill and kernels are loaded in it, and so is what comes
    before it; what comes after the last is no step's either.
    """
    if steps == 0:
        return None, False
    first = 1 if steps >= STEADY else 0
    steady = sum(1 for s in steps_of_site if s is not None and s >= first)
    return steady / (steps - first), bool(first) and steady == 0
