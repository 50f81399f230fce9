"""Which steps a live run makes before its clock starts: kernels chosen by size are compiled in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.traffic import Traffic
from dcpbench.workloads.serve import _full_steps, _requests

if TYPE_CHECKING:
    from dcpbench.serving.requests import ServeRequest


def config(**changes: int) -> SchedulerConfig:
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


def step_tokens(setup: SchedulerConfig, requests: list[ServeRequest]) -> list[int]:
    """Of each step, in the fullest replica."""
    scheduler = Scheduler(setup)
    traffic = Traffic(requests, scheduler, len(requests))
    traffic.submit(*traffic.due(0.0), 0.0)
    found = []
    while (step := scheduler.next_step()) is not None:
        found.append(max(replica.tokens for replica in step.replicas))
        traffic.read(step, 0.0)
    return found


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
    """Pages of 64 · 4 tokens: 15 of them in a request of 4,060 tokens, 32 in a step of 8,192."""
    assert _full_steps(config(**changes)) == lengths


def test_a_step_is_full_although_no_request_is_as_long() -> None:
    setup = config()
    assert step_tokens(setup, _requests(_full_steps(setup), 1, 100)) == [8192, 8192]
