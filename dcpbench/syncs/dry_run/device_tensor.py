"""Define a tensor that reports a GPU as its device and holds its values in host memory, so that programs run as with a GPU.

C++ also takes it for a CUDA tensor: composite operators take their CUDA branch, and the operators that they call arrive
here. On a GPU a parameter or a subclass is an object of the program's own class. Therefore each such class has a device
class, which derives from it and from DeviceTensor, equals it, and creates instances of it.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MARK = "_dcpbench_pinned"
_DEVICE_MARK = "_dcpbench_device"
_set_class = object.__dict__["__class__"].__set__


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the memory of a host tensor, and so of every view of it, as pinned."""
    setattr(tensor.untyped_storage(), _MARK, True)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return True if the memory of a host tensor is marked or registered as pinned."""
    if getattr(tensor.untyped_storage(), _MARK, False):
        return True
    return any(start <= tensor.data_ptr() < start + size for start, size in registered.items())


def mark_device_memory(tensor: DeviceTensor) -> None:
    """Mark the host memory of a device tensor as GPU memory: C++ may pass it on without the device tensor."""
    setattr(tensor.host_values.untyped_storage(), _DEVICE_MARK, True)


def is_device_memory(tensor: torch.Tensor) -> bool:
    """Return True if a host tensor is a view of memory that is marked as GPU memory."""
    is_host = not isinstance(tensor, DeviceTensor) and tensor.layout == torch.strided
    return is_host and getattr(tensor.untyped_storage(), _DEVICE_MARK, False)


registered: dict[int, int] = {}  # address -> bytes of memory that cudaHostRegister has pinned


class _Attributes(dict[str, Any]):
    """Hold the attributes of a device tensor, and its values separately, so that no copy of the attributes includes
    them.
    """

    host_values: torch.Tensor


class _DeviceClass(torch._C._TensorMeta):  # N805 below: ruff does not know it for a metaclass
    """Compare a device class equal to the class that it emulates, and create an instance of that class when called."""

    def __eq__(cls, other: object) -> bool:  # noqa: N805
        return isinstance(other, type) and get_emulated_class(cls) is get_emulated_class(other)

    def __hash__(cls) -> int:  # noqa: N805
        return hash(get_emulated_class(cls))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        return get_emulated_class(cls)(*args, **kwargs)


class DeviceTensor(torch.Tensor, metaclass=_DeviceClass):
    """Emulate a tensor on `cuda:N`; created by `to_device` as an instance of a device class."""

    stands_for: type[torch.Tensor] = torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run operators on threads and in places where the dry run's mode is not active."""
        from dcpbench.syncs.dry_run.operators import run_operator

        return (state.run or run_operator)(func, args, kwargs or {})

    @property
    def host_values(self) -> torch.Tensor:
        """Host tensor with the values."""
        return self.__dict__.host_values  # type: ignore[attr-defined]

    @property
    def __class__(self) -> Any:
        """Class that the tensor has on a GPU; assigning another one keeps the tensor on the device."""
        return type(self).stands_for

    @__class__.setter
    def __class__(self, kind: type[torch.Tensor]) -> None:
        _set_class(self, get_device_class(kind))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        text: str = super().__repr__(**kwargs)
        plain = type(self).stands_for in {torch.Tensor, torch.nn.Parameter}
        return text.replace(f"{type(self).__name__}(", "tensor(", 1) if plain else text

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def __copy__(self) -> DeviceTensor:
        """Return another object with the same values, as copy.copy does on a GPU."""
        made = to_device(self.host_values, self.device.index or 0, grad=self.requires_grad)
        _set_class_and_attributes(made, type(self).stands_for, self.__dict__, self.host_values)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        """Copy values and attributes; tensors that share memory do so in the copy, too."""
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        if id(self) in memo:
            return memo[id(self)]
        values = copy.deepcopy(self.host_values.detach(), memo)
        memo[id(self)] = made = to_device(values, self.device.index or 0, grad=self.requires_grad)
        _set_class_and_attributes(made, type(self).stands_for, copy.deepcopy(dict(self.__dict__), memo), values)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __getstate__(self) -> dict[str, Any] | None:
        """Return the attributes that the program has set."""
        return dict(self.__dict__) or None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a host copy, for which a GPU's tensor is waited for, too."""
        build = torch._utils._rebuild_device_tensor_from_cpu_tensor
        arguments = (self.detach().cpu(), self.dtype, str(self.device), self.requires_grad)
        attributes = self.__getstate__()
        if type(self).stands_for is torch.Tensor and not attributes:
            return build, arguments
        return torch._tensor._rebuild_from_type_v2, (build, type(self).stands_for, arguments, attributes)

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError as on a GPU, unless `force`."""
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def tolist(self) -> Any:
        """Return the values as Python numbers, after a copy to the host."""
        return self.detach().cpu().tolist()

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        """Raise RuntimeError as on a GPU: only host tensors can be pinned."""
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def __dlpack__(self, **_: Any) -> Any:
        """Raise NotImplementedError: there is no memory on a device to share."""
        raise NotImplementedError("A dry run has no device memory that another library could use; copy it to the host.")

    def data_ptr(self) -> int:
        """Return the address of the values: distinct tensors have distinct ones."""
        return self.host_values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the values."""
        return self.host_values.untyped_storage()

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; assigning replaces the values."""
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, DeviceTensor):
            set_data(self, other)
            return
        torch._C.TensorBase.data.__set__(self, other)  # type: ignore[attr-defined]
        self.__dict__.host_values = other.host_values  # type: ignore[attr-defined]


# torch disables it in a new class that has a __torch_dispatch__. Device classes have that of the class they emulate,
# which by default turns results into instances of it.
del DeviceTensor.__torch_function__


class PlainDeviceTensor(DeviceTensor):
    """Emulate torch.Tensor itself as a device class."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # else results become of this class


state = types.SimpleNamespace(run=None)  # dry run that executes operators of DeviceTensors; None outside of one


def get_emulated_class(cls: type) -> type:
    """Return the class that a device class emulates; any other class is returned unchanged."""
    return cls.stands_for if issubclass(cls, DeviceTensor) else cls


def get_device_class(kind: type) -> type[DeviceTensor]:
    """Return the class of device tensors that are instances of `kind` on a GPU."""
    kind = get_emulated_class(kind)
    return PlainDeviceTensor if kind is torch.Tensor else _make_device_class(kind)


@functools.cache
def _make_device_class(kind: type) -> type[DeviceTensor]:
    methods = {"__eq__": _DeviceClass.__eq__, "__hash__": _DeviceClass.__hash__}
    metaclass = type("_DeviceClass", (_DeviceClass, type(kind)), methods)
    entries = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__class__": DeviceTensor.__dict__["__class__"],
        "stands_for": kind,
    }
    made: type[DeviceTensor] = type.__call__(metaclass, kind.__name__, (kind, DeviceTensor), entries)
    made.__torch_function__ = inspect.getattr_static(kind, "__torch_function__")  # type: ignore[method-assign]
    return made


def to_device(values: torch.Tensor, index: int = 0, *, grad: bool = False) -> DeviceTensor:
    """Return a device tensor that shares `values`, which is a host tensor without history."""
    if values.is_nested or values.layout not in {torch.strided, torch.sparse_coo}:
        kind = "nested" if values.is_nested else str(values.layout)
        raise NotImplementedError(
            f"A dry run knows no {kind} tensors; on a machine with a GPU, use `dcpbench syncs run`."
        )
    made = torch.Tensor._make_wrapper_subclass(
        PlainDeviceTensor,
        values.size(),
        strides=values.stride(),
        storage_offset=values.storage_offset(),
        dtype=values.dtype,
        layout=values.layout,
        device=torch.device("cuda", index),
        requires_grad=grad,
        storage_size=_storage_bytes(values),
    )
    attributes = made.__dict__ = _Attributes()
    attributes.host_values = values
    return made


def _storage_bytes(values: torch.Tensor) -> int:
    """Return the size of the memory of host values, which is also the size that C++ sees for a device tensor."""
    return values.untyped_storage().nbytes() if values.layout == torch.strided else 0


def set_geometry(tensor: DeviceTensor) -> None:
    """Give a device tensor the shape, strides and storage size of its values."""
    values = tensor.host_values
    with torch.utils._mode_utils.no_dispatch():
        if get_device_storage(tensor).nbytes() < _storage_bytes(values):
            torch._C.TensorBase.data.__set__(tensor, to_device(values, tensor.device.index or 0))  # type: ignore[attr-defined]
        else:
            tensor.as_strided_(values.shape, values.stride(), values.storage_offset())


def get_device_storage(tensor: DeviceTensor) -> torch.UntypedStorage:
    """Return the storage that C++ sees, which has a size and no memory."""
    return torch._C.TensorBase.untyped_storage(tensor)


def convert_to_class(tensor: torch.Tensor, kind: type) -> torch.Tensor:
    """Make a device tensor an instance of `kind`, which it would be on a GPU."""
    _set_class(tensor, get_device_class(kind))
    return tensor


def set_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Do `tensor.data = other` across host and device: object, class, attributes and hooks stay, values are replaced."""
    kind, attributes = get_emulated_class(type(tensor)), dict(tensor.__dict__)
    hooks, grad = tensor._backward_hooks, tensor.grad
    fresh = other.detach().requires_grad_(tensor.requires_grad)
    values = fresh.host_values if isinstance(fresh, DeviceTensor) else None
    tensor.grad = None
    torch._C._swap_tensor_impl(tensor, fresh)
    _set_class_and_attributes(tensor, kind, attributes, values)
    if hooks:
        tensor._backward_hooks = hooks  # registers them with the new implementation
    if grad is not None and grad.device == tensor.device:
        tensor.grad = grad


def swap_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Do torch.utils.swap_tensors, also where something refers weakly to one of them."""
    states = [
        (get_emulated_class(type(t)), dict(t.__dict__), t.host_values if isinstance(t, DeviceTensor) else None)
        for t in (a, b)
    ]
    slots = [_take_slots(t) for t in (a, b)]
    torch._C._swap_tensor_impl(a, b)
    for tensor, taken, values in ((a, states[1], slots[1]), (b, states[0], slots[0])):
        _set_class_and_attributes(tensor, *taken)
        for name, value in values.items():
            setattr(tensor, name, value)


def _take_slots(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the values in the slots of a class, such as those of DTensor, and empty the slots."""
    names = copyreg._slotnames(type(tensor))  # type: ignore[attr-defined]
    values = {name: getattr(tensor, name) for name in names if hasattr(tensor, name)}
    for name in values:
        delattr(tensor, name)
    return values


def _set_class_and_attributes(
    tensor: torch.Tensor, kind: type, attributes: Mapping[str, Any], values: torch.Tensor | None
) -> None:
    """Set class and attributes of a tensor with a replaced implementation; without values it is a host tensor."""
    if values is None:
        _set_class(tensor, kind)
        tensor.__dict__ = dict(attributes)
        return
    _set_class(tensor, get_device_class(kind))
    kept = tensor.__dict__ = _Attributes(attributes)
    kept.host_values = values
