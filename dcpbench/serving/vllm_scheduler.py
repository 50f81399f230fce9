"""The scheduling policy of vLLM's V1 engine with its default settings, for replays.

Each step has a budget of tokens (`max_num_batched_tokens`) that decodes and chunks of prompts share:

1. Running requests come first, in the order in which they were admitted. Each gets its missing tokens: one if it decodes,
   the rest of its prompt if not, at most `long_prefill_token_threshold` (off by default) and what is left of the budget.
2. Blocks are allocated for these tokens alone. If there are too few, the request that was admitted last loses its KV and
   goes to the head of the queue, until the blocks suffice or the request itself is the last one.
3. Unless a request was preempted in this step, waiting requests are admitted first come, first served, while the budget
   and `max_num_seqs` allow it, and only if the blocks for all known tokens of the request are free
   (`scheduler_reserve_full_isl`). The first that does not fit ends the step.

A prefix is found in blocks of `block_size` × dcp tokens, at most to the last token but one; blocks are cached as soon as
they are scheduled. With asynchronous scheduling, step k + 1 is decided while step k runs, so a finished request holds its
place and its blocks for one more decision, without a row in it.

Sources, in github.com/vllm-project/vllm: vllm/v1/core/sched/scheduler.py (read at commit 00024d31),
vllm/v1/core/kv_cache_manager.py (`full_sequence_must_fit`, since 0.19), vllm/v1/engine/core.py (step_with_batch_queue),
vllm/engine/arg_utils.py (get_batch_defaults).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.serving.engine_scheduler import EngineScheduler
from dcpbench.serving.requests import ReplicaStep, Step

if TYPE_CHECKING:
    from dcpbench.serving.requests import Sequence

TOKEN_BUDGET = 8192  # max_num_batched_tokens of a server on GPUs with 70 GiB or more, except A100
MAX_REQUESTS = 1024  # max_num_seqs of such a server


class VllmScheduler(EngineScheduler):
    """Scheduler with vLLM's policy, as the module describes it."""

    def plan_step(self) -> Step | None:
        """Decide the next step; None if there is no work."""
        step = Step(self.steps, [ReplicaStep()])
        budget = self._add_running(step)
        if not step.preempted:
            self._add_waiting(step, budget)
        elif not step.replicas[0].tokens:
            self._add_waiting(step, budget)  # the only request preempted itself: the engine's next decision, at once
        return self._complete_step(step)

    def _add_running(self, step: Step) -> int:
        """Add the tokens of running requests; return the rest of the budget."""
        budget, running = self.config.chunk, self.replica.running
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            index += 1
            if sequence.is_finished:  # its last token is being computed
                continue
            tokens = self._limit_tokens(sequence.target - sequence.computed, budget)
            if not self._extend_by_preemption(sequence, tokens, step):
                break
            self.add_tokens(step.replicas[0], sequence, tokens)
            self.cache_computed(sequence)
            budget -= tokens
        return budget

    def _extend_by_preemption(self, sequence: Sequence, tokens: int, step: Step) -> bool:
        """Allocate tokens, preempting the requests that were admitted last; return False if it is itself preempted."""
        while not self.extend_kv(sequence, tokens):
            latest = next(one for one in reversed(self.replica.running) if not one.is_finished)
            self.release_request(latest)
            self.waiting.appendleft(latest)
            step.preempted += 1
            if latest is sequence:
                return False
        return True

    def _add_waiting(self, step: Step, budget: int) -> None:
        """Admit waiting requests until one does not fit."""
        replica = self.replica
        while self.waiting and budget and len(replica.running) < self.config.max_requests:
            sequence = self.waiting[0]
            pages, node = self.find_prefix(sequence)
            missing = self.count_missing_pages(sequence, sequence.target, len(pages))
            if missing > replica.count_admission_pages(node):
                return
            tokens = self._limit_tokens(sequence.target - self.count_hits(sequence, pages), budget)
            self.waiting.popleft()
            self.start_request(sequence, pages, node, tokens)
            replica.running.append(sequence)
            self.add_tokens(step.replicas[0], sequence, tokens)
            self.cache_computed(sequence)
            budget -= tokens

    def _limit_tokens(self, tokens: int, budget: int) -> int:
        return min(tokens, budget, self.config.max_chunk or tokens)
