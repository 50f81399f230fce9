"""Serve an engine's HTTP API with steps of known times and continuous batching within vLLM's token budget.

    python -m tests.servers.step_engine --port 8000 --max-num-batched-tokens 512 --asynchronous

A step takes compute_step_ms(). Its flags are vLLM's. With --separate a step has either prompts or decodes, as in SGLang; with
--asynchronous each step is planned while the previous one runs. With --row-multiple N, tokens of prompts take twice as long in a step
if its number of tokens is no multiple of N. With --launch-ms, the host takes this long to launch a step with prompts after it is
planned, which the previous step hides if it lasts as long; with --begin-ms, such a step begins at least this long after it is planned. With --first-token-us, the front end sends no tokens for
this long per prompt token when the first token of a prompt comes. /start_profile and /stop_profile write a trace of the steps between them for
each rank, with the kernels of KERNELS, and one of the front end.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.servers.faulty_engine import _write_chunk, _write_json
from tests.unit.trace_builder import Trace

KERNELS = {  # kernels of a traced step, each with its share of the step's time; the rest of the step is idle
    "flash_fwd_splitkv_mla_kernel": 0.4,
    "nvjet_tst_gemm": 0.25,
    "ncclDevKernel_AllReduce_Sum": 0.2,
    "some_kernel_of_its_own": 0.05,
}
MAX_LATE_S = 5e-3  # maximum delay of a step on a busy machine that does not delay later steps
BASE_MS, MS_PER_REQUEST, MS_PER_KV_TOKEN, MS_PER_TOKEN, MS_PER_PAIR = 20.0, 0.5, 1e-3, 0.02, 1e-5


def compute_step_ms(contexts: list[int], chunks: list[tuple[int, int]]) -> float:
    """Return the time of a step with decodes at these contexts and chunks of (tokens, prefix)."""
    decodes = MS_PER_REQUEST * len(contexts) + MS_PER_KV_TOKEN * sum(contexts)
    return BASE_MS + decodes + sum(MS_PER_TOKEN * t + MS_PER_PAIR * t * p for t, p in chunks)


@dataclasses.dataclass(eq=False)
class Request:
    """Hold a request that is being served."""

    prompt: int
    output: int
    writer: asyncio.StreamWriter
    usage: bool
    prefilled: int = 0
    planned: int = 0  # output tokens that planned steps produce
    sent: int = 0
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def is_gone(self) -> bool:
        """Return True if its client has closed the connection."""
        return self.writer.transport.is_closing()


@dataclasses.dataclass
class Step:
    """Hold a planned step."""

    decodes: list[Request]
    prompts: list[Request]
    finished_prompts: list[Request]
    ms: float
    begin_s: float  # earliest begin, by time.perf_counter()
    launched_s: float  # time at which the host has launched the step


class StepEngine:
    """Serve requests in steps of known times."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        self.wake = asyncio.Event()
        self.outputs: asyncio.Queue[Step] = asyncio.Queue()
        self.steps = 0
        self.delivered: list[tuple[float, int, int]] = []
        """Time of time.perf_counter() at which the tokens of each step were sent, and its numbers of prompts and decodes."""
        self.traced: list[tuple[float, int, int]] | None = None

    async def run(self) -> None:
        """Run steps for ever."""
        planned, end = None, 0.0
        while True:
            step = planned or self.plan_step()
            if step is None:
                self.wake.clear()
                await self.wake.wait()
                end = 0.0
                continue
            now = time.perf_counter()
            begin = end if now - end < MAX_LATE_S else now  # a step begins at the end of the previous one
            end = max(max(begin, step.begin_s) + step.ms / 1e3 * self.given.time_factor, step.launched_s)
            planned = self.plan_step() if self.given.asynchronous else None
            await asyncio.sleep(max(end - time.perf_counter(), 0.0))
            if self.traced is not None:
                self.traced.append((step.ms * 1e3, len(step.prompts), len(step.decodes)))
            if self.given.first_token_us:
                self.outputs.put_nowait(step)
            else:
                self.deliver(step)

    async def run_front_end(self) -> None:
        """Send the tokens of steps for ever, one step after the other."""
        while True:
            step = await self.outputs.get()
            await asyncio.sleep(sum(r.prompt for r in step.finished_prompts) * self.given.first_token_us / 1e6)
            self.deliver(step)

    def plan_step(self) -> Step | None:
        """Return the next step: decodes first, then prompts in the order in which they came, up to the budget."""
        self.running = [r for r in self.running if not r.is_gone and r.planned < r.output]
        self.waiting = collections.deque(r for r in self.waiting if not r.is_gone)
        decodes = [r for r in self.running if r.prefilled == r.prompt]
        chunks, budget = [], self.given.max_num_batched_tokens - (0 if self.given.separate else len(decodes))
        while self.waiting and len(self.running) < self.given.max_num_seqs:
            self.running.append(self.waiting.popleft())
        for request in self.running:
            take = min(request.prompt - request.prefilled, budget)
            if take > 0:
                chunks.append((request, take, request.prefilled))
                request.prefilled, budget = request.prefilled + take, budget - take
        if self.given.separate and chunks:
            decodes = []
        if not decodes and not chunks:
            return None
        contexts = [r.prompt + r.planned for r in decodes]
        finished = [r for r, _, _ in chunks if r.prefilled == r.prompt]
        for request in (*decodes, *finished):
            request.planned += 1
        ms, tokens = (
            compute_step_ms(contexts, [(take, prefix) for _, take, prefix in chunks]),
            sum(c[1] for c in chunks),
        )
        if tokens and (tokens + len(decodes)) % self.given.row_multiple:
            ms += MS_PER_TOKEN * tokens
        now = time.perf_counter()
        begin_s, launched_s = (
            now + (of_host / 1e3 if chunks else 0.0) for of_host in (self.given.begin_ms, self.given.launch_ms)
        )
        return Step(decodes, [r for r, _, _ in chunks], finished, ms, begin_s, launched_s)

    def deliver(self, step: Step) -> None:
        """Send the tokens of a step."""
        self.steps += 1
        self.delivered.append((time.perf_counter(), len(step.prompts), len(step.decodes)))
        if 0 <= self.given.dies_after <= self.steps:
            sys.stderr.write("RuntimeError: CUDA error: an illegal memory access was encountered\n")
            sys.stderr.flush()
            os._exit(1)
        for request in (*step.decodes, *step.finished_prompts):
            if request.is_gone:
                request.done.set()
                continue
            request.sent += 1
            last = request.sent == request.output
            event: dict[str, Any] = {"choices": [{"text": " a", "finish_reason": "length" if last else None}]}
            if request.usage:
                event["usage"] = {"prompt_tokens": request.prompt, "completion_tokens": request.sent}
            _write_chunk(request.writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            if last:
                _write_chunk(request.writer, b"data: [DONE]\n\n")
                request.writer.write(b"0\r\n\r\n")
                request.done.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head, *_ = (lines := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n"))
                length = next((int(x.partition(":")[2]) for x in lines if x.lower().startswith("content-length")), 0)
                body = await reader.readexactly(length)
                method, path, _ = head.split(" ", 2)
                await self.answer(method, path, body, writer)
                await writer.drain()
        writer.close()

    async def answer(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        if path == "/health":
            _write_json(writer, {})
        elif path == "/version":
            _write_json(writer, {"version": "0.26.0"})
        elif path == "/v1/models":
            card = {"id": self.given.model, "max_model_len": self.given.max_model_len}
            _write_json(writer, {"object": "list", "data": [card]})
        elif path == "/steps":
            _write_json(writer, self.delivered)
        elif path == "/start_profile" and self.given.traces:
            self.traced = []
            _write_json(writer, {})
        elif path == "/stop_profile" and self.traced is not None:
            self.write_traces()
            _write_json(writer, {})
        elif method == "POST" and path == "/v1/completions":
            await self.complete(writer, json.loads(body))
        else:
            _write_json(writer, {"error": "not here"}, 404)

    async def complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        """Take a request and wait until it has been answered."""
        usage = bool(body.get("stream_options", {}).get("continuous_usage_stats"))
        request = Request(len(body["prompt"]), body["max_tokens"], writer, usage)
        if request.prompt + request.output > self.given.max_model_len:
            _write_json(writer, {"error": {"message": "longer than max_model_len", "code": 400}}, 400)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.waiting.append(request)
        self.wake.set()
        await request.done.wait()

    def write_traces(self) -> None:
        """Write a trace of the profiled steps for each rank; kernels of a later rank take 2 % longer."""
        folder, traced, self.traced = Path(self.given.traces), self.traced or [], None
        front = Trace()
        front.range("AsyncLLM.step", 0, 10)
        (folder / f"host_1.async_llm.{time.time_ns()}.pt.trace.json").write_text(front.text())
        for rank in range(self.given.tensor_parallel_size):
            trace, at = Trace(), 0.0
            trace.top["distributedInfo"] = {
                "backend": "nccl",
                "rank": rank,
                "world_size": self.given.tensor_parallel_size,
            }
            for us, prompts, decodes in traced:
                trace.range(f"execute_context_{prompts}(0)_generation_{decodes}({decodes})", at, at + us)
                begin = at + 10
                for name, share in KERNELS.items():
                    end = begin + us * share * (1 + 0.02 * rank)
                    trace.gpu(name, begin, end, trace.call("cudaLaunchKernel", at + 5, at + 6))
                    begin = end
                at += us
            path = folder / f"dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{time.time_ns()}.pt.trace.json"
            path.write_text(trace.text())


def parse_flags() -> argparse.Namespace:
    """Parse the flags, of which several are vLLM's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="m")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--decode-context-parallel-size", type=int, default=1)
    parser.add_argument("--dcp-comm-backend", default="ag_rs")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=40_000)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--traces", default="")
    parser.add_argument("--separate", action="store_true")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--time-factor", type=float, default=1.0, help="factor on the time of each step")
    parser.add_argument("--row-multiple", type=int, default=1)
    parser.add_argument("--first-token-us", type=float, default=0.0)
    parser.add_argument("--launch-ms", type=float, default=0.0)
    parser.add_argument("--begin-ms", type=float, default=0.0)
    parser.add_argument("--dies-after", type=int, default=-1, help="steps")
    return parser.parse_args()


def log_settings(given: argparse.Namespace) -> None:
    """Write the lines of vLLM's log that state its settings."""
    sys.stderr.write(
        f"INFO [core.py:112] Initializing a V1 LLM engine (v0.26.0) with config: model='{given.model}', "
        f"load_format={given.load_format}, dtype=torch.bfloat16, quantization=fp8, kv_cache_dtype=auto, "
        f"dcp_comm_backend={given.dcp_comm_backend}, enable_prefix_caching=False\n"
        f"INFO [config.py:10] Chunked prefill is enabled with max_num_batched_tokens={given.max_num_batched_tokens}.\n"
        "(EngineCore pid=7) INFO [kv_cache_utils.py:1316] GPU KV cache size: 400,000 tokens\n"
    )
    sys.stderr.flush()


async def _main(given: argparse.Namespace) -> None:
    engine = StepEngine(given)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", given.port, limit=1 << 26, backlog=256)
    log_settings(given)
    sys.stdout.write(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await asyncio.gather(server.serve_forever(), engine.run(), engine.run_front_end())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parse_flags()))
