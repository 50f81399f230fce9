"""Let a fork wait until no other thread runs an operator of the virtual GPU.

Operators run on the CPU here, where they hold locks, such as that of the random generator. A forked child would inherit
a lock that no thread of its own ever releases. A real GPU's operators are launched without these locks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WAIT_S = 5.0  # time after which a fork goes on: an operator may wait for another thread, or for another rank


class ForkGate:
    """Count the operators that run, and hold back new ones during a fork."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._local = threading.local()
        self._running = 0
        self._forking = False

    @contextlib.contextmanager
    def run_operator(self) -> Iterator[None]:
        """Hold back forks of other threads meanwhile."""
        depth = getattr(self._local, "depth", 0)
        if depth == 0:
            with self._changed:
                self._changed.wait_for(lambda: not self._forking, MAX_WAIT_S)
                self._running += 1
        self._local.depth = depth + 1
        try:
            yield
        finally:
            self._local.depth = depth
            if depth == 0:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Wait for the operators of other threads, before a fork."""
        own = int(getattr(self._local, "depth", 0) > 0)
        with self._changed:
            self._forking = True
            self._changed.wait_for(lambda: self._running <= own, MAX_WAIT_S)

    def open(self) -> None:
        """Let operators run again, after a fork in the parent."""
        with self._changed:
            self._forking = False
            self._changed.notify_all()

    def reset(self) -> None:
        """Forget the operators of other threads, which are not there in a forked child."""
        self._changed = threading.Condition(threading.Lock())
        self._running = int(getattr(self._local, "depth", 0) > 0)
        self._forking = False


gate = ForkGate()
os.register_at_fork(before=gate.close, after_in_parent=gate.open, after_in_child=gate.reset)
