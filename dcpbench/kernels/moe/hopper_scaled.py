"""Experts over fp8 for prompts on Hopper, in Gluon: a warp loads tiles, two warpgroups multiply 64 rows each.

As kernels/hopper_linear.py, over the tiles of prompts.cut. gate-up ends in silu(gate) · up, quantised: a program's 128
columns are a group that shares a scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcpbench.kernels import block_scaled
from dcpbench.kernels.e4m3 import LARGEST
from dcpbench.kernels.hopper_linear import GROUP, MMA, SLICE, place

if TYPE_CHECKING:
    from dcpbench.kernels.block_scaled import Scaled

ROWS = 128
"""Of a tile."""


@gluon.jit
def _load(
    x,
    weight,
    smem,
    bars,
    cuts,
    sizes,
    GATED: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    x_tiles, w_tiles = smem
    full, empty = bars
    found, across, groups, columns = sizes
    parts: gl.constexpr = 2 if GATED else 1
    done = 0
    for tile in range(gl.program_id(0), found * across, gl.num_programs(0)):
        which, n = place(tile, found, across, TOGETHER)
        begin = gl.load(cuts + TILES + which)
        w_row = gl.load(cuts + which) * (columns * parts) + n * GROUP
        for group in range(groups):
            i = done % STAGES
            mbarrier.wait(empty.index(i), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(i), (2 * SLICE + parts * GROUP) * GROUP)
            for part in gl.static_range(2):
                at = begin + part * SLICE
                tma.async_copy_global_to_shared(x, [at, group * GROUP], full.index(i), x_tiles.index(i * 2 + part))
            for part in gl.static_range(parts):
                at = w_row + part * columns
                to = w_tiles.index(i * parts + part)
                tma.async_copy_global_to_shared(weight, [at, group * GROUP], full.index(i), to)
            done += 1


@gluon.jit
def _multiply(
    scales,
    outs,
    smem,
    bars,
    cuts,
    sizes,
    WHO: gl.constexpr,
    GATED: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
    LEAST: gl.constexpr,
    LARGEST: gl.constexpr,
):
    """Rows 64 · WHO to 64 · WHO + 63 of each tile."""
    x_scale, w_scale = scales
    out, out_scale = outs
    x_tiles, w_tiles = smem
    full, empty = bars
    found, across, groups, columns = sizes
    parts: gl.constexpr = 2 if GATED else 1
    r = gl.arange(0, SLICE, layout=gl.SliceLayout(1, MMA))
    c = gl.arange(0, GROUP, layout=gl.SliceLayout(0, MMA))
    zero = gl.zeros([SLICE, GROUP], gl.float32, layout=MMA)
    done = 0
    for tile in range(gl.program_id(0), found * across, gl.num_programs(0)):
        which, n = place(tile, found, across, TOGETHER)
        row = gl.load(cuts + TILES + which) + WHO * SLICE + r
        live = row < gl.load(cuts + 2 * TILES + which)
        scale_at = x_scale + row.to(gl.int64) * groups
        w_scale_at = w_scale + (gl.load(cuts + which) * (across * parts) + n) * groups
        y = zero
        up = zero
        for group in range(groups):
            scale = gl.load(scale_at + group, mask=live, other=0.0)
            of_w = gl.load(w_scale_at + group)
            i = done % STAGES
            if GATED:
                of_up = gl.load(w_scale_at + across * groups + group)
            mbarrier.wait(full.index(i), (done // STAGES) & 1)
            rows = x_tiles.index(i * 2 + WHO)
            acc = warpgroup_mma(rows, w_tiles.index(i * parts).permute((1, 0)), zero, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if GATED:
                y += acc * (scale * of_w)[:, None]
                w = w_tiles.index(i * parts + 1).permute((1, 0))
                acc = warpgroup_mma(rows, w, zero, use_acc=False, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index(i), count=1)
                up += acc * (scale * of_up)[:, None]
            else:
                mbarrier.arrive(empty.index(i), count=1)
                y += acc * (scale * of_w)[:, None]
            done += 1
        to = out + row.to(gl.int64)[:, None] * columns + (n * GROUP + c)[None, :]
        if GATED:
            y = y / (1.0 + gl.exp2(y * -1.4426950408889634)) * up
            of_row = gl.maximum(gl.max(gl.abs(y), 1), LEAST) / LARGEST
            gl.store(out_scale + row.to(gl.int64) * across + n, of_row, mask=live)
            y = y / of_row[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=live[:, None])


@gluon.jit
def _product_kernel(
    x,
    x_scale,
    weight,
    w_scale,
    out,
    out_scale,
    cuts,
    total,
    across,
    groups,
    GATED: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
    LEAST: gl.constexpr,
    LARGEST: gl.constexpr,
):
    """Each program goes from tile to tile; `across` blocks of 128 columns of results."""
    parts: gl.constexpr = 2 if GATED else 1
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * 2, SLICE, GROUP], x.layout)
    w_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES * parts, GROUP, GROUP], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    smem, bars, scales, outs = (x_tiles, w_tiles), (full, empty), (x_scale, w_scale), (out, out_scale)
    sizes = (gl.load(total), across, groups, across * GROUP)
    gl.warp_specialize(
        [
            (
                _multiply,
                (scales, outs, smem, bars, cuts, sizes, 0, GATED, TILES, STAGES, TOGETHER, LEAST, LARGEST),
            ),
            (
                _multiply,
                (scales, outs, smem, bars, cuts, sizes, 1, GATED, TILES, STAGES, TOGETHER, LEAST, LARGEST),
            ),
            (_load, (x, weight, smem, bars, cuts, sizes, GATED, TILES, STAGES, TOGETHER)),
        ],
        [4, 1],
        [240, 24],
    )


def product(
    x: Scaled,
    weight: Scaled,
    tiles: torch.Tensor,
    total: torch.Tensor,
    *,
    gated: bool,
    stages: int = 0,
    together: int = 4,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sorted rows [rows, in] times their expert's weights. Gated: e4m3 with scales, else bf16.

    Args:
        x: quantised rows, those of an expert together.
        weight: gated: [E, 2·I, in], of which silu(x · gateᵀ) · (x · upᵀ) is made; else [E, out, in].
        tiles: of up to ROWS rows; see prompts.cut.
        total: how many tiles there are.
        gated: which of the two.
        stages: tiles in flight; 0 takes as many as shared memory holds.
        together: tiles that go through the columns side by side.
    """
    _, height, depth = weight.data.shape
    columns, device = height // 2 if gated else height, x.data.device
    out = torch.empty(len(x.data), columns, dtype=x.data.dtype if gated else torch.bfloat16, device=device)
    scale = torch.empty(len(x.data), columns // 128, dtype=torch.float32, device=device) if gated else None
    layout = gl.NVMMASharedLayout(128, 8, rank=2)
    _product_kernel[(torch.cuda.get_device_properties(device).multi_processor_count,)](
        TensorDescriptor.from_tensor(x.data, [64, 128], layout),
        x.scale,
        TensorDescriptor.from_tensor(weight.data.flatten(0, 1), [128, 128], layout),
        weight.scale,
        out,
        scale,
        tiles,
        total,
        columns // 128,
        depth // 128,
        GATED=gated,
        TILES=tiles.shape[1],
        STAGES=stages or (4 if gated else 6),
        TOGETHER=together,
        LEAST=block_scaled.LEAST,
        LARGEST=LARGEST,
        num_warps=4,
    )
    return out, scale
