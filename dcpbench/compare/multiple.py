"""Many tests at once: which may be believed, and how wide intervals must be for it (Benjamini and Hochberg)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def rejected(p_values: Sequence[float], alpha: float) -> int:
    """How many hypotheses may be rejected: the largest k for which the k-th smallest p is at most alpha·k/m.

    Benjamini and Hochberg (1995). Where nothing differs at all, the chance of any rejection is at most alpha; else the
    expected share of wrong ones among the rejected is. Holds for independent tests, and for tests that are positively
    dependent, as metrics of one point are (Benjamini and Yekutieli, 2001).
    """
    m = len(p_values)
    return max((k for k, p in enumerate(sorted(p_values), 1) if p <= alpha * k / m), default=0)


def level(p_values: Sequence[float], alpha: float) -> float:
    """What a p must not exceed to be rejected, which is 1 - confidence of the intervals: alpha · max(1, R) / m.

    Intervals at this level exclude equality exactly where it is rejected, and on average at most alpha of those shown
    for rejected ones miss their ratio (Benjamini and Yekutieli, 2005).
    """
    return alpha * max(1, rejected(p_values, alpha)) / max(1, len(p_values))
