"""Lets torch's autograd run backward passes of device tensors in a process without a GPU.

Autograd asks for the stream of every gradient on a GPU, for which torch must first believe that there is one. C++
asks an object of which each answer is a virtual method; here that object gets a table with two answers changed for as
long as a dry run is on. Where in the table they are is found by asking, as it differs between versions of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.syncs.dry_run.device_tensor import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_METHODS = 128
"""More than the interface has; what follows it in memory is copied and never called."""
_Method = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


@contextlib.contextmanager
def gradients() -> Iterator[None]:
    """Makes torch believe in a GPU while the body runs; does nothing where it cannot be told."""
    hooks = _hooks()
    if hooks is None:
        yield
        return
    answers = dict.fromkeys(_places(), _Method(lambda _: 1))
    table = (ctypes.c_void_p * _METHODS)(*_methods(hooks))
    for place, answer in answers.items():
        table[place] = _address(answer)
    with _in_place(hooks, table):
        yield


@functools.cache
def _hooks() -> ctypes.c_void_p | None:
    """The object that C++ asks about CUDA; its first word points to its methods."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        with contextlib.suppress(OSError, AttributeError):
            ask = getattr(ctypes.CDLL(str(path)), _HOOKS)
            ask.restype = ctypes.c_void_p
            return ctypes.c_void_p(ask())
    return None


def _table(hooks: ctypes.c_void_p) -> Any:
    return ctypes.cast(hooks, ctypes.POINTER(ctypes.c_void_p))


def _methods(hooks: ctypes.c_void_p) -> list[int | None]:
    return list(ctypes.cast(_table(hooks)[0], ctypes.POINTER(ctypes.c_void_p))[:_METHODS])


def _address(method: Any) -> int | None:
    return ctypes.cast(method, ctypes.c_void_p).value


@contextlib.contextmanager
def _in_place(hooks: ctypes.c_void_p, table: Any) -> Iterator[None]:
    before = _table(hooks)[0]
    _table(hooks)[0] = ctypes.addressof(table)
    try:
        yield
    finally:
        _table(hooks)[0] = before


@functools.cache
def _places() -> tuple[int, ...]:
    """Where `hasCUDA` and `hasPrimaryContext` are: those that torch calls when it looks for an accelerator, and in a
    backward pass with one. Both answer yes.
    """
    available = _called((), torch._C._accelerator_getAccelerator, answer=0)
    return available + _called(available, _backward, answer=1)


def _backward() -> None:
    with torch.autograd.set_multithreading_enabled(False):
        to_device(torch.ones(()), grad=True).mul(1).backward()


def _called(known: tuple[int, ...], ask: Callable[[], object], *, answer: int) -> tuple[int, ...]:
    """Positions of methods that `ask` calls. Known ones answer 1, others `answer`."""
    hooks, called = _hooks(), []
    assert hooks is not None

    def method(place: int) -> Any:
        def answered(_: int | None) -> int:
            if place in known:
                return 1
            called.append(place)
            return answer

        return _Method(answered)

    methods = [method(place) for place in range(_METHODS)]
    with _in_place(hooks, (ctypes.c_void_p * _METHODS)(*map(_address, methods))):
        ask()
    return tuple(dict.fromkeys(called))
