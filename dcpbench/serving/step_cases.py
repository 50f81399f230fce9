"""Cases of step times as steps that an engine can launch: slots, positions and pages made by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.points.batches import PADDING_POSITION, PADDING_SLOT
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
        self.next_page = 0
        self.numbers = itertools.count(-1, -1)
        """No request of a load has a negative number, so its prompt is not taken for one of these."""

    def steps(self, case: Case) -> CaseSteps:
        """The steps of a case, alike on all replicas."""
        self.next_page = 0
        todo, writes = ReplicaStep(), []
        slots = itertools.count(1)
        for decodes in case.decodes:
            for _ in range(decodes.requests):
                sequence = self._sequence(next(slots), decodes.context)
                writes.append(self._where(sequence, decodes.context))
                sequence.computed = decodes.context
                todo.decodes.append(sequence)
                todo.slots.append(sequence.slot)
                todo.positions.append(decodes.context - 1)
        for chunks in case.chunks:
            for _ in range(chunks.chunks):
                stop = chunks.prefix + chunks.tokens
                sequence = self._sequence(next(slots), stop)
                writes.append(self._where(sequence, stop))
                todo.chunks.append(Chunk(sequence, sequence.slot, chunks.prefix, stop, samples=True))
        return CaseSteps(self._step(dataclasses.replace(todo, table=writes)), self._step(todo))

    def padding(self, rows: int) -> Step:
        """A decode step of so many padding rows."""
        nobody = [self._sequence(PADDING_SLOT, 1) for _ in range(rows)]
        return self._step(ReplicaStep(decodes=nobody, slots=[PADDING_SLOT] * rows, positions=[PADDING_POSITION] * rows))

    def _sequence(self, slot: int, tokens: int) -> Sequence:
        number = next(self.numbers)
        request = ServeRequest(number=number, prompt=self.prompt[:tokens], output_tokens=OUTPUT_TOKENS)
        return Sequence(request, -number, replica=0, slot=slot)

    def _where(self, sequence: Sequence, tokens: int) -> TableWrite:
        """The pool's pages in turn, without the padding page; past the last one, those of other requests again."""
        config, page = self.config, self.config.virtual_page
        pages = np.arange(self.next_page, self.next_page - (-tokens // page)) % (config.pages - 1) + 1
        self.next_page += len(pages)
        locs = (pages[:, None] * page + np.arange(page)).ravel()[:tokens]
        return TableWrite(sequence.slot, 0, locs.astype(np.int32))

    def _step(self, todo: ReplicaStep) -> Step:
        return Step(0, [todo] * self.config.replicas)
