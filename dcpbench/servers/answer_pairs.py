"""Compare two greedy answers to one prompt, up to the first token that differs, as later tokens follow from it. No I/O.

A pair of answers is

    same      if all tokens are equal
    near-tie  if the servers have the two tokens no further apart than rounding explains
    outlier   if they are further apart, or equal tokens are, and rounding could still be the reason
    token     if they are further apart than any rounding explains, or if the servers list no likely token in common
    drift     if the log-probabilities of equal tokens are further apart on average than any rounding explains
    unknown   if no log-probabilities show how far apart the tokens are

`token` and `drift` are real differences. answer_noise.py computes what rounding explains (Limits).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

SAME, NEAR_TIE, OUTLIER, TOKEN, DRIFT, UNKNOWN = "same", "near-tie", "outlier", "token", "drift", "unknown"
REPEAT, CACHE, BATCH, SERVERS, SCORES = ("repeat", "cache", "batch", "servers", "scores")  # effects
TOLERANCE = 0.1  # natural logarithms: bf16 sums in another order move a log-probability by some hundredths
MIN_DRIFT_TOKENS = 4  # equal tokens over which a mean difference of log-probabilities is judged
MIN_LISTED = 5  # tokens from which a list of likeliest tokens must have one in common with another


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of a server."""

    tokens: list[str]  # ids where the server gives them, else text
    names: list[str] = []  # the tokens as keys of `tops`
    logprobs: list[float] = []  # of the tokens; empty if unknown
    tops: list[dict[str, float]] = []  # log-probabilities of the likeliest tokens at each place; empty if unknown
    cached_tokens: int | None = None  # prompt tokens that a prefix cache held; None if the server does not report it

    @property
    def has_ids(self) -> bool:
        """Return whether `tokens` are ids and `names` their text: engines that give no ids are compared by text."""
        return bool(self.names) and self.tokens != self.names


class ScoredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of the tokens of one prompt, fetched twice."""

    first: list[float]
    again: list[float]


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """Distance of two answers to one prompt."""

    first: int | None = None  # index of the first token that differs
    gap: float | None = None  # natural logarithms between the two tokens there, at least
    exact: bool = True  # False: the gap is a lower bound, as one list of likeliest tokens lacks the other token
    common: int | None = None  # likely tokens that both lists have there; None if a list is short or missing
    drift: float | None = None  # mean |difference of log-probabilities| of equal tokens
    equal: int = 0  # tokens before the first that differs
    tokens: int = 0  # tokens of the longer answer

    @property
    def is_disjoint(self) -> bool:
        """Return whether the lists of likeliest tokens have none in common."""
        return self.common == 0

    @property
    def overlaps(self) -> bool:
        """Return whether the lists of likeliest tokens have one in common."""
        return bool(self.common)

    @property
    def judged_drift(self) -> float:
        """Return the drift if it is a mean over enough tokens, else 0."""
        return self.drift if self.drift is not None and self.equal >= MIN_DRIFT_TOKENS else 0.0


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to one prompt, compared and classified."""

    kind: str
    first: int | None = None  # index of the first token that differs
    gap: float | None = None  # natural logarithms between the two tokens there, at least
    drift: float | None = None  # mean |difference of log-probabilities| of equal tokens
    compared: int = 0  # tokens up to the first that differs, and that one
    tokens: int = 0  # tokens of the longer answer
    place: int | None = None  # of the request among those of the server, if it was sent alone

    @property
    def is_real(self) -> bool:
        """Return True if rounding does not explain the difference."""
        return self.kind in (TOKEN, DRIFT)

    @property
    def judged_drift(self) -> float:
        """Return the drift if it is a mean over enough tokens, else 0."""
        equal = self.compared - (self.first is not None)
        return self.drift if self.drift is not None and equal >= MIN_DRIFT_TOKENS else 0.0


def measure_distance(a: Answer, b: Answer) -> Distance:
    """Return how far two answers to one prompt are apart."""
    first, tokens = find_first_difference(a, b), max(len(a.tokens), len(b.tokens))
    equal = min(len(a.tokens), len(b.tokens)) if first is None else first
    found = Distance(first=first, drift=_compute_drift(a, b, equal), equal=equal, tokens=tokens)
    if first is None:
        return found
    gaps = [gap for x, y in ((a, b), (b, a)) if (gap := _find_gap(x, y, first)) is not None]
    return msgspec.structs.replace(
        found,
        gap=max((size for size, _ in gaps), default=None),
        exact=bool(gaps) and all(exact for _, exact in gaps),
        common=_count_common(a, b, first),
    )


def find_first_difference(a: Answer, b: Answer) -> int | None:
    """Return the index of the first token that differs, the end of an answer included; None if none does."""
    ours, theirs = (a.tokens, b.tokens) if a.has_ids == b.has_ids else (a.names or a.tokens, b.names or b.tokens)
    for i, (x, y) in enumerate(zip(ours, theirs, strict=False)):
        if x != y:
            return i
    return None if len(a.tokens) == len(b.tokens) else min(len(a.tokens), len(b.tokens))


def find_prompt_value(values: Sequence[float]) -> float:
    """Return the largest value that at least half of a prompt's pairs reach; 0 without any pair."""
    ordered = sorted(values, reverse=True)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def _compute_drift(a: Answer, b: Answer, equal: int) -> float | None:
    size = min(equal, len(a.logprobs), len(b.logprobs))
    return float(np.mean(np.abs(np.subtract(a.logprobs[:size], b.logprobs[:size])))) if size else None


def _find_gap(x: Answer, y: Answer, place: int) -> tuple[float, bool] | None:
    """Return by how much x has its own token ahead of y's token, and whether that is exact or a lower bound."""
    if place >= min(len(x.tops), len(x.logprobs), len(y.names)):
        return None
    own, others = x.logprobs[place], x.tops[place]
    if y.names[place] in others and y.names[place] != x.names[place]:
        return abs(own - others[y.names[place]]), True
    return own - min(others.values(), default=own), False


def _count_common(a: Answer, b: Answer, place: int) -> int | None:
    """Return how many tokens both lists of likeliest tokens have at a place; None if one has fewer than MIN_LISTED tokens."""
    if place >= min(len(a.tops), len(b.tops)):
        return None
    mine, theirs = a.tops[place], b.tops[place]
    return len(mine.keys() & theirs.keys()) if min(len(mine), len(theirs)) >= MIN_LISTED else None
