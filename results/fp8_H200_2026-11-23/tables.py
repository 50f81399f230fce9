"""The tables of steps in README.md, from the records beside this file: `python tables.py`."""

from pathlib import Path

from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
COLUMNS = {
    "V3": [
        ("bf16", [("v3-bf16-kv", "bf16"), ("v3-step", "bf16")]),
        ("fp8 weights", [("v3-fp8-bf16-kv", "fp8")]),
        ("fp8 weights and KV", [("v3-fp8-kv-ours", "fp8")]),
    ],
    "K2": [
        ("bf16", [("k2-bf16", "bf16")]),
        ("fp8 weights", [("k2-fp8-bf16-kv", "fp8")]),
        ("fp8 weights and KV", [("k2-fp8-kv", "fp8")]),
    ],
}
"""Runs of a column with the weights that are taken from each; of a load that two have, the later run."""
PHASES = {"attention": ("attention",), "experts": ("moe",), "projections": ("qkv_proj", "o_proj")}
ROWS = ((1, 4000), (1, 128000), (8, 4000), (8, 128000), (32, 4000), (32, 32000), (128, 4000))
"""Loads whose phases are shown."""


def records(runs):
    """A column's records by load, rejected ones, too."""
    found = {}
    for run, weights in runs:
        for r in read_run(HERE / run).records:
            if (r.point.weights_dtype or r.point.dtype) == weights:
                found[r.point.concurrency, r.point.context] = r
    return found


def step(r):
    """ms, and in brackets the share of the floor."""
    if r.outcome != "ok":
        assert r.no_room
        return "no room"
    ms = r.metrics.step_ms.median
    return f"{ms:.1f}{'*' if 'throttled' in r.marks else ''} ({r.floor.floor_ms / ms:.2f})"


def shares(r):
    """Of a profiled step, in percent."""
    of = r.phases.phase_us
    return " / ".join(f"{sum(of[p] for p in phases) / r.phases.step_us:.1%}"[:-1] for phases in PHASES.values())


def row(*cells):
    print(f"| {' | '.join(cells)} |")


for model, columns in COLUMNS.items():
    found = {name: records(runs) for name, runs in columns}
    loads = sorted(next(iter(found.values())))
    row(f"{model}, requests × context", *found)
    row("---", *["---:"] * len(found))
    for load in loads:
        row(f"{load[0]} × {load[1]:,}", *(step(of[load]) for of in found.values()))
    print()
    row(f"{model}: {' / '.join(PHASES)}, % of a step", *found)
    row("---", *["---:"] * len(found))
    for load in ROWS:
        row(f"{load[0]} × {load[1]:,}", *(shares(of[load]) for of in found.values()))
    print()
    for name, of in found.items():
        for load, r in of.items():
            if others := [m for m in r.marks if m != "throttled"]:
                print(f"{name}, {load[0]} × {load[1]:,}: {', '.join(others)}")
    print()
