"""Streams, events and graphs of a GPU that is not there: they order nothing, and report when the host would wait."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import torch

from dcpbench.syncs import rules

if TYPE_CHECKING:
    from collections.abc import Callable

_ids = itertools.count()
_local = threading.local()


class VirtualStream:
    """Stands for torch.cuda.Stream. Work is done as soon as it is asked for."""

    report: Callable[[rules.Rule, str, str], None] | None = None

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        self.device = torch.device("cuda", index or 0)
        self.device_index = self.device.index
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_ids)

    def synchronize(self) -> None:
        """Reports a wait for the stream."""
        if VirtualStream.report is not None:
            VirtualStream.report(rules.STREAM, "torch.cuda.Stream.synchronize", "cudaStreamSynchronize")

    def query(self) -> bool:
        """Everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return recorder.graph is not None

    def wait_stream(self, stream: Any) -> None:
        """One stream waits for another; the host does not."""

    def wait_event(self, event: Any) -> None:
        """The stream waits; the host does not."""

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """An event that has been recorded."""
        event = event if event is not None else VirtualEvent()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class VirtualEvent:
    """Stands for torch.cuda.Event."""

    report: Callable[[rules.Rule, str, str], None] | None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded_s: float | None = None
        self.cuda_event = next(_ids)
        self.device = torch.device("cuda", 0)

    def record(self, stream: Any = None) -> None:
        """Notes the time."""
        self.recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """A stream waits; the host does not."""

    def query(self) -> bool:
        """Everything is done."""
        return True

    def synchronize(self) -> None:
        """Reports a wait, unless the event was never recorded, for which CUDA does not wait."""
        if VirtualEvent.report is not None and self.recorded_s is not None:
            VirtualEvent.report(rules.EVENT, "torch.cuda.Event.synchronize", "cudaEventSynchronize")

    def elapsed_time(self, end: VirtualEvent) -> float:
        """Milliseconds between two records on the host's clock; says nothing about a GPU."""
        if self.recorded_s is None or end.recorded_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end.recorded_s - self.recorded_s) * 1e3


class StreamContext:
    """Stands for torch.cuda.stream(s)."""

    def __init__(self, stream: VirtualStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> VirtualStream | None:
        if self.stream is not None:
            _stack().append(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            _stack().pop()


def current_stream(device: Any = None) -> VirtualStream:
    """The calling thread's stream; by default the default one."""
    return _stack()[-1]


def default_stream(device: Any = None) -> VirtualStream:
    """The default stream."""
    return DEFAULT


def set_stream(stream: VirtualStream | None) -> None:
    """Makes a stream the calling thread's."""
    if stream is not None:
        _stack()[-1] = stream


def _stack() -> list[VirtualStream]:
    if not hasattr(_local, "stack"):
        _local.stack = [DEFAULT]
    stack: list[VirtualStream] = _local.stack
    return stack


DEFAULT = VirtualStream()


class Recorder:
    """Operators of the graph that is being captured, so that a replay can run them again on the same tensors."""

    def __init__(self) -> None:
        self.graph: VirtualGraph | None = None

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remembers an operator that ran on host values."""
        if self.graph is not None:
            self.graph.work.append((func, args, kwargs, result))


recorder = Recorder()


class VirtualGraph:
    """Stands for torch.cuda.CUDAGraph. Captured work is done at once, and by each replay."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.work: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """From here on operators belong to the graph."""
        self.work = []
        recorder.graph = self

    def capture_end(self) -> None:
        """The graph is complete."""
        recorder.graph = None

    def instantiate(self) -> None:
        """Nothing to prepare."""

    def replay(self) -> None:
        """Runs the captured operators again, results into the tensors of the capture."""
        for func, args, kwargs, result in self.work:
            _refill(result, func(*args, **kwargs))

    def reset(self) -> None:
        """Forgets the work."""
        self.work = []

    def pool(self) -> tuple[int, int]:
        """Names a memory pool."""
        return (0, 0)

    def enable_debug_mode(self) -> None:
        """There is nothing to debug."""

    def debug_dump(self, path: str) -> None:
        """There is nothing to dump."""


def _refill(old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    elif isinstance(old, list | tuple):
        for a, b in zip(old, new, strict=False):
            _refill(a, b)
