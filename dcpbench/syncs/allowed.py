"""Define regions of code in which synchronising is allowed, each with its reason.

    with dcpbench.syncs.allow("the batch is over"):
        tokens = tokens.cpu()

A region applies to the thread and the asyncio task that entered it, to tasks that this one starts inside, and to the
autograd threads that work for it. No torch here.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple

from dcpbench.errors import UsageError
from dcpbench.syncs.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Region(NamedTuple):
    owner: Owner
    reason: str


_regions: dict[int, list[_Region]] = {}  # thread -> regions that are open, in the order in which they were entered


@contextlib.contextmanager
def allow(reason: str) -> Iterator[None]:
    """Allow the code inside to synchronise; also usable as a decorator.

    Regions nest, and the innermost reason is reported. Raise UsageError if the reason is empty or not a text.
    """
    given: object = reason
    if not isinstance(given, str) or not given.strip():
        raise UsageError('An allowed region needs its reason: with dcpbench.syncs.allow("the batch is over"): …')
    region = _Region(Owner(), reason.strip())
    _regions.setdefault(region.owner.thread, []).append(region)
    try:
        yield
    finally:
        left = [other for other in _regions[region.owner.thread] if other is not region]
        if left:
            _regions[region.owner.thread] = left
        else:
            del _regions[region.owner.thread]
        region.owner.close()


def get_reason(thread: int | None = None) -> str:
    """Return the reason of the innermost region of a thread, by default of the calling thread and its task; empty outside of one."""
    if thread is not None and thread != threading.get_ident():
        return _regions[thread][-1].reason if _regions.get(thread) else ""
    mine = [region for region in _regions.get(threading.get_ident(), ()) if region.owner.owns_current_work()]
    return mine[-1].reason if mine else ""
