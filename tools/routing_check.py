"""Compare measured decode steps with forecasts, for several distributions of tokens over experts (--routing).

    dcpbench sweep --model deepseek-v3 --tp 2 --dcp 1 --ep 1,tp --concurrency 8,32 --routing even,zipf:0.75,zipf:1.25 -o RUN
    python -m tools.routing_check RUN…

It prints each step of a run with the measured and expected number of experts that its layers read, and with its forecast and band. The
forecast is that of `dcpbench recommend`, fitted to steps with even routing. Exit code 1: a step is outside the band of its forecast; 2: a
run cannot be read, or no run has such a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import DcpbenchError
from dcpbench.models import load_shape
from dcpbench.plan.spec import make_planned_probe
from dcpbench.points.budget import plan_engine
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.expert_distribution import EVEN
from dcpbench.points.gpus import GPUS
from dcpbench.points.roofline import Sharding
from dcpbench.points.settings import Settings
from dcpbench.recommend import forecast
from dcpbench.recommend.estimate import load_published_steps
from dcpbench.records.runs import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """Hold a measured step and its forecast."""

    point: Point
    experts: float  # measured number of experts that a rank reads in a layer, averaged over ranks
    expected: float  # number of experts that the distribution predicts
    busiest: float  # experts of the rank that reads the most, over `experts`
    ms: float
    forecast_ms: float
    band_ms: tuple[float, float]  # limits of the band of the forecast

    @property
    def is_in_band(self) -> bool:
        """Return True if the step is inside the band of its forecast."""
        return self.band_ms[0] <= self.ms <= self.band_ms[1]


def compare_record(record: Record) -> ComparedStep | None:
    """Return a decode record with its forecast; None if it has no step, or if its GPU is unknown."""
    device = record.environment.device if record.environment else ""
    gpu = next((gpu.name for gpu in GPUS if gpu.device == device), None)
    if record.metrics is None or record.conditions is None or record.conditions.experts_hit is None or gpu is None:
        return None
    point, shape = record.point, load_shape(record.point.model)
    machine, steps, settings = load_machine(point.emulate or gpu), load_published_steps(), Settings()
    plan = plan_engine([point], settings, shape, make_planned_probe(machine.gpu, machine.gpus_per_host))
    found = forecast.estimate_point(point, plan, machine, settings, steps, steps.terms)
    ms, band_ms = found.itl_ms.p50, found.itl_bounds_ms
    assert ms is not None
    assert band_ms is not None
    sharding = Sharding.from_point(point, shape)
    rows = record.conditions.graph_batch or point.concurrency // point.dp
    return ComparedStep(
        point=point,
        experts=record.conditions.experts_hit * shape.experts / sharding.expert_ranks,
        expected=sharding.estimate_expert_load(rows * point.dp).active_experts,
        busiest=record.conditions.busiest_rank_experts or 1.0,
        ms=record.metrics.step_ms.median,
        forecast_ms=ms,
        band_ms=band_ms,
    )


def format_table(found: Sequence[ComparedStep]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and a sentence on the band."""
    yield "| layout | requests × tokens | routing | experts a rank | expected | busiest / mean | step ms | forecast ms | error | band ms |"
    yield "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"
    for one in found:
        point, (low, high) = one.point, one.band_ms
        name = point.layout_name if point.dp > 1 else f"{point.layout_name}·ep{point.ep_degree}"
        yield (
            f"| {name} | {point.concurrency} × {point.context:,} | {point.routing or EVEN} | {one.experts:.1f} | {one.expected:.0f} "
            f"| {one.busiest:.2f} | {one.ms:.2f} | {one.forecast_ms:.2f} | {one.forecast_ms / one.ms - 1:+.1%} "
            f"| {low:.2f}–{high:.2f}{'' if one.is_in_band else ', missed'} |"
        )
    yield f"\n{sum(one.is_in_band for one in found)} of {len(found)} steps are inside the bands of their forecasts."


def main() -> int:
    """Print the table of the given runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    runs = parser.parse_args().runs
    try:
        records = [record for run in runs for record in read_run(run).records]
        measured = [record for record in records if record.outcome == "ok" and record.point.workload == "decode"]
        found = [one for record in measured if (one := compare_record(record)) is not None]
    except DcpbenchError as e:
        parser.error(str(e))
    if not found:
        parser.error(
            "no run has a decode step of a known GPU with counted experts; measure one with the command in --help."
        )
    sys.stdout.write("\n".join(format_table(found)) + "\n")
    return 0 if all(one.is_in_band for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
