"""Score a forecast: how often it would have picked the layout measured as best, compared with the best constant answer."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from dcpbench.models import load_shape
from dcpbench.points.budget import plan_engine
from dcpbench.points.names import CLOSED, REPLAY
from dcpbench.points.settings import Settings
from dcpbench.recommend import forecast
from dcpbench.records.record import OURS, get_origin, parse_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dcpbench.points.cluster_specs import Machine
    from dcpbench.points.device_probe import Probe
    from dcpbench.recommend.estimate import Steps
    from dcpbench.records.record import Record

NEAR = 0.03  # maximum relative distance to the best with which a pick counts as right
SPREAD = 0.1  # minimum relative distance of best and worst for a load in which the choice matters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Hold one load that several layouts ran: output tok/s by layout, measured and forecast."""

    name: str
    measured: Mapping[str, float]
    forecast: Mapping[str, float]
    latency_errors: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    """forecast / measured − 1 of the medians of `ttft` and `itl`, for each point."""

    @property
    def best(self) -> str:
        """Return the layout measured as fastest."""
        return max(self.measured, key=lambda who: self.measured[who])

    @property
    def picked(self) -> str:
        """Return the layout that the forecast would have picked."""
        return max(self.forecast, key=lambda who: self.forecast[who])

    def is_right(self, who: str) -> bool:
        """Return True if a layout is the best, or within NEAR of it; False for one that did not run."""
        return self.measured.get(who, 0.0) >= (1 - NEAR) * self.measured[self.best]

    @property
    def matters(self) -> bool:
        """Return True if the layouts lie more than SPREAD apart."""
        return self.measured[self.best] > (1 + SPREAD) * min(self.measured.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Hold the score over all loads."""

    loads: list[Load]

    @property
    def right(self) -> int:
        """Return the number of loads in which the pick is right."""
        return sum(load.is_right(load.picked) for load in self.loads)

    @property
    def constant(self) -> tuple[str, int]:
        """Return the layout that is right most often, and in how many loads."""
        names = dict.fromkeys(who for load in self.loads for who in load.measured)
        return max(((who, sum(load.is_right(who) for load in self.loads)) for who in names), key=lambda pair: pair[1])

    @property
    def winners(self) -> collections.Counter[str]:
        """Return how often each layout was the best."""
        return collections.Counter(load.best for load in self.loads)

    @property
    def errors(self) -> list[float]:
        """Return forecast / measured − 1 of each point."""
        return [load.forecast[who] / tok_s - 1 for load in self.loads for who, tok_s in load.measured.items()]

    @property
    def ratio_errors(self) -> list[float]:
        """Return forecast / measured − 1 of the ratio of each two layouts of a load."""
        return [
            (load.forecast[a] / load.forecast[b]) / (load.measured[a] / load.measured[b]) - 1
            for load in self.loads
            for a, b in itertools.combinations(load.measured, 2)
        ]

    def convert_to_json(self) -> dict[str, Any]:
        """Return the complete score for JSON; numbers in output tok/s."""
        who, constant = self.constant
        return {
            "answer": self.format_score(),
            "right": self.right,
            "constant": {"layout": who, "right": constant},
            "loads": [
                {
                    "load": load.name,
                    "best": load.best,
                    "picked": load.picked,
                    "right": load.is_right(load.picked),
                    "measured": dict(load.measured),
                    "forecast": dict(load.forecast),
                }
                for load in self.loads
            ],
        }

    def format_score(self) -> str:
        """Return the score as a sentence."""
        who, constant = self.constant
        n = len(self.loads)
        return (
            f"The best or one within {NEAR:.0%} of it in {self.right} of {n} loads, of which {sum(load.matters for load in self.loads)} have more than "
            f"{SPREAD:.0%} between best and worst, and {len(self.winners)} different winners; always {who} would be right in {constant} of {n}."
        )


def compute_score(
    records: Iterable[Record],
    machine: Machine,
    probe: Probe,
    steps: Steps,
    *,
    every: int = 1,
    watch: Callable[[str], None] = lambda _: None,
) -> Score:
    """Forecast each load that at least two layouts ran, with shares fitted without its model if `steps` has them.

    A layout that ran in several variants counts with its best one. With `every` n only each n-th load is used. `watch`
    is called with the work in progress.
    """
    groups: dict[str, list[Record]] = collections.defaultdict(list)
    for record in records:
        if record.outcome == "ok" and not record.point.emulate and (record.metrics or record.serve):
            groups[_format_load_key(record)].append(record)
    loads = []
    several = [(name, of) for name, of in groups.items() if len({r.point.layout_name for r in of}) > 1][::every]
    for number, (name, of) in enumerate(several, 1):
        watch(f"load {number} of {len(several)}, {name}")
        measured: dict[str, float] = {}
        expected: dict[str, float] = {}
        latency: dict[str, list[float]] = {"ttft": [], "itl": []}
        for record in of:
            point = record.point
            who = point.layout_name
            settings = Settings(kv_memory_bytes=record.measured_with.get("kv_memory_bytes"))  # type: ignore[arg-type]
            plan = plan_engine([point], settings, load_shape(point.model), probe)
            fitted = steps.without.get(point.model, steps.terms)
            found = forecast.estimate_point(point, plan, machine, settings, steps, fitted)
            true = forecast.from_record(record, "")
            measured[who] = max(measured.get(who, 0.0), true.tok_s)
            for metric, errors in latency.items():
                seen, estimated = (getattr(f, f"{metric}_ms").p50 for f in (true, found))
                if seen and estimated:
                    errors.append(estimated / seen - 1)
            expected[who] = max(expected.get(who, 0.0), found.tok_s)
        loads.append(Load(name=name, measured=measured, forecast=expected, latency_errors=latency))
    return Score(loads=loads)


def _format_load_key(record: Record) -> str:
    """Return the key of points that compete: the same engine, model, precision, load and KV memory."""
    point, origin = record.point, get_origin(record)
    engine = "" if origin == OURS else f"{parse_origin(origin).label}, "
    of = f"{engine}{point.model}, {point.precision}, {point.tp} GPUs, {point.concurrency} × "
    if point.load is None:
        return f"{of}{point.context:,} tokens"
    arrival = "" if point.load.arrival == CLOSED else f", {point.load.arrival} {point.load.request_rate}"
    kv = record.measured_with.get("kv_memory_bytes")
    return (
        f"{of}{point.load.input_tokens} → {point.load.output_tokens}{arrival}{', replayed' if point.load.mode == REPLAY else ''}"
        f"{f', {kv} bytes of KV' if kv else ''}"
    )
