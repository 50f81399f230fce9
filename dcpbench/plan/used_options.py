"""Refuse options that no layout of a run uses, so that no option is ignored. No torch."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from dcpbench.errors import LayoutError, UnusedOptionsError
from dcpbench.points.axes import Role
from dcpbench.points.layout import DEGREES, MAX_SUGGESTED, Layout, find_nearest_layout
from dcpbench.points.names import ALL_REDUCES, MOE_TP, format_flag
from dcpbench.points.point import HOW, select_point_axes
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.point import Point

    Suggest = Callable[[Callable[[Layout], bool]], str]

WITHOUT_EXCHANGE: dict[str, object] = {axis.name: axis.default for axis in select_point_axes(Role.EXCHANGE)}  # at dcp 1
ALL_REDUCE = "all_reduce"


def get_idle_fields(tp: int, dp: int, dcp: int) -> dict[str, object]:
    """Return the fields that have no effect in a layout, with the values that all of its points have."""
    exchange = WITHOUT_EXCHANGE if dcp <= 1 else {}
    return exchange | ({} if tp > dp else {ALL_REDUCE: ALL_REDUCES[0]})


def list_changed_options(options: Mapping[str, object]) -> frozenset[str]:
    """Return the names of parsed options of how points are computed that have another value than a layout without them."""
    given = {axis: options[axis.name] for axis in HOW if axis.name in options}
    values = {axis: value if isinstance(value, tuple) else (value,) for axis, value in given.items()}
    return frozenset(axis.name for axis, listed in values.items() if any(value != axis.default for value in listed))


def check_used(names: Collection[str], layouts: Iterable[tuple[int, int, int]], suggest: Suggest | None = None) -> None:
    """Raise UnusedOptionsError for an option that has no effect in any of the layouts, given as (tp, dp, dcp).

    `suggest` returns options with which the command has a layout with a property, or empty; by default `suggest_degrees`.
    """
    layouts = list(layouts)
    idle = [get_idle_fields(*layout) for layout in layouts]
    unused = [name for name in (*WITHOUT_EXCHANGE, ALL_REDUCE) if name in names and all(name in one for one in idle)]
    if not idle or not unused:
        return
    listed = [name for name in unused if (name == ALL_REDUCE) == (unused[0] == ALL_REDUCE)]
    needed, why = "--dcp > 1", "no ranks share a KV cache"
    if listed[0] == ALL_REDUCE:
        needed, why = "--tp above --dp", "no sums are reduced over ranks"
    instead = (suggest or functools.partial(suggest_degrees, [Layout(max(tp, 1)) for tp, _, _ in layouts]))(
        lambda x: listed[0] not in get_idle_fields(x.tp, x.dp, x.dcp)
    )
    flags = [format_flag(name) for name in listed]
    them = "it" if len(flags) == 1 else "them"
    advice = (
        f"Use for example {instead}, or leave {them} out."
        if instead
        else f"The model has no such layout here; leave {them} out."
    )
    raise UnusedOptionsError(f"{format_list(flags)} without a layout with {needed}: {why}. {advice}", flags)


def suggest_degrees(
    layouts: Sequence[Layout],
    wanted: Callable[[Layout], bool],
    shapes: Sequence[ModelShape | None] = (None,),
    ep: str = MOE_TP,
    max_ranks: int = MAX_SUGGESTED,
) -> str:
    """Return the degrees of a valid layout with a property, like one of the layouts; empty if no model has one on so many ranks.

    Without a model, degrees have to divide each other.
    """
    likes = sorted(set(layouts), key=lambda x: (x.tp, x.dp))
    pairs = ((like, find_nearest_layout(shape, like, ep, wanted, max_ranks)) for shape in shapes for like in likes)
    changed = (
        {name: getattr(found, name) for name in DEGREES if getattr(found, name) != getattr(like, name)}
        for like, found in pairs
        if found is not None
    )
    best = min(changed, key=lambda degrees: ("tp" in degrees, len(degrees)), default={})
    return " ".join(f"--{name} {degree}" for name, degree in best.items())


def list_layouts(points: Iterable[Point]) -> list[Layout]:
    """Return the layouts of points with degrees that divide each other."""
    found = []
    for point in points:
        with contextlib.suppress(LayoutError):
            found.append(point.layout)
    return found
