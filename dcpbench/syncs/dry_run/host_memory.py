"""Which host memory would be pinned. Without a GPU torch can pin none, so a dry run remembers what was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MARK = "_dcpbench_pinned"


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Remembers that a host tensor's memory, and so every view of it, stands for pinned memory."""
    setattr(tensor.untyped_storage(), _MARK, True)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor's memory stands for pinned memory."""
    return getattr(tensor.untyped_storage(), _MARK, False)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two host tensors share their memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
