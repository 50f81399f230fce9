"""Define the fp32 scores of answers, and the file that stores them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from tools.greedy_tokens.answers import WeightsKey

if TYPE_CHECKING:
    from tools.greedy_tokens.answers import Answers


class ScoredPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Hold log-probabilities at one position of an answer, by id: of fp32's likeliest tokens and of all that engines list."""

    fp32: dict[int, float]
    rounded: dict[int, float]
    rerouted: bool  # True if rounding changed the experts of a layer
    routing_tie: bool  # True if rounding could change them

    @property
    def best(self) -> int:
        """Return the token that fp32 ranks first."""
        return max(self.fp32, key=lambda token: (self.fp32[token], -token))

    @property
    def gap(self) -> float:
        """Return the difference of fp32's two likeliest tokens, in natural logarithms."""
        first, second = sorted(self.fp32.values())[:-3:-1]
        return first - second

    @property
    def gap_error(self) -> float:
        """Return the absolute change by rounding of the difference of fp32's two likeliest tokens."""
        first, second = sorted(self.fp32, key=lambda token: -self.fp32[token])[:2]
        return abs(self.rounded[first] - self.rounded[second] - self.fp32[first] + self.fp32[second])


class ScoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the fp32 scores of one answer."""

    prompt: int
    tokens: list[int]
    positions: list[ScoredPosition]


class Judgement(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Hold the scores of all distinct answers."""

    weights: WeightsKey
    prompts: list[list[int]]
    answers: list[ScoredAnswer]

    @functools.cached_property
    def by_tokens(self) -> dict[tuple[int, tuple[int, ...]], list[ScoredPosition]]:
        """Return the scored positions by the number of the prompt and the answer's tokens."""
        return {(one.prompt, tuple(one.tokens)): one.positions for one in self.answers}

    def get(self, prompt: int, engine: Answers) -> list[ScoredPosition]:
        """Return the scored positions of an engine's answer. Raise UsageError if it has no scores."""
        found = self.by_tokens.get((prompt, tuple(engine.list_tokens(prompt))))
        if found is None:
            raise UsageError(
                f"the file of --judge lacks the answer of {engine.name} to prompt {prompt + 1}; run `judge` again with all files."
            )
        return found
