"""Finds hidden CUDA synchronisation: in traces, live, and without a GPU.

`watch`, `no_syncs` and `allow` are for programs with a GPU, `dry_run` is for those without. torch is imported when one
of them is used, not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcpbench.syncs.allowed import allow
    from dcpbench.syncs.dry_run import dry_run
    from dcpbench.syncs.live import no_syncs, watch

__all__ = ["allow", "dry_run", "no_syncs", "watch"]

_HOMES = {"allow": "allowed", "dry_run": "dry_run", "no_syncs": "live", "watch": "live"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    # Else importing the module dry_run would leave a module of that name here.
    globals()[name] = value
    return value
