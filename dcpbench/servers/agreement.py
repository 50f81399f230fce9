"""Whether two servers give the same answers, as far as either gives the same ones twice: statistics alone.

Of each prompt there are several greedy answers of A and of B. The distance of two answers is 1 minus the share of tokens before they first differ; their
drift is the mean |difference of log-probabilities| of the tokens before that. What differs between A and B beyond what differs within
A and within B is tested by exchanging labels: had A and B been the same, any half of a prompt's answers might have been A's.

    statistic   sum over prompts of (mean over pairs A × B) − (mean over pairs within A and within B)
    p           share of relabellings, drawn for each prompt by itself, with a statistic as large
    judged      at each context for tokens and for drift; Holm's correction over all of them, level LEVEL

Two answers may differ without anything being wrong: where the two likeliest tokens are nearly as likely, rounding decides. A divergence is a near-tie
where the likeliest token was ahead of the second by less than `tolerance`, in natural logarithms; drift counts from the same size on. A token
after the first that differs follows from it, and is not compared.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[Any]

LEVEL = 0.001
"""Of a false alarm in a whole comparison: 20 comparisons of a server with itself give one in 2 % of the cases."""
DRAWS = 100_000
LEAST_RUNS = 2
TOLERANCE = 0.1
"""Natural logarithms. bf16 sums in another order move a log-probability by some hundredths; 0.1 is 10 % of a probability."""
HALVINGS = 10
"""Lengths that may be added while the first that differs is looked for."""
TOO_NOISY = 0.5
"""Share of pairs of the same server's answers that differ, from which on nothing can be said of another."""
AGREE, DIFFER, UNDECIDED = VERDICTS = ("AGREE", "DIFFER", "UNDECIDED")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a server answered once."""

    tokens: list[str]
    logprobs: list[float] = []
    """Of the tokens; empty where the server offers none."""
    gaps: list[float] = []
    """By how much each token was ahead of the second likeliest; infinite where nobody says."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What was found at one length of prompts."""

    context: int
    """Tokens of a prompt."""
    prompts: int
    differ_within: float
    """Share of pairs of one server's own answers that differ."""
    differ_between: float
    """Of pairs of A and B."""
    first: int | None = None
    """The earliest token, from 1, at which an answer of B differs from one of A; None where none does."""
    gap: float | None = None
    """How far ahead the likeliest token was there, at most over such prompts; null where nobody says."""
    drift_within: float | None = None
    drift_between: float | None = None
    """Mean |difference of log-probabilities|; null where a server offers none."""
    p_tokens: float = 1.0
    p_drift: float = 1.0
    tokens_differ: bool = False
    drifts: bool = False

    @property
    def differs(self) -> bool:
        """Whether A and B differ here beyond what either does by itself."""
        return self.tokens_differ or self.drifts


def first_difference(a: Answer, b: Answer) -> int | None:
    """Index of the first token that differs, an answer's end included; None where none does."""
    for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if x != y:
            return i
    return None if len(a.tokens) == len(b.tokens) else min(len(a.tokens), len(b.tokens))


def distance(a: Answer, b: Answer) -> float:
    """0 for equal answers, more the earlier they differ, at most 1."""
    first, longest = first_difference(a, b), max(len(a.tokens), len(b.tokens), 1)
    return 0.0 if first is None else 1 - first / longest


def drift(a: Answer, b: Answer) -> float | None:
    """Mean |difference of log-probabilities| of the tokens that both have before they differ; None without any."""
    first = first_difference(a, b)
    size = min(len(a.logprobs), len(b.logprobs), *([] if first is None else [first]))
    if not size:
        return None
    return float(np.mean(np.abs(np.subtract(a.logprobs[:size], b.logprobs[:size]))))


def compare(context: int, a: Sequence[Sequence[Answer]], b: Sequence[Sequence[Answer]], seed: int = 0) -> Found:
    """Answers of A and of B to prompts of one length, [prompt][run], not yet judged. Raises UsageError for too few runs."""
    for runs in (*a, *b):
        if len(runs) < LEAST_RUNS:
            raise UsageError(
                f"one answer of a server does not say how it differs from itself; use --repeats {LEAST_RUNS} or more."
            )
    rng = np.random.default_rng([seed, context])
    tokens = [_matrix(x, y, distance) for x, y in zip(a, b, strict=True)]
    drifts = [_matrix(x, y, drift) for x, y in zip(a, b, strict=True)]
    known = [m for m in drifts if not np.isnan(m).any()]
    count = len(a[0])
    within, between = _means(tokens, count, lambda m: m > 0)
    drift_within, drift_between = _means(known, count, lambda m: m) if known else (None, None)
    where = [
        (first, x.gaps[first] if first < len(x.gaps) else math.inf)
        for mine, theirs in zip(a, b, strict=True)
        for x, y in itertools.product(mine, theirs)
        if (first := first_difference(x, y)) is not None
    ]
    earliest = min((first for first, _ in where), default=None)
    gap = max((g for _, g in where), default=None)
    return Found(
        context=context,
        prompts=len(a),
        differ_within=within,
        differ_between=between,
        first=None if earliest is None else earliest + 1,
        gap=gap if gap is not None and math.isfinite(gap) else None,
        drift_within=drift_within,
        drift_between=drift_between,
        p_tokens=_permuted(tokens, count, rng),
        p_drift=_permuted(known, count, rng) if known else 1.0,
    )


def check_decides(prompts: int, runs: int, lengths: int) -> None:
    """Raises UsageError where no difference, however large, could be told from chance by so few answers at so many lengths."""
    level = LEVEL / (2 * (lengths + HALVINGS))
    if level < 1 / (DRAWS + 1):
        raise UsageError(f"{lengths} lengths of prompts are too many for one comparison; name fewer with --context.")
    if runs < LEAST_RUNS:
        more = f"--repeats {LEAST_RUNS + 1}"
    else:
        least = math.log(2 / level) / math.log(math.comb(2 * runs - 1, runs))  # of two, as what is drawn scatters
        if prompts >= least:
            return
        more = f"--num-prompts {math.ceil(least)}"
    raise UsageError(
        f"by --num-prompts {prompts} and --repeats {runs} no difference could be told from chance at {lengths} lengths; use {more} or more."
    )


def judge(found: Sequence[Found], tolerance: float = TOLERANCE) -> tuple[list[Found], str, str]:
    """Each context judged, the verdict over all, and a sentence that says why."""
    tests = sorted(
        [(f.p_tokens, i, "tokens") for i, f in enumerate(found)]
        + [(f.p_drift, i, "drift") for i, f in enumerate(found)]
    )
    rejected: set[tuple[int, str]] = set()
    for k, (p, i, what) in enumerate(tests):
        if p > LEVEL / (len(tests) - k):
            break
        rejected.add((i, what))
    judged = []
    for i, f in enumerate(found):
        more = (f.drift_between or 0.0) - (f.drift_within or 0.0)
        judged.append(
            msgspec.structs.replace(
                f,
                tokens_differ=(i, "tokens") in rejected and not _tied(f, tolerance),
                drifts=(i, "drift") in rejected and more > tolerance,
            )
        )
    return judged, *_verdict(judged, tolerance)


def between(found: Sequence[Found], apart: int) -> int | None:
    """A length of prompts by whose answers the first difference would be known better, to `apart` tokens; None: none.

    `found` are judged, in order of their lengths.
    """
    first = next((f.context for f in found if f.differs), None)
    if first is None:
        return None
    last = max((f.context for f in found if f.context < first), default=0)
    return (last + first) // 2 if last and first - last > apart else None


def _tied(found: Found, tolerance: float) -> bool:
    """Whether answers differ at near-ties alone."""
    return found.gap is not None and found.gap <= tolerance


def _verdict(found: Sequence[Found], tolerance: float) -> tuple[str, str]:
    wrong = [f for f in found if f.differs]
    if wrong:
        first = wrong[0]
        after = all(f.differs for f in found if f.context >= first.context)
        where = (
            f"from prompts of {first.context:,} tokens on"
            if after
            else f"at prompts of {', '.join(f'{f.context:,}' for f in wrong)} tokens"
        )
        told = (
            [f"first in token {first.first} of an answer (after {first.context + first.first - 1:,} tokens of context)"]
            if first.first and first.tokens_differ
            else []
        )
        told += [f"log-probabilities are {first.drift_between:.3g} apart on average"] if first.drifts else []
        same = (
            "each agrees with itself"
            if not first.differ_within
            else f"each differs from itself in {first.differ_within:.0%} of pairs"
        )
        return DIFFER, f"B differs from A {where}, {' and '.join(told)}; {same} there."
    noisy = [f for f in found if f.differ_within >= TOO_NOISY]
    if noisy:
        return UNDECIDED, (
            f"A and B do not differ more than each from itself, but at prompts of {noisy[0].context:,} tokens {noisy[0].differ_within:.0%} of "
            "a server's own answers differ: too much to say anything of the other. Fix the seed, or lower the load."
        )
    ties = [f for f in found if f.differ_between > f.differ_within and _tied(f, tolerance)]
    beyond = (
        f", but for near-ties (the two likeliest tokens within {tolerance:g}) at {len(ties)} of {len(found)} lengths"
        if ties
        else ""
    )
    return AGREE, f"B answers as A does up to prompts of {max(f.context for f in found):,} tokens{beyond}."


def _matrix(a: Sequence[Answer], b: Sequence[Answer], of: Callable[[Answer, Answer], float | None]) -> Floats:
    every = [*a, *b]
    found = np.zeros((len(every), len(every)))
    for i, j in itertools.combinations(range(len(every)), 2):
        value = of(every[i], every[j])
        found[i, j] = found[j, i] = np.nan if value is None else value
    return found


def _means(matrices: Sequence[Floats], runs: int, of: Callable[[Floats], Any]) -> tuple[float, float]:
    within, between = _masks(2 * runs, tuple(range(runs)))
    values = np.array([of(m) for m in matrices], float)
    return float(values[:, within].mean()), float(values[:, between].mean())


@functools.cache
def _masks(count: int, mine: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Pairs within either side, and between both."""
    is_a = np.isin(np.arange(count), mine)
    upper = np.triu(np.ones((count, count), bool), 1)
    alike = is_a[:, None] == is_a[None, :]
    return upper & alike, upper & ~alike


def _permuted(matrices: Sequence[Floats], runs: int, rng: np.random.Generator) -> float:
    """One-sided p of the statistic of the module, with the labels as they are counted among the draws."""
    splits = [_masks(2 * runs, (0, *rest)) for rest in itertools.combinations(range(1, 2 * runs), runs - 1)]
    table = np.array([[m[between].mean() - m[within].mean() for within, between in splits] for m in matrices])
    seen = table[:, 0].sum()  # the first split is the true one
    drawn = rng.integers(0, len(splits), (DRAWS, len(matrices)))
    sums = table[np.arange(len(matrices)), drawn].sum(axis=1)
    return float(((sums >= seen - 1e-12).sum() + 1) / (DRAWS + 1))
