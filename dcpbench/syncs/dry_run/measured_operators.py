"""List operators for which it was measured on a GPU whether they wait; all others are named in the report."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "measured_operators.txt"
EQUIVALENT = {  # operators that consist of measured ones, or have the same kernels -> the measured one that represents them
    # Functional.cpp of torch calls the process group's collective; wait_tensor waits for its work as dist.all_reduce does.
    "_c10d_functional::all_gather_into_tensor": "c10d::_allgather_base_",
    "_c10d_functional::all_reduce": "c10d::allreduce_",
    "_c10d_functional::all_to_all_single": "c10d::alltoall_base_",
    "_c10d_functional::broadcast": "c10d::broadcast_",
    "_c10d_functional::reduce_scatter_tensor": "c10d::_reduce_scatter_base_",
    "_c10d_functional::wait_tensor": "c10d::allreduce_",
    "aten::_index_put_impl_": "aten::index_put",
    "aten::_native_batch_norm_legit_no_training": "aten::native_batch_norm",
    "aten::_unsafe_index": "aten::index",
    "aten::_unsafe_index_put": "aten::index_put",
    "aten::bartlett_window": "aten::arange",
    "aten::blackman_window": "aten::cos",
    "aten::empty_permuted": "aten::empty",  # no kernel
    "aten::empty_strided": "aten::empty",
    "aten::hamming_window": "aten::cos",
    "aten::hann_window": "aten::cos",
    "aten::rand_like": "aten::uniform_",
    "aten::range": "aten::arange",
}


def is_measured(func: Any) -> bool:
    """Return True if it is known whether an operator waits.

    An operator is measured if one of its overloads is, in place or not. A view of a tensor never reaches the GPU.
    """
    name = EQUIVALENT.get(func._schema.name, func._schema.name)
    forms = {name, name.removesuffix("_"), f"{name}_"}
    return not forms.isdisjoint(_read_names()) or _is_view(func)


def _is_view(func: Any) -> bool:
    """Return True if an `aten` operator returns its arguments' memory and writes nothing."""
    returns = func._schema.returns
    return (
        func.namespace == "aten" and bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)
    )


@functools.cache
def _read_names() -> frozenset[str]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split()[0] for line in lines if line and not line.startswith("#"))
