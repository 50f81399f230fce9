"""Tilings of our kernel of int4 experts, timed in turns so that all meet the same clocks.

    python -m tools.int4_tilings -o tilings.jsonl
    python -m tools.int4_tilings --tp 1 --requests 32 --gate-up 64x5x4xw,64x4x4xr --down 128x3x4xr -o tilings.jsonl

A tiling is COLUMNSxSTAGESxWARPSxFIRST: columns of results of a program, stages of its pipeline, its warps, and the first operand of its
product: w for weights, r for rows. Each line of FILE is a case: µs of a call of each, from a CUDA graph over cold weights, with the interval
of its median, its error against the dequantised product in fp64, what was wrong, and the floor by this GPU's limits. A tiling that
cannot be compiled, or is wrong, says so and is not timed; the command then ends with 1. Without a GPU all are checked and none is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from dcpbench.bench.bench_record import BenchSettings, Case
from dcpbench.bench.cases import MOE_PRODUCTS, BenchOptions, list_moe_cases
from dcpbench.bench.operators import limits
from dcpbench.bench.operators.moe import Moe
from dcpbench.kernels.moe import int4_experts
from dcpbench.kernels.moe.int4_experts import Tiling
from dcpbench.points.roofline import Work, compute_floor_us
from tools.versions import asked_for, measured, told, written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.bench.operators.calls import Calls

GATE_UP = "64x5x4xw,64x4x4xw,64x3x4xw,64x5x4xr,64x4x4xr,64x3x4xr,32x5x2xw,32x5x2xr,128x3x8xw,128x3x8xr"
DOWN = "128x2x4xw,128x3x4xw,128x4x4xw,128x2x4xr,128x3x4xr,128x4x4xr,64x4x4xr,64x5x4xw,256x2x8xw,256x2x8xr"
LIMITS = ("read", "matmul")


def parse_tiling(word: str) -> Tiling:
    """Return the tiling of a word; raise ValueError for another word."""
    columns, stages, warps, first = word.split("x")
    if first not in ("w", "r"):
        raise ValueError(f"{first} is neither w nor r")
    return Tiling(columns=int(columns), stages=int(stages), warps=int(warps), weight_first=first == "w")


def builds(case: Case, tilings: Mapping[str, Tiling], build: Moe, works: list[Work]) -> dict[str, Callable[[], Calls]]:
    """Return a function that builds the calls of each tiling, and adds their work to `works`."""

    def make(tiling: Tiling) -> Calls:
        calls = build.build_calls(case)
        works.append(calls.work or Work())

        def with_tiling(call: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with mock.patch.object(int4_experts, "choose_tiling", return_value=tiling):
                    call()

            return run

        return dataclasses.replace(calls, calls=[with_tiling(call) for call in calls.calls])

    return {word: functools.partial(make, tiling) for word, tiling in tilings.items()}


def said(line: dict[str, Any]) -> str:
    """Format a case in a line."""
    sizes, floor = line["sizes"], line["floor_us"]
    best = min((one["median_us"] for one in line["found"].values() if "median_us" in one), default=None)
    share = f", best {100 * floor / best:.0f} % of the limit" if best and floor else ""
    return f"{sizes['product']}, {sizes['width']} wide, {sizes['requests']} requests, groups of {sizes['group_size']}{share}: {told(line)}"


def cases(asked: argparse.Namespace) -> list[Case]:
    """Return all requested cases."""
    named = {name: getattr(asked, name) for name in ("model", "tp", "requests", "rows", "group_size")}
    typed = named | {"weights": "int4", "variant": "triton", "layers": None}
    return list_moe_cases(BenchOptions(cpu=not torch.cuda.is_available(), typed=typed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate-up", default=GATE_UP, help="tilings of the first product; default: %(default)s")
    parser.add_argument("--down", default=DOWN, help="tilings of the second product; default: %(default)s")
    parser.add_argument("--model", default="deepseek-v3", help="default: %(default)s")
    parser.add_argument("--tp", default="1,8", help="default: %(default)s")
    parser.add_argument("--requests", default="8,32,128", help="default: %(default)s")
    parser.add_argument("--rows", default="uniform", help="as bench moe has them; default: %(default)s")
    parser.add_argument("--group-size", default="32", help="inputs per scale; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="of each case and tiling at most; default: %(default)s"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="append a line of JSON for each case")
    asked = parser.parse_args(arguments)
    tilings: dict[str, dict[str, Tiling]] = {}
    for product, words in zip(MOE_PRODUCTS, (asked.gate_up, asked.down), strict=True):
        try:
            tilings[product] = {word: parse_tiling(word) for word in words.split(",")}
        except ValueError as e:
            parser.error(f"--{product} {words}: {e}; a tiling is COLUMNSxSTAGESxWARPSxFIRST, such as 64x5x4xw")
    found = asked_for(parser, lambda: cases(asked))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates: dict[str, float] = {}
    if device.type == "cuda":
        rates = {limit.name: limit.median for limit in limits.measure_limits(LIMITS, device)[0]}
    build, settings = Moe(device, seed=0), BenchSettings(seconds=asked.seconds)

    def measure_case(case: Case) -> dict[str, Any]:
        works: list[Work] = []
        line = measured(case.sizes, builds(case, tilings[str(case.sizes["product"])], build, works), device, settings)
        return line | {"floor_us": compute_floor_us(works[0], rates) if works and rates else None}

    with torch.inference_mode():
        return written(map(measure_case, found), asked.out, said)


if __name__ == "__main__":
    sys.exit(main())
