"""Check that a point can run on this machine; otherwise name the options to use instead. No torch."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import (
    CapacityError,
    InsufficientMemoryError,
    LayoutError,
    MissingPackageError,
    UsageError,
    format_install_hint,
)
from dcpbench.models.shapes import NOPE, ROPE, VALUE
from dcpbench.models.weight_formats import FORMATS, INT4, INT4_GROUPS
from dcpbench.plan.command_line import format_updated_command, remove_settings, update_command
from dcpbench.plan.kernel_limits import TENSOR_UNIT, find_kernel_limit, find_split_block
from dcpbench.plan.used_options import get_idle_fields
from dcpbench.points import memory
from dcpbench.points.batches import GRAPH_BATCHES
from dcpbench.points.budget import (
    CPU_BYTES,
    ITEMSIZE,
    compute_max_pages,
    compute_page_bytes,
    count_min_pages,
    count_needed_pages,
    plan_engine,
)
from dcpbench.points.cluster_specs import LINKS, load_machine
from dcpbench.points.comm_model import GATHERS
from dcpbench.points.device_probe import HOPPER
from dcpbench.points.gpus import GPUS
from dcpbench.points.layout import MAX_SUGGESTED, Layout, iter_smaller_layouts, list_valid_layouts, place_experts
from dcpbench.points.memory import GIB
from dcpbench.points.names import (
    ALL_REDUCES,
    AUTO,
    DTYPES,
    ENGINE_POLICIES,
    EXCHANGES,
    FP8,
    LIBRARIES,
    MOE_TP,
    OVER_FP8,
    PCP_EXCHANGE,
    REGISTERED,
    REPLAY,
    SYNTHETIC,
    format_flag,
    join_value,
)
from dcpbench.points.sizes import format_size, format_size_up
from dcpbench.serving.loads import compute_extent
from dcpbench.serving.stage_steps import check_stages, make_measured_point
from dcpbench.serving.step_times import read_step_times
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Load, Point
    from dcpbench.points.settings import Settings
    from dcpbench.serving.step_times import StepTimes

SMALLEST_TILE = 16  # side of the smallest product that the tensor cores take
FLASHMLA_PAGE = 64
WHOLE_PAGES = (16, 32)  # further page sizes of the CUDA C++ kernels (kernels/attention/hopper_pairs.py)
FLASHINFER_HEADS = (64, 128, 256)  # columns of a head in FlashInfer's GQA kernels; prefill: the first two
SYMMETRIC = "symm"  # exchange and all-reduce that work inside one machine
ROW_UNIT = 16  # bytes that a thread of kernels/kv_gather reads at once; a test compares the two
_CPU_VERIFY = "dcpbench verify --device cpu --backend reference can take it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Describe what points are checked against."""

    probe: Probe
    nnodes: int = 1
    timed: bool = True  # True if points are measured (`sweep`, with CUDA graphs), False if compared (`verify`)
    submitted: bool = False  # True if `submit` checks the point for the machines of a job
    argv: tuple[str, ...] = ()  # command and arguments that errors repeat with other options; empty without any

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all machines; each is assumed to have as many as this one."""
        return self.probe.count * self.nnodes


def check_runnable(point: Point, settings: Settings, shape: ModelShape, machine: Machine) -> None:
    """Raise an error that names the options to use instead, unless the point can run."""
    probe = machine.probe
    if settings.step_times:  # first, as all else is judged by the machine and the engine of the file
        _check_layout(point, shape)
        _check_step_times(point, settings.step_times)
        if machine.nnodes > 1:
            raise UsageError("--step-times are replayed by one process on one machine; leave --nodes out.")
    if probe.device == "cpu":
        _check_cpu(point, shape, machine)
    _check_layout(point, shape)
    here = not settings.step_times  # else the point has run, on ranks and links that need not be here
    if here:
        _check_ranks(point, shape, machine)
        _check_query_rows(point)
    if probe.device == "cuda" and machine.timed and point.dtype != "bf16":  # others run the reference's experts
        raise UsageError(
            f"--weights-dtype {point.dtype}: on GPUs the grouped product of the experts is bf16 only; use --weights-dtype bf16. "
            "fp16 and fp32 on a GPU are for dcpbench verify."
        )
    if point.routing:
        _check_routing(point, shape, machine)
    _check_auto(point, machine)
    _check_backend(point, shape, machine)
    if here:
        _check_exchange(point, machine)
    if probe.device == "cuda":
        _check_gpu_kernels(point, shape)
    _check_kernel_limits(point, shape, probe)
    if point.load:
        _check_load(point, point.load, shape, probe)
    else:
        check_decode_batch(point)
        check_positions(point.context, None, shape, point.mtp)
    _check_memory(point, settings, shape, probe)


def _check_step_times(point: Point, file: str) -> None:
    """Raise UsageError unless a file has the step times of the point, or of the layout of which its stages are parts."""
    times, measured = load_step_times(file), make_measured_point(point)
    if measured == point:
        times.check_point(point, file)
    else:
        times.check_point(
            measured,
            f"{file}, for steps of {measured.instance_name} in {point.instance_name}",
            f"name a file of {measured.instance_name}, whose steps --mode replay measures with --dcp {measured.dcp} and without --stages.",
        )
    check_stages(times, point)


def _check_layout(point: Point, shape: ModelShape) -> None:
    """Raise an error unless the model can take the layout, and the layout the exchange."""
    if not shape.experts and point.ep_degree not in (None, 1):
        raise UsageError(f"--ep {point.ep}: {shape.name} has no experts; leave --ep out.")
    try:
        layout = point.layout
    except LayoutError as e:
        raise LayoutError(_explain_degrees(point, shape, e), e.problem) from e
    layout.check_model(shape, point.ep)
    if layout.spread.shared_kv > 1 and point.exchange != PCP_EXCHANGE:
        raise UsageError(
            f"--exchange {point.exchange} with --dcp over --stages pcp={point.pcp}: outputs are summed on all of these ranks, as in vLLM; "
            f"use --exchange {PCP_EXCHANGE}."
        )


def _explain_degrees(point: Point, shape: ModelShape, error: LayoutError) -> str:
    """Return why degrees do not divide each other, with those that the model can have instead; the error's text if it has none."""
    tp = max(point.tp, 1)
    valid = list_valid_layouts(shape, tp, point.ep, max(point.pp, 1), max(point.pcp, 1)) if tp <= MAX_SUGGESTED else []
    for name, values in (("dcp", {x.dcp for x in valid if x.dp == point.dp}), ("dp", {x.dp for x in valid})):
        if values:
            listed = format_list([*map(str, sorted(values))], "or")
            return f"{error.problem}; {shape.name} with --tp {tp} can have --{name} {listed}."
    return str(error)


def check_live(point: Point, settings: Settings, shape: ModelShape) -> None:
    """Raise UsageError unless the engine computes the model with its weights; replays with given step times need no engine."""
    if point.layout.gpus > point.tp and not point.replayed:
        raise UsageError(
            f"{point.instance_name}: the engine runs no pipeline stages and no prefill context parallelism. To plan them, add --dry-run, "
            "or use dcpbench recommend; to replay requests, use dcpbench serve --mode replay; to measure them, start an engine in this "
            "layout and use dcpbench server --url."
        )
    if point.layout.gpus > point.tp and not settings.step_times:
        raise UsageError(
            f"{point.instance_name}: steps over stages are estimated from measured steps of the layout without them; measure these with "
            "--mode replay and without --stages, and add --step-times with the file below step-times/ of that run."
        )
    reason = None if settings.step_times else find_live_limit(shape, point.weights_dtype)
    if reason is not None:
        raise UsageError(f"{point.instance_name}: {reason}. To plan it, add --dry-run, or use dcpbench recommend.")


def find_live_limit(shape: ModelShape, weights_dtype: str) -> str | None:
    """Return why the engine does not compute a model with weights of a format; None if it does."""
    if weights_dtype in FORMATS and not shape.get_weight_format(weights_dtype).engine:
        groups = " or ".join(map(str, INT4_GROUPS))
        but = f" but experts alone, symmetric in groups of {groups}" if weights_dtype == INT4 else ""
        return (
            f"the engine has no kernels for {weights_dtype} weights{but}; with --weights-dtype fp8 or bf16 it measures the same layers in that "
            "precision"
        )
    if shape.indexer:
        return f"the engine attends to all tokens, and {shape.name} has sparse attention"
    if shape.gqa is None:
        return None
    parts = {
        "biases in attention": shape.gqa.qkv_bias or shape.gqa.o_bias,
        "sliding windows": shape.gqa.window_layers > 0,
        "attention sinks": shape.gqa.sinks,
        "norms over all heads": shape.gqa.qk_norm_over_heads,
        "rope on a part of a head": shape.qk_nope_head_dim > 0,
        "biases of experts": shape.expert_bias,
    }
    missing = [name for name, present in parts.items() if present]
    return f"the engine does not compute {' and '.join(missing)}, which {shape.name} has" if missing else None


@functools.cache
def load_step_times(path: str) -> StepTimes:
    """Return the step times of --step-times; the file is read once."""
    return read_step_times(Path(path))


def find_batch_limit(point: Point) -> tuple[str, int] | None:
    """Return why a decode step has too many requests and the maximum concurrency; None if a CUDA graph can take it."""
    limit = GRAPH_BATCHES[-1]
    if -(-point.concurrency // point.dp) <= limit:
        return None
    requests = f"{limit} requests" if point.dp == 1 else f"{limit} requests on each of its {point.dp} replicas"
    reason = f"--concurrency {point.concurrency} is more than {point.instance_name} takes, {requests} (the largest CUDA graph)"
    return reason, limit * point.dp


def check_decode_batch(point: Point) -> None:
    """Raise UsageError if a decode step has more requests than the largest CUDA graph."""
    if found := find_batch_limit(point):
        raise UsageError(f"{found[0]}; --concurrency can be up to {found[1]}.")


def check_positions(context: int, load: Load | None, shape: ModelShape, drafts: int = 0) -> None:
    """Raise UsageError if a model has fewer positions than requests have tokens; a decode step has `drafts` further ones."""
    longest = shape.max_position - memory.HEADROOM_TOKENS - drafts
    if load is None and context > longest:
        new = f", {format_count(drafts, 'draft')} and" if drafts else " and"
        raise UsageError(
            f"--context {context}{new} one new token pass {shape.name}'s {shape.max_position} positions; --context can be up to {longest}."
        )
    if load is not None and context > shape.max_position:
        remedy = "take longer ones out of the file" if load.trace else "lower --input-tokens or --output-tokens"
        raise UsageError(
            f"requests of {_format_tokens(load)}, {context:,} tokens together, pass {shape.name}'s "
            f"{shape.max_position:,} positions; {remedy}."
        )


def _check_cpu(point: Point, shape: ModelShape, machine: Machine) -> None:
    """Raise an error for a point that a CPU cannot run; a full-size model is reported first, because no other advice
    would help.
    """
    layers, weights = memory.count_all_layers(shape), shape.get_weight_format(point.weights_precision)
    if memory.compute_weight_bytes(shape, Layout(tp=1), ITEMSIZE[point.dtype], *layers) > CPU_BYTES:
        on_gpus = memory.compute_weight_bytes(shape, Layout(tp=1), ITEMSIZE["bf16"], *layers, weights=weights)
        like = load_machine(point.emulate or "H200")
        plan = {"--model": point.model, "--dry-run": "", "--gpu": f"{like.gpu},count={like.gpus_per_host}"}
        raise CapacityError(
            f"--model {point.model} has about {on_gpus / GIB:,.0f} GiB of weights in {weights.name} and needs GPUs; none are "
            f"{'used with --device cpu' if machine.probe.count else 'visible'} (`dcpbench doctor` shows this machine). "
            f"To plan it for GPUs type: {format_updated_command(machine.argv, _get_command(point, machine), plan, ['--device'])}. "
            f"For a functional run on the CPU type: dcpbench {_get_command(point, machine)} --model tiny --tp 8 --dcp 8"
        )


def _check_ranks(point: Point, shape: ModelShape, machine: Machine) -> None:
    if point.tp % machine.nnodes:
        raise LayoutError(f"--tp {point.tp} does not divide over --nodes {machine.nnodes}; use a multiple of it.")
    if point.emulate:
        _check_emulated(point, machine)
        return
    gpus = point.layout.gpus
    if machine.probe.device == "cpu" or gpus <= machine.gpus:
        return
    if gpus > point.tp:
        raise CapacityError(
            f"{point.instance_name} needs {gpus} GPUs, tp · pp · pcp, and there are {machine.gpus} ({machine.probe.name}); add --nodes "
            f"{-(-gpus // machine.probe.count)} to the plan, or use smaller degrees."
        )
    nodes = -(-point.tp // machine.probe.count)
    instead = shlex.join(_suggest_smaller(point, shape, machine))
    others = (
        f" (or run it on {nodes} such machines with --nodes {nodes}; "
        f"see dcpbench {'submit' if machine.submitted else _get_command(point, machine)} --help). To forecast "
        f"{point.instance_name} from one GPU, add --emulate {_find_machine_name(point, machine.probe)}."
    )
    raise CapacityError(
        f"--tp {point.tp} needs {point.tp} GPUs and there are {machine.gpus} ({machine.probe.name}). "
        f"{f'Type behind --: {instead}' if machine.submitted else f'Type instead: dcpbench {instead}'}"
        f"{others if machine.timed else ''}"  # verify runs on one machine, and on all ranks
    )


def _find_machine_name(point: Point, probe: Probe) -> str:
    """Return the entry of the table of machines that matches this one, with a link if one host is too small."""
    name = next((gpu.name for gpu in GPUS if gpu.device == probe.name), None)
    if name is None:
        return "MACHINE (see dcpbench machines)"
    return name if point.tp <= load_machine(name).gpus_per_host else f"{name}+{LINKS[0].name}"


def _check_routing(point: Point, shape: ModelShape, machine: Machine) -> None:
    """Raise an error unless a model with synthetic weights can route tokens like the point."""
    from dcpbench.points.expert_choices import load_choices  # numpy, which most plans do without

    if not machine.timed or point.weights != SYNTHETIC:
        why = "verify compares results" if not machine.timed else "a checkpoint's router decides"
        raise UsageError(f"--routing {point.routing}: {why}; leave --routing out.")
    load_choices(point.routing, shape)


def _check_emulated(point: Point, machine: Machine) -> None:
    """Raise an error unless the rank that emulates a layout has a known communication model and its results are not compared."""
    if machine.nnodes > 1:
        raise UsageError("--emulate runs one rank on this machine alone; leave --nodes out.")
    if point.layout.gpus > point.tp:
        raise UsageError(
            f"--emulate {point.emulate}: a stage of {point.instance_name} is not emulated; leave --stages out."
        )
    if not machine.timed or point.weights != SYNTHETIC:
        raise UsageError(
            f"--emulate {point.emulate}: one rank's results mean nothing without the others'; "
            + ("verify compares results: leave --emulate out." if not machine.timed else "leave --weights out.")
        )
    if point.load and not point.replayed:
        raise UsageError(
            f"--emulate {point.emulate}: requests are answered by all ranks, and one has no answers; add --mode replay, which "
            "serves them in virtual time."
        )
    described_machine = load_machine(point.emulate)
    if point.exchange == REGISTERED:
        raise UsageError(f"--exchange {REGISTERED} cannot be emulated; use --exchange {', '.join(GATHERS)}.")
    gather = GATHERS.get(point.exchange)
    needed = [(point.exchange, point.dcp), (gather, point.dcp)] if gather else []
    needed += [("all-reduce" if point.all_reduce == ALL_REDUCES[0] else "all-reduce-symm", point.layout.attn_tp)]
    needed += [("all-gather", point.layout.attn_tp), ("all-gather", point.dp), ("reduce-scatter", point.dp)]
    if point.load:
        needed.append(("all-gather", point.dcp))  # of stored prefixes
    for name, ranks in needed:
        if ranks > 1:
            described_machine.comm_model.predict_seconds(name, ranks, 1)


def _suggest_smaller(point: Point, shape: ModelShape, machine: Machine) -> list[str]:
    """Return the words of the command for the largest layout of the same kind that these GPUs can hold."""
    smaller = iter_smaller_layouts(shape, machine.gpus, point.layout, point.ep)
    best = next((x for x in smaller if x.tp % machine.nnodes == 0), None)
    if best is None:
        return f"{_get_command(point, machine)} --device cpu --model tiny --tp 8 --dcp 8".split()
    given = {"--model": point.model, "--tp": str(best.tp)}
    given |= {"--dp": str(best.dp)} if best.dp > 1 else {}
    given |= {"--dcp": str(best.dcp)}
    given |= {"--ep": point.ep} if point.ep != place_experts(MOE_TP, point.tp) else {}
    gpu = machine.probe.gpu  # set in a plan for another machine
    given |= {"--dry-run": "", "--gpu": f"{gpu.name},count={machine.probe.count}"} if gpu else {}
    argv = remove_settings(machine.argv, map(format_flag, get_idle_fields(best.tp, best.dp, best.dcp)))
    return update_command(argv, _get_command(point, machine), given, ["--dp", "--ep"])


def _get_command(point: Point, machine: Machine) -> str:
    return "serve" if point.load else "sweep" if machine.timed else "verify"


def _list_auto_options(point: Point) -> list[str]:
    """Return the options that leave a choice to timing."""
    return [f"--{name} {AUTO}" for name in ("backend", "exchange") if getattr(point, name) == AUTO]


def _check_auto(point: Point, machine: Machine) -> None:
    open_ = _list_auto_options(point)
    subject = f"{' and '.join(open_)} choose{'s' if len(open_) == 1 else ''} by time"
    if open_ and not machine.timed:
        raise UsageError(f"{subject}, and verify measures none; name what it should compare.")
    if open_ and machine.probe.device == "cpu":
        raise UsageError(f"{subject}, which needs GPU times; use --backend reference --exchange {EXCHANGES[0]}.")


def _check_query_rows(point: Point) -> None:
    if point.mtp and point.backend in LIBRARIES:
        raise UsageError(
            f"--backend {point.backend} does not take the {point.mtp + 1} query rows of a request together (--mtp {point.mtp}); use --backend "
            "triton."
        )


def _check_backend(point: Point, shape: ModelShape, machine: Machine) -> None:
    probe = machine.probe
    if point.backend == "reference" and probe.device == "cuda" and machine.timed:
        raise UsageError(
            "--backend reference plans with new tensors in every step, which a CUDA graph would not see; use --backend "
            "triton or --backend flashinfer. On a GPU the reference is for dcpbench verify."
        )
    hopper_mla = probe.capability == HOPPER and shape.gqa is None
    if point.mtp and hopper_mla and point.page_size not in WHOLE_PAGES and point.page_size % FLASHMLA_PAGE:
        raise UsageError(
            f"--mtp {point.mtp}: kernels that take the query rows of a request together read pages of {format_list([*map(str, WHOLE_PAGES)])} rows and "
            f"multiples of {FLASHMLA_PAGE}, not {point.page_size}; use --page-size {FLASHMLA_PAGE}."
        )
    if shape.gqa:
        _check_gqa_options(point, shape)
    elif point.backend in ("triton", AUTO) and not (
        _is_power_of_two(shape.latent) and _is_power_of_two(shape.qk_rope_head_dim)
    ):
        instead = "use --backend reference" if probe.device == "cpu" else _CPU_VERIFY
        raise UsageError(
            f"--backend {point.backend} needs latent and rope widths that are powers of two of at least {SMALLEST_TILE}, "
            f"and {shape.name} has {shape.latent} and {shape.qk_rope_head_dim}; {instead}."
        )
    if point.backend in ("flashinfer", "flashmla"):
        _check_library(point, shape, probe)


def _check_gqa_options(point: Point, shape: ModelShape) -> None:
    """Raise an error for options that only MLA has, and for heads that no kernel takes."""
    if point.backend == "flashmla":
        raise UsageError(
            f"--backend flashmla computes MLA, and {shape.name} has grouped-query attention; use --backend triton."
        )
    if point.project_first:
        raise UsageError(
            f"--collectives project-first: the attention of {shape.name} gives values, and nothing is projected; leave it out."
        )
    if point.backend in ("triton", AUTO) and not _is_power_of_two(shape.qk_head_dim):
        raise UsageError(
            f"--backend {point.backend} needs a head width that is a power of two of at least {SMALLEST_TILE}, "
            f"and {shape.name} has {shape.qk_head_dim}; {_CPU_VERIFY}."
        )
    if point.backend == "flashinfer" and shape.qk_head_dim not in FLASHINFER_HEADS:
        raise UsageError(
            f"--backend flashinfer takes heads of {', '.join(map(str, FLASHINFER_HEADS))} columns, and {shape.name} has "
            f"{shape.qk_head_dim}; use --backend triton."
        )


def _check_library(point: Point, shape: ModelShape, probe: Probe) -> None:
    backend = f"--backend {point.backend}"
    if probe.device == "cpu":
        raise UsageError(f"{backend} needs a GPU; on the CPU use --backend reference or --backend triton.")
    if shape.gqa is None and (shape.latent, shape.qk_rope_head_dim) != (512, 64):
        raise UsageError(
            f"{backend} reads KV rows of 512 + 64 numbers and {shape.name} has {shape.latent} + {shape.qk_rope_head_dim}; use "
            "--backend triton."
        )
    if point.kv_precision == FP8 and point.backend not in OVER_FP8:
        raise UsageError(
            f"{backend} does not read an fp8 KV cache here; use --backend flashmla, --backend triton or --kv-dtype bf16."
        )
    if point.dtype not in ("bf16", "fp16"):
        raise UsageError(
            f"{backend} runs in bf16 and fp16, not {point.dtype}; use --kv-dtype bf16 or --backend triton."
        )
    if point.backend == "flashmla":
        _check_flashmla(point, probe)
    _check_installed("--backend", point.backend, "triton", probe)


def _check_flashmla(point: Point, probe: Probe) -> None:
    if probe.capability != HOPPER:
        raise UsageError(f"--backend flashmla needs a Hopper GPU, and {probe.name} is none; use --backend triton.")
    if point.page_size != FLASHMLA_PAGE:
        raise UsageError(
            f"--backend flashmla reads pages of {FLASHMLA_PAGE} rows, not {point.page_size}; use --page-size "
            f"{FLASHMLA_PAGE} or --backend triton."
        )


def _check_installed(option: str, library: str, instead: str, probe: Probe) -> None:
    """Raise an error unless a library is installed; `library` is both the option's value and the name of our extra."""
    if not probe.packages.get(LIBRARIES[library]):
        raise MissingPackageError(
            f"{option} {library}: {LIBRARIES[library]} cannot be imported; {format_install_hint(library)}, or use {option} "
            f"{instead}."
        )


def _check_exchange(point: Point, machine: Machine) -> None:
    if point.exchange == REGISTERED and machine.probe.device == "cpu":
        raise UsageError(
            f"--exchange {REGISTERED} registers memory with NCCL, which needs GPUs; use --exchange {EXCHANGES[0]}."
        )
    near = load_machine(point.emulate).gpus_per_host if point.emulate else point.tp // machine.nnodes
    for option, name, ranks, instead in (
        ("--exchange", point.exchange, point.dcp, "a2a"),
        ("--collectives all-reduce", point.all_reduce, point.layout.attn_tp, "nccl"),
    ):
        if name in (SYMMETRIC, REGISTERED) and ranks > near:
            raise UsageError(
                f"{join_value(option, name)} reads the memory of {ranks} ranks, and a machine has {near} of them; use "
                f"{join_value(option, instead)}."
            )


def _check_gpu_kernels(point: Point, shape: ModelShape) -> None:
    """Raise an error if GPU kernels that no --backend replaces cannot take the model."""
    if shape.gqa:
        if not _is_power_of_two(shape.qk_head_dim):
            raise UsageError(
                f"the rope kernel needs a head width that is a power of two of at least {SMALLEST_TILE}, and "
                f"{shape.name} has {shape.qk_head_dim}; {_CPU_VERIFY}."
            )
        return
    if not _is_power_of_two(shape.qk_rope_head_dim):
        raise UsageError(
            f"the rope kernel needs a width that is a power of two of at least {SMALLEST_TILE}, and {shape.name} has "
            f"'qk_rope_head_dim' {shape.qk_rope_head_dim}; {_CPU_VERIFY}."
        )
    merged_wide = point.dcp > 1 and point.dtype != "fp32" and not point.project_first
    if merged_wide and not (_is_power_of_two(shape.latent) and _is_power_of_two(shape.v_head_dim)):
        raise UsageError(
            f"with --dcp {point.dcp} the values are projected in fp32, which needs 'kv_lora_rank' and 'v_head_dim' to "
            f"be powers of two of at least {SMALLEST_TILE}, and {shape.name} has {shape.latent} and {shape.v_head_dim}; use --dcp "
            f"1, or {_CPU_VERIFY}."
        )


def _check_kernel_limits(point: Point, shape: ModelShape, probe: Probe) -> None:
    if probe.device == "cuda":
        limit = find_kernel_limit(point, shape, probe)
    else:  # the CPU splits blocks of fp8, and no groups of int4
        limit = find_split_block(point, shape) if point.weights_precision == INT4 else None
    if limit is not None:
        raise UsageError(limit.format_for_sweep())


def _is_power_of_two(width: int) -> bool:
    return width >= SMALLEST_TILE and not width & (width - 1)


def _check_load(point: Point, load: Load, shape: ModelShape, probe: Probe) -> None:
    """Raise an error that names the options to use instead, unless this model in this layout can serve the load."""
    if point.disaggregate and load.mode != REPLAY:
        raise UsageError(
            f"--disaggregate {point.disaggregate}: a live run serves on the GPUs of one instance; take --mode replay "
            "alone, which serves several in virtual time."
        )
    if load.policy in ENGINE_POLICIES and point.dp > 1:
        instead = "--dp 1, or " if point.layout.accepts(shape, point.ep, dp=1) else ""
        raise UsageError(
            f"--prefill policy={load.policy} is modelled for one attention replica; use {instead}a policy of dcpbench's engine."
        )
    if load.policy in ENGINE_POLICIES and point.mtp:
        raise UsageError(
            f"--prefill policy={load.policy} is not modelled with drafts; leave out --mtp, or use a policy of dcpbench's engine."
        )
    if open_ := _list_auto_options(point):
        raise UsageError(
            f"{' and '.join(open_)}: serve needs a named kernel; dcpbench sweep {' '.join(open_)} finds the fastest."
        )
    check_positions(point.context, load, shape)
    _check_rows(point, shape)
    _check_chunk(point, load)
    _check_chunk_memory(point, load, shape, probe)
    _check_prefill(point, load, shape, probe)


def _check_rows(point: Point, shape: ModelShape) -> None:
    """Raise an error unless KV rows have a multiple of the unit with which the kernel reorders rows
    from the DCP ranks.
    """

    def compute_row_bytes(dtype: str) -> int:
        return width * ITEMSIZE[dtype]

    width, kept = shape.compute_kv_width(point.layout.attn_tp), point.kv_precision
    if point.dcp == 1 or compute_row_bytes(kept) % ROW_UNIT == 0:
        return
    fits = [f"--kv-dtype {dtype}, " for dtype in DTYPES if compute_row_bytes(dtype) % ROW_UNIT == 0]
    raise UsageError(
        f"--dcp {point.dcp}: the prefix of a prompt is gathered from the ranks in rows that are multiples of "
        f"{ROW_UNIT} bytes, and {shape.name} has KV rows of {width} {kept} numbers, "
        f"{compute_row_bytes(kept)} bytes; use {''.join(fits)}--dcp 1, or dcpbench sweep for decode steps only."
    )


def _check_chunk(point: Point, load: Load) -> None:
    page = point.page_size * point.dcp
    if load.chunk // point.dp < page:
        of = f" for each of {point.dp} replicas" if point.dp > 1 else ""
        raise UsageError(
            f"--prefill chunk={load.chunk} leaves {format_count(load.chunk // point.dp, 'token')}{of}, and {point.instance_name} cuts prompts at "
            f"multiples of page size × dcp = {page}; use --prefill chunk={page * point.dp} or more, or a smaller --page-size."
        )


def _check_chunk_memory(point: Point, load: Load, shape: ModelShape, probe: Probe) -> None:
    """Raise an error if a step's chunks take a GPU's whole memory; whether weights and KV fit next to them is checked
    later.
    """
    total = probe.memory_bytes if probe.device == "cuda" else None
    need = memory.compute_prefill_bytes(
        shape, point.layout, load.chunk, ITEMSIZE[point.dtype], point.ep, kv_itemsize=ITEMSIZE[point.kv_precision]
    )
    if total is not None and need > total:
        raise CapacityError(
            f"--prefill chunk={load.chunk}: a step with this many prompt tokens needs {format_size(need)} on a GPU of "
            f"{format_size(total)}; use a smaller one, such as --prefill chunk=8192."
        )


def _check_prefill(point: Point, load: Load, shape: ModelShape, probe: Probe) -> None:
    widths = shape.kv_width, shape.latent, shape.v_head_dim
    if probe.device == "cuda" and not shape.gqa and any(n * ITEMSIZE[point.dtype] % TENSOR_UNIT for n in widths):
        raise UsageError(
            f"keys and values of prompts are made from rows that are multiples of {TENSOR_UNIT} bytes, and {shape.name} has "
            f"'kv_lora_rank' {shape.latent}, 'qk_rope_head_dim' {shape.qk_rope_head_dim} and 'v_head_dim' {shape.v_head_dim} in {point.dtype}; use "
            "dcpbench sweep for decode steps only."
        )
    if load.prefill != "flashinfer":
        return
    if probe.device == "cpu":
        raise UsageError("--prefill flashinfer needs a GPU; use --prefill sdpa.")
    _check_installed("--prefill", "flashinfer", "sdpa", probe)
    known = [(head, head) for head in FLASHINFER_HEADS[:2]] if shape.gqa else [(NOPE + ROPE, VALUE)]
    if (shape.qk_head_dim, shape.v_head_dim) not in known or point.dtype not in ("bf16", "fp16"):
        taken = " or ".join(f"keys of {key} and values of {value}" for key, value in known)
        raise UsageError(
            f"--prefill flashinfer takes {taken} numbers in bf16 or fp16, and "
            f"{shape.name} has {shape.qk_head_dim} and {shape.v_head_dim} in {point.dtype}; use --prefill sdpa."
        )


def _format_tokens(load: Load) -> str:
    return f"{load.trace}" if load.trace else f"--input-tokens {load.input_tokens} --output-tokens {load.output_tokens}"


def _check_memory(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> None:
    """Raise InsufficientMemoryError, with options to use instead, if a point does not fit in memory."""
    if shortage := find_shortage(point, settings, shape, probe):
        raise shortage


def find_shortage(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> InsufficientMemoryError | None:
    """Return an error with what does not fit, and the options to use instead; None if the point fits.

    The pool must hold what a decode step needs, or the longest request that is served; with --kv-memory any request of
    a load is enough.
    """
    one = compute_page_bytes(point, shape)
    try:
        plan = plan_engine([point], settings, shape, probe)
    except InsufficientMemoryError as e:
        advice = "" if point.load else f" {_suggest_fit(point, settings, shape, probe)}"
        if settings.kv_memory_bytes is not None:
            largest = compute_max_pages(point, shape, probe) * one
            advice = f" --kv-memory can be up to {format_size(largest, '')} here."
        return InsufficientMemoryError(f"{e}.{advice}", e.problem)
    holds = f"--kv-memory holds {format_size(plan.kv_bytes)} of KV cache per GPU"
    if point.load is None:
        missing = (count_needed_pages(point) - plan.pages) * one
        if missing > 0:
            fits = count_needed_pages(point) <= compute_max_pages(point, shape, probe)
            more = f" --kv-memory {format_size_up(count_needed_pages(point) * one)} holds all of them." if fits else ""
            needs = "needs" if point.concurrency == 1 else "need"
            needed = f"{format_count(point.concurrency, 'request')} of {point.context} tokens {needs}"
            problem = f"{holds}, {format_size(missing)} less than {needed}"
            advice = _suggest_fit(point, settings, shape, probe)
            return InsufficientMemoryError(f"{point.instance_name}: {problem}. {advice}{more}", problem)
    elif plan.bounded_by == "kv_memory":  # else it is sized for the longest request, or more
        shortest = compute_extent(point.load, settings.trace_path).shortest
        need = memory.count_pages(shortest - 1, point.layout, point.page_size) + memory.PAGES_OF_PADDING
        if need > plan.pages:
            problem = f"{holds}, and the shortest request, {shortest:,} tokens, needs {format_size(need * one)}"
            advice = f"to serve all requests, give --kv-memory {format_size_up(count_min_pages(point) * one)} or more."
            return InsufficientMemoryError(f"{point.instance_name}: {problem}; {advice}", problem)
    return None


def _suggest_fit(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> str:
    """Return the largest concurrency that fits here, and the smallest larger dcp with which the
    point fits unchanged.
    """
    given = None if settings.kv_memory_bytes is None else settings.kv_memory_bytes // compute_page_bytes(point, shape)

    def count_missing_pages(requests: int) -> int:
        fewer = msgspec.structs.replace(point, concurrency=requests * point.dp)
        pool = compute_max_pages(fewer, shape, probe)
        return count_needed_pages(fewer) - (pool if given is None else min(pool, given))

    fewer_requests = range(1, -(-point.concurrency // point.dp))  # of a replica
    max_requests = bisect.bisect_right(fewer_requests, 0, key=count_missing_pages) * point.dp
    advice = (
        f"At --context {point.context} the largest --concurrency that fits is {max_requests}."
        if max_requests
        else f"Not even one request of {point.context} tokens fits."
    )
    for layout in list_valid_layouts(shape, point.tp, point.ep, point.pp, point.pcp):
        if layout.dp != point.dp or layout.dcp <= point.dcp:
            continue
        wider = msgspec.structs.replace(point, dcp=layout.dcp)
        try:
            plan = plan_engine([wider], settings, shape, probe)
        except InsufficientMemoryError:
            continue
        if count_needed_pages(wider) <= plan.pages and _has_kernels(wider, shape, probe):
            return f"{advice} With --dcp {layout.dcp} it fits."
    return advice


def _has_kernels(point: Point, shape: ModelShape, probe: Probe) -> bool:
    """Return whether the kernels can take the point."""
    try:
        if probe.device == "cuda":
            _check_gpu_kernels(point, shape)
        _check_kernel_limits(point, shape, probe)
    except UsageError:
        return False
    return True
