"""The tables of README.md, from the raw files beside this file: `python tables.py`."""

import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent
LOADS = ((8, 8192), (48, 8192), (8, 32768), (48, 32768), (8, 131072))
ROW_BYTES, ROW_OPERATIONS = 1152, 2 * (576 + 512)


def cases(run):
    lines = [json.loads(line) for line in (HERE / run / "bf16.jsonl").read_text(encoding="utf-8").splitlines()]
    assert not any(x["wrong"] for x in lines)
    return {(x["sizes"]["requests"], x["sizes"]["context"], x["sizes"]["heads"]): x["found"] for x in lines}


def us(found, way="fill"):
    return found[way]["median_us"]


def row(*cells):
    print(f"| {' | '.join(map(str, cells))} |")


def head(*cells):
    row(*cells)
    row(*["---"] * len(cells))


def against():
    """µs of `fill`, and the time of the kernel before and of FlashMLA over it."""
    found = cases("second")
    head("B, S", "H=64", "H=128")
    for load in LOADS:
        cells = [found[(*load, heads)] for heads in (64, 128)]
        row(f"{load[0]}, {load[1]:,}", *[f"{us(f):.1f}: {us(f, 'old') / us(f):.2f}, {us(f, 'flashmla') / us(f):.2f}" for f in cells])
    for way in ("old", "flashmla"):
        for heads in (64, 128):
            ratios = [us(f, way) / us(f) for (_, _, h), f in found.items() if h == heads]
            print(f"{way} over fill, H={heads}: geometric mean {statistics.geometric_mean(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    print()


def speeds():
    found = cases("second")
    head("", "H=64", "H=128")
    for load in ((48, 32768), (8, 131072)):
        for way in ("fill", "old", "flashmla"):
            cells = []
            for heads in (64, 128):
                rows = load[0] * load[1] / us(found[(*load, heads)], way) * 1e6
                cells.append(f"{rows * ROW_BYTES / 1e12:.2f} TB/s, {rows * ROW_OPERATIONS * heads / 1e12:.0f} TFLOP/s")
            row(f"{load[0]} × {load[1]:,}, {way}", *cells)
    print()


def variants():
    """Time over that of `fill` in the first run."""
    found = cases("first")
    head("", *[f"H={heads}" for heads in (32, 64, 128)])
    for way in next(iter(found.values())):
        if way != "fill":
            cells = []
            for heads in (32, 64, 128):
                ratios = [us(f, way) / us(f) for (_, _, h), f in found.items() if h == heads]
                cells.append(f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
            row(way, *cells)


if __name__ == "__main__":
    against()
    speeds()
    variants()
