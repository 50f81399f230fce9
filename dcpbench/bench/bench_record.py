"""Data of a bench as plain JSON: its job, its events while it runs, and its record. No torch.

job.json        BenchJob, written by runner.py, read by every rank of bench_worker.py
events.jsonl    Event, one line each, written by rank 0 of bench_worker.py while it runs
bench-NAME.json BenchRecord, in the folder given with -o

Times are microseconds per call, of the slowest rank. Values that were not measured are null, never 0.
"""

from __future__ import annotations

import msgspec

from dcpbench.launch.version_check import Package
from dcpbench.points.roofline import OperatorCost
from dcpbench.records.record import Environment, Gpu

SCHEMA_VERSION = 1


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a bench's table, as requested."""

    variant: str
    sizes: dict[str, int | float | str]  # sizes by the name of the column, in the table's order
    calls: int  # calls of one pass over all layers or steps, by which its time is divided; 0: chosen by the bench

    def name(self) -> str:
        """Return `filter, 16 tokens, dcp 8, …`, for progress and messages."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.sizes.items())
        return f"{self.variant}, {sizes}"


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement settings of all cases."""

    seconds: float = 0.3  # time limit of each timing of a case; a timing that exceeds it is `noisy`
    precision: float = 0.01
    seed: int = 0


class BenchJob(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one worker does."""

    bench: str
    device: str  # `cuda` or `cpu`
    ranks: int = 1
    cases: list[Case]
    settings: BenchSettings = BenchSettings()
    command: str = ""
    package: Package | None = None  # package of the command, as in launch.jobs.Job


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of this machine, measured before the cases of the same run; the slowest rank's."""

    name: str  # `read`, `copy` (counts twice), `matmul` (bf16), `peer` (neighbour's memory), `barrier`, NCCL's smallest
    unit: str  # `B/s`, `FLOP/s` or `s`
    median: float
    low: float
    high: float
    samples: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one call: a median over passes with its 95 % interval, and the slowest pass."""

    median_us: float
    low_us: float
    high_us: float
    max_us: float
    samples: int
    noisy: bool = False  # the time limit came before the interval was within ±1 %
    unsettled: bool = False  # warm-up ended by time, not because two successive medians agreed
    samples_us: list[float] = []


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement of a pass in a CUDA graph."""

    time: Timing | None = None  # GPU time of a replay, without host time
    correct: bool | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one case."""

    case: Case
    outcome: str = "ok"  # `ok` or `failed`
    reason: str = ""  # reason of the failure
    calls: int = 0  # calls of a pass
    correct: bool | None = None
    difference: str = ""  # position of the first difference from the reference
    error: float | None = None  # ‖x − ref‖ / ‖ref‖ against fp64, worst rank; null if results must be bitwise equal
    work: OperatorCost | None = None
    floor_us: float | None = None  # lower bound by points.roofline; null on the CPU, and if a limit is unknown
    bytes_s: float | None = None  # `work` over the time in a graph
    flop_s: float | None = None
    received_bytes_s: float | None = None
    time: Timing | None = None  # eager calls back to back, from the start of one pass to the next; null if not timed
    graph: Graph | None = None  # null on the CPU
    warnings: list[str] = []  # `noisy`, `unsettled`, `throttled`, `l2_warm`, as in records.jsonl
    gpu: Gpu | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a worker: its environment first, then the progress of each case."""

    stage: str  # `start`, `limits`, then `case` and `done` for each case, and `end`
    index: int = 0  # index of the case in the job
    environment: Environment | None = None
    limits: list[Limit] = []
    unmeasured: list[str] = []  # limits that could not be measured, each with its reason
    result: Result | None = None


class BenchRecord(msgspec.Struct, kw_only=True):
    """`bench-NAME.json`: all of a run."""

    schema_version: int = SCHEMA_VERSION
    bench: str
    performance: bool  # false on the CPU, where no times are taken
    findings: list[str] = []  # findings in sentences generated from the numbers
    ranks: int = 1
    limits: list[Limit] = []  # measured before the cases; none on the CPU, and none for a bench that needs none
    unmeasured: list[str] = []  # limits that could not be measured, each with its reason
    results: list[Result] = []
    settings: BenchSettings = BenchSettings()
    environment: Environment | None = None
    started_at: str = ""  # UTC, ISO 8601
    seconds: float = 0.0  # wall time
