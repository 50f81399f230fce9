"""Compare steps with prompts on two pairs of H200 with the forecasts of each GPU, to choose `CHUNKS_HIGH` and `PROMPTS_APART`.

    python -m tools.chunk_forecasts

It prints the errors for steps with only prompts or only decodes, and the range of errors for all steps with prompts: from the measured
times of each GPU of the pair, and with the factors that `dcpbench calibrate` computes from the other pair. It needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec

from dcpbench.bench.calibration import compute_prompt_ratios, find_step_times
from dcpbench.points.comm_model import CHUNKS_HIGH, PROMPTS_APART
from dcpbench.serving.step_times import LINE, read_step_times
from tools.results import unpack_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dcpbench.serving.step_times import Case, StepTimes

FOLDER = unpack_all() / "emulation_H200" / "emulated-chunks_4xH200_2026-11-26"
PAIRS = {
    "live-0": ("emulated-0", "emulated-1"),
    "live-2": ("emulated-2", "emulated-3"),
}  # run of both GPUs: runs of one GPU each


def load_times(run: str) -> StepTimes:
    """Return the step times of a run."""
    (file,) = find_step_times([FOLDER / run])
    return read_step_times(file)


def load_calibrated(run: str, others: Iterable[str]) -> StepTimes:
    """Return the step times of an emulated run, with factors for prompts from other runs."""
    times = load_times(run)
    assert times.emulated is not None
    prompts = tuple(compute_prompt_ratios(find_step_times([FOLDER / other for other in others])))
    return msgspec.structs.replace(times, emulated=msgspec.structs.replace(times.emulated, prompts=prompts))


def compute_medians(times: StepTimes) -> dict[Case, float]:
    """Return the median time in ms of each case that forecasts use."""
    return {m.case: m.median_ms for m in times.select_cases(LINE)}


def compute_excess(live: StepTimes, emulated: StepTimes) -> dict[Case, float]:
    """Return the relative excess of the measured time of the pair over the forecast, for each step with prompts."""
    measured, expected = compute_medians(live), compute_medians(emulated)
    return {case: measured[case] / ms - 1 for case, ms in expected.items() if case.chunks and case in measured}


def compute_all_excess(*, calibrated: bool) -> list[float]:
    """Return the excess of all steps with prompts, of both pairs and each of their GPUs."""
    found: list[float] = []
    for run, gpus in PAIRS.items():
        (other,) = PAIRS.keys() - {run}
        for gpu in gpus:
            times = load_calibrated(gpu, (other, *PAIRS[other])) if calibrated else load_times(gpu)
            found += compute_excess(load_times(run), times).values()
    return found


def format_table() -> Iterator[str]:
    """Yield the lines of a table of steps with only prompts or only decodes, without a stored prefix."""
    columns = [run for pair, gpus in PAIRS.items() for run in (pair, *gpus)]
    medians = {run: compute_medians(load_times(run)) for run in columns}
    yield f"| ms of a step | {' | '.join(columns)} |"
    yield f"|---|{'--:|' * len(columns)}"
    for case in medians["live-0"]:
        if (case.chunks and case.decodes) or any(chunk.prefix for chunk in case.chunks):
            continue
        cells = []
        for pair, gpus in PAIRS.items():
            live = medians[pair][case]
            cells += [f"{live:.1f}", *(f"{medians[gpu][case] / live - 1:+.1%}" for gpu in gpus)]
        yield f"| {case} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] = ()) -> int:
    """Print the table and both ranges."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    for line in format_table():
        sys.stdout.write(f"{line}\n")
    for name, calibrated, limit in (("alone", False, CHUNKS_HIGH), ("calibrated", True, PROMPTS_APART)):
        found = compute_all_excess(calibrated=calibrated)
        beyond = sum(abs(share) > limit for share in found)
        sys.stdout.write(
            f"{name}: steps with prompts take {min(found):+.1%} to {max(found):+.1%} longer than the forecast; {beyond} of {len(found)} "
            f"differ by more than {limit:.0%}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
