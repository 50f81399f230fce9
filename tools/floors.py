"""Compare the floors of measured steps with benches of single operators on the same machine.

    dcpbench sweep --model deepseek-v3 --tp 1 --concurrency 32 --context 4000 --backend flashinfer -o run
    dcpbench bench attention --heads 128 --requests 32 --context 4000 --lengths even -o benches
    dcpbench bench moe --model deepseek-v3 --tp 1 --requests 32 --rows uniform -o benches
    python -m tools.floors run benches

The time of a bench's call times the number of layers is compared with the operator's part of the record's phase. Compared are: attention
with the same heads and requests, and with the same rows within 1 %; both matrix products of experts of the same width, if one rank has all
experts; exchanges and all-reduces of the same number of requests. Exit code 1: a floor differs by more than 5 %, or no operator can be
compared; 2: a run or a bench cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dcpbench.bench.bench_record import BenchRecord, Result
from dcpbench.errors import DcpbenchError, RecordsError
from dcpbench.models import load_shape
from dcpbench.points import memory, roofline
from dcpbench.points.layout import compute_local_length
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.runs import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.records.record import Record

MAX_ERROR = 0.05
MAX_CONTEXT_ERROR = 0.01


class Comparison(NamedTuple):
    """Hold an operator of a record's step and of a bench, in µs per step."""

    operator: str
    variant: str
    floor_us: float
    bench_floor_us: float
    step_us: float | None  # time of its phases; None without a profile
    bench_us: float

    @property
    def agrees(self) -> bool:
        """Return True if the floors agree within MAX_ERROR, as rates of jobs and chosen experts differ."""
        return abs(self.floor_us / self.bench_floor_us - 1) <= MAX_ERROR

    def __str__(self) -> str:
        """Format a line of the table."""
        step = (
            "—"
            if self.step_us is None
            else f"{self.step_us / 1e3:10.3f} ms, floor / step {self.floor_us / self.step_us:.2f}"
        )
        return (
            f"{self.operator:<14}{self.variant:<14}floor {self.floor_us / 1e3:10.3f} ms, from the bench "
            f"{self.bench_floor_us / 1e3:10.3f} ms, {self.floor_us / self.bench_floor_us:.3f}×; "
            f"step {step}; bench {self.bench_us / 1e3:10.3f} ms, floor / bench {self.bench_floor_us / self.bench_us:.2f}"
            f"{'' if self.agrees else '   DIFFERS'}"
        )


def compare_record(record: Record, benches: Sequence[BenchRecord]) -> Iterator[Comparison]:
    """Yield each operator of a record's step that a bench has measured."""
    for bench in benches:
        found = [r for r in bench.results if r.correct and r.floor_us and r.graph and r.graph.time]
        if bench.bench == "moe":
            yield from _compare_experts(record, found)
            continue
        for result in found:
            phases = _find_phases(record, bench.bench, result)
            if phases:
                yield _make_comparison(record, bench.bench, [result], phases, load_shape(record.point.model).layers)


def _find_phases(record: Record, bench: str, result: Result) -> tuple[str, ...]:
    """Return the phases of a layer that a bench's call covers; empty if its sizes differ."""
    point, sizes = record.point, result.case.sizes
    shape, layout = load_shape(point.model), point.layout
    group = shape.heads // layout.attn_tp * layout.dcp
    if sizes.get("requests") != -(-point.concurrency // point.dp):
        return ()
    if bench == "attention" and sizes["heads"] == group and sizes["lengths"] == "even":
        rows = compute_local_length(point.context + memory.HEADROOM_TOKENS, 0, layout.dcp, point.interleave)
        return ("attention",) if abs(int(sizes["context"]) / rows - 1) <= MAX_CONTEXT_ERROR else ()
    if bench == "exchange" and (sizes["heads"], sizes["ranks"]) == (group, layout.dcp):
        plain = sizes["value"] == shape.latent and sizes["q"] == "gathered"
        return ("q_gather", "merge") if plain and not (point.q_replicate or point.project_first) else ()
    if bench == "collectives" and result.case.variant.startswith("all-reduce"):
        return ("attn_reduce",) if (sizes["width"], sizes["ranks"]) == (shape.hidden, layout.attn_tp) else ()
    return ()


def _compare_experts(record: Record, found: Sequence[Result]) -> Iterator[Comparison]:
    """Yield the sum of gate-up and down of each variant, without router and shared expert, if rank 0 has all experts."""
    assert record.floor is not None
    point = record.point
    sharding = roofline.Sharding.from_point(point, load_shape(point.model))
    shape, layers = sharding.shape, memory.count_all_layers(sharding.shape).moe
    if sharding.expert_ranks > 1 or record.rates is None:
        return
    sizes = {
        "experts": shape.experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "width": sharding.expert_width,
        "requests": point.concurrency,
        "rows": "uniform",
    }
    nothing = ((roofline.ExpertLoad(active_experts=0, assignments=0),),) * layers
    without = roofline.StepRows(tokens=point.concurrency, routing=nothing)
    others = roofline.compute_step_floors(sharding, without, record.rates.limits)
    same = [r for r in found if sizes.items() <= r.case.sizes.items()]
    for variant in dict.fromkeys(r.case.variant for r in same):
        both = [r for r in same if r.case.variant == variant]
        if len(both) == len(("gate-up", "down")) and others is not None:
            yield _make_comparison(record, "moe", both, ("moe",), layers, others["moe"])


def _make_comparison(
    record: Record, operator: str, results: Sequence[Result], phases: Sequence[str], layers: int, others_us: float = 0.0
) -> Comparison:
    assert record.floor is not None
    phase_us = record.phases.phase_us if record.phases else {}
    return Comparison(
        operator=operator,
        variant=results[0].case.variant,
        floor_us=sum(record.floor.phase_floor_us[name] for name in phases) - others_us,
        bench_floor_us=layers * sum(r.floor_us or 0.0 for r in results),
        step_us=sum(phase_us[name] for name in phases) - others_us
        if all(name in phase_us for name in phases)
        else None,
        bench_us=layers * sum(r.graph.time.median_us for r in results if r.graph and r.graph.time),
    )


def read_benches(folders: Sequence[Path]) -> list[BenchRecord]:
    """Return the benches in these folders. Raise RecordsError if a folder has none, or one cannot be read."""
    found = []
    for folder in folders:
        files = sorted(folder.glob("bench-*.json"))
        if not files:
            raise RecordsError(f"{folder} has no bench-NAME.json; name the folder after -o of a dcpbench bench.")
        for file in files:
            try:
                found.append(msgspec.json.decode(file.read_bytes(), type=BenchRecord))
            except (OSError, *UNREADABLE) as e:
                raise RecordsError(f"{file} cannot be read as a bench ({e}); repeat dcpbench bench.") from e
    return found


def main(arguments: Sequence[str]) -> int:
    """Compare all records of a run that have floors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run with floors")
    parser.add_argument("benches", type=Path, nargs="+", help="folders with bench-NAME.json of the same machine")
    args = parser.parse_args(arguments)
    agree = []
    try:
        benches, records = read_benches(args.benches), read_run(args.run).records
    except DcpbenchError as e:
        parser.error(str(e))
    for record in records:
        if record.floor is None:
            continue
        sys.stdout.write(
            f"{record.point.layout_name}, concurrency {record.point.concurrency}: floor {record.floor.floor_ms:.2f} ms\n"
        )
        for line in compare_record(record, benches):
            sys.stdout.write(f"  {line}\n")
            agree.append(line.agrees)
    if not agree:
        sys.stdout.write(
            "No operator can be compared; measure run and benches on one machine, with the sizes in --help.\n"
        )
    return 0 if agree and all(agree) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
