"""Bench merge: the kernels around a DCP group's collectives, each by itself, on one GPU.

    head-order   both NCCL exchanges: gathered queries, rank after rank, in the order of heads
    correct      ag_rs: a rank's share of the merged output, exp(lse_rank − lse*)·o, heads first, fp32
    pack         a2a: partial outputs and lse as one message for each rank
    combine      a2a: the messages of all ranks merged, fp32
    value-proj   W_UV on the merged output: fp32 latent columns of a rank's heads to value columns

A pass loops over enough sets of tensors to keep the L2 cache cold; in an engine their inputs would still be in it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import compute_relative_error, count_cold_sets, make_checked_calls
from dcpbench.kernels import merge as kernels
from dcpbench.kernels.head_order import to_head_order
from dcpbench.kernels.merge import compute_weights
from dcpbench.kernels.pack import Message, merge_messages, pack_messages
from dcpbench.kernels.value_proj import project_values
from dcpbench.models.shapes import KV_WIDTH, LATENT, VALUE
from dcpbench.points.roofline import OperatorCost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.bench_record import Case
    from dcpbench.bench.operators.calls import Calls

DTYPE = torch.bfloat16
LIMIT = 5e-3  # maximum relative error of a correct result: the rounding to bf16; inputs are exact


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a case."""

    heads: int
    requests: int
    dcp: int

    @property
    def own(self) -> int:
        """Return the heads of one rank."""
        return self.heads // self.dcp


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedOp:
    """An operator on one set of tensors."""

    call: Callable[[], tuple[torch.Tensor, ...]]
    truth: Callable[[], tuple[torch.Tensor, ...]]  # expected result of `call`, in fp64
    work: OperatorCost


def prepare_head_order(s: Sizes, numbers: Callable[..., torch.Tensor]) -> PreparedOp:
    """Return the kernel for q [N, B, h, Q] to [B, H, Q], bf16."""
    q_NBhQ = numbers(s.dcp, s.requests, s.own, KV_WIDTH).to(DTYPE)
    return PreparedOp(
        call=lambda: (to_head_order(q_NBhQ),),
        truth=lambda: (q_NBhQ.transpose(0, 1).flatten(1, 2),),
        work=OperatorCost(memory_bytes=2 * q_NBhQ.nbytes),
    )


def prepare_pack(s: Sizes, numbers: Callable[..., torch.Tensor]) -> PreparedOp:
    """Return the kernel for o [B, H, R] in bf16 and lse [B, H] to N messages."""
    o_BHR, lse_BH = numbers(s.requests, s.heads, LATENT).to(DTYPE), numbers(s.requests, s.heads)
    message = Message(s.requests, s.own, LATENT, DTYPE)
    return PreparedOp(
        call=lambda: message.split_views(pack_messages(o_BHR, lse_BH, s.dcp)),
        truth=lambda: (_split_by_rank(o_BHR, s.own), _split_by_rank(lse_BH, s.own)),
        work=OperatorCost(memory_bytes=2 * (o_BHR.nbytes + lse_BH.nbytes)),
    )


def prepare_combine(s: Sizes, numbers: Callable[..., torch.Tensor]) -> PreparedOp:
    """Return the kernel for N messages of o in bf16 and lse to [h, B, R] in fp32."""
    message = Message(s.requests, s.own, LATENT, DTYPE)
    packed_NW = numbers(s.dcp, message.words)
    o_NBhR, lse_NBh = message.split_views(packed_NW)
    o_NBhR.copy_(numbers(*o_NBhR.shape))
    out_hBR = numbers(s.own, s.requests, LATENT)

    def run_call() -> tuple[torch.Tensor, ...]:
        merge_messages(packed_NW, message, out_hBR)
        return (out_hBR,)

    return PreparedOp(
        call=run_call,
        truth=lambda: (kernels.merge_partials(o_NBhR.double(), lse_NBh.double()).transpose(0, 1),),
        work=OperatorCost(memory_bytes=2 * o_NBhR.numel() + lse_NBh.numel() * 4 + out_hBR.nbytes),
    )


def prepare_correct(s: Sizes, numbers: Callable[..., torch.Tensor]) -> PreparedOp:
    """Return the kernel for o [B, H, R] in bf16 and lse [N, B, H] to [H, B, R] in fp32."""
    o_BHR = numbers(s.requests, s.heads, LATENT).to(DTYPE)
    lse_NBH = 3 * numbers(s.dcp, s.requests, s.heads)
    rank = s.dcp - 1
    return PreparedOp(
        call=lambda: (kernels.correct_attn_out(o_BHR, lse_NBH, rank, torch.float32),),
        truth=lambda: ((compute_weights(lse_NBH.double())[rank].unsqueeze(-1) * o_BHR.double()).transpose(0, 1),),
        work=OperatorCost(memory_bytes=o_BHR.nbytes + lse_NBH.nbytes + 4 * o_BHR.numel()),
    )


def prepare_value_proj(s: Sizes, numbers: Callable[..., torch.Tensor]) -> PreparedOp:
    """Return the kernel for o [h, B, R] in fp32 and W_UV [h, R, V] in bf16 to [B, h, V] in bf16."""
    o_hBR = numbers(s.own, s.requests, LATENT)
    w_uv = (numbers(s.own, LATENT, VALUE) / LATENT**0.5).to(DTYPE)
    out_bytes = s.requests * s.own * VALUE * DTYPE.itemsize
    return PreparedOp(
        call=lambda: (project_values(o_hBR, w_uv, DTYPE),),
        truth=lambda: (torch.bmm(o_hBR.double(), w_uv.double()).transpose(0, 1),),
        work=OperatorCost(
            memory_bytes=o_hBR.nbytes + w_uv.nbytes + out_bytes, flops=2 * s.requests * s.own * LATENT * VALUE
        ),
    )


VARIANTS: dict[str, Callable[[Sizes, Callable[..., torch.Tensor]], PreparedOp]] = {
    "head-order": prepare_head_order,
    "correct": prepare_correct,
    "pack": prepare_pack,
    "combine": prepare_combine,
    "value-proj": prepare_value_proj,
}


def _split_by_rank(x_BH: torch.Tensor, own: int) -> torch.Tensor:
    """Return [N, B, h, …] from [B, H, …]."""
    return x_BH.unflatten(1, (-1, own)).transpose(0, 1)


class Merge:
    """Build cases."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case with sizes heads, requests and dcp."""
        sizes = Sizes(**{name: int(value) for name, value in case.sizes.items()})
        random = torch.Generator(self.device).manual_seed(self.seed)

        def prepare_op() -> PreparedOp:
            return VARIANTS[case.variant](
                sizes, lambda *shape: torch.randn(shape, generator=random, device=self.device)
            )

        sets = [prepare_op()]
        work = sets[0].work
        count = case.calls or count_cold_sets(work.memory_bytes, self.device)
        sets += [prepare_op() for _ in range(count - 1)]
        truths = {number: sets[number].truth() for number in (0, count - 1)}

        def compute_error(results: Sequence[tuple[torch.Tensor, ...]]) -> float:
            return max(
                compute_relative_error(got, truth)
                for number, wanted in truths.items()
                for got, truth in zip(results[number], wanted, strict=True)
            )

        calls = [each.call for each in sets]
        return make_checked_calls(calls, compute_error, LIMIT, work=work, written_bytes=count * work.memory_bytes)
