"""Workload `decode`: `concurrency` requests of a given context, one token each per step, measured in steady state.

Tokens and lengths are frozen while steps are timed: every sample is the same step, which writes and reads token number
`context` + 1 of each request, with `--mtp N` also the N drafts behind it, and is routed to the same experts, in every layout
and repeat. The plan is made once, its
host time is recorded apart.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.exchange.emulated import Tally
from dcpbench.exchange.torch_collectives import gather_objects, is_first, reduce_max_error
from dcpbench.measuring.environment import get_gpu_uuid
from dcpbench.measuring.gpu_state import GpuSampler, is_throttled, merge_states
from dcpbench.measuring.profiling import profile_cpu_step, profile_step
from dcpbench.measuring.timing import measure_steps
from dcpbench.points import memory, roofline
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.comm_model import CHUNKS_HIGH, PROMPTS_APART, RANKS_HIGH, RANKS_LOW
from dcpbench.records import formulas
from dcpbench.records.model_sizes import read_model_sizes
from dcpbench.records.record import Emulated, Floor, Kv, Record, Straggler
from dcpbench.syncs.recorded import MAX_RECORD_SITES
from dcpbench.workloads.attention_error import compute_attention_error, get_limit
from dcpbench.workloads.choice import choose_fastest
from dcpbench.workloads.point_facts import (
    count_device_allocations,
    describe_weights,
    get_memory_in_use,
    list_device_warnings,
    list_warnings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.engine.decode_engine import Batch, DecodeEngine, Request
    from dcpbench.engine.synthetic import RouterInputs
    from dcpbench.measuring.timing import Timing
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import Environment, Gpu, Phases, Rates, SyncSite
    from dcpbench.workloads.session import Session

TOKEN_STEP = 7919  # a prime: neighbouring requests read different tokens and are routed to different experts
MAX_DRIFT = 0.01
MAX_IDLE_SHARE = 0.03
MAX_GRAPH_ERROR = 1e-3  # limits above which a point gets a warning; reports/explain.py explains them
SLOW_PLAN, SLOW_PLAN_US, SLOW_CLOCK = 0.5, 100.0, 0.05  # straggler: excess plan time (share, µs), clock deficit (share)
PLANS = 5  # plans timed for `host_plan_us`


@dataclasses.dataclass(frozen=True)
class Profile:
    """Result of the separate profiled pass; empty on ranks other than 0 and with --no-profile."""

    phases: Phases | None = None
    sync_sites: list[SyncSite] | None = None  # lines at which the host waited, worst first; None without GPU or profile


def run(
    session: Session,
    point: Point,
    settings: Settings,
    environment: Environment,
    *,
    rates: Rates | None = None,
    tell: Callable[[str], None],
) -> Record:
    """Measure one point on a built engine. Collective; every rank returns a record, rank 0's is complete.

    `rates` are the measured rates of the machine, from which the floor of the step is computed.
    """
    engine = session.engine
    device = engine.device
    padded = -(-point.concurrency // point.dp)
    mine = range(_split_requests(point, engine.model.groups.dp.rank))
    requests = [_add_request(engine, session, point, settings.seed, i) for i in mine]

    def plan() -> Batch:
        batch = engine.plan_step(requests, padded, point.mtp + 1)
        if session.shape.drafts:
            engine.plan_drafts(batch, requests, [point.context] * len(requests))
        return batch

    try:
        choice = choose_fastest(engine, point, plan, lambda: tell("choose"))
        batch = plan()
        if point.weights == "synthetic" and batch.router_inputs is None:
            for own in (batch, *(batch.draft_batches or ())):
                own.router_inputs = _make_router_inputs(session, own, settings.seed)
        plans_us = _measure_plan_times_us(engine, plan)
        tell("check")
        # a rank without the others merges no valid attention output
        error = None if session.emulation else compute_attention_error(engine, batch, requests, settings.seed)
        chosen = _collect_chosen_experts(engine, batch)
        emulated = count_emulated_calls(session, point, batch)
        graph_error = None
        if device.type == "cuda":
            tell("capture")
            engine.capture_step(batch)
            graph_error = _compute_graph_error(engine, batch)
        tell("measure")
        allocated = count_device_allocations(device)
        with GpuSampler(get_gpu_uuid(device)) as sampler:
            timing = measure_steps(lambda: engine.run_step(batch), device, settings, lambda: tell("measure"))
        allocated = count_device_allocations(device) - allocated
        states = gather_objects(sampler.get_state())
        gpu = merge_states(states)
        slow = find_straggler(plans_us, states) if device.type == "cuda" else None  # processes share CPUs
        profile = Profile()
        if settings.profile:
            tell("profile")
            profile = _run_profile(engine, batch)
        kv = Kv.from_plan(session.plan, _count_tokens(point), engine.allocator.compute_fragmentation())
    finally:
        for request in requests:
            engine.remove_request(request)
    sites = profile.sync_sites
    return Record(
        point=point,
        outcome="ok",
        warnings=list_device_warnings(point, device)
        + _list_timing_warnings(timing, gpu)
        + _list_step_warnings(profile, allocated, graph_error)
        + list_warnings(l2_warm=session.plan.l2_warm)
        + list_warnings(inaccurate=error is not None and not error <= get_limit(engine), emulated=emulated is not None)
        + list_warnings(straggler=slow is not None),
        metrics=formulas.compute_decode_metrics(
            timing.samples_ms,
            point.concurrency,
            point.tp,
            _estimate_uncertainty(emulated, device, statistics.median(timing.samples_ms)),
            point.tokens_per_step,
        ),
        phases=profile.phases,
        emulated=emulated,
        rates=rates,
        floor=compute_step_floor(session, point, batch.size, chosen, rates),
        host_syncs_per_step=None if sites is None else sum(s.per_step for s in sites),
        sync_sites=(sites or [])[:MAX_RECORD_SITES],
        allocations_per_step=allocated / len(timing.samples_ms) if device.type == "cuda" else None,
        host_plan_us=max(plans_us),
        straggler=slow or msgspec.UNSET,
        kv=kv,
        memory_peak_bytes=get_memory_in_use(device),
        conditions=describe_weights(
            session,
            graph_error=graph_error,
            attention_error=error,
            **_summarize_routing(chosen, session.shape.experts, point),
            graph_batch=batch.size,
            cuda_graph=batch.captured is not None,
        ),
        choice=choice,
        gpu=gpu,
        environment=environment,
        model_sizes=read_model_sizes(point.model),
    )


def _split_requests(point: Point, dp_rank: int) -> int:
    """Return the requests of one replica, divided as evenly as possible."""
    return point.concurrency // point.dp + (dp_rank < point.concurrency % point.dp)


def _count_tokens(point: Point) -> int:
    """Return the tokens of a request, with those that the step writes."""
    return point.context + point.mtp + memory.HEADROOM_TOKENS


def _add_request(engine: DecodeEngine, session: Session, point: Point, seed: int, index: int) -> Request:
    """Admit this replica's request number `index`; its tokens and KV are those of the same request in any other layout."""
    number = index * point.dp + engine.model.groups.dp.rank
    request = engine.add_request(_count_tokens(point))
    engine.write_random_kv(request, number, seed)
    first = number * (point.mtp + 1)
    tokens = [TOKEN_STEP * (first + i) % session.shape.vocab for i in range(point.mtp + 1)]
    engine.request_pool.set_tokens(request.slot, point.context, tokens)
    return request


def _make_router_inputs(session: Session, batch: Batch, seed: int) -> RouterInputs:
    """Return rows of all replicas, in the order in which their tokens are gathered; rows past a replica's share are
    padding.

    They are made once per batch, for every row of it: a smaller concurrency that is padded to the same size leaves
    rows at the end unused.
    """
    dp, length = session.point.dp, batch.query_length
    requests = [row * dp + replica for replica in range(dp) for row in range(batch.num_requests)]
    numbers = [request * length + i for request in requests for i in range(length)]
    return session.make_router_inputs(numbers, memory.count_all_layers(session.shape).moe, seed)


def find_straggler(plans_us: Sequence[float], states: Sequence[Gpu | None]) -> Straggler | None:
    """Return the rank with the largest relative deficit against the median of the others, in plan time or clock; None
    without one.

    `plans_us`: host time of a plan, by rank; `states`: NVML's data while steps were timed.
    """
    clocks = [s.sm_clock_mhz_min if s is not None else None for s in states]
    found = [_find_slowest("plan", plans_us, min_share=SLOW_PLAN, min_excess=SLOW_PLAN_US)]
    if None not in clocks:
        found.append(
            _find_slowest("step", [float(c) for c in clocks if c is not None], min_share=SLOW_CLOCK, faster=True)
        )
    return max(filter(None, found), key=lambda s: s.share, default=None)


def _find_slowest(
    phase: str, values: Sequence[float], *, min_share: float, min_excess: float = 0.0, faster: bool = False
) -> Straggler | None:
    """Return the slowest rank by these values, if it exceeds the median of the others by the share `min_share` and by
    `min_excess`.
    """
    if len(values) == 1:
        return None
    rank = (min if faster else max)(range(len(values)), key=values.__getitem__)
    value, others = values[rank], statistics.median(v for r, v in enumerate(values) if r != rank)
    if not value or not others:
        return None
    share = (others / value if faster else value / others) - 1
    if share < min_share or abs(value - others) < min_excess:
        return None
    return Straggler(rank=rank, phase=phase, share=share, value=value, others=others)


def _measure_plan_times_us(engine: DecodeEngine, plan: Callable[[], Batch]) -> list[float]:
    """Return the median plan time of each rank."""
    times = []
    for _ in range(PLANS):
        _sync_device(engine.device)
        start = time.perf_counter()
        plan()
        _sync_device(engine.device)
        times.append((time.perf_counter() - start) * 1e6)
    return gather_objects(statistics.median(times))


def _compute_graph_error(engine: DecodeEngine, batch: Batch) -> float:
    """Return the difference between the captured step and the eager one under the present plan; 0 if they are equal."""
    engine.run_eager(batch)
    eager = _get_live_logits(batch)
    engine.run_step(batch)
    error = (_get_live_logits(batch) - eager).norm() / eager.norm()
    return reduce_max_error(float(error))


def _get_live_logits(batch: Batch) -> torch.Tensor:
    """Return the last step's logits in fp64, with 0 for rows past the vocabulary, because their -inf has no difference."""
    assert batch.logits is not None
    wide = batch.logits.double()
    return wide.masked_fill(wide.isneginf(), 0.0)


def _collect_chosen_experts(engine: DecodeEngine, batch: Batch) -> list[torch.Tensor]:
    """Return ids_Tk of each layer with experts, over the rows of all replicas, from one eager step; on the host.

    The layer that drafts tokens, which runs behind the others over other rows, is left out.
    """
    model = engine.model
    layers = model.shape.layers - model.shape.first_k_dense_replace
    model.chosen_experts = []
    engine.run_eager(batch)
    chosen, model.chosen_experts = model.chosen_experts, None
    return [ids_Tk.cpu() for _, ids_Tk in chosen[:layers]]


def count_emulated_calls(session: Session, point: Point, batch: Batch) -> Emulated | None:
    """Return the modelled calls of a step of an emulated rank, counted in one eager step."""
    emulation = session.emulation
    if emulation is None:
        return None
    emulation.tally = tally = Tally()
    session.engine.run_eager(batch)
    machine = load_machine(point.emulate)
    on_gpu = session.engine.device.type == "cuda"
    return Emulated(
        machine=machine.name,
        sha256=machine.sha256,
        measured=machine.comm_source,
        calls=tally.calls,
        comm_us=tally.us,
        comm_low_us=tally.low_us,
        comm_high_us=tally.high_us,
        ranks_low=RANKS_LOW,
        ranks_high=RANKS_HIGH,
        prompts=tuple(machine.prompts) if on_gpu else (),
        chunks_low=PROMPTS_APART if on_gpu and machine.prompts else 0.0,
        chunks_high=(PROMPTS_APART if machine.prompts else CHUNKS_HIGH) if on_gpu else 0.0,
    )


def _estimate_uncertainty(emulated: Emulated | None, device: torch.device, step_ms: float) -> tuple[float, float]:
    """Return the shares by which a step may be shorter and longer than that of a rank alone; 0 on the CPU, without a
    communication model.
    """
    return (
        formulas.compute_forecast_error(emulated, step_ms * 1e3) if emulated and device.type == "cuda" else (0.0, 0.0)
    )


def _summarize_routing(chosen: list[torch.Tensor], experts: int, point: Point) -> dict[str, float]:
    """Return the statistics of the routed experts as fields of Conditions; every rank sees all tokens of the layout."""
    if not chosen:
        return {"experts_hit": 0.0}
    counts = torch.stack([torch.bincount(ids_Tk.flatten(), minlength=experts) for ids_Tk in chosen])
    return {"experts_hit": float((counts > 0).double().mean()), **summarize_busiest_rank(counts, point.ep_degree or 1)}


def summarize_busiest_rank(rows_LE: torch.Tensor, ranks: int) -> dict[str, float]:
    """Return the experts hit, and their rows, of each layer's busiest rank over the mean of its ranks, averaged over
    layers.

    rows_LE: rows of each expert; experts are assigned to `ranks` in contiguous runs; 1 rank with tensor-parallel
    experts.
    """
    ranked_LRe = rows_LE.unflatten(1, (ranks, -1))
    found = {
        "busiest_rank_experts": (ranked_LRe > 0).double().sum(-1),
        "busiest_rank_rows": ranked_LRe.double().sum(-1),
    }
    return {name: float((of_LR.amax(-1) / of_LR.mean(-1)).mean()) for name, of_LR in found.items()}


def compute_step_floor(
    session: Session, point: Point, rows: int, chosen: list[torch.Tensor], rates: Rates | None
) -> Floor | None:
    """Return the floor of a point's step, in a graph with `rows` rows per replica: the work of its requests, without
    padding, and of the passes that draft tokens.

    None without rates, or without a required one.
    """
    if rates is None:
        return None
    sharding, queries = roofline.Sharding.from_point(point, session.shape), point.mtp + 1
    live = [replica * rows + i for replica in range(point.dp) for i in range(_split_requests(point, replica) * queries)]
    step = roofline.StepRows(
        decodes=(_count_tokens(point),) * _split_requests(point, 0),
        queries=queries,
        sampled=_split_requests(point, 0) * queries,
        tokens=point.concurrency * queries,
        routing=tuple(tuple(sharding.count_expert_loads(ids_Tk[live].flatten().tolist())) for ids_Tk in chosen),
    )
    parts = [(sharding, step)]
    if session.shape.drafts and (layer := sharding.make_draft_layer()) is not None:
        parts += [(layer, each) for each in step.make_draft_passes()]
    phase_us: dict[str, float] = {}
    for part in parts:
        found = roofline.compute_step_floors(*part, rates.limits)
        if found is None:
            return None
        phase_us = {name: phase_us.get(name, 0.0) + found.get(name, 0.0) for name in {**phase_us, **found}}
    return Floor(floor_ms=sum(phase_us.values()) / 1e3, phase_floor_us=phase_us, experts="routed")


def _run_profile(engine: DecodeEngine, batch: Batch) -> Profile:
    first = is_first()
    if engine.device.type != "cuda":
        return Profile(phases=profile_cpu_step(lambda: engine.run_step(batch), enabled=first))
    found = profile_step(
        lambda: engine.run_eager(batch),
        lambda: engine.run_step(batch),
        enabled=first,
        agree=lambda mine: any(gather_objects(mine)),
    )
    return Profile(phases=found[0], sync_sites=found[1]) if found else Profile()


def _list_timing_warnings(timing: Timing, gpu: Gpu | None) -> list[str]:
    return list_warnings(
        noisy=timing.noisy, unsettled=timing.unsettled, drift=timing.drift > MAX_DRIFT, throttled=is_throttled(gpu)
    )


def _list_step_warnings(profile: Profile, allocated: int, graph_error: float | None) -> list[str]:
    idle = profile.phases.idle_fraction if profile.phases and profile.sync_sites is not None else 0.0
    return list_warnings(
        host_sync=bool(profile.sync_sites),
        allocates=allocated > 0,
        gpu_idle=idle > MAX_IDLE_SHARE,
        graph_differs=graph_error is not None and not graph_error <= MAX_GRAPH_ERROR,
    )


def _sync_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
