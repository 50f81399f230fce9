"""A tensor that says it is on a GPU and holds its values in host memory, so that a program runs as it would with one.

C++ takes it for a CUDA tensor, too: operators made of others take their CUDA branch, and what they call arrives here.
Without a GPU torch can pin no host memory, so what was asked is remembered.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs.dry_run.slow_operators import in_float32, slow_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HOST = torch.device("cpu")
_UNBOUNDED = 1 << 60
"""Storage size of the stand-in, which has no storage; what matters is the check of views of the values."""
_MARK = "_dcpbench_pinned"


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Remembers that a host tensor's memory, and so every view of it, stands for pinned memory."""
    setattr(tensor.untyped_storage(), _MARK, True)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor's memory stands for pinned memory."""
    return getattr(tensor.untyped_storage(), _MARK, False)


class DeviceTensor(torch.Tensor):
    """Stands for a tensor on `cuda:N`. Made by `to_device`; `host_values` is the host tensor with its numbers."""

    host_values: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # else results become DeviceTensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Operators on threads and in places where the dry run's mode is not active."""
        return (state.run or run_operator)(func, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        text: str = super().__repr__(**kwargs)
        return text.replace(f"{type(self).__name__}(", "tensor(", 1)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def __copy__(self) -> DeviceTensor:
        """Another object with the same values, as copy.copy makes on a GPU."""
        return to_device(self.host_values, self.device.index or 0, grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a host copy, for which a GPU's tensor is waited for, too."""
        return (rebuild, (self.detach().cpu(), self.requires_grad, self.device.index or 0))

    def numpy(self, *, force: bool = False) -> Any:
        """As on a GPU: a TypeError unless `force`."""
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def tolist(self) -> Any:
        """Values as Python numbers, after a copy to the host."""
        return self.detach().cpu().tolist()

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        """As on a GPU: only host tensors can be pinned."""
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def __dlpack__(self, **_: Any) -> Any:
        """There is no memory on a device to share."""
        raise NotImplementedError("A dry run has no device memory that another library could use; copy it to the host.")

    def data_ptr(self) -> int:
        """Address of the values: distinct tensors have distinct ones."""
        return self.host_values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of the values."""
        return self.host_values.untyped_storage()

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history; assigning replaces the values."""
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, DeviceTensor):
            become(self, other)
            return
        torch._C.TensorBase.data.__set__(self, other)  # type: ignore[attr-defined]
        self.host_values = other.host_values


state = types.SimpleNamespace(run=None)
"""What runs operators of DeviceTensors while a dry run is on."""


def to_device(values: torch.Tensor, index: int = 0, *, grad: bool = False) -> DeviceTensor:
    """A device tensor that shares `values`, which is a host tensor without history."""
    if values.is_nested or values.layout not in {torch.strided, torch.sparse_coo}:
        kind = "nested" if values.is_nested else str(values.layout)
        raise NotImplementedError(
            f"A dry run knows no {kind} tensors; on a machine with a GPU, use `dcpbench syncs run`."
        )
    made = torch.Tensor._make_wrapper_subclass(
        DeviceTensor,
        values.size(),
        strides=values.stride(),
        storage_offset=values.storage_offset(),
        dtype=values.dtype,
        layout=values.layout,
        device=torch.device("cuda", index),
        requires_grad=grad,
        storage_size=_UNBOUNDED,
    )
    made.host_values = values
    return made


def rebuild(values: torch.Tensor, requires_grad: bool, index: int) -> torch.Tensor:
    """Unpickles a device tensor, with the copy to the GPU that belongs to it."""
    return values.to(torch.device("cuda", index)).requires_grad_(requires_grad)


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """`tensor.data = other` across host and device: the object stays, what it holds is replaced."""
    fresh = other.detach()
    if isinstance(tensor, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    grad = tensor.grad
    swap(tensor, fresh)
    if grad is not None and grad.device == tensor.device:
        tensor.grad = grad


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """torch.utils.swap_tensors, also where something refers weakly to one, for which a GPU's tensors need no swap."""
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def run_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator that is not composed of others on the values; of what would be on the GPU it makes device tensors.

    `device` decides where a new tensor is, else the arguments do.
    """
    tensors = list(device_tensors((*args, *kwargs.values())))
    index = _target(tensors, kwargs)
    result = _call(
        func, on_host(args), on_host({**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs)
    )
    if not tensors and index is None:
        return result
    known = {id(t.host_values): t for t in tensors}
    if func._schema.is_mutable:
        for tensor in tensors:
            _follow(tensor)
    if func._schema.name == "aten::_pack_padded_sequence":
        return _wrapped(result[0], index, known), result[1]  # batch sizes are always the host's
    return _wrapped(result, index, known)


def _target(tensors: Sequence[DeviceTensor], kwargs: Mapping[str, Any]) -> int | None:
    """Index of the GPU that new tensors are on; None for the host."""
    device = kwargs.get("device")
    if device is not None:
        device = torch.device(device)
        return (device.index or 0) if device.type == "cuda" else None
    return (tensors[0].device.index or 0) if tensors else None


def on_host(value: Any) -> Any:
    """The same arguments with the values of device tensors, and the host where a GPU was named."""
    if isinstance(value, DeviceTensor):
        return value.host_values
    if isinstance(value, torch.device):
        return HOST if value.type == "cuda" else value
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(on_host, value))
    return value


def device_tensors(values: Iterable[Any]) -> Iterable[DeviceTensor]:
    """Device tensors among arguments, also those in lists."""
    for value in values:
        if isinstance(value, DeviceTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from device_tensors(value)


def _wrapped(result: Any, index: int | None, known: Mapping[int, DeviceTensor]) -> Any:
    if isinstance(result, torch.Tensor):
        if id(result) in known:
            return known[id(result)]
        return result if index is None or isinstance(result, DeviceTensor) else _fresh(result, index, known)
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(item, index, known) for item in result)
    return result


def _fresh(values: torch.Tensor, index: int, known: Mapping[int, DeviceTensor]) -> DeviceTensor:
    """A new device tensor. A view of an ordinary tensor stays one in inference mode, as torch demands."""
    ordinary = [t for t in known.values() if not t.is_inference()] if torch.is_inference_mode_enabled() else []
    if any(t.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() for t in ordinary):
        with torch.inference_mode(mode=False):
            return to_device(values, index)
    return to_device(values, index)


def _follow(tensor: DeviceTensor) -> None:
    """Gives the stand-in the shape that an operator in place gave to the values: `t_`, `resize_`, `out=`."""
    values = tensor.host_values
    if tensor.shape == values.shape and tensor.stride() == values.stride():
        return
    with torch.utils._mode_utils.no_dispatch():
        tensor.as_strided_(values.shape, values.stride(), values.storage_offset())


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and "not implemented for" not in str(error):
            raise
        slow = slow_version(func)
        result = slow(*args, **kwargs) if slow is not None else in_float32(func, args, kwargs)
        if result is not NotImplemented:
            return result
        reason = str(error).partition(" with arguments")[0].partition("\n")[0]
        raise NotImplementedError(
            f"A dry run cannot run {func} on the CPU ({reason}); on a machine with a GPU, use `dcpbench syncs run`."
        ) from None
