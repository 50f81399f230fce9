"""Continuous batching of one layout: which requests are prefilled, decoded or queued, in host-side integers.

Every rank runs the scheduler for all replicas and decides the same without communication, because no decision depends
on a clock, on a token's value or on an address. Replay runs it in virtual time.

A decision is final: `plan_step` counts its tokens as computed and as sampled, and frees the memory of finished
requests, because steps run in order on the device. So step k + 1 can be decided while step k runs.

The policy is first come, first served. A new request goes to the replica with the fewest requests among those with
enough free KV capacity; a later turn of a session goes to the replica of the earlier turns. If that one has too little
capacity, the turn waits there, and later arrivals for the same replica wait behind it. The required capacity is the
prompt plus one page for each request that runs there. When a running request finds no page for its next tokens, the
prefix cache first evicts unlocked pages; then the latest request loses its KV, waits in front of all others of its
replica, and recomputes prompt and generated tokens. The earliest request is never preempted by another, and fits alone
(`submit` rejects requests that do not), so every request finishes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.errors import UsageError
from dcpbench.points.names import MIXED, OWN_POLICIES
from dcpbench.serving.allocator import NO_PAGES, DcpAllocator
from dcpbench.serving.radix import PrefixCache
from dcpbench.serving.requests import Chunk, ReplicaStep, Sequence, ServeRequest, Step, TableWrite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.points.point import Point
    from dcpbench.points.speculation import Speculation
    from dcpbench.serving.radix import Node


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Engine parameters of a scheduler. Raise UsageError for a chunk that is too small."""

    replicas: int
    pages: int  # pages of each rank's KV pool, including the padding page
    page_size: int
    dcp: int
    interleave: int = 1
    max_requests: int  # slots of a replica
    chunk: int  # maximum prompt tokens per step of a replica; with vLLM's policy decodes count as well
    policy: str = MIXED
    prefix_cache: bool = True
    max_context: int  # tokens of a request that can be stored; all but the last one that is sampled are
    speculation: Speculation | None = None  # drafts of a step and their acceptance; None for steps of one token
    seed: int = 0  # seed of the draws of accepted drafts
    max_chunk: int = 0  # maximum prompt tokens of one request per step, with another engine's policy; 0: no limit

    @classmethod
    def from_point(cls, point: Point, *, pages: int, max_context: int) -> SchedulerConfig:
        """Return the configuration for a point with `pages` pages, both live and in replay."""
        load = point.load
        assert load is not None
        return cls(
            replicas=point.dp,
            pages=pages,
            page_size=point.page_size,
            dcp=point.dcp,
            interleave=point.interleave,
            max_requests=-(-point.max_requests // point.dp),
            chunk=load.chunk // point.dp,
            policy=load.policy,
            prefix_cache=bool(load.prefix_cache),
            max_context=max_context,
            speculation=point.speculation,
            seed=load.seed or 0,
        )

    def __post_init__(self) -> None:
        if self.policy in OWN_POLICIES and self.chunk < self.virtual_page:
            raise UsageError(
                f"--prefill chunk leaves {self.chunk} tokens per replica, fewer than the {self.virtual_page} of a page on all "
                f"dcp ranks; use --prefill chunk={self.virtual_page * self.replicas} or more, or a smaller --page-size."
            )

    @property
    def queries(self) -> int:
        """Return the rows of a running request in a step."""
        return 1 if self.speculation is None else self.speculation.query_length

    @property
    def virtual_page(self) -> int:
        """Return the tokens of a page on all dcp ranks; prompts are cut at multiples of it."""
        return self.page_size * self.dcp


class Replica:
    """An attention replica: its KV pages, slots and requests."""

    def __init__(self, number: int, config: SchedulerConfig) -> None:
        self.number = number
        self.allocator = DcpAllocator(config.pages, config.page_size, config.dcp, config.interleave)
        self.cache = PrefixCache(config.virtual_page)
        self.running: list[Sequence] = []  # running requests in order of submission
        self.preempted: list[Sequence] = []  # preempted requests in order of submission; they keep their slots
        self.slots = list(range(config.max_requests, 0, -1))  # free slots; slot 0 is padding
        self.moved: list[TableWrite] = []  # tokens that lie on the prefix cache's pages from the next step on

    @property
    def available_pages(self) -> int:
        """Return the number of pages that are free or can be evicted."""
        return self.allocator.free_pages + self.cache.evictable

    def count_admission_pages(self, node: Node) -> int:
        """Return the number of pages that a sequence with this cached prefix, which cannot be evicted for it, could allocate."""
        self.cache.lock(node)
        available = self.available_pages
        self.cache.unlock(node)
        return available

    def make_free_pages(self, pages: int) -> None:
        """Evict cached pages until `pages` pages are free or no page can be evicted."""
        missing = pages - self.allocator.free_pages
        if missing > 0:
            self.allocator.free_evicted(self.cache.evict_pages(missing))

    def free_kv(self, sequence: Sequence) -> None:
        """Take a sequence's KV."""
        assert sequence.allocation is not None
        self.allocator.free(sequence.allocation)
        sequence.allocation = None
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
            sequence.node = None


class Scheduler:
    """Scheduler of a deployment, as the module describes it."""

    decode_tokens = 1  # known tokens of a running sequence that are left to a decode row; the others are prefilled

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.replicas = [Replica(r, config) for r in range(config.replicas)]
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.homes: dict[int, int] = {}  # replica of each session, which holds its earlier turns
        self.steps = 0
        self._pages_of_step = self.replicas[0].allocator.count_pages(config.queries)
        self.orders = itertools.count()  # counter of submissions, shared by instances that serve together
        self.fixed_hits: Mapping[int, int] | None = None  # cached prompt tokens by number (replays of gain_split.py)

    @property
    def unfinished(self) -> list[Sequence]:
        """Return all submitted and unfinished sequences, by order of submission."""
        return sorted(
            [*self.waiting, *(s for r in self.replicas for s in (*r.running, *r.preempted))], key=lambda s: s.order
        )

    def submit(self, request: ServeRequest) -> str:
        """Queue a request; return the reason if it can never be served. Raise ValueError for one without tokens."""
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.number} has no prompt or no output")
        if reason := self._explain_rejection(request):
            return reason
        self.waiting.append(Sequence(request, next(self.orders)))
        return ""

    def plan_step(self) -> Step | None:
        """Decide the next step; None if there is no work."""
        step = Step(self.steps, [ReplicaStep(table=r.moved, queries=self.config.queries) for r in self.replicas])
        if self.config.policy == MIXED:
            self._add_decodes(step)
            self._add_prefills(step)
        else:
            self._add_prefills(step)
            if not step.has_chunks:
                self._add_decodes(step)
        if not any(r.tokens for r in step.replicas):
            return None
        self.steps += 1
        self._finish_step(step)
        return step

    def handle_read(self, step: Step) -> None:
        """Do nothing: finished requests have left when their last step was decided."""

    def cancel(self) -> list[Sequence]:
        """End everything that has not finished; returns it."""
        dropped = self.unfinished
        for replica in self.replicas:
            for sequence in (*replica.running, *replica.preempted):
                self._free_sequence(replica, sequence)
            replica.running, replica.preempted, replica.moved = [], [], []
        self.waiting.clear()
        return dropped

    def _explain_rejection(self, request: ServeRequest) -> str:
        config, one = self.config, self.replicas[0].allocator
        size = f"{request.prompt_tokens:,} prompt and {request.output_tokens:,} output tokens"
        most = (one.pages - 1) * one.virtual_page
        stored = request.kv_tokens + config.queries - 1  # with the drafts behind the last token
        if stored > most:
            return (
                f"request {request.number} has {size} and the KV cache of a replica holds {most:,} tokens; "
                "give more with --kv-memory or --dcp"
            )
        if stored > config.max_context:
            return f"request {request.number} has {size} and the engine was built for {config.max_context + 1:,} in all"
        return ""

    def _add_decodes(self, step: Step) -> None:
        """Add a token for every running sequence that has all known tokens but one stored."""
        for replica, todo in zip(self.replicas, step.replicas, strict=True):
            self._allocate_next_tokens(replica, todo, step)
            decodes = [s for s in replica.running if s.computed == s.prompt_tokens + s.generated - 1]
            todo.decodes = decodes
            todo.slots = [s.slot for s in decodes]
            todo.positions = [s.computed for s in decodes]
            if self.config.speculation is not None:
                self._verify_drafts(todo, self.config.speculation)
                continue
            for sequence in decodes:
                sequence.computed += 1
                sequence.generated += 1

    def _verify_drafts(self, todo: ReplicaStep, speculation: Speculation) -> None:
        """Count the accepted drafts of each decode, and its tokens, at most those that its answer still lacks.

        KV rows of rejected drafts lie behind the computed tokens, and the next step overwrites them.
        """
        for sequence in todo.decodes:
            accepted = speculation.count_accepted(self.config.seed, sequence.request.number, sequence.verified)
            delivered = min(accepted + 1, sequence.output_tokens - sequence.generated)
            todo.accepted.append(accepted)
            todo.delivered.append(delivered)
            sequence.verified += 1
            sequence.computed += delivered
            sequence.generated += delivered

    def _allocate_next_tokens(self, replica: Replica, todo: ReplicaStep, step: Step) -> None:
        """Allocate the next token of every decoding sequence, and its drafts, preempting the latest ones if necessary.

        A sequence in prefill has allocated pages, and its allocation has more tokens than are computed.
        """
        page, running = replica.allocator.virtual_page, replica.running
        if self.config.queries > 1:
            for sequence in [s for s in running if s.computed == s.target - 1]:
                if sequence.allocation is not None:  # else it was preempted
                    self._add_tokens(replica, sequence, todo, step)
            return
        growing = [s for s in running if s.allocation is not None and s.computed >= s.allocation.tokens]
        for sequence in [s for s in growing if s.computed % page == 0]:
            if sequence.allocation is not None:  # else it was preempted
                self._add_tokens(replica, sequence, todo, step)
        replica.allocator.fill([s.allocation for s in growing if s.computed % page and s.allocation is not None])

    def _add_tokens(self, replica: Replica, sequence: Sequence, todo: ReplicaStep, step: Step) -> None:
        """Allocate the rows of a sequence's next step, unless it is itself the latest one and has to be preempted."""
        allocator, allocation = replica.allocator, sequence.allocation
        assert allocation is not None
        held, stored = len(allocation.pages), sequence.computed + self.config.queries
        missing = allocator.count_pages(stored) - held
        replica.make_free_pages(missing)
        while allocator.free_pages < missing:
            latest = replica.running[-1]
            self._preempt_sequence(replica, latest)
            step.preempted += 1
            if latest is sequence:
                return
            replica.make_free_pages(missing)
        allocator.extend(allocation, max(stored - allocation.tokens, 0))
        if missing > 0:
            todo.table.append(self._make_table_write(sequence, held * allocator.virtual_page))

    def _preempt_sequence(self, replica: Replica, sequence: Sequence) -> None:
        replica.running.remove(sequence)
        replica.free_kv(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        replica.preempted.insert(0, sequence)

    def _add_prefills(self, step: Step) -> None:
        """Add chunks of prompts: first of running sequences, then of admitted ones."""
        budgets = [self.config.chunk] * len(self.replicas)
        for replica, todo in zip(self.replicas, step.replicas, strict=True):
            known = -self.decode_tokens
            for sequence in [s for s in replica.running if s.computed < s.prompt_tokens + s.generated + known]:
                budgets[replica.number] -= self._add_chunk(sequence, todo, budgets[replica.number])
            while replica.preempted and self._can_admit(replica, replica.preempted[0], budgets[replica.number]):
                sequence = replica.preempted.pop(0)
                budgets[replica.number] -= self._start_sequence(replica, sequence, todo, budgets[replica.number])
        kept: list[Sequence] = []
        taking = list(self.replicas)
        while self.waiting and taking:
            home = self._find_home(self.waiting[0])
            among = taking if home is None else [r for r in taking if r.number == home]
            best = self._choose_replica(self.waiting[0], budgets, among)
            if best is None and home is None:
                break
            sequence = self.waiting.popleft()
            if best is None:
                kept.append(sequence)
                taking = [r for r in taking if r.number != home]
                continue
            sequence.slot, sequence.replica = best.slots.pop(), best.number
            if sequence.request.session is not None:
                self.homes[sequence.request.session] = best.number
            budgets[best.number] -= self._start_sequence(
                best, sequence, step.replicas[best.number], budgets[best.number]
            )
        self.waiting.extendleft(reversed(kept))

    def _find_home(self, sequence: Sequence) -> int | None:
        """Return the replica of the session's earlier turns, or None."""
        return None if sequence.request.session is None else self.homes.get(sequence.request.session)

    def _choose_replica(self, sequence: Sequence, budgets: list[int], among: list[Replica]) -> Replica | None:
        """Return the replica with the fewest requests among those that can admit this one now; preempted ones have
        priority.
        """
        able = [r for r in among if r.slots and not r.preempted and self._can_admit(r, sequence, budgets[r.number])]
        return min(able, key=lambda r: (len(r.running), -r.available_pages, r.number), default=None)

    def _can_admit(self, replica: Replica, sequence: Sequence, budget: int) -> bool:
        """Return True if a sequence can be admitted: KV capacity for all tokens to prefill, and a sufficient token
        budget.
        """
        if budget < self.config.virtual_page:
            return False
        pages, node = self._match_prefix(replica, sequence)
        need = replica.allocator.count_pages(self._count_prompt_tokens(sequence)) - len(pages)
        return need + self._count_reserved_pages(replica) <= replica.count_admission_pages(node)

    def _count_prompt_tokens(self, sequence: Sequence) -> int:
        """Return the tokens with KV of a sequence that starts: the known ones and, behind them, those of the passes that draft."""
        return sequence.target + max(self.config.queries - 2, 0)

    def _count_reserved_pages(self, replica: Replica) -> int:
        """Return the number of pages that an admission leaves free: those of a step of each running sequence."""
        return len(replica.running) * self._pages_of_step

    def _match_prefix(self, replica: Replica, sequence: Sequence) -> tuple[np.ndarray, Node]:
        """Return the cached pages of its prompt and their node, such that at least one token is left to compute."""
        if not self.config.prefix_cache:
            return NO_PAGES, replica.cache.root
        most = min(sequence.request.prompt_tokens, sequence.target - 1)
        return replica.cache.match_prefix(sequence.request.prompt[:most])

    def count_hits(self, sequence: Sequence, pages: np.ndarray) -> int:
        """Return the tokens that a sequence starts with instead of computing them: those of its cached pages, or a fixed
        number unless it was preempted.
        """
        if self.fixed_hits is None or sequence.preemptions:
            return len(pages) * self.config.virtual_page
        return min(self.fixed_hits.get(sequence.request.number, 0), sequence.prompt_tokens, sequence.target - 1)

    def _start_sequence(self, replica: Replica, sequence: Sequence, todo: ReplicaStep, budget: int) -> int:
        """Start or restart a sequence, and return the tokens of its first chunk."""
        pages, node = self._match_prefix(replica, sequence)
        replica.cache.lock(node)
        sequence.node = node
        tokens = self._count_prompt_tokens(sequence)
        replica.make_free_pages(replica.allocator.count_pages(tokens) - len(pages))
        sequence.allocation = replica.allocator.allocate(tokens, pages)
        sequence.computed = self.count_hits(sequence, pages)
        if not sequence.preemptions:
            sequence.cached = sequence.computed
        replica.running.append(sequence)
        todo.table.append(self._make_table_write(sequence, 0))
        return self._add_chunk(sequence, todo, budget)

    def _add_chunk(self, sequence: Sequence, todo: ReplicaStep, budget: int) -> int:
        """Prefill as much of a sequence as the budget allows; return the number of tokens."""
        start, target, page = sequence.computed, sequence.target, self.config.virtual_page
        stop = target if target - start <= budget else start + budget // page * page
        if stop == start:
            return 0
        todo.chunks.append(Chunk(sequence, sequence.slot, start, stop, samples=stop == target))
        sequence.computed = stop
        sequence.generated += stop == target
        return stop - start

    def _make_table_write(self, sequence: Sequence, start: int) -> TableWrite:
        """Return the locations from token `start`, which begins a page, to the end of the last page."""
        assert sequence.allocation is not None
        page = self.config.virtual_page
        pages = sequence.allocation.pages[start // page :]
        locs = (pages[:, None] * page + np.arange(page, dtype=np.int32)).ravel()
        return TableWrite(sequence.slot, start, locs[: self.config.max_context - start])

    def _finish_step(self, step: Step) -> None:
        """Cache the prompts completed by this step and the answers of sessions that continue, then free finished
        requests.
        """
        for replica, todo in zip(self.replicas, step.replicas, strict=True):
            replica.moved = []
            emits = todo.sampled_sequences
            done = [s for s in emits if s.generated == s.output_tokens]
            if self.config.prefix_cache:
                self._cache_all(replica, emits)
            for sequence in done:
                self._free_sequence(replica, sequence)
            if done:
                replica.running = [s for s in replica.running if not s.is_finished]
            step.finished += done

    def _cache_all(self, replica: Replica, emits: list[Sequence]) -> None:
        """Cache the prompts of these sequences, and the answers of finished turns of sessions that continue."""
        page = self.config.virtual_page
        # Most sequences are cached already and not finished. Reading their prompts would take most of the time of a step.
        for sequence in [
            s
            for s in emits
            if s.generated == s.output_tokens or s.allocation is None or s.allocation.shared != s.prompt_tokens // page
        ]:
            self._cache_prefix(replica, sequence, sequence.request.prompt)
            if sequence.generated == sequence.output_tokens and sequence.request.answer is not None:
                tokens = np.concatenate((sequence.request.prompt, sequence.request.answer))
                self._cache_prefix(replica, sequence, tokens[: sequence.computed])

    def _cache_prefix(self, replica: Replica, sequence: Sequence, tokens: np.ndarray) -> None:
        """Share the full pages of its first tokens through the prefix cache, once; use the cache's pages if they were
        cached meanwhile.

        This is not limited to a prompt's last chunk: if chunks leave a single token, it is computed as a decode row.
        """
        allocation, old = sequence.allocation, sequence.node
        assert allocation is not None
        page = self.config.virtual_page
        full = len(tokens) // page
        if allocation.shared == full:
            return
        assert old is not None
        ours = allocation.pages[:full].copy()
        pages, node = replica.cache.insert(tokens[: full * page], ours)
        replica.cache.lock(node)
        replica.cache.unlock(old)
        sequence.node = node
        replica.allocator.share_pages(allocation, pages)
        if (pages != ours).any():
            replica.moved.append(self._make_table_write(sequence, 0))

    def _free_sequence(self, replica: Replica, sequence: Sequence) -> None:
        if sequence.allocation is not None:
            replica.free_kv(sequence)
        replica.slots.append(sequence.slot)
