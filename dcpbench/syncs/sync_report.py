"""Define the report of every detector: sites, their cost, and what the detector could not see; the JSON of `syncs`.
Its schema: `python -m dcpbench.syncs.sync_report > docs/syncs.schema.json`.

Times are microseconds. A detector leaves values that it cannot know at None: nothing here is guessed.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Number = TypeVar("Number", int, float)
SCHEMA_VERSION = 1


class ChildProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that the program started, and that was not followed."""

    pid: int | None = None
    command: str = ""  # command line of the process, or name and target of a multiprocessing.Process
    start_method: str = ""  # start method of the process: `multiprocessing spawn`, `os.fork`, `subprocess`, …
    may_use_gpu: bool = True  # False for harmless programs (git) and dry-run processes that ended without torch
    reason: str = ""  # why it was not followed


class Coverage(msgspec.Struct, kw_only=True):
    """Coverage of a detector: what it observed of the program, and sentences on what it cannot show."""

    detector: Literal["scan", "live", "dry-run"]
    gpu_events: int = 0  # kernels, copies and fills on the GPU
    runtime_events: int = 0  # calls of the CUDA or HIP runtime
    driver_events: int = 0  # calls of the driver API
    sync_events: int = 0  # `cuda_sync` events, which also show what the driver API and other libraries wait for
    ops: int = 0  # operators of the framework (`cpu_op`)
    stacks: Literal["python_function", "call stack", "frames", "none"] = "none"  # `frames`: read live, with line
    steps_from: str = ""  # common part of the names of the ranges that are steps; empty if no steps were found
    steps_by_phase: dict[str, int] = {}  # steps per phase, such as decode, if an engine annotates them
    steps_share: float | None = None  # share of GPU time or launches in steps, whichever is smaller
    steps_guessed: bool = False  # True if steps are numbered ranges over most of the work; no warm-up then
    unreadable_events: int = 0
    complete: bool = True  # False if the file ends early, parts of it could not be read, or it contradicts itself
    damage: list[str] = []  # why it is incomplete: clauses after the trace's name, each with a remedy
    foreign: list[str] = []  # traces of accelerators with unknown waits: categories of events, or names of calls
    unmeasured: list[str] = []  # dry run: operators without a measurement of waits, such as `mylib::sample`
    children: list[ChildProcess] = []  # processes of which a dry run has no report; the others are traces
    notes: list[str] = []  # limits of this detector, or of this trace; one sentence each


class TraceSummary(msgspec.Struct, kw_only=True):
    """A trace, or a process observed live."""

    path: str
    rank: int | None = None
    world_size: int | None = None  # number of ranks of the program, where the trace holds it
    dp_rank: int | None = None  # data-parallel rank that the file's name gives; `rank` may count within it
    pp_rank: int | None = None  # pipeline-parallel rank that the file's name gives
    front_end: bool = False  # True for a process without GPU use while others use one; not in the verdict
    steps: int | None = None
    span_us: float | None = None  # first to last event on host or GPU
    gpu_busy_us: float | None = None  # time in which at least one stream had work
    gpu_idle_us: float | None = None  # time between the first and the last GPU event in which none had
    coverage: Coverage


class Example(msgspec.Struct, kw_only=True):
    """An occurrence of a site."""

    trace: str
    ts: float | None = None  # start of the blocking call on the trace's own clock
    wait_us: float | None = None
    bubble_us: float | None = None
    step: int | None = None
    waited_for: str = ""  # last GPU work to end before the host went on


class CallLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a function that can make a blocking call."""

    line: int
    text: str


class Site(msgspec.Struct, kw_only=True):
    """A place in code that synchronises, whatever number of times."""

    fingerprint: str
    rule: str  # stable id, such as SYNC001; see rules.py
    kind: str  # the rule's name, such as scalar-read
    op: str = ""  # innermost operator around the blocking call; empty if there is none
    op_chain: list[str] = []  # operators around the blocking call, outermost first
    function: str = ""  # the user's innermost function; empty without Python stacks
    file: str = ""  # file of the call, relative to the repository if it is inside
    line: int | None = None  # line of the call if `line_is` marks it so, else the function's first line
    line_is: Literal["call", "function", ""] = ""
    call_lines: list[CallLine] = []  # lines of the function that can make the call; empty if `line` is it or unknown
    stack: list[str] = []  # Python frames, `file(line): function`, outermost first
    called_from: str = ""  # first frame outside libraries (traces: of another package) of a site in a library
    range: str = ""  # innermost `record_function` range that is not a step
    direction: str = ""  # direction of the copy: DtoH, HtoD, DtoD; with the host's memory if known: `DtoH pageable`
    call: str = ""  # runtime or driver call that blocked: cudaStreamSynchronize, or `cudaMemcpyAsync` for a copy
    threads: list[str] = []
    count: int = 0
    waited: int | None = None  # occurrences with ending GPU work or above 50 µs; None without GPU events or times
    count_per_step: float | None = None  # mean of steady steps (not the first of ≥ 3), largest phase; None: no steps
    count_per_phase: dict[str, float] = {}  # mean over steady steps per phase, such as decode; empty if unknown
    outside: int = 0  # occurrences outside steps (also in traces without any, if others have some), except warm-up
    warmup_only: bool = False  # seen before the first step or in it, but in none of at least two others
    wait_us: float | None = None  # sum over all occurrences
    wait_median_us: float | None = None
    wait_p99_us: float | None = None  # p99 of the wait; None with fewer than 662 occurrences, as for every p99
    bubble_us: float | None = None  # sum of the GPU idle time that removing each one saves at most; None if unknown
    bytes: int | None = None  # sum over all occurrences
    may_block: bool = False  # True if the call can wait but did not, or times are missing; in no total or gate
    explicit: bool = False  # requested by name, as a stack shows: synchronize() of a device, stream or event
    cause: str = ""  # probable cause of the site, if other calls of the trace show it; a sentence
    own: bool = False  # the profiler's or detector's own; in no total
    allowed: str = ""  # why it may synchronise, from `allow`, vLLM's `gpu_sync_allowed` or the gate; else empty
    example: Example | None = None  # the first occurrence
    worst: Example | None = None  # the one with the largest bubble, then wait
    traces: list[str] = []  # traces in which it occurs


class Totals(msgspec.Struct, kw_only=True):
    """Totals over all traces. Calls of the profiler and calls that only may block are excluded."""

    syncs: int = 0
    sites: int = 0
    wait_us: float | None = None
    bubble_us: float | None = None


class Finding(msgspec.Struct, kw_only=True):
    """A reason for the gate to fail."""

    reason: Literal["sync", "new", "more", "per-step", "bubble"]
    message: str
    fingerprint: str = ""  # site it is about; empty where it is about all of them


class Verdict(msgspec.Struct, kw_only=True, dict=True):
    """Verdict of the gate."""

    status: Literal["clean", "findings", "cannot answer"] = "clean"
    exit_code: Literal[0, 1, 3] = 0
    findings: list[Finding] = []
    allowed: dict[str, str] = {}  # fingerprint -> reason; lines of a function share one, unlike `Site.allowed`
    stale: list[str] = []  # allow-list and baseline entries that matched nothing, one sentence each
    reasons: list[str] = []  # why the trace cannot answer

    @functools.cached_property
    def findings_by_site(self) -> dict[str, list[Finding]]:
        """Return the findings by fingerprint, and by "" those about all sites; the verdict must not change any more."""
        found: dict[str, list[Finding]] = {}
        for finding in self.findings:
            found.setdefault(finding.fingerprint, []).append(finding)
        return found


class Report(msgspec.Struct, kw_only=True):
    """Result of `scan`, `run`, `dry-run` or `watch()`."""

    schema_version: int = SCHEMA_VERSION
    traces: list[TraceSummary] = []
    sites: list[Site] = []  # worst first: by bubble, then wait, then count
    totals: Totals = msgspec.field(default_factory=Totals)
    verdict: Verdict = msgspec.field(default_factory=Verdict)


def get_sort_key(site: Site) -> tuple[int, float, float, int, str, int, str]:
    """Sort key: worst site first, then what may block, the profiler's own last."""
    return (
        site.own + site.own + site.may_block,
        -(site.bubble_us or 0.0),
        -(site.wait_us or 0.0),
        -site.count,
        site.file,
        site.line or 0,
        site.fingerprint,
    )


def sum_totals(sites: list[Site]) -> Totals:
    """Return the sums over the program's own sites, without those that only may block."""
    mine = [s for s in sites if not (s.own or s.may_block)]
    return Totals(
        syncs=sum(s.count for s in mine),
        sites=len(mine),
        wait_us=sum_known(s.wait_us for s in mine),
        bubble_us=sum_known(s.bubble_us for s in mine),
    )


def sum_known(values: Iterable[Number | None]) -> Number | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def rename_traces(report: Report, names: Mapping[str, str]) -> None:
    """Rename traces in place, by their names so far; other traces keep their names."""
    for trace in report.traces:
        trace.path = names.get(trace.path, trace.path)
    for site in report.sites:
        site.traces = [names.get(path, path) for path in site.traces]
        for example in filter(None, (site.example, site.worst)):
            example.trace = names.get(example.trace, example.trace)


def build_report(traces: list[TraceSummary], sites: list[Site]) -> Report:
    """Return a report of sites in any order; the gate adds the verdict."""
    return Report(traces=traces, sites=sorted(sites, key=get_sort_key), totals=sum_totals(sites))


def encode_json(value: msgspec.Struct) -> str:
    """Encode a report or a baseline as JSON with one field per line, so that diffs show only changed fields."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def build_json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of the output of `--format json`, in which every field is always present."""
    made = msgspec.json.schema(Report)
    definitions = made["$defs"]
    for definition in definitions.values():
        definition["required"] = list(definition["properties"])
        for field in definition["properties"].values():
            field.pop("default", None)
    definitions["Report"]["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Report of dcpbench syncs"}
    return {**head, "$ref": made["$ref"], "$defs": dict(sorted(definitions.items()))}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(build_json_schema(), indent=2, ensure_ascii=False) + "\n")
