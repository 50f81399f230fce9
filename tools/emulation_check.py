"""Emulate published points of several GPUs on one GPU, and compare the times of phases and steps.

    python -m tools.emulation_check -o FOLDER [--seconds 0.5] [--model deepseek-v3] [--context 4000,32000]

It needs one GPU of the kind that was measured, and about 5 min for all points (bf16, DeepSeek-V3 and Kimi-K2). FOLDER gets the run of
the emulated points and check.json. Limits of the error: 5 % for phases without calls, 10 % for the exchange, 7 % for the step, each in
90 % of the points. Exit code 1: a limit is exceeded.
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

FOLDER = unpack_all() / "emulation_H200/emulated_4xH200_2026-11-26" / "bf16"
PUBLISHED = (FOLDER / "deepseek-v3-bf16", FOLDER / "kimi-k2-bf16")
EXCHANGE_PHASES = ("q_gather", "merge")  # phases that are an exchange
CALL_PHASES = (
    "attn_reduce",
    "dp_gather",
    "mlp_reduce",
    "embed",
    "lm_head",
)  # phases that end in another call between ranks
EXPERT_PHASES = (
    "moe",
    "mlp_reduce",
)  # compared as a sum with EP: the emulated rank has the most experts and waits for no other rank
MIN_SHARE = 0.9  # minimum share of the points that must be within a limit
MIN_STEP_SHARE = 0.005  # minimum share of a step; shorter phases are not judged
MAX_PHASE_ERROR, MAX_EXCHANGE_ERROR, MAX_STEP_ERROR = 0.05, 0.1, 0.07


def compare(published: Record, emulated: Record) -> dict[str, Any]:
    """Return the ratios of emulated over published times of one point."""
    assert published.phases is not None
    assert emulated.phases is not None
    assert published.metrics is not None
    assert emulated.metrics is not None
    published_us, emulated_us, point = published.phases.phase_us, emulated.phases.phase_us, published.point
    ratios = {name: emulated_us.get(name, 0.0) / us for name, us in published_us.items() if us > 0}
    exchange = (
        sum(emulated_us.get(n, 0.0) for n in EXCHANGE_PHASES),
        sum(published_us.get(n, 0.0) for n in EXCHANGE_PHASES),
    )
    if point.ep_degree != 1:
        ratios["experts"] = sum(emulated_us.get(n, 0.0) for n in EXPERT_PHASES) / sum(
            published_us.get(n, 0.0) for n in EXPERT_PHASES
        )
        del ratios["moe"]
    min_us = MIN_STEP_SHARE * sum(published_us.values())
    ratios = {name: ratio for name, ratio in ratios.items() if name == "experts" or published_us[name] >= min_us}
    return {
        "point": emulation_live.format_point(point),
        "phases": ratios,
        "exchange": exchange[0] / exchange[1] if exchange[1] else None,
        "step": emulated.metrics.step_ms.median / published.metrics.step_ms.median,
    }


def judge_rows(rows: Iterable[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return lines with the shares of points within the limits and the points outside, and True if all shares are at least
    MIN_SHARE.
    """
    rows = list(rows)
    lines, ok = [], True
    phases = [
        (row["point"], name, ratio)
        for row in rows
        for name, ratio in row["phases"].items()
        if name not in (*EXCHANGE_PHASES, *CALL_PHASES, "other")
    ]
    for title, bar, found in (
        ("phases without calls", MAX_PHASE_ERROR, phases),
        ("exchange", MAX_EXCHANGE_ERROR, [(r["point"], "exchange", r["exchange"]) for r in rows if r["exchange"]]),
        ("step", MAX_STEP_ERROR, [(r["point"], "step", r["step"]) for r in rows]),
    ):
        wrong = [f"{point} {name} {ratio:.3f}" for point, name, ratio in found if abs(ratio - 1) > bar]
        share = 1 - len(wrong) / len(found) if found else 0.0
        ok &= share >= MIN_SHARE
        lines.append(f"{title}: {share:.0%} of {len(found)} within {bar:.0%}; not: {'; '.join(wrong[:12]) or 'none'}")
    return lines, ok


def _get_engine(record: Record) -> tuple[str, int]:
    return record.point.model, record.point.dp


def parse_contexts(text: str) -> set[int]:
    """Parse a comma-separated list of context lengths."""
    return {int(n) for n in text.split(",")}


def main() -> int:
    """Run the emulated points, and compare them with the published ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", default="0.5", help="measuring time of a point; default: %(default)s")
    parser.add_argument("--model", help="published model; default: all")
    parser.add_argument("--context", type=parse_contexts, help="context lengths, separated by commas; default: all")
    parser.add_argument("--like", default="H200", help="machine to emulate; default: %(default)s")
    parser.add_argument("--compare", action="store_true", help="compare existing runs without running points")
    args = parser.parse_args()
    published = [
        r
        for r in emulation_live.read_measured(PUBLISHED)
        if r.phases
        and args.model in (None, r.point.model)
        and (args.context is None or r.point.context in args.context)
    ]
    for (model, dp), group in itertools.groupby(sorted(published, key=_get_engine), key=_get_engine):
        if args.compare:
            continue
        points = [r.point for r in group]
        first = points[0]
        options = f"--model {model} --tp {first.tp} --dp {dp} --ep {first.ep} --no-baseline"
        options += f" --weights-dtype {first.weights_precision} --kv-dtype {first.kv_precision}"
        options += f" --emulate {args.like} --seconds {args.seconds} --backend {first.backend}"
        options += f" --page-size {first.page_size}"
        for option in ("dcp", "context", "concurrency"):
            options += f" --{option} {','.join(map(str, sorted({getattr(p, option) for p in points})))}"
        exchanges = sorted({p.exchange for p in points if p.dcp > 1})
        options += f" --exchange {','.join(exchanges)}" if exchanges else ""
        folder = args.output / f"{model}-dp{dp}"
        command = [sys.executable, "-m", "dcpbench.cli", "sweep", *options.split(), "-o", str(folder), "--resume"]
        sys.stdout.write(f"$ dcpbench sweep {options}\n")
        sys.stdout.flush()
        subprocess.run(command, check=False)
    emulated = emulation_live.read_measured(args.output.glob("*"))
    rows = [compare(*pair) for pair in emulation_live.pair_points(published, emulated)]
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "check.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines, ok = judge_rows(rows)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
