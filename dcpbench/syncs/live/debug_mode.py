"""torch.cuda.set_sync_debug_mode as a detector, for a torch without the callbacks of gpu_trace.py.

It sees the stream synchronisations that ATen issues, and no `synchronize()` of a device or an event. The mode is one
per process. A mode that the program has set is kept: "warn" goes on warning, and "error" goes on raising.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGE = "called a synchronizing CUDA operation"
_DEFAULT, _WARN = 0, 1
_lock = threading.Lock()
_users: list[_Listening] = []


class _Listening:
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


def begin(listener: Callable[[], None]) -> None:
    """Calls `listener()` on the synchronising thread after each warning of torch, until the matching `end()`."""
    with _lock:
        _users.append(_users[-1] if _users else _Listening(listener))


def end() -> None:
    """Puts the mode, the filters and the display of warnings back as they were, after the last listener."""
    with _lock:
        listening = _users.pop()
        if not _users:
            listening.undo()


def raised_by(error: BaseException) -> bool:
    """Whether an exception is the mode "error" speaking."""
    return isinstance(error, RuntimeError) and MESSAGE in str(error)
