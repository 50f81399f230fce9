"""List the commands that compare vLLM, SGLang and dcpbench's engine on two or four GPUs, most valuable first."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tools.multi_gpu.parts import Command, Part

if TYPE_CHECKING:
    from pathlib import Path

VLLM, SGLANG, OURS = "vllm", "sglang", "dcpbench"
PRECISION = "--weights-dtype fp8 --kv-dtype bf16"
SERVED = "--concurrency 8,32 --num-requests 64 --input-tokens 16000 --output-tokens uniform:100-200"
LONG = "--concurrency 32 --num-requests 64 --input-tokens 64000 --output-tokens 500"
CAPPED_TOKENS = 1_000_000  # KV tokens of a rank in the load in which capacity binds
ROW_BYTES = 2 * (512 + 64)  # of a token and a layer of MLA in bf16: latent and rotated key
START_MINUTES = {VLLM: 1.1, SGLANG: 1.3, OURS: 0.6}  # until the first request; servers: 60 to 75 s on 2 H200, warm
POINT_MINUTES = 0.25  # of a decode point of 8 or 32 requests, prefill included
SERVED_MINUTES, LONG_MINUTES = 0.7, 1.2  # of a layout's loads


class EnginePlan:
    """Hold the parts that compare engines on a machine with this many GPUs, in a folder."""

    def __init__(self, gpus: int, folder: Path, engines: Path, model: Path, layers: int) -> None:
        """Make the parts; `engines` has vllm.toml and sglang.toml, `model` is a folder of as many layers of DeepSeek-V3."""
        self.n, self.folder, self.engines, self.model = gpus, folder, engines, model
        self.capped_bytes = CAPPED_TOKENS * ROW_BYTES * layers

    def parts(self) -> list[Part]:
        """Return the parts in the order of their value."""
        n, pays = self.n, f"--dcp 1,{self.n} --exchange ag_rs"
        both, three = (VLLM, OURS), (VLLM, SGLANG, OURS)
        found = [
            self._measure_points("points", both, pays, "4000,32000"),
            self._serve("served", both, pays),
            self._serve_capped("capacity", pays),
            self._measure_points("sglang-points", (SGLANG,), pays, "4000,32000"),
            self._serve("sglang-served", (SGLANG,), pays),
            self._serve("attention-dp", three, f"--dp {n} --dcp 1"),
            self._serve("a2a", (VLLM, SGLANG), f"--dcp {n} --exchange a2a"),
            self._serve("symm", (OURS,), f"--dcp {n} --exchange symm"),
        ]
        if n > 2:  # noqa: PLR2004 - a degree between none and all
            found.append(self._serve("dcp2", three, "--dcp 2 --exchange ag_rs"))
        return [*found, self._measure_points("points-128k", three, pays, "128000")]

    def _measure_points(self, part: str, engines: tuple[str, ...], layouts: str, contexts: str) -> Part:
        """Return decode points of 8 and 32 requests."""
        minutes = 2 * len(contexts.split(",")) * POINT_MINUTES
        words = f"{layouts} --concurrency 8,32 --context {contexts}"
        commands = [self._make_command(part, "sweep", engine, words, minutes) for engine in engines]
        return Part(part, f"decode points of {', '.join(engines)}, {layouts}", tuple(commands))

    def _serve(self, part: str, engines: tuple[str, ...], layouts: str) -> Part:
        """Return served loads of 8 and 32 clients."""
        words = f"{layouts} {SERVED}"
        commands = [self._make_command(part, "serve", engine, words, SERVED_MINUTES) for engine in engines]
        return Part(part, f"served loads of {', '.join(engines)}, {layouts}", tuple(commands))

    def _serve_capped(self, part: str, layouts: str) -> Part:
        """Return a load for which the KV cache of one copy is too small: CAPPED_TOKENS a rank in each engine."""
        caps = {
            VLLM: f"--engine-args '--kv-cache-memory-bytes {self.capped_bytes}'",
            OURS: f"--kv-memory {self.capped_bytes / 2**30:.2f}GiB",
        }
        commands = [
            self._make_command(part, "serve", engine, f"{layouts} {LONG} {cap}", LONG_MINUTES)
            for engine, cap in caps.items()
        ]
        return Part(part, f"32 clients of 64k tokens with {CAPPED_TOKENS:,} KV tokens a rank", tuple(commands))

    def _make_command(self, part: str, command: str, engine: str, words: str, minutes: float) -> Command:
        """Return a command of one engine, which takes `minutes` for each layout after the start."""
        own = engine == OURS
        of_engine = PRECISION if own else f"--engine {shlex.quote(str(self.engines / f'{engine}.toml'))}"
        layouts = 2 if "--dcp 1," in words else 1
        baseline = [] if command == "serve" and not own else ["--no-baseline"]
        return Command(
            "dcpbench",
            (
                "server" if command == "serve" and not own else command,
                *shlex.split(f"--model {shlex.quote(str(self.model))} --tp {self.n} {of_engine} {words}"),
                *baseline,
                "-o",
                str(self.folder / part / engine),
                "--resume",
            ),
            layouts * (START_MINUTES[engine] + minutes),
            engine,
        )
