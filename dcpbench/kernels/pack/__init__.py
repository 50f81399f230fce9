"""Partial outputs and their log-sum-exp as one message per rank, for one all-to-all, and the merge of what it brings.

A message is a row of fp32 words: o of the receiver's heads, [B, h, R] in its own dtype, then their lse [B, h] as fp32,
bit by bit: two columns more of a 16-bit o. Both parts begin where wide loads can; rows of R + 2
columns would not.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

WORD = 4
"""Bytes of an fp32 number."""
ALIGNED = 16
"""Words that a part of a message is padded to a multiple of: Triton makes wide loads of strides that 16 divides."""


@dataclasses.dataclass(frozen=True)
class Message:
    """Sizes of one rank's message to another: partial outputs of `heads` heads for `batch` requests."""

    batch: int
    heads: int
    columns: int
    dtype: torch.dtype

    @property
    def o_words(self) -> int:
        """Words that o takes, padding included."""
        return _aligned(self.batch * self.heads * self.columns * self.dtype.itemsize)

    @property
    def words(self) -> int:
        """Words of the whole message."""
        return self.o_words + _aligned(self.batch * self.heads * WORD)

    def views(self, wire_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """o [N, B, h, R] in its dtype and lse [N, B, h], in the memory of N messages."""
        o = wire_NW[:, : self.o_words].view(self.dtype)
        return _view(o, (self.batch, self.heads, self.columns)), _view(
            wire_NW[:, self.o_words :], (self.batch, self.heads)
        )


def pack(o_BHR: torch.Tensor, lse_BH: torch.Tensor, ranks: int) -> torch.Tensor:
    """Messages to all N ranks, [N, words] fp32; H = N·h, and rank n gets heads n·h to (n + 1)·h.

    o is contiguous in fp32, fp16 or bf16, and lse in fp32. Nothing is rounded; NaN in o travels as it is.
    """
    batch, heads, columns = o_BHR.shape
    message = Message(batch, heads // ranks, columns, o_BHR.dtype)
    wire_NW = torch.empty(ranks, message.words, dtype=torch.float32, device=o_BHR.device)
    if o_BHR.is_cuda:
        from dcpbench.kernels.pack.fused import pack as chosen
    else:
        from dcpbench.kernels.pack.reference import pack as chosen
    chosen(o_BHR, lse_BH, message, wire_NW)
    return wire_NW


def combine(wire_NW: torch.Tensor, message: Message, out_hBR: torch.Tensor) -> None:
    """Merge what N ranks sent for this rank's heads: Σ exp(lse_n − lse*)·o_n in fp32, into `out_hBR` [h, B, R].

    `out` may have any dtype and strides, its last dimension being contiguous. A rank whose lse is −inf has weight 0,
    whatever its o holds, NaN included; where all are −inf the result is 0.
    """
    if wire_NW.is_cuda:
        from dcpbench.kernels.pack.fused import combine as chosen
    else:
        from dcpbench.kernels.pack.reference import combine as chosen
    chosen(wire_NW, message, out_hBR)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // (WORD * ALIGNED)) * ALIGNED


def _view(part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return part[:, : math.prod(sizes)].unflatten(1, sizes)
