"""Judge whether an engine's settings give the same greedy answers, from the answers of edge_answers.py. No I/O.

Each setting is judged by itself first: repeated requests, prefix-cache hits against misses, and answers in a batch against
answers alone. Then its answers are compared with those of the first setting under the same conditions. Pairs of answers are classified
as in agreement.py. Each effect is tested over all prompts, over those of each length, each size of batch and each state of the prefix
cache, and for each combination (exact binomial tests against the share that chance may cause; Holm). All tests of a whole comparison
together give a false alarm with a probability of at most agreement.LEVEL.

Requests that are sent alone have a known order. If m of them differ and all their places are equal modulo k, that has a probability of
k^(1 - m) by chance, for any of k values of k at most k^(2 - m): it is one more test, which finds an engine that errs at every k-th request.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.servers.agreement import (
    AGREE,
    BATCH,
    CACHE,
    CONSISTENT,
    DIFFER,
    DRIFT,
    FEW_TOKENS,
    LEVEL,
    MANY_OUTLIERS,
    MAX_CHANCE_SHARE,
    MAX_OUTLIER_SHARE,
    MIN_COVERAGE,
    RARE,
    REPEAT,
    SAME,
    SERVERS,
    UNATTRIBUTED,
    UNDECIDED,
    Detectable,
    Pair,
    Tolerance,
    compute_smallest_share,
    compute_tail,
    compute_upper_bound,
    measure_rounding,
    reject_by_holm,
    tally_pairs,
)
from dcpbench.servers.edge_answers import AGAIN, CACHES, NEW, SHARED, Cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dcpbench.servers.agreement import Answer, ScoredPrompt
    from dcpbench.servers.edge_answers import GroupAnswers, LengthAnswers

    Test = tuple[str, str, object]  # effect, dimension, and its value

SCORES = "scores"  # effect: log-probabilities of the tokens of a prompt
OWN_EFFECTS = (REPEAT, CACHE, BATCH)
BASE_DIFFERS = "base differs"  # further reason for no verdict
MAX_ROUNDING_RATIO = 3.0
MIN_PERIODIC = 4  # wrong requests from which a period is derived


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of answers of one effect under the same conditions."""

    effect: str
    cell: Cell
    prompts: int
    pairs: int
    near_ties: int = 0
    outliers: int = (
        0  # pairs of which single tokens differ more than rounding explains, as when a token gets another expert
    )
    real: int = 0  # pairs that differ beyond rounding
    unknown: int = 0
    differing: int = 0  # prompts of which at least half of the pairs are real
    compared: int = 0  # tokens
    tokens: int = 0
    with_logprobs: int = 0  # pairs of which log-probabilities were compared
    example: Pair | None = None  # the first real pair
    wrong: list[int] = []  # places of the requests of real pairs that were sent alone, among those of the server
    gaps: list[float] = []  # of all pairs that part, where log-probabilities give it
    drifts: list[float] = []  # of all pairs with log-probabilities of equal tokens


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """An effect in which a setting differs beyond chance, and the smallest conditions that show it."""

    effect: str
    smallest: Cell
    differing: int  # prompts under all conditions
    prompts: int
    lengths: list[int]  # values at which at least half of the prompts of some combination differ; empty: it is sporadic
    batches: list[int]
    caches: list[str]
    clean_lengths: list[int]  # other values
    clean_batches: list[int]
    clean_caches: list[str]
    first: int | None  # token, from 1, that differs in the first such pair; None if only log-probabilities differ
    gap: float | None  # by how much one server has its token ahead of the other one's there
    drift: float | None  # mean |difference of log-probabilities| of equal tokens
    period: int | None  # distance in requests between wrong ones; None if it is not constant
    p: float


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one setting."""

    verdict: str
    findings: list[Finding]
    undecided: list[str]  # reasons why no verdict is possible
    counts: list[Count]
    detectable: Detectable
    coverage: float  # share of tokens that were compared
    tolerance: float  # natural logarithms; the largest of all lengths
    rounding: float  # of the same length: median |difference of log-probabilities| between conditions that change only the order of sums; 0: unknown
    spread: float | None  # standard deviation of the log-probabilities of random tokens; None if the server gives none
    logprobs: bool  # whether log-probabilities were compared


def measure_length_rounding(answers: LengthAnswers) -> float:
    """Return how far log-probabilities of one server's equal tokens are apart under other conditions (agreement.measure_rounding)."""
    effects = (CACHE, BATCH)
    pairs = {effect: [pair for g in answers.groups for of in OWN_PAIRS[effect](g) for pair in of] for effect in effects}
    return measure_rounding(pairs.values())


def limit_rounding(found: Mapping[int, float]) -> dict[int, float]:
    """Return the rounding of each length of prompts, from what was measured at it.

    Each has at least the median of all lengths, as few pairs at one length can be close by chance, and at most MAX_ROUNDING_RATIO times
    that, so that a fault at one length does not raise its tolerance beyond recognition.
    """
    typical = float(np.median([value for value in found.values() if value] or [0.0]))
    return {length: min(max(value, typical), MAX_ROUNDING_RATIO * typical) for length, value in found.items()}


def count_own(answers: LengthAnswers, tolerance: Tolerance) -> list[Count]:
    """Compare the answers of one server with each other."""
    found = []
    for group in answers.groups:
        cell = Cell(length=answers.length, batch=group.batch, cache=AGAIN)
        for effect, pairs_of in OWN_PAIRS.items():
            pairs = [[tolerance.compare_pair(x, y) for x, y in of] for of in pairs_of(group)]
            found.append(_count_pairs(effect, cell, pairs))
    return _merge_counts(found)


def count_between(base: LengthAnswers, other: LengthAnswers, tolerance: Tolerance) -> list[Count]:
    """Compare the answers of two servers under the same conditions."""
    found = []
    compare = tolerance.compare_pair
    for a, b in zip(base.groups, other.groups, strict=True):
        make_cell = functools.partial(Cell, length=base.length, batch=b.batch)
        first = [[compare(x, y)] for x, y in zip(a.rounds[0], b.rounds[0], strict=True)]
        found.append(_count_pairs(SERVERS, make_cell(cache=SHARED if b.shared else NEW), first, b.numbers[:1]))
        later = [
            [compare(x, y) for x, y in zip(of_a, of_b, strict=True)]
            for of_a, of_b in zip(zip(*a.rounds[1:], strict=True), zip(*b.rounds[1:], strict=True), strict=True)
        ]
        found.append(_count_pairs(SERVERS, make_cell(cache=AGAIN), later, b.numbers[1:]))
    scored = [[_compare_scores(x, y, tolerance.value)] for x, y in zip(base.scored, other.scored, strict=False)]
    alone = [
        ([[compare(x, y)] for x, y in zip(a.alone, b.alone, strict=True)], b.alone_numbers)
        for a, b in zip(base.groups, other.groups, strict=True)
    ]
    found += [_count_pairs(SERVERS, Cell(length=base.length, batch=1, cache=AGAIN), of, [n]) for of, n in alone]
    found.append(_count_pairs(SCORES, Cell(length=base.length, batch=1, cache=NEW), scored))
    return _merge_counts(found)


def judge_setting(
    own: Sequence[Count],
    between: Sequence[Count] | None,
    base: Sequence[Count],
    *,
    tolerance: Tolerance,
    base_verdict: str = CONSISTENT,
    level: float = LEVEL,
) -> Judgement:
    """Test all effects of a setting together, and decide. `between` is None for the first setting, `base` are its own counts."""
    repeats = [c for c in (*own, *base) if c.effect == REPEAT]
    bound = compute_upper_bound(sum(c.differing for c in repeats), sum(c.prompts for c in repeats))
    chance = max(bound, MAX_CHANCE_SHARE)
    judged = [*own, *(between or ())]
    tests = {test: _compute_p_value(test, of, chance) for test, of in _list_tests(judged).items()}
    wrong = sorted({number for c in between or () for number in c.wrong})
    if (period := find_period(wrong)) is not None:
        tests[SERVERS, "period", period] = float(period) ** (2 - len(wrong))
    rejected = reject_by_holm(tests, level)
    found = period if (SERVERS, "period", period) in rejected else None
    findings = [_make_finding(effect, judged, tests, found) for effect in dict.fromkeys(test[0] for test in rejected)]
    findings.sort(key=lambda one: (SERVERS, SCORES, *OWN_EFFECTS).index(one.effect))
    compared = [c for c in judged if c.effect == SERVERS or between is None]
    coverage = sum(c.compared for c in compared) / max(sum(c.tokens for c in compared), 1)
    undecided = [] if findings else _find_doubts(judged, coverage, base_verdict)
    agreed = CONSISTENT if between is None else AGREE
    return Judgement(
        verdict=DIFFER if findings else UNDECIDED if undecided else agreed,
        findings=findings,
        undecided=undecided,
        counts=judged,
        detectable=_compute_detectable(judged),
        coverage=coverage,
        tolerance=tolerance.value,
        rounding=tolerance.rounding,
        spread=tolerance.spread,
        logprobs=any(c.with_logprobs for c in judged),
    )


def find_smallest(counts: Iterable[Count]) -> Count | None:
    """Return the count with the shortest prompts, then the smallest batch, that shows a difference; None if none does.

    Conditions under which at least half of the prompts differ come before those of single differences.
    """
    wrong = [c for c in counts if c.real]
    clear = [c for c in wrong if _is_shown(c)] or wrong
    return min(clear, key=lambda c: (c.cell.length, c.cell.batch, CACHES.index(c.cell.cache)), default=None)


def find_period(numbers: Sequence[int]) -> int | None:
    """Return k if every k-th request is wrong, from the places of some wrong requests; None if there is no such k > 1."""
    if len(numbers) < MIN_PERIODIC:
        return None
    step = math.gcd(*(b - a for a, b in itertools.pairwise(numbers)))
    return step if step > 1 else None


def _pair_repeats(group: GroupAnswers) -> list[list[tuple[Answer, Answer]]]:
    return [list(itertools.pairwise(of)) for of in zip(*group.rounds[1:], strict=True)]


def _pair_cache(group: GroupAnswers) -> list[list[tuple[Answer, Answer]]]:
    return [[(first, later) for later in of] for first, *of in zip(*group.rounds, strict=True)]


def _pair_batch(group: GroupAnswers) -> list[list[tuple[Answer, Answer]]]:
    rounds = zip(*group.rounds[1:], strict=True)
    return [[(later, alone) for later in of] for of, alone in zip(rounds, group.alone, strict=False)]


OWN_PAIRS: dict[str, Callable[[GroupAnswers], list[list[tuple[Answer, Answer]]]]] = {
    REPEAT: _pair_repeats,
    CACHE: _pair_cache,
    BATCH: _pair_batch,
}


def _compare_scores(a: ScoredPrompt, b: ScoredPrompt, tolerance: float) -> Pair:
    """Compare the log-probabilities of a prompt's tokens."""
    drift = float(np.mean(np.abs(np.subtract(a.first, b.first))))
    kind = DRIFT if drift > tolerance else SAME
    return Pair(kind=kind, drift=drift, compared=len(a.first), tokens=len(a.first))


def _count_pairs(
    effect: str, cell: Cell, prompts: Sequence[Sequence[Pair]], numbers: Sequence[Sequence[int]] = ()
) -> Count:
    """Count the pairs of each prompt. `numbers`: places of the requests, [pair][prompt]."""
    pairs = [pair for of in prompts for pair in of]
    wrong = [
        numbers[i][prompt]
        for prompt, of in enumerate(prompts)
        for i, pair in enumerate(of)
        if numbers and cell.batch == 1 and pair.is_real
    ]
    return Count(
        effect=effect,
        cell=cell,
        **tally_pairs(prompts),
        with_logprobs=sum(pair.drift is not None or pair.gap is not None for pair in pairs),
        example=next((pair for pair in pairs if pair.is_real), None),
        wrong=wrong,
        gaps=[round(pair.gap, 4) for pair in pairs if pair.gap is not None],
        drifts=[round(pair.drift, 4) for pair in pairs if pair.drift is not None],
    )


def _merge_counts(counts: Iterable[Count]) -> list[Count]:
    """Return the counts, with one for each effect and cell; those without pairs are left out."""
    found: dict[tuple[str, Cell], Count] = {}
    for c in counts:
        if not c.pairs:
            continue
        old = found.get((c.effect, c.cell))
        found[c.effect, c.cell] = c if old is None else _add_counts(old, c)
    return list(found.values())


def _add_counts(a: Count, b: Count) -> Count:
    names = (
        "prompts",
        "pairs",
        "near_ties",
        "outliers",
        "real",
        "unknown",
        "differing",
        "compared",
        "tokens",
        "with_logprobs",
    )
    sums = {name: getattr(a, name) + getattr(b, name) for name in names}
    lists = {name: [*getattr(a, name), *getattr(b, name)] for name in ("wrong", "gaps", "drifts")}
    return msgspec.structs.replace(a, **sums, **lists, example=a.example or b.example)


def _list_tests(counts: Sequence[Count]) -> dict[Test, list[Count]]:
    """Return the counts of each test. Repeats are tested only over all prompts, as they give the share of chance."""
    found: dict[Test, list[Count]] = {}
    for c in counts:
        keys: list[Test] = [(c.effect, "all", None)]
        if c.effect != REPEAT:
            keys += [(c.effect, name, getattr(c.cell, name)) for name in ("length", "batch", "cache")]
            keys.append((c.effect, "cell", c.cell))
        for key in keys:
            found.setdefault(key, []).append(c)
    return found


def _compute_p_value(test: Test, counts: Sequence[Count], chance: float) -> float:
    differing, prompts = sum(c.differing for c in counts), sum(c.prompts for c in counts)
    share = {REPEAT: MAX_CHANCE_SHARE, SCORES: 2 * MAX_CHANCE_SHARE}.get(test[0], min(2 * chance, 1.0))
    return compute_tail(differing, prompts, share)


def _is_shown(c: Count) -> bool:
    return c.differing > 0 and 2 * c.differing >= c.prompts


def _make_finding(effect: str, counts: Sequence[Count], tests: dict[Test, float], period: int | None) -> Finding:
    of = [c for c in counts if c.effect == effect]
    smallest = find_smallest(of)
    assert smallest is not None
    assert smallest.example is not None
    shown = [] if period else [c.cell for c in of if _is_shown(c)]
    cells = [c.cell for c in of]
    lengths, batches = {c.length for c in shown}, {c.batch for c in shown}
    caches = [name for name in CACHES if any(c.cache == name for c in shown)]
    example = smallest.example
    return Finding(
        effect=effect,
        smallest=smallest.cell,
        differing=sum(c.differing for c in of),
        prompts=sum(c.prompts for c in of),
        lengths=sorted(lengths),
        batches=sorted(batches),
        caches=caches,
        clean_lengths=sorted({c.length for c in cells} - lengths),
        clean_batches=sorted({c.batch for c in cells} - batches),
        clean_caches=[name for name in CACHES if name not in caches and any(c.cache == name for c in cells)],
        first=None if example.kind == DRIFT or example.first is None else example.first + 1,
        gap=example.gap if example.kind != DRIFT else None,
        drift=example.drift,
        period=period,
        p=min(p for test, p in tests.items() if test[0] == effect),
    )


def _find_doubts(counts: Sequence[Count], coverage: float, base_verdict: str) -> list[str]:
    """Return why AGREE or CONSISTENT would claim more than was seen."""
    found = {
        BASE_DIFFERS: base_verdict != CONSISTENT,
        RARE: any(c.real for c in counts),
        MANY_OUTLIERS: sum(c.outliers for c in counts) > MAX_OUTLIER_SHARE * sum(c.pairs for c in counts),
        UNATTRIBUTED: any(c.unknown for c in counts),
        FEW_TOKENS: coverage < MIN_COVERAGE,
    }
    return [reason for reason, holds in found.items() if holds]


def _compute_detectable(counts: Sequence[Count]) -> Detectable:
    """Return the smallest shares that would have shown a difference in the effect that was seen least often."""
    compared = [c for c in counts if c.effect == SERVERS] or [c for c in counts if c.effect == CACHE]
    lengths = {c.cell.length for c in compared}
    return Detectable(
        prompts=compute_smallest_share([sum(c.prompts for c in compared)]),
        prompts_of_a_length=compute_smallest_share(
            sum(c.prompts for c in compared if c.cell.length == length) for length in lengths
        ),
        tokens=compute_smallest_share([sum(c.compared for c in compared)]),
    )
