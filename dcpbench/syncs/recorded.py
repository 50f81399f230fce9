"""Convert sites of host-blocking calls to the form in the record of a point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dcpbench.records.record import SyncSite
from dcpbench.syncs.rules import ALLOCATION
from dcpbench.syncs.sync_report import get_sort_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.sync_report import Site

MAX_RECORD_SITES = 8  # sites that a record holds at most


def build_sync_sites(sites: Sequence[Site], where: Literal["eager", "replay", "serve", "engine"]) -> list[SyncSite]:
    """Return the sites of a steady step, worst first, as a record holds them.

    What frees memory does not count in an eager step, where the caching allocator grows and shrinks; a graph has its
    memory, so in a replayed step, or in a turn of the serving loop, it does.
    """
    aside = ALLOCATION.id if where == "eager" else ""
    mine = [s for s in sites if not (s.own or s.may_block or s.count_per_step == 0 or s.rule == aside)]
    return [
        SyncSite(
            found_in=where,
            rule=s.rule,
            kind=s.kind,
            call=s.call,
            op=s.op,
            function=s.function,
            file=s.file,
            line=s.line,
            per_step=s.count_per_step or 0.0,
            wait_us=s.wait_median_us or 0.0,
            bubble_us=None if s.bubble_us is None else s.bubble_us / s.count,
        )
        for s in sorted(mine, key=get_sort_key)
    ]
