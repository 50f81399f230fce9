"""A load that several processes send: each its share, with an event loop of its own, all by the machine's one clock.

Of a closed loop the clients are divided, and each request, or session, goes to one of them beforehand; of an open loop the requests,
in turn by the time at which they are due. time.perf_counter() reads the same clock in all processes of a machine, so
that their times need no correction.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import signal
import time
from typing import TYPE_CHECKING, Any

from dcpbench import redaction
from dcpbench.errors import WorkerError
from dcpbench.servers.client import Client
from dcpbench.servers.load import Run, Told

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from dcpbench.servers.client import Target
    from dcpbench.servers.load import Call, Outcome, Pace

AHEAD_S = 0.25
"""From the moment that a start is agreed on until then."""
TELL_S = 0.5
STOP_S = 10.0
"""For a process to say what it has once it is stopped."""
READY, TOLD, DONE, STOP = "ready", "told", "done", "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What one process sends."""

    target: Target
    calls: Sequence[Call]
    clients: int | None
    at_once: int | None
    limit_s: float | None
    retries: int
    realtime: bool
    connections: int = 0
    secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """What is redacted in sentences about its requests."""


def divided(number: int, parts: int) -> list[int]:
    """A number in as many whole parts, as even as can be, the larger ones first."""
    return [number // parts + (i < number % parts) for i in range(parts)]


def deal(
    target: Target,
    calls: Sequence[Call],
    clients: int | None,
    processes: int,
    *,
    at_once: int | None = None,
    limit_s: float | None = None,
    retries: int = 0,
    realtime: bool = False,
) -> list[Share]:
    """Shares of a load, none of them empty; see the module."""
    count = max(min(processes, len(calls), *(n for n in (clients, at_once) if n is not None)), 1)
    hands = clients if clients is not None else count
    return [
        Share(
            target=target,
            calls=[call for i, call in enumerate(calls) if i % hands % count == part],
            clients=None if clients is None else divided(clients, count)[part],
            at_once=None if at_once is None else divided(at_once, count)[part],
            limit_s=limit_s,
            retries=retries,
            realtime=realtime,
            secrets=redaction.secrets(),
        )
        for part in range(count)
    ]


class Shares:
    """A load on its way in several processes, which is read like a Run; `outcomes` are there once it has ended."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = shares
        self.requests = sum(call.requests for share in shares for call in share.calls)
        self.outcomes: list[Outcome] = []
        self.paces: list[Pace] = []
        self.start_s = 0.0
        self._told = [Told()] * len(shares)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._said: list[asyncio.Queue[tuple[str, Any]]] = []

    def told(self) -> Told:
        """How far it is, as the processes said last."""
        return Told(*(sum(getattr(told, f.name) for told in self._told) for f in dataclasses.fields(Told)))

    async def prepare(self, connections: int) -> None:
        """Start the processes, with so many connections to the server in all. Raises WorkerError."""
        context, loop = multiprocessing.get_context("spawn"), asyncio.get_running_loop()
        each = divided(connections, len(self.shares))
        for number, share in enumerate(self.shares):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, dataclasses.replace(share, connections=each[number])), daemon=True
            )
            with _signals_blocked():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._said.append(asyncio.Queue())
            loop.add_reader(ours.fileno(), self._hear, number)
        try:
            for number in range(len(self.shares)):
                await self._wait(number, READY)
        except BaseException:
            self.close()
            raise

    async def run(self, start_s: float | None = None) -> None:
        """To the end, or to the limit; where it is cancelled, what has come until then is kept. Raises WorkerError."""
        self.start_s = max(start_s or 0.0, time.perf_counter() + AHEAD_S)
        try:
            for pipe in self._pipes:
                pipe.send(self.start_s)
            for number in range(len(self._pipes)):
                await self._take(number)
        except asyncio.CancelledError:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.send(STOP)
            with contextlib.suppress(TimeoutError, WorkerError):
                async with asyncio.timeout(STOP_S):
                    for number in range(len(self.paces), len(self._pipes)):
                        await self._take(number)
            raise
        finally:
            self.outcomes.sort(key=lambda outcome: outcome.submitted_s)
            self.close()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()
        self._pipes.clear()
        self._processes.clear()

    async def _take(self, number: int) -> None:
        outcomes, pace = await self._wait(number, DONE)
        self.outcomes += outcomes
        self.paces.append(pace)

    async def _wait(self, number: int, kind: str) -> Any:  # noqa: ANN401 -- of several kinds
        """What comes with the next message of a kind. Raises WorkerError where the process ends before."""
        said, what = await self._said[number].get()
        if said == kind:
            return what
        code = self._processes[number].exitcode
        raise WorkerError(f"a process of the client ended with exit code {code}; try --client-processes 1.")

    def _hear(self, number: int) -> None:
        try:
            kind, what = self._pipes[number].recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipes[number].fileno())
            self._processes[number].join(1)
            kind, what = "", None
        if kind == TOLD:
            self._told[number] = what
        else:
            self._said[number].put_nowait((kind, what))


@contextlib.asynccontextmanager
async def sending(
    target: Target,
    calls: Sequence[Call],
    clients: int | None,
    processes: int = 1,
    *,
    at_once: int | None = None,
    limit_s: float | None = None,
    retries: int = 0,
    realtime: bool = False,
) -> AsyncIterator[Run | Shares]:
    """A load that this process sends, or several; nothing of it is left once the block ends."""
    shares = deal(
        target, calls, clients, processes, at_once=at_once, limit_s=limit_s, retries=retries, realtime=realtime
    )
    if len(shares) > 1:
        several = Shares(shares)
        try:
            yield several
        finally:
            several.close()
        return
    async with Client(target) as client:
        yield Run(client, calls, clients, at_once=at_once, limit_s=limit_s, retries=retries, realtime=realtime)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """What is started here does not hear Ctrl-C, of which it is told."""
    numbers = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(pipe: Connection, share: Share) -> None:
    """One process: sends its share once it is told when, and says what came of it. It ends when its parent does."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        asyncio.run(_work(pipe, share))


async def _work(pipe: Connection, share: Share) -> None:
    loop = asyncio.get_running_loop()
    redaction.register(*share.secrets)
    async with Client(share.target) as client:
        run = Run(
            client,
            share.calls,
            share.clients,
            at_once=share.at_once,
            limit_s=share.limit_s,
            retries=share.retries,
            realtime=share.realtime,
        )
        await run.prepare(share.connections)
        pipe.send((READY, None))
        start_s = await asyncio.to_thread(pipe.recv)
        if start_s == STOP:
            pipe.send((DONE, ([], run.pace)))
            return
        running = loop.create_task(run.run(start_s))
        loop.add_reader(pipe.fileno(), running.cancel)  # told to stop, or alone
        telling = loop.create_task(_tell(pipe, run))
        with contextlib.suppress(asyncio.CancelledError):
            await running
        telling.cancel()
        for outcome in run.outcomes:
            outcome.call = dataclasses.replace(outcome.call, data=b"", session=None)
        pipe.send((DONE, (run.outcomes, run.pace)))


async def _tell(pipe: Connection, run: Run) -> None:
    while True:
        await asyncio.sleep(TELL_S)
        pipe.send((TOLD, run.told()))
