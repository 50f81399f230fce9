"""What a bench is asked to do, what it says while it runs, and the record that it leaves: plain JSON. No torch.

job.json        BenchJob, written by bench.py, read by bench_worker.py
events.jsonl    Event, one line each, written by bench_worker.py while it runs
bench-NAME.json BenchRecord, in the folder given with -o

Times are microseconds and of one call. What was not measured is null, never 0.
"""

from __future__ import annotations

import msgspec

from dcpbench.records import Environment, Gpu

SCHEMA_VERSION = 1


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a bench's table, as asked for."""

    variant: str
    sizes: dict[str, int | float | str]
    """What it is measured at, by the name of the column, in the table's order."""
    calls: int
    """Calls in one pass over all layers (or steps); times are a pass's, divided by them."""

    def name(self) -> str:
        """`filter, 16 tokens, dcp 8, …`, for progress and messages."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.sizes.items())
        return f"{self.variant}, {sizes}"


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How every case is measured."""

    seconds: float = 0.3
    """Time limit of each of a case's timings; past it the timing is `noisy`."""
    precision: float = 0.01
    backlog_us: float = 100.0
    """GPU work queued before each call whose host time is taken."""
    seed: int = 0


class BenchJob(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one worker does."""

    bench: str
    device: str
    """`cuda` or `cpu`."""
    cases: list[Case]
    settings: BenchSettings = BenchSettings()
    command: str = ""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one call: a median over passes with its 95 % interval, and the slowest pass."""

    median_us: float
    low_us: float
    high_us: float
    max_us: float
    samples: int
    noisy: bool = False
    """The time limit came before the interval was within ±1 %."""
    unsettled: bool = False
    """Warm-up ended by time, not because two successive medians agreed."""
    samples_us: list[float] = []


class SyncSite(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a variant that synchronises."""

    kind: str
    op: str = ""
    function: str = ""
    file: str = ""
    line: int | None = None
    per_call: float = 0.0


class Syncs(msgspec.Struct, frozen=True, kw_only=True):
    """Host-blocking calls of one call, counted in a pass of its own."""

    per_call: float
    detector: str
    """`live` on a GPU, `dry-run` on the CPU."""
    sites: list[SyncSite] = []


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """What became of capturing a pass into a CUDA graph."""

    captured: bool
    reason: str = ""
    """Why it could not be captured, in the words of the error."""
    time: Timing | None = None
    """Of a replay: GPU time, no host time in it."""
    correct: bool | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for one case."""

    case: Case
    outcome: str = "ok"
    """`ok` or `failed`."""
    reason: str = ""
    """Why it failed."""
    correct: bool | None = None
    difference: str = ""
    """Where it differs from the reference."""
    time: Timing | None = None
    """Eager calls back to back, from one pass's start on the GPU to the next one's. Null on the CPU."""
    host: Timing | None = None
    """Host time inside a call while the GPU is `backlog_us` behind. Null on the CPU."""
    syncs: Syncs | None = None
    graph: Graph | None = None
    """Null where it was not tried: on the CPU, and for all but the first case of a variant that synchronises."""
    marks: list[str] = []
    """`noisy`, `unsettled`, `throttled`, `l2_warm`, as in records.jsonl."""
    gpu: Gpu | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a worker: its environment first, then what becomes of each case."""

    stage: str
    """`start`, then `case` and `done` (timed) for each case; after all of them `counted` for each, then `graph` for
    captures tried last, and `end`."""
    index: int = 0
    """Of the case, in the job."""
    environment: Environment | None = None
    result: Result | None = None
    syncs: Syncs | None = None
    graph: Graph | None = None


class BenchRecord(msgspec.Struct, kw_only=True):
    """`bench-NAME.json`: all of a run."""

    schema_version: int = SCHEMA_VERSION
    bench: str
    performance: bool
    """False on the CPU, where nothing is timed."""
    findings: list[str] = []
    """What the numbers say, in sentences made from them."""
    results: list[Result] = []
    settings: BenchSettings = BenchSettings()
    environment: Environment | None = None
    started_at: str = ""
    """UTC, ISO 8601."""
    seconds: float = 0.0
    """Wall time."""
