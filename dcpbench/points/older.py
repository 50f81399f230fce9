"""Decode points as older versions wrote them, with removed options. No torch."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")
GONE = {"all_reduce": ("overlap", False)}
"""Removed options of points, by the field that followed them, each with the value that means the option is off.

A point with the option off equals a current point without it; keys and names of files, which never change, keep the
option.
"""
OFF = dict(GONE.values())
HOLD = ("point", "points", "pool_points", "engines")
"""Names of the fields that hold points in records and jobs."""


def decode_any_version(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a record or a job of any version; raise the decoder's errors, also if a point has a removed option
    switched on.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        values = msgspec.json.decode(data)
        _drop_removed_options(values)
        return decoder.decode(msgspec.json.encode(values))


def _drop_removed_options(value: object) -> None:
    """Remove the removed options that are off from all points."""
    if isinstance(value, list):
        for one in value:
            _drop_removed_options(one)
    elif isinstance(value, dict):
        for name, off in OFF.items():
            if value.get(name) is off:
                del value[name]
        for name in HOLD:
            _drop_removed_options(value.get(name))
