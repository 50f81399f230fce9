"""Derive values from a bench's times, and generate sentences from its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.memory import GIB
from dcpbench.points.names import AS_REQUESTS
from dcpbench.show.numbers import format_with_unit
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dcpbench.bench.bench_record import BenchRecord, Limit, Result, Timing

    Groups = dict[str, list[Result]]

WARNINGS = {
    "noisy": "the time limit came before a median was known within ±1 %; give more --seconds",
    "unsettled": "the warm-up had not settled when half the time limit was over; give more --seconds",
    "throttled": "the GPU slowed its clocks down meanwhile",
    "l2_warm": "a pass goes through less than 4 times the L2 cache, so that its rows may still lie there",
}

BASELINES = {  # variants that the others of a bench are compared with
    "attention": ("flashinfer", "flashmla"),
    "gqa": ("flashinfer",),
    "exchange": ("ag_rs", "ag_rs-bf16"),
    "collectives": ("all-reduce",),
    "linear": ("deepgemm", "flashinfer"),
    "moe": ("torch", "deepgemm"),
}
COMPARABLE = {"all-reduce": ("all-reduce", "all-reduce-symm", "all-reduce-registered")}
"""Variants that can be compared with a baseline, if not all variants of its bench compute the same."""
UNITS = {"B/s": ((1e12, "TB/s"), (1e9, "GB/s")), "FLOP/s": ((1e12, "TFLOP/s"),), "s": ((1e-6, "µs"),)}


def describe_findings(record: BenchRecord) -> list[str]:
    """Return sentences about correctness and rates, as far as there are numbers."""
    wrong = (r for r in record.results if r.outcome == "ok" and r.correct is False)
    return [*(f"WRONG: {r.case.name()}: {r.difference}." for r in wrong), *_describe_rates(record)]


def group_results(results: Iterable[Result], name_of: Callable[[Result], str] = lambda r: r.case.variant) -> Groups:
    """Return results by a name, by default their variant's, in order of first occurrence."""
    groups: Groups = {}
    for r in results:
        groups.setdefault(name_of(r), []).append(r)
    return groups


def get_gpu_time(r: Result) -> Timing | None:
    """Return a call's time without the host if available: from a CUDA graph, else eagerly."""
    return r.graph.time if r.graph and r.graph.time else r.time


def is_right(r: Result) -> bool:
    """Return True if a case ran without a wrong result, of which the time counts for nothing."""
    return r.outcome == "ok" and r.correct is not False


def compute_share(r: Result) -> float | None:
    """Return the minimum time of a call on this machine as a share of its measured time; None for a wrong result."""
    time = get_gpu_time(r)
    return r.floor_us / time.median_us if time and r.floor_us and is_right(r) else None


def compute_speed_up(r: Result, baseline: str, results: Sequence[Result]) -> float | None:
    """Return the speed-up over `baseline` at the same sizes; None if either has a wrong result."""
    if r.case.variant not in COMPARABLE.get(baseline, (r.case.variant,)) or not is_right(r):
        return None
    mine = get_gpu_time(r)
    same = (o for o in results if o.case.variant == baseline and o.case.sizes == r.case.sizes and is_right(o))
    theirs = next((t for o in same if (t := get_gpu_time(o))), None)
    return theirs.median_us / mine.median_us if mine and theirs else None


def list_baselines(record: BenchRecord) -> list[str]:
    """Return the baselines with times, if other variants can be compared with them."""
    timed = {r.case.variant for r in record.results if get_gpu_time(r)}
    return [name for name in BASELINES.get(record.bench, ()) if timed - {name} and name in timed]


def format_limits(record: BenchRecord) -> list[str]:
    """Return a line with this machine's limits, and one for each limit that could not be measured."""
    ranks = f", the slowest of {record.ranks} ranks" if record.ranks > 1 else ""
    measured = ", ".join(f"{limit.name} {format_amount(limit)}" for limit in record.limits)
    lines = [f"Measured on this machine in the same run{ranks}: {measured}."] if measured else []
    return lines + [f"Not measured: {reason}" for reason in record.unmeasured]


def format_amount(limit: Limit) -> str:
    """Return a limit as `4.38 TB/s`, `790 TFLOP/s` or `3.1 µs`."""
    return format_with_unit(limit.median, UNITS[limit.unit])


def format_warnings(results: Sequence[Result]) -> list[str]:
    """Return a sentence for each warning of any result."""
    counts = {name: sum(name in r.warnings for r in results) for name in WARNINGS}
    return [f"{name} ({count} of {len(results)}): {WARNINGS[name]}." for name, count in counts.items() if count]


def _describe_rates(record: BenchRecord) -> list[str]:
    """Return sentences on correct results only, as a fast wrong one is no finding."""
    right = [r for r in record.results if r.outcome == "ok" and r.correct]
    of = group_results(right)
    usual = list_baselines(record)
    notes = [
        sentence
        for place, baseline in enumerate(usual)
        for name in of
        if name not in usual[: place + 1] and (sentence := _describe_speed(name, baseline, of[name], right))
    ]
    notes += [sentence for name in of if (sentence := _describe_rows_together(name, of[name], right))]
    notes += [sentence for name in of if (sentence := _describe_share(name, of[name], right))]
    return notes + [sentence for r in right if (sentence := _describe_outgrown(r))]


def _describe_speed(variant: str, baseline: str, mine: Sequence[Result], results: Sequence[Result]) -> str:
    """Return a sentence such as: symm is 3.40× as fast as ag_rs at requests 1, 3.30× at requests 8."""
    ratios = [(r, ratio) for r in mine if (ratio := compute_speed_up(r, baseline, results))]
    if not ratios:
        return ""
    many = len(ratios) > 4  # noqa: PLR2004 - more than a sentence holds
    notes = [min(ratios, key=lambda x: x[1]), max(ratios, key=lambda x: x[1])] if many else ratios
    (first, slowest), *others = notes
    parts = [f"{variant} is {slowest:.2f}× as fast as {baseline}{_format_sizes(first, mine)}"]
    parts += [f"{ratio:.2f}×{_format_sizes(r, mine)}" for r, ratio in others]
    if not many:
        return f"{', '.join(parts)}."
    faster = sum(ratio > 1 for _, ratio in ratios)
    return f"{' to '.join(parts)}; faster in {faster} of {format_count(len(ratios), 'case')}."


def _describe_rows_together(variant: str, mine: Sequence[Result], results: Sequence[Result]) -> str:
    """Return a sentence on the speed with a request's query rows together, against the fastest variant without that."""
    ratios = []
    for r in mine:
        same = [o for o in results if o.case.variant.endswith(AS_REQUESTS) and o.case.sizes == r.case.sizes]
        times = [(time.median_us, o.case.variant) for o in same if (time := get_gpu_time(o))]
        if times and not variant.endswith(AS_REQUESTS) and (own := get_gpu_time(r)):
            fastest_us, name = min(times)
            ratios.append(f"{fastest_us / own.median_us:.2f}× of {name}{_format_sizes(r, mine)}")
    if not ratios:
        return ""
    return f"{variant} takes the query rows of a request together, at the speed of the fastest variant that takes them as requests: {', '.join(ratios)}."


def _describe_share(variant: str, mine: Sequence[Result], results: Sequence[Result]) -> str:
    """Return a sentence such as: triton reaches 41 % at … to 78 % at … of what this machine allows.

    Only times in CUDA graphs are used, so that host delays are not attributed to the GPU.
    """
    shares = [(r, part) for r in mine if r.graph and r.graph.time and (part := compute_share(r))]
    if not shares:
        return ""
    low, high = min(shares, key=lambda x: x[1]), max(shares, key=lambda x: x[1])
    if low is high:
        return f"{variant} reaches {100 * low[1]:.0f} % of what this machine allows."
    least, most = (f"{100 * part:.0f} %{_format_sizes(r, results)}" for r, part in (low, high))
    return f"{variant} reaches {least} to {most} of what this machine allows."


def _describe_outgrown(r: Result) -> str:
    """Return a sentence on the cost of allocating a buffer during a request."""
    if r.case.sizes.get("buffer") != "outgrown" or not (r.time and r.graph and r.graph.time):
        return ""
    sizes = ", ".join(f"{name} {int(r.case.sizes[name]):,}" for name in ("requests", "tokens"))
    pool = f"the pool of {int(r.case.sizes['pool_bytes']) / GIB:.3g} GiB"
    before, late = (f"{time.median_us:,.0f} µs" for time in (r.graph.time, r.time))
    return (
        f"{r.case.variant} outgrows {pool} at {sizes}: allocating a buffer at run time makes a call of {before} take "
        f"{late}."
    )


def _format_sizes(r: Result, among: Sequence[Result]) -> str:
    """Return the sizes in which results differ: ` at heads 128, requests 1`."""
    sizes = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in r.case.sizes.items()
        if any(other.case.sizes.get(name) != value for other in among)
    ]
    return f" at {', '.join(sizes)}" if sizes else ""
