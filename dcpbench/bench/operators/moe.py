"""Bench moe: one of the two products of a rank's experts, over the tokens of a decode step or of prompts.

    triton      our own; gate-up includes silu(gate) · up, and for decode batches gathers its rows while reading
    torch       torch's grouped product over sorted rows; gate-up without silu
    deepgemm    DeepGEMM's masked product over rows stored in a slab per expert; gate-up without silu

So the others have less work. The minimum memory traffic of a call is the weights of experts that have a row, and the
rows.

With int4 weights (int4.py) rows are in bf16, and the truth is the product with dequantised weights. Only triton has it. With fp8 weights (block_scaled.py) our gate-up also quantises the tokens before and its result after the product, as the
input of down; DeepGEMM gets rows that are quantised already. torch has no product for such scales.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import compute_relative_error, count_cold_sets, make_checked_calls
from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels import block_scaled, int4
from dcpbench.kernels.block_scaled import Scaled
from dcpbench.kernels.e4m3 import LARGEST
from dcpbench.kernels.int4 import Int4
from dcpbench.kernels.moe import decode_experts, int4_experts, prefill_experts, scaled
from dcpbench.models.weight_formats import FORMATS, FP8, INT4, SCALE_BLOCK, UNQUANTISED, WeightFormat
from dcpbench.points.memory import LinearShape
from dcpbench.points.roofline import compute_expert_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.bench_record import Case
    from dcpbench.bench.operators.calls import Calls
    from dcpbench.points.roofline import OperatorCost

LIMIT = 8e-3  # relative error past which a result is wrong: rounding it, and for gate-up its factors, to bf16
CHECKED = 8  # number of experts with rows compared with fp64: the fullest, and others spread over all
SLAB_ROWS = 64  # number of which the row count of DeepGEMM's slabs is a multiple
SPREAD = 90.0  # standard deviation of e4m3 numbers of weights: 448, the largest, is at five of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a case."""

    product: str  # `gate-up` or `down`
    experts: int  # number of experts, all on this rank, divided by width
    top_k: int
    hidden: int
    width: int  # I of one rank
    requests: int
    weights: str = "bf16"  # format of the weights: `bf16`, `fp8` or `int4`
    group_size: int = 0  # inputs per scale of int4 weights
    rows: str  # `uniform`: equal chances; `skewed`: expert i has a chance ∝ 1 / (i + 1); `few`: one in four is drawn

    @property
    def gated(self) -> bool:
        """Return True for the first product, gate-up, with hidden states as input."""
        return self.product == "gate-up"

    @property
    def block(self) -> int:
        """Return the number of which widths must be multiples."""
        return {FP8: SCALE_BLOCK, INT4: self.group_size}.get(self.weights, 1)

    @property
    def format(self) -> WeightFormat:
        """Return the format of the weights, from which their bytes follow."""
        if self.weights == INT4:
            return dataclasses.replace(FORMATS[INT4], columns=self.group_size)
        return FORMATS.get(self.weights, UNQUANTISED)

    @property
    def weight(self) -> tuple[int, int, int]:
        """Return the weight's shape [E, out, in]."""
        if self.gated:
            return self.experts, 2 * self.width, self.hidden
        return self.experts, self.hidden, self.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one call, and their expected results."""

    sizes: Sizes
    x: torch.Tensor  # gate-up: tokens [T, D]; down: rows [T·k, I], sorted by expert; for fp8 exact in e4m3
    weight: torch.Tensor | Scaled | Int4
    ids: torch.Tensor  # int32 [T, top_k]
    counts: list[int]  # rows of each expert

    @functools.cached_property
    def sorted_rows(self) -> torch.Tensor:
        """Return the rows in the order of experts, [T·k, in]."""
        if not self.sizes.gated:
            return self.x
        order = torch.sort(self.ids.flatten(), stable=True).indices
        return self.x[order // self.sizes.top_k]

    def compute_truth(self, expert: int, *, fused: bool) -> tuple[slice, torch.Tensor]:
        """Return (range of an expert's sorted rows, their expected result in fp64)."""
        begin = sum(self.counts[:expert])
        rows = slice(begin, begin + self.counts[expert])
        y = self.sorted_rows[rows].double() @ self._dequantize_weight(expert).T
        if self.sizes.gated and fused:
            gate, up = y.chunk(2, dim=-1)
            y = torch.nn.functional.silu(gate) * up
            if isinstance(self.weight, Scaled):
                y = block_scaled.dequantize_rows(block_scaled.quantize_rows_reference(y)).double()
        return rows, y

    def _dequantize_weight(self, expert: int) -> torch.Tensor:
        """Return an expert's weight as fp64 [out, in]."""
        if isinstance(self.weight, Scaled):
            one = Scaled(self.weight.data[expert], self.weight.scale[expert])
            return block_scaled.dequantize_weight(one).double()
        if isinstance(self.weight, Int4):
            return int4.dequantize(self.weight.select_expert(expert))[0].double()
        return self.weight[expert].double()

    def compute_work(self) -> OperatorCost:
        """Return the work: weights of experts that have a row, and each row read and each result written once."""
        _, height, depth = self.sizes.weight
        return compute_expert_work(
            LinearShape(depth, height),
            gated=self.sizes.gated,
            rows_in=len(self.x),
            assignments=self.ids.numel(),
            active_experts=sum(count > 0 for count in self.counts),
            itemsize=self.x.itemsize,
            weights=self.sizes.format,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedVariant:
    """A variant on its inputs."""

    call: Callable[[], tuple[torch.Tensor, ...]]
    rows: Callable[..., torch.Tensor] = lambda y: y  # converts the result of `call` to sorted rows
    fused: bool = False  # true if gate-up includes silu(gate) · up


def prepare_triton(inputs: Inputs) -> PreparedVariant:
    """Return kernels/moe as an engine calls it; the plan or the sorted rows, which both products share, are made before."""
    sizes = inputs.sizes
    if isinstance(inputs.weight, Scaled):
        return prepare_scaled(inputs, inputs.weight)
    if isinstance(inputs.weight, Int4):
        return prepare_int4(inputs, inputs.weight)
    weight = inputs.weight
    if inputs.ids.numel() > decode_experts.MAX_ASSIGNMENTS:
        rows_ID = inputs.sorted_rows
        *_, ends = prefill_experts.sort_by_expert(inputs.ids, 0, sizes.experts)
        return PreparedVariant(
            call=lambda: (prefill_experts.compute_grouped_gemm(rows_ID, weight, ends, gated=sizes.gated),),
            fused=True,
        )
    plan = decode_experts.align_tokens_to_experts(inputs.ids, 0, sizes.experts)
    return PreparedVariant(
        call=lambda: (decode_experts.compute_grouped_gemm(inputs.x, weight, plan, sizes.top_k, gated=sizes.gated),),
        fused=True,
    )


def prepare_scaled(inputs: Inputs, weight: Scaled) -> PreparedVariant:
    """Return the calls over fp8 weights; gate-up includes the quantisation of its tokens."""
    plan = scaled.plan_products(inputs.ids, 0, inputs.sizes.experts)
    top_k = inputs.sizes.top_k
    if inputs.sizes.gated:

        def run_gate_up() -> tuple[torch.Tensor, torch.Tensor]:
            hidden = scaled.compute_gate_up(block_scaled.quantize_rows(inputs.x), weight, plan, top_k)
            return hidden.data, hidden.scale

        return PreparedVariant(
            call=run_gate_up, rows=lambda data, scale: block_scaled.dequantize_rows(Scaled(data, scale)), fused=True
        )
    rows = block_scaled.quantize_rows(inputs.x)
    return PreparedVariant(call=lambda: (scaled.compute_down(rows, weight, plan, top_k),))


def prepare_int4(inputs: Inputs, weight: Int4) -> PreparedVariant:
    """Return the calls over int4 weights and bf16 rows."""
    sizes = inputs.sizes
    plan = int4_experts.plan_products(inputs.ids, 0, sizes.experts)
    return PreparedVariant(
        call=lambda: (int4_experts.compute_grouped_gemm(inputs.x, weight, plan, sizes.top_k, gated=sizes.gated),),
        fused=True,
    )


def prepare_torch(inputs: Inputs) -> PreparedVariant:
    """Return a call of `torch._grouped_mm`. Raise UsageError for weights with scales."""
    if isinstance(inputs.weight, Int4):
        raise UsageError("torch has no grouped product for int4; use --variant triton with --weights int4.")
    if isinstance(inputs.weight, Scaled):
        raise UsageError(
            "torch has no grouped product for block scales; use --variant triton,deepgemm with --weights fp8."
        )
    rows_ID, weight = inputs.sorted_rows, inputs.weight.transpose(-2, -1)
    *_, ends = prefill_experts.sort_by_expert(inputs.ids, 0, inputs.sizes.experts)
    grouped_mm = torch._grouped_mm  # noqa: SLF001 - public only from 2.12 on
    return PreparedVariant(call=lambda: (grouped_mm(rows_ID, weight, offs=ends),))


def prepare_deepgemm(inputs: Inputs) -> PreparedVariant:
    """Return a call of DeepGEMM's masked grouped product in bf16 or fp8. Raise MissingPackageError without it, and UsageError for int4."""
    if isinstance(inputs.weight, Int4):
        raise UsageError("DeepGEMM has no product of int4 and bf16; use --variant triton with --weights int4.")
    try:
        import deep_gemm
    except ImportError as e:
        raise MissingPackageError(
            f"--variant deepgemm needs DeepGEMM ({e}); install sgl-deep-gemm, or leave it out with "
            "--variant triton,torch."
        ) from e
    counts = inputs.counts
    slab = -(-max(counts) // SLAB_ROWS) * SLAB_ROWS
    rows = inputs.sorted_rows
    x = rows.new_zeros(len(counts), slab, rows.shape[1])
    used = torch.arange(slab, device=x.device)[None] < torch.tensor(counts, device=x.device)[:, None]
    x[used] = rows
    y = torch.empty(len(counts), slab, inputs.sizes.weight[1], dtype=x.dtype, device=x.device)
    masked = torch.tensor(counts, dtype=torch.int32, device=x.device)
    expected = -(-sum(counts) // len(counts))
    weight = inputs.weight
    if isinstance(weight, Scaled):
        flat = block_scaled.quantize_rows(x.flatten(0, 1))
        x8 = flat.data.view(x.shape), flat.scale.contiguous().view(*x.shape[:2], -1)
        weight8 = weight.data, weight.scale

        def run_call() -> tuple[torch.Tensor]:
            deep_gemm.fp8_m_grouped_gemm_nt_masked(x8, weight8, y, masked, expected)
            return (y,)
    else:

        def run_call() -> tuple[torch.Tensor]:
            deep_gemm.m_grouped_bf16_gemm_nt_masked(x, weight, y, masked, expected)
            return (y,)

    return PreparedVariant(call=run_call, rows=lambda y: y[used])


VARIANTS: dict[str, Callable[[Inputs], PreparedVariant]] = {
    "triton": prepare_triton,
    "torch": prepare_torch,
    "deepgemm": prepare_deepgemm,
}


class Moe:
    """Build cases. The weights are kept for the following cases, because drawing a whole model takes seconds."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._weights: tuple[tuple[object, ...], list[torch.Tensor | Scaled | Int4]] = ((), [])

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case with the sizes of `Sizes`."""
        sizes = Sizes(**case.sizes)  # type: ignore[arg-type]
        if sizes.width % sizes.block or sizes.hidden % sizes.block:
            raise UsageError(
                f"experts {sizes.width} of {sizes.hidden} wide have no whole blocks of {sizes.block}; --weights {sizes.weights} takes "
                "--model deepseek-v3."
            )
        random = torch.Generator(self.device).manual_seed(self.seed)
        inputs = self._make_inputs(sizes, random)
        work = inputs.compute_work()
        count = case.calls or count_cold_sets(work.memory_bytes, self.device)
        sets = [dataclasses.replace(inputs, weight=weight) for weight in self._get_weights(sizes, count)]
        ready = [VARIANTS[case.variant](each) for each in sets]
        fullest = max(range(sizes.experts), key=lambda e: inputs.counts[e])
        chosen = {fullest, *range(0, sizes.experts, max(1, sizes.experts // CHECKED))}
        chosen = {e for e in chosen if inputs.counts[e]}

        def compute_error(results: Sequence[tuple[torch.Tensor, ...]]) -> float:
            found, wanted = [], []
            for number in (0, count - 1):
                y = ready[number].rows(*results[number])
                for expert in chosen:
                    rows, truth = sets[number].compute_truth(expert, fused=ready[number].fused)
                    found.append(y[rows].double().flatten())
                    wanted.append(truth.flatten())
            return compute_relative_error(torch.cat(found), torch.cat(wanted))

        calls = [each.call for each in ready]
        return make_checked_calls(calls, compute_error, LIMIT, work=work, written_bytes=count * work.memory_bytes)

    def _make_inputs(self, sizes: Sizes, random: torch.Generator) -> Inputs:
        chance = torch.ones(sizes.experts, device=self.device)
        if sizes.rows == "skewed":
            chance = 1 / torch.arange(1, sizes.experts + 1, device=self.device)
        if sizes.rows == "few":
            chance[torch.arange(sizes.experts, device=self.device) % min(4, sizes.experts // sizes.top_k) != 0] = 0
        ids_Tk = torch.multinomial(chance.expand(sizes.requests, -1), sizes.top_k, generator=random).int()
        rows = sizes.requests if sizes.gated else ids_Tk.numel()
        x = torch.randn(rows, sizes.weight[2], generator=random, device=self.device).to(self.dtype)
        if sizes.weights == "fp8":
            x = make_exact(x)
        counts = torch.bincount(ids_Tk.flatten(), minlength=sizes.experts).tolist()
        one = self._draw_weight(sizes, 1, random)
        return Inputs(sizes=sizes, x=x, weight=one, ids=ids_Tk, counts=counts)

    def _get_weights(self, sizes: Sizes, count: int) -> list[torch.Tensor | Scaled | Int4]:
        kept, weights = self._weights
        key = (sizes.weight, sizes.format)
        if kept != key:
            self._weights = (key, weights := [])
        random = torch.Generator(self.device).manual_seed(self.seed + 1)
        while len(weights) < count:
            weights.append(self._draw_weight(sizes, sizes.experts, random))
        return weights[:count]

    def _draw_weight(self, sizes: Sizes, experts: int, random: torch.Generator) -> torch.Tensor | Scaled | Int4:
        _, height, depth = sizes.weight
        if sizes.weights == INT4:
            return int4.draw_random((experts, height, depth), sizes.group_size, depth**-0.5, random)
        return make_weights((experts, height, depth), sizes.weights, self.dtype, random)


def make_weights(
    shape: tuple[int, ...], weights: str, dtype: torch.dtype, random: torch.Generator
) -> torch.Tensor | Scaled:
    """Return normal numbers [..., N, K] that preserve the norm of their input; fp8 expert by expert, to save memory."""
    device, deviation = random.device, shape[-1] ** -0.5
    if weights == "fp8":
        data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        blocks = *shape[:-2], -(-shape[-2] // SCALE_BLOCK), -(-shape[-1] // SCALE_BLOCK)
        for matrix in data.view(-1, *shape[-2:]):
            wide = torch.randn(shape[-2:], generator=random, device=device) * SPREAD
            matrix.copy_(wide.clamp(-LARGEST, LARGEST))
        scale = 0.5 + torch.rand(blocks, generator=random, device=device)
        return Scaled(data, scale * (deviation / SPREAD))
    weight = torch.empty(shape, dtype=dtype, device=device)
    return weight.normal_(0, deviation, generator=random)


def make_exact(x_TK: torch.Tensor) -> torch.Tensor:
    """Return numbers near the given ones that e4m3 represents exactly, with group scales that are powers of two."""
    x = (x_TK.float() * 2.0**6).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
    x[:, ::SCALE_BLOCK] = LARGEST
    return (x * 2.0**-6).to(x_TK.dtype)
