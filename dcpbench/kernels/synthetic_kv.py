"""Random KV rows that depend on the request and the token, but not on their location in a layout.

Every layout then attends to the same numbers, routes its tokens to the same experts, and differs from another layout
only in the compared property.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dcpbench.kernels import e4m3
from dcpbench.kernels.e4m3 import e4m3_byte
from dcpbench.points import layout

if TYPE_CHECKING:
    from dcpbench.kernels.kv_indices import DcpShard


def fill_request(kv: torch.Tensor, locs_S: torch.Tensor, shard: DcpShard, *, request: int, seed: int) -> None:
    """Write standard normal rows for the tokens of one request in all layers; only this rank's tokens are written.

    kv [layers, K, Q] is a rank's pool as rows; locs_S int32 holds the request's virtual locations in token order.
    Numbers are a function of (seed, layer, request, token, column); GPU and CPU draw different ones. A pool of
    float8_e4m3fn holds them rounded.
    """
    (fill_counter_based if kv.is_cuda else fill_reference)(kv, locs_S, shard, request=request, seed=seed)


def fill_reference(kv: torch.Tensor, locs_S: torch.Tensor, shard: DcpShard, *, request: int, seed: int) -> None:
    """Draw the rows of the whole request, and write only those that belong to this rank."""
    locs = locs_S.cpu().numpy()
    mine = torch.from_numpy(layout.get_owner(locs, shard.dcp, shard.interleave) == shard.rank)
    rows = torch.from_numpy(layout.get_row(locs, shard.dcp, shard.interleave)).long()[mine]
    for index, pool in enumerate(kv):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + index) * 1_000_003 + request)
        drawn = torch.empty(len(locs_S), kv.shape[-1]).normal_(generator=generator)
        pool[rows] = drawn[mine].to(kv)


@triton.jit
def _fill_kernel(
    kv,
    locs,
    seed,
    layer_stride,
    rank,
    dcp,
    width,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    loc = tl.load(locs + token).to(tl.int64)
    if (loc // INTERLEAVE) % dcp == rank:
        row = loc // (INTERLEAVE * dcp) * INTERLEAVE + loc % INTERLEAVE
        q = tl.arange(0, BLOCK)
        values = tl.randn(seed + layer, token * width + q)
        if FP8:
            values = e4m3_byte(values, NATIVE)
        tl.store(kv + layer * layer_stride + row * width + q, values.to(kv.dtype.element_ty), mask=q < width)


def fill_counter_based(kv: torch.Tensor, locs_S: torch.Tensor, shard: DcpShard, *, request: int, seed: int) -> None:
    """Draw each number from a counter (Philox), so that a rank draws only the numbers that it stores."""
    layers, _, width = kv.shape
    _fill_kernel[(locs_S.shape[0], layers)](
        kv.view(torch.uint8) if kv.itemsize == 1 else kv,
        locs_S,
        (seed * 65_536 + request) * 1024,
        kv.stride(0),
        shard.rank,
        shard.dcp,
        width,
        INTERLEAVE=shard.interleave,
        BLOCK=triton.next_power_of_2(width),
        FP8=kv.itemsize == 1,
        NATIVE=e4m3.has_cast(kv.device),
        num_warps=4,
    )
