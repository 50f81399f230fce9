"""Records as reports keep them: strings of sensible length, and one copy of what thousands of records share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.show.text import LINES, printable, shortened

if TYPE_CHECKING:
    from dcpbench.records.record import Environment, Record

LONGEST_DETAIL = 8_000
"""Of a log, of which the end tells most."""


class Clipper:
    """Cuts the strings of records, and keeps each environment once."""

    def __init__(self) -> None:
        self._environments: dict[bytes, Environment] = {}

    def __call__(self, record: Record) -> Record:
        """The record with strings cut, and an environment that equals one seen before replaced by that."""
        names = ("point", "phases", "kv", "honesty", "choice", "sync_sites", "marks", "reason", "gpu", "serve")
        changes: dict[str, Any] = {name: _structure(getattr(record, name)) for name in names}
        if record.environment is not None:
            key = msgspec.json.encode(record.environment)
            if key not in self._environments:
                self._environments[key] = _structure(record.environment)
            changes["environment"] = self._environments[key]
        if record.detail:
            changes["detail"] = {shortened(name): _end(text) for name, text in record.detail.items()}
        return msgspec.structs.replace(record, **changes)


def _end(text: str) -> str:
    short = text if len(text) <= LONGEST_DETAIL else f"({len(text):,} characters) … {text[-LONGEST_DETAIL:]}"
    return printable(short, LINES)


def _structure(value: Any) -> Any:  # noqa: ANN401 - whatever a record holds
    """The same with strings cut, also inside; the very same object where nothing is too long."""
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, msgspec.Struct):
        changes = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            if isinstance(old, str | list | dict | msgspec.Struct) and (new := _structure(old)) is not old:
                changes[name] = new
        return msgspec.structs.replace(value, **changes) if changes else value
    if isinstance(value, list):
        made = [_structure(v) for v in value]
        return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
    if isinstance(value, dict):
        pairs = {shortened(k): _structure(v) for k, v in value.items()}
        same = len(pairs) == len(value) and all(k in value and pairs[k] is value[k] for k in pairs)
        return value if same else pairs
    return value
