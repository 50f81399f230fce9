"""One line for each metric: the definitions that are printed with the tables. docs/metrics.md says more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.reports.tables import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcpbench.reports.frames import Frames

TITLE = "What the words mean"
COMMON = {
    "per GPU": ("output throughput / tp; neither dp nor dcp adds GPUs", "tok/s/GPU"),
    "per user": ("1000 / median ITL in ms", "tok/s/user"),
    "p50, p90, p95, p99": ("null below 1, 64, 130, 662 samples: fewer bound no percentile at 99 %", ""),
    "SLO": ("held against p99; where that lacks samples, against the highest percentile all points of a load have", ""),
}
DECODE = {
    "step time": ("slowest rank's time from graph launch to the step's end; median with its 95 % interval", "ms"),
    "ITL": ("gap between two output tokens of a request: one step, one sample per step", "ms"),
    "output throughput": ("concurrency / step time, of the whole layout", "tok/s"),
}
SERVED = {
    "TTFT": ("t1 - t0: first output token - submitted (open loop: due), queueing included", "ms"),
    "ITL": ("each gap between consecutive output tokens of a request, pooled over requests", "ms"),
    "TPOT": ("(tn - t1) / (n - 1), one per request, none if n < 2", "ms"),
    "E2EL": ("tn - t0: last output token - submitted", "ms"),
    "output throughput": (
        "output tokens / wall time (first submission to last token), ramp and drain included",
        "tok/s",
    ),
    "steady": ("the same over the longest time with at least 95 % of a closed loop's clients in flight", "tok/s"),
    "goodput": ("finished requests that meet every objective / wall time; ITL in 99 of 100 gaps", "requests/s"),
}
OTHERS = {
    "KV tokens per GiB": (
        "tokens that the layout's pools hold, each counted once / GiB of one GPU's pool",
        "tokens/GiB",
    ),
    "phases, GPU idle": ("GPU time by range, and time without a kernel, in a separate profiled pass", "ms"),
    "host syncs": ("calls in a profiled step that made the host wait for the GPU", "per step"),
    "ratio, ×": ("output throughput over that of the same layout, load and settings with dcp 1", ""),
    "DCP pays": (
        "it meets the SLO and is clearly above the best layout without DCP that does: same load, GPUs, dtype, weights",
        "",
    ),
    "clearly": ("intervals lie apart and the difference is more than 2 %, as far as repeats may differ", ""),
}
EVERY = {"decode": DECODE | COMMON, "serve": SERVED | COMMON}


def table(frames: Frames, names: Iterable[str] | None = None) -> Table:
    """Those of the workloads at hand; `names` picks some, in their order. One that differs names its workload."""
    workloads = [w for w, points in (("decode", frames.points), ("serve", frames.served)) if len(points)]
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
