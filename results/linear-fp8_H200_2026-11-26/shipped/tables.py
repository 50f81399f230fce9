"""The tables of README.md of linear layers as they ship, from sweep.jsonl beside this file: `python tables.py`."""

import json
import statistics
from pathlib import Path

from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
STEPS = HERE.parents[1] / "steps-fp8_H200_2026-11-26" / "now"
ROUTED = ("qkv_a", "q_b", "o", "shared-gate-up", "shared-down")
ALL = (*ROUTED, "dense-gate-up", "dense-down")
REACHED = 0.8
WIDE = 0.02
"""Of a median: intervals broader than this are told."""

LINES = [json.loads(line) for line in (HERE / "sweep.jsonl").read_text(encoding="utf-8").splitlines()]
assert not any(x["wrong"] for x in LINES)
READ = next(r.rates.read_bytes_s for r in read_run(STEPS).records if r.outcome == "ok")
"""Of this GPU, in the same job."""
COUNTS = sorted({x["sizes"]["rows"] for x in LINES})
LAYERS = {(tuple(name.split()), x["sizes"]["rows"]): x for x in LINES for name in x["sizes"]["layer"].split(", ")}


def us(line, way="now"):
    return line["found"][way]["median_us"]


def least(line):
    """µs of reading the weights with their scales and the rows in bf16, and of writing the results, as beside it in before-and-now/."""
    s = line["sizes"]
    blocks = -(-s["inputs"] // 128) * -(-s["outputs"] // 128)
    return (s["inputs"] * s["outputs"] + 4 * blocks + 2 * s["rows"] * (s["inputs"] + s["outputs"])) / READ * 1e6


def said(line):
    return f"{line['sizes']['layer']}, {line['sizes']['rows']} rows"


def layers(tp, names, rows):
    return [LAYERS[(f"tp{tp}", name), rows] for name in names]


def row(*cells):
    print(f"| {' | '.join(map(str, cells))} |")


def sums(names):
    row("rows", "whole", "cut by 4", "cut by 8")
    row(*["---"] * 4)
    for rows in COUNTS:
        cells = []
        for tp in (1, 4, 8):
            some = layers(tp, names, rows)
            before, now, floor = (sum(map(f, some)) for f in (lambda x: us(x, "before"), us, least))
            cells.append(f"{before:.1f} → {now:.1f}, {floor / now:.2f}")
        row(rows, *cells)
    print()


if __name__ == "__main__":
    print(f"reads {READ / 1e12:.3f} TB/s; {len(LINES)} cases, {len(LINES) // len(COUNTS)} sizes\n")
    sums(ROUTED)
    sums(ALL)
    row("rows", *COUNTS)
    row(*["---"] * (len(COUNTS) + 1))
    cells = []
    for rows in COUNTS:
        gains = [us(x, "before") / us(x) for x in LINES if x["sizes"]["rows"] == rows]
        cells.append(f"{statistics.geometric_mean(gains):.2f} ({min(gains):.2f}–{max(gains):.2f})")
    row("now", *cells)
    ratios = [us(x) / us(x, "before") for x in LINES]
    print(f"\ntime of now over before: {min(ratios):.3f} to {max(ratios):.3f}")
    means = []
    for rows in COUNTS:
        ratios = [us(x) / us(x, "before") for x in LINES if x["sizes"]["rows"] == rows]
        means.append(f"{statistics.geometric_mean(ratios):.3f}")
    print("geometric means by rows:", ", ".join(means))
    print("\nslower than before:")
    for x in LINES:
        if us(x) > us(x, "before"):
            print(f"  {said(x)}: {us(x, 'before'):.1f} → {us(x):.1f}, {us(x) / us(x, 'before'):.3f}")
    print(f"\nfrom {REACHED - 0.05:.0%} of reading on:")
    for x in sorted(LINES, key=lambda x: -least(x) / us(x)):
        if least(x) / us(x) >= REACHED - 0.05:
            print(f"  {said(x)}: {us(x):.1f} µs, {least(x) / us(x):.3f}")
    print("\nof single layers at 16 rows, µs, and to read:")
    for tp in (1, 8):
        print(f"  tp{tp}", *[f"{name} {us(x):.1f} ({least(x):.1f})" for name, x in zip(ALL, layers(tp, ALL, 16), strict=True)])
    print("\nnot at full clocks, or with a broad interval:")
    for x in LINES:
        gpu = x["gpu"]
        broad = [w for w, f in x["found"].items() if f["high_us"] - f["low_us"] > WIDE * f["median_us"]]
        if gpu["throttle_reasons"] or gpu["sm_clock_mhz_min"] < 1980 or broad:
            print(f"  {said(x)}: from {gpu['sm_clock_mhz_min']} MHz, {gpu['throttle_reasons']}, broad: {broad}")
