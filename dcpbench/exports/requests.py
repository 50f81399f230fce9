"""The requests behind a served point, as the files of serving benchmarks have them: lists with an entry each, in s."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.serving.outcome import FINISHED, REJECTED
from dcpbench.serving.samples import read_samples, samples_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.exports.measured import Measured
    from dcpbench.records.record import ServeMetrics
    from dcpbench.serving.outcome import Row

CUT_OFF = "cut off when the run ended"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """Lists of one length, in order of submission. A request that did not finish has no output and an error."""

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    latencies: list[float]
    start_times: list[float]
    errors: list[str]

    def finished(self) -> list[int]:
        """Indices of those that did."""
        return [i for i, error in enumerate(self.errors) if not error]

    def spread_ms(self) -> dict[str, float]:
        """Standard deviation of each latency in ms over finished requests, ITL pooled; none where there is no sample.

        Of the population, as numpy's default is and the serving benchmarks have it.
        """
        import numpy as np

        done = self.finished()
        samples = {
            "ttft": [self.ttfts[i] for i in done],
            "tpot": [
                (self.latencies[i] - self.ttfts[i]) / (self.output_lens[i] - 1) for i in done if self.output_lens[i] > 1
            ],
            "itl": [gap for i in done for gap in self.itls[i]],
            "e2el": [self.latencies[i] for i in done],
        }
        return {name: float(np.std(found)) * 1e3 for name, found in samples.items() if found}

    def most_at_once(self) -> int:
        """Most finished requests that were in flight at a moment; one that starts as another ends is not beside it."""
        events = [(self.start_times[i], 1) for i in self.finished()]
        events += [(self.start_times[i] + self.latencies[i], -1) for i in self.finished()]
        flying = most = 0
        for _, change in sorted(events):
            flying += change
            most = max(most, flying)
        return most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over finished requests alone, as serving benchmarks have them; unlike ours, which count every token."""

    finished: int
    failed: int | None
    input_tokens: int
    output_tokens: int


def of_point(m: Measured) -> Requests | None:
    """The requests of a served point; None where its samples are not beside the record.

    Raises RecordsError for samples that cannot be read, or that lie outside the run's folder.
    """
    path = samples_of(m)
    return None if path is None else of_rows(read_samples(path))


def samples_of(m: Measured) -> Path | None:
    """Where the point's samples are, if they are there."""
    return samples_path(m.folder, m.record.serve.samples_file) if m.record.serve else None


def of_rows(rows: Sequence[Row]) -> Requests:
    """The same of rows in memory."""
    done = [row.outcome == FINISHED and bool(row.token_s) for row in rows]
    both = list(zip(rows, done, strict=True))
    return Requests(
        input_lens=[r.input_tokens for r in rows],
        output_lens=[len(r.token_s) if ok else 0 for r, ok in both],
        ttfts=[r.token_s[0] - r.submitted_s if ok else 0.0 for r, ok in both],
        itls=[[b - a for a, b in zip(r.token_s, r.token_s[1:], strict=False)] if ok else [] for r, ok in both],
        latencies=[r.token_s[-1] - r.submitted_s if ok else 0.0 for r, ok in both],
        start_times=[r.submitted_s for r in rows],
        errors=["" if ok else _why(r) for r, ok in both],
    )


def totals_of(serve: ServeMetrics, requests: Requests | None) -> Totals | None:
    """Sums over finished requests; None where some were cut off and nobody knows which tokens were theirs."""
    if requests is not None:
        done = requests.finished()
        return Totals(
            finished=len(done),
            failed=len(requests.errors) - len(done),
            input_tokens=sum(requests.input_lens[i] for i in done),
            output_tokens=sum(requests.output_lens[i] for i in done),
        )
    if serve.cancelled:
        return None
    return Totals(
        finished=serve.finished,
        failed=None if serve.submitted is None else serve.submitted - serve.finished,
        input_tokens=serve.input_tokens,
        output_tokens=serve.output_tokens,
    )


def _why(row: Row) -> str:
    return f"rejected: {row.reason}" if row.outcome == REJECTED else CUT_OFF
