"""Test which steps a live run makes before its clock starts, so that kernels chosen by size are compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dcpbench.points.layout import Layout
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.traffic import Traffic
from dcpbench.workloads.serve import (
    Serving,
    _list_cut_step_lengths,
    _list_full_step_lengths,
    _make_repeated_requests,
    _make_requests,
    make_scheduler_config,
)
from tests.unit import serve_record_builder

if TYPE_CHECKING:
    from dcpbench.points.point import Point
    from dcpbench.serving.requests import ServeRequest, Step


def make_config(**changes: int) -> SchedulerConfig:
    return SchedulerConfig(
        **{
            "replicas": 1,
            "pages": 1000,
            "page_size": 64,
            "dcp": 4,
            "max_requests": 64,
            "chunk": 8192,
            "policy": "mixed",
            "max_context": 4061,
        }
        | changes
    )


def list_steps(setup: SchedulerConfig, requests: list[ServeRequest], clients: int | None = None) -> list[Step]:
    """Return all served steps, with as many clients as requests by default."""
    scheduler = Scheduler(setup)
    traffic = Traffic(requests, scheduler, clients or len(requests))
    found = []
    while not traffic.is_done:
        traffic.submit(*traffic.count_due(0.0), 0.0)
        step = scheduler.plan_step()
        assert step is not None
        found.append(step)
        traffic.record_tokens(step, 0.0)
    return found


def step_tokens(setup: SchedulerConfig, requests: list[ServeRequest]) -> list[int]:
    """Return the tokens of each step in the fullest replica."""
    return [max(replica.tokens for replica in step.replicas) for step in list_steps(setup, requests)]


def list_prefixes(found: list[Step]) -> list[int]:
    """Return the numbers of stored tokens before the chunks of these steps."""
    return [chunk.start for step in found for replica in step.replicas for chunk in replica.chunks]


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, 2 * [3840, 3840, 512]),
        ({"max_context": 20_000}, 2 * [8192]),
        ({"pages": 11}, 2 * [2304, 2304, 2304, 1280]),
        ({"replicas": 4, "dcp": 1, "chunk": 2048}, 8 * [2048]),
        ({"max_context": 200}, []),
    ],
    ids=["short", "long", "small-cache", "replicas", "shorter-than-a-page"],
)
def test_prompts_of_whole_pages_fill_a_step(changes: dict[str, int], lengths: list[int]) -> None:
    """Pages have 64 · 4 tokens: a request of 4,060 tokens has 15, and a step of 8,192 has 32."""
    assert _list_full_step_lengths(make_config(**changes)) == lengths


def test_warm_up_has_a_full_step_although_no_request_is_as_long() -> None:
    setup = make_config()
    assert step_tokens(setup, _make_requests(_list_full_step_lengths(setup), 1, 100)) == [8192, 8192]


CUT = {
    "short": ({"chunk": 9000}, [4060] * 3),
    "nearly-full": ({}, [4060, 3876, 4060]),
    "long": ({"max_context": 20_000}, [16_384]),
    "short-in-pages-of-64": ({"dcp": 1, "chunk": 4096, "max_context": 904}, [903] * 5),
    "shorter-than-a-page": ({"max_context": 200}, []),
}


@pytest.mark.parametrize(("changes", "lengths"), CUT.values(), ids=CUT)
def test_warm_up_splits_a_prompt_although_none_is_as_long_as_a_step(
    changes: dict[str, int], lengths: list[int]
) -> None:
    """A prompt without a page left in a step does not begin in it: 8,192 less two prompts of 4,060 are 72, and a page
    has 256.
    """
    setup = make_config(**changes)
    assert _list_cut_step_lengths(setup) == lengths
    if lengths:
        assert max(list_prefixes(list_steps(setup, _make_requests(lengths, 1, 100)))) > 0


def test_warm_up_splits_a_prompt_on_each_replica() -> None:
    setup = make_config(replicas=2, dcp=1, chunk=2048, max_context=904)
    found = list_steps(setup, _make_requests(_list_cut_step_lengths(setup), 1, 100))
    assert all(any(c.start for step in found for c in step.replicas[r].chunks) for r in range(2))


def test_repeated_prompt_follows_its_cached_prefix() -> None:
    """The prefix counts even if too few prompts arrive at once to split one: 903 tokens are 14 pages of 64, and 7 more."""
    setup = make_config(dcp=1, max_context=904)
    assert list_prefixes(list_steps(setup, _make_repeated_requests(setup, 100), clients=1)) == [0, 896]


class Server:
    """Replace workloads.serve.Serving: serve without an engine, and keep the steps."""

    def __init__(self, context: int) -> None:
        plan, shape = SimpleNamespace(pages=100, max_context=context), SimpleNamespace(vocab=100)
        self.session = SimpleNamespace(plan=plan, shape=shape)
        self.engine = SimpleNamespace(capture_steps=lambda _alive, _compiling: None)
        self.found: list[Step] = []

    def make_loop(self, point: Point, requests: list[ServeRequest], concurrency: int) -> SimpleNamespace:
        setup = make_scheduler_config(point, self.session)  # type: ignore[arg-type]
        self.found += list_steps(setup, requests, concurrency)
        return SimpleNamespace(run=lambda _alive: None)


@pytest.mark.parametrize(("context", "stored"), [(41, 0), (440, 384)], ids=["shorter-than-a-page", "longer"])
def test_warm_up_is_served_with_prompts_above_and_below_a_page(context: int, stored: int) -> None:
    """Pages have 64 tokens: a prompt of 439 has 6 full ones, and one of 40 has none, for which no list of prompts may
    be empty.
    """
    one = serve_record_builder.make_point(Layout(1), 4, context=context, page_size=64)
    server = Server(context)
    Serving.warm_up(server, one, _make_requests([8] * 4, 2, 100), lambda: None)  # type: ignore[arg-type]
    assert max(list_prefixes(server.found)) == stored


def test_each_replica_runs_chunks_of_every_size_and_a_cached_prefix() -> None:
    """Single prompts would always go to the first replica, so that ranks of the others would compile during the
    measurement.
    """
    one = serve_record_builder.make_point(Layout(2, 2), 4, context=440, page_size=64)
    server = Server(440)
    Serving.warm_up(server, one, _make_requests([8] * 4, 2, 100), lambda: None)  # type: ignore[arg-type]
    chunks = [{(c.start, c.tokens) for step in server.found for c in step.replicas[r].chunks} for r in range(2)]
    assert chunks[0] == chunks[1]
    assert {(0, 1), (0, 127), (384, 55)} <= chunks[0]
