"""Says where a step of the program begins and ends.

With `--step MODULE:FUNCTION` that is one call of the function. Without, a step lasts from one outermost call of an
nn.Module to the next: what follows the model, such as sampling, belongs to it.
"""

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

SHELL = """
def _wrapped_call_impl(self, *args, **kwargs):
    _dcpbench_enter()
    try:
        return _dcpbench_call(self, *args, **kwargs)
    finally:
        _dcpbench_leave()
"""
"""Compiled under torch's own file name: a stack must not show a line of ours as the program's innermost one."""


class Marks:
    """Marks the steps of one process."""

    def __init__(self, recorder: Any, step: str) -> None:  # noqa: ANN401  (recording.Recorder, loaded by its path)
        self._recorder = recorder
        self._module, _, self._function = step.partition(":")
        self._local = threading.local()
        recorder.found = not step
        # A script has mostly defined its functions before it uses CUDA.
        recorder.when_cuda.append(self.look)
        recorder.when_done.append(self.undo)
        self._undo: list[Callable[[], None]] = []

    def torch_imported(self, torch: Any) -> None:  # noqa: ANN401  (a module)
        """Looks out for calls of modules; with --step, for a script whose function is not there yet."""
        try:
            self._follow_modules(torch.nn.Module.__call__)
        except (AttributeError, TypeError, ValueError) as error:
            self._recorder.problems.append(f"calls of nn.Module cannot be marked in this torch: {error!r}")
        self.look()

    def look(self) -> None:
        """Marks the function of --step as soon as it can be found."""
        if self._recorder.found:
            return
        owner: Any = sys.modules.get(self._module)
        *path, name = self._function.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        raw = inspect.getattr_static(owner, name, None) if owner is not None else None
        function = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        if function is None:
            return
        self._recorder.found = True
        if not callable(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            self._recorder.problems.append(f"{self._module}:{self._function} is no function that returns")
            return
        marked = self._marked(function)
        setattr(owner, name, type(raw)(marked) if isinstance(raw, staticmethod | classmethod) else marked)
        self._undo.append(lambda: setattr(owner, name, raw))

    def undo(self) -> None:
        """Takes the marks away again."""
        while self._undo:
            self._undo.pop()()

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the program's own)
            with self._step():
                return await function(*args, **kwargs)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (likewise)
            with self._step():
                return function(*args, **kwargs)

        return coroutine if inspect.iscoroutinefunction(function) else call

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave(ends=True)

    def _follow_modules(self, call: Any) -> None:  # noqa: ANN401  (nn.Module.__call__)
        """Puts the shell around the code of nn.Module.__call__. The function stays: torch.compile compares it."""
        code, home = call.__code__, call.__globals__
        home["_dcpbench_call"] = types.FunctionType(code, home, call.__name__, call.__defaults__, call.__closure__)
        home["_dcpbench_enter"] = self.look if self._function else self._enter
        home["_dcpbench_leave"] = (lambda: None) if self._function else self._leave
        made: dict[str, Any] = {}
        exec(compile(SHELL, code.co_filename, "exec"), made)  # noqa: S102  (the text above)
        call.__code__ = made["_wrapped_call_impl"].__code__
        self._undo.append(lambda: setattr(call, "__code__", code))

    def _enter(self) -> None:
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        if depth == 0:
            self._recorder.begin_step()

    def _leave(self, *, ends: bool = False) -> None:
        self._local.depth -= 1
        if ends and self._local.depth == 0:
            self._recorder.end_step()
