"""torch's own attention. In half precision its FlashAttention over ragged requests, else plain matrix products.

FlashAttention-2, as torch brings it, wants values as wide as keys: v has zeros behind its V columns.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch

from dcpbench.errors import UsageError
from dcpbench.kernels.prefill.plain import PlainRagged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.kernels.prefill import PrefillSpec, Ragged

WIDEST = 256
UNIT = 8
"""FlashAttention takes heads up to so many columns, a multiple of the unit."""


class SdpaPrefill:
    """See PrefillBackend. fp32, and whatever runs on a CPU, is for comparisons and not for timing."""

    name = "sdpa"

    def __init__(self, spec: PrefillSpec) -> None:
        self.spec = spec
        self.flash = spec.device.type == "cuda" and spec.dtype in (torch.bfloat16, torch.float16)
        self.value_width = spec.width if self.flash else spec.value
        if self.flash and (spec.width > WIDEST or spec.width % UNIT or spec.value > spec.width):
            raise UsageError(
                f"--prefill sdpa takes keys of up to {WIDEST} columns, a multiple of {UNIT}, and values no wider, not "
                f"{spec.width} and {spec.value}; use --dtype fp32."
            )

    def plan(self, q_lengths: Sequence[int], kv_lengths: Sequence[int], *, causal: bool) -> Ragged:
        """See PrefillBackend."""
        spec = self.spec
        if not self.flash:
            return PlainRagged(tuple(q_lengths), tuple(kv_lengths), causal, spec.scale, spec.value)
        lengths = zip(q_lengths, kv_lengths, strict=True)
        return FlashRagged(
            q_ends=_ends(q_lengths, spec.device),
            kv_ends=_ends(kv_lengths, spec.device),
            rows=sum(q_lengths),
            keys=sum(kv_lengths),
            most_q=max(q_lengths),
            most_kv=max(kv_lengths),
            some_empty=any(keys < queries if causal else not keys for queries, keys in lengths),
            causal=causal,
            scale=spec.scale,
            value=spec.value,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashRagged:
    """See Ragged."""

    q_ends: torch.Tensor
    """int32 [requests + 1] on the device: where rows of each request begin; kv_ends likewise."""
    kv_ends: torch.Tensor
    rows: int
    keys: int
    most_q: int
    most_kv: int
    some_empty: bool
    """Whether there may be queries that see no key."""
    causal: bool
    scale: float
    value: int

    def run(self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ragged."""
        q_ThX = q_ThX[: self.rows]
        if not self.most_kv:
            return q_ThX[..., : self.value], q_ThX.new_full(q_ThX.shape[:2], float("-inf"), dtype=torch.float32)
        o_ThX, lse_hT, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - the public name returns no lse
            q_ThX,
            k_ShX[: self.keys],
            v_ShW[: self.keys],
            self.q_ends,
            self.kv_ends,
            self.most_q,
            self.most_kv,
            0.0,
            self.causal,
            False,
            scale=self.scale,
        )
        lse_Th = lse_hT.T
        if self.some_empty:  # FlashAttention says +inf where it found nothing
            lse_Th = lse_Th.masked_fill(lse_Th.isposinf(), float("-inf"))
        return o_ThX[..., : self.value], lse_Th


def _ends(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    host = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True)
