"""Made-up Kineto traces, event by event. Times are microseconds; none of these numbers was measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.scan import scan_traces

if TYPE_CHECKING:
    from dcpbench.syncs.sync_report import Report, Site

HOST = 100  # process and main thread
PINNED = "Memcpy DtoH (Device -> Pinned)"
PAGEABLE = "Memcpy DtoH (Device -> Pageable)"
TO_GPU = "Memcpy HtoD (Pageable -> Device)"


class Trace:
    """A trace as today's torch writes it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.top: dict[str, Any] = {"schemaVersion": 1}
        self._ids = itertools.count(1)

    def add(
        self, cat: str, name: str, start: float, end: float, *, pid: Any = HOST, tid: Any = HOST, **args: Any
    ) -> None:
        """Any event."""
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )

    def op(self, name: str, start: float, end: float, *, tid: Any = HOST, **args: Any) -> None:
        """An operator."""
        self.add("cpu_op", name, start, end, tid=tid, **args)

    def frame(self, name: str, start: float, end: float, *, tid: Any = HOST) -> None:
        """A Python frame."""
        self.add("python_function", name, start, end, tid=tid)

    def range(self, name: str, start: float, end: float, *, tid: Any = HOST) -> None:
        """A record_function range."""
        self.add("user_annotation", name, start, end, tid=tid)

    def call(
        self, name: str, start: float, end: float, *, tid: Any = HOST, cat: str = "cuda_runtime", **args: Any
    ) -> int:
        """A call of the runtime; returns its correlation."""
        correlation = int(args.pop("correlation", 0)) or next(self._ids)
        self.add(cat, name, start, end, tid=tid, correlation=correlation, **args)
        return correlation

    def gpu(
        self,
        name: str,
        start: float,
        end: float,
        correlation: int,
        *,
        stream: int = 7,
        cat: str = "kernel",
        **args: Any,
    ) -> None:
        """Work on the GPU."""
        self.add(cat, name, start, end, pid=0, tid=stream, correlation=correlation, device=0, stream=stream, **args)

    def kernel(self, launch: float, start: float, end: float, *, tid: Any = HOST, stream: int = 7) -> None:
        """A kernel that is launched in one microsecond."""
        self.gpu("gemm", start, end, self.call("cudaLaunchKernel", launch, launch + 1, tid=tid), stream=stream)

    def copy(
        self,
        name: str,
        call: tuple[float, float],
        gpu: tuple[float, float],
        *,
        runtime: str = "cudaMemcpyAsync",
        size: int = 8,
        stream: int = 7,
        tid: Any = HOST,
    ) -> None:
        """A copy: its call on the host, and itself on the GPU."""
        correlation = self.call(runtime, *call, tid=tid)
        self.gpu(name, *gpu, correlation, cat="gpu_memcpy", stream=stream, bytes=size)

    def item(self, start: float, ready: float, *, tid: Any = HOST, name: str = PINNED) -> None:
        """`.item()`: 2 µs of copying call, then a synchronisation until 5 µs after the copy, which ends at `ready`."""
        self.op("aten::item", start, ready + 8, tid=tid)
        self.op("aten::_local_scalar_dense", start + 1, ready + 7, tid=tid)
        self.copy(name, (start + 2, start + 4), (ready - 1, ready), tid=tid)
        self.call("cudaStreamSynchronize", start + 5, ready + 5, tid=tid)

    def work(self) -> Trace:
        """Two kernels far before everything else, so that gate and window edges have something to look at."""
        self.kernel(-1000, -990, -980)
        self.kernel(-970, -960, -950)
        return self

    def text(self) -> str:
        """As JSON."""
        return json.dumps({**self.top, "traceEvents": self.events})

    def scan(self, folder: Path, name: str = "trace.json", **options: Any) -> Report:
        """Return the report of `scan` on the trace; `folder` is the repository, too."""
        path = Path(folder) / name
        path.write_text(self.text())
        return scan_traces([path], root=Path(folder), **options)


def mine(report: Report) -> list[Site]:
    """Sites that count."""
    return [s for s in report.sites if not (s.own or s.may_block)]


def only(report: Report) -> Site:
    """The one site that there is, whatever it is."""
    assert len(report.sites) == 1, [(s.kind, s.op, s.call) for s in report.sites]
    return report.sites[0]


def sync_with(**changes: Any) -> dict[str, Any]:
    """A wait of 50 µs, some of its fields changed or missing."""
    event: dict[str, Any] = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaStreamSynchronize",
        "pid": 100,
        "tid": 100,
        "ts": 100,
        "dur": 50,
        "args": {"correlation": 9},
    }
    return {k: v for k, v in {**event, **changes}.items() if v != "missing"}


def scanned(folder: Path, data: bytes | str, name: str = "trace.json") -> Report:
    """Return the report of `scan` on a file with these contents; `folder` is the repository, too."""
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return scan_traces([path], root=folder)


def exit_code(report: Report, folder: Path) -> int:
    """Return the gate's exit code without any limit."""
    return compute_verdict(report, Gate(root=folder)).exit_code
