"""How often a pass waits for the GPU, and where: by the live detector on a GPU, by the dry run without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.bench_records import Syncs, SyncSite

if TYPE_CHECKING:
    import torch

    from dcpbench.syncs.model import Site
    from dcpbench.workloads.calls import Calls


def count_syncs(calls: Calls, device: torch.device) -> Syncs:
    """Synchronisations of one pass, per call. On a GPU nothing may be timed afterwards: the detector's hooks stay."""
    if device.type == "cuda":
        from dcpbench.syncs.live import watch

        with watch() as seen:
            calls.run()
        report = seen.report()
    else:
        from dcpbench.syncs.dry_run import dry_run

        with dry_run() as run:
            calls.run()
        report = run.report()
    found = [site for site in report.sites if not site.own]
    return Syncs(
        per_call=sum(site.count for site in found) / len(calls.calls),
        detector=report.traces[0].coverage.detector,
        sites=[_site(site, len(calls.calls)) for site in found],
    )


def _site(site: Site, calls: int) -> SyncSite:
    return SyncSite(
        kind=site.kind, op=site.op, function=site.function, file=site.file, line=site.line,
        per_call=site.count / calls,
    )  # fmt: skip
