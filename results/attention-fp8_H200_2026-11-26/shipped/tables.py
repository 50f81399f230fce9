"""The tables of README.md of the kernel as it ships, from fp8.jsonl beside this file: `python tables.py`."""

import json
import statistics
from pathlib import Path

from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
STEPS = HERE.parents[1] / "steps-fp8_H200_2026-11-26" / "now"
LOADS = ((8, 8192), (48, 8192), (8, 32768), (48, 32768), (8, 131072))
HEADS = (16, 64, 128)
ROW_BYTES, ROW_OPERATIONS = 576, 2 * (576 + 512)
WIDE = 0.02
"""Of a median: intervals broader than this are told."""

LINES = [json.loads(line) for line in (HERE / "fp8.jsonl").read_text(encoding="utf-8").splitlines()]
CASES = {(x["sizes"]["requests"], x["sizes"]["context"], x["sizes"]["heads"]): x for x in LINES}
assert len(CASES) == len(LINES)
assert not any(x["wrong"] for x in LINES)
RATES = next(r.rates for r in read_run(STEPS).records if r.outcome == "ok")


def us(case, way="now"):
    return case["found"][way]["median_us"]


def over(case, way):
    """A way's time over that of the kernel as it ships."""
    return us(case, way) / us(case)


def error(case):
    return case["found"]["now"]["error"] / case["found"]["flashmla"]["error"]


def row(*cells):
    print(f"| {' | '.join(cells)} |")


def table(cell):
    row("B, S", *[f"H={heads}" for heads in HEADS])
    row(*["---"] * 4)
    for requests, context in LOADS:
        found = [CASES.get((requests, context, heads)) for heads in HEADS]
        row(f"{requests}, {context:,}", *[cell(case) if case else "–" for case in found])
    print()


def spread(values):
    values = list(values)
    return f"{min(values):.3f} to {max(values):.3f}"


def speed(case, way):
    s = case["sizes"]
    rows = s["requests"] * s["context"] / us(case, way) * 1e6
    return f"{rows * ROW_BYTES / 1e12:.2f} TB/s, {rows * ROW_OPERATIONS * s['heads'] / 1e12:.0f} TFLOP/s"


if __name__ == "__main__":
    table(lambda case: f"{us(case):.1f}: {over(case, 'old'):.2f}, {over(case, 'flashmla'):.2f}")
    table(lambda case: f"{1 / over(case, 'six'):.3f}")
    for way in ("old", "flashmla", "six"):
        means = []
        for heads in HEADS:
            found = [over(case, way) for case in CASES.values() if case["sizes"]["heads"] == heads]
            means.append(f"H={heads} {statistics.geometric_mean(found):.3f}")
        print(f"{way} over now, geometric means: {', '.join(means)}; all {spread(over(c, way) for c in CASES.values())}")
    found = [1 / over(case, "six") for case in CASES.values()]
    print(f"now over six: {spread(found)}, geometric mean {statistics.geometric_mean(found):.3f}")
    found = [1 / over(case, "flashmla") for case in CASES.values() if case["sizes"]["heads"] == 128]
    print(f"time over FlashMLA's with 128 heads: {spread(found)}; over old's: {spread(1 / over(c, 'old') for c in CASES.values())}")
    print(f"error over FlashMLA's: {spread(error(c) for c in CASES.values())}")
    for way in ("now", "flashmla"):
        print(f"errors of {way}: {spread(c['found'][way]['error'] for c in CASES.values())}")
    print()
    row("", *[f"H={heads}" for heads in HEADS])
    row(*["---"] * 4)
    for requests, context in ((48, 32768), (8, 131072)):
        for way in ("now", "old", "flashmla"):
            found = [CASES.get((requests, context, heads)) for heads in HEADS]
            row(f"{requests} × {context:,}, {way}", *[speed(case, way) if case else "–" for case in found])
    print(f"\nthis GPU: {RATES.read_bytes_s / 1e12:.3f} TB/s, {RATES.matmul_fp8_flop_s / 1e12:.0f} TFLOP/s in e4m3")
    best = {
        way: max(CASES.values(), key=lambda c: c["sizes"]["requests"] * c["sizes"]["context"] * per(c) / us(c))
        for way, per in (("bytes", lambda c: 1), ("operations", lambda c: c["sizes"]["heads"]))
    }
    for what, case in best.items():
        s = case["sizes"]
        rows = s["requests"] * s["context"] / us(case) * 1e6
        share = rows * (
            ROW_BYTES / RATES.read_bytes_s
            if what == "bytes"
            else ROW_OPERATIONS * s["heads"] / RATES.matmul_fp8_flop_s
        )
        print(f"most {what}: {s['requests']} × {s['context']:,}, H={s['heads']}: {share:.3f} of the rate")
    for case in LINES:
        s, gpu = case["sizes"], case["gpu"]
        wide = [
            f"{way} {f['low_us']:.0f} to {f['high_us']:.0f}"
            for way, f in case["found"].items()
            if f["high_us"] - f["low_us"] > WIDE * f["median_us"]
        ]
        print(
            f"{s['requests']} × {s['context']:,}, H={s['heads']}: {gpu['sm_clock_mhz_min']} to {gpu['sm_clock_mhz_max']} MHz, "
            f"{gpu['throttle_reasons']}, broad: {wide}"
        )
