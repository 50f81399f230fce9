"""Replays of other engines' servers without a server: measured cases, and agreement of replays with exact times."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from dcpbench.errors import RecordsError, UsageError, WorkerError
from dcpbench.points.engine_points import make_engine_load, make_engine_point
from dcpbench.points.names import CLOSED, GAMMA, MIXED, REPLAY, SGLANG, VLLM
from dcpbench.points.settings import Settings
from dcpbench.records.record import EngineSettings, Environment, Gpu
from dcpbench.servers import engine_replay
from dcpbench.servers.client import Target
from dcpbench.servers.engine_replay import ReplayOptions, describe_engine
from dcpbench.servers.info import Card, ServerInfo
from dcpbench.servers.measure import ClientConfig, MeasuredServer
from dcpbench.servers.prompt_format import PromptFormat
from dcpbench.servers.step_probe import CaseSamples, Method, RequestTimes, ServerLimits, StepProbe, check_case
from dcpbench.servers.stored_cases import CaseFile, CaseSource, StoredCase
from dcpbench.serving.engine_cases import EngineExtent, make_engine_cases, make_unaligned_cases
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.outcome import compute_serve_metrics
from dcpbench.serving.policies import make_scheduler
from dcpbench.serving.replay import (
    LoopTiming,
    get_loop_timing,
    make_engine_config,
    make_step_times_name,
    replay_point,
    replay_requests,
)
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.step_model import ReplicaBatch, Slowdown
from dcpbench.serving.step_times import (
    CHECK,
    Case,
    Chunks,
    Decodes,
    EngineServer,
    MeasuredCase,
    StepTimes,
    get_engine_path,
    read_step_times,
    write_step_times,
)
from tests.unit.serving_builder import make_config, make_request
from tests.unit.step_times_builder import CONDITIONS
from tests.unit.test_replay import Fixed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.points.point import Point
    from dcpbench.serving.requests import Step

ENGINE = EngineServer(
    engine=VLLM,
    version="0.26.0",
    policy=VLLM,
    token_budget=2048,
    max_requests=64,
    block_tokens=32,
    kv_tokens=400_000,
    max_model_len=16_000,
    request_ms=3.0,
)
SGLANG_ENGINE = msgspec.structs.replace(ENGINE, engine=SGLANG, policy=SGLANG)
TIMES = RequestTimes(request_ms=4.0, launch_ms=7.0)
CLIENT = ClientConfig(target=Target.from_url("http://127.0.0.1:1"))


def make_point(
    concurrency: int = 8, *, inputs: str = "uniform:1000-6000", outputs: str = "uniform:20-80", **load: object
) -> Point:
    """Return a served point of vLLM on one replica of tp2·dcp2."""
    fields = {"requests": 48, "arrival": CLOSED, "mode": REPLAY} | load
    return make_engine_point(
        model="m",
        layout={"tp": 2, "dp": 1, "dcp": 2},
        backend=VLLM,
        load=make_engine_load(input_tokens=inputs, output_tokens=outputs, **fields),
        concurrency=concurrency,
        context=6100,
        precision={},
    )


def compute_true_ms(
    works: list[tuple[float, int]], chunks: list[tuple[int, int]], engine: EngineServer = ENGINE
) -> float:
    """Return the duration of a step with decodes (requests, KV tokens) and chunks (tokens, prefix).

    It is the sum for weights, rows, KV and pairs. Chunks take 0.01 ms more for each token if the rows of the step are no
    multiple of the engine's `row_multiple`.
    """
    multiple = engine.row_multiple
    rows, kv = sum(n for n, _ in works), sum(tokens for _, tokens in works)
    per_token = 0.015 + (0.01 if (rows + sum(n for n, _ in chunks)) % multiple else 0.0)
    return 8 + 0.4 * rows + 2e-5 * kv + sum(per_token * n + 1e-6 * n * (before + n / 2) for n, before in chunks)


def compute_true_case_ms(case: Case, engine: EngineServer) -> float:
    rows = sum(d.requests for d in case.decodes)
    works = [(pad_rows(rows, case.chunks, engine), sum(d.requests * d.context for d in case.decodes))]
    return compute_true_ms(works, [(c.tokens, c.prefix) for c in case.chunks for _ in range(c.chunks)], engine)


def pad_rows(rows: int, chunks: Sequence[object], engine: EngineServer) -> float:
    """Return the rows of a step with these decodes: those of the next captured graph if it has no chunks and one is
    large enough. Of FEW_EXPERTS, a padding row takes half of the time of another.
    """
    size = rows if chunks else min((n for n in engine.graph_batches if n >= rows), default=rows)
    return (rows + size) / 2 if engine is FEW_EXPERTS else size


class ExactStepTimes:
    """Exact step times of an engine with `compute_true_ms`."""

    is_blocking, slowdown = False, Slowdown([])

    def get_begin_ms(self, _step: Step) -> float:
        """Return the time from the decision for a step until an idle device begins it."""
        return 0.0

    def __init__(self, engine: EngineServer) -> None:
        self.engine = engine

    def predict_duration_ms(self, step: Step, _heat: float = 0.0) -> float:
        (todo,) = step.replicas
        rows, kv = len(todo.decodes) + len(todo.discarded), sum(p + 1 for p in todo.positions) + sum(todo.discarded)
        works = [(pad_rows(rows, todo.chunks, self.engine), kv)]
        return compute_true_ms(works, [(c.tokens, c.start) for c in todo.chunks], self.engine)

    def predict_host_ms(self, _step: Step) -> float:
        return 0.0


def measure_exactly(points: list[Point], engine: EngineServer) -> StepTimes:
    """Return step times of the cases for these points, without noise."""
    limits = ServerLimits(
        max_batched_tokens=engine.token_budget,
        max_requests=engine.max_requests,
        max_model_len=engine.max_model_len,
        kv_tokens=engine.kv_tokens,
    )
    extent = EngineExtent.from_points(points, engine)
    wanted = [*make_engine_cases(extent), *(make_unaligned_cases(extent) if engine.row_multiple > 1 else [])]
    cases = engine_replay._iter_possible_cases(wanted, limits)
    return StepTimes(
        path=get_engine_path(points[0]),
        cases=[MeasuredCase(case=case, samples_ms=[compute_true_case_ms(case, engine)]) for case in cases],
        launch_ms=0.0,
        measuring_s=1.0,
        conditions=CONDITIONS,
        environment=Environment(device="NVIDIA H200", device_count=2),
        engine=engine,
    )


LOADS = {
    "closed": make_point(),
    "one client": make_point(1, requests=12),
    "many clients": make_point(32, requests=128),
    "equal lengths": make_point(inputs="4000", outputs="50"),
    "open": make_point(48, arrival=GAMMA, request_rate=4.0),
    "sessions": make_point(inputs="uniform:500-900", turns="4", turn_tokens="100"),
    "shared prefix": make_point(prefix_share=0.5),
}


SLOW_ROWS = msgspec.structs.replace(ENGINE, row_multiple=4)
"""vLLM 0.26.0 on an H200 with CUTLASS: a step of 8,162 tokens takes 1.8 times as long as one of 8,192."""


GRAPHS = msgspec.structs.replace(ENGINE, graph_batches=(1, 2, 4, 8, 16, 32))
"""vLLM 0.26.0 with --compilation-config on an H200: steps of 5 decodes take 99 % of the time of 8."""
FEW_EXPERTS = msgspec.structs.replace(GRAPHS, version="0.26.0+experts")
"""vLLM 0.26.0 with DeepSeek-V3 on an H200: steps of 17 decodes take 93 % of the time of 32, as padding rows need few experts."""
FIRST_TOKENS = msgspec.structs.replace(ENGINE, first_token_us=0.8)
"""vLLM 0.26.0: its front end sends no tokens for 13 ms with the first token of a prompt of 16,000 tokens."""
FEW_GRAPHS = msgspec.structs.replace(ENGINE, graph_batches=(1, 8))
"""Most steps have more decodes than the largest graph, so that they run without one."""


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize(
    "engine",
    [ENGINE, SGLANG_ENGINE, SLOW_ROWS, GRAPHS, FEW_GRAPHS, FIRST_TOKENS],
    ids=[VLLM, SGLANG, "slow rows", "graphs", "few graphs", "first tokens"],
)
def test_replays_from_measured_cases_follow_exact_step_times(engine: EngineServer, name: str, tmp_path: Path) -> None:
    """The few cases that requests can produce predict every step of a load: within 3 % in output and ITL, 4 % in TTFT."""
    point = LOADS[name]
    times = measure_exactly([point], engine)
    record = replay_point(point, None, make_point_requests(point, Settings(), 1000), times, Settings(), tmp_path)
    assert record.serve is not None
    found = replay_requests(
        make_point_requests(point, Settings(), 1000),
        make_scheduler(make_engine_config(point, engine, engine.policy)),
        point.clients,
        ExactStepTimes(engine),  # type: ignore[arg-type]
        loop=get_loop_timing(engine),
    )
    exact = compute_serve_metrics(found.traffic.samples, gpus=2, concurrency=point.clients, slo={}, steps=found.counts)
    assert record.serve.finished == exact.finished == len(found.traffic.samples)
    assert record.serve.output_tok_s == pytest.approx(exact.output_tok_s, rel=0.03)
    assert record.serve.itl_ms.p50 == pytest.approx(exact.itl_ms.p50, rel=0.03)
    assert record.serve.ttft_ms.p50 == pytest.approx(exact.ttft_ms.p50, rel=0.04)


def test_steps_between_two_graphs_take_less_than_full_ones() -> None:
    """The most padding rows are 15 of 32."""
    times = measure_exactly([make_point(32, requests=128)], FEW_EXPERTS)
    for rows in range(1, 33):
        case = Case(decodes=(Decodes(rows, 1000),))
        exact = compute_true_case_ms(case, FEW_EXPERTS)
        assert times.model.predict_step_ms([case.compute_work(1)]) == pytest.approx(exact, rel=0.03), rows
    older = msgspec.structs.replace(
        times,
        cases=[
            m for m in times.cases if m.case.chunks or sum(d.requests for d in m.case.decodes) in GRAPHS.graph_batches
        ],
    )
    found = [older.model.predict_step_ms([ReplicaBatch.from_requests(rows, 1000 * rows, [])]) for rows in (17, 32)]
    assert found[0] == pytest.approx(found[1], rel=0.03), (
        "without a case between two graphs, all rows take as long as the largest"
    )


def test_replayed_record_has_engine_and_policy(tmp_path: Path) -> None:
    point = LOADS["closed"]
    times = measure_exactly([point], ENGINE)
    requests = make_point_requests(point, Settings(), 1000)
    record = replay_point(point, None, requests, times, Settings(), tmp_path, file="step-times/f.json")
    assert record.origin == "engine vllm 0.26.0"
    assert record.conditions is not None
    assert (record.conditions.step_times, record.conditions.policy) == ("step-times/f.json", VLLM)
    assert record.server
    assert record.server.kv_capacity_tokens == 400_000
    other = replay_point(point, None, requests, times, Settings(), tmp_path, policy=SGLANG)
    assert other.conditions is not None
    assert other.conditions.policy == SGLANG
    assert other.serve is not None
    assert record.serve is not None
    assert other.serve.itl_ms.p99 != record.serve.itl_ms.p99


@pytest.mark.parametrize("engine", [ENGINE, SGLANG_ENGINE], ids=[VLLM, SGLANG])
@pytest.mark.parametrize(
    ("budget", "context", "requests"), [(8192, 16_200, 32), (512, 900, 4), (64, 100, 1), (8192, 300, 8)]
)
def test_all_cases_can_be_produced_by_requests(engine: EngineServer, budget: int, context: int, requests: int) -> None:
    engine = msgspec.structs.replace(engine, token_budget=budget, max_model_len=None, kv_tokens=None)
    extent = EngineExtent(engine=engine, requests=requests, context=context, targets=(requests,))
    cases = make_engine_cases(extent)
    for case in cases:
        check_case(ServerLimits(max_batched_tokens=budget), case)
    assert len(cases) <= 64
    stored = [c for case in cases for c in case.chunks if c.prefix and not case.decodes]
    assert not [c for c in stored if c.prefix % budget and c.prefix > budget / 4]
    short = msgspec.structs.replace(engine, max_model_len=3 * budget)
    without = make_engine_cases(EngineExtent(engine=short, requests=requests, context=context, targets=(requests,)))
    assert not [c for case in without if not case.decodes for c in case.chunks if c.prefix % budget], (
        "no prompt of three steps fits"
    )
    for size in {c.tokens for c in stored}:
        assert max(c.prefix for c in stored if c.tokens == size) + size >= min(context, budget + size)
    mixed = [case for case in cases if case.decodes and case.chunks and case.use != CHECK]
    assert len(mixed) == 1 if engine.policy == SGLANG and requests > 1 else bool(mixed) == (requests > 1)


def test_contexts_are_shortened_to_the_limit_of_the_server() -> None:
    """A request grows by up to 913 + 2 tokens until its steps have been timed: about 1,085 of 2,000 tokens are left."""
    limits = ServerLimits(max_batched_tokens=2048, max_model_len=2000)
    fitted = engine_replay._fit_case(Case(decodes=(Decodes(2, 1900),)), limits)
    assert fitted is not None
    check_case(limits, fitted)
    assert 1000 < fitted.decodes[0].context < 1100
    assert engine_replay._fit_case(Case(chunks=(Chunks(1, 2000, 2048),)), limits) is None


class TestSamples:
    def test_request_time_is_subtracted_from_ttft_of_single_prompts(self) -> None:
        chunk = Case(chunks=(Chunks(1, 100, 0),))
        found = CaseSamples(case=chunk, samples_ms=[25.0, 26.0], method=Method.PREFILL, precise=True)
        assert engine_replay._make_measured_case(found, TIMES).samples_ms == [21.0, 22.0]
        several = msgspec.structs.replace(found, method=Method.BEHIND)
        assert engine_replay._make_measured_case(several, TIMES).samples_ms == [25.0, 26.0]

    def test_decode_case_has_the_mean_context_of_its_samples(self) -> None:
        case = Case(decodes=(Decodes(4, 900),))
        found = CaseSamples(case=case, samples_ms=[25.0], method=Method.DECODE, precise=True, context_mean=907.4)
        assert engine_replay._make_measured_case(found, TIMES).case.decodes == (Decodes(4, 907),)

    @pytest.mark.parametrize(("queued", "ahead"), [((0.6, 0.9), False), ((1.5, 1.7), True), ((None,), True)])
    def test_long_queueing_of_a_prompt_shows_asynchronous_scheduling(
        self, queued: tuple[float | None, ...], ahead: bool
    ) -> None:
        """Decode steps take 20 ms and requests 1 ms. With requests of 6 ms the difference is not visible; a setting in
        the log decides.
        """
        mixed = Case(decodes=(Decodes(1, 300),), chunks=(Chunks(1, 100, 0),))
        decode = CaseSamples(
            case=Case(decodes=(Decodes(1, 300),)), samples_ms=[20.0], method=Method.DECODE, precise=True
        )
        found = [decode] + [
            CaseSamples(case=mixed, samples_ms=[30.0], method=Method.MIXED, precise=True, queued_steps=steps)
            for steps in queued
        ]
        assert engine_replay._decides_ahead(found, 1.0, None) is ahead
        assert engine_replay._decides_ahead(found, 1.0, EngineSettings()) is ahead
        assert engine_replay._decides_ahead(found, 6.0, None) is True
        for known in (True, False):
            assert engine_replay._decides_ahead(found, 1.0, EngineSettings(async_scheduling=known)) is known


def make_server(info: ServerInfo, words: list[str] | None = None) -> MeasuredServer:
    """Return a running server that was started with these words."""
    prompt_format = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9)
    process = None if words is None else SimpleNamespace(words=words)
    return MeasuredServer(
        config=CLIENT,
        info=info,
        prompt_format=prompt_format,
        settings=Settings(),
        folder=Path(),
        process=process,  # type: ignore[arg-type]
    )


class TestDescription:
    INFO = ServerInfo(
        engine=VLLM,
        version="0.26.0",
        models=(Card("m", 70_000),),
        kv_capacity_tokens=19_678_976,
        facts={"block_size": "64"},
    )

    def test_limits_come_from_the_command_and_from_the_servers_report(self) -> None:
        words = ["vllm", "serve", "m", "--max-num-batched-tokens", "4096", "--max-num-seqs=64"]
        found = describe_engine(make_point(), make_server(self.INFO, words), ReplayOptions())
        assert (found.policy, found.token_budget, found.max_requests) == (VLLM, 4096, 64)
        assert (found.block_tokens, found.kv_blocks) == (128, 153_742)  # 64 × dcp 2
        assert (found.max_model_len, found.prefix_cache, found.asynchronous) == (70_000, True, True)

    def test_cases_depend_on_the_process_only_of_a_server_that_ran_already(self) -> None:
        """A server that dcpbench starts has another process each time, and a command that says more."""
        point, running = make_point(), dataclasses.replace(self.INFO, started_s=1_780_000_000.5)
        path, process = get_engine_path(point), SimpleNamespace(words=[])
        for given, expected in ((None, 1_780_000_000.5), (process, None)):
            server = dataclasses.replace(make_server(running), process=given)
            found = engine_replay._describe_source(path, ENGINE, server)
            assert found.started_s == expected

    def test_limits_of_sglang_come_from_its_report(self) -> None:
        facts = {
            "chunked_prefill_size": "8192",
            "max_running_requests": "48",
            "page_size": "1",
            "disable_radix_cache": "True",
        }
        info = dataclasses.replace(self.INFO, engine=SGLANG, facts=facts)
        found = describe_engine(make_point(), make_server(info), ReplayOptions())
        assert (found.token_budget, found.max_requests, found.block_tokens) == (8192, 48, 2)
        assert not found.prefix_cache

    def test_unknown_token_budget_is_refused_with_the_option_to_add(self) -> None:
        with pytest.raises(UsageError, match="add --token-budget N, the value of --max-num-batched-tokens"):
            describe_engine(make_point(), make_server(self.INFO), ReplayOptions())
        assert (
            describe_engine(make_point(), make_server(self.INFO), ReplayOptions(token_budget=8192)).token_budget == 8192
        )

    def test_unknown_engine_without_a_policy_is_refused(self) -> None:
        info = dataclasses.replace(self.INFO, engine="openai")
        with pytest.raises(UsageError, match="add --prefill policy"):
            describe_engine(make_point(), make_server(info), ReplayOptions(token_budget=8192))
        options = ReplayOptions(token_budget=8192, policy=SGLANG)
        assert describe_engine(make_point(), make_server(info), options).policy == SGLANG

    def test_attention_data_parallel_is_refused(self) -> None:
        assert engine_replay.find_unsupported(make_point()) is None
        assert "--mode live" in str(engine_replay.find_unsupported(msgspec.structs.replace(make_point(), dp=2)))


class TestFile:
    def test_file_is_read_back_and_refused_for_other_server_flags(self, tmp_path: Path) -> None:
        times = measure_exactly([LOADS["closed"]], ENGINE)
        write_step_times(tmp_path / "f.json", times)
        again = read_step_times(tmp_path / "f.json")
        assert again.engine == ENGINE
        again.check_point(LOADS["closed"])
        with pytest.raises(UsageError, match="no varied flags instead of max-num-seqs=4"):
            again.check_point(msgspec.structs.replace(LOADS["closed"], settings="max-num-seqs=4"))

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"policy": "fifo"}, "policy is 'fifo'"),
            ({"token_budget": 0}, "token_budget is 0"),
            ({"kv_tokens": 40}, "less than two blocks"),
            ({"request_ms": -1.0}, "request_ms is -1"),
        ],
    )
    def test_invalid_values_are_refused(self, change: dict[str, object], problem: str, tmp_path: Path) -> None:
        times = measure_exactly([LOADS["closed"]], msgspec.structs.replace(ENGINE, kv_tokens=400_000))
        write_step_times(
            tmp_path / "f.json", msgspec.structs.replace(times, engine=msgspec.structs.replace(ENGINE, **change))
        )
        with pytest.raises(RecordsError, match=problem):
            read_step_times(tmp_path / "f.json")

    def test_servers_with_other_flags_have_other_files(self) -> None:
        path = get_engine_path(LOADS["closed"])
        assert make_step_times_name(path) != make_step_times_name(path, "max-num-seqs=4")

    def test_another_measurement_does_not_replace_a_file(self, tmp_path: Path) -> None:
        times = measure_exactly([LOADS["closed"]], ENGINE)
        names = [engine_replay.store_step_times(tmp_path, times) for _ in range(3)]
        assert len({*names}) == 3
        assert all((tmp_path / name).is_file() for name in names)


class TestLoop:
    """Steps take 10 ms, 1 ms more for a decode row and 2 ms for a token of a chunk; the engine sees a request after 1
    ms.
    """

    def replay(
        self, *sizes: tuple[int, int], clients: int | None = 1, loop: LoopTiming, arrivals: tuple[float, ...] = ()
    ) -> list[list[float]]:
        requests = [
            make_request(i, prompt, output, at)
            for i, ((prompt, output), at) in enumerate(itertools.zip_longest(sizes, arrivals))
        ]
        found = replay_requests(
            requests,
            make_scheduler(make_config(pages=60, policy=VLLM)),
            clients,
            Fixed(),  # type: ignore[arg-type]
            loop=loop,
        )
        return [[round(1e3 * s, 3) for s in (sample.submitted_s, *sample.token_s)] for sample in found.traffic.samples]

    def test_idle_engine_sees_a_request_after_its_delay(self) -> None:
        """The request is seen at 1 ms; a step of 16 ms and one of 11 ms follow."""
        assert self.replay((3, 2), loop=LoopTiming(request_s=1e-3)) == [[0.0, 17.0, 28.0]]

    def test_client_of_a_busy_engine_misses_the_decision_after_its_last_token(self) -> None:
        """Both clients send at 0. The idle engine sees request 0 at 1 ms, a moment before request 1, and runs it alone: 16 ms, to 17.
        Step 1, decided at 17, has request 1, to 33; step 2 its second token, to 44. Client 0 sends request 2 at 17; it is seen at 18,
        after the decisions of 17. The next one is at 33, for the step that begins at 44 and decodes request 1, too:
        44 + 10 + 1 + 2 · 3 = 61.
        """
        found = self.replay((3, 1), (3, 4), (3, 1), clients=2, loop=LoopTiming(request_s=1e-3))
        assert found == [[0.0, 17.0], [0.0, 33.0, 44.0, 61.0, 72.0], [17.0, 61.0]]

    def test_synchronous_engine_decides_after_reading_the_last_step(self) -> None:
        """In contrast to an asynchronous engine, the decision at 33 is for the step that begins then, with request 2:
        33 + 17 = 50.
        """
        found = self.replay((3, 1), (3, 4), (3, 1), clients=2, loop=LoopTiming(request_s=1e-3, asynchronous=False))
        assert found == [[0.0, 17.0], [0.0, 33.0, 50.0, 61.0, 72.0], [17.0, 50.0]]

    def test_next_turn_of_a_session_is_delayed(self) -> None:
        """The turn after request 0 is sent at 17 and misses the decisions of 17."""
        requests = [make_request(0, 3, 1), make_request(1, 3, 1), make_request(2, 3, 4)]
        requests[:2] = [
            dataclasses.replace(r, session=0, turn=turn, parent=turn - 1 if turn else None)
            for turn, r in enumerate(requests[:2])
        ]
        found = replay_requests(
            requests,
            make_scheduler(make_config(pages=60, policy=VLLM)),
            2,
            Fixed(),  # type: ignore[arg-type]
            loop=LoopTiming(request_s=1e-3),
        )
        sample = next(s for s in found.traffic.samples if s.request.number == 1)
        assert (round(sample.submitted_s, 6), round(sample.token_s[0], 6)) == (0.017, 0.061)

    def test_first_token_delays_the_tokens_of_all_requests(self) -> None:
        """Delay tokens by 5 ms for each of 3 prompt tokens: those of the step of 50 come at 65, and its client's next request, too.

        The step of 61 ends meanwhile. The tokens of the last prompt's step come 15 ms late as well.
        """
        found = self.replay((3, 2), clients=1, loop=LoopTiming(request_s=1e-3, first_token_s=5e-3))
        assert found == [[0.0, 32.0, 32.0]]
        found = self.replay(
            (3, 1), (3, 3), clients=None, arrivals=(0.0, 0.1), loop=LoopTiming(request_s=1e-3, first_token_s=1e-3)
        )
        assert found == [[0.0, 20.0], [100.0, 120.0, 128.0, 139.0]]

    def test_arrivals_of_an_open_loop_are_delayed(self) -> None:
        found = self.replay((3, 1), (3, 1), clients=None, arrivals=(0.0, 0.1), loop=LoopTiming(request_s=1e-3))
        assert found == [[0.0, 17.0], [100.0, 117.0]]

    def test_request_without_delay_joins_the_next_decision(self) -> None:
        """The project's own engine has no delay: a client's next request joins the decision after its token."""
        requests = [make_request(0, 3, 2), make_request(1, 3, 1)]
        found = replay_requests(requests, Scheduler(make_config(pages=60, policy=MIXED)), 1, Fixed())  # type: ignore[arg-type]
        assert [round(1e3 * s.token_s[0], 3) for s in found.traffic.samples] == [16.0, 43.0]


def test_rows_with_discarded_tokens_take_time() -> None:
    """SGLang's client reads its last token while the next step runs: that step has a row for it."""
    point = make_point(1, inputs="100", outputs="5", requests=1)
    engine = msgspec.structs.replace(SGLANG_ENGINE, request_ms=0.0)
    found = replay_requests(
        make_point_requests(point, Settings(), 1000),
        make_scheduler(make_engine_config(point, engine, SGLANG)),
        1,
        ExactStepTimes(engine),  # type: ignore[arg-type]
    )
    assert found.counts.steps == 1 + 4 + 1
    assert np.diff(found.traffic.samples[0].token_s) == pytest.approx([8.4e-3] * 4, rel=1e-3)
    assert ReplicaBatch.from_requests(1, 105, []).rows == 1


@pytest.mark.parametrize("multiple", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("budget", [512, 8192, 2047])
def test_fast_multiple_of_tokens_is_found(budget: int, multiple: int) -> None:
    """The times of prompts alone determine it; other lengths take 1.5 times as long, and noise is 4 %."""
    engine = msgspec.structs.replace(ENGINE, token_budget=budget)
    noise = itertools.cycle([1.0, 1.04, 0.98])

    class Prompts:
        async def measure_ms(self, case: Case) -> float:
            (chunk,) = case.chunks
            return chunk.tokens * (1.5 if chunk.tokens % multiple else 1.0) * next(noise)

    extent = EngineExtent(engine=engine, requests=8, context=4000)
    assert asyncio.run(engine_replay._find_row_multiple(Prompts(), extent)) == multiple  # type: ignore[arg-type]


def test_measured_steps_have_multiples_of_rows() -> None:
    """Otherwise only slow rows of an engine would be measured. A step of the whole budget is always one of the cases."""
    cases = make_engine_cases(EngineExtent(engine=ENGINE, requests=32, context=6100))
    tokens = {case.compute_work().decodes + case.compute_work().tokens for case in cases if case.chunks}
    assert not [n for n in tokens if n % 16]
    assert max(tokens) == ENGINE.token_budget


def test_exposed_launch_lengthens_steps_of_an_idle_engine(tmp_path: Path) -> None:
    """A prompt of 16 tokens on an idle engine takes its launch of 40 ms, not its step of 8.3; prompts of the whole
    budget hide it.
    """
    point = make_point(1, inputs="16", outputs="1", requests=4)
    times = measure_exactly([make_point()], ENGINE)
    slow = [msgspec.structs.replace(m, host_ms=[40.0] if m.case.chunks else []) for m in times.cases]
    found = []
    for cases in (times.cases, slow):
        changed = msgspec.structs.replace(times, cases=cases)
        requests = make_point_requests(point, Settings(), 1000)
        record = replay_point(point, None, requests, changed, Settings(), tmp_path)
        assert record.serve is not None
        found.append(record.serve.ttft_ms.p50)
    assert found == [pytest.approx(3 + 8.24, rel=0.02), pytest.approx(3 + 40, rel=0.02)]


def test_slow_numbers_of_tokens_are_reported() -> None:
    """A step of 2,046 tokens takes 8 + 2046 · 0.025 + 2.1 = 61 ms, one of 2,048 takes 41."""
    assert engine_replay.describe_slow_rows(measure_exactly([make_point()], SLOW_ROWS)) == (
        "This server takes 1.5 times as long for a step with prompts if its number of tokens is no multiple of 4: 61 ms for 2,046 "
        "tokens, 41 ms for 2,048."
    )
    assert not engine_replay.describe_slow_rows(measure_exactly([make_point()], ENGINE))


def test_step_times_hold_for_all_rows_of_a_measured_graph() -> None:
    """The graph of 32 rows is measured with 24 requests, so that replays of 25 to 32 requests are known, and of 33 are not."""
    model = measure_exactly([make_point(24, requests=128)], GRAPHS).model
    of_graph = [model.predict_step_ms([ReplicaBatch.from_requests(rows, 24_000, [])]) for rows in (24, 25, 32)]
    assert of_graph == pytest.approx([compute_true_case_ms(Case(decodes=(Decodes(24, 1000),)), GRAPHS)] * 3, rel=1e-3)
    with pytest.raises(UsageError, match="no step time is known for 33 decode rows"):
        model.predict_step_ms([ReplicaBatch.from_requests(33, 24_000, [])])


SOURCE = CaseSource(
    path=get_engine_path(make_point()),
    engine=ENGINE,
    server={},
    settings=None,
    environment=Environment(device="NVIDIA H200", device_count=2),
)


def make_cases(folder: Path, source: CaseSource = SOURCE) -> engine_replay._Cases:
    """Return cases of vLLM that are stored in this folder."""
    probe = StepProbe(client=None, prompt_format=None, limits=ServerLimits(max_batched_tokens=2048))  # type: ignore[arg-type]
    return engine_replay._Cases(probe, VLLM, lambda _: None, CaseFile.open(folder / "x.cases.jsonl", source))


def test_each_case_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The longest prompt of one step is compared with others, and is a step time as well."""
    measured: list[Case] = []

    async def measure(_probe: object, case: Case, **_options: bool) -> CaseSamples:
        measured.append(case)
        return CaseSamples(case=case, samples_ms=[9.0], method=Method.BEHIND, precise=True)

    monkeypatch.setattr(engine_replay, "measure_case", measure)
    cases, longest = make_cases(tmp_path), Case(chunks=(Chunks(1, 2048, 0),))
    assert asyncio.run(cases.measure_ms(longest)) == 9.0
    asyncio.run(cases.measure([longest]))
    assert (measured, [one.case for one in cases.found]) == ([longest], [longest])


def test_failed_case_behind_decodes_does_not_end_the_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same case with its launch hidden is another measurement, and its samples stay."""

    async def measure(_probe: object, case: Case, *, hide_launch: bool) -> CaseSamples:
        if not hide_launch:
            raise WorkerError("prompts never shared a step.")
        return CaseSamples(case=case, samples_ms=[9.0], method=Method.MIXED, precise=True)

    monkeypatch.setattr(engine_replay, "measure_case", measure)
    cases = make_cases(tmp_path)
    mixed = Case(decodes=(Decodes(1, 300),), chunks=(Chunks(1, 500, 0),))
    asyncio.run(cases.measure([mixed]))
    assert asyncio.run(cases.measure_exposed(mixed)) is None
    assert [one.samples_ms for one in cases.found] == [[9.0]]
    assert capsys.readouterr().err == "A step is not measured: prompts never shared a step.\n"


SIZES = [Case(chunks=(Chunks(1, size, 0),)) for size in (16, 32, 48)]


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Case]:
    """Return the cases that are measured, of which the third interrupts the measurement the first time."""
    found: list[Case] = []

    async def measure(_probe: object, case: Case, **_options: bool) -> CaseSamples:
        found.append(case)
        if len(found) == len(SIZES):
            raise KeyboardInterrupt
        return CaseSamples(case=case, samples_ms=[9.0], method=Method.BEHIND, precise=True)

    monkeypatch.setattr(engine_replay, "measure_case", measure)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(make_cases(tmp_path).measure(SIZES))
    return found


class TestStoredCases:
    """Test a measurement of three cases that is interrupted in the third, and goes on in another process."""

    def test_only_missing_cases_are_measured(
        self, interrupted: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cases, notes = make_cases(tmp_path), []
        cases.tell = notes.append
        asyncio.run(cases.measure(SIZES))
        assert interrupted == [*SIZES, SIZES[-1]]
        assert [one.case for one in cases.found] == SIZES
        assert notes[-1] == "step times: 3 of 3 cases (2 taken over), 1 × 48 tokens at 0"
        assert "2 cases of an earlier measurement are taken over: 1 × 16 tokens at 0; 1 × 32 tokens at 0." in (
            capsys.readouterr().err
        )

    @pytest.mark.parametrize(
        ("changes", "assumed"),
        [({}, True), ({"started_s": 1_780_000_000.5}, False), ({"server": {"command": "vllm serve m"}}, False)],
        ids=["unknown", "same-process", "same-command"],
    )
    def test_unreported_flags_are_assumed_unchanged_unless_process_or_command_is_known(
        self, changes: dict[str, object], assumed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        samples = CaseSamples(case=SIZES[0], samples_ms=[9.0], method=Method.BEHIND, precise=True)
        source = msgspec.structs.replace(SOURCE, **changes)
        make_cases(tmp_path, source).file.append(StoredCase(samples=samples, hide_launch=True, seconds=1.0))
        assert capsys.readouterr().err == ""
        assert len(make_cases(tmp_path, source).file.cases) == 1
        note = (
            "Flags that the server does not report are assumed unchanged. To measure all cases again, remove this file."
        )
        assert (note in capsys.readouterr().err) == assumed

    def test_incomplete_case_is_measured_again(
        self, interrupted: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A kill leaves a part of the last line, which a complete one replaces."""
        file = tmp_path / "x.cases.jsonl"
        file.write_bytes(file.read_bytes()[:-40])
        asyncio.run(make_cases(tmp_path).measure(SIZES))
        assert "1 case of an earlier measurement is taken over" in capsys.readouterr().err
        assert interrupted == [*SIZES, *SIZES[1:]]
        assert list(make_cases(tmp_path).file.cases) == [(case, True) for case in SIZES]

    @pytest.mark.parametrize(
        ("changes", "difference"),
        [
            ({"engine": msgspec.structs.replace(ENGINE, version="0.27.0")}, "engine.version was 0.26.0 and is 0.27.0"),
            ({"server": {"command": "vllm serve --x 1"}}, "server.command was None and is vllm serve --x 1"),
            (
                {"environment": Environment(device="NVIDIA H100", device_count=2)},
                "environment.device was NVIDIA H200 and is NVIDIA H100",
            ),
            ({"path": SOURCE.path | {"dcp": 1}}, "path.dcp was 2 and is 1"),
            ({"started_s": 1_780_000_000.5}, "started_s was None and is 1780000000.5"),
        ],
        ids=["version", "flags", "GPU", "layout", "process"],
    )
    def test_cases_of_another_server_are_measured_again(
        self,
        interrupted: list[Case],
        changes: dict[str, object],
        difference: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        cases = make_cases(tmp_path, msgspec.structs.replace(SOURCE, **changes))
        asyncio.run(cases.measure(SIZES))
        assert interrupted == [*SIZES, *SIZES]
        assert f"the stored cases are measured again: {difference}." in capsys.readouterr().err

    def test_throttling_before_an_interruption_is_kept(self) -> None:
        samples = CaseSamples(case=SIZES[0], samples_ms=[9.0], method=Method.BEHIND, precise=True)
        hot = Gpu(power_w_all=600.0, throttle_reasons=["sw_power_cap"])
        earlier = [StoredCase(samples=samples, hide_launch=True, seconds=1.0, gpu=hot)]
        found = engine_replay._merge_gpu_states(Gpu(power_w_all=500.0, temperature_c_max=60), earlier)
        assert found == Gpu(temperature_c_max=60, throttle_reasons=["sw_power_cap"])


LONG = Case(decodes=(Decodes(1, 300),), chunks=(Chunks(1, 8191, 0),))


def make_mixed(ms: float, case: Case = LONG, **changes: object) -> CaseSamples:
    """Return samples of a step with decodes and a chunk, next to decode steps of 2.5 ms."""
    found = CaseSamples(case=case, samples_ms=[ms], method=Method.MIXED, precise=True, decode_ms=2.5)
    return msgspec.structs.replace(found, **changes)


class TestRequestTimes:
    """Test a step of 92 ms behind decode steps of 2.5 ms, and a request of 20 ms on the idle server, the begin of its step included."""

    IDLE = RequestTimes(request_ms=20.0, launch_ms=7.0)
    FOUND = (make_mixed(20.0, Case(decodes=(Decodes(1, 300),), chunks=(Chunks(1, 500, 0),))), make_mixed(92.0))

    def divide(self, exposed: CaseSamples | None = None, *, asynchronous: bool = True) -> tuple[float, float]:
        """Return request_ms and begin_ms."""
        times, begin_ms = engine_replay._divide_request_times(self.IDLE, self.FOUND, exposed, asynchronous=asynchronous)
        return times.request_ms, begin_ms

    @pytest.mark.parametrize(
        ("exposed_ms", "asynchronous", "begin_ms"),
        [(105.0, True, 15.5), (105.0, False, 13.0), (98.0, True, 0.0), (90.0, True, 0.0), (120.0, True, 19.9)],
        ids=["asynchronous", "synchronous", "noise", "negative", "more than the request"],
    )
    def test_begin_of_a_step_is_the_time_not_hidden_by_decode_steps(
        self, exposed_ms: float, asynchronous: bool, begin_ms: float
    ) -> None:
        """In 105 ms, 13 ms are not hidden, and 2.5 ms are if the step is decided ahead."""
        found = self.divide(make_mixed(exposed_ms), asynchronous=asynchronous)
        assert found == (pytest.approx(20 - begin_ms), begin_ms)

    def test_step_that_was_not_measured_behind_decodes_begins_at_once(self) -> None:
        assert self.divide() == (20.0, 0.0)

    @pytest.mark.parametrize(
        ("steps", "decode_ms", "asynchronous", "request_ms"),
        [(5.5, 2.5, True, 10.0), (5.5, 2.5, False, 12.5), (1.0, 2.5, True, 0.1), (5.5, 9.3, True, 20.0)],
        ids=["asynchronous", "synchronous", "at once", "long steps"],
    )
    def test_request_takes_what_its_prompt_waits_beyond_decode_steps(
        self, steps: float, decode_ms: float, asynchronous: bool, request_ms: float
    ) -> None:
        """A prompt waits for 1.5 decode steps on average, or for half a step. Steps above 9.2 ms are a tenth of the prompt's."""
        exposed = make_mixed(92.0, queued_steps=steps, decode_ms=decode_ms)
        assert self.divide(exposed, asynchronous=asynchronous)[0] == request_ms


def test_samples_are_corrected_by_the_delays_of_first_tokens() -> None:
    """At 0.8 µs, 1,000 prompt tokens take 0.8 ms. Of a step of 4 ms at least a part is left that depends on the number of samples."""
    for ms, late_tokens, expected in ((90.0, 8192, 83.4464), (90.0, -8192, 96.5536), (4.0, 16_000, 1.0)):
        several = make_mixed(ms, samples_ms=[ms] * 4, late_tokens=late_tokens)
        found = engine_replay._remove_delays(several, 0.8)
        assert found.samples_ms == [pytest.approx(expected)] * 4
