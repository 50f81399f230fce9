"""What the page says of a point: its numbers, in words, units and order; and by what points can be filtered."""

from __future__ import annotations

import dataclasses

from dcpbench.points.memory import GIB
from dcpbench.points.point import AXES, LOAD_AXES


@dataclasses.dataclass(frozen=True)
class Field:
    """One number of a point."""

    column: str
    """Of Frames.points or Frames.served."""
    label: str
    unit: str = ""
    scale: float = 1.0
    """What the column is multiplied by."""
    table: bool = False
    """Whether the table of points has it; a pointer over a mark shows all."""


PERCENT = 100.0
FIELDS = (
    Field("concurrency", "concurrency", "requests"),
    Field("load_request_rate", "request rate", "requests/s"),
    Field("context", "context", "tokens"),
    Field("tp", "GPUs (tp)"),
    Field("dp", "attention replicas (dp)"),
    Field("dcp", "KV shards (dcp)"),
    Field("output_tok_s", "output", "tok/s", table=True),
    Field("output_tok_s_per_gpu", "output per GPU", "tok/s/GPU", table=True),
    Field("tok_s_per_user", "speed for one user", "tok/s/user", table=True),
    Field("dcp_ratio", "output over the same layout without DCP", "×"),
    Field("steady_tok_s", "steady output", "tok/s"),
    Field("step_ms", "step time", "ms", table=True),
    Field("itl_p50_ms", "ITL p50", "ms", table=True),
    Field("itl_p90_ms", "ITL p90", "ms"),
    Field("itl_p95_ms", "ITL p95", "ms"),
    Field("itl_p99_ms", "ITL p99", "ms", table=True),
    Field("ttft_p50_ms", "TTFT p50", "ms", table=True),
    Field("ttft_p90_ms", "TTFT p90", "ms"),
    Field("ttft_p95_ms", "TTFT p95", "ms"),
    Field("ttft_p99_ms", "TTFT p99", "ms", table=True),
    Field("tpot_p50_ms", "TPOT p50", "ms"),
    Field("tpot_p99_ms", "TPOT p99", "ms"),
    Field("e2el_p50_ms", "E2EL p50", "ms"),
    Field("e2el_p99_ms", "E2EL p99", "ms"),
    Field("request_s", "finished requests", "requests/s"),
    Field("goodput_s", "goodput", "requests/s", table=True),
    Field("preemptions", "preemptions", table=True),
    Field("cached_share", "prompt tokens from the prefix cache", "%", PERCENT),
    Field("decode_batch", "requests in a decode step", "requests"),
    Field("kv_capacity_tokens", "KV capacity", "tokens", table=True),
    Field("kv_tokens_per_gib", "KV tokens per GiB on each GPU", "tokens"),
    Field("kv_pool_bytes_per_gpu", "KV pool per GPU", "GiB", 1 / GIB),
    Field("memory_peak_bytes", "memory peak per GPU", "GiB", 1 / GIB),
    Field("idle_fraction", "GPU idle", "%", PERCENT),
    Field("host_syncs_per_step", "host syncs per step"),
    Field("kernels", "kernels per step"),
    Field("attention_error", "attention error"),
    Field("sm_clock_mhz_min", "lowest SM clock", "MHz"),
    Field("temperature_c_max", "highest temperature", "°C"),
    Field("repeats", "repeats"),
)
RANGES = ("output_tok_s", "step_ms", "dcp_ratio")
"""Columns that have a `_low` and a `_high` beside them."""
FILTERS = {
    "layout": "layout",
    **{axis.name: axis.title for axis in (*AXES, *LOAD_AXES) if axis.title},
    "load": "load",
    "origin": "measured by",
    "run": "run",
    "marks": "marks",
}
"""Names in the page's data, and what the page calls them."""
COLOURS = (*(name for name in FILTERS if name not in ("load", "marks")), "backend", "device")
"""By what the chart that a reader makes can be coloured."""
