"""What a dry run sees of a program: each operator of a thread, and each call into torch."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from dcpbench.syncs.dry_run.device_tensor import DeviceTensor, become, to_device
from dcpbench.syncs.frames import walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.syncs.dry_run import DryRun

_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})


def _read(data: Any) -> Any:
    """Nested lists of numbers and tensors with each value on the GPU read into Python."""
    if isinstance(data, DeviceTensor):
        return data.item() if data.dim() == 0 else [_read(row) for row in data]
    return type(data)(_read(item) for item in data) if type(data) in {list, tuple} else data


class ProgramMode(TorchDispatchMode):
    """Sees every operator of a thread, so also those that make the first device tensor."""

    supports_higher_order_operators = True

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operator goes through the compiler's entrance first

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return self.run.operate(func, args, kwargs or {})


class CallMode(TorchFunctionMode):
    """Sees the program's calls into torch: their names, and what never becomes an operator."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        local, before = self.run.local, self.run.local.function
        local.function = func
        try:
            return self._call(func, args, kwargs)
        finally:
            local.function = before

    def _call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in _FROM_DATA:
            return self._from_data(func, args, kwargs)
        if func is torch.Tensor.type and len(args) > 1 and ".cuda." in str(args[1]):
            kind = str(args[1]).rpartition(".")[2].strip("'>")
            return args[0].to("cuda", getattr(torch, kind).dtype)
        if getattr(func, "__name__", "") == "__set__" and func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            tensor, other = args
            if isinstance(other, DeviceTensor) and not isinstance(tensor, DeviceTensor):
                return become(tensor, other)
        if self.run.assume_device and func in _device_constructors() and _unplaced(kwargs):
            return self._assumed(func, args, kwargs)
        return func(*args, **kwargs)

    def _from_data(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """torch.tensor and its like, which read lists where no mode sees it: values on the GPU are read one by one."""
        args = tuple(_read(a) if isinstance(a, list | tuple) else a for a in args)
        pinned = kwargs.get("pin_memory") and {**kwargs, "pin_memory": False}
        if self.run.assume_device and func is not torch.Tensor.new_tensor and _unplaced(kwargs):
            return self._assumed(func, args, kwargs)
        return func(*args, **pinned).pin_memory() if pinned else func(*args, **kwargs)

    def _assumed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A tensor that is made without a device; its making is no copy, as it would be made on the GPU."""
        _, user = walk()
        if user is not None and any(first <= user.line <= last for first, last in _host_lines(user.file)):
            return func(*args, **kwargs)
        if func in _FROM_DATA:
            made = func(*args, **kwargs)
            if isinstance(made, DeviceTensor):
                return made
            return to_device(made.detach(), grad=made.requires_grad)
        return func(*args, **{**kwargs, "device": torch.device("cuda", 0)})


def _unplaced(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("device") is None and not kwargs.get("pin_memory")


HOST_NAME = re.compile(r"_cpu(_[A-Z]+)?$")
"""`lens_cpu`, and with letters for its shape: `lens_cpu_R`."""


@functools.cache
def _host_lines(file: str) -> list[tuple[int, int]]:
    """First and last line of each value that is assigned to, or passed as, a name for host memory.

    The file may be a notebook's cell; an unknown one has no such lines.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AnnAssign | ast.keyword))
    values = [n.value for n in nodes if n.value is not None and any(map(HOST_NAME.search, _names(n)))]
    return [(value.lineno, value.end_lineno or value.lineno) for value in values]


def _names(node: ast.Assign | ast.AnnAssign | ast.keyword) -> list[str]:
    """Names that a value is given to; of attributes the last part."""
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [getattr(target, "attr", getattr(target, "id", "")) for target in targets]
