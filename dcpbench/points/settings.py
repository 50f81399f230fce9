"""Define how points are measured. No torch."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Describe how points are measured; the same for all points of a job."""

    kv_memory_bytes: int | None = None  # --kv-memory: size of the KV pool per GPU; None: budget.plan_engine computes it
    seconds: float = 10.0  # --seconds: time limit of one point's measurement; beyond it the record is marked `noisy`
    precision: float = 0.01  # relative half-width of the 95 % interval of the median at which measuring stops
    profile: bool = True  # True if the separate profiled pass (phases, host syncs) runs
    seed: int = 0  # seed of weights and KV; a load has its own
    slo: dict[str, float] = {}  # --slo: limits in ms by metric, records.record.ServeMetrics.slo_ms
    limit_seconds: float | None = None  # --timeout load=60: unfinished requests are cancelled then (see Load.requests)
    trace_path: str = ""  # --requests: absolute path of the file that Load.trace names
    micro_batches: int = 0  # --stages micro-batches: number in flight over stages; 0: as many as there are stages
    step_times: str = ""  # --step-times: absolute path of a replay's step times; empty: the replay measures them
