"""Products of many rows with block scales for Hopper in Gluon: a warp loads tiles, two warpgroups multiply their rows.

While one warpgroup scales the product of a group of 128 numbers and adds it up, the other's is being multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.block_scaled import Scaled

MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
# Rows of one wgmma.
SLICE = gl.constexpr(64)
GROUP = gl.constexpr(128)


@gluon.jit
def place(tile, down, across, TOGETHER: gl.constexpr):
    """Tile of rows and block of columns of a tile: TOGETHER tiles of rows go through the columns side by side."""
    first = tile // (TOGETHER * across) * TOGETHER
    group_size = gl.minimum(down - first, TOGETHER)
    inside = tile % (TOGETHER * across)
    return first + inside % group_size, inside // group_size


@gluon.jit
def _load(x, weight, tiles, bars, sizes, STAGES: gl.constexpr, TOGETHER: gl.constexpr):
    x_tiles, w_tiles = tiles
    full, empty = bars
    down, across, groups = sizes
    done = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = place(tile, down, across, TOGETHER)
        for group in range(groups):
            i = done % STAGES
            mbarrier.wait(empty.index(i), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(i), (2 * SLICE + GROUP) * GROUP)
            for part in gl.static_range(2):
                at = (m * 2 + part) * SLICE
                tma.async_copy_global_to_shared(x, [at, group * GROUP], full.index(i), x_tiles.index(i * 2 + part))
            tma.async_copy_global_to_shared(weight, [n * GROUP, group * GROUP], full.index(i), w_tiles.index(i))
            done += 1


@gluon.jit
def _multiply(
    scales,
    scale_strides,
    out,
    tiles,
    bars,
    sizes,
    extent,
    WHO: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Multiply rows 64 · WHO to 64 · WHO + 63 of each tile."""
    x_scale, w_scale = scales
    scale_row, scale_group = scale_strides
    x_tiles, w_tiles = tiles
    full, empty = bars
    down, across, groups = sizes
    rows, columns = extent
    r = gl.arange(0, SLICE, layout=gl.SliceLayout(1, MMA))
    c = gl.arange(0, GROUP, layout=gl.SliceLayout(0, MMA))
    zero = gl.zeros([SLICE, GROUP], gl.float32, layout=MMA)
    done = 0
    for tile in range(gl.program_id(0), down * across, gl.num_programs(0)):
        m, n = place(tile, down, across, TOGETHER)
        row = (m * 2 + WHO) * SLICE + r
        scale_at = x_scale + gl.minimum(row, rows - 1).to(gl.int64) * scale_row
        w_scale_at = w_scale + n * groups
        y = zero
        for group in range(groups):
            scale = gl.load(scale_at + group * scale_group) * gl.load(w_scale_at + group)
            i = done % STAGES
            mbarrier.wait(full.index(i), (done // STAGES) & 1)
            w = w_tiles.index(i).permute((1, 0))
            acc = warpgroup_mma(x_tiles.index(i * 2 + WHO), w, zero, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(i), count=1)
            y += acc * scale[:, None]
            done += 1
        column = n * GROUP + c
        to = out + row.to(gl.int64)[:, None] * columns + column[None, :]
        gl.store(to, y.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@gluon.jit
def _product_kernel(
    x,
    x_scale,
    scale_row,
    scale_group,
    weight,
    w_scale,
    out,
    rows,
    columns,
    groups,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Compute out [rows, columns]; each program iterates over tiles of 128 rows by 128 columns."""
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * 2, SLICE, GROUP], x.layout)
    w_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, GROUP, GROUP], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    sizes = (gl.cdiv(rows, 2 * SLICE), gl.cdiv(columns, GROUP), groups)
    tiles, bars, extent = (x_tiles, w_tiles), (full, empty), (rows, columns)
    scales, strides = (x_scale, w_scale), (scale_row, scale_group)
    gl.warp_specialize(
        [
            (_multiply, (scales, strides, out, tiles, bars, sizes, extent, 0, STAGES, TOGETHER)),
            (_multiply, (scales, strides, out, tiles, bars, sizes, extent, 1, STAGES, TOGETHER)),
            (_load, (x, weight, tiles, bars, sizes, STAGES, TOGETHER)),
        ],
        [4, 1],
        [240, 24],
    )


def compute_product(x: Scaled, weight: Scaled, out: torch.Tensor, programs: int) -> None:
    """Multiply rows [T, K] by weights [N, K] in blocks of 128 × 128 into out [T, N]. K is a multiple of 128, N of 8."""
    layout = gl.NVMMASharedLayout(128, 8, rank=2)
    (rows, depth), columns = x.data.shape, len(weight.data)
    tiles = triton.cdiv(rows, 128) * triton.cdiv(columns, 128)
    _product_kernel[(min(programs, tiles),)](
        TensorDescriptor.from_tensor(x.data, [64, 128], layout),
        x.scale,
        *x.scale.stride(),
        TensorDescriptor.from_tensor(weight.data, [128, 128], layout),
        weight.scale,
        out,
        rows,
        columns,
        depth // 128,
        STAGES=6,  # tiles in flight
        TOGETHER=4,
        num_warps=4,
    )
