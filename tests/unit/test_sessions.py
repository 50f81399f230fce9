"""Test sessions of several turns: their requests, their cached tokens, and agreement of replays with live runs."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from dcpbench.errors import UsageError
from dcpbench.plan.serve_spec import ServeLoads, get_serve_defaults, read_loads
from dcpbench.points.device_probe import Probe
from dcpbench.points.point import Load, Point
from dcpbench.reports.record_tables import build_turns_table as build_table
from dcpbench.serving.load_words import format_load
from dcpbench.serving.loads import compute_extent, compute_turn_numbers, draw_lengths, make_requests
from dcpbench.serving.outcome import StepCounts, compute_serve_metrics, make_rows
from dcpbench.serving.replay import replay_requests
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.traffic import Traffic
from dcpbench.workloads import serving_loop
from dcpbench.workloads.serving_loop import Loop, RankZeroBroadcast
from tests.unit.test_replay import Fixed
from tests.unit.test_replay_loop import Clock, Device
from tests.unit.virtual_serving import make_config, make_request
from tests.unit.virtual_serving import serve as virtually

VOCAB = 1000
GPUS = Probe(device="cuda", count=1, name="")
PAGE = 16


def make_load(**changes: object) -> Load:
    """Return a load of twelve turns, in sessions of two to four, with 20 to 60 tokens in and out."""
    usual: dict[str, object] = {
        "requests": 12,
        "input_tokens": "uniform:20-60",
        "output_tokens": "uniform:20-60",
        "turns": "uniform:2-4",
        "chunk": 64,
    }
    return Load(**(usual | changes))


class TestLoads:
    @pytest.mark.parametrize("turn_tokens", ["", "7"])
    def test_prompt_begins_with_the_history_of_its_session(self, turn_tokens: str) -> None:
        found = make_requests(make_load(turn_tokens=turn_tokens), VOCAB)
        assert [r.number for r in found] == list(range(12))
        later = [(a, b) for a, b in itertools.pairwise(found) if b.turn]
        assert len(later) >= 6
        for before, after in later:
            assert (after.session, after.turn) == (before.session, before.turn + 1)
            history = np.concatenate((before.prompt, before.answer))
            assert len(before.answer) == before.output_tokens
            assert (after.prompt[: len(history)] == history).all()
            if turn_tokens:
                assert len(after.prompt) == len(history) + 7
        firsts = [r for r in found if not r.turn]
        assert [r.session for r in firsts] == list(range(len(firsts)))
        assert all((r.answer is None) == (r.number + 1 == 12 or found[r.number + 1].turn == 0) for r in found)

    def test_longest_request_is_a_last_turn(self) -> None:
        load = make_load(turns="4", input_tokens="10", output_tokens="5")
        found = make_requests(load, VOCAB)
        assert [len(r.prompt) for r in found] == 3 * [10, 25, 40, 55]
        assert (compute_extent(load).shortest, compute_extent(load).longest, compute_extent(load).output) == (
            15,
            60,
            60,
        )

    def test_sessions_arrive_at_the_rate_and_turns_after_answers(self) -> None:
        found = make_requests(make_load(arrival="gamma", request_rate=2.0, turns="3"), VOCAB)
        times = [r.arrival_s for r in found]
        assert times[0] == 0
        assert [at is None for at in times] == 4 * [False, True, True]
        assert times[::3] == sorted(times[::3])

    def test_load_with_one_turn_equals_one_without_sessions(self) -> None:
        load = make_load(turns="1")
        assert str(load) == str(
            Load(requests=12, input_tokens="uniform:20-60", output_tokens="uniform:20-60", chunk=64)
        )
        assert all(r.session is None and r.answer is None for r in make_requests(load, VOCAB))

    def test_load_text_describes_the_sessions(self) -> None:
        text = format_load(make_load(turns="4", turn_tokens="7", think_time=2.5), 3)
        assert "in sessions of 4 turns, 7 new tokens each later turn, 2.5 s between turns" in text


def replay(load: Load, clients: int | None, **changes: object) -> Traffic:
    """Replay the load with artificial step times and virtual pages of PAGE tokens."""
    scheduler = Scheduler(make_config(page_size=PAGE, **changes))
    return replay_requests(make_requests(load, VOCAB), scheduler, clients, Fixed()).traffic


def get_cached_tokens(traffic: Traffic) -> dict[int, int]:
    return {s.request.number: s.sequence.cached for s in traffic.samples if s.sequence is not None}


class TestCache:
    def test_turn_finds_all_full_pages_of_its_history(self) -> None:
        """The last token of an answer has no KV, as it is never read; the last token of a prompt is always computed."""
        load = make_load()
        traffic = replay(load, 1)
        found = get_cached_tokens(traffic)
        for before, after in itertools.pairwise(make_requests(load, VOCAB)):
            stored = min(len(before.prompt) + before.output_tokens - 1, len(after.prompt) - 1)
            assert found[after.number] == (stored // PAGE * PAGE if after.turn else 0)

    def test_cached_tokens_are_part_of_the_prompt_tokens(self) -> None:
        traffic = replay(make_load(requests=40), 4)
        metrics = compute_serve_metrics(traffic.samples, gpus=1, concurrency=4, slo={}, steps=StepCounts())
        assert metrics.finished == 40
        assert metrics.preemptions == 0
        assert metrics.cached_tokens == sum(get_cached_tokens(traffic).values())
        assert 0 < metrics.cached_tokens < metrics.input_tokens

    def test_no_tokens_are_cached_without_the_prefix_cache(self) -> None:
        assert set(get_cached_tokens(replay(make_load(), 4, prefix_cache=False)).values()) == {0}

    def test_larger_kv_cache_caches_more_tokens(self) -> None:
        """Eight sessions in flight pause long enough for others to take their pages."""
        load = make_load(requests=64, turns="4", think_time=3.0)
        shares = [sum(get_cached_tokens(replay(load, 8, pages=pages)).values()) for pages in (41, 81, 321)]
        assert shares == sorted(set(shares))

    def test_session_stays_on_its_replica(self) -> None:
        traffic = replay(make_load(requests=40), 8, replicas=2)
        homes = [{s.sequence.replica for s in traffic.samples if s.request.session == n} for n in range(8)]
        assert all(len(home) == 1 for home in homes)
        assert {replica for home in homes for replica in home} == {0, 1}


class TestTimes:
    def test_next_turn_is_submitted_after_the_think_time(self) -> None:
        traffic = replay(make_load(think_time=0.25), 2)
        by_number = traffic.sample_of
        later = [turn.number for turn in make_requests(make_load(), VOCAB) if turn.turn]
        assert later
        for number in later:
            assert by_number[number].submitted_s == by_number[number - 1].token_s[-1] + 0.25

    def test_client_has_one_session_at_a_time(self) -> None:
        traffic = replay(make_load(requests=40, think_time=0.1), 3)
        ends: dict[int, float] = {}
        begins: dict[int, float] = {}
        for s in traffic.samples:
            begins.setdefault(s.request.session, s.submitted_s)
            ends[s.request.session] = s.token_s[-1]
        for at in begins.values():
            assert sum(begins[n] <= at < ends[n] for n in begins) <= 3

    def test_session_ends_if_a_turn_is_rejected(self) -> None:
        """Prompts have 30, 80 and 130 tokens; 8 pages hold 128."""
        load = make_load(requests=6, turns="3", input_tokens="30", output_tokens="20")
        traffic = replay(load, 1, pages=9)
        assert [bool(s.rejected) for s in traffic.samples] == 2 * [False, False, True]
        assert traffic.is_done

    def test_stopped_traffic_submits_no_more_turns(self) -> None:
        scheduler = Scheduler(make_config(page_size=PAGE))
        traffic = Traffic(make_requests(make_load(), VOCAB), scheduler, 2)
        traffic.submit(*traffic.count_due(0.0), 0.0)
        traffic.stop()
        assert (traffic.is_done, traffic.count_due(9.0), traffic.find_next_arrival_s()) == (True, (0, 0), None)

    @pytest.mark.parametrize("think_time", [0.0, 0.07])
    @pytest.mark.parametrize("clients", [3, None])
    def test_live_and_replay_have_equal_times_and_cached_tokens(
        self, clients: int | None, think_time: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pool is so small that it evicts pages."""
        open_loop = {} if clients else {"arrival": "gamma", "request_rate": 20.0}
        load = make_load(requests=40, think_time=think_time, **open_loop)
        setup, clock = make_config(page_size=PAGE, pages=41 if clients else 121), Clock()
        monkeypatch.setattr(serving_loop, "time", clock)
        scheduler = Scheduler(setup)
        traffic = Traffic(make_requests(load, VOCAB), scheduler, clients)
        loop = Loop(Device(Fixed(4.0), clock), scheduler, traffic, RankZeroBroadcast())
        while loop.iterate():
            pass
        found = replay_requests(make_requests(load, VOCAB), Scheduler(setup), clients, Fixed(4.0))
        seen, replayed = (
            [(r.number, r.cached_tokens, r.token_s) for r in make_rows(t.samples)] for t in (traffic, found.traffic)
        )
        assert seen == replayed
        assert any(c for _, c, _ in seen)

    def test_later_prompt_has_the_sampled_tokens_of_earlier_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The simulated device samples zeros."""
        clock = Clock()
        monkeypatch.setattr(serving_loop, "time", clock)
        scheduler = Scheduler(make_config(page_size=PAGE))
        load = make_load(requests=3, turns="3", input_tokens="5", output_tokens="4")
        traffic = Traffic(make_requests(load, VOCAB), scheduler, 1)
        loop = Loop(Device(Fixed(), clock), scheduler, traffic, RankZeroBroadcast())
        while loop.iterate():
            pass
        last = traffic.samples[-1].request
        assert len(last.ids) == len(last.prompt) == 23
        assert last.ids[5:9].tolist() == last.ids[14:18].tolist() == [0, 0, 0, 0]
        own = np.r_[0:5, 9:14, 18:23]
        assert (last.ids[own] == last.prompt[own]).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"think_time": 3.0}, "--sessions think without turns: no request has a next turn; add for example turns=4"),
        ({"turn_tokens": "7"}, "--sessions tokens without turns"),
        ({"turns": "4", "think_time": -1.0}, "--sessions think=-1.0: not 0 to 86,400 seconds"),
        ({"turns": "4", "think_time": math.nan}, "--sessions think=nan: not 0 to 86,400 seconds"),
        ({"turns": "20000"}, "--sessions turns=20000: a session has at most 10,000 turns"),
    ],
)
def test_invalid_session_options_are_refused(options: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        ServeLoads(num_requests=8, input_tokens=("10",), output_tokens=("5",), chunk=(64,), **options)


def test_turn_that_waits_for_its_replica_does_not_delay_other_replicas() -> None:
    """Replica 0 is full; a new request behind the waiting turn goes to replica 1."""
    scheduler = Scheduler(make_config(page_size=PAGE, replicas=2, max_requests=1))
    first, turn, *_ = make_requests(make_load(requests=2, turns="2", input_tokens="20", output_tokens="2"), VOCAB)
    others = [make_request(number, outputs=40) for number in (5, 6)]
    traffic = Traffic([first], scheduler, 1)
    traffic.submit(0, 1, 0.0)
    while scheduler.plan_step():
        pass
    assert scheduler.homes == {0: 0}
    scheduler.submit(others[0])
    scheduler.plan_step()
    scheduler.submit(turn)
    scheduler.submit(others[1])
    scheduler.plan_step()
    assert [len(r.running) for r in scheduler.replicas] == [1, 1]
    assert [s.request.number for s in scheduler.waiting] == [turn.number]


def test_metrics_and_table_have_the_cached_tokens_of_each_turn() -> None:
    """Four sessions of three turns of 20 tokens in and 20 out have prompts of 20, 60 and 100 tokens. The last token of
    the history of 40 and 80 was never stored, so that full pages of 16 have 32 and 64 tokens.
    """
    load = make_load(turns="3", input_tokens="20", output_tokens="20")
    traffic, counts = virtually(make_requests(load, VOCAB), concurrency=2, pages=2000)
    found = compute_serve_metrics(traffic.samples, gpus=1, concurrency=2, slo={}, steps=counts)
    assert [(t.turn, t.requests, t.input_tokens, t.cached_tokens) for t in found.turns] == [
        (1, 4, 80, 0),
        (2, 4, 240, 128),
        (3, 4, 400, 256),
    ]
    assert found.cached_tokens == 128 + 256
    point = Point(
        model="tiny",
        tp=1,
        workload="serve",
        concurrency=2,
        context=120,
        backend="reference",
        dtype="fp32",
        page_size=16,
        weights="synthetic",
        load=load,
    )
    frames = SimpleNamespace(records=[SimpleNamespace(serve=found, point=point)])
    assert [row[2:6] for row in build_table(frames, "live").rows] == [
        ["1", "4", "20", "0 %"],
        ["2", "4", "60", "53 %"],
        ["3", "4", "100", "64 %"],
    ]
    assert build_table(frames, "replay").rows == []
    point = msgspec.structs.replace(point, load=make_load(turns="2", subagents=3))
    frames = SimpleNamespace(records=[SimpleNamespace(serve=found, point=point)])
    assert [row[2] for row in build_table(frames, "live").rows] == ["1", "1, sub-agents", "2"]


def test_concurrency_above_the_number_of_sessions_is_refused() -> None:
    """The 16 requests of 8 turns are two sessions, which also limit the default concurrency."""
    plain = {"num_requests": 16, "input_tokens": ("32",), "output_tokens": ("8",), "chunk": (64,)}
    with pytest.raises(
        UsageError,
        match=r"--concurrency 4 is more than there are sessions of --sessions turns=8 \(2, with 16 requests\)",
    ):
        list(ServeLoads(**plain, concurrency=(4,), turns="8").iter_loads())
    assert [c for c, _ in ServeLoads(**plain, concurrency=(2,), turns="8").iter_loads()] == [2]
    with pytest.raises(
        UsageError, match="use --num-requests 128, or a smaller"
    ):  # 4 turns, 3 times 20 sub-agents: 64 each
        list(ServeLoads(**plain, concurrency=(2,), turns="4", subagents=20).iter_loads())
    assert read_loads({"turns": "8"}, plain | {"concurrency": (4,)})[0].concurrency == (2,)
    assert read_loads({}, plain | {"concurrency": (4,)})[0].concurrency == (4,)


class TestAgents:
    """Test loads of agents: a common system prompt, gaps of tools, and turns that branch off earlier ones."""

    def test_all_sessions_begin_with_the_same_system_prompt(self) -> None:
        """The system prompt has 90 of 100 tokens of each first prompt."""
        load = make_load(turns="3", input_tokens="10", turn_tokens="5", output_tokens="4", system_tokens=90)
        found = make_requests(load, VOCAB)
        firsts = [r.prompt for r in found if not r.turn]
        assert [len(prompt) for prompt in firsts] == [100] * 4
        assert all((prompt[:90] == firsts[0][:90]).all() for prompt in firsts)
        assert not any((a[90:] == b[90:]).all() for a, b in itertools.combinations(firsts, 2))
        assert [r.prompt_tokens for r in found[:3]] == [100, 109, 118]
        assert compute_extent(load).longest == 122

    def test_branch_continues_an_earlier_answer(self) -> None:
        """Every prompt has that of its parent, the parent's answer, and 5 tokens; the parent of a branch is not the
        previous turn.
        """
        load = make_load(requests=400, turns="20", turn_tokens="5", input_tokens="10", output_tokens="4", branch=0.5)
        found = make_requests(load, VOCAB)
        later = [r for r in found if r.turn > 1]
        branches = [r for r in later if r.parent != r.number - 1]
        assert 0.4 < len(branches) / len(later) < 0.6
        for r in (r for r in found if r.turn):
            parent = found[r.parent]
            assert parent.session == r.session
            assert parent.turn < r.turn
            assert parent.answer is not None
            assert r.prompt[: len(r.prompt) - 5].tolist() == [*parent.prompt.tolist(), *parent.answer.tolist()]
        assert compute_extent(load).longest == max(r.prompt_tokens + r.output_tokens for r in found)

    @pytest.mark.parametrize("branch", [0.0, 0.6])
    def test_only_continued_requests_have_an_answer(self, branch: float) -> None:
        found = make_requests(make_load(requests=60, branch=branch), VOCAB)
        continued = {r.parent for r in found}
        assert all((r.answer is not None) == (r.number in continued) for r in found)

    def test_branch_finds_the_history_of_its_parent_in_the_cache(self) -> None:
        """With branches, the cache has all full pages except those of the new tokens of a turn."""
        load = make_load(requests=40, turns="8", turn_tokens="32", input_tokens="64", output_tokens="16", branch=0.5)
        traffic = replay(load, 1)
        requests = make_requests(load, VOCAB)
        for number, tokens in get_cached_tokens(traffic).items():
            r = requests[number]
            if r.turn:
                parent = requests[r.parent]
                # The last token of an answer is never read, so that its row is not stored.
                assert tokens >= (parent.prompt_tokens + parent.output_tokens - 1) // PAGE * PAGE

    @pytest.mark.parametrize(
        ("think", "mean"), [("uniform:1-3", 2.0), ("lognormal:2:0.5", 2 * math.exp(0.125)), (2.0, 2.0)]
    )
    def test_think_times_have_their_distribution(self, think: float | str, mean: float) -> None:
        found = make_requests(make_load(requests=4000, turns="20", think_time=think, input_tokens="1"), VOCAB)
        delays = [r.delay_s for r in found if r.turn]
        assert np.mean(delays) == pytest.approx(mean, rel=0.05)
        assert all(r.delay_s == 0 for r in found if not r.turn)

    @pytest.mark.parametrize("clients", [1, 3, None])
    def test_turn_is_submitted_after_its_own_think_time(self, clients: int | None) -> None:
        """In virtual time, each turn is submitted exactly its own gap after the last token of the previous one."""
        open_loop = {} if clients else {"arrival": "gamma", "request_rate": 20.0}
        load = make_load(requests=40, think_time="uniform:0.01-0.5", branch=0.3, **open_loop)
        requests, traffic = make_requests(load, VOCAB), replay(load, clients)
        ends = {number: sample.token_s[-1] for number, sample in traffic.sample_of.items()}
        assert len(ends) == 40
        for number, sample in traffic.sample_of.items():
            if requests[number].turn:
                assert sample.submitted_s == pytest.approx(ends[number - 1] + requests[number].delay_s)

    def test_coding_agent_preset_has_the_published_sizes(self) -> None:
        """Calls of a run: p50 30, p90 57. First prompts: p50 12,278, p90 12,813. Outputs of a call: 522.

        A cache that forgets nothing has 97 % of the prompt tokens; the server of the published runs had 94 %.
        """
        loads, _ = read_loads(
            {"session_preset": "coding-agent", "num_requests": 20_000, "concurrency": (1,)}, get_serve_defaults(GPUS)
        )
        ((_, load),) = loads.iter_loads()
        inputs, outputs = draw_lengths(load)
        turns = compute_turn_numbers(load)
        starts = np.flatnonzero(turns == 0)
        calls = np.diff(starts)
        assert np.percentile(calls, [50, 90]) == pytest.approx([30, 57], rel=0.08)
        assert np.percentile(inputs[starts], [50, 90]) == pytest.approx([12_278, 12_813], rel=0.01)
        assert outputs.mean() == pytest.approx(522, rel=0.01)
        new = inputs - np.where(turns == 0, 12_000, np.roll(inputs + outputs, 1))
        assert 1 - new.sum() / inputs.sum() == pytest.approx(0.97, abs=0.01)
        assert load.think_time == 1.9

    def test_options_take_precedence_over_the_preset(self) -> None:
        typed = {"session_preset": "coding-agent", "turns": "4", "think_time": 0.5, "concurrency": (1,)}
        loads, _ = read_loads(typed, get_serve_defaults(GPUS))
        assert (loads.turns, loads.think_time, loads.system_tokens) == ("4", 0.5, 12_000)

    def test_unknown_preset_is_refused(self) -> None:
        with pytest.raises(UsageError, match="--sessions preset=chat: not one of coding-agent"):
            read_loads({"session_preset": "chat"}, get_serve_defaults(GPUS))

    def test_all_ranks_submit_the_turns_that_one_rank_chose(self) -> None:
        """Two ranks receive the answers of two sessions at different times, so that the turns are due in another order
        on each.
        """
        load = make_load(requests=4, turns="2", input_tokens="20", output_tokens="4", think_time="uniform:0.1-0.11")
        requests = make_requests(load, VOCAB)
        submitted = []
        chosen: list[int] | None = None
        for answered in ((1.0, 1.5), (1.5, 1.0)):
            traffic = Traffic(requests, Scheduler(make_config(page_size=PAGE)), 2)
            traffic.submit(0, 2, 0.0)
            for number, now in zip((0, 2), answered, strict=True):
                sequence = SimpleNamespace(request=requests[number])
                traffic.record_tokens(SimpleNamespace(replicas=[], finished=[sequence]), now)  # type: ignore[arg-type]
            own = traffic.list_next_turns(2)
            chosen = chosen or own
            traffic.submit(2, 0, 2.0, chosen)
            submitted.append(([sample.request.number for sample in traffic.samples], own))
        assert submitted == [([0, 2, 1, 3], [1, 3]), ([0, 2, 1, 3], [3, 1])]


class TestSubAgents:
    """Test requests that continue a turn at the same time, before the next turn."""

    LOAD = make_load(requests=22, turns="3", turn_tokens="5", input_tokens="10", output_tokens="4", subagents=4)

    def test_each_turn_except_the_last_is_followed_by_its_sub_agents(self) -> None:
        """The 3 turns and 2 · 4 sub-agents are 11 requests, with prompts of 10, 19 (five times) and 28 tokens (five
        times).
        """
        found = make_requests(self.LOAD, VOCAB)
        first, second = found[:11], found[11:]
        assert [r.turn for r in first] == [0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 4]
        assert [r.parent for r in first] == [None, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5]
        assert [r.prompt_tokens for r in first] == [10, 19, 19, 19, 19, 19, 28, 28, 28, 28, 28]
        assert [r.session for r in found] == [0] * 11 + [1] * 11
        assert [r.parent for r in second[1:]] == [r.parent + 11 for r in first[1:]]
        for r in (r for r in found if r.turn):
            parent = found[r.parent]
            assert r.prompt[: len(r.prompt) - 5].tolist() == [*parent.prompt.tolist(), *parent.answer.tolist()]
        assert len({r.prompt[-5:].tobytes() for r in found}) == len(found)
        assert compute_extent(self.LOAD).longest == 32

    @pytest.mark.parametrize("clients", [2, None])
    def test_sub_agents_run_at_the_same_time_before_the_next_turn(self, clients: int | None) -> None:
        rate = {} if clients else {"arrival": "gamma", "request_rate": 4.0}
        load = msgspec.structs.replace(self.LOAD, think_time=0.25, output_tokens="uniform:2-9", **rate)
        traffic = replay(load, clients, max_requests=16)
        samples = traffic.sample_of
        assert len(samples) == 22
        for number in range(0, 22, 11):
            for turn in (number, number + 5):
                agents, ends = range(turn + 1, turn + 5), samples[turn].token_s[-1]
                assert {samples[n].submitted_s for n in agents} == {ends}
                joined = max(samples[n].token_s[-1] for n in agents)
                assert samples[turn + 5].submitted_s == joined + 0.25
        assert traffic.ended == 2

    def test_sub_agents_find_their_common_history_in_the_cache(self) -> None:
        """Prompts have 64 tokens, and 16 more each time: a sub-agent finds the turn and its answer, in full pages of 16
        tokens.
        """
        load = msgspec.structs.replace(self.LOAD, input_tokens="64", turn_tokens="32", output_tokens="17")
        found = get_cached_tokens(replay(load, 1, max_requests=4))
        assert [found[n] for n in range(11)] == [0, *[80] * 5, *[128] * 5]

    def test_closed_loop_has_the_requests_of_all_sub_agents_in_flight(self) -> None:
        point = Point(
            model="deepseek-v3", tp=4, dp=2, workload="serve", concurrency=6, context=60, backend="flashinfer", dtype="bf16",
            page_size=16, load=self.LOAD,
        )  # fmt: skip
        assert (point.clients, point.max_requests) == (6, 24)
        assert SchedulerConfig.from_point(point, pages=99, max_context=60).max_requests == 12
        open_loop = msgspec.structs.replace(
            point, load=msgspec.structs.replace(self.LOAD, arrival="gamma", request_rate=1.0)
        )
        assert (open_loop.clients, open_loop.max_requests) == (None, 6)

    def test_session_ends_with_the_turn_of_a_rejected_sub_agent(self) -> None:
        """Prompts have 30 and 80 tokens; 8 pages hold 128, and the third turn has 130."""
        load = msgspec.structs.replace(
            self.LOAD, requests=22, input_tokens="30", turn_tokens="30", output_tokens="20", subagents=4
        )
        traffic = replay(load, 1, pages=9)
        for session in (0, 1):
            own_samples = [s for s in traffic.samples if s.request.session == session]
            assert [bool(s.rejected) for s in own_samples] == [False] * 6 + [True] * 4
        assert traffic.is_done

    def test_live_and_replay_with_sub_agents_have_equal_times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load = msgspec.structs.replace(self.LOAD, requests=60, output_tokens="uniform:2-9", think_time=0.07)
        setup, clock = make_config(page_size=PAGE, pages=41, max_requests=8), Clock()
        monkeypatch.setattr(serving_loop, "time", clock)
        scheduler = Scheduler(setup)
        traffic = Traffic(make_requests(load, VOCAB), scheduler, 3)
        loop = Loop(Device(Fixed(4.0), clock), scheduler, traffic, RankZeroBroadcast())
        while loop.iterate():
            pass
        found = replay_requests(make_requests(load, VOCAB), Scheduler(setup), 3, Fixed(4.0))
        seen, replayed = (
            [(r.number, r.cached_tokens, r.token_s) for r in make_rows(t.samples)] for t in (traffic, found.traffic)
        )
        assert seen == replayed
        assert len(seen) == 60

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"subagents": 2}, "--sessions subagents without turns"),
            (
                {"turns": "4", "subagents": -1},
                "--sessions subagents=-1: not 0 to 1,000 requests; write for example subagents=4",
            ),
            ({"turns": "4", "subagents": 2, "branch": 0.5}, "leave one of them out"),
        ],
    )
    def test_mistakes_are_sentences(self, options: dict[str, object], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            ServeLoads(num_requests=8, input_tokens=("10",), output_tokens=("5",), chunk=(64,), **options)

    def test_words(self) -> None:
        assert "4 sub-agents after each turn but the last" in format_load(self.LOAD, 2)
