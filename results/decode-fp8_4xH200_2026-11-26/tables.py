"""The tables of README.md, from the records beside this file: `python tables.py`."""

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
BEFORE = HERE.parent / "decode-serving-fp8_4xH200_2026-11-26"
spec = importlib.util.spec_from_file_location("four", BEFORE / "tables.py")
four = importlib.util.module_from_spec(spec)
spec.loader.exec_module(four)

MODELS = {"V3": "deepseek-v3", "K2": "kimi-k2"}
OLDER = {"V3": four.FP8, "K2": four.FP8_K2}
LINEAR = ("norm", "qkv_proj", "o_proj", "dense_mlp")
"""Norms are of it, as they quantise what some of these layers multiply."""
BETWEEN = (*four.COLLECTIVES, "dp_gather")
LOST = ((128000, 8), (32000, 32))


def records(model):
    return four.ok(HERE / MODELS[model])


def against_older(model):
    """Steps, and what of that each group of phases is, of one rank."""
    now, before = four.by_load(records(model)), four.by_load(four.ok(*OLDER[model]))
    kinds = {"attention": ("attention",), "linear": LINEAR, "moe": ("moe",), "calls between ranks": BETWEEN}
    four.head(f"{model}, ms", "step", "shorter by", *kinds, "idle", left=1)
    for at, of in now.items():
        for label, r in of.items():
            older = before[at][label]
            us = [
                sum(of.phases.phase_us.get(phase, 0) * sign for of, sign in ((r, 1), (older, -1)) for phase in phases)
                for phases in kinds.values()
            ]
            was, took = four.step_ms(older), four.step_ms(r)
            four.row(
                f"{four.said(*at)}, {label}",
                f"{was:.1f} → {took:.1f}",
                f"{1 - took / was:.1%}".replace("%", " %"),
                *[f"{x / 1e3:+.2f}" for x in (*us, r.phases.idle_us - older.phases.idle_us)],
            )
    print()


def lost(model):
    """By phase, what goes beyond its limit; its share of the limit in brackets."""
    of = four.by_load(records(model))
    four.head(f"{model}: ms over the limit (share of it)", "first", "second", "third", "fourth", "step, all")
    for at in LOST:
        for label, r in of[at].items():
            over = {phase: (us - r.floor.phase_floor_us.get(phase, 0)) / 1e3 for phase, us in r.phases.phase_us.items()}
            over["idle"] = r.phases.idle_us / 1e3
            cells = []
            for phase in sorted(over, key=over.get, reverse=True)[:4]:
                limit = r.floor.phase_floor_us.get(phase)
                share = f" ({limit / r.phases.phase_us[phase]:.2f})" if limit else ""
                cells.append(f"{phase} {over[phase]:.2f}{share}")
            all_of_it = four.step_ms(r) - r.floor.floor_ms
            four.row(f"{four.said(*at)}, {label}", *cells, f"{all_of_it:.1f} of {four.step_ms(r):.1f}")
    print()


def attention_dp(model):
    """The best layout with DCP over attention DP with whole experts, and over cut ones, which are `BEFORE`'s of 4,000 tokens."""
    four.head(
        f"{model}, requests × context",
        "best with DCP",
        f"{four.DP}, whole experts",
        "DCP over it",
        "cut experts",
        "DCP over it",
    )
    experts = four.by_load(four.ok(BEFORE / four.EXPERTS[model]), ep=True)
    for at, of in four.by_load(records(model)).items():
        there = experts[4000, at[1]]
        whole_costs = four.step_ms(there[f"{four.DP}, `--ep tp`"]) - four.step_ms(there[f"{four.DP}, `--ep 1`"])
        split = min(four.step_ms(r) for r in of.values() if r.point.dcp > 1)
        whole = four.step_ms(of[four.DP])
        cut = whole - whole_costs
        four.row(
            four.said(*at),
            f"{split:.1f}",
            f"{whole:.1f}",
            f"{whole / split:.3f}",
            f"≈ {cut:.1f}",
            f"≈ {cut / split:.3f}",
        )
    print()


def spans():
    """Gaps between kernels and marks, of all records."""
    for model in MODELS:
        found = records(model)
        gaps = sorted(map(four.gap_us, found))
        marks = [mark for r in found for mark in r.marks]
        counts = ", ".join(f"{mark} {marks.count(mark)}" for mark in dict.fromkeys(marks))
        print(f"{model}: {len(found)} points, gaps {gaps[0]:.2f} to {gaps[-1]:.2f} µs; marked: {counts}")


if __name__ == "__main__":
    for table in (four.decode, four.pays):
        for model in MODELS:
            table(model, four.by_load(records(model)))
    for table in (attention_dp, against_older, lost):
        for model in MODELS:
            table(model)
    four_of = four.by_load(records("V3"))
    four.phases(
        f"V3, {four.said(128000, 8)}", {label: four_of[128000, 8][label] for label in (four.TP, four.SYMM, four.DP)}
    )
    spans()
