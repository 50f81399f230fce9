"""Files of scores: what fp32 has for the answers of engines."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from tools.greedy_tokens.answers import WeightsKey

if TYPE_CHECKING:
    from tools.greedy_tokens.answers import Answers


class ScoredPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position of an answer, by ids: of fp32's likeliest tokens and of all that engines list there."""

    fp32: dict[int, float]
    rounded: dict[int, float]
    rerouted: bool  # rounding changed the experts of some layer
    routing_tie: bool  # rounding could change them

    @property
    def best(self) -> int:
        """Return the token that fp32 ranks first."""
        return max(self.fp32, key=lambda token: (self.fp32[token], -token))

    @property
    def gap(self) -> float:
        """Return by how much fp32 has its likeliest token ahead of the next, in natural logarithms."""
        first, second = sorted(self.fp32.values())[:-3:-1]
        return first - second

    @property
    def gap_error(self) -> float:
        """Return by how much rounding moves the difference of fp32's two likeliest tokens."""
        first, second = sorted(self.fp32, key=lambda token: -self.fp32[token])[:2]
        return abs(self.rounded[first] - self.rounded[second] - self.fp32[first] + self.fp32[second])


class ScoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, as fp32 scores it."""

    prompt: int
    tokens: list[int]
    positions: list[ScoredPosition]


class Judgement(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Scores of all distinct answers of some files."""

    weights: WeightsKey
    prompts: list[list[int]]
    answers: list[ScoredAnswer]

    @functools.cached_property
    def by_tokens(self) -> dict[tuple[int, tuple[int, ...]], list[ScoredPosition]]:
        """Return the scored positions by the number of the prompt and the answer's tokens."""
        return {(one.prompt, tuple(one.tokens)): one.positions for one in self.answers}

    def get(self, prompt: int, engine: Answers) -> list[ScoredPosition]:
        """Return the scored positions of an engine's answer. Raise UsageError if it was not judged."""
        found = self.by_tokens.get((prompt, tuple(engine.list_tokens(prompt))))
        if found is None:
            raise UsageError(
                f"the file of --judge lacks the answer of {engine.name} to prompt {prompt + 1}; run `judge` again with all files."
            )
        return found
