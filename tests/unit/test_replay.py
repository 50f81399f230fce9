"""Replay: the live pipeline in virtual time, compared with an event-driven simulation."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.errors import UsageError
from dcpbench.serving.outcome import compute_serve_metrics
from dcpbench.serving.replay import replay_requests
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.step_model import Slowdown
from tests.unit.serving_builder import make_config, make_request
from tests.unit.step_times_builder import EXTENT, make_step_times

if TYPE_CHECKING:
    from dcpbench.serving.requests import ServeRequest, Step
    from dcpbench.serving.scheduler import SchedulerConfig


@dataclasses.dataclass
class Fixed:
    """An engine with known times: 1 ms per decode row, 2 ms per token of a chunk, and 10 ms per step."""

    launch_ms: float = 0.0
    is_blocking: bool = False
    host: float = 0.0  # ms to launch a step with chunks, and again for each token of them
    slowdown: Slowdown = dataclasses.field(default_factory=lambda: Slowdown([]))

    def get_begin_ms(self, _step: Step) -> float:
        return self.launch_ms

    def predict_duration_ms(self, step: Step, _heat: float = 0.0) -> float:
        return 10.0 + max(len(r.decodes) + 2 * sum(c.tokens for c in r.chunks) for r in step.replicas)

    def predict_host_ms(self, step: Step) -> float:
        tokens = max(sum(c.tokens for c in r.chunks) for r in step.replicas)
        return self.host * (1 + tokens) if tokens else 0.0


class Events:
    """The live pipeline as events on one clock: the device ends a step, a request arrives, or a step has been launched.
    The host reads the results of the device even while it launches. When it has nothing else to do and fewer than two
    steps are unread, it lets clients send, decides the next step and begins to launch it.
    """

    def __init__(self, requests: list[ServeRequest], setup: SchedulerConfig, clients: int | None, times: Fixed) -> None:
        self.scheduler, self.times, self.clients = Scheduler(setup), times, clients
        self.unsent = list(requests)
        self.idle_since = [0.0] * (clients or 0)
        self.came: dict[int, list[float]] = {}
        self.sent: dict[int, float] = {}
        self.device_free = self.host_free = 0.0
        self.unread: list[Step] = []
        self.heap: list[tuple[float, int, Step | None]] = []
        self.tick = itertools.count()

    def run(self) -> Events:
        """Run a replay until all requests end."""
        self.wake(0.0)
        while self.heap:
            now, _, ended = heapq.heappop(self.heap)
            if ended is not None:
                self.read(ended, now)
            if now >= self.host_free:
                self.wake(now)
        return self

    def wake(self, now: float) -> None:
        """Send requests and launch a step, if fewer than two are unread."""
        if len(self.unread) == 2:
            return
        self.send(now)
        step = self.scheduler.plan_step()
        if step is not None:
            start = max(now + self.times.launch_ms / 1e3, self.device_free)
            self.host_free = now + self.times.predict_host_ms(step) / 1e3
            self.device_free = max(start + self.times.predict_duration_ms(step) / 1e3, self.host_free)
            self.unread.append(step)
            heapq.heappush(self.heap, (self.host_free, next(self.tick), None))  # first if both are at the same time
            heapq.heappush(self.heap, (self.device_free, next(self.tick), step))
        elif not self.unread and self.unsent and self.clients is None:
            heapq.heappush(self.heap, (self.unsent[0].arrival_s, next(self.tick), None))
        elif not self.unread and self.unsent:
            self.wake(now)  # all that clients sent was rejected

    def send(self, now: float) -> None:
        """Submit what clients have sent by now, each as soon as it had no open request."""
        while self.unsent:
            one = self.unsent[0]
            if self.clients is None:
                if one.arrival_s > now:
                    return
            elif not self.idle_since:
                return
            self.unsent.pop(0)
            self.sent[one.number] = self.idle_since.pop(0) if self.clients is not None else one.arrival_s
            if not self.scheduler.submit(one):
                self.came[one.number] = []
            elif self.clients is not None:
                self.idle_since.append(self.sent[one.number])

    def read(self, step: Step, now: float) -> None:
        """Read the tokens of a step."""
        assert step is self.unread.pop(0), "steps end in order"
        for part in step.replicas:
            for sequence in part.sampled_sequences:
                self.came[sequence.request.number].append(now)
                if (
                    self.clients is not None
                    and len(self.came[sequence.request.number]) == sequence.request.output_tokens
                ):
                    self.idle_since.append(now)


def load(seed: int, count: int, *, rate: float | None = None) -> list[ServeRequest]:
    """Return requests of mixed lengths, with a rate at random times."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist() if rate else [None] * count
    return [make_request(i, int(rng.integers(1, 14)), int(rng.integers(1, 12)), times[i]) for i in range(count)]


SETUPS = {
    "mixed": make_config(pages=60),
    "prefill-first": make_config(pages=60, policy="prefill-first"),
    "pressure": make_config(pages=9),
    "dp2": make_config(pages=12, replicas=2),
    "one-slot": make_config(pages=60, max_requests=1),
}


class TestAgainstSimulation:
    @pytest.mark.parametrize("launch_ms", [0.0, 4.0], ids=["launch0", "launch4"])
    @pytest.mark.parametrize("clients", [1, 3, 8])
    @pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
    def test_closed_loop_equals_the_simulation(self, setup: SchedulerConfig, clients: int, launch_ms: float) -> None:
        self.compare(load(1, 40), setup, clients, Fixed(launch_ms))

    @pytest.mark.parametrize("clients", [1, 3, 8])
    @pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
    def test_host_slower_than_the_device_equals_the_simulation(self, setup: SchedulerConfig, clients: int) -> None:
        """The host takes up to twice as long as the device for a step with chunks, and less for small ones."""
        self.compare(load(5, 40), setup, clients, Fixed(4.0, host=5.3))

    @pytest.mark.parametrize("rate", [2, 20, 200], ids=["rate2", "rate20", "rate200"])
    @pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
    def test_open_loop_equals_the_simulation(self, setup: SchedulerConfig, rate: float) -> None:
        self.compare(load(2, 40, rate=rate), setup, None, Fixed(4.0))
        self.compare(load(2, 40, rate=rate), setup, None, Fixed(4.0, host=5.3))

    @staticmethod
    def compare(requests: list[ServeRequest], setup: SchedulerConfig, clients: int | None, times: Fixed) -> None:
        """Check that every token of every request has the same time, bit for bit."""
        events = Events(requests, setup, clients, times).run()
        found = replay_requests(requests, Scheduler(setup), clients, times).traffic
        assert {s.request.number: s.submitted_s for s in found.samples} == events.sent
        assert {s.request.number: s.token_s for s in found.samples if not s.rejected} == events.came
        assert all(s.is_finished for s in found.samples if not s.rejected)


def list_token_ms(
    requests: list[ServeRequest], clients: int | None, times: Fixed, **changes: object
) -> list[list[float]]:
    """Return the token times of each request, in ms."""
    found = replay_requests(requests, Scheduler(make_config(pages=60, **changes)), clients, times)
    return [[round(t * 1e3, 6) for t in s.token_s] for s in found.traffic.samples]


class TestPipeline:
    def test_tokens_have_the_end_time_of_their_step(self) -> None:
        """A prompt of 3 takes 10 + 2 · 3 = 16 ms, each further token 10 + 1."""
        assert list_token_ms([make_request(0, 3, 3)], 1, Fixed()) == [[16, 27, 38]]

    def test_launch_delays_only_a_step_on_an_idle_device(self) -> None:
        """The first step waits 5 ms; later steps are launched while another runs."""
        assert list_token_ms([make_request(0, 3, 3)], 1, Fixed(launch_ms=5)) == [[21, 32, 43]]

    def test_request_sent_after_step_k_joins_step_k_plus_2(self) -> None:
        """Two clients have three requests. A ends with the prefill at 10 + 2 · (1 + 3) = 18 ms. Step 1, decided before,
        has only B's decode: 29 ms. C, sent at 18 ms, joins step 2 with B's decode: 29 + 10 + 1 + 2 · 2 = 44 ms.
        """
        requests = [make_request(0, 1, 1), make_request(1, 3, 3), make_request(2, 2, 1)]
        assert list_token_ms(requests, 2, Fixed()) == [[18], [18, 29, 44], [44]]

    def test_step_does_not_end_before_it_is_launched(self) -> None:
        """Launching takes 30 ms for the prompt of 5, although the device needs 10 + 2 · 5; later steps are not delayed."""
        assert list_token_ms([make_request(0, 5, 3)], 1, Fixed(host=5)) == [[30, 41, 52]]

    def test_launch_time_is_hidden_by_the_previous_step(self) -> None:
        """Two clients have three requests. Steps 0 (A and B are prefilled, 18 ms) and 1 (B decodes, 29 ms) are launched
        at 0 and 20, after the host has launched step 0. C, sent at 20, is launched from 20 to 29, which is hidden by
        step 1 until 31 ms: it ends at 31 + 10 + 1 + 2 · 2.
        """
        requests = [make_request(0, 1, 1), make_request(1, 3, 3), make_request(2, 2, 1)]
        assert list_token_ms(requests, 2, Fixed(host=4)) == [[20], [20, 31, 46], [46]]

    def test_tokens_are_read_during_a_launch(self) -> None:
        """B arrives at 12 ms, during A's prefill (until 16 ms), which is launched until 8. Step 1, A's decode, is
        decided at 8 and ends at 27; step 2, with B's prompt of 7, is decided at 16 and launched until 32. Meanwhile
        step 1 is read at 27. Step 2 ends at 27 + 10 + 1 + 14 = 52.
        """
        requests = [make_request(0, 3, 3, 0.0), make_request(1, 7, 1, 0.012)]
        assert list_token_ms(requests, None, Fixed(host=2)) == [[16, 27, 52], [52]]

    def test_idle_device_waits_for_the_next_arrival(self) -> None:
        """The second request arrives 1 s later, with an empty pipeline: 1,000 + 10 + 2 · 3."""
        requests = [make_request(0, 3, 1, 0.0), make_request(1, 3, 1, 1.0)]
        assert list_token_ms(requests, None, Fixed()) == [[16], [1016]]

    def test_arrival_during_a_step_joins_the_next_decided_step(self) -> None:
        """The host decides at 0 (steps 0 and 1), 16 (step 2) and 27 (step 3). A request that arrives at 17 ms joins
        step 3, which begins at 38 and takes 10 + 1 + 2 · 2: 53 ms.
        """
        requests = [make_request(0, 3, 4, 0.0), make_request(1, 2, 1, 0.017)]
        found = replay_requests(requests, Scheduler(make_config(pages=60)), None, Fixed()).traffic.samples[1]
        assert (found.submitted_s, round(found.token_s[0], 6)) == (0.017, 0.053)

    def test_blocking_engine_reads_tokens_after_the_next_step(self) -> None:
        """Step 0 ends at 16 ms on the CPU, but the host runs step 1 until 27 ms, and only then reads step 0."""
        assert list_token_ms([make_request(0, 3, 3)], 1, Fixed(is_blocking=True)) == [[27, 38, 38]]

    def test_requests_that_never_fit_do_not_end_the_run(self) -> None:
        requests = [make_request(0, 9999, 1), make_request(1, 9999, 1), make_request(2, 3, 1)]
        found = replay_requests(requests, Scheduler(make_config(pages=60)), 1, Fixed()).traffic
        assert [bool(s.rejected) for s in found.samples] == [True, True, False]
        assert found.samples[2].is_finished

    def test_time_limit_ends_the_replay_after_the_steps_in_flight(self) -> None:
        """The limit of 20 ms is noticed at 27, when step 1 has been read; step 2, in flight, is read at 38, and no
        other.
        """
        found = replay_requests(
            [make_request(0, 3, 9), make_request(1, 3, 9)], Scheduler(make_config(pages=60)), 1, Fixed(), limit_s=0.02
        )
        assert [len(s.token_s) for s in found.traffic.samples] == [3]
        assert found.traffic.is_done
        assert round(found.end_s, 6) == 0.038

    def test_steps_are_counted_by_kind(self) -> None:
        """There are a prefill and two decodes of one row; the device is never idle."""
        found = replay_requests([make_request(0, 3, 3)], Scheduler(make_config(pages=60)), 1, Fixed())
        assert (found.counts.steps, found.counts.decode_steps, found.counts.decode_rows) == (3, 2, 2)
        assert round(found.end_s, 6) == 0.038


class TestWithStepTimes:
    def test_same_load_gives_the_same_token_times(self) -> None:
        def list_token_times() -> list[list[float]]:
            setup = make_config(pages=1200, page_size=64, dcp=4, max_requests=48, chunk=8192, max_context=5500)
            requests = [make_request(i, 300 + 7 * i, 20) for i in range(30)]
            return [
                s.token_s for s in replay_requests(requests, Scheduler(setup), 8, make_step_times()).traffic.samples
            ]

        assert list_token_times() == list_token_times()

    def test_metrics_of_a_replay_are_those_of_a_live_run(self) -> None:
        """48 clients have prompts of 4,000 in chunks of 8,192, two at a time and the rest of the third: in steady state
        a step takes 40 + 1.4 · 48 + 0.1 · 48 · 4 = 126 ms and a little.
        """
        setup = make_config(pages=1200, page_size=64, dcp=4, max_requests=48, chunk=8192, max_context=5500)
        requests = [make_request(i, [i % 100] * 4000, 60) for i in range(48)]
        found = replay_requests(requests, Scheduler(setup), 48, make_step_times(EXTENT))
        metrics = compute_serve_metrics(found.traffic.samples, gpus=4, concurrency=48, slo={}, steps=found.counts)
        assert metrics.finished == 48
        assert metrics.itl_ms.p50 == pytest.approx(126, rel=0.02)

    def test_step_without_a_known_time_raises_usage_error(self) -> None:
        setup = make_config(pages=1200, page_size=64, dcp=4, max_requests=64, chunk=8192, max_context=5500)
        with pytest.raises(UsageError, match="no step time is known"):
            replay_requests([make_request(i, 10, 9) for i in range(64)], Scheduler(setup), 64, make_step_times())
