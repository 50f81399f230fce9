"""Save and load TorchScript modules in a dry run, for which C++ uses the storages of device tensors.

A device tensor has a storage in C++, with a size and without memory. torch.jit.save copies each storage to the host by
`aten::set_` and `aten::_to_copy`. torch.jit.load copies each storage to the GPU by `aten::_to_copy`, and then sets the
storage, the shape and the strides of an empty tensor without an operator.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcpbench.syncs.dry_run.device_tensor import DeviceTensor, get_device_storage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dcpbench.syncs.dry_run.virtual_cuda import Patches

REFUSAL = (
    "A dry run cannot follow the storage of a tensor on the virtual GPU into C++; on a machine with a GPU, use "
    "`dcpbench syncs run`."
)
_owners: weakref.WeakValueDictionary[int, DeviceTensor] = weakref.WeakValueDictionary()  # by C++ address; last search


def install_torchscript(patches: Patches) -> None:
    """Replace torch.jit.load until `patches.restore()`."""
    original = torch.jit.load

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        with _Copies() as copies:
            loaded = original(*args, **kwargs)
        copies.restore_values(_device_tensors() if copies.made else ())
        return loaded

    patches.set_attributes(torch.jit, load=load)
    patches.set_attributes(torch.jit._serialization, load=load)


def find_host_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the storage of the values for a storage that C++ took from a device tensor.

    Raise NotImplementedError if no device tensor has this storage, or if its values were resized.
    """
    owner = _owners.get(storage._cdata)
    if owner is None or get_device_storage(owner)._cdata != storage._cdata:
        _owners.clear()
        _owners.update({get_device_storage(tensor)._cdata: tensor for tensor in _device_tensors()})
        owner = _owners.get(storage._cdata)
    if owner is None or owner.untyped_storage().nbytes() != storage.nbytes():
        raise NotImplementedError(REFUSAL)
    return owner.untyped_storage()


class _Copies(TorchDispatchMode):
    """Keep the copies of storages, and give their values to the tensors that receive these storages in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, DeviceTensor] = {}  # address of a storage in C++ -> the copy that has it

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.restore_values(arg for arg in args if isinstance(arg, DeviceTensor))
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten._to_copy.default and isinstance(result, DeviceTensor):
            self.made[get_device_storage(result)._cdata] = result
        return result

    def restore_values(self, tensors: Iterable[DeviceTensor]) -> None:
        """Raise NotImplementedError for a tensor that received another storage than that of a copy."""
        for tensor in tensors:
            if tensor.shape == tensor.host_values.shape:
                continue
            copy = self.made.get(get_device_storage(tensor)._cdata)
            if copy is None:
                raise NotImplementedError(REFUSAL)
            values = copy.host_values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            tensor.__dict__.host_values = values  # type: ignore[attr-defined]


def _device_tensors() -> Iterator[DeviceTensor]:
    """Yield all device tensors with a storage, including those that only C++ refers to."""
    for item in gc.get_objects():
        if issubclass(type(item), DeviceTensor) and item.layout == torch.strided:
            yield item
