"""Hold streaming requests that decode at the same time, and compute the time of each step from their tokens. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.ma  # np.median loads it in its first call, during which the client would read no tokens

from dcpbench.errors import WorkerError
from dcpbench.records.formulas import compute_token_times
from dcpbench.servers.answers import StreamReply
from dcpbench.servers.client import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from dcpbench.servers.client import Client

POLL_S = 0.01  # between two looks at the streams
CATCH_UP_SHARE = 1.5  # of a delay, after which tokens have caught up with it
MIN_TOKENS = 4  # tokens of each stream from which a moment between two steps can be found


class NotRunningError(WorkerError):
    """Report that the requests of a step did not decode at the same time."""

    def __init__(self, running: int, requests: int) -> None:
        """Keep how many of the requests were decoding."""
        super().__init__(
            f"only {running} of {requests} requests decode at the same time: some ended before they had been measured "
            "together. Start the server with a larger maximum batch (vLLM: --max-num-seqs, SGLang: --max-running-requests) or "
            "with more KV cache."
        )
        self.running, self.requests = running, requests


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedRequest:
    """A request in the form in which it is sent."""

    data: bytes  # head and body
    prompt_tokens: int
    output_tokens: int


class DecodeStreams:
    """Requests that stream their answers, as a context manager: leaving it cancels those that still run."""

    def __init__(self, client: Client, requests: Sequence[StreamedRequest]) -> None:
        self.client, self.requests = client, requests
        self.replies = [StreamReply(r.output_tokens, prompt_tokens=r.prompt_tokens) for r in requests]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        with contextlib.suppress(RequestError):
            await self.client.open_connections(len(self.requests))
        for request, reply in zip(self.requests, self.replies, strict=True):
            self._tasks.append(asyncio.create_task(self.client.send_request(request.data, reply)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def started(self) -> int:
        """Return the number of requests that have received a token."""
        return sum(reply.chunks > 0 for reply in self.replies)

    def list_contexts(self) -> list[int]:
        """Return the KV tokens to which the next step of each request attends."""
        return [
            _get_prompt_tokens(request, reply) + sum(reply.counts.tokens)
            for request, reply in zip(self.requests, self.replies, strict=True)
        ]

    def list_token_times(self, requests: int | None = None) -> list[NDArray[np.float64]]:
        """Return the arrival times of the tokens of each request, or of the first ones, in s of time.perf_counter()."""
        arrivals = [merge_arrivals(r.counts.time_s, r.counts.tokens) for r in self.replies[:requests]]
        return [np.array(compute_token_times(times, tokens)) for times, tokens in arrivals]

    def list_arrivals(self, requests: int | None = None) -> list[NDArray[np.float64]]:
        """Return when each token of each request, or of the first ones, arrived: equal times for those that arrived together."""
        return [np.repeat(np.array(r.counts.time_s), r.counts.tokens) for r in self.replies[:requests]]

    def compute_divided_share(self, begin_s: float) -> float:
        """Return the share of tokens since `begin_s` that arrived together with others of their request."""
        arrivals = [merge_arrivals(r.counts.time_s, r.counts.tokens) for r in self.replies]
        counts = np.array(
            [n for times, tokens in arrivals for at, n in zip(times, tokens, strict=True) if at > begin_s]
        )
        return float(counts[counts > 1].sum() / max(counts.sum(), 1))

    def check_running(self) -> None:
        """Raise WorkerError if a request failed, NotRunningError if one has ended."""
        for task in self._tasks:
            if not task.done() or task.cancelled() or (error := task.exception()) is None:
                continue
            if isinstance(error, RequestError):
                raise WorkerError(f"a request of the step failed: {error.sentence}") from error
            raise error
        if ended := sum(task.done() for task in self._tasks):
            raise NotRunningError(min(len(self._tasks) - ended, self.started), len(self._tasks))

    async def wait_until_started(self, tell: Callable[[int], None] = lambda _: None) -> None:
        """Wait until every request has received a token; `tell` is called when more of them have. Raise as check_running does."""
        reported = -1
        while (started := self.started) < len(self.requests):
            if started > reported:
                tell(started)
                reported = started
            self.check_running()
            await asyncio.sleep(POLL_S)
        self.check_running()

    async def wait_for_chunks(self, chunks: int) -> None:
        """Wait until every request has received `chunks` more chunks of one or more tokens. Raise as check_running does."""
        wanted = [reply.chunks + chunks for reply in self.replies]
        while any(reply.chunks < count for reply, count in zip(self.replies, wanted, strict=True)):
            self.check_running()
            await asyncio.sleep(POLL_S)

    async def wait_for_context(self, mean: float) -> None:
        """Wait until the requests attend to at least `mean` tokens each, on average. Raise as check_running does."""
        while (missing := mean - float(np.mean(self.list_contexts()))) > 0:
            await self.wait_for_chunks(max(int(missing / 2), 1))

    async def open_window(self) -> StepWindow:
        """Return a window that begins between two steps, after the present moment. Raise as check_running does."""
        opened = time.perf_counter()
        await self.wait_for_chunks(MIN_TOKENS)
        return StepWindow(self, find_moment_between_steps(self.list_token_times(), opened))


@dataclasses.dataclass(frozen=True)
class StepWindow:
    """The steps of requests since a moment between two steps."""

    streams: DecodeStreams
    begin_s: float

    def list_samples_ms(self, requests: int | None = None) -> list[float]:
        """Return the time of each whole step so far in ms; `requests`: only as the first ones see it, which takes less time."""
        return compute_step_times_ms(self.streams.list_token_times(requests), self.begin_s)

    def compute_contexts(self, steps: int) -> tuple[int, int, float]:
        """Return the lowest, the highest and the mean number of KV tokens of a request in the first `steps` steps.

        The token that comes first in the window is the input of the first step that is timed.
        """
        firsts = [
            _get_prompt_tokens(request, reply) + int((times <= self.begin_s).sum()) + 1
            for request, reply, times in zip(
                self.streams.requests, self.streams.replies, self.streams.list_token_times(), strict=True
            )
        ]
        return min(firsts), max(firsts) + steps - 1, float(np.mean(firsts)) + (steps - 1) / 2


def merge_arrivals(time_s: Sequence[float], tokens: Sequence[int]) -> tuple[list[float], list[int]]:
    """Return the moments at which chunks of a request arrived and the number of tokens of each moment.

    Chunks that are read from a socket at once have the same time, that of the last one.
    """
    found: dict[float, int] = {}
    for at, count in zip(time_s, tokens, strict=True):
        found[at] = found.get(at, 0) + count
    return list(found), list(found.values())


def find_moment_between_steps(token_s: Sequence[NDArray[np.float64]], opened_s: float) -> float:
    """Return a moment after `opened_s` at which no step's tokens are arriving: the middle of the longest pause.

    Tokens of one step arrive close together, so that the longest pause among the first tokens of all requests lies between
    two steps.
    """
    merged = np.sort(np.concatenate([times[times > opened_s][:MIN_TOKENS] for times in token_s]))
    longest = int(np.argmax(np.diff(merged)))
    return float(merged[longest] + merged[longest + 1]) / 2


def compute_step_times_ms(token_s: Sequence[NDArray[np.float64]], begin_s: float) -> list[float]:
    """Return the time of each step in ms: the median over requests of the gap between two of their tokens.

    Every request gets one token from each step, so that the n-th token of each after `begin_s` comes from the same step.
    The last step is left out if some of its tokens have not arrived.
    """
    after = [times[times > begin_s] for times in token_s]
    tokens = min(map(len, after), default=0)
    if tokens < 2:  # noqa: PLR2004 - a gap lies between two tokens
        return []
    gaps = np.diff(np.stack([times[:tokens] for times in after]), axis=1)
    return [float(gap) * 1e3 for gap in np.median(gaps, axis=0)]


def find_gap_ms(times: NDArray[np.float64], moment_s: float, tolerance_s: float) -> tuple[float, float] | None:
    """Return the gap of a stream in ms in which another request's first token came at `moment_s`, and the moment at which it ended.

    The gap ends with the first token at `moment_s` or later, unless one that came up to `tolerance_s` earlier is nearer, as tokens of
    one step are not sent at the same time. None while no token has come since.
    """
    end = int(np.searchsorted(times, moment_s))
    if end == len(times) or end == 0:
        return None
    earlier_s = moment_s - float(times[end - 1])
    end -= end > 1 and earlier_s <= min(tolerance_s, float(times[end]) - moment_s)
    return float(times[end] - times[end - 1]) * 1e3, float(times[end])


def compute_delay_ms(times: NDArray[np.float64], moment_s: float) -> float | None:
    """Return by how much the first token of a stream at `moment_s` or later came late, if the tokens after it catch up.

    `times` are those at which tokens arrived. A server whose front end is busy sends no tokens meanwhile, and then those of all steps
    since, one after the other or several in one chunk. A usual step is the median gap of the last half. Tokens that have caught up come
    a usual step apart; the delay is that of the latest token before them. It is computed twice: it states how soon tokens have caught up,
    and soon afterwards an error of the usual step adds up to less. None without enough tokens.
    """
    later = times[int(np.searchsorted(times, moment_s)) :]
    half = len(later) // 2
    if half < MIN_TOKENS:
        return None
    step_s, tokens = float(np.median(np.diff(later[half:]))), half // 4
    late_s = later - step_s * np.arange(len(later))

    def compute_delay_s(caught_up: int) -> float:
        """Return the delay if the tokens from this one on have caught up."""
        return max(float(late_s[:caught_up].max() - np.median(late_s[caught_up : caught_up + tokens])), 0.0)

    last = half - tokens
    caught_up = min(2 + int(CATCH_UP_SHARE * compute_delay_s(last) / step_s), last)
    return compute_delay_s(caught_up) * 1e3


def _get_prompt_tokens(request: StreamedRequest, reply: StreamReply) -> int:
    """Return the length of a prompt by the server's count, else as it was sent."""
    counted = reply.usage.prompt_tokens if reply.usage is not None else None
    return counted or request.prompt_tokens
