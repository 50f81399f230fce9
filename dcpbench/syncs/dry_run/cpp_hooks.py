"""Makes torch's C++ believe in a GPU that is not there, and leave one alone that is.

C++ asks a table of device guards before it touches a device. torch puts a guard that does nothing, for its own fake
tensors, in place of one that says it has no GPU: a build for the CPU has none at all, and a GPU's would start CUDA; so
we first put one there that says it has none.

Autograd asks for the stream of every gradient on a GPU, for which torch must first believe that there is one. It asks
an object of which each answer is a virtual method: for as long as a dry run is on, that object gets a table with two
answers changed. Where they are is found by asking, as it differs between versions of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.errors import UsageError
from dcpbench.syncs.dry_run.device_tensor import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA = 1
"""Position of CUDA in c10::DeviceType, which torch keeps stable as serialised tensors hold it."""
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_METHODS = 128
"""More than either interface has; what follows it in memory is copied and never called."""
_Table = ctypes.c_void_p * _METHODS
_Method = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def _library(name: str) -> ctypes.CDLL:
    """A library of torch's, on Linux or macOS; an OSError without it."""
    folder = Path(torch.__file__).parent / "lib"
    found = next((path for end in (".so", ".dylib") if (path := folder / f"{name}{end}").exists()), folder / name)
    return ctypes.CDLL(str(found))


@contextlib.contextmanager
def cuda_tensors() -> Iterator[None]:
    """Puts the guard that does nothing there; a GPU's own comes back afterwards, else it stays and harms nobody.

    Raises UsageError where this torch cannot be told.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        # Autograd starts its threads, one for each device, at its first backward pass: now there is no device.
        torch.ones((), requires_grad=True).backward()
    table = _guards()
    before = table[_CUDA]
    if gpus or table[_CUDA] not in _placed():
        _pretend_no_gpu(table)
    try:
        yield
    finally:
        if gpus:
            table[_CUDA] = before


@functools.cache
def _placed() -> list[int | None]:
    """Addresses of guards that torch has put there for us."""
    return []


def _pretend_no_gpu(table: ctypes.Array[ctypes.c_void_p]) -> None:
    """A guard of which every method returns 0, so that it has 0 devices; torch replaces it at once."""
    before = table[_CUDA]
    answer = ctypes.CFUNCTYPE(ctypes.c_int)(int)
    methods = _Table(*[_address(answer)] * _METHODS)
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    table[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if table[_CUDA] == ctypes.addressof(guard):
        table[_CUDA] = before
        raise UsageError(
            f"torch {torch.__version__} takes no stand-in for a GPU; use `dcpbench syncs run` on a machine with one."
        )
    _placed().append(table[_CUDA])


@functools.cache
def _guards() -> ctypes.Array[ctypes.c_void_p]:
    with contextlib.suppress(OSError, ValueError):
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(_library("libc10"), _TABLE)
    raise UsageError(
        f"torch {torch.__version__} hides its table of devices, so nothing can stand for a GPU; use torch 2.9 or newer "
        "on Linux or macOS."
    )


@contextlib.contextmanager
def gradients() -> Iterator[None]:
    """Makes torch believe in a GPU while the body runs; does nothing where it cannot be told."""
    hooks = _hooks()
    if hooks is None:
        yield
        return
    yes = _Method(lambda _: 1)
    table = _Table(*_Table.from_address(hooks[0]))
    for place in _places():
        table[place] = _address(yes)
    with _in_place(hooks, table):
        yield


@functools.cache
def _hooks() -> Any:
    """The object that C++ asks about CUDA; its first word points to its methods."""
    with contextlib.suppress(OSError, AttributeError):
        ask = getattr(_library("libtorch_cpu"), _HOOKS)
        ask.restype = ctypes.POINTER(ctypes.c_void_p)
        return ask()
    return None


def _address(method: Any) -> int | None:
    return ctypes.cast(method, ctypes.c_void_p).value


@contextlib.contextmanager
def _in_place(hooks: Any, table: ctypes.Array[ctypes.c_void_p]) -> Iterator[None]:
    before, hooks[0] = hooks[0], ctypes.addressof(table)
    try:
        yield
    finally:
        hooks[0] = before


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
    called = []

    def method(place: int) -> Any:
        def answered(_: int | None) -> int:
            if place in known:
                return 1
            called.append(place)
            return answer

        return _Method(answered)

    methods = [method(place) for place in range(_METHODS)]
    with _in_place(_hooks(), _Table(*map(_address, methods))):
        ask()
    return tuple(dict.fromkeys(called))
