"""Run published points of several GPUs on one, emulated, and say how far every phase and the step are off.

    python -m tools.emulation_check -o FOLDER [--seconds 0.5] [--model deepseek-v3] [--context 4000,32000]

needs one GPU of the kind that was measured, some 5 min for all of them (bf16, DeepSeek-V3 and Kimi-K2). FOLDER gets the run of
the emulated points and check.json. Bars: phases without calls 5 %, the exchange 10 %, the step 7 %, each in 90 % of points; it
ends with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools import emulation_live
from tools.results import unpack_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcpbench.records.record import Record

FOUR = unpack_all() / "emulation_H200/emulated_4xH200_2026-11-26" / "bf16"
PUBLISHED = (FOUR / "deepseek-v3-bf16", FOUR / "kimi-k2-bf16")
EXCHANGED, CALLS = ("q_gather", "merge"), ("attn_reduce", "dp_gather", "mlp_reduce", "embed", "lm_head")
"""Phases that are an exchange, and phases that end in another call between ranks."""
EXPERTS = ("moe", "mlp_reduce")  # compared as a sum with EP: the emulated rank has most, and waits for no other
SHARE = 0.9  # minimum share of points that have to be within a bar
LEAST = 0.005  # minimum share of a step; shorter phases are not judged
PHASE_BAR, EXCHANGE_BAR, STEP_BAR = 0.05, 0.1, 0.07


def compare(published: Record, emulated: Record) -> dict[str, Any]:
    """Return ratios, emulated over published, of one point."""
    assert published.phases is not None
    assert emulated.phases is not None
    assert published.metrics is not None
    assert emulated.metrics is not None
    theirs, ours, point = published.phases.phase_us, emulated.phases.phase_us, published.point
    ratios = {name: ours.get(name, 0.0) / us for name, us in theirs.items() if us > 0}
    exchange = sum(ours.get(n, 0.0) for n in EXCHANGED), sum(theirs.get(n, 0.0) for n in EXCHANGED)
    if point.ep_degree != 1:
        ratios["experts"] = sum(ours.get(n, 0.0) for n in EXPERTS) / sum(theirs.get(n, 0.0) for n in EXPERTS)
        del ratios["moe"]
    least = LEAST * sum(theirs.values())
    ratios = {name: ratio for name, ratio in ratios.items() if name == "experts" or theirs[name] >= least}
    return {
        "point": emulation_live.name(point),
        "phases": ratios,
        "exchange": exchange[0] / exchange[1] if exchange[1] else None,
        "step": emulated.metrics.step_ms.median / published.metrics.step_ms.median,
    }


def told(rows: Iterable[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return lines with the shares of points within the bars and the points outside, and True if all shares are large
    enough.
    """
    rows = list(rows)
    lines, held = [], True
    phases = [
        (row["point"], name, ratio)
        for row in rows
        for name, ratio in row["phases"].items()
        if name not in (*EXCHANGED, *CALLS, "other")
    ]
    for title, bar, found in (
        ("phases without calls", PHASE_BAR, phases),
        ("exchange", EXCHANGE_BAR, [(r["point"], "exchange", r["exchange"]) for r in rows if r["exchange"]]),
        ("step", STEP_BAR, [(r["point"], "step", r["step"]) for r in rows]),
    ):
        wrong = [f"{point} {name} {ratio:.3f}" for point, name, ratio in found if abs(ratio - 1) > bar]
        share = 1 - len(wrong) / len(found) if found else 0.0
        held &= share >= SHARE
        lines.append(f"{title}: {share:.0%} of {len(found)} within {bar:.0%}; not: {'; '.join(wrong[:12]) or 'none'}")
    return lines, held


def _engine(record: Record) -> tuple[str, int]:
    return record.point.model, record.point.dp


def tokens(text: str) -> set[int]:
    """Parse a comma-separated list of contexts."""
    return {int(n) for n in text.split(",")}


def main() -> int:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", default="0.5")
    parser.add_argument("--model", help="one of those published; default: all")
    parser.add_argument("--context", type=tokens, help="comma list; default: all")
    parser.add_argument("--like", default="H200")
    parser.add_argument("--compare", action="store_true", help="only what was run already")
    asked = parser.parse_args()
    published = [
        r
        for r in emulation_live.measured(PUBLISHED)
        if r.phases
        and asked.model in (None, r.point.model)
        and (asked.context is None or r.point.context in asked.context)
    ]
    for (model, dp), of in itertools.groupby(sorted(published, key=_engine), key=_engine):
        if asked.compare:
            continue
        points = [r.point for r in of]
        first = points[0]
        words = f"--model {model} --tp {first.tp} --dp {dp} --ep {first.ep} --no-baseline"
        words += f" --weights-dtype {first.weights_precision} --kv-dtype {first.kv_precision}"
        words += f" --emulate {asked.like} --seconds {asked.seconds} --backend {first.backend}"
        words += f" --page-size {first.page_size}"
        for option in ("dcp", "context", "concurrency"):
            words += f" --{option} {','.join(map(str, sorted({getattr(p, option) for p in points})))}"
        exchanges = sorted({p.exchange for p in points if p.dcp > 1})
        words += f" --exchange {','.join(exchanges)}" if exchanges else ""
        folder = asked.output / f"{model}-dp{dp}"
        command = [sys.executable, "-m", "dcpbench.cli", "sweep", *words.split(), "-o", str(folder), "--resume"]
        sys.stdout.write(f"$ dcpbench sweep {words}\n")
        sys.stdout.flush()
        subprocess.run(command, check=False)
    emulated = emulation_live.measured(asked.output.glob("*"))
    rows = [compare(*pair) for pair in emulation_live.pairs(published, emulated)]
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / "check.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines, held = told(rows)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
