"""Stop the cyclic garbage collector while many objects are read."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def stop_garbage_collector() -> Iterator[None]:
    """Disable the cyclic garbage collector inside the block: it would visit all objects often and find no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
