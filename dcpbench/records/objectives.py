"""Compare latencies with the objectives of `--slo`, each at the highest percentile that has enough samples. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.records.stats import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class JudgedObjective:
    """Hold an objective of the SLO and the latency that it was compared with."""

    name: str  # one of OBJECTIVES
    limit_ms: float
    percentile: str | None  # the highest one with enough samples; None if the latency is not known
    ms: float | None

    @property
    def met(self) -> bool:
        """Return True if the latency is known and within the limit."""
        return self.ms is not None and self.ms <= self.limit_ms

    def format(self) -> str:
        """Return the latency with its percentile, such as `ITL p99 41.3 ms`."""
        if self.ms is None:
            return f"{self.name.upper()}, which is not known"
        shown = f"{self.ms:,.0f}" if self.ms >= 100 else f"{self.ms:.3g}"  # noqa: PLR2004 - three digits
        return f"{self.name.upper()} {self.percentile} {shown} ms"


def judge_latencies(of: object, slo: Mapping[str, float]) -> list[JudgedObjective]:
    """Return each objective with the latency that it is compared with.

    `of` has percentiles as `ttft_ms.p99`: the results of a load, or a forecast.
    """
    return [JudgedObjective(name, limit, *_find_judged_value(getattr(of, f"{name}_ms"))) for name, limit in slo.items()]


def _find_judged_value(latencies: object) -> tuple[str, float] | tuple[None, None]:
    """Return (percentile, ms) by which an objective is judged: p99 if there are enough samples, else the next lower one."""
    for percentile in reversed(PERCENTILES):
        value = getattr(latencies, f"p{percentile}")
        if value is not None:
            return f"p{percentile}", value
    return None, None
