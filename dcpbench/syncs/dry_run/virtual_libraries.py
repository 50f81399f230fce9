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
from dcpbench.syncs.python_frames import walk_stack
from dcpbench.syncs.steps import LaunchedWork, Range

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.dry_run import DryRun
    from dcpbench.syncs.dry_run.virtual_cuda import Patches


def install_libraries(patches: Patches, run: DryRun) -> None:
    """Replace those parts until `patches.restore()`."""
    _apply_range_patches(patches, run)
    _apply_backward_patches(patches, run)
    patches.set_attributes(torch, compile=_get_uncompiled, load=_make_load(torch.load))
    patches.set_attributes(torch.serialization, load=torch.load)
    if importlib.util.find_spec("triton"):
        _apply_kernel_patches(patches)


def _apply_range_patches(patches: Patches, run: DryRun) -> None:
    """Make record_function report to the dry run; a range counts once it has ended, or if it is open around a wait."""
    kind = torch.autograd.profiler.record_function
    enter, leave = kind.__enter__, kind.__exit__

    @functools.wraps(enter)
    def open_range(self: Any) -> Any:
        run.local.ranges.append(self.name)
        self.dry_run_start, self.dry_run_seen, self.dry_run_ops = time.perf_counter(), run.count_activity(), run.ops
        return enter(self)

    @functools.wraps(leave)
    def close_range(self: Any, *error: Any) -> Any:
        if self.name in run.local.ranges:
            run.local.ranges.remove(self.name)
            empty = run.count_activity() == self.dry_run_seen
            work = LaunchedWork(run.ops - self.dry_run_ops)
            run.ranges.append(Range(self.name, self.dry_run_start, time.perf_counter(), empty, work))
        return leave(self, *error)

    patches.set_attributes(kind, __enter__=open_range, __exit__=close_range)


def _apply_backward_patches(patches: Patches, run: DryRun) -> None:
    """Record the caller of backward, because autograd may run nodes where there is no Python stack."""
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        before, run.local.caller = run.local.caller, walk_stack()
        try:
            return original(*args, **kwargs)
        finally:
            run.local.caller = before

    patches.set_attributes(torch.autograd.graph, _engine_run_backward=run_backward)
    patches.set_attributes(torch.autograd, _engine_run_backward=run_backward)


def _get_uncompiled(model: Any = None, **_: Any) -> Any:
    """Replace torch.compile, as a function and as a decorator with options."""
    return (lambda function: function) if model is None else model


def _make_load(original: Callable[..., Any]) -> Callable[..., Any]:
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


def _apply_kernel_patches(patches: Patches) -> None:
    """Run Triton kernels in its interpreter, on the values of device tensors; autotuning takes the first choice."""
    from triton.runtime import autotuner, interpreter, jit

    start, finish = interpreter.GridExecutor.__call__, jit.JITFunction.run

    @functools.wraps(start)
    def run_on_values(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return start(self, *_get_values(args), **{key: _get_values(value) for key, value in kwargs.items()})

    @functools.wraps(finish)
    def run_interpreted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not any(isinstance(value, DeviceTensor) for value in (*args, *kwargs.values())):
            return finish(self, *args, grid=grid, warmup=warmup, **kwargs)
        return interpreter.InterpretedFunction(self.fn).run(*args, grid=grid, warmup=warmup, **kwargs)

    def call_interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return interpreter.InterpretedFunction(self.fn)(*args, **kwargs)

    def run_first_choice(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    patches.set_attributes(interpreter.GridExecutor, __call__=run_on_values)
    patches.set_attributes(jit.JITFunction, run=run_interpreted, __call__=call_interpreted)
    patches.set_attributes(autotuner.Autotuner, run=run_first_choice)


def _get_values(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host_values
    return tuple(_get_values(item) for item in value) if type(value) is tuple else value
