"""Whether a point can run on this machine and, where it cannot, what to type instead. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import CapacityError, LayoutError, MissingPackageError, UsageError, how_to_install
from dcpbench.plan.judge_serve import check_serve, check_serve_memory
from dcpbench.points import memory
from dcpbench.points.batches import GRAPH_BATCHES
from dcpbench.points.budget import CPU_BYTES, ITEMSIZE, kv_pages, memory_plan, most_pages, pages_needed
from dcpbench.points.layout import Layout, valid_layouts
from dcpbench.points.memory import GIB
from dcpbench.points.names import AUTO, EXCHANGES, NO_EXCHANGE, OPTIONS, flag
from dcpbench.points.sizes import size_text

if TYPE_CHECKING:
    from dcpbench.points.machine import Probe
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.points.shapes import ModelShape

SMALLEST_TILE = 16
"""Side of the smallest product that the tensor cores take."""
SYMMETRIC = "symm"
"""Exchange and all-reduce that work inside one machine."""
_CPU_VERIFY = "dcpbench verify --device cpu --backend reference can take it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What points are checked against."""

    probe: Probe
    nnodes: int = 1
    timed: bool = True
    """Whether points are measured (`sweep`), on a GPU from CUDA graphs, or only compared (`verify`)."""

    @property
    def gpus(self) -> int:
        """GPUs of all machines; every machine is taken to have as many as this one."""
        return self.probe.count * self.nnodes


def check(point: Point, settings: Settings, shape: ModelShape, machine: Machine) -> None:
    """Raise an error that says what to type instead, unless the point can run."""
    probe = machine.probe
    if probe.device == "cpu":
        _check_cpu(point, shape, machine)
    point.layout.check_model(shape)
    _check_ranks(point, shape, machine)
    if probe.device == "cuda" and machine.timed:
        _check_dtype(point)
    _check_auto(point, machine)
    _check_backend(point, shape, machine)
    _check_exchange(point, machine)
    if probe.device == "cuda":
        _check_gpu_kernels(point, shape)
    if point.load:
        check_serve(point, point.load, settings, shape, probe)
        check_serve_memory(point, settings, shape, probe)
        return
    _check_concurrency(point)
    if point.context + memory.HEADROOM_TOKENS > shape.max_position:
        raise UsageError(
            f"--context {point.context} and one new token pass {shape.name}'s {shape.max_position} positions; "
            f"--context can be up to {shape.max_position - memory.HEADROOM_TOKENS}."
        )
    _check_memory(point, settings, shape, probe)


def _check_cpu(point: Point, shape: ModelShape, machine: Machine) -> None:
    """A full-size model on a machine without GPUs is named first: no other advice would help."""
    moe = shape.layers - shape.first_dense
    whole = memory.weight_bytes(shape, Layout(tp=1), ITEMSIZE[point.dtype], shape.first_dense, moe)
    if whole > CPU_BYTES:
        raise CapacityError(
            f"--model {point.model} has about {whole / GIB:,.0f} GiB of {point.dtype} weights and needs GPUs; none are "
            f"{'used with --device cpu' if machine.probe.count else 'visible'} (`dcpbench env` says what is). "
            f"For a functional run on the CPU type: dcpbench {_command(point)} --model tiny --tp 8 --dcp 8"
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
        f"(or run it on {nodes} such machines with --nnodes {nodes}; see dcpbench {_command(point)} --help)"
    )


def _smaller(point: Point, shape: ModelShape, gpus: int) -> str:
    """The command for the largest layout of the same kind that these GPUs can hold."""
    for tp in range(gpus, 0, -1):
        layouts = [x for x in valid_layouts(shape, tp) if x.dp <= point.dp and x.dcp <= point.dcp]
        if layouts:
            best = max(layouts, key=lambda x: (x.dp == point.dp, x.dcp))
            dp = f" --dp {best.dp}" if best.dp > 1 else ""
            return f"dcpbench {_command(point)} --model {point.model} --tp {best.tp}{dp} --dcp {best.dcp}"
    return f"dcpbench {_command(point)} --device cpu --model tiny --tp 8 --dcp 8"


def _command(point: Point) -> str:
    return "serve" if point.load else "sweep"


def _check_dtype(point: Point) -> None:
    """Comparisons on a GPU may take fp16 and fp32: their experts run the reference, which nobody should time."""
    if point.dtype != "bf16":
        raise UsageError(
            f"--dtype {point.dtype}: on GPUs the grouped product of the experts is bf16 only; use --dtype bf16. "
            "fp16 and fp32 on a GPU are for dcpbench verify."
        )


def _check_auto(point: Point, machine: Machine) -> None:
    open_ = [f"--{name} {AUTO}" for name in ("backend", "exchange") if getattr(point, name) == AUTO]
    asked = f"{' and '.join(open_)} choose{'s' if len(open_) == 1 else ''} by time"
    if open_ and not machine.timed:
        raise UsageError(f"{asked}, and verify measures none; name what it should compare.")
    if open_ and machine.probe.device == "cpu":
        raise UsageError(f"{asked}, and times of a CPU say nothing; use --backend reference --exchange {EXCHANGES[0]}.")


def _check_backend(point: Point, shape: ModelShape, machine: Machine) -> None:
    probe = machine.probe
    if point.backend == "reference" and probe.device == "cuda" and machine.timed:
        raise UsageError(
            "--backend reference plans with new tensors in every step, which a CUDA graph would not see; use --backend "
            "triton or --backend flashinfer. On a GPU the reference is for dcpbench verify."
        )
    if point.backend in ("triton", AUTO) and not (_power_of_two(shape.latent) and _power_of_two(shape.rope)):
        raise UsageError(
            f"--backend {point.backend} needs a latent and a rope width that are powers of two from {SMALLEST_TILE}, "
            f"and {shape.name} has {shape.latent} and {shape.rope}; {_reference(probe)}."
        )
    if point.backend == "flashinfer":
        _check_flashinfer(point, shape, probe)


def _check_flashinfer(point: Point, shape: ModelShape, probe: Probe) -> None:
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
            f"--backend flashinfer: FlashInfer cannot be imported; {how_to_install('flashinfer')}, or use --backend "
            "triton."
        )


def _check_exchange(point: Point, machine: Machine) -> None:
    on = [flag(name) for name in OPTIONS if getattr(point, name)]
    if on and point.exchange == NO_EXCHANGE:
        raise UsageError(f"{', '.join(on)}: {point.layout} exchanges nothing; use --dcp 2 or more, or leave it out.")
    if point.overlap and -(-point.concurrency // point.dp) == 1:
        raise UsageError(
            "--overlap runs a batch in two halves, and a replica has one request; use a --concurrency of "
            f"{point.dp + 1} or more, or leave it out."
        )
    near = point.tp // machine.nnodes
    for option, name, ranks, instead in (
        ("--exchange", point.exchange, point.dcp, "a2a"),
        ("--all-reduce", point.all_reduce, point.layout.attn_tp, "nccl"),
    ):
        if name == SYMMETRIC and ranks > near:
            raise UsageError(
                f"{option} {name} reads the memory of {ranks} ranks, and a machine has {near} of them; use "
                f"{option} {instead}."
            )


def _check_gpu_kernels(point: Point, shape: ModelShape) -> None:
    """Kernels of a GPU that no --backend replaces."""
    if not _power_of_two(shape.rope):
        raise UsageError(
            f"the rope kernel needs a width that is a power of two from {SMALLEST_TILE}, and {shape.name} has "
            f"'qk_rope_head_dim' {shape.rope}; {_CPU_VERIFY}."
        )
    merged_wide = point.dcp > 1 and point.dtype != "fp32" and not point.project_first
    if merged_wide and not (_power_of_two(shape.latent) and _power_of_two(shape.value)):
        raise UsageError(
            f"with --dcp {point.dcp} the values are projected in fp32, which needs 'kv_lora_rank' and 'v_head_dim' to "
            f"be powers of two from {SMALLEST_TILE}, and {shape.name} has {shape.latent} and {shape.value}; use --dcp "
            f"1, or {_CPU_VERIFY}."
        )


def _power_of_two(width: int) -> bool:
    return width >= SMALLEST_TILE and not width & (width - 1)


def _reference(probe: Probe) -> str:
    return "use --backend reference" if probe.device == "cpu" else _CPU_VERIFY


def _check_concurrency(point: Point) -> None:
    most = GRAPH_BATCHES[-1]
    if -(-point.concurrency // point.dp) > most:
        of = f"{most} requests" if point.dp == 1 else f"{most} requests on each of its {point.dp} replicas"
        raise UsageError(
            f"--concurrency {point.concurrency} is more than {point.layout} takes, {of} (the largest CUDA graph); "
            f"--concurrency can be up to {most * point.dp}."
        )


def _check_memory(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> None:
    need = pages_needed(point)
    fixed = settings.kv_memory_bytes is not None
    pool = kv_pages(point, [point], settings, shape, probe)
    try:
        plan = memory_plan(point, pool, shape, probe)
    except CapacityError as e:
        if fixed:
            room = most_pages(point, shape, probe) * memory.page_bytes(shape, point.page_size, ITEMSIZE[point.dtype])
            raise CapacityError(f"{e}. --kv-memory can be up to {size_text(room, '')} here.") from e
        raise CapacityError(f"{e}. {_what_fits(point, settings, shape, probe)}") from e
    if need > pool:
        missing = (need - pool) * memory.page_bytes(shape, point.page_size, ITEMSIZE[point.dtype])
        raise CapacityError(
            f"{point.layout}: --kv-memory holds {size_text(plan.kv_bytes)} of KV cache per GPU, "
            f"{size_text(missing)} less than {point.concurrency} requests of {point.context} tokens need. "
            f"{_what_fits(point, settings, shape, probe)}"
        )


def _what_fits(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> str:
    """The largest concurrency that fits here, and the smallest larger dcp that takes the point as it is."""
    pool = most_pages(point, shape, probe)
    if settings.kv_memory_bytes is not None:
        pool = min(pool, kv_pages(point, [point], settings, shape, probe))
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
        pages = kv_pages(wider, [wider], settings, shape, probe)
        try:
            memory_plan(wider, pages, shape, probe)
        except CapacityError:
            continue
        if pages_needed(wider) <= pages:
            return f"{advice} With --dcp {layout.dcp} it fits."
    return advice
