"""Test that the live loop reads tokens as soon as they arrive, also during the launch of the next step."""

from types import SimpleNamespace

import numpy as np
import pytest

from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from dcpbench.serving.traffic import Traffic
from dcpbench.workloads.serving_loop import Gaps, Loop


class Launched:
    """Simulate a step with tokens that arrive after `looks` queries."""

    def __init__(self, step, looks, log):
        self.step, self.looks, self.log = step, looks, log
        self.started = self.ended = None

    @property
    def has_arrived(self):
        self.looks -= 1
        return self.looks < 0

    def wait_tokens(self):
        self.log.append(f"read {self.step.number}")
        return [7] * len(self.step.replicas[0].sampled_sequences)


class Engine:
    """Launch a step with chunks in three layers."""

    replica = 0

    def __init__(self, looks):
        self.looks, self.log = looks, []

    def launch_step(self, step, meanwhile):
        for layer in range(3 if step.has_chunks else 0):
            self.log.append(f"launch {step.number}.{layer}")
            meanwhile()
        return Launched(step, self.looks, self.log)


def serve_prompt(looks):
    """Serve a prompt of three chunks to its end."""
    config = SchedulerConfig(replicas=1, pages=20, page_size=1, dcp=1, max_requests=1, chunk=2, max_context=16)
    scheduler = Scheduler(config)
    request = ServeRequest(number=0, prompt=np.arange(6, dtype=np.int32), output_tokens=2)
    engine = Engine(looks)
    made = Loop(engine, scheduler, Traffic([request], scheduler, 1), lambda *numbers: list(numbers))
    made.run()
    return made, engine.log


def test_arrived_tokens_are_read_between_layers_of_the_next_launch():
    """The first query is too early; the second, after the second layer of the next step, finds the tokens."""
    made, log = serve_prompt(looks=1)
    start = log.index("launch 1.0")
    assert log[start : start + 4] == ["launch 1.0", "launch 1.1", "read 0", "launch 1.2"]
    assert made.traffic.samples[0].tokens == [7, 7]


@pytest.mark.parametrize("looks", [0, 1, 2, 100])
def test_every_step_is_read_once_and_in_order(looks):
    """The order does not depend on when tokens arrive: three chunks and a decode."""
    made, log = serve_prompt(looks)
    assert [line for line in log if line.startswith("read")] == [f"read {n}" for n in range(4)]
    assert made.counts.steps == 4
    assert made.traffic.samples[0].is_finished


def test_idle_gaps_count_only_between_consecutive_decode_steps():
    """Two steps of 4 ms with 1 ms between them, one with chunks, and one more have 1 of 5 ms idle."""

    def read(start, end, *, prefills=False):
        event = lambda at: SimpleNamespace(at=at, elapsed_time=lambda other: other.at - at)  # noqa: E731
        return SimpleNamespace(step=SimpleNamespace(has_chunks=prefills), started=event(start), ended=event(end))

    gaps = Gaps()
    for launched in (read(0, 4), read(5, 9), read(20, 30, prefills=True), read(31, 35)):
        gaps.add_step(launched)
    assert (gaps.busy_ms, gaps.idle_ms) == (4, 1)
    assert gaps.idle_fraction == 0.2
