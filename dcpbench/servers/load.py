"""Send the requests of a load when they are due, and record their outcomes: one event loop, several connections.

    closed   each client sends its next request when its last one has been answered
    open     each request is sent at its time, regardless of pending ones; with a bound, requests beyond it wait, and their
             latency still counts from their due time

Turns of a session follow each other in one client, or run concurrently with other sessions in an open loop; the requests of
sub-agents are sent at the same time. If a request of a turn fails, its session ends.

The latency of a request counts from its due time, or from when its client was free: delays of this process are included
in the latency, and are also recorded separately.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dcpbench.records.garbage_collection import stop_garbage_collector
from dcpbench.servers.answers import StreamReply
from dcpbench.servers.client import TOO_MANY, RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from dcpbench.servers.client import Client
    from dcpbench.servers.sessions import Session

ResultT = TypeVar("ResultT")
SPIN_S = 1.2e-3  # epoll wakes a process up to 1 ms late: the loop wakes this long before a request is due, and spins
LAG_INTERVAL_S = 0.02  # between two measurements of the event loop's lag
START_DELAY_S = 0.01  # from the moment that everything is ready to the start of a load
RETRY_S = 1.0  # before a request is sent again, if the server names no time (Retry-After)
MAX_RETRY_S = 60.0  # of a Retry-After
UNAVAILABLE = 503


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A request in the form in which it is sent."""

    number: int  # in the load
    data: bytes  # head and body
    output_tokens: int
    due_s: float | None = None  # after the start; None if a client sends it when it is free
    session: Session | None = None  # the turns that follow once it has been answered
    prompt_tokens: int = 0  # 0 if unknown

    @property
    def requests(self) -> int:
        """Return the number of requests: this one and the later turns of its session."""
        return 1 + (self.session.requests if self.session is not None else 0)


@dataclasses.dataclass(slots=True)
class Outcome:
    """Outcome of a call; times of time.perf_counter()."""

    call: Call
    submitted_s: float  # when it was due, or its client free
    sent_s: float | None = None
    answer: StreamReply | None = None  # the last one, if it was sent several times
    error: RequestError | None = None
    retries: int = 0
    ended: bool = False  # whether it was answered or failed; False if the run ended before


@dataclasses.dataclass(slots=True)
class Pace:
    """Timeliness of this process."""

    lags_s: list[float] = dataclasses.field(default_factory=list)
    ages_s: list[float] = dataclasses.field(default_factory=list)  # how long data lay in the kernel, if it is stamped
    cpu_s: float = 0.0
    starved_s: float | None = None  # for which it was ready, and had no core
    realtime: bool = False  # whether it had priority over all ordinary processes of its core
    wall_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a load."""

    ended: int = 0
    failed: int = 0
    chunks: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Describe how the calls of a load are sent."""

    clients: int | None  # of a closed loop; None: each call is sent at its time
    at_once: int | None = None  # maximum number of requests in flight at the same time
    limit_s: float | None = None  # after which the load ends
    retries: int = 0  # of each request that a busy server rejects
    realtime: bool = False  # see set_realtime_priority


class Run:
    """A load under way. `outcomes` can be read at any time, also after an interruption."""

    def __init__(self, client: Client, calls: Sequence[Call], options: LoadOptions) -> None:
        self.client, self.calls, self.options = client, calls, options
        self.outcomes: list[Outcome] = []
        self.start_s = 0.0
        self.pace = Pace()
        self._concurrency_limit = asyncio.Semaphore(options.at_once) if options.at_once is not None else None
        self._tasks: set[asyncio.Task[None]] = set()

    async def prepare(self, connections: int) -> None:
        """Open `connections` connections beforehand, if the server accepts them."""
        with contextlib.suppress(RequestError):
            await self.client.open_connections(connections)

    @property
    def requests(self) -> int:
        """Return the number of requests in the load."""
        return sum(call.requests for call in self.calls)

    @property
    def paces(self) -> list[Pace]:
        """Return the pace of each process; here there is one."""
        return [self.pace]

    def get_progress(self) -> LoadProgress:
        """Return the progress so far."""
        ended = [o for o in self.outcomes if o.ended]
        chunks = sum(o.answer.chunks for o in self.outcomes if o.answer is not None)
        return LoadProgress(len(ended), sum(o.error is not None for o in ended), chunks)

    async def send_load(self, start_s: float | None = None) -> None:
        """Send the load, to its end or to the limit. `start_s`: of time.perf_counter(), the same for all processes."""
        loop = asyncio.get_running_loop()
        with freeze_garbage_collector(), set_realtime_priority(wanted=self.options.realtime) as self.pace.realtime:
            # Compute the start late, because a garbage collection takes long.
            self.start_s = time.perf_counter() + START_DELAY_S if start_s is None else start_s
            sending = self._send_closed_loop() if self.options.clients is not None else self._send_open_loop()
            lag_task = loop.create_task(self._measure_lag())
            cpu, starved = time.process_time(), read_starved_s()
            del self.client.ages_s[:]
            try:
                async with asyncio.timeout(self._compute_left_s()):
                    await sending
            except TimeoutError:
                pass
            finally:
                self.pace.cpu_s = time.process_time() - cpu
                end = read_starved_s()  # None if /proc cannot be opened
                self.pace.starved_s = None if starved is None or end is None else max(end - starved, 0.0)
                self.pace.ages_s = self.client.ages_s
                self.pace.wall_s = max(time.perf_counter() - self.start_s, 0.0)  # it may be ended before it began
                lag_task.cancel()
                await self._stop_tasks()

    def _compute_left_s(self) -> float | None:
        limit_s = self.options.limit_s
        return None if limit_s is None else max(self.start_s + limit_s - time.perf_counter(), 0.0)

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_closed_loop(self) -> None:
        await _wait_until(self.start_s)
        calls = iter(self.calls)

        async def run_client() -> None:
            for call in calls:
                await self._send_session(call, time.perf_counter())

        clients = [self._start_task(run_client()) for _ in range(self.options.clients or 0)]
        await asyncio.gather(*clients)

    async def _send_open_loop(self) -> None:
        for call in self.calls:
            due = self.start_s + (call.due_s or 0.0)
            await _wait_until(due)
            _ = self._start_task(self._send_session(call, due))
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_session(self, call: Call, submitted_s: float) -> None:
        """Send a request, and then the later turns of its session, each with its requests at the same time."""
        outcomes, session = [await self._send_call(call, submitted_s)], call.session
        while session is not None and all(outcome.error is None for outcome in outcomes):
            due_s = session.compute_due_s(time.perf_counter() - self.start_s)
            answers = {outcome.call.number: outcome.answer for outcome in outcomes if outcome.answer is not None}
            calls = session.make_next_calls(answers)
            if len(calls) == 1:
                outcomes = [await self._send_when_due(calls[0], self.start_s + due_s[0])]
            else:
                sending = map(self._send_when_due, calls, (self.start_s + due for due in due_s))
                outcomes = await asyncio.gather(*sending)
            session = calls[0].session

    async def _send_when_due(self, call: Call, due_s: float) -> Outcome:
        """Send a request at a time of time.perf_counter()."""
        await _wait_until(due_s)
        return await self._send_call(call, due_s)

    async def _send_call(self, call: Call, submitted_s: float) -> Outcome:
        outcome = Outcome(call, submitted_s)
        self.outcomes.append(outcome)
        if self._concurrency_limit is None:
            await self._send_with_retries(outcome)
            return outcome
        async with self._concurrency_limit:
            await self._send_with_retries(outcome)
        return outcome

    async def _send_with_retries(self, outcome: Outcome) -> None:
        call, session = outcome.call, outcome.call.session
        keep = session is not None and session.keeps_text(call.number)
        outcome.sent_s = time.perf_counter()

        async def send_once() -> None:
            outcome.answer = StreamReply(call.output_tokens, prompt_tokens=call.prompt_tokens, keep=keep)
            outcome.error = None
            await self.client.send_request(call.data, outcome.answer)

        def record_retry(error: RequestError) -> None:
            outcome.retries += 1
            outcome.error = error  # if the run ends while the client waits

        try:
            await retry_while_busy(send_once, self.options.retries, record_retry)
        except RequestError as e:
            outcome.error = e
        outcome.ended = True

    async def _measure_lag(self) -> None:
        due = time.perf_counter()
        while True:
            due += LAG_INTERVAL_S
            await asyncio.sleep(due - time.perf_counter())
            now = time.perf_counter()
            self.pace.lags_s.append(now - due)
            due = max(due, now - LAG_INTERVAL_S)


async def retry_while_busy(
    send: Callable[[], Awaitable[ResultT]], retries: int, note: Callable[[RequestError], None] = lambda _: None
) -> ResultT:
    """Return the result of `send`, which is called up to `retries` times more while the server is busy.

    `note` is called with the failure before each retry. Raise the last RequestError of `send`.
    """
    while True:
        try:
            return await send()
        except RequestError as e:
            if retries <= 0 or not can_retry(e):
                raise
            retries -= 1
            note(e)
            await asyncio.sleep(min(RETRY_S if e.retry_after_s is None else e.retry_after_s, MAX_RETRY_S))


def can_retry(error: RequestError) -> bool:
    """Return whether the server may accept the same request later, because it is busy or does not listen yet."""
    return error.status in (TOO_MANY, UNAVAILABLE) or error.kind == "refused"


@contextlib.contextmanager
def set_realtime_priority(*, wanted: bool = True) -> Iterator[bool]:
    """Give this thread priority over all ordinary threads of its core (SCHED_RR); yield whether the kernel allows it.

    It needs root, CAP_SYS_NICE or an RLIMIT_RTPRIO. Threads and processes that it starts have ordinary priority.
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


def read_starved_s() -> float | None:
    """Return the seconds for which this thread was ready and had no core; None if the kernel does not report it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


async def _wait_until(moment_s: float) -> None:
    """Sleep, and then spin in the event loop, until a moment of time.perf_counter()."""
    if (left := moment_s - time.perf_counter() - SPIN_S) > 0:
        await asyncio.sleep(left)
    while time.perf_counter() < moment_s:  # noqa: ASYNC110 -- the clock sets no event
        await asyncio.sleep(0)


@contextlib.contextmanager
def freeze_garbage_collector() -> Iterator[None]:
    """Collect garbage and stop the collector during timings, because it stops the process for as long as a token takes."""
    gc.collect()
    gc.freeze()
    try:
        with stop_garbage_collector():
            yield
    finally:
        gc.unfreeze()
