"""Find synchronisation without a GPU: run a program on tensors that emulate a GPU's, and report what would wait.

Values are real, so control flow is as on a GPU. Times, kernels and the internals of libraries are unknown.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import linecache
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from dcpbench.errors import UsageError
from dcpbench.syncs import allowed, rules
from dcpbench.syncs.dry_run import device_tensor
from dcpbench.syncs.dry_run.backward import find_backward_waits, find_gradient_check
from dcpbench.syncs.dry_run.children import Children, install_children
from dcpbench.syncs.dry_run.cpp_hooks import apply_cuda_hooks, apply_device_guard
from dcpbench.syncs.dry_run.device_tensor import (
    DeviceTensor,
    is_pinned,
    mark_device_memory,
    mark_pinned,
    set_data,
    to_device,
)
from dcpbench.syncs.dry_run.fork_gate import gate
from dcpbench.syncs.dry_run.measured_operators import is_measured
from dcpbench.syncs.dry_run.operators import convert_to_host, find_device_tensors, run_operator
from dcpbench.syncs.dry_run.subclasses import install_subclasses
from dcpbench.syncs.dry_run.sync_ops import POINTWISE_MIXERS, find_operator_waits
from dcpbench.syncs.dry_run.virtual_cuda import Patches, gpu, install_cuda
from dcpbench.syncs.dry_run.virtual_distributed import install_distributed
from dcpbench.syncs.dry_run.virtual_libraries import install_libraries
from dcpbench.syncs.dry_run.virtual_runtime import install_runtime
from dcpbench.syncs.dry_run.virtual_torchscript import install_torchscript
from dcpbench.syncs.dry_run.waits import make_wait
from dcpbench.syncs.owner import name_current_work
from dcpbench.syncs.python_frames import walk_stack
from dcpbench.syncs.sites import Sync, group_into_sites
from dcpbench.syncs.steps import LaunchedWork, find_steps, format_ranges
from dcpbench.syncs.sync_report import Coverage, Report, TraceSummary, build_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dcpbench.syncs.steps import Range, Steps

NOTES = (
    "A dry run has no GPU: kernels, waits and bubbles are unknown, and every time and cost is left out.",
    "Libraries and C++ or CUDA extensions that call CUDA by themselves are not seen; their operators run on the CPU.",
    "Device memory is not limited here, so waits of a caching allocator that runs out of it are not seen.",
    "Waits of operators were measured with torch 2.11 on an H200; other versions and GPUs may differ in detail.",
    "torch.compile is left out: compiled functions ran eagerly.",
    "In threads that started before the dry run, only operators on device tensors are seen.",
)
NOT_FOLLOWED = "Child processes are followed by the command `dcpbench syncs dry-run` only."
ASSUMED = "Tensors made without a device were taken to be on the GPU; making them counts as no copy."
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
HOST_NAME = re.compile(r"_cpu(_[A-Z]+)?$")  # `lens_cpu`, and with letters for its shape: `lens_cpu_R`
_PYTHON_KERNEL_KEYS = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


class DryRun:
    """Hold the state of one dry run: the waits so far, and the report on them."""

    def __init__(self, *, assume_device: bool = False) -> None:
        self.assume_device = assume_device
        self.syncs: list[Sync] = []  # waits in the order in which they happened, of all threads
        self.ranges: list[Range] = []  # all `record_function` ranges that have ended, on the host's clock
        self.ops = 0  # operators on device tensors
        self.unmeasured: set[str] = set()  # operators on device tensors without a measurement of waits
        self.local = _Local()
        self.children = Children()
        self.follows = False  # True if child processes report their synchronisations

    def forget(self) -> None:
        """Forget what happened so far, because this is now a forked child."""
        self.syncs, self.ranges, self.ops = [], [], 0
        self.unmeasured, self.children = set(), Children()

    def report(self, *, program: str = "", step_range: str | None = None, root: Path | None = None) -> Report:
        """Return sites, coverage and totals of a program of that name; the gate adds the verdict.

        `step_range` is a regular expression of the ranges that mark steps, by default as for a trace; files are made
        relative to `root`, or the working directory.
        """
        steps = find_steps(self.ranges, LaunchedWork(self.ops), step_range)
        placed = [_add_step(sync, steps) for sync in self.syncs]
        unmatched = []
        if step_range is not None and not len(steps):
            ranges = format_ranges(found.name for found in self.ranges)
            unmatched = [f"No range matches --step-range {step_range!r}, so that no steps are known. {ranges}"]
        coverage = Coverage(
            detector="dry-run",
            ops=self.ops,
            stacks="frames",
            steps_from=steps.marked_by,
            steps_by_phase=steps.count_phases(),
            steps_share=steps.share,
            steps_guessed=steps.is_guessed,
            unmeasured=sorted(self.unmeasured),
            children=[*self.children.started],
            notes=[*NOTES, *[NOT_FOLLOWED] * (not self.follows), *[ASSUMED] * self.assume_device, *unmatched],
        )
        summary = TraceSummary(path=program, steps=len(steps) or None, coverage=coverage)
        return build_report([summary], group_into_sites(placed, steps=steps, trace=program, root=root))

    def count_activity(self) -> int:
        """Return the number of operators on device tensors and waits so far, to detect activity within a range."""
        return self.ops + len(self.syncs)

    def record_named_wait(self, rule: rules.Rule, op: str, call: str, *, explicit: bool = True) -> None:
        """Record a wait that does not come from an operator, such as torch.cuda.synchronize()."""
        self._record_wait(Sync(rule=rule.id, op=op, call=call, explicit=explicit))

    def _pin_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark a host tensor as pinned, which keeps the host busy if it is large."""
        if tensor.nbytes >= rules.MIN_PINNING_BYTES:
            facts = {"bytes": tensor.nbytes, "may_block": True}
            self._record_wait(
                make_wait(rules.ALLOCATION, "aten::_pin_memory", direction="", call="cudaHostAlloc", **facts)
            )
        return mark_pinned(tensor)

    def _record_wait(self, sync: Sync) -> None:
        """Record a wait with its place in the program.

        If the program called a composite operator that needs a count, its rule is more specific than that of its parts:
        one_hot reads a value to know a size.
        """
        called = getattr(self.local.function, "__name__", "")
        if sync.rule == rules.SCALAR.id and called in rules.SHAPE_OPS:
            sync = dataclasses.replace(sync, rule=rules.SHAPE.id, op_chain=(f"aten::{called}", *sync.op_chain))
        frames, user = walk_stack()
        if user is None and self.local.caller is not None:
            frames, user = self.local.caller
        placed = dataclasses.replace(
            sync,
            frames=frames,
            user=user,
            thread=name_current_work(),
            thread_id=threading.get_ident(),
            allowed=allowed.get_reason(),
            at=time.perf_counter(),
            ranges=tuple(self.local.ranges),
            api=_get_function_name(self.local.function),
            capturing=gpu.is_capturing(),
        )
        self.syncs.append(placed)

    def handle_operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator as on a GPU, and record where it would wait."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            with ProgramMode(self):
                return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        given = (*args, *kwargs.values())
        concerned = next(iter(find_device_tensors(given)), None) is not None
        if not concerned and not any(isinstance(value, torch.device) and value.type == "cuda" for value in given):
            return self._run_on_host(func, args, kwargs)
        if not concerned and any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented  # a class such as DTensor runs the operator on the tensors inside
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with ProgramMode(self):
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _has_python_kernel(func):
            with ProgramMode(self):
                keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
                return func.redispatch(keys, *args, **kwargs)
        return self._run_on_gpu(func, args, kwargs)

    def _run_on_gpu(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = func._schema.name
        if name in _ANSWERS:
            return _ANSWERS[name]
        _check_devices(func, args)
        self.ops += 1
        if not is_measured(func):
            self.unmeasured.add(name)
        self._record_node_waits(func, args)
        for sync in find_operator_waits(func, args, kwargs):
            self._record_wait(sync)
        gpu.touched = True
        if func.namespace == "c10d":  # the result of a collective's Work refers to its tensors
            for tensor in find_device_tensors((*args, *kwargs.values())):
                mark_device_memory(tensor)
        with gate.run_operator():
            result = run_operator(func, args, kwargs)
        to_host = name in {"aten::_to_copy", "aten::empty"} and isinstance(result, torch.Tensor) and result.is_cpu
        if to_host and (kwargs.get("non_blocking") or kwargs.get("pin_memory")):
            mark_pinned(result)
        if gpu.graph is not None:
            gpu.graph.work.append((func, convert_to_host(args), convert_to_host(dict(kwargs)), convert_to_host(result)))
        return result

    def _record_node_waits(self, func: Any, args: Sequence[Any]) -> None:
        """Note the waits of the node of autograd that runs, of which this is an operator."""
        node: Any = torch._C._current_autograd_node()  # None outside of a backward pass
        if node is not self.local.node:
            self.local.node, self.local.checked = node, False
            for sync in find_backward_waits(node, args) if node is not None else ():
                self._record_wait(sync)
        if node is not None and not self.local.checked:
            for sync in find_gradient_check(node, func, args):
                self.local.checked = True
                self._record_wait(sync)

    def _run_on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator between host tensors: it never waits, but it may create or request pinned memory."""
        name = func._schema.name
        if name == "aten::is_pinned":
            return is_pinned(args[0])
        if name in {"aten::_pin_memory", "aten::pin_memory"}:
            if is_pinned(args[0]):
                return args[0]
            return self._pin_tensor(args[0].clone(memory_format=torch.contiguous_format))
        if kwargs.get("pin_memory"):
            return self._pin_tensor(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


def _read_nested(data: Any) -> Any:
    """Return nested lists of numbers and tensors with each value on the GPU read into Python."""
    if isinstance(data, DeviceTensor):
        return data.item() if data.dim() == 0 else [_read_nested(row) for row in data]
    return type(data)(_read_nested(item) for item in data) if type(data) in {list, tuple} else data


class ProgramMode(TorchDispatchMode):
    """Intercept every operator of a thread, including those that create the first device tensor."""

    supports_higher_order_operators = True

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operator goes through the compiler's entrance first

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return self.run.handle_operator(func, args, kwargs or {})


class CallMode(TorchFunctionMode):
    """Intercept the program's calls into torch: their names, and calls that never become an operator."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        local, before = self.run.local, self.run.local.function
        local.function = func
        try:
            return self._handle_call(func, args, kwargs)
        finally:
            local.function = before

    def _handle_call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in _FROM_DATA:
            return self._create_from_data(func, args, kwargs)
        if func is torch.Tensor.type and len(args) > 1 and ".cuda." in str(args[1]):
            kind = str(args[1]).rpartition(".")[2].strip("'>")
            return args[0].to("cuda", getattr(torch, kind).dtype)
        if getattr(func, "__name__", "") == "__set__" and func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            tensor, other = args
            if isinstance(other, DeviceTensor) and not isinstance(tensor, DeviceTensor):
                return set_data(tensor, other)
        if self.run.assume_device and func in _device_constructors() and _has_no_device(kwargs):
            return self._create_without_device(func, args, kwargs)
        return func(*args, **kwargs)

    def _create_from_data(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Handle torch.tensor and similar functions, which read lists where no mode sees it: values on the GPU are read
        one by one.
        """
        args = tuple(_read_nested(a) if isinstance(a, list | tuple) else a for a in args)
        pinned = kwargs.get("pin_memory") and {**kwargs, "pin_memory": False}
        if self.run.assume_device and func is not torch.Tensor.new_tensor and _has_no_device(kwargs):
            return self._create_without_device(func, args, kwargs)
        return func(*args, **pinned).pin_memory() if pinned else func(*args, **kwargs)

    def _create_without_device(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return a tensor that was created without a device; its creation is not a copy, because on a GPU it would be
        created there.
        """
        _, user = walk_stack()
        if user is not None and any(first <= user.line <= last for first, last in _find_host_lines(user.file)):
            return func(*args, **kwargs)
        if func in _FROM_DATA:
            made = func(*args, **kwargs)
            if isinstance(made, DeviceTensor):
                return made
            return to_device(made.detach(), grad=made.requires_grad)
        return func(*args, **{**kwargs, "device": torch.device("cuda", 0)})


def _has_no_device(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("device") is None and not kwargs.get("pin_memory")


@functools.cache
def _find_host_lines(file: str) -> list[tuple[int, int]]:
    """Return first and last line of each value that is assigned to, or passed as, a name for host memory.

    The file may be a notebook's cell; an unknown file has no such lines.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AnnAssign | ast.keyword))
    values = [n.value for n in nodes if n.value is not None and any(map(HOST_NAME.search, _list_names(n)))]
    return [(value.lineno, value.end_lineno or value.lineno) for value in values]


def _list_names(node: ast.Assign | ast.AnnAssign | ast.keyword) -> list[str]:
    """Return the names that a value is assigned to; for attributes the last part."""
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [getattr(target, "attr", getattr(target, "id", "")) for target in targets]


class _Local(threading.local):
    """Hold the state of each thread."""

    def __init__(self) -> None:
        self.function: Any = None  # function of torch that the program called
        self.ranges: list[str] = []
        self.caller: Any = None
        self.node: Any = None  # node of autograd that ran at the last operator
        self.checked = False  # True if that node has checked a gradient


@contextlib.contextmanager
def dry_run(*, assume_device: bool = False) -> Iterator[DryRun]:
    """Run the body with a virtual GPU, and record every wait for it.

    Args:
        assume_device: Tensors made without a device are on the virtual GPU, for programs that name none. Those made
            with `device="cpu"`, pinned ones and those assigned to a name that ends in `_cpu` stay on the host.

    Raise UsageError inside another dry run, or if this version of torch accepts no virtual GPU.
    """
    if device_tensor.state.run is not None:
        raise UsageError("A dry run is on already; leave its `with` block first.")
    # torch's compiler keeps a table of functions from when it first needs one, and torch imports it in odd places, such
    # as an optimizer's step: let it read torch.cuda as it is.
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    run, patches = DryRun(assume_device=assume_device), Patches()
    with apply_device_guard(), apply_cuda_hooks(), contextlib.ExitStack() as restored:
        restored.callback(patches.restore)
        install_cuda(patches, run.record_named_wait)
        install_runtime(patches)
        install_libraries(patches, run)
        install_subclasses(patches)
        install_torchscript(patches)
        install_children(patches, run)
        if torch.distributed.is_available():
            install_distributed(patches, run)
        bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def start_thread(thread: Any) -> None:
            with _apply_modes(run):
                bootstrap(thread)

        patches.set_attributes(threading.Thread, _bootstrap_inner=start_thread)
        patches.set_attributes(device_tensor.state, run=run.handle_operator)
        with _apply_settings(), _apply_modes(run):
            yield run


@contextlib.contextmanager
def _apply_settings() -> Iterator[None]:
    """Apply the settings of torch for which there is no attribute to replace."""
    lift = torch._C._only_lift_cpu_tensors()
    cudnn = torch._C._get_cudnn_enabled()
    # Lists then become host tensors first, of which the copy to the GPU is an operator that can be seen.
    torch._C._set_only_lift_cpu_tensors(True)  # noqa: FBT003
    torch._C._set_cudnn_enabled(False)  # noqa: FBT003
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lift)
        torch._C._set_cudnn_enabled(cudnn)


@contextlib.contextmanager
def _apply_modes(run: DryRun) -> Iterator[None]:
    """Activate the modes that intercept the calling thread's operators and calls; its backward passes stay on that
    thread.
    """
    with torch.autograd.set_multithreading_enabled(False), CallMode(run), ProgramMode(run):
        yield


def _add_step(sync: Sync, steps: Steps) -> Sync:
    """Return the wait with its step and its other ranges."""
    step = steps.find_indices([sync.at])[0] if sync.at is not None and len(steps) else None
    inner = next((name for name in reversed(sync.ranges) if name not in steps.names), "")
    return dataclasses.replace(sync, step=step, range=inner)


def _get_function_name(function: Any) -> str:
    return (resolve_name(function) or getattr(function, "__name__", "")) if function is not None else ""


def _has_python_kernel(func: Any) -> bool:
    """Return True if the program registered a Python implementation of the operator, which then runs with device
    tensors, too.
    """
    if func.namespace in {"aten", "prims", "prim", "c10d"}:
        return False
    name = func._schema.name.replace("::", "/")
    return any(f"{name}/{key}" in torch.library._impls for key in _PYTHON_KERNEL_KEYS)


def _check_devices(func: Any, args: Sequence[Any]) -> None:
    """Raise torch's RuntimeError if an elementwise operator mixes devices, or if the index of a host tensor is on the
    GPU.
    """
    if func._schema.name in {"aten::index", "aten::index_put_", "aten::index_put"} and not isinstance(
        args[0], DeviceTensor
    ):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    if torch.Tag.pointwise not in func.tags or func._schema.name.removeprefix("aten::") in POINTWISE_MIXERS:
        return
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim() > 0]
    if any(isinstance(t, DeviceTensor) for t in tensors) and not all(isinstance(t, DeviceTensor) for t in tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        )


_ANSWERS = {  # results of operators that only a GPU has
    "aten::_fused_sdp_choice": 0,  # the mathematical one is made of operators that the CPU has
    "aten::is_pinned": False,
    "aten::_use_cudnn_ctc_loss": False,
    "aten::_use_miopen_ctc_loss": False,
}
