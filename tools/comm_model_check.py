"""Print the errors of the communication model against records of 2 and 4 GPUs under results/, in Markdown.

    python -m tools.comm_model_check

It needs no GPU, and writes no file.
"""

from __future__ import annotations

import argparse
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
from tools.emulation_check import EXCHANGE_PHASES, PUBLISHED
from tools.results import unpack_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

RESULTS = unpack_all()
RUNS_4_GPUS, RUNS_2_GPUS = (
    RESULTS / name
    for name in ("decode_4xH200/decode-serving-fp8_4xH200_2026-11-26", "decode-serving_2xH200_2026-11-26")
)
FOLDERS = [
    *(RUNS_4_GPUS / name for name in ("grid", "a2a-k2", "bf16", "bf16-k2")),
    *(RUNS_2_GPUS / name for name in ("grid", "bf16", "experts")),
]
RUNS = [*(run for folder in FOLDERS for run in sorted(folder.iterdir())), *PUBLISHED]
MAX_ERROR = 0.1
ITEMSIZE = 2  # bytes per number of queries and partial outputs, also with an e4m3 KV cache
STEP_SUMMARY = (
    "The exchange of one layer (phases `q_gather` and `merge` of a profiled step, divided by the layers) in runs on two and four H200, "
    "compared with the model. **{within} of {all} are within {bar:.0%}**. The model is fitted to benches alone, without these steps, and "
    "has no factor for exchanges inside steps. With bf16 weights {bf16} are within it. The largest error is {worst}."
)


class Row(NamedTuple):
    """Hold the exchange of one layer inside a step, measured and modelled."""

    run: str  # name of the run's folder below results
    point: Point
    measured_us: float
    modelled_us: float

    @property
    def error(self) -> float:
        """Return the error of the model: modelled over measured, minus 1."""
        return self.modelled_us / self.measured_us - 1


def list_exchanges(run: str, records: Iterable[Record]) -> Iterator[Row]:
    """Yield one layer's exchange of each profiled step with DCP."""
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
        measured = sum(phases.phase_us[name] for name in EXCHANGE_PHASES) / shape.layers
        modelled = comm_model.predict_seconds(point.exchange, ranks, sum(received), 2).mean * 1e6
        yield Row(run, point, measured, modelled)


def select_within(rows: Sequence[Row]) -> list[Row]:
    """Return the rows for which the error is at most MAX_ERROR."""
    return [row for row in rows if abs(row.error) <= MAX_ERROR]


def format_exchange_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table with a row for each exchange: steps within MAX_ERROR, and the median of measured over modelled."""
    yield f"| exchange | ranks | steps | within {MAX_ERROR:.0%} | measured over modelled, median |"
    yield "|---|---:|---:|---:|---:|"
    for exchange, ranks in sorted({(row.point.exchange, row.point.dcp) for row in rows}):
        same = [row for row in rows if (row.point.exchange, row.point.dcp) == (exchange, ranks)]
        median = statistics.median(row.measured_us / row.modelled_us for row in same)
        yield f"| `{exchange}` | {ranks} | {len(same)} | {len(select_within(same))} | {median:.2f} |"


def _format_run(run: Path) -> str:
    return str(run.relative_to(RESULTS))


def format_quality_table(found: Iterable[Quality]) -> str:
    """Format the errors of the fit for each kind of call as a Markdown table."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *map(format_row, found)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the errors of the fit, and those of the exchanges inside steps."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    machine = load_built_in(MEASURED_ON)
    found = [row for run in RUNS for row in list_exchanges(_format_run(run), read_run(run).records)]
    bf16 = [row for row in found if row.point.weights_precision == "bf16"]
    worst = max(found, key=lambda row: abs(row.error))
    lines = [
        f"Hardware: {machine.measured}.",
        "",
        "## Predictions without the measurement itself",
        "",
        "Each size is predicted from the other sizes, and the largest number of ranks from smaller ones. The formula: docs/comm-model.md.",
        "",
        format_quality_table(compute_quality(machine.comm_model.calls.values())),
        "## Inside a step",
        "",
        STEP_SUMMARY.format(
            within=len(select_within(found)),
            all=len(found),
            bar=MAX_ERROR,
            bf16=f"{len(select_within(bf16))} of {len(bf16)}",
            worst=f"{worst.error:+.0%}, {emulation_live.format_point(worst.point)}",
        ),
        "",
        *format_exchange_table(found),
        "",
        "| run | point | measured µs | modelled µs | error |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {row.run} | {emulation_live.format_point(row.point)} | {row.measured_us:.1f} | {row.modelled_us:.1f} | {row.error:+.0%} |"
            for row in found
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
