"""Parse counts of tokens, requests and clients as people type them: `4000`, `64k`, `1.5m`. No torch.

`k` and `m` are 1,000 and 1,000,000, as for `vllm serve --max-model-len`. `K` and `M` are refused: they are powers of
1,024 in vLLM and powers of 1,000 in other tools.
"""

from __future__ import annotations

import re
from fractions import Fraction

DECIMAL = {"": 1, "k": 10**3, "m": 10**6}
BINARY = {"K": 2**10, "M": 2**20}
_NUMBER = r"[+-]?\d{1,99}(?:\.\d{1,9})?"
PATTERN = _NUMBER + "[kKmM]?"
_COUNT = re.compile(rf"\s*({_NUMBER})([kKmM]?)\s*")


def parse_count(text: str) -> int | None:
    """Return the integer that `text` means, or None if it is no number or its unit is ambiguous."""
    found = _COUNT.fullmatch(text)
    if not found or found[2] not in DECIMAL or ("." in found[1] and not found[2]):
        return None
    number = Fraction(found[1]) * DECIMAL[found[2]]
    return int(number) if number.denominator == 1 else None


def suggest_counts(text: str) -> str:
    """Return the numbers that a capital `K` or `M` may mean, as part of a sentence; empty for any other text."""
    found = _COUNT.fullmatch(text)
    if not found or found[2] not in BINARY:
        return ""
    amount, unit = Fraction(found[1]), found[2]
    decimal, binary = (float(amount * scale) for scale in (DECIMAL[unit.lower()], BINARY[unit]))
    return (
        f"{unit} is {DECIMAL[unit.lower()]:,} in some tools and {BINARY[unit]:,} in others; write {decimal:.0f} (or "
        f"{found[1]}{unit.lower()}), or {binary:.0f}"
    )
