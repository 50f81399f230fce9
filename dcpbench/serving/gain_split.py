"""Split the gain of DCP over the same layout without it by cause: replays switch each cause off, by itself and with others.

A cause that is on has the value of the layout with DCP, one that is off that of the baseline:

    KV capacity          the tokens of the pool: which requests run, wait and are preempted
    prefix-cache hits    the prompt tokens that each request does not compute, as in the layout's own replay
    step time            the duration of each step, and of the host's work around it; how prompts are cut into chunks

A prompt is cut at multiples of a page on all DCP ranks, so that the chunks of both layouts differ also where each pool is large
enough. That is a difference of steps. A pool of the other layout's size is rounded up to whole pages.

With f(on) the result of a replay, a set A of causes loses g(A) = f(all) - f(all without A) if it is switched off. The
part that belongs to exactly A, and to no smaller set, is

    part(A) = Σ over B ⊆ A of (-1)^(|A| - |B|) · g(B)

so that all parts together are g(all) = f(all) - f(none), the gain. The part of one cause is what switching it off by
itself loses; the parts of several causes are their interactions. An interaction has the sign of the gain if one of its causes
alone would bring it, and the other sign if it needs all of them, because then each switch alone loses it.

The formula is the factor separation of Stein and Alpert (Journal of the Atmospheric Sciences 50, 1993, 2107-2115), from the
other end: they switch factors on, starting with none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.bounds import Number, SignedNumber
from dcpbench.points.memory import PAGES_OF_PADDING
from dcpbench.points.names import CLOSED, NO_EXCHANGE
from dcpbench.serving.outcome import compute_serve_metrics
from dcpbench.serving.policies import make_scheduler
from dcpbench.serving.replay import OWN_LOOP, replay_requests
from dcpbench.show.numbers import format_percent
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcpbench.points.point import Point
    from dcpbench.records.record import ServeMetrics
    from dcpbench.serving.replay import LoopTiming
    from dcpbench.serving.requests import ServeRequest
    from dcpbench.serving.scheduler import SchedulerConfig
    from dcpbench.serving.step_times import StepTimes

CAPACITY, HITS, STEP_TIME = CAUSES = ("KV capacity", "prefix-cache hits", "step time")
MEANINGS = {CAPACITY: "requests that run at once", STEP_TIME: "steps of the same requests"}
OUTPUT, LATENCY = "output_tok_s", "e2el_mean_ms"  # split in closed loops; in open ones, where output follows arrivals
METRIC_NAMES = {OUTPUT: "output tok/s", LATENCY: "mean end-to-end latency"}
HEADINGS = {OUTPUT: "output tok/s", LATENCY: "mean end-to-end latency (ms)"}  # of axes and columns
MIN_SHOWN = 0.0005  # share of the baseline's value below which an interaction is not printed
Causes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """Hold what one of two layouts contributes to a replay."""

    config: SchedulerConfig
    times: StepTimes
    loop: LoopTiming = OWN_LOOP


class GainPart(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the part of a gain that belongs to some causes together."""

    causes: Causes
    difference: SignedNumber  # in the unit of the metric

    def format_causes(self) -> str:
        """Return `from KV capacity (requests that run at once)`, or `from the interaction of KV capacity and step time`."""
        if len(self.causes) > 1:
            return f"from the interaction of {self.format_interaction()}"
        more = f" ({MEANINGS[self.causes[0]]})" if self.causes[0] in MEANINGS else ""
        return f"from {self.causes[0]}{more}"

    def format_interaction(self) -> str:
        """Return `KV capacity and step time`."""
        return format_list(list(self.causes))


class SideResult(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of the replay of one layout as it is."""

    layout: str
    value: Number  # of the metric
    preemptions: int
    hit_share: Number  # of the prompt tokens


class GainSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the gain of a layout over its baseline, and its parts."""

    metric: str  # OUTPUT or LATENCY
    baseline: SideResult
    layout: SideResult
    parts: list[GainPart]  # of each cause, in the order of CAUSES, then what two and three share

    @property
    def difference(self) -> float:
        """Return the gain in the unit of the metric."""
        return self.layout.value - self.baseline.value

    def compute_share(self, part: GainPart) -> float:
        """Return a part as a share of the baseline's value."""
        return part.difference / self.baseline.value

    @property
    def share(self) -> float:
        """Return the gain as a share of the baseline's value."""
        return self.difference / self.baseline.value

    def format(self) -> str:
        """Return the gain with its parts in a sentence, as shares of the baseline's value."""
        parts = [f"{format_share(self.compute_share(part))} {part.format_causes()}" for part in self.list_shown()]
        return (
            f"From {self.baseline.layout} to {self.layout.layout}, {METRIC_NAMES[self.metric]} in replay changes by {format_share(self.share)}: "
            f"{format_list(parts)}."
        )

    def list_shown(self) -> list[GainPart]:
        """Return the part of each cause, and the interactions that are not 0."""
        return [part for part in self.parts if len(part.causes) == 1 or abs(self.compute_share(part)) >= MIN_SHOWN]


def is_splittable(point: Point) -> bool:
    """Return True for a served point of one instance with DCP, without pipeline stages and prefill context parallelism."""
    return point.load is not None and point.dcp > 1 and not point.disaggregate and point.layout.gpus == point.tp


def make_baseline_key(point: Point) -> str:
    """Return a key that a point shares with the same layout without DCP, under the same load."""
    plain = {"dcp": 1, "exchange": NO_EXCHANGE, "q_replicate": False, "project_first": False, "interleave": 1}
    return msgspec.structs.replace(point, **plain).get_key()


def split_gain(
    point: Point,
    baseline: Point,
    requests: Sequence[ServeRequest],
    of: Mapping[str, Side],
    limit_s: float = math.inf,
) -> GainSplit:
    """Return the gain of a point over its baseline by cause, from up to eight replays that end after `limit_s`.

    `of` has the Side of both points, by their layout names.

    Raise UsageError if step times do not cover a replay, or if no token comes in one.
    """
    sides = {True: of[point.layout_name], False: of[baseline.layout_name]}
    for side in sides.values():
        _extrapolate(side.times)
    replay = functools.partial(_replay, point, requests, sides, limit_s)
    ends = {on: replay(dict.fromkeys(CAUSES, on), None) for on in (False, True)}
    replays: dict[Causes, _Replayed] = {CAUSES: ends[False], (): ends[True]}  # by the causes that are off
    same_hits = ends[False].hits == ends[True].hits
    for off in _list_subsets(CAUSES):
        with_hits = tuple(cause for cause in CAUSES if cause in off and cause != HITS)
        if same_hits and with_hits in replays:
            replays[off] = replays[with_hits]
        elif off not in replays:
            on = {cause: cause not in off for cause in CAUSES}
            replays[off] = replay(on, ends[on[HITS]].hits)
    metric = OUTPUT if point.load is not None and point.load.arrival == CLOSED else LATENCY
    results = {off: replays[off].get_value(metric) for off in _list_subsets(CAUSES)}
    return GainSplit(
        metric=metric,
        baseline=ends[False].summarize(baseline, metric),
        layout=ends[True].summarize(point, metric),
        parts=separate_parts(results),
    )


def separate_parts(results: Mapping[Causes, float]) -> list[GainPart]:
    """Return the part of each set of causes. `results`: the result without each set, that of all causes under ()."""
    lost = {off: results[()] - value for off, value in results.items()}

    def compute_part(causes: Causes) -> float:
        signed = [(1 if (len(causes) - len(some)) % 2 == 0 else -1) * lost[some] for some in _list_subsets(causes)]
        return math.fsum(signed)

    return [GainPart(causes=causes, difference=compute_part(causes)) for causes in lost if causes]


def _list_subsets(causes: Causes) -> Iterator[Causes]:
    """Yield all subsets, the smallest first, in the order of `causes`."""
    for size in range(len(causes) + 1):
        yield from itertools.combinations(causes, size)


@dataclasses.dataclass(frozen=True)
class _Replayed:
    """Hold the result of one replay."""

    serve: ServeMetrics
    hits: Mapping[int, int]  # prompt tokens from the prefix cache, by the number of the request

    def get_value(self, metric: str) -> float:
        value = self.serve.output_tok_s if metric == OUTPUT else self.serve.e2el_ms.mean
        if value is None:
            raise UsageError("no request finished in a replay, so that it has no latency.")
        return value

    def summarize(self, point: Point, metric: str) -> SideResult:
        return SideResult(
            layout=point.layout_name,
            value=self.get_value(metric),
            preemptions=self.serve.preemptions or 0,
            hit_share=(self.serve.cached_tokens or 0) / (self.serve.input_tokens or 1),
        )


def _replay(
    point: Point,
    requests: Sequence[ServeRequest],
    sides: Mapping[bool, Side],
    limit_s: float,
    on: Mapping[str, bool],
    hits: Mapping[int, int] | None,
) -> _Replayed:
    """Serve the requests with each cause of the layout or of its baseline; `hits` are None for those that happen."""
    assert point.load is not None
    timed = sides[on[STEP_TIME]]
    scheduler = make_scheduler(_resize_pool(timed.config, sides[on[CAPACITY]].config))
    scheduler.fixed_hits = hits
    found = replay_requests(requests, scheduler, point.clients, timed.times, limit_s, timed.loop)
    serve = compute_serve_metrics(
        found.traffic.samples, gpus=point.gpus, concurrency=point.clients, slo={}, steps=found.counts
    )
    return _Replayed(serve, {s.request.number: s.cached or 0 for s in found.traffic.samples})


def _resize_pool(config: SchedulerConfig, like: SchedulerConfig) -> SchedulerConfig:
    """Return a configuration with the KV tokens and the maximum number of requests of another one."""
    tokens = (like.pages - PAGES_OF_PADDING) * like.virtual_page
    pages = -(-tokens // config.virtual_page) + PAGES_OF_PADDING
    return dataclasses.replace(config, pages=pages, max_requests=like.max_requests)


def format_share(share: float) -> str:
    """Return `+12 %`, `−0.31 %` or `0 %`."""
    if abs(share) < MIN_SHOWN:
        return "0 %"
    return f"{'−' if share < 0 else '+'}{format_percent(abs(share))}"


def _extrapolate(times: StepTimes) -> None:
    """Let step times reach KV caches of any size: a layout is replayed with the KV cache of the other one, too."""
    for name in ("model", "host_model"):
        if (model := getattr(times, name, None)) is not None:
            model.extrapolate()
