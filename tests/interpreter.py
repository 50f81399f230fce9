"""Triton's interpreter in less time: it prepares its language once a launch, not whenever one function calls another.

To prepare is to look at each of some 500 members of `triton.language`, which takes 2 ms: half of what our kernels took.
What a launch has prepared stays until it ends, so that doing it again changes nothing.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def prepare_once() -> None:
    """From now on, in this process."""
    from triton.runtime import interpreter

    prepare: Callable[[Any], Any] = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    prepared: set[frozenset[int]] = set()

    @functools.cache
    def known_to(fn: Any) -> frozenset[int]:
        """Modules of the language in what this function can name: that is all that is prepared for it."""
        modules = filter(inspect.ismodule, fn.__globals__.values())
        return frozenset(id(module) for module in modules if module in languages)

    def prepare_new(fn: Any) -> Any:
        if known_to(fn) in prepared:
            return None
        prepared.add(known_to(fn))
        return prepare(fn)

    def launch_anew(*args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang = prepare_new
    interpreter.GridExecutor.__call__ = launch_anew
