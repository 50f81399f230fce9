"""Replace parts of torch around its operators in a dry run: ranges, backward passes, compilation, loading and Triton."""

from __future__ import annotations

import functools
import importlib.util
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.graph
from torch.utils._pytree import tree_map

from dcpbench.syncs.dry_run.device_tensor import DeviceTensor
from dcpbench.syncs.frames import walk
from dcpbench.syncs.steps import Range, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.dry_run import DryRun
    from dcpbench.syncs.dry_run.virtual_cuda import Patches


def install_libraries(patches: Patches, run: DryRun) -> None:
    """Replace those parts until `patches.restore()`."""
    _ranges(patches, run)
    _backward(patches, run)
    patches.put(torch, compile=_eager, load=_load(torch.load))
    patches.put(torch.serialization, load=torch.load)
    if importlib.util.find_spec("triton"):
        _kernels(patches)


def _ranges(patches: Patches, run: DryRun) -> None:
    """Make record_function report to the dry run; a range counts once it has ended, or if it is open around a wait."""
    kind = torch.autograd.profiler.record_function
    enter, leave = kind.__enter__, kind.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        run.local.ranges.append(self.name)
        self.dry_run_start, self.dry_run_seen, self.dry_run_ops = time.perf_counter(), run.seen(), run.ops
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        if self.name in run.local.ranges:
            run.local.ranges.remove(self.name)
            empty = run.seen() == self.dry_run_seen
            work = Work(run.ops - self.dry_run_ops)
            run.ranges.append(Range(self.name, self.dry_run_start, time.perf_counter(), empty, work))
        return leave(self, *error)

    patches.put(kind, __enter__=entered, __exit__=left)


def _backward(patches: Patches, run: DryRun) -> None:
    """Record the caller of backward, because autograd may run nodes where there is no Python stack."""
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        before, run.local.caller = run.local.caller, walk()
        try:
            return original(*args, **kwargs)
        finally:
            run.local.caller = before

    patches.put(torch.autograd.graph, _engine_run_backward=backward)
    patches.put(torch.autograd, _engine_run_backward=backward)


def _eager(model: Any = None, **_: Any) -> Any:
    """Replace torch.compile, as a function and as a decorator with options."""
    return (lambda function: function) if model is None else model


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        """Replace torch.load: tensors for the GPU are read on the host and copied."""
        to_gpu = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cuda"
        if not to_gpu:
            return original(f, map_location=map_location, **kwargs)
        loaded = original(f, map_location="cpu", **kwargs)
        device = torch.device(map_location)
        return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, loaded)

    return load


def _kernels(patches: Patches) -> None:
    """Run Triton kernels in its interpreter, on the values of device tensors; autotuning takes the first choice."""
    from triton.runtime import autotuner, interpreter, jit

    start, finish = interpreter.GridExecutor.__call__, jit.JITFunction.run

    @functools.wraps(start)
    def on_values(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return start(self, *_values(args), **{key: _values(value) for key, value in kwargs.items()})

    @functools.wraps(finish)
    def interpreted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not any(isinstance(value, DeviceTensor) for value in (*args, *kwargs.values())):
            return finish(self, *args, grid=grid, warmup=warmup, **kwargs)
        return interpreter.InterpretedFunction(self.fn).run(*args, grid=grid, warmup=warmup, **kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return interpreter.InterpretedFunction(self.fn)(*args, **kwargs)

    def first_choice(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    patches.put(interpreter.GridExecutor, __call__=on_values)
    patches.put(jit.JITFunction, run=interpreted, __call__=called)
    patches.put(autotuner.Autotuner, run=first_choice)


def _values(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host_values
    return tuple(_values(item) for item in value) if type(value) is tuple else value
