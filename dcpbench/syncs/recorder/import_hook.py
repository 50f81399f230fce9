"""Call a function after a module of the program has been imported."""

import contextlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def run_after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` when the module `name` has run to its end, or at once if it already has.

    Exceptions of `then` are dropped, because they are not the program's.
    """
    if name in sys.modules:
        _run_callback(then, sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def _run_callback(then: Callable[[ModuleType], None], module: ModuleType) -> None:
    with contextlib.suppress(Exception):
        then(module)


class _Finder:
    """Find one module as the other finders do, and call a function after its execution; nothing is left behind."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ANN401
        """Implement Python's protocol for finders."""
        if name != self.name:
            return None
        others = (f for f in sys.meta_path if not isinstance(f, _Finder) and hasattr(f, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            self._attach_to_loader(spec.loader)
        return spec

    def _attach_to_loader(self, loader: Any) -> None:  # noqa: ANN401  (any loader)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _run_callback(self.then, module)

        # A loader that takes no attributes is left alone, and its module goes unseen.
        with contextlib.suppress(AttributeError):
            loader.exec_module = exec_module
