"""Define what a comparison finds and writes to JSON: rows with verdicts below points, and differences of the sides."""

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
    sampled: bool = True  # False for a count, of which every difference is one
    judged: bool = False  # whether it could have got another verdict than UNDECIDED
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
    least_visible: float | None = None  # smallest ratio above 1 that is found in 4 of 5 cases; null if not judged
    reason: str = ""  # why it is undecided
    more_launches: int | None = (
        None  # launches of each side that would decide it, if the ratio is as it seems; null if none would
    )
    missing_launches: tuple[int, int] = (0, 0)  # launches of A and B without which it is not judged
    launches: tuple[int, int] = (1, 1)
    repeats: tuple[int, int] = (1, 1)
    gate: str = ""  # what a rule of --fail-on finds: `fails`, `unjudged`, `undecided` or `passes`

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


class LayersHeld(msgspec.Struct, frozen=True, kw_only=True):
    """A model that did not fit on a side: the number of its layers that were in memory, and were cycled through."""

    side: Literal["a", "b"]
    model: str
    fewest: int  # over the points of the side that did not hold all layers
    most: int
    layers: int  # of the whole model


class Broken(msgspec.Struct, kw_only=True):
    """A point that ran on one side only."""

    name: str
    side: Literal["a", "b"]
    """Where it did not run."""
    outcome: str
    reason: str


class Finding(msgspec.Struct, kw_only=True):
    """The result of a rule of --fail-on for one row or point.

    `fails`: B is proven worse · `unjudged`: the row has no test that could have failed · `undecided`: it has one, and the
    interval reaches beyond the limit.
    """

    rule: str
    point: str = ""
    metric: str = ""
    message: str
    status: Literal["fails", "unjudged", "undecided"] = "fails"


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
    launch_noise: float | None  # null if it was not given
    tests: int  # judged rows that were sampled: the family that verdicts are corrected for
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
    layers_held: list[LayersHeld] = []  # empty if all points that were compared held every layer
    rules: list[str] = []
    findings: list[Finding] = []

    @property
    def fails(self) -> list[Finding]:
        """The findings that make the exit code 1."""
        return [f for f in self.findings if f.status == "fails"]

    @property
    def unjudged(self) -> list[Finding]:
        """The findings that make the exit code 3 if no rule fails."""
        return [f for f in self.findings if f.status == "unjudged"]
