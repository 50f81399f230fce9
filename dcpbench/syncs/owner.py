"""Attribute work to the thread that does it, and to its asyncio task, such as a request of a server. No torch here."""

from __future__ import annotations

import contextvars
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_owners: contextvars.ContextVar[tuple[Owner, ...]] = contextvars.ContextVar("dcpbench_syncs_owners", default=())
"""Owners that were made in this task, or in the tasks that started it."""


class Owner:
    """Hold the thread, and the asyncio task, in which a region or a watch was opened."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        task = _find_task()
        self._task: Callable[[], Any] = weakref.ref(task) if task is not None else lambda: None
        if task is not None:
            _owners.set((*_owners.get(), self))

    def owns_current_work(self) -> bool:
        """Return True on the owner's thread, except in another task that runs while the owner's is suspended.

        Tasks that the owner's task starts within the region belong to it. A task that has ended owns its whole thread:
        fixtures of tests are such tasks.
        """
        if threading.get_ident() != self.thread:
            return False
        task = self._task()
        return task is None or task.done() or task is _find_task() or self in _owners.get()

    def close(self) -> None:
        """End the ownership, so that tasks that are started from now on do not belong to it."""
        _owners.set(tuple(owner for owner in _owners.get() if owner is not self))


def _find_task() -> Any:  # noqa: ANN401  (a task, or None)
    """Return the asyncio task that runs on this thread; None outside of one."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return None
    try:
        return asyncio.current_task()
    except RuntimeError:  # there is no event loop
        return None


def name_current_work() -> str:
    """Return the name of the calling thread, with that of its asyncio task if it runs one."""
    ident = threading.get_ident()
    # Not current_thread(), which makes an object for a thread that Python does not know.
    thread = next((t.name for t in threading.enumerate() if t.ident == ident), "autograd")
    task = _find_task()
    return thread if task is None else f"{thread}, {task.get_name()}"
