"""Run the cases of a bench as one of its ranks: `python -m dcpbench.bench.bench_worker FOLDER`, started by runner.py.

FOLDER/job.json is the job; rank 0 appends a line to FOLDER/events.jsonl for each step of the work. The machine's limits
come first, then the cases. Every case is captured into a CUDA graph, which proves that it does not wait for the GPU. With
several ranks all take every branch together.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from dcpbench.bench.bench_record import BenchJob, Event, Graph, Result
from dcpbench.bench.operators import calls as measuring
from dcpbench.bench.operators import limits
from dcpbench.bench.operators.attention import Attention
from dcpbench.bench.operators.collectives import Collectives
from dcpbench.bench.operators.exchange import ExchangeBench
from dcpbench.bench.operators.gqa_attention import Gqa
from dcpbench.bench.operators.indexer import IndexerBench
from dcpbench.bench.operators.kv_gather import KvGather
from dcpbench.bench.operators.linear import Linear
from dcpbench.bench.operators.merge import Merge
from dcpbench.bench.operators.moe import Moe
from dcpbench.bench.operators.rendezvous import RankError, gather_first_text, run_together, start_distributed
from dcpbench.bench.operators.sparse_attention import SparseAttentionBench
from dcpbench.exchange.torch_collectives import gather_objects, reduce_max_error
from dcpbench.launch import version_check
from dcpbench.measuring.environment import collect_environment
from dcpbench.measuring.gpu_state import merge_states
from dcpbench.measuring.timing import capture_graph
from dcpbench.points.roofline import compute_floor_us

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.bench.bench_record import Case, Timing
    from dcpbench.bench.operators.calls import Calls, Run, Workload
    from dcpbench.records.record import Gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measurements of a bench in addition to the time of its cases in a CUDA graph."""

    workload: type[Workload]
    limits: tuple[str, ...] = ()  # limits with which its cases are compared; see operators/limits.py
    eager_calls: int = 0  # calls of an eager pass that is timed, too, if they do work that a graph cannot; else 0
    fresh: bool = False  # true if an engine would also have just written its inputs: the L2 cache is not kept cold
    turns: bool = False  # True if a case's variants alternate: after a hot one, a variant has lower clocks


BENCHES = {  # benches by name: a class with `build(case) -> Calls` in its own file, and an entry here
    "attention": Bench(workload=Attention, limits=("read", "matmul", "matmul_fp8"), turns=True),
    "gqa": Bench(workload=Gqa, limits=("read", "matmul", "matmul_fp8"), turns=True),
    "indexer": Bench(workload=IndexerBench, limits=("read", "matmul", "matmul_fp8"), turns=True),
    "sparse-attention": Bench(workload=SparseAttentionBench, limits=("read", "matmul", "matmul_fp8"), turns=True),
    "exchange": Bench(workload=ExchangeBench, limits=("peer", "barrier"), fresh=True),
    "merge": Bench(workload=Merge, limits=("copy", "matmul"), turns=True),
    "linear": Bench(workload=Linear, limits=("read", "matmul", "matmul_fp8"), turns=True),
    "moe": Bench(workload=Moe, limits=("read", "matmul", "matmul_fp8"), turns=True),
    "collectives": Bench(workload=Collectives, limits=("peer", "barrier", "smallest"), fresh=True),
    "kv-gather": Bench(workload=KvGather, limits=("copy", "peer", "barrier"), eager_calls=2),
}


@dataclasses.dataclass
class PreparedCase:
    """A case on its way."""

    calls: Calls
    result: Result
    states: list[Gpu | None] = dataclasses.field(default_factory=list)  # state of the GPU during its timings
    replay: Run | None = None  # a pass as a graph

    def update_result(self, **fields: Any) -> None:  # noqa: ANN401 - of a result
        """Change fields of the result."""
        self.result = msgspec.structs.replace(self.result, **fields)


class BenchWorker:
    """State of a job on one rank."""

    def __init__(self, job: BenchJob, folder: Path, rank: int, device: torch.device) -> None:
        self.job, self.rank, self.device = job, rank, device
        self.events = folder / "events.jsonl"
        self.bench = BENCHES[job.bench]
        self.gpu_times = functools.partial(measuring.measure_gpu_times, device=device, settings=job.settings)
        self.workload = self.bench.workload(device, job.settings.seed)
        self.limits: dict[str, float] = {}

    def write_event(self, event: Event) -> None:
        """Append one event, on rank 0."""
        if self.rank == 0:
            with self.events.open("ab") as f:
                f.write(msgspec.json.encode(event) + b"\n")

    def run_job(self) -> None:
        """Measure limits, then all cases."""
        self.write_event(Event(stage="start", environment=collect_environment(self.device, self.job.command)))
        if self.device.type == "cuda" and self.bench.limits:
            found, unmeasured = limits.measure_limits(self.bench.limits, self.device)
            self.limits = {limit.name: limit.median for limit in found}
            self.write_event(Event(stage="limits", limits=found, unmeasured=unmeasured))
        for group in self.group_cases():
            for index, result in self.measure_group(group):
                self.write_event(Event(stage="done", index=index, result=result))
        self.write_event(Event(stage="end"))

    def group_cases(self) -> list[dict[int, Case]]:
        """Return the cases that are measured together, by their numbers: the variants of a case, if they take turns."""
        found: list[dict[int, Case]] = []
        for index, case in enumerate(self.job.cases):
            if self.bench.turns and self.device.type == "cuda" and found:
                last = next(iter(found[-1].values()))
                if (case.sizes, case.calls) == (last.sizes, last.calls):
                    found[-1][index] = case
                    continue
            found.append({index: case})
        return found

    def measure_group(self, group: dict[int, Case]) -> Iterator[tuple[int, Result]]:
        """Yield correctness and, on a GPU, times of each case; a case that fails on any rank is marked as failed."""
        ready: dict[int, PreparedCase] = {}
        for index, case in group.items():
            self.write_event(Event(stage="case", index=index))
            try:
                ready[index] = self.prepare_case(case)
            except RankError as e:
                yield index, make_failed_result(case, e)
        passes = [(each.replay, len(each.calls.calls)) for each in ready.values() if each.replay]
        try:
            found, gpu = run_together(lambda: self.gpu_times(passes)) if passes else ([], None)
        except RankError as e:
            yield from ((index, make_failed_result(group[index], e)) for index in ready)
            return
        times = iter(found)
        for index, each in ready.items():
            try:
                if each.replay:
                    self.add_replay(each, each.replay, next(times), gpu)
                result = self.finish_result(each)
            except RankError as e:
                result = make_failed_result(group[index], e)
            yield index, result

    def prepare_case(self, case: Case) -> PreparedCase:
        """Check a case, and on a GPU take the timings that do not involve other cases."""
        calls = run_together(lambda: self.workload.build_calls(case))
        found = check_calls(calls, calls.run)
        ready = PreparedCase(calls=calls, result=Result(case=case, calls=len(calls.calls), work=calls.work, **found))
        if self.device.type == "cpu":
            return ready
        if eager := min(self.bench.eager_calls, len(calls.calls)):
            some = functools.partial(measuring.run_all, calls.calls[:eager])
            (time,), gpu = run_together(lambda: self.gpu_times([(some, eager)]))
            ready.update_result(time=time)
            ready.states.append(gpu)
        ready.replay = run_together(lambda: capture_graph(calls.run_captured).replay)
        return ready

    def add_replay(self, ready: PreparedCase, replay: Run, time: Timing, gpu: Gpu | None) -> None:
        """Add the results of the graph, and check them."""
        calls, result = ready.calls, ready.result
        found = check_calls(calls, replay)
        graph = Graph(time=time, correct=found["correct"])
        if not result.correct:  # an earlier error takes precedence
            found |= {"correct": False, "difference": result.difference}
        elif not graph.correct:
            found |= {"difference": f"replayed graph: {found['difference']}"}
        ready.update_result(graph=graph, **found)
        ready.states.append(gpu)

    def finish_result(self, ready: PreparedCase) -> Result:
        """Return the result with values derived from its times, if there are any; a CPU has none."""
        if self.device.type == "cpu":
            return ready.result
        gpu = merge_states(state for each in gather_objects(ready.states) for state in each)
        result = ready.result
        return msgspec.structs.replace(
            result,
            gpu=gpu,
            warnings=self.list_warnings(ready.calls, gpu, result),
            **self.compute_rates(ready.calls, result),
        )

    def compute_rates(self, calls: Calls, result: Result) -> dict[str, float | None]:
        """Return the rates of a call by its time, and its floor."""
        work, time = calls.work, result.graph.time if result.graph else result.time
        if work is None or time is None:
            return {}
        amounts = {"bytes_s": work.memory_bytes, "flop_s": work.flops, "received_bytes_s": work.received_bytes}
        rates = {name: amount / time.median_us * 1e6 if amount else None for name, amount in amounts.items()}
        return rates | {"floor_us": compute_floor_us(work, self.limits)}

    def list_warnings(self, calls: Calls, gpu: Gpu | None, result: Result) -> list[str]:
        """Return the warnings of a result, by their names in records.jsonl."""
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        timings = [t for t in (result.time, result.graph and result.graph.time) if t]
        found = {
            "noisy": any(t.noisy for t in timings),
            "unsettled": any(t.unsettled for t in timings),
            "throttled": bool(gpu and gpu.throttle_reasons),
            "l2_warm": not self.bench.fresh and calls.written_bytes < measuring.COLD * l2_bytes,
        }
        return [name for name, applies in found.items() if applies]


def make_failed_result(case: Case, error: RankError) -> Result:
    """Return the result of a case that failed on some rank."""
    return Result(case=case, outcome="failed", reason=str(error))


def check_calls(calls: Calls, run: Run) -> dict[str, Any]:
    """Return fields of a result after a pass by `run`: the difference on any rank, and the largest error of all ranks."""
    difference = gather_first_text(run_together(lambda: calls.check(run)))
    return {
        "correct": not difference,
        "difference": difference,
        "error": reduce_max_error(run_together(calls.error)) if calls.error else None,
    }


def main(path: str) -> None:
    """Run the job of a folder as the rank that the environment names, as torchrun would."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder, rank = Path(path), int(os.environ.get("RANK", "0"))
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=BenchJob)
    if job.package is not None:
        version_check.check_same_package(job.package)
    if job.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    if job.ranks > 1:
        start_distributed(device, rank, job.ranks, folder / "port")
    worker = BenchWorker(job, folder, rank, device)
    with torch.inference_mode():
        worker.run_job()
    if job.ranks > 1:
        dist.barrier(device_ids=[rank] if job.device == "cuda" else None)
        sys.stderr.flush()
        os._exit(0)  # the tear-down of a group waits for graphs that hold its collectives


if __name__ == "__main__":
    main(sys.argv[1])
