"""Fit the terms of estimates to published step times, and score recommendations against published loads.

    python -m tools.recommend_check [--write] [--quick] [--every N] [--engines]

It prints the terms, the errors for a model that is left out of the fit, and the score of each set of loads, which docs/recommend.md has.
--write writes the terms to dcpbench/points/measured/. --quick scores only decode steps; --every N scores each N-th served load. --engines
only scores the loads of tools/engine_loads.py, which vLLM, SGLang and dcpbench's engine served. It needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.plan.spec import make_planned_probe
from dcpbench.points.cluster_specs import MEASURED_ON, load_machine
from dcpbench.recommend import estimate
from dcpbench.recommend.forecast import Estimator
from dcpbench.recommend.score import Score, compute_score
from dcpbench.records.runs import read_run
from dcpbench.serving.step_times import StepTimes
from tools.engine_loads import print_scores
from tools.results import unpack_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.points.point import Point
    from dcpbench.points.roofline import StepRows
    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[1]
RESULTS = unpack_all()
FOLDER_4_GPUS = RESULTS / "decode_4xH200/decode-serving-fp8_4xH200_2026-11-26"
FOLDER_1_GPU = RESULTS / "steps_H100-H200/fp8_H200_2026-11-23"
PRESENT_4_GPUS = RESULTS / "decode_4xH200/decode-fp8_4xH200_2026-11-26"
PRESENT_GRID = [PRESENT_4_GPUS / name for name in ("deepseek-v3", "kimi-k2")]
PRESENT_RUNS = [*PRESENT_GRID, RESULTS / "steps_H100-H200/steps-fp8_H200_2026-11-26" / "now"]
"""Runs with the present kernels. The fp8 runs of all other folders have older kernels, up to commit 630e490a."""
PROMPTS = RESULTS / "replay_H100-H200/replay-against-live_H200_2026-11-26" / "v3-open"
FOLDER_2_GPUS = RESULTS / "decode-serving_2xH200_2026-11-26"
RUNS_2_GPUS, RUNS_2_GPUS_BF16, RUNS_2_GPUS_EXPERTS = (
    sorted((FOLDER_2_GPUS / name).iterdir()) for name in ("grid", "bf16", "experts")
)
GRID = [FOLDER_4_GPUS / "grid" / name for name in ("deepseek-v3-fp8", "kimi-k2-fp8")]
RUNS_FP8 = [*GRID, *sorted((FOLDER_4_GPUS / "grid-tp").iterdir()), *sorted((FOLDER_4_GPUS / "a2a-k2").iterdir())]
RUNS_BF16 = [FOLDER_4_GPUS / "bf16" / "deepseek-v3-bf16", FOLDER_4_GPUS / "bf16-k2" / "kimi-k2-bf16"]
RUNS_EXPERTS = sorted((FOLDER_4_GPUS / "experts").iterdir())
RUNS_1_GPU = [
    FOLDER_1_GPU / name for name in ("v3-fp8-kv-ours", "v3-fp8-bf16-kv", "k2-bf16", "k2-fp8-bf16-kv", "k2-fp8-kv")
]
GQA_FOLDER = RESULTS / "gqa-routing_2xH200_2026-11-29"
ROUTING_RUNS = [GQA_FOLDER / "routing", *sorted((GQA_FOLDER / "routing-layouts").glob("*k"))]
"""Runs with skewed routing, and with 128,000 tokens."""
DECODE_RUNS = [
    *PRESENT_RUNS,
    *RUNS_FP8,
    *RUNS_BF16,
    *RUNS_EXPERTS,
    *RUNS_1_GPU,
    *ROUTING_RUNS,
]  # runs of decode, with a step per record
SHORTENED_MODELS = {"v3-8": "deepseek-v3"}  # model folders next to a run that have some layers of a model
V3, K2 = FOLDER_4_GPUS / "seed" / "deepseek-v3", sorted((FOLDER_4_GPUS / "seed-k2").iterdir())
STEP_TIME_RUNS = [V3, *K2, PROMPTS / "build-deepseek-v3"]  # runs with step times, including those of steps with prompts
FIRST_RUNS = ([V3], [*GRID, *sorted((FOLDER_4_GPUS / "grid").glob("*-tp4")), FOLDER_1_GPU / "k2-fp8-kv"])
"""The earliest measurements: runs with step times, and decode runs."""
LOAD_SETS = {
    "decode in fp8, measured": PRESENT_GRID,
    "decode in bf16, measured": RUNS_BF16,
    "decode in bf16 on two, measured": RUNS_2_GPUS_BF16,
}
OLDER_LOAD_SETS = {  # runs with kernels up to 630e490a, scored with the step times of these kernels
    "decode in fp8 with older kernels, measured": RUNS_FP8,
    "decode in fp8 on two, measured": RUNS_2_GPUS,
    "decode in fp8 on two, expert and tensor parallel, measured": RUNS_2_GPUS_EXPERTS,
    "decode in fp8, expert and tensor parallel, measured": RUNS_EXPERTS,
    "served in fp8, replayed: 4,000 + 1,500 tokens": [V3, *K2, *sorted((FOLDER_4_GPUS / "seed-4gib").iterdir())],
}
FP8_MULTIPLIED = estimate.MULTIPLIED[estimate.FP8_ATTENTION]
OLDER_TERMS = {name: f"{name}, older" for name in (estimate.QUANTISING, estimate.FP8_ATTENTION, FP8_MULTIPLIED)}
"""Terms for the additional time of older kernels over an fp8 KV cache: launches with fp8 weights, and attention."""
LATER_LOAD_SETS = {  # loads measured after FIRST_RUNS, hours later on other machines
    "decode in bf16": RUNS_BF16,
    "decode in fp8 on two": RUNS_2_GPUS,
    "decode in bf16 on two": RUNS_2_GPUS_BF16,
    "decode in fp8 on two, expert and tensor parallel": RUNS_2_GPUS_EXPERTS,
    "decode in fp8, expert and tensor parallel": RUNS_EXPERTS,
    "served in fp8, Kimi-K2": K2,
}
UNITS = {
    OLDER_TERMS[estimate.QUANTISING]: "µs a layer",
    OLDER_TERMS[estimate.FP8_ATTENTION]: "× the floor",
    OLDER_TERMS[FP8_MULTIPLIED]: "× the floor",
    **dict.fromkeys(estimate.PER_LAYER, "µs a layer"),
    **dict.fromkeys(estimate.CALLED, "× the model's"),
    estimate.WAITING: "× the time from the drawn experts",
    **dict.fromkeys(estimate.FLOORED, "of the rate of the floor"),
}
OUTPUT_FILE = ROOT / "dcpbench" / "points" / "measured" / f"steps-{MEASURED_ON.lower()}.json"
Step = tuple[str, dict[str, float], float]  # model, terms, measured µs
PARTNER_TERMS = [  # pairs of terms: a term that no step of a fit has gets the value of the other one
    *estimate.MULTIPLIED.items(),
    (estimate.ATTENTION, estimate.FP8_ATTENTION),
    (estimate.MULTIPLIED[estimate.ATTENTION], estimate.MULTIPLIED[estimate.FP8_ATTENTION]),
]
MIN_TERM = 1e-10  # scaled terms below this are zero


def fit_terms(found: Sequence[tuple[Mapping[str, float], float]], more_terms: Sequence[str] = ()) -> dict[str, float]:
    """Fit terms to measured times in µs by least squares of relative errors: no part is shorter than its floor, and no term is
    negative.

    The fit solves for the excess of parts over their floors (Lawson and Hanson 1974, chapter 23). A term that no step has gets the
    value of its partner in PARTNER_TERMS: compute-bound and memory-bound parts, then attention over both precisions of the KV cache.
    `more_terms` are additional terms without floors.
    """
    every = (*estimate.TERMS, *more_terms)
    table = np.array([[terms[name] for name in every] for terms, _ in found])
    table /= np.array([[us] for _, us in found])
    floors = np.array([name in estimate.FLOORED for name in every])
    present = np.abs(table).sum(axis=0) > 0
    scale = np.where(present, np.abs(table).max(axis=0), 1.0)
    more = _fit_nonnegative(table / scale, 1 - table[:, floors].sum(axis=1)) / scale
    solved = dict(zip(every, map(float, np.where(present, floors + more, 0.0)), strict=True))
    known = dict(zip(every, present, strict=True))
    for pair in PARTNER_TERMS:
        for one, other in (pair, pair[::-1]):
            if known[other] and not known[one]:
                solved[one], known[one] = solved[other], True
    return solved


def _fit_nonnegative(table: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Return the non-negative least-squares solution of `table @ numbers = sums`."""
    numbers, free = np.zeros(table.shape[1]), np.zeros(table.shape[1], dtype=bool)
    while True:
        gain = np.where(free, 0.0, table.T @ (sums - table @ numbers))
        if gain.max() <= MIN_TERM:
            return numbers
        free[gain.argmax()] = True
        while True:
            solution = np.zeros(len(numbers))
            solution[free] = np.linalg.lstsq(table[:, free], sums, rcond=None)[0]
            if (solution[free] > 0).all():
                numbers = solution
                break
            below = free & (solution <= 0)
            numbers = numbers + (numbers[below] / (numbers[below] - solution[below])).min() * (solution - numbers)
            free &= numbers > MIN_TERM
            numbers[~free] = 0.0


def collect_steps(timed: list[Path], stepped: list[Path], now: list[Path]) -> tuple[list[Step], list[str]]:
    """Return the steps of runs, and the folders of the runs; runs that are not in `now` have older kernels."""
    found: list[Step] = []
    for run in timed:
        for file in sorted(run.glob("step-times/*.json")):
            # Files of older versions lack the cases of single replicas, which only a replay needs.
            times = msgspec.json.decode(file.read_bytes(), type=StepTimes)
            point = find_point(times.path, read_run(run).records)
            found += [
                make_step(point, measured.case.compute_rows(point.dp), measured.median_ms) for measured in times.cases
            ]
    for run in stepped:
        for r in read_run(run).records:
            if r.metrics is not None:
                model, terms, us = make_step(
                    locate_model(r.point, run), None, r.metrics.step_ms.median, older=run not in now
                )
                found.append((SHORTENED_MODELS.get(r.point.model, model), terms, us))
    return found, [str(run.relative_to(ROOT)) for run in (*timed, *stepped)]


def locate_model(point: Point, run: Path) -> Point:
    """Return the point with the path of its model's folder if that lies next to the run."""
    folder = run.parent / point.model
    return msgspec.structs.replace(point, model=str(folder)) if (folder / "config.json").is_file() else point


def find_point(path: Mapping[str, object], records: list[Record]) -> Point:
    """Return a point that was replayed with step times of this path, and has its layout."""
    same = ("tp", "dp", "dcp", "exchange")
    return next(r.point for r in records if all(getattr(r.point, name) == path[name] for name in same))


def make_step(point: Point, rows: StepRows | None, ms: float, *, older: bool = True) -> Step:
    """Return a measured step; without `rows`, the step in which all requests of the point decode."""
    estimator = Estimator(point, load_machine(MEASURED_ON), {})
    terms = estimator.compute_terms(rows or estimator.make_decode_rows(point.concurrency, point.context))
    assert terms is not None
    beyond = older and point.kv_dtype == "fp8"
    more = {extra: terms[name] if beyond else 0.0 for name, extra in OLDER_TERMS.items()}
    return point.model, terms | more, ms * 1e3


def fit_runs(timed: list[Path], stepped: list[Path], now: list[Path]) -> tuple[estimate.Steps, estimate.Steps]:
    """Return the fits for the present and for older kernels, without bands, which the scores determine.

    Without any run in `now` both fits are equal.
    """
    steps, sources = collect_steps(timed, stepped, now)
    more = tuple(OLDER_TERMS.values()) if now else ()
    models = list(dict.fromkeys(model for model, _, _ in steps))
    without = {left: fit_terms([(t, us) for model, t, us in steps if model != left], more) for left in models}
    terms = fit_terms([(t, us) for _, t, us in steps], more)
    errors = [abs(estimate.compute_us({n: t[n] for n in terms}, without[model]) / us - 1) for model, t, us in steps]
    print_line(
        f"{len(steps)} steps; error for a model that is left out of the fit: p50 {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}"
    )
    print_terms(terms)
    present, before = (
        estimate.Steps(
            terms=select(terms),
            without={left: select(left_terms) for left, left_terms in without.items()},
            band=0.0,
            ratio_band=0.0,
            machine=MEASURED_ON,
            sources=sources,
            steps=len(steps),
        )
        for select in (select_present_terms, add_older_terms)
    )
    return present, before


def select_present_terms(terms: dict[str, float]) -> dict[str, float]:
    """Return the terms of the present kernels."""
    return {name: terms[name] for name in estimate.TERMS}


def add_older_terms(terms: dict[str, float]) -> dict[str, float]:
    """Return the terms of older kernels, for steps with fp8 weights and an fp8 KV cache."""
    return {name: terms[name] + terms.get(OLDER_TERMS.get(name, ""), 0.0) for name in estimate.TERMS}


def print_terms(terms: dict[str, float]) -> None:
    """Print each term on a line."""
    for name, factor in terms.items():
        share = 1 / factor if factor and name in estimate.FLOORED else factor
        print_line(
            f"  {name}: {share:.3g} {UNITS[name]}" if factor else f"  {name}: not distinguished from other terms"
        )


def score_loads(name: str, folders: list[Path], steps: estimate.Steps, every: int) -> Score:
    """Compute and print the score of the estimates for a set of loads."""
    records = [record for folder in folders for record in read_run(folder).records]
    found = compute_score(records, load_machine(MEASURED_ON), make_planned_probe(MEASURED_ON, 4), steps, every=every)
    errors, ratio_errors = np.abs(found.errors), np.abs(found.ratio_errors)
    print_line(f"{name}: {found.format_score()}")
    print_line(f"  winners: {', '.join(f'{who} {n}' for who, n in found.winners.most_common())}")
    print_line(
        f"  error of tok/s p50 {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}; of the ratio of two layouts "
        f"p50 {np.median(ratio_errors):.1%}, p90 {np.quantile(ratio_errors, 0.9):.1%}"
    )
    for metric in ("itl", "ttft"):
        latency_errors = np.abs([error for load in found.loads for error in load.latency_errors[metric]])
        if len(latency_errors):
            print_line(
                f"  error of {metric.upper()} p50: p50 {np.median(latency_errors):.1%}, p90 {np.quantile(latency_errors, 0.9):.1%}"
            )
    for load in found.loads:
        if not load.is_right(load.picked):
            behind = 1 - load.measured[load.picked] / load.measured[load.best]
            print_line(f"  wrong: {load.name}: {load.picked} for {load.best}, {behind:.1%} behind")
    return found


def print_line(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Fit the terms, print the scores, and write the fit if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the terms to {OUTPUT_FILE.name}")
    parser.add_argument("--quick", action="store_true", help="score only decode steps")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="score each N-th served load")
    parser.add_argument("--engines", action="store_true", help="only score loads of vLLM, SGLang and dcpbench's engine")
    args = parser.parse_args()
    if args.engines:
        print_scores(RESULTS, estimate.load_published_steps())
        return 0
    steps, before = fit_runs(STEP_TIME_RUNS, DECODE_RUNS, [*PRESENT_RUNS, *ROUTING_RUNS])
    errors: list[float] = []
    ratios: list[float] = []
    for name, folders in (LOAD_SETS | OLDER_LOAD_SETS).items():
        if args.quick and not name.startswith("decode"):
            continue
        by = before if name in OLDER_LOAD_SETS else steps
        found = score_loads(name, folders, by, 1 if name.startswith("decode") else args.every)
        errors += list(np.abs(found.errors))
        ratios += list(np.abs(found.ratio_errors))
    if not args.quick:
        print_line("Loads that were measured after the steps of this fit:")
        first, _ = fit_runs(*FIRST_RUNS, now=[])
        for name, folders in LATER_LOAD_SETS.items():
            score_loads(name, folders, first, 1 if name.startswith("decode") else args.every)
    steps = msgspec.structs.replace(
        steps, band=float(np.quantile(errors, 0.9)), ratio_band=float(np.quantile(ratios, 0.9))
    )
    print_line(f"band {steps.band:.1%}, of ratios {steps.ratio_band:.1%}")
    if args.write:
        OUTPUT_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(steps), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
