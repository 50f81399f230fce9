"""Write new tokens' KV rows into a rank's pool; only the owner of a location stores it. Nothing is counted on the host.

A program takes TILE tokens and stores those that are this rank's, ROWS at a time: 16 bytes per thread, all of them
loaded before the first is stored. If every token may be this rank's, TILE = ROWS. If one of `share` is, TILE is larger,
and the program first numbers its own tokens, so that others cost only the load of their location.

Dependent launch: the GPU may set up this kernel's programs while the preceding kernel still runs. Two rules keep that
correct. No program reads data that the preceding kernel may have written before `gdc_wait`, and every program waits,
even one that stores nothing: otherwise this kernel could end before the preceding one, and dependents of this one would
read too early.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dcpbench.kernels import e4m3
from dcpbench.kernels.e4m3 import LARGEST, e4m3_byte
from dcpbench.points import layout

if TYPE_CHECKING:
    from dcpbench.kernels.kv_indices import DcpShard

NUMBERED_FROM = 8192  # number of tokens from which programs number the rows that they store, if few are stored


def write_kv(
    kv_KQ: torch.Tensor, new_BQ: torch.Tensor, loc_B: torch.Tensor, shard: DcpShard, scale: float = 1.0
) -> None:
    """Store `new_BQ[b]` at row(loc_B[b]) of `kv_KQ` where owner(loc_B[b]) is the rank; skip loc < 0. No host sync.

    loc_B is an int32 or int64 tensor of virtual locations (layout.get_owner, layout.get_row), no two of them the same row.
    kv_KQ has the dtype of new_BQ, or is float8_e4m3fn, or uint8 with e4m3 bytes: then the stored value is new × (1 /
    scale), rounded to nearest and bounded by ±448. Rows of other ranks are not read.
    """
    (write_kv_fused if kv_KQ.is_cuda else write_kv_reference)(kv_KQ, new_BQ, loc_B, shard, scale)


def write_kv_reference(
    kv_KQ: torch.Tensor, new_BQ: torch.Tensor, loc_B: torch.Tensor, shard: DcpShard, scale: float = 1.0
) -> None:
    """Write one row at a time with the integer arithmetic of layout.py."""
    for b, loc in enumerate(loc_B.tolist()):
        if loc >= 0 and layout.get_owner(loc, shard.dcp, shard.interleave) == shard.rank:
            kv_KQ[layout.get_row(loc, shard.dcp, shard.interleave)] = convert_to_stored(new_BQ[b], kv_KQ.dtype, scale)


def convert_to_stored(new: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return `new` in a pool's `dtype`: unchanged, or new × (1 / scale) clamped to ±448 as float8_e4m3fn.

    A pool of uint8 gets the bytes of the float8 numbers. The product is fp32, as in the kernel.
    """
    if dtype.itemsize > 1:
        return new
    numbers = (new.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers if dtype == torch.float8_e4m3fn else numbers.view(dtype)


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    """Wait for the previous kernel, and then allow the next one to be set up."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def copy_rows(
    source,
    target,
    live,
    inverse_scale,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Live rows of two columns of addresses, in two parts, as a block's width is a power of two: 576 = 512 + 64."""
    h = tl.arange(0, HEAD)[None, :]
    t = HEAD + tl.arange(0, TAIL)[None, :]
    in_head = live[:, None]
    in_tail = live[:, None] & (t < WIDTH)
    head = tl.load(source + h, mask=in_head)
    tail = tl.load(source + t, mask=in_tail)
    if FP8:
        head = e4m3_byte(head.to(tl.float32) * inverse_scale, NATIVE)
        tail = e4m3_byte(tail.to(tl.float32) * inverse_scale, NATIVE)
    _wait(DEPENDENT)
    tl.store(target + h, head, mask=in_head)
    tl.store(target + t, tail, mask=in_tail)


@triton.jit(do_not_specialize=["tokens", "rank"])
def _write_kernel(
    kv,
    new,
    places,
    tokens,
    kv_stride,
    new_stride,
    inverse_scale,
    rank,
    DCP: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    _wait(DEPENDENT)
    first = tl.program_id(0) * TILE
    t = tl.arange(0, TILE)
    place = tl.load(places + first + t, mask=first + t < tokens, other=-1)
    stripe = place // INTERLEAVE
    live = (place >= 0) & (stripe % DCP == rank)
    row = stripe // DCP * INTERLEAVE + place % INTERLEAVE
    if TILE == ROWS:
        source = new + (first + t).to(tl.int64)[:, None] * new_stride
        target = kv + row.to(tl.int64)[:, None] * kv_stride
        copy_rows(source, target, live, inverse_scale, WIDTH, HEAD, TAIL, FP8, NATIVE, False)
    else:
        count = tl.sum(live.to(tl.int32), 0)
        number = tl.where(live, tl.cumsum(live.to(tl.int32), 0) - 1, -1)
        for start in range(0, count, ROWS):
            i = start + tl.arange(0, ROWS)
            chosen = number[None, :] == i[:, None]
            token = tl.sum(tl.where(chosen, t[None, :], 0), 1)
            to_row = tl.sum(tl.where(chosen, row[None, :], 0), 1)
            token += first
            found = i < count
            source = new + token.to(tl.int64)[:, None] * new_stride
            target = kv + to_row.to(tl.int64)[:, None] * kv_stride
            copy_rows(source, target, found, inverse_scale, WIDTH, HEAD, TAIL, FP8, NATIVE, False)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Assignment of tokens to programs."""

    tile: int
    rows: int
    warps: int


def choose_tiling(tokens: int, share: int) -> Tiling:
    """Return the fastest tiling on an H200 (docs/kernels-kv.md) if one token of `share` is stored."""
    if share < 4 or tokens < NUMBERED_FROM:
        return Tiling(tile=16, rows=16, warps=8)
    return Tiling(tile=32, rows=4, warps=1)


def write_kv_fused(
    kv_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    loc_B: torch.Tensor,
    shard: DcpShard,
    scale: float = 1.0,
    tiles: Tiling | None = None,
) -> None:
    """Write with one kernel."""
    tiles = tiles or choose_tiling(len(loc_B), shard.dcp)
    fp8 = kv_KQ.element_size() == 1
    launches_dependents = e4m3.get_capability(kv_KQ.device) >= (9, 0)
    _write_kernel[(triton.cdiv(len(loc_B), tiles.tile),)](
        kv_KQ.view(torch.uint8) if fp8 else kv_KQ,
        new_BQ,
        loc_B,
        len(loc_B),
        kv_KQ.stride(0),
        new_BQ.stride(0),
        1.0 / scale,
        shard.rank,
        DCP=shard.dcp,
        INTERLEAVE=shard.interleave,
        **split_width(kv_KQ.shape[1]),
        FP8=fp8,
        NATIVE=e4m3.has_cast(kv_KQ.device),
        TILE=tiles.tile,
        ROWS=tiles.rows,
        num_warps=tiles.warps,
        DEPENDENT=launches_dependents,
        launch_pdl=launches_dependents,
    )


def split_width(width: int) -> dict[str, int]:
    """Return the constants of `copy_rows` for rows of `width` numbers."""
    head = 1 << (width.bit_length() - 1)
    return {"WIDTH": width, "HEAD": head, "TAIL": triton.next_power_of_2(max(1, width - head))}
