"""The tables of README.md, from limits.jsonl and the read rate at the end of limits.txt: `python tables.py`."""

import json
from pathlib import Path

HERE = Path(__file__).parent
LINES = [json.loads(line) for line in (HERE / "limits.jsonl").read_text().splitlines()]
RATE = float((HERE / "limits.txt").read_text().split()[-2])
WAYS = ("read", "read-early", "quantise", "product", "linear")
ROUTED = ("qkv_a", "q_b", "o", "shared-gate-up", "shared-down")


def bytes_us(line):
    """At the rate of a long read."""
    return line["inputs"] * line["outputs"] / RATE / 1e6


def row(*cells):
    print("| " + " | ".join(cells) + " |")


for rows in (1, 16, 64):
    print(f"\n{rows} row{'s' * (rows > 1)}\n")
    row("layer", "bytes at the read rate", "read", "read early", "product", "rows quantised, too", "by copies")
    row("---", *["--:"] * 6)
    for line in LINES:
        if line["rows"] == rows:
            us, share = line["us"], lambda t: f"{t:.2f} ({bytes_us(line) / t:.2f})"
            cells = [share(us[way]) for way in ("read", "read-early", "product", "linear")]
            row(line["layers"][0], f"{bytes_us(line):.2f}", *cells, share(line["copied"]) if "copied" in line else "")
    five = [line for line in LINES if line["rows"] == rows and line["layers"][0] in {f"tp1 {name}" for name in ROUTED}]
    whole = sum(map(bytes_us, five))
    sums = [sum(line["us"][way] for line in five) for way in ("read", "read-early", "product", "linear")] + [sum(line["copied"] for line in five)]
    row("five of a routed layer, whole", f"{whole:.1f}", *[f"{t:.1f} ({whole / t:.2f})" for t in sums])

sizes = [line for line in LINES if line["rows"] == 16]
for way in ("read", "read-early"):
    below = [line["layers"][0] for line in sizes if bytes_us(line) / line["us"][way] < 0.8]
    print(f"\n{way} below 0.8 in {len(below)} of {len(sizes)} sizes: {', '.join(below)}")
