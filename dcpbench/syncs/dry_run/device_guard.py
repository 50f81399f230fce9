"""Makes torch's C++ accept CUDA tensors without a GPU, and leave a GPU alone that is there.

C++ asks a table of device guards before it touches a device. torch has a guard that does nothing, for its own fake
tensors, and puts it there in place of one that says it has no GPU. A build for the CPU has no guard at all, and on a
machine with a GPU the real one would start CUDA; so we first put one there that says it has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA = 1
"""Position of CUDA in c10::DeviceType, which torch keeps stable as serialised tensors hold it."""
_METHODS = 64
"""More than the guard's interface has virtual methods."""


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
    if gpus or not _stand_in():
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


def _stand_in() -> bool:
    return _guards()[_CUDA] in _placed()


def _pretend_no_gpu(table: ctypes.Array[ctypes.c_void_p]) -> None:
    """A guard of which every method returns 0, so that it has 0 devices; torch replaces it at once."""
    before = table[_CUDA]
    answer = ctypes.CFUNCTYPE(ctypes.c_int)(int)
    method = ctypes.cast(answer, ctypes.c_void_p).value
    methods = (ctypes.c_void_p * _METHODS)(*[method] * _METHODS)
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
    for name in ("libc10.so", "libc10.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            with contextlib.suppress(ValueError):
                return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(path)), _TABLE)
    raise UsageError(
        f"torch {torch.__version__} hides its table of devices, so nothing can stand for a GPU; use torch 2.9 or newer "
        "on Linux or macOS."
    )
