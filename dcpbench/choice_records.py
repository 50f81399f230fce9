"""What a record says of the backend and the exchange that stood for `auto`. A part of records.py; no torch."""

from __future__ import annotations

import msgspec

from dcpbench.choices import NO_EXCHANGE


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A backend with an exchange that `auto` tried."""

    backend: str
    exchange: str
    layer_us: float | None = None
    """Median time of q's exchange, attention and merge in one layer, slowest rank; null where it cannot run."""
    reason: str | None = None
    """Why it cannot."""

    def __str__(self) -> str:
        """`triton symm`."""
        return _name(self.backend, self.exchange)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What stood for `auto` while the point was measured."""

    backend: str
    exchange: str
    candidates: list[Tried]
    """All that were tried, in order."""

    def __str__(self) -> str:
        """`triton symm`."""
        return _name(self.backend, self.exchange)


def _name(backend: str, exchange: str) -> str:
    return backend if exchange == NO_EXCHANGE else f"{backend} {exchange}"
