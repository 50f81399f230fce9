"""Find copies that were requested not to block, and use pageable host memory. No detector of torch reports them.

torch copies directly between device and host if both sides have one dtype and one dense layout. Otherwise it converts
on the device and makes the host's side contiguous in new memory, which is pageable even if the tensor is pinned.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs import rules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

COPY, NEW_COPY = "aten::copy_", "aten::_to_copy"
_CUDA, _CPU = "cuda", "cpu"


@dataclasses.dataclass(frozen=True)
class Copy:
    """Describe a copy between host and device: `DtoH` or `HtoD`, memory `pinned` or `pageable`, size in bytes."""

    way: str
    memory: str
    bytes: int
    non_blocking: bool

    @property
    def direction(self) -> str:
        """Return the direction as in `Site.direction`, such as `DtoH pageable`."""
        return f"{self.way} {self.memory}"

    @property
    def may_return(self) -> bool:
        """Return True if a non-blocking copy need not block: CUDA's staging memory takes it."""
        return self.way == "HtoD" and self.bytes <= rules.MAX_STAGING_BYTES


def find_copy(
    op: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: object,
    *,
    is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned,
) -> Copy | None:
    """Return what an operator, such as `aten::copy_`, copies between host and device, or None if it copies nothing
    there.

    `result` is the operator's result, None while it runs; `is_pinned` returns True if a host tensor's memory is pinned.
    """
    if op == COPY:
        target, source = args[0], args[1]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))  # noqa: PLR2004
    elif op == NEW_COPY and kwargs.get("device") is not None:
        source, target = args[0], result if isinstance(result, torch.Tensor) else None
        non_blocking = bool(kwargs.get("non_blocking", False))
    else:
        return None
    device = torch.device(kwargs["device"]) if target is None else target.device
    if {source.device.type, device.type} != {_CUDA, _CPU}:
        return None
    to_host = device.type == _CPU
    if target is None and to_host:
        # Still running: for a new host tensor only the request is known, and torch pins one that is not waited for.
        pinned = bool(kwargs.get("pin_memory")) or non_blocking
    elif target is None:
        pinned = is_pinned(source)
    else:
        pinned = is_pinned(target if to_host else source) and not is_staged(source, target)
    size = (source if target is None else target).numel() * source.element_size()
    return Copy("DtoH" if to_host else "HtoD", "pinned" if pinned else "pageable", size, non_blocking)


def is_staged(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return True if a non-blocking copy goes through new, pageable host memory, regardless of the memory of the host
    tensor.

    `source` and `target` are on different sides, and the source's shape broadcasts to the target's.
    """
    host = target if target.device.type == _CPU else source.expand_as(target)
    same_layout = (source.dtype, source.shape, source.stride()) == (target.dtype, target.shape, target.stride())
    return not (host.is_contiguous() or (same_layout and _is_dense(source)))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill their memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
