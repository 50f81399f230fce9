"""KV write with the mask inside the kernel, so that nothing has to be counted on the host.

A program takes TILE tokens and stores those that are this rank's, ROWS at a time: 16 bytes per thread, all of them on
their way before the first is stored. Where every token may be this rank's, TILE = ROWS. Where one of `share` is, TILE
is larger, and the program first numbers its own, so that others cost nothing but the load of their location.

Dependent launch: the GPU may set up this kernel's programs while the kernel before still runs. Two rules keep that
right. Nothing that the kernel before may have written is read before `gdc_wait`, and every program waits, even one that
stores nothing: otherwise this kernel could end before that one, and whoever waits for this one would read too early.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dcpbench.kernels.kv_write.float8 import e4m3_byte

NUMBERED_FROM = 8192
"""Tokens from which on programs number the rows that they store, where few are."""


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    """Until the kernel before is done; the one after may be set up from then on."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _copy(
    kv,
    new,
    row,
    token,
    live,
    kv_stride,
    new_stride,
    inverse_scale,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows in two parts, as a block's width is a power of two: 576 = 512 + 64."""
    source = new + token.to(tl.int64)[:, None] * new_stride
    target = kv + row.to(tl.int64)[:, None] * kv_stride
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
    OWNED: tl.constexpr,
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
    SETTLED: tl.constexpr,
):
    if not SETTLED:
        _wait(DEPENDENT)
    first = tl.program_id(0) * TILE
    t = tl.arange(0, TILE)
    place = tl.load(places + first + t, mask=first + t < tokens, other=-1)
    if OWNED:
        stripe = place // INTERLEAVE
        live = (place >= 0) & (stripe % DCP == rank)
        row = stripe // DCP * INTERLEAVE + place % INTERLEAVE
    else:
        live = place >= 0
        row = place
    if TILE == ROWS:
        _copy(
            kv,
            new,
            row,
            first + t,
            live,
            kv_stride,
            new_stride,
            inverse_scale,
            WIDTH,
            HEAD,
            TAIL,
            FP8,
            NATIVE,
            DEPENDENT and SETTLED,
        )
    else:
        count = tl.sum(live.to(tl.int32), 0)
        number = tl.where(live, tl.cumsum(live.to(tl.int32), 0) - 1, -1)
        for start in range(0, count, ROWS):
            i = start + tl.arange(0, ROWS)
            chosen = number[None, :] == i[:, None]
            token = tl.sum(tl.where(chosen, t[None, :], 0), 1)
            to_row = tl.sum(tl.where(chosen, row[None, :], 0), 1)
            _copy(
                kv,
                new,
                to_row,
                first + token,
                i < count,
                kv_stride,
                new_stride,
                inverse_scale,
                WIDTH,
                HEAD,
                TAIL,
                FP8,
                NATIVE,
                DEPENDENT and SETTLED,
            )
        if SETTLED:
            _wait(DEPENDENT)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How tokens are dealt to programs."""

    tile: int
    rows: int
    warps: int


def tiling(tokens: int, share: int) -> Tiling:
    """What was fastest on an H200 (docs/kernels-kv.md) where one token of `share` is stored."""
    if share < 4 or tokens < NUMBERED_FROM:
        return Tiling(tile=16, rows=16, warps=8)
    return Tiling(tile=32, rows=4, warps=1)


def write_kv(
    kv_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    loc_B: torch.Tensor,
    *,
    rank: int,
    dcp: int,
    interleave: int = 1,
    scale: float = 1.0,
    settled: bool = False,
) -> None:
    """See kernels.kv_write.write_kv."""
    owner = {"OWNED": True, "rank": rank, "DCP": dcp, "INTERLEAVE": interleave}
    launch(kv_KQ, new_BQ, loc_B, tiling(len(loc_B), dcp), scale, settled, **owner)


def write_rows(
    kv_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    row_B: torch.Tensor,
    *,
    scale: float = 1.0,
    share: int = 1,
    settled: bool = False,
) -> None:
    """See kernels.kv_write.write_rows."""
    nobody = {"OWNED": False, "rank": 0, "DCP": 1, "INTERLEAVE": 1}
    launch(kv_KQ, new_BQ, row_B, tiling(len(row_B), share), scale, settled, **nobody)


def launch(
    kv_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    places_B: torch.Tensor,
    tiles: Tiling,
    scale: float,
    settled: bool,
    **owner: int,
) -> None:
    """One kernel; `owner` is what says whose a place is."""
    width = kv_KQ.shape[1]
    head = 1 << (width.bit_length() - 1)
    fp8 = kv_KQ.element_size() == 1
    hopper, cast = _abilities(kv_KQ.device)
    _write_kernel[(triton.cdiv(len(places_B), tiles.tile),)](
        kv_KQ.view(torch.uint8) if fp8 else kv_KQ,
        new_BQ,
        places_B,
        len(places_B),
        kv_KQ.stride(0),
        new_BQ.stride(0),
        1.0 / scale,
        WIDTH=width,
        HEAD=head,
        TAIL=triton.next_power_of_2(max(1, width - head)),
        FP8=fp8,
        NATIVE=cast,
        TILE=tiles.tile,
        ROWS=tiles.rows,
        num_warps=tiles.warps,
        DEPENDENT=hopper,
        SETTLED=settled,
        launch_pdl=hopper,
        **owner,
    )


@functools.cache
def _abilities(device: torch.device) -> tuple[bool, bool]:
    """Whether a device has dependent launch, and a cast to float8; neither has Triton's interpreter."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:  # a dry run's tensors say that they are on a GPU
        return False, False
    capability = torch.cuda.get_device_capability(device)
    return capability >= (9, 0), capability >= (8, 9)
