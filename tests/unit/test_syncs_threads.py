"""Test that a wait belongs to the thread and asyncio task that waited: live, with torch's callbacks called by hand, and
in a dry run.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from dcpbench.syncs import allow, live, watch
from dcpbench.syncs.dry_run import dry_run
from dcpbench.syncs.live import sighting
from dcpbench.syncs.live.checked import SyncCheck
from dcpbench.syncs.sites import Sync
from tests.unit import fake_cuda

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REPETITIONS = 1000


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with a GPU."""
    monkeypatch.setattr(live, "has_cuda", lambda: True)


def wait_for_stream() -> None:
    fake_cuda.stream()


def wait_allowed(wait: Callable[[], object], barrier: threading.Barrier) -> None:
    with allow("this thread may"):
        barrier.wait()
        wait()
        barrier.wait()  # the region is open while the other thread waits


def wait_forbidden(wait: Callable[[], object], barrier: threading.Barrier) -> None:
    barrier.wait()
    wait()
    barrier.wait()


def run_both(pool: ThreadPoolExecutor, wait: Callable[[], object]) -> None:
    """Let two threads wait at once, one of which is allowed to."""
    barrier = threading.Barrier(2)
    for done in [pool.submit(wait_allowed, wait, barrier), pool.submit(wait_forbidden, wait, barrier)]:
        done.result()


def test_allowed_wait_of_one_thread_does_not_allow_that_of_another() -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(REPETITIONS):
            with watch(threads="all") as seen:
                run_both(pool, wait_for_stream)
            assert [(s.allowed, s.frames[-3].function) for s in seen.syncs] == [("", "wait_forbidden")]
            assert [(s.allowed, s.frames[-3].function) for s in seen.allowed] == [("this thread may", "wait_allowed")]
            assert seen.syncs[0].thread != seen.allowed[0].thread


def test_watches_of_two_waiting_threads_record_their_own_thread_only() -> None:
    def watched(wait: Callable[..., None], barrier: threading.Barrier) -> tuple[int, int]:
        with watch() as seen:
            wait(wait_for_stream, barrier)
        return seen.count, len(seen.allowed)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(REPETITIONS):
            barrier = threading.Barrier(2)
            results = [pool.submit(watched, wait, barrier) for wait in (wait_allowed, wait_forbidden)]
            assert [done.result() for done in results] == [(0, 1), (1, 0)]


def test_allowed_wait_of_one_thread_in_a_dry_run_allows_no_other() -> None:
    with dry_run() as run, ThreadPoolExecutor(2) as pool:
        x = torch.ones(1, device="cuda")
        for _ in range(REPETITIONS):
            run_both(pool, x.item)
    functions = [(s.allowed, s.function) for s in run.syncs]
    assert sorted(functions) == [
        *[("", "wait_forbidden")] * REPETITIONS,
        *[("this thread may", "wait_allowed")] * REPETITIONS,
    ]


@pytest.mark.parametrize(("threads", "count"), [("current", 1), ("all", 3)])
@pytest.mark.parametrize("mode", ["live", "dry-run"])
def test_checked_test_counts_its_own_thread_with_and_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, threads: str, count: int
) -> None:
    """The test waits once, and a thread that it starts waits twice."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    check = SyncCheck(mode, threads=threads, allow=[], root=tmp_path)
    check.start()
    x = torch.ones(1, device="cuda" if mode == "dry-run" else "cpu")

    def wait() -> None:
        x.item() if mode == "dry-run" else fake_cuda.stream()

    with check.record_call():
        wait()
        thread = threading.Thread(target=lambda: [wait(), wait()])
        thread.start()
        thread.join()
    check.stop()
    assert check.count == count


class TestTasks:
    """Test requests of a server, which run as tasks on one thread: one runs while another is suspended."""

    def test_allowed_region_of_a_suspended_task_does_not_apply_to_another(self) -> None:
        async def main() -> None:
            entered, waited = asyncio.Event(), asyncio.Event()

            async def allowed() -> None:
                with allow("this request may"):
                    entered.set()
                    await waited.wait()
                    wait_for_stream()

            async def forbidden() -> None:
                await entered.wait()
                wait_for_stream()
                waited.set()

            await asyncio.gather(allowed(), forbidden())

        with watch() as seen:
            asyncio.run(main())
        assert [s.frames[-3].function for s in seen.syncs] == ["forbidden"]
        assert [s.frames[-3].function for s in seen.allowed] == ["allowed"]

    def test_watch_counts_its_own_task_and_tasks_that_it_starts(self) -> None:
        counts = {}

        async def child() -> None:
            await asyncio.sleep(0)
            wait_for_stream()

        async def request(name: str, times: int, barrier: asyncio.Barrier) -> None:
            with watch() as seen:
                await barrier.wait()
                for _ in range(times):
                    wait_for_stream()
                    await asyncio.sleep(0)
                await asyncio.create_task(child())
            counts[name] = seen.count, {s.thread for s in seen.syncs}

        async def main() -> None:
            barrier = asyncio.Barrier(2)
            first = asyncio.create_task(request("first", 5, barrier), name="first")
            second = asyncio.create_task(request("second", 2, barrier), name="second")
            await asyncio.gather(first, second)

        asyncio.run(main())
        assert {name: count for name, (count, _) in counts.items()} == {"first": 5 + 1, "second": 2 + 1}
        assert "MainThread, first" in counts["first"][1]
        assert "MainThread, second" not in counts["first"][1]
        assert torch._C._len_torch_dispatch_stack() == 0

    def test_copies_are_counted_by_the_watch_of_their_task(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first watch ends while the second one, which was opened later, continues. Each task copies once inside."""

        def find_copy(call: sighting.Call, *_: object) -> Sync | None:
            return Sync(rule="SYNC005", op=call.op) if call.op == "aten::clone" else None

        monkeypatch.setattr(sighting, "find_hazard", find_copy)
        counts = {}

        async def request(name: str, opened: asyncio.Event, closed: asyncio.Event) -> None:
            if name == "second":
                await opened.wait()
            with watch() as seen:
                opened.set()
                await asyncio.sleep(0)
                if name == "second":
                    await closed.wait()
                torch.ones(2).clone()
            counts[name] = seen.count
            closed.set()

        async def main() -> None:
            events = asyncio.Event(), asyncio.Event()
            await asyncio.gather(request("first", *events), request("second", *events))

        asyncio.run(main())
        assert counts == {"first": 1, "second": 1}
        assert torch._C._len_torch_dispatch_stack() == 0

    def test_watch_of_a_finished_fixture_covers_the_test(self) -> None:
        """An asynchronous fixture is a task, which has ended when the test runs."""

        async def fixture() -> live.Watch:
            return watch().__enter__()

        async def test() -> None:
            wait_for_stream()

        loop = asyncio.new_event_loop()
        seen = loop.run_until_complete(fixture())
        loop.run_until_complete(test())
        seen.__exit__(None, None, None)
        loop.close()
        assert seen.count == 1
