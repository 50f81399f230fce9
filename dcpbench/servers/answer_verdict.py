"""Judge whether a server gives the same greedy answers as another one, from the counts of answer_counts.py. No I/O.

Each server is judged by itself first: repeated requests, prefix-cache hits against misses, and answers in a batch against answers alone.
Then its answers are compared with those of its reference under the same conditions. Each effect is tested over all prompts, over those
of each length, each size of batch and each state of the prefix cache, and for each combination: a fault that depends on such a condition
shows there. The number of differing prompts is tested (exact binomial, one-sided) against the share that chance may cause: the upper 95 %
bound (Clopper-Pearson) of the share among repeats, doubled, since by Markov's inequality at least half of a prompt's pairs are real with at
most twice the probability of one. Repeats are tested against MAX_CHANCE_SHARE. Smaller differences of many prompts are tested against the
distribution of the rounding (answer_noise.compute_share_tests). All tests of a whole comparison together give a false alarm with a
probability of at most exact_tests.LEVEL (Holm).

Requests that are sent alone have a known order. If m of them differ and all their places are equal modulo k, that has a probability of
k^(1 - m) by chance, for any of k values of k at most k^(2 - m): it is one more test, which finds a server that errs at every k-th request.
"""

from __future__ import annotations

import collections
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dcpbench.errors import UsageError
from dcpbench.servers.answer_counts import AGAIN, CACHES, OWN_PAIRS, Cell, Count
from dcpbench.servers.answer_noise import (
    DRIFT_SIZE,
    GAP,
    MAX_CHANCE_SHARE,
    REAL,
    Limits,
    ShareTest,
    compute_share_tests,
)
from dcpbench.servers.answer_pairs import BATCH, CACHE, DRIFT, REPEAT, SCORES, SERVERS
from dcpbench.servers.edge_lengths import MIN_SHARED, count_prompts
from dcpbench.servers.exact_tests import (
    LEVEL,
    compute_smallest_found_share,
    compute_smallest_share,
    compute_tail,
    compute_upper_bound,
    reject_by_holm,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

AGREE, CONSISTENT, DIFFER, UNDECIDED = "AGREE", "CONSISTENT", "DIFFER", "UNDECIDED"
RARE, UNATTRIBUTED, FEW_TOKENS = "rare", "unattributed", "few tokens"  # reasons for no verdict
TOO_WIDE, UNMEASURED, MANY_OUTLIERS = "too wide", "unmeasured", "many outliers"  # further ones, about rounding
BASE_DIFFERS = "base differs"  # further one: the reference has no clean verdict on its own answers
MIN_COVERAGE = 0.5  # share of tokens that have to be compared before answers part at near-ties, or
MIN_COMPARED = 3.0  # tokens of an answer: of the prefill, of a decode step, and of one that reads the cache of another
MAX_OUTLIER_SHARE = 0.05  # of pairs
MIN_PERIODIC = 4  # wrong requests from which a period is derived
MIN_SHOWN, MIN_SHOWN_SHARE = 2, 0.25  # prompts, and their share, that differ under conditions which show a difference
MIN_ROUNDS = 2  # minimum number of rounds in which prompts are sent again
CONDITIONS = ("length", "batch", "cache")  # fields of a cell


class Test(NamedTuple):
    """A test of an effect under a condition."""

    effect: str
    condition: str  # `all`, one of CONDITIONS, `cell` or `period`
    value: object  # of the condition
    limit: ShareTest


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """An effect in which a server differs beyond chance, and the smallest conditions that show it."""

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


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one server."""

    verdict: str
    findings: list[Finding]
    undecided: list[str]  # reasons why no verdict is possible
    counts: list[Count]
    detectable: Detectable
    coverage: float  # share of tokens that were compared
    mean_compared: float  # tokens of an answer
    limits: Limits  # what rounding explains
    logprobs: bool  # whether log-probabilities were compared

    @property
    def repeats_itself(self) -> bool:
        """Return whether the server's own answers agree, so that those of others can be compared with them."""
        own = all(finding.effect not in OWN_PAIRS for finding in self.findings)
        return own and self.verdict != UNDECIDED


def judge_counts(
    own: Sequence[Count],
    between: Sequence[Count] | None,
    base: Sequence[Count],
    *,
    limits: Limits,
    base_repeats: bool = True,
    level: float = LEVEL,
) -> Judgement:
    """Test all effects of a server together, and decide. `between` is None without a reference; `base` are the counts of the reference."""
    judged = [*own, *(between or ())]
    tests = _compute_p_values(judged, _compute_chance([*own, *base]), limits)
    wrong = sorted({number for c in between or () for number in c.wrong})
    if (period := find_period(wrong)) is not None:
        tests[Test(SERVERS, "period", period, REAL)] = float(period) ** (2 - len(wrong))
    rejected = _reject_tests(tests, level)
    findings = [
        _make_finding([c for c in judged if c.effect == effect], mine, limits)
        for effect in (SERVERS, SCORES, *OWN_PAIRS)
        if (mine := {test: p for test, p in rejected.items() if test.effect == effect})
    ]
    compared = [c for c in judged if c.effect == SERVERS or between is None]
    coverage = sum(c.compared for c in compared) / max(sum(c.tokens for c in compared), 1)
    mean_compared = sum(c.compared for c in compared) / max(sum(c.pairs for c in compared), 1)
    undecided = [] if findings else _list_doubts(judged, coverage, mean_compared, base_repeats, limits)
    agreed = CONSISTENT if between is None else AGREE
    return Judgement(
        verdict=DIFFER if findings else UNDECIDED if undecided else agreed,
        findings=findings,
        undecided=undecided,
        counts=judged,
        detectable=_compute_detectable(judged, limits, len(tests)),
        coverage=coverage,
        mean_compared=mean_compared,
        limits=limits,
        logprobs=any(c.with_logprobs for c in judged),
    )


def find_smallest(counts: Sequence[Count], test: ShareTest, limits: Limits) -> Count | None:
    """Return the count with the shortest prompts, then the smallest batch, that shows a difference; None if none does.

    Conditions under which most prompts differ come before those of single differences.
    """
    wrong = [c for c in counts if test.count_prompts([c], limits) or (test == REAL and c.real)]
    clear = [c for c in wrong if _is_shown(c, test, limits)] or wrong
    return min(clear, key=lambda c: (c.cell.length, c.cell.batch, CACHES.index(c.cell.cache)), default=None)


def find_period(numbers: Sequence[int]) -> int | None:
    """Return k if every k-th request is wrong, from the places of some wrong requests; None if there is no such k > 1."""
    if len(numbers) < MIN_PERIODIC:
        return None
    step = math.gcd(*(b - a for a, b in itertools.pairwise(numbers)))
    return step if step > 1 else None


def find_next_length(judgements: Iterable[Judgement], apart: int) -> int | None:
    """Return a length of prompts between the last that agrees and the first that differs; None if they are `apart` at most."""
    found = []
    for finding in (finding for judgement in judgements for finding in judgement.findings if finding.lengths):
        first = finding.lengths[0]
        last = max((length for length in finding.clean_lengths if length < first), default=0)
        if last and first - last > apart:
            found.append((last + first) // 2)
    return min(found, default=None)


def check_rounds(rounds: int) -> None:
    """Raise UsageError for so few rounds that no request is repeated under the same conditions."""
    if rounds < MIN_ROUNDS:
        raise UsageError(f"--repeats {rounds} does not repeat anything; use --repeats {MIN_ROUNDS} or more.")


def check_decides(prompts: int, lengths: Sequence[int], batches: Sequence[int], servers: int) -> None:
    """Raise UsageError if even an effect that is wrong for all prompts of one length could not be distinguished from chance."""
    if not _can_decide(prompts, lengths, batches, servers):
        enough = next(n for n in range(prompts, 1000) if _can_decide(n, lengths, batches, servers))
        raise UsageError(
            f"with --num-prompts {prompts} no difference could be distinguished from chance; use --num-prompts {enough} or more."
        )


def _can_decide(prompts: int, lengths: Sequence[int], batches: Sequence[int], servers: int) -> bool:
    counts = []
    for length, batch, effect in itertools.product(lengths, batches, (REPEAT, CACHE, BATCH)):
        groups = 2 if batch == 1 and length >= MIN_SHARED else 1
        pairs = prompts if effect == BATCH else groups * count_prompts(batch, prompts)
        if effect != BATCH or batch > 1:
            cell = Cell(length=length, batch=batch, cache=AGAIN)
            counts.append(Count(effect=effect, cell=cell, prompts=pairs, pairs=pairs))
    counts[-1] = msgspec.structs.replace(counts[-1], differing=counts[-1].prompts)
    return bool(_reject_tests(_compute_p_values(counts, _compute_chance(counts), Limits()), LEVEL / servers))


def _compute_chance(counts: Iterable[Count]) -> float:
    """Return the share of prompts that may differ by chance: the upper bound of the share among repeats."""
    repeats = [c for c in counts if c.effect == REPEAT]
    return max(
        compute_upper_bound(sum(c.differing for c in repeats), sum(c.prompts for c in repeats)), MAX_CHANCE_SHARE
    )


def _compute_p_values(counts: Sequence[Count], chance: float, limits: Limits) -> dict[Test, float]:
    """Return the p value of each test. Repeats are tested only over all prompts: they give the share of chance."""
    groups: dict[tuple[str, str, object], list[Count]] = {}
    for c in counts:
        conditions = [] if c.effect == REPEAT else [(name, getattr(c.cell, name)) for name in CONDITIONS]
        cell = [] if c.effect == REPEAT else [("cell", c.cell)]
        for name, value in [("all", None), *conditions, *cell]:
            groups.setdefault((c.effect, name, value), []).append(c)
    tests: dict[Test, float] = {}
    for (effect, name, value), some in groups.items():
        share = {REPEAT: MAX_CHANCE_SHARE, SCORES: 2 * MAX_CHANCE_SHARE}.get(effect, min(2 * chance, 1.0))
        differing, prompts = sum(c.differing for c in some), sum(c.prompts for c in some)
        tests[Test(effect, name, value, REAL)] = compute_tail(differing, prompts, share)
        if effect != SCORES:
            found = compute_share_tests(some, limits, chance if effect != REPEAT else 0.0)
            tests |= {Test(effect, name, value, limit): p for limit, p in found.items()}
    return tests


def _reject_tests(tests: Mapping[Test, float], level: float) -> dict[Test, float]:
    """Return the significant tests. Tests of real differences and of the distribution of the rounding have half of the level each."""
    real = {test: p for test, p in tests.items() if test.limit == REAL}
    others = {test: p for test, p in tests.items() if test.limit != REAL}
    rejected = reject_by_holm(real, level / 2) | reject_by_holm(others, level / 2)
    return {test: p for test, p in tests.items() if test in rejected}


def _is_shown(c: Count, test: ShareTest, limits: Limits) -> bool:
    """Return whether at least half of the prompts differ, or some where answers often part before the fault."""
    differing = test.count_prompts([c], limits)
    several = test == REAL and differing >= max(MIN_SHOWN, MIN_SHOWN_SHARE * c.prompts)
    return 2 * differing >= c.prompts > 0 or several


def _make_finding(counts: Sequence[Count], rejected: Mapping[Test, float], limits: Limits) -> Finding:
    """Return the finding on an effect, from its counts and its significant tests: a real one is stated before others."""
    real = [test for test in rejected if test.limit == REAL]
    stated = min(real or rejected, key=lambda test: rejected[test]).limit
    period = next((test.value for test in rejected if test.condition == "period" and isinstance(test.value, int)), None)
    showing = counts if stated == REAL else _select_conditions(counts, rejected)
    smallest = find_smallest(showing, stated, limits)
    assert smallest is not None
    example = smallest.example
    assert example is not None
    shown = [] if period else [c.cell for c in showing if _is_shown(c, stated, limits)]
    values = {name: {getattr(cell, name) for cell in shown} for name in CONDITIONS}
    clean = {name: {getattr(c.cell, name) for c in counts} - values[name] for name in CONDITIONS}
    drifts = example.kind == DRIFT or stated.size == DRIFT_SIZE
    return Finding(
        effect=smallest.effect,
        smallest=smallest.cell,
        differing=stated.count_prompts(counts, limits),
        prompts=sum(c.prompts for c in counts),
        lengths=sorted(values["length"]),
        batches=sorted(values["batch"]),
        caches=sorted(values["cache"], key=CACHES.index),
        clean_lengths=sorted(clean["length"]),
        clean_batches=sorted(clean["batch"]),
        clean_caches=sorted(clean["cache"], key=CACHES.index),
        first=None if drifts or example.first is None else example.first + 1,
        gap=None if drifts else example.gap,
        drift=example.drift,
        period=period,
        p=min(rejected.values()),
        test=stated,
    )


def _select_conditions(counts: Sequence[Count], rejected: Mapping[Test, float]) -> Sequence[Count]:
    """Return the counts with the lengths, the batch sizes or the cache states that differ: whichever of these is most significant."""
    found = [test for test in rejected if test.condition in CONDITIONS]
    if not found:
        return counts
    name = min(found, key=lambda test: rejected[test]).condition
    values = {test.value for test in found if test.condition == name}
    return [c for c in counts if getattr(c.cell, name) in values]


def _list_doubts(
    counts: Sequence[Count], coverage: float, mean_compared: float, base_repeats: bool, limits: Limits
) -> list[str]:
    """Return why AGREE or CONSISTENT would claim more than was seen."""
    outliers, pairs = sum(c.outliers for c in counts), sum(c.pairs for c in counts)
    found = {
        BASE_DIFFERS: not base_repeats,
        RARE: any(c.real for c in counts),
        TOO_WIDE: limits.is_too_wide,
        UNMEASURED: outliers > 0 and not limits.is_measured,
        MANY_OUTLIERS: outliers > MAX_OUTLIER_SHARE * pairs and limits.is_measured,
        UNATTRIBUTED: any(c.unknown for c in counts),
        FEW_TOKENS: coverage < MIN_COVERAGE and mean_compared < MIN_COMPARED,
    }
    return [reason for reason, holds in found.items() if holds]


def _compute_detectable(counts: Sequence[Count], limits: Limits, tests: int) -> Detectable:
    """Return the smallest differences that would have been found between servers; of a single server, in its prefix cache."""
    compared = [c for c in counts if c.effect == SERVERS] or [c for c in counts if c.effect == CACHE]
    by_length: collections.Counter[int] = collections.Counter()
    for c in compared:
        by_length[c.cell.length] += c.prompts
    prompts = by_length.total()
    seen = limits.get_limit if limits.is_measured else limits.get_explained  # unknown rounding lets nothing else agree
    shares = [
        compute_smallest_found_share(prompts, limits.get_typical_share(size, 0), LEVEL / max(tests, 1))
        for size in (GAP, DRIFT_SIZE)
    ]
    return Detectable(
        prompts=compute_smallest_share([prompts]),
        prompts_of_a_length=compute_smallest_share(by_length.values()),
        tokens=compute_smallest_share([sum(c.compared for c in compared)]),
        gap=seen(GAP),
        drift=seen(DRIFT_SIZE),
        typical_prompts=max(shares),
        typical_gap=limits.list_limits(GAP)[0],
        typical_drift=limits.list_limits(DRIFT_SIZE)[0],
    )
