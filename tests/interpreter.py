"""Triton's interpreter, quicker: it puts its own functions into the language anew at each call of a device function, a
third of its time. Within one kernel once is enough, as nothing takes them out before its end.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable


def patch_once() -> None:
    """From here on, in this process and its forks; not for kernels of several threads at a time."""
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_what_is_not(fn: Callable[..., Any]) -> Any:
        found = _languages(fn)
        if found and found <= patched:
            return None  # only a kernel's own call takes back what this returns, and finds nothing patched
        patched.update(found)
        return patch(fn)

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_what_is_not, run_kernel


@functools.cache
def _languages(fn: Callable[..., Any]) -> frozenset[int]:
    """Modules of the language that a function sees."""
    return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
