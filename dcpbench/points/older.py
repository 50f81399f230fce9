"""Points as older versions wrote them, with options that are gone. No torch."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")
GONE = {"all_reduce": ("overlap", False)}
"""Options that points once had, by the field that they stood before, each with what a point says that leaves it off. Such a
point is the same today without it; keys and names of files, which stay as they are for ever, have it."""
OFF = dict(GONE.values())
HOLD = ("point", "points", "pool_points", "engines")
"""Names of what holds points in records and jobs."""


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """A record or a job of any version. Raises as the decoder does, also for an option that is gone and that a point has on."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        told = msgspec.json.decode(data)
        _leave_out(told)
        return decoder.decode(msgspec.json.encode(told))


def _leave_out(told: object) -> None:
    """Take what is off out of all points."""
    if isinstance(told, list):
        for one in told:
            _leave_out(one)
    elif isinstance(told, dict):
        for name, off in OFF.items():
            if told.get(name) is off:
                del told[name]
        for name in HOLD:
            _leave_out(told.get(name))
