"""Load records as tidy tables: one row per point with its repeats merged, and failed or rejected points in a separate table."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from dcpbench.errors import RecordsError, UsageError
from dcpbench.points import axes
from dcpbench.points.axes import Role
from dcpbench.points.layout import DEGREES, find_ep_degree
from dcpbench.points.memory import GIB
from dcpbench.points.names import CLOSED, MOE_EP, NO_EXCHANGE, STORED, UNKNOWN
from dcpbench.points.point import AXES, LOAD_AXES, SETTING, select_point_axes
from dcpbench.records import metrics
from dcpbench.records.folder import RECORDS_FILE, get_record_file, get_run_folder
from dcpbench.records.launches import measure_bands
from dcpbench.records.metrics import LATENCIES, METRIC, STATISTICS
from dcpbench.records.record import (
    CPU,
    MAX_SUM_ERROR,
    OURS,
    PHASES_DIFFER,
    SERVER_FLAG,
    Interval,
    Kv,
    ServeMetrics,
    format_reason,
    get_cause,
    get_device,
    get_kv_capacity,
    get_origin,
    get_precisions,
    get_reason,
    is_functional,
    is_imported_origin,
    is_kv_limited,
    is_rejected_for_memory,
    is_server_origin,
    parse_origin,
)
from dcpbench.records.runs import Run, read_run
from dcpbench.reports import findings, joined_runs, launch_bands, load_labels, model_names
from dcpbench.reports import slo as objectives
from dcpbench.reports.style import describe_layout
from dcpbench.serving.load_words import is_lock_step
from dcpbench.show.numbers import is_missing
from dcpbench.show.text import (
    LINES,
    MAX_TEXT_CHARS,
    make_natural_key,
    make_printable,
    make_unique_names,
    summarize_long_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from dcpbench.points.axes import Axis
    from dcpbench.records.record import Environment, Phases, Record
    from dcpbench.reports.joined_runs import EngineRun

# Words are few and looked at one by one, for which Arrow's arrays of strings take three times as long.
pd.set_option("mode.string_storage", "python")

MAX_POINTS = 100_000  # of one run; a report about as many takes four minutes
MAX_DETAIL_CHARS = 8_000  # characters that are kept of the end of a log, which is the most informative part
GPU = "gpu="  # prefix of the setting that makes points of different hardware distinct; labels name the hardware itself
BUSIEST = ("busiest_rank_experts", "busiest_rank_rows")  # columns that tables have only if any record has them
MERGES: dict[str, Callable[[list[float]], float]] = {  # merges repeats into one value, by metrics' `merged`
    "median": lambda values: statistics.median(map(float, values)),
    "max": max,
    "min": min,
    "first": lambda values: values[0],
}
OF_ENGINE = [m.name for m in metrics.METRICS if m.at and not m.parts & {"metrics", "serve"}]
OF_DECODE = [m.name for m in metrics.METRICS if "metrics" in m.parts]  # in the order of a table
SERVED = [  # metrics of served points, in a record's order; goodput is reported with its objectives
    name for name in ServeMetrics.__struct_fields__ if name in METRIC and name != "request_goodput"
]
VARIES = {  # further fields of a load or its settings that may distinguish points of a report, with their format
    "at_once": "{:,.0f} at once",
    **{axis.name: axis.label for axis in LOAD_AXES if axis.label and axis.name not in load_labels.OF_SESSIONS},
    "kv_memory_gib": "{:g} GiB of KV",
    "limit_seconds": "ended at {:g} s",
}
SOME_HAVE = tuple(  # fields of VARIES that only some points have; a missing value tells nothing
    name for name in VARIES if name not in ("kv_memory_gib", "limit_seconds")
)
OTHERS = (  # columns of points that did not run, before those of LOST
    "run",
    "model",
    "layout",
    "drawn_layout",
    "dcp",
    "context",
    "concurrency",
    "routing",
    "mode",
    "load",
    "repeat",
)
LOST = ("outcome", "reason", "detail", "lacks_memory", "message", "cause", "device", "cpu", "gpus", "shape")
"""Columns of points that did not run: outcome, the reason without job-specific or point-specific parts, memory, and hardware."""


@dataclasses.dataclass(frozen=True)
class Frames:
    """Hold the tables from which a report is made."""

    runs: list[Run]  # runs as read; with `as_repeats` a single one, unless several engines were measured
    points: pd.DataFrame  # one row per point of the workload `decode` that ran, repeats merged (see `_make_point_row`)
    served: pd.DataFrame  # one row per served point of `serve` that ran, repeats merged (see `_make_served_columns`)
    others: pd.DataFrame  # points of any workload that did not run, with the columns OTHERS and LOST
    slo: dict[str, float] = dataclasses.field(default_factory=dict)  # requested in ms; empty: as measured (slo.py)
    engines: list[EngineRun] = dataclasses.field(default_factory=list)  # by engine, if several: tables' `run` names one
    model_names: dict[str, str] = dataclasses.field(default_factory=dict)  # shown names by folder

    @property
    def shown_runs(self) -> list[Run]:
        """Return the runs that the column `run` of the tables names."""
        return [engine.run for engine in self.engines] or self.runs

    def format_model(self, model: str) -> str:
        """Return the name under which the tables show a model."""
        return self.model_names.get(model, model)

    def format_scope(self, run: str, model: str) -> str:
        """Return `kimi-k2, run monday` or `kimi-k2, vLLM 0.26.0`; of a single run the model alone."""
        return f"{model}, {joined_runs.format_run(run, self.engines)}" if len(self.shown_runs) > 1 else model

    @property
    def records(self) -> list[Record]:
        """Return all records of all runs."""
        return [record for run in self.runs for record in run.records]

    @property
    def cpu(self) -> bool:
        """Return True if any point was measured on a CPU, or, without measured points, if any failed on a CPU."""
        table = self.others if self.everything.empty else self.everything
        return len(table) > 0 and bool(table["cpu"].any())

    @cached_property
    def everything(self) -> pd.DataFrame:
        """Return the points of all workloads, with the columns of each."""
        if self.points.empty or self.served.empty:
            return self.served if self.points.empty else self.points
        return _make_plain_table([*self.points.to_dict("records"), *self.served.to_dict("records")])

    @cached_property
    def kv(self) -> pd.DataFrame:
        """Return the KV cache of each layout (findings.compute_kv_by_layout)."""
        return findings.compute_kv_by_layout(self.everything)

    @cached_property
    def findings(self) -> findings.Findings:
        """Return the findings from comparing the points."""
        return findings.compute_findings(self)


def load_frames(folders: Iterable[Path], *, as_repeats: bool = False, slo: dict[str, float] | None = None) -> Frames:
    """Read and join run folders; with `as_repeats` as one run in which each folder is a pass over the same grid.

    `slo` are objectives in ms by name, instead of those that the runs were measured with.

    Raises RecordsError for a folder without records, UsageError for no folder.
    """
    runs = read_runs(folders)
    bands = measure_bands(runs)
    devices = joined_runs.find_device_names(runs)
    models = model_names.find_model_names(runs)
    engines, launches = [], Counter[tuple[str, str]]()
    if len(joined_runs.list_engines(runs)) > 1:
        engines = joined_runs.group_by_engine(runs, devices, as_repeats=as_repeats)
        launches = joined_runs.count_launches(runs, make_point_key)
    elif as_repeats:
        runs = [joined_runs.join_runs(runs)]
    report = _Reading(engines, devices, models, launches)
    rows: list[dict[str, Any]] = []
    served: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for run in [engine.run for engine in engines] or runs:
        same: dict[str, list[Record]] = {}
        for record in run.records:
            if record.outcome == "ok":
                same.setdefault(make_point_key(record), []).append(record)
            else:
                others.append(report.add_names(_make_other_row(run.name, record), [record]))
        for records in same.values():
            row = report.add_names(_make_point_row(run.name, records), records)
            (served if records[0].point.load else rows).append(row)
    slo = slo or {}

    def complete_table(table: pd.DataFrame) -> pd.DataFrame:
        return launch_bands.add_bands(_make_plain_table(objectives.add_slo_results(table, slo)), bands)

    return Frames(
        runs=runs,
        points=complete_table(_add_load_columns(_build_tidy_table(rows))),
        served=complete_table(_add_served_columns(_build_tidy_table(served))),
        slo=slo,
        others=pd.DataFrame(others, columns=[*OTHERS, *LOST]),
        engines=engines,
        model_names=models,
    )


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Hold what the records of a report have in common, for the columns that depend on all of them."""

    engines: list[EngineRun]
    devices: dict[str, str]  # shown name of each device (joined_runs.find_device_names)
    models: dict[str, str]  # shown name of each model folder (model_names.find_model_names)
    launches: Counter[tuple[str, str]]  # launches of each point by engine and key; only counted for several engines

    def add_names(self, row: dict[str, Any], records: list[Record]) -> dict[str, Any]:
        """Return the row of a point with the shown names of its model and device, and with the engine that ran it."""
        engine = parse_origin(get_origin(records[0])).label
        return row | {
            "model": self.models.get(row["model"], row["model"]),
            "model_folder": row["model"] if row["model"] in self.models else "",
            "device": self.devices.get(row["device"], row["device"]),
            "engine": engine,
            "precisions": get_precisions(records[0]),
            "run_label": joined_runs.format_run(row["run"], self.engines),
            "launches": self.launches[engine, make_point_key(records[0])] if self.launches else 0,
        }


def _add_load_columns(points: pd.DataFrame) -> pd.DataFrame:
    """Return points of `decode` with the columns that describe the load of served points."""
    if points.empty:
        return points
    tokens = zip(points["context"], map(load_labels.format_routing, points["routing"]), strict=True)
    parts = [tuple(filter(None, (f"context {context:,}", routing))) for context, routing in tokens]
    rest = list(map(load_labels.SEPARATOR.join, parts))
    arrival = "concurrency " + points["concurrency"].map("{:,}".format)
    same = points["workload"] + " " + points["context"].astype(str) + " " + points["concurrency"].astype(str)
    same += " " + points["routing"]
    return points.assign(
        mode="decode",
        load_arrival=CLOSED,
        input_typical=points["context"].astype(float),
        rest=rest,
        rest_parts=pd.Series(parts, index=points.index),
        arrival=arrival,
        load=list(map(load_labels.SEPARATOR.join, zip(arrival, rest, strict=True))),
        same_load=same,
    )


def _add_served_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Return served points with `load` as text, in reading order: by mode, then loads from light to heavy, then layouts."""
    if table.empty:
        return table
    # columns that may be unknown in every row, which pandas would not take for numbers
    table = table.assign(**{name: pd.to_numeric(table[name]) for name in METRIC if name in table})
    parts: dict[str, list[str]] = {}
    for name, form in VARIES.items():
        shown = _find_printed(table, name)
        loads = table[f"load_{name}"].tolist()
        if name == "requests" and _is_same_per_client(table[shown]):
            continue
        values = [
            None if v == "" or is_missing(v) or not printed else v for v, printed in zip(loads, shown, strict=True)
        ]
        if len(set(values) - ({None} if name in SOME_HAVE else set())) > 1:
            printed = [("on" if v else "off") if isinstance(v, bool) else v for v in values]
            parts[name] = ["" if v is None else form.format(v) for v in printed]

    parts["routing"] = list(map(load_labels.format_routing, table["routing"]))

    def join(*columns: list[str]) -> list[str]:
        return [load_labels.SEPARATOR.join(filter(None, texts)) for texts in zip(*columns, strict=True)]

    arrival, shape = table["arrival"].tolist(), table["shape"].tolist()
    rest = join(shape, *parts.values())
    texts_of_rows = zip(table["shape_parts"], *parts.values(), strict=True)
    rest_parts = pd.Series([(*own, *filter(None, varied)) for own, *varied in texts_of_rows], index=table.index)
    any_chunk = join(arrival, shape, *(texts for name, texts in parts.items() if name != "chunk"))
    table = table.assign(rest=rest, rest_parts=rest_parts, load=join(arrival, rest), load_with_any_chunk=any_chunk)
    by = ("run", "model", "mode", "load_arrival", "input_typical", "rest", "load_request_rate", "concurrency")
    return _sort_table(table.copy(), *by)  # in one piece, as pandas wants wide tables


def _is_same_per_client(table: pd.DataFrame) -> bool:
    """Return True if the points are closed loops with as many requests for each client, which belong to one curve."""
    return bool(table["load_arrival"].eq(CLOSED).all()) and len(set(table["load_requests"] / table["concurrency"])) == 1


def _find_printed(table: pd.DataFrame, name: str) -> pd.Series[Any]:
    """Return a mask of the points for which a load field is part of the printed load.

    The number of requests of an import is printed only if nothing else distinguishes two points: other tools send as
    many requests as a load needs, often a multiple of the clients, and such points belong to one curve. dcpbench's own
    points next to imports of the same lengths are distinguished only among themselves, because imports do not have the
    other fields.
    """
    ours = table["origin"].eq(OURS)
    alone = ours
    if not ours.all() and ours.any():
        lengths = [table[column] for column in ("model", "mode", "shape")]
        varies = table[f"load_{name}"].where(ours).groupby(lengths).transform("nunique") > 1
        alone = ours & (table["origin"].groupby(lengths).transform("nunique").eq(1) | (varies & (name != "requests")))
    if name == "requests":
        return alone | table.duplicated(["run", "model", "mode", "label", "arrival", "shape"], keep=False)
    return alone | (~ours & (name not in SOME_HAVE))


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Return each folder once, as a run with a unique name for each device in it; raise the errors of `load`.

    Lines that cannot be read are listed in the run, so that the others can be shown.
    """
    folders = list(dict.fromkeys(folders))
    if not folders:
        raise UsageError("no run folder given; name at least one, as in `dcpbench report runs/latest`.")
    paths = [get_run_folder(folder).resolve() for folder in folders]
    names = make_unique_names(paths)
    runs = [_load_run(folder, names[path]) for folder, path in zip(folders, paths, strict=True)]
    return [part for run in runs for part in joined_runs.split_by_device(run)]


def _load_run(folder: Path, name: str) -> Run:
    path = get_record_file(folder)
    inside = sorted(p.parent for p in folder.glob(f"*/{RECORDS_FILE}"))
    if inside and not path.exists():
        raise RecordsError(f"{folder} is no run, but holds some; name one or several: {' '.join(map(str, inside))}")
    run = read_run(folder, name, keep=_Clipper(), max_points=MAX_POINTS, skip_bad_lines=True)
    if run.truncated and not run.records:
        raise RecordsError(f"{path} holds only a part of one record; repeat its sweep with -o {folder} --force.")
    if not run.records and not run.bad_lines:
        raise RecordsError(
            f"{path} holds no record yet; wait for its run, repeat its command with -o {folder} --resume, or name another run."
        )
    return run


class _Clipper:
    """Cut the strings of records to a reasonable length, and share one copy of an environment between records."""

    def __init__(self) -> None:
        self._environments: dict[bytes, Environment] = {}

    def __call__(self, record: Record) -> Record:
        """Return the record with strings cut, and with an equal environment replaced by the one seen before."""
        names = ("point", "phases", "kv", "conditions", "choice", "sync_sites", "warnings", "reason", "gpu", "serve")
        parts = {name: getattr(record, name) for name in names}
        changes = {} if _is_short(parts) else {name: _fit_strings(part) for name, part in parts.items()}
        if record.environment is not None:
            key = msgspec.json.encode(record.environment)
            if key not in self._environments:
                self._environments[key] = _fit_strings(record.environment)
            changes["environment"] = self._environments[key]
        if record.detail:
            changes["detail"] = {summarize_long_text(name): _fit_detail(text) for name, text in record.detail.items()}
        return msgspec.structs.replace(record, **changes)


def _is_short(parts: dict[str, Any]) -> bool:
    """Return True if no string inside needs to be cut: JSON without escapes or long text between two quotes."""
    text = msgspec.json.encode(parts)
    return (
        text.isascii()
        and b"\\" not in text
        and b"\x7f" not in text
        and max(map(len, text.split(b'"'))) <= MAX_TEXT_CHARS
    )


def _fit_detail(text: str) -> str:
    short = text if len(text) <= MAX_DETAIL_CHARS else f"({len(text):,} characters) … {text[-MAX_DETAIL_CHARS:]}"
    return make_printable(short, LINES)


def _fit_strings(value: Any) -> Any:  # noqa: ANN401 - whatever a record holds
    """Return the value with its strings cut, including nested ones."""
    if isinstance(value, str):
        return summarize_long_text(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **_fit_strings(msgspec.structs.asdict(value)))
    if isinstance(value, list):
        return [_fit_strings(v) for v in value]
    if isinstance(value, dict):
        return {summarize_long_text(name): _fit_strings(v) for name, v in value.items()}
    return value


def _make_other_row(run: str, record: Record) -> dict[str, Any]:
    point = record.point
    return {
        "run": run,
        "model": point.model,
        "layout": point.layout_name,
        "drawn_layout": describe_layout(point),
        "dcp": point.dcp,
        "context": point.context,
        "concurrency": point.concurrency,
        "routing": point.routing,
        "mode": point.load.mode if point.load else None,
        "load": load_labels.format_served_load(point) if point.load else None,
        "repeat": point.repeat,
        "outcome": record.outcome,
        "reason": format_reason(record) or get_reason(record),
        "detail": "\n".join(f"{name}: {text}" for name, text in record.detail.items()),
        "lacks_memory": is_rejected_for_memory(record),
        "message": get_reason(record),
        "cause": get_cause(record),
        "device": CPU if is_functional(record) else get_device(record),
        "cpu": is_functional(record),
        "gpus": point.gpus,
        "shape": load_labels.format_shape(point.load) if point.load else None,
    }


def sort_commonest_first(others: pd.DataFrame) -> pd.DataFrame:
    """Return the points that did not run: failures by frequency of their cause, then rejected points in their order."""
    if others.empty:
        return others
    shared = others.groupby("cause", sort=False)["cause"].transform("size").where(others["outcome"] != "rejected", 0)
    return others.assign(shared=shared).sort_values("shared", ascending=False, kind="stable").drop(columns="shared")


def _make_point_row(run: str, records: list[Record]) -> dict[str, Any]:
    """Return the repeats of one point as one row: medians of medians; intervals are the envelope of the repeats' intervals."""
    point = records[0].point
    fields = [name for name in point.__struct_fields__ if name not in ("repeat", "load")]
    row: dict[str, Any] = {name: getattr(point, name) for name in fields}
    kv, instances = next((r.kv for r in records if r.kv), None), point.instances
    conditions = next((r.conditions for r in records if r.conditions), None)
    profiled = [r.phases for r in records if r.phases]
    phases = dict.fromkeys(name for p in profiled for name in p.phase_us)
    floors = [r.floor for r in records if r.floor]
    floored = dict.fromkeys(name for f in floors for name in (*phases, *f.phase_floor_us))
    condition_names = ("layers", "layers_held", "attention_error", "experts_hit", "graph_batch", "cuda_graph")
    busiest = {name: v for name in BUSIEST if conditions and (v := getattr(conditions, name)) is not None}
    row |= {
        "record": records[0],
        "run": run,
        "layout": point.layout_name,
        "drawn_layout": describe_layout(point),
        "instance": point.instance_name,
        "instances": instances.count if point.disaggregate else None,
        "gpus": point.gpus,
        "precision": point.precision,
        "repeats": len(records),
        "origin": get_origin(records[0]),
        "warnings": tuple(sorted({warning for r in records for warning in _list_warnings(r)})),
        "cpu": any(map(is_functional, records)),
        "device": next(filter(None, map(get_device, records)), None),
        **{f"kv_{name}": getattr(kv, name, None) for name in Kv.__struct_fields__},
        **({"kv_bounded_by": SERVER_FLAG} if any(map(is_kv_limited, records)) else {}),
        "room_for": kv.capacity_requests * instances.serving if kv else None,
        **merge_metrics(records, "kv_tokens_per_gib"),
        **{f"phase_{name}_us": compute_median(p.phase_us.get(name, 0.0) for p in profiled) for name in phases},
        "idle_us": compute_median(p.idle_us for p in profiled),
        **(_make_profile_columns(profiled) if profiled else {}),
        **{f"floor_{name}_us": compute_median(f.phase_floor_us.get(name, 0.0) for f in floors) for name in floored},
        **merge_metrics(records, "idle_fraction", "kernels"),
        **{name: getattr(conditions, name, None) for name in condition_names},
        **busiest,
        **merge_metrics(records, *OF_ENGINE),
        "kv_capacity_tokens": next((n for n in map(get_kv_capacity, records) if n is not None), None),
        **merge_metrics(records, "floor_share"),
        "throttle_reasons": tuple(sorted({reason for r in records if r.gpu for reason in r.gpu.throttle_reasons})),
        **_collect_clocks(records),
    }
    held = row["kv_capacity_tokens"]
    row["kv_tokens_of_all"] = None if held is None else held * instances.serving
    return row | (_make_served_columns(records) if point.load else _make_decode_columns(records))


def _list_warnings(record: Record) -> list[str]:
    """Return the warnings of a record, with PHASES_DIFFER if its phases do not add up to the profiled step."""
    differ = record.phases is not None and abs(record.phases.sum_error) > MAX_SUM_ERROR
    return [*record.warnings, *([PHASES_DIFFER] if differ and PHASES_DIFFER not in record.warnings else [])]


def _make_profile_columns(profiled: list[Phases]) -> dict[str, Any]:
    """Return the time of the profiled step, the largest deviation of the sum of its phases, and what is left out of it."""
    waits = [p.host_wait_us for p in profiled if p.host_wait_us is not msgspec.UNSET]
    return {
        **({"host_wait_us": compute_median(waits)} if waits else {}),
        "profiled_us": compute_median(p.step_us for p in profiled),
        "phase_sum_error": max((p.sum_error for p in profiled), key=abs),
    }


def _collect_clocks(records: list[Record]) -> dict[str, Any]:
    """Return the highest SM clock and the relative fall below it, for the repeat in which the clock fell most."""
    known = [(g.sm_clock_mhz_min, g.sm_clock_mhz_max) for r in records if (g := r.gpu)]
    falls = [(1 - low / high, high) for low, high in known if low and high]
    fall, high = max(falls, default=(None, None))
    return {"sm_clock_mhz_max": high, "clock_fall": fall}


def _make_decode_columns(records: list[Record]) -> dict[str, Any]:
    steps = [r.metrics.step_ms for r in records if r.metrics]
    latencies = [f"{name}_{p}_ms" for p in metrics.PERCENTILES for name in ("itl", "ttft")]
    return {
        "samples": sum(interval.samples for interval in steps),
        "spread": findings.compute_spread(steps),
        **merge_metrics(records, "step_ms", "output_tok_s", *latencies, *OF_DECODE),
    }


def _make_served_columns(records: list[Record]) -> dict[str, Any]:
    """Return the additional columns of a served point: medians, and for the output rate its range over repeats."""
    point = records[0].point
    load = point.load
    assert load is not None
    measured = [r.serve for r in records if r.serve]
    rates = [m.output_tok_s for m in measured]
    row: dict[str, Any] = {f"load_{name}": getattr(load, name) for name in load.__struct_fields__ if name != "mode"}
    settings = records[0].measured_with
    limit, kv_memory = settings.get("limit_seconds"), settings.get("kv_memory_bytes")
    slos = list({load_labels.format_objectives(m.slo_ms) for m in measured})
    row |= {
        "load_at_once": None if load.arrival == CLOSED else point.concurrency,
        "load_kv_memory_gib": kv_memory / GIB if isinstance(kv_memory, int) else None,
        "load_limit_seconds": limit if isinstance(limit, float | int) else None,
        "mode": load.mode,
        "arrival": load_labels.format_arrival(point),
        "shape": load_labels.format_shape(load),
        "shape_parts": tuple(load_labels.list_shape_parts(load)),
        "input_typical": load_labels.get_typical_length(load.input_tokens),
        "same_load": make_load_key(records[0]),
        "in_step": is_lock_step(load, point.concurrency) and not is_imported_origin(get_origin(records[0])),
        "output_tok_s_low": min(rates, default=None),
        "output_tok_s_high": max(rates, default=None),
        "spread": findings.compute_spread([Interval(median=rate, low=rate, high=rate, samples=1) for rate in rates]),
        "step_error": max(
            (e for r in records if r.conditions and (e := r.conditions.step_error) is not None), default=None
        ),
    }
    row |= merge_metrics(records, *SERVED)
    for name in LATENCIES:
        row |= merge_metrics(records, *(f"{name}_{statistic}_ms" for statistic in STATISTICS))
        row[f"{name}_samples"] = max((getattr(m, f"{name}_ms").samples for m in measured), default=0)
    row |= merge_metrics(records, "cached_share", "tokens_per_step", *(metric.name for metric in metrics.INSTANCES))
    # repeats with different objectives have none in common
    same_objectives = len(slos) == 1
    return row | {
        "slo": slos[0] if same_objectives else "",
        "request_goodput": compute_median(m.request_goodput for m in measured if same_objectives),
    }


def make_point_key(record: Record) -> str:
    """Return a key that all measurements of one point under one load share."""
    return f"{record.point.get_key_without_repeat()} {make_load_key(record)}"


def make_load_key(record: Record) -> str:
    """Return a key that is equal for all points that were sent the same requests, in any mode, with the same KV memory and limit.

    The key is empty for `decode`, because the point describes it completely.
    """
    if record.point.load is None:
        return ""
    sent = msgspec.json.encode(msgspec.structs.replace(record.point.load, mode="")).decode()
    settings = [record.measured_with.get(name) for name in ("limit_seconds", "kv_memory_bytes")]
    return f"{record.point.concurrency} {sent} {settings} {record.point.routing}".rstrip()


def compute_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None without any."""
    known = [float(v) for v in values if v is not None]
    return statistics.median(known) if known else None


def merge_metrics(records: Sequence[Record], *names: str) -> dict[str, float | None]:
    """Return columns of these metrics: the merged value of the repeats, and both ends of an interval if tables have them.

    An interval is the envelope of the repeats' intervals, or of the repeats' values if they have no intervals.
    """
    row: dict[str, float | None] = {}
    for metric in (METRIC[name] for name in names):
        held = [found for record in records if (found := metric.get_recorded(record)) is not None]
        known = [(f.median, f.low, f.high) if isinstance(f, Interval) else (f, f, f) for f in held]
        row[metric.name] = MERGES[metric.merged]([value for value, _, _ in known]) if known else None
        if metric.ranged:
            row[f"{metric.name}_low"] = min((low for _, low, _ in known), default=None)
            row[f"{metric.name}_high"] = max((high for _, _, high in known), default=None)
    return row


def _make_plain_table(rows: pd.DataFrame | list[dict[Any, Any]]) -> pd.DataFrame:
    """Return a table with strings stored as objects: even pandas' arrays of Python strings are slow to iterate over."""
    table = pd.DataFrame(rows)
    words = [name for name, kind in table.dtypes.items() if isinstance(kind, pd.StringDtype)]
    return table.astype(dict.fromkeys(words, object)).copy()  # in one piece, as pandas wants wide tables


def _build_tidy_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a table in reading order, with a `variant` that distinguishes points of the same layout and load."""
    if not rows:
        return pd.DataFrame()
    table = _make_plain_table(rows)
    variants = pd.Series("", table.index, dtype=object)
    servers = table["engine"].where(table["origin"].map(is_server_origin), "")
    for _, own in table.groupby(servers, sort=False):
        variants.loc[own.index] = pd.Series(_format_variants(own), own.index, dtype=object)
    table["variant"] = variants
    table["label"] = [
        f"{lay} ({var})" if var else lay for lay, var in zip(table["layout"], table["variant"], strict=True)
    ]
    return _sort_table(table, "run", "model", "context", "concurrency")


def _format_variants(table: pd.DataFrame) -> list[str]:
    """Return for each point of one engine what distinguishes it from others of its layout, such as `triton, page 64`."""
    found = [_format_exchanges(table) if axis.name == "exchange" else _format_varying(table, axis) for axis in AXES]
    parts = [texts for texts in (*found, _format_devices(table)) if texts]
    if not parts:
        return [""] * len(table)
    return [", ".join(filter(None, texts)) for texts in zip(*parts, strict=True)]


def _sort_table(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Sort by these columns and the layout; numbers in texts sort by value, so that `max_num_seqs=8` comes before `=32`."""

    def make_sort_key(column: pd.Series[Any]) -> pd.Series[Any]:
        if not any(isinstance(value, str) for value in column):
            return column
        return column.map({text: place for place, text in enumerate(sorted(set(column), key=make_natural_key))})

    order = [*columns, *DEGREES, "ep", "variant"]
    return table.sort_values(order, kind="stable", ignore_index=True, key=make_sort_key)


DISTINCT_WHEN_ABSENT = ("emulate", "prefill_gpus", "mtp", "acceptance")  # an empty value does not mean "unknown"


def _format_varying(table: pd.DataFrame, axis: Axis) -> list[str]:
    """Return the text of a field for each point, such as `page 64`; empty unless it distinguishes two points that have it."""
    if axis.name == "settings":
        return _format_settings(table)
    if axis.name == "ep":
        return _format_experts(table)
    if axis.name in STORED:
        return _format_stored(table, axis)
    own = axis.label and Role.EXCHANGE not in axis.role and axis.name != "routing"  # the text of the load has it
    texts = [axis.format_value(value) for value in table[axis.name]] if own else []
    silent = set() if axis.name in DISTINCT_WHEN_ABSENT else {""}
    return texts if len({*texts} - silent) > 1 else []


def _format_stored(table: pd.DataFrame, axis: Axis) -> list[str]:
    """Return `fp8 KV` or `bf16 KV` for each point if both occur; empty for an import without that information."""
    kept = table[axis.name]
    if len({*kept} - {UNKNOWN}) == 1:
        return []
    return [axis.format_value(value or dtype) for value, dtype in zip(kept, table["dtype"], strict=True)]


def _format_experts(table: pd.DataFrame) -> list[str]:
    """Return `ep8` or `ep1` for each point without attention data parallel; an empty list if all place experts the same way.

    With attention data parallel the name of the layout has the degree.
    """
    placed = [
        (tp, find_ep_degree(ep, tp) if tp > 1 and dp <= 1 else None)
        for tp, dp, ep in zip(table["tp"], table["dp"], table["ep"], strict=True)
    ]
    kinds = {MOE_EP if degree == tp else degree for tp, degree in placed if degree is not None}
    return [] if len(kinds) <= 1 else ["" if degree is None else f"ep{degree}" for _, degree in placed]


def _format_settings(table: pd.DataFrame) -> list[str]:
    """Return the settings of each point that not all points of its run have, or that another run sets differently."""
    settings = [[p for p in text.split(SETTING) if p and not p.startswith(GPU)] for text in table["settings"]]
    of_run: dict[str, list[set[str]]] = {}
    values: dict[str, set[str]] = {}
    for run, parts in zip(table["run"], settings, strict=True):
        of_run.setdefault(run, []).append(set(parts))
        for part in parts:
            values.setdefault(part.partition("=")[0], set()).add(part)
    common = {run: set.intersection(*found) for run, found in of_run.items()}
    return [
        SETTING.join(p for p in parts if p not in common[run] or len(values[p.partition("=")[0]]) > 1)
        for run, parts in zip(table["run"], settings, strict=True)
    ]


def _format_devices(table: pd.DataFrame) -> list[str]:
    """Return the hardware of each point if there are imports and several kinds of hardware; else an empty list."""
    devices = [device if isinstance(device, str) else "" for device in table["device"]]
    return devices if len({*devices} - {""}) > 1 and bool((table["origin"] != OURS).any()) else []


def _format_exchanges(table: pd.DataFrame) -> list[str]:
    """Return the parts of each point's exchange that not all have in common, such as `a2a +q-replicate`."""
    own = select_point_axes(Role.EXCHANGE)
    rows = load_labels.list_rows(table[[axis.name for axis in own]])
    exchanges = ~table["exchange"].isin((NO_EXCHANGE, UNKNOWN))
    varying = [axis for axis in own if len(set(table[axis.name][exchanges])) > 1]
    return [
        " ".join(axes.format_changed_values(varying, row)) if exchanging else ""
        for row, exchanging in zip(rows, exchanges, strict=True)
    ]
