"""What a field of a point or a load says, how it is printed, and where it stands in lists. No torch.

Each such field is annotated with an Axis; whatever compares, shares, lists or names points reads it from there.
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
    """What is another one where two points differ in a field."""

    ENGINE = enum.auto()
    """The engine: its weights, KV pools or process groups."""
    PATH = enum.auto()
    """The path through it: its kernels or collectives."""
    EXCHANGE = enum.auto()
    """How partial attention is merged, which only points with dcp > 1 do."""
    LOAD = enum.auto()
    """What there is to do."""
    REPEAT = enum.auto()
    """The pass over the whole sweep."""
    SERVER = enum.auto()
    """An imported server's own options."""
    DEPLOYED = enum.auto()
    """How many instances of the engine there are, what each does, and what is sent between them."""


NOTHING = Role(0)
COMPUTES = Role.ENGINE | Role.PATH | Role.SERVER | Role.DEPLOYED
"""What runs a point, whatever there is to do."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One field; what stands before `name` is declared beside it, the rest is read from the struct."""

    role: Role
    order: int
    """Its place in lists, in which neighbours share what is slow to build."""
    label: str = ""
    """How a value is printed where it tells two points apart; empty where other words say it, as a layout's."""
    _: dataclasses.KW_ONLY
    title: str = ""
    """What a report's page calls it where points can be filtered by it; empty where they cannot."""
    values: tuple[str, ...] = ()
    """Names that it can have, what is taken where none is typed first. Empty: any value of its type."""
    one: bool = False
    """Whether its option takes one value for a whole run, instead of a list."""
    later: bool = False
    """Whether points once had no such field: keys and tables are without it where it has its default."""
    path: bool = False
    """Whether a value may be the path of a file, which is printed without its folders."""
    name: str = ""
    kind: type = str
    default: Any = msgspec.NODEFAULT

    def text(self, value: object) -> str:
        """A value as it is printed; empty where it says nothing, as in an import that does not know."""
        if value in (None, "", UNKNOWN) or (value == 0 and self.kind is not bool):
            return ""
        if self.path:
            value = PurePath(str(value)).name
        return self.label.format(("off", "on")[bool(value)] if self.kind is bool else value)


def read(struct: type[msgspec.Struct]) -> tuple[Axis, ...]:
    """The axes of a struct's fields, in order."""
    found = []
    for field in msgspec.structs.fields(struct):
        axis = next((extra for extra in getattr(field.type, "__metadata__", ()) if isinstance(extra, Axis)), None)
        if axis is not None:
            annotated = typing.get_args(field.type)[0]
            kind = next(kind for kind in (*typing.get_args(annotated), annotated) if kind is not type(None))
            if typing.get_origin(kind) is typing.Annotated:  # a number with its bounds
                kind = typing.get_args(kind)[0]
            found.append(dataclasses.replace(axis, name=field.name, kind=kind, default=field.default))
    return tuple(sorted(found, key=lambda axis: axis.order))


def of_role(axes: Iterable[Axis], role: Role, but: Role = NOTHING) -> tuple[Axis, ...]:
    """Those that have any of `role`, and nothing of `but`."""
    return tuple(axis for axis in axes if axis.role & role and not axis.role & but)


def words(axes: Iterable[Axis], values: Mapping[str, Any]) -> list[str]:
    """Of values by name, those that are not the defaults, as they are printed: what is usual goes without saying."""
    said = (axis.text(value) for axis in axes if (value := values.get(axis.name, axis.default)) != axis.default)
    return [text for text in said if text]
