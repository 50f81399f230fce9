"""Format the note on models with weights and KV cache that exceed the memory of their GPUs, for every output. No torch."""

from __future__ import annotations


def format_no_fit(held: str, layers: str) -> str:
    """Return `GPU memory holds 14 of 61 layers, which run repeatedly`."""
    return f"GPU memory holds {held} of {layers} layers, which run repeatedly"


def format_range(counts: list[int]) -> str:
    """Return `14`, or `12–14` for counts that differ."""
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low}–{high}"
