"""`down` of experts over fp8 for prompts on Hopper, in Gluon: a warp loads tiles, two warpgroups multiply 64 rows each.

As kernels/hopper_linear.py, over the tiles of prefill_experts.split_tiles. gate-up in this way is slower than decode_experts.py's kernel: two
products that wait for each other leave a warpgroup no time to add them up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcpbench.kernels.hopper_linear import GROUP, MMA, SLICE, place

if TYPE_CHECKING:
    from dcpbench.kernels.block_scaled import Scaled


@gluon.jit
def _load(
    x,
    weight,
    smem,
    bars,
    cuts,
    sizes,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    x_tiles, w_tiles = smem
    full, empty = bars
    found, across, groups, columns = sizes
    done = 0
    for tile in range(gl.program_id(0), found * across, gl.num_programs(0)):
        which, n = place(tile, found, across, TOGETHER)
        begin = gl.load(cuts + TILES + which)
        w_row = gl.load(cuts + which) * columns + n * GROUP
        for group in range(groups):
            i = done % STAGES
            mbarrier.wait(empty.index(i), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(i), (2 * SLICE + GROUP) * GROUP)
            for part in gl.static_range(2):
                at = begin + part * SLICE
                tma.async_copy_global_to_shared(x, [at, group * GROUP], full.index(i), x_tiles.index(i * 2 + part))
            tma.async_copy_global_to_shared(weight, [w_row, group * GROUP], full.index(i), w_tiles.index(i))
            done += 1


@gluon.jit
def _multiply(
    scales,
    out,
    smem,
    bars,
    cuts,
    sizes,
    WHO: gl.constexpr,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Multiply rows 64 · WHO to 64 · WHO + 63 of each tile."""
    x_scale, w_scale = scales
    x_tiles, w_tiles = smem
    full, empty = bars
    found, across, groups, columns = sizes
    r = gl.arange(0, SLICE, layout=gl.SliceLayout(1, MMA))
    c = gl.arange(0, GROUP, layout=gl.SliceLayout(0, MMA))
    zero = gl.zeros([SLICE, GROUP], gl.float32, layout=MMA)
    done = 0
    for tile in range(gl.program_id(0), found * across, gl.num_programs(0)):
        which, n = place(tile, found, across, TOGETHER)
        row = gl.load(cuts + TILES + which) + WHO * SLICE + r
        live = row < gl.load(cuts + 2 * TILES + which)
        scale_at = x_scale + row.to(gl.int64) * groups
        w_scale_at = w_scale + (gl.load(cuts + which) * across + n) * groups
        y = zero
        for group in range(groups):
            scale = gl.load(scale_at + group, mask=live, other=0.0)
            of_w = gl.load(w_scale_at + group)
            i = done % STAGES
            mbarrier.wait(full.index(i), (done // STAGES) & 1)
            w = w_tiles.index(i).permute((1, 0))
            acc = warpgroup_mma(x_tiles.index(i * 2 + WHO), w, zero, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(i), count=1)
            y += acc * (scale * of_w)[:, None]
            done += 1
        to = out + row.to(gl.int64)[:, None] * columns + (n * GROUP + c)[None, :]
        gl.store(to, y.to(out.dtype.element_ty), mask=live[:, None])


@gluon.jit
def _product_kernel(
    x,
    x_scale,
    weight,
    w_scale,
    out,
    cuts,
    total,
    across,
    groups,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Iterate over tiles in each program. The results have `across` blocks of 128 columns."""
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * 2, SLICE, GROUP], x.layout)
    w_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, GROUP, GROUP], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    smem, bars, scales = (x_tiles, w_tiles), (full, empty), (x_scale, w_scale)
    sizes = (gl.load(total), across, groups, across * GROUP)
    gl.warp_specialize(
        [
            (
                _multiply,
                (scales, out, smem, bars, cuts, sizes, 0, TILES, STAGES, TOGETHER),
            ),
            (
                _multiply,
                (scales, out, smem, bars, cuts, sizes, 1, TILES, STAGES, TOGETHER),
            ),
            (_load, (x, weight, smem, bars, cuts, sizes, TILES, STAGES, TOGETHER)),
        ],
        [4, 1],
        [240, 24],
    )


def compute_grouped_gemm(x: Scaled, weight: Scaled, tiles: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Multiply sorted rows [rows, in] by their expert's weights, in bf16 [rows, out].

    Args:
        x: quantised rows, those of an expert together; scales contiguous, as compute_gate_up() has them.
        weight: [E, out, in] in blocks of 128 × 128; in and out are multiples of 128.
        tiles: of up to ROWS rows; see prefill_experts.split_tiles.
        total: how many tiles there are.
    """
    _, columns, depth = weight.data.shape
    assert x.scale.is_contiguous()
    out = torch.empty(len(x.data), columns, dtype=torch.bfloat16, device=x.data.device)
    layout = gl.NVMMASharedLayout(128, 8, rank=2)
    _product_kernel[(torch.cuda.get_device_properties(out.device).multi_processor_count,)](
        TensorDescriptor.from_tensor(x.data, [64, 128], layout),
        x.scale,
        TensorDescriptor.from_tensor(weight.data.flatten(0, 1), [128, 128], layout),
        weight.scale,
        out,
        tiles,
        total,
        columns // 128,
        depth // 128,
        TILES=tiles.stride(0),
        STAGES=6,  # tiles in flight
        TOGETHER=2,  # tiles that go through the columns side by side
        num_warps=4,
    )
    return out
