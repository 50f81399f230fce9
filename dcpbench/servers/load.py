"""Sends the requests of a load when they are due, and keeps what came of each: one event loop, several connections.

    closed   so many clients, each of which sends its next request when its last one has been answered
    open     each request at its time, by the clock, whatever is unanswered; with a bound, those beyond it wait and count
             from when they were due all the same

Turns of a session follow each other in one client, or beside others in an open loop; where one fails, so does the session.

A request counts from when it was due, or from when its client was free: what this process is late by is in its latency,
and is recorded beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.servers.answers import Streamed
from dcpbench.servers.client import TOO_MANY, RequestError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from dcpbench.servers.client import Client
    from dcpbench.servers.turns import Session

EARLY_S = 1.2e-3
"""epoll wakes a process up to a millisecond late: so the loop is woken before a request is due, and turns until it is."""
BEAT_S = 0.02
SOON_S = 0.01
"""Until a load begins, from the moment that all is ready."""
RETRY_S = 1.0
"""Before a request is sent again where the server does not say."""
MOST_RETRY_S = 60.0
UNAVAILABLE = 503


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request as it is sent."""

    number: int
    """Of the load."""
    data: bytes
    """All of it, head and body."""
    output_tokens: int
    due_s: float | None = None
    """After the start; None where a client sends it when it is free."""
    session: Session | None = None
    """What follows once it has been answered."""

    @property
    def requests(self) -> int:
        """It, and those of its session that follow."""
        return 1 + (len(self.session.left) if self.session is not None else 0)


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of a call; times of time.perf_counter()."""

    call: Call
    submitted_s: float
    """When it was due, or its client free."""
    sent_s: float | None = None
    answer: Streamed | None = None
    """The last one, where it was sent several times."""
    error: RequestError | None = None
    retries: int = 0
    ended: bool = False
    """Whether it was answered or failed; False while it is on its way, or where the run ended before."""


@dataclasses.dataclass(slots=True)
class Pace:
    """How well this process kept up."""

    lags_s: list[float] = dataclasses.field(default_factory=list)
    ages_s: list[float] = dataclasses.field(default_factory=list)
    """Of what was read, where the kernel stamps it."""
    cpu_s: float = 0.0
    starved_s: float | None = None
    """For which it was ready, and had no core."""
    realtime: bool = False
    """Whether it went before everything else on its core."""
    wall_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """How far a load is."""

    ended: int = 0
    failed: int = 0
    chunks: int = 0


class Run:
    """A load on its way. `outcomes` can be read at any time, also after an interruption."""

    def __init__(
        self,
        client: Client,
        calls: Sequence[Call],
        clients: int | None,
        *,
        at_once: int | None = None,
        limit_s: float | None = None,
        retries: int = 0,
        realtime: bool = False,
    ) -> None:
        """`clients` of a closed loop; None: each call at its time, `at_once` of them at most. `realtime`: see first_in_line."""
        self.client, self.calls, self.clients = client, calls, clients
        self.outcomes: list[Outcome] = []
        self.start_s = 0.0
        self.pace = Pace()
        self._room = asyncio.Semaphore(at_once) if at_once is not None else None
        self._limit_s, self._retries, self._realtime = limit_s, retries, realtime
        self._tasks: set[asyncio.Task[None]] = set()

    async def prepare(self, connections: int) -> None:
        """Have so many connections ready, where the server takes them."""
        with contextlib.suppress(RequestError):
            await self.client.open(connections)

    @property
    def requests(self) -> int:
        """How many there will be."""
        return sum(call.requests for call in self.calls)

    @property
    def paces(self) -> list[Pace]:
        """Of each process: one."""
        return [self.pace]

    def told(self) -> Told:
        """How far it is."""
        ended = [o for o in self.outcomes if o.ended]
        chunks = sum(len(o.answer.chunk_s) for o in self.outcomes if o.answer is not None)
        return Told(len(ended), sum(o.error is not None for o in ended), chunks)

    async def run(self, start_s: float | None = None) -> None:
        """To the end, or to the limit. `start_s`: by time.perf_counter(), the same for all processes of a load."""
        loop = asyncio.get_running_loop()
        with settled_heap(), first_in_line(wanted=self._realtime) as self.pace.realtime:
            self.start_s = time.perf_counter() + SOON_S if start_s is None else start_s  # a heap takes long to settle
            sending = self._closed() if self.clients is not None else self._open()
            beat = loop.create_task(self._beat())
            cpu, starved = time.process_time(), starved_s()
            del self.client.ages_s[:]
            try:
                async with asyncio.timeout(self._left_s()):
                    await sending
            except TimeoutError:
                pass
            finally:
                self.pace.cpu_s = time.process_time() - cpu
                end = starved_s()  # None where /proc cannot be opened any more
                self.pace.starved_s = None if starved is None or end is None else max(end - starved, 0.0)
                self.pace.ages_s = self.client.ages_s
                self.pace.wall_s = max(time.perf_counter() - self.start_s, 0.0)  # it may be ended before it began
                beat.cancel()
                await self._give_up()

    def _left_s(self) -> float | None:
        return None if self._limit_s is None else max(self.start_s + self._limit_s - time.perf_counter(), 0.0)

    async def _give_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _closed(self) -> None:
        await _until(self.start_s)
        calls = iter(self.calls)

        async def client() -> None:
            for call in calls:
                await self._session(call, time.perf_counter())

        clients = [self._task(client()) for _ in range(self.clients or 0)]
        await asyncio.gather(*clients)

    async def _open(self) -> None:
        for call in self.calls:
            due = self.start_s + (call.due_s or 0.0)
            await _until(due)
            _ = self._task(self._session(call, due))
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _session(self, call: Call, submitted_s: float) -> None:
        """A request, and those that follow it."""
        while (outcome := await self._one(call, submitted_s)).error is None and call.session is not None:
            assert outcome.answer is not None
            think_s = call.session.think_s
            submitted_s = time.perf_counter() + think_s
            call = call.session.next_call(outcome.answer)
            await _until(submitted_s)

    async def _one(self, call: Call, submitted_s: float) -> Outcome:
        outcome = Outcome(call, submitted_s)
        self.outcomes.append(outcome)
        if self._room is None:
            await self._send(outcome)
            return outcome
        async with self._room:
            await self._send(outcome)
        return outcome

    async def _send(self, outcome: Outcome) -> None:
        call = outcome.call
        outcome.sent_s = time.perf_counter()
        while True:
            outcome.answer, outcome.error = (
                Streamed(call.output_tokens, keep=call.session is not None and call.session.texts),
                None,
            )
            try:
                await self.client.exchange(call.data, outcome.answer)
            except RequestError as e:
                outcome.error = e
                if outcome.retries < self._retries and may_retry(e):
                    outcome.retries += 1
                    await asyncio.sleep(min(RETRY_S if e.retry_after_s is None else e.retry_after_s, MOST_RETRY_S))
                    continue
            break
        outcome.ended = True

    async def _beat(self) -> None:
        due = time.perf_counter()
        while True:
            due += BEAT_S
            await asyncio.sleep(due - time.perf_counter())
            now = time.perf_counter()
            self.pace.lags_s.append(now - due)
            due = max(due, now - BEAT_S)


def may_retry(error: RequestError) -> bool:
    """Whether the same request may be taken a moment later: the server is busy, or not there."""
    return error.status in (TOO_MANY, UNAVAILABLE) or error.kind == "refused"


@contextlib.contextmanager
def first_in_line(*, wanted: bool = True) -> Iterator[bool]:
    """This thread runs as soon as it can, before all ordinary ones of its core (SCHED_RR); whether the kernel allows that.

    It needs root, CAP_SYS_NICE or an RLIMIT_RTPRIO. What it starts meanwhile is ordinary.
    """
    allowed = False
    if wanted and hasattr(os, "sched_setscheduler"):
        before, priority = os.sched_getscheduler(0), os.sched_getparam(0)
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
            allowed = True
    try:
        yield allowed
    finally:
        if allowed:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, before, priority)


def starved_s() -> float | None:
    """For which this thread has been ready and had no core, since it began; None where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


async def _until(moment_s: float) -> None:
    """Sleep, and then turn the loop, until a moment of time.perf_counter()."""
    if (left := moment_s - time.perf_counter() - EARLY_S) > 0:
        await asyncio.sleep(left)
    while time.perf_counter() < moment_s:  # noqa: ASYNC110 -- nobody sets an event when time passes
        await asyncio.sleep(0)


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """No collection of garbage while times are taken: it stops everything for as long as a token takes."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
