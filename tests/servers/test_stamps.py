"""Bytes are stamped by the kernel: what a client that is woken late says of a server is the same."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time

import pytest

from dcpbench.servers.client import Client, Target
from dcpbench.servers.load import LoadOptions, Run, set_realtime_priority
from dcpbench.servers.socket_timestamps import SO_TIMESTAMPNS, SURE_NS, TIMESPEC, read_arrival_s
from tests.servers.test_faults import call

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"index": 0, "text": " a", "finish_reason": null}]}\n\n'
LAST = b"data: [DONE]\n\n"
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
END = b"%x\r\n%s\r\n0\r\n\r\n" % (len(LAST), LAST)
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux stamps")
BLOCKED_S, READ_S = 0.3, 0.001  # two clocks are read one after the other


@linux
def test_a_client_that_was_held_up_takes_no_time_of_it_for_the_servers() -> None:
    """Its loop is blocked until the answer has been there for 300 ms; the answer is stamped with when it came."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = Target.from_url(f"http://127.0.0.1:{listening.getsockname()[1]}")
        loops: list[asyncio.AbstractEventLoop] = []
        held, answered = threading.Event(), threading.Event()
        said_s: list[float] = []

        def server() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(1 << 16)
                loops[0].call_soon_threadsafe(hold)
                held.wait(10)
                taken.sendall(HEAD + CHUNK + END)
                said_s.append(time.perf_counter())
                answered.set()

        async def held_up() -> Run:
            async with Client(target) as client:
                run = Run(client, [call(target, tokens=1)], LoadOptions(clients=1))
                await run.prepare(1)
                loops.append(asyncio.get_running_loop())
                await run.send_load()
                return run

        def hold() -> None:
            held.set()
            if answered.wait(10):
                time.sleep(BLOCKED_S)

        thread = threading.Thread(target=server)
        thread.start()
        run = asyncio.run(held_up())
        thread.join()
    (outcome,) = run.outcomes
    assert outcome.error is None
    assert outcome.answer is not None
    assert outcome.answer.chunk_s[0] <= said_s[0] + READ_S
    assert max(run.pace.ages_s) >= BLOCKED_S - READ_S


def test_a_stamp_is_told_by_the_clock_of_our_times() -> None:
    """Now is now; what is no stamp, or an empty one, is none."""
    date = time.time_ns()
    kind = (socket.SOL_SOCKET, SO_TIMESTAMPNS)
    told = read_arrival_s([(*kind, TIMESPEC.pack(*divmod(date, 1_000_000_000)))])
    assert told is not None
    assert told == pytest.approx(time.perf_counter(), abs=5)
    assert read_arrival_s([(*kind, TIMESPEC.pack(0, 0))]) is None
    assert read_arrival_s([(socket.SOL_SOCKET, SO_TIMESTAMPNS + 1, TIMESPEC.pack(1, 1))]) is None
    assert read_arrival_s([]) is None


def test_clocks_between_whose_readings_a_process_was_stopped_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first the date lies between readings 20 µs apart, which is too far; then between 1,000 and 1,010 ns.

    A stamp 95 ns before that date is from 910 ns: the date is taken to be read in the middle, at 1,005.
    """
    readings, dates = iter([0, SURE_NS, 1000, 1010]), iter([7_000_000_000, 9_000_000_095])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(readings))
    monkeypatch.setattr(time, "time_ns", lambda: next(dates))
    stamp = TIMESPEC.pack(9, 0)
    assert read_arrival_s([(socket.SOL_SOCKET, SO_TIMESTAMPNS, stamp)]) == pytest.approx(910e-9, rel=1e-9)
    assert not list(readings)


@linux
def test_a_client_that_goes_first_is_ordinary_again_afterwards() -> None:
    """Also where the kernel does not let it."""
    before = os.sched_getscheduler(0)
    with set_realtime_priority() as allowed:
        policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        assert policy == (os.SCHED_RR if allowed else before)
    assert os.sched_getscheduler(0) == before
    with set_realtime_priority(wanted=False) as allowed:
        assert not allowed


@pytest.mark.parametrize("lets", [True, False])
def test_whoever_goes_first_is_this_thread_and_none_that_it_starts(monkeypatch: pytest.MonkeyPatch, lets: bool) -> None:
    """0 is the caller; what it forks is ordinary. Afterwards it is what it was, if it was anything else."""
    asked: list[tuple[int, int]] = []

    def schedule(pid: int, policy: int, _: object) -> None:
        asked.append((pid, policy))
        if not lets:
            raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", schedule)
    before = os.sched_getscheduler(0)
    with set_realtime_priority() as allowed:
        assert allowed is lets
    first = (0, os.SCHED_RR | os.SCHED_RESET_ON_FORK)
    assert asked == ([first, (0, before)] if lets else [first])
