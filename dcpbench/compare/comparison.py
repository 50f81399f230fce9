"""Define what a comparison finds and writes to JSON: rows with verdicts below points, and differences of the sides."""

from __future__ import annotations

from typing import Literal

import msgspec

from dcpbench.records.metrics import find_compared_metric

Workload = Literal["decode", "serve"]
SideName = Literal["a", "b"]
SIDES: tuple[SideName, ...] = ("a", "b")
Verdict = Literal["FASTER", "SLOWER", "MORE", "FEWER", "SAME", "UNDECIDED"]  # B against A; MORE, FEWER: of counted data
WORST_FIRST: tuple[Verdict, ...] = ("SLOWER", "MORE", "FEWER", "FASTER", "UNDECIDED", "SAME")


class Row(msgspec.Struct, kw_only=True):
    """Hold one metric of one point."""

    metric: str
    title: str
    unit: str
    higher_is_better: bool
    absolute: bool = False
    sampled: bool = True  # False for a count, of which every difference is one
    judged: bool = False  # whether it could have got another verdict than UNDECIDED
    a: float  # geometric mean over launches, each the geometric mean of its repeats; for counted metrics the median
    b: float
    ratio: float | None  # B / A; null if A is 0
    low: float | None = None  # lower end of the ratio's interval at `confidence`; null if its uncertainty is unknown
    high: float | None = None
    confidence: float | None = None  # of this interval after correcting for all tests; null for counted metrics
    p_differs: float | None = None
    p_same: float | None = None
    differs: bool = False  # True if the corrected test finds A and B unequal, however small the difference
    verdict: Verdict
    least_visible: float | None = None  # smallest ratio above 1 that is found in 4 of 5 cases; null if not judged
    reason: str = ""  # why it is undecided
    more_launches: int | None = None  # launches of each side that would decide it, if it is as it seems; else null
    missing_launches: tuple[int, int] = (0, 0)  # launches of A and B without which it is not judged
    launches: tuple[int, int] = (1, 1)
    repeats: tuple[int, int] = (1, 1)
    gate: str = ""  # what a rule of --fail-on finds: `fails`, `unjudged`, `undecided` or `passes`

    @property
    def is_worse(self) -> bool:
        """Return True if the verdict is a change for the worse."""
        bad = "FEWER" if self.higher_is_better else "MORE"
        return self.verdict in ("SLOWER", bad)


class Uncompared(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a metric of a point that only one side has, that is 0 in too few launches of a side, or that has two definitions."""

    metric: str
    absent_in: SideName
    zero: bool = False  # true for a rate of 0, which has no ratio
    other_objectives: bool = False  # true for goodput under other objectives

    def __str__(self) -> str:
        what = "0" if self.zero else "other objectives" if self.other_objectives else "absent"
        return f"{self.metric} ({what} in {self.absent_in.upper()})"


class PointResult(msgspec.Struct, kw_only=True):
    """Hold one point that both sides have."""

    name: str
    other_name: str = ""  # name of the point in B if it differs (`across`)
    workload: Workload
    mode: str = ""  # `live` or `replay`, for served points
    cpu: bool = False
    forecast: list[SideName] = []  # sides that are forecasts of one rank: intervals reach to their ends
    without_ends: list[str] = []  # metrics that are not judged because a forecast has no ends for them
    warnings_a: list[str] = []
    warnings_b: list[str] = []
    output_tok_s: tuple[float, float] | None = None  # A and B in `decode`, by step time; null in `serve` (own rows)
    rows: list[Row] = []
    not_compared: list[Uncompared] = []

    def find_row(self, name: str) -> Row | None:
        """Return the row of the metric that options of `compare` call by this name; None without one."""
        metric = find_compared_metric(name, self.workload)
        return next((row for row in self.rows if metric is not None and row.metric == metric.option), None)

    def find_missing_in_b(self, name: str) -> Uncompared | None:
        """Return the metric that options of `compare` call by this name if A has it and B does not."""
        metric = find_compared_metric(name, self.workload)
        found = (t for t in self.not_compared if metric is not None and t.metric == metric.brief)
        return next((t for t in found if t.absent_in == "b"), None)

    @property
    def rank(self) -> int:
        """Sort key: worst verdict first."""
        return min((WORST_FIRST.index(row.verdict) for row in self.rows), default=len(WORST_FIRST))


class Difference(msgspec.Struct, kw_only=True):
    """Hold something in which the sides were not the same."""

    what: str
    a: str
    b: str


class LayersHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a model that did not fit on a side: the number of its layers that were in memory, and were cycled through."""

    side: SideName
    model: str
    fewest: int  # over the points of the side that did not hold all layers
    most: int
    layers: int  # of the whole model


class OneSidedPoint(msgspec.Struct, kw_only=True):
    """Hold a point that ran on one side only."""

    name: str
    side: SideName  # side on which it did not run
    outcome: str
    reason: str


class Finding(msgspec.Struct, kw_only=True):
    """Hold the result of a rule of --fail-on for one row or point.

    `fails`: B is proven worse · `unjudged`: the row has no test that could have failed · `undecided`: it has one, and
    the interval reaches beyond the limit.
    """

    rule: str
    point: str = ""
    metric: str = ""
    message: str
    status: Literal["fails", "unjudged", "undecided"] = "fails"


class Comparison(msgspec.Struct, kw_only=True):
    """Hold the comparison of A and B."""

    schema_version: int = 1
    a: list[str]  # names of the launches of A
    b: list[str]
    paired: bool
    across: list[str]
    margin: float
    alpha: float
    launch_noise: float | None  # null if it was not given
    tests: int  # judged rows that were sampled: the family that verdicts are corrected for
    counts: dict[str, int]  # number of rows by verdict
    cpu: bool  # True if any point ran on a CPU, so that its times allow no conclusion about performance
    forecast: bool  # true if any point of either side is a forecast
    performance: bool  # True if times of CPU points were judged nevertheless (--allow-cpu), or if there are none
    differences: list[Difference]
    points: list[PointResult]
    only_a: list[str]
    only_b: list[str]
    broken: list[OneSidedPoint]
    notes: list[str]
    layers_held: list[LayersHeld] = []  # empty if all points that were compared held every layer
    rules: list[str] = []
    findings: list[Finding] = []

    @property
    def fails(self) -> list[Finding]:
        """Findings that make the exit code 1."""
        return [f for f in self.findings if f.status == "fails"]

    @property
    def unjudged(self) -> list[Finding]:
        """Findings that make the exit code 3 if no rule fails."""
        return [f for f in self.findings if f.status == "unjudged"]
