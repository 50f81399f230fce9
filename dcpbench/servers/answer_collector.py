"""Collect the answers of one server to prompts of several lengths: new and repeated, alone and in batches of several sizes.

For each length and each size of batch a server gets
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
from dcpbench.servers.answer_counts import AGAIN, NEW, SHARED, Cell, GroupAnswers, LengthAnswers
from dcpbench.servers.answer_pairs import ScoredPrompt
from dcpbench.servers.ask import Side
from dcpbench.servers.client import Client
from dcpbench.servers.edge_lengths import MIN_SHARED, count_prompts, fit_lengths, list_batches
from dcpbench.servers.prompt_format import IDS, find_prompt_format
from dcpbench.servers.prompt_logprobs import MAX_SCORED, PromptScorer
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.servers.answer_pairs import Answer
    from dcpbench.servers.client import Target
    from dcpbench.servers.info import ServerInfo
    from dcpbench.servers.prompt_format import PromptFormat, Text

SCALE_TOKENS = 256  # length of a prompt that gives the scale of log-probabilities if all others are too long


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """Describe the questions put to each server."""

    lengths: Sequence[int] | None  # of prompts, as given; None: those that are chosen for the first server
    batches: Sequence[int]
    prompts: int  # minimum number of prompts for each length and size of batch
    tokens: int  # of an answer
    rounds: int  # rounds in which each prompt is sent again
    seed: int
    endpoint: str
    extra_body: Mapping[str, object] = dataclasses.field(default_factory=dict)
    model: str | None = None  # name of one of the servers' models; None: the only one


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedPrompts:
    """Describe the prompts that all servers get."""

    vocab: int
    prompts: str  # IDS, or text
    text: Text | None
    lengths: Sequence[int] | None = None  # of the first server; None until it has chosen them


class CollectedAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one server, as MessagePack: a length takes some MB, as objects several times as many."""

    lengths: dict[int, bytes]
    scored: list[ScoredPrompt]  # of all lengths
    hit_tokens: int | None  # prefix-cache hits; None if the server does not report them

    def __add__(self, other: CollectedAnswers) -> CollectedAnswers:
        """Return the answers of both."""
        hits = (self.hit_tokens, other.hit_tokens)
        return CollectedAnswers(
            lengths=self.lengths | other.lengths,
            scored=self.scored + other.scored,
            hit_tokens=None if None in hits else sum(filter(None, hits)),
        )


def decode_answers(data: bytes) -> LengthAnswers:
    """Return the answers to the prompts of a length, from MessagePack."""
    return msgspec.msgpack.decode(data, type=LengthAnswers)


async def find_shared_prompts(targets: Sequence[Target], questions: Questions) -> SharedPrompts:
    """Return the prompts that all of these servers take: text in the words of the first if one of them takes no token ids."""
    clients = [Client(target) for target in targets]
    try:
        for text in (False, True):
            forms = [(await _find_format(client, questions, text=text))[1] for client in clients]
            if all(form.prompts == IDS for form in forms):
                break
        vocab = min(form.vocab for form in forms)
        return SharedPrompts(vocab=vocab, prompts=forms[0].prompts, text=forms[0].text)
    finally:
        for client in clients:
            client.close()


async def _find_format(
    client: Client, questions: Questions, *, text: bool
) -> tuple[ServerInfo, PromptFormat, int | None]:
    """Return the reports of a server about itself, its format of requests, and its maximum context."""
    info = await server_info.fetch_info(client)
    card = info.find_model(questions.model)
    extra = questions.extra_body
    form = await find_prompt_format(client, card.id, questions.endpoint, text=text, extra_body=extra)
    return info, form, card.max_model_len


class Collector:
    """Ask one server. The attributes tell how far it came if a request fails."""

    def __init__(self, target: Target, questions: Questions, tell: Callable[[str], None]) -> None:
        self.target, self.questions, self.tell = target, questions, tell
        self.cell: Cell | None = None
        self.sent = 0
        self.lengths: list[int] = []  # of the prompts so far
        self.left_out: list[int] = []  # lengths that are longer than its maximum context
        self.max_model_len: int | None = None
        self._hits: list[int | None] = []

    async def collect(
        self, shared: SharedPrompts | None, choose: Callable[[ServerInfo], Sequence[int]]
    ) -> tuple[CollectedAnswers, SharedPrompts]:
        """Return the answers, and the prompts that all servers get. `choose` returns the lengths of the first server's prompts.

        Raise WorkerError if an answer is missing, and UsageError if the server does not take the shared prompts.
        """
        client = Client(self.target)
        self._hits.clear()
        try:
            text = shared is not None and shared.prompts != IDS
            info, form, self.max_model_len = await _find_format(client, self.questions, text=text)
            if shared is None:
                shared = SharedPrompts(vocab=form.vocab, prompts=form.prompts, text=form.text)
            if (form.prompts == IDS) != (shared.prompts == IDS) or form.vocab < shared.vocab:
                raise UsageError(
                    f"it takes prompts as {form.prompts} below {form.vocab:,}, and the first server as {shared.prompts} below "
                    f"{shared.vocab:,}; compare engines that take the same prompts."
                )
            form = dataclasses.replace(form, text=shared.text)
            self._side, self._scorer = Side(client, form), PromptScorer(client, form)
            wanted, given = shared.lengths or self.questions.lengths or choose(info), bool(self.questions.lengths)
            lengths, longer = fit_lengths(wanted, self.max_model_len, self.questions.tokens, given=given)
            if shared.lengths and lengths[0] not in shared.lengths:
                raise UsageError(
                    f"it takes prompts of up to {lengths[0]:,} tokens, and the first server got longer ones; name lengths for both "
                    "with --context."
                )
            self.lengths, self.left_out = sorted({*self.lengths, *lengths}), [*self.left_out, *longer]
            before = await server_info.fetch_counters(client)
            answers, scored = {}, []
            for length in lengths:
                found = await self._collect_length(length, shared.vocab)
                answers[length] = msgspec.msgpack.encode(found)
                scored += found.scored
            if lengths[0] > MAX_SCORED:
                scored = await self._score_prompt(
                    np.random.default_rng(self.questions.seed), SCALE_TOKENS, shared.vocab
                )
            after = await server_info.fetch_counters(client)
            hits = _count_hits(after.compute_increase(before)["cached_tokens"], self._hits)
            collected = CollectedAnswers(lengths=answers, scored=scored, hit_tokens=hits)
            return collected, dataclasses.replace(shared, lengths=shared.lengths or lengths)
        finally:
            client.close()

    async def _collect_length(self, length: int, vocab: int) -> LengthAnswers:
        questions = self.questions
        generator = np.random.Generator(np.random.PCG64([questions.seed, length]))
        groups: list[GroupAnswers] = []
        scored: list[ScoredPrompt] = []
        for batch in list_batches(length, questions.batches):
            prompts = make_distinct_prompts(generator, length, count_prompts(batch, questions.prompts), vocab)
            if length <= MAX_SCORED and not groups:
                self.cell = Cell(length=length, batch=1, cache=NEW)
                scored = await self._score_prompt(generator, length, vocab)
            groups.append(await self._collect_group(batch, prompts))
            if batch == 1 and length >= MIN_SHARED:
                half = length // 2
                tails = make_distinct_prompts(generator, length - half, len(prompts), vocab)
                joined = [np.concatenate([prompt[:half], tail]) for prompt, tail in zip(prompts, tails, strict=True)]
                groups.append(await self._collect_group(batch, joined, shared=True))
        return LengthAnswers(length=length, groups=groups, scored=scored)

    async def _score_prompt(self, generator: np.random.Generator, length: int, vocab: int) -> list[ScoredPrompt]:
        sent = self._scorer.sent
        found = await self._scorer.score_prompt(make_distinct_prompts(generator, length, 1, vocab)[0])
        self.sent += self._scorer.sent - sent
        return found

    async def _collect_group(self, batch: int, prompts: Sequence[np.ndarray], *, shared: bool = False) -> GroupAnswers:
        number, states = self.sent, [SHARED if shared else NEW, *[AGAIN] * self.questions.rounds]
        rounds = [await self._fetch_answers(prompts, batch, cache) for cache in states]
        alone = await self._fetch_answers(prompts[: self.questions.prompts], 1, AGAIN) if batch > 1 else []
        return GroupAnswers(batch=batch, shared=shared, number=number, rounds=rounds, alone=alone)

    async def _fetch_answers(self, prompts: Sequence[np.ndarray], batch: int, cache: str) -> list[Answer]:
        """Return the answers to prompts of which `batch` are in flight at once."""
        self.cell = Cell(length=len(prompts[0]), batch=batch, cache=cache)
        self.tell(f"prompts of {format_count(len(prompts[0]), 'token')}, batch size {batch}, {cache}")
        found: list[Answer] = []
        for first in range(0, len(prompts), batch):
            some = prompts[first : first + batch]
            self.sent += len(some)
            found += await asyncio.gather(*(self._side.fetch_answer(prompt, self.questions.tokens) for prompt in some))
        self._hits += [answer.cached_tokens for answer in found]
        return found


def _count_hits(counter: int | None, answers: Sequence[int | None]) -> int | None:
    """Return the tokens of prefix-cache hits: by the server's counter, else by the usage of its answers."""
    known = [n for n in answers if n is not None]
    return counter if counter is not None else sum(known) if known else None


def make_distinct_prompts(generator: np.random.Generator, length: int, count: int, vocab: int) -> list[np.ndarray]:
    """Return prompts of random token ids whose first tokens differ, as far as the vocabulary allows."""
    starts = generator.choice(vocab, size=count, replace=count > vocab)
    prompts = [generator.integers(0, vocab, length, dtype=np.int32) for _ in range(count)]
    for prompt, start in zip(prompts, starts, strict=True):
        prompt[0] = start
    return prompts
