"""torch's callbacks for a host that is about to wait: for a stream, an event or the whole device.

They are private to torch and can be neither taken back nor switched off, so one dispatcher is registered, once, when
the first watch begins. From then on torch enters Python before each wait, event record and allocation on the GPU.
An exception inside a callback never reaches the program: torch logs it. So nothing is raised here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

STREAM, EVENT, DEVICE = "stream", "event", "device"

_lock = threading.Lock()
_listener: Callable[[str], None] | None = None
_registered = False


def listen(listener: Callable[[str], None]) -> bool:
    """Calls `listener("stream" | "event" | "device")` on the waiting thread, before each wait, from now on.

    Whoever listened before is replaced. False where this torch has no such callbacks.
    """
    global _listener, _registered  # noqa: PLW0603  (one dispatcher per process, as torch keeps it for ever)
    with _lock:
        _registered = _registered or _register()
        if _registered:
            _listener = listener
        return _registered


def _tell(kind: str) -> None:
    if _listener is not None:
        _listener(kind)


def _register() -> bool:
    try:
        from torch.cuda import _gpu_trace

        streams = _gpu_trace.register_callback_for_stream_synchronization
        events = _gpu_trace.register_callback_for_event_synchronization
        devices = _gpu_trace.register_callback_for_device_synchronization
        activate = torch._C._activate_gpu_trace  # noqa: SLF001  (there is no public name)
    except (ImportError, AttributeError):
        return False
    streams(lambda _stream: _tell(STREAM))
    events(lambda _event: _tell(EVENT))
    devices(lambda: _tell(DEVICE))
    activate()
    return True
