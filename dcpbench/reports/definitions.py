"""One line for each metric: the definitions that are printed with the tables. docs/metrics.md says more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.records.metrics import DECODE, METRIC, SERVE, defined
from dcpbench.reports.tables import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcpbench.reports.frames import Frames

TITLE = "What the words mean"
KV = METRIC["kv_tokens_per_gib"]
EVERYWHERE = {
    "p50, p90, p95, p99": ("null below 1, 64, 130, 662 samples: fewer bound no percentile at 99 %", ""),
    "SLO": ("held against p99; where that lacks samples, against the highest percentile all points of a load have", ""),
}
OTHERS = {
    KV.term: (KV.defined[SERVE], KV.unit),
    "phases, GPU idle": ("GPU time by range, and time without a kernel, in a separate profiled pass", "ms"),
    "host syncs": ("calls in a profiled step that made the host wait for the GPU", "per step"),
    "ratio, ×": (METRIC["dcp_ratio"].help, ""),
    "DCP pays": (
        "it meets the SLO and is clearly above the best layout without DCP that does: same load, GPUs, dtype, weights",
        "",
    ),
    "clearly": ("intervals lie apart and the difference is more than 2 %, as far as repeats may differ", ""),
}
EVERY = {workload: defined(workload) | EVERYWHERE for workload in (DECODE, SERVE)}


def table(frames: Frames, names: Iterable[str] | None = None) -> Table:
    """Those of the workloads at hand; `names` picks some, in their order. One that differs names its workload."""
    workloads = [w for w, points in ((DECODE, frames.points), (SERVE, frames.served)) if len(points)]
    rows = []
    for name in names or _all(workloads):
        found = {w: EVERY[w][name] for w in workloads if name in EVERY[w]} or (
            {"": OTHERS[name]} if name in OTHERS else {}
        )
        differ = len(set(found.values())) > 1
        for workload, (said, unit) in list(found.items())[: None if differ else 1]:
            rows.append([f"{name} ({workload})" if differ else name, said, unit or "—"])
    return Table(TITLE, ["metric", "definition", "unit"], rows, text_columns=3, fold=True)


def _all(workloads: list[str]) -> list[str]:
    names = dict.fromkeys(name for w in workloads for name in EVERY[w])
    return [*names, *OTHERS]
