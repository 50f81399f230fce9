"""Fetch the log-probabilities of a prompt's own tokens: `prompt_logprobs` of vLLM, `/generate` of SGLang.

Such tokens are given, not sampled, so two servers can be compared at each of them. Greedy answers can only be compared up to
the first token that differs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import WorkerError
from dcpbench.records.lines import decode_or_none
from dcpbench.servers.answer_pairs import ScoredPrompt
from dcpbench.servers.answers import is_refusal
from dcpbench.servers.client import NO_ENDPOINT, RequestError
from dcpbench.servers.prompt_format import COMPLETIONS, IDS, PATHS

if TYPE_CHECKING:
    import numpy as np

    from dcpbench.servers.client import Client
    from dcpbench.servers.prompt_format import PromptFormat

MAX_SCORED = 1024  # tokens of a prompt: the logits of all its tokens are in GPU memory at once
BYTES_OF_TOKEN = 1 << 10  # maximum size of one token's entry in an answer
GENERATE = "/generate"


class VllmChoice(msgspec.Struct, frozen=True):
    """An answer of vLLM: for each token of the prompt its log-probability, and those of likelier tokens, by their ids."""

    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class VllmReply(msgspec.Struct, frozen=True):
    """Answers of vLLM to one request."""

    choices: list[VllmChoice] = []


class SglangMeta(msgspec.Struct, frozen=True):
    """Facts about an answer of SGLang: (log-probability, token id, text) for each token of the prompt."""

    input_token_logprobs: list[list[Any]] | None = None


class SglangReply(msgspec.Struct, frozen=True):
    """An answer of SGLang."""

    meta_info: SglangMeta = SglangMeta()


class PromptScorer:
    """Fetch log-probabilities of prompts from one server, in the first way that it supports."""

    def __init__(self, client: Client, prompt_format: PromptFormat) -> None:
        self.client, self.prompt_format = client, prompt_format
        takes_ids = prompt_format.prompts == IDS and prompt_format.endpoint == COMPLETIONS
        self._ways = [self._fetch_vllm, self._fetch_sglang] if takes_ids else []
        self.sent = 0  # requests so far

    async def score_prompt(self, prompt: np.ndarray) -> list[ScoredPrompt]:
        """Return the log-probabilities of the tokens after the first, fetched twice; empty if the server gives none."""
        first = await self.fetch_logprobs(prompt)
        again = await self.fetch_logprobs(prompt) if first else []
        return [ScoredPrompt(first=first, again=again)] if first and again else []

    async def fetch_logprobs(self, prompt: np.ndarray) -> list[float]:
        """Return the log-probabilities of the tokens after the first; empty if the server gives none."""
        while self._ways and len(prompt) > 1:
            try:
                self.sent += 1
                found = await self._ways[0](prompt)
            except RequestError as e:
                if not is_refusal(e) and e.status not in NO_ENDPOINT:
                    raise WorkerError(f"{self.client.target.url}: {e.sentence}") from e
                found = []
            if found:
                return found
            del self._ways[0]
        return []

    async def _fetch_vllm(self, prompt: np.ndarray) -> list[float]:
        body = self.prompt_format.encode_body(prompt, 1, stream=False, prompt_logprobs=1)
        request = msgspec.json.decode(body)
        request.pop("stream_options", None)
        data = await self._send(PATHS[COMPLETIONS], request, len(prompt))
        return parse_vllm_reply(data, prompt)

    async def _fetch_sglang(self, prompt: np.ndarray) -> list[float]:
        request = {
            "input_ids": prompt.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        data = await self._send(GENERATE, request, len(prompt))
        return parse_sglang_reply(data, prompt)

    async def _send(self, path: str, request: dict[str, Any], tokens: int) -> bytes:
        return await self.client.post(path, msgspec.json.encode(request), limit=(1 << 16) + BYTES_OF_TOKEN * tokens)


def parse_vllm_reply(data: bytes, prompt: np.ndarray) -> list[float]:
    """Return the log-probabilities of the tokens after the first; empty if one of them is missing."""
    found = decode_or_none(data, VllmReply)
    entries = (found.choices[0].prompt_logprobs or [])[1:] if found and found.choices else []
    tokens = [(entry or {}).get(str(token), {}) for entry, token in zip(entries, prompt[1:].tolist(), strict=False)]
    return _keep_complete([one.get("logprob") for one in tokens], len(prompt))


def parse_sglang_reply(data: bytes, prompt: np.ndarray) -> list[float]:
    """Return the log-probabilities of the tokens after the first; empty if one of them is missing."""
    found = decode_or_none(data, SglangReply)
    entries = (found.meta_info.input_token_logprobs or [])[1:] if found else []
    if [entry[1:2] for entry in entries] != [[token] for token in prompt[1:].tolist()]:
        return []
    return _keep_complete([entry[0] for entry in entries], len(prompt))


def _keep_complete(logprobs: list[Any], tokens: int) -> list[float]:
    """Return the log-probabilities if there is a finite one for each token after the first, else none."""
    complete = len(logprobs) == tokens - 1 and all(isinstance(p, int | float) and math.isfinite(p) for p in logprobs)
    return [float(p) for p in logprobs] if complete else []
