"""Measure the step times of a server of vLLM or SGLang, and replay loads with them and with the engine's policy. No torch.

The times of cases are obtained by step_probe.py. Times to first token contain the time of a request outside of steps. It is measured
on its own and subtracted, because a replay adds it to every request (EngineServer.request_ms).
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import itertools
import statistics
import time
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import RecordsError, UsageError, WorkerError
from dcpbench.measuring.gpu_state import is_throttled, merge_states, sample_gpus
from dcpbench.points.names import ENGINE_POLICIES, SGLANG, VLLM
from dcpbench.records.model_sizes import read_model_sizes
from dcpbench.records.record import CPU, DUMMY_WEIGHTS, Conditions, Record
from dcpbench.records.stats import StopRule
from dcpbench.servers.client import Client
from dcpbench.servers.engine_flags import (
    MAX_CHUNK_FLAGS,
    MAX_REQUESTS_FLAGS,
    TOKEN_BUDGET_FLAGS,
    find_count,
    find_token_budget,
)
from dcpbench.servers.kv_capacity import find_page_size, parse_count
from dcpbench.servers.measure import THROTTLED, make_environment
from dcpbench.servers.step_probe import (
    MIN_REQUEST_MS,
    Method,
    Refusal,
    RequestTimes,
    ServerLimits,
    StepProbe,
    UnsupportedCaseError,
    check_case,
    measure_case,
    measure_first_token_us,
    measure_request_times,
)
from dcpbench.servers.stored_cases import CaseFile, CaseSource, StoredCase
from dcpbench.serving import sglang_scheduler, vllm_scheduler
from dcpbench.serving.engine_cases import (
    ALIGNED,
    EngineExtent,
    make_engine_cases,
    make_row_cases,
    make_unaligned_cases,
    make_whole_case,
)
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.replay import ENGINE_VOCAB, make_case_file_name, make_step_times_name, replay_point
from dcpbench.serving.step_model import ReplicaBatch
from dcpbench.serving.step_times import (
    Decodes,
    EngineServer,
    MeasuredCase,
    StepTimes,
    get_engine_path,
    write_step_times,
)
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import EngineSettings, Gpu
    from dcpbench.servers.info import ServerInfo
    from dcpbench.servers.measure import MeasuredServer
    from dcpbench.servers.step_probe import CaseSamples
    from dcpbench.serving.step_times import Case, EnginePath

MIN_QUEUED_AHEAD = 1.1  # decode steps from which a prompt waits for a step that was decided before it came
MAX_REQUEST_SHARE = 0.25  # of a decode step: a longer request_ms hides whether a prompt waited for one step or for two
MAX_STEP_SHARE = 0.1  # of a step with a prompt: longer decode steps hide how long a request takes until it is seen
MIN_BEGIN_SHARE = 0.08  # of a step by which it is longer behind decode steps if its begin is delayed; less is noise
MAX_FAILURES = 3  # cases in succession that a server may fail
CASE_S = 2.0  # time limit of a case, once its requests run
MAX_ROW_EFFECT = 0.1  # by which noise changes the time of a prompt, relative to one that is a few tokens longer
DEFAULT_BLOCK = {VLLM: 16, SGLANG: 1}  # tokens of a KV block where the server does not report them
MAX_REQUESTS = {VLLM: vllm_scheduler.MAX_REQUESTS, SGLANG: sglang_scheduler.MAX_REQUESTS}
BUDGET_FLAG = dict(zip((VLLM, SGLANG), TOKEN_BUDGET_FLAGS, strict=True))
TOKEN_BUDGETS = {VLLM: vllm_scheduler.TOKEN_BUDGET, SGLANG: sglang_scheduler.TOKEN_BUDGET}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options for replays of servers."""

    policy: str = ""  # --prefill policy: policy that replaces the engine's own; empty: none
    token_budget: int | None = None  # --token-budget: maximum tokens per step, if a server does not report it


def find_unsupported(point: Point) -> UsageError | None:
    """Return why steps of a point's layout cannot be replayed with the policy of an engine, or None."""
    if point.dp <= 1:
        return None
    return UsageError(
        f"--mode replay: a server chooses which of its {point.dp} attention replicas takes a request, so that their steps "
        "cannot be measured apart; use --dp 1, or --mode live."
    )


def describe_engine(point: Point, server: MeasuredServer, options: ReplayOptions) -> EngineServer:
    """Return the limits of a server and how its engine schedules requests.

    Raise UsageError for an engine without a known policy, or if the budget of a step is unknown.
    """
    config, info, command = server.config, server.info, server.process.words if server.process is not None else ()
    policy = options.policy or info.engine
    if policy not in ENGINE_POLICIES:
        raise UsageError(
            f"{config.target.url} does not report that it is vLLM or SGLang, so that it is not known how it schedules "
            "requests; add --prefill policy= with the engine that it schedules like, or use --mode live."
        )
    settings, facts = config.engine_settings, info.facts
    budget = options.token_budget or find_token_budget(command, settings)
    budget = budget or parse_count(facts.get("chunked_prefill_size"))
    if budget is None:
        raise UsageError(
            f"{config.target.url} does not report how many tokens its steps have at most; add --token-budget N, the value "
            f"of {BUDGET_FLAG[policy]} ({TOKEN_BUDGETS[policy]} by default on GPUs such as H200)."
        )
    requests = find_count(command, MAX_REQUESTS_FLAGS) or parse_count(facts.get("max_running_requests"))
    return EngineServer(
        engine=info.engine,
        version=info.version,
        policy=policy,
        token_budget=budget,
        max_requests=requests or MAX_REQUESTS[policy],
        max_chunk=find_count(command, MAX_CHUNK_FLAGS) or 0,
        block_tokens=(find_page_size(settings, facts) or DEFAULT_BLOCK[policy]) * max(point.dcp, 1),
        kv_tokens=info.kv_capacity_tokens,
        max_model_len=max((card.max_model_len for card in info.models if card.max_model_len), default=None),
        prefix_cache=_has_prefix_cache(settings, info),
        graph_batches=tuple((settings.graph_batches if settings is not None else None) or ()),
        settings=point.settings,
    )


def _has_prefix_cache(settings: EngineSettings | None, info: ServerInfo) -> bool:
    """Return False if a log or an endpoint states that the engine has no prefix cache, which is on by default."""
    if settings is not None and settings.prefix_caching is not None:
        return settings.prefix_caching
    off = info.facts.get("enable_prefix_caching") == "False" or info.facts.get("disable_radix_cache") == "True"
    return not off


def measure_server_steps(
    points: Sequence[Point],
    engine: EngineServer,
    server: MeasuredServer,
    tell: Callable[[str], None] = lambda _: None,
) -> StepTimes:
    """Measure the step times for all of `points` on the running server that serves them, which must be idle.

    Cases that the run's folder has from an interrupted measurement of the same server are not measured again. Raise WorkerError if
    the server fails, UsageError if its steps contradict its policy.
    """
    began, config = time.perf_counter(), server.config
    path = get_engine_path(points[0])
    file = CaseFile.open(
        server.folder / make_case_file_name(path, engine.settings), _describe_source(path, engine, server)
    )
    earlier = list(file.cases.values())
    with sample_gpus(config.gpus.uuids if config.gpus else ()) as get_state:
        measured = asyncio.run(_measure_cases(points, engine, server, tell, file, get_state))
        gpu = _merge_gpu_states(get_state(), earlier)
    found = [_remove_delays(one, measured.first_token_us) for one in measured.found]
    exposed = None if measured.exposed is None else _remove_delays(measured.exposed, measured.first_token_us)
    seen = found if exposed is None else [*found, exposed]
    asynchronous = _decides_ahead(seen, measured.times.request_ms, config.engine_settings)
    times, begin_ms = _divide_request_times(measured.times, found, exposed, asynchronous=asynchronous)
    cases = [_make_measured_case(one, times) for one in found if not one.separate_prefill]
    warnings = {"cpu": config.device == CPU, DUMMY_WEIGHTS: config.dummy_weights, THROTTLED: is_throttled(gpu)}
    sizes = read_model_sizes(points[0].model)
    layers = (sizes.layers if sizes else None) or 0
    return StepTimes(
        path=path,
        cases=cases,
        launch_ms=0.0,
        measuring_s=time.perf_counter() - began + sum(one.seconds for one in earlier),
        conditions=Conditions(
            weights=points[0].weights, layers=layers, layers_held=layers, full_weights_bytes_per_gpu=0, kv="served"
        ),
        environment=make_environment(config),
        warnings=[warning for warning, holds in warnings.items() if holds],
        engine=msgspec.structs.replace(
            engine,
            row_multiple=measured.row_multiple,
            request_ms=times.request_ms,
            begin_ms=begin_ms,
            first_token_us=measured.first_token_us,
            asynchronous=asynchronous,
        ),
        gpu=gpu,
    )


def _describe_source(path: EnginePath, engine: EngineServer, server: MeasuredServer) -> CaseSource:
    """Return what the times of the server's cases depend on."""
    config = server.config
    command = config.facts.get("command", "").replace(str(config.target.port), "{port}")
    root = next((card.root for card in server.info.models if card.id == path["model"]), "")
    facts = {"command": command, "root": root, "prompts": server.prompt_format.prompts}
    return CaseSource(
        path=path,
        engine=msgspec.structs.replace(engine, kv_tokens=None),
        server=facts | config.request_facts | server.info.facts,
        settings=config.engine_settings,
        environment=msgspec.structs.replace(make_environment(config), command=""),
        started_s=server.info.started_s if server.process is None else None,
    )


def _merge_gpu_states(now: Gpu | None, earlier: Sequence[StoredCase]) -> Gpu | None:
    """Return the worst state of the GPUs in all parts of a measurement; the mean power of several parts is unknown."""
    if not earlier or now is None:
        return now
    gpu = merge_states([now, *(one.gpu for one in earlier)])
    return None if gpu is None else msgspec.structs.replace(gpu, power_w_all=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
    """Everything that was measured on a server."""

    found: list[CaseSamples]
    row_multiple: int
    times: RequestTimes
    exposed: CaseSamples | None  # decodes and a chunk behind decode steps, which hide less of its launch
    first_token_us: float


async def _measure_cases(
    points: Sequence[Point],
    engine: EngineServer,
    server: MeasuredServer,
    tell: Callable[[str], None],
    file: CaseFile,
    get_state: Callable[[], Gpu | None],
) -> _Measured:
    """Measure all cases that requests can produce and that the file does not have."""
    limits = ServerLimits(
        max_batched_tokens=engine.token_budget,
        max_requests=engine.max_requests,
        max_model_len=engine.max_model_len,
        kv_tokens=engine.kv_tokens,
    )
    extent = EngineExtent.from_points(points, engine)
    async with Client(server.config.target) as client:
        probe = StepProbe(
            client=client,
            prompt_format=server.prompt_format,
            limits=limits,
            rule=StopRule(seconds=CASE_S),
            realtime=server.config.realtime,
        )
        cases = _Cases(probe, engine.policy, tell, file, get_state)
        multiple = await _find_row_multiple(cases, extent)
        unaligned = make_unaligned_cases(extent) if multiple > 1 else []
        await cases.measure([*make_engine_cases(extent), *unaligned])
        mixed = _find_longest_mixed(cases.found)
        exposed = None if mixed is None or engine.policy != VLLM else await cases.measure_exposed(mixed.case)
        tell("step times: first tokens of prompts")
        first_token_us = await measure_first_token_us(probe)
        times = await measure_request_times(probe, first_token_us)
        return _Measured(
            found=cases.found,
            row_multiple=multiple,
            times=times,
            exposed=exposed,
            first_token_us=first_token_us,
        )


class _Cases:
    """Measure cases one after the other, each of them once, and leave out those that requests cannot produce."""

    def __init__(
        self,
        probe: StepProbe,
        policy: str,
        tell: Callable[[str], None],
        file: CaseFile,
        get_state: Callable[[], Gpu | None] = lambda: None,
    ) -> None:
        """Begin with the cases of the file; `get_state` returns the state of the GPUs since the begin."""
        self.probe, self.policy, self.tell, self.file, self.get_state = probe, policy, tell, file, get_state
        self.found: list[CaseSamples] = []
        self._earlier = frozenset(file.cases)
        self._failures = 0  # in succession

    async def measure(self, cases: Sequence[Case]) -> None:
        """Measure the cases and keep their samples. Raise WorkerError if the server fails several in succession."""
        fitting, hidden = list(_iter_possible_cases(cases, self.probe.limits)), self.policy == VLLM
        earlier = sum((case, hidden) in self._earlier for case in fitting)
        taken_over = f" ({earlier} taken over)" if earlier else ""
        for number, case in enumerate(fitting, 1):
            self.tell(f"step times: {number} of {format_count(len(fitting), 'case')}{taken_over}, {case}")
            if (one := await self._take(case, hide_launch=hidden)) is not None:
                self.found.append(one)

    async def measure_ms(self, case: Case) -> float | None:
        """Return the median time of a case; None if it cannot be measured."""
        if not list(_iter_possible_cases([case], self.probe.limits)):
            return None
        self.tell(f"step times: {case}")
        one = await self._take(case, hide_launch=self.policy == VLLM)
        return None if one is None else statistics.median(one.samples_ms)

    async def measure_exposed(self, case: Case) -> CaseSamples | None:
        """Return the samples of decodes and a chunk that run behind decode steps; None if the server fails."""
        self.tell(f"step times: {case} behind decodes")
        return await self._take(case, hide_launch=False)

    async def _take(self, case: Case, *, hide_launch: bool) -> CaseSamples | None:
        """Return the samples of a case, which is measured once; None if the server fails."""
        if (stored := self.file.cases.get((case, hide_launch))) is not None:
            return stored.samples
        began = time.perf_counter()
        try:
            one = await measure_case(self.probe, case, hide_launch=hide_launch)
        except WorkerError as e:  # such as prompts that never shared a step
            self._failures += 1
            if self._failures == MAX_FAILURES:
                raise
            print_stderr(f"A step is not measured: {e}")
            return None
        self._failures = 0
        if one.separate_prefill and self.policy == VLLM:
            raise UsageError(
                f"{case}: its prompt and its decodes ran in different steps, which vLLM's policy does not do; add "
                f"--prefill policy={SGLANG} if the engine schedules like SGLang, or use --mode live."
            )
        seconds = time.perf_counter() - began
        self.file.append(StoredCase(samples=one, hide_launch=hide_launch, seconds=seconds, gpu=self.get_state()))
        return one


async def _find_row_multiple(cases: _Cases, extent: EngineExtent) -> int:
    """Return the number of which the tokens of a step must be a multiple to take no longer; 1 if every number is as fast."""
    whole = await cases.measure_ms(make_whole_case(extent))
    if whole is None:
        return 1
    for multiple, case in make_row_cases(extent):
        found = await cases.measure_ms(case)
        if found is None or found <= (1 + MAX_ROW_EFFECT) * whole:
            return multiple
    return ALIGNED


def _iter_possible_cases(cases: Sequence[Case], limits: ServerLimits) -> Iterator[Case]:
    """Yield the cases that requests can produce, with shorter contexts of decodes where the server takes no longer ones."""
    seen: set[Case] = set()
    for case in cases:
        fitting = _fit_case(case, limits)
        if fitting is not None and fitting not in seen:
            seen.add(fitting)
            yield fitting


def _fit_case(case: Case, limits: ServerLimits) -> Case | None:
    """Return the case, or the same with shorter contexts of its decodes; None if no such step can be produced."""
    for _ in range(len(limits.__struct_fields__)):
        try:
            check_case(limits, case)
        except UnsupportedCaseError as e:
            requests = sum(d.requests for d in case.decodes)
            excess = e.needed - e.limit
            if not requests or e.limit <= 0 or e.refusal not in (Refusal.LENGTH, Refusal.KV):
                return None
            less = excess if e.refusal is Refusal.LENGTH else -(-excess // requests)
            decodes = tuple(Decodes(d.requests, d.context - less) for d in case.decodes)
            if min(d.context for d in decodes) < 1:
                return None
            case = msgspec.structs.replace(case, decodes=decodes)
        else:
            return case
    return None


def _decides_ahead(found: Sequence[CaseSamples], request_ms: float, settings: EngineSettings | None) -> bool:
    """Return True if the engine decides a step while the one before it runs.

    The log of a server that was started may state it. Else it follows from how long prompts wait among decodes, if steps are
    long enough to tell that from the time of the request itself. Else it is taken to be so, as both engines do by default.
    """
    if settings is not None and settings.async_scheduling is not None:
        return settings.async_scheduling
    steps_ms = [statistics.median(one.samples_ms) for one in found if one.method is Method.DECODE]
    queued = [one.queued_steps for one in found if one.queued_steps is not None]
    if not queued or not steps_ms or request_ms > MAX_REQUEST_SHARE * min(steps_ms):
        return True
    return statistics.median(queued) > MIN_QUEUED_AHEAD


def _find_longest_mixed(found: Sequence[CaseSamples]) -> CaseSamples | None:
    """Return the case of a whole prompt with most tokens, and of those with fewest decodes; None without decodes and chunks in a step."""
    mixed = [
        one
        for one in found
        if one.case.decodes and one.case.chunks and not one.case.chunks[0].prefix and not one.separate_prefill
    ]
    return max(mixed, key=lambda one: (one.case.chunks[0].tokens, -one.case.decodes[0].requests), default=None)


def _remove_delays(found: CaseSamples, first_token_us: float) -> CaseSamples:
    """Return samples without the delays of first tokens, which begin or end them."""
    late_ms = found.late_tokens * first_token_us / 1e3
    least = min(found.samples_ms) / len(found.samples_ms)  # noise does not make a step negative
    return msgspec.structs.replace(found, samples_ms=[max(ms - late_ms, least) for ms in found.samples_ms])


def _divide_request_times(
    idle: RequestTimes, found: Sequence[CaseSamples], exposed: CaseSamples | None, *, asynchronous: bool
) -> tuple[RequestTimes, float]:
    """Return the times of a request without the begin of its step, and EngineServer.begin_ms; `idle`: with it, on the idle server."""
    hidden = _find_longest_mixed(found)
    begin_ms, request_ms = 0.0, None
    if exposed is not None:
        request_ms = _compute_request_ms(exposed, asynchronous=asynchronous)
        if hidden is not None:
            begin_ms = _compute_begin_ms(hidden, exposed, asynchronous=asynchronous)
    begin_ms = min(begin_ms, idle.request_ms - MIN_REQUEST_MS)  # a request on an idle server takes both
    if request_ms is None:
        request_ms = idle.request_ms - begin_ms
    return RequestTimes(request_ms, _compute_launch_ms(idle, begin_ms)), begin_ms


def _compute_request_ms(exposed: CaseSamples, *, asynchronous: bool) -> float | None:
    """Return the time from sending a prompt until the scheduler sees it, from its wait among decodes; None if they take too long.

    It is seen within a decode step. An asynchronous engine has then planned the next step, another one begins that of the prompt.
    """
    steps, step_ms = exposed.queued_steps, exposed.decode_ms
    if steps is None or step_ms is None or step_ms > MAX_STEP_SHARE * statistics.median(exposed.samples_ms):
        return None
    return max((steps - (1.5 if asynchronous else 0.5)) * step_ms, MIN_REQUEST_MS)


def _compute_begin_ms(hidden: CaseSamples, exposed: CaseSamples, *, asynchronous: bool) -> float:
    """Return the time in ms from the decision for a step with chunks until the GPU begins it (EngineServer.begin_ms).

    A step behind a decode step waits for the rest of that time, and one behind a step with chunks does not. An asynchronous
    engine decides it when the decode step begins, another one when it ends. Differences below MIN_BEGIN_SHARE of the step are noise.
    """
    step_ms = statistics.median(hidden.samples_ms)
    more_ms = statistics.median(exposed.samples_ms) - step_ms
    if more_ms < MIN_BEGIN_SHARE * step_ms or exposed.decode_ms is None:
        return 0.0
    return more_ms + (exposed.decode_ms if asynchronous else 0.0)


def _compute_launch_ms(times: RequestTimes, begin_ms: float) -> float:
    """Return the time in ms that the host takes to launch a step with prompts, its begin included.

    A launch as long as the shortest step is hidden by it, so that only its begin is known.
    """
    hidden = begin_ms > 0 and times.launch_ms <= (1 + MIN_BEGIN_SHARE) * times.shortest_ms
    return begin_ms if hidden else times.launch_ms + begin_ms


def _make_measured_case(found: CaseSamples, times: RequestTimes) -> MeasuredCase:
    """Return a case as step-time files have it: with the contexts that were measured, and without the request's own time."""
    case, samples = found.case, found.samples_ms
    if found.context_mean is not None and len(case.decodes) == 1:
        decodes = (Decodes(case.decodes[0].requests, max(round(found.context_mean), 1)),)
        case = msgspec.structs.replace(case, decodes=decodes)
    if found.method is Method.PREFILL:
        least = min(samples) / len(samples)  # noise does not make a step negative
        samples = [max(ms - times.request_ms, least) for ms in samples]
    return MeasuredCase(case=case, samples_ms=samples, host_ms=[times.launch_ms] if case.chunks else [])


def describe_slow_rows(times: StepTimes) -> str:
    """Return by how much steps are longer whose number of tokens is no multiple of the engine's; empty if none is."""
    if times.engine is None or times.engine.row_multiple == 1:
        return ""
    multiple, tokens = times.engine.row_multiple, times.engine.token_budget // ALIGNED * ALIGNED
    whole, less = (
        times.model.predict_step_ms([ReplicaBatch.from_requests(0, 0, [(n, 0)])])
        for n in (tokens, tokens - multiple // 2)
    )
    return (
        f"This server takes {less / whole:.1f} times as long for a step with prompts if its number of tokens is no multiple of "
        f"{multiple}: {less:.0f} ms for {tokens - multiple // 2:,} tokens, {whole:.0f} ms for {tokens:,}."
    )


def store_step_times(folder: Path, times: StepTimes) -> str:
    """Write step times below the run's folder, under a new name; return it as records have it."""
    assert times.engine is not None
    name = make_step_times_name(times.path, times.engine.settings)
    numbered = (name.replace(".json", f"-{number}.json") for number in itertools.count(2))
    while (folder / name).exists():
        name = next(numbered)
    write_step_times(folder / name, times)
    return name


def replay_server_point(
    point: Point, times: StepTimes, file: str, settings: Settings, folder: Path, *, command: str = "", policy: str = ""
) -> Record:
    """Return the record of a replayed point; it has failed if the step times do not cover its load.

    `file` names the step times, `policy` the policy of another engine than the server's.
    """
    started, begin = dt.datetime.now(dt.UTC), time.perf_counter()
    requests = make_point_requests(point, settings, ENGINE_VOCAB)
    try:
        record = replay_point(point, None, requests, times, settings, folder, file=file, command=command, policy=policy)
    except (UsageError, RecordsError) as e:
        record = Record(
            point=point, outcome="failed", reason=str(e), warnings=times.warnings, environment=times.environment
        )
    return msgspec.structs.replace(
        record,
        measured_with=msgspec.to_builtins(settings),
        started_at=started.isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - begin, 3),
    )


def replay_on_server(
    points: Sequence[Point], server: MeasuredServer, tell: Callable[[str], None], options: ReplayOptions
) -> Iterator[Record]:
    """Measure the step times of a running server, store them below the folder, and yield the record of each replayed point.

    If its steps cannot be measured, all points have failed.
    """
    config = server.config
    try:
        engine = describe_engine(points[0], server, options)
        times = measure_server_steps(points, engine, server, tell)
    except (UsageError, WorkerError, RecordsError) as e:
        for point in points:
            environment, warnings = make_environment(config), ["cpu"] if config.device == CPU else []
            yield Record(point=point, outcome="failed", reason=str(e), environment=environment, warnings=warnings)
        return
    name = store_step_times(server.folder, times)
    if sentence := describe_slow_rows(times):
        print_stderr(sentence)
    for point in points:
        yield replay_server_point(point, times, name, server.settings, server.folder, command=config.command)
