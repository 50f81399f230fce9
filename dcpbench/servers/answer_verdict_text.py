"""Format the parts of a verdict on answers that `verify --url` and `verify --engine` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.servers.answer_noise import DRIFT_SIZE, GAP, LAYOUT_FACTOR, QUANTILES, REAL
from dcpbench.servers.answer_verdict import (
    FEW_TOKENS,
    MANY_OUTLIERS,
    MAX_OUTLIER_SHARE,
    MIN_COMPARED,
    RARE,
    TOO_WIDE,
    UNATTRIBUTED,
    UNMEASURED,
)
from dcpbench.servers.exact_tests import CONFIDENCE
from dcpbench.show.numbers import format_short_number

if TYPE_CHECKING:
    from dcpbench.servers.answer_noise import Limits, ShareTest
    from dcpbench.servers.answer_verdict import Detectable

DOUBT_TEXTS = {
    RARE: "some answers differ beyond rounding, too few to be distinguished from chance; ask more with --num-prompts",
    TOO_WIDE: "the rounding is so large that a fault could look like it; use a model without quantized activations, or trained weights",
    UNMEASURED: "some answers differ, and the rounding is unknown, as the answers of each server to the same prompt are almost always "
    "identical; use more or longer prompts (--num-prompts, --context)",
    MANY_OUTLIERS: f"more than {MAX_OUTLIER_SHARE:.0%} of the answers differ more than the largest rounding that was measured",
    UNATTRIBUTED: "some answers differ, and no log-probabilities say whether those are near-ties",
    FEW_TOKENS: f"answers diverge at near-ties so early that fewer than {MIN_COMPARED:g} of their tokens could be compared on average; "
    "use a model with trained weights, or without quantized activations",
}
LIMIT_NAMES = ("the typical", "the large", "the very large")  # rounding at each of QUANTILES
assert len(LIMIT_NAMES) == len(QUANTILES)


def format_rounding(limits: Limits) -> str:
    """Return how large the measured rounding is."""
    if not limits.is_measured:
        return (
            "Rounding could not be measured: the answers of each server to the same prompt are almost always identical."
        )
    parts = []
    if drift := limits.drift_noise.values:
        typical, largest = format_short_number(drift[0]), format_short_number(drift[-1])
        parts.append(f"Rounding moves log-probabilities by {typical} (median) and up to {largest}.")
    if gap := limits.gap_noise.values:
        typical, largest = format_short_number(gap[0]), format_short_number(gap[-1])
        parts.append(f"It lets answers diverge at tokens that are {typical} apart (median) and up to {largest}.")
    parts.append("This is measured on one server, where only the batch or the prefix cache changes.")
    return " ".join(parts)


def format_detectable(found: Detectable, mean_compared: float) -> str:
    """Return the smallest fault that would have been seen, and how much of the answers was compared."""
    shares = f"{found.prompts:.2%} of prompts ({found.prompts_of_a_length:.0%} of those of one length), or in {found.tokens:.3%} of tokens"
    gap = f"more than {format_short_number(found.gap)} apart in log-probability"
    text = [
        f"A fault in {shares}, would have been seen with {CONFIDENCE:.0%} confidence, if it chooses tokens {gap}, or replaces all likely tokens."
    ]
    if found.typical_prompts < 1 and found.typical_gap < found.gap:
        smaller = format_short_number(found.typical_gap)
        text.append(
            f"A fault in {found.typical_prompts:.0%} of prompts would have been seen if they are more than {smaller} apart."
        )
    text.append(f"On average {mean_compared:.1f} tokens of an answer were compared.")
    return " ".join(text)


def format_limit(test: ShareTest, limits: Limits) -> str:
    """Return what the prompts of a finding exceed."""
    if test == REAL:
        return "beyond rounding"
    limit = format_short_number(limits.list_limits(test.size)[test.place])
    what = {GAP: "diverge at tokens more than", DRIFT_SIZE: "have log-probabilities of equal tokens more than"}[
        test.size
    ]
    factor = f" ({LAYOUT_FACTOR:g} times {LIMIT_NAMES[test.place]} rounding)" if limits.is_measured else ""
    return f"{what} {limit} apart{factor}"
