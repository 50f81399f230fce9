"""Test request files over HTTP: a server records when each request arrives and what the prompts have in common."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.plan.server_spec import make_server_spec
from dcpbench.points.structured_options import RequestFile
from dcpbench.servers import measure, sessions
from dcpbench.servers.client import Client, Target
from dcpbench.servers.load import LoadOptions, Run
from dcpbench.servers.prompt_format import find_prompt_format
from dcpbench.serving.loads import make_requests
from dcpbench.serving.replay import replay_requests
from dcpbench.serving.scheduler import Scheduler
from tests.servers.fake_server import Running, Script, Sent
from tests.unit import virtual_serving
from tests.unit.test_replay import Fixed

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.plan.server_spec import ServerSpec
    from dcpbench.points.point import Load


@dataclasses.dataclass(frozen=True)
class Case:
    """Describe a file and its requests."""

    text: str
    arrivals: list[float]  # s after the first request
    prompts: list[int]  # tokens
    answers: list[int]
    shared: list[int]  # common prefix with the previous prompt, in tokens
    share: float | None  # share of prompt tokens that were in earlier prompts
    reading: str
    option: str = "{path}"


def to_json_lines(*rows: dict[str, Any]) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def make_mooncake_row(timestamp: float, tokens: int, hashes: list[int], output: int = 2) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": hashes}


def make_qwen_row(chat: int, parent: int, timestamp: float, tokens: int, hashes: list[int]) -> dict[str, Any]:
    turn = 1 if parent < 0 else 2
    more = {"chat_id": chat, "parent_chat_id": parent, "type": "text", "turn": turn}
    return more | make_mooncake_row(timestamp, tokens, hashes)


FULL = list(range(116))  # common blocks of 512 tokens of two 64k prompts: 59,392 of 65,536 tokens are 90.6 %
CASES = {
    "mooncake": Case(
        to_json_lines(
            make_mooncake_row(27_482, 1_100, [1, 2, 3]),
            make_mooncake_row(27_582, 1_300, [1, 2, 4]),
            make_mooncake_row(27_732, 600, [1, 9]),
        ),
        [0.0, 0.1, 0.25],
        [1_100, 1_300, 600],
        [2, 2, 2],
        [1_024, 512],
        (1_024 + 512) / 3_000,
        "format=mooncake,time-unit=ms,block-size=512",
    ),
    "mooncake of 64 k, nine tenths shared": Case(
        to_json_lines(
            *(make_mooncake_row(100 * i, 65_536, [*FULL, *(1_000 * (i + 1) + j for j in range(12))]) for i in range(2))
        ),
        [0.0, 0.1],
        [65_536, 65_536],
        [2, 2],
        [59_392],
        59_392 / 131_072,
        "format=mooncake,time-unit=ms,block-size=512",
    ),
    "mooncake in s, with blocks of 64": Case(
        to_json_lines(make_mooncake_row(0, 130, [1, 2, 3]), make_mooncake_row(0.2, 128, [1, 5])),
        [0.0, 0.2],
        [130, 128],
        [2, 2],
        [64],
        64 / 258,
        "format=mooncake,time-unit=s,block-size=64",
        "{path},time-unit=s,block-size=64",
    ),
    "qwen": Case(
        to_json_lines(make_qwen_row(1, -1, 61.114, 40, [7, 8, 9]), make_qwen_row(2, 1, 61.314, 60, [7, 8, 10, 11])),
        [0.0, 0.2],
        [40, 60],
        [2, 2],
        [32],
        32 / 100,
        "format=qwen,time-unit=s,block-size=16",
    ),
    "burstgpt": Case(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n5,ChatGPT,30,0,30,Conversation log\n5.2,GPT-4,99,3,102,API log\n",
        [0.0, 0.2],
        [472, 99],
        [18, 3],
        [0],
        None,
        "format=burstgpt,time-unit=s",
    ),
    "azure 2023": Case(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.9799600,374,4\n2023-11-17 00:00:00.1799605,396,9\n",
        [0.0, 0.2000005],
        [374, 396],
        [4, 9],
        [0],
        None,
        "format=azure,time-unit=date",
    ),
    "azure 2024": Case(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00+00:00,2162,5\n2024-05-10 00:00:00.150930+00:00,200,6\n",
        [0.0, 0.15093],
        [2162, 200],
        [5, 6],
        [0],
        None,
        "format=azure,time-unit=date",
    ),
    "named columns": Case(
        "when,in,out\n1000,40,3\n151000,50,4\n",
        [0.0, 0.15],
        [40, 50],
        [3, 4],
        [0],
        None,
        "format=columns,columns=arrival:when/input_tokens:in/output_tokens:out,time-unit=us",
        "{path},columns=arrival:when/input_tokens:in/output_tokens:out,time-unit=us",
    ),
}
SESSIONS = to_json_lines(
    {"session_id": "a", "timestamp": 1_000, "input_length": 40, "output_length": 3},
    {"session_id": "b", "timestamp": 1_050, "input_length": 30, "output_length": 2},
    {"session_id": "a", "delay": 120, "input_length": 10, "output_length": 4},
    {"session_id": "a", "delay": 30, "input_length": 7, "output_length": 2},
    {"session_id": "b", "timestamp": 1_400, "input_length": 5, "output_length": 2},
)
"""AIPerf's sessions: three turns of one, and two of another, of which the second has its own time."""


def read(tmp_path: Path, text: str, option: str = "{path}", **given: Any) -> ServerSpec:
    path = tmp_path / "requests.data"
    path.write_text(text)
    typed = RequestFile.parse(option.format(path=path)).collect_fields()
    return make_server_spec({**typed, **given}, cpu=True)


def send(spec: ServerSpec, clients: int | None = None, gap_ms: float = 1.0) -> tuple[list[Sent], Run]:
    """Return the requests that a server got for the first load, and the run, both by request number.

    On a busy machine requests may arrive in another order.
    """

    async def main() -> tuple[list[Sent], Run]:
        async with Running(Script(gap_ms=gap_ms)) as running:
            target = Target.from_url(running.url)
            async with Client(target) as client:
                manner = await find_prompt_format(client, "fake", "completions")
                running.server.sent.clear()
                (point, *_) = spec.make_points("vllm", "fake")
                requests = measure._make_requests(point, spec.settings, manner.vocab)
                run = Run(client, sessions.make_calls(target, manner, requests), LoadOptions(clients=clients))
                await run.send_load(time.perf_counter() + 0.05)
                run.outcomes.sort(key=lambda outcome: outcome.call.number)
                bodies = [json.loads(outcome.call.data.partition(b"\r\n\r\n")[2]) for outcome in run.outcomes]
                return sorted(running.server.sent, key=lambda one: bodies.index(one.body)), run

    return asyncio.run(main())


def count_common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def get_load(spec: ServerSpec) -> Load:
    return next(load for _, load in spec.loads.iter_loads())


@pytest.mark.parametrize("name", CASES)
def test_each_request_arrives_on_time_with_its_prefix(name: str, tmp_path: Path) -> None:
    """Due times are exact and no request is early, so no timestamp can have been read in another unit."""
    case = CASES[name]
    spec = read(tmp_path, case.text, case.option)
    sent, run = send(spec)
    assert [len(s.body["prompt"]) for s in sent] == case.prompts
    assert [s.body["max_tokens"] for s in sent] == case.answers
    prompts = [s.body["prompt"] for s in sent]
    assert [count_common(a, b) for a, b in itertools.pairwise(prompts)] == case.shared
    assert [o.submitted_s - run.start_s for o in run.outcomes] == pytest.approx(case.arrivals, abs=1e-9)
    assert all(s.came_s >= run.start_s + due for s, due in zip(sent, case.arrivals, strict=True))
    load = get_load(spec)
    assert load.trace_reading == case.reading
    assert load.trace_facts is not None
    assert load.trace_facts.span_s == pytest.approx(case.arrivals[-1], abs=1e-9)
    assert load.trace_facts.prefix_share == (None if case.share is None else pytest.approx(case.share))


@pytest.mark.parametrize("name", CASES)
def test_replay_serves_the_same_requests_at_the_same_times(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    spec = read(tmp_path, case.text, case.option, mode="replay")
    requests = make_requests(get_load(spec), 10_000, tmp_path / "requests.data")
    assert [r.output_tokens for r in requests] == case.answers
    prompts = [r.prompt.tolist() for r in requests]
    assert [count_common(a, b) for a, b in itertools.pairwise(prompts)] == case.shared
    scheduler = Scheduler(virtual_serving.make_config(pages=20_000, chunk=8192, max_requests=4))
    samples = replay_requests(requests, scheduler, None, Fixed(1.0)).traffic.samples
    assert [s.submitted_s for s in samples] == pytest.approx(case.arrivals, abs=1e-9)
    assert all(s.is_finished for s in samples)


class TestSessions:
    """Test turns of AIPerf's sessions: 40 → 40 + 3 + 10 → 53 + 4 + 7 tokens, and 30 → 30 + 2 + 5."""

    def test_turns_follow_their_answers_after_their_delays(self, tmp_path: Path) -> None:
        spec = read(tmp_path, SESSIONS)
        sent, run = send(spec)
        outcomes = {o.call.number: o for o in run.outcomes}
        prompts = {o.call.number: s.body["prompt"] for o, s in zip(run.outcomes, sent, strict=True)}
        assert [len(prompts[number]) for number in range(5)] == [40, 53, 64, 30, 37]
        for before, after in ((0, 1), (1, 2), (3, 4)):
            whole = [*prompts[before], *outcomes[before].answer.tokens]
            assert prompts[after][: len(whole)] == whole
        starts = [outcomes[number].submitted_s - run.start_s for number in range(5)]
        assert (starts[0], starts[3]) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.05, abs=1e-9))
        for before, after, delay in ((0, 1, 0.12), (1, 2, 0.03)):
            assert outcomes[after].submitted_s >= outcomes[before].answer.chunk_s[-1] + delay
        assert starts[4] >= 0.4 - 1e-9

    def test_replay_has_exactly_the_same_delays(self, tmp_path: Path) -> None:
        """With steps of 1 ms each turn is due its delay after the last token of the previous turn, or at its time."""
        spec = read(tmp_path, SESSIONS, mode="replay")
        load = get_load(spec)
        requests = make_requests(load, 10_000, tmp_path / "requests.data")
        scheduler = Scheduler(virtual_serving.make_config(pages=2_000, max_requests=4))
        traffic = replay_requests(requests, scheduler, None, Fixed(1.0)).traffic
        found = {number: sample.submitted_s for number, sample in traffic.sample_of.items()}
        ends = {number: sample.token_s[-1] for number, sample in traffic.sample_of.items()}
        assert found[0] == 0.0
        assert found[3] == pytest.approx(0.05)
        assert found[1] == pytest.approx(ends[0] + 0.12)
        assert found[2] == pytest.approx(ends[1] + 0.03)
        assert found[4] == pytest.approx(0.4)
        assert load.trace_facts is not None
        assert load.trace_facts.sessions == 2
        assert load.trace_facts.prefix_share == pytest.approx((43 + 57 + 32) / (40 + 53 + 64 + 30 + 37))

    def test_each_client_of_a_closed_loop_has_its_own_session(self, tmp_path: Path) -> None:
        sent, run = send(read(tmp_path, SESSIONS, concurrency="1"), clients=1)
        assert [o.call.number for o in run.outcomes] == [0, 1, 2, 3, 4]
        assert [len(s.body["prompt"]) for s in sent] == [40, 53, 64, 30, 37]


class TestAgents:
    """Test agent sessions: 90 of 100 tokens of a first prompt are common to all, and turns branch."""

    def spec(self, **changes: Any) -> ServerSpec:
        given = {"turns": "6", "input_tokens": "10", "turn_tokens": "5", "output_tokens": "3", "system_tokens": 90}
        return make_server_spec(given | {"num_requests": 24, "concurrency": "2", "branch": 0.5} | changes, cpu=True)

    def test_prompts_form_a_tree_with_the_answers_of_the_server(self) -> None:
        spec = self.spec()
        sent, run = send(spec, clients=2)
        plain = {r.number: r for r in make_requests(get_load(spec), 10_000)}
        prompts = {o.call.number: s.body["prompt"] for o, s in zip(run.outcomes, sent, strict=True)}
        answers = {o.call.number: o.answer.tokens for o in run.outcomes}
        assert sorted(prompts) == list(range(24))
        branches = [r for r in plain.values() if r.turn and r.parent != r.number - 1]
        assert branches
        for number, request in plain.items():
            assert len(prompts[number]) == request.prompt_tokens
            if request.turn:
                whole = [*prompts[request.parent], *answers[request.parent]]
                assert prompts[number][: len(whole)] == whole
                assert len(prompts[number]) == len(whole) + 5
        firsts = [prompts[number] for number in plain if not plain[number].turn]
        assert {len(first) for first in firsts} == {100}
        assert {count_common(firsts[0], first) for first in firsts[1:]} == {90}

    def test_tool_delays_separate_an_answer_and_the_next_turn(self) -> None:
        spec = self.spec(num_requests=12, think_time="uniform:0.01-0.06")
        _, run = send(spec, clients=2)
        delays = {r.number: r.delay_s for r in make_requests(get_load(spec), 10_000)}
        outcomes = {o.call.number: o for o in run.outcomes}
        for number in (n for n in outcomes if n % 6):
            assert 0.01 <= delays[number] <= 0.06
            assert outcomes[number].submitted_s >= outcomes[number - 1].answer.chunk_s[-1] + delays[number]
