"""Find hidden CUDA synchronisation: in traces, live, and without a GPU.

`watch`, `no_syncs` and `allow` are for programs with a GPU; `dry_run`, in the module of that name, is for those
without. torch is imported when one of them is used, not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcpbench.syncs.allowed import allow
    from dcpbench.syncs.live import no_syncs, watch

__all__ = ["allow", "no_syncs", "watch"]

_HOMES = {"allow": "allowed", "no_syncs": "live", "watch": "live"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
