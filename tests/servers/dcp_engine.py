"""Serve answers like those of a correct or faulty engine with decode context parallelism, for `verify --engine`.

    python -m tests.servers.dcp_engine --port 8000 --dcp 2 --fault cache --noise bf16

Tokens follow from a hash of the prompt. A fault of FAULTS is present if --dcp is more than 1, or always with --fault-everywhere. With
--noise logits are moved by rounding, differently in each layout, and differently each time in a batch: as in bf16, or as in fp8 with
experts, where log-probabilities of vLLM 0.26 on an H200 (DeepSeek-V3, 4 layers) differ by 0.06 to 0.16 on average between
prefix-cache hits and misses, and single ones by several times as much. With `--noise flips` the differences have the distribution of
vLLM 0.26 on two H200 (tests/data/verify/vllm_2xH200.json): some tokens get another expert, which moves all log-probabilities more, and
short prompts are computed in the same way in each batch, but not in each layout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import sys
from array import array
from typing import Any

from tests.servers.faulty_engine import BF16_STEP, NOISE, VOCAB, Token, _draw_logits, _write_answer, _write_json

FAULTS = ("none", "cache", "batch", "long", "every33", "page", "exchange", "scores")
FP8_NOISE, FP8_FREEDOM, FP8_MEAN_GAP = (
    0.06,
    4,
    0.5,
)  # Student's t distribution has the tails of tokens that get another expert
FLIP_SHARE, FLIP_NOISE, SUM_NOISE = (
    0.3,
    0.13,
    0.04,
)  # share of tokens that get another expert, their noise, and the noise of all others
FLIP_STEP, FLIP_SPACING, FLIP_LISTED = (
    2**-5,
    0.23,
    20,
)  # of bf16 logits; of the likeliest two tokens, as among 129,280 normal logits
FLIPS_FROM = 64  # prompt length from which batches and prefix-cache hits change the order of sums
PAGE, LONG_FROM, BATCH_ABOVE, PERIOD, WRONG_FROM = 16, 4_096, 2, 33, 2
MAX_WRONG, WRONG_GAP = 4, 2.9  # number of listed wrong tokens, and their lead over the correct token
STEP_S = 0.003  # duration of an answer; requests that arrive meanwhile join its batch
SCORE_RANGE = (0.5, 9.0)  # range of negative log-probabilities of prompt tokens


class DcpEngine:
    """Answer completions as one setting of an engine."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.requests = 0
        self._peaks: dict[int, int] = {}  # maximum of concurrent requests since the arrival of each request
        self.faulty = given.dcp > 1 or given.fault_everywhere
        self._random = random.Random(given.dcp)
        self._blocks: set[bytes] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self._answer_one(reader, writer)
        writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/health":
            _write_json(writer, {})
        elif path == "/v1/models":
            card = {"id": "m"} | ({"max_model_len": self.given.max_model_len} if self.given.max_model_len else {})
            _write_json(writer, {"object": "list", "data": [card]})
        elif method == "POST" and path == "/v1/completions":
            await self._complete(writer, json.loads(body))
        elif method == "POST" and path == "/generate" and self.given.api == "sglang":
            prompt = json.loads(body)["input_ids"]
            scores = [[p, token, None] for p, token in zip([None, *self._score(prompt)], prompt, strict=True)]
            _write_json(writer, {"meta_info": {"input_token_logprobs": scores}})
        else:
            _write_json(writer, {"error": "not here"}, 404)
        await writer.drain()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        prompt: list[int] = body["prompt"]
        if self.given.dies_after >= 0 and self.requests >= self.given.dies_after and self.faulty:
            _die()
        if body.get("stream") and max(prompt) >= self.given.vocab:
            _write_json(writer, {"error": {"message": "token id out of vocabulary", "code": 400}}, 400)
            return
        number, self.requests = self.requests, self.requests + 1
        data = array("i", prompt).tobytes()
        cached = self._find_cached(data, len(prompt))
        self._peaks[number] = 0
        self._peaks = {key: max(peak, len(self._peaks)) for key, peak in self._peaks.items()}
        await asyncio.sleep(STEP_S)
        batch = self._peaks.pop(number)
        alone = batch == 1
        short = len(prompt) < FLIPS_FROM
        state = "short" if short else f"alone {cached}" if alone else f"batch {self._random.random()}"
        name = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        tokens = self._answer(name, body["max_tokens"], cached, state, alone=alone)
        if self._is_wrong(len(prompt), number, cached, batch):
            for i in range(min(WRONG_FROM, len(tokens) - 1), len(tokens)):
                tokens[i] = _make_wrong(tokens[i])
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if body.get("prompt_logprobs") is not None and self.given.api == "vllm":
            scores = zip(prompt[1:], self._score(prompt), strict=True)
            entries = [None, *({str(token): {"logprob": p, "rank": 1}} for token, p in scores)]
            choice = {"index": 0, "text": "", "prompt_logprobs": entries, "finish_reason": "length"}
            _write_json(writer, {"choices": [choice], "usage": usage})
            return
        _write_answer(writer, body, tokens, usage)

    def _find_cached(self, data: bytes, length: int) -> int:
        """Return the number of prompt tokens in the prefix cache, in whole pages; then add all pages of the prompt to the cache."""
        ends = [end * 4 for end in range(PAGE, length, PAGE)]
        names = [hashlib.sha1(data[:end], usedforsecurity=False).digest() for end in ends[:4]]
        hits = 0
        for name in names:
            if name not in self._blocks:
                break
            hits += 1
        self._blocks.update(names)
        return hits * PAGE

    def _is_wrong(self, length: int, number: int, cached: int, batch: int) -> bool:
        return self.faulty and {
            "cache": cached > 0,
            "batch": batch > BATCH_ABOVE,
            "long": length >= LONG_FROM,
            "every33": number % PERIOD == PERIOD - 1,
            "page": length % PAGE == 0,
            "exchange": self.given.exchange == "a2a",
        }.get(self.given.fault, False)

    def _answer(self, name: str, count: int, cached: int, state: str, *, alone: bool) -> list[Token]:
        if self.given.noise == "flips":
            return self._answer_with_flips(name, count, state)
        rounding = random.Random(f"{self.given.dcp} {self.given.exchange} {cached}") if alone else self._random
        tokens: list[Token] = []
        for _ in range(count):
            before = [token.id for token in tokens]
            ids, logits = _draw_logits(name, before, *([FP8_MEAN_GAP] if self.given.noise == "fp8" else []))
            if self.given.noise:
                logits = [round((x + self._move(rounding)) / BF16_STEP) * BF16_STEP for x in logits]
            norm = math.log(sum(map(math.exp, logits)))
            top = {token: x - norm for token, x in sorted(zip(ids, logits, strict=True), key=lambda pair: -pair[1])}
            tokens.append(Token(next(iter(top)), top))
        return tokens

    def _answer_with_flips(self, name: str, count: int, state: str) -> list[Token]:
        """Return the tokens, with log-probabilities that are moved as in vLLM: in the same way in equal states."""
        rounding = random.Random(f"{self.given.dcp} {self.given.exchange} {name} {state}")
        tokens: list[Token] = []
        for _ in range(count):
            chances = random.Random(f"{name} {[token.id for token in tokens]}")
            ids = chances.sample(range(10, VOCAB), FLIP_LISTED)
            spacings = [chances.expovariate(k / FLIP_SPACING) for k in range(1, FLIP_LISTED)]
            noise = FLIP_NOISE if rounding.random() < FLIP_SHARE else SUM_NOISE
            logprobs = [-2.0 - x for x in itertools.accumulate(spacings, initial=0.0)]
            moved = [round((x + rounding.gauss(0.0, noise)) / FLIP_STEP) * FLIP_STEP for x in logprobs]
            top = dict(sorted(zip(ids, moved, strict=True), key=lambda pair: -pair[1]))
            tokens.append(Token(next(iter(top)), top))
        return tokens

    def _move(self, rounding: random.Random) -> float:
        """Return by how much rounding moves a logit."""
        if self.given.noise == "bf16":
            return rounding.gauss(0.0, NOISE)
        if self.given.noise == "flips":
            return rounding.gauss(0.0, FLIP_NOISE if rounding.random() < FLIP_SHARE else SUM_NOISE)
        chi_squared = rounding.gammavariate(FP8_FREEDOM / 2, 2)
        return FP8_NOISE * rounding.gauss(0.0, 1.0) / math.sqrt(chi_squared / FP8_FREEDOM)

    def _score(self, prompt: list[int]) -> list[float]:
        """Return the log-probabilities of the tokens after the first."""
        found = []
        for before, token in itertools.pairwise(prompt):
            p = -random.Random(before * VOCAB + token).uniform(*SCORE_RANGE)
            p += self._move(self._random) if self.given.noise else 0.0
            found.append(p + (0.5 * (-1) ** token if self.faulty and self.given.fault == "scores" else 0.0))
        return found


def _make_wrong(token: Token) -> Token:
    """Return a wrong token with a large lead over the correct one; its gaps to other wrong tokens equal those between correct ones."""
    top = {(i * 7 + 13) % VOCAB: p for i, p in list(token.top.items())[:MAX_WRONG]}
    return Token((token.id * 7 + 13) % VOCAB, top | {token.id: token.top[token.id] - WRONG_GAP})


def _die() -> None:
    sys.stderr.write("RuntimeError: tile_scheduler_metadata must have shape (num_sm_parts, 8)\n")
    sys.stderr.flush()
    os._exit(1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dcp", type=int, default=1)
    parser.add_argument("--exchange", default="ag_rs")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--fault-everywhere", action="store_true")
    parser.add_argument("--noise", choices=("bf16", "fp8", "flips"))
    parser.add_argument("--api", choices=("vllm", "sglang", "openai"), default="vllm")
    parser.add_argument("--max-model-len", type=int, default=40_000)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=VOCAB + 2_000)
    parser.add_argument("--dies-at-start", action="store_true")
    parser.add_argument(
        "--dies-after", type=int, default=-1, help="number of requests after which a faulty setting exits"
    )
    return parser.parse_args()


async def _main(given: argparse.Namespace) -> None:
    server = await asyncio.start_server(DcpEngine(given).serve, "127.0.0.1", given.port, limit=1 << 26, backlog=256)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    body = _parse_arguments()
    if body.dies_at_start and body.dcp > 1:
        sys.stderr.write("capturing CUDA graphs\n")
        _die()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(body))
