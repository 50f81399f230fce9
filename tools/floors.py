"""Holds the floors of measured steps against benches of single operators on the same machine, and shares beside them.

    dcpbench sweep --model deepseek-v3 --tp 1 --concurrency 32 --context 4000 --backend flashinfer -o run
    dcpbench bench attention --heads 128 --requests 32 --context 4000 --lengths even -o benches
    dcpbench bench moe --model deepseek-v3 --tp 1 --requests 32 --rows uniform -o benches
    python -m tools.floors run benches

A bench's call times the layers that have it, against the operator's part of the record's phase. Matched are attention of
as many heads, requests and rows (within 1 %), both products of experts of the same width where one rank has them all,
exchanges and sums of as many requests. Ends with 1 where a floor differs by more than 5 %, or nothing could be matched.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dcpbench.bench.bench_record import BenchRecord, Result
from dcpbench.models import load_shape
from dcpbench.points import memory, roofline
from dcpbench.points.layout import compute_local_length
from dcpbench.records.runs import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.records.record import Record

WITHIN = 0.05
SAME_CONTEXT = 0.01


class Compared(NamedTuple):
    """Compare an operator of a record's step with a benchmark's, in µs of a step."""

    operator: str
    variant: str
    floor_us: float
    bench_floor_us: float
    step_us: float | None  # time of its phases; None without a profiled pass
    bench_us: float

    @property
    def agrees(self) -> bool:
        """Return True if the floors agree except for the rates of two jobs and the drawing of experts."""
        return abs(self.floor_us / self.bench_floor_us - 1) <= WITHIN

    def __str__(self) -> str:
        """Format a line of the table."""
        step = (
            "—" if self.step_us is None else f"{self.step_us / 1e3:10.3f} ms, {self.floor_us / self.step_us:.2f} of it"
        )
        return (
            f"{self.operator:<14}{self.variant:<14}floor {self.floor_us / 1e3:10.3f} ms, by the bench "
            f"{self.bench_floor_us / 1e3:10.3f} ms, {self.floor_us / self.bench_floor_us:.3f}×; "
            f"step {step}; bench {self.bench_us / 1e3:10.3f} ms, {self.bench_floor_us / self.bench_us:.2f} of it"
            f"{'' if self.agrees else '   DIFFERS'}"
        )


def compared(record: Record, benches: Sequence[BenchRecord]) -> Iterator[Compared]:
    """Yield every operator of a record's step that a benchmark has measured."""
    for bench in benches:
        found = [r for r in bench.results if r.correct and r.floor_us and r.graph and r.graph.time]
        if bench.bench == "moe":
            yield from _experts(record, found)
            continue
        for result in found:
            phases = _phases(record, bench.bench, result)
            if phases:
                yield _of(record, bench.bench, [result], phases, load_shape(record.point.model).layers)


def _phases(record: Record, bench: str, result: Result) -> tuple[str, ...]:
    """Return the phases of the step that a benchmark's call covers, once a layer; empty if its sizes differ."""
    point, sizes = record.point, result.case.sizes
    shape, layout = load_shape(point.model), point.layout
    group = shape.heads // layout.attn_tp * layout.dcp
    if sizes.get("requests") != -(-point.concurrency // point.dp):
        return ()
    if bench == "attention" and sizes["heads"] == group and sizes["lengths"] == "even":
        rows = compute_local_length(point.context + memory.HEADROOM_TOKENS, 0, layout.dcp, point.interleave)
        return ("attention",) if abs(int(sizes["context"]) / rows - 1) <= SAME_CONTEXT else ()
    if bench == "exchange" and (sizes["heads"], sizes["ranks"]) == (group, layout.dcp):
        plain = sizes["value"] == shape.latent and sizes["q"] == "gathered"
        return ("q_gather", "merge") if plain and not (point.q_replicate or point.project_first) else ()
    if bench == "collectives" and result.case.variant.startswith("all-reduce"):
        return ("attn_reduce",) if (sizes["width"], sizes["ranks"]) == (shape.hidden, layout.attn_tp) else ()
    return ()


def _experts(record: Record, found: Sequence[Result]) -> Iterator[Compared]:
    """Yield gate-up and down of a variant together, if rank 0 has all experts; without router and shared expert."""
    assert record.floor is not None
    point = record.point
    sharding = roofline.Sharding.from_point(point, load_shape(point.model))
    shape, layers = sharding.shape, memory.count_all_layers(sharding.shape).moe
    if sharding.expert_ranks > 1 or record.rates is None:
        return
    wanted = {
        "experts": shape.experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "width": sharding.expert_width,
        "requests": point.concurrency,
        "rows": "uniform",
    }
    nothing = ((roofline.Routed(hit=0, rows=0),),) * layers
    without = roofline.StepRows(tokens=point.concurrency, routing=nothing)
    others = roofline.compute_step_floors(sharding, without, record.rates.limits)
    same = [r for r in found if wanted.items() <= r.case.sizes.items()]
    for variant in dict.fromkeys(r.case.variant for r in same):
        both = [r for r in same if r.case.variant == variant]
        if len(both) == len(("gate-up", "down")) and others is not None:
            yield _of(record, "moe", both, ("moe",), layers, others["moe"])


def _of(
    record: Record, operator: str, results: Sequence[Result], phases: Sequence[str], layers: int, others_us: float = 0.0
) -> Compared:
    assert record.floor is not None
    spent = record.phases.phase_us if record.phases else {}
    return Compared(
        operator=operator,
        variant=results[0].case.variant,
        floor_us=sum(record.floor.phase_floor_us[name] for name in phases) - others_us,
        bench_floor_us=layers * sum(r.floor_us or 0.0 for r in results),
        step_us=sum(spent[name] for name in phases) - others_us if all(name in spent for name in phases) else None,
        bench_us=layers * sum(r.graph.time.median_us for r in results if r.graph and r.graph.time),
    )


def main(arguments: Sequence[str]) -> int:
    """Compare all records of a run that have a floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run with floors")
    parser.add_argument("benches", type=Path, nargs="+", help="folders with bench-NAME.json of the same machine")
    options = parser.parse_args(arguments)
    files = [path for folder in options.benches for path in sorted(folder.glob("bench-*.json"))]
    benches = [msgspec.json.decode(path.read_bytes(), type=BenchRecord) for path in files]
    agree = []
    for record in read_run(options.run).records:
        if record.floor is None:
            continue
        sys.stdout.write(
            f"{record.point.layout_name}, concurrency {record.point.concurrency}: floor {record.floor.floor_ms:.2f} ms\n"
        )
        for line in compared(record, benches):
            sys.stdout.write(f"  {line}\n")
            agree.append(line.agrees)
    if not agree:
        sys.stdout.write("Nothing to compare: measure both on one machine, with sizes as --help says.\n")
    return 0 if agree and all(agree) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
