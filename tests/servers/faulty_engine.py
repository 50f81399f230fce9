"""Serve greedy answers from a hash of the prompt, correct or with a planted fault, like engines with DCP bugs.

    python -m tests.servers.faulty_engine --port 0

The first part of a path selects the fault, so http://127.0.0.1:PORT/cache is a server with a fault in its prefix cache:

    good    always the same tokens
    cache   other tokens from the fifth on, if a prompt of at least 256 tokens is repeated
    batch   the same, if more than two requests run concurrently
    long    other tokens from the seventh on after prompts of at least 4,096 tokens
    noise, noise2   correct engines in bf16: logits are moved by rounding, differently in every batch and after prefix-cache hits,
            and each token depends on the previous ones, so that near-ties flip and answers differ from there on
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import random
import sys
from typing import Any

VOCAB = 30_000
CACHED_FROM, LONG_FROM, BATCH_ABOVE = 256, 4_096, 2
STEP_S = 0.02  # duration of an answer; requests that arrive meanwhile join its batch
NOISE, BF16_STEP = 0.02, 0.0625  # rounding of logits between 8 and 16
LOGITS, MEAN_GAP = (12.0, 16.0), 1.0  # of the likeliest token; gaps between candidates are exponential
CANDIDATES = 6


@dataclasses.dataclass
class Token:
    """Hold a token of an answer with the log-probabilities of the likeliest tokens."""

    id: int
    top: dict[int, float]


class FaultyEngine:
    """Serve answers of all modes; count the seen prompts and the running requests of each mode."""

    def __init__(self) -> None:
        self._seen: collections.Counter[tuple[str, str]] = collections.Counter()
        self._busy: collections.Counter[str] = collections.Counter()
        self._random = random.Random(0)

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
        _, mode, *rest = path.split("/")
        if rest == ["v1", "models"]:
            _write_json(writer, {"object": "list", "data": [{"id": "m", "max_model_len": 131_072}]})
        elif method == "POST" and rest == ["v1", "completions"]:
            await self._complete(writer, mode, json.loads(body))
        else:
            _write_json(writer, {"error": "not here"}, 404)
        await writer.drain()

    async def _complete(self, writer: asyncio.StreamWriter, mode: str, body: dict[str, Any]) -> None:
        prompt: list[int] = body["prompt"]
        name = hashlib.sha1(json.dumps(prompt).encode(), usedforsecurity=False).hexdigest()
        self._busy[mode] += 1
        self._seen[mode, name] += 1
        again = self._seen[mode, name] > 1
        await asyncio.sleep(STEP_S)
        if mode.startswith("noise"):
            tokens = self._draw_noisy_tokens(mode, name, body["max_tokens"], again=again, alone=self._busy[mode] == 1)
        else:
            fault = _find_fault(mode, len(prompt), again=again, busy=self._busy[mode])
            tokens = _draw_planted_tokens(name, body["max_tokens"], fault)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        _write_answer(writer, body, tokens, usage)
        self._busy[mode] -= 1

    def _draw_noisy_tokens(self, mode: str, name: str, count: int, *, again: bool, alone: bool) -> list[Token]:
        """Return tokens of a correct engine, which uses the same kernels for each single request but not for each batch."""
        rounding = random.Random(f"{mode} {again}") if alone else self._random
        tokens: list[Token] = []
        for _ in range(count):
            ids, logits = _draw_logits(name, [token.id for token in tokens])
            moved = [round((x + rounding.gauss(0.0, NOISE)) / BF16_STEP) * BF16_STEP for x in logits]
            norm = math.log(sum(map(math.exp, moved)))
            top = {token: x - norm for token, x in sorted(zip(ids, moved, strict=True), key=lambda pair: -pair[1])}
            tokens.append(Token(next(iter(top)), top))
        return tokens


def _find_fault(mode: str, length: int, *, again: bool, busy: int) -> int | None:
    """Return the index of the first wrong token; None if all are right."""
    faults = {
        "cache": (again and length >= CACHED_FROM, 4),
        "batch": (busy > BATCH_ABOVE and length >= CACHED_FROM, 4),
        "long": (length >= LONG_FROM, 6),
    }
    present, first = faults.get(mode, (False, 0))
    return first if present else None


def _draw_planted_tokens(name: str, count: int, fault: int | None) -> list[Token]:
    """Return tokens that do not depend on previous ones, with other tokens from a fault on."""
    chances, tokens = random.Random(name), []
    for i in range(count):
        token, logprob = chances.randrange(10, VOCAB), -chances.random() * 0.5 - 0.01
        if fault is not None and i >= fault:
            token, logprob = (token * 7 + 13) % VOCAB, -1.5
        tokens.append(Token(token, {token: logprob, (token + 1) % VOCAB: logprob - 2.0}))
    return tokens


def _draw_logits(name: str, before: list[int], mean_gap: float = MEAN_GAP) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens and their logits in exact arithmetic."""
    chances = random.Random(f"{name} {before}")
    ids = chances.sample(range(10, VOCAB), CANDIDATES)
    logits = [chances.uniform(*LOGITS)]
    for _ in range(CANDIDATES - 1):
        logits.append(logits[-1] - chances.expovariate(1 / mean_gap))
    return ids, logits


def _make_choice(body: dict[str, Any], tokens: list[Token]) -> dict[str, Any]:
    found: dict[str, Any] = {"index": 0, "text": "".join(f" t{token.id}" for token in tokens)}
    if body.get("return_token_ids"):
        found["token_ids"] = [token.id for token in tokens]
    if wanted := body.get("logprobs"):
        tops = [dict(list(token.top.items())[: int(wanted)]) for token in tokens]
        found["logprobs"] = {
            "tokens": [f"t{token.id}" for token in tokens],
            "token_logprobs": [token.top[token.id] for token in tokens],
            "top_logprobs": [{f"t{i}": p for i, p in top.items()} for top in tops],
        }
    return found


def _write_answer(
    writer: asyncio.StreamWriter, body: dict[str, Any], tokens: list[Token], usage: dict[str, int]
) -> None:
    if not body.get("stream"):
        choice = _make_choice(body, tokens) | {"finish_reason": "length"}
        _write_json(writer, {"choices": [choice], "usage": usage})
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for i, token in enumerate(tokens):
        choice = _make_choice(body, [token]) | {"finish_reason": "length" if i == len(tokens) - 1 else None}
        _write_chunk(writer, b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    _write_chunk(writer, b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _write_json(writer: asyncio.StreamWriter, found: object, status: int = 200) -> None:
    data = json.dumps(found).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def listen(port: int) -> tuple[asyncio.Server, int]:
    """Listen on loopback; return the server and its port."""
    server = await asyncio.start_server(FaultyEngine().serve, "127.0.0.1", port, limit=1 << 26)
    return server, int(server.sockets[0].getsockname()[1])


async def _main(port: int) -> None:
    server, port = await listen(port)
    sys.stdout.write(f"listening on http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args().port))
