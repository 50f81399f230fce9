"""Greedy answers of servers to the same prompts, with log-probabilities where they are offered."""

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
from dcpbench.servers.answers import refused
from dcpbench.servers.client import OK, Client, RequestError, Target, Whole, status_error
from dcpbench.servers.events import Choice, StreamError, read_completion
from dcpbench.servers.prompts import CHAT, IDS, PATHS, find_manner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.servers.prompts import Manner

SHORTEST, LONGEST = 64, 32_768
"""Prompts where --context says nothing: doubled from one to the other, or to what the servers take."""


class Side:
    """A server and how it is asked."""

    def __init__(self, client: Client, manner: Manner, longest: int | None) -> None:
        self.client, self.manner, self.longest = client, manner, longest
        self.extras: dict[str, Any] = (
            {"logprobs": 2} if manner.endpoint != CHAT else {"logprobs": True, "top_logprobs": 2}
        )

    async def answer(self, prompt: np.ndarray, tokens: int) -> Answer:
        """One greedy answer. Raises WorkerError where there is none."""
        while True:
            more = {"stream": False, "stream_options": None, "seed": 0} | self.extras
            body = msgspec.json.decode(self.manner.body(prompt, tokens, **more))
            body.pop("stream_options")
            reply = Whole()
            try:
                data = msgspec.json.encode(body)
                await self.client.exchange(self.client.target.request("POST", PATHS[self.manner.endpoint], data), reply)
                if reply.status != OK:
                    raise status_error(reply.status, reply.headers, reply.data)
                found = read_completion(reply.data)
            except RequestError as e:
                if self.extras and refused(e):
                    self.extras = {}
                    continue
                raise WorkerError(f"{self.client.target.url}: {e.sentence}") from e
            except StreamError as e:
                raise WorkerError(f"{self.client.target.url}: {e}.") from e
            if not found.choices:
                raise WorkerError(f"{self.client.target.url}: its answer holds no choice.")
            return answer_of(found.choices[0])


def answer_of(choice: Choice) -> Answer:
    """Tokens and log-probabilities of a whole answer, of completions or of chats; without either its text, by words."""
    told = choice.logprobs if isinstance(choice.logprobs, dict) else {}
    if content := told.get("content"):
        tops = [[top["logprob"] for top in one.get("top_logprobs") or ()] for one in content]
        tokens, logprobs = [one["token"] for one in content], [one["logprob"] for one in content]
    else:
        tokens, logprobs = told.get("tokens") or [], told.get("token_logprobs") or []
        tops = [list((one or {}).values()) for one in told.get("top_logprobs") or ()]
    if choice.token_ids:
        tokens = list(map(str, choice.token_ids))
    if not tokens:
        return Answer(tokens=choice.new_text.split())
    gaps = [_ahead(top) for top in tops]
    known = len(logprobs) == len(tokens) and all(isinstance(p, (int, float)) for p in logprobs)
    return Answer(tokens=tokens, logprobs=logprobs if known else [], gaps=gaps if len(gaps) == len(tokens) else [])


def _ahead(logprobs: Sequence[float]) -> float:
    """Of the likeliest before the second; infinite where no second is told."""
    ordered = sorted(logprobs, reverse=True)
    return ordered[0] - ordered[1] if len(ordered) > 1 else math.inf


def contexts_for(typed: Sequence[int] | None, longest: int | None, tokens: int) -> list[int]:
    """Lengths of prompts, growing. Raises UsageError for those that a server does not take."""
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
    """Of so many tokens, all different, with nothing in common."""
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
    """Ask both servers, in turn: each prompt alone first, then all of a length at once, as batches change sums. Not yet judged.

    Of one target both sides are the same server.
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
