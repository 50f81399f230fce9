"""Who sends requests when, and when which token came: the same for live runs and for replay.

Closed loop: `concurrency` clients, each of which sends its next request when it has read the last token of the one
before. Open loop: requests come when they are due, whatever is still unanswered.

In a live run one rank's clock decides how many requests have come, and all ranks submit as many.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from dcpbench.serving.requests import Sequence, ServeRequest, Step
    from dcpbench.serving.scheduler import Scheduler


@dataclasses.dataclass(slots=True, eq=False)
class Sample:
    """What became of one request; times in seconds after the start of the run."""

    request: ServeRequest
    submitted_s: float
    token_s: list[float] = dataclasses.field(default_factory=list)
    """When each output token was read."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Their ids; empty in replay, and for requests of another replica than the recording rank's."""
    sequence: Sequence | None = None
    """Its state in the scheduler; None where it was rejected."""
    rejected: str = ""
    """Why it can never be served."""
    failed: str = ""
    """Why a real server did not answer it to its end."""
    chunk_tokens: list[int] = dataclasses.field(default_factory=list)
    """Tokens of each chunk of a stream that brought several at once; empty where each brought one."""

    @property
    def finished(self) -> bool:
        """Whether all its tokens have been read."""
        return not self.failed and len(self.token_s) == self.request.output_tokens


class Traffic:
    """Feeds a scheduler with a load, and notes what comes back."""

    def __init__(self, requests: SequenceOf[ServeRequest], scheduler: Scheduler, concurrency: int | None) -> None:
        """`requests` by arrival; `concurrency` clients send them, or None: each at its arrival_s."""
        if not requests:
            raise UsageError("there is no request to serve; give --num-requests 1 or more.")
        if concurrency is not None and concurrency < 1:
            raise UsageError(f"--concurrency {concurrency}: no client would send anything; try --concurrency 1.")
        self.requests, self.scheduler, self.concurrency = requests, scheduler, concurrency
        self.samples: list[Sample] = []
        """Of all that were submitted, in this order."""
        self.sample_of: dict[int, Sample] = {}
        """By request number."""
        self.in_flight = 0
        self.stopped = False

    @property
    def done(self) -> bool:
        """Whether nothing more will come and all has been read."""
        return not self.in_flight and (self.stopped or len(self.samples) == len(self.requests))

    def due(self, now_s: float) -> int:
        """How many requests come now."""
        sent = len(self.samples)
        left = len(self.requests) - sent
        if self.stopped or not left:
            return 0
        if self.concurrency is not None:
            return min(self.concurrency - self.in_flight, left)
        count = 0
        while count < left and self._arrival(sent + count) <= now_s:
            count += 1
        return count

    def next_arrival_s(self) -> float | None:
        """When the next request of an open loop comes; None where none does, or where clients wait for answers."""
        sent = len(self.samples)
        if self.concurrency is not None or self.stopped or sent == len(self.requests):
            return None
        return self._arrival(sent)

    def submit(self, count: int, now_s: float) -> None:
        """Submit the next requests. In an open loop they count from when they were due, not from when we looked."""
        for request in self.requests[len(self.samples) : len(self.samples) + count]:
            came = now_s if request.arrival_s is None or self.concurrency is not None else request.arrival_s
            sample = Sample(request, came)
            self.samples.append(sample)
            self.sample_of[request.number] = sample
            sample.rejected = self.scheduler.submit(request)
            self.in_flight += not sample.rejected

    def read(self, step: Step, now_s: float) -> None:
        """The tokens that a step sampled have been read."""
        for replica in step.replicas:
            for sequence in replica.emits:
                self.sample_of[sequence.request.number].token_s.append(now_s)
        for sequence in step.finished:
            self.sample_of[sequence.request.number].sequence = sequence
        self.in_flight -= len(step.finished)

    def stop(self) -> None:
        """Send nothing more, and give up what has not finished; call it once the last step has been read."""
        self.stopped = True
        for sequence in self.scheduler.cancel():
            self.sample_of[sequence.request.number].sequence = sequence
        self.in_flight = 0

    def _arrival(self, index: int) -> float:
        arrival = self.requests[index].arrival_s
        assert arrival is not None
        return arrival
