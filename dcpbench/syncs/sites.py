"""Define synchronisations, as every detector describes them, and sites: the places in code that cause them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import linecache
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dcpbench.records.stats import compute_percentile
from dcpbench.syncs.python_frames import find_caller, get_relative_path
from dcpbench.syncs.rules import BY_ID
from dcpbench.syncs.steps import Steps, count_occurrences
from dcpbench.syncs.sync_report import Example, Site, sum_known

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dcpbench.syncs.python_frames import Frame

_UNSTABLE = re.compile(r"\b(?=\w*\d)\w{20,}\b|\d+")  # hashes and numbers, as in `## Call CompiledFxGraph f7xq… ##`
CONTEXT = 2  # source lines shown before and after the one that synchronised
_SHARED = "rule op function line called_from cause range direction call may_block allowed own"  # equal in a site
MAX_LINES = 10  # lines that are shown in full; of further ones the number is shown


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Describe one time that the host waits, or would wait, for the GPU.

    Detectors leave unknown fields at their default. Fields that a Site has as well are described there.
    """

    rule: str  # id in rules.py, such as SYNC001
    op: str = ""  # innermost operator, `aten::_local_scalar_dense`, or the call that waits, `torch.cuda.synchronize`
    op_chain: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()  # whole Python stack without detector frames, outermost first; `stack` for traces
    stack: tuple[str, ...] = ()
    user: Frame | None = None  # innermost frame outside torch, Triton, the standard library and the detectors
    line_is: Literal["call", "function"] = "call"
    called_from: str = ""  # known here for a trace only
    thread: str = ""  # name of the thread, with that of its asyncio task if it ran one
    thread_id: int = 0  # `threading.get_ident()` in a dry run
    explicit: bool = False
    direction: str = ""
    call: str = ""
    bytes: int | None = None
    may_block: bool = False
    allowed: str = ""  # reason of the innermost region of `allow` or vLLM's gpu_sync_allowed; empty outside
    own: bool = False
    range: str = ""
    within: str = ""  # the range without numbers, if there is no function to distinguish places
    step: int | None = None  # index from 0; None before the first step, the number of steps after the last
    ranges: tuple[str, ...] = ()  # all `record_function` ranges around it, outermost first, steps included
    at: float | None = None  # start time: perf_counter seconds if live, the trace clock's µs for a trace
    wait: float | None = None  # microseconds
    bubble: float | None = None  # microseconds, at most
    waited: bool | None = None  # True if there was something to wait for
    waited_for: str = ""
    cause: str = ""
    api: str = ""  # function that the program called, such as `torch.Tensor.__bool__`, if the detector has it
    capturing: bool = False  # happened while a CUDA graph was captured, where a real GPU raises an error

    @property
    def file(self) -> str:
        """File of the user's frame: absolute, from a trace relative to the repository; empty without a frame."""
        return self.user.file if self.user else ""

    @property
    def line(self) -> int | None:
        """Line of the call in the user's frame, if the detector knows it."""
        return self.user.line or None if self.user else None

    @property
    def function(self) -> str:
        """Bare name of the user's function; `<module>` at the top of a script."""
        return self.user.function if self.user else ""

    def message(self) -> str:
        """Format one sentence with the line, what happens there and the usual fix."""
        rule = BY_ID[self.rule]
        where = f"{get_relative_path(self.file)}:{self.line} in {self.function}" if self.user else "no Python frame"
        api = f" in {self.api}" if self.api and self.api != self.op else ""
        copy = f", {self.direction}" if self.direction else ""
        capture = " This happens while a CUDA graph is captured, where CUDA raises an error." if self.capturing else ""
        return f"{where}: {rule.title} ({self.op or self.call}{api}{copy}) [{self.rule}].{capture} {rule.fix}"

    def get_fingerprint(self, file: str) -> str:
        """Return the fingerprint by which a baseline identifies it, in this file of the repository."""
        where = self.function or (f"range {self.within}" if self.within else "")
        return compute_fingerprint(self.rule, file, where, self.op_chain, self.direction)


def format_syncs(syncs: Sequence[Sync]) -> str:
    """Format the lines that synchronised, each once with its count, in the order of their first occurrence."""
    groups: dict[tuple[str, int | None, str, str], list[Sync]] = {}
    for sync in syncs:
        groups.setdefault((sync.file, sync.line, sync.rule, sync.op), []).append(sync)
    shown = [_format_group(group[0], len(group)) for group in list(groups.values())[:MAX_LINES]]
    rest = len(groups) - len(shown)
    return "\n\n".join([*shown, *([f"… and {rest} more lines."] if rest else [])])


def _format_group(sync: Sync, count: int) -> str:
    rule = BY_ID[sync.rule]
    where = f"{get_relative_path(sync.file)}:{sync.line} in {sync.function}" if sync.user else "outside any Python line"
    what = ", ".join(part for part in (sync.op or sync.call, sync.direction) if part)
    times = f", {count} times" if count > 1 else ""
    head = f"{where}: {rule.title} [{sync.rule}] ({what}){times}"
    return "\n".join([head, *_format_source(sync), f"  why: {rule.why}", f"  fix: {rule.fix}"])


def _format_source(sync: Sync) -> list[str]:
    """Return the line with its neighbours; nothing if the source cannot be read."""
    if sync.line is None or not linecache.getline(sync.file, sync.line):
        return []
    numbers = range(max(1, sync.line - CONTEXT), sync.line + CONTEXT + 1)
    lines = {n: text.rstrip() for n in numbers if (text := linecache.getline(sync.file, n))}
    return [f"{'>' if n == sync.line else ' '} {n:5d} | {text}".rstrip() for n, text in lines.items()]


def compute_fingerprint(rule: str, file: str, function: str, op_chain: Sequence[str], direction: str) -> str:
    """Return sixteen hexadecimal digits that identify a site, independent of lines, addresses and thread numbers.

    `function` is the user's innermost one; if a trace has none, `range ` and the name of the range.
    """
    ops = [op if "::" in op else _UNSTABLE.sub("#", op) for op in op_chain]
    text = "\0".join([rule, file, function, ">".join(ops), direction])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def group_into_sites(
    syncs: Iterable[Sync], *, steps: Steps | None = None, trace: str = "", root: Path | None = None
) -> list[Site]:
    """Return the sites of a program that was seen live or in a dry run, one for each fingerprint and line.

    They are in the order in which they first occurred. `trace` is the program's name; files are made relative to `root`,
    or to the working directory.
    """
    groups: dict[object, list[Sync]] = {}
    for sync in syncs:
        key = (sync.get_fingerprint(get_relative_path(sync.file, root)), sync.line, sync.may_block, sync.allowed)
        groups.setdefault(key, []).append(sync)
    sites = []
    for group in groups.values():
        first = group[0]
        caller = find_caller(first.user, first.frames) if first.user else None
        site = _build_site(group, get_relative_path(first.file, root), steps or Steps(), trace)
        site.called_from = str(caller._replace(file=get_relative_path(caller.file, root))) if caller else ""
        sites.append(site)
    return sites


def group_trace_sites(trace: str, syncs: Iterable[Sync], steps: Steps) -> list[Site]:
    """Return the sites of one trace, one for each fingerprint, in the order in which they first occurred.

    Their lines are mostly those of functions. Calls that are allowed are a separate site, apart from other calls of
    the same function.
    """
    known: dict[object, str] = {}
    groups: dict[object, list[Sync]] = {}
    for s in sorted(syncs, key=lambda s: s.at or 0.0):
        place = (s.rule, s.user, s.op_chain, s.direction, s.within)
        if place not in known:
            known[place] = s.get_fingerprint(s.file)
        groups.setdefault((known[place], s.may_block, s.own, s.allowed), []).append(s)
    return [_build_site(group, group[0].file, steps, trace) for group in groups.values()]


def _build_site(group: Sequence[Sync], file: str, steps: Steps, trace: str) -> Site:
    first = group[0]
    occurrences = count_occurrences([s.step for s in group], steps)
    waits = [s.wait for s in group if s.wait is not None]
    bubbles = [s.bubble for s in group if s.bubble is not None]
    worst = max(group, key=lambda s: (s.bubble or 0.0, s.wait or 0.0))
    return Site(
        **{name: getattr(first, name) for name in _SHARED.split()},
        fingerprint=first.get_fingerprint(file),
        kind=BY_ID[first.rule].kind,
        op_chain=list(first.op_chain),
        file=file,
        line_is=first.line_is if first.user else "",
        stack=[*first.stack, *map(str, first.frames)],
        threads=sorted({s.thread for s in group if s.thread}),
        count=len(group),
        waited=sum_known(s.waited for s in group),
        count_per_step=occurrences.per_step,
        count_per_phase=occurrences.per_phase,
        outside=occurrences.outside,
        warmup_only=occurrences.warmup_only,
        wait_us=float(np.sum(waits)) if waits else None,
        wait_median_us=float(np.median(waits)) if waits else None,
        wait_p99_us=compute_percentile(waits, 99) if waits else None,
        bubble_us=float(np.sum(bubbles)) if bubbles else None,
        bytes=sum_known(s.bytes for s in group),
        explicit=all(s.explicit for s in group),
        example=_build_example(trace, first, steps),
        worst=_build_example(trace, worst, steps) if waits else None,
        traces=[trace] if trace else [],
    )


def _build_example(trace: str, s: Sync, steps: Steps) -> Example:
    at = None if s.wait is None else s.at
    step = None if s.step == len(steps) else s.step
    return Example(trace=trace, ts=at, wait_us=s.wait, bubble_us=s.bubble, step=step, waited_for=s.waited_for)


def count_in_phase(site: Site, phase: str) -> float:
    """Return a site's count per step of a phase; over all steps where phases are unknown."""
    return site.count_per_phase.get(phase, 0.0) if site.count_per_phase else site.count_per_step or 0.0


class WorstStep(NamedTuple):
    """Hold the step that waits most often, of all traces and phases."""

    phase: str  # empty where phases are unknown
    waits: float  # waits of the step, at most: a site of several traces counts as in the worst one
    sites: list[Site]  # sites of its trace


def find_worst_step(sites: Sequence[Site]) -> WorstStep:
    """Return the step that waits most often; sites of different traces do not add up."""
    phases = dict.fromkeys(phase for site in sites for phase in site.count_per_phase) or [""]
    by_trace: dict[str, list[Site]] = {trace: [] for site in sites for trace in site.traces} or {"": []}
    for site in sites:
        for trace in site.traces or by_trace:
            by_trace[trace].append(site)
    steps = [
        WorstStep(phase, sum(count_in_phase(site, phase) for site in of_trace), of_trace)
        for of_trace in by_trace.values()
        for phase in phases
    ]
    return max(steps, key=lambda step: step.waits)


def merge_sites(per_trace: Sequence[Sequence[Site]], *, by_line: bool = False) -> list[Site]:
    """Merge the sites of several traces: the same place on several ranks is one site; with `by_line` lines stay apart.

    Counts, waits and bubbles add up. Count per step is that of the worst trace, as is the median wait: a step is as
    slow as its slowest rank. A p99 needs the samples, which several traces no longer have together, so it is the worst
    one's. If it is unknown for one trace what waited, it is unknown for both. Where only some traces have steps, the
    occurrences in the others are outside of steps.
    """
    groups: dict[tuple[str, int | None, bool, bool, str], list[Site]] = {}
    for site in itertools.chain.from_iterable(per_trace):
        key = (site.fingerprint, site.line if by_line else None, site.may_block, site.own, site.allowed)
        groups.setdefault(key, []).append(site)
    for group in groups.values():
        without_steps = [site for site in group if site.count_per_step is None]
        if len(without_steps) < len(group):
            total = sum(site.count for site in without_steps)
            for site in without_steps:
                site.outside = total
    return [functools.reduce(_add_site, group) for group in groups.values()]


def _add_site(a: Site, b: Site) -> Site:
    """Add a site of another trace to the same site of this one."""
    a.count += b.count
    a.count_per_phase = _join_phases(a, b)
    for way, names in (
        (sum, ("wait_us", "bubble_us", "bytes")),
        (max, ("count_per_step", "wait_median_us", "wait_p99_us")),
    ):
        for name in names:
            known = [value for value in (getattr(a, name), getattr(b, name)) if value is not None]
            setattr(a, name, way(known) if known else None)
    a.outside = max(a.outside, b.outside)
    a.waited = None if a.waited is None or b.waited is None else a.waited + b.waited
    a.warmup_only &= b.warmup_only
    a.explicit &= b.explicit
    a.called_from, a.cause = a.called_from or b.called_from, a.cause or b.cause
    a.threads = sorted({*a.threads, *b.threads})
    a.traces = [*a.traces, *b.traces]
    if a.worst and b.worst:
        a.worst = max(a.worst, b.worst, key=lambda e: (e.bubble_us or 0.0, e.wait_us or 0.0))
    return a


def _join_phases(a: Site, b: Site) -> dict[str, float]:
    """Return the larger count of each phase; none where a trace has steps and does not give their phases."""
    marked = [site.count_per_phase for site in (a, b) if site.count_per_step is not None]
    if not all(marked):
        return {}
    return {phase: max(counts.get(phase, 0.0) for counts in marked) for phase in itertools.chain(*marked)}
