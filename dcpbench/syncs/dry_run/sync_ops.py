"""List operators that make the host wait for the GPU, as measured on an H200 with torch 2.11 and CUDA 13.0.

Most of torch is composed of other operators, which arrive here one by one: `bool(t.all())` arrives as `_local_scalar_dense`.
The tables hold the operators that wait inside their CUDA code; linear_algebra.py holds those on matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs import rules
from dcpbench.syncs.dry_run.device_tensor import DeviceTensor, is_device_memory, is_pinned
from dcpbench.syncs.dry_run.linear_algebra import find_waits
from dcpbench.syncs.dry_run.operators import find_device_tensors
from dcpbench.syncs.dry_run.waits import COPY, COUNT, READ, copy_from_host, copy_to_host, make_wait, read_value
from dcpbench.syncs.live.pageable import find_copy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcpbench.syncs.sites import Sync

MASKS = frozenset({torch.bool, torch.uint8})
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
COUNTING = {  # operators that always need a count or limits -> number of waits
    "nonzero": 1,
    "masked_select": 1,
    "masked_scatter_backward": 1,
    "_unique": 1,
    "_unique2": 1,
    "unique_dim": 2,
    "unique_consecutive": 1,
    "unique_dim_consecutive": 1,
    "bincount": 2,
    "_coalesce": 4,
    "_nested_tensor_from_mask": 1,
    "_sparse_softmax": 6,
    "_sparse_sum": 4,
}
READING = {  # operators that read values -> number of waits; 0 means one wait for each scalar tensor on the device
    "_linalg_check_errors": 1,
    "_nested_tensor_from_mask_left_aligned": 1,
    "allclose": 1,
    "linspace": 0,
    "logspace": 0,
    "index_fill": 0,
    "index_fill_": 0,
}
FIRST_SCALAR = {"index_fill": 3, "index_fill_": 3}  # position of the first argument that can be such a scalar; else 0
DEVIATIONS = {"Tensor_Tensor": 2, "float_Tensor": 2}  # `normal` checks standard deviations that are on the device
LOSS_WITH_LENGTHS = frozenset({"_ctc_loss", "_ctc_loss_backward"})
MAX_MODE_SLICE = 2048  # elements of a slice up to which `mode` has a kernel; else it sorts (TensorModeKernel.cpp)
POINTWISE_MIXERS = frozenset(
    {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "fill_", "set_"}
)
ISIN_SORTS_FROM = 10.0  # isin sorts, and so counts, from this many test elements times the number of elements ** 0.145


def find_operator_waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Sync]:
    """Yield the waits of an operator that is not composed of others; it has not run yet."""
    if func.namespace != "aten":
        return
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    op = f"aten::{name}"
    if name in {"copy_", "_to_copy"}:
        yield from _find_copy_waits(op, args, kwargs)
        return
    tensors = list(find_device_tensors((*args, *kwargs.values())))
    if not tensors:
        return
    if name in INDEXING:
        yield from _find_index_waits(name, args, kwargs)
    elif name == "_local_scalar_dense":
        yield make_wait(rules.SCALAR, READ, direction="DtoH", bytes=tensors[0].element_size())
    elif name in LOSS_WITH_LENGTHS:
        yield from [copy_to_host(op)] * (2 if func is torch.ops.aten._ctc_loss.Tensor else 0)
        yield from [copy_from_host(op)] * 3
    else:
        yield from find_waits(name, args, kwargs)
        yield from [make_wait(rules.SHAPE, op, direction="DtoH")] * _count_size_waits(name, overload, args, kwargs)
        yield from [read_value(op)] * _count_value_reads(name, overload, args, kwargs)


def _count_size_waits(name: str, overload: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many counts and limits an operator needs before it can allocate its result."""
    if name == "_to_sparse":
        return 3 if overload == "sparse_dim" else 1
    if name == "mode":
        dim = _get_argument(args, kwargs, 1, "dim", -1)
        return int(args[0].dim() > 0 and args[0].shape[dim] > MAX_MODE_SLICE)
    if name == "repeat_interleave":
        return 0 if kwargs.get("output_size") is not None else 2
    if name == "histc":
        low, high = _get_argument(args, kwargs, 2, "min", 0), _get_argument(args, kwargs, 3, "max", 0)
        return 2 if low == high and args[0].numel() else 0  # it looks for both limits unless they are given
    return _count_isin_waits(args, kwargs) if name == "isin" else COUNTING.get(name, 0)


def _get_argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _find_copy_waits(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Sync]:
    """Yield the wait of a copy between host and device that blocks, or that CUDA has to stage."""
    copy = find_copy(op, args, kwargs, None, is_pinned=is_pinned)
    if copy is None or not copy.bytes or any(isinstance(a, torch.Tensor) and is_device_memory(a) for a in args):
        return
    if not copy.non_blocking:
        rule = rules.TO_HOST if copy.way == "DtoH" else rules.FROM_HOST
        yield make_wait(rule, op, direction=copy.direction, bytes=copy.bytes)
    elif copy.memory == "pageable":
        facts = {"bytes": copy.bytes, "may_block": copy.may_return}
        yield make_wait(rules.PAGEABLE, op, direction=copy.direction, call="cudaMemcpyAsync", **facts)


def _count_comparisons(args: Sequence[Any]) -> int:
    """Return 1 if two tensors are compared, 0 if shapes or a shared memory decide."""
    a, b = args[0], args[1]
    if not (isinstance(a, DeviceTensor) and isinstance(b, DeviceTensor)) or a.shape != b.shape or not a.numel():
        return 0
    shared = a.host_values.data_ptr() == b.host_values.data_ptr()
    return int(not (shared and a.stride() == b.stride() and a.dtype == b.dtype))


def _find_index_waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Sync]:
    """Yield a count for each mask on the device and a copy for each index on the host.

    A mask on the host goes through pinned memory unless values are accumulated, as in a backward pass.
    """
    target, indices = args[0], args[1] if len(args) > 1 else kwargs["indices"]
    if not isinstance(target, DeviceTensor):
        return
    op, put = f"aten::{name}", "put" in name
    value = _get_argument(args, kwargs, 2, "values") if put else None
    accumulate = put and bool(_get_argument(args, kwargs, 3, "accumulate"))
    given = [index for index in indices if index is not None]
    single = value is not None and not isinstance(value, DeviceTensor) and value.numel() == 1
    if single and not accumulate and len(given) == 1 and _is_device_mask(given[0]):
        return  # a masked fill
    if single and value is not None and value.dim() == 0:
        yield _make_host_copy(op, value)
    for index in given:
        if _is_device_mask(index):
            yield make_wait(rules.SHAPE, op, COUNT, direction="DtoH")
        elif not isinstance(index, DeviceTensor) and index.numel() and (accumulate or index.dtype not in MASKS):
            yield _make_host_copy(op, index)


def _is_device_mask(index: torch.Tensor) -> bool:
    return isinstance(index, DeviceTensor) and index.dtype in MASKS


def _make_host_copy(op: str, tensor: torch.Tensor) -> Sync:
    memory = "pinned" if is_pinned(tensor) else "pageable"
    return make_wait(rules.FROM_HOST, op, COPY, direction=f"HtoD {memory}", bytes=tensor.nbytes)


def _count_isin_waits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how often isin counts distinct elements: on both sides if it sorts, which it does for many test elements."""
    elements, tests = args[0], args[1]
    if not isinstance(elements, DeviceTensor) or not isinstance(tests, DeviceTensor) or kwargs.get("assume_unique"):
        return 0
    return 2 if tests.numel() >= ISIN_SORTS_FROM * max(elements.numel(), 1) ** 0.145 else 0


def _count_value_reads(name: str, overload: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many values an operator that is not composed of others reads."""
    if name in {"masked_fill", "masked_fill_"}:
        return int(isinstance(_get_argument(args, kwargs, 2, "value"), DeviceTensor))
    if name == "equal":
        return _count_comparisons(args)
    if name == "normal":
        return DEVIATIONS.get(overload, 0)
    if name == "fill_":
        return int(not isinstance(args[0], DeviceTensor))
    if name == "segment_reduce":
        return 2 if kwargs.get("lengths") is not None and not kwargs.get("unsafe") else 0
    if name not in READING:
        return 0
    scalars = args[FIRST_SCALAR.get(name, 0) :]
    return READING[name] or sum(isinstance(a, DeviceTensor) for a in scalars)
