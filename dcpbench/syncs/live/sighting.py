"""Build a Sync from an observation of the live detectors: which rule, which operator, and the direction of the data."""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dcpbench.syncs import rules
from dcpbench.syncs.live import callbacks
from dcpbench.syncs.live.pageable import find_copy
from dcpbench.syncs.owner import name_current_work
from dcpbench.syncs.python_frames import (
    SUBSCRIPT,
    UNKNOWN,
    Frame,
    find_call_name,
    is_detector,
    is_user,
    list_framework_folders,
    walk_stack_from,
)
from dcpbench.syncs.sites import Sync

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from dcpbench.syncs.rules import Rule

BY_NAME = {  # rule, name and runtime call by kind of a wait, if no operator is around it
    callbacks.DEVICE: (rules.DEVICE, "torch.cuda.synchronize", "cudaDeviceSynchronize"),
    callbacks.EVENT: (rules.EVENT, "torch.cuda.Event.synchronize", "cudaEventSynchronize"),
    callbacks.STREAM: (rules.STREAM, "torch.cuda.Stream.synchronize", "cudaStreamSynchronize"),
}
READ, COUNT = "aten::_local_scalar_dense", "aten::nonzero"
INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
PINNING = frozenset({"aten::_pin_memory", "aten::pin_memory"})
SYNCHRONIZE = "synchronize"
FROM_DATA = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", SUBSCRIPT})  # copies no dispatch mode can see
TO_HOST_CALLS = frozenset({"cpu", "tolist", "numpy"})
READING_CALLS = frozenset({"", "item", "bool", "int", "float", "range", "is_nonzero", "any", "all"})  # `""` is `if t:`


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """Hold an operator that runs, and the watch with the mode that saw it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    watch: object
    seen: bool = False  # True if it has waited, and that has been reported

    @property
    def op(self) -> str:
        """Return its name without overload, as profilers write it: `aten::index`; higher-order operators have a bare
        one.
        """
        schema = getattr(self.func, "_schema", None)
        return str(schema.name if schema is not None else self.func)


class _Place(NamedTuple):
    """Hold a place in the user's program."""

    frames: tuple[Frame, ...]
    user: Frame | None
    calls: tuple[str, str]  # calls in progress: on the innermost line, which may be torch's, and on the user's
    by_name: bool  # True if the line itself calls `synchronize()`
    thread: str
    watched: bool  # True if a dispatch mode would see every operator; printing a tensor suspends modes


def make_wait_sync(kind: str, calls: Sequence[Call], thread: int) -> Sync:
    """Return the report of a wait for a `stream`, `event` or `device`, within these operators of the calling thread.

    `thread` is the watching one.
    """
    place = _find_place(thread)
    chain = _build_chain(calls, place)
    if kind == callbacks.STREAM and calls:
        return _make_operator_sync(calls[-1], chain, place)
    if kind == callbacks.STREAM and not place.by_name and (known := _find_call_rule(place)) is not None:
        rule, name = known
        direction = {rules.COPY: "", rules.FROM_HOST: "HtoD pageable"}.get(rule, "DtoH")
        return _make_sync(rule, place, chain, op=name, direction=direction, call="cudaStreamSynchronize")
    rule, op, call = BY_NAME[kind]
    return _make_sync(
        rule, place, chain, op=chain[-1] if chain else op, call=call, explicit=place.by_name and not chain
    )


def find_hazard(call: Call, result: object, thread: int) -> Sync | None:
    """Return the report of a finished operator that may have waited unnoticed; None if it has not.

    Such operators are non-blocking copies, and pinning of much memory, which may allocate.
    """
    # Every operator comes by here, and few are either.
    if call.op in PINNING or call.kwargs.get("pin_memory"):
        size = result.nbytes if isinstance(result, torch.Tensor) else 0
        if size < rules.MIN_PINNING_BYTES:
            return None
        facts: dict[str, Any] = {"call": "cudaHostAlloc", "bytes": size, "may_block": True}
        return _make_sync(rules.ALLOCATION, _find_place(thread), (call.op,), **facts)
    if not call.kwargs.get("non_blocking") and not (len(call.args) > 2 and call.args[2] is True):  # noqa: PLR2004
        return None
    copy = find_copy(call.op, call.args, call.kwargs, result)
    if copy is None or not copy.non_blocking or copy.memory == "pinned" or not copy.bytes:
        return None
    facts = {"direction": copy.direction, "bytes": copy.bytes, "may_block": copy.may_return}
    return _make_sync(rules.PAGEABLE, _find_place(thread), (call.op,), call="cudaMemcpyAsync", **facts)


def _make_operator_sync(call: Call, chain: tuple[str, ...], place: _Place) -> Sync:
    """Return the report of a wait for a stream inside an operator: a copy, or a value or a count
    that the host needs.
    """
    copy = find_copy(call.op, call.args, call.kwargs, None)
    direction, size = (copy.direction, copy.bytes) if copy else ("", None)
    if copy is None:
        tensors = list(_iterate_tensors(call.args))
        if call.op in INDEXING and any(_is_mask(t) for t in _iterate_tensors(call.args[1])):
            chain, direction = (*chain, COUNT), "DtoH"
        elif call.op != READ and {"cuda", "cpu"} <= {t.device.type for t in tensors}:
            direction = "HtoD pageable"  # an operator on the GPU copies the data of the host that it is given
        else:
            known = rules.get_op_name(call.op) in rules.SCALAR_OPS | rules.SHAPE_OPS
            chain, direction = chain if known else (*chain, READ), "DtoH"
            size = tensors[0].element_size() if call.op == READ and tensors else None
    rule = rules.find_copy_rule(chain, direction, waited=True)
    return _make_sync(rule, place, chain, direction=direction, call="cudaStreamSynchronize", bytes=size)


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype in {torch.bool, torch.uint8} and tensor.is_cuda


def _iterate_tensors(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, including those in lists."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _iterate_tensors(value)


def _find_call_rule(place: _Place) -> tuple[Rule, str] | None:
    """Return the rule of a stream's wait outside any operator that a mode sees, and the call that implies it.

    On a thread with a mode it is host data on its way to the GPU; elsewhere operators are unknown.
    """
    for name in place.calls:
        if name in FROM_DATA and (place.watched or name != SUBSCRIPT):
            return rules.FROM_HOST, name
        if name == SUBSCRIPT or name in rules.SHAPE_OPS | {"unique", "where"}:
            return rules.SHAPE, name
        if name in TO_HOST_CALLS:
            return rules.TO_HOST, name
        if name in READING_CALLS and (name or not place.watched):
            return rules.SCALAR, name
    return None if place.watched or place.user is None else (rules.COPY, place.calls[0])


def _build_chain(calls: Sequence[Call], place: _Place) -> tuple[str, ...]:
    """Return the operators, outermost first: each once, even with several watches, below the composite that the line
    calls.
    """
    names: list[str] = []
    for before, call in zip([None, *calls], calls, strict=False):
        if before is None or before.func is not call.func:
            names.append(call.op)
    called = place.calls[1]
    if names and called in rules.SHAPE_OPS and rules.get_op_name(names[0]) != called:
        names.insert(0, f"aten::{called}")
    return tuple(names)


def _find_place(thread: int) -> _Place:
    """Return the place in the program.

    It is the calling thread's innermost frame that belongs neither to dcpbench nor to torch's path to it; for
    autograd's threads, which have no Python stack, the frame of the watching thread.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (inspect.stack reads every source file)
    while frame is not None and (is_detector(frame.f_code.co_filename) or frame.f_code.co_name == "fire_callbacks"):
        frame = frame.f_back
    mine = threading.get_ident() == thread
    frames, user = walk_stack_from(frame)
    if not frames and not mine:
        frame = sys._current_frames().get(thread)  # noqa: SLF001  (documented, despite its name)
        frames, user = walk_stack_from(frame)
    inner = frames[len(frames) - frames[::-1].index(user) :] if user else frames
    calls = (find_call_name(frame), _find_user_call(frame)) if user and frame else (UNKNOWN, UNKNOWN)
    by_name = calls[1] == SYNCHRONIZE or (bool(inner) and all(f.function == SYNCHRONIZE for f in inner))
    watched = mine and torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001  (there is no public name)
    return _Place(frames, user, calls, by_name, name_current_work(), watched)


def _find_user_call(frame: FrameType | None) -> str:
    """Return the name of the call in the user's innermost frame."""
    outside = list_framework_folders()
    while frame is not None and not is_user(frame.f_code.co_filename, outside):
        frame = frame.f_back
    return find_call_name(frame) if frame is not None else UNKNOWN


def _make_sync(rule: Rule, place: _Place, chain: tuple[str, ...], **facts: Any) -> Sync:  # noqa: ANN401
    """Return a synchronisation at this place, in the last of these operators; the facts are fields of a Sync."""
    where: dict[str, Any] = {"frames": place.frames, "user": place.user, "thread": place.thread, "op_chain": chain}
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return Sync(**{"rule": rule.id, "op": chain[-1] if chain else "", "capturing": capturing, **where, **facts})
