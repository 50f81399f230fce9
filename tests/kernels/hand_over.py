"""Run a minimal kernel in which one warpgroup stores data, arrives at a barrier, and another one waits and loads it.

Each turn has its own memory and its own barrier. A race checker reports the same for this kernel as for every kernel that
Triton divides among warpgroups:

    compute-sanitizer --tool racecheck python -m tests.kernels.hand_over
"""

from __future__ import annotations

import sys

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TURNS, WIDTH = 4, 128


@gluon.jit
def _store_tiles(tile, full, TURNS: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, WIDTH, layout=layout)
    for turn in range(TURNS):
        tile.index(turn).store((i + turn).to(gl.float32))
        mbarrier.arrive(full.index(turn), count=1)


@gluon.jit
def _load_tiles(tile, full, out, TURNS: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, WIDTH, layout=layout)
    for turn in range(TURNS):
        mbarrier.wait(full.index(turn), 0)
        gl.store(out + turn * WIDTH + i, tile.index(turn).load(layout))


@gluon.jit
def hand_over_kernel(out, TURNS: gl.constexpr, WIDTH: gl.constexpr):
    """Fill row t of `out` [TURNS, WIDTH] with t, t + 1, …; each row has its own memory and barrier."""
    tile = gl.allocate_shared_memory(gl.float32, [TURNS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(TURNS):
        mbarrier.init(full.index(turn), count=1)
    gl.warp_specialize(
        [(_load_tiles, (tile, full, out, TURNS, WIDTH)), (_store_tiles, (tile, full, TURNS, WIDTH))], [4], [96]
    )


if __name__ == "__main__":
    out = torch.empty(TURNS, WIDTH, device="cuda")
    hand_over_kernel[(1,)](out, TURNS, WIDTH, num_warps=4)
    rows = torch.arange(TURNS)[:, None] + torch.arange(WIDTH)
    sys.stdout.write(f"handed over: {'right' if torch.equal(out.cpu(), rows.float()) else 'WRONG'}\n")
