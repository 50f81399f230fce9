"""Replace CUDA on machines without a GPU: fire torch's callbacks at calls that would wait for CUDA.

The code is compiled under a file name of torch, so that detectors skip it and report the user's line.
"""

from pathlib import Path

import torch

SOURCE = """
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode

def stream():
    _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(0)

def event():
    _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(0)

def device():
    _gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks()

def synchronize():
    _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(0)

class Waiting(TorchDispatchMode):
    def __init__(self, names, wait=stream):
        super().__init__()
        self.names, self.wait = names, wait

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in self.names:
            self.wait()
        return func(*args, **(kwargs or {}))
"""
_names: dict = {}
exec(compile(SOURCE, str(Path(torch.__file__).parent / "fake_cuda.py"), "exec"), _names)  # noqa: S102
stream, event, device, synchronize = (_names[name] for name in ("stream", "event", "device", "synchronize"))
Waiting = _names["Waiting"]
"""Dispatch mode, to be entered before the watch: operators with these names wait, like their CUDA kernels."""
