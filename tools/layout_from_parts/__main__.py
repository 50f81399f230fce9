"""Forecast decode steps of vLLM on more GPUs than the machine has, from parts that were measured on one or two GPUs.

On a machine with two GPUs, `vllm` on PATH and an engine file of results/engines_H200, for tp8 and tp8·dcp8 at 32,000 tokens:

    python -m tools.layout_from_parts model half --divide 2 --tp 1
    python -m tools.layout_from_parts model eighth --divide 8 --tp 1
    python -m tools.layout_from_parts model whole --divide 1 --tp 2
    dcpbench sweep --engine vllm.toml --model eighth --tp 1 --dcp 1 --concurrency 8,32 --context 32000 -o eighth-tp1
    dcpbench sweep --engine vllm.toml --model whole --tp 1 --dcp 1 --concurrency 8,32 --context 4000,16000 -o whole-tp1
    dcpbench sweep --engine vllm.toml --model whole --tp 2 --dcp 1,2 --concurrency 8,32 --context 16000,32000 -o whole-tp2
    dcpbench sweep --engine vllm.toml --model half --tp 1 --dcp 1 --concurrency 8,32 --context 32000 -o half-tp1
    python -m tools.layout_from_parts compose eighth-tp1 whole-tp1 whole-tp2 half-tp1 --tp 8 --concurrency 8,32 --context 32000

`model` writes a folder without weights. Its heads, experts, dense layers and vocabulary are divided, so that a rank computes the same as one
of more ranks. A folder divided by 4 at tp2 is equivalent to one divided by 8 at tp1. vLLM pads the vocabulary of the latter, 16,160
tokens, to 16,192.

`compose` takes the parts of each step of tp8 and tp8·dcp8 from the runs in which ranks compute the same:

    projections, experts, norms, quantisation    a rank with the target's heads and widths
    attention                                    the same; with DCP a rank with all heads over its share of the context
    sampling, elementwise                        a rank with the whole vocabulary
    merge, copies, KV cache write, no kernel     with DCP a layout with DCP at any context
    all-reduce, exchange                         the communication model, between the target's ranks

Measured all-reduces and exchanges are left out, because they contain the wait for the slowest rank. The band is the largest error of
the same composition of tp2 and tp2·dcp2 (`--check-tp`) against their measured steps.

Exit code 3: no measured step checks the composition.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import ExitCode, UsageError
from dcpbench.models import load_shape
from dcpbench.points.cluster_specs import load_machine
from tools.command_line import parse_count, report_errors
from tools.layout_from_parts.composition import forecast
from tools.layout_from_parts.divided import SOURCES, write_divided_folder
from tools.layout_from_parts.steps import Target, read_steps
from tools.layout_from_parts.text import format_forecast, format_json

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.layout_from_parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="write a model folder with divided heads and widths")
    model.add_argument("folder", type=Path, help="folder to write")
    model.add_argument("--divide", type=parse_count, required=True, help="divisor of heads, widths and vocabulary")
    model.add_argument(
        "--tp", type=parse_count, default=2, help="GPUs of the run, to check the widths of a rank; default: %(default)s"
    )
    model.add_argument("--layers", type=parse_count, default=8, help="number of layers; default: %(default)s")
    compose = commands.add_parser("compose", help="compose steps, and check the composition")
    compose.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs of dcpbench sweep --engine vllm")
    compose.add_argument("--tp", type=parse_count, default=8, help="tensor-parallel degree; default: %(default)s")
    compose.add_argument(
        "--check-tp", type=parse_count, default=2, help="smaller degree with measured steps; default: %(default)s"
    )
    compose.add_argument(
        "--concurrency", type=parse_counts, default=[8, 32], metavar="N,…", help="numbers of requests; default: 8,32"
    )
    compose.add_argument(
        "--context", type=parse_count, default=32000, help="KV tokens of a request; default: %(default)s"
    )
    compose.add_argument("--machine", default="H200", help="machine of the communication model; default: %(default)s")
    compose.add_argument("--json", action="store_true", help="print the forecast as JSON")
    for part in (model, compose):
        part.add_argument("--source", choices=SOURCES, default="deepseek-v3", help="published model")
    return parser.parse_args(words)


def parse_counts(text: str) -> list[int]:
    """Parse positive whole numbers, separated by commas. Raise ArgumentTypeError for other text."""
    return list(dict.fromkeys(parse_count(part) for part in text.split(",")))


def list_targets(tp: int, concurrency: Sequence[int], context: int) -> list[Target]:
    """Return the steps without and with DCP. Raise UsageError if ranks cannot divide the context equally."""
    if tp == 1 or context % tp:
        raise UsageError(
            f"--context {context} with {tp} ranks: the forecast is for 2 or more ranks with equal shares of the context; use --context "
            f"{max(context // tp, 1) * tp}, or 2 or more ranks."
        )
    return [Target(tp=tp, dcp=dcp, requests=n, context=context) for n in concurrency for dcp in (1, tp)]


def run_command(args: argparse.Namespace) -> int:
    """Run a command; return its exit code."""
    if args.command == "model":
        sentence = write_divided_folder(args.folder, args.source, divide=args.divide, tp=args.tp, layers=args.layers)
        sys.stdout.write(f"{sentence}\n")
        return ExitCode.OK
    shape, machine = load_shape(args.source), load_machine(args.machine)
    found = forecast(
        read_steps(args.runs, shape),
        shape,
        machine.label,
        machine.comm_model,
        list_targets(args.tp, args.concurrency, args.context),
        list_targets(args.check_tp, args.concurrency, args.context),
    )
    sys.stdout.write(format_json(found) if args.json else format_forecast(found))
    return ExitCode.OK if found.checks else ExitCode.NO_ANSWER


if __name__ == "__main__":
    sys.exit(report_errors(lambda: run_command(parse_arguments())))
