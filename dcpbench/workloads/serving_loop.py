"""Live loop of `serve`: decide and launch step k + 1, then read the tokens that step k sampled.

    broadcast ─▶ submit ─▶ decide k+1 ─▶ launch k+1 ─▶ wait for the tokens of k ─▶ stamp them ─▶ …
    device:  ────────── step k ──────────────────▶│────────── step k+1 ────────

A step with chunks takes several launches per layer, which may take longer than step k runs: the tokens of k are then
read as soon as they arrive, between two layers of the launch.

Rank 0's clock decides how many turns and sessions are due and when the run ends; it sends this to the others, through
sockets, while the device is busy. All other decisions follow from the same integers on every rank.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from dcpbench.hangs.heartbeats import record_collective
from dcpbench.points.roofline import StepRows
from dcpbench.serving.outcome import StepCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.engine.serve_engine import LaunchedStep, ServeEngine
    from dcpbench.serving.scheduler import Scheduler
    from dcpbench.serving.traffic import Traffic

MAX_NAP_S = 0.05  # a loop without work looks again after this long


def freeze_heap() -> None:
    """Exclude existing objects from garbage collection for the life of the engine.

    A full collection takes as long as a step.
    """
    gc.collect()
    gc.freeze()


class RankZeroBroadcast:
    """Broadcast of rank 0's numbers to all ranks. Collective; uses only the host."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.alone = not dist.is_initialized() or dist.get_world_size() == 1
        if not self.alone:
            gloo = dist.get_backend() == "gloo"
            self.group = dist.group.WORLD if gloo else dist.new_group(backend="gloo")

    def __call__(self, *numbers: int) -> list[int]:
        """Return rank 0's `numbers`."""
        if self.alone:
            return list(numbers)
        shared = torch.tensor(numbers, dtype=torch.int64)
        with record_collective("broadcast", shared, self.group):
            dist.broadcast(shared, src=0, group=self.group)
        return shared.tolist()


@dataclasses.dataclass(slots=True)
class Gaps:
    """GPU time of steps without prefill that followed each other, and between them."""

    busy_ms: float = 0.0
    idle_ms: float = 0.0
    last: LaunchedStep | None = None

    def add_step(self, read: LaunchedStep) -> None:
        """Count a step with tokens that have been read, so that its events have been reached."""
        last, self.last = self.last, None
        if read.started is None or read.ended is None or read.step.has_chunks:
            return
        if last is not None and last.ended is not None:
            self.idle_ms += last.ended.elapsed_time(read.started)
            self.busy_ms += read.started.elapsed_time(read.ended)
        self.last = read

    @property
    def idle_fraction(self) -> float | None:
        """Return the share of the time between the steps; None if no two consecutive steps were seen."""
        whole = self.busy_ms + self.idle_ms
        return self.idle_ms / whole if whole else None


class TimedStep(NamedTuple):
    """Duration of a step on the device, and the work of the replica with the most rows."""

    ms: float  # time from its first kernel to its last one
    decodes: int
    queries: int  # rows of each of these
    context: int  # mean number of KV rows that each of these attends to
    chunks: tuple[tuple[int, int], ...]
    sampled: int
    tokens: int  # tokens as in StepRows

    @classmethod
    def from_launched(cls, read: LaunchedStep) -> TimedStep | None:
        """Return the timing of a step with tokens that have been read, so that its events have been reached. None on
        the CPU.
        """
        if read.started is None or read.ended is None:
            return None
        replicas = read.step.replicas
        busiest = max(replicas, key=lambda replica: replica.tokens)
        decodes = len(busiest.decodes)
        return cls(
            ms=read.started.elapsed_time(read.ended),
            decodes=decodes,
            queries=busiest.queries,
            context=round(sum(busiest.positions) / decodes) + busiest.queries if decodes else 0,
            chunks=tuple((chunk.tokens, chunk.start) for chunk in busiest.chunks),
            sampled=len(busiest.sampled_sequences) + decodes * (busiest.queries - 1),
            tokens=sum(replica.tokens for replica in replicas),
        )

    def to_step_rows(self) -> StepRows:
        """Return the rows from which a floor can be computed."""
        decodes = (self.context,) * self.decodes
        return StepRows(
            decodes=decodes, queries=self.queries, chunks=self.chunks, sampled=self.sampled, tokens=self.tokens
        )


class Loop:
    """A run of a load. Call `iterate` until it returns False; all ranks call it the same number of times."""

    def __init__(
        self,
        engine: ServeEngine,
        scheduler: Scheduler,
        traffic: Traffic,
        broadcast: RankZeroBroadcast,
        *,
        ends: Callable[[float], bool] = lambda _: False,
    ) -> None:
        """Create the loop; `ends(seconds since the start)` is called on rank 0 and returns True to cut off the run."""
        self.engine, self.scheduler, self.traffic = engine, scheduler, traffic
        self.broadcast, self.ends = broadcast, ends
        self.counts, self.gaps = StepCounts(), Gaps()
        self.timed: list[TimedStep] = []
        self.pending: LaunchedStep | None = None
        self.start = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.start

    def run(self, alive: Callable[[], None] = lambda: None) -> None:
        """Run to the end; `alive` is called from time to time."""
        freeze_heap()
        while self.iterate():
            alive()

    def iterate(self) -> bool:
        """Run one iteration; return False if there is no work left."""
        now = self.now_s
        turns, sessions, cut = self.broadcast(*self.traffic.count_due(now), int(self.ends(now)))
        if cut:
            self.stop_early()
            return False
        order = self.broadcast(*self.traffic.list_next_turns(turns)) if turns else None
        self.traffic.submit(turns, sessions, now, order)
        step = self.scheduler.plan_step()
        launched = self.engine.launch_step(step, self._read_arrived) if step else None
        if self.pending is not None:
            self._read_step()
        elif launched is None:
            if self.traffic.is_done:
                return False
            self._wait_briefly()
        self.pending = launched
        return True

    def stop_early(self) -> None:
        """End the run: read the steps in flight, and cancel unfinished requests."""
        self._read_step()
        self.traffic.stop()

    def _read_arrived(self) -> None:
        if self.pending is not None and self.pending.has_arrived:
            self._read_step()

    def _read_step(self) -> None:
        """Wait for the step in flight, and record its sampled tokens."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        tokens = pending.wait_tokens()
        self.traffic.record_tokens(pending.step, self.now_s)
        emits = pending.step.replicas[self.engine.replica].emitting_sequences
        for sequence, token in zip(emits, tokens, strict=True):
            self.traffic.sample_of[sequence.request.number].tokens.append(token)
        self.counts.add_step(pending.step)
        self.gaps.add_step(pending)
        if (timed := TimedStep.from_launched(pending)) is not None:
            self.timed.append(timed)

    def _wait_briefly(self) -> None:
        arrival = self.traffic.find_next_arrival_s()
        if arrival is not None:
            time.sleep(min(max(arrival - self.now_s, 0.0), MAX_NAP_S))
