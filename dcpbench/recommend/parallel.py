"""Estimate points in several processes, as each is served in virtual time by one. No torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.points.point import Point

    Watch = Callable[[str], None]

Result = TypeVar("Result")
FORK = "fork"
_estimate: Callable[[Point], Any]  # of a worker process


def estimate_points(
    points: Sequence[Point], estimate: Callable[[Point, Watch], Result], watch: Watch = lambda _: None
) -> list[Result]:
    """Return the result of `estimate` for each point, over all cores; `watch` is called with the work in progress."""
    if len(points) > 1 and _count_cores() > 1 and FORK in multiprocessing.get_all_start_methods():
        try:
            return _estimate_in_processes(points, estimate, watch)
        except BrokenProcessPool:  # a process was killed, as by a limit on memory
            pass
    results = []
    for n, point in enumerate(points):
        what = _describe(points, n)
        watch(what)
        results.append(estimate(point, lambda step, what=what: watch(f"{what}, {step}")))  # type: ignore[misc]
    return results


def _estimate_in_processes(
    points: Sequence[Point], estimate: Callable[[Point, Watch], Result], watch: Watch
) -> list[Result]:
    """Fork processes, which inherit `estimate`, and return its result for each point."""
    watch(_describe(points, 0))

    def run(point: Point) -> Result:
        return estimate(point, lambda _: None)

    results: dict[int, Result] = {}
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which the workers never use: NumPy's are idle and reset after a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = ProcessPoolExecutor(
            min(_count_cores(), len(points)),
            mp_context=multiprocessing.get_context(FORK),
            initializer=_start_worker,
            initargs=(run,),
        )
        futures = {pool.submit(_run, point): n for n, point in enumerate(points)}
    try:
        for done in as_completed(futures):
            results[futures[done]] = done.result()
            watch(_describe(points, min(len(results), len(points) - 1)))
    finally:
        pool.shutdown(cancel_futures=True)
    return [results[n] for n in range(len(points))]


def _describe(points: Sequence[Point], n: int) -> str:
    return f"estimate {n + 1} of {len(points)}: {points[n].instance_name}"


def _start_worker(estimate: Callable[[Point], object]) -> None:
    global _estimate  # noqa: PLW0603 - a worker has one task
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its workers
    _estimate = estimate


def _run(point: Point) -> Any:  # noqa: ANN401 - a Result
    return _estimate(point)


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
