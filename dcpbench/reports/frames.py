"""Records as tidy tables: one row per point, its repeats merged; what failed or was rejected kept apart."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from dcpbench.errors import RecordsError, UsageError
from dcpbench.points import axes
from dcpbench.points.axes import Role
from dcpbench.points.layout import DEGREES
from dcpbench.points.names import CLOSED, NO_EXCHANGE, UNKNOWN
from dcpbench.points.point import AXES, SETTING, point_axes
from dcpbench.records import metrics
from dcpbench.records.folder import RECORDS_FILE, record_file, run_folder
from dcpbench.records.provenance import functional, origin
from dcpbench.records.record import Kv
from dcpbench.records.runs import Run, measurement, read_run
from dcpbench.reports import slo as objectives
from dcpbench.reports.clip import Clipper
from dcpbench.reports.findings import Findings
from dcpbench.reports.merge import in_order, median, merged, spread
from dcpbench.reports.serving import frame as serving
from dcpbench.reports.serving import words

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dcpbench.points.axes import Axis
    from dcpbench.records.record import Environment, Record

MOST_POINTS = 100_000
"""Of one run. A report about as many takes four minutes; of more nobody could read it."""
SAME_ENVIRONMENT = ("device", "device_count", "torch", "cuda", "nccl", "flashinfer", "triton")
"""What runs must share to be repeats of each other."""


@dataclasses.dataclass(frozen=True)
class Frames:
    """Everything a report is made of."""

    runs: list[Run]
    points: pd.DataFrame
    """One row per point of the workload `decode` that ran, repeats merged (see `_point_row`)."""
    served: pd.DataFrame
    """The same of `serve` (serving/frame.py)."""
    others: pd.DataFrame
    """Points of any workload that did not: run, model, layout, context, concurrency, outcome, reason, detail."""
    slo: dict[str, float] = dataclasses.field(default_factory=dict)
    """Objectives asked for, in ms; empty: those that the runs were measured with (slo.py)."""

    @property
    def records(self) -> list[Record]:
        """All records of all runs."""
        return [record for run in self.runs for record in run.records]

    @property
    def cpu(self) -> bool:
        """Whether any point was taken on a CPU."""
        return any(len(table) > 0 and bool(table["cpu"].any()) for table in (self.points, self.served))

    @cached_property
    def everything(self) -> pd.DataFrame:
        """Points of all workloads, with the columns of each."""
        if self.points.empty or self.served.empty:
            return self.served if self.points.empty else self.points
        return pd.DataFrame([*self.points.to_dict("records"), *self.served.to_dict("records")])

    @cached_property
    def findings(self) -> Findings:
        """What the points say when they are compared."""
        return Findings(self)


def load(folders: Iterable[Path], *, as_repeats: bool = False, slo: dict[str, float] | None = None) -> Frames:
    """Read and join run folders; with `as_repeats` as one run in which each folder is a pass over the same grid.

    `slo` are objectives in ms by name, instead of those that the runs were measured with.

    Raises RecordsError for a folder without records, UsageError for no folder.
    """
    runs = read_runs(folders)
    if as_repeats:
        runs = [_joined(runs)]
    rows: list[dict[str, Any]] = []
    served: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for run in runs:
        same: dict[str, list[Record]] = {}
        for record in run.records:
            if record.outcome == "ok":
                served_as = serving.same_load(record) if record.point.load else ""
                same.setdefault(f"{record.point.same_but_repeat()} {served_as}", []).append(record)
            else:
                others.append(_other_row(run.name, record))
        for records in same.values():
            (served if records[0].point.load else rows).append(_point_row(run.name, records))
    slo = slo or {}
    return Frames(
        runs=runs,
        points=objectives.judged(_as_loads(_tidy(rows)), slo),
        served=objectives.judged(serving.tidy(_tidy(served)), slo),
        slo=slo,
        others=pd.DataFrame(others, columns=list(_OTHER_COLUMNS)),
    )


def _as_loads(points: pd.DataFrame) -> pd.DataFrame:
    """Points of `decode` with the columns that say of served points what their load was."""
    if points.empty:
        return points
    contexts, loads = points["context"].tolist(), points["concurrency"].tolist()
    rest = [f"context {c:,}" for c in contexts]
    arrival = [f"concurrency {n:,}" for n in loads]
    return points.assign(
        mode="decode",
        load_arrival=CLOSED,
        input_typical=points["context"].astype(float),
        rest=rest,
        arrival=arrival,
        load=[f"{n} · {c}" for n, c in zip(arrival, rest, strict=True)],
        same_load=[f"{w} {c} {n}" for w, c, n in zip(points["workload"], contexts, loads, strict=True)],
    )


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Each folder once, as a run with a name that tells it from the others; errors as of `load`."""
    folders = list(dict.fromkeys(folders))
    if not folders:
        raise UsageError("no run folder given; name at least one, as in `dcpbench report runs/latest`.")
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _read(folder: Path, name: str) -> Run:
    path = record_file(folder)
    inside = sorted(p.parent for p in folder.glob(f"*/{RECORDS_FILE}"))
    if inside and not path.exists():
        raise RecordsError(f"{folder} is no run, but holds some; name one or several: {' '.join(map(str, inside))}")
    run = read_run(folder, name, keep=Clipper(), most=MOST_POINTS)
    if run.truncated and not run.records:
        raise RecordsError(f"{path} holds only a part of one record; repeat its sweep with -o {folder} --force.")
    return run


def _joined(runs: list[Run]) -> Run:
    """The runs as one: later ones' repeats are counted on, and a point that is rejected in all is rejected once.

    An exact copy of a record is no repeat. Raises UsageError where runs were taken in different environments.
    """
    _check_same_environment(runs)
    records: dict[str, Record] = {}
    measured: set[bytes] = set()
    passes = 0
    for run in runs:
        for record in run.records:
            if record.metrics or record.serve:
                if (one := measurement(record)) in measured:
                    continue
                measured.add(one)
            point = msgspec.structs.replace(record.point, repeat=record.point.repeat + passes)
            key = record.point.same_but_repeat() if record.outcome == "rejected" else point.key()
            records.setdefault(key, msgspec.structs.replace(record, point=point))
        passes += 1 + max((r.point.repeat for r in run.records), default=0)
    return Run(
        folder=runs[0].folder,
        name=" + ".join(run.name for run in runs),
        records=list(records.values()),
        replaced=sum(run.replaced for run in runs),
        truncated=any(run.truncated for run in runs),
    )


def _check_same_environment(runs: list[Run]) -> None:
    first: tuple[str, Environment] | None = None
    for run in runs:
        for here in (r.environment for r in run.records if r.environment):
            first = first or (run.name, here)
            for name in SAME_ENVIRONMENT:
                one, other = getattr(first[1], name), getattr(here, name)
                if one != other:
                    raise UsageError(
                        f"--as-repeats: {name} is {one} in {first[0]} and {other} in {run.name}, so they are not "
                        "repeats of each other. Leave --as-repeats out to show them side by side."
                    )


def _names(folders: list[Path]) -> list[str]:
    """Folder names, with as much of their path as tells them apart."""
    paths = [run_folder(folder).resolve() for folder in folders]
    names = [path.name or str(path) for path in paths]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]


_OTHER_COLUMNS = (
    "run",
    "model",
    "layout",
    "dcp",
    "context",
    "concurrency",
    "mode",
    "load",
    "repeat",
    "outcome",
    "reason",
    "detail",
)


def _other_row(run: str, record: Record) -> dict[str, Any]:
    point = record.point
    return {
        "run": run,
        "model": point.model,
        "layout": point.layout_name,
        "dcp": point.dcp,
        "context": point.context,
        "concurrency": point.concurrency,
        "mode": point.load.mode if point.load else None,
        "load": words.served(point) if point.load else None,
        "repeat": point.repeat,
        "outcome": record.outcome,
        "reason": record.reason or "no reason was recorded",
        "detail": "\n".join(f"{name}: {text}" for name, text in record.detail.items()),
    }


def _point_row(run: str, records: list[Record]) -> dict[str, Any]:
    """Repeats of one point as one row: medians of medians; intervals are the envelope of the repeats' intervals."""
    point = records[0].point
    fields = [name for name in point.__struct_fields__ if name not in ("repeat", "load")]
    row: dict[str, Any] = {name: getattr(point, name) for name in fields}
    row |= {
        "run": run,
        "layout": point.layout_name,
        "repeats": len(records),
        "origin": origin(records[0]),
        "marks": ", ".join(sorted({mark for r in records for mark in r.marks})),
        "cpu": any(map(functional, records)),
        "device": next((r.environment.device for r in records if r.environment), None),
        "slo_recorded": objectives.recorded(records[0]),
    }
    row |= _kv_columns(records) | _phase_columns(records) | _honesty_columns(records)
    row |= merged(records, *(m.name for m in metrics.METRICS if m.at and not m.parts & {"metrics", "serve"}))
    states = [r.gpu for r in records if r.gpu]
    row["throttle_reasons"] = ", ".join(sorted({reason for g in states for reason in g.throttle_reasons}))
    return row | (serving.columns(records) if point.load else _decode_columns(records))


def _decode_columns(records: list[Record]) -> dict[str, Any]:
    steps = [r.metrics.step_ms for r in records if r.metrics]
    latencies = [f"{name}_{p}_ms" for p in metrics.PERCENTILES for name in ("itl", "ttft")]
    return {
        "samples": sum(interval.samples for interval in steps),
        "spread": spread(steps),
        **merged(records, "step_ms", "output_tok_s", *latencies),
        **merged(records, *(m.name for m in metrics.METRICS if "metrics" in m.parts)),
    }


def _kv_columns(records: list[Record]) -> dict[str, Any]:
    kv = next((r.kv for r in records if r.kv), None)
    row = {f"kv_{name}": getattr(kv, name, None) for name in Kv.__struct_fields__}
    return row | merged(records, "kv_tokens_per_gib")


def _phase_columns(records: list[Record]) -> dict[str, Any]:
    profiled = [r.phases for r in records if r.phases]
    names = dict.fromkeys(name for p in profiled for name in p.phase_us)
    row: dict[str, Any] = {f"phase_{name}_us": median(p.phase_us.get(name, 0.0) for p in profiled) for name in names}
    return row | {"idle_us": median(p.idle_us for p in profiled)} | merged(records, "idle_fraction", "kernels")


def _honesty_columns(records: list[Record]) -> dict[str, Any]:
    honesty = next((r.honesty for r in records if r.honesty), None)
    names = ("layers", "layers_held", "attention_error", "experts_hit", "graph_batch", "cuda_graph")
    return {name: getattr(honesty, name, None) for name in names}


def _tidy(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a table in reading order, with a `variant` that tells apart points of the same layout and load."""
    if not rows:
        return pd.DataFrame()
    table = pd.DataFrame(rows)
    found = (_exchanges(table) if axis.name == "exchange" else _varying(table, axis) for axis in AXES)
    parts = [texts for texts in found if texts]
    table["variant"] = [", ".join(filter(None, texts)) for texts in zip(*parts, strict=True)]
    table["label"] = [
        f"{lay} ({var})" if var else lay for lay, var in zip(table["layout"], table["variant"], strict=True)
    ]
    order = ["run", "model", "context", "concurrency", *DEGREES, "variant"]
    return table.sort_values(order, kind="stable", ignore_index=True, key=in_order)


def _varying(table: pd.DataFrame, axis: Axis) -> list[str]:
    """`page 64` of each point; empty unless it tells two points apart that both say it."""
    if Role.SERVER in axis.role:
        return _settings(table)
    own = axis.label and Role.EXCHANGE not in axis.role
    texts = [axis.text(value) for value in table[axis.name]] if own else []
    return texts if len({*texts} - {""}) > 1 else []


def _settings(table: pd.DataFrame) -> list[str]:
    """`max_num_seqs=4`: of each point's settings those that not all points have in common."""
    told = [text.split(SETTING) if text else [] for text in table["settings"]]
    common = set(told[0]).intersection(*told[1:])
    return [SETTING.join(part for part in parts if part not in common) for parts in told]


def _exchanges(table: pd.DataFrame) -> list[str]:
    """`a2a +q-replicate`: of each point that exchanges, what not all of these have in common; else empty."""
    own = point_axes(Role.EXCHANGE)
    rows = table[[axis.name for axis in own]].to_dict("records")
    exchanges = ~table["exchange"].isin((NO_EXCHANGE, UNKNOWN))
    varying = [axis for axis in own if len(set(table[axis.name][exchanges])) > 1]
    return [
        " ".join(axes.words(varying, {str(k): v for k, v in row.items()})) if exchanging else ""
        for row, exchanging in zip(rows, exchanges, strict=True)
    ]
