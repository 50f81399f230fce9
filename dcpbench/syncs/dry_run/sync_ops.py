"""Which operators make the host wait for the GPU, as measured on an H200; used where no GPU can tell.

Most of torch is composed of other operators, and those arrive here one by one: `bool(t.all())` as
`_local_scalar_dense`, `allclose` likewise. So the table holds only those whose CUDA code waits inside.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs import rules
from dcpbench.syncs.dry_run.device_tensor import DeviceTensor, device_tensors, is_pinned
from dcpbench.syncs.live.pageable import copy_of

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


@dataclasses.dataclass(frozen=True)
class Wait:
    """One wait inside an operator."""

    rule: Rule
    chain: tuple[str, ...]
    direction: str
    call: str = "cudaStreamSynchronize"
    bytes: int | None = None
    may_block: bool = False


def waits_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Wait]:
    """Waits of one operator, before it runs.

    Args:
        func: An overload that is not composed of others.
        args: Its arguments; device tensors are DeviceTensors.
        kwargs: Its arguments by name.
    """
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
        yield Wait(rules.SCALAR, (READ,), "DtoH", bytes=tensors[0].element_size())
    else:
        yield from [Wait(rules.SHAPE, (op,), "DtoH")] * _counts(name, args, kwargs)
        yield from [Wait(rules.SCALAR, (op, READ), "DtoH")] * _reads(name, overload, args, kwargs)


def _counts(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many counts and limits an operator needs before it can allocate its result."""
    if name == "repeat_interleave":
        return 0 if kwargs.get("output_size") is not None else 2
    if name == "histc":
        return _limits(args, kwargs)
    return _sorts(args, kwargs) if name == "isin" else COUNTING.get(name, 0)


def _copies(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Wait]:
    """A copy between host and device: blocking, or of memory that CUDA has to stage."""
    copy = copy_of(op, args, kwargs, None, is_pinned=is_pinned)
    if copy is None or not copy.bytes:
        return
    if not copy.non_blocking:
        rule = rules.TO_HOST if copy.way == "DtoH" else rules.FROM_HOST
        yield Wait(rule, (op,), copy.direction, bytes=copy.bytes)
    elif copy.memory == "pageable":
        yield Wait(rules.PAGEABLE, (op,), copy.direction, "cudaMemcpyAsync", copy.bytes, copy.may_return)


def _compares(args: Sequence[Any]) -> int:
    """Two tensors are compared, unless a look at them as objects is enough."""
    a, b = args[0], args[1]
    if not (isinstance(a, DeviceTensor) and isinstance(b, DeviceTensor)) or a.shape != b.shape or not a.numel():
        return 0
    shared = a.host_values.data_ptr() == b.host_values.data_ptr()
    return int(not (shared and a.stride() == b.stride() and a.dtype == b.dtype))


def _indexing(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Wait]:
    """Each mask on the device is counted; indices on the host are copied, but a mask's through pinned memory."""
    target, indices = args[0], args[1] if len(args) > 1 else kwargs["indices"]
    if not isinstance(target, DeviceTensor):
        return
    op, put = f"aten::{name}", "put" in name
    value = (args[2] if len(args) > 2 else kwargs.get("values")) if put else None  # noqa: PLR2004
    accumulate = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False)) if put else False  # noqa: PLR2004
    given = [index for index in indices if index is not None]
    single = value is not None and not isinstance(value, DeviceTensor) and value.numel() == 1
    if single and not accumulate and len(given) == 1 and _is_device_mask(given[0]):
        return  # a masked fill
    if single and value is not None and value.dim() == 0:
        yield _host_copy(op, value)
    for index in given:
        if _is_device_mask(index):
            yield Wait(rules.SHAPE, (op, COUNT), "DtoH")
        elif not isinstance(index, DeviceTensor) and index.dtype not in MASKS and index.numel():
            yield _host_copy(op, index)


def _is_device_mask(index: torch.Tensor) -> bool:
    return isinstance(index, DeviceTensor) and index.dtype in MASKS


def _host_copy(op: str, tensor: torch.Tensor) -> Wait:
    memory = "pinned" if is_pinned(tensor) else "pageable"
    return Wait(rules.FROM_HOST, (op, COPY), f"HtoD {memory}", bytes=tensor.nbytes)


def _limits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """histc looks for both limits unless they are given."""
    low = args[2] if len(args) > 2 else kwargs.get("min", 0)  # noqa: PLR2004
    high = args[3] if len(args) > 3 else kwargs.get("max", 0)  # noqa: PLR2004
    return 2 if low == high and args[0].numel() else 0


def _sorts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """isin counts distinct elements on both sides where it sorts: with many test elements."""
    elements, tests = args[0], args[1]
    if not isinstance(elements, DeviceTensor) or not isinstance(tests, DeviceTensor) or kwargs.get("assume_unique"):
        return 0
    return 2 if tests.numel() >= ISIN_SORTS_FROM * max(elements.numel(), 1) ** 0.145 else 0


def _reads(name: str, overload: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many values an operator reads that is not composed of others."""
    if name in {"masked_fill", "masked_fill_"}:
        return int(isinstance(args[2] if len(args) > 2 else kwargs.get("value"), DeviceTensor))  # noqa: PLR2004
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
