"""Refuse options that no layout of a run uses, so that no option is ignored. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.errors import UnusedOptionsError
from dcpbench.points.axes import Role
from dcpbench.points.names import ALL_REDUCES, format_flag
from dcpbench.points.point import HOW, select_point_axes
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

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


def check_used(
    names: Collection[str], layouts: Iterable[tuple[int, int, int]], remedy: str = "Add for example --dcp 2"
) -> None:
    """Raise UnusedOptionsError for an option that has no effect in any of the layouts, given as (tp, dp, dcp).

    `remedy`: how the command gets layouts with dcp.
    """
    idle = [get_idle_fields(*layout) for layout in layouts]
    unused = [name for name in (*WITHOUT_EXCHANGE, ALL_REDUCE) if name in names and all(name in one for one in idle)]
    if not idle or not unused:
        return
    listed = [name for name in unused if (name == ALL_REDUCE) == (unused[0] == ALL_REDUCE)]
    why = f"--dcp > 1: no ranks share a KV cache. {remedy}"
    if listed[0] == ALL_REDUCE:
        why = "--tp above --dp: no sums are reduced over ranks. Raise --tp"
    flags = [format_flag(name) for name in listed]
    raise UnusedOptionsError(
        f"{format_list(flags)} without a layout with {why}, or leave {'it' if len(flags) == 1 else 'them'} out.", flags
    )
