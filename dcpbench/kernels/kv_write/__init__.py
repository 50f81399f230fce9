"""Write new tokens' KV rows into a rank's pool; only the owner of a location stores it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.kernels.kv_write.reference import write_kv as write_kv_reference

if TYPE_CHECKING:
    import torch


def write_kv(
    kv_KQ: torch.Tensor, new_BQ: torch.Tensor, loc_B: torch.Tensor, *, rank: int, dcp: int, interleave: int = 1
) -> None:
    """Store `new_BQ[b]` at row(loc_B[b]) of `kv_KQ` where owner(loc_B[b]) == rank; skip loc < 0. No host sync.

    loc_B is an int32 or int64 tensor of virtual locations (layout.owner, layout.row); kv_KQ and new_BQ share a dtype.
    """
    if kv_KQ.is_cuda:
        from dcpbench.kernels.kv_write.masked import write_kv as write_kv_masked

        write_kv_masked(kv_KQ, new_BQ, loc_B, rank=rank, dcp=dcp, interleave=interleave)
    else:
        write_kv_reference(kv_KQ, new_BQ, loc_B, rank=rank, dcp=dcp, interleave=interleave)
