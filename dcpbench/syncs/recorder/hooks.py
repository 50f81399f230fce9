"""Calls a function once a module has been imported, without importing it."""

import contextlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls `then(module)` when the module `name` has run to its end; at once where it has already.

    What `then` raises is not the program's, and is dropped.
    """
    if name in sys.modules:
        _call(then, sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def _call(then: Callable[[ModuleType], None], module: ModuleType) -> None:
    with contextlib.suppress(Exception):
        then(module)


class _Finder:
    """Finds one module as all others do, and puts a call behind its execution. It leaves nothing behind."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ANN401
        """Part of Python's protocol for finders."""
        if name != self.name:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:  # noqa: ANN401  (any loader)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _call(self.then, module)

        # A loader that takes no attributes is left alone, and its module goes unseen.
        with contextlib.suppress(AttributeError):
            loader.exec_module = exec_module
