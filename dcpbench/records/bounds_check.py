"""Check the values of a record against the bounds that its fields declare (points/bounds.py). No torch.

The decoder checks the same bounds in C and stops at the first value that breaks one. This module runs only after that: it
names the field in readable form, and replaces values that no reader would accept before they are written.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import msgspec
from msgspec import inspect

from dcpbench.records.record import OmittedValue, Record

MAX_SHOWN = 40  # characters of a value in a message
REFUSED: Any = object()  # marks a value that has no acceptable form
Path = tuple[str | int, ...]


def format_field_name(path: Path) -> str:
    """Return the name of a field, without places in lists."""
    return ".".join(name[:MAX_SHOWN] for name in path if isinstance(name, str))


@functools.cache
def get_record_type() -> inspect.Type:
    """Return the declared type of a record."""
    return inspect.type_info(Record)


def drop_refused_parts(value: Any, kind: inspect.Type, path: Path, omitted: list[OmittedValue]) -> Any:  # noqa: ANN401 - any field
    """Return the value with null in place of each part that a reader would refuse, or REFUSED if its type allows no
    null.

    The innermost part that may be null or empty is replaced, and the problem is appended to `omitted`.
    """
    if isinstance(value, str):
        return _encode_surrogates(value, path, omitted)
    if isinstance(value, dict) and (struct := _find_variant(kind, inspect.StructType)):
        return _drop_refused_fields(value, struct, path, omitted)
    if isinstance(value, dict) and (mapping := _find_variant(kind, inspect.DictType)):
        pairs = {
            _encode_surrogates(name, path, omitted): drop_refused_parts(
                item, mapping.value_type, (*path, name), omitted
            )
            for name, item in value.items()
        }
        return REFUSED if any(item is REFUSED for item in pairs.values()) else pairs
    if isinstance(value, list) and (items := _find_variant(kind, inspect.ListType, inspect.VarTupleType)):
        found = [drop_refused_parts(item, items.item_type, (*path, place), omitted) for place, item in enumerate(value)]
        return REFUSED if any(item is REFUSED for item in found) else found
    if isinstance(value, int | float) and (what := _describe_violation(value, kind)):
        omitted.append(OmittedValue(field=format_field_name(path), what=what))
        return REFUSED
    if isinstance(value, float) and _find_variant(kind, inspect.IntType) and not _find_variant(kind, inspect.FloatType):
        return int(value)  # 8.0, which no reader takes for a whole number
    return value


def _drop_refused_fields(
    value: dict[str, Any], kind: inspect.StructType, path: Path, omitted: list[OmittedValue]
) -> Any:  # noqa: ANN401
    found = dict(value)
    for field in kind.fields:
        name = field.encode_name
        if name in value:
            found[name] = drop_refused_parts(value[name], field.type, (*path, name), omitted)
        if found.get(name) is not REFUSED:
            continue
        if _find_variant(field.type, inspect.NoneType):
            found[name] = None
        elif field.default_factory is not msgspec.NODEFAULT:  # an empty list or dict
            found[name] = field.default_factory()
        elif not field.required and (kind.cls is Record or field.default is msgspec.NODEFAULT):
            del found[name]  # a field that lines may lack
        else:
            return REFUSED
    return found


def _encode_surrogates(text: str, path: Path, omitted: list[OmittedValue]) -> str:
    """Return the text with lone surrogates spelled out, as UTF-8 cannot hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        omitted.append(OmittedValue(field=format_field_name(path), what="holds characters that are no Unicode text"))
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def _describe_violation(value: float, kind: inspect.Type) -> str:
    """Return the problem with a number, or an empty string if it is within the bounds of its type."""
    if isinstance(value, bool):
        return ""
    if not isinstance(value, int) and not math.isfinite(value):
        return f"is {value}, not a finite number"
    declared = _find_variant(kind, inspect.FloatType) or _find_variant(kind, inspect.IntType)
    if declared is None or declared.le is None:
        return ""
    if value > declared.le or (declared.ge and value < declared.ge):
        return f"is above {declared.le:g}"
    if value < 0 and not declared.ge:
        return f"is {max(value, -1e300):g}, below 0"  # an integer may be larger than a float can be
    if declared.gt is not None and value <= declared.gt:
        return f"is {value:g}, not above {declared.gt:g}"
    whole = isinstance(declared, inspect.IntType) and not float(value).is_integer()
    return f"is {value:g}, not a whole number" if whole else ""


def _find_variant(kind: inspect.Type, *wanted: type[Any]) -> Any:  # noqa: ANN401 - of the given class
    """Return the type, or the variant of a union, that is of one of these classes; None if there is none."""
    variants = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((one for one in variants if isinstance(one, wanted)), None)
