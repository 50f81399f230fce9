"""Construct the waits that a dry run predicts for an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.syncs import rules
from dcpbench.syncs.sites import Sync

if TYPE_CHECKING:
    from dcpbench.syncs.rules import Rule

READ, COUNT, COPY = "aten::_local_scalar_dense", "aten::nonzero", "aten::copy_"


def make_wait(rule: Rule, *chain: str, direction: str, call: str = "cudaStreamSynchronize", **facts: Any) -> Sync:
    """Return a wait inside these operators, outermost first; its place in the program is added later."""
    return Sync(rule=rule.id, op=chain[-1], op_chain=chain, direction=direction, call=call, **facts)


def read_value(op: str) -> Sync:
    """Return the wait for a value, such as an error flag, that the operator copies to the host through pinned memory."""
    return make_wait(rules.SCALAR, op, READ, direction="DtoH")


def copy_to_host(op: str, memory: str = "pageable") -> Sync:
    """Return the wait for a copy to host memory inside the operator."""
    return make_wait(rules.TO_HOST, op, COPY, direction=f"DtoH {memory}")


def copy_from_host(op: str, memory: str = "pageable") -> Sync:
    """Return the wait for a copy from host memory inside the operator."""
    return make_wait(rules.FROM_HOST, op, COPY, direction=f"HtoD {memory}")


def wait_in_library(op: str) -> Sync:
    """Return the wait for the stream in a library that the operator calls, such as cuSOLVER or MAGMA."""
    return make_wait(rules.STREAM, op, direction="")
