"""Which results asked for requests of the same lengths: a curve is of one load, and sums differ with every draw."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.points.names import UNKNOWN
from dcpbench.serving.load_words import parse_lengths

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.imports.result import Result

NEAR = 0.05
"""Means of one load differ by no more, as a share of the smaller one: a tokenizer adds some, and draws differ."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths of a result's prompts and answers, as a load has them."""

    prompts: str
    """`1024`, `uniform:256-1024`, or `mean:1022` of all results of the same load; `unknown`."""
    answers: str
    most: int
    """Tokens of the longest request, answer included; 0 where nobody knows it."""


@dataclasses.dataclass(frozen=True)
class _Side:
    """The prompts of a result, or its answers."""

    said: str | None
    """Their length, where the file says it of all of them."""
    nominal: int | None
    """The one asked for, where it does not."""
    tokens: int
    requests: int

    @property
    def mean(self) -> float:
        return self.tokens / self.requests


def of_all(results: Sequence[Result]) -> list[Shape]:
    """The shape of each result. Those whose lengths are not fixed share a mean where they are one load."""
    pairs = [_sides(result) for result in results]
    prompts, answers = (_named(sides) for sides in zip(*pairs, strict=True))
    longest: dict[tuple[str, str], list[int]] = {}
    for result, *names in zip(results, prompts, answers, strict=True):
        longest.setdefault((names[0], names[1]), []).append(result.details.longest() if result.details else 0)
    return [
        Shape(p, a, _most(p, a) or (max(longest[p, a]) if all(longest[p, a]) else 0))
        for p, a in zip(prompts, answers, strict=True)
    ]


def _sides(result: Result) -> tuple[_Side, _Side]:
    details, done = result.details, result.details.finished() if result.details else []
    sums = (result.input_tokens, result.output_tokens)
    found = []
    for said, nominal, tokens, lens in zip(
        result.lengths,
        result.nominal,
        sums,
        (details.input_lens, details.output_lens) if details else ((), ()),
        strict=True,
    ):
        theirs = [lens[i] for i in done]
        alike = str(theirs[0]) if len(set(theirs)) == 1 else None
        found.append(_Side(said or alike, nominal, sum(theirs) or tokens, len(theirs) or result.completed))
    return found[0], found[1]


def _named(sides: Iterable[_Side]) -> list[str]:
    """Of each side its length; where that varies, the mean over all that asked for the same, or have nearly the same.

    The smallest mean of a load decides which others are near it.
    """
    sides = list(sides)
    varied = [side for side in sides if side.said is None and side.requests]
    loads: dict[int | float, list[_Side]] = {}
    first = 0.0
    for side in sorted(varied, key=lambda side: side.mean):
        if side.nominal is None and not first <= side.mean <= first * (1 + NEAR):
            first = side.mean
        loads.setdefault(side.nominal or -first, []).append(side)
    names = {
        id(side): f"mean:{sum(s.tokens for s in same) / sum(s.requests for s in same):.0f}"
        for same in loads.values()
        for side in same
    }
    return [side.said or names.get(id(side), UNKNOWN) for side in sides]


def _most(prompts: str, answers: str) -> int:
    """Of lengths that have an upper bound; 0 for means."""
    if UNKNOWN in (prompts, answers) or "mean:" in prompts + answers:
        return 0
    bounds = [parse_lengths("", spec) for spec in (prompts, answers)]
    return sum(max(bound.low, bound.high) for bound in bounds)
