"""What the kernels compute, slow and obvious, from all ranks' tensors in one place."""

from __future__ import annotations

import torch

from dcpbench.kernels.merge import merge as merge_partials


def gather(q_NBhQ: torch.Tensor) -> torch.Tensor:
    """See kernels.peers.gather."""
    return torch.cat(list(q_NBhQ), dim=1)


def merge(o_NBHR: torch.Tensor, lse_NBH: torch.Tensor, rank: int) -> torch.Tensor:
    """See kernels.peers.merge: [h, B, R] in o's dtype."""
    h = o_NBHR.shape[2] // o_NBHR.shape[0]
    return merge_partials(o_NBHR, lse_NBH)[:, rank * h : (rank + 1) * h].transpose(0, 1)


def add_up(x_NBD: torch.Tensor) -> torch.Tensor:
    """See kernels.peers.add_up: the sum over ranks in rank order, rounded once."""
    wide = torch.promote_types(x_NBD.dtype, torch.float32)
    return x_NBD.to(wide).sum(0).to(x_NBD.dtype)
