"""Which operators make the host wait for the GPU, as measured on an H200; used where no GPU can tell.

Most of torch is composed of other operators, and those arrive here one by one: `bool(t.all())` as
`_local_scalar_dense`, `allclose` likewise. So the table holds only those whose CUDA code waits inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs import rules
from dcpbench.syncs.dry_run.device_tensor import DeviceTensor, is_pinned
from dcpbench.syncs.dry_run.operators import device_tensors
from dcpbench.syncs.live.pageable import copy_of
from dcpbench.syncs.sites import Sync

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcpbench.syncs.rules import Rule

READ, COUNT, COPY = "aten::_local_scalar_dense", "aten::nonzero", "aten::copy_"
MASKS = frozenset({torch.bool, torch.uint8})
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
COUNTING = {
    "nonzero": 1,
    "masked_select": 1,
    "_unique": 1,
    "_unique2": 1,
    "unique_dim": 1,
    "unique_consecutive": 1,
    "unique_dim_consecutive": 1,
    "bincount": 2,
}
"""Operators that always need a count or limits -> how often they wait."""
READING = {"_linalg_check_errors": 1, "allclose": 1, "linspace": 0, "logspace": 0, "index_fill": 0, "index_fill_": 0}
"""Operators that read values; 0 stands for once for each scalar tensor on the device."""
DEVIATIONS = {"Tensor_Tensor": 2, "float_Tensor": 2}
"""Overloads of `normal` with standard deviations on the device, which are checked."""
POINTWISE_MIXERS = frozenset(
    {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "fill_", "set_"}
)
ISIN_SORTS_FROM = 10.0
"""isin sorts, and so counts, from this many test elements times the number of elements ** 0.145."""


def wait(rule: Rule, *chain: str, direction: str, call: str = "cudaStreamSynchronize", **facts: Any) -> Sync:
    """A wait inside these operators, outermost first; who called them is not said yet."""
    return Sync(rule=rule.id, op=chain[-1], op_chain=chain, direction=direction, call=call, **facts)


def waits_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Sync]:
    """Waits of one operator, an overload that is not composed of others, before it runs with these arguments."""
    if func.namespace != "aten":
        return
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    op = f"aten::{name}"
    if name in {"copy_", "_to_copy"}:
        yield from _copies(op, args, kwargs)
        return
    tensors = list(device_tensors((*args, *kwargs.values())))
    if not tensors:
        return
    if name in INDEXING:
        yield from _indexing(name, args, kwargs)
    elif name == "_local_scalar_dense":
        yield wait(rules.SCALAR, READ, direction="DtoH", bytes=tensors[0].element_size())
    else:
        yield from [wait(rules.SHAPE, op, direction="DtoH")] * _counts(name, args, kwargs)
        yield from [wait(rules.SCALAR, op, READ, direction="DtoH")] * _reads(name, overload, args, kwargs)


def _counts(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many counts and limits an operator needs before it can allocate its result."""
    if name == "repeat_interleave":
        return 0 if kwargs.get("output_size") is not None else 2
    if name == "histc":
        low, high = _argument(args, kwargs, 2, "min", 0), _argument(args, kwargs, 3, "max", 0)
        return 2 if low == high and args[0].numel() else 0  # it looks for both limits unless they are given
    return _sorts(args, kwargs) if name == "isin" else COUNTING.get(name, 0)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str, default: Any = None) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _copies(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Sync]:
    """A copy between host and device: blocking, or of memory that CUDA has to stage."""
    copy = copy_of(op, args, kwargs, None, is_pinned=is_pinned)
    if copy is None or not copy.bytes:
        return
    if not copy.non_blocking:
        rule = rules.TO_HOST if copy.way == "DtoH" else rules.FROM_HOST
        yield wait(rule, op, direction=copy.direction, bytes=copy.bytes)
    elif copy.memory == "pageable":
        facts = {"bytes": copy.bytes, "may_block": copy.may_return}
        yield wait(rules.PAGEABLE, op, direction=copy.direction, call="cudaMemcpyAsync", **facts)


def _compares(args: Sequence[Any]) -> int:
    """Two tensors are compared, unless a look at them as objects is enough."""
    a, b = args[0], args[1]
    if not (isinstance(a, DeviceTensor) and isinstance(b, DeviceTensor)) or a.shape != b.shape or not a.numel():
        return 0
    shared = a.host_values.data_ptr() == b.host_values.data_ptr()
    return int(not (shared and a.stride() == b.stride() and a.dtype == b.dtype))


def _indexing(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Sync]:
    """Each mask on the device is counted; indices on the host are copied, but a mask's through pinned memory."""
    target, indices = args[0], args[1] if len(args) > 1 else kwargs["indices"]
    if not isinstance(target, DeviceTensor):
        return
    op, put = f"aten::{name}", "put" in name
    value = _argument(args, kwargs, 2, "values") if put else None
    accumulate = put and bool(_argument(args, kwargs, 3, "accumulate"))
    given = [index for index in indices if index is not None]
    single = value is not None and not isinstance(value, DeviceTensor) and value.numel() == 1
    if single and not accumulate and len(given) == 1 and _is_device_mask(given[0]):
        return  # a masked fill
    if single and value is not None and value.dim() == 0:
        yield _host_copy(op, value)
    for index in given:
        if _is_device_mask(index):
            yield wait(rules.SHAPE, op, COUNT, direction="DtoH")
        elif not isinstance(index, DeviceTensor) and index.dtype not in MASKS and index.numel():
            yield _host_copy(op, index)


def _is_device_mask(index: torch.Tensor) -> bool:
    return isinstance(index, DeviceTensor) and index.dtype in MASKS


def _host_copy(op: str, tensor: torch.Tensor) -> Sync:
    memory = "pinned" if is_pinned(tensor) else "pageable"
    return wait(rules.FROM_HOST, op, COPY, direction=f"HtoD {memory}", bytes=tensor.nbytes)


def _sorts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """isin counts distinct elements on both sides where it sorts: with many test elements."""
    elements, tests = args[0], args[1]
    if not isinstance(elements, DeviceTensor) or not isinstance(tests, DeviceTensor) or kwargs.get("assume_unique"):
        return 0
    return 2 if tests.numel() >= ISIN_SORTS_FROM * max(elements.numel(), 1) ** 0.145 else 0


def _reads(name: str, overload: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many values an operator reads that is not composed of others."""
    if name in {"masked_fill", "masked_fill_"}:
        return int(isinstance(_argument(args, kwargs, 2, "value"), DeviceTensor))
    if name == "equal":
        return _compares(args)
    if name == "normal":
        return DEVIATIONS.get(overload, 0)
    if name == "fill_":
        return int(not isinstance(args[0], DeviceTensor))
    if name not in READING:
        return 0
    scalars = args[2:] if name.startswith("index_fill") else args
    return READING[name] or sum(isinstance(a, DeviceTensor) for a in scalars)
