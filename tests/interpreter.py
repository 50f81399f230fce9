"""Speed up Triton's interpreter: prepare its language once for each launch instead of for each call between functions.
Preparing inspects some 500 members of `triton.language`, which takes 2 ms, half of the time of our kernels. A launch's
preparation lasts until it ends, so that repeating it changes nothing.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def prepare_once() -> None:
    """Install the faster preparation in this process."""
    from triton.runtime import interpreter

    prepare: Callable[[Any], Any] = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    languages = (interpreter.tl, interpreter.tl.core)
    prepared: set[frozenset[int]] = set()

    @functools.cache
    def known_to(fn: Any) -> frozenset[int]:
        """Return the modules of the language that this function can name, as only these are prepared for it."""
        modules = filter(inspect.ismodule, fn.__globals__.values())
        return frozenset(id(module) for module in modules if module in languages)

    def prepare_new(fn: Any) -> Any:
        if known_to(fn) in prepared:
            return None
        prepared.add(known_to(fn))
        return prepare(fn)

    def clear_and_launch(*args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang = prepare_new
    interpreter.GridExecutor.__call__ = clear_and_launch
