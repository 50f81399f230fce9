"""Format the note on models with weights and KV cache that exceed the memory of their GPUs, for every output. No torch."""

from __future__ import annotations

NO_FIT = "whole model and KV cache do not fit"


def format_no_fit(held: str, layers: str) -> str:
    """Return `whole model and KV cache do not fit: 14 of 61 layers held and reused`."""
    return f"{NO_FIT}: {held} of {layers} layers held and reused"


def format_range(counts: list[int]) -> str:
    """Return `14`, or `12–14` for counts that differ."""
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low}–{high}"
