"""Replace functions of torch that create instances of a program's own tensor classes, for tensors on the virtual GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs.dry_run.device_tensor import DeviceTensor, convert_to_class, get_emulated_class, swap_tensors

if TYPE_CHECKING:
    from dcpbench.syncs.dry_run.virtual_cuda import Patches


def install_subclasses(patches: Patches) -> None:
    """Replace those functions until `patches.restore()`."""
    make_subclass, as_subclass, new = (
        torch.Tensor._make_subclass,
        torch.Tensor.as_subclass,
        torch.nn.Parameter.__new__,
    )

    def _make_subclass(cls: Any, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        if not isinstance(data, DeviceTensor):
            return make_subclass(get_emulated_class(cls), data, require_grad, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return convert_to_class(data.detach().requires_grad_(require_grad), cls)

    def _as_subclass(self: Any, cls: Any) -> Any:
        if not isinstance(self, DeviceTensor):
            return as_subclass(self, get_emulated_class(cls))
        with torch._C.DisableTorchFunctionSubclass():
            return convert_to_class(torch.ops.aten.alias(self), cls)

    def _new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if isinstance(data, DeviceTensor) and get_emulated_class(type(data)) in {torch.Tensor, torch.nn.Parameter}:
            return torch.Tensor._make_subclass(cls, data, requires_grad)
        return new(cls, data, requires_grad)

    patches.set_attributes(torch.Tensor, _make_subclass=staticmethod(_make_subclass), as_subclass=_as_subclass)
    patches.set_attributes(torch.nn.Parameter, __new__=staticmethod(_new_parameter))
    patches.set_attributes(torch.utils, swap_tensors=swap_tensors)
