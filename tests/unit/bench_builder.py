"""Records of benches as a GPU or a CPU would leave them, with numbers chosen by the test."""

from dcpbench.bench.record import BenchRecord, Case, Graph, Result, Syncs, SyncSite, Timing
from dcpbench.records.record import Environment

SITE = SyncSite(
    kind="data-dependent-shape",
    op="aten::nonzero",
    function="filter_always",
    file="dcpbench/bench/operators/kv_write.py",
    line=47,
    per_call=2.0,
)


def timing(us: float) -> Timing:
    """A median with an interval of 1 % below and 2 % above."""
    return Timing(median_us=us, low_us=us * 0.99, high_us=us * 1.02, max_us=us * 2, samples=20, samples_us=[us] * 20)


def result(variant: str, *, syncs: float | None, tokens: int = 16, us: float | None = None, **fields) -> Result:
    """A correct result; with `us` it was timed."""
    sites, detector = [SITE] if syncs else [], "live" if us else "dry-run"
    return Result(
        case=Case(variant=variant, sizes={"tokens": tokens, "dcp": 8, "dtype": "bf16"}, calls=61),
        **{
            "correct": True,
            "syncs": None if syncs is None else Syncs(per_call=syncs, detector=detector, sites=sites),
            "time": timing(us) if us else None,
            "host": timing(us + 100) if us else None,
        }
        | fields,
    )


def record(*results: Result, performance: bool = True) -> BenchRecord:
    """A record of kv-write."""
    device = "NVIDIA H200" if performance else "CPU"
    environment = Environment(device=device, device_count=int(performance))
    return BenchRecord(bench="kv-write", performance=performance, results=list(results), environment=environment)


REFUSED = Graph(captured=False, reason="CUDA error: operation not permitted when stream is capturing")
