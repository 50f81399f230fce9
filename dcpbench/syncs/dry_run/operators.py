"""Run an operator that is not composed of others on the host values of device tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs.dry_run.device_tensor import DeviceTensor, set_geometry, to_device
from dcpbench.syncs.dry_run.slow_operators import find_slow_version, run_in_float32
from dcpbench.syncs.dry_run.virtual_torchscript import find_host_storage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HOST = torch.device("cpu")
SPARSE_SUMS = frozenset({"aten::add", "aten::add_", "aten::sub", "aten::sub_"})  # coalesce on the CPU, not on a GPU


def run_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that is not composed of others on the values, and wrap results that would be on the GPU.

    `device` decides where a new tensor is, else the arguments do.
    """
    tensors = list(find_device_tensors((*args, *kwargs.values())))
    index = _choose_device_index(tensors, kwargs)
    result = _run_on_host(
        func,
        convert_to_host(args),
        convert_to_host({**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs),
    )
    if not tensors and index is None:
        return result
    if func._schema.name in SPARSE_SUMS and isinstance(result, torch.Tensor) and result.is_sparse:
        result._coalesced_(False)  # noqa: FBT003 - a GPU only joins the indices
    known = {id(t.host_values): t for t in tensors}
    if func._schema.is_mutable:
        for tensor in tensors:
            _update_shape(tensor)
    if func._schema.name == "aten::_pack_padded_sequence":
        return _convert_result(result[0], index, known), result[1]  # batch sizes are always the host's
    return _convert_result(result, index, known)


def _choose_device_index(tensors: Sequence[DeviceTensor], kwargs: Mapping[str, Any]) -> int | None:
    """Return the index of the GPU that new tensors are on; None for the host."""
    device = kwargs.get("device")
    if device is not None:
        device = torch.device(device)
        return (device.index or 0) if device.type == "cuda" else None
    return (tensors[0].device.index or 0) if tensors else None


def convert_to_host(value: Any) -> Any:
    """Return the arguments with the values of device tensors, and with the host in place of a GPU."""
    if isinstance(value, DeviceTensor):
        return value.host_values
    if isinstance(value, torch.device):
        return HOST if value.type == "cuda" else value
    if isinstance(value, torch.UntypedStorage) and value.device.type == "cuda":
        return find_host_storage(value)
    if isinstance(value, dict):
        return {key: convert_to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(convert_to_host, value))
    return value


def find_device_tensors(values: Iterable[Any]) -> Iterable[DeviceTensor]:
    """Return the device tensors among arguments, including those in lists."""
    for value in values:
        if isinstance(value, DeviceTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from find_device_tensors(value)


def _convert_result(result: Any, index: int | None, known: Mapping[int, DeviceTensor]) -> Any:
    if isinstance(result, torch.Tensor):
        if id(result) in known:
            return known[id(result)]
        return (
            result if index is None or isinstance(result, DeviceTensor) else _make_device_tensor(result, index, known)
        )
    if isinstance(result, list | tuple):
        return type(result)(_convert_result(item, index, known) for item in result)
    return result


def _make_device_tensor(values: torch.Tensor, index: int, known: Mapping[int, DeviceTensor]) -> DeviceTensor:
    """Return a new device tensor; a view of an ordinary tensor stays one in inference mode, as torch demands."""
    ordinary = [t for t in known.values() if not t.is_inference()] if torch.is_inference_mode_enabled() else []
    if any(t.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() for t in ordinary):
        with torch.inference_mode(mode=False):
            return to_device(values, index)
    return to_device(values, index)


def _update_shape(tensor: DeviceTensor) -> None:
    """Give the device tensor the shape that an in-place operator gave to the values: `t_`, `resize_`, `out=`."""
    values = tensor.host_values
    if tensor.shape == values.shape and tensor.stride() == values.stride():
        return
    set_geometry(tensor)


def _run_on_host(func: Any, args: Any, kwargs: Any) -> Any:
    if (
        func is torch.ops.aten.view_as_real.default
    ):  # a device tensor does not show that its values are conjugated lazily
        args = (args[0].resolve_conj(),)
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and "not implemented for" not in str(error):
            raise
        slow = find_slow_version(func)
        result = slow(*args, **kwargs) if slow is not None else run_in_float32(func, args, kwargs)
        if result is not NotImplemented:
            return result
        reason = str(error).partition(" with arguments")[0].partition("\n")[0]
        raise NotImplementedError(
            f"A dry run cannot run {func} on the CPU ({reason}); on a machine with a GPU, use `dcpbench syncs run`."
        ) from None
