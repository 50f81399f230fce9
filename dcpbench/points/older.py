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


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a record or a job of any version; raise the decoder's errors, also if a point has a removed option
    switched on.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        told = msgspec.json.decode(data)
        _leave_out(told)
        return decoder.decode(msgspec.json.encode(told))


def _leave_out(told: object) -> None:
    """Remove the removed options that are off from all points."""
    if isinstance(told, list):
        for one in told:
            _leave_out(one)
    elif isinstance(told, dict):
        for name, off in OFF.items():
            if told.get(name) is off:
                del told[name]
        for name in HOLD:
            _leave_out(told.get(name))
