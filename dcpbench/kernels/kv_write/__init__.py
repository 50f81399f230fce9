"""Write new tokens' KV rows into a rank's pool; only the owner of a location stores it.

`write_kv` works out who owns a virtual location; `write_rows` is told this rank's rows, with -1 for what others own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.kernels.kv_write.reference import write_kv as write_kv_reference
from dcpbench.kernels.kv_write.reference import write_rows as write_rows_reference

if TYPE_CHECKING:
    import torch


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
    """Store `new_BQ[b]` at row(loc_B[b]) of `kv_KQ` where owner(loc_B[b]) == rank; skip loc < 0. No host sync.

    loc_B is an int32 or int64 tensor of virtual locations (layout.owner, layout.row), no two of them the same row.
    kv_KQ, scale and settled: as in `write_rows`.
    """
    if kv_KQ.is_cuda:
        from dcpbench.kernels.kv_write import masked

        masked.write_kv(kv_KQ, new_BQ, loc_B, rank=rank, dcp=dcp, interleave=interleave, scale=scale, settled=settled)
    else:
        write_kv_reference(kv_KQ, new_BQ, loc_B, rank=rank, dcp=dcp, interleave=interleave, scale=scale)


def write_rows(
    kv_KQ: torch.Tensor,
    new_BQ: torch.Tensor,
    row_B: torch.Tensor,
    *,
    scale: float = 1.0,
    share: int = 1,
    settled: bool = False,
) -> None:
    """Store `new_BQ[b]` at row `row_B[b]` of `kv_KQ`; skip rows below 0, whose source is not read. No host sync.

    kv_KQ has the dtype of new_BQ, or is float8_e4m3fn, or uint8 that stands for it: then what is stored is
    new × (1 / scale), rounded to nearest and bounded by ±448. row_B is int32 or int64, valid rows distinct and below K.

    Two hints, for speed only: about one row of `share` is valid; and `settled` promises that neither new_BQ nor row_B
    was written by the kernel that is launched directly before, so that both may be read while that one still runs.
    """
    if kv_KQ.is_cuda:
        from dcpbench.kernels.kv_write import masked

        masked.write_rows(kv_KQ, new_BQ, row_B, scale=scale, share=share, settled=settled)
    else:
        write_rows_reference(kv_KQ, new_BQ, row_B, scale=scale)
