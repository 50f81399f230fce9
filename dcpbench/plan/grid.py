"""Expand a SweepSpec to the grid of points that can run, and those that cannot, each with its reason. No torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, cast

import msgspec

from dcpbench.errors import DcpbenchError, InsufficientMemoryError, UsageError
from dcpbench.models import get_published_precision, load_shape
from dcpbench.plan import validate
from dcpbench.plan.spec import check_same_sizes, resolve_compute_dtype
from dcpbench.plan.used_options import WITHOUT_EXCHANGE, check_used, get_idle_fields, list_layouts, suggest_degrees
from dcpbench.plan.validate import Machine, check_runnable
from dcpbench.points.axes import Role
from dcpbench.points.budget import EnginePlan, find_engine_plan, plan_engines
from dcpbench.points.layout import DEGREES, MAX_SUGGESTED, OUTER_DEGREES, place_experts
from dcpbench.points.names import (
    AS_COMPUTED,
    AS_PUBLISHED,
    AUTO,
    BACKENDS,
    VLLM,
    WEIGHT_FORMATS,
)
from dcpbench.points.point import AXES, LOAD_AXES, Point, select_point_axes
from dcpbench.points.speculation import limit_acceptance
from dcpbench.records.record import Record
from dcpbench.serving.load_words import format_load
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.axes import Value
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.layout import Layout
    from dcpbench.points.settings import Settings

WITHOUT_TRANSFERS: dict[str, object] = {  # fields of a point without transfers of KV between instances
    axis.name: axis.default for axis in select_point_axes(Role.DEPLOYED)
}
LISTED = [  # fields that have their own keys in the JSON of --dry-run
    axis
    for axis in AXES
    if axis.name in (*DEGREES, *OUTER_DEGREES) or axis.role & (Role.PATH | Role.DEPLOYED | Role.ASSUMED)
]
MAX_POINTS = 100_000  # maximum number of points of one run, which is also what its report reads
MAX_REASONS = 3  # maximum reasons in an error, before it refers to --dry-run, and of layouts that a line names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Hold one point of the grid: it can run (`plan`), or it cannot (`error`)."""

    point: Point
    added: bool = False  # True for a baseline that was added automatically
    plan: EnginePlan | None = None
    error: DcpbenchError | None = None

    def make_rejected_record(self) -> Record:
        """Return the record of a point that cannot run."""
        lacks_memory = isinstance(self.error, InsufficientMemoryError)
        return Record(point=self.point, outcome="rejected", reason=str(self.error), lacks_memory=lacks_memory)


def expand_grid(
    spec: SweepSpec, probe: Probe, nnodes: int = 1, *, submitted: bool = False, argv: Sequence[str] = ()
) -> list[Candidate]:
    """Return every point of the grid with its baseline, in running order: neighbours share an engine.

    `argv`: command and arguments that errors repeat with other options.
    """
    found = _expand_spec(spec, Machine(probe=probe, nnodes=nnodes, submitted=submitted, argv=tuple(argv)))
    _check_used(spec, [c.point for c in found], probe, nnodes)
    return found


def expand_layouts(
    layouts: Sequence[Layout], spec: SweepSpec, probe: Probe, argv: Sequence[str] = ()
) -> list[Candidate]:
    """Return the points that `verify` compares: the given layouts instead of every combination of tp, dp and dcp,
    without baselines. `argv`: as in `expand_grid`.
    """
    found, machine = {}, Machine(probe=probe, timed=False, argv=tuple(argv))
    for x in layouts:
        one = dataclasses.replace(spec, tp=(x.tp,), dp=(x.dp,), dcp=(x.dcp,), baseline=False)
        found.update({c.point.get_key(): c for c in _expand_spec(one, machine)})
    _check_used(spec, [c.point for c in found.values()], probe)
    return sorted(found.values(), key=lambda c: _get_sort_key(c.point, spec))


def _check_used(spec: SweepSpec, points: Sequence[Point], probe: Probe, nnodes: int = 1) -> None:
    """Raise UnusedOptionsError for an option that no point uses, with degrees that its model and these GPUs can have instead."""
    ranks = probe.count * nnodes
    if probe.device == "cpu" or any(spec.how["emulate"]) or spec.settings.step_times:
        ranks = MAX_SUGGESTED
    check_used(
        spec.typed,
        [(p.tp, p.dp, p.dcp) for p in points],
        functools.partial(
            suggest_degrees,
            list_layouts(points),
            shapes=[load_shape(model) for model in spec.model],
            ep=str(spec.how["ep"][0]),
            max_ranks=ranks,
        ),
    )


def require_runnable(candidates: Sequence[Candidate], *, listed_above: bool = False) -> None:
    """Raise the requested points' own error if none of them can run: a baseline alone was not requested.

    Reasons that begin with the same sentence are merged into the one of the last point, which has the most DCP.
    `listed_above` is True if the reasons are already on the screen.
    """
    typed = [c for c in candidates if not c.added]
    if any(c.error is None for c in typed):
        return
    if listed_above:
        raise type(typed[0].error)("None of these points can run; the plan says why, and what to type instead.")  # type: ignore[misc]
    reasons = list({str(c.error).partition(". ")[0]: str(c.error) for c in typed}.values())
    more = f"\n({len(reasons) - MAX_REASONS} more; see them all with --dry-run)" if len(reasons) > MAX_REASONS else ""
    raise type(typed[0].error)("\n".join(reasons[:MAX_REASONS]) + more)  # type: ignore[misc]


def check_live(candidates: Iterable[Candidate], settings: Settings) -> None:
    """Raise the error of `validate.check_live` for the first point that can be planned but not measured."""
    for c in candidates:
        if c.error is None:
            validate.check_live(c.point, settings, load_shape(c.point.model))


def format_dcp_note(candidates: Sequence[Candidate]) -> str:
    """Return a note that DCP is measured by default, for users who gave only --tp; empty if no layout that can run has
    DCP.
    """
    typed = [c for c in candidates if not c.added and c.point.dcp > 1 and c.error is None]
    if not typed:
        return ""
    baselines = _format_layouts(c for c in candidates if c.added and c.error is None)
    baseline_note = f", with {baselines} as baseline" if baselines else ""
    alone = "plain TP alone" if all(c.point.dp == 1 for c in typed) else "layouts without it alone"
    return f"DCP is measured by default: {_format_layouts(typed)}{baseline_note}. For {alone}, add --dcp 1."


def format_precision_note(spec: SweepSpec, candidates: Sequence[Candidate]) -> str:
    """Return a note that weights have the format of the published model, if that is no dtype and none was given; else empty."""
    if AS_PUBLISHED not in spec.how["weights_dtype"]:
        return ""
    points = [c.point for c in candidates if c.point.weights_dtype and c.error is None]
    if not points:
        return ""
    formats = format_list(list(dict.fromkeys(point.weights_dtype for point in points)))
    models = list(dict.fromkeys(point.model for point in points))
    kept = format_list(list(dict.fromkeys(point.kv_precision for point in points)))
    published = f"as {format_list(models)} {'is' if len(models) == 1 else 'are'} published"
    return f"Weights {formats}, {published}; KV {kept}. For weights in bf16, add --weights-dtype bf16."


def format_point_name(point: Point, *, repeated: bool = True) -> str:
    """Return a point in a line: `tiny tp8·dcp8 reference ag_rs, 8 × 100 tokens`; with expert parallel `tp8·dcp8 ep8`."""
    repeat = f", repeat {point.repeat}" if repeated and point.repeat else ""
    load = format_point_load(point) + ("" if point.load else " tokens")
    who = (point.model_label, point.layout_name, point.ep_label, format_path(point))
    return f"{' '.join(filter(None, who))}, {load}{repeat}"


def format_point_load(point: Point) -> str:
    """Return requests and tokens of a point, such as `8 × 4,000`, or its load."""
    return format_load(point.load, point.concurrency) if point.load else f"{point.concurrency} × {point.context:,}"


def format_varied_parts(points: Sequence[Point]) -> dict[str, str]:
    """Return by key the parts of loads that `format_point_load` omits and that differ between points: `, chunk 4,096`."""
    loads = [p.load for p in points if p.load is not None]
    axes = [axis for axis in LOAD_AXES if axis.label and len({getattr(load, axis.name) for load in loads}) > 1]
    return {
        p.get_key(): "".join(f", {a.format_value(getattr(p.load, a.name))}" for a in axes) if p.load else ""
        for p in points
    }


def format_path(point: Point) -> str:
    """Return how a point is computed, without defaults such as the all-reduce: `triton a2a +q-replicate`."""
    return " ".join(
        word
        for word in point.format_changed_fields(Role.PATH | Role.SERVER | Role.DEPLOYED | Role.ASSUMED)
        if word != point.ep_label
    )


def make_table(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    """Return one row per point for --dry-run: the layout in dcpbench's and an engine's terms, the load, memory per GPU, or
    the reason.

    The engine is the one that is started, and vLLM for dcpbench's own.
    """
    rows: list[dict[str, object]] = []
    more = format_varied_parts([c.point for c in candidates])
    for c in candidates:
        p, plan = c.point, c.plan
        placed = c.error is None and p.tp > 0
        engine = VLLM if p.backend in (*BACKENDS, AUTO) else p.backend
        rows.append(
            {
                "model": p.model,
                "layout": p.layout_name,
                "vllm_layout": p.layout.format_vllm_name() if placed else None,
                "engine": engine,
                "engine_layout": p.layout.format_engine_name(engine) if placed else None,
                **{axis.name: getattr(p, axis.name) for axis in LISTED},
                "ep_text": p.ep_label,
                "path": format_path(p),
                "workload": p.workload,
                "concurrency": p.concurrency,
                "context": p.context,
                "repeat": p.repeat,
                "load": msgspec.to_builtins(p.load),
                "load_text": format_point_load(p) + more[p.get_key()],
                "added": c.added,
                "kv_pool_bytes": plan.kv_bytes if plan else None,
                "weights_held_bytes": plan.weight_bytes if plan else None,
                "layers_held": plan.layers_held if plan else None,
                "layers": plan.layers if plan else None,
                "reason": str(c.error) if c.error else None,
            }
        )
    return rows


def _format_layouts(candidates: Iterable[Candidate]) -> str:
    """Return the first of their layouts, each once."""
    names = list(dict.fromkeys(c.point.layout_name for c in candidates))
    return ", ".join(names[:MAX_REASONS]) + (", …" if len(names) > MAX_REASONS else "")


def _iter_points(spec: SweepSpec, shapes: Mapping[str, ModelShape]) -> Iterable[Point]:
    loads = {(model, dp): spec.make_loads(dp, shapes[model]) for model in spec.model for dp in spec.dp}
    _check_count(spec, sum(map(len, loads.values())) * math.prod(map(len, spec.how.values())))
    hows = [dict(zip(spec.how, values, strict=True)) for values in itertools.product(*spec.how.values())]
    axes = itertools.product(range(spec.repeats), spec.tp, spec.pp, spec.pcp, spec.dp, spec.model, hows)
    for repeat, tp, pp, pcp, dp, model, how in axes:
        placed = {
            "ep": place_experts(str(how["ep"]), tp * pcp),
            "acceptance": limit_acceptance(cast("int", how["mtp"]), spec.acceptance),
            "pp": pp,
            "pcp": pcp,
        }
        for given, dcp in itertools.product(
            loads[model, dp], spec.dcp or (shapes[model].compute_max_dcp(max(tp // dp, 1)) if pcp == 1 else 1,)
        ):
            yield Point(
                model=model,
                tp=tp,
                dp=dp,
                dcp=dcp,
                concurrency=given.concurrency,
                context=given.context,
                load=given.load,
                workload="serve" if given.load else "decode",
                repeat=repeat,
                **(
                    how  # type: ignore[arg-type]
                    | placed
                    | _resolve_precision(how, shapes[model])
                    | get_idle_fields(tp, dp, dcp)
                    | dict(given.deployed)
                ),
            )


def _resolve_precision(how: Mapping[str, Value], shape: ModelShape) -> dict[str, str]:
    """Return the precision of the computation, and those of weights and KV if they differ from it."""
    weights, kv = str(how["weights_dtype"]), str(how["kv_dtype"])
    dtype = resolve_compute_dtype(weights, kv, str(how["dtype"]))
    if weights == AS_PUBLISHED:
        weights = get_published_precision(shape) if dtype == "bf16" else dtype
    stored = {"weights_dtype": weights, "kv_dtype": kv}
    return {"dtype": dtype} | {
        name: typed if typed in WEIGHT_FORMATS else AS_COMPUTED for name, typed in stored.items()
    }


def _check_count(spec: SweepSpec, each: int) -> None:
    """Raise UsageError for a grid with more points than a report reads; `each` is their number per
    repeat, tp and dcp.
    """
    stages = len(spec.pp) * len(spec.pcp)
    count = spec.repeats * len(spec.tp) * stages * len(spec.dcp or (1,)) * each
    if count > MAX_POINTS:
        raise UsageError(
            f"{count:,} points are requested, more than the {MAX_POINTS:,} that a run can have; lower --repeats, or "
            "give fewer values of an option."
        )


def _expand_spec(spec: SweepSpec, machine: Machine) -> list[Candidate]:
    shapes = {model: load_shape(model) for model in spec.model}
    check_same_sizes(spec, shapes)
    typed = {
        point.get_key(): _make_candidate(point, spec, shapes[point.model], machine)
        for point in _iter_points(spec, shapes)
    }
    added = {}
    if spec.baseline:
        for found in typed.values():
            for point in _iter_baselines(found.point, spec) if found.error is None else ():
                if point.get_key() not in typed and point.get_key() not in added:
                    judged = _make_candidate(point, spec, shapes[point.model], machine)
                    added[point.get_key()] = dataclasses.replace(judged, added=True)
    order = sorted([*typed.values(), *added.values()], key=lambda c: _get_sort_key(c.point, spec))
    engines = plan_engines((c.point for c in order if c.error is None), spec.settings, machine.probe)
    return [c if c.error else dataclasses.replace(c, plan=find_engine_plan(c.point, engines)) for c in order]


def _iter_baselines(point: Point, spec: SweepSpec) -> Iterable[Point]:
    """Yield the point's baseline and, if some instances only prefill, both points with as many instances that all do
    both.
    """
    pair = [point] if spec.settings.step_times else [point, _make_baseline(point)]  # a file is of one engine
    yield from pair[1:]
    if point.instances.disaggregated:
        combined = WITHOUT_TRANSFERS | {"disaggregate": str(point.instances.convert_to_both())}
        yield from (msgspec.structs.replace(one, **combined) for one in pair)


def _make_baseline(point: Point) -> Point:
    """Return the same layout without DCP; for a layout without DCP, tensor parallelism alone."""
    dp = point.dp if point.dcp > 1 else 1
    return msgspec.structs.replace(point, dp=dp, dcp=1, **WITHOUT_EXCHANGE)


def _get_sort_key(point: Point, spec: SweepSpec) -> tuple[object, ...]:
    """Return the sort key: by pass, then job (tp), engine and path; models in the given order."""
    engine = point.get_values(Role.ENGINE) | {"model": spec.model.index(point.model)}
    rest = (
        point.get_values(role, but=Role.ENGINE).values() for role in (Role.PATH, Role.LOAD, Role.DEPLOYED, Role.ASSUMED)
    )
    load = ((value is not None, value) for value in itertools.chain(*rest))
    return (point.repeat, point.tp, *engine.values(), *load)


def _make_candidate(point: Point, spec: SweepSpec, shape: ModelShape, machine: Machine) -> Candidate:
    try:
        check_runnable(point, spec.settings, shape, machine)
    except DcpbenchError as e:
        return Candidate(point=point, error=e)
    return Candidate(point=point)
