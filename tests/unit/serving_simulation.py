"""Check every step of a scheduler against its rules, with simulated devices and a second scheduler that must decide the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.names import PREFILL_FIRST
from dcpbench.serving.scheduler import Scheduler
from tests.unit.serving_builder import Device, check_books

if TYPE_CHECKING:
    from dcpbench.serving.requests import Sequence, ServeRequest, Step
    from dcpbench.serving.scheduler import SchedulerConfig


class Simulation:
    """Submit requests and run steps; raise AssertionError if a rule is broken."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler, self.twin = Scheduler(config), Scheduler(config)
        self.devices = [Device(config) for _ in range(config.replicas)]
        self.submitted: list[ServeRequest] = []
        self.admitted: list[int] = []
        """Submission numbers of requests in the order of their first chunk."""
        self.finished: list[Sequence] = []
        self.preempted = 0
        self.mixed = 0
        """Number of steps with decodes and chunks."""
        self.steps_left = 0
        """Number of steps within which all submitted requests must finish; with prefill-first, only decode steps count."""
        self.prefills_left = 0
        """Number of steps that prefill while decodes wait, with prefill-first."""

    def submit(self, request: ServeRequest) -> bool:
        """Submit a request and return True if it was accepted; check that exactly those are rejected that can never be
        served.
        """
        config = self.config
        stored = request.kv_tokens + config.queries - 1
        fits = stored <= min((config.pages - 1) * config.virtual_page, config.max_context)
        reason = self.scheduler.submit(request)
        self.twin.submit(request)
        assert (not reason) == fits
        if fits:
            self.submitted.append(request)
            self.steps_left += self.count_max_prefills(request) + request.output_tokens
            self.prefills_left += -(-request.kv_tokens // config.virtual_page)
        else:
            assert f"request {request.number} has {len(request.prompt):,} prompt and" in reason
        return fits

    def count_max_prefills(self, request: ServeRequest) -> int:
        """Return the number of chunks of a request once it is the oldest one: it is then served first and never
        preempted.
        """
        chunk = self.config.chunk // self.config.virtual_page * self.config.virtual_page
        return -(-request.kv_tokens // chunk)

    def step(self) -> Step | None:
        """Plan a step, check it, and run it."""
        before = self.get_state()
        step, other = self.scheduler.plan_step(), self.twin.plan_step()
        assert (step is None) == (other is None)
        if step is None:
            assert not self.scheduler.unfinished
            return None
        assert make_signature(step) == make_signature(other), "ranks decide the same"
        self.check_rules(step, before)
        for device, replica, todo in zip(self.devices, self.scheduler.replicas, step.replicas, strict=True):
            device.run(todo)
            check_books(replica, device)
        self.check_progress(step)
        return step

    def finish(self) -> None:
        """Run until no request is left; all must finish, and only the cache may keep pages."""
        while self.step() is not None:
            pass
        assert len(self.finished) == len(self.submitted)
        self.check_empty()

    def cancel(self) -> None:
        """Cancel the unfinished requests."""
        left = len(self.submitted) - len(self.finished)
        assert len(self.scheduler.cancel()) == len(self.twin.cancel()) == left
        self.submitted = [s.request for s in self.finished]
        self.steps_left = self.prefills_left = 0
        self.check_empty()

    def check_empty(self) -> None:
        """Check that only the cache holds pages, and that it can free all of them."""
        assert self.scheduler.unfinished == []
        for replica, device in zip(self.scheduler.replicas, self.devices, strict=True):
            check_books(replica, device)
            assert replica.allocator.used_pages == replica.cache.pages == replica.cache.evictable
            assert len(replica.slots) == self.config.max_requests

    def get_state(self) -> list[list[tuple[Sequence, int, int]]]:
        """Return computed tokens and preemptions of each replica's running sequences."""
        return [[(s, s.computed, s.preemptions) for s in r.running] for r in self.scheduler.replicas]

    def check_rules(self, step: Step, before: list[list[tuple[Sequence, int, int]]]) -> None:
        """Check which requests are in a step, with which tokens, and which lost their KV."""
        page, lost = self.config.virtual_page, 0
        for todo, running, device in zip(step.replicas, before, self.devices, strict=True):
            preempted = [s for s, _, count in running if s.preemptions > count]
            assert preempted == [s for s, _, _ in running][len(running) - len(preempted) :], "the youngest"
            assert not running or running[0][0] not in preempted, "who came first keeps its KV"
            lost += len(preempted)
            self.prefills_left += sum(-(-s.request.kv_tokens // page) for s in preempted)
            stored = {id(s): computed for s, computed, _ in running if s not in preempted}
            for chunk in todo.chunks:
                known = device.get_state(chunk)
                left = len(known.tokens)
                assert chunk.start % page == 0
                assert chunk.start == stored.get(id(chunk.sequence), chunk.start)
                assert 0 <= chunk.start < chunk.stop <= left
                assert chunk.stop % page == 0 or chunk.stop == left
                assert chunk.samples == (chunk.stop == left)
            assert sum(c.tokens for c in todo.chunks) <= self.config.chunk
            ready = [
                s for s, computed, _ in running if s not in preempted and computed == count_known_tokens(device, s) - 1
            ]
            if self.config.policy == PREFILL_FIRST and step.has_chunks:
                ready = []
            assert [id(s) for s in todo.decodes] == [id(s) for s in ready], "all that can decode do"
            assert todo.positions == [stored[id(s)] for s in ready]
        assert step.preempted == lost
        self.preempted += lost

    def check_progress(self, step: Step) -> None:
        """Check that requests are admitted in order, and that the oldest never waits."""
        seen = {chunk.sequence.order for todo in step.replicas for chunk in todo.chunks}
        new = sorted(seen.difference(self.admitted))
        assert not new or not self.admitted or new[0] > self.admitted[-1]
        self.admitted += new
        for sequence in step.finished:
            known = self.devices[sequence.replica].at[sequence.slot]
            assert len(known.tokens) == len(sequence.request.prompt) + sequence.request.output_tokens
        self.finished += step.finished
        self.mixed += step.has_chunks and any(r.decodes for r in step.replicas)
        if self.config.policy == PREFILL_FIRST and step.has_chunks:
            self.prefills_left -= 1  # a page of a prompt, or its end, in each
        else:
            self.steps_left -= 1
        assert min(self.steps_left, self.prefills_left) >= 0


def count_known_tokens(device: Device, sequence: Sequence) -> int:
    """Return the number of tokens of a running sequence that are known before a step."""
    return len(device.at[sequence.slot].tokens)


def make_signature(step: Step) -> tuple[object, ...]:
    """Return a step as plain numbers."""
    return (
        step.number,
        step.preempted,
        [s.request.number for s in step.finished],
        [
            (
                [s.request.number for s in r.decodes],
                r.slots,
                r.positions,
                [(c.sequence.request.number, c.slot, c.start, c.stop, c.samples) for c in r.chunks],
                [(w.slot, w.start, w.locs.tolist()) for w in r.table],
            )
            for r in step.replicas
        ],
    )
