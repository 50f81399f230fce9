"""Compare the weights that vLLM loads with those that dcpbench plans, for folders with a config.json.

    python -m tools.loaded_weights FOLDER... --tp 1 -o loaded.json

vLLM starts each model with dummy weights, which have the sizes of real ones, and is ended when it logs `Model loading took … GiB`. The plan
is that of `dcpbench sweep --dry-run`. The tool needs `vllm` on PATH and as many GPUs as --tp, and no tokenizer of the model.

Exit codes: 0 if all plans are within --limit of the log, 1 if one is not, 2 for invalid options, 4 if vLLM ended or reached --timeout
without that line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 2**30
LOADED_PATTERN = re.compile(r"Model loading took ([\d.]+) GiB")
NOT_LOADED_CODE, POLL_S, OTHER_RANKS_S, STOP_S = 4, 0.2, 2.0, 15.0
FLAGS = "--load-format dummy --enforce-eager --skip-tokenizer-init --max-model-len 2048 --max-num-seqs 8 --max-num-batched-tokens 2048"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the planned and loaded weights of one rank of a model, in GiB."""

    model: str
    tp: int
    weights_dtype: str
    planned_gib: float
    loaded_gib: list[float]  # GiB of each rank that logged them; empty if vLLM ended before
    seconds: float
    command: str
    log_tail: list[str] = []

    @property
    def error(self) -> float | None:
        """Return the plan over the largest rank of the log, minus 1; None if no rank logged it."""
        return self.planned_gib / max(self.loaded_gib) - 1 if self.loaded_gib else None


def read_loaded_gib(log: str) -> list[float]:
    """Return the GiB of weights in the log, one number for each rank."""
    return [float(found) for found in LOADED_PATTERN.findall(log)]


def plan_weights(model: Path, tp: int) -> tuple[float, str]:
    """Return the GiB of weights that dcpbench plans for a rank, and their dtype."""
    options = f"sweep --model {model} --tp {tp} --dcp 1 --dry-run --gpu H200 --concurrency 1 --context 128 --json"
    done = subprocess.run(
        [sys.executable, "-m", "dcpbench", *options.split()], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"The weights of {model} cannot be planned:\n{done.stderr}")
    (point,) = json.loads(done.stdout)
    return point["weights_held_bytes"] / GIB, point["weights_dtype"]


def load_model(command: Sequence[str], log: Path, ranks: int, limit_s: float) -> list[float]:
    """Start vLLM, wait until all ranks have logged their weights or OTHER_RANKS_S have passed since the first, and return the logged GiB.

    The list is empty if vLLM ends before, or at the limit.
    """
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    end = time.monotonic() + limit_s
    try:
        while len(found := read_loaded_gib(log.read_text(errors="replace"))) < ranks:
            if process.poll() is not None or time.monotonic() > end:
                break
            if found:
                end = min(end, time.monotonic() + OTHER_RANKS_S)
            time.sleep(POLL_S)
        return found
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)


def format_table(found: Sequence[Comparison]) -> str:
    """Format the comparisons as a Markdown table."""
    lines = ["| model | weights | tp | vLLM, GiB a rank | planned | difference |", "|---|---|--:|--:|--:|--:|"]
    for c in found:
        loaded = f"{max(c.loaded_gib):.2f}" if c.loaded_gib else "not loaded"
        error = "" if c.error is None else f"{c.error:+.1%}"
        lines.append(f"| {c.model} | {c.weights_dtype} | {c.tp} | {loaded} | {c.planned_gib:.2f} | {error} |")
    return "\n".join(lines)


def main() -> int:
    """Load all models, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree; default: %(default)s")
    parser.add_argument("--limit", type=float, default=0.02, help="largest relative difference; default: %(default)s")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="maximum time of one model in s; default: %(default)s"
    )
    parser.add_argument("--flags", default="", help="additional flags of vllm serve")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file; logs are written next to it")
    args = parser.parse_args()
    if shutil.which("vllm") is None:
        parser.error("`vllm` is not on PATH; install vLLM, or add its folder to PATH")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for folder in args.folders:
        planned, dtype = plan_weights(folder, args.tp)
        command = ["vllm", "serve", str(folder), "-tp", str(args.tp), *FLAGS.split(), *args.flags.split()]
        log = args.output.with_name(f"{folder.name}-tp{args.tp}.log")
        begin = time.monotonic()
        loaded = load_model(command, log, args.tp, args.timeout)
        tail = [] if loaded else log.read_text(errors="replace").splitlines()[-20:]
        if not loaded:
            sys.stderr.write(f"vLLM did not load {folder.name}; the reason is in {log}\n")
        result = Comparison(
            model=folder.name,
            tp=args.tp,
            weights_dtype=dtype,
            planned_gib=planned,
            loaded_gib=loaded,
            seconds=time.monotonic() - begin,
            command=" ".join(command),
            log_tail=tail,
        )
        found.append(result)
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    sys.stdout.write(format_table(found) + "\n")
    if not all(c.loaded_gib for c in found):
        return NOT_LOADED_CODE
    return int(any(abs(c.error or 0.0) > args.limit for c in found))


if __name__ == "__main__":
    sys.exit(main())
