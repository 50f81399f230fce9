"""Fit the shares that estimates go by to published step times, and score recommendations against published loads.

    python -m tools.recommend_check [--write] [--quick] [--every N]

prints the shares, their errors for the model that a fit had not seen, and the score of each set of loads, as docs/recommend.md has them.
--write writes them to dcpbench/points/measured/. It needs no GPU. --quick scores decode steps alone; --every takes each N-th served load.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import numpy as np

from dcpbench.plan.spec import planned
from dcpbench.points.floors import Sharding
from dcpbench.points.layout import Layout
from dcpbench.points.machines import MEASURED_ON, described
from dcpbench.points.shapes import load_shape
from dcpbench.recommend import estimate
from dcpbench.recommend.score import score
from dcpbench.records.runs import read_run
from dcpbench.serving.step_times import read_step_times

ROOT = Path(__file__).parents[1]
SERVED = ROOT / "results" / "serving-deepseek-v3-kimi-k2_4xH200_2026-11-21"
DECODED = ROOT / "results" / "decode-deepseek-v3-kimi-k2_4xH200_2026-11-20"
SETS = {
    "decode steps, measured": [DECODED / "run1"],
    "served at 8 GiB of KV, replayed: 4,000 + 1,500 tokens": [SERVED / "v3-seed-8gib", SERVED / "k2-seed-8gib"],
    "served at 8 GiB of KV, replayed: 1,000 to 32,000 + 500 tokens": [
        SERVED / "v3-break-even-8gib",
        SERVED / "k2-break-even-8gib",
    ],
}
OUT = ROOT / "dcpbench" / "points" / "measured" / f"steps-{MEASURED_ON.lower()}.json"
Case = tuple[str, dict[str, float], float]
"""Model, terms, measured µs."""


def cases() -> tuple[list[Case], list[str]]:
    """Of all published step times, and the runs that they lie in."""
    machine = described(MEASURED_ON)
    rates, wire = estimate.limits(machine), machine.wire
    found, sources = [], []
    for file in sorted(SERVED.glob("*/step-times/*.json")):
        times = read_step_times(file)
        path = times.path
        layout = Layout(tp=int(path["tp"]), dp=int(path["dp"]), dcp=int(path["dcp"]))
        sharding = Sharding(shape=load_shape(str(path["model"])), layout=layout, itemsize=2)
        sources.append(str(file.parents[1].relative_to(ROOT)))
        for measured in times.cases:
            rows = estimate.padded(measured.case.rows(layout.dp), layout.dp)
            terms = estimate.terms(sharding, rows, rates, wire, str(path["exchange"]))
            assert terms is not None
            found.append((str(path["model"]), terms, measured.median_ms * 1e3))
    return found, list(dict.fromkeys(sources))


def fitted() -> estimate.Steps:
    """Everything but the bands, which scores say."""
    found, sources = cases()
    models = list(dict.fromkeys(model for model, _, _ in found))
    without = {left: estimate.fit([(t, us) for model, t, us in found if model != left]) for left in models}
    errors = [abs(estimate.us(t, without[model]) / us - 1) for model, t, us in found]
    say(
        f"{len(found)} steps; of a model that the fit had not seen p50 {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}"
    )
    return estimate.Steps(
        terms=estimate.fit([(t, us) for _, t, us in found]),
        without=without,
        band=0.0,
        ratio_band=0.0,
        machine=MEASURED_ON,
        sources=sources,
        steps=len(found),
    )


def say(text: str) -> None:
    """A line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Fit, score and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    asked = parser.parse_args()
    steps = fitted()
    for name, factor in steps.terms.items():
        unit = (
            "µs a layer" if name == estimate.LAUNCH else "× alone" if name == estimate.WIRE else "of the floor's rate"
        )
        share = factor if name in (estimate.LAUNCH, estimate.WIRE) or not factor else 1 / factor
        say(f"  {name}: {share:.3g} {unit}" if factor else f"  {name}: not told apart from others")
    machine, probe = described(MEASURED_ON), planned(MEASURED_ON, 4)
    ratios: list[float] = []
    all_errors: list[float] = []
    for name, folders in list(SETS.items())[: 1 if asked.quick else None]:
        records = [record for folder in folders for record in read_run(folder).records]
        found = score(records, machine, probe, steps, every=1 if name.startswith("decode") else asked.every)
        errors = np.abs(found.errors)
        say(f"{name}: {found.words()}")
        say(f"  winners: {', '.join(f'{who} {n}' for who, n in found.winners.most_common())}")
        apart = np.abs(found.ratio_errors)
        say(
            f"  error of tok/s p50 {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}; of the ratio of two layouts "
            f"p50 {np.median(apart):.1%}, p90 {np.quantile(apart, 0.9):.1%}"
        )
        for metric in ("itl", "ttft"):
            off = np.abs([error for load in found.loads for error in load.latency_errors[metric]])
            if len(off):
                say(f"  error of {metric.upper()} p50: p50 {np.median(off):.1%}, p90 {np.quantile(off, 0.9):.1%}")
        all_errors += list(errors)
        for load in found.loads:
            if not load.right(load.picked):
                behind = 1 - load.measured[load.picked] / load.measured[load.best]
                say(f"  wrong: {load.name}: {load.picked} for {load.best}, {behind:.1%} behind")
        ratios += list(apart)
    steps = msgspec.structs.replace(
        steps, band=float(np.quantile(all_errors, 0.9)), ratio_band=float(np.quantile(ratios, 0.9))
    )
    say(f"band {steps.band:.1%}, of ratios {steps.ratio_band:.1%}")
    if asked.write:
        OUT.write_bytes(msgspec.json.format(msgspec.json.encode(steps), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
