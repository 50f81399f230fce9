"""Step times of one engine path: the measured cases, as a file, and the prediction of any step of the scheduler from
them.

A case is the same work on every attention replica, or on some of them. Cases without prompt chunks, cases with only
chunks, mixed ones, and those of a single replica determine the terms of the prediction (step_model.py); docs/replay.md
explains the model and its limits.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import TYPE_CHECKING, cast

import msgspec

from dcpbench.errors import RecordsError, UsageError
from dcpbench.points.axes import Role
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.comm_model import describe_invalid_prompts
from dcpbench.points.device_probe import HOPPER, Probe
from dcpbench.points.names import AUTO, ENGINE_POLICIES, format_field, join_value
from dcpbench.points.point import select_load_axes, select_point_axes
from dcpbench.points.roofline import StepRows
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import CPU, Conditions, Emulated, Environment, Gpu, format_server_origin
from dcpbench.serving.load_words import MAX_TOKENS
from dcpbench.serving.step_model import HotStep, PiecewiseLinear, ReplicaBatch, Slowdown, StepModel, compute_step_works
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.serving.requests import Step

STEP_TIMES_VERSION = 1
MAX_ENGINE_TOKENS = 1 << 31  # tokens of a KV cache that a replay can number
MAX_REQUESTS = 1 << 20  # maximum requests of a measured step: more than any machine holds, few enough to list
LINE, GATHER, UNEVEN, UNALIGNED, CHECK, HOT = USES = ("line", "gather", "uneven", "unaligned", "check", "hot")
"""Uses of a case: interpolation, cost of more stored tokens, savings of replicas with fewer rows, cost of a number of rows that is no
multiple of EngineServer.row_multiple, check of predictions, or slowdown after chunks, where power limits slow a GPU down.
"""
MEASURE_AGAIN = "name a file that was measured for this point, or leave --step-times out and it is measured now."
MODELLED = (LINE, GATHER, UNEVEN, UNALIGNED)  # uses for predictions, in the order of StepModel's arguments


class Decodes(msgspec.Struct, frozen=True):
    """Requests that decode a token each."""

    requests: int
    context: int  # KV tokens that each request attends to, including its own


class Chunks(msgspec.Struct, frozen=True):
    """Chunks of prompts of different requests."""

    chunks: int
    tokens: int
    prefix: int  # stored tokens before each


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the attention replicas in a measured step."""

    decodes: tuple[Decodes, ...] = ()
    chunks: tuple[Chunks, ...] = ()
    use: str = LINE  # one of USES
    after: tuple[Chunks, ...] = ()  # chunks that ran before a hot case; empty: the largest ones of any hot case
    since: int = 0  # number of identical steps between a hot case and the chunks before it
    replicas: int = 0  # number of replicas that do the work while the others are idle; 0: all do it

    @property
    def requests(self) -> int:
        """Return the number of requests of one replica."""
        return sum(d.requests for d in self.decodes) + sum(c.chunks for c in self.chunks)

    def compute_work(self, queries: int = 1) -> ReplicaBatch:
        """Return the work in the form used by the prediction, with so many query rows of each decode."""
        return ReplicaBatch.from_requests(
            sum(d.requests for d in self.decodes),
            sum(d.requests * d.context for d in self.decodes),
            [(c.tokens, c.prefix) for c in self.chunks for _ in range(c.chunks)],
            queries,
        )

    def compute_works(self, replicas: int, queries: int = 1) -> list[ReplicaBatch]:
        """Return the work of each of `replicas` replicas."""
        busy = self.replicas or replicas
        return [self.compute_work(queries)] * busy + [ReplicaBatch.from_requests(0, 0, [])] * (replicas - busy)

    def compute_rows(self, replicas: int, queries: int = 1) -> StepRows:
        """Return the rows in the form used by floors, on this number of attention replicas; every chunk ends a prompt."""
        decodes = tuple(d.context for d in self.decodes for _ in range(d.requests))
        chunks = tuple((c.tokens, c.prefix) for c in self.chunks for _ in range(c.chunks))
        sampled = self.requests + len(decodes) * (queries - 1)
        rows = StepRows(decodes=decodes, chunks=chunks, sampled=sampled, queries=queries)
        return dataclasses.replace(rows, tokens=(self.replicas or replicas) * rows.rows)

    def __str__(self) -> str:
        """Return the case as `47 × 1 token at 5,500 + 1 × 2,048 tokens at 256`."""
        parts = [f"{d.requests} × 1 token at {d.context:,}" for d in self.decodes]
        text = " + ".join(parts + _format_chunks(self.chunks))
        text += f", on {self.replicas} replica{'s' * (self.replicas > 1)} alone" if self.replicas else ""
        text += f", {self.since} step{'s' * (self.since > 1)} later" if self.since else ""
        return f"{text}, behind {' + '.join(_format_chunks(self.after))}" if self.after else text


def _format_chunks(chunks: tuple[Chunks, ...]) -> list[str]:
    return [f"{c.chunks} × {c.tokens:,} tokens at {c.prefix:,}" for c in chunks]


class MeasuredCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case with its step times."""

    case: Case
    samples_ms: list[float]
    """Step times as the live loop launches and reads them, each of the slowest rank: from the end of the preceding step
    to its own end. The preceding step is identical; with chunks it only decodes, which hides their launch.
    """
    host_ms: list[float] = []  # time during which the host was busy launching such a step, for the slowest rank
    floor_ms: float | None = None  # at the machine's rates (points/roofline.py), with the expected experts; None on CPU

    @property
    def median_ms(self) -> float:
        """Return the device time used by predictions."""
        return statistics.median(self.samples_ms)

    @property
    def median_host_ms(self) -> float:
        """Return the host time used by predictions; 0 if it was not measured."""
        return statistics.median(self.host_ms) if self.host_ms else 0.0


EnginePath = dict[str, str | int | bool]  # fields on which step times depend, besides the step and the machine
PATH_AXES = select_point_axes(Role.ENGINE | Role.PATH) + select_load_axes(Role.ENGINE | Role.PATH)


def get_engine_path(point: Point) -> EnginePath:
    """Return the engine path of a point of the workload `serve`; `auto` stays `auto`."""
    assert point.load is not None
    return cast("EnginePath", point.get_values(Role.ENGINE | Role.PATH))


def find_differences(path: EnginePath, wanted: EnginePath) -> list[str]:
    """Return the differences of a path from the wanted one as options: `--backend triton instead of flashinfer`.

    A wanted value of `auto` matches all values.
    """
    return [
        f"{join_value(format_field(name), path[name])} instead of {value or 'none'}"
        if path[name] != ""
        else f"no {format_field(name)} instead of {value}"
        for name, value in wanted.items()
        if value not in (path[name], AUTO)
    ]


class EngineServer(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a server of another engine that was measured through HTTP, and how it schedules requests."""

    engine: str  # `vllm` or `sglang`: the engine with the kernels that ran the steps
    version: str = ""
    policy: str  # scheduling policy of the engine, one of ENGINE_POLICIES
    token_budget: int  # maximum tokens per step: vLLM's --max-num-batched-tokens, SGLang's --chunked-prefill-size
    max_requests: int  # maximum number of running requests: vLLM's --max-num-seqs, SGLang's --max-running-requests
    max_chunk: int = 0  # maximum prompt tokens of a request per step (--long-prefill-token-threshold); 0: no limit
    block_tokens: int  # tokens of a KV block on all dcp ranks
    kv_tokens: int | None = None  # tokens that the KV cache holds on all ranks; null if the server does not report it
    max_model_len: int | None = None
    prefix_cache: bool = True
    asynchronous: bool = True  # True if the engine decides a step while the one before it runs
    row_multiple: int = 1  # prompt steps take longer if their tokens are no multiple of it; 1: no difference
    graph_batches: tuple[int, ...] = ()  # sizes that decodes are padded to, sorted; empty: unknown or none
    request_ms: float = 0.0  # time of a request outside steps: HTTP, tokenizing, idle engine's scheduling, way back
    begin_ms: float = 0.0  # from the decision for a prompt step to its start on an idle GPU: preparing, launching
    first_token_us: float = 0.0  # for which the front end sends no tokens with a prompt's first token, per prompt token
    settings: str = ""  # flags that distinguish the server from others of its run, as a point has them

    @property
    def origin(self) -> str:
        """Return the origin of records that are replayed with its steps, such as `engine vllm 0.26.0`."""
        return format_server_origin(self.engine, self.version)

    @property
    def kv_blocks(self) -> int | None:
        """Return the number of blocks of its KV cache; None if that is unknown."""
        return None if self.kv_tokens is None else self.kv_tokens // self.block_tokens


class _Version(msgspec.Struct):
    schema_version: int


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Measured step times of one engine path, stored in a file."""

    schema_version: int = STEP_TIMES_VERSION
    path: EnginePath
    cases: list[MeasuredCase]
    launch_ms: float  # additional time of a step that is launched while the device is idle: planning and launching it
    measuring_s: float  # duration of the whole measurement
    conditions: Conditions
    environment: Environment  # Git commit and command included
    warnings: list[str] = []  # warnings in the form of records: `cpu`, `throttled`, …
    emulated: Emulated | None = None  # communication model of the largest decode step of an emulated layout
    engine: EngineServer | None = None
    """Server of another engine on which the steps were measured; null for dcpbench's own engine. The samples are gaps between tokens and
    differences of times to first token, as a client sees them, less `request_ms` and the delays of first tokens."""
    gpu: Gpu | None = None  # clocks, power and temperature while measuring, each of the worst rank; None on the CPU

    def apply_factors(self, decodes: float, chunks: float) -> StepTimes:
        """Return the step times with steps without prompts, and with, multiplied by these factors."""
        cases = [
            msgspec.structs.replace(m, samples_ms=[ms * (chunks if m.case.chunks else decodes) for ms in m.samples_ms])
            for m in self.cases
        ]
        return msgspec.structs.replace(self, cases=cases)

    @property
    def is_blocking(self) -> bool:
        """Return True if launching a step runs it synchronously, as dcpbench's engine does on the CPU."""
        return self.engine is None and self.environment.device == CPU

    def make_probe(self) -> Probe:
        """Return the probe of the machine of the measurement, for budget.py: a replay divides the memory as a live run
        there would.
        """
        seen = self.environment
        return Probe(
            device="cpu" if self.is_blocking else "cuda",
            count=seen.device_count,
            name=seen.device,
            memory_bytes=seen.device_memory_bytes,
            l2_bytes=seen.l2_bytes,
            capability=HOPPER if self.path["backend"] == "flashmla" else None,  # it ran
        )

    @property
    def replicas(self) -> int:
        """Return the number of attention replicas of the path."""
        return int(self.path["dp"])

    @property
    def queries(self) -> int:
        """Return the query rows of a decoding request in the measured steps."""
        return int(self.path["mtp"]) + 1

    @functools.cached_property
    def model(self) -> StepModel:
        """Return the prediction made from the cases. Raise RecordsError if they are too few."""
        return self._make_model(lambda m: m.median_ms)

    @functools.cached_property
    def host_model(self) -> StepModel:
        """Return the step model of the host's time.

        With several ranks, launching a step with chunks takes the host as long as the GPUs run it; with one emulating
        rank it takes less time (docs/emulation.md).
        """
        stands = self.emulated is not None and self.path["tp"] != 1

        def get_ms(m: MeasuredCase) -> float:
            return max(m.median_host_ms, m.median_ms if stands and m.case.chunks else 0.0)

        return self._make_model(get_ms)

    def _make_model(self, ms: Callable[[MeasuredCase], float]) -> StepModel:
        samples = ([(m.case.compute_work(self.queries), ms(m)) for m in self.select_cases(use)] for use in MODELLED)
        if self.engine is None:
            return StepModel(*samples)
        engine = self.engine
        return StepModel(*samples, graph_batches=engine.graph_batches, row_multiple=engine.row_multiple)

    @functools.cached_property
    def slowdown(self) -> Slowdown:
        """Return the slowdown model of a hot GPU."""
        found = []
        for m in self.select_cases(HOT):
            batch, preceding_tokens = m.case.compute_work(self.queries), sum(c.chunks * c.tokens for c in m.case.after)
            cool_ms = self.model.predict_step_ms([batch])
            found.append(HotStep(batch, m.median_ms / cool_ms, preceding_tokens, m.case.since * cool_ms / 1e3))
        return Slowdown(found)

    def predict_duration_ms(self, step: Step, heat: float = 0.0) -> float:
        """Return the duration of a step after the one before it, with a share `heat` of the slowdown after the largest
        chunks.

        Raise UsageError for a step outside the measured range.
        """
        works = compute_step_works(step)
        return self.model.predict_step_ms(works) * (1 + heat * (self.slowdown(works) - 1))

    def get_begin_ms(self, step: Step) -> float:
        """Return the time from the decision for a step until an idle device begins it."""
        return self.launch_ms + (self.engine.begin_ms if self.engine is not None and step.has_chunks else 0.0)

    def predict_host_ms(self, step: Step) -> float:
        """Return the time during which the host is busy launching the step. Raise as predict_duration_ms does."""
        return max(self.host_model.predict_step_ms(compute_step_works(step)), 0.0)

    def check_errors(self) -> list[tuple[Case, float]]:
        """Return the cases that predictions do not use, each with (predicted - measured) / measured."""
        found = self.select_cases(CHECK)
        return [
            (m.case, self.model.predict_step_ms(m.case.compute_works(self.replicas, self.queries)) / m.median_ms - 1)
            for m in found
        ]

    def select_cases(self, use: str) -> list[MeasuredCase]:
        """Return the cases of one use; for an emulated layout, those with prompts are scaled to the GPUs of the machine
        together.
        """
        found = self.emulated.prompts if self.emulated else ()
        together = PiecewiseLinear((p.tokens, p.times) for p in found) if found else None
        return [_apply_scaling(m, together) for m in self.cases if m.case.use == use]

    def check_point(self, point: Point, name: str = "the step times", remedy: str = MEASURE_AGAIN) -> None:
        """Raise UsageError with the differences and `remedy` unless these are the times of the point's engine."""
        wanted = get_engine_path(point)
        if self.engine is None and not self.path["mtp"]:
            wanted["mtp"] = 0  # draft_steps.py estimates steps with drafts from those without
        found = find_differences(self.path, wanted)
        if self.engine is not None and self.engine.settings != point.settings:
            found.append(f"{self.engine.settings or 'no varied flags'} instead of {point.settings or 'none'}")
        if found:
            raise UsageError(f"{name}: measured with {', '.join(found)}; {remedy}")


def _apply_scaling(measured: MeasuredCase, together: PiecewiseLinear | None) -> MeasuredCase:
    """Return a case measured on one GPU, scaled to several."""
    tokens = measured.case.compute_work().tokens
    if together is None or not tokens:
        return measured
    times = together.predict_clamped(tokens)
    return msgspec.structs.replace(measured, samples_ms=[ms * times for ms in measured.samples_ms])


def write_step_times(path: Path, times: StepTimes) -> None:
    """Write the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, msgspec.json.format(msgspec.json.encode(times), indent=1) + b"\n")


def read_step_times(path: Path) -> StepTimes:
    """Read a file of step times. Raise RecordsError if it is missing, damaged, or of another version."""
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != STEP_TIMES_VERSION:
            raise RecordsError(f"{path} has schema_version {version}, while this dcpbench reads {STEP_TIMES_VERSION}.")
        times = msgspec.json.decode(data, type=StepTimes)
        times = msgspec.structs.replace(times, path=_complete_path(times.path))
        _check_path(times.path)
    except (OSError, *UNREADABLE) as e:
        reason = "it is nested too deep" if isinstance(e, RecursionError) else str(e)[:300]
        raise RecordsError(
            f"{path} cannot be read as step times: {reason}; name a file below step-times/ of a run."
        ) from e
    full_cases = {msgspec.structs.replace(m.case, use=UNEVEN, replicas=1) for m in times.cases if m.case.use == LINE}
    for number, measured in enumerate(times.cases):
        found = _find_problem(measured, times.replicas)
        if not found and measured.case.use == UNEVEN and measured.case not in full_cases:
            found = f"its step, {measured.case}, was not measured on all replicas, so nothing tells what it spares"
        if found:
            raise RecordsError(f"{path}, cases[{number}]: {found}; measure again.")
    if times.emulated and (wrong := describe_invalid_prompts(times.emulated.prompts)):
        raise RecordsError(f"{path}, emulated: {wrong}")
    if times.engine is not None and (wrong := _find_engine_problem(times.engine, times.replicas)):
        raise RecordsError(f"{path}, engine: {wrong}; measure again.")
    if times.engine is None and times.replicas > 1 and not times.select_cases(UNEVEN):
        raise RecordsError(
            f"{path}: no case has prompts on one replica of {times.replicas} only, so the time that rows without experts save is "
            "unknown; measure again."
        )
    if not 0 <= times.launch_ms <= MAX_NUMBER:
        raise RecordsError(f"{path}: launch_ms is {times.launch_ms:g}, which is no time; measure again.")
    return times


def _complete_path(path: EnginePath) -> EnginePath:
    """Return the path with the defaults of fields that a file of an earlier version does not have."""
    defaults = {axis.name: axis.default for axis in PATH_AXES if axis.default is not msgspec.NODEFAULT}
    return cast("EnginePath", defaults | path)


def _check_path(path: EnginePath) -> None:
    """Raise ValidationError if a field of the path is missing, is of another type or is unknown."""
    for axis in PATH_AXES:
        if type(path.get(axis.name)) is not axis.kind:
            raise msgspec.ValidationError(f"path.{axis.name} is missing, or no {axis.kind.__name__}")
    unknown = next((name for name in path if name not in {axis.name for axis in PATH_AXES}), None)
    if unknown is not None:
        raise msgspec.ValidationError(f"path.{unknown} is an option that this version of dcpbench does not know")


def _find_use_problem(case: Case, replicas: int) -> str:
    """Return the problem with the use or the replicas of a case; empty if both are valid."""
    if case.use not in USES:
        return f"case.use is {case.use[:40]!r}, none of {', '.join(USES)}"
    if not 0 <= case.replicas <= replicas:
        return f"case.replicas is {case.replicas}, of a path with dp {replicas}"
    if case.replicas and case.use not in (UNEVEN, CHECK):
        return (
            f"case.replicas is {case.replicas} where case.use is {case.use!r}, but this use is the same on all replicas"
        )
    if case.use == UNEVEN and (case.replicas != 1 or case.decodes or replicas == 1):
        return f"case.use is {UNEVEN!r}, which is of chunks that one of several replicas has alone"
    if case.use == UNALIGNED and (case.decodes or not case.chunks):
        return f"case.use is {UNALIGNED!r}, which is of chunks without decodes"
    return ""


def _find_engine_problem(engine: EngineServer, replicas: int) -> str:
    """Return the first value of an engine's server that cannot be; empty if all are valid."""
    if engine.policy not in ENGINE_POLICIES:
        return f"policy is {engine.policy[:40]!r}, none of {', '.join(ENGINE_POLICIES)}"
    if replicas > 1:
        return f"path.dp is {replicas}, but the policies of engines are modelled for one attention replica"
    for name in ("token_budget", "max_requests", "block_tokens", "kv_tokens", "max_model_len", "row_multiple"):
        value = getattr(engine, name)
        if value is not None and not 1 <= value <= MAX_ENGINE_TOKENS:
            return f"{name} is {value}, which is not from 1 to {MAX_ENGINE_TOKENS:,}"
    if not 0 <= engine.max_chunk <= MAX_ENGINE_TOKENS:
        return f"max_chunk is {engine.max_chunk}, which is not from 0 to {MAX_ENGINE_TOKENS:,}"
    if engine.kv_tokens is not None and engine.kv_tokens < 2 * engine.block_tokens:
        return f"kv_tokens are {engine.kv_tokens:,}, less than two blocks of {engine.block_tokens:,}"
    for name in ("request_ms", "begin_ms", "first_token_us"):
        if not 0 <= (value := getattr(engine, name)) <= MAX_NUMBER:
            return f"{name} is {value:g}, which is no time"
    return ""


def _find_problem(measured: MeasuredCase, replicas: int) -> str:
    """Return the first value of a case that cannot have been measured on this number of replicas; empty if all are
    valid.
    """
    case = measured.case
    counts = {
        "case.decodes": [n for d in case.decodes for n in (d.requests, d.context)],
        "case.chunks": [n for c in case.chunks for n in (c.chunks, c.tokens)],
        "case.after": [n for c in case.after for n in (c.chunks, c.tokens)],
    }
    for name, numbers in counts.items():
        if numbers and not 1 <= min(numbers) <= max(numbers) <= MAX_TOKENS:
            return f"{name} counts from 1 to {MAX_TOKENS:,}, and not {', '.join(map(str, numbers))[:100]}"
    prefixes = [c.prefix for c in case.chunks]
    if prefixes and not 0 <= min(prefixes) <= max(prefixes) <= MAX_TOKENS:
        return f"case.chunks has prefixes of 0 to {MAX_TOKENS:,} tokens, and not {prefixes[:3]}"
    if not 0 <= case.since <= MAX_REQUESTS:
        return f"case.since is {case.since}, which is no number of steps"
    if case.requests > MAX_REQUESTS:
        return f"its step has more than {MAX_REQUESTS:,} requests"
    if not case.decodes and not case.chunks:
        return "its step does nothing"
    if use := _find_use_problem(case, replicas):
        return use
    if not measured.samples_ms or not 0 < min(measured.samples_ms) <= max(measured.samples_ms) <= MAX_NUMBER:
        return "it has no samples_ms, or times that are not positive"
    others = {"host_ms": measured.host_ms, "floor_ms": [] if measured.floor_ms is None else [measured.floor_ms]}
    wrong = (name for name, found in others.items() if found and not 0 <= min(found) <= max(found) <= MAX_NUMBER)
    return next((f"its {name} are no times" for name in wrong), "")
