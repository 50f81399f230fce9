"""Receive torch's callbacks before the host waits, which every version of torch has had since 2.0.

They are private to torch and can be neither removed nor switched off, so one dispatcher is registered, once, when the
first watch begins. From then on torch enters Python before each wait, event record and allocation on the GPU. It logs
exceptions of a callback, so nothing is raised here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from dcpbench.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

STREAM, EVENT, DEVICE = "stream", "event", "device"
MESSAGE = "called a synchronizing CUDA operation"  # message of torch.cuda.set_sync_debug_mode before ATen waits
_lock = threading.Lock()
_listener: Callable[[str], None] | None = None
_registered = False


def set_listener(listener: Callable[[str], None]) -> None:
    """Call `listener("stream" | "event" | "device")` on the waiting thread, before each wait, from now on.

    The listener replaces any previous one. Raise CapacityError if this version of torch has no such callbacks.
    """
    global _listener, _registered  # noqa: PLW0603  (one dispatcher per process, as torch keeps it for ever)
    with _lock:
        if not _registered:
            _register_callbacks()
            _registered = True
        _listener = listener


def _send_to_listener(kind: str) -> None:
    if _listener is not None:
        _listener(kind)


def _register_callbacks() -> None:
    try:
        from torch.cuda import _gpu_trace

        streams = _gpu_trace.register_callback_for_stream_synchronization
        events = _gpu_trace.register_callback_for_event_synchronization
        devices = _gpu_trace.register_callback_for_device_synchronization
        activate = torch._C._activate_gpu_trace  # noqa: SLF001  (there is no public name)
    except (ImportError, AttributeError) as e:
        raise CapacityError(
            f"torch {torch.__version__} does not tell when it waits ({e}), so nothing could be seen; record a trace "
            "instead: dcpbench syncs run -- python your_program.py"
        ) from e
    streams(lambda _stream: _send_to_listener(STREAM))
    events(lambda _event: _send_to_listener(EVENT))
    devices(lambda: _send_to_listener(DEVICE))
    activate()


def is_sync_error(error: BaseException) -> bool:
    """Return True if an exception comes from the mode "error"."""
    return isinstance(error, RuntimeError) and MESSAGE in str(error)
