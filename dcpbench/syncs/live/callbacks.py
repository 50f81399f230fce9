"""How torch tells that the host is about to wait: by callbacks, or, in a torch without them, by its sync debug mode.

The callbacks are private to torch and can be neither taken back nor switched off, so one dispatcher is registered, once,
when the first watch begins. From then on torch enters Python before each wait, event record and allocation on the GPU.
It logs what a callback raises, so nothing is raised here.

torch.cuda.set_sync_debug_mode sees the stream synchronisations that ATen issues alone. The mode is one per process; one
that the program has set is kept: "warn" goes on warning, and "error" goes on raising.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

STREAM, EVENT, DEVICE = "stream", "event", "device"
MESSAGE = "called a synchronizing CUDA operation"
_DEFAULT, _WARN = 0, 1
_lock = threading.Lock()
_listener: Callable[[str], None] | None = None
_registered = False
_warned: list[_Warnings] = []
"""One entry for each listener to warnings."""


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


class _Warnings:
    """What was in force before the first listener, to be put back after the last."""

    def __init__(self, listener: Callable[[], None]) -> None:
        self.mode = torch.cuda.get_sync_debug_mode()
        self.show = warnings.showwarning
        self.listener = listener
        self.filters = warnings.filters[:]
        warnings.filterwarnings("always", message=f".*{MESSAGE}", category=UserWarning)
        warnings.showwarning = self._show
        if self.mode == _DEFAULT:
            torch.cuda.set_sync_debug_mode(_WARN)

    def _show(self, message: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (warnings' own signature)
        """Takes torch's warnings, and hands every other one on; also torch's where the program has asked for them."""
        ours = MESSAGE in str(message)
        if ours:
            self.listener()
        if not ours or self.mode == _WARN:
            self.show(message, *args, **kwargs)

    def undo(self) -> None:
        """Puts back what was in force before."""
        if torch.cuda.get_sync_debug_mode() == _WARN:
            torch.cuda.set_sync_debug_mode(self.mode)
        # What the program itself replaced meanwhile stays as the program wants it.
        if warnings.showwarning == self._show:
            warnings.showwarning = self.show
        ours = [f for f in warnings.filters if f not in self.filters and f[1] is not None and MESSAGE in f[1].pattern]
        for entry in ours:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


def begin_warnings(listener: Callable[[], None]) -> None:
    """Calls `listener()` on the synchronising thread after each warning of torch, until the matching `end_warnings()`."""
    with _lock:
        _warned.append(_warned[-1] if _warned else _Warnings(listener))


def end_warnings() -> None:
    """Puts the mode, the filters and the display of warnings back as they were, after the last listener."""
    with _lock:
        listening = _warned.pop()
        if not _warned:
            listening.undo()


def raised_by(error: BaseException) -> bool:
    """Whether an exception is the mode "error" speaking."""
    return isinstance(error, RuntimeError) and MESSAGE in str(error)
