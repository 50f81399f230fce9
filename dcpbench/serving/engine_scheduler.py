"""Common parts of the schedulers with which a replay follows the policies of vLLM and SGLang.

They differ from dcpbench's own scheduler (scheduler.py) in what all of them have in common:

- KV blocks are allocated for the tokens of the next chunk, not for a whole prompt, and no page is reserved for a
  running request.
- Chunks end anywhere, not at whole pages.
- A finished request keeps its place and its KV until the engine has read its last token (`handle_read`). An engine that
  decides one step ahead learns of it one decision later.

Only one attention replica is modelled. Steps are planned for replays alone, so they have no table of KV locations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import UsageError
from dcpbench.serving.requests import Chunk, ReplicaStep, Step
from dcpbench.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from dcpbench.serving.radix import Node
    from dcpbench.serving.requests import Sequence
    from dcpbench.serving.scheduler import SchedulerConfig


class EngineScheduler(Scheduler):
    """Scheduler of another engine; subclasses decide which requests get how many tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        if config.replicas != 1:
            raise UsageError(
                f"the policy {config.policy} is modelled for one attention replica, not for --dp {config.replicas}; use "
                "--dp 1, or --mode live."
            )
        super().__init__(config)
        self.replica = self.replicas[0]

    @property
    def unfinished(self) -> list[Sequence]:
        """Return all submitted and unfinished sequences, by order of submission."""
        return [sequence for sequence in super().unfinished if not sequence.is_finished]

    def handle_read(self, step: Step) -> None:
        """Free the finished requests of a step that has been read, and cache the answers of sessions that continue."""
        for sequence in step.finished:
            answer = sequence.request.answer
            if self.config.prefix_cache and answer is not None:
                self._share_prefix(sequence, np.concatenate((sequence.request.prompt, answer))[: sequence.computed])
            self._free_sequence(self.replica, sequence)
            self.replica.running.remove(sequence)

    def _complete_step(self, step: Step) -> Step | None:
        """Return the step with the requests that it finishes; None if it has no work."""
        todo = step.replicas[0]
        self.replica.moved = []
        if not todo.tokens:
            return None
        step.finished = [sequence for sequence in todo.sampled_sequences if sequence.is_finished]
        self.steps += 1
        return step

    def count_missing_pages(self, sequence: Sequence, tokens: int, cached: int = 0) -> int:
        """Return the number of pages to allocate before a sequence stores its first `tokens` tokens.

        `cached` is the number of pages in the prefix cache of a sequence that has no allocation.
        """
        held = cached if sequence.allocation is None else len(sequence.allocation.pages)
        return max(self.replica.allocator.count_pages(tokens) - held, 0)

    def find_prefix(self, sequence: Sequence) -> tuple[np.ndarray, Node]:
        """Return the cached pages of a sequence's prompt and their node; at least one token is left to compute."""
        return self._match_prefix(self.replica, sequence)

    def start_request(self, sequence: Sequence, pages: np.ndarray, node: Node, tokens: int) -> None:
        """Start a sequence with its cached prefix, and allocate its next `tokens` tokens."""
        replica, cached = self.replica, self.count_hits(sequence, pages)
        stored = max(cached + tokens, len(pages) * self.config.virtual_page + 1)
        replica.cache.lock(node)
        sequence.node = node
        replica.make_free_pages(self.count_missing_pages(sequence, stored, len(pages)))
        sequence.allocation = replica.allocator.allocate(stored, pages)
        sequence.computed = cached
        if not sequence.preemptions:
            sequence.cached = cached
        sequence.slot, sequence.replica = replica.slots.pop(), replica.number

    def extend_kv(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate the next `tokens` tokens of a running sequence; return False if the KV cache has too few pages."""
        replica, allocation = self.replica, sequence.allocation
        assert allocation is not None
        missing = self.count_missing_pages(sequence, sequence.computed + tokens)
        if missing > replica.available_pages:
            return False
        replica.make_free_pages(missing)
        if (more := sequence.computed + tokens - allocation.tokens) > 0:
            replica.allocator.extend(allocation, more)
        return True

    def release_request(self, sequence: Sequence) -> None:
        """Take the KV and the place of a sequence, which has to compute all its tokens again."""
        replica = self.replica
        replica.running.remove(sequence)
        replica.free_kv(sequence)
        replica.slots.append(sequence.slot)
        sequence.computed = 0
        sequence.preemptions += 1

    def add_tokens(self, todo: ReplicaStep, sequence: Sequence, tokens: int) -> None:
        """Add the next `tokens` tokens of a sequence to a step, as a decode row if it is the last known token alone."""
        start, stop = sequence.computed, sequence.computed + tokens
        samples = stop == sequence.target
        if tokens == 1 and samples and start:
            todo.decodes.append(sequence)
            todo.slots.append(sequence.slot)
            todo.positions.append(start)
        else:
            todo.chunks.append(Chunk(sequence, sequence.slot, start, stop, samples=samples))
        sequence.computed = stop
        sequence.generated += samples

    def cache_computed(self, sequence: Sequence) -> None:
        """Share the full blocks of the computed part of a prompt through the prefix cache."""
        allocation, page = sequence.allocation, self.config.virtual_page
        if not self.config.prefix_cache or allocation is None:
            return
        tokens = min(sequence.computed, sequence.prompt_tokens)
        if tokens // page > allocation.shared:
            self._share_prefix(sequence, sequence.request.prompt[:tokens])

    def _share_prefix(self, sequence: Sequence, tokens: np.ndarray) -> None:
        self._cache_prefix(self.replica, sequence, tokens)
        self.replica.moved = []
