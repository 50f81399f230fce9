"""Test kernel timestamps of received bytes, with which a late client still measures the server correctly."""

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
BLOCKED_S, READ_S = 0.3, 0.001  # the tolerance, since two clocks are read in sequence


@linux
def test_blocked_event_loop_does_not_change_measured_arrival() -> None:
    """The loop is blocked for 300 ms after the answer has arrived, and the answer keeps its arrival time."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = Target.from_url(f"http://127.0.0.1:{listening.getsockname()[1]}")
        loops: list[asyncio.AbstractEventLoop] = []
        blocked, answered = threading.Event(), threading.Event()
        sent_s: list[float] = []

        def server() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(1 << 16)
                loops[0].call_soon_threadsafe(block_loop)
                blocked.wait(10)
                taken.sendall(HEAD + CHUNK + END)
                sent_s.append(time.perf_counter())
                answered.set()

        async def measure_blocked() -> Run:
            async with Client(target) as client:
                run = Run(client, [call(target, tokens=1)], LoadOptions(clients=1))
                await run.prepare(1)
                loops.append(asyncio.get_running_loop())
                await run.send_load()
                return run

        def block_loop() -> None:
            blocked.set()
            if answered.wait(10):
                time.sleep(BLOCKED_S)

        thread = threading.Thread(target=server)
        thread.start()
        run = asyncio.run(measure_blocked())
        thread.join()
    (outcome,) = run.outcomes
    assert outcome.error is None
    assert outcome.answer is not None
    assert outcome.answer.chunk_s[0] <= sent_s[0] + READ_S
    assert max(run.pace.ages_s) >= BLOCKED_S - READ_S


def test_timestamp_is_converted_to_perf_counter() -> None:
    """The current date is converted to the current time; invalid and empty timestamps give None."""
    date = time.time_ns()
    kind = (socket.SOL_SOCKET, SO_TIMESTAMPNS)
    arrival_s = read_arrival_s([(*kind, TIMESPEC.pack(*divmod(date, 1_000_000_000)))])
    assert arrival_s is not None
    assert arrival_s == pytest.approx(time.perf_counter(), abs=5)
    assert read_arrival_s([(*kind, TIMESPEC.pack(0, 0))]) is None
    assert read_arrival_s([(socket.SOL_SOCKET, SO_TIMESTAMPNS + 1, TIMESPEC.pack(1, 1))]) is None
    assert read_arrival_s([]) is None


def test_clock_pair_is_read_again_after_a_pause_between_its_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first date lies between readings 20 µs apart, which is too far; the second between 1,000 and 1,010 ns.

    The date counts as read in the middle, at 1,005 ns, so a timestamp 95 ns before that date is at 910 ns.
    """
    readings, dates = iter([0, SURE_NS, 1000, 1010]), iter([7_000_000_000, 9_000_000_095])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(readings))
    monkeypatch.setattr(time, "time_ns", lambda: next(dates))
    stamp = TIMESPEC.pack(9, 0)
    assert read_arrival_s([(socket.SOL_SOCKET, SO_TIMESTAMPNS, stamp)]) == pytest.approx(910e-9, rel=1e-9)
    assert not list(readings)


@linux
def test_realtime_priority_is_reset_after_the_load() -> None:
    """The load also runs if the kernel does not permit a real-time priority."""
    before = os.sched_getscheduler(0)
    with set_realtime_priority() as allowed:
        policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        assert policy == (os.SCHED_RR if allowed else before)
    assert os.sched_getscheduler(0) == before
    with set_realtime_priority(wanted=False) as allowed:
        assert not allowed


@pytest.mark.parametrize("lets", [True, False])
def test_realtime_priority_applies_to_this_thread_only(monkeypatch: pytest.MonkeyPatch, lets: bool) -> None:
    """Process id 0 is the calling thread, forks have normal priority, and the previous policy is restored."""
    requested: list[tuple[int, int]] = []

    def schedule(pid: int, policy: int, _: object) -> None:
        requested.append((pid, policy))
        if not lets:
            raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", schedule)
    before = os.sched_getscheduler(0)
    with set_realtime_priority() as allowed:
        assert allowed is lets
    first = (0, os.SCHED_RR | os.SCHED_RESET_ON_FORK)
    assert requested == ([first, (0, before)] if lets else [first])
