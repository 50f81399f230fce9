"""Write docs/wire-checked.md: what the model of the wire says, against records of 2 and 4 GPUs under results/.

python -m tools.wire_check
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dcpbench.bench.calibration import quality
from dcpbench.bench.shown.wire import markdown
from dcpbench.points.machines import MEASURED_ON, built_in
from dcpbench.points.shapes import load_shape
from dcpbench.records.runs import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "wire-checked.md"
FOUR, TWO = (
    ROOT / "results" / name for name in ("decode-serving-fp8_4xH200_2026-11-26", "decode-fp8_2xH200_2026-11-26")
)
RUNS = [
    run.parent
    for folder in (FOUR / "grid", FOUR / "bf16", FOUR / "bf16-k2", TWO / "grid")
    for run in sorted(folder.glob("*/records.jsonl"))
]
BAR = 0.1
INSIDE = (
    "One layer's exchange `ag_rs` (phases `q_gather` and `merge` of a profiled step, divided by the layers), of runs on "
    "two and four H200, against the model. **{within} of {all} are within {bar:.0%}**; no step took part in it: benches alone "
    "were fitted to, and exchanges have no factor inside steps. In the median they took {two:.2f} times as long as modelled on "
    "two H200, and {four:.2f} on four. The largest error is {worst}."
)


def bytes_received(record: Record) -> int:
    """By a rank, of one layer's exchange ag_rs: q, lse, and fp32 partial outputs (exchange/ag_rs.py)."""
    point, honesty = record.point, record.honesty
    shape, ranks = load_shape(point.model), point.dcp
    assert honesty is not None
    batch = honesty.graph_batch or -(-point.concurrency // point.dp)
    heads = shape.heads // point.layout.attn_tp * ranks
    q = (ranks - 1) * batch * heads * shape.kv_width * 2 // ranks
    return q + (ranks - 1) * batch * heads * 4 + (ranks - 1) * batch * heads * shape.latent * 4 // ranks


class Row(NamedTuple):
    """One layer's exchange inside a step."""

    point: Point
    measured_us: float
    modelled_us: float

    @property
    def off(self) -> float:
        """Modelled over measured, less 1."""
        return self.modelled_us / self.measured_us - 1

    @property
    def said(self) -> str:
        """The point."""
        point = self.point
        return f"{point.model} {point.weights_precision} {point.layout}, {point.concurrency} × {point.context:,}"


def layers(records: list[Record]) -> Iterator[Row]:
    """Of all that were measured with ag_rs."""
    wire = built_in(MEASURED_ON).wire
    for record in records:
        point, phases = record.point, record.phases
        if phases is None or point.exchange != "ag_rs":
            continue
        measured = (phases.phase_us["q_gather"] + phases.phase_us["merge"]) / load_shape(point.model).layers
        modelled = wire.in_step.seconds("ag_rs", point.dcp, bytes_received(record), 2).mean * 1e6
        yield Row(point, measured, modelled)


def longer(rows: list[Row], ranks: int) -> float:
    """Median of how many times as long as modelled it takes in steps of so many ranks."""
    return statistics.median(row.measured_us / row.modelled_us for row in rows if row.point.tp == ranks)


def main() -> int:
    """Write the page."""
    machine = built_in(MEASURED_ON)
    found = [row for run in RUNS for row in layers(list(read_run(run).records))]
    within = [row for row in found if abs(row.off) <= BAR]
    worst = max(found, key=lambda row: abs(row.off))
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
            two=longer(found, 2),
            four=longer(found, 4),
            worst=f"{worst.off:+.0%}, {worst.said}",
        ),
        "",
        "| point | measured µs | modelled µs | off by |",
        "|---|---:|---:|---:|",
        *(f"| {row.said} | {row.measured_us:.1f} | {row.modelled_us:.1f} | {row.off:+.0%} |" for row in found),
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"{len(within)} of {len(found)} within {BAR:.0%}; wrote {PAGE.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
