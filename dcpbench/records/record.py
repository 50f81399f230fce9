"""Define the record of one point on disk: one JSON object per line of `records.jsonl`. No torch.

Units are part of each name (`_us`, `_ms`, `_bytes`, `_tok_s`). Absent measurements are null, never 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import msgspec

from dcpbench.points.bounds import Count, Number, PositiveNumber, Rate, SignedCount, SignedNumber
from dcpbench.points.comm_model import Prompts
from dcpbench.points.memory import PAGES_OF_PADDING, count_pages
from dcpbench.points.names import AUTO, BACKENDS, ENGINE_NAMES, FP8, NO_EXCHANGE, UNKNOWN
from dcpbench.points.point import Point
from dcpbench.records.model_sizes import ModelSizes

if TYPE_CHECKING:
    from dcpbench.points.budget import EnginePlan

OURS = "dcpbench"  # origin of points measured by this package
CPU = "CPU"  # environment.device of a run without GPUs
SCHEMA_VERSION = 1

THROTTLE_BITS = {  # bits of nvmlDeviceGetCurrentClocksEventReasons; idle and application clocks are not among them
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}


def decode_throttle_reasons(bits: int) -> list[str]:
    """Return the names of the set bits."""
    return [name for bit, name in THROTTLE_BITS.items() if bits & bit]


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a median with its 95 % confidence interval (order statistics, stats.compute_median_interval)."""

    median: Number
    low: Number
    high: Number
    samples: Count
    autocorrelation: SignedNumber | None = None  # between neighbouring samples; None for fewer than 4
    effective_samples: Number | None = None  # independent samples of the same precision; None in the same cases


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Hold p50 to p99; null where there are too few samples (stats.compute_percentile)."""

    p50: Number | None = None
    p90: Number | None = None
    p95: Number | None = None
    p99: Number | None = None
    samples: Count = 0


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the measurements of the workload; definitions in formulas.py."""

    step_ms: Interval  # slowest rank's time from graph launch to the step's end
    itl_ms: Percentiles  # gap between two tokens of a request: one step, or 0 within a step; a sample per step
    output_tok_s: Interval
    output_tok_s_per_gpu: Number
    tok_s_per_user: Number
    ttft_ms: Percentiles | None = None  # time to first token; null for `decode`, which does not prefill
    step_samples_ms: list[PositiveNumber] = []  # step samples in order, so that others can compute their own statistics


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a rank that the others of a step have to wait for."""

    rank: Count
    phase: str  # `plan`: its host planned a step more slowly · `step`: its GPU ran at a lower clock
    share: Number  # relative slowdown against the median of the other ranks: 0.1 is 10 %
    value: Number  # host time to plan (µs) or lowest GPU clock (MHz) of this rank
    others: Number  # median of the other ranks


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the breakdown of a step's time, from a separate profiled pass; never mixed with `step_ms`.

    The pass is that of rank 0 in dcpbench's engine. For another engine it is that of the rank with the shortest communication, for which the
    others wait.
    """

    step_us: Number
    """Time of the profiled step, from its first kernel to the next step's: the mean over steps of dcpbench's engine, back to back. For
    another engine the sum of the medians of its parts and of `idle_us`, without `host_wait_us`."""
    phase_us: dict[str, Number]
    """GPU time by range name (ranges.PHASES), or by part of an engine's step (syncs.kernel_time.PARTS).

    With `idle_us` it sums to `step_us`: where kernels overlap, each moment counts for the one that began first.
    """
    idle_us: SignedNumber  # time without a running kernel
    idle_fraction: SignedNumber
    kernels: Count  # kernels in one step
    steps: Count
    host_wait_us: Number | msgspec.UnsetType = msgspec.UNSET
    """Median time in which the GPU waits for the host to launch its next work, if the step with it is longer than the one that was
    timed without the profiler; it is not in `step_us`. Shorter waits are idle time, and this is 0. Unset for dcpbench's engine, and in
    records of engines with a mean `step_us` that includes all waits."""
    disturbed: Count | msgspec.UnsetType = msgspec.UNSET  # profiled steps 3 % above `step_us`; unset as `host_wait_us`

    @property
    def sum_error(self) -> float:
        """Return (phases + idle time) / step - 1: 0 if the phases add up to the step."""
        return (sum(self.phase_us.values()) + self.idle_us) / self.step_us - 1 if self.step_us else 0.0


MAX_DISTURBANCE = 0.03  # share by which a profiled step may exceed the typical or timed one, before it is disturbed
MAX_SUM_ERROR = 0.03  # maximum deviation of the sum of phases from their step without the warning PHASES_DIFFER
WRONG_RESULTS = ("graph_differs", "inaccurate")  # warnings of points that computed wrong results
PHASES_DIFFER = "phases_differ"  # warning of a point with phases that do not add up to its profiled step


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the measured rates of the machine: medians of a short burst once per job before its points, for the slowest rank.

    Null if a rate could not be measured; rates between GPUs are null with a single GPU.
    """

    read_bytes_s: Rate | None = None  # read bandwidth of device memory, for a kernel that only reads
    copy_bytes_s: Rate | None = None  # copy bandwidth of device memory; bytes count twice, read and written
    matmul_flop_s: Rate | None = None  # rate of a large matrix product in bf16
    matmul_fp8_flop_s: Rate | None = None  # the same product in fp8; null also if no point of the job has fp8 operands
    peer_bytes_s: Rate | None = None  # bandwidth when every rank reads its neighbour's memory
    barrier_us: Number | None = None  # duration of a barrier of all ranks in symmetric memory
    unmeasured: list[str] = []  # rates that could not be measured, each with its reason

    @property
    def limits(self) -> dict[str, float]:
        """Return the known rates by the names of points.roofline, in bytes/s, operations/s and s."""
        found = {
            "read": self.read_bytes_s,
            "copy": self.copy_bytes_s,
            "matmul": self.matmul_flop_s,
            "matmul_fp8": self.matmul_fp8_flop_s,
            "peer": self.peer_bytes_s,
            "barrier": None if self.barrier_us is None else self.barrier_us * 1e-6,
        }
        return {name: rate for name, rate in found.items() if rate}


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the minimum time of a step of this point on a machine of these `rates` (roofline); see points/roofline.py."""

    floor_ms: Number  # lower bound of the whole step: the sum over its phases
    phase_floor_us: dict[str, Number]  # lower bounds by range, as `phases.phase_us`; absent: no necessary work
    experts: str  # `routed` if the experts that tokens were sent to count, `expected` if as many as expected


class SyncSite(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a place where the host waited for the GPU in a profiled step (`dcpbench syncs`), on rank 0."""

    found_in: str  # `eager` (a graph would hide it), `replay`, `serve` (serving loop), `engine` (a server, worst rank)
    rule: str  # id such as SYNC001; docs/syncs.md has a sentence for each
    kind: str
    call: str  # runtime call that blocked
    op: str = ""
    function: str = ""
    file: str = ""
    line: Count | None = None
    per_step: Number
    wait_us: Number  # median of one occurrence; profiled, so no share of `step_ms`
    bubble_us: Number | None = None  # GPU idle time that removing one occurrence would win, at most; their mean


class Emulated(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the model that replaces the other ranks of an emulated point; see docs/emulation.md."""

    machine: str  # machine that the communication model describes (points/cluster_specs.py)
    sha256: str = ""  # SHA-256 of the machine's file; empty for a machine that only a table describes
    measured: str = ""  # origin of the measurements of communication, or of those that it was scaled from
    rank: Count = 0  # rank that was computed: 0, with the most tokens, and in each layer the busiest experts
    calls: Count  # number of modelled exchanges between ranks in a step
    comm_us: Number  # modelled duration of these exchanges; included in `step_ms`
    comm_low_us: Number  # lower bound of `comm_us` by the error of the model
    comm_high_us: Number  # upper bound
    ranks_low: Number = 0.0  # share by which the other ranks may make a step shorter, added to the interval
    ranks_high: Number = 0.0  # share by which they may make it longer, added to the interval
    prompts: tuple[Prompts, ...] = ()  # excess of predicted prompt steps over this rank's, from the machine's file
    chunks_low: Number = 0.0  # share by which a prompt step may be shorter, if more than both errors together
    chunks_high: Number = 0.0  # share by which it may be longer, under the same condition
    output_tok_s_low: Number | None = None
    output_tok_s_high: Number | None = None
    ttft_p50_ms_low: Number | None = None
    ttft_p50_ms_high: Number | None = None
    itl_p50_ms_low: Number | None = None
    itl_p50_ms_high: Number | None = None
    """Minimum and maximum over three replays: with the forecast steps, with steps shortened, and with steps lengthened
    by the relative error of the largest decode step; steps with prompts use `chunks_low` and `chunks_high` if that is
    more. The bounds of TTFT and ITL are at least as far apart as the errors of published forecasts
    (points/latency_bands.py).
    """


class Kv(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the KV cache of the point."""

    pool_bytes_per_gpu: Count
    bytes_per_token_per_gpu: Number  # KV bytes of a token over all layers, mean of the GPUs: full rows / (dp · dcp)
    capacity_tokens: Count  # tokens that the layout's pools hold, all replicas together, each token counted once
    capacity_requests: Count  # requests of this point's context that fit at once
    bounded_by: str  # limit: `weights` (memory left by all), `kv_memory`, `sweep` (largest point; weights do not fit)
    fragmentation: Number  # share of allocated rows that hold no token (page and stripe rounding)

    @classmethod
    def from_plan(cls, plan: EnginePlan, tokens: int, fragmentation: float = 0.0) -> Kv:
        """Return the KV capacity of an engine, for requests of `tokens` tokens."""
        point, layout = plan.point, plan.point.layout
        pages = plan.pages - PAGES_OF_PADDING
        per_page = point.page_size * point.dcp
        return cls(
            pool_bytes_per_gpu=plan.kv_bytes,
            bytes_per_token_per_gpu=plan.kv_bytes // plan.pages / (per_page * point.dp),
            capacity_tokens=pages * per_page * point.dp,
            capacity_requests=pages // count_pages(tokens, layout, point.page_size) * point.dp,
            bounded_by=plan.bounded_by,
            fragmentation=fragmentation,
        )


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the conditions of the measurement that a reader must know before trusting the numbers."""

    weights: str
    layers: Count
    layers_held: Count  # distinct layers in memory; fewer than `layers` means that they were cycled through
    full_weights_bytes_per_gpu: Count
    kv: str = "synthetic"  # `synthetic` random rows in the KV cache, or the prompts and answers that were `served`
    graph_error: Number | None = None  # ‖logits of graph − eager‖ / ‖eager‖, worst rank; null without a graph
    attention_error: Number | None = None  # ‖o − o_fp64‖ / ‖o_fp64‖ of this point's merged attention output, worst rank
    experts_hit: Number | None = None  # mean share of all experts that a layer's tokens were routed to
    busiest_rank_experts: Number | None = None  # busiest rank's experts hit over the mean, over layers; 1 without EP
    busiest_rank_rows: Number | None = None  # the same of the rows that experts are applied to
    graph_batch: Count | None = None  # rows per replica in the captured graph; more than the requests if padded
    cuda_graph: bool = False
    step_times: str = ""  # file of the step times of a replay, which were not measured with this point
    policy: str = ""  # scheduling policy of a replay with step times of another engine's server
    step_error: Number | None = None  # largest |predicted / measured - 1| of the checked steps of a replay


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the state of the GPUs while the point was measured (NVML); worst over ranks."""

    sm_clock_mhz_min: Count | None = None
    sm_clock_mhz_max: Count | None = None
    power_w_max: Number | None = None
    power_w_all: Number | None = None  # mean power of all ranks' GPUs together in W; null if one has no energy counter
    temperature_c_max: Count | None = None
    throttle_reasons: list[str] = []


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the hardware and software on which the record was taken."""

    device: str  # `NVIDIA H200`, or `CPU`
    device_count: Count
    device_memory_bytes: Count | None = None
    l2_bytes: Count | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str = ""
    triton: str | None = None
    nccl: str | None = None
    flashinfer: str | None = None
    flash_mla: str | None = None
    python: str = ""
    dcpbench: str = ""
    settings: dict[str, str] = {}  # environment variables that change how collectives run: NCCL_* and TORCH_NCCL_*
    git_commit: str | None = None
    host_hash: str = ""  # 12 hex digits of a SHA-256 of host name, machine id and GPU UUIDs: equal on one machine
    command: str = ""


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Hold times of finished requests in ms, as formulas.py defines them; percentiles are null with too few samples."""

    mean: Number | None = None
    p50: Number | None = None
    p90: Number | None = None
    p95: Number | None = None
    p99: Number | None = None
    samples: Count = 0


class TurnMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the metrics of requests that were the n-th turn of a session."""

    turn: Count  # number of the turn, from 1; with sub-agents, those of a turn have the next number
    requests: Count  # requests that got at least one token; the sums below cover the same requests
    input_tokens: Count  # prompt tokens, including all earlier turns
    cached_tokens: Count | None  # prompt tokens found in the prefix cache; null if a server does not report them
    ttft_ms: Latencies  # time to first token of the finished requests


class InstanceMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the metrics of several instances that serve together, in replay."""

    busy_share: dict[str, Number]  # share of the run in which an instance ran steps: `prefill` and `decode`, or `both`
    link_busy_share: Number | None = None  # mean busy share of prefill instances' links; null if all do both
    transfers: Count | None = None
    sent_bytes: Count | None = None  # bytes sent by each GPU that held part of a request, summed over all transfers
    transfer_ms: Latencies | None = None  # from a request's first token to the end of its KV's transfer, in ms
    transfer_wait_ms: Latencies | None = None  # time waited for both links and for a free decode instance, in ms


class StageMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the metrics of pipeline stages and prefill context parallelism, in replay."""

    micro_batches: Count  # maximum number of micro-batches in flight; 1 without pipeline stages
    bubble_share: Number  # share of the steps' time in which the mean stage has no work
    step_times: str  # how the times of steps over stages were estimated


class SpeculationMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Hold how many drafts were accepted, as stated or as a server reports it."""

    draft_tokens: Count  # drafts of a request and step
    assumed: list[Number] = []  # stated probabilities of each draft after accepted ones; empty for a server's
    steps: Count | None = None  # steps that verified drafts, summed over requests; null if a server does not report it
    accepted: list[Count] = []  # steps of a request that accepted a draft and all before it, by draft; empty if unknown
    tokens_per_step: Number  # mean tokens of a step: 1 + accepted drafts / steps, those beyond an answer's end included
    step_times: str = ""  # how the times of such steps were estimated or what they lack; empty if measured


class ServeMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the measured or replayed results of the workload `serve`; definitions in formulas.py."""

    ttft_ms: Latencies
    itl_ms: Latencies
    tpot_ms: Latencies
    e2el_ms: Latencies
    output_tok_s: Number  # output throughput over the whole run, ramp-up and drain included
    output_tok_s_per_gpu: Number | None  # null if the number of GPUs is unknown, as for an import without it
    total_tok_s: Number  # throughput of prompt and output tokens; cached prompt tokens count
    request_throughput: Number | None  # finished requests per second; null, as all sums, if an import has only rates
    tok_s_per_user: Number | None  # 1000 / median TPOT in ms; null without TPOT
    steady_tok_s: Number | None  # output throughput over the longest time at 95 % of the target concurrency
    steady_s: Number | None  # length of that interval in s
    slo_ms: dict[str, Number] = {}  # objectives as given, in ms: `ttft`, `itl`, `tpot`, `e2el`
    request_goodput: Number | None = None  # requests per second that meet all objectives; null without objectives
    wall_s: Number | None  # first submission to last token
    submitted: Count | None  # submitted requests; null, like all counts below that may be, if an import lacks it
    finished: Count | None
    rejected: Count | None  # requests that can never fit
    cancelled: Count | None  # submitted and not finished when the run was ended
    failed: Count | None = None  # requests without a whole answer of a real server; by kind in `server.failures`
    input_tokens: Count | None  # prompt tokens of requests that got a token
    output_tokens: Count | None  # output tokens received, including those of requests that were cut off
    cached_tokens: Count | None  # prompt tokens that the prefix cache had
    preemptions: Count | None
    steps: Count | None
    decode_steps: Count | None  # steps without prefill
    eager_decode_steps: Count | None = 0  # decode steps larger than the largest captured graph
    decode_batch: Number | None  # mean requests in a step without prefill, over the layout
    idle_fraction: SignedNumber | None = None  # idle GPU share between decode steps, worst rank; null on CPU, in replay
    prefill_floor_share: Number | None = None
    """Sum of the floors (points/roofline.py) of all steps with chunks of prompts over the sum of their times on rank 0's
    GPU, with as many experts hit as expected. Null in replay and on the CPU, like the next two."""
    prefill_matmul_share: Number | None = None  # prompt steps' operations over those possible at the matrix rate
    decode_floor_share: Number | None = None  # counterpart of `prefill_floor_share` for steps without prompts
    turns: list[TurnMetrics] = []  # metrics by turn; empty for single-turn requests
    instances: InstanceMetrics | None = None  # metrics of several instances; null for a single one
    stages: StageMetrics | None = None  # null without pipeline stages and prefill context parallelism
    samples_file: str = ""  # Parquet file in the folder of the records, with one row per request
    speculation: SpeculationMetrics | None = None  # drafts and their acceptance; null for steps of one token


class _Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a backend with an exchange."""

    backend: str
    exchange: str

    def __str__(self) -> str:
        """Return backend and exchange as `triton symm`."""
        return self.backend if self.exchange == NO_EXCHANGE else f"{self.backend} {self.exchange}"


class Candidate(_Kernels, frozen=True, kw_only=True):
    """Hold a candidate that `auto` measured."""

    layer_us: Number | None = None  # median of one layer's q exchange, attention and merge, slowest rank
    reason: str | None = None  # reason why the candidate cannot run


class Choice(_Kernels, frozen=True, kw_only=True):
    """Hold the kernels that `auto` chose for the measurement of the point."""

    candidates: list[Candidate]  # candidates in the order in which they were tried


class FailedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Count requests to a real server that failed for the same reason."""

    kind: str  # `refused`, `HTTP 429`, `time-out`, …: docs/servers.md lists them
    requests: Count
    first: str  # message of the first failure


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the cost of sending requests to a real server and of reading its answers."""

    processes: Count  # number of client processes, each with one event loop, over which the load was divided
    cpu_share: Number  # CPU time of the busiest process over the time of the run: at 1 it cannot send or read any more
    late_p99_ms: Number | None = None  # delay of a submission after its due time, or after its client was free
    lag_p99_ms: Number | None = None  # delay of timers set every 20 ms: a bound on how late requests may leave
    read_late_p99_ms: Number | None = None
    """Time that bytes lay in the kernel before the client read them. The kernel's timestamps are used in that case, so
    latencies do not contain it. Null without such timestamps; latencies may then contain up to `lag_p99_ms`.
    """
    starved_share: Number | None = None  # run share in which other processes had a client's cores, worst process
    realtime: bool | None = None  # True if the client had real-time priority (SCHED_RR; root and CAP_SYS_NICE may)


class KvSources(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the numbers from which a server's KV capacity was computed (servers/kv_capacity.py)."""

    source: str  # `kv_cache_size_tokens`, `num_gpu_blocks` (vLLM), `max_total_num_tokens` (SGLang) or `log`
    rank_tokens: Count | None = None  # tokens that the pool of one rank holds, over all vLLM engines
    context_parallel: Count | None = None  # ranks that share one request's KV cache: dcp, and vLLM's pcp
    replicas: Count = 1  # data-parallel replicas with a pool each
    log_tokens: Count | None = None  # number in the server's own log
    conflicts: list[str] = []  # sources that disagree: `log`, `replicas`, `context_parallel`


ENGINE_DTYPES = {  # names of precisions in logs of engines, with those of a point
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "fp8_e4m3": FP8,
    "float8_e4m3fn": FP8,
}
DUMMY_WEIGHTS = "dummy_weights"  # warning of a point whose server has dummy weights: all tokens take the same experts


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Describe how an engine runs, by its log; null where the log does not state it."""

    load_format: str | None = None  # `safetensors`, `dummy` for the engine's own dummy weights, …
    weights_fingerprints: list[str] = []  # checksums of synthetic weights, one per part that differs; or empty
    dtype: str | None = None  # data type of activations
    weights_dtype: str | None = None  # quantisation of the weights, such as `fp8`
    kv_dtype: str | None = None
    page_size: Count | None = None  # KV rows in a page
    max_batched_tokens: Count | None = None  # tokens per step: --max-num-batched-tokens, --chunked-prefill-size
    prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None
    exchange: str | None = None  # how partial attention is merged over dcp ranks
    graph_batches: list[Count] | None = None  # captured decode sizes, to which decodes are padded; empty: no graphs


class StartPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a phase of the start of a server, by the lines of its log, or of a job of dcpbench's engine."""

    name: str  # `starting`, `building`, `loading weights`, `compiling`, `allocating the KV cache`, `capturing CUDA graphs`, …
    seconds: Number


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a real server that was measured, as reported by itself and observed by the client."""

    engine: str  # `vllm`, `sglang`, or `openai` if the server does not report its engine
    version: str = ""
    kv_capacity_tokens: Count | None = None  # total number of tokens that its KV cache holds; null if unknown
    kv_sources: KvSources | None = None  # origin of kv_capacity_tokens
    max_model_len: Count | None = None
    prompts: str = ""  # form of the prompts: `token ids`, or `text` from a tokenizer or `counted` by the server
    counted: str = ""  # source of the token count of a chunk: `token ids`, `usage`, or `chunks` with one token each
    retries: Count = 0  # requests that were sent again, each counted every time
    failures: list[FailedRequests] = []
    client: ClientLoad | None = None
    settings: EngineSettings | None = None  # resolved settings of a server that was started for it; else null
    start: list[StartPhase] = []  # phases of its start, in order; empty if it ran already
    facts: dict[str, str] = {}  # further facts about the server: its command, its flags


class OmittedValue(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a value that no reader accepts. A record names those that were replaced when it was written."""

    field: str  # dotted name, without places in lists, such as `server.max_model_len`
    what: str  # problem with the value, worded to follow the name: `is above 1e+15`

    def __str__(self) -> str:
        """Return `server.max_model_len is above 1e+15`."""
        return f"{self.field} {self.what}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the record of a point, one line of records.jsonl."""

    schema_version: int = SCHEMA_VERSION
    point: Point
    outcome: str  # `ok`, `failed`, `hung`, `rejected`
    reason: str | None = None  # why the outcome is not `ok`; for a rejected point it ends with the option to change
    cause: str | msgspec.UnsetType = (
        msgspec.UNSET
    )  # part of `reason` by which failures are grouped; unset: all of `reason`
    advice: str | msgspec.UnsetType = msgspec.UNSET  # which logs to read and which options to use for another attempt
    lacks_memory: bool | msgspec.UnsetType = msgspec.UNSET  # true if it was rejected because memory is too small
    detail: dict[str, str] = {}  # details of a failure: the device, exit code, last log lines, stacks
    warnings: list[str] = []  # warnings about the point; reports/explain.py lists them, with a sentence for each
    metrics: Metrics | None = None  # results of the workload `decode`
    serve: ServeMetrics | None = None  # results of the workload `serve`
    phases: Phases | None = None
    emulated: Emulated | None = None  # model of the missing ranks; null if all ranks were real
    rates: Rates | None = None  # null on the CPU and in replay
    floor: Floor | None = None  # lower bound of a `decode` step; null without the rates that it requires
    host_syncs_per_step: Number | None = None  # host-blocking CUDA calls inside one step, from the profiled pass
    sync_sites: list[SyncSite] = []  # source lines of the host synchronisations, worst first; at most 8
    allocations_per_step: Number | None = None  # CUDA allocator calls (cudaMalloc, …) while steps were timed, per step
    host_plan_us: Number | None = None  # host time to plan a step, slowest rank; not in `step_ms`
    kv: Kv | None = None
    memory_peak_bytes: Count | None = None
    conditions: Conditions | None = None
    choice: Choice | None = None  # choice of `auto`; null if the point names its backend and its exchange
    gpu: Gpu | None = None
    environment: Environment | None = None
    measured_with: dict[str, SignedCount | SignedNumber | bool | str | dict[str, SignedNumber] | None] = {}
    """Effective jobs.Settings, from the command line, a file or defaults."""
    started_at: str = ""  # UTC, ISO 8601
    seconds: Number = 0.0  # wall time the point took, set-up included
    origin: str | msgspec.UnsetType = msgspec.UNSET  # tool of an import, or `engine`, version; unset: dcpbench
    straggler: Straggler | msgspec.UnsetType = msgspec.UNSET  # the slowest rank, if one is a straggler; unset otherwise
    model_sizes: ModelSizes | msgspec.UnsetType = msgspec.UNSET  # if `point.model` is a readable folder; else unset
    start: list[StartPhase] | msgspec.UnsetType = msgspec.UNSET  # phases until the first measured step of this engine
    server: Server | msgspec.UnsetType = msgspec.UNSET  # real server that served the point; absent for all others
    omitted: list[OmittedValue] | msgspec.UnsetType = msgspec.UNSET  # values replaced in writing; or unset


def format_omitted_note(record: Record) -> str:
    """Return the text behind the numbers of a point in a progress line if values were omitted, else an empty string."""
    return f"; not recorded: {'; '.join(map(str, record.omitted))}" if record.omitted else ""


def get_origin(record: Record) -> str:
    """Return the tool that measured a point, in the form of an origin: `dcpbench`, `vllm`, `engine sglang 0.5.5`.

    A point of a server that was rejected, or failed before the server ran, has the engine without a version: `engine sglang`.
    """
    if record.origin:
        return str(record.origin)
    return OURS if record.point.backend in (*BACKENDS, AUTO) else format_server_origin(record.point.backend)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Identify what measured a point: dcpbench's engine, a server of another engine, or a tool that was imported from."""

    text: str  # as a record has it
    engine: str = ""  # of a server, as points.names.ENGINES names it; empty for all others
    version: str = ""  # of that engine; empty for a point that its server never ran

    @property
    def label(self) -> str:
        """Return `vLLM 0.26.0` for a server; other origins stay as they are."""
        return f"{ENGINE_NAMES.get(self.engine, self.engine)} {self.version}".rstrip() if self.engine else self.text


def format_server_origin(engine: str, version: str = "") -> str:
    """Return the origin of a point of a real server, which `parse_origin` reads: `engine vllm 0.26.0`."""
    return " ".join(filter(None, ("engine", engine, version)))


@functools.cache
def parse_origin(text: str) -> Origin:
    """Return the parts of an origin, as `get_origin` returns it."""
    kind, _, name = text.partition(" ")
    engine, _, version = name.partition(" ") if kind == "engine" else ("", "", "")
    return Origin(text, engine, version)


def is_server_origin(name: str) -> bool:
    """Return True if an origin is a real server of another engine."""
    return bool(parse_origin(name).engine)


def is_imported_origin(name: str) -> bool:
    """Return True if an origin is another tool, from which a result file was imported."""
    return name != OURS and not is_server_origin(name)


def format_hardware(environment: Environment) -> str:
    """Return `4 × NVIDIA H200`, or `CPU`; for an import without the number of GPUs, `H200`."""
    if environment.device == CPU or not environment.device_count:
        return environment.device
    return f"{environment.device_count} × {environment.device}"


def is_rejected_for_memory(record: Record) -> bool:
    """Return True if a point was rejected because memory was too small."""
    return record.outcome == "rejected" and record.lacks_memory is True


KV_LIMIT_FLAGS = ("--num-gpu-blocks-override", "--max-total-tokens")  # limits of the KV cache besides memory
SERVER_FLAG = "server_flag"  # limit of a KV cache by one of KV_LIMIT_FLAGS, next to those in Kv.bounded_by


def is_kv_limited(record: Record) -> bool:
    """Return True if a flag of a server's command, one of KV_LIMIT_FLAGS, limits its KV cache."""
    command = record.server.facts.get("command", "") if isinstance(record.server, Server) else ""
    return any(word.partition("=")[0] in KV_LIMIT_FLAGS for word in command.split())


def get_kv_capacity(record: Record) -> int | None:
    """Return how many tokens the KV cache holds, of dcpbench's engine or of a real server; None if it is unknown."""
    if record.kv is not None:
        return record.kv.capacity_tokens
    return record.server.kv_capacity_tokens if isinstance(record.server, Server) else None


def get_precisions(record: Record) -> tuple[str, str]:
    """Return the precision of the weights and of the KV cache, each `unknown` if it is not recorded.

    For a server they are those that its log states.
    """
    if not isinstance(record.server, Server):
        return record.point.weights_precision, record.point.kv_precision
    settings = record.server.settings or EngineSettings()
    found = (settings.weights_dtype or settings.dtype, settings.kv_dtype)
    return tuple(ENGINE_DTYPES.get(name, name) if name else UNKNOWN for name in found)  # type: ignore[return-value]


def get_reason(record: Record) -> str:
    """Return why a point is not `ok`."""
    return record.reason or "no reason was recorded"


def get_cause(record: Record) -> str:
    """Return the cause of a failure, without the positions of the ranks, which differ between points that hung."""
    return record.cause or get_reason(record)


def format_reason(record: Record) -> str:
    """Return why a point is not `ok`, and what to read and try next; empty for a point that is `ok`."""
    reason = record.reason or ""
    return f"{reason.rstrip('.')}. {record.advice}" if record.advice else reason


def get_device(record: Record) -> str | None:
    """Return the device that the point ran or failed on; None if it is unknown."""
    return record.environment.device if record.environment else record.detail.get("device")


def is_functional(record: Record) -> bool:
    """Return True if the point ran on a CPU, so that its times have no meaning for performance."""
    return "cpu" in record.warnings or (record.environment is not None and record.environment.device == CPU)


def is_forecast(record: Record) -> bool:
    """Return True if one rank ran for all, with a model of communication."""
    return bool(record.point.emulate)
