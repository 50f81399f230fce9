"""Sentences about rates: how much faster than the usual way, and how near to what the machine can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.bench.shown.rates import baselines, share, speed_up
from dcpbench.points.memory import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.bench.record import BenchRecord, Result


def rate_findings(record: BenchRecord) -> list[str]:
    """Of results that are correct; a fast wrong one is no finding."""
    right = [r for r in record.results if r.outcome == "ok" and r.correct]
    variants = list(dict.fromkeys(r.case.variant for r in right))
    of = {name: [r for r in right if r.case.variant == name] for name in variants}
    usual = baselines(record)
    notes = [
        sentence
        for place, baseline in enumerate(usual)
        for name in variants
        if name not in usual[: place + 1] and (sentence := _speed(name, baseline, of[name], right))
    ]
    notes += [sentence for name in variants if (sentence := _share(name, of[name], right))]
    return notes + [sentence for r in right if (sentence := _outgrown(r))]


def _speed(variant: str, baseline: str, mine: Sequence[Result], results: Sequence[Result]) -> str:
    """Such as: symm is 3.40× as fast as ag_rs at requests 1, 3.30× at requests 8."""
    ratios = [(r, ratio) for r in mine if (ratio := speed_up(r, baseline, results))]
    if not ratios:
        return ""
    many = len(ratios) > 4  # noqa: PLR2004 - more than a sentence holds
    notes = [min(ratios, key=lambda x: x[1]), max(ratios, key=lambda x: x[1])] if many else ratios
    (first, slowest), *others = notes
    parts = [f"{variant} is {slowest:.2f}× as fast as {baseline}{_at(first, mine)}"]
    parts += [f"{ratio:.2f}×{_at(r, mine)}" for r, ratio in others]
    if not many:
        return f"{', '.join(parts)}."
    faster = sum(ratio > 1 for _, ratio in ratios)
    return f"{' to '.join(parts)}; faster in {faster} of {len(ratios)} cases."


def _share(variant: str, mine: Sequence[Result], results: Sequence[Result]) -> str:
    """Such as: triton reaches 41 % at … to 78 % at … of what this machine allows.

    From CUDA graphs alone: what waits for the host is not held against the GPU.
    """
    shares = [(r, part) for r in mine if r.graph and r.graph.time and (part := share(r))]
    if not shares:
        return ""
    low, high = min(shares, key=lambda x: x[1]), max(shares, key=lambda x: x[1])
    if low is high:
        return f"{variant} reaches {100 * low[1]:.0f} % of what this machine allows."
    least, most = (f"{100 * part:.0f} %{_at(r, results)}" for r, part in (low, high))
    return f"{variant} reaches {least} to {most} of what this machine allows."


def _outgrown(r: Result) -> str:
    """What it costs that a buffer has to be allocated while the request waits."""
    if r.case.sizes.get("buffer") != "outgrown" or not (r.time and r.graph and r.graph.time):
        return ""
    sizes = ", ".join(f"{name} {int(r.case.sizes[name]):,}" for name in ("requests", "tokens"))
    pool = f"the pool of {int(r.case.sizes['pool_bytes']) / GIB:.3g} GiB"
    before, late = (f"{time.median_us:,.0f} µs" for time in (r.graph.time, r.time))
    return (
        f"{r.case.variant} outgrows {pool} at {sizes}: allocating a buffer at run time makes a call of {before} take "
        f"{late}."
    )


def _at(r: Result, among: Sequence[Result]) -> str:
    """` at heads 128, requests 1`: the sizes in which results differ."""
    sizes = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in r.case.sizes.items()
        if any(other.case.sizes.get(name) != value for other in among)
    ]
    return f" at {', '.join(sizes)}" if sizes else ""
