"""Choose among the layouts of one load: by output per GPU, and by KV capacity where errors leave that open. No torch."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dcpbench.points.names import CLOSED
from dcpbench.recommend.forecast import ESTIMATED
from dcpbench.records.launches import is_clearly_ahead
from dcpbench.records.stats import find_lasting_start
from dcpbench.serving.gain_split import is_splittable, make_baseline_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.points.point import Point
    from dcpbench.recommend.capacity import Capacity
    from dcpbench.recommend.forecast import Forecast
    from dcpbench.serving.gain_split import GainSplit

NO_WHOLE_MODEL = "no whole model"  # all layers and the KV cache do not fit
LACKS_MEMORY = "too little memory"  # the KV pool is too small for the load
TOO_MANY = "too many"  # more requests than a step takes
OTHER = "other"  # the planner of `sweep` refuses the layout, or nothing is known about its steps
AMPLE_HEADROOM = 2.0  # requests that fit over those in flight: more than that breaks no tie
MAX_TIE = 0.05  # share of the fastest layout's output that capacity may cost; beyond it, a measurement has to decide
MIN_MORE_HEADROOM = 1.05  # ratio of the headrooms of two layouts below which they count as equal


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Hold the reason why a layout has no forecast under a load."""

    kind: str  # NO_WHOLE_MODEL, LACKS_MEMORY, TOO_MANY or OTHER
    reason: str

    @property
    def for_memory(self) -> bool:
        """Return True if the layout does not fit."""
        return self.kind in (NO_WHOLE_MODEL, LACKS_MEMORY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Hold the best layout of one load, and the alternatives."""

    requests: str  # `32`: requests in flight or their rate, in `unit`
    unit: str  # `clients` of a closed loop, `requests` of a decode step, or `req/s`
    lengths: str  # `4,000 → 1,500 tokens`
    concurrency: int
    forecasts: list[Forecast]  # of each layout that fits: first those that meet the SLO, fastest first
    misses: dict[str, list[str]]  # objectives that each layout misses
    refused: dict[str, Refusal]  # layouts that do not fit, or for which nothing is known
    refused_points: Mapping[str, Point] = dataclasses.field(default_factory=dict)  # the same layouts' points
    capacities: Mapping[str, Capacity] = dataclasses.field(default_factory=dict)  # weights, KV per GPU, also if too big
    short: dict[str, str] = dataclasses.field(default_factory=dict)  # layouts without enough step times: file, its gap
    runs: list[Forecast] = dataclasses.field(default_factory=list)  # all records and replays of the load
    gain: GainSplit | None = (
        None  # of the leading layout with DCP over the same one without, by cause; None if not split
    )
    instead: list[str] = dataclasses.field(default_factory=list)  # options that make a layout fit, if none does

    @property
    def name(self) -> str:
        """Return the name of the load, such as `32 clients × 4,000 → 1,500 tokens`."""
        return f"{self.requests} {self.unit} × {self.lengths}"

    @property
    def fastest(self) -> Forecast | None:
        """Return the layout with most output per GPU: of those within the SLO, or of all if none is; None if no layout fits."""
        return self.forecasts[0] if self.forecasts else None

    @property
    def best(self) -> Forecast | None:
        """Return the recommended layout: the first of `tied`; None if no layout fits."""
        return next(iter(self.tied), None)

    @property
    def meets(self) -> bool:
        """Return True if the fastest layout is within the SLO."""
        return self.fastest is not None and not self.misses.get(self.fastest.label)

    @property
    def level(self) -> list[Forecast]:
        """Return the fastest layout and all layouts that are not clearly slower, fastest first."""
        fastest = self.fastest
        return [fastest, *(f for f in self._rivals if not is_ahead(fastest, f))] if fastest else []

    @property
    def tied(self) -> list[Forecast]:
        """Return the layouts between which the choice is open, fastest first.

        They are those of `level` of which none has less KV headroom than another, and the fastest one if they are far behind it.
        """
        level = self.level
        headrooms = [self._compute_headroom(f) for f in level]
        least = max(headrooms, default=0.0) / MIN_MORE_HEADROOM
        tied = [f for f, headroom in zip(level, headrooms, strict=True) if headroom >= least]
        return [level[0], *tied] if tied and is_far_behind(tied[0], level[0]) else tied

    @property
    def ranked(self) -> list[Forecast]:
        """Return all layouts in the order of the table: `tied`, the rest of `level`, then the others."""
        first = self.tied
        level = [f for f in self.level if f not in first]
        return [*first, *level, *(f for f in self.forecasts if f not in first and f not in level)]

    @property
    def next(self) -> Forecast | None:
        """Return the runner-up: the layout behind the best one, among those within the SLO if any is."""
        best, ahead = self.best, [*self.tied, *self.level, *self._rivals]
        return next((f for f in ahead if f is not best), None)

    @property
    def dcp_pair(self) -> tuple[Forecast, Forecast] | None:
        """Return the estimates of the leading layout with DCP and of the same one without; None if there is no such pair."""
        served = [f for f in self.ranked if f.source == ESTIMATED and f.point.load is not None]
        plain = {make_baseline_key(f.point): f for f in served if f.point.dcp == 1}
        pairs = ((f, plain.get(make_baseline_key(f.point))) for f in served if is_splittable(f.point))
        return next(((f, baseline) for f, baseline in pairs if baseline is not None), None)

    @property
    def _rivals(self) -> list[Forecast]:
        return [f for f in self.forecasts[1:] if not self.meets or not self.misses.get(f.label)]

    @property
    def factor(self) -> float | None:
        """Return the factor that corrects the estimates; None if there is none."""
        return next((f.factor for f in self.forecasts if f.factor), None)

    @property
    def decided(self) -> bool:
        """Return True if a single layout is best, if need be by its KV headroom."""
        return len(self.tied) == 1

    def _compute_headroom(self, of: Forecast) -> float:
        """Return how many times the requests in flight fit, at most AMPLE_HEADROOM; 1 if that is unknown, as in open loops."""
        capacity, load = self.capacities.get(of.label), of.point.load
        if capacity is None or capacity.requests is None or (load is not None and load.arrival != CLOSED):
            return 1.0
        return min(capacity.requests / self.concurrency, AMPLE_HEADROOM)


def compute_tok_s_per_gpu(of: Forecast) -> float:
    """Return output tok/s per GPU, by which layouts of different size are compared."""
    return of.tok_s / of.point.gpus


def is_far_behind(a: Forecast, b: Forecast) -> bool:
    """Return True if a has less output per GPU than b by more than MAX_TIE."""
    return compute_tok_s_per_gpu(a) < (1 - MAX_TIE) * compute_tok_s_per_gpu(b)


def compute_margin(a: Forecast, b: Forecast) -> float:
    """Return the minimum lead of a over b, as a share, for it to count; infinite if launches of one may not agree."""
    return max(_compute_scatter(a, b), _get_launch_band(a, b))


def _get_launch_band(a: Forecast, b: Forecast) -> float:
    """Return by how much launches of either may differ, as a share; infinite if that is not known of one."""
    return math.inf if a.launch_spread is None or b.launch_spread is None else max(a.launch_spread, b.launch_spread)


def _compute_scatter(a: Forecast, b: Forecast) -> float:
    """Return the relative error of a over b.

    For two estimates, or if one is corrected by records, it is the error of ratios plus the error of calls between
    ranks, in which the errors of one kind of call cancel between both layouts and different kinds are independent; else
    it is the sum of both bands.
    """
    if all(f.source == ESTIMATED for f in (a, b)) or a.factor or b.factor:
        kinds = a.comm_errors.keys() | b.comm_errors.keys()
        comm = math.hypot(*(a.comm_errors.get(kind, 0.0) - b.comm_errors.get(kind, 0.0) for kind in kinds))
        return max(a.ratio_error, b.ratio_error) + comm
    return (a.tok_s / a.low) * (b.high / b.tok_s) - 1


def is_ahead(a: Forecast, b: Forecast) -> bool:
    """Return True if a is clearly faster than b, per GPU."""
    ratio = compute_tok_s_per_gpu(a) / compute_tok_s_per_gpu(b)
    return is_clearly_ahead(ratio, ratio / (1 + _compute_scatter(a, b)), _get_launch_band(a, b))


def compute_price(price: float, of: Forecast) -> tuple[float, float, float]:
    """Return (mean, low, high) of the price of a million output tokens: price per GPU hour · GPUs / (3600 · tok/s) · 10⁶."""

    def compute_at(tok_s: float) -> float:
        return price * of.point.gpus / 3600 / tok_s * 1e6

    low, high = of.output_bounds_tok_s
    return compute_at(of.tok_s), compute_at(high), compute_at(low)


def find_break_even(choices: Sequence[Choice]) -> tuple[int | None, bool, list[float]]:
    """Return (lowest concurrency from which DCP is clearly ahead of all without, whether both kinds were compared, output of the best
    layout with DCP over that of the best one without at each load from there on where both fit).
    """
    compared = []
    for choice in sorted(choices, key=lambda c: c.concurrency):
        with_dcp = [f for f in choice.forecasts if f.point.dcp > 1]
        others = [f for f in choice.forecasts if f.point.dcp == 1]
        if with_dcp and (others or choice.refused):
            best = max(with_dcp, key=compute_tok_s_per_gpu)
            second = max(map(compute_tok_s_per_gpu, others), default=None)
            ratio = None if second is None else compute_tok_s_per_gpu(best) / second
            compared.append((choice.concurrency, all(is_ahead(best, other) for other in others), ratio))
    start = find_lasting_start([ahead for _, ahead, _ in compared])
    if start is None:
        return None, bool(compared), []
    return compared[start][0], True, [ratio for *_, ratio in compared[start:] if ratio is not None]
