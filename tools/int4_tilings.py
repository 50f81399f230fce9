"""Compare tilings of dcpbench's kernels for experts with int4 weights, also with those of another checkout.

It checks each tiling on any machine, and times the correct ones alternately on one GPU.

    python -m tools.int4_tilings -o tilings.jsonl
    python -m tools.int4_tilings --tp 1 --requests 32 --gate-up 64x3x2xw,64x3x2xw16 --down 128x3x2xw -o tilings.jsonl
    git worktree add /tmp/before main~3
    python -m tools.int4_tilings --before /tmp/before --gate-up before:64x3x4xw,64x3x2xw --down before:128x4x4xw -o tilings.jsonl

A tiling is COLUMNSxSTAGESxWARPSxFIRST: columns of results of a program, stages of its pipeline, warps of a program, and the first operand of its
product, which is w for weights or r for rows. FIRST can have the number of rows of a tile (w16). A tiling can end with xBLOCKS, the blocks of
columns of a program with few inputs. A tiling with the prefix before: belongs to the checkout of --before, which must have the same layout of
int4 weights.

FILE gets a line of JSON for each case. It has the median µs of a call in a CUDA graph over weights that are in no cache, the interval of the
median, the error against the dequantised product in fp64, the problem of each wrong tiling, and the floor by the limits of this GPU. Wrong
tilings are not timed.

Exit code 1: a tiling does not compile or is wrong; 2: invalid arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from dcpbench import kernels
from dcpbench.bench.bench_record import BenchSettings, Case
from dcpbench.bench.cases import MOE_PRODUCTS, BenchOptions, list_moe_cases
from dcpbench.bench.operators import limits, moe
from dcpbench.kernels.moe import int4_experts
from dcpbench.points.roofline import OperatorCost, compute_floor_us
from tools.versions import Version, format_times, make_parser, measure_versions, select_cases, write_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from dcpbench.bench.operators.calls import Calls

GATE_UP = "64x3x2xw,64x3x2xw16,64x4x2xw,32x4x2xw,32x5x2xw,32x4x1xw,64x3x4xw,64x3x4xr16"
DOWN = "128x3x2xw,128x3x2xw16,64x3x2xw,64x3x2xwx14,64x3x2xwx7,64x4x1xw,128x3x4xw,128x4x4xw"
LIMITS = ("read", "matmul")
TILING = re.compile(r"(before:)?(\d+)x(\d+)x(\d+)x([wr])(\d+)?(?:x(\d+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Hold a tiling of one version of the kernels."""

    module: ModuleType  # module int4_experts of the version
    tiling: Any  # Tiling of this module
    rows: int | None  # rows of a tile; None if the version chooses them

    @contextlib.contextmanager
    def select(self) -> Iterator[None]:
        """Make benches run this version with this tiling inside the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(moe, "int4_experts", self.module))
            stack.enter_context(mock.patch.object(self.module, "choose_tiling", return_value=self.tiling))
            if self.rows is not None:
                stack.enter_context(mock.patch.object(self.module, "choose_rows", return_value=self.rows))
            yield


def load_checkout(checkout: Path) -> ModuleType:
    """Return the module int4_experts of another checkout; it uses the int4 module of that checkout, and the present other modules."""
    with Version(checkout, kernels, ["int4"]).replace_modules():
        return Version(checkout, kernels.moe, ["int4_experts"]).modules["int4_experts"]


def parse_trial(word: str, before: ModuleType | None) -> Trial:
    """Parse a tiling. Raise ValueError if the text is no tiling, or if it has the prefix before: and `before` is None."""
    match = TILING.fullmatch(word)
    if match is None:
        raise ValueError(f"{word} is no tiling")
    prefix, columns, stages, warps, first, rows, blocks = match.groups()
    if prefix and before is None:
        raise ValueError(f"{word} needs --before CHECKOUT")
    module = before if prefix and before else int4_experts
    if rows and not hasattr(module, "choose_rows"):
        raise ValueError(f"{word}: kernels of that checkout do not choose the rows of a tile")
    more = {"blocks": int(blocks)} if blocks else {}
    tiling = module.Tiling(
        columns=int(columns), stages=int(stages), warps=int(warps), weight_first=first == "w", **more
    )
    return Trial(module=module, tiling=tiling, rows=int(rows) if rows else None)


def make_builders(
    case: Case, trials: Mapping[str, Trial], workload: moe.Moe, costs: list[OperatorCost]
) -> dict[str, Callable[[], Calls]]:
    """Return a function for each trial that builds its calls, and appends their cost to `costs`."""

    def build_calls(trial: Trial) -> Calls:
        with trial.select():
            calls = workload.build_calls(case)
        costs.append(calls.work or OperatorCost())

        def wrap_call(call: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with trial.select():
                    call()

            return run

        return dataclasses.replace(calls, calls=[wrap_call(call) for call in calls.calls])

    return {word: functools.partial(build_calls, trial) for word, trial in trials.items()}


def format_case(line: dict[str, Any]) -> str:
    """Format the sizes of a case and the results of all tilings as one line."""
    sizes, floor = line["sizes"], line["floor_us"]
    best = min((one["median_us"] for one in line["versions"].values() if "median_us" in one), default=None)
    share = f", best {100 * floor / best:.0f} % of the limit" if best and floor else ""
    return f"{sizes['product']}, {sizes['width']} wide, {sizes['requests']} requests, groups of {sizes['group_size']}{share}: {format_times(line)}"


def list_cases(options: argparse.Namespace) -> list[Case]:
    """Return a case for each combination of the requested sizes."""
    named = {name: getattr(options, name) for name in ("model", "tp", "requests", "rows", "group_size")}
    typed = named | {"weights": "int4", "variant": "triton", "layers": None}
    return list_moe_cases(BenchOptions(cpu=not torch.cuda.is_available(), typed=typed))


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse the command line; return the parser, which reports errors, and the options."""
    parser = make_parser(__doc__, seconds=0.1)
    parser.add_argument("--gate-up", default=GATE_UP, help="tilings of the first product; default: %(default)s")
    parser.add_argument("--down", default=DOWN, help="tilings of the second product; default: %(default)s")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout, for tilings with the prefix before:"
    )
    parser.add_argument("--model", default="deepseek-v3", help="model with the experts; default: %(default)s")
    parser.add_argument("--tp", default="1,8", help="tensor-parallel degrees; default: %(default)s")
    parser.add_argument("--requests", default="8,32,128", help="numbers of requests; default: %(default)s")
    rows_help = "distribution of rows over experts, as for dcpbench bench moe; default: %(default)s"
    parser.add_argument("--rows", default="uniform", help=rows_help)
    parser.add_argument("--group-size", default="32", help="inputs that share a scale; default: %(default)s")
    return parser, parser.parse_args(arguments)


def parse_trials(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, dict[str, Trial]]:
    """Return the trials of each product, by their text. Exit with the parser's error for an invalid tiling."""
    path = Path("dcpbench/kernels/moe/int4_experts.py")
    if options.before and not (options.before / path).is_file():
        parser.error(f"{options.before} is no checkout of this project: it has no {path}")
    before = load_checkout(options.before) if options.before else None
    trials: dict[str, dict[str, Trial]] = {}
    for product, words in zip(MOE_PRODUCTS, (options.gate_up, options.down), strict=True):
        try:
            trials[product] = {word: parse_trial(word, before) for word in words.split(",")}
        except ValueError as e:
            parser.error(f"--{product} {words}: {e}; a tiling is COLUMNSxSTAGESxWARPSxFIRST, such as 64x3x2xw")
    return trials


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the tilings in all cases; return the exit code."""
    parser, options = parse_arguments(arguments)
    trials = parse_trials(parser, options)
    cases = select_cases(parser, lambda: list_cases(options))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates: dict[str, float] = {}
    if device.type == "cuda":
        rates = {limit.name: limit.median for limit in limits.measure_limits(LIMITS, device)[0]}
    workload, settings = moe.Moe(device, seed=0), BenchSettings(seconds=options.seconds)

    def measure_case(case: Case) -> dict[str, Any]:
        costs: list[OperatorCost] = []
        builders = make_builders(case, trials[str(case.sizes["product"])], workload, costs)
        line = measure_versions(case.sizes, builders, device, settings)
        return line | {"floor_us": compute_floor_us(costs[0], rates) if costs and rates else None}

    with torch.inference_mode():
        return write_lines(map(measure_case, cases), options.out, format_case)


if __name__ == "__main__":
    sys.exit(main())
