"""Build synthetic Kineto traces, event by event. Times are microseconds; none of these numbers was measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.scan import scan_traces

if TYPE_CHECKING:
    from dcpbench.syncs.sync_report import Report, Site

HOST = 100  # ids of the process and its main thread
PINNED = "Memcpy DtoH (Device -> Pinned)"
PAGEABLE = "Memcpy DtoH (Device -> Pageable)"
TO_GPU = "Memcpy HtoD (Pageable -> Device)"


class Trace:
    """Build a trace in the format of current torch versions."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.top: dict[str, Any] = {"schemaVersion": 1}
        self._ids = itertools.count(1)

    def add(
        self, cat: str, name: str, start: float, end: float, *, pid: Any = HOST, tid: Any = HOST, **args: Any
    ) -> None:
        """Add any event."""
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
        """Add an operator."""
        self.add("cpu_op", name, start, end, tid=tid, **args)

    def frame(self, name: str, start: float, end: float, *, tid: Any = HOST) -> None:
        """Add a Python frame."""
        self.add("python_function", name, start, end, tid=tid)

    def range(self, name: str, start: float, end: float, *, tid: Any = HOST) -> None:
        """Add a record_function range."""
        self.add("user_annotation", name, start, end, tid=tid)

    def call(
        self, name: str, start: float, end: float, *, tid: Any = HOST, cat: str = "cuda_runtime", **args: Any
    ) -> int:
        """Add a call of the runtime, and return its correlation."""
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
        """Add work on the GPU."""
        self.add(cat, name, start, end, pid=0, tid=stream, correlation=correlation, device=0, stream=stream, **args)

    def kernel(self, launch: float, start: float, end: float, *, tid: Any = HOST, stream: int = 7) -> None:
        """Add a kernel that is launched in one microsecond."""
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
        """Add a copy: its call on the host, and its work on the GPU."""
        correlation = self.call(runtime, *call, tid=tid)
        self.gpu(name, *gpu, correlation, cat="gpu_memcpy", stream=stream, bytes=size)

    def item(self, start: float, ready: float, *, tid: Any = HOST, name: str = PINNED) -> None:
        """Add `.item()`: 2 µs of copying call, then a synchronisation until 5 µs after the copy, which ends at `ready`."""
        self.op("aten::item", start, ready + 8, tid=tid)
        self.op("aten::_local_scalar_dense", start + 1, ready + 7, tid=tid)
        self.copy(name, (start + 2, start + 4), (ready - 1, ready), tid=tid)
        self.call("cudaStreamSynchronize", start + 5, ready + 5, tid=tid)

    def work(self) -> Trace:
        """Add two kernels far before everything else, so that the trace has a gate and window edges."""
        self.kernel(-1000, -990, -980)
        self.kernel(-970, -960, -950)
        return self

    def text(self) -> str:
        """Return the trace as JSON."""
        return json.dumps({**self.top, "traceEvents": self.events})

    def scan(self, folder: Path, name: str = "trace.json", **options: Any) -> Report:
        """Return the report of `scan` on the trace; `folder` is the repository, too."""
        path = Path(folder) / name
        path.write_text(self.text())
        return scan_traces([path], root=Path(folder), **options)


def select_counted(report: Report) -> list[Site]:
    """Return the sites that count."""
    return [s for s in report.sites if not (s.own or s.may_block)]


def get_only_site(report: Report) -> Site:
    """Return the only site."""
    assert len(report.sites) == 1, [(s.kind, s.op, s.call) for s in report.sites]
    return report.sites[0]


def make_sync(**changes: Any) -> dict[str, Any]:
    """Return a wait of 50 µs, with some fields changed or missing."""
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


def scan_data(folder: Path, data: bytes | str, name: str = "trace.json") -> Report:
    """Return the report of `scan` on a file with these contents; `folder` is the repository, too."""
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return scan_traces([path], root=folder)


def compute_exit_code(report: Report, folder: Path) -> int:
    """Return the gate's exit code without any limit."""
    return compute_verdict(report, Gate(root=folder)).exit_code
