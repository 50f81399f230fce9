"""Serving in virtual time: the scheduler and the traffic of a live run, and step times instead of a device.

    host     decide k + 1 │ wait for k ············│ read k, decide k + 2 │ wait for k + 1 ···
    device   ··· step k ···························│ step k + 1 ······················

A live run launches step k + 1 while step k runs, and reads what k sampled. So clients learn of step k when it ends,
and what they send then can join step k + 2 at the earliest. The same order of events here, one by one; only the end of
a step is computed: the end of the step before + its duration, but not before the host has launched all of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dcpbench.serving.outcome import StepCounts
from dcpbench.serving.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from dcpbench.serving.requests import ServeRequest, Step
    from dcpbench.serving.scheduler import Scheduler

    class Durations(Protocol):
        """What replay asks of StepTimes."""

        @property
        def blocking(self) -> bool:
            """Whether to launch a step is to run it."""

        @property
        def launch_ms(self) -> float:
            """What a step takes longer that the device had to wait for."""

        def duration_ms(self, step: Step) -> float:
            """How long a step takes behind another."""

        def host_ms(self, step: Step) -> float:
            """How long the host is busy with launching it."""


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What became of the requests."""

    traffic: Traffic
    counts: StepCounts
    steps_s: float
    """Time of all steps together; what is missing to the end was idle."""
    end_s: float


class VirtualDevice:
    """Runs one step after the other; knows when each ends."""

    def __init__(self, times: Durations) -> None:
        self.times, self.free_s, self.busy_s = times, 0.0, 0.0

    def launch(self, step: Step, now_s: float) -> tuple[float, float]:
        """When the host has launched a step that it begins with now, and when the step ends."""
        times = self.times
        start = max(now_s + times.launch_ms / 1e3, self.free_s)
        end = start + times.duration_ms(step) / 1e3
        launched = end if times.blocking else now_s + times.host_ms(step) / 1e3
        self.free_s = max(end, launched)
        self.busy_s += self.free_s - start
        return launched, self.free_s


def replay(
    requests: Sequence[ServeRequest],
    scheduler: Scheduler,
    concurrency: int | None,
    times: Durations,
    limit_s: float = math.inf,
) -> Replayed:
    """Serve `requests` from second 0 on, until `limit_s`; other arguments as Traffic has them.

    Raises UsageError for a step whose time is not known.
    """
    traffic, device, counts = Traffic(requests, scheduler, concurrency), VirtualDevice(times), StepCounts()
    pending: tuple[Step, float] | None = None
    now = 0.0
    while not traffic.done:
        if now >= limit_s:
            if pending is not None:
                now = max(now, pending[1])
                traffic.read(pending[0], now)
            traffic.stop()
            break
        traffic.submit(traffic.due(now), now)
        step = scheduler.next_step()
        launched, on_its_way = now, None
        if step is not None:
            launched, end = device.launch(step, now)
            on_its_way = step, end
            counts.add(step)
        if pending is not None:
            # Where launching is not running, tokens are read as soon as they are there, between two layers of a launch.
            read = max(launched if times.blocking else now, pending[1])
            traffic.read(pending[0], read)
            now = max(launched, read)
        elif on_its_way is None:
            now = max(now, traffic.next_arrival_s() or now)
        else:
            now = launched
        pending = on_its_way
    return Replayed(traffic, counts, device.busy_s, now)
