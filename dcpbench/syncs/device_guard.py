"""Makes torch's C++ accept CUDA tensors in a process without a GPU.

C++ asks a table of device guards before it touches a device. A build for CUDA without a GPU has a guard that can be
replaced by one that does nothing; that is what torch's own fake tensors do. A build for the CPU has no guard at all, so
we first put one there that says it has no GPU, and let torch replace that.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from dcpbench.errors import UsageError

_TABLE = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA = 1
"""Position of CUDA in c10::DeviceType, which torch keeps stable as serialised tensors hold it."""
_METHODS = 64
"""More than the guard's interface has virtual methods."""


@functools.cache
def allow_cuda_tensors() -> None:
    """Puts a guard that does nothing where there is no GPU; once for the process, and harmless to other code.

    Raises UsageError where this torch cannot be told.
    """
    if torch.cuda.device_count():
        return
    # Autograd starts its threads, one for each device, at its first backward pass: now there is no device.
    torch.ones((), requires_grad=True).backward()
    if torch.version.cuda is None and torch.version.hip is None:
        _pretend_no_gpu()
    torch._C._ensureCUDADeviceGuardSet()


def _pretend_no_gpu() -> None:
    """A guard of which every method returns 0, so that it has 0 devices; torch replaces it at once."""
    table = _guards()
    if table[_CUDA]:
        return
    answer = ctypes.CFUNCTYPE(ctypes.c_int)(int)
    method = ctypes.cast(answer, ctypes.c_void_p).value
    methods = (ctypes.c_void_p * _METHODS)(*[method] * _METHODS)
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    table[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if table[_CUDA] == ctypes.addressof(guard):
        table[_CUDA] = None
        raise UsageError(
            f"torch {torch.__version__} takes no stand-in for a GPU; use `dcpbench syncs run` on a machine with one."
        )


def _guards() -> ctypes.Array[ctypes.c_void_p]:
    for name in ("libc10.so", "libc10.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(path)), _TABLE)
            except ValueError:
                break
    raise UsageError(
        f"torch {torch.__version__} hides its table of devices, so nothing can stand for a GPU; use a torch built for "
        "CUDA, which needs no GPU for this."
    )
