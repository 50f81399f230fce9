"""Build traces of small programs on a GPU in the format of torch.profiler: launches, kernels, `.item()` and ranges.

The clock of the host and that of the GPU advance with each call, so a program reads as it runs. No time was measured.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOST = 100
ITEM = ("aten::item", "aten::_local_scalar_dense")


class Program:
    """Build the trace of a program on one thread and one stream."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.host = self.gpu = 1000.0
        self.ids = itertools.count(1)

    def add(self, category: str, name: str, start: float, length: float, **args: Any) -> None:
        """Write one event; GPU work has a separate process."""
        pid, tid = (0, 7) if category in ("kernel", "gpu_memcpy") else (HOST, HOST)
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": round(start, 3)}
        self.events.append({**event, "dur": round(length, 3), "args": args})

    def work(self, kernels: int, us: float = 50.0, name: str = "gemm") -> None:
        """Launch kernels of `us` microseconds each."""
        for _ in range(kernels):
            op, correlation = next(self.ids), next(self.ids)
            self.add("cpu_op", "aten::mm", self.host, 8, **{"External id": op})
            self.add("cuda_runtime", "cudaLaunchKernel", self.host + 1, 5, correlation=correlation)
            begin = max(self.gpu, self.host + 7)
            self.add("kernel", name, begin, us, correlation=correlation, device=0, stream=7)
            self.gpu, self.host = begin + us, self.host + 9

    def read(self, times: int = 1) -> None:
        """Read a value as `.item()` does: a copy to pinned memory and a wait for it."""
        for _ in range(times):
            start, end = self.host, max(self.gpu, self.host + 8) + 2
            ids = [next(self.ids) for _ in ITEM]
            for i, (op, number) in enumerate(zip(ITEM, ids, strict=True)):
                self.add("cpu_op", op, start + i * 0.5, end - start + 6 - i * 0.5, **{"External id": number})
            copy, wait = next(self.ids), next(self.ids)
            link = {"External id": ids[-1]}
            self.add("cuda_runtime", "cudaMemcpyAsync", start + 3, 4, correlation=copy, **link)
            where = {"correlation": copy, "bytes": 8, "stream": 7, "device": 0}
            self.add("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", end - 2, 1, **where)
            self.add("cuda_runtime", "cudaStreamSynchronize", start + 7.5, end - start - 5, correlation=wait, **link)
            self.gpu, self.host = end - 1, end + 8

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Annotate the events inside the block, as `record_function` does."""
        start = self.host
        yield
        self.add("user_annotation", name, start, self.host - start)

    @contextlib.contextmanager
    def function(self, name: str) -> Iterator[None]:
        """Put a Python frame around the events inside the block."""
        start = self.host
        yield
        self.add("python_function", name, start - 0.2, self.host - start + 0.4)

    def write(self, path: Path, **top: Any) -> Path:
        """Write the trace and return its path."""
        path.write_text(json.dumps({"schemaVersion": 1, **top, "traceEvents": self.events}))
        return path
