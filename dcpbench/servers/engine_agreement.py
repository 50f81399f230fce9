"""Judge whether an engine's settings give the same greedy answers, from the answers of edge_answers.py. No I/O.

Each setting is judged by itself first: repeated requests, prefix-cache hits against misses, and answers in a batch against
answers alone. Then its answers are compared with those of the first setting under the same conditions. Pairs of answers are classified
as in agreement.py, by the limits that follow from the rounding of the first setting (answer_noise.py). Each effect is tested over all
prompts, over those of each length, each size of batch and each state of the prefix cache, and for each combination (exact binomial tests
against the share that chance or rounding may cause; Holm): a fault that depends on such a condition shows there. All tests of a whole
comparison together give a false alarm with a probability of at most exact_tests.LEVEL.

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

from dcpbench.servers.answer_noise import (
    DRIFT_SIZE,
    GAP,
    MAX_CHANCE_SHARE,
    REAL,
    Limits,
    ShareTest,
    choose_test,
    compute_share_tests,
    measure_sizes,
    reject_tests,
)
from dcpbench.servers.answer_pairs import (
    BATCH,
    CACHE,
    DRIFT,
    MIN_DRIFT_TOKENS,
    REPEAT,
    SAME,
    SERVERS,
    Pair,
    tally_pairs,
)
from dcpbench.servers.answer_verdict import (
    AGREE,
    CONSISTENT,
    DIFFER,
    UNDECIDED,
    Detectable,
    compute_detectable,
    compute_mean_compared,
    find_doubts,
)
from dcpbench.servers.edge_answers import AGAIN, CACHES, NEW, SHARED, Cell
from dcpbench.servers.exact_tests import LEVEL, compute_tail, compute_upper_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dcpbench.servers.answer_noise import Sizes
    from dcpbench.servers.answer_pairs import Answer, ScoredPrompt
    from dcpbench.servers.edge_answers import GroupAnswers, LengthAnswers

    Test = tuple[str, str, object, ShareTest]  # effect, dimension and its value, and the limit

SCORES = "scores"  # effect: log-probabilities of the tokens of a prompt
OWN_EFFECTS = (REPEAT, CACHE, BATCH)
BASE_DIFFERS = "base differs"  # further reason for no verdict
MIN_PERIODIC = 4  # wrong requests from which a period is derived
MIN_SHOWN, MIN_SHOWN_SHARE = 2, 0.25  # prompts, and their share, that differ under conditions which show a difference


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of answers of one effect under the same conditions."""

    effect: str
    cell: Cell
    prompts: int
    pairs: int
    near_ties: int = 0
    outliers: int = 0  # pairs that differ more than the rounding that was seen, and less than what it explains
    real: int = 0  # pairs that differ beyond rounding
    unknown: int = 0
    differing: int = 0  # prompts of which at least half of the pairs are real
    compared: int = 0  # tokens
    tokens: int = 0
    with_logprobs: int = 0  # pairs of which log-probabilities were compared
    example: Pair | None = None  # the first real pair; without any, the one with the largest gap or drift
    wrong: list[int] = []  # places of the requests of real pairs that were sent alone, among those of the server
    gaps: list[float] = []  # of each prompt: at least half of its pairs are so far apart where they part; 0: none parts
    drifts: list[float] = []  # of each prompt: at least half of its pairs drift so much


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """An effect in which a setting differs beyond chance, and the smallest conditions that show it."""

    effect: str
    smallest: Cell
    differing: int  # prompts under all conditions that exceed the limit of `test`
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
    test: ShareTest = REAL  # that shows it


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one setting."""

    verdict: str
    findings: list[Finding]
    undecided: list[str]  # reasons why no verdict is possible
    counts: list[Count]
    detectable: Detectable
    coverage: float  # share of tokens that were compared
    mean_compared: float  # tokens of an answer
    limits: Limits  # what rounding explains
    logprobs: bool  # whether log-probabilities were compared


def measure_length_sizes(answers: LengthAnswers) -> Sizes:
    """Return how far the answers of one server to prompts of one length are apart."""
    return measure_sizes(
        {effect: [of for g in answers.groups for of in pairs_of(g)] for effect, pairs_of in OWN_PAIRS.items()}
    )


def count_own(answers: LengthAnswers, limits: Limits) -> list[Count]:
    """Compare the answers of one server with each other."""
    found = []
    for group in answers.groups:
        cell = Cell(length=answers.length, batch=group.batch, cache=AGAIN)
        for effect, pairs_of in OWN_PAIRS.items():
            pairs = [[limits.compare_pair(x, y) for x, y in of] for of in pairs_of(group)]
            found.append(_count_pairs(effect, cell, pairs, limits))
    return _merge_counts(found)


def count_between(base: LengthAnswers, other: LengthAnswers, limits: Limits) -> list[Count]:
    """Compare the answers of two servers under the same conditions."""
    found = []
    compare = limits.compare_pair
    for a, b in zip(base.groups, other.groups, strict=True):
        make_cell = functools.partial(Cell, length=base.length, batch=b.batch)
        first = [[compare(x, y)] for x, y in zip(a.rounds[0], b.rounds[0], strict=True)]
        found.append(_count_pairs(SERVERS, make_cell(cache=SHARED if b.shared else NEW), first, limits, b.numbers[:1]))
        later = [
            [compare(x, y) for x, y in zip(of_a, of_b, strict=True)]
            for of_a, of_b in zip(zip(*a.rounds[1:], strict=True), zip(*b.rounds[1:], strict=True), strict=True)
        ]
        found.append(_count_pairs(SERVERS, make_cell(cache=AGAIN), later, limits, b.numbers[1:]))
    scored = [[_compare_scores(x, y, limits)] for x, y in zip(base.scored, other.scored, strict=False)]
    alone = [
        ([[compare(x, y)] for x, y in zip(a.alone, b.alone, strict=True)], b.alone_numbers)
        for a, b in zip(base.groups, other.groups, strict=True)
    ]
    found += [_count_pairs(SERVERS, Cell(length=base.length, batch=1, cache=AGAIN), of, limits, [n]) for of, n in alone]
    found.append(_count_pairs(SCORES, Cell(length=base.length, batch=1, cache=NEW), scored, limits))
    return _merge_counts(found)


def judge_setting(
    own: Sequence[Count],
    between: Sequence[Count] | None,
    base: Sequence[Count],
    *,
    limits: Limits,
    base_verdict: str = CONSISTENT,
    level: float = LEVEL,
) -> Judgement:
    """Test all effects of a setting together, and decide. `between` is None for the first setting, `base` are its own counts."""
    repeats = [c for c in (*own, *base) if c.effect == REPEAT]
    bound = compute_upper_bound(sum(c.differing for c in repeats), sum(c.prompts for c in repeats))
    chance = max(bound, MAX_CHANCE_SHARE)
    judged = [*own, *(between or ())]
    tests = _compute_p_values(judged, chance, limits)
    wrong = sorted({number for c in between or () for number in c.wrong})
    periodic: Test | None = None
    if (period := find_period(wrong)) is not None:
        periodic = (SERVERS, "period", period, REAL)
        tests[periodic] = float(period) ** (2 - len(wrong))
    rejected = reject_tests(tests, level, lambda test: test[-1])
    found = period if periodic in rejected else None
    effects = dict.fromkeys(test[0] for test in rejected)
    findings = [_make_finding(effect, judged, tests, rejected, found, limits) for effect in effects]
    findings.sort(key=lambda one: (SERVERS, SCORES, *OWN_EFFECTS).index(one.effect))
    compared = [c for c in judged if c.effect == SERVERS or between is None]
    coverage = sum(c.compared for c in compared) / max(sum(c.tokens for c in compared), 1)
    undecided = [] if findings else _list_doubts(judged, compared, coverage, base_verdict, limits)
    agreed = CONSISTENT if between is None else AGREE
    return Judgement(
        verdict=DIFFER if findings else UNDECIDED if undecided else agreed,
        findings=findings,
        undecided=undecided,
        counts=judged,
        detectable=_compute_detectable(judged, limits, len(tests)),
        coverage=coverage,
        mean_compared=compute_mean_compared(compared),
        limits=limits,
        logprobs=any(c.with_logprobs for c in judged),
    )


def find_smallest(counts: Iterable[Count], test: ShareTest = REAL, limits: Limits | None = None) -> Count | None:
    """Return the count with the shortest prompts, then the smallest batch, that shows a difference; None if none does.

    Conditions under which most prompts differ come before those of single differences.
    """
    limits = limits or Limits()
    counts = list(counts)
    wrong = [c for c in counts if _count_differing(c, test, limits) or (test == REAL and c.real)]
    clear = [c for c in wrong if _is_shown(c, test, limits)] or wrong
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


def _compare_scores(a: ScoredPrompt, b: ScoredPrompt, limits: Limits) -> Pair:
    """Compare the log-probabilities of a prompt's tokens."""
    drift = float(np.mean(np.abs(np.subtract(a.first, b.first))))
    kind = DRIFT if drift > limits.scores and len(a.first) >= MIN_DRIFT_TOKENS else SAME
    return Pair(kind=kind, drift=drift, compared=len(a.first), tokens=len(a.first))


def _count_pairs(
    effect: str,
    cell: Cell,
    prompts: Sequence[Sequence[Pair]],
    limits: Limits,
    numbers: Sequence[Sequence[int]] = (),
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
        example=max(pairs, key=lambda pair: _rank_example(pair, limits), default=None),
        wrong=wrong,
    )


def _rank_example(pair: Pair, limits: Limits) -> tuple[bool, float]:
    """Return the rank of a pair as an example: all real ones are equal, others rank by their size."""
    if pair.is_real:
        return True, 0.0
    gap, drift = limits.get_limit(GAP), limits.get_limit(DRIFT_SIZE)
    return False, max((pair.gap or 0.0) / gap if gap else 0.0, pair.judged_drift / drift if drift else 0.0)


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
    example = b.example if b.real and not a.real else a.example
    return msgspec.structs.replace(a, **sums, **lists, example=example)


def _group_tested(counts: Sequence[Count]) -> dict[tuple[str, str, object], list[Count]]:
    """Return the counts of each effect, dimension and value. Repeats are tested only over all prompts: they give the share of chance."""
    found: dict[tuple[str, str, object], list[Count]] = {}
    for c in counts:
        keys: list[tuple[str, str, object]] = [(c.effect, "all", None)]
        if c.effect != REPEAT:
            keys += [(c.effect, name, getattr(c.cell, name)) for name in ("length", "batch", "cache")]
            keys.append((c.effect, "cell", c.cell))
        for key in keys:
            found.setdefault(key, []).append(c)
    return found


def _compute_p_values(counts: Sequence[Count], chance: float, limits: Limits) -> dict[Test, float]:
    """Return the p value of each test."""
    tests: dict[Test, float] = {}
    for (effect, name, value), some in _group_tested(counts).items():
        differing, prompts = sum(c.differing for c in some), sum(c.prompts for c in some)
        share = {REPEAT: MAX_CHANCE_SHARE, SCORES: 2 * MAX_CHANCE_SHARE}.get(effect, min(2 * chance, 1.0))
        tests[effect, name, value, REAL] = compute_tail(differing, prompts, share)
        if effect == SCORES:
            continue
        found = compute_share_tests(some, limits, chance if effect != REPEAT else 0.0)
        tests |= {(effect, name, value, test): p for test, p in found.items()}
    return tests


def _count_differing(c: Count, test: ShareTest, limits: Limits) -> int:
    """Return the prompts that exceed the limit of a test."""
    return c.differing if test == REAL else test.count_prompts([c], limits)


def _is_shown(c: Count, test: ShareTest, limits: Limits) -> bool:
    """Return whether at least half of the prompts differ, or some where answers often part before the fault."""
    differing = _count_differing(c, test, limits)
    several = test == REAL and differing >= max(MIN_SHOWN, MIN_SHOWN_SHARE * c.prompts)
    return 2 * differing >= c.prompts > 0 or several


def _make_finding(
    effect: str,
    counts: Sequence[Count],
    tests: dict[Test, float],
    rejected: Iterable[Test],
    period: int | None,
    limits: Limits,
) -> Finding:
    mine = {test: tests[test] for test in rejected if test[0] == effect}
    stated = choose_test(mine, lambda test: test[-1])
    of = [c for c in counts if c.effect == effect]
    showing = of if stated == REAL else _select_conditions(of, mine)
    smallest = find_smallest(showing, stated, limits)
    assert smallest is not None
    assert smallest.example is not None
    shown = [] if period else [c.cell for c in showing if _is_shown(c, stated, limits)]
    cells = [c.cell for c in of]
    lengths, batches = {c.length for c in shown}, {c.batch for c in shown}
    caches = [name for name in CACHES if any(c.cache == name for c in shown)]
    example = smallest.example
    drifts = example.kind == DRIFT or stated.size == DRIFT_SIZE
    return Finding(
        effect=effect,
        smallest=smallest.cell,
        differing=sum(_count_differing(c, stated, limits) for c in of),
        prompts=sum(c.prompts for c in of),
        lengths=sorted(lengths),
        batches=sorted(batches),
        caches=caches,
        clean_lengths=sorted({c.length for c in cells} - lengths),
        clean_batches=sorted({c.batch for c in cells} - batches),
        clean_caches=[name for name in CACHES if name not in caches and any(c.cache == name for c in cells)],
        first=None if drifts or example.first is None else example.first + 1,
        gap=None if drifts else example.gap,
        drift=example.drift,
        period=period,
        p=min(p for test, p in tests.items() if test[0] == effect),
        test=stated,
    )


def _select_conditions(counts: Sequence[Count], rejected: Mapping[Test, float]) -> Sequence[Count]:
    """Return the counts with the lengths, the batch sizes or the cache states that differ: whichever of these is most significant."""
    found = {test: p for test, p in rejected.items() if test[1] in ("length", "batch", "cache")}
    if not found:
        return counts
    name = min(found, key=lambda test: found[test])[1]
    values = {test[2] for test in found if test[1] == name}
    return [c for c in counts if getattr(c.cell, name) in values]


def _list_doubts(
    counts: Sequence[Count], compared: Sequence[Count], coverage: float, base_verdict: str, limits: Limits
) -> list[str]:
    """Return why AGREE or CONSISTENT would claim more than was seen."""
    found = {BASE_DIFFERS: base_verdict != CONSISTENT} | find_doubts(counts, compared, coverage, limits)
    return [reason for reason, holds in found.items() if holds]


def _compute_detectable(counts: Sequence[Count], limits: Limits, tests: int) -> Detectable:
    compared = [c for c in counts if c.effect == SERVERS] or [c for c in counts if c.effect == CACHE]
    by_length: dict[int, int] = {}
    for c in compared:
        by_length[c.cell.length] = by_length.get(c.cell.length, 0) + c.prompts
    prompts, tokens = sum(c.prompts for c in compared), sum(c.compared for c in compared)
    return compute_detectable([prompts], [tokens], by_length.values(), limits, tests)
