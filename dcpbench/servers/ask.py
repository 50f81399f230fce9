"""Greedy answers of servers to the same prompts, with log-probabilities where they are offered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError, WorkerError
from dcpbench.servers.agreement import Answer
from dcpbench.servers.answers import refused
from dcpbench.servers.client import OK, RequestError, Whole, status_error
from dcpbench.servers.events import Choice, StreamError, read_completion
from dcpbench.servers.prompts import CHAT, PATHS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from dcpbench.servers.client import Client
    from dcpbench.servers.prompts import Manner

TOP_LOGPROBS = (20, 5, 2)
"""Numbers of likeliest tokens whose log-probabilities are asked for, until a server takes one."""
SHORTEST, LONGEST = 64, 32_768
"""Prompts where --context says nothing: doubled from one to the other, or to what the servers take."""


class Side:
    """A server and how it is asked."""

    def __init__(self, client: Client, manner: Manner, longest: int | None) -> None:
        self.client, self.manner, self.longest = client, manner, longest
        self._extras = [
            {"logprobs": True, "top_logprobs": count} if manner.endpoint == CHAT else {"logprobs": count}
            for count in TOP_LOGPROBS
        ]

    async def answer(self, prompt: np.ndarray, tokens: int) -> Answer:
        """One greedy answer. Raises WorkerError where there is none."""
        while True:
            more: dict[str, Any] = {"stream": False, "stream_options": None, "seed": 0}
            tried = self._extras[0] if self._extras else {}
            more |= tried
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
                if tried and refused(e):
                    if self._extras and self._extras[0] == tried:  # another request may have removed it meanwhile
                        del self._extras[0]
                    continue
                raise WorkerError(f"{self.client.target.url}: {e.sentence}") from e
            except StreamError as e:
                raise WorkerError(f"{self.client.target.url}: {e}.") from e
            if not found.choices:
                raise WorkerError(f"{self.client.target.url}: its answer holds no choice.")
            details = found.usage.prompt_tokens_details if found.usage else None
            return msgspec.structs.replace(
                answer_of(found.choices[0]), cached_tokens=details.cached_tokens if details else None
            )


def answer_of(choice: Choice) -> Answer:
    """Return the tokens and log-probabilities of a whole answer; without either, the words of its text."""
    given = choice.logprobs if isinstance(choice.logprobs, dict) else {}
    if content := given.get("content"):
        names, logprobs = [one["token"] for one in content], [one["logprob"] for one in content]
        tops = [{top["token"]: top["logprob"] for top in one.get("top_logprobs") or ()} for one in content]
    else:
        names, logprobs = given.get("tokens") or [], given.get("token_logprobs") or []
        tops = [one or {} for one in given.get("top_logprobs") or ()]
    tokens = list(map(str, choice.token_ids)) if choice.token_ids else names
    if not tokens:
        return Answer(tokens=choice.new_text.split())
    if len(logprobs) != len(tokens) or not all(map(_is_finite, logprobs)):
        return Answer(tokens=tokens)
    tops = [{name: p for name, p in top.items() if _is_finite(p)} for top in tops]
    return Answer(tokens=tokens, names=names, logprobs=logprobs, tops=tops if len(tops) == len(tokens) else [])


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


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
