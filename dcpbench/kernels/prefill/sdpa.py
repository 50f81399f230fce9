"""PyTorch's attention: FlashAttention over ragged requests in half precision, else plain matrix products.

FlashAttention-2, as torch brings it, wants values as wide as keys: v has zeros behind its V columns.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.kernels.prefill import PrefillSpec, Ragged

MAX_WIDTH = 256
UNIT = 8  # FlashAttention takes heads up to so many columns, a multiple of the unit
SCORES = 1 << 24  # most scores of plain products that are held at once


class SdpaPrefill:
    """PrefillBackend of PyTorch. Use fp32, and any run on a CPU, for comparisons and not for timing."""

    def __init__(self, spec: PrefillSpec) -> None:
        self.spec = spec
        self.flash = spec.device.type == "cuda" and spec.dtype in (torch.bfloat16, torch.float16)
        self.value_width = spec.width if self.flash else spec.value
        if self.flash and (spec.width > MAX_WIDTH or spec.width % UNIT or spec.value > spec.width):
            raise UsageError(
                f"--prefill sdpa takes keys of up to {MAX_WIDTH} columns, a multiple of {UNIT}, and values no wider, not "
                f"{spec.width} and {spec.value}; use --weights-dtype fp32."
            )

    def is_compiled(self) -> bool:
        """Implement PrefillBackend.is_compiled."""
        return True

    def plan(self, q_lengths: Sequence[int], kv_lengths: Sequence[int], *, causal: bool) -> Ragged:
        """Implement PrefillBackend.plan."""
        spec = self.spec
        if not self.flash:
            return PlainRagged(tuple(q_lengths), tuple(kv_lengths), causal, spec.scale, spec.value, spec.group)
        lengths = zip(q_lengths, kv_lengths, strict=True)
        return FlashRagged(
            q_ends=_compute_ends(q_lengths, spec.device),
            kv_ends=_compute_ends(kv_lengths, spec.device),
            rows=sum(q_lengths),
            keys=sum(kv_lengths),
            max_q=max(q_lengths),
            max_kv=max(kv_lengths),
            some_empty=any(keys < queries if causal else not keys for queries, keys in lengths),
            causal=causal,
            scale=spec.scale,
            value=spec.value,
        )


class _Values(abc.ABC):
    """Base of backends that return o alone but always compute lse."""

    @abc.abstractmethod
    def run(self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Ragged.run."""

    def compute_output(
        self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor, out_ThV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Implement Ragged.compute_output."""
        o_ThV, _ = self.run(q_ThX, k_ShX, v_ShW)
        return o_ThV if out_ThV is None else out_ThV.copy_(o_ThV)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashRagged(_Values):
    """Ragged attention as PyTorch's FlashAttention."""

    q_ends: torch.Tensor  # int32 [requests + 1] on the device: first row of each request; kv_ends in the same form
    kv_ends: torch.Tensor
    rows: int
    keys: int
    max_q: int
    max_kv: int
    some_empty: bool  # True if there may be queries that see no key
    causal: bool
    scale: float
    value: int

    def run(self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Ragged.run."""
        q_ThX = q_ThX[: self.rows]
        if not self.max_kv:
            return q_ThX[..., : self.value], q_ThX.new_full(q_ThX.shape[:2], float("-inf"), dtype=torch.float32)
        o_ThX, lse_hT, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - the public name returns no lse
            q_ThX,
            k_ShX[: self.keys],
            v_ShW[: self.keys],
            self.q_ends,
            self.kv_ends,
            self.max_q,
            self.max_kv,
            0.0,
            self.causal,
            False,
            scale=self.scale,
        )
        lse_Th = lse_hT.T
        if self.some_empty:  # FlashAttention returns +inf for queries without keys
            lse_Th = lse_Th.masked_fill(lse_Th.isposinf(), float("-inf"))
        return o_ThX[..., : self.value], lse_Th


@dataclasses.dataclass(frozen=True)
class PlainRagged(_Values):
    """Ragged attention as matrix products in fp32, a block of queries at a time. No call waits for the device."""

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    causal: bool
    scale: float
    value: int
    group: int  # query heads that share a KV head

    def run(self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Ragged.run."""
        rows, heads = sum(self.q_lengths), q_ThX.shape[1]
        o_ThV = q_ThX.new_zeros(rows, heads, self.value)
        lse_Th = q_ThX.new_full((rows, heads), float("-inf"), dtype=torch.float32)
        row = first = 0
        for queries, keys in zip(self.q_lengths, self.kv_lengths, strict=True):
            mine, seen = slice(row, row + queries), slice(first, first + keys)
            if keys:
                self._run_request(q_ThX[mine], k_ShX[seen], v_ShW[seen, :, : self.value], o_ThV[mine], lse_Th[mine])
            row += queries
            first += keys
        return o_ThV, lse_Th

    def _run_request(
        self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShV: torch.Tensor, o_ThV: torch.Tensor, lse_Th: torch.Tensor
    ) -> None:
        queries, heads = q_ThX.shape[:2]
        keys = len(k_ShX)
        wide = torch.promote_types(q_ThX.dtype, torch.float32)
        k_ShX, v_ShV = (x.to(wide).repeat_interleave(self.group, dim=1) for x in (k_ShX, v_ShV))
        k_hXS, v_hSV = k_ShX.permute(1, 2, 0), v_ShV.transpose(0, 1)
        block = max(1, SCORES // (heads * keys))
        for start in range(0, queries, block):
            stop = min(start + block, queries)
            scores_hTS = q_ThX[start:stop].to(wide).transpose(0, 1) @ k_hXS * self.scale
            if self.causal:
                last_T = torch.arange(start, stop, device=q_ThX.device) + keys - queries
                hidden_TS = torch.arange(keys, device=q_ThX.device) > last_T.unsqueeze(1)
                scores_hTS.masked_fill_(hidden_TS, float("-inf"))
            lse_hT = scores_hTS.logsumexp(-1)
            weights_hTS = (scores_hTS - lse_hT.masked_fill(lse_hT.isneginf(), 0.0).unsqueeze(-1)).exp_()
            o_ThV[start:stop] = (weights_hTS @ v_hSV).transpose(0, 1)
            lse_Th[start:stop] = lse_hT.T


def _compute_ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    host = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True)
