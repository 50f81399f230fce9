"""The record that one point leaves on disk: one JSON object per line of `records.jsonl`. No torch.

Units are part of each name (`_us`, `_ms`, `_bytes`, `_tok_s`). Absent measurements are null, never 0.
"""

from __future__ import annotations

import fnmatch
import os
from typing import TYPE_CHECKING

import msgspec

from dcpbench import checksums, record_checks
from dcpbench.choice_records import Choice
from dcpbench.choices import CLOSED, NO_EXCHANGE, OPTIONS, UNKNOWN, with_options
from dcpbench.errors import LayoutError, RecordsError
from dcpbench.layout import GroupWide, Layout
from dcpbench.serve_records import Load, ServeMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

SCHEMA_VERSION = 1
RECORDS_FILE = "records.jsonl"
ASIDE_FILE = "records.truncated.txt"
BEGUN = (".lock", "job-*.json")
"""Files of a run that may have no record yet (folders.py, jobs.py)."""
UNKNOWN_LAYOUT = "layout unknown"
SETTING = ", "
"""Stands between the settings of a point."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One layout × workload × load, as asked for."""

    model: str
    tp: int
    """0 where nobody knows the layout: of an import that does not say; dp and dcp likewise."""
    dp: int = 1
    dcp: int = 1
    workload: str = "decode"
    concurrency: int
    """Requests in flight over the whole layout; `serve`: at most."""
    context: int
    """Tokens already in the KV cache of each request; `serve`: the most tokens of a request, output included."""
    exchange: str = "none"
    """`ag_rs`, `a2a`, …; `auto` (see Record.choice); `none` where dcp is 1 and nothing is exchanged."""
    q_replicate: bool = False
    """Every rank computes the queries of all heads of its DCP group, and none are gathered."""
    project_first: bool = False
    """Partial outputs are projected to values before they are exchanged."""
    overlap: bool = False
    """The batch in two halves, one half's exchange beside the other half's attention."""
    all_reduce: str = "nccl"
    """How partial sums of tensor parallelism are reduced."""
    backend: str
    """The attention kernel; of an import the engine, which chose its own."""
    dtype: str
    page_size: int = 1
    interleave: int = 1
    weights: str = "synthetic"
    """`synthetic`, or the folder of a checkpoint."""
    repeat: int = 0
    """Which pass over the whole sweep this is, from 0."""
    load: Load | None = None
    """Null for `decode`."""
    settings: str = ""
    """Of an import: what its benchmark varied of the server or the load and no other field says, such as
    `max_num_seqs=4`; comma list."""

    @property
    def layout(self) -> Layout:
        """The point's layout. Raises LayoutError where degrees do not nest."""
        return Layout(tp=self.tp, dp=self.dp, dcp=self.dcp)

    @property
    def layout_name(self) -> str:
        """As printed; for degrees that do not nest, those that were asked for."""
        if not self.tp:
            return UNKNOWN_LAYOUT
        try:
            return str(self.layout)
        except LayoutError:
            return f"tp{self.tp}·dp{self.dp}·dcp{self.dcp}"

    @property
    def group_wide(self) -> GroupWide:
        """What each rank holds for all heads of its DCP group."""
        return GroupWide(query=self.q_replicate, value=self.project_first)

    @property
    def clients(self) -> int | None:
        """Of a closed loop, each with one request in flight; None where requests come whatever is answered."""
        return self.concurrency if self.load is not None and self.load.arrival == CLOSED else None

    def exchange_label(self) -> str:
        """The exchange with the options that are on: `a2a +q-replicate`; empty without one that is known."""
        if self.exchange in (NO_EXCHANGE, UNKNOWN):
            return ""
        return with_options(self.exchange, [name for name in OPTIONS if getattr(self, name)])

    def key(self) -> str:
        """Everything that makes this point itself; `--resume` and comparisons match on it.

        The same for a point for ever: what was added to points later is in it only where it says something.
        """
        names = (name for name in self.__struct_fields__ if name != "settings" or self.settings)
        return "/".join(f"{name}={getattr(self, name)}" for name in names)

    def same_but_repeat(self) -> str:
        """Key without the repeat, equal for all measurements of the same thing."""
        return msgspec.structs.replace(self, repeat=0).key()


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A median with its 95 % confidence interval (order statistics, stats.median_interval)."""

    median: float
    low: float
    high: float
    samples: int


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """p50 to p99; null where there are too few samples (stats.percentile)."""

    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    samples: int = 0


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload measured; definitions in metrics.py."""

    step_ms: Interval
    """Slowest rank's time from graph launch to the step's end."""
    itl_ms: Percentiles
    """Gap between two tokens of a request: one step. Samples are steps."""
    output_tok_s: Interval
    output_tok_s_per_gpu: float
    tok_s_per_user: float
    ttft_ms: Percentiles | None = None
    """Null for `decode`: nothing is prefilled."""
    step_samples_ms: list[float] = []
    """Every step sample, in order, so that others can compute their own statistics."""


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's time goes, from a separate profiled pass on rank 0; never mixed with `step_ms`."""

    step_us: float
    """Mean time of the profiled steps, from one step's first kernel to the next one's, back to back."""
    phase_us: dict[str, float]
    """GPU time by range name (ranges.PHASES); sums with `idle_us` to `step_us`."""
    idle_us: float
    """No kernel running."""
    idle_fraction: float
    kernels: int
    """Kernels in one step."""
    steps: int


class SyncSite(msgspec.Struct, frozen=True, kw_only=True):
    """A place where the host waited for the GPU in a profiled step (`dcpbench syncs`), profiled on rank 0."""

    found_in: str
    """`eager`, where a captured graph would hide it, `replay`, or `serve`: a turn of the serving loop."""
    rule: str
    """Id such as SYNC001; docs/syncs.md has a sentence for each."""
    kind: str
    call: str
    """Runtime call that blocked."""
    op: str = ""
    function: str = ""
    file: str = ""
    line: int | None = None
    per_step: float
    wait_us: float
    """Median of one occurrence; profiled, so no share of `step_ms`."""
    bubble_us: float | None = None
    """GPU idle time that removing one occurrence would win, at most; their mean."""


class Kv(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache of the point."""

    pool_bytes_per_gpu: int
    bytes_per_token_per_gpu: float
    """What a token takes, all layers, averaged over the layout's GPUs: full rows / (dp · dcp)."""
    capacity_tokens: int
    """Tokens that the layout's pools hold, all replicas together, each token counted once."""
    capacity_requests: int
    """Requests of this point's context that fit at once."""
    bounded_by: str
    """`weights` (what all weights leave), `kv_memory` (--kv-memory) or `sweep` (sized for the largest point, because
    not all weights fit and a capacity beside them would be fiction)."""
    fragmentation: float
    """Share of allocated rows that hold no token (page and stripe rounding)."""


class Honesty(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader must know before believing the numbers."""

    weights: str
    layers: int
    layers_held: int
    """Distinct layers in memory; fewer than `layers` means that they were cycled through."""
    full_weights_bytes_per_gpu: int
    kv: str = "synthetic"
    """What the KV cache held: `synthetic` random rows, or the prompts and answers that were `served`."""
    graph_error: float | None = None
    """‖logits of the replayed graph − logits of the eager step‖ / ‖the latter‖, worst rank; null without a graph."""
    attention_error: float | None = None
    """‖o − o_fp64‖ / ‖o_fp64‖ of this point's merged attention output, worst rank."""
    experts_hit: float | None = None
    """Mean share of all experts that a layer's tokens were routed to."""
    graph_batch: int | None = None
    """Rows per replica in the captured graph; more than the requests means padding rows on slot 0."""
    cuda_graph: bool = False
    step_times: str = ""
    """Of a replay: the file that its step times come from; not measured with this point."""
    step_error: float | None = None
    """Of a replay: largest |predicted / measured - 1| of the steps that were measured to check predictions."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """State of the GPUs while the point was measured (NVML); worst over ranks."""

    sm_clock_mhz_min: int | None = None
    sm_clock_mhz_max: int | None = None
    power_w_max: float | None = None
    temperature_c_max: int | None = None
    throttle_reasons: list[str] = []


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where the record was taken."""

    device: str
    """`NVIDIA H200`, or `CPU`."""
    device_count: int
    device_memory_bytes: int | None = None
    l2_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str = ""
    triton: str | None = None
    nccl: str | None = None
    flashinfer: str | None = None
    python: str = ""
    dcpbench: str = ""
    settings: dict[str, str] = {}
    """Environment variables that change how collectives run: NCCL_* and TORCH_NCCL_*."""
    git_commit: str | None = None
    host_hash: str = ""
    """First 12 hex digits of SHA-256 of host name, machine id and GPU UUIDs: equal on one machine, not reversible."""
    command: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of records.jsonl."""

    schema_version: int = SCHEMA_VERSION
    point: Point
    outcome: str
    """`ok`, `failed`, `hung`, `rejected`."""
    reason: str | None = None
    """Why the outcome is not `ok`, with the next thing to try."""
    detail: dict[str, str] = {}
    """For failures: exit code, last log lines, stacks."""
    marks: list[str] = []
    """What to be careful about; reports/explain.py lists them, with a sentence for each."""
    metrics: Metrics | None = None
    """Of the workload `decode`."""
    serve: ServeMetrics | None = None
    """Of the workload `serve`."""
    phases: Phases | None = None
    host_syncs_per_step: float | None = None
    """Host-blocking CUDA calls inside one step, from the profiled pass."""
    sync_sites: list[SyncSite] = []
    """Where they are, worst first; at most 8."""
    allocations_per_step: float | None = None
    """Calls to the CUDA allocator (cudaMalloc and its like) while the steps were timed, divided by the steps."""
    host_plan_us: float | None = None
    """Host time to plan one step (index building, copies, backend plan), slowest rank; not in `step_ms`."""
    kv: Kv | None = None
    memory_peak_bytes: int | None = None
    honesty: Honesty | None = None
    choice: Choice | None = None
    """Null where the point names its backend and its exchange."""
    gpu: Gpu | None = None
    environment: Environment | None = None
    measured_with: dict[str, int | float | bool | str | dict[str, float] | None] = {}
    """jobs.Settings as they were in force, whether typed, from a file or by default."""
    started_at: str = ""
    """UTC, ISO 8601."""
    seconds: float = 0.0
    """Wall time the point took, set-up included."""
    origin: str | msgspec.UnsetType = msgspec.UNSET
    """Of an import: the tool that measured it (choices.ENGINES). Not in the line of a record of our own."""


class _Version(msgspec.Struct):
    schema_version: int


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a line that is no record raises."""
NUL = b"\0"
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)
_version_decoder = msgspec.json.Decoder(_Version)


class RecordFile:
    """Append-only `records.jsonl` of one run; each line is on disk before `append` returns. One writer at a time."""

    def __init__(self, folder: Path, name: str = RECORDS_FILE) -> None:
        self.path = folder / name

    def append(self, record: Record) -> None:
        """Write one record, flushed and synced.

        A last line that a crash cut short goes to `records.truncated.txt` first, never lost.
        """
        _end_last_line(self.path)
        with self.path.open("ab") as f:
            f.write(checksums.seal(_encoder.encode(record)) + b"\n")
            f.flush()
            os.fsync(f.fileno())


def read_records(folder: Path) -> list[Record]:
    """All records of a run folder, or of a records.jsonl given directly.

    A last line that was cut short, or ends in the NULs of a power cut, is left out: a crash did it, or the line is
    being written right now. Reading never changes the file; the next `RecordFile.append` puts such a line aside.
    Raises RecordsError for a file that is missing or cannot be read, for damage anywhere else, as in a line that its
    checksum (checksums.py) does not fit, for values that cannot be (record_checks.py) and for records of another
    version.
    """
    return list(iter_records(folder))


def iter_records(folder: Path) -> Iterator[Record]:
    """The same one by one, so that what is not needed of each need not stay in memory."""
    path = folder / RECORDS_FILE if folder.is_dir() else folder
    if not path.is_file():
        raise RecordsError(_no_records(folder))
    try:
        with path.open("rb") as f:
            yield from records_in(f, path)
    except OSError as e:
        raise RecordsError(f"{path} cannot be read: {e}; name another folder.") from e


def records_in(lines: Iterable[bytes], path: Path) -> Iterator[Record]:
    """The same of an open file, called `path` where something is wrong with it."""
    for number, whole in enumerate(lines, 1):
        line = whole if whole.endswith(b"\n") else whole.rstrip(NUL)
        if line.strip():
            try:
                yield decode(line)
            except UNREADABLE as e:
                if _cut_short(line, e):
                    return
                raise RecordsError(f"{path}, line {number}: {record_checks.why(line, e)}") from e


def _no_records(folder: Path) -> str:
    """What a folder or file is that was taken for a run, and what to type."""
    name = "name the folder of a run, such as those in runs/."
    try:
        inside = [path.name for path in folder.iterdir()] if folder.is_dir() else None
    except OSError as e:
        return f"{folder} cannot be read ({e.strerror}); {name}"
    if inside is None:
        return f"{folder} is no file of records; {name}" if folder.exists() else f"{folder} does not exist; {name}"
    if not inside:
        return f"{folder} is empty; `dcpbench sweep -o {folder}` would fill it, or {name}"
    if any(fnmatch.fnmatch(file, begun) for file in inside for begun in BEGUN):
        return f"{folder} holds no record yet; `dcpbench top {folder}` shows what its run is at."
    return f"{folder} holds no {RECORDS_FILE}, so it is no run; name the folder of one, such as those in runs/."


def cut_short(folder: Path) -> bool:
    """Whether the last line of a record file is not whole, and so is left out."""
    path = folder / RECORDS_FILE if folder.is_dir() else folder
    whole = _last_line(path)
    line = whole.rstrip(NUL)
    try:
        decode(line)
    except UNREADABLE as e:
        return bool(whole) and (not line or _cut_short(line, e))
    return False


def _cut_short(line: bytes, error: Exception) -> bool:
    """Whether a line that cannot be read is the beginning of a record at the end of its file."""
    return (
        not line.endswith(b"\n") and line.lstrip().startswith(b"{") and not isinstance(error, msgspec.ValidationError)
    )


def decode(line: bytes) -> Record:
    """The record of one line, held against its checksum before anything else. Raises UNREADABLE."""
    checksums.check(line)
    try:
        record = _decoder.decode(line)
    except msgspec.ValidationError:
        _check_version(_version_decoder.decode(line).schema_version)
        raise
    _check_version(record.schema_version)
    if found := record_checks.problem(record, line):
        raise msgspec.ValidationError(found)
    return record


def _check_version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise record_checks.OtherVersionError(f"schema_version {version}, while this dcpbench reads {SCHEMA_VERSION}")


def _last_line(path: Path) -> bytes:
    try:
        return record_checks.last_line(path)
    except OSError as e:
        raise RecordsError(f"{path} cannot be read: {e}; name another folder.") from e


def _end_last_line(path: Path) -> None:
    """Make the file end with a newline: complete a whole last line, move half of one to the file aside."""
    whole = record_checks.last_line(path) if path.exists() else b""
    if not whole:
        return
    line = whole.rstrip(NUL)
    begin = path.stat().st_size - len(whole)
    try:
        decode(line)
    except UNREADABLE:
        with (path.parent / ASIDE_FILE).open("ab") as f:
            f.write(line + b"\n")
        os.truncate(path, begin)
    else:
        os.truncate(path, begin + len(line))
        with path.open("ab") as f:
            f.write(b"\n")
