"""Random KV rows that depend on the request and the token, not on where a layout stores them.

Every layout then attends to the same numbers, routes its tokens to the same experts, and differs from another layout
only in what is being compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fill_request(
    kv: torch.Tensor, locs_S: torch.Tensor, *, request: int, seed: int, rank: int, dcp: int, interleave: int
) -> None:
    """Standard normal rows for the tokens of one request, all layers: only this rank's tokens are written.

    kv [layers, K, Q] is a rank's pool as rows; locs_S int32 holds the request's virtual locations in token order.
    Numbers are a function of (seed, layer, request, token, column); GPU and CPU draw different ones.
    """
    if kv.is_cuda:
        from dcpbench.kernels.synthetic_kv.counter_based import fill_request as fill
    else:
        from dcpbench.kernels.synthetic_kv.reference import fill_request as fill
    fill(kv, locs_S, request=request, seed=seed, rank=rank, dcp=dcp, interleave=interleave)
