"""Build synthetic records for tests of the reports. None of these numbers was measured."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.records.file import RecordFile
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.records.record import Conditions, Environment, Gpu, Kv, Phases, Record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

KV_ROW_BYTES = 70272  # bytes of one token of DeepSeek-V3: 61 layers of 576 bf16 numbers
GPU = Environment(
    device="NVIDIA H200",
    device_count=4,
    device_memory_bytes=150_000_000_000,
    driver="570.1",
    cuda="12.8",
    torch="2.9.0",
    triton="3.5.0",
    nccl="2.27",
    flashinfer="0.6.18",
    python="3.12.3",
    dcpbench="0.1.0",
    git_commit="0123abc",
    host_hash="0123456789ab",
    command="dcpbench sweep --tp 4 --dcp 1,2,4",
)
CPU = Environment(
    device="CPU",
    device_count=0,
    torch="2.9.0",
    python="3.11.2",
    dcpbench="0.1.0",
    command="dcpbench sweep --tp 8 --dcp 8",
)


def compute_step_ms(layout: Layout, context: int, concurrency: int) -> float:
    """Return a synthetic step time with realistic terms: fixed cost, weights, KV reading over ranks, exchange."""
    kv = concurrency * context / (layout.dp * layout.dcp) * KV_ROW_BYTES / 2.7e9
    exchange = (1.2 + 0.06 * concurrency) * (layout.dcp > 1) * (1 + 0.1 * layout.dcp)
    return 9.0 + 0.11 * concurrency + kv + exchange + (1.5 if layout.dp > 1 else 0.0)


def make_phases(total_ms: float, layout: Layout) -> Phases:
    """Return a synthetic division of a step into phases."""
    shares = {"attention": 0.34, "moe": 0.31, "mlp_reduce": 0.09, "o_proj": 0.07, "qkv_proj": 0.06, "lm_head": 0.03}
    if layout.dcp > 1:
        shares |= {"q_gather": 0.03, "merge": 0.05}
    idle = 1 - sum(shares.values()) if layout.dcp > 1 else 0.015
    us = total_ms * 1e3
    shares["other"] = 1 - idle - sum(shares.values())
    return Phases(
        step_us=us,
        phase_us={name: share * us for name, share in shares.items()},
        idle_us=idle * us,
        idle_fraction=idle,
        kernels=1403,
        steps=5,
    )


def make_point(layout: Layout = Layout(1), **changes: Any) -> Point:  # noqa: B008 - frozen
    """Return a point of kimi-k2 on the flashinfer backend."""
    fields: dict[str, Any] = {
        "model": "kimi-k2",
        "tp": layout.tp,
        "dp": layout.dp,
        "dcp": layout.dcp,
        "concurrency": 8,
        "context": 4000,
        "exchange": "ag_rs" if layout.dcp > 1 else "none",
        "backend": "flashinfer",
        "dtype": "bfloat16",
        "page_size": 64,
    }
    return Point(**(fields | changes))


def make_ok_record(
    point: Point, *, median_ms: float | None = None, steps: int = 700, noise: float = 0.01, **changes: Any
) -> Record:
    """Return a finished record with steps that scatter around `median_ms`."""
    layout = point.layout
    median = compute_step_ms(layout, point.context, point.concurrency) if median_ms is None else median_ms
    rng = random.Random(
        "/".join(f"{f.name}={v}" for f in msgspec.structs.fields(point) if (v := getattr(point, f.name)) != f.default)
    )
    samples = [max(median * rng.gauss(1, noise), 1e-3) for _ in range(steps)]
    replicas = layout.dp * layout.dcp
    pool = 20 << 30
    fields: dict[str, Any] = {
        "point": point,
        "outcome": "ok",
        "metrics": compute_decode_metrics(samples, point.concurrency, point.tp),
        "phases": make_phases(median, layout),
        "host_syncs_per_step": 0.0,
        "allocations_per_step": 0.0,
        "host_plan_us": 310.0,
        "kv": Kv(
            pool_bytes_per_gpu=pool,
            bytes_per_token_per_gpu=KV_ROW_BYTES / layout.dcp,
            capacity_tokens=pool // KV_ROW_BYTES * replicas,
            capacity_requests=pool // KV_ROW_BYTES * replicas // point.context,
            bounded_by="kv_memory",
            fragmentation=0.004,
        ),
        "memory_peak_bytes": 131 << 30,
        "conditions": Conditions(
            weights="synthetic",
            layers=61,
            layers_held=19,
            full_weights_bytes_per_gpu=560 << 30,
            attention_error=2.4e-3,
            experts_hit=0.63,
            graph_batch=point.concurrency,
            cuda_graph=True,
        ),
        "gpu": Gpu(sm_clock_mhz_min=1830, sm_clock_mhz_max=1980, power_w_max=612.0, temperature_c_max=61),
        "environment": GPU,
        "started_at": "2025-01-02T03:04:05Z",
        "seconds": 21.0,
    }
    return Record(**(fields | changes))


def make_cpu_record(point: Point, **changes: Any) -> Record:
    """Return a finished record of a functional run."""
    return make_ok_record(
        point,
        steps=40,
        noise=0.05,
        warnings=["cpu", "noisy"],
        environment=CPU,
        gpu=None,
        memory_peak_bytes=None,
        host_syncs_per_step=None,
        allocations_per_step=None,
        **changes,
    )


def make_rejected_record(
    point: Point, reason: str = "the KV cache needs 31.0 GiB more per GPU than there is; try --dcp 4."
) -> Record:
    """Return a point that could not run."""
    return Record(point=point, outcome="rejected", reason=reason, lacks_memory=True)


def make_failed_record(point: Point, reason: str = "rank 3 exited with code 1; read logs/rank-3.txt.") -> Record:
    """Return a point that failed."""
    return Record(
        point=point, outcome="failed", reason=reason, detail={"exit code": "1", "log": "last lines\nof the log"}
    )


def make_gpu_sweep() -> list[Record]:
    """Return records of 2 models × 4 layouts × 3 contexts × 3 loads × 2 repeats, with some points that did not run."""
    found = []
    for model, slower in (("kimi-k2", 1.0), ("deepseek-v3", 1.13)):
        for repeat in range(2):
            for context in (4000, 32000, 128000):
                for load in (8, 32, 48):
                    for layout in (Layout(4), Layout(4, 1, 2), Layout(4, 1, 4), Layout(4, 4)):
                        swept_point = make_point(layout, model=model, context=context, concurrency=load, repeat=repeat)
                        if context == 128000 and load > 8 and layout.dp * layout.dcp == 1:
                            found.append(make_rejected_record(swept_point))
                        else:
                            ms = slower * compute_step_ms(layout, context, load)
                            drift = (
                                1.031
                                if (repeat, context, load, layout.dcp) == (1, 32000, 48, 4)
                                else 1 + 0.002 * repeat
                            )
                            found.append(make_ok_record(swept_point, median_ms=ms * drift))
    return found


def make_cpu_sweep() -> list[Record]:
    """Return records of tp8 and tp8·dcp8 of the tiny model at two loads."""
    return [
        make_cpu_record(
            make_point(
                layout, model="tiny", backend="reference", dtype="float32", context=256, concurrency=load, page_size=1
            ),
            median_ms=40.0 + load * layout.dcp,
        )
        for load in (4, 8)
        for layout in (Layout(8), Layout(8, 1, 8))
    ]


def write_records(folder: Path, found: Iterable[Record]) -> Path:
    """Write records.jsonl into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORDS_FILE).touch()
    out = RecordFile(folder)
    with out.path.open("ab") as f:
        f.writelines(msgspec.json.encode(record) + b"\n" for record in found)
    return folder
