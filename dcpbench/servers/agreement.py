"""Judge whether servers give the same greedy answers, from several answers of each to the same prompts. No I/O.

Every prompt is answered by each server several times (conditions.py): when it is new, again when a prefix cache may hold it,
alone, and in a batch with other prompts. Four effects are judged, the first three for each server by itself:

    repeat    two answers under the same conditions
    cache     the first answer against later ones, for which a prefix cache may hold the prompt
    batch     answers alone against answers in a batch
    servers   answers of A against answers of B under the same conditions

Pairs of answers are classified as answer_pairs.py describes, by the limits of answer_noise.py. A prompt counts as differing in an
effect if at least half of its pairs are real. The number of such prompts is tested (exact binomial, one-sided) against the share that
chance may cause: the upper 95 % bound (Clopper-Pearson) of the share among repeats, doubled, since by Markov's inequality at least half
of a prompt's pairs are real with at most twice the probability of one. The repeats of A and B are compared with each other (Fisher's
exact test); those of a single server are tested against MAX_CHANCE_SHARE. Smaller differences of many prompts are tested against the
distribution of the rounding (answer_noise.compute_share_tests). All tests together give a false alarm with a probability of at most
LEVEL (Holm).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.errors import UsageError
from dcpbench.servers.answer_noise import (
    MAX_CHANCE_SHARE,
    REAL,
    Limits,
    ShareTest,
    choose_test,
    compute_limits,
    compute_share_tests,
    measure_sizes,
    reject_tests,
)
from dcpbench.servers.answer_pairs import (
    BATCH,
    CACHE,
    EFFECTS,
    NEAR_TIE,
    REPEAT,
    SERVERS,
    TOKEN,
    UNKNOWN,
    Answer,
    tally_pairs,
)
from dcpbench.servers.answer_verdict import (
    AGREE,
    CONSISTENT,
    DIFFER,
    RARE,
    UNDECIDED,
    Detectable,
    compute_detectable,
    compute_mean_compared,
    find_doubts,
)
from dcpbench.servers.exact_tests import LEVEL, compute_fisher, compute_tail, compute_upper_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dcpbench.servers.answer_noise import Sizes
    from dcpbench.servers.answer_pairs import Pair, ScoredPrompt

    Key = tuple[str, str]  # effect and server
    Test = tuple[Key, int, ShareTest]  # with the place of a length, or ALL

MIN_ROUNDS = 2  # minimum number of rounds of answers, alone and in a batch, for repetition
NOISY = "noisy"  # reason for no verdict: servers differ from themselves when a request is repeated
ALL = -1  # place of all lengths together


class PromptAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one server to one prompt."""

    first: Answer  # while the prompt was new
    first_in_batch: bool
    alone: list[Answer]
    batch: list[Answer]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """An effect at one length of prompts."""

    effect: str
    server: str  # `A`, `B`, or `AB` for the effect `servers`
    context: int  # tokens of a prompt
    prompts: int
    pairs: int
    near_ties: int = 0  # pairs
    outliers: int = 0  # pairs
    real: int = 0  # pairs
    unknown: int = 0  # pairs
    differing: int = 0  # prompts with at least half of the pairs real
    first: int | None = None  # earliest token, from 1, of a difference that is no near-tie
    gap: float | None = None  # largest gap of a near-tie
    drift: float | None = None  # mean |difference of log-probabilities|
    compared: int = 0  # tokens
    tokens: int = 0
    gaps: list[float] = []  # of each prompt: at least half of its pairs are so far apart where they part; 0: none parts
    drifts: list[float] = []  # of each prompt: at least half of its pairs drift so much
    p: float = 1.0
    differs: bool = False


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """An effect in which a server differs beyond chance."""

    effect: str
    server: str
    contexts: list[int]  # lengths of prompts at which it does by themselves; empty: over all lengths together
    differing: int  # prompts at these lengths
    prompts: int
    first: int | None  # earliest token, from 1, at the first of these lengths
    p: float
    test: ShareTest = REAL  # that shows it


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A judged comparison."""

    verdict: str
    servers: int
    limits: Limits  # what rounding explains
    comparisons: list[Comparison]
    findings: list[Finding]  # differences
    undecided: list[str]  # reasons why no verdict is possible, such as `rare`
    detectable: Detectable
    coverage: float  # share of tokens that were compared
    mean_compared: float  # tokens of an answer
    logprobs: bool  # whether log-probabilities were compared

    def has_difference_at(self, context: int) -> bool:
        """Return whether anything differs at this length."""
        return any(c.differs for c in self.comparisons if c.context == context)


def judge_answers(
    answers: Mapping[int, Sequence[Sequence[PromptAnswers]]], scored: Sequence[ScoredPrompt], tolerance: float
) -> Report:
    """Judge the answers of one or two servers to prompts of each length, {length: [server][prompt]}."""
    servers = max((len(of) for of in answers.values()), default=0)
    sizes = [measure_server_sizes([of[i] for of in answers.values()]) for i in range(servers)]
    limits = compute_limits(tolerance, sizes, scored, scored)
    return make_report([c for n, of in answers.items() for c in compare_length(n, of, limits)], limits)


def measure_server_sizes(lengths: Sequence[Sequence[PromptAnswers]]) -> Sizes:
    """Return how far the answers of one server are apart, [length][prompt]."""
    prompts = [one for answers in lengths for one in answers]
    return measure_sizes({effect: [pairs_of(one) for one in prompts] for effect, pairs_of in OWN_PAIRS.items()})


def compare_length(
    context: int, servers: Sequence[Sequence[PromptAnswers]], limits: Limits | None = None
) -> list[Comparison]:
    """Compare the answers of one or two servers to prompts of one length, [server][prompt]; not yet judged."""
    compare = (limits or Limits()).compare_pair
    found = []
    for name, answers in zip("AB", servers, strict=False):
        for effect, pairs_of in OWN_PAIRS.items():
            pairs = [[compare(x, y) for x, y in pairs_of(one)] for one in answers]
            found.append(_summarize_pairs(effect, name, context, pairs))
    if len(servers) > 1:
        pairs = [[compare(x, y) for x, y in _pair_servers(*both)] for both in zip(*servers, strict=True)]
        found.append(_summarize_pairs(SERVERS, "AB", context, pairs))
    return found


def make_report(comparisons: Sequence[Comparison], limits: Limits | None = None) -> Report:
    """Test all comparisons together, and decide."""
    limits = limits or Limits()
    groups = _group_comparisons(comparisons)
    tests = _compute_p_values(groups, compute_chance(comparisons), limits)
    rejected = reject_tests(tests, LEVEL, lambda test: test[-1])
    findings = [
        _make_finding(groups[key], rejected, key, tests, limits) for key in groups if any(t[0] == key for t in rejected)
    ]
    judged = [
        msgspec.structs.replace(
            c,
            p=min((p for test, p in tests.items() if test[:2] == (key, i)), default=1.0),
            differs=any(test[:2] == (key, i) for test in rejected),
        )
        for key, of in groups.items()
        for i, c in enumerate(of)
    ]
    judged.sort(key=lambda c: (c.context, c.server, EFFECTS.index(c.effect)))
    two = any(c.effect == SERVERS for c in judged)
    main = [c for c in judged if c.effect == SERVERS or not two]
    coverage = _compute_coverage(main)
    undecided = [] if findings else _list_doubts(judged, main, coverage, limits)
    agreed = AGREE if two else CONSISTENT
    return Report(
        verdict=DIFFER if findings else UNDECIDED if undecided else agreed,
        servers=1 + two,
        limits=limits,
        comparisons=judged,
        findings=findings,
        undecided=undecided,
        detectable=_compute_detectable(judged, limits, len(tests)),
        coverage=coverage,
        mean_compared=compute_mean_compared(main),
        logprobs=any(c.drift is not None for c in judged),
    )


def compute_chance(comparisons: Iterable[Comparison]) -> float:
    """Return the share of prompts that may differ by chance: the upper bound of the share among repeats."""
    repeats = [c for c in comparisons if c.effect == REPEAT]
    return max(
        compute_upper_bound(sum(c.differing for c in repeats), sum(c.prompts for c in repeats)),
        MAX_CHANCE_SHARE,
    )


def find_next_length(report: Report, apart: int) -> int | None:
    """Return a length of prompts between the last that agrees and the first that differs; None if they are `apart` at most."""
    contexts = sorted({c.context for c in report.comparisons})
    first = next((context for context in contexts if report.has_difference_at(context)), None)
    if first is None:
        return None
    last = max((context for context in contexts if context < first), default=0)
    return (last + first) // 2 if last and first - last > apart else None


def check_decides(prompts: int, rounds: int, lengths: int, servers: int) -> None:
    """Raise UsageError if no difference, however large, could be distinguished from chance by so few answers."""
    check_rounds(rounds)
    if not _can_decide(prompts, lengths, servers):
        enough = next(n for n in range(prompts, 1000) if _can_decide(n, lengths, servers))
        raise UsageError(
            f"with --num-prompts {prompts} no difference could be distinguished from chance; use --num-prompts {enough} or more."
        )


def check_rounds(rounds: int) -> None:
    """Raise UsageError for so few rounds that no request is repeated under the same conditions."""
    if rounds < MIN_ROUNDS:
        raise UsageError(f"--repeats {rounds} does not repeat anything; use --repeats {MIN_ROUNDS} or more.")


def _compute_detectable(comparisons: Sequence[Comparison], limits: Limits, tests: int) -> Detectable:
    groups = _group_comparisons(comparisons).values()
    lengths = [c.prompts for c in comparisons]
    prompts = [sum(c.prompts for c in of) for of in groups]
    return compute_detectable(prompts, [sum(c.compared for c in of) for of in groups], lengths, limits, tests)


def _pair_repeats(one: PromptAnswers) -> list[tuple[Answer, Answer]]:
    return list(zip(one.alone, one.alone[1:], strict=False))


def _pair_cache(one: PromptAnswers) -> list[tuple[Answer, Answer]]:
    return [(one.first, later) for later in (one.batch if one.first_in_batch else one.alone)]


def _pair_batch(one: PromptAnswers) -> list[tuple[Answer, Answer]]:
    return list(zip(one.alone, one.batch, strict=False))


def _pair_servers(a: PromptAnswers, b: PromptAnswers) -> list[tuple[Answer, Answer]]:
    return [
        (a.first, b.first),
        *zip(a.alone, b.alone, strict=False),
        *zip(a.batch, b.batch, strict=False),
    ]


OWN_PAIRS: dict[str, Callable[[PromptAnswers], list[tuple[Answer, Answer]]]] = {
    REPEAT: _pair_repeats,
    CACHE: _pair_cache,
    BATCH: _pair_batch,
}


def _summarize_pairs(effect: str, server: str, context: int, prompts: Sequence[Sequence[Pair]]) -> Comparison:
    pairs = [pair for of in prompts for pair in of]
    drifts = [pair.drift for pair in pairs if pair.drift is not None]
    return Comparison(
        effect=effect,
        server=server,
        context=context,
        **tally_pairs(prompts),
        first=min(
            (pair.first + 1 for pair in pairs if pair.kind in (TOKEN, UNKNOWN) and pair.first is not None), default=None
        ),
        gap=max((pair.gap for pair in pairs if pair.kind == NEAR_TIE and pair.gap is not None), default=None),
        drift=float(np.mean(drifts)) if drifts else None,
    )


def _group_comparisons(comparisons: Iterable[Comparison]) -> dict[Key, list[Comparison]]:
    """Return the comparisons of each effect of each server, by length."""
    found: dict[Key, list[Comparison]] = {}
    for c in sorted(comparisons, key=lambda c: c.context):
        found.setdefault((c.effect, c.server), []).append(c)
    return found


def _compute_p_values(groups: dict[Key, list[Comparison]], chance: float, limits: Limits) -> dict[Test, float]:
    """Return the p value of each test: an effect of a server, at one length or at all, against one limit."""
    tests: dict[Test, float] = {}
    for key, of in groups.items():
        for place in _list_tested(groups, key):
            some = of if place == ALL else [of[place]]
            tests[key, place, REAL] = _compute_real_p(groups, key, some, chance)
            if key[0] == REPEAT:
                continue
            found = compute_share_tests(some, limits, chance)
            tests |= {(key, place, test): p for test, p in found.items()}
    return tests


def _list_tested(groups: dict[Key, list[Comparison]], key: Key) -> list[int]:
    """Return the places of an effect's lengths at which real differences are tested, and ALL."""
    if key[0] != REPEAT:
        return [*range(len(groups[key])), ALL]
    other = groups.get((REPEAT, "A" if key[1] == "B" else "B"))
    if other is None:
        return [ALL]
    mine, theirs = (n / of for n, of in (_count_differing(groups[key]), _count_differing(other)))
    return [ALL] if (mine, key[1]) > (theirs, "A" if key[1] == "B" else "B") else []


def _compute_real_p(groups: dict[Key, list[Comparison]], key: Key, some: Sequence[Comparison], chance: float) -> float:
    differing, prompts = _count_differing(some)
    if key[0] != REPEAT:
        return compute_tail(differing, prompts, min(2 * chance, 1.0))
    other = groups.get((REPEAT, "A" if key[1] == "B" else "B"))
    if other is None:
        return compute_tail(differing, prompts, MAX_CHANCE_SHARE)
    return compute_fisher(differing, prompts, *_count_differing(other))


def _count_differing(of: Iterable[Comparison]) -> tuple[int, int]:
    counts = [(c.differing, c.prompts) for c in of]
    return sum(n for n, _ in counts), sum(n for _, n in counts)


def _make_finding(
    of: Sequence[Comparison], rejected: set[Test], key: Key, tests: dict[Test, float], limits: Limits
) -> Finding:
    stated = choose_test({test: tests[test] for test in rejected if test[0] == key}, lambda test: test[-1])
    places = {place for k, place, test in rejected if k == key and test == stated}
    alone = [c for i, c in enumerate(of) if i in places]
    differing, prompts = _count_differing(alone or of)
    if stated != REAL:
        differing = stated.count_prompts(alone or of, limits)
    return Finding(
        effect=key[0],
        server=key[1],
        contexts=[c.context for c in alone],
        differing=differing,
        prompts=prompts,
        first=min((c.first for c in alone[:1] or of if c.first is not None), default=None),
        p=min(p for test, p in tests.items() if test[0] == key),
        test=stated,
    )


def _compute_coverage(comparisons: Sequence[Comparison]) -> float:
    tokens = sum(c.tokens for c in comparisons)
    return sum(c.compared for c in comparisons) / tokens if tokens else 0.0


def _list_doubts(
    comparisons: Sequence[Comparison], main: Sequence[Comparison], coverage: float, limits: Limits
) -> list[str]:
    """Return why AGREE or CONSISTENT would claim more than was seen."""
    repeats = _count_differing(c for c in comparisons if c.effect == REPEAT)
    noisy = compute_tail(*repeats, MAX_CHANCE_SHARE) <= LEVEL
    found = {NOISY: noisy} | find_doubts(comparisons, main, coverage, limits)
    found[RARE] &= not noisy
    return [reason for reason, holds in found.items() if holds]


def _can_decide(prompts: int, lengths: int, servers: int) -> bool:
    chance = max(compute_upper_bound(0, prompts * lengths * servers), MAX_CHANCE_SHARE)
    tests = (2 * servers + (servers > 1)) * (lengths + 1) + 1
    return compute_tail(prompts, prompts, min(2 * chance, 1.0)) <= LEVEL / 2 / tests
