"""Find waits of factorisations, solvers and other operators on matrices, as measured on an H200.

The measurement is in results/syncs-graphs_H200/hidden-syncs-operators_H200_2026-11-28. cuSOLVER and MAGMA wait more often for some matrices
(an iteration that converges slowly, a batch that is solved one matrix after another); the numbers here are the smallest
that were measured. An operator that is given no element waits only where this module says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs.dry_run.waits import copy_from_host, copy_to_host, read_value, wait_in_library

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.syncs.sites import Sync

MIN_DIM = 2  # dimensions of a matrix
MIN_EXP_SIZE = 2  # rows from which matrix_exp is not the exponential of one number


class Call:
    """Hold the call of an operator with a batch of matrices as its first argument."""

    def __init__(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.matrix: torch.Tensor = args[0]

    @property
    def batch(self) -> int:
        """Number of matrices, after the first two arguments have been broadcast."""
        shape = self.matrix.shape[:-MIN_DIM]
        other = self.args[1] if len(self.args) > 1 else None
        if isinstance(other, torch.Tensor) and other.dim() >= MIN_DIM:
            shape = torch.broadcast_shapes(shape, other.shape[:-MIN_DIM])
        return math.prod(shape)


def find_waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Sync]:
    """Return the waits of an `aten` operator on matrices; none for any other operator."""
    checked = bool(kwargs.get("check_errors"))  # of the functions of torch.linalg that end in _ex
    if (name not in _WAITS and not checked) or not isinstance(args[0], torch.Tensor) or args[0].dim() < MIN_DIM:
        return []
    call = Call(f"aten::{name}", args, kwargs)
    if not call.matrix.numel() and name not in _WAIT_WITHOUT_ELEMENTS:
        return []
    waits = _WAITS[name](call) if name in _WAITS else []
    return [*waits, read_value(call.op)] if checked else waits


def _find_check_waits(call: Call) -> list[Sync]:
    """Return the wait for an error flag."""
    return [read_value(call.op)]


def _find_svd_waits(call: Call) -> list[Sync]:
    return [copy_to_host(call.op), read_value(call.op)]


def _find_eigh_waits(call: Call) -> list[Sync]:
    return _find_svd_waits(call) if call.batch == 1 else _find_check_waits(call)


def _find_eig_waits(call: Call) -> list[Sync]:
    reads = [read_value(call.op)] * (2 if call.matrix.is_complex() else 3)
    return [*reads, copy_from_host(call.op, "pinned")] if call.matrix.numel() else reads


def _find_pinv_waits(call: Call) -> list[Sync]:
    return _find_eigh_waits(call) if call.kwargs.get("hermitian") else _find_svd_waits(call)


def _find_ldl_factor_waits(call: Call) -> list[Sync]:
    """Return a wait for each pivot of a symmetric matrix; a Hermitian one is factorised on the host."""
    if call.kwargs.get("hermitian"):
        return [copy_to_host(call.op, "pinned"), copy_from_host(call.op, "pinned")]
    return [copy_to_host(call.op)] * (1 + call.batch * call.matrix.shape[-1])


def _find_ldl_solve_waits(call: Call) -> list[Sync]:
    return [copy_to_host(call.op)] * math.prod(call.matrix.shape[:-MIN_DIM])


def _find_lu_factor_waits(call: Call) -> list[Sync]:
    if call.matrix.shape[-1] == call.matrix.shape[-2]:
        return []
    return [wait_in_library(call.op)] * (1 if call.kwargs.get("pivot", True) else 2)


def _find_lu_waits(call: Call) -> list[Sync]:
    return [] if call.matrix.shape[-1] == call.matrix.shape[-2] else [wait_in_library(call.op)] * 2


def _find_matrix_exp_waits(call: Call) -> list[Sync]:
    if call.matrix.shape[-1] < MIN_EXP_SIZE:
        return []
    return [read_value(call.op), copy_to_host(call.op), copy_from_host(call.op)]


def _find_batched_solve_waits(call: Call) -> list[Sync]:
    return [wait_in_library(call.op)] if call.batch > 1 else []


_WAITS: dict[str, Callable[[Call], list[Sync]]] = {
    "_linalg_svd": _find_svd_waits,
    "_linalg_eigh": _find_eigh_waits,
    "linalg_eig": _find_eig_waits,
    "linalg_eigvals": _find_eig_waits,
    "_linalg_eigvals": _find_eig_waits,
    "linalg_pinv": _find_pinv_waits,
    "linalg_lstsq": _find_check_waits,
    "linalg_ldl_factor_ex": _find_ldl_factor_waits,
    "linalg_ldl_solve": _find_ldl_solve_waits,
    "linalg_lu": _find_lu_waits,
    "linalg_lu_factor_ex": _find_lu_factor_waits,
    "linalg_matrix_exp": _find_matrix_exp_waits,
    "cholesky": _find_check_waits,
    "cholesky_inverse": _find_batched_solve_waits,
    "cholesky_solve": _find_batched_solve_waits,
    "_cholesky_solve_helper": _find_batched_solve_waits,
}
_WAIT_WITHOUT_ELEMENTS = frozenset({"linalg_eig", "linalg_eigvals", "_linalg_eigvals", "linalg_lstsq"})
