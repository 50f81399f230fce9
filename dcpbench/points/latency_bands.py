"""Compute bands of forecast latencies from the errors of published forecasts. No torch.

A case is one load that was forecast and that all GPUs served, live or replayed by their own step times. Its ratio is
measured / forecast. A band reaches as far to both sides as the farthest case of its kind and arrival, as forecasts that are too
long on one machine are too short on another. `tools.latency_check` checks it by leaving out all
cases of one machine at a time.

    python -m tools.latency_check            print the bands and their coverage
    python -m tools.latency_check --write    measure the cases again, from results/, and write points/measured/latencies-h200.json

The median gap between tokens (ITL p50) is the time of a decode step or of a step with prompts, which takes several times as long.
Near equal shares of both a small error of the share moves the median from one to the other, so an estimate has no ITL p50 if
the share of gaps with prompts may reach one half.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Literal

import msgspec

from dcpbench.points.cluster_specs import MEASURED_ON

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Kind = Literal["estimated", "emulated", "emulated, prompts together"]
ESTIMATED: Kind = "estimated"
EMULATED: Kind = "emulated"  # one rank represents all, without `prompts` in the machine's file
TOGETHER: Kind = "emulated, prompts together"  # the same with `prompts`: what steps with prompts take GPUs together
Metric = Literal["ttft", "itl"]
MIN_MACHINES = 2  # that the band of one kind of arrivals needs; with fewer, cases of all arrivals count
HALF = 0.5  # share of gaps past which the median is a step with prompts


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold one load, forecast and served."""

    kind: Kind
    source: str  # folder of results/ with the record of the served load
    forecast: str  # folder of results/ with the record of the forecast; empty if `kind` is estimated
    machine: str  # Environment.host_hash of the machine that served
    load: str
    arrival: str
    ttft: float  # measured / forecast, of the p50
    itl: float  # the same error for the ITL
    mixed_share: float | None = None  # of the forecast's gaps between tokens, how many had prompts in their step
    mixed_share_measured: float | None = None


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold the file of cases."""

    gpu: str
    cases: list[Case]


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the factor by which a forecast p50 may be off, and its basis."""

    low: float  # smallest and largest measured / forecast of the cases
    high: float
    cases: int
    machines: int

    @property
    def factor(self) -> float:
        """Return the largest error of the cases as a factor, 1 or more, whichever way it was."""
        return max(self.high, 1 / self.low, 1.0)

    def compute_ends(self, ms: float, error: float = 0.0) -> tuple[float, float]:
        """Return the ends around a forecast, which may be off by a further share `error`."""
        factor = self.factor * (1 + error)
        return ms / factor, ms * factor


@functools.cache
def load_published() -> tuple[Case, ...]:
    """Return the cases of the package."""
    file = resources.files("dcpbench.points.measured") / f"latencies-{MEASURED_ON.lower()}.json"
    return tuple(msgspec.json.decode(file.read_bytes(), type=Published).cases)


def find_band(
    kind: Kind, metric: Metric, arrival: str, cases: Sequence[Case], mixed_share: float | None = None
) -> Band | None:
    """Return the band of a forecast; None if no case is of its kind, or if ITL p50 may be a step with prompts.

    Cases of other arrivals count, too, if those of this one are of fewer than two machines.
    """
    of_kind = [case for case in cases if case.kind == kind]
    if kind == ESTIMATED and metric == "itl":
        limit = compute_max_sure_share(cases)
        if mixed_share is None or mixed_share >= limit:
            return None
        of_kind = [case for case in of_kind if case.mixed_share is not None and case.mixed_share < limit]
    chosen = [case for case in of_kind if case.arrival == arrival]
    if len({case.machine for case in chosen}) < MIN_MACHINES:
        chosen = of_kind
    if not chosen:
        return None
    ratios = [getattr(case, metric) for case in chosen]
    return Band(low=min(ratios), high=max(ratios), cases=len(chosen), machines=len({case.machine for case in chosen}))


def compute_max_sure_share(cases: Iterable[Case]) -> float:
    """Return the share of gaps with prompts, as estimated, below which the measured share of no case reached one half.

    It is one half less the largest error of the estimated share.
    """
    errors = [
        case.mixed_share_measured - case.mixed_share
        for case in cases
        if case.mixed_share is not None and case.mixed_share_measured is not None
    ]
    return HALF - max([0.0, *errors])
