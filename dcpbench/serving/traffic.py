"""Decide which requests are sent when, and record when tokens came; shared by live runs and replay.

In a closed loop, each of `concurrency` clients sends its next request when it has read the last token of the one
before, however late the server checks. In an open loop, requests are sent when they are due, regardless of pending
ones.

Turns of a session follow each other in both modes: the next turn is due `delay_s` of its request after the last token of
the one before. Requests of sub-agents have the same turn number: they run at the same time, and the next turn is due after the
last of them. A client of a closed loop has one session at a time.

In a live run, one rank's clock decides which turns and how many sessions are due, and all ranks submit these. A
single-turn request is a session of one turn.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from dcpbench.serving.deployment import Deployment
    from dcpbench.serving.requests import Sequence, ServeRequest, Step
    from dcpbench.serving.scheduler import Scheduler


SPACING_S = 1e-6  # between requests that reach a server at the same time, which it takes one by one


@dataclasses.dataclass(slots=True, eq=False)
class RequestResult:
    """Result of one request; times in seconds after the start of the run."""

    request: ServeRequest
    submitted_s: float
    token_s: list[float] = dataclasses.field(default_factory=list)  # time at which each output token was read
    tokens: list[int] = dataclasses.field(default_factory=list)  # ids; empty in replay and for other replicas' requests
    sequence: Sequence | None = None  # state in the scheduler; None if the request was rejected
    rejected: str = ""  # reason why the request can never be served
    failed: str = ""  # reason why a real server did not answer the request to its end
    cached_tokens: int | None = None  # prompt tokens in a server's prefix cache, if reported; see `sequence` for ours
    chunk_tokens: list[int] = dataclasses.field(default_factory=list)  # tokens per chunk if any has several, else empty

    @property
    def cached(self) -> int | None:
        """Return the prompt tokens that were found in the prefix cache, of our engine or of a server; None if unknown."""
        return self.sequence.cached if self.sequence is not None and self.sequence.replica >= 0 else self.cached_tokens

    @property
    def is_finished(self) -> bool:
        """Return True if all its tokens have been read."""
        return not self.failed and len(self.token_s) == self.request.output_tokens


@dataclasses.dataclass(slots=True, eq=False)
class _Turn:
    """A turn of a session: one request, or those of sub-agents."""

    left: int  # requests that have not ended
    later: list[ServeRequest]  # requests of the next turn; empty if there is none


class Traffic:
    """Feed a scheduler with a load, and record the results."""

    def __init__(
        self,
        requests: SequenceOf[ServeRequest],
        scheduler: Scheduler | Deployment,
        concurrency: int | None,
        delay_s: float = 0.0,
        first_token_s: float = 0.0,
    ) -> None:
        """Create the traffic; `requests` are sorted by arrival, with the turns of a session one after the other.

        `concurrency` clients send them, or with None each session starts at the arrival_s of its first turn. The scheduler
        sees a request `delay_s` after it was sent, which counts as part of its latency. The server's front end sends no tokens
        for `first_token_s` of each prompt token when the first token of a request comes.
        """
        if not requests:
            raise UsageError("there is no request to serve; give --num-requests 1 or more.")
        if concurrency is not None and concurrency < 1:
            raise UsageError(f"--concurrency {concurrency}: no client would send anything; try --concurrency 1.")
        self.requests, self.scheduler, self.concurrency = requests, scheduler, concurrency
        self.delay_s, self.first_token_s = delay_s, first_token_s
        self.sent_s = -math.inf  # when the front end has sent the tokens of the last step
        self.sessions = [request for request in requests if not request.turn]  # first turns of the sessions
        self.turn_of = _group_turns(requests)  # turn of each request of a session with later turns, by its number
        self.samples: list[RequestResult] = []  # samples of all submitted requests, in submission order
        self.sample_of: dict[int, RequestResult] = {}  # sample by request number
        self.in_flight = 0  # number of requests
        self.begun = self.ended = 0  # number of sessions
        self.turns: list[
            tuple[float, int, ServeRequest]
        ] = []  # heap of pending turns: due time, number (unique), request
        self.free_s: collections.deque[float] = collections.deque()  # since when clients have no session
        self.stopped = self.cut_off = False  # `cut_off`: some requests were not sent, or not answered to their end

    @property
    def is_done(self) -> bool:
        """Return True if no more requests will come and all have been read."""
        left = len(self.sessions) - self.begun
        return not self.in_flight and (self.stopped or not (left or self.turns))

    def count_due(self, now_s: float) -> tuple[int, int]:
        """Return the number of later turns and of new sessions that are due."""
        if self.stopped:
            return 0, 0
        due = self.turns and self.turns[0][0] <= now_s
        turns = self._count_seen(sorted(due_s for due_s, *_ in self.turns), now_s) if due else 0
        left = len(self.sessions) - self.begun
        if self.concurrency is not None:
            return turns, min(self._count_free_clients(now_s), left)
        new = 0
        while new < left and self._get_arrival_s(self.begun + new) + self.delay_s <= now_s:
            new += 1
        return turns, new

    def find_next_arrival_s(self) -> float | None:
        """Return when the scheduler sees the next turn or session; None without either, or if clients wait for answers.

        Without a delay, a client of a closed loop sends its next session at once.
        """
        if self.stopped:
            return None
        known = [self.turns[0][0]] if self.turns else []
        if self.begun < len(self.sessions):
            if self.concurrency is None:
                known.append(self._get_arrival_s(self.begun))
            elif self.delay_s:
                known += [self.free_s[0]] if self.free_s else [] if self.begun else [0.0]
        return min(known) + self.delay_s if known else None

    def list_next_turns(self, count: int) -> list[int]:
        """Return the numbers of the next turns, in the order in which they are due."""
        return [number for _, number, _ in sorted(self.turns)[:count]]

    def submit(self, turns: int, sessions: int, now_s: float, order: SequenceOf[int] | None = None) -> None:
        """Submit the next requests. Their latency counts from their due time, or from when their client was free.

        `order` has the numbers of the turns if another rank decided which they are.
        """
        if self.concurrency is not None and not self.begun and sessions:
            self.free_s.extend([max(now_s - self.delay_s, 0.0)] * self.concurrency)
        if order is not None:
            pending = {number: (due_s, request) for due_s, number, request in self.turns}
            chosen = [pending.pop(number) for number in order]
            self.turns = [(due_s, number, request) for number, (due_s, request) in pending.items()]
            heapq.heapify(self.turns)
        else:
            chosen = [(due_s, request) for due_s, _, request in (heapq.heappop(self.turns) for _ in range(turns))]
        for due_s, request in chosen:
            self._submit_request(self._add_sampled_answers(request), due_s)
        for _ in range(sessions):
            came_s = self._get_arrival_s(self.begun) if self.concurrency is None else self.free_s.popleft()
            self.begun += 1
            self._submit_request(self.sessions[self.begun - 1], came_s)

    def record_tokens(self, step: Step, now_s: float) -> None:
        """Record the tokens of a step that has been read, when the front end sends them."""
        emitting = [s.request for replica in step.replicas for s in replica.emitting_sequences]
        sent_s = self._compute_sent_s(emitting, now_s) if self.first_token_s else now_s
        for request in emitting:
            self.sample_of[request.number].token_s.append(sent_s)
        for sequence in step.finished:
            self.sample_of[sequence.request.number].sequence = sequence
            self._finish_request(sequence.request, sent_s)
        self.in_flight -= len(step.finished)

    def _compute_sent_s(self, emitting: Iterable[ServeRequest], now_s: float) -> float:
        """Return when the front end sends the tokens of a step, after those of the steps before."""
        began = sum(r.prompt_tokens for r in emitting if not self.sample_of[r.number].token_s)
        self.sent_s = max(now_s, self.sent_s) + began * self.first_token_s
        return self.sent_s

    def stop(self) -> None:
        """Stop sending and cancel unfinished requests; called after the last step has been read."""
        self.cut_off, self.stopped = not self.is_done, True
        self.turns.clear()
        for sequence in self.scheduler.cancel():
            self.sample_of[sequence.request.number].sequence = sequence
        self.in_flight = 0

    def _submit_request(self, request: ServeRequest, came_s: float) -> None:
        sample = RequestResult(request, came_s)
        self.samples.append(sample)
        self.sample_of[request.number] = sample
        sample.rejected = self.scheduler.submit(request)
        if not sample.rejected:
            self.in_flight += 1
            return
        if (turn := self.turn_of.get(request.number)) is not None:
            turn.later = []  # which are longer
        self._finish_request(request, came_s)

    def _finish_request(self, request: ServeRequest, now_s: float) -> None:
        """Make the next turn pending if this was the last request of a turn, or record the end of the session."""
        turn = self.turn_of.get(request.number)
        if turn is not None:
            turn.left -= 1
            if turn.left:
                return
        if turn is None or not turn.later:
            self._finish_session(now_s)
            return
        for later in turn.later:
            heapq.heappush(self.turns, (later.compute_due_s(now_s), later.number, later))

    def _add_sampled_answers(self, request: ServeRequest) -> ServeRequest:
        """Return a later turn with the sampled answers before it, on a rank that has them."""
        assert request.parent is not None
        before = self.sample_of[request.parent]
        if len(before.tokens) != before.request.output_tokens:
            return request
        own = request.prompt[before.request.prompt_tokens + before.request.output_tokens :]
        sampled_prompt = np.concatenate((before.request.ids, np.array(before.tokens, dtype=np.int32), own))
        return dataclasses.replace(request, sampled_prompt=sampled_prompt)

    def _finish_session(self, now_s: float) -> None:
        """Record the end of a session."""
        self.ended += 1
        if self.concurrency is not None:
            self.free_s.append(now_s)

    def _count_free_clients(self, now_s: float) -> int:
        """Return the number of clients of a closed loop with a next session that the scheduler can see."""
        assert self.concurrency is not None
        if not self.delay_s:
            return self.concurrency - (self.begun - self.ended)
        return self._count_seen(self.free_s if self.begun else itertools.repeat(0.0, self.concurrency), now_s)

    def _count_seen(self, sent_s: Iterable[float], now_s: float) -> int:
        """Return the number of requests sent at these times, in order, that the scheduler sees at `now_s`.

        With a delay, requests that are sent at the same time are seen SPACING_S apart: an idle engine begins with the first alone.
        """
        count, same, before = 0, 0, -math.inf
        for sent in sent_s:
            same = same + 1 if sent == before and self.delay_s else 0
            if sent + self.delay_s + same * SPACING_S > now_s:
                break
            count, before = count + 1, sent
        return count

    def _get_arrival_s(self, index: int) -> float:
        arrival = self.sessions[index].arrival_s
        assert arrival is not None
        return arrival


def _group_turns(requests: SequenceOf[ServeRequest]) -> dict[int, _Turn]:
    """Return the turn of each request by its number, without sessions of a single request."""
    if not any(request.turn for request in requests):
        return {}
    groups = [list(group) for _, group in itertools.groupby(requests, key=_get_turn)]
    found: dict[int, _Turn] = {}
    for group, after in itertools.pairwise([*groups, []]):
        later = after if after and after[0].turn else []
        if later or group[0].turn:
            turn = _Turn(left=len(group), later=later)
            found |= {request.number: turn for request in group}
    return found


def _get_turn(request: ServeRequest) -> tuple[int, int]:
    """Return the key of a turn; of a request without a session one of its own."""
    return request.session_turn or (-1 - request.number, 0)
