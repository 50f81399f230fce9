"""Collect the answers of one server to prompts at all edges: new and repeated, alone and in batches of several sizes.

For each length and each size of batch a server is asked
    1. prompts that are new, in batches of this size    round 0: no prefix-cache hit
    2. the same prompts in the same batches             rounds 1, 2, …: the prefix cache may hold them
    3. some of them, each alone                         as in 2, in another batch

and, at batch size 1, also prompts that begin like earlier ones: in round 0 the prefix cache may hold the first half. The
log-probabilities of one prompt's own tokens are fetched twice, where the server offers them: they are compared at every token, however
early the greedy answers part.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.errors import UsageError
from dcpbench.servers import info as server_info
from dcpbench.servers.answer_pairs import Answer, ScoredPrompt
from dcpbench.servers.ask import Side
from dcpbench.servers.client import Client
from dcpbench.servers.conditions import count_hits
from dcpbench.servers.edge_lengths import MIN_SHARED, count_prompts, list_batches
from dcpbench.servers.prompt_format import IDS, find_prompt_format
from dcpbench.servers.prompt_logprobs import MAX_SCORED, PromptScorer
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.servers.client import Target
    from dcpbench.servers.info import ServerInfo
    from dcpbench.servers.prompt_format import PromptFormat, Text

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
    rounds: list[list[Answer]]  # [round][prompt]
    numbers: list[list[int]]  # place of each request of `rounds` among those of the server, from 0
    alone: list[Answer]  # to the first prompts, each alone, after all rounds; empty if the batch has one request
    alone_numbers: list[int]  # places of these requests


class LengthAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one server to the prompts of one length."""

    length: int
    groups: list[GroupAnswers]
    scored: list[ScoredPrompt]  # empty if the server gives no log-probabilities of prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeQuestions:
    """Describe the questions put to each server."""

    batches: Sequence[int]
    prompts: int  # minimum number of prompts for each length and size of batch
    tokens: int  # of an answer
    rounds: int  # in which each prompt is asked again
    seed: int
    endpoint: str
    extra_body: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBase:
    """Describe how all servers get the same prompts: as the first server takes them."""

    vocab: int
    prompts: str  # IDS, or text
    text: Text | None


class CollectedAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one server, encoded by `encode_answers`: a length takes some MB, as objects several times as many."""

    lengths: dict[int, bytes]
    scored: list[ScoredPrompt]  # of all lengths
    hit_tokens: int | None  # prefix-cache hits; None if the server does not report them
    requests: int


_decoder = msgspec.msgpack.Decoder(LengthAnswers)


def encode_answers(answers: LengthAnswers) -> bytes:
    """Return the answers as bytes."""
    return msgspec.msgpack.encode(answers)


def decode_answers(data: bytes) -> LengthAnswers:
    """Return the answers that `encode_answers` encoded."""
    return _decoder.decode(data)


class Collector:
    """Ask one server. `cell` and `sent` tell how far it came if a request fails."""

    def __init__(self, target: Target, questions: EdgeQuestions, tell: Callable[[str], None]) -> None:
        self.target, self.questions, self.tell = target, questions, tell
        self.cell: Cell | None = None
        self.sent = 0
        self._hits: list[int | None] = []

    async def collect(
        self, base: PromptBase | None, choose: Callable[[ServerInfo, int | None], Sequence[int]]
    ) -> tuple[CollectedAnswers, PromptBase]:
        """Return the answers to prompts of the lengths that `choose` returns, and how the server takes prompts.

        `choose` gets the server's reports about itself and its maximum context. Raise WorkerError if an answer is missing, and
        UsageError if the server does not take the prompts of `base`, the first server.
        """
        client = Client(self.target)
        try:
            info = await server_info.fetch_info(client)
            card = info.find_model(None)
            form = await self._find_format(client, card.id, base)
            self._side, self._scorer = Side(client, form, card.max_model_len), PromptScorer(client, form)
            base = base or PromptBase(vocab=form.vocab, prompts=form.prompts, text=form.text)
            before = await server_info.fetch_counters(client)
            answers, scored = {}, []
            for length in choose(info, card.max_model_len):
                found = await self._collect_length(length, base.vocab)
                answers[length] = encode_answers(found)
                scored += found.scored
            after = await server_info.fetch_counters(client)
            hits = count_hits(after.compute_increase(before)["cached_tokens"], self._hits)
            return CollectedAnswers(lengths=answers, scored=scored, hit_tokens=hits, requests=self.sent), base
        finally:
            client.close()

    async def _find_format(self, client: Client, model: str, base: PromptBase | None) -> PromptFormat:
        """Return the format of requests, with the prompts of `base`."""
        questions, text = self.questions, base is not None and base.prompts != IDS
        found = await find_prompt_format(client, model, questions.endpoint, text=text, extra_body=questions.extra_body)
        if base is None:
            return found
        if found.prompts != base.prompts or found.vocab < base.vocab:
            raise UsageError(
                f"it takes prompts as {found.prompts} below {found.vocab:,}, and the first server as {base.prompts} below "
                f"{base.vocab:,}; compare engines that take the same prompts."
            )
        return dataclasses.replace(found, text=base.text)

    async def _collect_length(self, length: int, vocab: int) -> LengthAnswers:
        questions = self.questions
        generator = np.random.Generator(np.random.PCG64([questions.seed, length]))
        groups: list[GroupAnswers] = []
        scored: list[ScoredPrompt] = []
        for batch in list_batches(length, questions.batches):
            prompts = make_distinct_prompts(generator, length, count_prompts(batch, questions.prompts), vocab)
            if length <= MAX_SCORED and not groups:
                self.cell = Cell(length=length, batch=1, cache=NEW)
                scored = await self._scorer.score_prompt(make_distinct_prompts(generator, length, 1, vocab)[0])
                self.sent += self._scorer.sent
            groups.append(await self._collect_group(length, batch, prompts))
            if batch == 1 and length >= MIN_SHARED:
                half = length // 2
                tails = make_distinct_prompts(generator, length - half, len(prompts), vocab)
                joined = [np.concatenate([prompt[:half], tail]) for prompt, tail in zip(prompts, tails, strict=True)]
                groups.append(await self._collect_group(length, batch, joined, shared=True))
        return LengthAnswers(length=length, groups=groups, scored=scored)

    async def _collect_group(
        self, length: int, batch: int, prompts: Sequence[np.ndarray], *, shared: bool = False
    ) -> GroupAnswers:
        rounds, numbers = [], []
        for number in range(1 + self.questions.rounds):
            self.cell = Cell(length=length, batch=batch, cache=AGAIN if number else SHARED if shared else NEW)
            self.tell(f"prompts of {format_count(length, 'token')}, batch size {batch}, {self.cell.cache}")
            numbers.append(list(range(self.sent, self.sent + len(prompts))))
            rounds.append(await self._fetch_answers(prompts, batch))
        alone: list[Answer] = []
        first = self.sent
        if batch > 1:
            self.cell = Cell(length=length, batch=1, cache=AGAIN)
            alone = await self._fetch_answers(prompts[: self.questions.prompts], 1)
        return GroupAnswers(
            batch=batch,
            shared=shared,
            rounds=rounds,
            numbers=numbers,
            alone=alone,
            alone_numbers=list(range(first, self.sent)),
        )

    async def _fetch_answers(self, prompts: Sequence[np.ndarray], batch: int) -> list[Answer]:
        """Return the answers to prompts of which `batch` are in flight at once."""
        found: list[Answer] = []
        for first in range(0, len(prompts), batch):
            some = prompts[first : first + batch]
            self.sent += len(some)
            found += await asyncio.gather(*(self._side.fetch_answer(prompt, self.questions.tokens) for prompt in some))
        self._hits += [answer.cached_tokens for answer in found]
        return found


def make_distinct_prompts(generator: np.random.Generator, length: int, count: int, vocab: int) -> list[np.ndarray]:
    """Return prompts of random token ids whose first tokens differ, as far as the vocabulary allows."""
    starts = generator.choice(vocab, size=count, replace=count > vocab)
    prompts = [generator.integers(0, vocab, length, dtype=np.int32) for _ in range(count)]
    for prompt, start in zip(prompts, starts, strict=True):
        prompt[0] = start
    return prompts
