"""Several instances of a layout behind a router, in integers and virtual time: routing of requests and transfer of KV.

Either all instances prefill and decode (`Deployment`), or some only prefill and others only decode (`Disaggregated`):

    client ─▶ prefill instance ── first token ──▶ client
                    │ KV, once the whole prompt is stored: link after link
                    ▼
              decode instance ── all other tokens ──▶ client

Each instance has its own scheduler; those of disaggregated instances are the common scheduler (scheduler.py) without
one half of its steps. A transfer occupies the links of both ends: those of the sending and of the receiving attention
replica, each GPU to its counterpart. It begins when earlier transfers of the sending replica have ended and a decode
replica has free KV capacity, which is then reserved. Until the transfer ends, the KV stays on the prefill instance, so
full decode instances keep the prefill instances waiting.

A request that loses its KV during decode is prefilled again, prompt and generated tokens, before all others of a
prefill instance, and its KV is transferred again.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import itertools
import math
from typing import TYPE_CHECKING

from dcpbench.serving.requests import Transfer
from dcpbench.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from dcpbench.serving.requests import Sequence, ServeRequest, Step
    from dcpbench.serving.scheduler import Replica, SchedulerConfig


class Deployment:
    """Identical instances behind the interface of a scheduler: `submit` and `cancel`.

    A request goes to the instance with the fewest requests, a later turn of a session to the one that holds the earlier
    turns.
    """

    def __init__(self, schedulers: SequenceOf[Scheduler], takers: int | None = None) -> None:
        """Create a deployment; only the first `takers` instances accept requests, or all if None."""
        self.schedulers = list(schedulers)
        self.takers = range(len(self.schedulers) if takers is None else takers)
        self.in_hand = [0] * len(self.schedulers)  # number of requests of each instance
        orders = itertools.count()
        for scheduler in self.schedulers:
            scheduler.orders = orders
        self.homes: dict[int, int] = {}  # instance that takes the turns of each session
        self.transfers: list[Transfer] = []  # transfers that have ended
        self._woken: set[int] = set()

    def submit(self, request: ServeRequest) -> str:
        """Give a request to an instance; return the reason if it can never be served, else an empty string."""
        index = self._choose_instance(request.session)
        reason = self.schedulers[index].submit(request)
        if not reason:
            self._add_to_instance(index)
            if request.session is not None:
                self.homes[request.session] = index
        return reason

    def cancel(self) -> list[Sequence]:
        """End everything that has not finished; returns it, each request once."""
        dropped = {}
        for index, scheduler in enumerate(self.schedulers):
            for sequence in scheduler.cancel():
                dropped[sequence.request.number] = sequence
                self._set_instance(sequence, index)
        return list(dropped.values())

    def handle_end(self, index: int, step: Step) -> None:
        """Handle that the last tokens of a step of an instance have been read, after which nothing is served."""
        for sequence in step.finished:
            self._set_instance(sequence, index)

    def handle_decision(self, index: int, now_s: float) -> None:
        """Handle that an instance has decided a step, or that it has none."""

    def handle_read(self, index: int, step: Step, now_s: float) -> None:
        """Handle that the tokens of a step of an instance have been read."""
        del now_s
        self.handle_end(index, step)
        self.schedulers[index].handle_read(step)
        self.in_hand[index] -= len(step.finished)

    def get_next_end_s(self) -> float:
        """Return the time at which the next transfer ends."""
        return math.inf

    def update_transfers(self, now_s: float) -> None:
        """End the transfers that are over by now."""

    def collect_woken(self) -> set[int]:
        """Return the instances that have received work since the last call."""
        found, self._woken = self._woken, set()
        return found

    def _set_instance(self, sequence: Sequence, index: int) -> None:
        if len(self.schedulers) > 1:
            sequence.instance = index

    def _add_to_instance(self, index: int) -> None:
        self.in_hand[index] += 1
        self._woken.add(index)

    def _choose_instance(self, session: int | None) -> int:
        home = None if session is None else self.homes.get(session)
        return min(self.takers, key=lambda i: (self.in_hand[i], i)) if home is None else home


class PrefillScheduler(Scheduler):
    """An instance that only prefills. Who has a token keeps slot and KV until that has crossed."""

    decode_tokens = 0  # a single remaining token is a chunk, too

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.leaving: list[Sequence] = []

    @property
    def unfinished(self) -> list[Sequence]:
        """Return the unfinished requests, including those that leave."""
        return sorted([*super().unfinished, *self.leaving], key=lambda s: s.order)

    def retry_prefill(self, sequence: Sequence) -> None:
        """Queue a request that lost its KV before all others, to compute its KV again."""
        self.waiting.appendleft(sequence)

    def free_sent(self, sequence: Sequence) -> None:
        """Release the memory of a request after the transfer of its KV."""
        self.leaving.remove(sequence)
        self._free_sequence(self.replicas[sequence.replica], sequence)

    def cancel(self) -> list[Sequence]:
        """End everything that has not finished; returns it."""
        gone, self.leaving = self.leaving, []
        for sequence in gone:
            self._free_sequence(self.replicas[sequence.replica], sequence)
        return sorted([*gone, *super().cancel()], key=lambda s: s.order)

    def _add_decodes(self, step: Step) -> None:
        """Do nothing: this instance does not decode."""

    def _count_reserved_pages(self, replica: Replica) -> int:
        """Return 0, as no request grows here."""
        del replica
        return 0

    def _finish_step(self, step: Step) -> None:
        """Finish the step and release requests that have their first token."""
        super()._finish_step(step)
        for replica, todo in zip(self.replicas, step.replicas, strict=True):
            gone = [s for s in todo.sampled_sequences if not s.is_finished]
            self.leaving += gone
            replica.running = [s for s in replica.running if s not in gone]


class DecodeScheduler(Scheduler):
    """An instance that only decodes requests prefilled elsewhere.

    It has no prefix cache, and keeps the memory of a finished request until its step was read, because KV arrives from
    other instances without any order relative to its steps.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.arriving: list[list[Sequence]] = [[] for _ in self.replicas]  # arriving requests, by replica
        self.lost: list[Sequence] = []  # requests that lost their KV

    @property
    def unfinished(self) -> list[Sequence]:
        """Return the unfinished requests, including those that arrive."""
        arriving = [s for of in self.arriving for s in of]
        return sorted([*super().unfinished, *arriving, *self.lost], key=lambda s: s.order)

    def find_able_replicas(self, tokens: int) -> list[Replica]:
        """Return the replicas with enough free capacity for a request of which `tokens` tokens are stored."""
        found = []
        for replica in self.replicas:
            need = replica.allocator.count_pages(tokens) + self._count_reserved_pages(replica)
            if replica.slots and need <= replica.available_pages:
                found.append(replica)
        return found

    def count_requests(self, replica: Replica) -> int:
        """Return the number of running and arriving requests of a replica."""
        return len(replica.running) + len(self.arriving[replica.number])

    def allocate_arriving(self, sequence: Sequence, replica: Replica) -> Sequence:
        """Reserve capacity for a request that is prefilled elsewhere; return its sequence on this instance."""
        allocation = replica.allocator.allocate(sequence.computed)
        ours = dataclasses.replace(
            sequence, replica=replica.number, slot=replica.slots.pop(), allocation=allocation, node=None
        )
        self.arriving[replica.number].append(ours)
        return ours

    def start_request(self, sequence: Sequence) -> None:
        """Add a request to the running ones after the transfer of its KV."""
        self.arriving[sequence.replica].remove(sequence)
        bisect.insort(self.replicas[sequence.replica].running, sequence, key=lambda s: s.order)

    def free_finished(self, step: Step) -> None:
        """Free the memory of finished requests."""
        for sequence in step.finished:
            self._free_sequence(self.replicas[sequence.replica], sequence)

    def cancel(self) -> list[Sequence]:
        """End everything that has not finished; returns it."""
        gone = [*self.lost, *(s for of in self.arriving for s in of)]
        for sequence in gone:
            if sequence.allocation is not None:
                self._free_sequence(self.replicas[sequence.replica], sequence)
        self.lost, self.arriving = [], [[] for _ in self.replicas]
        return sorted([*gone, *super().cancel()], key=lambda s: s.order)

    def _add_prefills(self, step: Step) -> None:
        """Do nothing: this instance does not prefill."""

    def _count_reserved_pages(self, replica: Replica) -> int:
        """Return the pages of a step of each running or arriving request."""
        return self.count_requests(replica) * self._pages_of_step

    def _preempt_sequence(self, replica: Replica, sequence: Sequence) -> None:
        """Give up a request, which has to be prefilled again elsewhere."""
        super()._preempt_sequence(replica, sequence)
        replica.preempted.remove(sequence)
        replica.slots.append(sequence.slot)
        self.lost.append(sequence)

    def _finish_step(self, step: Step) -> None:
        """Keep the memory of finished requests until the step was read."""
        for replica, todo in zip(self.replicas, step.replicas, strict=True):
            step.finished += [s for s in todo.sampled_sequences if s.is_finished]
            replica.running = [s for s in replica.running if not s.is_finished]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """Link that carries KV from a prefill instance to a decode instance."""

    bytes_s: float  # bandwidth of a GPU
    latency_s: float = 0.0  # latency of each transfer, during which the link is occupied as well
    page_bytes: int  # bytes of a page of one rank over all layers, of the largest pipeline stage; whole pages are sent

    def compute_seconds(self, sent_bytes: int) -> float:
        """Return the duration of a transfer of `sent_bytes` per GPU, in s."""
        return self.latency_s + sent_bytes / self.bytes_s


class Disaggregated(Deployment):
    """Instances that only prefill, then those that only decode. See above."""

    def __init__(self, config: SchedulerConfig, prefill: int, decode: int, link: Link) -> None:
        self.prefills = [PrefillScheduler(config) for _ in range(prefill)]
        self.decodes = [DecodeScheduler(config) for _ in range(decode)]
        super().__init__([*self.prefills, *self.decodes], takers=prefill)
        self.link = link
        self._queues: dict[tuple[int, int], collections.deque[tuple[float, Sequence]]] = {
            (i, r): collections.deque() for i in range(prefill) for r in range(config.replicas)
        }
        """Waiting requests on the link of each sender (instance, replica), with the time since when; the first one may
        be in transfer.
        """
        self._busy: set[tuple[int, int]] = set()  # replicas, sending and receiving, with occupied links
        self._crossing: list[tuple[float, int, tuple[int, int], Sequence, Transfer]] = []
        """Heap of running transfers: end, tie-break, sender, request, statistics."""
        self._ties = itertools.count()

    @property
    def links(self) -> int:
        """Return the number of links of prefill instances: one for each of their replicas."""
        return len(self._queues)

    def handle_decision(self, index: int, now_s: float) -> None:
        """Return requests that lost their KV to a prefill instance."""
        if index in self.takers:
            return
        scheduler = self.decodes[index - len(self.prefills)]
        lost, scheduler.lost = scheduler.lost, []
        for sequence in sorted(lost, key=lambda s: -s.order):
            self.in_hand[index] -= 1
            taker = self._choose_instance(sequence.request.session)
            self.prefills[taker].retry_prefill(sequence)
            self._add_to_instance(taker)
        if lost:
            self._start_transfers(now_s)

    def handle_read(self, index: int, step: Step, now_s: float) -> None:
        """Queue requests with a first token for their transfer, and free the capacity of finished requests."""
        super().handle_read(index, step, now_s)
        if index in self.takers:
            for replica, todo in enumerate(step.replicas):
                for sequence in todo.sampled_sequences:
                    if not sequence.is_finished:
                        self._queues[index, replica].append((now_s, sequence))
        else:
            self.decodes[index - len(self.prefills)].free_finished(step)
        self._start_transfers(now_s)

    def get_next_end_s(self) -> float:
        """Return the time at which the next transfer ends."""
        return self._crossing[0][0] if self._crossing else math.inf

    def update_transfers(self, now_s: float) -> None:
        """End the transfers that are over by now, and begin those that can."""
        while self._crossing and self._crossing[0][0] <= now_s:
            _, _, sender, sequence, transfer = heapq.heappop(self._crossing)
            assert sequence.instance is not None
            _, before = self._queues[sender].popleft()
            self._busy -= {sender, (sequence.instance, sequence.replica)}
            self.prefills[sender[0]].free_sent(before)
            self.in_hand[sender[0]] -= 1
            self.decodes[sequence.instance - len(self.prefills)].start_request(sequence)
            self._woken |= {sender[0], sequence.instance}
            self.transfers.append(transfer)
        self._start_transfers(now_s)

    def _start_transfers(self, now_s: float) -> None:
        """Start all transfers that can start, longest waiting first."""
        heads = [(q[0][0], sender) for sender, q in self._queues.items() if q and sender not in self._busy]
        for ready_s, sender in sorted(heads):
            _, sequence = self._queues[sender][0]
            if (found := self._choose_receiver(sequence)) is None:
                continue
            index, replica = found
            sent_bytes = self.link.page_bytes * replica.allocator.count_pages(sequence.computed)
            transfer = Transfer(
                sender[0], index, ready_s, now_s, now_s + self.link.compute_seconds(sent_bytes), sent_bytes
            )
            arriving = self.decodes[index - len(self.prefills)].allocate_arriving(sequence, replica)
            arriving.instance, arriving.transfer = index, sequence.transfer or transfer
            self.in_hand[index] += 1
            self._busy |= {sender, (index, replica.number)}
            heapq.heappush(self._crossing, (transfer.end_s, next(self._ties), sender, arriving, transfer))

    def _choose_receiver(self, sequence: Sequence) -> tuple[int, Replica] | None:
        """Return the instance with the fewest requests and its replica with the fewest, among those with capacity and a
        free link.
        """
        able: Iterable[tuple[int, DecodeScheduler, Replica]] = (
            (index, scheduler, replica)
            for index, scheduler in enumerate(self.decodes, len(self.prefills))
            for replica in scheduler.find_able_replicas(sequence.computed)
            if (index, replica.number) not in self._busy
        )
        best = min(able, key=lambda a: (self.in_hand[a[0]], a[1].count_requests(a[2]), a[0], a[2].number), default=None)
        return None if best is None else (best[0], best[2])
