"""Replay compared with the code of the live loop, on a simulated device and clock."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import pytest

from dcpbench.serving.replay import replay_requests
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.traffic import Traffic
from dcpbench.workloads import serving_loop
from dcpbench.workloads.serving_loop import Loop, RankZeroBroadcast
from tests.unit.test_replay import SETUPS, Fixed, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.serving.requests import ServeRequest, Step
    from dcpbench.serving.scheduler import SchedulerConfig


@dataclasses.dataclass
class Clock:
    """A replacement of the module `time`."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclasses.dataclass
class Launched:
    """A launched step, with tokens that can be read after the clock has reached its end."""

    step: Step
    end: float
    clock: Clock
    started: None = None
    ended: None = None

    @property
    def has_arrived(self) -> bool:
        return self.clock.now >= self.end

    def wait_tokens(self) -> list[int]:
        self.clock.now = max(self.clock.now, self.end)
        return [0] * len(self.step.replicas[0].sampled_sequences)


@dataclasses.dataclass
class Device:
    """Runs launched steps one after the other; for a blocking engine the host is busy meanwhile."""

    times: Fixed
    clock: Clock
    free: float = 0.0
    replica: int = 0

    def launch_step(self, step: Step, meanwhile: Callable[[], None]) -> Launched:
        begin, before = self.clock.now, self.free
        launched = begin + self.times.predict_host_ms(step) / 1e3
        end = max(begin + self.times.launch_ms / 1e3, before) + self.times.predict_duration_ms(step) / 1e3
        self.free = max(end, launched)
        if self.times.is_blocking:
            self.clock.now = self.free
        else:
            if begin <= before <= launched and step.has_chunks:
                self.clock.now = before
                meanwhile()
            self.clock.now = launched
        return Launched(step, self.free, self.clock)


def run_live(
    requests: list[ServeRequest],
    setup: SchedulerConfig,
    clients: int | None,
    times: Fixed,
    limit_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Traffic, Loop]:
    """Return the traffic and the loop after a live run of the requests."""
    clock = Clock()
    monkeypatch.setattr(serving_loop, "time", clock)
    scheduler = Scheduler(setup)
    traffic = Traffic(requests, scheduler, clients)
    loop = Loop(Device(times, clock), scheduler, traffic, RankZeroBroadcast(), ends=lambda now: now >= limit_s)
    while loop.iterate():  # run() would look through this process's whole heap first
        pass
    return traffic, loop


TIMES = {
    "plain": Fixed(),
    "launch": Fixed(4.0),
    "blocking": Fixed(is_blocking=True),
    "slow-host": Fixed(4.0, host=5.3),
}


@pytest.mark.parametrize("limit_s", [math.inf, 0.3], ids=["whole", "cut"])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize(("clients", "rate"), [(1, None), (8, None), (None, 20.0)], ids=["closed1", "closed8", "open"])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_replayed_tokens_have_the_times_of_a_live_run(setup, clients, rate, times, limit_s, monkeypatch) -> None:
    """There also are equally many steps of each kind. An open loop sleeps in parts until the next arrival, and their
    sum may differ from it in the last bit.
    """
    requests = load(3, 40, rate=rate)
    traffic, loop = run_live(requests, setup, clients, times, limit_s, monkeypatch)
    found = replay_requests(requests, Scheduler(setup), clients, times, limit_s)
    assert found.counts == loop.counts
    assert len(found.traffic.samples) == len(traffic.samples)
    for replayed, original in zip(found.traffic.samples, traffic.samples, strict=True):
        assert replayed.token_s == pytest.approx(original.token_s, abs=1e-9)
        assert (replayed.submitted_s, replayed.is_finished) == (
            pytest.approx(original.submitted_s, abs=1e-9),
            original.is_finished,
        )
