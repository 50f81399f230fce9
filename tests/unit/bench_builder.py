"""Build records of benches as a GPU or a CPU would leave them, with numbers chosen by the test."""

from dcpbench.bench.bench_record import BenchRecord, Case, Graph, Result, Timing
from dcpbench.points.roofline import OperatorCost
from dcpbench.records.record import Environment


def make_timing(us: float) -> Timing:
    """Return a median with an interval of 1 % below and 2 % above."""
    return Timing(median_us=us, low_us=us * 0.99, high_us=us * 1.02, max_us=us * 2, samples=20, samples_us=[us] * 20)


def make_result(variant: str, *, requests: int = 16, us: float | None = None, **fields) -> Result:
    """Return a correct result, timed in a CUDA graph if `us` is given."""
    return Result(
        **{
            "case": Case(variant=variant, sizes={"heads": 128, "requests": requests, "dcp": 8}, calls=61),
            "correct": True,
            "graph": Graph(time=make_timing(us), correct=True) if us else None,
            "work": OperatorCost(memory_bytes=1000 * requests),
        }
        | fields,
    )


def make_record(*results: Result, performance: bool = True) -> BenchRecord:
    """Return a record of the bench merge."""
    device = "NVIDIA H200" if performance else "CPU"
    environment = Environment(device=device, device_count=int(performance))
    return BenchRecord(bench="merge", performance=performance, results=list(results), environment=environment)
