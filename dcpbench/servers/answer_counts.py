"""Count the pairs of greedy answers that differ, for each effect under each condition. No I/O.

    repeat    two answers of a server under the same conditions
    cache     its first answer to a prompt against later ones, for which a prefix cache may hold the prompt
    batch     its answers in a batch against answers alone
    servers   its answers against those of the reference under the same conditions
    scores    its log-probabilities of the tokens of a prompt against those of the reference

Pairs of answers are classified as answer_pairs.py describes, by the limits of answer_noise.py.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.servers.answer_noise import DRIFT_SIZE, GAP, measure_sizes
from dcpbench.servers.answer_pairs import (
    BATCH,
    CACHE,
    DRIFT,
    MIN_DRIFT_TOKENS,
    NEAR_TIE,
    OUTLIER,
    REPEAT,
    SAME,
    SCORES,
    SERVERS,
    TOKEN,
    UNKNOWN,
    Answer,
    Pair,
    ScoredPrompt,
    find_prompt_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dcpbench.servers.answer_noise import Limits, Sizes

    Grouped = dict[tuple[str, "Cell"], list[list[Pair]]]  # the pairs of each prompt, by effect and cell

NEW, SHARED, AGAIN = CACHES = ("new", "shared prefix", "again")  # what a prefix cache may hold of a prompt


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions under which prompts are answered."""

    length: int  # tokens of a prompt
    batch: int  # requests that are in flight at once
    cache: str  # NEW, SHARED or AGAIN


class GroupAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to the prompts of one length in batches of one size."""

    batch: int
    shared: bool  # whether prompts begin like earlier ones in round 0
    number: int  # place of the first request among those of the server, from 0; the others follow in the order of the fields
    rounds: list[list[Answer]]  # [round][prompt]
    alone: list[Answer]  # to the first prompts, each alone, after all rounds; empty if the batch has one request


class LengthAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one server to the prompts of one length."""

    length: int
    groups: list[GroupAnswers]
    scored: list[ScoredPrompt]  # empty if the server gives no log-probabilities of prompts


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


OWN_PAIRS: Mapping[str, Callable[[GroupAnswers], list[list[tuple[Answer, Answer]]]]] = {
    REPEAT: lambda g: [list(itertools.pairwise(of)) for of in zip(*g.rounds[1:], strict=True)],
    CACHE: lambda g: [[(first, later) for later in of] for first, *of in zip(*g.rounds, strict=True)],
    BATCH: lambda g: [
        [(later, alone) for later in of] for of, alone in zip(zip(*g.rounds[1:], strict=True), g.alone, strict=False)
    ],
}  # the pairs of each prompt that show an effect of a server by itself


def measure_length_sizes(answers: LengthAnswers) -> Sizes:
    """Return how far the answers of one server to prompts of one length are apart."""
    return measure_sizes(
        {effect: [of for g in answers.groups for of in pairs_of(g)] for effect, pairs_of in OWN_PAIRS.items()}
    )


def count_own(answers: LengthAnswers, limits: Limits) -> list[Count]:
    """Compare the answers of one server with each other."""
    found: Grouped = {}
    for group in answers.groups:
        cell = Cell(length=answers.length, batch=group.batch, cache=AGAIN)
        for effect, pairs_of in OWN_PAIRS.items():
            pairs = [[limits.compare_pair(x, y) for x, y in of] for of in pairs_of(group)]
            found.setdefault((effect, cell), []).extend(pairs)
    return _count_all(found, limits)


def count_between(base: LengthAnswers, other: LengthAnswers, limits: Limits) -> list[Count]:
    """Compare the answers of two servers under the same conditions."""
    found: Grouped = {}
    for a, b in zip(base.groups, other.groups, strict=True):
        places = itertools.count(b.number) if b.batch == 1 else itertools.repeat(None)
        first, *later = (_compare_answers(x, y, limits, places) for x, y in zip(a.rounds, b.rounds, strict=True))
        alone_places = itertools.count(b.number + sum(map(len, b.rounds)))
        alone = _compare_answers(a.alone, b.alone, limits, alone_places)
        for batch, cache, rounds in (
            (b.batch, SHARED if b.shared else NEW, [first]),
            (b.batch, AGAIN, later),
            (1, AGAIN, [alone]),
        ):
            cell = Cell(length=base.length, batch=batch, cache=cache)
            found.setdefault((SERVERS, cell), []).extend(list(of) for of in zip(*rounds, strict=True))
    scored = [[_compare_scores(x, y, limits)] for x, y in zip(base.scored, other.scored, strict=False)]
    found[SCORES, Cell(length=base.length, batch=1, cache=NEW)] = scored
    return _count_all(found, limits)


def _compare_answers(
    ours: Sequence[Answer], theirs: Sequence[Answer], limits: Limits, places: Iterator[int | None]
) -> list[Pair]:
    """Compare the answers of a round. `places`: of their requests among those of the server; None in a batch."""
    pairs = [limits.compare_pair(x, y) for x, y in zip(ours, theirs, strict=True)]
    return [msgspec.structs.replace(pair, place=place) for pair, place in zip(pairs, places, strict=False)]


def _compare_scores(a: ScoredPrompt, b: ScoredPrompt, limits: Limits) -> Pair:
    """Compare the log-probabilities of a prompt's tokens."""
    drift = float(np.mean(np.abs(np.subtract(a.first, b.first))))
    kind = DRIFT if drift > limits.scores and len(a.first) >= MIN_DRIFT_TOKENS else SAME
    return Pair(kind=kind, drift=drift, compared=len(a.first), tokens=len(a.first))


def _count_all(found: Grouped, limits: Limits) -> list[Count]:
    """Return the count of each effect and cell, except for those without pairs."""
    return [_count_pairs(effect, cell, prompts, limits) for (effect, cell), prompts in found.items() if any(prompts)]


def _count_pairs(effect: str, cell: Cell, prompts: Sequence[Sequence[Pair]], limits: Limits) -> Count:
    pairs = [pair for of in prompts for pair in of]
    kinds = collections.Counter(pair.kind for pair in pairs)
    return Count(
        effect=effect,
        cell=cell,
        prompts=len(prompts),
        pairs=len(pairs),
        near_ties=kinds[NEAR_TIE],
        outliers=kinds[OUTLIER],
        real=kinds[TOKEN] + kinds[DRIFT],
        unknown=kinds[UNKNOWN],
        differing=sum(2 * sum(pair.is_real for pair in of) >= max(len(of), 1) for of in prompts),
        compared=sum(pair.compared for pair in pairs),
        tokens=sum(pair.tokens for pair in pairs),
        with_logprobs=sum(pair.drift is not None or pair.gap is not None for pair in pairs),
        example=max(pairs, key=lambda pair: _rank_example(pair, limits)),
        wrong=[pair.place for pair in pairs if pair.is_real and pair.place is not None],
        gaps=[round(find_prompt_value([pair.gap or 0.0 for pair in of]), 4) for of in prompts],
        drifts=[round(find_prompt_value([pair.judged_drift for pair in of]), 4) for of in prompts],
    )


def _rank_example(pair: Pair, limits: Limits) -> tuple[bool, float]:
    """Return the rank of a pair as an example: all real ones are equal, others rank by their size."""
    if pair.is_real:
        return True, 0.0
    gap, drift = limits.get_limit(GAP), limits.get_limit(DRIFT_SIZE)
    return False, max((pair.gap or 0.0) / gap if gap else 0.0, pair.judged_drift / drift if drift else 0.0)
