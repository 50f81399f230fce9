"""Serve an engine's HTTP API without an engine: send tokens at known times, inject faults, and log the times of all tokens.

    python -m tests.servers.fake_server --port 0 --ttft-ms 20 --gap-ms 50 --log sent.jsonl

The program prints `listening on http://127.0.0.1:PORT`, and runs until it is killed. It accepts vLLM's flags of layouts, so
that dcpbench can start it like vLLM. `async with Running(Script(...)) as server` runs it in the process of a test.

A request may carry its own script in the header X-Script, as JSON with fields of Script. Tokens follow from the prompt:
the same prompt has the same answer on every server of the same vocabulary, with the same logprobs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import ssl
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Self

from dcpbench.servers.socket_timestamps import ANCILLARY, StampedSocket, read_arrival_s

FAULTS = (
    "401",
    "404",
    "400",
    "429",
    "429-once",
    "500",
    "500-mid",
    "error-event",
    "html",
    "not-json",
    "half-event",
    "close",
    "close-mid",
    "reset",
    "silent",
    "silent-mid",
    "endless",
    "endless-line",
    "endless-head",
    "comments",
    "redirect",
    "no-usage-no-tokens",
    "crlf",
    "slow-bytes",
    "continue",
)
MIDDLE_FAULTS = ("500-mid", "error-event", "half-event", "close-mid", "silent-mid", "comments")
"""Faults in place of the second chunk."""
WRONG_BODIES = {  # bodies in place of a stream, each with its type
    "html": ("<!doctype html><title>Sign in</title>" * 20, "text/html"),
    "not-json": ("{half", "application/json"),
}
ENDLESS_BYTES = 1 << 30  # maximum bytes of an endless answer, so that a failing test does not hang


@dataclasses.dataclass
class Script:
    """Describe how a request is answered."""

    ttft_ms: float = 0.0
    gap_ms: float = 0.0
    gaps_ms: list[float] | None = None  # gaps before the chunks after the first, used in a cycle; replaces gap_ms
    burst: int = 1  # tokens of a chunk
    stall_every: int = 0  # every n-th gap of all requests lasts stall_ms
    stall_ms: float = 500.0
    usage: str = "asked"
    """Chunks with a usage: `asked` follows stream_options; `always` is the last chunk; `never` is none."""
    token_ids: bool = True  # True if the server supports return_token_ids, like vLLM
    takes_ids: bool = True  # True if a prompt may be token ids
    ends_early: int = 0  # maximum tokens of an answer; 0: the number that the request asks for
    fault: str = ""
    fault_every: int = 1  # every n-th request has the fault


@dataclasses.dataclass
class Model:
    """Describe the served model."""

    name: str = "fake"
    vocab: int = 1000
    max_model_len: int = 32768
    tokens_per_word: float = 1.0  # mean number of tokens per word of text
    wrong_from: int = 0  # context length from which tokens are wrong; 0: never
    drift_from: int = 0
    drift: float = 0.0  # value added to each logprob from the context length drift_from on
    noise: float = 0.0
    """Standard deviation of random noise on each logprob, and probability of another token, as in engines whose sums depend
    on the batch.
    """
    flips: float = 0.0
    logprobs: bool = True  # True if the server returns logprobs; that of the second token is lower by 2
    strict: bool = False  # True if the server refuses fields that OpenAI's API lacks
    api_key: str = ""
    engine: str = "vllm"
    version: str = "0.32.0"
    kv_blocks: int = 1000
    block_size: int = 16
    kv_size_label: bool = True  # True if vllm:cache_config_info has kv_cache_size_tokens, as newer versions have
    log_kv_tokens: int = 0  # KV cache size in the log; 0: the true one
    offer_metrics: bool = True  # True if /metrics exists; in SGLang it needs --enable-metrics
    draft_tokens: int = 0
    """Drafts per step: each chunk after the first is a step, in which all tokens except the last are accepted drafts."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)  # reported by /get_server_info
    trace: str = ""
    """File that /stop_profile copies into the folder of VLLM_TORCH_PROFILER_DIR or SGLANG_TORCH_PROFILER_DIR."""


@dataclasses.dataclass
class Sent:
    """Record the answer to one request. Times are values of time.perf_counter(), which all processes of a machine share."""

    number: int
    path: str
    came_s: float  # arrival time of the complete request, from the kernel if it provides one
    prompt_tokens: int = 0
    token_s: list[float] = dataclasses.field(
        default_factory=list
    )  # times immediately before each token's chunk was written
    ended_s: float = 0.0
    fault: str = ""
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


class Listening(socket.socket):
    """Accept connections with kernel timestamps."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Override socket.socket."""
        number, address = self._accept()  # type: ignore[attr-defined]
        return Accepted(self.family, self.type, self.proto, fileno=number).enable_timestamps(), address


class Accepted(StampedSocket):
    """Record the arrival time of the last bytes that were read."""

    came_s: float | None = None

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Override socket.socket."""
        data, control, _, _ = self.recvmsg(size, ANCILLARY, flags)
        self.came_s = read_arrival_s(control) or time.perf_counter()
        return data


def open_listening_socket(host: str, port: int) -> Listening:
    """Return a listening socket that records the arrival times of requests."""
    sock = Listening(
        socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # asyncio sets TCP_NODELAY for this protocol
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


OPENAI = {
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "n",
    "stream",
    "stream_options",
    "stop",
    "seed",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "user",
    "echo",
    "suffix",
    "best_of",
    "logit_bias",
    "response_format",
}
STATUS = {
    200: "OK",
    301: "Moved Permanently",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


def draw_next_token(context: list[int], vocab: int) -> tuple[int, float]:
    """Return the token after `context` and its logprob, which depend on a hash of the context."""
    digest = zlib.crc32(b" ".join(b"%d" % token for token in context[-8:]), len(context))
    return digest % vocab, -0.05 - (digest >> 12) % 1000 / 2000


class FakeServer:
    """Answer requests according to scripts; `sent` records the answers."""

    def __init__(self, script: Script | None = None, model: Model | None = None) -> None:
        self.script, self.model = script or Script(), model or Model()
        self.scripts: list[Script] = []
        """For the first requests of completions, in order; then `script`."""
        self.sent: list[Sent] = []
        self.ready = True
        self.connections = 0
        self.refused = 0
        self.gaps = 0
        self.prompt_tokens = self.generated = self.running = self.hits = 0
        self.steps = 0
        self.accepted: list[int] = [0] * self.model.draft_tokens
        """Steps that accepted a draft, by position."""
        self.profiles: list[str] = []
        self._seen: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, request after request."""
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._serve_request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, ssl.SSLError, asyncio.CancelledError):
            pass  # the client disconnected, or the server is stopping
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(Exception):
                writer.close()

    def be_ready(self) -> None:
        """Answer requests from now on, instead of sending 503."""
        self.ready = True

    async def stop(self) -> None:
        """Close all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line.strip():
            return False
        method, path, _ = line.decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = path.partition("?")[0]
        if not self.ready:
            return await _send_json(writer, 503, {"error": "starting"})
        key = self.model.api_key
        if key and headers.get("authorization") != f"Bearer {key}" and path != "/health":
            return await _send_json(writer, 401, {"error": {"message": "Incorrect API key provided.", "code": 401}})
        if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            return await self._complete(writer, path, headers, body)
        return await self._serve_other_path(writer, method, path)

    async def _serve_other_path(self, writer: asyncio.StreamWriter, method: str, path: str) -> bool:
        model = self.model
        if path == "/health":
            return await _send_text(writer, 200, "", "text/plain")
        if path == "/v1/models":
            card = {"id": model.name, "object": "model", "owned_by": model.engine}
            return await _send_json(writer, 200, {"data": [card | {"max_model_len": model.max_model_len}]})
        if path == "/version" and model.engine == "vllm":
            return await _send_json(writer, 200, {"version": model.version})
        if path in ("/get_server_info", "/server_info") and model.engine == "sglang":
            info = {"version": model.version, "model_path": model.name, **model.args}
            if self.steps:
                mean = 1 + sum(self.accepted) / self.steps
                info |= {
                    "speculative_num_steps": model.draft_tokens,
                    "internal_states": [{"avg_spec_accept_length": mean}],
                }
            return await _send_json(writer, 200, info | {"max_total_num_tokens": model.kv_blocks * model.block_size})
        if path == "/metrics" and model.engine in ("vllm", "sglang") and model.offer_metrics:
            return await _send_text(writer, 200, self._format_metrics(), "text/plain; version=0.0.4")
        if method == "POST" and path in ("/start_profile", "/stop_profile"):
            return await self._serve_profiler(writer, path)
        return await _send_json(writer, 404, {"detail": "Not Found"})

    async def _serve_profiler(self, writer: asyncio.StreamWriter, path: str) -> bool:
        folders = [os.environ.get(f"{name}_TORCH_PROFILER_DIR", "") for name in ("VLLM", "SGLANG")]
        folder = next(filter(None, folders), "")
        if not folder:
            return await _send_json(writer, 404, {"detail": "Not Found"})
        self.profiles.append(path)
        if path == "/stop_profile" and self.model.trace:
            source = Path(self.model.trace)
            for rank in range(int(self.model.args.get("tensor_parallel_size", 1) or 1)):
                shutil.copy(
                    source,
                    Path(folder)
                    / f"rank{rank}.{time.time_ns()}.pt.trace.json{source.suffix if source.suffix == '.gz' else ''}",
                )
        return await _send_text(writer, 200, "", "text/plain")

    def _format_metrics(self) -> str:
        name, model = self.model.engine, self.model
        labels = f'model_name="{model.name}"'
        if name == "sglang":
            return (
                f"# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{{{labels}}} {self.running}\n"
                f"# TYPE sglang:prompt_tokens_total counter\nsglang:prompt_tokens_total{{{labels}}} {self.prompt_tokens}\n"
                f"sglang:generation_tokens_total{{{labels}}} {self.generated}\n"
                f"sglang:cached_tokens_total{{{labels}}} {self.hits}\n"
                f"sglang:num_retracted_requests_total{{{labels}}} 0\n"
                f"sglang:max_total_num_tokens{{{labels}}} {model.kv_blocks * model.block_size}\n"
            )
        return (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="0",{labels}}} {self.running}\n'
            "# TYPE vllm:prompt_tokens_total counter\n"
            f'vllm:prompt_tokens_total{{engine="0",{labels}}} {float(self.prompt_tokens)}\n'
            f'vllm:generation_tokens_total{{engine="0",{labels}}} {float(self.generated)}\n'
            f'vllm:num_preemptions_total{{engine="0",{labels}}} 0.0\n'
            f'vllm:prefix_cache_queries_total{{engine="0",{labels}}} {float(self.prompt_tokens)}\n'
            f'vllm:prefix_cache_hits_total{{engine="0",{labels}}} {float(self.hits)}\n'
        ) + "".join(
            [
                self._format_draft_counters(labels),
                *(self._format_cache_config(engine) for engine in range(self._get_degree("dp_size"))),
            ]
        )

    def _format_draft_counters(self, labels: str) -> str:
        """Return vLLM's counters of --speculative-config."""
        if not self.model.draft_tokens:
            return ""
        return f'vllm:spec_decode_num_drafts_total{{engine="0",{labels}}} {float(self.steps)}\n' + "".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",{labels},position="{n}"}} {float(count)}\n'
            for n, count in enumerate(self.accepted)
        )

    def _get_degree(self, name: str) -> int:
        return int(self.model.args.get(name, 1) or 1)

    def count_engine_tokens(self) -> int:
        """Return the tokens that the KV cache of one vLLM engine holds, over its context parallel ranks."""
        return self.model.kv_blocks * self.model.block_size * self._get_degree("dcp_size")

    def _format_cache_config(self, engine: int) -> str:
        """Return vLLM's metric, in which num_gpu_blocks is the sum over engines and tokens are of one engine."""
        model = self.model
        size = f',kv_cache_size_tokens="{self.count_engine_tokens()}"' if model.kv_size_label else ""
        return (
            f'vllm:cache_config_info{{block_size="{model.block_size}",cache_dtype="auto",engine="{engine}"{size},'
            f'num_gpu_blocks="{model.kv_blocks * self._get_degree("dp_size")}"}} 1.0\n'
        )

    def log_kv_cache(self) -> None:
        """Write the log lines about the KV cache that the engine writes when it starts."""
        model = self.model
        if model.engine == "sglang":
            tokens = model.log_kv_tokens or model.kv_blocks * model.block_size
            sys.stderr.write(f"[2026-11-28 10:00:00 TP0] max_total_num_tokens={tokens}, chunked_prefill_size=8192\n")
        if model.engine == "vllm":
            tokens = model.log_kv_tokens or self.count_engine_tokens()
            for engine in range(self._get_degree("dp_size")):
                sys.stderr.write(
                    f"(EngineCore_DP{engine} pid=7) INFO 11-28 10:00:00 [kv_cache_utils.py:1316] "
                    f"GPU KV cache size: {tokens:,} tokens\n"
                )
        sys.stderr.flush()

    def _get_script(self, headers: dict[str, str], number: int) -> Script:
        if "x-script" in headers:
            return Script(**json.loads(headers["x-script"]))
        return self.scripts[number] if number < len(self.scripts) else self.script

    async def _complete(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], data: bytes) -> bool:
        stamped = getattr(writer.get_extra_info("socket")._sock, "came_s", None)
        sent = Sent(len(self.sent), path, stamped or time.perf_counter())
        self.sent.append(sent)
        script = self._get_script(headers, sent.number)
        if script.fault and (sent.number + 1) % script.fault_every == 0:
            sent.fault = script.fault
        try:
            body = json.loads(data)
        except ValueError:
            return await _send_json(writer, 400, {"error": {"message": "the body is no JSON", "code": 400}})
        sent.body, sent.headers = body, headers
        answered = await self._send_faulty_head(writer, sent, headers)
        if answered is not None:
            return answered
        if refusal := self._find_refusal(body, script):
            return await _send_json(
                writer, 400, {"error": {"message": refusal, "type": "BadRequestError", "code": 400}}
            )
        prompt = self._get_prompt_ids(body)
        sent.prompt_tokens = len(prompt)
        count = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        count = min(count, script.ends_early or count)
        if len(prompt) + count > self.model.max_model_len:
            message = f"This model's maximum context length is {self.model.max_model_len} tokens."
            return await _send_json(writer, 400, {"error": {"message": message, "code": 400}})
        self.prompt_tokens += len(prompt)
        shared = str(prompt[:16])
        self.hits += 16 * (len(prompt) // 16) if shared in self._seen else 0
        self._seen.add(shared)
        self.running += 1
        try:
            if body.get("stream"):
                return await self._send_stream(writer, sent, script, body, prompt, count)
            return await self._send_whole(writer, sent, script, body, prompt, count)
        finally:
            self.running -= 1
            sent.ended_s = time.perf_counter()

    async def _send_faulty_head(self, writer: asyncio.StreamWriter, sent: Sent, headers: dict[str, str]) -> bool | None:
        """Send a faulty response instead of an answer; return None if the answer is to begin."""
        fault = sent.fault
        if fault == "429-once":
            if headers.get("x-retry") or self.refused > 0:
                self.refused = 0
                return None
            self.refused += 1
            fault = "429"
        if fault in ("400", "401", "404", "429", "500"):
            error = {"error": {"message": f"{STATUS[int(fault)]}: as scripted", "code": int(fault)}}
            more = {"Retry-After": "0"} if fault == "429" else {}
            return await _send_json(writer, int(fault), error, more)
        if fault == "redirect":
            return await _send_text(writer, 301, "", "text/plain", {"Location": "http://elsewhere.invalid/v1"})
        if fault in WRONG_BODIES:
            return await _send_text(writer, 200, *WRONG_BODIES[fault])
        if fault in ("close", "reset"):
            if fault == "reset":
                writer.transport.abort()
            return False
        if fault == "silent":
            await asyncio.Event().wait()
        if fault == "endless-head":
            writer.write(b"HTTP/1.1 200 OK\r\nX-Endless: ")
            return await _pour(writer, b"x" * 65536)
        return None

    def _find_refusal(self, body: dict[str, Any], script: Script) -> str:
        if self.model.strict and (unknown := set(body) - OPENAI):
            return f"Unrecognized request argument supplied: {min(unknown)}"
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            if not script.takes_ids:
                return "prompt must be a string"
            if any(not isinstance(token, int) or token >= self.model.vocab for token in prompt):
                return f"Token id {max(prompt)} is out of vocabulary"
        if body.get("model") not in (self.model.name, None):
            return f"The model `{body['model']}` does not exist."
        return ""

    def _get_prompt_ids(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        if prompt is None:
            prompt = " ".join(str(message.get("content", "")) for message in body.get("messages", []))
        ids = [zlib.crc32(word.encode()) % self.model.vocab for word in prompt.split()]
        more = round(len(ids) * self.model.tokens_per_word)
        return (ids * (more // max(len(ids), 1) + 1))[:more] or [0]

    def _draw_answer(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        model, context, found = self.model, list(prompt), []
        for _ in range(count):
            token, logprob = draw_next_token(context, model.vocab)
            if (model.wrong_from and len(context) >= model.wrong_from) or random.random() < model.flips:
                token = (token + 1) % model.vocab
            if model.drift_from and len(context) >= model.drift_from:
                logprob += model.drift
            if model.noise:
                logprob += random.gauss(0.0, model.noise)
            found.append((token, logprob))
            context.append(token)
        return found

    def _make_choice(
        self, body: dict[str, Any], tokens: list[tuple[int, float]], *, chat: bool, stream: bool
    ) -> dict[str, Any]:
        """Return a choice with these tokens."""
        text = "".join(f" t{token}" for token, _ in tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        if chat:
            choice["delta" if stream else "message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        wanted = body.get("logprobs")
        if wanted not in (None, False) and self.model.logprobs:
            named = [(f"token_id:{t}" if body.get("return_tokens_as_token_ids") else f" t{t}", p) for t, p in tokens]
            if chat:
                choice["logprobs"] = {
                    "content": [
                        {
                            "token": t,
                            "logprob": p,
                            "top_logprobs": [{"token": t, "logprob": p}, {"token": " second", "logprob": p - 2.0}],
                        }
                        for t, p in named
                    ]
                }
            else:
                choice["logprobs"] = {
                    "tokens": [t for t, _ in named],
                    "token_logprobs": [p for _, p in named],
                    "top_logprobs": [{t: p, " second": p - 2.0} for t, p in named],
                    "text_offset": [0] * len(named),
                }
        return choice

    def _make_usage(self, prompt: list[int], done: int) -> dict[str, int]:
        return {"prompt_tokens": len(prompt), "completion_tokens": done, "total_tokens": len(prompt) + done}

    async def _send_whole(
        self,
        writer: asyncio.StreamWriter,
        sent: Sent,
        script: Script,
        body: dict[str, Any],
        prompt: list[int],
        count: int,
    ) -> bool:
        chat = sent.path.endswith("chat/completions")
        await asyncio.sleep((script.ttft_ms + script.gap_ms * (count - 1)) / 1000)
        tokens = self._draw_answer(prompt, count)
        self.generated += count
        choice = self._make_choice(body, tokens, chat=chat, stream=False) | {"finish_reason": "length"}
        if body.get("return_token_ids") and script.token_ids:
            choice |= {"token_ids": [t for t, _ in tokens]}
        sent.token_s = [time.perf_counter()] * count
        response = {"id": f"cmpl-{sent.number}", "model": self.model.name, "choices": [choice]}
        return await _send_json(writer, 200, response | {"usage": self._make_usage(prompt, count)})

    async def _send_stream(
        self,
        writer: asyncio.StreamWriter,
        sent: Sent,
        script: Script,
        body: dict[str, Any],
        prompt: list[int],
        count: int,
    ) -> bool:
        chat, fault = sent.path.endswith("chat/completions"), sent.fault
        stream_options = (body.get("stream_options") or {}) if script.usage == "asked" else {}
        end = b"\r\n\r\n" if fault == "crlf" else b"\n\n"
        head = {"id": f"cmpl-{sent.number}", "object": "text_completion", "model": self.model.name}
        if fault == "continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            _send_event(writer, head | {"choices": [first]}, end)
        if fault == "endless-line":
            return await _pour(writer, b"data: " + b"x" * 65536, chunked=True)
        tokens, text, due = self._draw_answer(prompt, count), b"", sent.came_s + script.ttft_ms / 1000
        for number, first_token in enumerate(range(0, count, script.burst)):
            piece = tokens[first_token : first_token + script.burst]
            done = first_token + len(piece)
            due += self._get_gap_s(script, number) / 1000 if number else 0.0
            choice = self._make_choice(body, piece, chat=chat, stream=True)
            if body.get("return_token_ids") and script.token_ids:
                choice |= {"token_ids": [t for t, _ in piece]} | ({} if number else {"prompt_token_ids": prompt})
            choice["finish_reason"] = "length" if done == count and fault != "endless" else None
            usage = {"usage": self._make_usage(prompt, done)} if stream_options.get("continuous_usage_stats") else {}
            text = json.dumps(head | {"choices": [choice]} | usage, separators=(",", ":")).encode()
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            if number == 1 and fault in MIDDLE_FAULTS:
                return await self._send_faulty_middle(writer, fault, text)
            sent.token_s += [time.perf_counter()] * len(piece)
            await _write_event(writer, text, end, slowly=fault == "slow-bytes")
            self.generated += len(piece)
            self._count_step(number, len(piece))
        if fault == "endless":
            return await _pour(writer, b"data: " + text + end, chunked=True)
        if script.usage == "always" or stream_options.get("include_usage"):
            _send_event(writer, head | {"choices": [], "usage": self._make_usage(prompt, count)}, end)
        _send_chunk(writer, b"data: [DONE]" + end)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _count_step(self, number: int, tokens: int) -> None:
        """Count the chunk of a step that verifies drafts."""
        if number and self.model.draft_tokens:
            self.steps += 1
            for position in range(tokens - 1):
                self.accepted[position] += 1

    async def _send_faulty_middle(self, writer: asyncio.StreamWriter, fault: str, text: bytes) -> bool:
        if fault in ("500-mid", "error-event"):
            error = {"error": {"message": "EngineCore encountered an issue: as scripted", "code": 500}}
            _send_event(writer, error, b"\n\n")
            if fault == "error-event":
                _send_chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
        elif fault == "half-event":
            _send_chunk(writer, b"data: " + text[: len(text) // 2])
            writer.write(b"0\r\n\r\n")
        elif fault == "silent-mid":
            await writer.drain()
            await asyncio.Event().wait()
        elif fault == "comments":
            while True:
                _send_chunk(writer, b": still here\n\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        await writer.drain()
        return False

    def _get_gap_s(self, script: Script, number: int) -> float:
        self.gaps += 1
        if script.stall_every and self.gaps % script.stall_every == 0:
            return script.stall_ms
        return script.gaps_ms[(number - 1) % len(script.gaps_ms)] if script.gaps_ms else script.gap_ms


def _send_event(writer: asyncio.StreamWriter, body: dict[str, Any], end: bytes) -> None:
    _send_chunk(writer, b"data: " + json.dumps(body, separators=(",", ":")).encode() + end)


async def _write_event(writer: asyncio.StreamWriter, text: bytes, end: bytes, *, slowly: bool) -> None:
    """Write an event in one chunk, or in many."""
    if slowly:
        for i in range(0, len(text), 16):
            _send_chunk(writer, (b"" if i else b"data: ") + text[i : i + 16])
            await asyncio.sleep(0)
        _send_chunk(writer, end)
    else:
        _send_chunk(writer, b"data: " + text + end)
    await writer.drain()


def _send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write a chunk of HTTP."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def _pour(writer: asyncio.StreamWriter, data: bytes, *, chunked: bool = False) -> bool:
    """Write the same text repeatedly."""
    for _ in range(ENDLESS_BYTES // len(data)):
        if chunked:
            _send_chunk(writer, data)
        else:
            writer.write(data)
        await writer.drain()
    return False


async def _send_json(writer: asyncio.StreamWriter, code: int, body: object, more: dict[str, str] | None = None) -> bool:
    return await _send_text(writer, code, json.dumps(body), "application/json", more)


async def _send_text(
    writer: asyncio.StreamWriter, code: int, text: str, kind: str, more: dict[str, str] | None = None
) -> bool:
    body = text.encode()
    lines = [f"HTTP/1.1 {code} {STATUS[code]}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (more or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    await writer.drain()
    return True


class Running:
    """Run a server in this process at a free loopback port; `async with` returns it with its `url`."""

    def __init__(
        self, script: Script | None = None, model: Model | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.server, self._tls = FakeServer(script, model), tls
        self.url = ""

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.start_server(
            self.server.serve, sock=open_listening_socket("127.0.0.1", 0), ssl=self._tls, backlog=1024
        )
        port = self._listening.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()
        await self.server.stop()


def _parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for struct in (Script, Model):
        for field in dataclasses.fields(struct):
            default, name = field.default, "--" + field.name.replace("_", "-")
            if field.name == "name":
                name = "--served-model-name"
            if isinstance(default, bool):
                parser.add_argument(name, action=argparse.BooleanOptionalAction, default=default, dest=field.name)
            elif isinstance(default, str | int | float):
                parser.add_argument(name, type=type(default), default=default, dest=field.name)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", help="file for a JSON line per finished request, written at exit")
    parser.add_argument("--script", help="JSON lines, a Script each, for the first requests")
    parser.add_argument("--tls-cert")
    parser.add_argument("--tls-key")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "-tp", type=int, default=1)
    parser.add_argument("--decode-context-parallel-size", "--dcp-size", "-dcp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "--dp-size", "-dp", type=int, default=1)
    parser.add_argument("--refuse", default="2,2", help="TP,DCP of a layout that is refused with a reason on stderr")
    parser.add_argument("--start-delay", type=float, default=0.0, help="time in s before it listens")
    parser.add_argument("--health-delay", type=float, default=0.0, help="time in s after that for which it answers 503")
    parser.add_argument("--crash-after", type=float, default=0.0, help="time in s after which it exits with an error")
    parser.add_argument("--engine-log", type=Path, help="log of a real engine that is written to stderr at the start")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--children", type=int, default=0, help="child processes that only wait, like ranks")
    return parser.parse_known_args()


def _make_struct(kind: type, given: argparse.Namespace) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in vars(given).items() if name in names})


async def _main(given: argparse.Namespace, others: list[str]) -> None:
    server = FakeServer(_make_struct(Script, given), _make_struct(Model, given))
    server.model.args = {
        "tp_size": given.tensor_parallel_size,
        "dcp_size": given.decode_context_parallel_size,
        "dp_size": given.data_parallel_size,
        "tensor_parallel_size": given.tensor_parallel_size,
        "other_args": others,
    }
    if given.script:
        lines = (await asyncio.to_thread(Path(given.script).read_text)).splitlines()
        server.scripts = [Script(**json.loads(line)) for line in lines]
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        if number == signal.SIGTERM and given.ignore_sigterm:
            signal.signal(number, signal.SIG_IGN)
        else:
            loop.add_signal_handler(number, stopped.set)
    await asyncio.sleep(given.start_delay)
    server.log_kv_cache()
    tls = None
    if given.tls_cert:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(given.tls_cert, given.tls_key)
    sock = open_listening_socket(given.host, given.port)
    taking = await asyncio.start_server(server.serve, sock=sock, ssl=tls, backlog=1024)
    scheme = "https" if tls else "http"
    sys.stdout.write(f"listening on {scheme}://{given.host}:{sock.getsockname()[1]}" + "\n")
    sys.stdout.flush()
    if given.health_delay:
        server.ready = False
        loop.call_later(given.health_delay, server.be_ready)
    if given.crash_after:
        loop.call_later(given.crash_after, _crash)
    await stopped.wait()
    taking.close()
    if given.log:
        lines = (json.dumps(dataclasses.asdict(sent)) + "\n" for sent in server.sent)
        await asyncio.to_thread(Path(given.log).write_text, "".join(lines))


def _crash() -> None:
    sys.stderr.write("RuntimeError: CUDA error: an illegal memory access was encountered\n")
    sys.stderr.flush()
    os._exit(1)


def main() -> int:
    """Serve until killed."""
    given, others = _parse_arguments()
    layout = f"{given.tensor_parallel_size},{given.decode_context_parallel_size}"
    if layout == given.refuse:
        sys.stderr.write(
            "(EngineCore) ERROR worker failed to start\nAssertionError: decode context parallel size "
            f"{given.decode_context_parallel_size} is not supported by the attention backend CPU_ATTN.\n"
        )
        return 1
    if given.engine_log:
        sys.stderr.write(given.engine_log.read_text(encoding="utf-8"))
        sys.stderr.flush()
    for _ in range(given.children):
        if os.fork() == 0:
            while True:
                signal.pause()
    asyncio.run(_main(given, others))
    return 0


if __name__ == "__main__":
    sys.exit(main())
