"""Judge whether servers give the same greedy answers, from several answers of each to the same prompts. No I/O.

Every prompt is answered by each server several times (conditions.py): when it is new, again when a prefix cache may hold it,
alone, and in a batch with other prompts. Four effects are judged, the first three for each server by itself:

    repeat    two answers under the same conditions
    cache     the first answer against later ones, for which a prefix cache may hold the prompt
    batch     answers alone against answers in a batch
    servers   answers of A against answers of B under the same conditions

Two answers are compared up to the first token that differs, as later tokens follow from it. A pair of answers is

    same      if all tokens are equal
    near-tie  if each server that gives log-probabilities has both tokens within 2 × tolerance: rounding decided
    outlier   if a server has them further apart, within 2 × the limit of outliers (Tolerance)
    token     if a server has them still further apart: no rounding explains it
    drift     if log-probabilities of equal tokens are apart by more than the tolerance on average
    unknown   if no server's log-probabilities say how far apart the tokens were

`token` and `drift` are real differences. The tolerance of a length is the given one, or follows from the servers' own rounding
(compute_tolerance). A prompt counts as differing in an effect if at least half of its pairs are real.
The number of such prompts is tested (exact binomial, one-sided) against the share that chance may cause: the upper 95 % bound
(Clopper-Pearson) of the share among repeats, doubled, since by Markov's inequality at least half of a prompt's pairs are real with at
most twice the probability of one. The repeats of A and B are compared with each other (Fisher's exact test); those of a single
server are tested against MAX_CHANCE_SHARE. All tests together give a false alarm with a probability of at most LEVEL (Holm).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict, TypeVar

import msgspec
import numpy as np

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Key = tuple[str, str]  # effect and server
    Test = tuple[Key, int]  # and the place of a length among those of the effect, -1 for all lengths together

T = TypeVar("T")
LEVEL = 0.001  # probability of a false alarm in a whole comparison
CONFIDENCE = 0.95
MAX_CHANCE_SHARE = 0.01  # share of prompts in which a server may differ from itself by chance beyond rounding
TOLERANCE = 0.1  # natural logarithms: bf16 sums in another order move a log-probability by some hundredths
NOISE_FACTOR = 4.0  # a difference of this many times a server's own noise is beyond rounding
MAX_NOISE_SHARE = 0.25  # largest tolerance, as a share of the standard deviation of log-probabilities
OUTLIER_FACTOR = 3.0  # limit of outliers, as a multiple of a tolerance that follows from rounding
MAX_OUTLIER_SHARE = 0.05  # of pairs
MIN_DRIFT_TOKENS = 4  # equal tokens over which a mean difference of log-probabilities is judged
MIN_COVERAGE = 0.5  # share of tokens that have to be compared before answers part at near-ties
MIN_ROUNDS = 2  # minimum number of rounds of answers, alone and in a batch, for repetition
MAX_HALVINGS = 10  # lengths that may be added while the first that differs is looked for
AGREE, CONSISTENT, DIFFER, UNDECIDED = "AGREE", "CONSISTENT", "DIFFER", "UNDECIDED"
REPEAT, CACHE, BATCH, SERVERS = EFFECTS = ("repeat", "cache", "batch", "servers")
SAME, NEAR_TIE, OUTLIER, TOKEN, DRIFT, UNKNOWN = "same", "near-tie", "outlier", "token", "drift", "unknown"
RARE, NOISY, UNATTRIBUTED, FEW_TOKENS = "rare", "noisy", "unattributed", "few tokens"  # reasons for no verdict
MANY_OUTLIERS = "many outliers"  # a further one


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


class PromptAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one server to one prompt."""

    first: Answer  # while the prompt was new
    first_in_batch: bool
    alone: list[Answer]
    batch: list[Answer]


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to one prompt, compared."""

    kind: str
    first: int | None = None  # index of the first token that differs
    gap: float | None = None  # how far apart the two tokens were there, at least
    drift: float | None = None  # mean |difference of log-probabilities| of equal tokens
    compared: int = 0  # tokens up to the first that differs, and that one
    tokens: int = 0  # tokens of the longer answer

    @property
    def is_real(self) -> bool:
        """Return True if rounding does not explain the difference."""
        return self.kind in (TOKEN, DRIFT)


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
    tolerance: float = TOLERANCE
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


class Detectable(msgspec.Struct, frozen=True, kw_only=True):
    """Smallest shares that would have shown at least one difference with a probability of CONFIDENCE."""

    prompts: float  # over all lengths
    prompts_of_a_length: float
    tokens: float  # of the places that were compared


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A judged comparison."""

    verdict: str
    servers: int
    tolerance: float  # the largest of all lengths
    comparisons: list[Comparison]
    findings: list[Finding]  # differences
    undecided: list[str]  # reasons why no verdict is possible, such as `rare`
    detectable: Detectable
    coverage: float  # share of tokens that were compared
    logprobs: bool  # whether log-probabilities were compared

    def has_difference_at(self, context: int) -> bool:
        """Return whether anything differs at this length."""
        return any(c.differs for c in self.comparisons if c.context == context)


def compare_pair(a: Answer, b: Answer, tolerance: float = TOLERANCE, outliers: float = 0.0) -> Pair:
    """Compare two answers to one prompt. `outliers` is their limit; at most the tolerance: there are none."""
    first, tokens = find_first_difference(a, b), max(len(a.tokens), len(b.tokens))
    equal = min(len(a.tokens), len(b.tokens)) if first is None else first
    drift = _compute_drift(a, b, equal)
    kind, gap = SAME, None
    if first is not None:
        gaps = [found for x, y in ((a, b), (b, a)) if (found := _find_gap(x, y, first)) is not None]
        gap = max((size for size, _ in gaps), default=None)
        exact = bool(gaps) and all(known for _, known in gaps)
        kind = UNKNOWN if gap is None or (gap <= 2 * tolerance and not exact) else NEAR_TIE
        if gap is not None and gap > 2 * tolerance:
            kind = TOKEN if gap > 2 * outliers else OUTLIER
    if kind != TOKEN and drift is not None and drift > tolerance and equal >= MIN_DRIFT_TOKENS:
        kind = DRIFT
    compared = equal + (first is not None)
    return Pair(kind=kind, first=first, gap=gap, drift=drift, compared=compared, tokens=tokens)


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """Differences of log-probabilities that rounding explains, in natural logarithms."""

    value: float
    rounding: float = 0.0  # measure_rounding
    spread: float | None = (
        None  # standard deviation of the log-probabilities of random tokens; None if a server gives none
    )

    @property
    def follows_rounding(self) -> bool:
        """Return whether the value follows from the servers' rounding, and not from the given tolerance."""
        return self.spread is not None and 0 < self.value <= NOISE_FACTOR * self.rounding

    @property
    def outliers(self) -> float:
        """Return the limit of outliers; the tolerance itself where it does not follow from rounding."""
        return self.value * (OUTLIER_FACTOR if self.follows_rounding else 1.0)

    def compare_pair(self, a: Answer, b: Answer) -> Pair:
        """Compare two answers to one prompt."""
        return compare_pair(a, b, self.value, self.outliers)


def compute_tolerance(
    tolerance: float, base: Sequence[ScoredPrompt], other: Sequence[ScoredPrompt], rounding: float = 0.0
) -> Tolerance:
    """Return the tolerance for two servers, from the given one, the spread of log-probabilities, and the servers' own rounding.

    Weights that are not trained can give every token nearly the same log-probability, so that a difference of 0.1 is large. The
    tolerance is then the same share of the standard deviation of the log-probabilities, but at least NOISE_FACTOR times the noise of
    repeated log-probabilities. Activations in fp8, and routing to experts, turn the smallest change of a sum into a large one:
    the tolerance is then NOISE_FACTOR times `rounding` (measure_rounding), and at most MAX_NOISE_SHARE of the standard deviation.
    Single tokens then differ more than that, up to OUTLIER_FACTOR times the tolerance: a few such outliers are no difference.
    """
    values = [p for one in base for p in one.first]
    if not values:
        return Tolerance(value=tolerance, rounding=rounding)
    spread = float(np.std(values))
    noise = NOISE_FACTOR * max(_measure_noise(base), _measure_noise(other))
    least = min(tolerance, max(tolerance * spread, noise))
    most = MAX_NOISE_SHARE * spread
    return Tolerance(value=max(least, min(NOISE_FACTOR * rounding, most)), rounding=rounding, spread=spread)


def measure_rounding(effects: Iterable[Sequence[tuple[Answer, Answer]]]) -> float:
    """Return how far log-probabilities of one server's equal tokens are apart under other conditions; 0 if they never are.

    It is the median over pairs of answers that are not identical, of the effect (a prefix-cache hit, a batch) in which it is smaller: a
    fault in one of them does not raise it.
    """
    medians = []
    for of in effects:
        pairs = [compare_pair(x, y) for x, y in of]
        drifts = [p.drift for p in pairs if p.drift and p.compared - (p.first is not None) >= MIN_DRIFT_TOKENS]
        medians += [float(np.median(drifts))] if drifts else []
    return min(medians, default=0.0)


def _measure_noise(scored: Sequence[ScoredPrompt]) -> float:
    """Return the mean |difference| of log-probabilities that were fetched twice."""
    apart = [abs(x - y) for one in scored for x, y in zip(one.first, one.again, strict=True)]
    return float(np.mean(apart)) if apart else 0.0


def find_first_difference(a: Answer, b: Answer) -> int | None:
    """Return the index of the first token that differs, the end of an answer included; None if none does."""
    ours, theirs = (a.tokens, b.tokens) if a.has_ids == b.has_ids else (a.names or a.tokens, b.names or b.tokens)
    for i, (x, y) in enumerate(zip(ours, theirs, strict=False)):
        if x != y:
            return i
    return None if len(a.tokens) == len(b.tokens) else min(len(a.tokens), len(b.tokens))


def compare_length(
    context: int, servers: Sequence[Sequence[PromptAnswers]], tolerance: Tolerance | None = None
) -> list[Comparison]:
    """Compare the answers of one or two servers to prompts of one length, [server][prompt]; not yet judged."""
    tolerance = tolerance or Tolerance(value=TOLERANCE)
    compare = tolerance.compare_pair
    found = []
    for name, answers in zip("AB", servers, strict=False):
        for effect, pairs_of in OWN_PAIRS.items():
            pairs = [[compare(x, y) for x, y in pairs_of(one)] for one in answers]
            found.append(_summarize_pairs(effect, name, context, pairs))
    if len(servers) > 1:
        pairs = [[compare(x, y) for x, y in _pair_servers(*both)] for both in zip(*servers, strict=True)]
        found.append(_summarize_pairs(SERVERS, "AB", context, pairs))
    return [msgspec.structs.replace(one, tolerance=tolerance.value) for one in found]


def measure_server_rounding(servers: Sequence[Sequence[PromptAnswers]]) -> float:
    """Return the rounding of the server that has more of it, from its answers to prompts of one length."""
    return max(
        measure_rounding([pair for one in answers for pair in pairs_of(one)] for pairs_of in (_pair_cache, _pair_batch))
        for answers in servers
    )


def make_report(comparisons: Sequence[Comparison]) -> Report:
    """Test all comparisons together, and decide."""
    chance = compute_chance(comparisons)
    groups = _group_comparisons(comparisons)
    tests = {(key, i): _compute_p_value(groups, key, i, chance) for key in groups for i in _list_tested(groups, key)}
    rejected = reject_by_holm(tests)
    findings = [
        _make_finding(groups[key], rejected, key, tests) for key in groups if any(k == key for k, _ in rejected)
    ]
    judged = [
        msgspec.structs.replace(c, p=tests.get((key, i), 1.0), differs=(key, i) in rejected)
        for key, of in groups.items()
        for i, c in enumerate(of)
    ]
    judged.sort(key=lambda c: (c.context, c.server, EFFECTS.index(c.effect)))
    two = any(c.effect == SERVERS for c in judged)
    coverage = _compute_coverage([c for c in judged if c.effect == SERVERS or not two])
    undecided = [] if findings else _find_doubts(judged, coverage)
    agreed = AGREE if two else CONSISTENT
    return Report(
        verdict=DIFFER if findings else UNDECIDED if undecided else agreed,
        servers=1 + two,
        tolerance=max((c.tolerance for c in judged), default=TOLERANCE),
        comparisons=judged,
        findings=findings,
        undecided=undecided,
        detectable=compute_detectable(judged),
        coverage=coverage,
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


def compute_upper_bound(count: int, total: int, confidence: float = CONFIDENCE) -> float:
    """Return the upper one-sided Clopper-Pearson bound of a share; 1 without any observation."""
    if count >= total:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 1 - compute_tail(count + 1, total, middle)  # probability of at most `count`
        low, high = (middle, high) if below > 1 - confidence else (low, middle)
    return high


def compute_tail(count: int, total: int, share: float) -> float:
    """Return the probability that at least `count` of `total` happen, each with probability `share`."""
    if count <= 0 or share >= 1.0:
        return float(count <= total)
    if share <= 0.0 or count > total:
        return 0.0
    if count <= total * share:  # the other side is shorter, and this one is not small
        return max(1.0 - _sum_binomial(0, count - 1, total, share), 0.0)
    return _sum_binomial(count, total, total, share)


def _sum_binomial(first: int, last: int, total: int, share: float) -> float:
    """Return the probability of `first` to `last` of `total`, from logarithms: coefficients exceed a float from 1,030 on."""
    k = np.arange(first, last + 1)
    start = math.lgamma(total + 1) - math.lgamma(first + 1) - math.lgamma(total - first + 1)
    steps = np.log(total - k[:-1]) - np.log(k[1:])
    coefficients = start + np.concatenate([[0.0], np.cumsum(steps)])
    terms = np.exp(coefficients + k * math.log(share) + (total - k) * math.log1p(-share))
    return min(math.fsum(terms.tolist()), 1.0)


def compute_fisher(a: int, of_a: int, b: int, of_b: int) -> float:
    """Return the two-sided p of Fisher's exact test for the shares a / of_a and b / of_b, by doubling the smaller tail."""
    total, every = a + b, math.comb(of_a + of_b, a + b)
    chances = [math.comb(of_a, k) * math.comb(of_b, total - k) / every for k in range(total + 1)]
    return min(2 * min(sum(chances[: a + 1]), sum(chances[a:])), 1.0)


def reject_by_holm(tests: dict[T, float], level: float = LEVEL) -> set[T]:
    """Return the tests that are significant at `level` together, by Holm's procedure."""
    rejected: set[T] = set()
    for k, (key, p) in enumerate(sorted(tests.items(), key=lambda item: item[1])):
        if p > level / (len(tests) - k):
            break
        rejected.add(key)
    return rejected


def compute_smallest_share(counts: Iterable[int]) -> float:
    """Return the smallest share that shows at least once among the fewest observations, with a probability of CONFIDENCE."""
    least = min(counts, default=0)
    return 1 - (1 - CONFIDENCE) ** (1 / least) if least else 1.0


def compute_detectable(comparisons: Sequence[Comparison]) -> Detectable:
    """Return the smallest shares that would have shown a difference in the effect that was seen least often."""
    groups = _group_comparisons(comparisons).values()
    return Detectable(
        prompts=compute_smallest_share(sum(c.prompts for c in of) for of in groups),
        prompts_of_a_length=compute_smallest_share(c.prompts for c in comparisons),
        tokens=compute_smallest_share(sum(c.compared for c in of) for of in groups),
    )


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


class Tally(TypedDict):
    """Hold the counts that Comparison and engine_agreement.Count share, by the names of their fields."""

    prompts: int
    pairs: int
    near_ties: int
    outliers: int
    real: int
    unknown: int
    differing: int
    compared: int
    tokens: int


def tally_pairs(prompts: Sequence[Sequence[Pair]]) -> Tally:
    """Count the pairs of each prompt."""
    pairs = [pair for of in prompts for pair in of]
    return {
        "prompts": len(prompts),
        "pairs": len(pairs),
        "near_ties": sum(pair.kind == NEAR_TIE for pair in pairs),
        "outliers": sum(pair.kind == OUTLIER for pair in pairs),
        "real": sum(pair.is_real for pair in pairs),
        "unknown": sum(pair.kind == UNKNOWN for pair in pairs),
        "differing": sum(2 * sum(pair.is_real for pair in of) >= max(len(of), 1) for of in prompts),
        "compared": sum(pair.compared for pair in pairs),
        "tokens": sum(pair.tokens for pair in pairs),
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


def _list_tested(groups: dict[Key, list[Comparison]], key: Key) -> list[int]:
    """Return the indices of an effect's lengths that are tested separately, and -1 for all of them together."""
    if key[0] != REPEAT:
        return [*range(len(groups[key])), -1]
    other = groups.get((REPEAT, "A" if key[1] == "B" else "B"))
    if other is None:
        return [-1]
    mine, theirs = (n / of for n, of in (_count_differing(groups[key]), _count_differing(other)))
    return [-1] if (mine, key[1]) > (theirs, "A" if key[1] == "B" else "B") else []


def _compute_p_value(groups: dict[Key, list[Comparison]], key: Key, place: int, chance: float) -> float:
    of = groups[key]
    differing, prompts = _count_differing(of if place < 0 else [of[place]])
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
    of: Sequence[Comparison], rejected: set[tuple[Key, int]], key: Key, tests: dict[tuple[Key, int], float]
) -> Finding:
    alone = [c for i, c in enumerate(of) if (key, i) in rejected]
    differing, prompts = _count_differing(alone or of)
    return Finding(
        effect=key[0],
        server=key[1],
        contexts=[c.context for c in alone],
        differing=differing,
        prompts=prompts,
        first=min((c.first for c in alone[:1] or of if c.first is not None), default=None),
        p=min(p for (k, _), p in tests.items() if k == key),
    )


def _compute_coverage(comparisons: Sequence[Comparison]) -> float:
    tokens = sum(c.tokens for c in comparisons)
    return sum(c.compared for c in comparisons) / tokens if tokens else 0.0


def _find_doubts(comparisons: Sequence[Comparison], coverage: float) -> list[str]:
    """Return why AGREE or CONSISTENT would claim more than was seen."""
    repeats = _count_differing(c for c in comparisons if c.effect == REPEAT)
    noisy = compute_tail(*repeats, MAX_CHANCE_SHARE) <= LEVEL
    found = {
        NOISY: noisy,
        MANY_OUTLIERS: sum(c.outliers for c in comparisons) > MAX_OUTLIER_SHARE * sum(c.pairs for c in comparisons),
        RARE: not noisy and any(c.real for c in comparisons),
        UNATTRIBUTED: any(c.unknown for c in comparisons),
        FEW_TOKENS: coverage < MIN_COVERAGE,
    }
    return [reason for reason, holds in found.items() if holds]


def _can_decide(prompts: int, lengths: int, servers: int) -> bool:
    chance = max(compute_upper_bound(0, prompts * lengths * servers), MAX_CHANCE_SHARE)
    effects = 2 * servers + (servers > 1)
    return compute_tail(prompts, prompts, min(2 * chance, 1.0)) <= LEVEL / (effects * (lengths + 1) + 1)
