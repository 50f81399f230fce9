"""Answer a query: find the layouts that fit, forecast each under each load, and choose the best of each load. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import shlex
import statistics
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import LayoutError, UsageError
from dcpbench.models import load_shape
from dcpbench.plan.kernel_limits import find_kernel_limit
from dcpbench.plan.option_parsers import parse_bytes
from dcpbench.plan.spec import make_planned_probe
from dcpbench.plan.used_options import check_used
from dcpbench.plan.validate import check_positions, find_batch_limit, find_shortage
from dcpbench.points.budget import measure_whole_model, plan_engine
from dcpbench.points.expert_distribution import EVEN, OWN
from dcpbench.points.key_values import LIST
from dcpbench.points.layout import DEGREES, OUTER_DEGREES, Layout, list_valid_layouts, place_experts
from dcpbench.points.memory import GIB
from dcpbench.points.names import (
    CLOSED,
    GAMMA,
    MOE_EP,
    MOE_TP,
    NO_EXCHANGE,
    PCP_EXCHANGE,
    REPLAY,
    UNKNOWN,
    format_setting,
)
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.points.structured_options import KEYS
from dcpbench.recommend import forecast, suggestions
from dcpbench.recommend.capacity import Capacity, measure_capacity
from dcpbench.recommend.forecast import ESTIMATED, SOURCES, Forecast
from dcpbench.recommend.layout_choice import (
    LACKS_MEMORY,
    NO_WHOLE_MODEL,
    OTHER,
    TOO_MANY,
    Choice,
    Refusal,
    compute_tok_s_per_gpu,
)
from dcpbench.recommend.parallel import estimate_points
from dcpbench.records.launches import measure_bands
from dcpbench.records.record import CPU, get_origin, is_functional, is_server_origin
from dcpbench.reports.load_labels import format_lengths
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.budget import WholeModel
    from dcpbench.points.cluster_specs import Machine
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Load
    from dcpbench.recommend.estimate import Steps
    from dcpbench.recommend.forecast import Watch
    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run
    from dcpbench.serving.gain_split import GainSplit
    from dcpbench.serving.step_times import StepTimes


NO_STAGES = ((1, 1),)  # default of Query.stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Query:
    """Describe the query."""

    model: str
    machine: Machine
    named: str  # machine as given on the command line: a name, or a file
    gpus: tuple[int, ...]  # numbers of GPUs of a layout, all stages together; several are compared
    loads: tuple[tuple[int, int, Load | None], ...]  # (requests in flight, most tokens of each, load or None: decode)
    weights_dtype: str
    kv_dtype: str
    exchanges: tuple[str, ...]
    slo: Mapping[str, float]
    mtp: int = 0  # drafts of a request and step
    acceptance: str = ""  # probability that each is accepted, as Point.acceptance
    routing: str = OWN  # distribution of the experts that tokens take
    price: float | None = None  # price of a GPU per hour
    kv_memory: str | None = None  # --kv-memory as given; None means the memory left next to the weights
    stages: tuple[tuple[int, int], ...] = NO_STAGES  # (pp, pcp) that are compared
    micro_batches: int = 0  # in flight over pipeline stages; 0: as many as stages
    cycled: bool = False  # True if layouts count for which only some layers fit, as `sweep` measures them
    typed: frozenset[str] = frozenset()  # given options that only some layouts use

    @property
    def kv_memory_bytes(self) -> int | None:
        """Return the KV memory of each GPU in bytes; raise UsageError if the text is no size."""
        return None if self.kv_memory is None else parse_bytes("kv_memory", self.kv_memory)

    @property
    def settings(self) -> Settings:
        """Return the settings for plans and replays."""
        return Settings(kv_memory_bytes=self.kv_memory_bytes, slo=dict(self.slo))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Hold the evidence that is available in addition to estimates."""

    runs: Sequence[Run] = ()
    times: Mapping[str, StepTimes] = dataclasses.field(default_factory=dict)  # step times by file


def choose_layouts(
    query: Query, known: Evidence, steps: Steps, watch: Watch = lambda _: None
) -> tuple[list[Choice], list[str]]:
    """Return a choice for each load, and sentences on the evidence that was not used.

    `watch` is called with the work in progress. Raise UsageError if no layout is possible, or if the model cannot take
    the loads.
    """
    shape = load_shape(query.model)
    for _, context, load in query.loads:
        check_positions(context, load, shape)
    records, notes = _select_records(query, known)
    times, unused = _select_step_times(query, known)
    layouts: list[Layout] = []
    for gpus in query.gpus:
        found = _list_valid_layouts(query, gpus)
        if not found:
            raise UsageError(_explain_no_layout(query, gpus))
        layouts += found
    check_used(query.typed, ((x.tp, x.dp, x.dcp) for x in layouts), functools.partial(_suggest_gpus, query))
    bands = measure_bands(known.runs)
    drafts = [_start_choice(query, times, steps, records, bands, layouts, watch, *load) for load in query.loads]
    _add_estimates(query, drafts, steps, watch)
    choices = _split_gains(query, [_finish_choice(query, draft, steps) for draft in drafts], steps, watch)
    if not any(choice.best for choice in choices):
        instead = suggestions.suggest_options(query, lambda other: _has_answer(other, steps))
        choices = [dataclasses.replace(choice, instead=instead) for choice in choices]
    return choices, [*notes, *unused, *_list_unused_runs(records, choices)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draft:
    """Hold what is known of the layouts of one load, by layout, while it is collected."""

    concurrency: int
    context: int
    load: Load | None
    best: dict[str, Forecast] = dataclasses.field(default_factory=dict)
    pending: dict[str, Point] = dataclasses.field(default_factory=dict)  # to be estimated
    points: dict[str, Point] = dataclasses.field(default_factory=dict)  # an example of each layout
    refused: dict[str, Refusal] = dataclasses.field(default_factory=dict)
    short: dict[str, str] = dataclasses.field(default_factory=dict)
    runs: list[Forecast] = dataclasses.field(default_factory=list)
    capacities: dict[str, Capacity] = dataclasses.field(default_factory=dict)


def _start_choice(
    query: Query,
    times: Mapping[str, StepTimes],
    steps: Steps,
    records: Sequence[tuple[Record, str]],
    bands: Mapping[str, float],
    layouts: Sequence[Layout],
    watch: Watch,
    concurrency: int,
    context: int,
    load: Load | None,
) -> _Draft:
    """Return the records and replays of a load, and the layouts that are left to be estimated, one for each placement of experts."""
    draft = _Draft(concurrency=concurrency, context=context, load=load)
    shape, probe = load_shape(query.model), _make_probe(query)
    placed = [(layout, ep) for layout in layouts for ep in _list_placements(query, layout)]
    for layout, ep in placed:
        points = [p for p in _make_points(query, layout, concurrency, context, load) if p.ep == ep]
        who = points[0].instance_name
        watch(f"{_format_load_name(concurrency, context, load)}: {who}")

        def report_progress(served: str, who: str = who) -> None:
            watch(f"{who}, {served}")

        draft.points[who] = points[0]
        draft.capacities[who] = measure_capacity(points[0], query.settings, shape, probe)
        if refusal := find_refusal(query, points[0]):
            draft.refused[who] = refusal
            continue
        found = [
            forecast.from_record(r, run, bands.get(get_origin(r)))
            for r, run in records
            if _is_same_load(r.point, points[0], server=is_server_origin(get_origin(r)))
            and _is_placed_alike(r.point.ep, points[0])
        ]
        replays = [_replay_point(query, points[0], *file, report_progress) for file in times.items()]
        found += [f for f in replays if isinstance(f, Forecast)]
        draft.runs.extend(found)
        if found:
            surest = min(SOURCES.index(f.source) for f in found)
            draft.best[who] = max((f for f in found if SOURCES.index(f.source) == surest), key=compute_tok_s_per_gpu)
            continue
        if too_short := [reason for reason in replays if isinstance(reason, str)]:
            draft.short[who] = too_short[-1]
        try:
            draft.pending[who] = _find_quickest(query, points, steps)
        except UsageError as e:
            draft.refused[who] = Refusal(OTHER, draft.short.pop(who, str(e)))
    return draft


def _add_estimates(query: Query, drafts: Sequence[_Draft], steps: Steps, watch: Watch) -> None:
    """Estimate the pending layouts of all loads."""

    def estimate(point: Point, watch: Watch) -> Forecast | str:
        try:
            return _estimate_point(query, point, steps, watch)
        except UsageError as e:
            return str(e)

    pending = [(draft, who, point) for draft in drafts for who, point in draft.pending.items()]
    results = estimate_points([point for _, _, point in pending], estimate, watch)
    for (draft, who, _), found in zip(pending, results, strict=True):
        if isinstance(found, str):
            draft.refused[who] = Refusal(OTHER, draft.short.pop(who, found))
        else:
            draft.best[who] = found


def _finish_choice(query: Query, draft: _Draft, steps: Steps) -> Choice:
    """Return the choice with estimates corrected by records, in order."""
    best = {who: _drop_layers_held(query, f) for who, f in _apply_records(query, draft.best, steps).items()}
    misses = {f.label: missed for f in best.values() if (missed := f.list_missed(query.slo))}
    requests, unit, lengths = _format_load(draft.concurrency, draft.context, draft.load)
    return Choice(
        requests=requests,
        unit=unit,
        lengths=lengths,
        concurrency=draft.concurrency,
        forecasts=sorted(best.values(), key=lambda f: (bool(misses.get(f.label)), -compute_tok_s_per_gpu(f))),
        misses=misses,
        refused=draft.refused,
        refused_points={who: draft.points[who] for who in draft.refused},
        capacities=draft.capacities | {f.label: draft.capacities[who] for who, f in best.items()},
        short=draft.short,
        runs=draft.runs,
    )


def _split_gains(query: Query, choices: Sequence[Choice], steps: Steps, watch: Watch) -> list[Choice]:
    """Return the choices, each with the gain of its leading layout with DCP by cause, if the same layout without DCP fits."""
    pairs = {n: pair for n, choice in enumerate(choices) if (pair := choice.dcp_pair)}
    baselines = {f.point.get_key(): baseline.point for f, baseline in pairs.values()}

    def split(point: Point, _watch: Watch) -> GainSplit | None:
        both = (point, baselines[point.get_key()])
        shape, probe = load_shape(query.model), _make_probe(query)
        plans = {p.layout_name: plan_engine([p], query.settings, shape, probe) for p in both}
        try:
            return forecast.split_gain(*both, plans, query.machine, query.settings, steps.terms)
        except UsageError:
            return None

    gains = estimate_points([f.point for f, _ in pairs.values()], split, watch)
    of = dict(zip(pairs, gains, strict=True))
    return [dataclasses.replace(choice, gain=of.get(n)) for n, choice in enumerate(choices)]


def _is_placed_alike(ep: str, point: Point) -> bool:
    """Return whether a record with this placement of experts stands for a point.

    Without attention DP every placement does; with it, an unknown placement stands for tensor-parallel experts, the default of
    engines.
    """
    return point.dp == 1 or (ep == point.ep if ep in (MOE_TP, MOE_EP) else point.ep == MOE_TP)


def find_nearest(
    query: Query, choice: Choice, recommended: Forecast, exchanges: Sequence[str], steps: Steps
) -> Forecast | None:
    """Return the forecast of the same layout and load with the fastest of `exchanges` and no option of an exchange.

    A record takes precedence over an estimate, which is corrected by the records of the load. Return None if nothing is
    known about its steps.
    """
    point = recommended.point
    load = (point.concurrency, point.context, point.load)
    points = [_make_point(query, point.layout, exchange, point.ep, *load) for exchange in exchanges]
    names = {forecast.format_point(point) for point in points}
    if ran := [f for f in choice.runs if f.label in names]:
        return min(ran, key=lambda f: (SOURCES.index(f.source), -f.tok_s))
    try:
        found = _estimate_point(query, _find_quickest(query, points, steps), steps)
    except UsageError:
        return None
    others = {f.label: f for f in choice.forecasts if f.source != ESTIMATED}
    return _apply_records(query, others | {found.label: found}, steps)[found.label]


def _estimate_point(query: Query, point: Point, steps: Steps, watch: Watch = lambda _: None) -> Forecast:
    plan = plan_engine([point], query.settings, load_shape(query.model), _make_probe(query))
    return forecast.estimate_point(
        point, plan, query.machine, query.settings, steps, steps.terms, watch, micro_batches=query.micro_batches
    )


def _find_quickest(query: Query, points: Sequence[Point], steps: Steps) -> Point:
    """Return the point with the shortest decode step among a layout's exchanges and expert placements.

    Raise UsageError if nothing is known about any.
    """
    known: dict[float, Point] = {}
    reason = ""
    for point in points:
        try:
            estimator = forecast.Estimator(point, query.machine, steps.terms, query.micro_batches)
            known[estimator.estimate_ms(estimator.make_decode_rows(point.concurrency, point.context))] = point
        except UsageError as e:
            reason = str(e)
    if not known:
        raise UsageError(reason)
    return known[min(known)]


def _apply_records(query: Query, found: dict[str, Forecast], steps: Steps) -> dict[str, Forecast]:
    """Return the forecasts, with estimates times the geometric mean of records over their own estimates."""
    there = [f for f in found.values() if f.source != ESTIMATED]
    if not there or len(there) == len(found):
        return found
    ratios = []
    for f in there:
        try:
            ratios.append(f.tok_s / _estimate_point(query, f.point, steps).tok_s)
        except UsageError:
            continue
    if not ratios:
        return found
    factor = statistics.geometric_mean(ratios)
    return {who: forecast.apply_factor(f, factor) if f.source == ESTIMATED else f for who, f in found.items()}


def _format_load(concurrency: int, context: int, load: Load | None) -> tuple[str, str, str]:
    """Return the number or the rate of requests, its unit, and their lengths: `32`, `clients` and `4000 → 1500 tokens`."""
    plural = "" if concurrency == 1 else "s"
    if load is None:
        return str(concurrency), f"request{plural}", f"{context:,} tokens"
    lengths = f"{format_lengths(load.input_tokens)} → {format_lengths(load.output_tokens)} tokens"
    if load.arrival == CLOSED:
        return str(concurrency), f"client{plural}", lengths
    return f"{load.request_rate:g}", "req/s", lengths


def _format_load_name(concurrency: int, context: int, load: Load | None) -> str:
    """Return the name of a load, which is that of its choice."""
    requests, unit, lengths = _format_load(concurrency, context, load)
    return f"{requests} {unit} × {lengths}"


def _list_valid_layouts(query: Query, gpus: int) -> list[Layout]:
    """Return the layouts of this many GPUs that the model can take, in all stages that are compared."""
    shape = load_shape(query.model)
    stages = [(pp, pcp) for pp, pcp in query.stages if gpus % (pp * pcp) == 0]
    return [layout for pp, pcp in stages for layout in _list_stage_layouts(shape, gpus // (pp * pcp), pp, pcp)]


def _list_stage_layouts(shape: ModelShape, tp: int, pp: int, pcp: int) -> list[Layout]:
    """Return the layouts of `tp` ranks a stage that the model can take in one of the placements of experts that are compared.

    Replicas of attention DP share experts; a model without experts is served by several servers instead.
    """
    cut = list_valid_layouts(shape, tp, MOE_TP, pp, pcp)
    if not shape.experts:
        return [layout for layout in cut if layout.dp == 1]
    found = [*cut, *(x for x in list_valid_layouts(shape, tp, MOE_EP, pp, pcp) if x.dp > 1)]
    return sorted(set(found), key=lambda x: (x.dp, x.dcp))


def _suggest_gpus(query: Query, wanted: Callable[[Layout], bool]) -> str:
    """Return the smallest larger number of GPUs of a host on which the model has a layout with a property; empty if none has."""
    more = range(max(query.gpus) + 1, query.machine.gpus_per_host + 1)
    return next((f"--gpus {n}" for n in more if any(map(wanted, _list_valid_layouts(query, n)))), "")


def _explain_no_layout(query: Query, gpus: int) -> str:
    degrees = format_list([f"pp={pp},pcp={pcp}" for pp, pcp in query.stages], "or")
    staged = f" with --stages {degrees} (--gpus counts tp · pp · pcp)" if query.stages != NO_STAGES else ""
    problem = f"{query.model} cannot be placed on {format_count(gpus, 'GPU')}{staged}"
    able = [str(n) for n in range(1, query.machine.gpus_per_host + 1) if _list_valid_layouts(query, n)]
    if not able:
        return f"{problem}; use other degrees."
    return f"{problem}; within a host it can on {format_list(able, 'or')}, as in --gpus {able[-1]}."


def _list_placements(query: Query, layout: Layout) -> list[str]:
    """Return the placements of experts that are compared in a layout: tensor-parallel, and with attention DP expert parallel too."""
    found = []
    for ep in (MOE_TP, MOE_EP)[: 2 if layout.dp > 1 else 1]:
        with contextlib.suppress(LayoutError):
            placed = place_experts(ep, layout.spread.tp)
            layout.check_model(load_shape(query.model), placed)
            found.append(placed)
    return found


def _make_points(query: Query, layout: Layout, concurrency: int, context: int, load: Load | None) -> list[Point]:
    """Return the points of a layout under a load, one for each exchange and expert placement to compare."""
    exchanges = query.exchanges if layout.dcp > 1 else (NO_EXCHANGE,)
    if layout.spread.shared_kv > 1:
        exchanges = (PCP_EXCHANGE,)
    return [
        _make_point(query, layout, exchange, ep, concurrency, context, load)
        for exchange in exchanges
        for ep in _list_placements(query, layout)
    ]


def _make_point(
    query: Query, layout: Layout, exchange: str, ep: str, concurrency: int, context: int, load: Load | None
) -> Point:
    return Point(
        model=query.model,
        tp=layout.tp,
        dp=layout.dp,
        dcp=layout.dcp,
        pp=layout.pp,
        pcp=layout.pcp,
        ep=ep,
        workload="decode" if load is None else "serve",
        concurrency=concurrency,
        context=context,
        exchange=exchange,
        backend="flashinfer",
        dtype="bf16",
        weights_dtype=query.weights_dtype if query.weights_dtype != "bf16" else "",
        kv_dtype=query.kv_dtype if query.kv_dtype != "bf16" else "",
        page_size=64,
        routing=query.routing,
        mtp=query.mtp,
        acceptance=query.acceptance,
        load=load,
    )


def _make_probe(query: Query) -> Probe:
    return make_planned_probe(query.machine.gpu, query.machine.gpus_per_host)


def find_refusal(query: Query, point: Point) -> Refusal | None:
    """Return why a layout cannot run a load; None if it can. Without --cycled all layers and the KV have to fit."""
    shape, probe = load_shape(query.model), _make_probe(query)
    batch = find_batch_limit(point) if point.load is None else None
    if limit := find_kernel_limit(point, shape, probe):
        return Refusal(TOO_MANY if batch else OTHER, limit.format_for_recommend())
    if batch:
        return Refusal(TOO_MANY, batch[0])
    if not query.cycled:
        whole = measure_whole_model(point, query.settings, shape, probe)
        if whole.missing_bytes:
            one_request = point.load is not None and query.kv_memory is None
            return Refusal(NO_WHOLE_MODEL, _format_missing(whole, one_request=one_request))
    shortage = find_shortage(point, query.settings, shape, probe)
    return Refusal(LACKS_MEMORY, shortage.problem) if shortage else None


def _drop_layers_held(query: Query, found: Forecast) -> Forecast:
    """Return the forecast without its number of held layers if the whole model fits the query: its run had less memory."""
    if found.layers_held is None:
        return found
    whole = measure_whole_model(found.point, query.settings, load_shape(query.model), _make_probe(query))
    return found if whole.missing_bytes else dataclasses.replace(found, layers_held=None)


def _format_missing(whole: WholeModel, *, one_request: bool) -> str:
    """Return the memory that a whole model takes of each GPU, and by how much that exceeds a GPU."""
    weights = f"its weights take {whole.weight_bytes / GIB:,.1f} GiB"
    kv = f"{'the KV of its longest request' if one_request else 'its KV'} {whole.kv_bytes / GIB:,.1f} GiB"
    buffers = (
        f" in addition to {whole.buffer_bytes / GIB:,.1f} GiB for the buffers of a step" if whole.buffer_bytes else ""
    )
    return (
        f"{weights} and {kv} of each GPU, {whole.missing_bytes / GIB:,.1f} GiB more than the "
        f"{whole.available_bytes / GIB:,.1f} GiB for both{buffers}"
    )


def _has_answer(query: Query, steps: Steps) -> bool:
    """Return True if a layout fits under a load, and something is known about its steps."""
    for load, gpus in itertools.product(query.loads, query.gpus):
        for layout in _list_valid_layouts(query, gpus):
            for point in _make_points(query, layout, *load):
                if find_refusal(query, point):
                    continue
                with contextlib.suppress(UsageError):
                    _find_quickest(query, [point], steps)
                    return True
    return False


def _select_records(query: Query, known: Evidence) -> tuple[list[tuple[Record, str]], list[str]]:
    """Return the records that apply to this machine and model, and sentences on those left out."""
    found: list[tuple[Record, str]] = []
    left: dict[str, int] = {}
    held: set[str] = set()
    for run in known.runs:
        for record in run.records:
            if record.outcome != "ok":
                continue
            if why := _explain_exclusion(record, query):
                left[why] = left.get(why, 0) + 1
                continue
            found.append((record, run.name))
            if record.conditions and record.conditions.layers_held < record.conditions.layers:
                held.add(run.name)
    notes = [
        f"{run.name}: none of its points finished." for run in known.runs if all(r.outcome != "ok" for r in run.records)
    ]
    notes += [f"Left out: {format_count(n, 'record')} {why}." for why, n in left.items()]
    notes += [f"{name}: a part of the layers was held and used in turn." for name in sorted(held)]
    return found, notes


def _explain_exclusion(record: Record, query: Query) -> str:
    """Return why a record does not apply to the query; empty if it does."""
    point = record.point
    device = record.environment.device if record.environment else ""
    if is_functional(record):
        return _explain_cpu(query)
    server = is_server_origin(get_origin(record))
    layers = record.model_sizes.layers if record.model_sizes and server else 0
    if wrong := _describe_other_model(point.model, layers, query):
        return f"of {wrong}"
    if point.emulate and not _is_emulated_for(point, query):
        return f"emulated for {point.emulate}, not for {query.named}"
    if not point.emulate and not _is_card(device, query):
        return f"run on {device or 'an unnamed machine'}, not on {query.machine.card.device}"
    if point.load is not None and _get_pool_size(record) != query.kv_memory_bytes:
        return f"with {_format_gib(_get_pool_size(record))} of KV on each GPU, not {_format_gib(query.kv_memory_bytes)} (--kv-memory)"
    wrong = _describe_other_precision(point, query, server=server)
    return f"with {wrong}" if wrong else ""


def _explain_cpu(query: Query) -> str:
    """Return why CPU results are left out, and how to get results that count."""
    points = [_make_point(query, Layout(tp), NO_EXCHANGE, MOE_TP, *load) for tp in query.gpus for load in query.loads]
    return (
        f"run on a CPU, and CPU times do not count; on {query.machine.card.device} run "
        f"{format_measure_command(query, points, ['tp'])} -o runs/measured, and name runs/measured here"
    )


def format_measure_command(query: Query, points: Sequence[Point], axes: Sequence[str]) -> str:
    """Return the command that measures these points with all options of the query and the points' values of these layout axes."""
    served = points[0].load is not None
    by_default = [] if "dcp" in axes else [load_shape(query.model).compute_max_dcp(point.tp) for point in points]
    exchanged = max(by_default, default=1) > 1 or any(point.dcp > 1 for point in points)
    words = [
        f"serve --mode {REPLAY}" if served else "sweep",
        f"--model {shlex.quote(query.model)}",
        *(_format_values(name, points) for name in axes),
        *_list_load_words(points),
        *([f"--exchange {','.join(query.exchanges)}"] if exchanged else []),
        *_list_condition_words(query, served=served),
    ]
    return f"dcpbench {' '.join(words)}"


def format_ab_command(query: Query, one: Point, other: Point) -> str:
    """Return the command that measures two layouts in turn under the load that they share, on a machine with their GPUs."""
    served = one.load is not None
    conditions = _list_condition_words(query, served=served)
    both = [f"--model {shlex.quote(query.model)}", *_list_load_words([one]), *conditions]
    words = ["ab", *(["--workload", "serve"] if served else []), "--both", shlex.quote(" ".join(both))]
    for side, point in (("--a", one), ("--b", other)):
        names = [name for name in ("dp", "dcp") if getattr(point, name) > 1]
        own = [_format_values(name, [point]) for name in ("tp", *names)]
        own += [f"--ep {point.ep}"] if point.ep != place_experts(MOE_TP, point.tp) else []
        own += ["--dcp 1"] if point.dcp == 1 else [f"--exchange {point.exchange}"]
        words += [side, shlex.quote(" ".join(own))]
    return f"dcpbench {' '.join(words)}"


def format_url_command(one: Point, other: Point) -> str:
    """Return the command that measures each of two servers under the load that both points share."""
    return f"dcpbench {'sweep' if one.load is None else 'server'} --url URL {' '.join(_list_load_words([one, other], of_server=True))}"


def format_server_command(one: Point, other: Point) -> str:
    """Return the command that measures two layouts of vLLM under the load that they share, for models that only engines run.

    CHECKPOINT stands for the model: quantised weights are published under names of their own.
    """
    both = [one, other]
    command = "sweep" if one.load is None else "server"
    words = [
        f"{command} --engine vllm --model CHECKPOINT",
        *(_format_values(name, both) for name in ("tp", "dp", "dcp")),
    ]
    if len({point.ep for point in both}) > 1 or one.ep != place_experts(MOE_TP, one.tp):
        words.append("--ep " + ",".join(dict.fromkeys(point.ep for point in both)))
    exchanges = list(dict.fromkeys(point.exchange for point in both if point.dcp > 1))
    if exchanges:
        words.append(f"--exchange {','.join(exchanges)}")
    return f"dcpbench {' '.join([*words, *_list_load_words(both, of_server=True)])}"


def _format_values(name: str, of: Sequence[Point] | Sequence[Load]) -> str:
    """Return an option with the values that these have: `--dcp 1,8`, `--prefill chunk=8192`."""
    values = dict.fromkeys(str(getattr(one, name)) for one in of)
    return format_setting(name, (LIST if name in KEYS else ",").join(values))


def _list_load_words(points: Sequence[Point], *, of_server: bool = False) -> list[str]:
    """Return the options of the loads of these points; a server's chunks are its own."""
    loads = [p.load for p in points if p.load is not None]
    if not loads:
        return [_format_values(name, points) for name in ("concurrency", "context")]
    arrival = (
        _format_values("request_rate", loads) if loads[0].arrival == GAMMA else _format_values("concurrency", points)
    )
    lengths = [
        _format_values(name, loads) for name in ("input_tokens", "output_tokens", *(() if of_server else ("chunk",)))
    ]
    return [arrival, *lengths, f"--num-requests {max(load.requests for load in loads)}"]


def _list_condition_words(query: Query, *, served: bool) -> list[str]:
    """Return the options of precision, routing, KV memory and objectives."""
    words = [f"--weights-dtype {query.weights_dtype}", f"--kv-dtype {query.kv_dtype}"]
    if query.routing:
        words.append(f"--routing {shlex.quote(query.routing)}")
    if query.mtp:
        words.append(f"--mtp {query.mtp},acceptance={query.acceptance}")
    if query.kv_memory is not None:
        words.append(f"--kv-memory {shlex.quote(query.kv_memory)}")
    if served and query.slo:
        words.append(f"--slo {','.join(f'{name}={ms:g}' for name, ms in query.slo.items())}")
    return words


def _describe_other_model(model: str, layers: int, query: Query) -> str:
    """Return which model evidence is of, if it is not the requested one; empty if it is.

    Servers name models in their own way: `deepseek-ai/DeepSeek-V3`, or a folder with that name. `layers` is the number of layers
    that the server's model has, 0 if that is unknown.
    """
    if model != query.model and PurePath(model).name.lower() != query.model.lower():
        return f"{model}, not of {query.model}"
    all_layers = load_shape(query.model).layers
    return f"{layers} of the {all_layers} layers of {query.model}" if layers not in (0, all_layers) else ""


def _is_card(device: str, query: Query) -> bool:
    return query.machine.card.name in re.split(r"[\s-]", device)


def _describe_other_precision(point: Point, query: Query, *, server: bool = False) -> str:
    """Return how a point's precision differs from the query; empty if it does not, or if a server does not report it."""
    pairs = (
        ("--weights-dtype", point.weights_precision, query.weights_dtype),
        ("--kv-dtype", point.kv_precision, query.kv_dtype),
        ("--routing", point.routing or EVEN, query.routing or EVEN),
    )
    return format_list(
        [
            f"{option} {seen}, not {wanted}"
            for option, seen, wanted in pairs
            if seen != wanted and not (server and seen == UNKNOWN)
        ]
    )


def _list_unused_runs(records: Sequence[tuple[Record, str]], choices: Sequence[Choice]) -> list[str]:
    """Return a sentence on the loads of each run that contributed no figure."""
    used = {f.basis for choice in choices for f in choice.forecasts}
    loads: dict[str, dict[str, None]] = {}
    for record, run in records:
        if run not in used:
            point = record.point
            loads.setdefault(run, {})[_format_load_name(point.concurrency, point.context, point.load)] = None
    return [
        f"{run}: no figure is from it; the first of its {format_count(len(of), 'load')} is {next(iter(of))}."
        for run, of in loads.items()
    ]


def _is_emulated_for(point: Point, query: Query) -> bool:
    """Return True if an emulated point is for this machine; within a host, for its GPU."""
    inside = point.gpus <= query.machine.gpus_per_host
    return point.emulate in (query.machine.name, query.named) or (inside and point.emulate == query.machine.gpu)


def _get_pool_size(record: Record) -> int | None:
    """Return --kv-memory of the record's run."""
    found = record.measured_with.get("kv_memory_bytes")
    return found if isinstance(found, int) else None


def _format_gib(size: int | None) -> str:
    return "all that was left" if size is None else f"{size / GIB:g} GiB"


def _is_same_load(seen: Point, wanted: Point, *, server: bool = False) -> bool:
    """Return whether a record has these degrees under this load; placement of experts, exchange and kernels may differ, and of decode
    steps the acceptance, which does not change their times.

    Records of a server of another engine have its own chunk size, which is unknown.
    """
    same = (*DEGREES, *OUTER_DEGREES, "disaggregate", "concurrency", "mtp")
    if any(getattr(seen, name) != getattr(wanted, name) for name in same):
        return False
    if seen.load is not None and seen.acceptance != wanted.acceptance:
        return False
    if seen.load is None or wanted.load is None:
        return seen.load is wanted.load and seen.context == wanted.context
    names = ("input_tokens", "output_tokens", "arrival", "request_rate", "trace_sha256")
    same_chunk = seen.load.chunk == wanted.load.chunk or (server and seen.load.chunk == 0)
    return same_chunk and all(getattr(seen.load, name) == getattr(wanted.load, name) for name in names)


def _select_step_times(query: Query, known: Evidence) -> tuple[dict[str, StepTimes], list[str]]:
    """Return the files of step times that apply to the query, and sentences on the others and on limitations of these."""
    found, notes = {}, []
    for file, times in known.times.items():
        of = _add_engine_settings(times, _make_point(query, Layout(1), NO_EXCHANGE, MOE_TP, 1, 1, None))
        if why := _explain_unused_times(query, times, of):
            notes.append(f"Left out: {file}, {why}.")
            continue
        found[file] = times
        if UNKNOWN in (of.weights_precision, of.kv_precision):
            notes.append(
                f"{file}: the precision of the server's weights and KV cache is unknown; it is taken to be as requested."
            )
    return found, notes


def _explain_unused_times(query: Query, times: StepTimes, of: Point) -> str:
    """Return why step times do not apply to the query; empty if they do. `of` has the settings of their engine."""
    device, server = times.environment.device, times.engine is not None
    if device == CPU:
        return f"step times {_explain_cpu(query)}"
    if wrong := _describe_other_model(str(times.path["model"]), times.conditions.layers if server else 0, query):
        return f"step times of {wrong}"
    if of.emulate and not _is_emulated_for(of, query):
        return f"step times emulated for {of.emulate}, not for {query.named}"
    if not of.emulate and not _is_card(device, query):
        return f"step times of {device}, not of {query.machine.card.device}"
    if of.tp not in query.gpus:
        return f"step times of {format_count(of.tp, 'GPU')}, not of {format_list([str(n) for n in query.gpus], 'or')} (--gpus)"
    if wrong := _describe_other_precision(of, query, server=server):
        return f"step times of {wrong}"
    if not any(load for _, _, load in query.loads):
        return "step times, by which served loads are replayed; --context measures decode steps only"
    return ""


def _add_engine_settings(times: StepTimes, point: Point) -> Point:
    """Return the point with the settings of the engine that the step times were measured on."""
    own = {name: times.path[name] for name in Point.__struct_fields__ if name in times.path and name != "model"}
    return msgspec.structs.replace(point, **({"ep": "tp", "weights_dtype": "", "kv_dtype": ""} | own))


def _replay_point(
    query: Query, point: Point, file: str, times: StepTimes, watch: Watch = lambda _: None
) -> Forecast | str | None:
    """Return the forecast by a file of step times, or why its times do not reach the load; None if it has another layout."""
    if point.load is None or any(times.path[name] != getattr(point, name) for name in DEGREES):
        return None
    if any(times.path.get(name, 1) != getattr(point, name) for name in OUTER_DEGREES):
        return None
    if not _is_placed_alike(str(times.path.get("ep", MOE_EP)), point):
        return None
    load = msgspec.structs.replace(point.load, mode=REPLAY, prefill=str(times.path["prefill"]))
    of = msgspec.structs.replace(_add_engine_settings(times, point), load=load)
    try:
        own = times.engine is None
        plan = plan_engine([of], query.settings, load_shape(query.model), times.make_probe()) if own else None
        return forecast.replay_point(of, plan, times, query.settings, file, watch)
    except UsageError as e:
        return f"{file}: {e}"
