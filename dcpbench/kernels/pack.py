"""Pack partial outputs and their log-sum-exp into one message per rank, for one all-to-all, and merge the received
messages.

A message is a row of fp32 words: o of the receiver's heads, [B, h, R] in its own dtype, then their lse [B, h] as fp32,
bit by bit: as many bytes as two more columns of a 16-bit o. Both parts are aligned for wide loads; rows of R + 2
columns would not be.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl

from dcpbench.kernels.merge import merge_partials

WORD = 4  # bytes of an fp32 number
ALIGNED = 16  # message parts are padded to a multiple of 16 words: Triton makes wide loads of strides that 16 divides
BLOCK = 2048  # numbers that one program of packing copies


@dataclasses.dataclass(frozen=True)
class Message:
    """Sizes of one rank's message to another: partial outputs of `heads` heads for `batch` requests."""

    batch: int
    heads: int
    columns: int
    dtype: torch.dtype

    @property
    def o_words(self) -> int:
        """Return the words of o, padding included."""
        return _count_aligned_words(self.batch * self.heads * self.columns * self.dtype.itemsize)

    @property
    def words(self) -> int:
        """Return the words of the whole message."""
        return self.o_words + _count_aligned_words(self.batch * self.heads * WORD)

    def split_views(self, packed_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return o [N, B, h, R] in its dtype and lse [N, B, h], as views of N messages."""
        o = packed_NW[:, : self.o_words].view(self.dtype)
        lse = packed_NW[:, self.o_words :]
        return _reshape_part(o, self.batch, self.heads, self.columns), _reshape_part(lse, self.batch, self.heads)


def pack_messages(o_BHR: torch.Tensor, lse_BH: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return messages to all N ranks, [N, words] fp32; H = N·h, and rank n gets heads n·h to (n + 1)·h.

    o is contiguous in fp32, fp16 or bf16, and lse in fp32. Values are not rounded; NaN in o is preserved.
    """
    batch, heads, columns = o_BHR.shape
    message = Message(batch, heads // ranks, columns, o_BHR.dtype)
    packed_NW = torch.empty(ranks, message.words, dtype=torch.float32, device=o_BHR.device)
    (pack_messages_fused if o_BHR.is_cuda else pack_messages_reference)(o_BHR, lse_BH, message, packed_NW)
    return packed_NW


def merge_messages(packed_NW: torch.Tensor, message: Message, out_hBR: torch.Tensor) -> None:
    """Merge the messages of N ranks for this rank's heads: Σ exp(lse_n − lse*)·o_n in fp32, into `out_hBR` [h, B, R].

    `out_hBR` may have any dtype and strides with a contiguous last dimension. A rank with lse −inf has weight 0 for any
    o, including NaN; if all are −inf the result is 0.
    """
    (merge_messages_fused if packed_NW.is_cuda else merge_messages_reference)(packed_NW, message, out_hBR)


def pack_messages_reference(
    o_BHR: torch.Tensor, lse_BH: torch.Tensor, message: Message, packed_NW: torch.Tensor
) -> None:
    """Slow and obvious."""
    o_NBhR, lse_NBh = message.split_views(packed_NW)
    o_NBhR.copy_(o_BHR.unflatten(1, (-1, message.heads)).transpose(0, 1))
    lse_NBh.copy_(lse_BH.unflatten(1, (-1, message.heads)).transpose(0, 1))


def merge_messages_reference(packed_NW: torch.Tensor, message: Message, out_hBR: torch.Tensor) -> None:
    """Slow and obvious."""
    o_NBhR, lse_NBh = message.split_views(packed_NW)
    out_hBR.copy_(merge_partials(o_NBhR.float(), lse_NBh).transpose(0, 1))


@triton.jit
def _pack_kernel(
    o,
    lse,
    out_o,
    out_lse,
    heads,
    length,
    message_o,
    message_lse,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    # What a request has for one rank is contiguous on both sides: h·R numbers.
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = at < length
    values = tl.load(o + (b * N + n) * length + at, mask=live)
    tl.store(out_o + n * message_o + b * length + at, values, mask=live)
    if tl.program_id(2) == 0:
        h = tl.arange(0, BLOCK_H)
        lse_h = tl.load(lse + (b * N + n) * heads + h, mask=h < heads)
        tl.store(out_lse + n * message_lse + b * heads + h, lse_h, mask=h < heads)


@triton.jit
def _combine_kernel(
    o,
    lse,
    out,
    heads,
    message_o,
    message_lse,
    out_h,
    out_b,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    row = b * heads + h
    n = tl.arange(0, N_BLOCK)
    lse_n = tl.load(lse + n.to(tl.int64) * message_lse + row, mask=n < N, other=float("-inf"))
    top = tl.max(lse_n, 0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lse_n - pivot), 0)
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    r = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(N):
        weight = tl.exp(tl.load(lse + tl.full([], i, tl.int64) * message_lse + row) - pivot) * scale
        # Read without waiting for the weight; an empty shard's o may be anything, NaN included, so it is not used.
        part = tl.load(o + tl.full([], i, tl.int64) * message_o + row * R + r, mask=r < R, other=0.0)
        acc += tl.where(weight > 0.0, part.to(tl.float32) * weight, 0.0)
    tl.store(out + h * out_h + b * out_b + r, acc.to(out.dtype.element_ty), mask=r < R)


def pack_messages_fused(o_BHR: torch.Tensor, lse_BH: torch.Tensor, message: Message, packed_NW: torch.Tensor) -> None:
    """Pack with one kernel."""
    o_NBhR, lse_NBh = message.split_views(packed_NW)
    ranks, length = packed_NW.shape[0], message.heads * message.columns
    _pack_kernel[(message.batch, ranks, triton.cdiv(length, BLOCK))](
        o_BHR,
        lse_BH,
        o_NBhR,
        lse_NBh,
        message.heads,
        length,
        o_NBhR.stride(0),
        lse_NBh.stride(0),
        N=ranks,
        BLOCK=BLOCK,
        BLOCK_H=triton.next_power_of_2(message.heads),
        num_warps=4,
    )


def merge_messages_fused(packed_NW: torch.Tensor, message: Message, out_hBR: torch.Tensor) -> None:
    """Merge with one kernel."""
    o_NBhR, lse_NBh = message.split_views(packed_NW)
    ranks = packed_NW.shape[0]
    _combine_kernel[(message.batch, message.heads)](
        o_NBhR,
        lse_NBh,
        out_hBR,
        message.heads,
        o_NBhR.stride(0),
        lse_NBh.stride(0),
        out_hBR.stride(0),
        out_hBR.stride(1),
        N=ranks,
        N_BLOCK=triton.next_power_of_2(ranks),
        R=message.columns,
        BLOCK=triton.next_power_of_2(message.columns),
        num_warps=2,
    )


def _count_aligned_words(nbytes: int) -> int:
    return -(-nbytes // (WORD * ALIGNED)) * ALIGNED


def _reshape_part(part: torch.Tensor, *sizes: int) -> torch.Tensor:
    return part[:, : math.prod(sizes)].unflatten(1, sizes)
