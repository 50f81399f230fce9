"""Find the functions of torch with documentation that mentions synchronisation."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

SYNC_PATTERN = re.compile(  # text in the docstring of a synchronising function
    r"synchroni[sz]|(?:CPU-GPU|GPU -> CPU) sync|\bblock(?:s|ing)? the (?:cpu|current) thread", re.IGNORECASE
)
MODULES = (  # namespaces with the functions that the documentation describes
    "torch",
    "torch.Tensor",
    "torch.Event",
    "torch.Stream",
    "torch.UntypedStorage",
    "torch.accelerator",
    "torch.amp",
    "torch.amp.GradScaler",
    "torch.autograd.graph",
    "torch.cuda",
    "torch.cuda.Event",
    "torch.cuda.Stream",
    "torch.cuda.comm",
    "torch.distributed",
    "torch.distributed.Work",
    "torch.distributed.fsdp",
    "torch.distributions",
    "torch.fft",
    "torch.linalg",
    "torch.nested",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.parallel",
    "torch.nn.utils",
    "torch.optim",
    "torch.sparse",
    "torch.special",
)
UNMEASURED = {  # functions with such a docstring that are not measured, with the reason
    "torch.Event.wait": "one stream waits for another, as torch.cuda.Stream.wait_event does",
    "torch.Stream": "a class; its methods are measured",
    "torch.Stream.record_event": "the argument of a wait, not a wait",
    "torch.amp.GradScaler.update": "part of torch.amp.GradScaler.step here",
    "torch.cuda.comm.broadcast_coalesced": "needs several GPUs",
    "torch.cuda.comm.reduce_add_coalesced": "needs several GPUs",
    "torch.cuda.cudart": "synchronises in its example alone",
    "torch.cuda.get_sync_debug_mode": "reads the mode of the debug mode",
    "torch.cuda.set_sync_debug_mode": "the debug mode itself",
    "torch.distributed.Work.get_future": "needs several processes to wait",
    "torch.distributed.Work.get_future_result": "does not wait, by its documentation",
    "torch.distributed.fsdp.FullyShardedDataParallel": "needs several processes",
    "torch.distributed.fsdp.ShardingStrategy": "an option of FullyShardedDataParallel",
    "torch.distributed.monitored_barrier": "of the backend gloo, on the host",
    "torch.distributed.new_group": "measured with the collectives of cases.py",
    "torch.lobpcg": "in the title of a paper that it cites",
    "torch.nn.SyncBatchNorm": "needs several processes",
    "torch.nn.parallel.DistributedDataParallel": "measured with the collectives of cases.py",
    "torch.UntypedStorage.share_memory_": "synchronisation of processes",
    "torch.accelerator.memory_stats": "torch.cuda.memory_stats is measured",
}


def find_documented_names() -> Iterator[str]:
    """Yield the functions of the installed torch with a docstring that mentions synchronisation."""
    for module in MODULES:
        holder = _find(module)
        for name in sorted(vars(holder) if inspect.isclass(holder) else dir(holder)):
            if not name.startswith("_") and SYNC_PATTERN.search(_get_docstring(holder, name)):
                yield f"{module}.{name}"


def _get_docstring(holder: Any, name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = getattr(holder, name, None)
        text = None if inspect.ismodule(value) else getattr(value, "__doc__", None)
        return text if isinstance(text, str) else ""


def _find(module: str) -> Any:
    found: Any = torch
    for part in module.split(".")[1:]:
        found = getattr(found, part, None) or importlib.import_module(module)
    return found
