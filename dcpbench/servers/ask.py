"""Ask servers for greedy answers to the same prompts, with log-probabilities if they are offered."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dcpbench.errors import UsageError, WorkerError
from dcpbench.servers import info as server_info
from dcpbench.servers.agreement import Answer, Found, compare
from dcpbench.servers.answers import BROKEN_OFF, refused
from dcpbench.servers.client import Client, RequestError, Target, WholeOk
from dcpbench.servers.events import BadStream, Choice, Completion, Fault, StreamError, read_completion
from dcpbench.servers.prompts import CHAT, IDS, PATHS, find_manner
from dcpbench.servers.token_counts import Limits
from dcpbench.show.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.servers.prompts import Manner

SHORTEST, LONGEST = 64, 32_768
"""Lengths of prompts without --context: doubled from one to the other, or to what the servers accept."""
MIN_ANSWER_BYTES, BYTES_OF_TOKEN = 1 << 20, 1 << 12  # of a whole answer, and for each token with its log-probabilities


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token of a chat's answer."""

    logprob: float


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token of a chat's answer."""

    token: str
    logprob: float
    top_logprobs: list[TopLogprob] | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as OpenAI's API has them: `content` in chats, the other fields in completions."""

    content: list[ChatLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class Side:
    """A server and how requests to it are written."""

    def __init__(self, client: Client, manner: Manner, longest: int | None) -> None:
        self.client, self.manner, self.longest = client, manner, longest
        self.extras: dict[str, Any] = (
            {"logprobs": 2} if manner.endpoint != CHAT else {"logprobs": True, "top_logprobs": 2}
        )

    async def answer(self, prompt: np.ndarray, tokens: int) -> Answer:
        """Return one greedy answer. Raise WorkerError if there is none."""
        limits = Limits(tokens, len(prompt))
        while True:
            try:
                reply = await self._send(prompt, tokens, limits)
                found = read_completion(reply.data)
                if not found.choices:
                    raise WorkerError(f"{self.client.target.url}: its answer holds no choice.")
                return answer_of(check_answer(found, limits))
            except RequestError as e:
                if self.extras and refused(e):
                    self.extras = {}
                    continue
                raise WorkerError(f"{self.client.target.url}: {e.sentence}") from e
            except StreamError as e:
                raise WorkerError(f"{self.client.target.url}: {e}.") from e

    async def _send(self, prompt: np.ndarray, tokens: int, limits: Limits) -> WholeOk:
        more = {"stream": False, "stream_options": None, "seed": 0} | self.extras
        body = msgspec.json.decode(self.manner.body(prompt, tokens, ids=True, **more))
        body.pop("stream_options")
        reply = WholeOk(MIN_ANSWER_BYTES + BYTES_OF_TOKEN * tokens + limits.echo_bytes)
        path = PATHS[self.manner.endpoint]
        await self.client.exchange(self.client.target.request("POST", path, msgspec.json.encode(body)), reply)
        return reply


def check_answer(found: Completion, limits: Limits) -> Choice:
    """Return the first choice of a whole answer. Raise StreamError if it broke off, or contradicts the request."""
    assert found.choices
    choice = found.choices[0]
    if choice.finish_reason in BROKEN_OFF:
        raise StreamError(BadStream(fault=Fault.SERVER_ERROR, quote=f"finish_reason {choice.finish_reason}"))
    if found.usage is not None and (bad := limits.find_excess(found.usage)) is not None:
        raise StreamError(bad)
    if len(choice.token_ids or ()) > limits.chunks:
        raise StreamError(BadStream(fault=Fault.TOO_MANY_TOKENS, limit=limits.chunks, asked=limits.output_tokens))
    return choice


def answer_of(choice: Choice) -> Answer:
    """Return the tokens and log-probabilities of a whole answer; without either its text, split at spaces.

    Raise StreamError if its log-probabilities are not those of OpenAI's API.
    """
    try:
        found = msgspec.json.decode(choice.logprobs, type=Logprobs | None) or Logprobs()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        bad = BadStream(fault=Fault.NOT_A_COMPLETION, detail=one_line(str(e)), quote="log-probabilities")
        raise StreamError(bad) from e
    logprobs: Sequence[float | None]
    if found.content:
        tops = [[top.logprob for top in one.top_logprobs or ()] for one in found.content]
        tokens, logprobs = [one.token for one in found.content], [one.logprob for one in found.content]
    else:
        tokens, logprobs = found.tokens or [], found.token_logprobs or []
        tops = [list((one or {}).values()) for one in found.top_logprobs or ()]
    if choice.token_ids:
        tokens = list(map(str, choice.token_ids))
    if not tokens:
        return Answer(tokens=choice.new_text.split())
    gaps = [_ahead(top) for top in tops]
    known = [p for p in logprobs if p is not None]
    return Answer(
        tokens=tokens,
        logprobs=known if len(known) == len(logprobs) == len(tokens) else [],
        gaps=gaps if len(gaps) == len(tokens) else [],
    )


def _ahead(logprobs: Sequence[float]) -> float:
    """Return by how much the likeliest token is ahead of the second; infinity if there is no second."""
    ordered = sorted(logprobs, reverse=True)
    return ordered[0] - ordered[1] if len(ordered) > 1 else math.inf


def contexts_for(typed: Sequence[int] | None, longest: int | None, tokens: int) -> list[int]:
    """Return the lengths of prompts in rising order. Raise UsageError for those that a server does not accept."""
    most = LONGEST if longest is None else longest - tokens
    if typed:
        if longest is not None and max(typed) > most:
            raise UsageError(
                f"--context {max(typed):,} with {tokens} new tokens is more than the {longest:,} that a server takes; --context can be up to {most:,}."
            )
        return sorted(set(typed))
    found, length = [], SHORTEST
    while length <= min(most, LONGEST):
        found.append(length)
        length *= 2
    return found or [max(most, 1)]


def prompts_of(context: int, count: int, vocab: int, seed: int) -> list[np.ndarray]:
    """Return `count` random prompts of `context` tokens."""
    generator = np.random.Generator(np.random.PCG64([seed, context]))
    return [generator.integers(0, vocab, context, dtype=np.int32) for _ in range(count)]


async def ask_all(
    targets: Sequence[Target],
    *,
    contexts: Sequence[int] | None,
    prompts: int,
    tokens: int,
    repeats: int,
    seed: int,
    endpoint: str,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Found]:
    """Ask both servers in turn: each prompt alone first, then all of a length at once, as batches change sums.

    With one target both sides are the same server. The result is not judged yet.
    """
    async with Client(targets[0]) as first, Client(targets[-1]) as second:
        sides = [await _side(first, endpoint), await _side(second, endpoint)]
        kinds = {side.manner.prompts for side in sides}
        if kinds != {IDS}:
            texts = [await _side(client, endpoint, text=True) for client in (first, second)]
            sides = [
                texts[0],
                Side(second, dataclasses.replace(texts[1].manner, text=texts[0].manner.text), texts[1].longest),
            ]
        vocab = min(side.manner.vocab for side in sides)
        longest = min((side.longest for side in sides if side.longest is not None), default=None)
        found = []
        for context in contexts_for(contexts, longest, tokens):
            asked = prompts_of(context, prompts, vocab, seed)
            runs: list[list[list[Answer]]] = [[], []]
            for number in range(repeats):
                for of, side in zip(runs, sides, strict=True):
                    tell(f"prompts of {context:,} tokens, pass {number + 1} of {repeats}")
                    if number:
                        of.append(await asyncio.gather(*(side.answer(prompt, tokens) for prompt in asked)))
                    else:
                        of.append([await side.answer(prompt, tokens) for prompt in asked])
            a, b = ([[answers[i] for answers in of] for i in range(prompts)] for of in runs)
            found.append(compare(context, a, b, seed))
        return found


async def _side(client: Client, endpoint: str, *, text: bool = False) -> Side:
    asked = await server_info.ask(client)
    card = asked.model(None)
    return Side(client, await find_manner(client, card.id, endpoint, text=text), card.max_model_len)
