"""A SweepSpec as the grid of points that can run, and those that cannot, each with its reason. No torch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import msgspec

from dcpbench import memory
from dcpbench.budget import (
    CPU_BYTES,
    ITEMSIZE,
    bounded_by,  # noqa: F401 -- worker.py finds it here
    kv_pages,
    memory_plan,
    most_pages,
    pages_needed,
    same_engine,  # noqa: F401 -- worker.py finds it here
)
from dcpbench.errors import CapacityError, DcpbenchError, LayoutError, MissingPackageError, UsageError
from dcpbench.layout import Layout, valid_layouts
from dcpbench.memory import GIB
from dcpbench.records import Point, Record
from dcpbench.shapes import ModelShape, load_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.jobs import Probe
    from dcpbench.spec import SweepSpec

MOST_REASONS = 3
"""Reasons that an error message repeats before it points to --dry-run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of the grid: it can run (`plan`), or it cannot (`error`)."""

    point: Point
    added: bool = False
    """A baseline that nobody typed."""
    plan: memory.Plan | None = None
    error: DcpbenchError | None = None

    def rejected(self) -> Record:
        """The record of a point that cannot run."""
        return Record(point=self.point, outcome="rejected", reason=str(self.error))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What points are checked against."""

    probe: Probe
    nnodes: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all machines; every machine is taken to have as many as this one."""
        return self.probe.count * self.nnodes


def expand(spec: SweepSpec, probe: Probe, nnodes: int = 1) -> list[Candidate]:
    """Every point of the grid with its baseline, in the order in which they run: neighbours share an engine."""
    machine = Machine(probe=probe, nnodes=nnodes)
    shapes = {model: load_shape(model) for model in spec.model}
    typed = {point.key(): _judge(point, spec, shapes[point.model], machine) for point in _grid(spec)}
    added = {}
    if spec.baseline:
        for found in typed.values():
            point = _baseline(found.point)
            if found.error is None and point.key() not in typed and point.key() not in added:
                judged = _judge(point, spec, shapes[point.model], machine)
                added[point.key()] = dataclasses.replace(judged, added=True)
    order = sorted([*typed.values(), *added.values()], key=lambda c: _order(c.point, spec))
    return [_with_pool(c, order, spec, shapes[c.point.model], machine) for c in order]


def expand_layouts(layouts: Sequence[Layout], spec: SweepSpec, probe: Probe) -> list[Candidate]:
    """The same for the given layouts instead of every combination of tp, dp and dcp, and without baselines."""
    found = {}
    for x in layouts:
        one = dataclasses.replace(spec, tp=(x.tp,), dp=(x.dp,), dcp=(x.dcp,), baseline=False)
        found.update({c.point.key(): c for c in expand(one, probe)})
    return sorted(found.values(), key=lambda c: _order(c.point, spec))


def check_any(candidates: Sequence[Candidate]) -> None:
    """Raise the typed points' own error when none of them can run: a baseline alone is not what was asked for."""
    typed = [c for c in candidates if not c.added]
    if any(c.error is None for c in typed):
        return
    reasons = list(dict.fromkeys(str(c.error) for c in typed))
    more = f"\n({len(reasons) - MOST_REASONS} more; see them all with --dry-run)" if len(reasons) > MOST_REASONS else ""
    raise type(typed[0].error)("\n".join(reasons[:MOST_REASONS]) + more)  # type: ignore[misc]


def layout_name(point: Point) -> str:
    """`tp8·dcp8`; also for degrees that do not nest."""
    try:
        return str(point.layout)
    except LayoutError:
        return f"tp{point.tp}·dp{point.dp}·dcp{point.dcp}"


def point_name(point: Point) -> str:
    """One point in a line: `tiny tp8·dcp8 reference ag_rs, 8 × 100 tokens`."""
    exchange = f" {point.exchange}" if point.dcp > 1 else ""
    repeat = f", repeat {point.repeat}" if point.repeat else ""
    load = f"{point.concurrency} × {point.context:,} tokens"
    return f"{point.model} {layout_name(point)} {point.backend}{exchange}, {load}{repeat}"


def table(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    """One row a point for --dry-run: the layout in our and vLLM's words, the load, memory per GPU, or the reason."""
    rows: list[dict[str, object]] = []
    for c in candidates:
        p, plan = c.point, c.plan
        rows.append({
            "model": p.model,
            "layout": layout_name(p),
            "vllm_layout": p.layout.vllm_name() if c.error is None else None,
            "tp": p.tp, "dp": p.dp, "dcp": p.dcp,
            "backend": p.backend, "exchange": p.exchange,
            "concurrency": p.concurrency, "context": p.context, "repeat": p.repeat,
            "added": c.added,
            "kv_pool_bytes": plan.kv_bytes if plan else None,
            "weights_held_bytes": plan.weight_bytes if plan else None,
            "layers_held": plan.layers_held if plan else None,
            "layers": plan.layers if plan else None,
            "reason": str(c.error) if c.error else None,
        })  # fmt: skip
    return rows


def _grid(spec: SweepSpec) -> Iterable[Point]:
    loads = itertools.product(spec.model, spec.backend, spec.exchange, spec.concurrency, spec.context)
    axes = itertools.product(range(spec.repeats), spec.tp, spec.dp, loads)
    for repeat, tp, dp, (model, backend, exchange, concurrency, context) in axes:
        for dcp in spec.dcp or (max(tp // dp, 1),):
            yield Point(
                model=model, tp=tp, dp=dp, dcp=dcp, concurrency=concurrency, context=context,
                exchange=exchange if dcp > 1 else "none", backend=backend, dtype=spec.dtype,
                page_size=spec.page_size, interleave=spec.interleave, weights=spec.weights, repeat=repeat,
            )  # fmt: skip


def _baseline(point: Point) -> Point:
    return msgspec.structs.replace(point, dp=1, dcp=1, exchange="none")


def _order(point: Point, spec: SweepSpec) -> tuple[object, ...]:
    p = point
    place = spec.model.index(p.model)
    return (p.repeat, p.tp, place, p.dp, p.dcp, p.backend, p.exchange, p.concurrency, p.context)


def _judge(point: Point, spec: SweepSpec, shape: ModelShape, machine: Machine) -> Candidate:
    try:
        if machine.probe.device == "cpu":
            _check_cpu(point, shape, machine)
        point.layout.check_model(shape)
        _check_ranks(point, shape, machine)
        _check_backend(point, shape, machine.probe)
        if point.context + memory.HEADROOM_TOKENS > shape.max_position:
            raise UsageError(
                f"--context {point.context} and one new token pass {shape.name}'s {shape.max_position} positions; "
                f"--context can be up to {shape.max_position - memory.HEADROOM_TOKENS}."
            )
        _check_memory(point, spec, shape, machine.probe)
    except DcpbenchError as e:
        return Candidate(point=point, error=e)
    return Candidate(point=point)


def _with_pool(
    found: Candidate, order: Sequence[Candidate], spec: SweepSpec, shape: ModelShape, machine: Machine
) -> Candidate:
    if found.error is not None:
        return found
    pages = kv_pages(found.point, (c.point for c in order if c.error is None), spec.settings, shape, machine.probe)
    return dataclasses.replace(found, plan=memory_plan(found.point, pages, shape, machine.probe))


def _check_cpu(point: Point, shape: ModelShape, machine: Machine) -> None:
    """A full-size model on a machine without GPUs is named first: no other advice would help."""
    moe = shape.layers - shape.first_dense
    whole = memory.weight_bytes(shape, Layout(tp=1), ITEMSIZE[point.dtype], shape.first_dense, moe)
    if whole > CPU_BYTES:
        raise CapacityError(
            f"--model {point.model} has about {whole / GIB:,.0f} GiB of {point.dtype} weights and needs GPUs; none are "
            f"{'used with --device cpu' if machine.probe.count else 'visible'} (`dcpbench env` says what is). "
            "For a functional run on the CPU type: dcpbench sweep --model tiny --tp 8 --dcp 8"
        )


def _check_ranks(point: Point, shape: ModelShape, machine: Machine) -> None:
    if point.tp % machine.nnodes:
        raise LayoutError(f"--tp {point.tp} does not divide over --nnodes {machine.nnodes}; use a multiple of it.")
    if machine.probe.device == "cpu" or point.tp <= machine.gpus:
        return
    nodes = -(-point.tp // machine.probe.count)
    raise CapacityError(
        f"--tp {point.tp} needs {point.tp} GPUs and there are {machine.gpus} ({machine.probe.name}). "
        f"Type instead: {_smaller(point, shape, machine.gpus)} "
        f"(or run it on {nodes} such machines with --nnodes {nodes}; see dcpbench sweep --help)"
    )


def _smaller(point: Point, shape: ModelShape, gpus: int) -> str:
    """The command for the largest layout of the same kind that these GPUs can hold."""
    for tp in range(gpus, 0, -1):
        layouts = [x for x in valid_layouts(shape, tp) if x.dp <= point.dp and x.dcp <= point.dcp]
        if layouts:
            best = max(layouts, key=lambda x: (x.dp == point.dp, x.dcp))
            dp = f" --dp {best.dp}" if best.dp > 1 else ""
            return f"dcpbench sweep --model {point.model} --tp {best.tp}{dp} --dcp {best.dcp}"
    return "dcpbench sweep --device cpu --model tiny --tp 8 --dcp 8"


def _check_backend(point: Point, shape: ModelShape, probe: Probe) -> None:
    if point.backend != "flashinfer":
        return
    if probe.device == "cpu":
        raise UsageError("--backend flashinfer needs a GPU; on the CPU use --backend reference or --backend triton.")
    if (shape.latent, shape.rope) != (512, 64):
        raise UsageError(
            f"--backend flashinfer reads KV rows of 512 + 64 numbers and {shape.name} has {shape.latent} + "
            f"{shape.rope}; use --backend triton."
        )
    if point.dtype not in ("bf16", "fp16"):
        raise UsageError(
            f"--backend flashinfer runs in bf16 and fp16, not {point.dtype}; use --dtype bf16 or --backend triton."
        )
    if not probe.packages.get("flashinfer"):
        raise MissingPackageError(
            "--backend flashinfer: FlashInfer cannot be imported; pip install 'dcpbench[flashinfer]', "
            "or use --backend triton."
        )


def _check_memory(point: Point, spec: SweepSpec, shape: ModelShape, probe: Probe) -> None:
    need = pages_needed(point)
    settings = spec.settings
    fixed = settings.kv_memory_bytes is not None
    pool = kv_pages(point, [point], settings, shape, probe)
    try:
        plan = memory_plan(point, pool, shape, probe)
    except CapacityError as e:
        if fixed:
            room = most_pages(point, shape, probe) * memory.page_bytes(shape, point.page_size, ITEMSIZE[point.dtype])
            raise CapacityError(f"{e}. --kv-memory can be up to {int(room / GIB * 10) / 10:.1f}GiB here.") from e
        raise CapacityError(f"{e}. {_what_fits(point, spec, shape, probe)}") from e
    if need > pool:
        missing = (need - pool) * memory.page_bytes(shape, point.page_size, ITEMSIZE[point.dtype])
        raise CapacityError(
            f"{point.layout}: --kv-memory holds {plan.kv_bytes / GIB:.1f} GiB of KV cache per GPU, "
            f"{missing / GIB:.1f} GiB less than {point.concurrency} requests of {point.context} tokens need. "
            f"{_what_fits(point, spec, shape, probe)}"
        )


def _what_fits(point: Point, spec: SweepSpec, shape: ModelShape, probe: Probe) -> str:
    """The largest concurrency that fits here, and the smallest larger dcp that takes the point as it is."""
    pool = most_pages(point, shape, probe)
    if spec.settings.kv_memory_bytes is not None:
        pool = min(pool, kv_pages(point, [point], spec.settings, shape, probe))
    one = memory.pages_for(point.context + memory.HEADROOM_TOKENS, point.layout, point.page_size)
    most = max((pool - memory.PAGES_OF_PADDING) // one, 0) * point.dp
    advice = (
        f"At --context {point.context} the largest --concurrency that fits is {most}."
        if most
        else f"Not even one request of {point.context} tokens fits."
    )
    for layout in valid_layouts(shape, point.tp):
        if layout.dp != point.dp or layout.dcp <= point.dcp:
            continue
        wider = msgspec.structs.replace(point, dcp=layout.dcp)
        pages = kv_pages(wider, [wider], spec.settings, shape, probe)
        try:
            memory_plan(wider, pages, shape, probe)
        except CapacityError:
            continue
        if pages_needed(wider) <= pages:
            return f"{advice} With --dcp {layout.dcp} it fits."
    return advice
