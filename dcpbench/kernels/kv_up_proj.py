"""Keys and values of prompts for one rank's heads, from stored and new latent rows.

    lay          rows in the order and dtype of the attention: request by request, stored rows followed by new ones
    decompress   keys (nope ‖ rope) and values of all heads

The number of rows, and their sources, are read on the device, so that one CUDA graph serves any prefix: as many
programs as the GPU holds loop over the existing rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dcpbench.kernels.e4m3 import e4m3_number
from dcpbench.kernels.kv_write import copy_rows, split_width
from dcpbench.kernels.linear import count_multiprocessors

ROWS, COPIES = 16, 4  # rows that a program of `gather_rows` has under way, and programs for each multiprocessor
SIDE, WIDE_SIDE, BLOCK_BYTES, PRODUCTS = 128, 32, 128, 2
"""Rows and most columns of a tile of `decompress_latents`, and of one in fp32, which is for comparisons; bytes of its depth; and
programs for each multiprocessor: of so many one adds up while the other stores."""
MIN_DOT_SIZE = 16  # side of the smallest product that the tensor cores take
UNIT = 16  # row size in bytes required by tensor descriptors: a multiple of this


def gather_rows(
    out_SQ: torch.Tensor,
    stored_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    count: torch.Tensor,
    place_S: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Fill the first `count` rows of `out_SQ` with `stored_KQ[place]`, or `new_BQ[-1 - place]` for a negative place.

    count is int32 [1], place_S int32 [S or more]. stored_KQ is of the dtype of the two others, or float8_e4m3fn of numbers that were
    divided by `scale`. All rows are contiguous. No host sync; further rows are left alone.
    """
    (gather_rows_fused if out_SQ.is_cuda else gather_rows_reference)(out_SQ, stored_KQ, new_BQ, count, place_S, scale)


def decompress_latents(
    row_SQ: torch.Tensor,
    count: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    key_ShX: torch.Tensor,
    value_ShW: torch.Tensor,
) -> None:
    """Compute keys row[:R] · W_UK ‖ row[R:] and values row[:R] · W_UV of the first `count` rows. fp32 accumulation.

    w_uk [h, nope, R], w_uv [h, R, V]; X = nope + P, and of W ≥ V columns those behind V are left alone, as further rows
    are. count is int32 [1]; weights are contiguous, and so are the last dimensions of all. No host sync. Raises
    ValueError for widths of rows, latent part and values that are no multiples of 16 bytes.
    """
    (decompress_latents_fused if row_SQ.is_cuda else decompress_latents_reference)(
        row_SQ, count, w_uk, w_uv, key_ShX, value_ShW
    )


def gather_rows_reference(
    out_SQ: torch.Tensor,
    stored_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    count: torch.Tensor,
    place_S: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Gather the stored rows and then the new rows."""
    place_S = place_S[: int(count)].long()
    stored_S = place_S >= 0
    out_SQ = out_SQ[: len(place_S)]
    out_SQ[~stored_S] = new_BQ[-1 - place_S[~stored_S]]
    found_JQ = stored_KQ[place_S[stored_S]].to(out_SQ.dtype)
    out_SQ[stored_S] = found_JQ * scale if stored_KQ.dtype != out_SQ.dtype else found_JQ


def decompress_latents_reference(
    row_SQ: torch.Tensor,
    count: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    key_ShX: torch.Tensor,
    value_ShW: torch.Tensor,
) -> None:
    """Two products, in the dtype of the rows."""
    rows, nope, latent = int(count), w_uk.shape[1], w_uk.shape[2]
    latent_SR, rope_SP = row_SQ[:rows, :latent], row_SQ[:rows, latent:]
    key_ShX[:rows, :, :nope] = torch.einsum("sr,hnr->shn", latent_SR, w_uk)
    key_ShX[:rows, :, nope:] = rope_SP.unsqueeze(1)
    value_ShW[:rows, :, : w_uv.shape[2]] = torch.einsum("sr,hrv->shv", latent_SR, w_uv)


@triton.jit
def _widened(source, target, live, scale, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """Live rows of bytes of e4m3 as numbers, in two parts as in copy_rows."""
    h = tl.arange(0, HEAD)[None, :]
    t = HEAD + tl.arange(0, TAIL)[None, :]
    in_head = live[:, None] & (h < WIDTH)
    in_tail = live[:, None] & (t < WIDTH)
    head = e4m3_number(tl.load(source + h, mask=in_head, other=0)) * scale
    tail = e4m3_number(tl.load(source + t, mask=in_tail, other=0)) * scale
    tl.store(target + h, head.to(target.dtype.element_ty), mask=in_head)
    tl.store(target + t, tail.to(target.dtype.element_ty), mask=in_tail)


# Places may begin anywhere in a longer tensor, without recompilation.
@triton.jit(do_not_specialize_on_alignment=["count", "places"])
def _lay_kernel(
    out,
    stored,
    new,
    count,
    places,
    scale,
    E4M3: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.load(count)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        s = first + tl.arange(0, ROWS)
        live = s < rows
        place = tl.load(places + s, mask=live, other=0).to(tl.int64)
        target = (out + s.to(tl.int64) * WIDTH)[:, None]
        fresh = (new + (-1 - place) * WIDTH)[:, None]
        copy_rows(fresh, target, live & (place < 0), 1.0, WIDTH, HEAD, TAIL, False, False, False)
        old = (stored + place * WIDTH)[:, None]
        if E4M3:
            _widened(old, target, live & (place >= 0), scale, WIDTH, HEAD, TAIL)
        else:
            copy_rows(old, target, live & (place >= 0), 1.0, WIDTH, HEAD, TAIL, False, False, False)


def gather_rows_fused(
    out_SQ: torch.Tensor,
    stored_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    count: torch.Tensor,
    place_S: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Gather with one kernel."""
    e4m3 = stored_KQ.dtype != out_SQ.dtype
    _lay_kernel[(_count_programs(out_SQ.device, COPIES, triton.cdiv(len(out_SQ), ROWS)),)](
        out_SQ,
        stored_KQ.view(torch.uint8) if e4m3 else stored_KQ,
        new_BQ,
        count,
        place_S,
        scale,
        E4M3=e4m3,
        **split_width(out_SQ.shape[1]),
        ROWS=ROWS,
        num_warps=8,
    )


@triton.jit(do_not_specialize_on_alignment=["count"])
def _decompress_kernel(
    latent,
    ropes,
    count,
    weights,
    out,
    heads,
    row_s,
    out_s,
    out_h,
    R: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    live = tl.load(count)
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tl.cdiv(live, BLOCK_S) * heads * blocks
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # Neighbours read the same rows.
        first = tile // (heads * blocks) * BLOCK_S
        h = tile // blocks % heads
        block = tile % blocks * BLOCK_N
        acc = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
        for at in range(0, R, BLOCK_R):
            x_SR = latent.load([first, at])
            w_RN = weights.load([h * R + at, block]) if ACROSS else weights.load([h * N + block, at]).T
            acc = tl.dot(x_SR, w_RN, acc, input_precision="ieee")
        s = first + tl.arange(0, BLOCK_S)
        n = block + tl.arange(0, BLOCK_N)
        inside = (s < live)[:, None]
        target = out + s.to(tl.int64)[:, None] * out_s + h * out_h
        tl.store(target + n[None, :], acc.to(out.dtype.element_ty), mask=inside & (n < N)[None, :])
        if block == 0:
            p = tl.arange(0, BLOCK_P)[None, :]
            tail = inside & (p < P)
            rope = tl.load(ropes + s.to(tl.int64)[:, None] * row_s + p, mask=tail)
            tl.store(target + N + p, rope, mask=tail)


def decompress_latents_fused(
    row_SQ: torch.Tensor,
    count: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    key_ShX: torch.Tensor,
    value_ShW: torch.Tensor,
) -> None:
    """Launch one kernel for keys and one for values.

    Tensor descriptors fetch both operands; past R columns of a row there are zeros.
    Rows behind the count, as far as the last tile reaches, are multiplied and not stored.
    """
    heads, latent, value = w_uv.shape
    if any(size * row_SQ.itemsize % UNIT for size in (row_SQ.shape[1], latent, value)):
        raise ValueError(f"rows {row_SQ.shape[1]}, {latent} and {value} wide must be multiples of {UNIT} bytes")
    side = SIDE if row_SQ.itemsize < torch.float32.itemsize else WIDE_SIDE
    latent_SR, ropes = row_SQ[:, :latent], row_SQ[:, latent:]
    step = min(max(triton.next_power_of_2(latent), MIN_DOT_SIZE), BLOCK_BYTES // row_SQ.itemsize)
    for weight, columns, across, out, tail in (
        (w_uk, w_uk.shape[1], False, key_ShX, ropes.shape[1]),
        (w_uv, value, True, value_ShW, 0),
    ):
        block = min(max(triton.next_power_of_2(columns), MIN_DOT_SIZE), side)
        tiles = triton.cdiv(len(row_SQ), side) * heads * triton.cdiv(columns, block)
        _decompress_kernel[(_count_programs(row_SQ.device, PRODUCTS, tiles),)](
            TensorDescriptor.from_tensor(latent_SR, [side, step]),
            ropes,
            count,
            TensorDescriptor.from_tensor(weight.flatten(0, 1), [step, block] if across else [block, step]),
            out,
            heads,
            row_SQ.stride(0),
            *out.stride()[:2],
            R=latent,
            N=columns,
            P=tail,
            ACROSS=across,
            BLOCK_S=side,
            BLOCK_N=block,
            BLOCK_R=step,
            BLOCK_P=triton.next_power_of_2(max(tail, 1)),
            num_warps=8,
            num_stages=3,
        )


def _count_programs(device: torch.device, each: int, tiles: int) -> int:
    """Return the number of programs: a fixed number per multiprocessor, and at most the number of tiles."""
    return max(min(each * count_multiprocessors(device), tiles), 1)
