"""Which charts the page draws itself, and where: each stands where the figure stood that it takes the place of."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.points.names import MODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.reports.plots import Picture


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart with a panel for each thing that lines must not share."""

    kind: str
    """What report-charts.js draws."""
    title: str
    workload: str = ""
    """`decode`, `serve`, or empty for both."""
    mode: str = ""
    """Of `serve`: `live` or `replay`, which no chart mixes."""
    alts: tuple[str, ...] = ()
    """What it shows, for those who cannot see it."""

    @property
    def slug(self) -> str:
        """Its name in the page and in the fragment of its address."""
        return "-".join(filter(None, (self.kind, self.workload if self.workload != "decode" else "", self.mode)))


TITLES = {
    "throughput": "Output throughput against load",
    "ttft": "Time to first token, p50 and p99",
    "itl": "Inter-token latency, p50 and p99",
    "frontier": "Throughput per GPU against speed per user",
    "break-even": "Output with DCP over that of the same layout without it",
    "kv": "KV cache capacity by layout",
    "phases": "Where a step's time goes",
}
"""By how a picture's kind begins, after `serve-` for served requests."""
ALL_WORKLOADS = ("kv",)


def chart_of(picture: Picture) -> Chart | None:
    """The chart that shows what a picture shows; None where the page shows the picture itself."""
    served = picture.kind.startswith("serve-")
    name = picture.kind.removeprefix("serve-")
    kind = next((kind for kind in TITLES if name == kind or name.startswith(f"{kind}-")), None)
    if kind is None:
        return None
    if kind in ALL_WORKLOADS:
        return Chart(kind, TITLES[kind], alts=(picture.alt,))
    mode = next((mode for mode in MODES if mode in name.split("-")), "") if served else ""
    title = TITLES[kind] + (f", {mode}" if mode else "")
    return Chart(kind, title, "serve" if served else "decode", mode, (picture.alt,))


def charts_of(pictures: Sequence[Picture]) -> list[Chart]:
    """Charts of a section, each once, with all that its pictures say of themselves."""
    found: dict[str, Chart] = {}
    for picture in pictures:
        chart = chart_of(picture)
        if chart and chart.slug in found:
            before = found[chart.slug]
            found[chart.slug] = dataclasses.replace(before, alts=before.alts + chart.alts)
        elif chart:
            found[chart.slug] = chart
    return list(found.values())
