"""Compare greedy tokens of engines with each other and with fp32, and decide whether the engines compute the same function.

Terms:

near-tie            Two tokens differ, and their fp32 log-probabilities differ by at most twice the largest change that rounding causes in the
                    difference of the two likeliest tokens; or rounding could change the chosen experts.
beyond a near-tie   The fp32 log-probabilities differ by more: the engine with the less likely token is wrong.
rounding            The mean difference of an engine's log-probabilities from fp32, divided by that of the model with the roundings of an
                    engine, at positions without near-ties of experts.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

import msgspec

from dcpbench.servers.answer_noise import MIN_NOISE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.greedy_tokens.answers import Answers
    from tools.greedy_tokens.scores import Judgement, ScoredPosition

TIE_FACTOR = 2.0  # limit of a near-tie of tokens over the largest change by rounding
MAX_NEAR_TIES = 0.05  # maximum share of near-ties in the positions of two engines
MIN_POSITIONS = 250  # minimum number of compared positions of two engines: a share of 5 % has a standard error of 1.4 %
MAX_ROUTING_TIES = 0.5  # maximum share of positions with near-ties of experts
MAX_ROUNDING = (
    2.0  # maximum mean difference from fp32 over that of the rounded model, as kernels also round inside of operations
)
SAME, DIFFER, UNDECIDED = "SAME", "DIFFER", "UNDECIDED"
EXIT_CODES = {SAME: 0, DIFFER: 1, UNDECIDED: 3}
BEYOND, ROUNDING, NEAR_TIES, FEW, WIDE, ROUTING = "beyond", "rounding", "near-ties", "few", "wide", "routing"  # reasons
DECISIVE = (BEYOND, ROUNDING)  # reasons for DIFFER; other reasons give UNDECIDED


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Hold two different tokens of one position: those of two engines after the same tokens, or those of an engine and of fp32."""

    prompt: int
    position: int
    left: int  # token
    right: int
    ahead: float  # fp32 log-probability of the left token minus that of the right one, in natural logarithms
    best: int  # token that fp32 ranks first
    near_tie: bool
    routing: bool  # True for a near-tie of experts


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the comparison of two engines up to the first difference of each answer."""

    left: str
    right: str
    prompts: int
    positions: int
    equal: int
    differences: list[Difference]

    @property
    def near_ties(self) -> int:
        """Return the number of near-ties."""
        return sum(one.near_tie for one in self.differences)

    @property
    def near_tie_share(self) -> float:
        """Return the share of compared positions that are near-ties."""
        return self.near_ties / self.positions

    @property
    def beyond_near_tie(self) -> int:
        """Return the number of differences beyond a near-tie."""
        return len(self.differences) - self.near_ties


class EngineResult(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the comparison of one engine with fp32 at all positions, each after the engine's own tokens."""

    name: str
    positions: int
    equal: int
    differences: list[Difference]  # left: the engine's token, right: that of fp32
    mean: float  # mean absolute difference of log-probabilities from fp32, of the tokens that the engine lists
    rounding: float  # the same difference of the model with the roundings of an engine, at least MIN_NOISE

    @property
    def ratio(self) -> float:
        """Return the engine's difference from fp32 over that of a correct engine."""
        return self.mean / self.rounding

    @property
    def beyond_near_tie(self) -> int:
        """Return the number of tokens that differ from fp32's first token beyond a near-tie."""
        return sum(not one.near_tie for one in self.differences)


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a reason why engines differ, or why the verdict is undecided."""

    kind: str  # BEYOND, ROUNDING, NEAR_TIES, FEW, WIDE or ROUTING
    engines: list[str]
    value: float
    limit: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the results of all engines and pairs, and the verdict."""

    verdict: str  # SAME, DIFFER or UNDECIDED
    tie_limit: float  # largest difference of two log-probabilities in fp32 that is a near-tie
    median_gap: float  # median difference of fp32's two likeliest tokens
    routing_ties: float  # share of positions with near-ties of experts
    engines: list[EngineResult]
    pairs: list[PairResult]
    reasons: list[Reason]

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command."""
        return EXIT_CODES[self.verdict]


def decide(files: Sequence[Answers], judgement: Judgement) -> Verdict:
    """Compare all engines with fp32 and with each other, and return the verdict."""
    scored = [position for one in judgement.answers for position in one.positions]
    kept = [position.gap_error for position in scored if not position.rerouted]
    limit = TIE_FACTOR * max([MIN_NOISE, *kept])
    median_gap = statistics.median(position.gap for position in scored)
    routing_ties = statistics.fmean(position.routing_tie for position in scored)
    engines = [compare_with_fp32(one, judgement, limit) for one in files]
    pairs = [compare_engines(a, b, judgement, limit) for a, b in itertools.combinations(files, 2)]
    reasons = find_reasons(engines, pairs)
    if limit > median_gap:
        reasons.append(Reason(kind=WIDE, engines=[], value=limit, limit=median_gap))
    if routing_ties > MAX_ROUTING_TIES:
        reasons.append(Reason(kind=ROUTING, engines=[], value=routing_ties, limit=MAX_ROUTING_TIES))
    verdict = SAME if not reasons else UNDECIDED
    if any(reason.kind in DECISIVE for reason in reasons):
        verdict = DIFFER
    return Verdict(
        verdict=verdict,
        tie_limit=limit,
        median_gap=median_gap,
        routing_ties=routing_ties,
        engines=engines,
        pairs=pairs,
        reasons=reasons,
    )


def find_reasons(engines: Sequence[EngineResult], pairs: Sequence[PairResult]) -> list[Reason]:
    """Return the reasons against SAME, decisive reasons first."""
    found = [
        Reason(kind=BEYOND, engines=[e.name], value=e.beyond_near_tie, limit=0) for e in engines if e.beyond_near_tie
    ]
    found += [
        Reason(kind=BEYOND, engines=[p.left, p.right], value=p.beyond_near_tie, limit=0)
        for p in pairs
        if p.beyond_near_tie
    ]
    found += [
        Reason(kind=ROUNDING, engines=[e.name], value=e.ratio, limit=MAX_ROUNDING)
        for e in engines
        if e.ratio > MAX_ROUNDING
    ]
    found += [
        Reason(kind=NEAR_TIES, engines=[p.left, p.right], value=p.near_tie_share, limit=MAX_NEAR_TIES)
        for p in pairs
        if p.near_tie_share > MAX_NEAR_TIES
    ]
    found += [
        Reason(kind=FEW, engines=[e.name], value=e.positions, limit=MIN_POSITIONS)
        for e in engines
        if e.positions < MIN_POSITIONS
    ]
    return found + [
        Reason(kind=FEW, engines=[p.left, p.right], value=p.positions, limit=MIN_POSITIONS)
        for p in pairs
        if p.positions < MIN_POSITIONS
    ]


def compare_with_fp32(one: Answers, judgement: Judgement, limit: float) -> EngineResult:
    """Compare the tokens and log-probabilities of one engine with fp32 at each position after the engine's own tokens."""
    differences: list[Difference] = []
    errors: list[float] = []
    roundings: list[float] = []
    for prompt, answer in enumerate(one.answers):
        for place, (position, scored) in enumerate(zip(answer, judgement.get(prompt, one), strict=True)):
            if not scored.routing_tie:
                errors += [abs(logprob - scored.fp32[token]) for token, logprob in position.logprobs.items()]
                roundings += [abs(scored.rounded[token] - scored.fp32[token]) for token in position.logprobs]
            if position.token != scored.best:
                differences.append(_make_difference(prompt, place, position.token, scored.best, scored, limit))
    positions = sum(map(len, one.answers))
    return EngineResult(
        name=one.name,
        positions=positions,
        equal=positions - len(differences),
        differences=differences,
        mean=statistics.fmean(errors or [0.0]),
        rounding=max(MIN_NOISE, statistics.fmean(roundings or [0.0])),
    )


def compare_engines(left: Answers, right: Answers, judgement: Judgement, limit: float) -> PairResult:
    """Compare the tokens of two engines up to the first difference of each answer, which changes all later tokens."""
    positions, differences = 0, []
    for prompt, (one, other) in enumerate(zip(left.answers, right.answers, strict=True)):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            positions += 1
            if a.token != b.token:
                scored = judgement.get(prompt, left)[place]
                differences.append(_make_difference(prompt, place, a.token, b.token, scored, limit))
                break
    return PairResult(
        left=left.name,
        right=right.name,
        prompts=len(left.answers),
        positions=positions,
        equal=positions - len(differences),
        differences=differences,
    )


def _make_difference(
    prompt: int, place: int, left: int, right: int, scored: ScoredPosition, limit: float
) -> Difference:
    ahead = scored.fp32[left] - scored.fp32[right]
    return Difference(
        prompt=prompt,
        position=place,
        left=left,
        right=right,
        ahead=ahead,
        best=scored.best,
        near_tie=abs(ahead) <= limit or scored.routing_tie,
        routing=abs(ahead) > limit and scored.routing_tie,
    )
