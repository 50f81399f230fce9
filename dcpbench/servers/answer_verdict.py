"""Verdicts on answers: reasons why there is none, and the smallest differences that would have been found. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from dcpbench.servers.answer_noise import DRIFT_SIZE, GAP
from dcpbench.servers.exact_tests import (
    LEVEL,
    compute_smallest_found_share,
    compute_smallest_share,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.servers.answer_noise import Limits

AGREE, CONSISTENT, DIFFER, UNDECIDED = "AGREE", "CONSISTENT", "DIFFER", "UNDECIDED"
MIN_COVERAGE = 0.5  # share of tokens that have to be compared before answers part at near-ties, or
MIN_COMPARED = (
    3.0  # mean tokens of an answer: of the prefill, of a decode step, and of one that reads the cache of another
)
MAX_OUTLIER_SHARE = 0.05  # of pairs
RARE, UNATTRIBUTED, FEW_TOKENS = "rare", "unattributed", "few tokens"  # reasons for no verdict
TOO_WIDE, UNMEASURED, MANY_OUTLIERS = "too wide", "unmeasured", "many outliers"  # further ones, about rounding


class Counted(Protocol):
    """Describe the counts of pairs that agreement.Comparison and engine_agreement.Count share."""

    @property
    def pairs(self) -> int:
        """Return the number of pairs."""

    @property
    def compared(self) -> int:
        """Return the number of tokens that were compared."""

    @property
    def outliers(self) -> int:
        """Return the number of pairs of the kind OUTLIER."""

    @property
    def real(self) -> int:
        """Return the number of real pairs."""

    @property
    def unknown(self) -> int:
        """Return the number of pairs of the kind UNKNOWN."""


class Detectable(msgspec.Struct, frozen=True, kw_only=True):
    """Smallest differences that would have been found with a probability of exact_tests.CONFIDENCE."""

    prompts: float  # share of prompts, of differences beyond `gap` or `drift`
    prompts_of_a_length: float
    tokens: float  # share of the places that were compared
    gap: float  # size of these differences, natural logarithms
    drift: float
    typical_prompts: float  # share of prompts, of smaller differences; 1: none would have been found
    typical_gap: float  # size of these smaller differences
    typical_drift: float


def find_doubts(
    counts: Sequence[Counted], compared: Iterable[Counted], coverage: float, limits: Limits
) -> dict[str, bool]:
    """Return which reasons hold why agreement would claim more than was seen. `compared`: the counts that the verdict is about."""
    outliers, pairs = sum(c.outliers for c in counts), sum(c.pairs for c in counts)
    return {
        RARE: any(c.real for c in counts),
        TOO_WIDE: limits.is_too_wide,
        UNMEASURED: outliers > 0 and not limits.is_measured,
        MANY_OUTLIERS: outliers > MAX_OUTLIER_SHARE * pairs and limits.is_measured,
        UNATTRIBUTED: any(c.unknown for c in counts),
        FEW_TOKENS: coverage < MIN_COVERAGE and compute_mean_compared(compared) < MIN_COMPARED,
    }


def compute_mean_compared(counts: Iterable[Counted]) -> float:
    """Return the mean number of tokens of an answer that were compared."""
    counts = list(counts)
    return sum(c.compared for c in counts) / max(sum(c.pairs for c in counts), 1)


def compute_detectable(
    prompts: Sequence[int], tokens: Sequence[int], by_length: Iterable[int], limits: Limits, tests: int
) -> Detectable:
    """Return the smallest differences that would have been found in the effect that was seen least often.

    `prompts` and `tokens` are the numbers of each effect, `by_length` those of the prompts of each length; `tests` is the number of tests.
    """
    fewest = min(prompts, default=0)
    seen = limits.get_limit if limits.is_measured else limits.get_explained  # unknown rounding lets nothing else agree
    shares = [
        compute_smallest_found_share(fewest, limits.get_typical_share(size, 0), LEVEL / max(tests, 1))
        for size in (GAP, DRIFT_SIZE)
    ]
    return Detectable(
        prompts=compute_smallest_share(prompts),
        prompts_of_a_length=compute_smallest_share(by_length),
        tokens=compute_smallest_share(tokens),
        gap=seen(GAP),
        drift=seen(DRIFT_SIZE),
        typical_prompts=max(shares),
        typical_gap=limits.list_limits(GAP)[0],
        typical_drift=limits.list_limits(DRIFT_SIZE)[0],
    )
