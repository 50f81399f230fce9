"""Export for github-action-benchmark: one file of metrics that are better smaller, and one of those better bigger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.exports import RenderedFiles, encode_json_list, measured_points
from dcpbench.reports import load_labels
from dcpbench.show.text import fit_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.measured_points import MeasuredPoint
    from dcpbench.records.metrics import Value

FILES = {"lower": "gha-smaller-is-better.json", "higher": "gha-bigger-is-better.json"}  # for custom…IsBetter tools


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return both files, without a file that has no entries, because the action fails on an empty list."""
    kept, left_out = measured_points.filter_points(points, measured_points.DID_NOT_RUN)
    groups = measured_points.group_repeats(kept)
    entries: dict[str, list[dict[str, Any]]] = {better: [] for better in FILES}
    for name, group in zip(measured_points.make_names(groups), groups, strict=True):
        for value in measured_points.collect_values(group):
            if value.metric.better:
                entries[value.metric.better].append(_build_entry(name, group, value))
    return RenderedFiles(
        {FILES[better]: encode_json_list(found) for better, found in entries.items() if found}, left_out
    )


def _build_entry(name: str, group: Sequence[MeasuredPoint], v: Value) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": f"{name}: {v.metric.name}", "unit": v.metric.unit, "value": v.median}
    if v.low is not None and v.high is not None:
        entry["range"] = f"± {max(v.high - v.median, v.median - v.low):g}"
    first = group[0]
    facts = [
        v.metric.help,
        f"measured by {first.origin}" + (f" on {fit_name(first.device)}" if first.device else ""),
        f"{len(v.each)} repeats" if len(v.each) > 1 else "",
        {
            measured_points.FUNCTIONAL: "functional run on a CPU: no performance number",
            measured_points.REPLAYED: "replay: computed",
            measured_points.EMULATED: "forecast: one rank ran, its communication modelled",
        }.get(first.standing, ""),
        load_labels.describe_layers_held(m.record for m in group),
        "warnings: " + ", ".join(warnings)
        if (warnings := sorted({warning for m in group for warning in m.record.warnings}))
        else "",
    ]
    return entry | {"extra": "\n".join(filter(None, facts))}
