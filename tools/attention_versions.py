"""Compare versions of dcpbench's attention kernels with each other and with other backends.

It checks each version on any machine, and times the correct ones alternately on one GPU.

    git worktree add /tmp/before main~3
    python -m tools.attention_versions now=. before=/tmp/before flashmla flashinfer -o versions.jsonl
    python -m tools.attention_versions now=. before=/tmp/before --kv fp8 --cases 48x8192,8x32768 --heads 16,64 -o versions.jsonl
    python -m tools.attention_versions triton flashmla --kv fp8 --mean 1 --cases 132x16384 -o mean.jsonl

NAME=CHECKOUT is a version: the tool loads the attention kernels of this checkout, and no other part of it. A name without a checkout is a
backend. FILE gets a line of JSON for each case. It has the median µs of a call in a CUDA graph, the interval of the median, the error against
fp64, and the problem of each wrong version. Wrong versions are not timed.

Exit code 1: a version does not compile or is wrong; 2: invalid arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from dcpbench.bench.bench_record import BenchSettings, Case
from dcpbench.bench.operators import attention
from dcpbench.kernels import attention as kernels
from dcpbench.points.names import BACKENDS, FP8
from tools.versions import (
    Version,
    format_times,
    make_builders,
    make_parser,
    measure_versions,
    select_cases,
    write_lines,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from dcpbench.kernels.attention import AttentionSpec, Backend

    BackendFactory = Callable[[str, AttentionSpec], Backend]  # signature of kernels.attention.make_backend

KERNELS_FOLDER = Path("dcpbench/kernels/attention")  # folder of the kernels in a checkout
MODULES = ("partition", "plain_mla", "hopper_mla", "hopper_mla_fp8", "hopper_pairs", "triton_mla")
"""Modules of a version, each after the modules that it imports."""
CASES = "8x8192,48x8192,8x32768,48x32768"


def load_checkout(checkout: Path) -> BackendFactory:
    """Return a function that makes the Triton backend of a checkout."""
    names = [name for name in MODULES if torch.cuda.is_available() or not name.startswith("hopper_mla")]
    version = Version(checkout, kernels, names)

    def make_backend(_: str, spec: AttentionSpec) -> Backend:
        backend: Backend = version.modules["triton_mla"].TritonBackend(spec)
        run = backend.run

        def run_with_modules(*tensors: Any) -> None:  # noqa: ANN401 -- passes the arguments of Backend.run on
            with version.replace_modules():
                run(*tensors)

        backend.run = run_with_modules  # type: ignore[method-assign,assignment]
        return backend

    return make_backend


def format_case(line: dict[str, Any]) -> str:
    """Format the sizes of a case and the results of all versions as one line."""
    sizes = line["sizes"]
    mean = f", values with a mean of {sizes['mean']:g}" if sizes.get("mean") else ""
    return f"{sizes['requests']} × {sizes['context']:,}, H={sizes['heads']}, {sizes['kv']}{mean}: {format_times(line)}"


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Return a case for each combination of the requested sizes."""
    loads = [
        (int(requests), int(context))
        for requests, _, context in (load.partition("x") for load in args.cases.split(","))
    ]
    return [
        Case(
            variant="",
            sizes={
                "kv": kv,
                "heads": int(heads),
                "requests": requests,
                "context": context,
                "page": args.page,
                "lengths": "even",
                "mean": args.mean,
            },
            calls=0,
        )
        for kv in args.kv.split(",")
        for requests, context in loads
        for heads in args.heads.split(",")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the versions in all cases; return the exit code."""
    parser = make_parser(__doc__, seconds=0.3)
    parser.add_argument("versions", nargs="+", metavar="NAME=CHECKOUT|BACKEND", help="versions and backends to compare")
    parser.add_argument("--cases", default=CASES, metavar="REQUESTSxCONTEXT,…", help="default: %(default)s")
    parser.add_argument("--heads", default="16,64,128", help="numbers of query heads; default: %(default)s")
    parser.add_argument(
        "--kv", default="bf16", help=f"dtypes of the KV cache: bf16, {FP8} or both; default: %(default)s"
    )
    mean_help = "mean of the normally distributed values; their standard deviation is 1; default: %(default)s"
    parser.add_argument("--mean", type=float, default=0.0, help=mean_help)
    parser.add_argument("--page", type=int, default=64, help="tokens of a page of the KV cache; default: %(default)s")
    args = parser.parse_args(arguments)
    versions: dict[str, BackendFactory] = {}
    for word in args.versions:
        name, _, checkout = word.partition("=")
        if checkout and not (Path(checkout) / KERNELS_FOLDER).is_dir():
            parser.error(f"{checkout} is no checkout of this project: it has no {KERNELS_FOLDER}")
        if not checkout and name not in BACKENDS:
            parser.error(f"{name} is no backend ({', '.join(BACKENDS)}); a version is NAME=CHECKOUT")
        versions[name] = load_checkout(Path(checkout)) if checkout else kernels.make_backend
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload, settings = attention.Attention(device, seed=0, mean=args.mean), BenchSettings(seconds=args.seconds)

    def measure_case(case: Case) -> dict[str, Any]:
        builders = make_builders(
            case, versions, workload, lambda _, make: mock.patch.object(attention, "make_backend", make)
        )
        return measure_versions(case.sizes, builders, device, settings)

    return write_lines(map(measure_case, select_cases(parser, lambda: list_cases(args))), args.out, format_case)


if __name__ == "__main__":
    sys.exit(main())
