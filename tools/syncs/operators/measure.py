"""Measure on a GPU which operators make the host wait: `python -m tools.syncs.operators.measure FILE WORKERS LIMIT_S [KIND …]`.

A KIND is one of `KINDS` of cases.py; by default all are measured. Each case runs three times: once to load kernels; once behind queued
GPU work, forward and backward; and once with separate queued work before every operator that reaches a kernel. An operator waits if it
returns only after the queued work. torch's profiler counts the synchronising calls of the CUDA runtime and driver, and the warnings of
torch.cuda.set_sync_debug_mode are counted.
"""

from __future__ import annotations

import bisect
import collections
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools.syncs.operators.cases import KINDS, Case, list_groups, make_cases

if TYPE_CHECKING:
    from collections.abc import Sequence

QUEUED_CYCLES = 20_000_000  # about 10 ms on an H200
MARGIN_S = 0.002  # time before and after a call, for events without a link to an operator
WARNING = "called a synchronizing CUDA operation"
MAX_CALLS = 12  # measured calls of one overload in one group
MAX_PROCESS_CALLS = 60  # measured calls of one overload in one process
MAX_GROUP_S = 20.0
RANGE = "dcpbench#"


PROCESS_CALLS: collections.Counter[str] = collections.Counter()  # calls of each overload in this process


def measure_queued_ms() -> float:
    """Measure the duration of the queued work on an idle GPU, in ms."""
    torch.cuda._sleep(QUEUED_CYCLES)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(QUEUED_CYCLES)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


class Meter:
    """Run calls behind queued GPU work, and record the time until they return."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def time(self, what: str, call: Any, **facts: Any) -> Any:
        """Run and record a call behind queued work; `_count_syncs` adds the synchronising calls from the profiler."""
        torch.cuda.synchronize()
        torch.cuda._sleep(QUEUED_CYCLES)
        with (
            torch.profiler.record_function(f"{RANGE}{len(self.calls)}"),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            time.sleep(MARGIN_S)
            torch.cuda.set_sync_debug_mode("warn")
            start = time.perf_counter()
            try:
                result = call()
            finally:
                held = time.perf_counter() - start
                torch.cuda.set_sync_debug_mode("default")
                time.sleep(MARGIN_S)
        warned = sum(WARNING in str(w.message) for w in caught)
        self.calls.append({"what": what, "ms": round(held * 1e3, 3), "warned": warned, **facts})
        return result


class Leaves(TorchDispatchMode):
    """Time every operator on GPU tensors that reaches a kernel."""

    def __init__(self, meter: Meter, seen: collections.Counter[str]) -> None:
        super().__init__()
        self.meter, self.seen = meter, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        on_gpu = any(isinstance(v, torch.Tensor) and v.is_cuda for v in given) or any(
            isinstance(v, torch.device) and v.type == "cuda" for v in given
        )
        if not on_gpu or not isinstance(func, torch._ops.OpOverload) or torch.cuda.is_current_stream_capturing():
            return func(*args, **kwargs)
        self.seen[str(func)] += 1
        PROCESS_CALLS[str(func)] += 1
        if self.seen[str(func)] > MAX_CALLS or PROCESS_CALLS[str(func)] > MAX_PROCESS_CALLS:
            return func(*args, **kwargs)
        return self.meter.time(str(func), lambda: func(*args, **kwargs), leaf=True)


def measure_group(group: str) -> dict[str, Any]:
    """Measure all cases of a group; return the calls and the first failures."""
    seen: collections.Counter[str] = collections.Counter()
    meter, failed = Meter(), []
    config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    begun = time.perf_counter()
    with torch.profiler.profile(activities=activities, experimental_config=config) as profiler:
        made = make_cases(group, "cuda")
        while time.perf_counter() - begun < MAX_GROUP_S:
            try:
                case = next(made, None)
                if case is None:
                    break
                _measure_case(case, meter, seen)
            except Exception as error:  # continue with other operators after an exception
                failed.append(f"{type(error).__name__}: {str(error)[:200]}")
                if "CUDA error" in str(error):
                    raise
    _count_syncs(profiler, meter)
    return {"group": group, "calls": meter.calls, "failed": failed[:5]}


def _measure_case(case: Case, meter: Meter, seen: collections.Counter[str]) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        result = case.run()
        backward = case.make_backward(result)
        if backward:
            backward()
        result = meter.time(case.name, case.run, leaf=False)
        backward = case.make_backward(result)
        if backward:
            meter.time(f"{case.name} backward", backward, leaf=False)
        with Leaves(meter, seen):
            backward = case.make_backward(case.run())
            if backward:
                backward()


def _count_syncs(profiler: Any, meter: Meter) -> None:
    """Add the names of the synchronising events in its range to each call."""
    for index, names in count_events(profiler.profiler.kineto_results.events()).items():
        if index < len(meter.calls):
            meter.calls[index]["events"] = dict(names)


def count_events(events: Sequence[Any]) -> dict[int, collections.Counter[str]]:
    """Count the synchronising events of each range by name.

    An event of CUDA belongs to the operator or range that it is linked to, as CUDA's clock can differ from the host's by some
    milliseconds. An event without a link belongs to the range around its time.
    """
    ranges = sorted((_get_span(e), int(e.name().removeprefix(RANGE))) for e in events if e.name().startswith(RANGE))
    starts = [start for (start, _), _ in ranges]

    def find_range(event: Any) -> int | None:
        at = bisect.bisect_right(starts, event.start_ns()) - 1
        return ranges[at][1] if at >= 0 and event.start_ns() <= ranges[at][0][1] else None

    linked = {e.linked_correlation_id() for e in events if _is_synchronising(e.name())} - {0}
    owners = {e.correlation_id(): find_range(e) for e in events if e.correlation_id() in linked and not _is_cuda(e)}
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for event in events:
        if _is_synchronising(event.name()):
            link = event.linked_correlation_id()
            index = owners[link] if link in owners else find_range(event)
            if index is not None:
                found[index][event.name()] += 1
    return found


def _get_span(event: Any) -> tuple[int, int]:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def _is_cuda(event: Any) -> bool:
    """Return True for an event of CUDA's runtime or driver, or of the GPU. Such an event does not have the number of an operator."""
    return event.linked_correlation_id() != 0 or event.name().startswith("cu")


def _is_synchronising(name: str) -> bool:
    return (
        name.startswith(("cuda", "cu", "Memcpy"))
        and any(w in name for w in ("ynchronize", "Free", "Memcpy", "Host", "Memcpy DtoH", "Memcpy HtoD"))
    ) or name in {"Stream Sync", "Context Sync", "Event Sync", "Stream Wait Event"}


def run_groups(names: list[str], output: Path) -> None:
    """Measure these groups one after another, and write a line for each as soon as it is done."""
    warnings.simplefilter("ignore")
    if any(name.startswith(("op:", "module:")) for name in names):
        list_groups()  # reads torch's database, which takes seconds
    with output.open("a") as file:
        for name in names:
            file.write(json.dumps({"begin": name}) + "\n")
            file.flush()
            file.write(json.dumps(measure_group(name)) + "\n")
            file.flush()


def supervise(output: Path, workers: int, limit_s: float, kinds: Sequence[str] = KINDS) -> None:
    """Split the groups among processes. Restart a process that a group ended, with the next group."""
    todo, deadline, queued = list_groups(kinds), time.monotonic() + limit_s, measure_queued_ms()
    shares = {output.with_suffix(f".{n}.jsonl"): todo[n::workers] for n in range(workers)}
    running: dict[Path, subprocess.Popen[bytes]] = {}
    while time.monotonic() < deadline:
        for path, share in shares.items():
            process = running.get(path)
            if process is not None and process.poll() is None:
                continue
            left = share[_count_begun(path, share) :]
            if left and (process is None or process.returncode):
                argument = json.dumps(left)
                running[path] = subprocess.Popen([sys.executable, "-m", __spec__.name, "--work", str(path), argument])
            elif not left or (process is not None and process.returncode == 0):
                running.pop(path, None)
                shares[path] = []
        if not running:
            break
        time.sleep(0.5)
    for process in running.values():
        process.kill()
    head = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__), "cuda": torch.version.cuda}
    _join_parts(
        output,
        list(shares),
        head | {"queued_ms": round(queued - MARGIN_S * 1e3, 3), "margin_ms": MARGIN_S * 1e3, "linked": True},
    )


def _count_begun(path: Path, share: list[str]) -> int:
    if not path.exists():
        return 0
    names = {json.loads(line).get("begin") for line in path.read_text().splitlines() if line.endswith("}")}
    return max((n + 1 for n, name in enumerate(share) if name in names), default=0)


def _join_parts(output: Path, parts: list[Path], head: dict[str, Any]) -> None:
    lines: list[str] = []
    for path in parts:
        written = path.read_text().splitlines() if path.exists() else []
        lines += [line for line in written if line.startswith('{"group"') and line.endswith("}")]
        path.unlink(missing_ok=True)
    output.write_text("\n".join([json.dumps(head), *lines]) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        run_groups(json.loads(sys.argv[3]), Path(sys.argv[2]))
    else:
        supervise(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:] or KINDS)
