"""What the numbers of a bench say, in sentences that are made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.bench.record import Overwritten
from dcpbench.bench.shown.rate_findings import rate_findings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dcpbench.bench.record import BenchRecord, Result, Timing

PUBLISHED_FIXES = {"filter": "check-all", "host-slice": "cuda-slice"}
"""Variant that was published as a fix -> what it fixes. Of each it was said that it avoids synchronisation, which is
held against what is counted."""
MARKS = {
    "noisy": "the time limit came before a median was known within ±1 %; give more --seconds",
    "unsettled": "the warm-up had not settled when half the time limit was over; give more --seconds",
    "throttled": "the GPU slowed its clocks down meanwhile",
    "l2_warm": "a pass goes through less than 4 times the L2 cache, so that its rows may still lie there",
}


def findings(record: BenchRecord) -> list[str]:
    """Sentences about correctness, synchronisation, host time, rates and CUDA graphs, as far as there are numbers."""
    ok = [r for r in record.results if r.outcome == "ok"]
    variants = list(dict.fromkeys(r.case.variant for r in ok))
    of = {name: [r for r in ok if r.case.variant == name] for name in variants}
    notes = list(_wrong(ok))
    notes += [sentence for name in variants if (sentence := _syncs(name, of[name]))]
    notes += [sentence for name in variants if (sentence := _where(name, of[name]))]
    if host := _range_by_variant(of, lambda r: r.host):
        notes.append(f"Host time inside a call while the GPU is {record.settings.backlog_us:g} µs behind: {host}.")
    notes += [sentence for name in variants if (sentence := _overwritten(name, of[name]))]
    notes += rate_findings(record)
    replay = _range_by_variant(of, lambda r: r.graph.time if r.graph else None)
    if replay and any(r.host for r in ok):
        notes.append(f"GPU time of a call replayed from a CUDA graph: {replay}.")
    notes += [
        f"{r.case.variant} cannot be captured in a CUDA graph: {r.graph.reason}"
        for r in ok
        if r.graph and not r.graph.captured
    ]
    return notes


def corrupts(r: Result) -> bool:
    """Whether padding rows changed anything that a live request had stored."""
    return r.overwritten is not None and bool(r.overwritten.kv_rows or r.overwritten.token_ids)


def mark_notes(results: Sequence[Result]) -> list[str]:
    """A sentence for each mark that some result has."""
    counts = {name: sum(name in r.marks for r in results) for name in MARKS}
    return [f"{name} ({count} of {len(results)}): {MARKS[name]}." for name, count in counts.items() if count]


def times(count: float) -> str:
    """`once`, `twice`, `3 times`; `1.5 times` where not every call of a pass did the same."""
    words: dict[float, str] = {0: "never", 1: "once", 2: "twice"}
    return words.get(count, f"{count:g} times")


def _wrong(results: Sequence[Result]) -> Iterator[str]:
    for r in results:
        if r.correct is False:
            yield f"WRONG: {r.case.name()}: {r.difference}."


def _syncs(variant: str, results: Sequence[Result]) -> str:
    counts = sorted({r.syncs.per_call for r in results if r.syncs})
    if not counts:
        return ""
    often = f"{' or '.join(map(times, counts))} a call{', depending on the case' if len(counts) > 1 else ''}"
    if variant not in PUBLISHED_FIXES:
        return f"{variant} never synchronises." if counts == [0] else f"{variant} synchronises {often}."
    said = f"{variant} is the published fix of {PUBLISHED_FIXES[variant]} and was said to avoid synchronisation"
    return f"{said}, which is true." if counts == [0] else f"{said}: it does not, it still synchronises {often}."


def _where(variant: str, results: Sequence[Result]) -> str:
    """The lines that wait, of the result that has the most."""
    counted = [r.syncs for r in results if r.syncs and r.syncs.sites]
    if not counted:
        return ""
    most = max(counted, key=lambda s: s.per_call)
    sites = [
        f"{s.op or s.kind} in {s.function} ({s.file.rpartition('/')[2]}:{s.line}), {times(s.per_call)}"
        for s in most.sites
    ]
    return f"{variant} waits for {'; '.join(sites)}."


def _overwritten(variant: str, results: Sequence[Result]) -> str:
    """What padding rows did, in how many cases, or what it costs that they did nothing."""
    found = [r.overwritten for r in results if r.overwritten]
    if not found:
        return ""
    hurt = sum(corrupts(r) for r in results)
    most = {name: max(getattr(o, name) for o in found) for name in Overwritten.__struct_fields__}
    error = f"{100 * most['logit_error']:.3g} % of their norm"
    if hurt:
        return (
            f"{variant}: in {hurt} of {len(found)} cases padding rows wrote over a live request, up to "
            f"{most['kv_rows']:,} of its stored KV rows and {most['token_ids']:,} of its token ids; its logits are off "
            f"by up to {error}."
        )
    return (
        f"{variant}: padding rows changed nothing that a live request had stored, and its logits by {error}; the slot "
        f"takes up to {most['table_bytes']:,} bytes, beside {most['page_bytes']:,} of the KV pool's padding page."
    )


def _range_by_variant(of: dict[str, list[Result]], timing: Callable[[Result], Timing | None]) -> str:
    parts = []
    for variant, results in of.items():
        medians = [t.median_us for r in results if (t := timing(r))]
        if medians:
            low, high = f"{min(medians):,.3g}", f"{max(medians):,.3g}"
            parts.append(f"{variant} {low if low == high else f'{low} to {high}'} µs")
    return ", ".join(parts)
