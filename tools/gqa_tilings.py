"""Tilings of our decode kernel of grouped-query attention beside FlashInfer's kernel, timed in turns so that all meet the same clocks.

    python -m tools.gqa_tilings flashinfer 64x4x3x3 64x4x3x2 32x2x4x4 -o tilings.jsonl

A tiling is ROWSxWARPSxSTAGESxPROGRAMS: rows of a tile, warps of a program, stages of its pipeline, programs for each multiprocessor; a bare
word is a backend. Each line of FILE is a case: µs of a call of each, from a CUDA graph over cold rows, with the interval of its median, its
error against fp64, and what was wrong. A tiling that cannot be compiled, or is wrong, says so and is not timed; the command then ends with 1.
Without a GPU all are checked and none is timed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from dcpbench.bench.bench_record import BenchSettings, Case
from dcpbench.bench.operators import gqa_attention as gqa
from dcpbench.kernels import gqa as kernels
from dcpbench.kernels.gqa.triton_gqa import Tiling, TritonGqa
from dcpbench.points.names import GQA_BACKENDS
from tools.versions import format_times, measure_versions, select_cases, write_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.operators.calls import Calls
    from dcpbench.kernels.attention import Backend
    from dcpbench.kernels.gqa import GqaSpec

    Make = Callable[[str, GqaSpec], Backend]  # signature of kernels.gqa.make_gqa_backend

CASES = "8x8192,48x8192,8x32768,48x32768"


def parse_way(word: str) -> Make:
    """Return the function that makes the backend of a tiling, or of a bare name."""
    if word in GQA_BACKENDS:
        return lambda _, spec: kernels.make_gqa_backend(word, spec)
    tiling = Tiling(*map(int, word.split("x")))
    return lambda _, spec: TritonGqa(spec, tiling)


def builds(case: Case, ways: dict[str, Make], work: gqa.Gqa) -> dict[str, Callable[[], Calls]]:
    """Return a function that builds the calls of each way."""

    def build(name: str, make: Make) -> Calls:
        with mock.patch.object(gqa, "make_gqa_backend", make):
            return work.build_calls(Case(variant=name, sizes=case.sizes, calls=case.calls))

    return {name: functools.partial(build, name, make) for name, make in ways.items()}


def format_case(line: dict[str, Any]) -> str:
    """Format a case in a line."""
    sizes = line["sizes"]
    return f"{sizes['requests']} × {sizes['context']:,}, {sizes['heads']} heads, {sizes['kv_heads']} KV heads: {format_times(line)}"


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Return all requested cases."""
    found = []
    for word in args.cases.split(","):
        requests, context = map(int, word.split("x"))
        for kv_heads in map(int, args.kv_heads.split(",")):
            sizes: dict[str, int | float | str] = {
                "heads": args.heads,
                "kv_heads": kv_heads,
                "head_dim": args.head_dim,
            }
            sizes |= {"requests": requests, "context": context, "page": args.page, "lengths": "even", "kv": "bf16"}
            found.append(Case(variant="", sizes=sizes, calls=0))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", metavar="TILING")
    parser.add_argument("--cases", default=CASES, help="REQUESTSxROWS; default: %(default)s")
    parser.add_argument("--heads", type=int, default=64, help="query heads; default: %(default)s")
    parser.add_argument("--kv-heads", default="4,8", help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--page", type=int, default=64, help="rows of a page; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.1, help="of each case and way at most; default: %(default)s")
    parser.add_argument("-o", "--out", type=Path, required=True, help="append a line of JSON for each case")
    args = parser.parse_args(arguments)
    ways: dict[str, Make] = {}
    for word in args.ways:
        try:
            ways[word] = parse_way(word)
        except (TypeError, ValueError):
            parser.error(f"{word} is neither ROWSxWARPSxSTAGESxPROGRAMS nor one of {', '.join(GQA_BACKENDS)}")
    found = select_cases(parser, lambda: list_cases(args))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work, settings = gqa.Gqa(device, seed=0), BenchSettings(seconds=args.seconds)
    lines = (measure_versions(case.sizes, builds(case, ways, work), device, settings) for case in found)
    return write_lines(lines, args.out, format_case)


if __name__ == "__main__":
    sys.exit(main())
