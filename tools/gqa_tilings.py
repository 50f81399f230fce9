"""Compare tilings of dcpbench's decode kernel for grouped-query attention with each other and with other backends.

It checks each tiling on any machine, and times the correct ones alternately on one GPU.

    python -m tools.gqa_tilings flashinfer 64x4x3x3 64x4x3x2 32x2x4x4 -o tilings.jsonl

A tiling is ROWSxWARPSxSTAGESxPROGRAMS: KV rows of a tile, warps of a program, stages of its pipeline, and programs per multiprocessor. A name is
a backend. FILE gets a line of JSON for each case. It has the median µs of a call in a CUDA graph over KV rows that are in no cache, the interval
of the median, the error against fp64, and the problem of each wrong tiling. Wrong tilings are not timed.

Exit code 1: a tiling does not compile or is wrong; 2: invalid arguments.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from dcpbench.bench.bench_record import BenchSettings, Case
from dcpbench.bench.operators import gqa_attention as gqa
from dcpbench.kernels import gqa as kernels
from dcpbench.kernels.gqa.triton_gqa import Tiling, TritonGqa
from dcpbench.points.names import GQA_BACKENDS
from tools.versions import format_times, make_builders, make_parser, measure_versions, select_cases, write_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from dcpbench.kernels.attention import Backend
    from dcpbench.kernels.gqa import GqaSpec

    BackendFactory = Callable[[str, GqaSpec], Backend]  # signature of kernels.gqa.make_gqa_backend

CASES = "8x8192,48x8192,8x32768,48x32768"


def parse_variant(word: str) -> BackendFactory:
    """Return a function that makes the backend of a tiling, or the backend with this name."""
    if word in GQA_BACKENDS:
        return lambda _, spec: kernels.make_gqa_backend(word, spec)
    tiling = Tiling(*map(int, word.split("x")))
    return lambda _, spec: TritonGqa(spec, tiling)


def format_case(line: dict[str, Any]) -> str:
    """Format the sizes of a case and the results of all tilings as one line."""
    sizes = line["sizes"]
    return f"{sizes['requests']} × {sizes['context']:,}, {sizes['heads']} heads, {sizes['kv_heads']} KV heads: {format_times(line)}"


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Return a case for each combination of the requested sizes."""
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
    """Compare the tilings in all cases; return the exit code."""
    parser = make_parser(__doc__, seconds=0.1)
    parser.add_argument("variants", nargs="+", metavar="TILING|BACKEND", help="tilings and backends to compare")
    parser.add_argument("--cases", default=CASES, metavar="REQUESTSxCONTEXT,…", help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=64, help="number of query heads; default: %(default)s")
    parser.add_argument("--kv-heads", default="4,8", help="numbers of KV heads; default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128, help="numbers of a head; default: %(default)s")
    parser.add_argument("--page", type=int, default=64, help="tokens of a page of the KV cache; default: %(default)s")
    args = parser.parse_args(arguments)
    variants: dict[str, BackendFactory] = {}
    for word in args.variants:
        try:
            variants[word] = parse_variant(word)
        except (TypeError, ValueError):
            parser.error(f"{word} is neither ROWSxWARPSxSTAGESxPROGRAMS nor one of {', '.join(GQA_BACKENDS)}")
    cases = select_cases(parser, lambda: list_cases(args))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload, settings = gqa.Gqa(device, seed=0), BenchSettings(seconds=args.seconds)

    def measure_case(case: Case) -> dict[str, Any]:
        builders = make_builders(
            case, variants, workload, lambda _, make: mock.patch.object(gqa, "make_gqa_backend", make)
        )
        return measure_versions(case.sizes, builders, device, settings)

    return write_lines(map(measure_case, cases), args.out, format_case)


if __name__ == "__main__":
    sys.exit(main())
