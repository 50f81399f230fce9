"""How often a pass waits for the GPU, and where: by the live detector on a GPU, by the dry run without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dcpbench.bench.record import Syncs, SyncSite
from dcpbench.syncs.sites import sites_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Literal

    from dcpbench.bench.operators.calls import Calls
    from dcpbench.syncs.sites import Sync


def count_syncs(build: Callable[[torch.device], Calls], device: torch.device) -> Syncs:
    """Synchronisations of one pass, per call; what building it takes is left out.

    On a GPU nothing may be timed afterwards, as the detector's callbacks stay. On the CPU the case is built again, on
    a device that only stands for a GPU.
    """
    if device.type == "cuda":
        from dcpbench.syncs.live import watch

        calls = build(device)
        with watch() as seen:
            calls.run()
        return _per_call(seen.syncs, calls, "live")
    from dcpbench.syncs.dry_run import dry_run

    # A dry run begins with a backward pass, which inference mode would refuse.
    with torch.inference_mode(mode=False), dry_run() as run:
        calls = build(torch.device("cuda", 0))
        before = len(run.syncs)
        calls.run()
        return _per_call(run.syncs[before:], calls, "dry-run")


def _per_call(syncs: Sequence[Sync], calls: Calls, detector: Literal["live", "dry-run"]) -> Syncs:
    passes = len(calls.calls)
    certain = [sync for sync in syncs if not sync.may_block]
    sites = [
        SyncSite(
            kind=site.kind,
            op=site.op,
            function=site.function,
            file=site.file,
            line=site.line,
            per_call=site.count / passes,
        )
        for site in sites_of(certain)
    ]
    return Syncs(per_call=len(certain) / passes, detector=detector, sites=sites)
