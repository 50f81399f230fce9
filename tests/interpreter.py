"""Speed up Triton's interpreter: patch `triton.language` once per launch instead of once per call of a function.

Patching inspects 500 members of `triton.language` and takes 2 ms, half of the time of dcpbench's kernels. The patches
of a launch last until its end, so a second patch in the same launch changes nothing.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def prepare_once() -> None:
    """Make the interpreter of this process patch `triton.language` once per launch."""
    from triton.runtime import interpreter

    prepare: Callable[[Any], Any] = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    prepared: set[frozenset[int]] = set()

    @functools.cache
    def get_language_modules(fn: Any) -> frozenset[int]:
        """Return the ids of the language modules among the globals of a function; Triton patches only these."""
        modules = filter(inspect.ismodule, fn.__globals__.values())
        return frozenset(id(module) for module in modules if module in languages)

    def patch_new(fn: Any) -> Any:
        if get_language_modules(fn) in prepared:
            return None
        prepared.add(get_language_modules(fn))
        return prepare(fn)

    def launch_unpatched(*args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang = patch_new
    interpreter.GridExecutor.__call__ = launch_unpatched
