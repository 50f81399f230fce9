"""Parse options with several keys, as `--sessions turns=4,think=2`, by the class that declares one. No torch.

The fields of the class are the keys. The option's help, its parser, its errors and its form in a configuration file follow
from the class. A key that sets a field of a spec names that field, and is handed on under its name: `--sessions think=2` as
`think_time`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.counts import parse_count, suggest_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

SWITCH = {"yes": True, "no": False, "true": True, "false": False}
MAX_SHOWN_CHARS = 80  # of a value in an error
LIST = "/"  # separates the values of a key


@dataclasses.dataclass(frozen=True)
class Key:
    """Describe one key of a structured option."""

    value: str  # placeholder of its value in the help, which names the unit
    text: str
    default: str = ""  # default as the help prints it; empty if the class or the text states it
    field: str = ""  # field of a spec that it sets; empty if the command reads the key itself

    def format_help(self) -> str:
        """Return its text with its default."""
        return f"{self.text} Default: {self.default}." if self.default else self.text


class StructuredOption(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the values of a structured option; None means not given."""

    option: ClassVar[str]
    text: ClassVar[str]  # what the option is for
    bare: ClassVar[str] = ""  # key whose name may be left out in front, as in `--timeout 300`

    @classmethod
    def list_keys(cls) -> dict[str, Key]:
        """Return the keys by the names that a user types."""
        return {name.replace("_", "-"): key for name, (key, _) in _read_fields(cls).items()}

    @classmethod
    def parse(cls, value: object, keys: Collection[str] = ()) -> Self:
        """Parse `turns=4,think=2`, or a table or a bare value of a configuration file. Raise UsageError.

        `keys` limits the keys to those that a command has; empty means all of them.
        """
        if isinstance(value, cls):
            return value
        known = [name for name in cls.list_keys() if not keys or name in keys]
        form = f"{cls.option} {cls.format_form(known)}"
        reader = _Reader(cls.option, form, cls.bare if cls.bare in known else "")
        found: dict[str, object] = {}
        for typed, given in reader.split_pairs(value):
            name = typed.replace("_", "-")
            if name not in known:
                raise UsageError(f"{cls.option} has no key {name[:MAX_SHOWN_CHARS]!r}; {cls.format_keys(keys)}.")
            attribute = name.replace("-", "_")
            if attribute in found:
                raise UsageError(f"{cls.option} has {name} twice; give it once.")
            _, kind = _read_fields(cls)[attribute]
            found[attribute] = reader.convert(name, given, kind)
        return cls(**found)

    @classmethod
    def format_keys(cls, keys: Collection[str] = ()) -> str:
        """Return the keys with placeholders of their values, for an error: `its keys are turns=LEN, think=S`."""
        shown = [f"{name}={key.value}" for name, key in cls.list_keys().items() if not keys or name in keys]
        return f"its keys are {', '.join(shown)}" if len(shown) > 1 else f"its key is {shown[0]}"

    @classmethod
    def format_form(cls, keys: Collection[str] = ()) -> str:
        """Return what a user can write, for an error: `[turns=]LEN,think=S`."""
        parts = {name: key for name, key in cls.list_keys().items() if not keys or name in keys}
        names = {name: f"[{name}=]" if name == cls.bare else f"{name}=" for name in parts}
        return ",".join(names[name] + key.value for name, key in parts.items())

    @classmethod
    def format_help(cls, keys: Collection[str] = (), texts: Mapping[str, str] = types.MappingProxyType({})) -> str:
        """Return the help of the option: what it is for, then a paragraph for each key.

        `texts` replaces the texts of keys, and by "" that of the option.
        """
        found = [texts.get("", cls.text)]
        for name, key in cls.list_keys().items():
            if not keys or name in keys:
                short = f", or {key.value}" if name == cls.bare else ""
                found.append(f"{name}={key.value}{short}: {texts.get(name, key.format_help())}")
        return "\n\n".join(found)

    def collect_fields(self) -> dict[str, object]:
        """Return the values that were given, by the fields of a spec that they set."""
        values = {key.field: getattr(self, name) for name, (key, _) in _read_fields(type(self)).items() if key.field}
        return {field: value for field, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Read the text of one structured option."""

    option: str
    form: str  # what a user can write
    bare: str

    def split_pairs(self, value: object) -> Iterable[tuple[str, object]]:
        """Return the keys and their values, not yet converted."""
        if isinstance(value, dict):
            pairs = [(_format_value(name), given) for name, given in value.items()]
        elif isinstance(value, str):
            pairs = [self._split_pair(part.strip(), first=i == 0) for i, part in enumerate(value.split(","))]
        else:
            pairs = [(self.bare, value)] if self.bare else []
        if not pairs:
            raise UsageError(f"{self.option} has no value; write {self.form}.")
        return pairs

    def convert(self, name: str, value: object, kind: object) -> object:
        """Return a value of the key's type."""
        if typing.get_origin(kind) is tuple:
            values = value.split(LIST) if isinstance(value, str) else value
            items = values if isinstance(values, list | tuple) else [values]
            return tuple(dict.fromkeys(self.convert(name, item, typing.get_args(kind)[0]) for item in items))
        text = _format_value(value).strip()
        if not text:
            raise UsageError(f"{self.option} {name}= has no value; write {self.form}.")
        convert, wanted = _CONVERT[kind]
        found = convert(text, value)
        if found is None:
            why = (suggest_counts(text) if kind is int else "") or f"not {wanted}"
            raise UsageError(f"{self.option} {name}={text[:MAX_SHOWN_CHARS]}: {why}; write {self.form}.")
        return found

    def _split_pair(self, part: str, *, first: bool) -> tuple[str, str]:
        name, equals, text = part.partition("=")
        if equals:
            return name.strip(), text
        if first and self.bare and part:
            return self.bare, part
        raise UsageError(f"{self.option} {part[:MAX_SHOWN_CHARS] or '(empty)'}: not KEY=VALUE; write {self.form}.")


def _format_value(value: object) -> str:
    try:
        return str(value)
    except ValueError:  # more digits than Python prints
        return "(a number that is too long)"


def _convert_number(text: str, value: object) -> float | None:
    try:
        return None if isinstance(value, bool) else float(text)
    except ValueError:
        return None


_CONVERT: dict[object, tuple[Callable[[str, object], object], str]] = {  # conversion to a type, and its name in errors
    str: (lambda text, value: None if isinstance(value, bool | dict | list) else text, "text"),
    int: (lambda text, value: None if isinstance(value, bool) else parse_count(text), "a whole number"),
    float: (_convert_number, "a number"),
    bool: (lambda text, value: value if isinstance(value, bool) else SWITCH.get(text), "yes or no"),
}


@functools.cache
def _read_fields(cls: type[StructuredOption]) -> dict[str, tuple[Key, object]]:
    """Return the key and the type of each field."""
    found, defaults = {}, cls()
    for name, annotation in typing.get_type_hints(cls, include_extras=True).items():
        if typing.get_origin(annotation) is not Annotated:
            continue
        kind, key = typing.get_args(annotation)
        plain = [part for part in typing.get_args(kind) if part is not type(None)] if _is_union(kind) else [kind]
        default = getattr(defaults, name)
        if default not in (None, "") and not key.default:
            key = dataclasses.replace(key, default=("no", "yes")[default] if plain[0] is bool else str(default))
        found[name] = (key, plain[0])
    return found


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)
