"""Workload `decode`: `concurrency` requests of a given context, one token each per step, measured in steady state.

Tokens and lengths are frozen while steps are timed: every sample is the same step, which writes and reads token number
`context` + 1 of each request and is routed to the same experts, in every layout and repeat. The plan is made once, its
host time is recorded apart.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.exchange.collectives import gather_objects, is_first, largest_error
from dcpbench.exchange.emulated import Tally
from dcpbench.measuring.gpu_state import GpuSampler, throttled, worst
from dcpbench.measuring.profiling import profile_cpu_step, profile_step
from dcpbench.measuring.timing import time_steps
from dcpbench.points import floors, memory
from dcpbench.points.machines import described
from dcpbench.points.wire import CHUNKS_HIGH, PROMPTS_APART, RANKS_HIGH, RANKS_LOW
from dcpbench.records import formulas
from dcpbench.records.record import Emulated, Floor, Kv, Record, Straggler
from dcpbench.syncs.recorded import WORST_SITES
from dcpbench.workloads.attention_error import attention_error, limit_of
from dcpbench.workloads.choice import choose
from dcpbench.workloads.point_facts import device_allocations, device_marks, honesty, marks, memory_in_use

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.engine.decode import Batch, DecodeEngine, Request
    from dcpbench.measuring.timing import Timing
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.record import Environment, Gpu, Phases, Rates, SyncSite
    from dcpbench.workloads.session import Session

TOKEN_STEP = 7919
"""A prime: neighbouring requests read different tokens and are routed to different experts."""
MOST_DRIFT = 0.01
MOST_IDLE = 0.03
MOST_GRAPH_ERROR = 1e-3
"""Limits above which a point gets a warning; reports/explain.py explains them."""
SLOW_PLAN, SLOW_PLAN_US, SLOW_CLOCK = 0.5, 100.0, 0.05
"""Thresholds for a straggler: relative and absolute (µs) excess of its plan time, and relative deficit of its clock."""
PLANS = 5
"""Plans timed for `host_plan_us`."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Result of the separate profiled pass; empty on ranks other than 0 and with --no-profile."""

    phases: Phases | None = None
    sync_sites: list[SyncSite] | None = None
    """Source lines at which the host waited, worst first; None without a GPU or a profiled pass."""


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
    rows = -(-point.concurrency // point.dp)
    mine = range(_share(point, engine.model.groups.dp.rank))
    requests = [_admit(engine, session, point, settings.seed, i) for i in mine]
    try:
        choice = choose(engine, point, lambda: engine.plan(requests, rows), lambda: tell("choose"))
        batch = engine.plan(requests, rows)
        if point.weights == "synthetic" and batch.router_inputs is None:
            batch.router_inputs = _router_inputs(session, batch, settings.seed)
        plans_us = _plan_times_us(engine, requests, rows)
        tell("check")
        # a rank without the others merges no valid attention output
        error = None if session.emulation else attention_error(engine, batch, requests, settings.seed)
        chosen = _chosen_experts(engine, batch)
        emulated = emulated_calls(session, point, batch)
        graph_error = None
        if device.type == "cuda":
            tell("capture")
            engine.capture(batch)
            graph_error = _graph_error(engine, batch)
        tell("measure")
        allocated = device_allocations(device)
        with GpuSampler(device) as sampler:
            timing = time_steps(lambda: engine.step(batch), device, settings, lambda: tell("measure"))
        allocated = device_allocations(device) - allocated
        states = gather_objects(sampler.state())
        gpu = worst(states)
        slow = straggler(plans_us, states) if device.type == "cuda" else None  # processes share CPUs
        profile = Profile()
        if settings.profile:
            tell("profile")
            profile = _profile(engine, batch)
        kv = Kv.of(session.plan, point.context + memory.HEADROOM_TOKENS, engine.allocator.fragmentation())
    finally:
        for request in requests:
            engine.release(request)
    sites = profile.sync_sites
    return Record(
        point=point,
        outcome="ok",
        marks=device_marks(point, device)
        + _timing_marks(timing, gpu)
        + _step_marks(profile, allocated, graph_error)
        + marks(l2_warm=session.plan.l2_warm)
        + marks(inaccurate=error is not None and not error <= limit_of(engine), emulated=emulated is not None)
        + marks(straggler=slow is not None),
        metrics=formulas.decode_metrics(
            timing.samples_ms,
            point.concurrency,
            point.tp,
            _unsure(emulated, device, statistics.median(timing.samples_ms)),
        ),
        phases=profile.phases,
        emulated=emulated,
        rates=rates,
        floor=step_floor(session, point, batch.size, chosen, rates),
        host_syncs_per_step=None if sites is None else sum(s.per_step for s in sites),
        sync_sites=(sites or [])[:WORST_SITES],
        allocations_per_step=allocated / len(timing.samples_ms) if device.type == "cuda" else None,
        host_plan_us=max(plans_us),
        straggler=slow or msgspec.UNSET,
        kv=kv,
        memory_peak_bytes=memory_in_use(device),
        honesty=honesty(
            session,
            graph_error=graph_error,
            attention_error=error,
            **_routed(chosen, session.shape.experts, point),
            graph_batch=batch.size,
            cuda_graph=batch.captured is not None,
        ),
        choice=choice,
        gpu=gpu,
        environment=environment,
    )


def _share(point: Point, dp_rank: int) -> int:
    """Return the requests of one replica, divided as evenly as possible."""
    return point.concurrency // point.dp + (dp_rank < point.concurrency % point.dp)


def _admit(engine: DecodeEngine, session: Session, point: Point, seed: int, index: int) -> Request:
    """Admit this replica's request number `index`; its token and KV are those of the same request in any other layout."""
    number = index * point.dp + engine.model.groups.dp.rank
    request = engine.admit(point.context + memory.HEADROOM_TOKENS)
    engine.fill(request, number, seed)
    engine.requests.set_tokens(request.slot, point.context, [(TOKEN_STEP * number) % session.shape.vocab])
    return request


def _router_inputs(session: Session, batch: Batch, seed: int) -> torch.Tensor:
    """Return rows of all replicas, in the order in which their tokens are gathered; rows past a replica's share are
    padding.

    They are made once per batch size, for every row of it: a smaller concurrency that is padded to the same size leaves
    rows at the end unused.
    """
    dp = session.point.dp
    numbers = [row * dp + replica for replica in range(dp) for row in range(batch.size)]
    return session.router_inputs(numbers, memory.all_layers(session.shape).moe, seed)


def straggler(plans_us: Sequence[float], states: Sequence[Gpu | None]) -> Straggler | None:
    """Return the rank with the largest relative deficit against the median of the others, in plan time or clock; None
    without one.

    `plans_us`: host time of a plan, by rank; `states`: NVML's data while steps were timed.
    """
    clocks = [s.sm_clock_mhz_min if s is not None else None for s in states]
    found = [_behind("plan", plans_us, least=SLOW_PLAN, at_least=SLOW_PLAN_US)]
    if None not in clocks:
        found.append(_behind("step", [float(c) for c in clocks if c is not None], least=SLOW_CLOCK, faster=True))
    return max(filter(None, found), key=lambda s: s.share, default=None)


def _behind(
    phase: str, values: Sequence[float], *, least: float, at_least: float = 0.0, faster: bool = False
) -> Straggler | None:
    """Return the slowest rank by these values, if it exceeds the median of the others by the share `least` and by
    `at_least`.
    """
    if len(values) == 1:
        return None
    rank = (min if faster else max)(range(len(values)), key=values.__getitem__)
    value, others = values[rank], statistics.median(v for r, v in enumerate(values) if r != rank)
    if not value or not others:
        return None
    share = (others / value if faster else value / others) - 1
    if share < least or abs(value - others) < at_least:
        return None
    return Straggler(rank=rank, phase=phase, share=share, value=value, others=others)


def _plan_times_us(engine: DecodeEngine, requests: list[Request], rows: int) -> list[float]:
    """Return the median plan time of each rank."""
    times = []
    for _ in range(PLANS):
        _synchronize(engine.device)
        start = time.perf_counter()
        engine.plan(requests, rows)
        _synchronize(engine.device)
        times.append((time.perf_counter() - start) * 1e6)
    return gather_objects(statistics.median(times))


def _graph_error(engine: DecodeEngine, batch: Batch) -> float:
    """Return the difference between the captured step and the eager one under the present plan; 0 if they are equal."""
    engine.run(batch)
    eager = _live_logits(batch)
    engine.step(batch)
    error = (_live_logits(batch) - eager).norm() / eager.norm()
    return largest_error(float(error))


def _live_logits(batch: Batch) -> torch.Tensor:
    """Return the last step's logits in fp64, with 0 for rows past the vocabulary, because their -inf has no difference."""
    assert batch.logits is not None
    wide = batch.logits.double()
    return wide.masked_fill(wide.isneginf(), 0.0)


def _chosen_experts(engine: DecodeEngine, batch: Batch) -> list[torch.Tensor]:
    """Return ids_Tk of each layer with experts, over the rows of all replicas, from one eager step; on the host."""
    model = engine.model
    model.chosen_experts = []
    engine.run(batch)
    chosen, model.chosen_experts = model.chosen_experts, None
    return [ids_Tk.cpu() for _, ids_Tk in chosen]


def emulated_calls(session: Session, point: Point, batch: Batch) -> Emulated | None:
    """Return the modelled calls of a step of an emulated rank, counted in one eager step."""
    emulation = session.emulation
    if emulation is None:
        return None
    emulation.tally = tally = Tally()
    session.engine.run(batch)
    machine = described(point.emulate)
    on_gpu = session.engine.device.type == "cuda"
    return Emulated(
        machine=machine.name,
        sha256=machine.sha256,
        measured=machine.wire_measured,
        calls=tally.calls,
        wire_us=tally.us,
        wire_low_us=tally.low_us,
        wire_high_us=tally.high_us,
        ranks_low=RANKS_LOW,
        ranks_high=RANKS_HIGH,
        prompts=tuple(machine.prompts) if on_gpu else (),
        chunks_low=PROMPTS_APART if on_gpu and machine.prompts else 0.0,
        chunks_high=(PROMPTS_APART if machine.prompts else CHUNKS_HIGH) if on_gpu else 0.0,
    )


def _unsure(emulated: Emulated | None, device: torch.device, step_ms: float) -> tuple[float, float]:
    """Return the shares by which a step may be shorter and longer than that of a rank alone; 0 on the CPU, without a
    wire model.
    """
    return formulas.forecast_error(emulated, step_ms * 1e3) if emulated and device.type == "cuda" else (0.0, 0.0)


def _routed(chosen: list[torch.Tensor], experts: int, point: Point) -> dict[str, float]:
    """Return the statistics of the routed experts in the form of Honesty; every rank sees all tokens of the layout."""
    if not chosen:
        return {"experts_hit": 0.0}
    counts = torch.stack([torch.bincount(ids_Tk.flatten(), minlength=experts) for ids_Tk in chosen])
    return {"experts_hit": float((counts > 0).double().mean()), **busiest(counts, point.ep_degree or 1)}


def busiest(rows_LE: torch.Tensor, ranks: int) -> dict[str, float]:
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


def step_floor(
    session: Session, point: Point, rows: int, chosen: list[torch.Tensor], rates: Rates | None
) -> Floor | None:
    """Return the floor of a point's step, in a graph with `rows` rows per replica: the work of its requests, without
    padding.

    None without rates, or without a required one.
    """
    if rates is None:
        return None
    sharding = floors.Sharding.of(point, session.shape)
    live = [replica * rows + i for replica in range(point.dp) for i in range(_share(point, replica))]
    step = floors.StepRows(
        decodes=(point.context + memory.HEADROOM_TOKENS,) * _share(point, 0),
        sampled=_share(point, 0),
        tokens=point.concurrency,
        routing=tuple(tuple(sharding.routed(ids_Tk[live].flatten().tolist())) for ids_Tk in chosen),
    )
    phase_us = floors.step_floors(sharding, step, rates.limits)
    if phase_us is None:
        return None
    return Floor(floor_ms=sum(phase_us.values()) / 1e3, phase_floor_us=phase_us, experts="routed")


def _profile(engine: DecodeEngine, batch: Batch) -> Profile:
    first = is_first()
    if engine.device.type != "cuda":
        return Profile(phases=profile_cpu_step(lambda: engine.step(batch), enabled=first))
    found = profile_step(
        lambda: engine.run(batch),
        lambda: engine.step(batch),
        enabled=first,
        agree=lambda mine: any(gather_objects(mine)),
    )
    return Profile(phases=found[0], sync_sites=found[1]) if found else Profile()


def _timing_marks(timing: Timing, gpu: Gpu | None) -> list[str]:
    return marks(
        noisy=timing.noisy, unsettled=timing.unsettled, drift=timing.drift > MOST_DRIFT, throttled=throttled(gpu)
    )


def _step_marks(profile: Profile, allocated: int, graph_error: float | None) -> list[str]:
    idle = profile.phases.idle_fraction if profile.phases and profile.sync_sites is not None else 0.0
    return marks(
        host_sync=bool(profile.sync_sites),
        allocates=allocated > 0,
        gpu_idle=idle > MOST_IDLE,
        graph_differs=graph_error is not None and not graph_error <= MOST_GRAPH_ERROR,
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
