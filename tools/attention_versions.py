"""Versions of our attention kernels beside one another and other libraries', timed in turns so that all meet the same clocks.

    git worktree add /tmp/before main~3
    python -m tools.attention_versions now=. before=/tmp/before flashmla flashinfer -o versions.jsonl
    python -m tools.attention_versions now=. before=/tmp/before --kv fp8 --cases 48x8192,8x32768 --heads 16,64 -o versions.jsonl
    python -m tools.attention_versions triton flashmla --kv fp8 --mean 1 --cases 132x16384 -o mean.jsonl

A version is a checkout of this project, of which the attention kernels are taken and nothing else; a bare word is a backend. Each line
of FILE is a case: µs of a call of each, from a CUDA graph, with the interval of its median, its error against fp64, and what was wrong.
A version that cannot be compiled, or is wrong, says so and is not timed; the command then ends with 1. Without a GPU all are checked and
none is timed.
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
from dcpbench.bench.operators import attention
from dcpbench.kernels import attention as kernels
from dcpbench.points.names import BACKENDS, FP8
from tools.versions import Version, format_times, measure_versions, select_cases, write_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.operators.calls import Calls
    from dcpbench.kernels.attention import AttentionSpec, Backend

    Make = Callable[[str, AttentionSpec], Backend]  # signature of kernels.attention.make_backend

ROOM = Path("dcpbench/kernels/attention")
OURS = ("partition", "plain_mla", "hopper_mla", "hopper_mla_fp8", "hopper_pairs", "triton_mla")
"""Modules of a version, each after those that it imports."""
CASES = "8x8192,48x8192,8x32768,48x32768"


def loaded(checkout: Path) -> Make:
    """Return the function that makes a checkout's own backend."""
    names = [name for name in OURS if torch.cuda.is_available() or not name.startswith("hopper_mla")]
    version = Version(checkout, kernels, names)

    def make(_: str, spec: AttentionSpec) -> Backend:
        backend: Backend = version.modules["triton_mla"].TritonBackend(spec)
        run = backend.run

        def as_it_was(*tensors: Any) -> None:  # noqa: ANN401 - of Backend.run
            with version.replace_modules():
                run(*tensors)

        backend.run = as_it_was  # type: ignore[method-assign,assignment]
        return backend

    return make


def builds(case: Case, ways: dict[str, Make | None], work: attention.Attention) -> dict[str, Callable[[], Calls]]:
    """Return a function that builds the calls of each variant; `ways` has the function that makes its backend, or None
    for the backend of that name.
    """

    def build(name: str, make: Make | None) -> Calls:
        with mock.patch.object(attention, "make_backend", make or kernels.make_backend):
            return work.build_calls(Case(variant=name, sizes=case.sizes, calls=case.calls))

    return {name: functools.partial(build, name, make) for name, make in ways.items()}


def format_case(line: dict[str, Any]) -> str:
    """Format a case in a line."""
    sizes = line["sizes"]
    mean = f", values with a mean of {sizes['mean']:g}" if sizes.get("mean") else ""
    return f"{sizes['requests']} × {sizes['context']:,}, H={sizes['heads']}, {sizes['kv']}{mean}: {format_times(line)}"


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases of all requested sizes."""
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
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", metavar="NAME=CHECKOUT or BACKEND")
    parser.add_argument("--cases", default=CASES, help="requests x context of each; default: %(default)s")
    parser.add_argument("--heads", default="16,64,128", help="default: %(default)s")
    parser.add_argument("--kv", default="bf16", help=f"bf16, {FP8} or both; default: %(default)s")
    parser.add_argument("--mean", type=float, default=0.0, help="of values, whose deviation is 1; default: %(default)s")
    parser.add_argument("--page", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each case and way at most; default: %(default)s")
    parser.add_argument("-o", "--out", type=Path, required=True, help="append a line of JSON for each case")
    args = parser.parse_args(arguments)
    ways: dict[str, Make | None] = {}
    for way in args.ways:
        name, _, checkout = way.partition("=")
        if checkout and not (Path(checkout) / ROOM).is_dir():
            parser.error(f"{checkout} is no checkout of this project: it has no {ROOM}")
        if not checkout and name not in BACKENDS:
            parser.error(f"{name} is no backend ({', '.join(BACKENDS)}); a version is NAME=CHECKOUT")
        ways[name] = loaded(Path(checkout)) if checkout else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work, settings = attention.Attention(device, seed=0, mean=args.mean), BenchSettings(seconds=args.seconds)
    found = select_cases(parser, lambda: list_cases(args))
    lines = (measure_versions(case.sizes, builds(case, ways, work), device, settings) for case in found)
    return write_lines(lines, args.out, format_case)


if __name__ == "__main__":
    sys.exit(main())
