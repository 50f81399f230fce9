"""The scheduling policy of SGLang with its default settings, for replays.

1. A step is either a prefill batch or a decode batch; a prefill batch comes first whenever a waiting request can be
   admitted or a prompt is unfinished (no `--enable-mixed-chunk`).
2. A prefill batch has `chunked_prefill_size` tokens. An unfinished prompt continues first; at most one is unfinished. Then
   waiting requests are admitted first come, first served. The last one is cut to what is left, in whole pages.
3. A request is admitted if its missing prompt tokens, all tokens that it may generate (at most 4,096) and a page fit into
   the free and evictable KV, less a reservation for running requests: `new_token_ratio` times the tokens that each of
   them may still generate. Once a request does not fit, none is tried until a decode step or, if it has been read, the
   prefill batch before has seen a request leave.
4. `new_token_ratio` begins at 0.7 and falls to 0.098 over 600 decode steps without retraction.
5. If a decode step finds too few pages, requests are retracted: those with the fewest generated tokens first, of these the
   one with the longest prompt. They go to the end of the queue and compute all their tokens again. The ratio is then set
   to (generated + 20 · requests) / (allowed + 1) over the requests that are left.

The radix cache holds a prompt once its last chunk has been read, an unfinished prompt from the next decision on, and an
answer after its request has finished. With the overlap schedule, step k + 1 is decided while step k runs. A request that
finishes in step k therefore has a row in step k + 1, and its token is discarded.

Sources, in github.com/sgl-project/sglang: python/sglang/srt/managers/schedule_policy.py (PrefillAdder, read at commit
00550cd1), and as of versions 0.4 to 0.5 scheduler.py, schedule_batch.py (retract_decode) and
scheduler_output_processor_mixin.py there, python/sglang/srt/environ.py and server_args.py (defaults).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.serving.engine_scheduler import EngineScheduler
from dcpbench.serving.requests import ReplicaStep, Step

if TYPE_CHECKING:
    from dcpbench.serving.requests import Sequence, ServeRequest
    from dcpbench.serving.scheduler import SchedulerConfig

TOKEN_BUDGET = 8192  # chunked_prefill_size on GPUs of 35 to 160 GB
MAX_REQUESTS = 2048  # the least that max_running_requests is set to by default
MAX_RESERVED_TOKENS = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
FIRST_RATIO, MIN_RATIO_FACTOR, DECAY_STEPS = 0.7, 0.14, 600  # SGLANG_INIT_NEW_TOKEN_RATIO and those named like it
RETRACT_STEPS = 20  # SGLANG_RETRACT_DECODE_STEPS


class SglangScheduler(EngineScheduler):
    """Scheduler with SGLang's policy, as the module describes it."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.unfinished_prompt: Sequence | None = None
        self.ratio = FIRST_RATIO  # new_token_ratio
        self.full = False  # whether a request did not fit since a request has left
        self.decoded = 0  # requests of the last decode batch
        self.unread = 0  # steps that have not been read

    def plan_step(self) -> Step | None:
        """Decide the next step; None if there is no work."""
        step = Step(self.steps, [ReplicaStep()])
        todo = step.replicas[0]
        self._add_prefills(step)
        if not todo.tokens:
            self._add_decodes(step)
        if not todo.tokens and not self.unread:  # the engine decides again at once, now that it knows who has left
            self.ratio = FIRST_RATIO
            self._add_prefills(step)
        self.unread += bool(todo.tokens)
        return self._complete_step(step)

    def handle_read(self, step: Step) -> None:
        """Cache the prompts that the step completed, then free the requests that it finished."""
        self.unread -= 1
        for chunk in step.replicas[0].chunks:
            if chunk.samples:
                self.cache_computed(chunk.sequence)
        if step.has_chunks and step.finished and not self.unread:
            self.full = False
        super().handle_read(step)

    @property
    def unfinished(self) -> list[Sequence]:
        """Return all submitted and unfinished sequences, by order of submission."""
        partial = [self.unfinished_prompt] if self.unfinished_prompt is not None else []
        return sorted([*super().unfinished, *partial], key=lambda s: s.order)

    def cancel(self) -> list[Sequence]:
        """End everything that has not finished; returns it."""
        if self.unfinished_prompt is not None:
            self.replica.running.append(self.unfinished_prompt)
            self.unfinished_prompt = None
        return super().cancel()

    def _explain_rejection(self, request: ServeRequest) -> str:
        capacity = (self.replica.allocator.pages - 1) * self.config.virtual_page
        most = request.prompt_tokens + min(request.output_tokens, MAX_RESERVED_TOKENS) + self.config.virtual_page
        if most >= capacity:
            return (
                f"request {request.number} needs {most:,} tokens of KV cache to be admitted by SGLang, and the server has "
                f"{capacity:,}"
            )
        return super()._explain_rejection(request)

    def _add_prefills(self, step: Step) -> None:
        """Add a prefill batch: the unfinished prompt, then waiting requests."""
        if self.unfinished_prompt is None and (self.full or not self.waiting):
            return
        batch = _PrefillBatch(self, step.replicas[0])
        if self.unfinished_prompt is not None:
            self.cache_computed(self.unfinished_prompt)
            self.unfinished_prompt = batch.continue_prompt(self.unfinished_prompt)
        while self.waiting and self.unfinished_prompt is None:
            if len(self.replica.running) >= self.config.max_requests:
                self.full = True
                return
            if not batch.admit(self.waiting[0]):
                return

    def _add_decodes(self, step: Step) -> None:
        """Add a decode batch of all running requests, retracting some if the KV cache has too few pages."""
        if len(self.replica.running) < self.decoded or not self.replica.running:
            self.full = False
        if self._count_decode_pages() > self.replica.available_pages:
            self._retract(step)
            self.full = False
        else:
            self.ratio = max(
                self.ratio - FIRST_RATIO * (1 - MIN_RATIO_FACTOR) / DECAY_STEPS, FIRST_RATIO * MIN_RATIO_FACTOR
            )
        self.decoded = len(self.replica.running)
        todo = step.replicas[0]
        for sequence in self.replica.running:
            if sequence.is_finished:  # its last token is being computed, which is not known yet
                todo.discarded.append(sequence.computed + 1)
                continue
            fits = self.extend_kv(sequence, 1)
            assert fits, "the pages of all decodes were counted"
            self.add_tokens(todo, sequence, 1)

    def _count_decode_pages(self) -> int:
        """Return the number of pages that the next decode batch allocates."""
        page = self.config.virtual_page
        return sum(1 for s in self.replica.running if not s.is_finished and s.computed % page == 0)

    def _retract(self, step: Step) -> None:
        """Retract requests until the next decode batch fits, or one request is left."""
        first = True
        while first or self._count_decode_pages() > self.replica.available_pages:
            able = [s for s in self.replica.running if not s.is_finished]
            if len(able) <= 1:
                break
            fewest = min(able, key=lambda s: (s.generated, -s.prompt_tokens))
            self.release_request(fewest)
            self.waiting.append(fewest)
            step.preempted += 1
            first = False
        left = self.replica.running
        generated, allowed = sum(s.generated for s in left), sum(s.output_tokens for s in left)
        self.ratio = min((generated + RETRACT_STEPS * len(left)) / (allowed + 1), 1.0)


class _PrefillBatch:
    """Budgets of a prefill batch while it is filled."""

    def __init__(self, scheduler: SglangScheduler, todo: ReplicaStep) -> None:
        self.scheduler, self.todo = scheduler, todo
        self.page = scheduler.config.virtual_page
        self.chunk = scheduler.config.chunk
        self.reserved = sum(_count_new_tokens(s) * scheduler.ratio for s in scheduler.replica.running)
        """Tokens that running requests may need, and those of requests of this batch that are not allocated."""

    def continue_prompt(self, sequence: Sequence) -> Sequence | None:
        """Add the next chunk of an unfinished prompt; return it unless it is the last one."""
        left = sequence.target - sequence.computed
        tokens = min(left, self.chunk)
        if not self.scheduler.extend_kv(sequence, tokens):
            return sequence
        return self._add(sequence, tokens)

    def admit(self, sequence: Sequence) -> bool:
        """Admit a waiting request with as many tokens as the batch takes; return False if nothing is left for others."""
        scheduler = self.scheduler
        pages, node = scheduler.find_prefix(sequence)
        left = sequence.target - len(pages) * self.page
        free = scheduler.replica.count_admission_pages(node) * self.page - self.reserved
        if left + _count_new_tokens(sequence) + self.page >= free:
            scheduler.full = True
            return False
        left = sequence.target - scheduler.count_hits(sequence, pages)
        tokens = left if _round_up(left, self.page) <= self.chunk else self.chunk // self.page * self.page
        if tokens <= 0:
            return False
        scheduler.waiting.popleft()
        scheduler.start_request(sequence, pages, node, tokens)
        scheduler.unfinished_prompt = self._add(sequence, tokens)
        return self.chunk > 0 and scheduler.unfinished_prompt is None

    def _add(self, sequence: Sequence, tokens: int) -> Sequence | None:
        """Charge tokens of a sequence; return it if its prompt is unfinished, else it joins the running requests."""
        allowed = _count_new_tokens(sequence)
        whole = tokens == sequence.target - sequence.computed
        self.scheduler.add_tokens(self.todo, sequence, tokens)
        self.chunk -= _round_up(tokens, self.page)
        self.reserved += self.page + (allowed if whole else 0)
        if not whole:
            return sequence
        self.scheduler.replica.running.append(sequence)
        return None


def _count_new_tokens(sequence: Sequence) -> int:
    """Return the number of tokens that SGLang expects a request to generate at most."""
    return min(max(sequence.output_tokens - sequence.generated, 0), MAX_RESERVED_TOKENS)


def _round_up(tokens: int, page: int) -> int:
    return -(-tokens // page) * page
