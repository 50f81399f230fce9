"""Define regions of code in which synchronising is allowed, each with its reason.

    with dcpbench.syncs.allow("the batch is over"):
        tokens = tokens.cpu()

A region applies to the thread that entered it, and to the autograd threads that work for it. No torch here.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_reasons: dict[int, list[str]] = {}


@contextlib.contextmanager
def allow(reason: str) -> Iterator[None]:
    """Allow the code inside to synchronise; also usable as a decorator.

    Regions nest, and the innermost reason is reported. Raise UsageError if the reason is empty or not a text.
    """
    given: object = reason
    if not isinstance(given, str) or not given.strip():
        raise UsageError('An allowed region needs its reason: with dcpbench.syncs.allow("the batch is over"): …')
    thread = threading.get_ident()
    reasons = _reasons.setdefault(thread, [])
    reasons.append(reason.strip())
    try:
        yield
    finally:
        reasons.pop()
        if not reasons:
            _reasons.pop(thread, None)


def get_reason(thread: int | None = None) -> str:
    """Return the reason of a thread's innermost region, by default the calling thread's; empty outside of one."""
    reasons = _reasons.get(threading.get_ident() if thread is None else thread)
    return reasons[-1] if reasons else ""
