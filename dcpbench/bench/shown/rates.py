"""What a bench's times come to: rates, shares of what the machine can do, and how much faster than the usual way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.show.numbers import with_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dcpbench.bench.record import BenchRecord, Limit, Result, Timing

    Groups = dict[str, list[Result]]

BASELINES = {
    "attention": ("flashinfer",),
    "exchange": ("ag_rs", "ag_rs-bf16"),
    "collectives": ("all-reduce",),
    "padded-slots": ("slot-0-live",),
    "moe": ("torch", "deepgemm"),
}
"""Variants that the others of a bench are compared with."""
ALIKE = {"all-reduce": ("all-reduce", "all-reduce-symm")}
"""Who can be compared with a baseline, where not all variants of its bench do the same."""
UNITS = {"B/s": ((1e12, "TB/s"), (1e9, "GB/s")), "FLOP/s": ((1e12, "TFLOP/s"),), "s": ((1e-6, "µs"),)}


def grouped(results: Iterable[Result], name_of: Callable[[Result], str] = lambda r: r.case.variant) -> Groups:
    """Results by a name, their variant's if nothing else is asked for, in the order in which names first come."""
    groups: Groups = {}
    for r in results:
        groups.setdefault(name_of(r), []).append(r)
    return groups


def gpu_time(r: Result) -> Timing | None:
    """A call's time without the host where that is known: from a CUDA graph, else eagerly."""
    return r.graph.time if r.graph and r.graph.time else r.time


def share(r: Result) -> float | None:
    """The least time that a call can take on this machine, as a share of the time that it took."""
    time = gpu_time(r)
    return r.floor_us / time.median_us if time and r.floor_us else None


def speed_up(r: Result, baseline: str, results: Sequence[Result]) -> float | None:
    """How many times as fast as `baseline` at the same sizes."""
    if r.case.variant not in ALIKE.get(baseline, (r.case.variant,)):
        return None
    mine = gpu_time(r)
    same = (o for o in results if o.case.variant == baseline and o.case.sizes == r.case.sizes)
    theirs = next((t for o in same if (t := gpu_time(o))), None)
    return theirs.median_us / mine.median_us if mine and theirs else None


def baselines(record: BenchRecord) -> list[str]:
    """Baselines that have times, where there is anything to compare with them."""
    timed = {r.case.variant for r in record.results if gpu_time(r)}
    return [name for name in BASELINES.get(record.bench, ()) if timed - {name} and name in timed]


def limit_notes(record: BenchRecord) -> list[str]:
    """A line with this machine's limits, and one for each that could not be measured."""
    ranks = f", the slowest of {record.ranks} ranks" if record.ranks > 1 else ""
    measured = ", ".join(f"{limit.name} {amount(limit)}" for limit in record.limits)
    lines = [f"Measured on this machine in the same run{ranks}: {measured}."] if measured else []
    return lines + [f"Not measured: {reason}" for reason in record.without]


def amount(limit: Limit) -> str:
    """`4.38 TB/s`, `790 TFLOP/s`, `3.1 µs`."""
    return with_unit(limit.median, UNITS[limit.unit])
