"""Serve the answers of a file of tools.greedy_tokens, like an engine that computes the same function.

python -m tests.servers.replayed_engine --file own.json --port 8000 --dcp 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from pathlib import Path

import msgspec

from tests.servers.faulty_engine import Token, _write_answer, _write_json
from tools.greedy_tokens.answers import Answers


class ReplayedEngine:
    """Answer the prompts of a file, one connection after another."""

    def __init__(self, given: Answers) -> None:
        self._answers = {tuple(p): a for p, a in zip(given.prompts, given.answers, strict=True)}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if head.startswith("POST /v1/completions "):
                    self._complete(writer, json.loads(body))
                else:
                    _write_json(writer, {})
                await writer.drain()
        writer.close()

    def _complete(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        prompt = body["prompt"]
        assert isinstance(prompt, list)
        tokens = [Token(position.token, position.logprobs) for position in self._answers[tuple(prompt)]]
        assert len(tokens) == body["max_tokens"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        _write_answer(writer, body, tokens, usage)


async def _main(given: argparse.Namespace) -> None:
    answers = msgspec.json.decode(given.file.read_bytes(), type=Answers)
    server = await asyncio.start_server(ReplayedEngine(answers).serve, "127.0.0.1", given.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dcp", type=int, default=1)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))
