"""Versions of our linear layer over e4m3 weights beside one another, or the ways to cut it, timed in turns so that all meet the same clocks.

    git worktree add /tmp/before main~3
    python -m tools.linear_versions now=. before=/tmp/before -o versions.jsonl
    python -m tools.linear_versions now=. --cuts --rows 16,64 --tp 8 --matrix q_b,o -o cuts.jsonl

A version is a checkout of this project, of which the kernels of linear layers are taken and nothing else. `--cuts`: all that this checkout's
choose_tiling() chooses from, too; c64p2 is 64 columns a program and two stretches of the depth. A call quantises its rows and multiplies. Each line of
FILE is a layer: µs of a call of each, from a CUDA graph over cold weights, with the interval of its median, its error against fp64, and what was
wrong. A version that cannot be compiled, or is wrong, says so and is not timed; the command then ends with 1. Without a GPU all are checked and none
is timed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch

from dcpbench import kernels
from dcpbench.bench.bench_record import BenchSettings, Case
from dcpbench.bench.cases import LAYERS_BY_NAME, list_linear_layers
from dcpbench.bench.operators import linear
from dcpbench.kernels import block_scaled
from dcpbench.kernels import linear as ours
from dcpbench.kernels.block_scaled import Scaled
from dcpbench.models import load_shape
from tools.versions import Version, format_times, measure_versions, select_cases, write_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from dcpbench.bench.operators.calls import Calls

    Prepare = Callable[[torch.Tensor, "torch.Tensor | Scaled"], Callable[[], tuple[torch.Tensor]]]  # as in VARIANTS

MODULES = ("e4m3", "block_scaled", "hopper_linear", "linear")


def loaded(checkout: Path) -> Prepare:
    """Return a checkout's own layer, with its kernels, on a CPU, too."""
    names = [name for name in MODULES if torch.cuda.is_available() or not name.startswith("hopper")]
    version = Version(checkout, kernels, names)
    quantise, product = version.modules["block_scaled"].quantize_rows, version.modules["linear"].compute_product

    def prepare(x_TK: torch.Tensor, weight_NK: torch.Tensor | Scaled) -> Callable[[], tuple[torch.Tensor]]:
        assert isinstance(weight_NK, Scaled)
        weight = version.modules["block_scaled"].Scaled(weight_NK.data, weight_NK.scale, weight_NK.block)

        def call() -> tuple[torch.Tensor]:
            with version.replace_modules():
                return (product(quantise(x_TK), weight, x_TK.dtype),)

        return call

    return prepare


def cut(how: ours.Tiling) -> Prepare:
    """Return our layer with this tiling."""

    def prepare(x_TK: torch.Tensor, weight_NK: torch.Tensor | Scaled) -> Callable[[], tuple[torch.Tensor]]:
        assert isinstance(weight_NK, Scaled)
        return lambda: (ours.compute_product(block_scaled.quantize_rows(x_TK), weight_NK, x_TK.dtype, how),)

    return prepare


def builds(case: Case, ways: dict[str, Prepare], work: linear.Linear) -> dict[str, Callable[[], Calls]]:
    """Return a function that builds the calls of each variant."""

    def build(name: str, prepare: Prepare) -> Calls:
        with mock.patch.dict(linear.VARIANTS, {name: prepare}):
            return work.build_calls(Case(variant=name, sizes=case.sizes, calls=case.calls))

    return {name: functools.partial(build, name, prepare) for name, prepare in ways.items()}


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Return all requested layers; layers of the same size appear once, with all their names."""
    found: dict[tuple[int, int], list[str]] = {}
    shape = load_shape(args.model)
    for tp in map(int, args.tp.split(",")):
        for layer, product in list_linear_layers(shape, tp).items():
            if layer in args.matrix.split(","):
                found.setdefault((product.inputs, product.outputs), []).append(f"tp{tp} {layer}")
    return [
        Case(
            variant="",
            sizes={"layer": ", ".join(names), "inputs": k, "outputs": n, "rows": rows, "weights": "fp8"},
            calls=0,
        )
        for rows in map(int, args.rows.split(","))
        for (k, n), names in found.items()
    ]


def cuts(sizes: dict[str, Any], device: torch.device) -> dict[str, Prepare]:
    """Return all tilings of a layer, by name."""
    room = ours.count_multiprocessors(device), ours.get_shared_memory(device)
    found = ours.iter_tilings(sizes["rows"], sizes["outputs"], sizes["inputs"], *room)
    return {f"c{how.columns}p{how.parts}": cut(how) for how in found}


def format_case(line: dict[str, Any]) -> str:
    """Format a layer in a line."""
    sizes = line["sizes"]
    return (
        f"{sizes['layer']}, {sizes['rows']} rows of {sizes['inputs']:,} by {sizes['outputs']:,}: {format_times(line)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="NAME=CHECKOUT")
    parser.add_argument("--cuts", action="store_true", help="with all ways to cut ours; up to 128 rows")
    parser.add_argument("--model", default="deepseek-v3", help="default: %(default)s")
    parser.add_argument("--tp", default="1,2,4,8", help="ranks that layers are cut by; default: %(default)s")
    parser.add_argument("--rows", default="1,16,32,64,128", help="default: %(default)s")
    parser.add_argument("--matrix", default=",".join(LAYERS_BY_NAME), help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="of each layer and way at most; default: %(default)s"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="append a line of JSON for each layer")
    args = parser.parse_args(arguments)
    ways: dict[str, Prepare] = {}
    for word in args.versions:
        name, _, checkout = word.partition("=")
        if not (Path(checkout or "nowhere") / "dcpbench/kernels/linear.py").is_file():
            parser.error(f"{word} is no NAME=CHECKOUT of this project: it has no dcpbench/kernels/linear.py")
        ways[name] = loaded(Path(checkout))
    found = select_cases(parser, lambda: list_cases(args))
    if args.cuts and max(int(case.sizes["rows"]) for case in found) > block_scaled.FEW_ROWS:
        parser.error(f"--cuts are of up to {block_scaled.FEW_ROWS} rows; try --rows {block_scaled.FEW_ROWS}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work, settings = linear.Linear(device, seed=0), BenchSettings(seconds=args.seconds)

    def lines() -> Iterator[dict[str, Any]]:
        for case in found:
            every = ways | (cuts(case.sizes, device) if args.cuts else {})
            yield measure_versions(case.sizes, builds(case, every, work), device, settings)

    return write_lines(lines(), args.out, format_case)


if __name__ == "__main__":
    sys.exit(main())
