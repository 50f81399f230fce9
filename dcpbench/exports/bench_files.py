"""What the files of `vllm bench serve` and SGLang's bench_serving have in common, of one served point."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.exports.measured import DECODE_STEPS, DID_NOT_RUN, Measured, Rule, sieve
from dcpbench.exports.requests import Requests, Totals, of_point, samples_of, totals_of
from dcpbench.points.names import CLOSED, GAMMA
from dcpbench.records.metrics import PERCENTILES
from dcpbench.records.provenance import OURS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Mapping

    from dcpbench.points.point import Load
    from dcpbench.records.record import Latencies, ServeMetrics

NOT_KNOWN = Rule(
    "had requests cut off, and no samples that say which tokens were theirs",
    lambda m: m.record.serve is not None and bool(m.record.serve.cancelled) and samples_of(m) is None,
)
NO_TIME = Rule("took no time", lambda m: m.record.serve is not None and not m.record.serve.wall_s > 0)
CARRIES = (DID_NOT_RUN, DECODE_STEPS, NO_TIME, NOT_KNOWN)
"""What neither file has a place for."""
SAME_NAMES = {name: name for name in ("ttft", "tpot", "itl", "e2el")}
"""Latencies of a tool that calls them what we do, in its order."""


@dataclasses.dataclass(frozen=True)
class Served:
    """A served point with its requests, as far as they are known."""

    m: Measured
    load: Load
    serve: ServeMetrics
    requests: Requests | None
    totals: Totals

    @property
    def label(self) -> str:
        """Who measured it: `dcpbench`, `dcpbench-replay`, `dcpbench-functional`, or an import's own tool."""
        return "-".join(filter(None, (self.m.origin, self.m.standing)))

    @property
    def max_concurrency(self) -> int | None:
        """Of a closed loop; our open loops have a bound in the scheduler, not in the client."""
        return self.m.record.point.concurrency if self.load.arrival == CLOSED else None

    @property
    def request_rate(self) -> float | None:
        """None where nothing spaces the requests: a closed loop, or a file's own times."""
        return self.load.request_rate if self.load.arrival == GAMMA else None


def served(points: Iterable[Measured], *more: Rule) -> tuple[list[Served], Counter[str]]:
    """The points that such a file can carry, and how many were left out, by reason."""
    kept, left_out = sieve(points, *CARRIES, *more)
    found = []
    for m in kept:
        load, serve = m.record.point.load, m.record.serve
        assert load is not None
        assert serve is not None
        details = of_point(m)
        totals = totals_of(serve, details)
        assert totals is not None
        found.append(Served(m, load, serve, details, totals))
    return found, left_out


def statistics(point: Served, names: Mapping[str, str] = SAME_NAMES) -> dict[str, float]:
    """`mean_ttft_ms` and its like, by the names that a tool has for ours; percentiles that are not known are absent."""
    spread = point.requests.spread_ms() if point.requests else {}
    found: dict[str, float | None] = {}
    for ours, theirs in names.items():
        times: Latencies = getattr(point.serve, f"{ours}_ms")
        found |= {
            f"mean_{theirs}_ms": times.mean,
            f"median_{theirs}_ms": times.p50,
            f"std_{theirs}_ms": spread.get(ours),
        }
        found |= {f"{p}_{theirs}_ms": getattr(times, p) for p in PERCENTILES[1:]}
    return {name: value for name, value in found.items() if value is not None}


def fixed(length: str) -> int | None:
    """Tokens where all requests have as many."""
    return int(length) if length.isdecimal() and len(length) < 10 else None  # noqa: PLR2004 - tokens, not a trap


def is_ours(m: Measured) -> bool:
    """Whether this package measured it."""
    return m.origin == OURS
