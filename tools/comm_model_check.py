"""Print the communication model and its errors against records of 2 and 4 GPUs under results/, in Markdown.

python -m tools.comm_model_check
"""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING, NamedTuple

from dcpbench.bench.calibration import Quality, compute_quality
from dcpbench.bench.shown.comm_model_fit import COLUMNS, format_row
from dcpbench.models import load_shape
from dcpbench.points.cluster_specs import MEASURED_ON, load_built_in
from dcpbench.points.roofline import compute_exchanged_bytes
from dcpbench.records.runs import read_run
from tools import emulation_live
from tools.emulation_check import EXCHANGED, PUBLISHED
from tools.results import unpack_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

RESULTS = unpack_all()
FOUR, TWO = (
    RESULTS / name
    for name in ("decode_4xH200/decode-serving-fp8_4xH200_2026-11-26", "decode-serving_2xH200_2026-11-26")
)
FOLDERS = [
    *(FOUR / name for name in ("grid", "a2a-k2", "bf16", "bf16-k2")),
    *(TWO / name for name in ("grid", "bf16", "experts")),
]
RUNS = [*(run for folder in FOLDERS for run in sorted(folder.iterdir())), *PUBLISHED]
BAR = 0.1
ITEMSIZE = 2  # bytes per number of queries and partial outputs, also over e4m3
INSIDE = (
    "One layer's exchange (phases `q_gather` and `merge` of a profiled step, divided by the layers), of runs on two and four "
    "H200, against the model. **{within} of {all} are within {bar:.0%}**; no step took part in it: benches alone were fitted to, "
    "and exchanges have no factor inside steps. Of weights in bf16 it is {bf16}. The largest error is {worst}."
)


class Row(NamedTuple):
    """Hold one layer's exchange inside a step."""

    run: str  # name of the run's folder below results
    point: Point
    measured_us: float
    modelled_us: float

    @property
    def off(self) -> float:
        """Return modelled over measured, minus 1."""
        return self.modelled_us / self.measured_us - 1


def layers(run: str, records: Iterable[Record]) -> Iterator[Row]:
    """Yield the exchanges of all steps that have one."""
    comm_model = load_built_in(MEASURED_ON).comm_model.in_step
    for record in records:
        point, phases, conditions = record.point, record.phases, record.conditions
        if phases is None or conditions is None or point.dcp == 1:
            continue
        shape, ranks = load_shape(point.model), point.dcp
        batch = conditions.graph_batch or -(-point.concurrency // point.dp)
        heads = shape.heads // point.layout.attn_tp * ranks
        received = compute_exchanged_bytes(
            point.exchange, batch, heads, ranks, shape.query_width, shape.output_width, ITEMSIZE
        )
        measured = sum(phases.phase_us[name] for name in EXCHANGED) / shape.layers
        modelled = comm_model.predict_seconds(point.exchange, ranks, sum(received), 2).mean * 1e6
        yield Row(run, point, measured, modelled)


def within(rows: Sequence[Row]) -> list[Row]:
    """Return the rows for which the model is right."""
    return [row for row in rows if abs(row.off) <= BAR]


def by_exchange(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many rows are within the bar, and the median of measured over modelled, by exchange."""
    yield f"| exchange | ranks | steps | within {BAR:.0%} | measured over modelled, median |"
    yield "|---|---:|---:|---:|---:|"
    for exchange, ranks in sorted({(row.point.exchange, row.point.dcp) for row in rows}):
        of = [row for row in rows if (row.point.exchange, row.point.dcp) == (exchange, ranks)]
        median = statistics.median(row.measured_us / row.modelled_us for row in of)
        yield f"| `{exchange}` | {ranks} | {len(of)} | {len(within(of))} | {median:.2f} |"


def _named(run: Path) -> str:
    return str(run.relative_to(RESULTS))


def format_quality_table(found: Iterable[Quality]) -> str:
    """Return the quality of each call as a table in Markdown."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *map(format_row, found)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def main() -> int:
    """Print the tables."""
    machine = load_built_in(MEASURED_ON)
    found = [row for run in RUNS for row in layers(_named(run), read_run(run).records)]
    bf16 = [row for row in found if row.point.weights_precision == "bf16"]
    worst = max(found, key=lambda row: abs(row.off))
    lines = [
        f"Hardware: {machine.measured}.",
        "",
        "## Without the measurement at hand",
        "",
        "Errors are those of predicting a size without it, and the most ranks from fewer; docs/comm-model.md has the formula.",
        "",
        format_quality_table(compute_quality(machine.comm_model.calls.values())),
        "## Inside a step",
        "",
        INSIDE.format(
            within=len(within(found)),
            all=len(found),
            bar=BAR,
            bf16=f"{len(within(bf16))} of {len(bf16)}",
            worst=f"{worst.off:+.0%}, {emulation_live.name(worst.point)}",
        ),
        "",
        *by_exchange(found),
        "",
        "| run | point | measured µs | modelled µs | off by |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {row.run} | {emulation_live.name(row.point)} | {row.measured_us:.1f} | {row.modelled_us:.1f} | {row.off:+.0%} |"
            for row in found
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
