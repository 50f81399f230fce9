"""What steps with chunks take the host to launch and the device to run, without a stored prefix and with one.

    python -m tools.chunk_steps -o FOLDER [--model deepseek-v2-lite] [--before STEP-TIMES.json]

FOLDER gets the step times of a model on one GPU, measured as tools.replay_live does, unless they are there. With --before the
cases that a file of earlier step times has, too, stand beside them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.points.names import REPLAY
from dcpbench.serving.step_times import HOT, read_step_times
from tools.replay_live import BUILD, SIZES, serve, step_times, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.serving.step_times import MeasuredCase, StepTimes


def chunk_cases(times: StepTimes) -> list[MeasuredCase]:
    """Return the cases with only chunks, by prefix and tokens."""
    alone = [m for m in times.cases if m.case.chunks and not m.case.decodes and m.case.use != HOT]
    return sorted(
        alone,
        key=lambda m: (m.case.compute_work().prefix > 0, m.case.compute_work().tokens, m.case.compute_work().prefix),
    )


def table(now: StepTimes, before: StepTimes | None = None) -> list[str]:
    """Return host and device ms of each case, and the range of the host's for both kinds."""
    old = {str(m.case): m for m in chunk_cases(before)} if before else {}
    heads = ["chunks", "prefix", "host ms", "device ms", *(["host ms before", "device ms before"] if before else [])]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    cases = chunk_cases(now)
    for m in cases:
        found = old.get(str(m.case))
        cells = [str(m.case), f"{m.case.compute_work().prefix:,}", *_both(m)]
        lines.append(f"| {' | '.join(cells + (_both(found) if before else []))} |")
    lines.append("")
    for name, stored in (("without a stored prefix", False), ("with one", True)):
        lines.append(f"{name}: {_range([m for m in cases if (m.case.compute_work().prefix > 0) == stored])}")
    return lines


def _both(case: MeasuredCase | None) -> list[str]:
    return ["–", "–"] if case is None else [f"{case.median_host_ms:.1f}", f"{case.median_ms:.1f}"]


def _range(cases: Sequence[MeasuredCase]) -> str:
    if not cases:
        return "no case"
    host = [m.median_host_ms for m in cases]
    longer = sum(m.median_host_ms > m.median_ms for m in cases)
    return (
        f"{min(host):.1f} to {max(host):.1f} ms of the host; longer than the device in {longer} of {len(cases)} cases"
    )


def main() -> int:
    """Measure missing step times, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--model", default="deepseek-v2-lite", choices=list(SIZES))
    parser.add_argument("--before", type=Path, help="step times of another state of the code")
    asked = parser.parse_args()
    if step_times(asked.output, asked.model) is None:
        asked.output.mkdir(parents=True, exist_ok=True)
        there = asked.output / f"{BUILD}-{asked.model}"
        serve(there, "--model", asked.model, "--tp", "1", *words(asked.model, BUILD), "--mode", REPLAY)
    found = step_times(asked.output, asked.model)
    if found is None:
        sys.stdout.write("no step times were measured; what the command above says is why.\n")
        return 1
    times = read_step_times(found)
    on = times.environment.device
    lines = table(times, read_step_times(asked.before) if asked.before else None)
    sys.stdout.write("\n".join([f"{asked.model} on {on}, {found}", "", *lines]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
