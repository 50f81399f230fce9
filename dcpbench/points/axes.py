"""Declare for each field of a point or a load what it affects, how it is printed, and its place in lists. No torch.

Each such field is annotated with an Axis; all code that compares, shares, lists or names points reads it from there.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.points.names import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Value = str | int | float | bool | None


class Role(enum.Flag):
    """Name the part of a run that changes if two points differ in a field."""

    ENGINE = enum.auto()  # the engine: its weights, KV pools or process groups
    PATH = enum.auto()  # the path through it: its kernels or collectives
    EXCHANGE = enum.auto()  # fields of how partial attention is merged, for points with dcp > 1
    LOAD = enum.auto()  # the load that is served or computed
    REPEAT = enum.auto()  # the pass over the complete sweep
    SERVER = enum.auto()  # an imported server's own options
    DEPLOYED = enum.auto()  # number and roles of the engine's instances, and the transfers between them
    ASSUMED = enum.auto()  # assumptions on which the results of a step depend, but not its time


NOTHING = Role(0)
COMPUTES = Role.ENGINE | Role.PATH | Role.SERVER | Role.DEPLOYED | Role.ASSUMED  # how a point is run


@dataclasses.dataclass(frozen=True)
class Axis:
    """Describe one field; the attributes before `name` are declared with the field, the rest is
    read from the struct.
    """

    role: Role
    order: int  # place in lists, in which neighbours share parts that are slow to build
    label: str = ""  # format of a value that distinguishes points; empty if other text names it, such as a layout
    _: dataclasses.KW_ONLY
    title: str = ""  # name of the field as a filter on a report's page; empty if points cannot be filtered by it
    values: tuple[str, ...] = ()  # names that are allowed, the default first; empty if any value of the type is allowed
    one: bool = False  # True if the option takes a single value per run instead of a list
    path: bool = False  # True if a value may be the path of a file, which is printed without its folders
    name: str = ""
    kind: type = str
    default: Any = msgspec.NODEFAULT

    def format_value(self, value: object) -> str:
        """Return a value as it is printed; empty for an unknown value, as in an import without it."""
        if value in (None, "", UNKNOWN) or (value == 0 and self.kind is not bool):
            return ""
        if self.path:
            value = PurePath(str(value)).name
        if self.kind is str and isinstance(value, float):  # of a field that may also be text
            value = f"{value:g}"
        return self.label.format(("off", "on")[bool(value)] if self.kind is bool else value)


def read_axes(struct: type[msgspec.Struct]) -> tuple[Axis, ...]:
    """Return the axes of a struct's fields, in order."""
    found = []
    for field in msgspec.structs.fields(struct):
        axis = next((extra for extra in getattr(field.type, "__metadata__", ()) if isinstance(extra, Axis)), None)
        if axis is not None:
            annotated = typing.get_args(field.type)[0]
            kinds = typing.get_args(annotated)
            kind = str if str in kinds else next(kind for kind in (*kinds, annotated) if kind is not type(None))
            if typing.get_origin(kind) is typing.Annotated:  # a number with its bounds
                kind = typing.get_args(kind)[0]
            found.append(dataclasses.replace(axis, name=field.name, kind=kind, default=field.default))
    return tuple(sorted(found, key=lambda axis: axis.order))


def select_axes(axes: Iterable[Axis], role: Role, but: Role = NOTHING) -> tuple[Axis, ...]:
    """Return the axes that have any of `role`, and nothing of `but`."""
    return tuple(axis for axis in axes if axis.role & role and not axis.role & but)


def format_changed_values(axes: Iterable[Axis], values: Mapping[str, Any]) -> list[str]:
    """Return the values that differ from their defaults, as they are printed."""
    texts = (
        axis.format_value(value) for axis in axes if (value := values.get(axis.name, axis.default)) != axis.default
    )
    return [text for text in texts if text]
