"""Fit the shares that estimates go by to published step times, and score recommendations against published loads.

    python -m tools.recommend_check [--write] [--quick] [--every N] [--engines]

prints the shares, their errors for the model that a fit had not seen, and the score of each set of loads, as docs/recommend.md has them.
--write writes them to dcpbench/points/measured/. It needs no GPU. --quick scores decode steps alone; --every takes each N-th served load.
--engines only scores the loads of tools/engine_loads.py, which vLLM, SGLang and dcpbench's engine served.
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
FOUR = RESULTS / "decode_4xH200/decode-serving-fp8_4xH200_2026-11-26"
ONE = RESULTS / "steps_H100-H200/fp8_H200_2026-11-23"
FOUR_NOW = RESULTS / "decode_4xH200/decode-fp8_4xH200_2026-11-26"
GRID_NOW = [FOUR_NOW / name for name in ("deepseek-v3", "kimi-k2")]
NOW = [*GRID_NOW, RESULTS / "steps_H100-H200/steps-fp8_H200_2026-11-26" / "now"]
"""Runs that measured the present kernels; the fp8 runs of all other folders have those up to commit 630e490a."""
PROMPTS = RESULTS / "replay_H100-H200/replay-against-live_H200_2026-11-26" / "v3-open"
PAIR = RESULTS / "decode-serving_2xH200_2026-11-26"
TWO, TWO_BF16, TWO_EXPERTS = (sorted((PAIR / name).iterdir()) for name in ("grid", "bf16", "experts"))
GRID = [FOUR / "grid" / name for name in ("deepseek-v3-fp8", "kimi-k2-fp8")]
FP8 = [*GRID, *sorted((FOUR / "grid-tp").iterdir()), *sorted((FOUR / "a2a-k2").iterdir())]
BF16 = [FOUR / "bf16" / "deepseek-v3-bf16", FOUR / "bf16-k2" / "kimi-k2-bf16"]
EXPERTS = sorted((FOUR / "experts").iterdir())
ALONE = [ONE / name for name in ("v3-fp8-kv-ours", "v3-fp8-bf16-kv", "k2-bf16", "k2-fp8-bf16-kv", "k2-fp8-kv")]
STEPPED = [*NOW, *FP8, *BF16, *EXPERTS, *ALONE]  # runs of decode, with a step per record
V3, K2 = FOUR / "seed" / "deepseek-v3", sorted((FOUR / "seed-k2").iterdir())
TIMED = [V3, *K2, PROMPTS / "build-deepseek-v3"]  # runs with step times, including those of steps with prompts
FIRST = ([V3], [*GRID, *sorted((FOUR / "grid").glob("*-tp4")), ONE / "k2-fp8-kv"])
"""Earliest measurements: step times, and decode."""
SETS = {
    "decode in fp8, measured": GRID_NOW,
    "decode in bf16, measured": BF16,
    "decode in bf16 on two, measured": TWO_BF16,
}
BEFORE = {  # runs with kernels up to 630e490a, which are scored by the step times of these kernels
    "decode in fp8 with older kernels, measured": FP8,
    "decode in fp8 on two, measured": TWO,
    "decode in fp8 on two with experts whole and cut, measured": TWO_EXPERTS,
    "decode in fp8 with experts whole and cut, measured": EXPERTS,
    "served in fp8, replayed: 4,000 + 1,500 tokens": [V3, *K2, *sorted((FOUR / "seed-4gib").iterdir())],
}
FP8_MULTIPLIED = estimate.MULTIPLIED[estimate.FP8_ATTENTION]
OLDER = {name: f"{name}, older" for name in (estimate.QUANTISING, estimate.FP8_ATTENTION, FP8_MULTIPLIED)}
"""Terms for the additional time of steps with these kernels over an fp8 cache: launches with fp8 weights, and
attention.
"""
AFTERWARDS = {  # loads measured after FIRST, hours later on other machines
    "decode in bf16": BF16,
    "decode in fp8 on two": TWO,
    "decode in bf16 on two": TWO_BF16,
    "decode in fp8 on two with experts whole and cut": TWO_EXPERTS,
    "decode in fp8 with experts whole and cut": EXPERTS,
    "served in fp8, Kimi-K2": K2,
}
UNITS = {
    OLDER[estimate.QUANTISING]: "µs a layer",
    OLDER[estimate.FP8_ATTENTION]: "× the floor",
    OLDER[FP8_MULTIPLIED]: "× the floor",
    **dict.fromkeys(estimate.PER_LAYER, "µs a layer"),
    **dict.fromkeys(estimate.CALLED, "× the model's"),
    estimate.WAITING: "× what drawing experts makes of it",
    **dict.fromkeys(estimate.FLOORED, "of the floor's rate"),
}
OUT = ROOT / "dcpbench" / "points" / "measured" / f"steps-{MEASURED_ON.lower()}.json"
Case = tuple[str, dict[str, float], float]  # model, terms, measured µs
SAME = [  # pairs of terms: if no step of a fit has one of them, it gets the share of the other
    *estimate.MULTIPLIED.items(),
    (estimate.ATTENTION, estimate.FP8_ATTENTION),
    (estimate.MULTIPLIED[estimate.ATTENTION], estimate.MULTIPLIED[estimate.FP8_ATTENTION]),
]
ENOUGH = 1e-10  # below which a scaled term counts as zero


def fit_terms(found: Sequence[tuple[Mapping[str, float], float]], more_terms: Sequence[str] = ()) -> dict[str, float]:
    """Fit (terms, measured µs) by least squares of relative errors: no part takes less than its floor, nothing is
    negative.

    The fit solves for the excess of parts over their floors (Lawson and Hanson 1974, chapter 23). A part that no step
    was bound by multiplying has the share of reading, and the reverse; then attention that no step had over a cache of
    one precision has its share over the other. `more_terms` are additional terms without floors.
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
    for pair in SAME:
        for one, other in (pair, pair[::-1]):
            if known[other] and not known[one]:
                solved[one], known[one] = solved[other], True
    return solved


def _fit_nonnegative(table: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Return the numbers ≥ 0 by which sums over rows come nearest to `sums`."""
    numbers, free = np.zeros(table.shape[1]), np.zeros(table.shape[1], dtype=bool)
    while True:
        gain = np.where(free, 0.0, table.T @ (sums - table @ numbers))
        if gain.max() <= ENOUGH:
            return numbers
        free[gain.argmax()] = True
        while True:
            wanted = np.zeros(len(numbers))
            wanted[free] = np.linalg.lstsq(table[:, free], sums, rcond=None)[0]
            if (wanted[free] > 0).all():
                numbers = wanted
                break
            below = free & (wanted <= 0)
            numbers = numbers + (numbers[below] / (numbers[below] - wanted[below])).min() * (wanted - numbers)
            free &= numbers > ENOUGH
            numbers[~free] = 0.0


def cases(timed: list[Path], stepped: list[Path], now: list[Path]) -> tuple[list[Case], list[str]]:
    """Return the steps of runs, and the names of the runs; all but `now` have older kernels."""
    found: list[Case] = []
    for run in timed:
        for file in sorted(run.glob("step-times/*.json")):
            # Files of older versions lack the cases of single replicas, which a replay needs and a fit does not.
            times = msgspec.json.decode(file.read_bytes(), type=StepTimes)
            point = point_of(times.path, read_run(run).records)
            found += [case(point, measured.case.compute_rows(point.dp), measured.median_ms) for measured in times.cases]
    for run in stepped:
        for r in read_run(run).records:
            if r.metrics is not None:
                found.append(case(r.point, None, r.metrics.step_ms.median, older=run not in now))
    return found, [str(run.relative_to(ROOT)) for run in (*timed, *stepped)]


def point_of(path: Mapping[str, object], records: list[Record]) -> Point:
    """Return a point that was replayed by step times of that path, and so has the same layout."""
    same = ("tp", "dp", "dcp", "exchange")
    return next(r.point for r in records if all(getattr(r.point, name) == path[name] for name in same))


def case(point: Point, rows: StepRows | None, ms: float, *, older: bool = True) -> Case:
    """Return a measured step; without rows it is the step in which all of a point's requests decode."""
    of = Estimator(point, load_machine(MEASURED_ON), {})
    terms = of.compute_terms(rows or of.make_decode_rows(point.concurrency, point.context))
    assert terms is not None
    beyond = older and point.kv_dtype == "fp8"
    more = {extra: terms[name] if beyond else 0.0 for name, extra in OLDER.items()}
    return point.model, terms | more, ms * 1e3


def fitted(timed: list[Path], stepped: list[Path], now: list[Path]) -> tuple[estimate.Steps, estimate.Steps]:
    """Return the fit for the kernels of `now` and for those before, without the bands, which scores determine.

    Both are equal without any `now`.
    """
    found, sources = cases(timed, stepped, now)
    more = tuple(OLDER.values()) if now else ()
    models = list(dict.fromkeys(model for model, _, _ in found))
    without = {left: fit_terms([(t, us) for model, t, us in found if model != left], more) for left in models}
    terms = fit_terms([(t, us) for _, t, us in found], more)
    errors = [abs(estimate.compute_us({n: t[n] for n in terms}, without[model]) / us - 1) for model, t, us in found]
    say(
        f"{len(found)} steps; of a model that the fit had not seen p50 {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}"
    )
    said(terms)
    today, before = (
        estimate.Steps(
            terms=made(terms),
            without={left: made(of) for left, of in without.items()},
            band=0.0,
            ratio_band=0.0,
            machine=MEASURED_ON,
            sources=sources,
            steps=len(found),
        )
        for made in (of_today, of_before)
    )
    return today, before


def of_today(terms: dict[str, float]) -> dict[str, float]:
    """Return the terms without the additional time of older kernels."""
    return {name: terms[name] for name in estimate.TERMS}


def of_before(terms: dict[str, float]) -> dict[str, float]:
    """Return the terms with that additional time, for steps with fp8 weights over an fp8 cache."""
    return {name: terms[name] + terms.get(OLDER.get(name, ""), 0.0) for name in estimate.TERMS}


def said(terms: dict[str, float]) -> None:
    """Print each share on a line."""
    for name, factor in terms.items():
        share = 1 / factor if factor and name in estimate.FLOORED else factor
        say(f"  {name}: {share:.3g} {UNITS[name]}" if factor else f"  {name}: not told apart from others")


def scored(name: str, folders: list[Path], steps: estimate.Steps, every: int) -> Score:
    """Print and return the score of the estimates for a set of loads."""
    records = [record for folder in folders for record in read_run(folder).records]
    found = compute_score(records, load_machine(MEASURED_ON), make_planned_probe(MEASURED_ON, 4), steps, every=every)
    errors, apart = np.abs(found.errors), np.abs(found.ratio_errors)
    say(f"{name}: {found.format_score()}")
    say(f"  winners: {', '.join(f'{who} {n}' for who, n in found.winners.most_common())}")
    say(
        f"  error of tok/s p50 {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}; of the ratio of two layouts "
        f"p50 {np.median(apart):.1%}, p90 {np.quantile(apart, 0.9):.1%}"
    )
    for metric in ("itl", "ttft"):
        off = np.abs([error for load in found.loads for error in load.latency_errors[metric]])
        if len(off):
            say(f"  error of {metric.upper()} p50: p50 {np.median(off):.1%}, p90 {np.quantile(off, 0.9):.1%}")
    for load in found.loads:
        if not load.is_right(load.picked):
            behind = 1 - load.measured[load.picked] / load.measured[load.best]
            say(f"  wrong: {load.name}: {load.picked} for {load.best}, {behind:.1%} behind")
    return found


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Fit, score and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--engines", action="store_true")
    asked = parser.parse_args()
    if asked.engines:
        print_scores(RESULTS, estimate.load_published_steps())
        return 0
    steps, before = fitted(TIMED, STEPPED, NOW)
    errors: list[float] = []
    ratios: list[float] = []
    for name, folders in (SETS | BEFORE).items():
        if asked.quick and not name.startswith("decode"):
            continue
        by = before if name in BEFORE else steps
        found = scored(name, folders, by, 1 if name.startswith("decode") else asked.every)
        errors += list(np.abs(found.errors))
        ratios += list(np.abs(found.ratio_errors))
    if not asked.quick:
        say("Loads measured after the steps that are fitted here:")
        first, _ = fitted(*FIRST, now=[])
        for name, folders in AFTERWARDS.items():
            scored(name, folders, first, 1 if name.startswith("decode") else asked.every)
    steps = msgspec.structs.replace(
        steps, band=float(np.quantile(errors, 0.9)), ratio_band=float(np.quantile(ratios, 0.9))
    )
    say(f"band {steps.band:.1%}, of ratios {steps.ratio_band:.1%}")
    if asked.write:
        OUT.write_bytes(msgspec.json.format(msgspec.json.encode(steps), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
