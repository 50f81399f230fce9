"""Ask servers for greedy answers to the same prompts, with log-probabilities if they are offered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import WorkerError
from dcpbench.records.lines import UNREADABLE
from dcpbench.servers.answer_pairs import Answer
from dcpbench.servers.answers import BROKEN_OFF, is_refusal
from dcpbench.servers.client import RequestError
from dcpbench.servers.events import BadStream, Choice, Completion, Fault, StreamError, read_completion
from dcpbench.servers.prompt_format import CHAT, PATHS
from dcpbench.servers.token_counts import Limits
from dcpbench.show.text import fit_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from dcpbench.servers.client import Client
    from dcpbench.servers.prompt_format import PromptFormat

TOP_LOGPROBS = (20, 5, 2)  # numbers of top log-probabilities to request, tried in order until a server accepts one
MIN_ANSWER_BYTES, BYTES_OF_TOKEN = 1 << 20, 1 << 12  # of a whole answer, and for each token with its log-probabilities


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token of a chat's answer."""

    token: str
    logprob: float


class ChatLogprob(TopLogprob, frozen=True):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob] | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as OpenAI's API has them: `content` in chats, the other fields in completions."""

    content: list[ChatLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class Side:
    """A server and how requests to it are written."""

    def __init__(self, client: Client, prompt_format: PromptFormat) -> None:
        self.client, self.prompt_format = client, prompt_format
        self._extras = [
            {"logprobs": True, "top_logprobs": count} if prompt_format.endpoint == CHAT else {"logprobs": count}
            for count in TOP_LOGPROBS
        ]

    async def fetch_answer(self, prompt: np.ndarray, tokens: int) -> Answer:
        """Return one greedy answer. Raise WorkerError if there is none."""
        limits = Limits(tokens, len(prompt))
        while True:
            tried = self._extras[0] if self._extras else {}
            try:
                found = read_completion(await self._send_prompt(prompt, tokens, limits, tried))
                if not found.choices:
                    raise WorkerError(f"{self.client.target.url}: its answer holds no choice.")
                details = found.usage.prompt_tokens_details if found.usage else None
                answer = parse_answer(check_answer(found, limits))
                return msgspec.structs.replace(answer, cached_tokens=details.cached_tokens if details else None)
            except RequestError as e:
                if tried and is_refusal(e):
                    if self._extras and self._extras[0] == tried:  # another request may have removed it meanwhile
                        del self._extras[0]
                    continue
                raise WorkerError(f"{self.client.target.url}: {e.sentence}") from e
            except StreamError as e:
                raise WorkerError(f"{self.client.target.url}: {e}.") from e

    async def _send_prompt(self, prompt: np.ndarray, tokens: int, limits: Limits, extras: dict[str, Any]) -> bytes:
        more = {"stream": False, "stream_options": None, "seed": 0} | extras
        body = msgspec.json.decode(self.prompt_format.encode_body(prompt, tokens, ids=True, **more))
        body.pop("stream_options")
        limit = MIN_ANSWER_BYTES + BYTES_OF_TOKEN * tokens + limits.echo_bytes
        return await self.client.post(PATHS[self.prompt_format.endpoint], msgspec.json.encode(body), limit=limit)


def check_answer(found: Completion, limits: Limits) -> Choice:
    """Return the first choice of a whole answer. Raise StreamError if it broke off, or contradicts the request."""
    assert found.choices
    choice = found.choices[0]
    if choice.finish_reason in BROKEN_OFF:
        raise StreamError(BadStream(fault=Fault.SERVER_ERROR, quote=f"finish_reason {choice.finish_reason}"))
    if found.usage is not None and (bad := limits.find_excess(found.usage)) is not None:
        raise StreamError(bad)
    if len(choice.token_ids or ()) > limits.chunks:
        raise StreamError(BadStream(fault=Fault.TOO_MANY_TOKENS, limit=limits.chunks, requested=limits.output_tokens))
    return choice


def parse_answer(choice: Choice) -> Answer:
    """Return the tokens and log-probabilities of a whole answer; without either, the words of its text.

    Raise StreamError if its log-probabilities are not those of OpenAI's API.
    """
    try:
        given = msgspec.json.decode(choice.logprobs, type=Logprobs | None) or Logprobs()
    except UNREADABLE as e:
        bad = BadStream(fault=Fault.NOT_A_COMPLETION, detail=fit_line(str(e)), quote="log-probabilities")
        raise StreamError(bad) from e
    logprobs: Sequence[float | None]
    tops: list[dict[str, float | None]]
    if given.content:
        names, logprobs = [one.token for one in given.content], [one.logprob for one in given.content]
        tops = [{top.token: top.logprob for top in one.top_logprobs or ()} for one in given.content]
    else:
        names, logprobs = given.tokens or [], given.token_logprobs or []
        tops = [one or {} for one in given.top_logprobs or ()]
    tokens = list(map(str, choice.token_ids)) if choice.token_ids else names
    if not tokens:
        return Answer(tokens=choice.new_text.split())
    known = [p for p in logprobs if p is not None and math.isfinite(p)]
    if len(known) != len(logprobs) or len(known) != len(tokens):
        return Answer(tokens=tokens)
    finite = [{name: p for name, p in top.items() if p is not None and math.isfinite(p)} for top in tops]
    return Answer(tokens=tokens, names=names, logprobs=known, tops=finite if len(finite) == len(tokens) else [])
