"""Greedy answers of servers under known conditions: to new and repeated prompts, alone and in a batch.

For each length a server is asked
    1. the first half of the prompts, each alone        they are new
    2. all prompts at once                              the second half is new, and answered in a batch
    3. all prompts, each alone, then all at once        repeated --repeats times

so that each half has its first answer without a prefix-cache hit, and every later answer can have one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.servers import info as server_info
from dcpbench.servers.agreement import PromptAnswers
from dcpbench.servers.answer_pairs import ScoredPrompt
from dcpbench.servers.ask import Side, choose_contexts
from dcpbench.servers.client import Client
from dcpbench.servers.prompt_format import IDS, find_prompt_format
from dcpbench.servers.prompt_logprobs import PromptScorer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.servers.answer_pairs import Answer
    from dcpbench.servers.client import Target


SCORED_TOKENS = 256
"""Length of the prompt whose log-probabilities give the scale of differences."""


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix-cache hits of a server during a comparison, as it reports them."""

    hit_tokens: int | None = None  # None if it does not report them

    def __add__(self, other: CacheUse) -> CacheUse:
        """Return the hits of both; unknown if either is."""
        known = self.hit_tokens is not None and other.hit_tokens is not None
        return CacheUse(hit_tokens=(self.hit_tokens or 0) + (other.hit_tokens or 0) if known else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions put to servers."""

    prompts: int  # of each length
    tokens: int  # of an answer
    rounds: int
    seed: int
    endpoint: str
    extra_body: Mapping[str, object] = dataclasses.field(default_factory=dict)


class ServerAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one or two servers."""

    lengths: dict[int, list[list[PromptAnswers]]]  # {length of the prompts: [server][prompt]}
    scored: list[ScoredPrompt]  # of the first server; empty if it gives no log-probabilities of prompts
    caches: list[CacheUse]  # of each server

    def __add__(self, other: ServerAnswers) -> ServerAnswers:
        """Return the answers of both, with the log-probabilities of the first."""
        caches = [mine + theirs for mine, theirs in zip(self.caches, other.caches, strict=True)]
        return ServerAnswers(lengths=self.lengths | other.lengths, scored=self.scored, caches=caches)


async def question_servers(
    targets: Sequence[Target],
    questions: Questions,
    *,
    contexts: Sequence[int] | None,
    tell: Callable[[str], None] = lambda _: None,
) -> ServerAnswers:
    """Send the questions to one or two servers, one after the other at each length, and return their answers.

    Raise WorkerError if a server does not answer, UsageError for lengths that it does not accept.
    """
    clients = [Client(target) for target in targets]
    try:
        sides = await _make_sides(clients, questions)
        vocab = min(side.prompt_format.vocab for side in sides)
        longest = min((side.longest for side in sides if side.longest is not None), default=None)
        before = [await server_info.fetch_counters(client) for client in clients]
        found: dict[int, list[list[PromptAnswers]]] = {}
        (other,) = make_prompts(min(SCORED_TOKENS, longest or SCORED_TOKENS), 1, vocab, questions.seed + 1)
        scored = await PromptScorer(sides[0].client, sides[0].prompt_format).score_prompt(other)
        cached: list[list[int | None]] = [[] for _ in sides]
        for context in choose_contexts(contexts, longest, questions.tokens):
            prompts = make_prompts(context, questions.prompts, vocab, questions.seed)
            found[context] = []
            for side, hits in zip(sides, cached, strict=True):
                tell(f"prompts of {context:,} tokens, {side.client.target.url}")
                found[context].append(await collect_answers(side, prompts, questions.tokens, questions.rounds))
                hits += [answer.cached_tokens for one in found[context][-1] for answer in (*one.alone, *one.batch)]
        after = [await server_info.fetch_counters(client) for client in clients]
        counts = [now.compute_increase(then)["cached_tokens"] for now, then in zip(after, before, strict=True)]
        caches = [CacheUse(hit_tokens=count_hits(*of)) for of in zip(counts, cached, strict=True)]
        return ServerAnswers(lengths=found, scored=scored, caches=caches)
    finally:
        for client in clients:
            client.close()


async def collect_answers(side: Side, prompts: Sequence[np.ndarray], tokens: int, rounds: int) -> list[PromptAnswers]:
    """Return the answers of one server to prompts of one length, in the order of the module's table."""

    async def collect_alone(some: Sequence[np.ndarray]) -> list[Answer]:
        return [await side.fetch_answer(prompt, tokens) for prompt in some]

    async def collect_at_once() -> list[Answer]:
        return list(await asyncio.gather(*(side.fetch_answer(prompt, tokens) for prompt in prompts)))

    half = len(prompts) // 2
    new = await collect_alone(prompts[:half])
    together = await collect_at_once()
    alone, batches = [], []
    for _ in range(rounds):
        alone.append(await collect_alone(prompts))
        batches.append(await collect_at_once())
    return [
        PromptAnswers(
            first=new[i] if i < half else together[i],
            first_in_batch=i >= half,
            alone=[answers[i] for answers in alone],
            batch=[answers[i] for answers in batches],
        )
        for i in range(len(prompts))
    ]


def make_prompts(context: int, count: int, vocab: int, seed: int) -> list[np.ndarray]:
    """Return prompts of `context` random token ids, which have no beginning in common."""
    generator = np.random.Generator(np.random.PCG64([seed, context]))
    return [generator.integers(0, vocab, context, dtype=np.int32) for _ in range(count)]


async def _make_sides(clients: Sequence[Client], questions: Questions) -> list[Side]:
    """Determine the request format of each server; if one accepts no token ids, both get text generated with A's
    vocabulary.
    """
    sides = [await _make_side(client, questions) for client in clients]
    if all(side.prompt_format.prompts == IDS for side in sides):
        return sides
    sides = [await _make_side(client, questions, text=True) for client in clients]
    text = sides[0].prompt_format.text
    return [Side(s.client, dataclasses.replace(s.prompt_format, text=text), s.longest) for s in sides]


async def _make_side(client: Client, questions: Questions, *, text: bool = False) -> Side:
    info = await server_info.fetch_info(client)
    card = info.find_model(None)
    prompt_format = await find_prompt_format(
        client, card.id, questions.endpoint, text=text, extra_body=questions.extra_body
    )
    return Side(client, prompt_format, card.max_model_len)


def count_hits(counter: int | None, answers: Sequence[int | None]) -> int | None:
    """Return the tokens of prefix-cache hits: by the server's counter, else by the usage of its answers."""
    if counter is not None:
        return counter
    known = [n for n in answers if n is not None]
    return sum(known) if known else None
