"""Test sessions over HTTP against a server that records its requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace

import msgspec
import pytest

from dcpbench.points.point import Load
from dcpbench.servers import sessions
from dcpbench.servers.answers import StreamReply
from dcpbench.servers.client import Client, Target
from dcpbench.servers.client_pool import split_load
from dcpbench.servers.events import PromptDetails, Usage
from dcpbench.servers.load import Call, LoadOptions, Outcome, Run
from dcpbench.servers.measure import _make_sample
from dcpbench.servers.prompt_format import find_prompt_format
from dcpbench.serving.loads import make_requests
from dcpbench.serving.outcome import make_rows
from tests.servers.fake_server import FakeServer, Model, Running, Script

LOAD = Load(requests=9, input_tokens="uniform:10-30", output_tokens="uniform:3-8", turns="3", turn_tokens="5", chunk=64)
GAP_S = 0.01


def run_load(
    endpoint: str,
    clients: int | None = 2,
    think_s: float = 0.0,
    script: Script | None = None,
    model: Model | None = None,
    load: Load = LOAD,
) -> tuple[FakeServer, Run]:
    """Return the requests of a server without trial requests, and the run."""

    async def main() -> tuple[FakeServer, Run]:
        async with Running(script or Script(gap_ms=GAP_S * 1e3), model or Model()) as running:
            server, target = running.server, Target.from_url(running.url)
            async with Client(target) as client:
                manner = await find_prompt_format(client, "fake", endpoint)
                server.sent.clear()
                run = Run(
                    client,
                    sessions.make_calls(
                        target,
                        manner,
                        make_requests(msgspec.structs.replace(load, think_time=think_s), manner.vocab),
                    ),
                    LoadOptions(clients=clients),
                )
                await run.send_load(time.perf_counter())
                return server, run

    return asyncio.run(main())


def group_by_session(run: Run) -> dict[int, list[int]]:
    """Return the positions of a run's outcomes by session."""
    found: dict[int, list[int]] = {}
    for place, outcome in enumerate(run.outcomes):
        found.setdefault(outcome.call.number // 3, []).append(place)
    return found


@pytest.mark.parametrize("token_ids", [True, False])
def test_prompt_of_ids_starts_with_all_previous_turns(token_ids: bool) -> None:
    """Answers are the server's if it returns their ids, or else generated ones of the same length."""
    server, run = run_load("completions", 1, script=Script(token_ids=token_ids))
    assert (len(run.outcomes), run.requests) == (9, 9)
    prompts = {o.call.number: s.body["prompt"] for o, s in zip(run.outcomes, server.sent, strict=True)}
    requests = make_requests(LOAD, server.model.vocab)
    answers = {o.call.number: o.answer.tokens for o in run.outcomes}
    for before, after in itertools.pairwise(requests):
        assert len(prompts[after.number]) == len(after.prompt)
        if after.turn:
            answer = answers[before.number] if token_ids else before.answer.tolist()
            whole = [*prompts[before.number], *answer]
            assert prompts[after.number][: len(whole)] == whole
            assert len(prompts[after.number]) == len(whole) + 5


def test_chat_has_the_answers_of_the_server_as_messages() -> None:
    server, run = run_load("chat")
    last = max(server.sent, key=lambda s: len(s.body["messages"])).body["messages"]
    assert [m["role"] for m in last] == ["user", "assistant", "user", "assistant", "user"]
    texts = {"".join(o.answer.texts) for o in run.outcomes}
    assert {m["content"] for m in last if m["role"] == "assistant"} <= texts
    assert all(m["content"] for m in last)


def test_text_prompt_continues_the_previous_text() -> None:
    server, _ = run_load("completions", script=Script(takes_ids=False, gap_ms=1.0))
    prompts = sorted((s.body["prompt"] for s in server.sent), key=len)
    assert all(isinstance(p, str) for p in prompts)
    assert sum(any(other != p and other.startswith(p) for other in prompts) for p in prompts) == 6


@pytest.mark.parametrize("clients", [2, None])
def test_turn_is_sent_after_the_think_time(clients: int | None) -> None:
    _, run = run_load("completions", clients, think_s=0.05)
    for places in group_by_session(run).values():
        for a, b in itertools.pairwise(run.outcomes[place] for place in places):
            pause = b.submitted_s - a.answer.chunk_s[-1]
            assert 0.05 <= pause < 1.0
            assert b.sent_s >= b.submitted_s


AGENTS = msgspec.structs.replace(LOAD, requests=18, subagents=3)
"""Two sessions of a turn, three sub-agents, a turn, three sub-agents and a turn."""


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("clients", [2, None])
def test_sub_agents_are_sent_at_the_same_time(endpoint: str, clients: int | None) -> None:
    """Sub-agents follow the answer of their turn and run concurrently; the next turn follows their last answer."""
    load = AGENTS if clients else msgspec.structs.replace(AGENTS, arrival="gamma", request_rate=50.0)
    _, run = run_load(endpoint, clients, 0.02, Script(gap_ms=20.0), load=load)
    outcomes = {outcome.call.number: outcome for outcome in run.outcomes}
    assert len(outcomes) == run.requests == 18
    for turn in (0, 4, 9, 13):
        agents = [outcomes[n] for n in range(turn + 1, turn + 4)]
        answered = max(agent.answer.chunk_s[-1] for agent in agents)
        assert min(agent.sent_s for agent in agents) >= outcomes[turn].answer.chunk_s[-1]
        assert max(agent.sent_s for agent in agents) < min(agent.answer.chunk_s[-1] for agent in agents)
        assert outcomes[turn + 4].submitted_s >= answered + 0.02


def test_sub_agents_share_the_prompt_and_the_answer_of_their_turn() -> None:
    """The server reads the same tokens, with its own answer, followed by 5 tokens of each sub-agent."""
    server, run = run_load("completions", 1, load=AGENTS)
    answers = {o.call.number: o.answer.tokens for o in run.outcomes}
    prompt_by_number = {n: s.body["prompt"] for n, s in zip(_match_numbers(server, run), server.sent, strict=True)}
    for turn in (0, 4, 9, 13):
        shared = [*prompt_by_number[turn], *answers[turn]]
        prompts = [prompt_by_number[n] for n in range(turn + 1, turn + 5)]  # of the sub-agents and of the next turn
        assert all(prompt[: len(shared)] == shared for prompt in prompts)
        assert [len(prompt) - len(shared) for prompt in prompts] == [5] * 4
        assert len({tuple(prompt) for prompt in prompts}) == 4


def _match_numbers(server: FakeServer, run: Run) -> list[int]:
    """Return the numbers of requests that the server read, identified by their last tokens."""
    own = {tuple(r.prompt[-5:].tolist()): r.number for r in make_requests(AGENTS, server.model.vocab)}
    assert len(own) == len(run.outcomes)
    return [own[tuple(s.body["prompt"][-5:])] for s in server.sent]


def test_session_ends_with_failed_sub_agents() -> None:
    """Prompts of 20, 29 and 38 tokens have answers of 4, so the second turn's sub-agents are too long.

    No third turn is sent.
    """
    load = msgspec.structs.replace(AGENTS, input_tokens="20", output_tokens="4")
    server, run = run_load("completions", 1, model=Model(max_model_len=38), load=load)
    assert sorted(o.call.number for o in run.outcomes) == [*range(8), *range(9, 17)]
    assert {o.call.number for o in run.outcomes if o.error is not None} == {5, 6, 7, 14, 15, 16}
    assert len(server.sent) == len(run.outcomes)


def test_session_ends_with_a_failed_turn() -> None:
    """Every turn except the first is too long for the server."""
    server, run = run_load("completions", model=Model(max_model_len=38))
    failed = [o for o in run.outcomes if o.error is not None]
    assert failed
    for places in group_by_session(run).values():
        errors = [run.outcomes[place].error is not None for place in places]
        assert not any(errors[:-1])
    assert len(server.sent) == len(run.outcomes) < 9


def test_each_session_stays_in_one_process() -> None:
    target = Target.from_url("http://127.0.0.1:1")
    manner_calls = list(range(3))

    class Made:
        def __init__(self, number: int) -> None:
            self.number, self.requests = number, 3

    shares = split_load(target, [Made(n) for n in manner_calls], LoadOptions(clients=3), 2)  # type: ignore[arg-type]
    assert sorted(call.number for part in shares for call in part.calls) == manner_calls
    assert len(shares) == 2


@pytest.mark.parametrize(("details", "cached"), [(PromptDetails(cached_tokens=16), 16), (None, None)])
def test_turn_has_the_cached_tokens_that_the_server_reports(details: PromptDetails | None, cached: int | None) -> None:
    request = make_requests(LOAD, 1000)[1]
    answer = StreamReply(1)
    answer._chunks.add_chunk(2.0, True, 1, None)  # noqa: FBT003 -- as it is called
    answer.tokens = [7]
    answer.usage = Usage(prompt_tokens=40, completion_tokens=1, prompt_tokens_details=details)
    outcome = Outcome(Call(0, b"", 1), 1.0, answer=answer, ended=True)
    sample = _make_sample(
        outcome,
        SimpleNamespace(run=SimpleNamespace(start_s=0.0), requests=[request]),
        together=False,
    )
    assert (sample.cached_tokens, make_rows([sample])[0].cached_tokens, sample.request.turn) == (cached, cached, 1)
