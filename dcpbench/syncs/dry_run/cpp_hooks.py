"""Make torch's C++ code assume a GPU if there is none, and prevent it from using an existing one.

C++ looks up a table of device guards before it uses a device. torch installs a guard without effect, for its own fake
tensors, in place of one that reports no GPU. A build for the CPU has no guard at all, and the guard of a GPU would
start CUDA; so a guard that reports no GPU is installed first.

Autograd requests the stream of every gradient on a GPU, for which torch must first assume that there is one. It queries
an object with virtual methods: during a dry run, that object has a method table with two answers changed. The positions
of both are found by calling, because they differ between versions of torch.
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
_CUDA = 1  # position of CUDA in c10::DeviceType, which torch keeps stable as serialised tensors hold it
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_METHODS = 128  # more than either interface has; what follows it in memory is copied and never called
_Table = ctypes.c_void_p * _METHODS
_Method = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def _load_library(name: str) -> ctypes.CDLL:
    """Return one of torch's libraries, on Linux or macOS; raise OSError without it."""
    folder = Path(torch.__file__).parent / "lib"
    found = next((path for end in (".so", ".dylib") if (path := folder / f"{name}{end}").exists()), folder / name)
    return ctypes.CDLL(str(found))


@contextlib.contextmanager
def apply_device_guard() -> Iterator[None]:
    """Install the guard without effect; a GPU's own is restored afterwards, else it stays and has no effect.

    Raise UsageError if this version of torch does not allow it.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        # Autograd starts its threads, one for each device, at its first backward pass: now there is no device.
        torch.ones((), requires_grad=True).backward()
    table = _get_guards()
    before = table[_CUDA]
    if gpus or table[_CUDA] not in _list_placed_guards():
        _pretend_no_gpu(table)
    try:
        yield
    finally:
        if gpus:
            table[_CUDA] = before


@functools.cache
def _list_placed_guards() -> list[int | None]:
    """Return the addresses of guards that torch has installed for the dry run."""
    return []


def _pretend_no_gpu(table: ctypes.Array[ctypes.c_void_p]) -> None:
    """Install a guard with methods that all return 0, so that it has 0 devices; torch replaces it at once."""
    before = table[_CUDA]
    answer = ctypes.CFUNCTYPE(ctypes.c_int)(int)
    methods = _Table(*[_get_address(answer)] * _METHODS)
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    table[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()
    if table[_CUDA] == ctypes.addressof(guard):
        table[_CUDA] = before
        raise UsageError(
            f"torch {torch.__version__} takes no stand-in for a GPU; use `dcpbench syncs run` on a machine with one."
        )
    _list_placed_guards().append(table[_CUDA])


@functools.cache
def _get_guards() -> ctypes.Array[ctypes.c_void_p]:
    with contextlib.suppress(OSError, ValueError):
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(_load_library("libc10"), _TABLE)
    raise UsageError(
        f"torch {torch.__version__} hides its table of devices, so nothing can stand for a GPU; use torch 2.9 or newer "
        "on Linux or macOS."
    )


@contextlib.contextmanager
def apply_cuda_hooks() -> Iterator[None]:
    """Make torch assume a GPU while the body runs; do nothing if that is impossible."""
    hooks = _get_hooks()
    if hooks is None:
        yield
        return
    yes = _Method(lambda _: 1)
    table = _Table(*_Table.from_address(hooks[0]))
    for place in _find_positions():
        table[place] = _get_address(yes)
    with _apply_table(hooks, table):
        yield


@functools.cache
def _get_hooks() -> Any:
    """Return the object that C++ queries about CUDA; its first word points to its methods."""
    with contextlib.suppress(OSError, AttributeError):
        ask = getattr(_load_library("libtorch_cpu"), _HOOKS)
        ask.restype = ctypes.POINTER(ctypes.c_void_p)
        return ask()
    return None


def _get_address(method: Any) -> int | None:
    return ctypes.cast(method, ctypes.c_void_p).value


@contextlib.contextmanager
def _apply_table(hooks: Any, table: ctypes.Array[ctypes.c_void_p]) -> Iterator[None]:
    before, hooks[0] = hooks[0], ctypes.addressof(table)
    try:
        yield
    finally:
        hooks[0] = before


@functools.cache
def _find_positions() -> tuple[int, ...]:
    """Return the positions of `hasCUDA` and `hasPrimaryContext`.

    These are the methods that torch calls when it looks for an accelerator, and in a backward pass with one. Both
    return true.
    """
    available = _find_called_methods((), torch._C._accelerator_getAccelerator, answer=0)
    return available + _find_called_methods(available, _run_backward, answer=1)


def _run_backward() -> None:
    with torch.autograd.set_multithreading_enabled(False):
        to_device(torch.ones(()), grad=True).mul(1).backward()


def _find_called_methods(known: tuple[int, ...], ask: Callable[[], object], *, answer: int) -> tuple[int, ...]:
    """Return the positions of methods that `ask` calls; known ones return 1, others `answer`."""
    called = []

    def make_method(place: int) -> Any:
        def record_call(_: int | None) -> int:
            if place in known:
                return 1
            called.append(place)
            return answer

        return _Method(record_call)

    methods = [make_method(place) for place in range(_METHODS)]
    with _apply_table(_get_hooks(), _Table(*map(_get_address, methods))):
        ask()
    return tuple(dict.fromkeys(called))
