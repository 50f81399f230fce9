"""Compare launch times on the host with device times of steps with prompt chunks, without and with a stored prefix.

    python -m tools.chunk_steps -o FOLDER [--model deepseek-v2-lite] [--before STEP-TIMES.json]

FOLDER gets the step times of a model on one GPU, measured as in tools.replay_live, unless it has them. With --before the table also has
the times of the same cases in a file of earlier step times.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.points.names import REPLAY
from dcpbench.serving.step_times import HOT, read_step_times
from tools.replay_live import BUILD, SIZES, find_step_times, list_options, run_serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.serving.step_times import MeasuredCase, StepTimes


def list_chunk_cases(times: StepTimes) -> list[MeasuredCase]:
    """Return the cases without decodes, in the order of prefix and tokens."""
    alone = [m for m in times.cases if m.case.chunks and not m.case.decodes and m.case.use != HOT]
    return sorted(
        alone,
        key=lambda m: (m.case.compute_work().prefix > 0, m.case.compute_work().tokens, m.case.compute_work().prefix),
    )


def format_table(times: StepTimes, before: StepTimes | None = None) -> list[str]:
    """Format a table of host and device times in ms, with the range of host times without and with a stored prefix."""
    earlier = {str(m.case): m for m in list_chunk_cases(before)} if before else {}
    heads = ["chunks", "prefix", "host ms", "device ms", *(["host ms before", "device ms before"] if before else [])]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    cases = list_chunk_cases(times)
    for m in cases:
        match = earlier.get(str(m.case))
        cells = [str(m.case), f"{m.case.compute_work().prefix:,}", *_format_times(m)]
        lines.append(f"| {' | '.join(cells + (_format_times(match) if before else []))} |")
    lines.append("")
    for name, stored in (("without a stored prefix", False), ("with a stored prefix", True)):
        lines.append(f"{name}: {_format_range([m for m in cases if (m.case.compute_work().prefix > 0) == stored])}")
    return lines


def _format_times(case: MeasuredCase | None) -> list[str]:
    return ["–", "–"] if case is None else [f"{case.median_host_ms:.1f}", f"{case.median_ms:.1f}"]


def _format_range(cases: Sequence[MeasuredCase]) -> str:
    if not cases:
        return "no case"
    host = [m.median_host_ms for m in cases]
    longer = sum(m.median_host_ms > m.median_ms for m in cases)
    return f"{min(host):.1f} to {max(host):.1f} ms on the host, longer than on the device in {longer} of {len(cases)} cases"


def main() -> int:
    """Measure the step times if they are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the step times")
    parser.add_argument("--model", default="deepseek-v2-lite", choices=list(SIZES))
    parser.add_argument("--before", type=Path, help="step times of another version of the code")
    args = parser.parse_args()
    if find_step_times(args.output, args.model) is None:
        args.output.mkdir(parents=True, exist_ok=True)
        run = args.output / f"{BUILD}-{args.model}"
        run_serve(run, "--model", args.model, "--tp", "1", *list_options(args.model, BUILD), "--mode", REPLAY)
    file = find_step_times(args.output, args.model)
    if file is None:
        sys.stdout.write("No step times were measured; the command above printed the reason.\n")
        return 1
    times = read_step_times(file)
    device = times.environment.device
    lines = format_table(times, read_step_times(args.before) if args.before else None)
    sys.stdout.write("\n".join([f"{args.model} on {device}, {file}", "", *lines]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
