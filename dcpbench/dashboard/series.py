"""Define a line, which joins one history: the same point on the same hardware and driver under the same conditions."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from dcpbench.points import axes
from dcpbench.points.axes import COMPUTES, Role
from dcpbench.points.memory import GIB
from dcpbench.points.names import UNKNOWN
from dcpbench.points.point import AXES, LOAD_AXES
from dcpbench.records import metrics
from dcpbench.records.record import CPU, WRONG_RESULTS, format_hardware
from dcpbench.reports import load_labels
from dcpbench.show.text import fit_text

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dcpbench.points.point import Point
    from dcpbench.records.metrics import Value
    from dcpbench.records.record import Environment, Record

MAX_NAME_CHARS = 160  # characters of a name on the page; longer names are cut, and stay distinguishable
MAX_REASON_CHARS = 600
NOT_RECORDED = "not recorded"
SEPARATOR = ", "  # separator between conditions
WITHOUT_EFFECT = ("NCCL_VERSION", "TORCH_NCCL_ASYNC_ERROR_HANDLING")  # images and torchrun set them: version, errors
PRECISIONS = ("dtype", "weights_dtype", "kv_dtype")  # fields of a point that determine its precision
WORST = ("hung", "failed", "rejected")


@dataclasses.dataclass(frozen=True)
class Line:
    """Identify a line: records belong to the same line if and only if all of these fields are equal."""

    point: str  # key of the point, the same for all repeats
    hardware: str  # `4 × NVIDIA H200`, or `CPU`
    driver: str
    conditions: tuple[str, ...]  # settings that change figures: KV memory, limit, objectives, NCCL's variables, source
    example: Point = dataclasses.field(compare=False)
    cpu: bool  # true for functional runs, in which times say nothing about performance

    @property
    def id(self) -> str:
        """Return a short name that is stable over builds, for addresses."""
        known = "\n".join((self.point, self.hardware, self.driver, SEPARATOR.join(self.conditions), str(self.cpu)))
        return hashlib.sha256(known.encode(errors="replace")).hexdigest()[:10]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Hold one run's values of a line."""

    outcome: str
    values: dict[str, Value]  # values by metric name, in the display unit
    repeats: int
    warnings: str
    reason: str
    wrong: str = ""  # warnings that its results are wrong
    layers_held: str = ""  # that the whole model did not fit (show/model_fit.py); empty if all layers were held


def collect_lines(records: Sequence[Record]) -> dict[Line, Entry]:
    """Return the lines of one run; a record without an environment, such as a rejected one, gets the run's most common one."""
    usual = Counter(_describe_hardware(r.environment) for r in records if r.environment)
    fallback = usual.most_common(1)[0][0] if usual else (NOT_RECORDED, NOT_RECORDED)
    conditions = Counter(_list_conditions(r) for r in records if r.outcome == "ok")
    same: dict[Line, list[Record]] = {}
    for record in records:
        where, driver = _describe_hardware(record.environment) if record.environment else fallback
        own_conditions = _list_conditions(record)
        if record.outcome != "ok" and not record.measured_with and len(conditions) == 1:
            own_conditions = next(iter(conditions))
        line = Line(
            point=record.point.get_key_without_repeat(),
            hardware=where,
            driver=driver,
            conditions=own_conditions,
            example=record.point,
            cpu=where == CPU or "cpu" in record.warnings,
        )
        same.setdefault(line, []).append(record)
    return {line: _make_entry(found) for line, found in same.items()}


def describe_line(line: Line, layers_held: str = "", shared: Collection[str] = ()) -> dict[str, str | int]:
    """Return what the page shows of a line and filters by; `layers_held` of its newest entry that ran.

    Conditions in `shared` are left out.
    """
    point = line.example
    mode = f"{load_labels.SEPARATOR}{point.load.mode}" if point.load else ""
    experts = [] if point.ep_degree is None else [f"ep{point.ep_degree}"]  # in every row, to be stated once
    # defaults, and fields that an import lacks, are left out
    load = axes.format_changed_values(LOAD_AXES, msgspec.structs.asdict(point.load)) if point.load else []
    return {
        "model": fit_label(point.model),
        "workload": fit_label(f"{point.workload}{mode}"),
        "layout": point.layout_name,
        "exchange": fit_label(point.format_exchange_label() or "none"),
        "how": fit_label(
            load_labels.SEPARATOR.join([*experts, *_describe_computation(point), *load, *filter(None, [layers_held])])
        ),
        "context": point.context,
        "concurrency": point.concurrency,
        "load": fit_label(load_labels.format_served_load(point) if point.load else ""),
        "hardware": fit_label(line.hardware),
        "driver": fit_label(line.driver),
        "conditions": fit_label(SEPARATOR.join(part for part in line.conditions if part not in shared)),
    }


def _describe_computation(point: Point) -> list[str]:
    """Return how a point is computed, with the precision of weights and KV as one word.

    The single word avoids a misreading: `bf16` alone, next to `fp8 weights` of other rows, would be taken for the
    precision of weights.
    """
    made_of = {axis.format_value(getattr(point, axis.name)) for axis in AXES if axis.name in PRECISIONS}
    texts = [
        word
        for word in point.format_changed_fields(COMPUTES, but=Role.EXCHANGE)
        if word not in {*made_of, point.ep_label}
    ]
    return [*texts, *([point.precision] if point.precision != UNKNOWN else [])]


def find_shared_settings(lines: Sequence[Line]) -> list[str]:
    """Return the environment variables that all lines share, which a page states once."""
    shared = set(lines[0].conditions).intersection(*(line.conditions for line in lines)) if lines else ()
    return sorted(part for part in shared if "=" in part)


def fit_label(text: str, longest: int = MAX_NAME_CHARS) -> str:
    """Return `text`, or its beginning with `…`."""
    return fit_text(text, longest)


def _describe_hardware(environment: Environment) -> tuple[str, str]:
    driver = environment.driver or ("none" if environment.device == CPU else NOT_RECORDED)
    return format_hardware(environment), driver


def _list_conditions(record: Record) -> tuple[str, ...]:
    known = record.measured_with
    parts = []
    if memory := known.get("kv_memory_bytes"):
        parts.append(f"KV memory {float(str(memory)) / GIB:g} GiB")
    if limit := known.get("limit_seconds"):
        parts.append(f"ended after {limit} s")
    if record.serve and record.serve.slo_ms:
        parts.append(load_labels.format_objectives(dict(sorted(record.serve.slo_ms.items()))))
    if origin := record.origin:
        parts.append(f"from {origin}")
    if record.environment:
        settings = sorted(record.environment.settings.items())
        parts += [f"{name}={value}" for name, value in settings if name not in WITHOUT_EFFECT]
    return tuple(parts)


def _make_entry(records: Sequence[Record]) -> Entry:
    ok = [r for r in records if r.outcome == "ok"]
    failed = [r for r in records if r.outcome != "ok"]
    outcome = "ok" if ok else next((o for o in WORST if any(r.outcome == o for r in failed)), failed[0].outcome)
    reason = next((r.reason for r in failed if r.reason), "")
    if ok and failed:
        reason = f"{len(failed)} of {len(records)} repeats did not finish: {reason}"
    warnings = sorted({warning for r in ok for warning in r.warnings})
    values = {
        v.metric.shown_name: v.convert_to_shown_unit()
        for v in metrics.merge_values(ok, metrics.DASHBOARD, derived=True)
    }
    return Entry(
        fit_label(outcome),
        values,
        len(ok),
        fit_label(", ".join(warnings)),
        fit_label(reason, MAX_REASON_CHARS),
        ", ".join(warning for warning in warnings if warning in WRONG_RESULTS),
        load_labels.describe_layers_held(ok),
    )
