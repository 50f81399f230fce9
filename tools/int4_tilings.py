"""Time tilings of our kernels of int4 experts, and of those of another checkout, in turns so that all meet the same clocks.

    python -m tools.int4_tilings -o tilings.jsonl
    python -m tools.int4_tilings --tp 1 --requests 32 --gate-up 64x3x2xw,64x3x2xw16 --down 128x3x2xw -o tilings.jsonl
    git worktree add /tmp/before main~3
    python -m tools.int4_tilings --before /tmp/before --gate-up before:64x3x4xw,64x3x2xw --down before:128x4x4xw -o tilings.jsonl

A tiling is COLUMNSxSTAGESxWARPSxFIRST: columns of results of a program, stages of its pipeline, its warps, and the first operand of its
product: w for weights, r for rows. The rows of a tile may follow FIRST (w16), and xBLOCKS the whole: blocks of columns of a program whose
inputs are few. A tiling with the prefix before: is one of the checkout of --before, whose int4 weights must have the same layout.

Each line of FILE is a case: µs of a call of each, from a CUDA graph over cold weights, with the interval of its median, its error against
the dequantised product in fp64, what was wrong, and the floor by this GPU's limits. A tiling that cannot be compiled, or is wrong, says so
and is not timed; the command then ends with 1. Without a GPU all are checked and none is timed.
"""

from __future__ import annotations

import argparse
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
from tools.versions import Version, format_times, measure_versions, select_cases, write_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from dcpbench.bench.operators.calls import Calls

GATE_UP = "64x3x2xw,64x3x2xw16,64x4x2xw,32x4x2xw,32x5x2xw,32x4x1xw,64x3x4xw,64x3x4xr16"
DOWN = "128x3x2xw,128x3x2xw16,64x3x2xw,64x3x2xwx14,64x3x2xwx7,64x4x1xw,128x3x4xw,128x4x4xw"
LIMITS = ("read", "matmul")
TILING = re.compile(r"(before:)?(\d+)x(\d+)x(\d+)x([wr])(\d+)?(?:x(\d+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A tiling of one version of the kernels."""

    module: ModuleType  # the version's int4_experts
    tiling: Any  # its Tiling
    rows: int | None  # rows of a tile; None for those that the version chooses

    @contextlib.contextmanager
    def select(self) -> Iterator[None]:
        """Let benches run this version with this tiling inside the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(moe, "int4_experts", self.module))
            stack.enter_context(mock.patch.object(self.module, "choose_tiling", return_value=self.tiling))
            if self.rows is not None:
                stack.enter_context(mock.patch.object(self.module, "choose_rows", return_value=self.rows))
            yield


def load_checkout(checkout: Path) -> ModuleType:
    """Return the module int4_experts of another checkout, which uses that checkout's int4 and this one's other modules."""
    with Version(checkout, kernels, ["int4"]).replace_modules():
        return Version(checkout, kernels.moe, ["int4_experts"]).modules["int4_experts"]


def parse_trial(word: str, before: ModuleType | None) -> Trial:
    """Return the trial of a word; raise ValueError if it is no tiling, or `before` is None and needed."""
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
    case: Case, trials: Mapping[str, Trial], build: moe.Moe, works: list[OperatorCost]
) -> dict[str, Callable[[], Calls]]:
    """Return a function that builds the calls of each trial, and adds their work to `works`."""

    def make(trial: Trial) -> Calls:
        with trial.select():
            calls = build.build_calls(case)
        works.append(calls.work or OperatorCost())

        def select_first(call: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with trial.select():
                    call()

            return run

        return dataclasses.replace(calls, calls=[select_first(call) for call in calls.calls])

    return {word: functools.partial(make, trial) for word, trial in trials.items()}


def format_case(line: dict[str, Any]) -> str:
    """Format a case in a line."""
    sizes, floor = line["sizes"], line["floor_us"]
    best = min((one["median_us"] for one in line["versions"].values() if "median_us" in one), default=None)
    share = f", best {100 * floor / best:.0f} % of the limit" if best and floor else ""
    return f"{sizes['product']}, {sizes['width']} wide, {sizes['requests']} requests, groups of {sizes['group_size']}{share}: {format_times(line)}"


def list_cases(options: argparse.Namespace) -> list[Case]:
    """Return all requested cases."""
    named = {name: getattr(options, name) for name in ("model", "tp", "requests", "rows", "group_size")}
    typed = named | {"weights": "int4", "variant": "triton", "layers": None}
    return list_moe_cases(BenchOptions(cpu=not torch.cuda.is_available(), typed=typed))


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the parser, for errors, and the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate-up", default=GATE_UP, help="tilings of the first product; default: %(default)s")
    parser.add_argument("--down", default=DOWN, help="tilings of the second product; default: %(default)s")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout, for tilings named before:…")
    parser.add_argument("--model", default="deepseek-v3", help="default: %(default)s")
    parser.add_argument("--tp", default="1,8", help="default: %(default)s")
    parser.add_argument("--requests", default="8,32,128", help="default: %(default)s")
    parser.add_argument("--rows", default="uniform", help="as bench moe has them; default: %(default)s")
    parser.add_argument("--group-size", default="32", help="inputs per scale; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="of each case and tiling at most; default: %(default)s"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="append a line of JSON for each case")
    return parser, parser.parse_args(arguments)


def parse_trials(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, dict[str, Trial]]:
    """Return the trials of each product; exit with the parser's error for an invalid one."""
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
    """Run the command line; see the module docstring."""
    parser, options = parse_arguments(arguments)
    trials = parse_trials(parser, options)
    cases = select_cases(parser, lambda: list_cases(options))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates: dict[str, float] = {}
    if device.type == "cuda":
        rates = {limit.name: limit.median for limit in limits.measure_limits(LIMITS, device)[0]}
    build, settings = moe.Moe(device, seed=0), BenchSettings(seconds=options.seconds)

    def measure_case(case: Case) -> dict[str, Any]:
        works: list[OperatorCost] = []
        builders = make_builders(case, trials[str(case.sizes["product"])], build, works)
        line = measure_versions(case.sizes, builders, device, settings)
        return line | {"floor_us": compute_floor_us(works[0], rates) if works and rates else None}

    with torch.inference_mode():
        return write_lines(map(measure_case, cases), options.out, format_case)


if __name__ == "__main__":
    sys.exit(main())
