"""List the commands that compare vLLM, SGLang and dcpbench's engine on two or four GPUs, the most valuable first."""

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
CAPPED_TOKENS = 1_000_000  # KV tokens of a rank in the load that is limited by KV capacity
ROW_BYTES = 2 * (512 + 64)  # bytes per token and layer of MLA in bf16: latent vector and rotary key
START_MINUTES = {
    VLLM: 1.1,
    SGLANG: 1.3,
    OURS: 0.6,
}  # minutes until the first request; servers: 60 to 75 s on 2 H200, with warm caches
POINT_MINUTES = 0.25  # minutes of a decode point of 8 or 32 requests, with prefill
SERVED_MINUTES, LONG_MINUTES = 0.7, 1.2  # minutes of the loads of one layout


class EnginePlan:
    """Make the parts that compare engines on a machine with this many GPUs, and write to a folder."""

    def __init__(self, gpus: int, folder: Path, engines: Path, model: Path, layers: int) -> None:
        """Set the folders: `engines` has vllm.toml and sglang.toml, `model` has this many layers of DeepSeek-V3."""
        self.n, self.folder, self.engines, self.model = gpus, folder, engines, model
        self.capped_bytes = CAPPED_TOKENS * ROW_BYTES * layers

    def list_parts(self) -> list[Part]:
        """Return the parts, the most valuable first."""
        n, dcp_layouts = self.n, f"--dcp 1,{self.n} --exchange ag_rs"
        both, three = (VLLM, OURS), (VLLM, SGLANG, OURS)
        parts = [
            self._make_decode_part("points", both, dcp_layouts, "4000,32000"),
            self._make_served_part("served", both, dcp_layouts),
            self._make_capped_part("capacity", dcp_layouts),
            self._make_decode_part("sglang-points", (SGLANG,), dcp_layouts, "4000,32000"),
            self._make_served_part("sglang-served", (SGLANG,), dcp_layouts),
            self._make_served_part("attention-dp", three, f"--dp {n} --dcp 1"),
            self._make_served_part("a2a", (VLLM, SGLANG), f"--dcp {n} --exchange a2a"),
            self._make_served_part("symm", (OURS,), f"--dcp {n} --exchange symm"),
        ]
        if n > 2:  # noqa: PLR2004 - there is a degree between 1 and n
            parts.append(self._make_served_part("dcp2", three, "--dcp 2 --exchange ag_rs"))
        return [*parts, self._make_decode_part("points-128k", three, dcp_layouts, "128000")]

    def _make_decode_part(self, part: str, engines: tuple[str, ...], layouts: str, contexts: str) -> Part:
        """Return a part of decode points of 8 and 32 requests."""
        minutes = 2 * len(contexts.split(",")) * POINT_MINUTES
        options = f"{layouts} --concurrency 8,32 --context {contexts}"
        commands = [self._make_command(part, "sweep", engine, options, minutes) for engine in engines]
        return Part(part, f"decode points of {', '.join(engines)}, {layouts}", tuple(commands))

    def _make_served_part(self, part: str, engines: tuple[str, ...], layouts: str) -> Part:
        """Return a part of served loads of 8 and 32 clients."""
        options = f"{layouts} {SERVED}"
        commands = [self._make_command(part, "serve", engine, options, SERVED_MINUTES) for engine in engines]
        return Part(part, f"served loads of {', '.join(engines)}, {layouts}", tuple(commands))

    def _make_capped_part(self, part: str, layouts: str) -> Part:
        """Return a part with a load that exceeds the KV cache of a rank, which is CAPPED_TOKENS in each engine."""
        caps = {
            VLLM: f"--engine-args '--kv-cache-memory-bytes {self.capped_bytes}'",
            OURS: f"--kv-memory {self.capped_bytes / 2**30:.2f}GiB",
        }
        commands = [
            self._make_command(part, "serve", engine, f"{layouts} {LONG} {cap}", LONG_MINUTES)
            for engine, cap in caps.items()
        ]
        return Part(part, f"32 clients of 64k tokens with {CAPPED_TOKENS:,} KV tokens a rank", tuple(commands))

    def _make_command(self, part: str, command: str, engine: str, options: str, minutes: float) -> Command:
        """Return the command of one engine; it takes `minutes` for each layout after the start."""
        is_ours = engine == OURS
        engine_options = PRECISION if is_ours else f"--engine {shlex.quote(str(self.engines / f'{engine}.toml'))}"
        layouts = 2 if "--dcp 1," in options else 1
        baseline = [] if command == "serve" and not is_ours else ["--no-baseline"]
        return Command(
            "dcpbench",
            (
                "server" if command == "serve" and not is_ours else command,
                *shlex.split(f"--model {shlex.quote(str(self.model))} --tp {self.n} {engine_options} {options}"),
                *baseline,
                "-o",
                str(self.folder / part / engine),
                "--resume",
            ),
            layouts * (START_MINUTES[engine] + minutes),
            engine,
        )
