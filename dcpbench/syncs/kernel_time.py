"""Compute the GPU time of an engine's steps by kernel and by part of a layer, from traces of torch.profiler."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from dcpbench.errors import TraceError
from dcpbench.records.record import MAX_DISTURBANCE
from dcpbench.show.text import format_count
from dcpbench.syncs.scan import Trace, find_trace_steps, read_traces
from dcpbench.syncs.steps import format_ranges
from dcpbench.syncs.traces.coverage import list_damage
from dcpbench.syncs.traces.intervals import match_keys, merge_intervals, take_known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from dcpbench.syncs.steps import Steps
    from dcpbench.syncs.traces.columns import Columns

UNKNOWN = "unknown"
COMMUNICATION_PARTS = ("all-reduce", "exchange")  # parts in which a rank waits for the others
PARTS = (
    ("all-reduce", r"[Aa]ll_?[Rr]educe|cross_device_reduce|one_?shot|two_?shot|multimem_reduce"),
    (
        "exchange",
        r"AllGather|ReduceScatter|AllToAll|SendRecv|all_gather|all_?to_?all|all2all|reduce_scatter|nccl(Sym)?(Dev)?Kernel|nvshmem|deep_ep",
    ),
    (
        "merge",
        r"correct_attn|merge_attn_states|merge_state|(?<!VariableLength)MergeState|(?<![a-z])lse_|_dcp_(a2a|lse)|mask_empty_context",
    ),
    (
        "attention",
        (
            r"flash_fwd|FlashAttnFwd|flash::|flash_mla|splitkv_mla|BatchMLA|BatchDecode|BatchPrefill|BatchAttention|SinglePrefill|"
            r"VariableLengthMergeStates|AttentionSum|fmha|Fmha|_fwd_grouped_kernel|_fwd_kernel_stage|^_fwd_kernel(_unified|_alibi)?$|"
            r"mla_decode|paged_attention|unified_attention|reduce_segments|sparse_attn|sparse_mla|mla_metadata|prepare_varlen|mqa_logits"
        ),
    ),
    (
        "experts",
        (
            r"[Mm]oe|MoE|topk(?!_topp|_log_softmax)|topK|TopK(?!TopP)|grouped_gemm|GroupedGemm|group_gemm|GroupProblemShape|m_grouped|"
            r"GemmType\)[1235]|count_and_sort|[Ee]xpert|silu|_and_mul|swiglu|router|expandInputRows|shuffleInputRows|problem_sizes|src2dst|"
            r"_(pre|post)_reorder|ep_gather|ep_scatter|batched_triton_kernel|compute_arg_sorts|align_single_token|route_radix|compute_identity|deepep_|triton_\w+_fused_copy__mul_sum"
        ),
    ),
    (
        "KV cache write",
        r"_and_cache|set_mla_kv|set_kv_buffer|store_kv|store_cache|store_flashmla|(?<!cp_gather_)kv_cache(?!_gather)",
    ),
    ("norm and rope", r"(?<![Rr]e)[Nn]orm(?!al)|rms_|rsqrt|[Rr]otary|[Rr]o[Pp][Ee](?![a-z])"),
    (
        "quantisation",
        r"(?<!maybe_de)quant|Quant|convert_fp8|cvt_fp|segmented_max_reduction|absmax|per_group_transpose|align_input_scale",
    ),
    (
        "projections",
        r"gemm|Gemm|GEMM|cutlass|nvjet|cublas|splitKreduce|matmul|scaled_mm|_w8a8_|bmm|xmma|wgrad|gemv|dot_kernel",
    ),
    (
        "sampling",
        (
            r"argmax|ArgMax|[Ss]ampl|[Ss]oft[Mm]ax|logits|logprob|penalt|multinomial|gumbel|topk_topp|TopKTopP|[Rr]enorm|_normalize_kernel|"
            r"_temperature_|_min_p_|_bias_kernel|bad_words|bincount|bitmask|vocab_mask|_ranks_kernel|rejection|_partial_sum_kernel|distribution_"
        ),
    ),
    (
        "copies",
        r"[Mm]emcpy|[Mm]emset|(?<!_to_)copy_|CatArray|maybe_dequant_cache|cp_gather|[Cc]oncat_?(mla|MLA)|concat_and_cast|get_mla_kv_buffer|zero_kv|multi_tensor_apply_kernel<.*\bCopy<",
    ),
    (
        "elementwise",
        (
            r"elementwise|reduce_kernel|triton_poi|triton_red|triton_per|index|indices|gather|scatter|embedding|arange|fill|cub::|slot_mapping|"
            r"metadata|block_table|seq_?lens|kv_splits|position|last_loc|req_to_token|page_table|kv_lens|activation_kernel|clamp|scan_kernel|sort|multi_tensor_apply"
        ),
    ),
)
"""Parts of a step and the names of their kernels in vLLM, SGLang and torch, in the order in which they are tried.

Checked against the kernels in vLLM 0.26.0's libraries, and in the sources of vLLM 0.26.0, SGLang 0.5.17, FlashInfer and DeepGEMM. A kernel
that does the work of two parts belongs to the first of them here, such as a norm that quantises its rows to `norm and rope`.
Products of a shared expert have the names of other projections, and activations of dense layers those of experts.
"""
_PATTERNS = tuple((part, re.compile(pattern)) for part, pattern in PARTS)
_PART_NAMES = (*(part for part, _ in PARTS), UNKNOWN)

_IN_CUTLASS = re.compile(  # name of a CUTLASS kernel, with the name of the kernel's own class
    r"cutlass::device_kernel<(?:[\w:]*enable_\w+<)?(?:[a-z]\w*::)*(\w+)"
)
_RETURN_TYPE = re.compile(r"^[\w:]+::type ")  # of a function template, such as `std::enable_if::type f`


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the time of one kernel in a step, as means over the steps."""

    name: str  # name without template arguments and parameters
    part: str  # one of PARTS, or UNKNOWN
    per_step: float  # launches
    us: float


class TypicalStep(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the medians over the steps of one kind in microseconds, which a minority of disturbed steps does not change.

    The profiler makes each launch of the host take longer. A step that is short for the GPU then waits for the host, which it does
    not do without the profiler, so these waits are kept apart.
    """

    step_us: float  # sum of `part_us` and `idle_us`: the step without `host_wait_us`
    part_us: dict[str, float]  # median per part, longest first; overlapping time counts for the earlier kernel
    idle_us: float  # median time in which no kernel or copy runs although the next one has been launched
    host_wait_us: float  # median time in which no kernel or copy runs because the host has not launched the next one
    durations_us: list[float]  # time of each step, with its waits

    def count_disturbed(self, step_us: float) -> int:
        """Return the number of steps that last longer than `step_us` by more than MAX_DISTURBANCE."""
        return sum(us > (1 + MAX_DISTURBANCE) * step_us for us in self.durations_us)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the GPU time of the steps of one kind, as means over the steps in microseconds."""

    path: str  # trace file
    kind: str  # `decode`, `prefill`, `mixed`, or empty if the annotations of steps do not give it
    steps: int  # number of steps, without the first of its kind
    step_us: float  # from a step's first GPU work to that of the next step
    idle_us: float  # time in which no kernel or copy runs
    overlap_us: float  # sum of the kernels' times minus the time in which at least one runs
    kernels: list[KernelTime]  # with copies, longest first; times + `idle_us` - `overlap_us` = `step_us`
    exposed_part_us: dict[str, float]  # without overlap by earlier kernels; sum + `idle_us` = `step_us`
    typical: TypicalStep
    damage: list[str] = []  # why the trace is not complete: clauses that follow its name

    @property
    def part_us(self) -> dict[str, float]:
        """Return the time of each part, the longest first."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            found[kernel.part] = found.get(kernel.part, 0.0) + kernel.us
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def find_part(name: str) -> str:
    """Return the part of a step to which a kernel belongs, by its name; UNKNOWN if no pattern matches."""
    return next((part for part, pattern in _PATTERNS if pattern.search(name)), UNKNOWN)


def shorten_name(name: str) -> str:
    """Return a kernel's name without its return type, template arguments and parameters.

    CUTLASS launches all its kernels through one template, so the name of its argument is kept: `cutlass::device_kernel: GemmUniversal`.
    """
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    if found := _IN_CUTLASS.match(text):
        return f"cutlass::device_kernel: {found[1]}"
    for brackets in (r"\([^()]*\)", r"<[^<>]*>"):  # a `>` in round brackets, as in `enable_if<(8 > 0)>`, closes nothing
        count = 1
        while count:
            text, count = re.subn(brackets, "", text)
    return _RETURN_TYPE.sub("", text.partition("(")[0]).strip() or name


def measure_steps(
    path: Path, *, step_range: str | None = None, progress: Callable[[str], None] | None = None
) -> list[StepTime]:
    """Return the GPU time of the steps in a trace, one entry for each kind of step.

    Raises TraceError if the file is no trace, or has no GPU work or fewer than two steps.
    """
    return [time for trace in read_traces(path, progress) for time in _measure_trace(trace, step_range)]


def _measure_trace(trace: Trace, step_range: str | None) -> list[StepTime]:
    name, columns = trace.name, trace.columns
    if not len(columns.tables["gpu"]):
        raise TraceError(f"{name} has no GPU work; give the trace of a rank that ran on a GPU.")
    steps = find_trace_steps(columns, step_range)
    if len(steps) < 2:  # noqa: PLR2004 - a step ends where the next one begins
        raise TraceError(
            f"{name} has {format_count(len(steps), 'step')}, and at least 2 are needed: record several steps of an engine, or name the "
            f"range around a step with --step-range. {format_ranges(columns.list_ranges())}"
        )
    damage = list_damage(columns)
    return [msgspec.structs.replace(time, damage=damage) for time in _compute_times(name, columns, steps)]


def _compute_times(path: str, columns: Columns, steps: Steps) -> list[StepTime]:
    gpu, calls = columns.tables["gpu"], columns.tables["calls"]
    launch = match_keys(calls.correlation, gpu.correlation)
    moments = take_known(calls.start, launch, gpu.start)
    step_of = np.array([-1 if i is None else i for i in steps.find_indices(moments)])
    begins = np.array([gpu.start[step_of == i].min(initial=np.inf) for i in range(len(steps))])
    timeline = _make_timeline(columns, launch, np.arange(len(gpu)))
    found = []
    for kind, members in steps.find_steady().items():
        whole = [i for i in members if i + 1 < len(steps) and begins[i] < begins[i + 1] < np.inf]
        if whole:
            rows = np.flatnonzero(np.isin(step_of, whole))
            exposed_us = _sum_parts(_make_timeline(columns, launch, rows)) / len(whole)
            found.append(_average(path, kind, columns, rows, begins, whole, exposed_us, timeline))
    return found


class _Timeline(NamedTuple):
    """Hold GPU work in order of start, with the time since the work before it ended."""

    start: NDArray[np.float64]
    reached: NDArray[np.float64]  # end of all work that began earlier; not after `start`
    exposed: NDArray[np.float64]  # time in which no work that began earlier runs
    late: NDArray[np.bool_]  # True if the GPU was idle before the call that launched the work had returned
    part: NDArray[np.int64]  # number in _PART_NAMES


def _make_timeline(columns: Columns, launch: NDArray[np.int64], rows: NDArray[np.int64]) -> _Timeline:
    """Return these rows of the GPU work; `launch` is the index of the call that launched each row, -1 if it is unknown.

    A graph is launched by one call, and its later kernels wait for the kernels before them, not for the host.
    """
    gpu, calls = columns.tables["gpu"], columns.tables["calls"]
    order = rows[np.argsort(gpu.start[rows], kind="stable")]
    start, end, launch = gpu.start[order], gpu.end[order], launch[order]
    reached = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    first = np.concatenate([[True], launch[1:] != launch[:-1]])
    returned = take_known(calls.end, launch, -np.inf)
    names, name = np.unique(gpu.name[order], return_inverse=True)
    part_of = np.array([_PART_NAMES.index(find_part(columns.names[number])) for number in names])
    return _Timeline(
        start=start,
        reached=np.minimum(reached, start),
        exposed=np.maximum(end - np.maximum(start, reached), 0.0),
        late=first & (returned > reached),
        part=part_of[name],
    )


def _sum_parts(timeline: _Timeline, rows: slice = slice(None)) -> NDArray[np.float64]:
    """Return the time of each of _PART_NAMES that no kernel with an earlier start covers."""
    found = np.bincount(timeline.part[rows], timeline.exposed[rows], minlength=len(_PART_NAMES))
    return found.astype(np.float64)


def _name_parts(us: Iterable[float]) -> dict[str, float]:
    """Return the parts that take time, the longest first."""
    return dict(sorted(((p, t) for p, t in zip(_PART_NAMES, us, strict=True) if t > 0), key=lambda item: -item[1]))


def _find_typical_step(timeline: _Timeline, begins: NDArray[np.float64], members: Sequence[int]) -> TypicalStep:
    """Return the medians over these steps, each of which ends where the next one begins."""
    of_step = [_divide_step(timeline, begins[i], begins[i + 1]) for i in members]
    *parts, idle_us, host_wait_us = np.median(of_step, axis=0).tolist()
    part_us = _name_parts(parts)
    step_us = sum(part_us.values()) + idle_us
    return TypicalStep(
        step_us=step_us,
        part_us=part_us,
        idle_us=idle_us,
        host_wait_us=host_wait_us,
        durations_us=[float(begins[i + 1] - begins[i]) for i in members],
    )


def _divide_step(timeline: _Timeline, begin: float, end: float) -> NDArray[np.float64]:
    """Return the time of each part, the time without work, and that in which the host had not launched the next work."""
    inside = slice(*np.searchsorted(timeline.start, [begin, end]).tolist())
    busy = _sum_parts(timeline, inside)
    since = np.maximum(timeline.reached, begin)
    gap = np.maximum(np.minimum(timeline.start, end) - since, 0.0)
    waits = float(gap[timeline.late & (timeline.start > begin) & (timeline.reached < end)].sum())
    return np.array([*busy, end - begin - busy.sum() - waits, waits])


def _average(
    path: str,
    kind: str,
    columns: Columns,
    rows: NDArray[np.int64],
    begins: NDArray[np.float64],
    members: Sequence[int],
    exposed_us: NDArray[np.float64],
    timeline: _Timeline,
) -> StepTime:
    """Return the means over these steps with these rows of GPU work; each step is followed by another one."""
    gpu = columns.tables["gpu"]
    start, end, names = gpu.start[rows], gpu.end[rows], gpu.name[rows]
    busy_start, busy_end = merge_intervals(start, end)
    busy, total, count = float((busy_end - busy_start).sum()), float((end - start).sum()), len(members)
    step_us = float(sum(begins[i + 1] - begins[i] for i in members)) / count
    times: dict[tuple[str, str], tuple[float, int]] = {}
    for number in np.unique(names):
        of_name = names == number
        key = shorten_name(columns.names[number]), find_part(columns.names[number])
        us, launches = times.get(key, (0.0, 0))
        times[key] = us + float((end - start)[of_name].sum()), launches + int(of_name.sum())
    kernels = [
        KernelTime(name=name, part=part, per_step=launches / count, us=us / count)
        for (name, part), (us, launches) in sorted(times.items(), key=lambda item: -item[1][0])
    ]
    return StepTime(
        path=path,
        kind=kind,
        steps=count,
        step_us=step_us,
        idle_us=step_us - busy / count,
        overlap_us=(total - busy) / count,
        kernels=kernels,
        exposed_part_us=_name_parts(exposed_us.tolist()),
        typical=_find_typical_step(timeline, begins, members),
    )
