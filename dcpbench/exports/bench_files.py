"""Build the parts that the files of `vllm bench serve` and SGLang's bench_serving share, for one served point."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from dcpbench.exports.measured_points import DECODE_STEPS, DID_NOT_RUN, MeasuredPoint, Rule, filter_points
from dcpbench.points.names import CLOSED, GAMMA
from dcpbench.records import formulas
from dcpbench.records.metrics import PERCENTILES
from dcpbench.records.record import OURS
from dcpbench.serving.outcome import FAILED, FINISHED, REJECTED
from dcpbench.serving.samples import find_samples, read_samples

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from dcpbench.points.point import Load
    from dcpbench.records.record import Latencies, ServeMetrics
    from dcpbench.serving.outcome import Row


def find_point_samples(m: MeasuredPoint) -> Path | None:
    """Return the path of a point's samples if they exist; raise RecordsError if that is outside the run's folder."""
    return find_samples(m.folder, m.record.serve.samples_file) if m.record.serve else None


NOT_KNOWN = Rule(
    "with requests cut off, and without samples that say which tokens were theirs",
    lambda m: m.record.serve is not None and bool(m.record.serve.cancelled) and find_point_samples(m) is None,
)
NO_TIME = Rule(
    "without a duration",
    lambda m: m.record.serve is not None and not (m.record.serve.wall_s or 0) > 0,
)
NO_SUMS = Rule(
    "without the number of tokens in their duration",
    lambda m: m.record.serve is not None and None in (m.record.serve.input_tokens, m.record.serve.output_tokens),
)
SEVERAL = Rule("with several instances, of which a file has no number", lambda m: bool(m.record.point.disaggregate))
CARRIES = (DID_NOT_RUN, DECODE_STEPS, SEVERAL, NO_TIME, NO_SUMS, NOT_KNOWN)  # points that neither file can represent
SAME_NAMES = {name: name for name in ("ttft", "tpot", "itl", "e2el")}  # latencies by dcpbench's own names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """Hold lists with an entry for each request, in order of submission, by the names and in the order of both files.

    Times are in s. A request that did not finish has no output and an error.
    """

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    latencies: list[float]
    start_times: list[float]
    generated_texts: list[str]  # generated texts, all empty because they are not recorded
    errors: list[str]

    @classmethod
    def from_point(cls, m: MeasuredPoint) -> Requests | None:
        """Return the requests of a served point; None if its samples are not next to the record.

        Raise RecordsError for samples that cannot be read, or that lie outside the run's folder.
        """
        path = find_point_samples(m)
        if path is None:
            return None
        rows = read_samples(path)
        both = [(row, row.outcome == FINISHED and bool(row.token_s)) for row in rows]
        return cls(
            input_lens=[r.input_tokens for r in rows],
            output_lens=[len(r.token_s) if ok else 0 for r, ok in both],
            ttfts=[r.token_s[0] - r.submitted_s if ok else 0.0 for r, ok in both],
            itls=[[b - a for a, b in itertools.pairwise(r.token_s)] if ok else [] for r, ok in both],
            latencies=[r.token_s[-1] - r.submitted_s if ok else 0.0 for r, ok in both],
            start_times=[r.submitted_s for r in rows],
            generated_texts=[""] * len(rows),
            errors=["" if ok else _format_error(r) for r, ok in both],
        )

    def list_finished(self) -> list[int]:
        """Return the indices of the finished requests."""
        return [i for i, error in enumerate(self.errors) if not error]

    def compute_std_ms(self) -> dict[str, float]:
        """Return the standard deviation of each latency in ms over finished requests, ITL pooled; none without a
        sample.

        It is the population's, as numpy's default is and the serving benchmarks have it.
        """
        import numpy as np

        done = self.list_finished()
        several = [i for i in done if self.output_lens[i] > 1]
        samples = {
            "ttft": [self.ttfts[i] for i in done],
            "tpot": [(self.latencies[i] - self.ttfts[i]) / (self.output_lens[i] - 1) for i in several],
            "itl": [gap for i in done for gap in self.itls[i]],
            "e2el": [self.latencies[i] for i in done],
        }
        return {name: float(np.std(found)) * 1e3 for name, found in samples.items() if found}

    def count_max_in_flight(self) -> int:
        """Return the maximum number of finished requests in flight."""
        return formulas.count_max_in_flight(
            (self.start_times[i], self.start_times[i] + self.latencies[i]) for i in self.list_finished()
        )


def _format_error(row: Row) -> str:
    return f"{row.outcome}: {row.reason}" if row.outcome in (REJECTED, FAILED) else "cut off when the run ended"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Hold sums over finished requests only, as serving benchmarks have them; dcpbench's own count every token."""

    finished: int
    failed: int | None
    input_tokens: int
    output_tokens: int

    @classmethod
    def from_metrics(cls, serve: ServeMetrics, requests: Requests | None) -> Totals:
        """Return the totals of the requests or, without them, of a run that cut none off, so that all tokens are theirs."""
        if requests is not None:
            done = requests.list_finished()
            # Samples may lack failed requests.
            submitted = len(requests.errors) if serve.submitted is None else serve.submitted
            return cls(
                finished=len(done),
                failed=submitted - len(done),
                input_tokens=sum(requests.input_lens[i] for i in done),
                output_tokens=sum(requests.output_lens[i] for i in done),
            )
        assert not serve.cancelled
        assert serve.finished is not None
        assert serve.input_tokens is not None
        assert serve.output_tokens is not None
        return cls(
            finished=serve.finished,
            failed=None if serve.submitted is None else serve.submitted - serve.finished,
            input_tokens=serve.input_tokens,
            output_tokens=serve.output_tokens,
        )


@dataclasses.dataclass(frozen=True)
class ServedPoint:
    """Hold a served point with its requests, as far as they are known."""

    m: MeasuredPoint
    load: Load
    serve: ServeMetrics
    requests: Requests | None
    totals: Totals
    wall_s: float

    @property
    def label(self) -> str:
        """Return what measured it: `dcpbench`, `dcpbench-replay`, `dcpbench-functional`, or the tool of an import."""
        return "-".join(filter(None, (self.m.origin, self.m.standing)))

    @property
    def max_concurrency(self) -> int | None:
        """Return the maximum number of requests in flight that the client allows; None without a limit.

        In an open loop of dcpbench's own engine, the concurrency limits the scheduler and not the client.
        """
        point = self.m.record.point
        limited = self.m.origin != OURS and point.concurrency < self.load.requests
        return point.concurrency if self.load.arrival == CLOSED or limited else None

    @property
    def request_rate(self) -> float | None:
        """Return the request rate; None if nothing spaces the requests: a closed loop, or a file's own times."""
        return self.load.request_rate if self.load.arrival == GAMMA else None


def collect_served(points: Iterable[MeasuredPoint], *more: Rule) -> tuple[list[ServedPoint], Counter[str]]:
    """Return the points that such a file can carry, and the number left out by reason."""
    kept, left_out = filter_points(points, *CARRIES, *more)
    found = []
    for m in kept:
        load, serve = m.record.point.load, m.record.serve
        assert load is not None
        assert serve is not None
        assert serve.wall_s is not None
        requests = Requests.from_point(m)
        found.append(ServedPoint(m, load, serve, requests, Totals.from_metrics(serve, requests), serve.wall_s))
    return found, left_out


def collect_statistics(point: ServedPoint, names: Mapping[str, str] = SAME_NAMES) -> dict[str, float]:
    """Return `mean_ttft_ms` and similar statistics by the tool's names; unknown percentiles are absent."""
    spread = point.requests.compute_std_ms() if point.requests else {}
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


def parse_fixed_length(length: str) -> int | None:
    """Return the number of tokens if all requests have the same; else None."""
    return int(length) if length.isdecimal() and len(length) < 10 else None  # noqa: PLR2004 - tokens, not a trap
