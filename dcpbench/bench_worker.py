"""Runs the cases of a bench on one device: `python -m dcpbench.bench_worker FOLDER`, started by bench.py.

FOLDER/job.json says what; FOLDER/events.jsonl gets a line for each thing done. Three rounds over the cases: timing
first, since the detector that counts synchronisations afterwards slows whatever follows it, and at the end the captures
that are expected to be refused, since a refused capture leaves torch's allocator in a state that nothing should follow.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.bench_records import BenchJob, Event, Graph, Result
from dcpbench.environment import environment
from dcpbench.workloads import calls as measuring
from dcpbench.workloads.dp_slice import DpSlice
from dcpbench.workloads.kv_write import KvWrite
from dcpbench.workloads.sync_count import count_syncs

if TYPE_CHECKING:
    from dcpbench.bench_records import Case, Timing
    from dcpbench.records import Gpu
    from dcpbench.workloads.calls import Calls, Workload

WORKLOADS: dict[str, type[Workload]] = {"kv-write": KvWrite, "dp-slice": DpSlice}
"""A further bench is a class with `build(case) -> Calls`, in a file of its own, and its line here."""
L2_TIMES = 4
"""A pass that writes less than this many times the L2 cache is marked `l2_warm`."""


class BenchWorker:
    """State of a job."""

    def __init__(self, job: BenchJob, folder: Path, device: torch.device) -> None:
        self.job, self.device = job, device
        self.events = folder / "events.jsonl"
        self.workload = WORKLOADS[job.bench](device, job.settings.seed)
        self.blocking: dict[str, int] = {}
        """First case of each variant that waits for the GPU, by its variant."""

    def workload_on(self, device: torch.device) -> Workload:
        """The bench's workload with its tensors on `device`; this process's own is kept, with its inputs."""
        if device == self.device:
            return self.workload
        return WORKLOADS[self.job.bench](device, self.job.settings.seed)

    def tell(self, event: Event) -> None:
        """Append one line."""
        with self.events.open("ab") as f:
            f.write(msgspec.json.encode(event) + b"\n")

    def run(self) -> None:
        """All cases, in three rounds."""
        self.tell(Event(stage="start", environment=environment(self.device, self.job.command)))
        done = []
        for index, case in enumerate(self.job.cases):
            self.tell(Event(stage="case", index=index))
            try:
                result = self.measure(index, case)
            except Exception as e:  # noqa: BLE001 - whatever it is, the case says it and the others go on
                result = Result(case=case, outcome="failed", reason=_sentence(e))
            done.append(result)
            self.tell(Event(stage="done", index=index, result=result))
        for index, result in enumerate(done):
            if result.outcome == "ok":
                self.count(index, result)
        ready = {index: self.workload.build(self.job.cases[index]) for index in self.blocking.values()}
        for index, calls in ready.items():
            self.tell(Event(stage="graph", index=index, graph=measuring.try_capture(calls)))
        self.tell(Event(stage="end"))

    def measure(self, index: int, case: Case) -> Result:
        """Correctness and, on a GPU, times of one case."""
        calls = self.workload.build(case)
        difference = calls.check(calls.run)
        if self.device.type == "cpu":
            return Result(case=case, correct=not difference, difference=difference)
        settings = self.job.settings
        time, gpu = measuring.eager_time(calls, self.device, settings)
        host = measuring.host_time(calls, settings)
        graph: Graph | None = None
        if measuring.waits(calls.run_captured):
            self.blocking.setdefault(case.variant, index)
        else:
            graph, wrong = measuring.graph_time(calls, self.device, settings)
            difference = difference or (wrong and f"replayed graph: {wrong}")
        return Result(
            case=case, correct=not difference, difference=difference, time=time, host=host, graph=graph, gpu=gpu,
            marks=self.marks(calls, gpu, [t for t in (time, host, graph and graph.time) if t]),
        )  # fmt: skip

    def marks(self, calls: Calls, gpu: Gpu | None, timings: list[Timing]) -> list[str]:
        """What to be careful about, in the words of records.jsonl."""
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        found = {
            "noisy": any(t.noisy for t in timings),
            "unsettled": any(t.unsettled for t in timings),
            "throttled": bool(gpu and gpu.throttle_reasons),
            "l2_warm": calls.written_bytes < L2_TIMES * l2_bytes,
        }
        return [name for name, applies in found.items() if applies]

    def count(self, index: int, result: Result) -> None:
        """Synchronisations of one case."""
        try:
            syncs = count_syncs(lambda device: self.workload_on(device).build(result.case), self.device)
        except Exception as e:  # noqa: BLE001 - as in `run`; what was timed stays
            reason = f"counting synchronisations: {_sentence(e)}"
            failed = msgspec.structs.replace(result, outcome="failed", reason=reason)
            self.tell(Event(stage="counted", index=index, result=failed))
        else:
            self.tell(Event(stage="counted", index=index, syncs=syncs))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {measuring.first_line(error)}"


def main(path: str) -> None:
    """Run the job of a folder."""
    folder = Path(path)
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=BenchJob)
    if job.device == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    worker = BenchWorker(job, folder, device)
    with torch.inference_mode():
        worker.run()
    if worker.blocking:
        os._exit(0)  # a refused capture is still open in torch, whose tear-down would complain about it


if __name__ == "__main__":
    main(sys.argv[1])
