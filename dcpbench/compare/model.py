"""What a comparison found, as it is written to JSON: rows with verdicts below points, and what both sides differ in."""

from __future__ import annotations

from typing import Literal

import msgspec

Workload = Literal["decode", "serve"]
Verdict = Literal["FASTER", "SLOWER", "MORE", "FEWER", "SAME", "UNDECIDED"]
"""B against A. MORE and FEWER are of what is counted: syncs, memory, KV capacity."""
WORST_FIRST: tuple[Verdict, ...] = ("SLOWER", "MORE", "FEWER", "FASTER", "UNDECIDED", "SAME")


class Row(msgspec.Struct, kw_only=True):
    """One metric of one point."""

    metric: str
    title: str
    unit: str
    higher_is_better: bool
    absolute: bool = False
    sampled: bool = True
    """False for what is counted, where every difference is one."""
    a: float
    """Geometric mean over launches, each the geometric mean of its repeats; of what is counted, the median."""
    b: float
    ratio: float | None
    """B / A; null where A is 0."""
    low: float | None = None
    """Of the ratio's interval at `confidence`; null where nothing says how well it is known."""
    high: float | None = None
    confidence: float | None = None
    """1 - what is left for this interval after correcting for all tests; null for what is counted."""
    p_differs: float | None = None
    p_same: float | None = None
    differs: bool = False
    """Whether the corrected test says that A and B are not equal, by however little."""
    verdict: Verdict
    reason: str = ""
    """Why it is undecided."""
    more_launches: int | None = None
    """How many more launches of each side would decide it, were the ratio as it seems; null where they would not."""
    launches: tuple[int, int] = (1, 1)
    repeats: tuple[int, int] = (1, 1)
    gate: str = ""
    """`fails`, `undecided` or `passes` where --fail-on speaks of it."""

    @property
    def worse(self) -> bool:
        """Whether the verdict is a change for the worse."""
        bad = "FEWER" if self.higher_is_better else "MORE"
        return self.verdict in ("SLOWER", bad)


class PointResult(msgspec.Struct, kw_only=True):
    """One point that both sides have."""

    name: str
    other_name: str = ""
    """What it is in B, where it is not the same (`across`)."""
    workload: Workload
    mode: str = ""
    """`live` or `replay`, of served points."""
    cpu: bool = False
    forecast: list[Literal["a", "b"]] = []
    """Sides that are forecasts, of which one rank ran: intervals reach to their ends."""
    without_ends: list[str] = []
    """Metrics that are not judged, as a forecast has no ends for them."""
    marks_a: list[str] = []
    marks_b: list[str] = []
    output_tok_s: tuple[float, float] | None = None
    """Of A and B in `decode`: concurrency / step time. Null in `serve`, which has rows of its throughput."""
    rows: list[Row] = []
    not_compared: list[str] = []
    """Metrics that one side has and the other has not."""

    @property
    def rank(self) -> int:
        """Worst verdict first."""
        return min((WORST_FIRST.index(row.verdict) for row in self.rows), default=len(WORST_FIRST))


class Difference(msgspec.Struct, kw_only=True):
    """Something in which the sides were not the same."""

    what: str
    a: str
    b: str


class Broken(msgspec.Struct, kw_only=True):
    """A point that ran on one side only."""

    name: str
    side: Literal["a", "b"]
    """Where it did not run."""
    outcome: str
    reason: str


class Finding(msgspec.Struct, kw_only=True):
    """What a rule of --fail-on says of one row or point."""

    rule: str
    point: str = ""
    metric: str = ""
    message: str
    status: Literal["fails", "undecided"] = "fails"


class Comparison(msgspec.Struct, kw_only=True):
    """A against B."""

    schema_version: int = 1
    a: list[str]
    """Its launches."""
    b: list[str]
    paired: bool
    across: list[str]
    margin: float
    alpha: float
    launch_noise: float
    tests: int
    """Sampled rows: the family that verdicts are corrected for."""
    counts: dict[str, int]
    """Rows by verdict."""
    cpu: bool
    """Whether any point ran on a CPU, so that its times claim nothing."""
    forecast: bool
    """Whether any point is a forecast on either side; which of them, and what was not judged for it, say the points."""
    performance: bool
    """Whether times of such points were judged all the same (--allow-cpu), or there are none."""
    differences: list[Difference]
    points: list[PointResult]
    only_a: list[str]
    only_b: list[str]
    broken: list[Broken]
    notes: list[str]
    rules: list[str] = []
    findings: list[Finding] = []

    @property
    def fails(self) -> list[Finding]:
        """Why the exit code is 1."""
        return [f for f in self.findings if f.status == "fails"]
