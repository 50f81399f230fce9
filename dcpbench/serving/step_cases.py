"""Cases of step times as steps that an engine can launch: slots, positions and pages made by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.serving.allocator import DcpAllocator
from dcpbench.serving.requests import Chunk, ReplicaStep, Sequence, ServeRequest, Step, TableWrite

if TYPE_CHECKING:
    from dcpbench.serving.scheduler import SchedulerConfig
    from dcpbench.serving.step_times import Case

OUTPUT_TOKENS = 2
"""Of the requests, which never finish: no step says that it samples a last token."""


@dataclasses.dataclass(frozen=True)
class CaseSteps:
    """Steps of one case. Both do the same work; it can be repeated as often as one likes, as no position moves."""

    first: Step
    """Writes where its requests' tokens lie."""
    again: Step


class CaseMaker:
    """Makes the same steps on every rank. Each case begins with an empty cache."""

    def __init__(self, config: SchedulerConfig, vocab: int) -> None:
        self.config = config
        generator = np.random.Generator(np.random.PCG64(0))
        self.prompt = generator.integers(0, vocab, config.max_context, dtype=np.int32)
        self.numbers = itertools.count(-1, -1)
        """No request of a load has a negative number, so its prompt is not taken for one of these."""

    def steps(self, case: Case) -> CaseSteps:
        """The steps of a case, alike on all replicas."""
        config = self.config
        allocator = DcpAllocator(config.pages, config.page_size, config.dcp, config.interleave)
        todo, writes = ReplicaStep(), []
        slots = itertools.count(1)
        for decodes in case.decodes:
            for _ in range(decodes.requests):
                sequence = self._sequence(allocator, next(slots), decodes.context)
                writes.append(_where(sequence))
                sequence.computed = decodes.context
                todo.decodes.append(sequence)
                todo.slots.append(sequence.slot)
                todo.positions.append(decodes.context - 1)
        for chunks in case.chunks:
            for _ in range(chunks.chunks):
                stop = chunks.prefix + chunks.tokens
                sequence = self._sequence(allocator, next(slots), stop)
                writes.append(_where(sequence))
                todo.chunks.append(Chunk(sequence, sequence.slot, chunks.prefix, stop, samples=True))
        return CaseSteps(self._step(dataclasses.replace(todo, table=writes)), self._step(todo))

    def _sequence(self, allocator: DcpAllocator, slot: int, tokens: int) -> Sequence:
        number = next(self.numbers)
        request = ServeRequest(number=number, prompt=self.prompt[:tokens], output_tokens=OUTPUT_TOKENS)
        return Sequence(request, -number, replica=0, slot=slot, allocation=allocator.alloc(tokens))

    def _step(self, todo: ReplicaStep) -> Step:
        return Step(0, [todo] * self.config.replicas)


def _where(sequence: Sequence) -> TableWrite:
    assert sequence.allocation is not None
    return TableWrite(sequence.slot, 0, sequence.allocation.locs(0, sequence.allocation.tokens))
