"""Send a load from several processes, each with its share of the requests and its own event loop.

A closed loop is divided by clients; each request or session belongs to one client in advance. The requests of an open loop are dealt in
turn, in the order of their due times. time.perf_counter() reads the same clock in all processes of a machine, so their times need
no correction.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import signal
import time
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from dcpbench.errors import WorkerError
from dcpbench.points import redaction
from dcpbench.servers.client import Client
from dcpbench.servers.load import LoadProgress, Run
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from dcpbench.servers.client import Target
    from dcpbench.servers.load import Call, LoadOptions, Outcome, Pace

START_LEAD_S = 0.25  # time between the choice of a start and the start
PROGRESS_S = 0.5
STOP_S = 10.0  # limit for a stopped process to send its outcomes
END_S = 5.0  # time limit in s for a terminated process to end, after which it is killed
READY, PROGRESS, DONE, STOP = "ready", "progress", "done", "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientLoadPart:
    """The part of a load that one process sends."""

    target: Target
    calls: Sequence[Call]
    options: LoadOptions
    connections: int = 0
    secrets: tuple[str, ...] = dataclasses.field(default=(), repr=False)  # to redact in messages about requests


def split_evenly(number: int, parts: int) -> list[int]:
    """Divide a number into integers that differ by at most 1, larger ones first."""
    return [number // parts + (i < number % parts) for i in range(parts)]


def split_load(target: Target, calls: Sequence[Call], options: LoadOptions, processes: int) -> list[ClientLoadPart]:
    """Divide a load into non-empty shares, as described in the module."""
    clients, at_once = options.clients, options.at_once
    count = max(min(processes, len(calls), *(n for n in (clients, at_once) if n is not None)), 1)
    hands = clients if clients is not None else count
    return [
        ClientLoadPart(
            target=target,
            calls=[call for i, call in enumerate(calls) if i % hands % count == part],
            options=dataclasses.replace(
                options,
                clients=None if clients is None else split_evenly(clients, count)[part],
                at_once=None if at_once is None else split_evenly(at_once, count)[part],
            ),
            secrets=redaction.list_secrets(),
        )
        for part in range(count)
    ]


class ClientPool:
    """Run a load in several processes, with the interface of Run; `outcomes` are complete when it has ended."""

    def __init__(self, parts: Sequence[ClientLoadPart]) -> None:
        self.parts = parts
        self.requests = sum(call.requests for part in parts for call in part.calls)
        self.outcomes: list[Outcome] = []
        self.paces: list[Pace] = []
        self.start_s = 0.0
        self._progress = [LoadProgress()] * len(parts)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._messages: list[asyncio.Queue[tuple[str, Any]]] = []

    def get_progress(self) -> LoadProgress:
        """Return the sum of the last progress of each process."""
        return LoadProgress(
            *(sum(getattr(progress, f.name) for progress in self._progress) for f in dataclasses.fields(LoadProgress))
        )

    async def prepare(self, connections: int) -> None:
        """Start the processes and open this many connections to the server in total. Raises WorkerError."""
        context, loop = multiprocessing.get_context("spawn"), asyncio.get_running_loop()
        each = split_evenly(connections, len(self.parts))
        for number, part in enumerate(self.parts):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_process, args=(theirs, dataclasses.replace(part, connections=each[number])), daemon=True
            )
            with _block_signals():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._messages.append(asyncio.Queue())
            loop.add_reader(ours.fileno(), self._handle_message, number)
        try:
            for number in range(len(self.parts)):
                await self._receive_message(number, READY)
        except BaseException:
            self.close()
            raise

    async def send_load(self, start_s: float | None = None) -> None:
        """Send all requests, to the end or to the limit, and keep their outcomes.

        If it is cancelled or a process ends, the other processes are stopped and their outcomes are kept. Raise
        WorkerError if a process ended.
        """
        self.start_s = max(start_s or 0.0, time.perf_counter() + START_LEAD_S)
        self._send_all(self.start_s)
        taking = [asyncio.create_task(self._collect_outcomes(number)) for number in range(len(self._pipes))]
        try:
            await asyncio.wait(taking, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            try:
                await self._stop_processes(taking)
            finally:
                self.outcomes.sort(key=lambda outcome: outcome.submitted_s)
                self.close()
        for task in taking:
            task.result()

    def close(self) -> None:
        """End the processes, by SIGKILL if SIGTERM does not suffice."""
        for pipe in self._pipes:
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(END_S)
            process.kill()  # one that is stopped or stuck does not end otherwise
            process.join()
        self._pipes.clear()
        self._processes.clear()

    def _send_all(self, message: float | str) -> None:
        """Send a message to each process; processes that have ended are noticed when their outcomes are awaited."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(message)

    async def _stop_processes(self, taking: Sequence[asyncio.Task[None]]) -> None:
        """Stop the processes that have not sent their outcomes, and wait for them."""
        left = {task for task in taking if not task.done()}
        if left:
            self._send_all(STOP)
            _, left = await asyncio.wait(left, timeout=STOP_S)
        if left:
            print_stderr(
                f"{len(left)} of {len(taking)} client processes did not answer within {STOP_S:g} s; their requests are in no record."
            )
        for task in left:
            task.cancel()

    async def _collect_outcomes(self, number: int) -> None:
        outcomes, pace = await self._receive_message(number, DONE)
        self.outcomes += outcomes
        self.paces.append(pace)

    async def _receive_message(self, number: int, kind: str) -> Any:  # noqa: ANN401 -- of several kinds
        """Return the content of a process's next message of a kind. Raise WorkerError if the process ends before."""
        received, content = await self._messages[number].get()
        if received == kind:
            return content
        code = self._processes[number].exitcode
        raise WorkerError(f"a process of the client ended with exit code {code}; try --client processes=1.")

    def _handle_message(self, number: int) -> None:
        try:
            kind, content = self._pipes[number].recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipes[number].fileno())
            self._processes[number].join(1)
            kind, content = "", None
        if kind == PROGRESS:
            self._progress[number] = content
        else:
            self._messages[number].put_nowait((kind, content))


@contextlib.asynccontextmanager
async def open_load(
    target: Target, calls: Sequence[Call], options: LoadOptions, processes: int = 1
) -> AsyncIterator[Run | ClientPool]:
    """Provide a load sent by this process or by several, and end all of them with the block."""
    shares = split_load(target, calls, options, processes)
    if len(shares) > 1:
        several = ClientPool(shares)
        try:
            yield several
        finally:
            several.close()
        return
    async with Client(target) as client:
        yield Run(client, calls, options)


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Block Ctrl-C in the processes that are started here: their parent stops them, and they answer with their
    outcomes.

    multiprocessing starts a resource tracker with its first process, after which Python unblocks SIGINT; therefore the
    tracker is started beforehand.
    """
    resource_tracker.ensure_running()
    numbers = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_process(pipe: Connection, part: ClientLoadPart) -> None:
    """Run one process: send a share from the given start, send the outcomes back, and end when the parent does."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        asyncio.run(_run_share(pipe, part))


async def _run_share(pipe: Connection, part: ClientLoadPart) -> None:
    loop = asyncio.get_running_loop()
    redaction.register_secrets(*part.secrets)
    async with Client(part.target) as client:
        run = Run(client, part.calls, part.options)
        await run.prepare(part.connections)
        pipe.send((READY, None))
        start_s = await asyncio.to_thread(pipe.recv)
        if start_s == STOP:
            pipe.send((DONE, ([], run.pace)))
            return
        running = loop.create_task(run.send_load(start_s))

        def stop_load() -> None:
            """Cancel once: the message stays readable, and a second cancellation would interrupt the clean-up."""
            loop.remove_reader(pipe.fileno())
            running.cancel()

        loop.add_reader(pipe.fileno(), stop_load)  # a message to stop, or the parent's end
        reporting = loop.create_task(_report_progress(pipe, run))
        with contextlib.suppress(asyncio.CancelledError):
            await running
        reporting.cancel()
        for outcome in run.outcomes:
            outcome.call = dataclasses.replace(outcome.call, data=b"", session=None)
        pipe.send((DONE, (run.outcomes, run.pace)))


async def _report_progress(pipe: Connection, run: Run) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        pipe.send((PROGRESS, run.get_progress()))
