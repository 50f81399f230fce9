"""Compare versions and tilings of dcpbench's linear layer with e4m3 weights.

It checks each version on any machine, and times the correct ones alternately on one GPU.

    git worktree add /tmp/before main~3
    python -m tools.linear_versions now=. before=/tmp/before -o versions.jsonl
    python -m tools.linear_versions now=. --cuts --rows 16,64 --tp 8 --matrix q_b,o -o cuts.jsonl

NAME=CHECKOUT is a version: the tool loads the kernels of linear layers of this checkout, and no other part of it. --cuts adds every tiling that
choose_tiling() of the present checkout can choose: c64p2 has programs with 64 columns, and splits the depth in two. A call quantises its rows and
multiplies them. FILE gets a line of JSON for each layer. It has the median µs of a call in a CUDA graph over weights that are in no cache, the
interval of the median, the error against fp64, and the problem of each wrong version. Wrong versions are not timed.

Exit code 1: a version does not compile or is wrong; 2: invalid arguments.
"""

from __future__ import annotations

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
    from contextlib import AbstractContextManager
    from typing import Any

    Prepare = Callable[
        [torch.Tensor, "torch.Tensor | Scaled"], Callable[[], tuple[torch.Tensor]]
    ]  # type in linear.VARIANTS

MODULES = ("e4m3", "block_scaled", "hopper_linear", "linear")


def load_checkout(checkout: Path) -> Prepare:
    """Return the linear layer of a checkout, with its own kernels."""
    names = [name for name in MODULES if torch.cuda.is_available() or not name.startswith("hopper")]
    version = Version(checkout, kernels, names)
    quantize_rows, compute_product = (
        version.modules["block_scaled"].quantize_rows,
        version.modules["linear"].compute_product,
    )

    def prepare(x_TK: torch.Tensor, weight_NK: torch.Tensor | Scaled) -> Callable[[], tuple[torch.Tensor]]:
        assert isinstance(weight_NK, Scaled)
        weight = version.modules["block_scaled"].Scaled(weight_NK.data, weight_NK.scale, weight_NK.block)

        def call() -> tuple[torch.Tensor]:
            with version.replace_modules():
                return (compute_product(quantize_rows(x_TK), weight, x_TK.dtype),)

        return call

    return prepare


def make_tiled_layer(tiling: ours.Tiling) -> Prepare:
    """Return the present linear layer with this tiling."""

    def prepare(x_TK: torch.Tensor, weight_NK: torch.Tensor | Scaled) -> Callable[[], tuple[torch.Tensor]]:
        assert isinstance(weight_NK, Scaled)
        return lambda: (ours.compute_product(block_scaled.quantize_rows(x_TK), weight_NK, x_TK.dtype, tiling),)

    return prepare


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Return a case for each requested layer. Layers of the same size share a case, which has all their names."""
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


def list_tilings(sizes: dict[str, Any], device: torch.device) -> dict[str, Prepare]:
    """Return the layer with each possible tiling, by the tiling's name."""
    limits = ours.count_multiprocessors(device), ours.get_shared_memory(device)
    tilings = ours.iter_tilings(sizes["rows"], sizes["outputs"], sizes["inputs"], *limits)
    return {f"c{tiling.columns}p{tiling.parts}": make_tiled_layer(tiling) for tiling in tilings}


def format_case(line: dict[str, Any]) -> str:
    """Format the sizes of a layer and the results of all versions as one line."""
    sizes = line["sizes"]
    return (
        f"{sizes['layer']}, {sizes['rows']} rows of {sizes['inputs']:,} by {sizes['outputs']:,}: {format_times(line)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the versions for all layers; return the exit code."""
    parser = make_parser(__doc__, seconds=0.1)
    parser.add_argument("versions", nargs="+", metavar="NAME=CHECKOUT", help="versions to compare")
    cuts_help = f"also compare all tilings of the present checkout, for up to {block_scaled.FEW_ROWS} rows"
    parser.add_argument("--cuts", action="store_true", help=cuts_help)
    parser.add_argument("--model", default="deepseek-v3", help="model with the layers; default: %(default)s")
    parser.add_argument("--tp", default="1,2,4,8", help="tensor-parallel degrees; default: %(default)s")
    parser.add_argument("--rows", default="1,16,32,64,128", help="numbers of rows; default: %(default)s")
    parser.add_argument("--matrix", default=",".join(LAYERS_BY_NAME), help="names of the layers; default: %(default)s")
    args = parser.parse_args(arguments)
    versions: dict[str, Prepare] = {}
    for word in args.versions:
        name, _, checkout = word.partition("=")
        if not (Path(checkout or "nowhere") / "dcpbench/kernels/linear.py").is_file():
            parser.error(f"{word} is no NAME=CHECKOUT of this project: it has no dcpbench/kernels/linear.py")
        versions[name] = load_checkout(Path(checkout))
    cases = select_cases(parser, lambda: list_cases(args))
    if args.cuts and max(int(case.sizes["rows"]) for case in cases) > block_scaled.FEW_ROWS:
        parser.error(f"--cuts are of up to {block_scaled.FEW_ROWS} rows; try --rows {block_scaled.FEW_ROWS}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload, settings = linear.Linear(device, seed=0), BenchSettings(seconds=args.seconds)

    def select(name: str, prepare: Prepare) -> AbstractContextManager[object]:
        return mock.patch.dict(linear.VARIANTS, {name: prepare})

    def measure_case(case: Case) -> dict[str, Any]:
        variants = versions | (list_tilings(case.sizes, device) if args.cuts else {})
        return measure_versions(case.sizes, make_builders(case, variants, workload, select), device, settings)

    return write_lines(map(measure_case, cases), args.out, format_case)


if __name__ == "__main__":
    sys.exit(main())
