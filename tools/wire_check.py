"""Write docs/wire-checked.md: what the model of the wire says, against records of 2 and 4 GPUs under results/.

python -m tools.wire_check
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.bench.calibration import quality
from dcpbench.bench.shown.wire import markdown
from dcpbench.points.machines import MEASURED_ON, built_in
from dcpbench.points.shapes import load_shape
from dcpbench.points.wire import LATE
from dcpbench.records.runs import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "wire-checked.md"
RUNS = sorted((ROOT / "results" / "decode-deepseek-v3-kimi-k2_4xH200_2026-11-20").glob("run*"))
BAR = 0.1
INSIDE = (
    "One layer's exchange `ag_rs` (phases `q_gather` and `merge` of a profiled step, divided by the layers), of runs on "
    "4 × NVIDIA H200, against the model. **{within} of {all} are within {bar:.0%}**, {model} of {models} of models that took no "
    "part in it: benches alone were fitted to, and one factor, {late}, for what ranks wait as they come at different times, is "
    "the median of {fitted}. Messages of 1 to 4 MB lie where NCCL changes its protocol, between sizes that were measured far "
    "apart; the largest errors are there."
)
FITTED = "deepseek-v3"
"""Whose points LATE is the median of."""


def bytes_received(record: Record) -> int:
    """By a rank, of one layer's exchange ag_rs: q, lse, and fp32 partial outputs (exchange/ag_rs.py)."""
    point, honesty = record.point, record.honesty
    shape, ranks = load_shape(point.model), point.dcp
    assert honesty is not None
    batch = honesty.graph_batch or -(-point.concurrency // point.dp)
    heads = shape.heads // point.layout.attn_tp * ranks
    q = (ranks - 1) * batch * heads * shape.kv_width * 2 // ranks
    return q + (ranks - 1) * batch * heads * 4 + (ranks - 1) * batch * heads * shape.latent * 4 // ranks


def layers(records: list[Record]) -> Iterator[tuple[str, float, float]]:
    """(which, measured µs, modelled µs) of one layer's exchange inside a step."""
    wire = built_in(MEASURED_ON).wire
    seen = set()
    for record in records:
        point, phases = record.point, record.phases
        if phases is None or point.exchange != "ag_rs":
            continue
        measured = (phases.phase_us["q_gather"] + phases.phase_us["merge"]) / load_shape(point.model).layers
        modelled = wire.in_step.seconds("ag_rs", point.dcp, bytes_received(record), 2).mean * 1e6
        which = f"{point.model} {point.layout}, {point.concurrency} × {point.context:,}"
        if which not in seen:
            yield which, measured, modelled
        seen.add(which)


def main() -> int:
    """Write the page."""
    machine = built_in(MEASURED_ON)
    found = [row for run in RUNS for row in layers(list(read_run(run).records))]
    within = [which for which, measured, modelled in found if abs(modelled / measured - 1) <= BAR]
    others, theirs = (
        [which for which in of if not which.startswith(FITTED)] for of in ([row[0] for row in found], within)
    )
    lines = [
        "# The wire, checked",
        "",
        f"Written by `python -m tools.wire_check` from records under `results/`. Hardware: {machine.measured}.",
        "",
        "## Without the measurement at hand",
        "",
        "Errors are those of predicting a size without it, and the most ranks from fewer; [wire.md](wire.md) has the formula.",
        "",
        markdown(quality(machine.wire.calls.values())),
        "## Inside a step",
        "",
        INSIDE.format(
            within=len(within),
            all=len(found),
            bar=BAR,
            model=len(theirs),
            models=len(others),
            late=LATE,
            fitted=FITTED,
        ),
        "",
        "| point | measured µs | modelled µs | off by |",
        "|---|---:|---:|---:|",
        *(
            f"| {which} | {measured:.1f} | {modelled:.1f} | {modelled / measured - 1:+.0%} |"
            for which, measured, modelled in found
        ),
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"{len(within)} of {len(found)} within {BAR:.0%}; wrote {PAGE.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
