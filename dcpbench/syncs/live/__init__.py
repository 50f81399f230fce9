"""Detect synchronisations while they happen: `watch`, `no_syncs` and, from allowed.py, `allow`.

    with dcpbench.syncs.watch() as seen:
        step()
    assert seen.count == 0, seen.text()

Callbacks of torch (callbacks.py) report that and where the host waits. A dispatch mode adds the operator, and finds
copies to and from pageable memory, which no callback reports.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import threading
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, overload

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from dcpbench.errors import CapacityError, SyncError, UsageError
from dcpbench.syncs import allowed
from dcpbench.syncs.live import callbacks, sighting
from dcpbench.syncs.owner import Owner
from dcpbench.syncs.sites import format_syncs, group_into_sites
from dcpbench.syncs.sync_report import Coverage, Report, TraceSummary, build_report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from dcpbench.syncs.sites import Sync

P = ParamSpec("P")
R = TypeVar("R")
Threads = Literal["current", "all"]

NOTES = (
    "Waits of libraries that call the CUDA driver or runtime themselves, outside torch, are not seen.",
    "What NCCL's own threads and blocking collectives wait for is not seen.",
    "Allocations that wait, such as cudaMalloc, cudaFree and cudaHostAlloc, are not seen.",
    "How long the host waited and what it cost the GPU is not measured; use a trace (dcpbench syncs run).",
)
OTHER_THREADS = "In other threads, copies to and from pageable memory with non_blocking=True are not seen."

_lock = threading.Lock()
_watches: tuple[Watch, ...] = ()
_running = threading.local()


def has_cuda() -> bool:
    """Return True if there is a CUDA device to wait for."""
    return torch.cuda.is_available()


class Watch:
    """Hold the result of `watch()`: a context manager for one use; watches nest, and each counts what it sees."""

    def __init__(self, *, threads: Threads = "current", at_most: int | None = None) -> None:
        if threads not in {"current", "all"}:
            raise UsageError(f'watch(threads={threads!r}): write "current" or "all".')
        given: object = at_most
        if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 0):
            raise UsageError(f"watch(at_most={at_most!r}): write a number of synchronisations, 0 or more.")
        self.threads = threads
        self.at_most = at_most
        self.syncs: list[Sync] = []  # synchronisations in order of time, without those of allowed regions
        self.hazards: list[Sync] = []  # operations that may wait needlessly: small pageable copies, pinning
        self.allowed: list[Sync] = []  # synchronisations of allowed regions; `Sync.allowed` is the reason
        self._owner: Owner | None = None
        self._mode = _Operators(self)

    @property
    def thread(self) -> int:
        """Return `threading.get_ident()` of the thread that watches; 0 before it does."""
        return self._owner.thread if self._owner else 0

    @property
    def count(self) -> int:
        """Return the number of synchronisations so far, without those of allowed regions."""
        return len(self.syncs)

    def text(self) -> str:
        """Return every line that synchronised, with its source, the reason and the usual fix."""
        return format_syncs(self.syncs)

    def report(self) -> Report:
        """Return the same report as `dcpbench syncs`; times are unknown, because nothing is measured here."""
        threads = OTHER_THREADS if self.threads == "all" else "Other threads were not watched."
        notes = [*NOTES, threads]
        events = len(self.syncs) + len(self.allowed)
        coverage = Coverage(detector="live", stacks="frames", sync_events=events, notes=notes)
        rank = os.environ.get("RANK", "")
        summary = TraceSummary(path="live", rank=int(rank) if rank.isdecimal() else None, coverage=coverage)
        report = build_report([summary], group_into_sites([*self.syncs, *self.hazards, *self.allowed]))
        report.verdict.allowed = {site.fingerprint: site.allowed for site in report.sites if site.allowed}
        return report

    def __enter__(self) -> Self:
        if self.thread:
            raise UsageError("This watch has been used; make a new one: with dcpbench.syncs.watch() as seen: …")
        if not has_cuda():
            raise CapacityError(
                "There is no CUDA device, so nothing could be seen here; on such a machine write "
                "`from dcpbench.syncs.dry_run import dry_run` and `with dry_run() as run:`, which finds what would wait."
            )
        callbacks.set_listener(_handle_wait)
        self._owner = Owner()
        self._mode.__enter__()
        _set_watches((*_watches, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        _set_watches(tuple(w for w in _watches if w is not self))
        if self._owner is not None:
            self._owner.close()
        self._mode.take_top()
        self._mode.__exit__(kind, error, where)
        if error is None and self.at_most is not None and self.count > self.at_most:
            limit = f"at most {self.at_most}" if self.at_most else "none"
            raise SyncError(f"{self.count} CUDA synchronisations where {limit} may be.\n\n{self.text()}")

    def is_concerned(self, calls: Sequence[sighting.Call]) -> bool:
        """Return True if the current activity belongs to this watch: that of its own thread and task, or work of autograd
        for it.
        """
        if self.threads == "all" or self._owner is None:
            return self.threads == "all"
        return self._owner.owns_current_work() or self._is_helped_by(calls)

    def _is_helped_by(self, calls: Sequence[sighting.Call]) -> bool:
        """Return True on a thread of autograd that works for the watching one."""
        return threading.get_ident() != self.thread and any(call.watch is self for call in calls)

    def add_sync(self, sync: Sync, calls: Sequence[sighting.Call]) -> None:
        """Count a synchronisation within these operators of the calling thread, or record why it is allowed."""
        reason = allowed.get_reason() or (allowed.get_reason(self.thread) if self._is_helped_by(calls) else "")
        if reason:
            self.allowed.append(dataclasses.replace(sync, allowed=reason))
        elif sync.may_block:
            self.hazards.append(sync)
        else:
            self.syncs.append(sync)


def watch(*, threads: Threads = "current", at_most: int | None = None) -> Watch:
    """Watch for CUDA synchronisation inside a `with` block, and return the Watch that records it.

    The program is not changed, and a `set_sync_debug_mode` of its own stays in force. Raise CapacityError without a
    CUDA device, because a count of 0 would be meaningless.

    Args:
        threads: `current` sees this thread and what autograd runs for it; `all` every thread of the process.
        at_most: With more than this many, leaving the block raises a SyncError that shows their lines.
    """
    return Watch(threads=threads, at_most=at_most)


@overload
def no_syncs(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def no_syncs(*, at_most: int = 0, threads: Threads = "current") -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def no_syncs(
    function: Callable[P, R] | None = None, /, *, at_most: int = 0, threads: Threads = "current"
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that each call must not synchronise, or not more often than `at_most`.

    Write `@no_syncs` or `@no_syncs(at_most=1)`. A call that does raises a SyncError after it has returned.
    """
    if function is None:
        return functools.partial(no_syncs, at_most=at_most, threads=threads)
    if not callable(function):
        raise UsageError(f"@no_syncs stands above a function, not {function!r}; options have names: at_most=1.")
    if any(f(function) for f in (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)):
        raise UsageError(
            f"@no_syncs cannot guard {function.__name__}: others run on its thread while it waits. "
            "Put `with dcpbench.syncs.watch(at_most=0):` around the part in question."
        )
    Watch(at_most=at_most, threads=threads)

    @functools.wraps(function)
    def call_guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        with Watch(at_most=at_most, threads=threads):
            return function(*args, **kwargs)

    return call_guarded


class _Operators(TorchDispatchMode):
    """Record which operator runs on this thread, and inspect copies that were requested not to block."""

    # Otherwise torch refuses higher-order operators, such as flex_attention, under this mode.
    supports_higher_order_operators = True

    def __init__(self, owner: Watch) -> None:
        super().__init__()
        self.owner = owner

    def take_top(self) -> None:
        """Exchange owners with the innermost mode: leaving a mode removes that one, which may be of another asyncio task."""
        top = _get_current_dispatch_mode()
        if isinstance(top, _Operators):
            self.owner, top.owner = top.owner, self.owner

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code stays compiled; otherwise torch would run it eagerly under a mode."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (operators return anything)
        call = sighting.Call(func, args, kwargs or {}, self.owner)
        calls = _get_calls()
        calls.append(call)
        try:
            result = func(*args, **call.kwargs)
        except RuntimeError as error:
            if callbacks.is_sync_error(error) and not call.seen:
                self.owner.add_sync(sighting.make_wait_sync(callbacks.STREAM, calls, self.owner.thread), calls)
            raise
        finally:
            calls.pop()
        if not call.seen and (sync := sighting.find_hazard(call, result, self.owner.thread)):
            concerned = [*calls, call]
            if self.owner.is_concerned(concerned):
                self.owner.add_sync(sync, concerned)
        return result


def _get_calls() -> list[sighting.Call]:
    """Return the operators that run on the calling thread, outermost first."""
    calls: list[sighting.Call] = vars(_running).setdefault("calls", [])
    return calls


def _handle_wait(kind: str) -> None:
    """Notify every watch concerned that the host is about to wait on the calling thread."""
    calls = _get_calls()
    watches = [w for w in _watches if w.is_concerned(calls)]
    if not watches:
        return
    for call in calls:
        call.seen = True
    for each in watches:
        each.add_sync(sighting.make_wait_sync(kind, calls, each.thread), calls)


def _set_watches(watches: tuple[Watch, ...]) -> None:
    global _watches  # noqa: PLW0603  (waits are reported to the process, not to a watch)
    with _lock:
        _watches = watches
