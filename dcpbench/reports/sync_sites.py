"""Report where the host waited in the profiled steps of a run, over all its points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.reports.tables import Table, make_table, make_text_columns
from dcpbench.show.numbers import ABSENT, format_number

if TYPE_CHECKING:
    from dcpbench.reports.dataframes import Frames


def describe_sites(frames: Frames) -> list[str]:
    """State that no site was found, if a profiled pass looked for sites and no table lists any."""
    looked = [r for r in frames.records if r.host_syncs_per_step is not None]
    if not looked or any(r.sync_sites for r in looked):
        return []
    most = max(r.host_syncs_per_step or 0 for r in looked)
    if most:
        return [
            f"Up to {format_number(most, 3)} calls in a step made the host wait; the records do not say on which lines."
        ]
    return [f"No step of the {len(looked):,} profiled points made the host wait for the GPU."]


def build_table(frames: Frames) -> Table:
    """Build a table of the sites: the worst count, wait and bubble of any point, and the number of points."""
    rows = [
        {
            "run": run.name,
            "model": frames.format_model(record.point.model),
            "where": f"{site.function} ({site.file}:{site.line})"
            if site.function and site.file
            else site.function or ABSENT,
            "kind": site.kind,
            "operator or call": site.op or site.call,
            "pass": site.found_in,
            "per_step": site.per_step,
            "wait_us": site.wait_us,
            "bubble_us": site.bubble_us,
            "point": record.point.get_key(),
        }
        for run in frames.runs
        for record in run.records
        for site in record.sync_sites
    ]
    found = pd.DataFrame(rows)
    if rows:
        worst = {"per_step": "max", "wait_us": "max", "bubble_us": "max", "point": "nunique"}
        same = ["run", "model", "pass", "kind", "where", "operator or call"]
        found = found.groupby(same, as_index=False).agg(worst).sort_values("bubble_us", ascending=False)
    return make_table(
        "Where the host waited",
        found,
        [
            *make_text_columns("model", "where", "kind", "operator or call", "pass"),
            ("per step", lambda r: format_number(r["per_step"], 3)),
            ("wait µs", lambda r: format_number(r["wait_us"], 3)),
            ("bubble µs, at most", lambda r: format_number(r["bubble_us"], 3)),
            ("points", lambda r: f"{r['point']:,}"),
        ],
        text_columns=5,
    )
