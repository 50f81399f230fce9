"""Select the cases to measure, as few as suffice to predict every step of given loads, and make their steps.

Device time is expensive. Lines in KV tokens and in pairs need two points each; sizes must be as dense as the curve
bends between them. docs/replay.md derives the counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dcpbench.errors import UsageError
from dcpbench.points.batches import (
    GRAPH_BATCHES,
    PADDING_POSITION,
    PADDING_SLOT,
    compute_batch_rows,
    compute_chunk_rows,
    list_chunk_rows,
)
from dcpbench.points.names import CLOSED
from dcpbench.serving.load_words import FIXED, TRACE_LENGTHS, parse_lengths
from dcpbench.serving.requests import Chunk, ReplicaStep, Sequence, ServeRequest, Step, TableWrite
from dcpbench.serving.step_times import CHECK, GATHER, HOT, LINE, UNEVEN, Case, Chunks, Decodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Sequence as SequenceOf

    from dcpbench.points.point import Point
    from dcpbench.serving.scheduler import SchedulerConfig

NEAR_TOP, GROWTH, FAR_GROWTH = 4, 1.19, 1.5
"""Neighbouring numbers of decode rows differ by GROWTH at least, and by FAR_GROWTH below a NEAR_TOP-th of the most:
clients that wait for answers leave those to a run's beginning and end. In an open loop they are as usual as others."""
CHUNK_TOKENS = (16, 48, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # bends: experts hit, then large products
BETWEEN_TOKENS = (256, 544, 768, 1536, 3072, 6144)  # bends without a prefix; past 512 products need a fifth tile (jump)
FEW_TOKENS = 128  # below, chunks have no shortest prefix measured: hardly any are so short but at the end of a prompt
SHORT_CHUNKS = 8  # chunks of a step with short prompts
ATTENTION_SHOWS = 2048  # number of tokens from which their division into prompts is measured
MANY_PREFIX = 8192  # stored tokens before each of many chunks: more would only take more time
LATE = 4  # a late chunk has at most 1 / LATE of its long prompt's tokens, so that it attends mostly to earlier ones
MIXED_TOKENS = (128, 512, 2048)  # tokens of chunks next to which decode rows are measured, or the next smaller size
HOT_TOKENS = 512  # chunks of fewer tokens are not measured hot: they read weights as decodes do
TRAIN = 12  # number of decode steps after chunks, each of which is measured
KEPT = 8  # chunks of mixed cases take at most 1 / KEPT of the KV cache, as requests may hold nearly all of it
SAME = 0.1  # relative distance within which a prompt uses a measured size
OUTPUT_TOKENS = 2  # output tokens of the requests, which never finish, so that no step samples a last token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """Maximum size of the steps of one replica."""

    requests: int
    context: int  # tokens of a request
    pages: int  # KV pages without the padding page; a virtual page spans all dcp ranks
    virtual_page: int
    chunk: int  # prompt tokens of a step
    replicas: int = 1  # attention replicas
    targets: tuple[int, ...] = ()  # requests that closed loops keep in flight on a replica: the usual row counts
    open_loop: bool = False  # True if a load has no fixed number of requests in flight
    prompts: tuple[int, ...] = ()  # lengths that all prompts of a load have
    shared: bool = False  # True if prompts share prefixes, so that requests attend to more tokens than fit the cache
    changes: tuple[int, ...] = ()  # most rows of a step with chunks for which the same kernels run; one more is a jump

    @property
    def max_running(self) -> int:
        """Return the number of requests that can run at the same time: each has at least one page."""
        return min(self.requests, self.pages)

    @classmethod
    def from_points(
        cls, points: Iterable[Point], *, pages: int, max_context: int, changes: Iterable[int] = ()
    ) -> Extent:
        """Return the extent of all points of one engine path, with `pages` in each rank's pool, including the padding
        page.
        """
        points = list(points)
        one = points[0]
        loads = [p.load for p in points if p.load is not None]
        lengths = (parse_lengths("input", x.input_tokens) for x in loads if x.input_tokens != TRACE_LENGTHS)
        closed = [p for p in points if p.load is not None and p.load.arrival == CLOSED]
        return cls(
            requests=max(-(-p.max_requests // p.dp) for p in points),
            targets=tuple(sorted({-(-p.max_requests // p.dp) for p in closed})),
            open_loop=len(closed) < len(points),
            context=min(max(p.context for p in points), max_context),
            pages=pages - 1,
            virtual_page=one.page_size * one.dcp,
            chunk=max(x.chunk for x in loads) // one.dp,
            replicas=one.dp,
            prompts=tuple(sorted({x.low for x in lengths if x.kind == FIXED})),
            shared=any(x.prefix_cache and (x.prefix_share or x.trace or x.sessions) for x in loads),
            changes=tuple(sorted(set(changes))),
        )

    def supports_case(self, case: Case) -> bool:
        """Return True if slots, pages, context and chunk suffice for a case."""
        lengths = [(d.requests, d.context) for d in case.decodes]
        lengths += [(c.chunks, c.prefix + c.tokens) for c in case.chunks]
        pages = sum(count * -(-tokens // self.virtual_page) for count, tokens in lengths)
        return (
            case.requests <= self.max_running
            and (pages <= self.pages or self.shared)
            and max(tokens for _, tokens in lengths) <= self.context
            and sum(c.chunks * c.tokens for c in case.chunks) <= self.chunk
        )

    def compute_max_context(self, requests: int, pages_taken: int = 0) -> int:
        """Return the maximum tokens of each of `requests` requests at once, without sharing; 0 if they do not fit."""
        return min(self.context, (self.pages - pages_taken) // requests * self.virtual_page)

    def compute_max_prefix(self, chunks: int, tokens: int) -> int:
        """Return the maximum stored tokens before each of `chunks` chunks, which begin with a page; negative if they do
        not fit.
        """
        available, page = self.context - tokens, self.virtual_page
        if not self.shared:
            available = min(available, (self.pages // chunks - -(-tokens // page)) * page)
        return available // page * page

    def compute_min_chunks(self, tokens: int) -> int | None:
        """Return the minimum number of chunks of a step of `tokens` prompt tokens; None if there can be no such step."""
        each = ((n, min(self.context, self.pages // n * self.virtual_page)) for n in range(1, self.max_running + 1))
        return next((n for n, most in each if n * most >= tokens), None)

    def compute_late_chunks(self, tokens: int) -> int | None:
        """Return the number of chunks with which they attend to most tokens: many, so that each contains little of its
        prompt, if KV allows it. None if no chunk can have a prefix.
        """
        fewest = self.compute_min_chunks(tokens) or 1
        several = range(fewest, max(fewest, min(-(-LATE * tokens // self.context), self.max_running)) + 1)
        able = [n for n in several if self.compute_max_prefix(n, -(-tokens // n)) > 0]
        return max(able, key=lambda n: self.compute_max_prefix(n, -(-tokens // n)) + tokens / n / 2, default=None)


def make_cases(extent: Extent) -> list[Case]:
    """Return the cases, cheapest kind first. Raise UsageError if the KV cache has no page."""
    if extent.pages < 1:
        raise UsageError("a KV cache without a page is too small to measure any step; give more with --kv-memory.")
    sizes, plain = select_chunk_sizes(extent), select_chunk_sizes(dataclasses.replace(extent, changes=()))
    kinds = (
        _iter_decode_cases(extent),
        _iter_prefill_cases(extent, sizes),
        _iter_uneven_cases(extent, plain),
        _iter_mixed_cases(extent, plain),
    )
    wanted = dict.fromkeys(itertools.chain(*kinds, _iter_check_cases(extent, plain)))
    return [case for case in wanted if extent.supports_case(case)]


def select_row_sizes(requests: int, targets: Iterable[int] = (), *, open_loop: bool = False) -> list[int]:
    """Return the padded sizes to measure for up to `requests` decode rows, of captured graphs and of larger eager
    steps.
    """
    wanted = {compute_batch_rows(min(n, requests)) for n in targets}
    graphs = [s for s in GRAPH_BATCHES if s <= compute_batch_rows(requests)]
    eager = sorted({compute_batch_rows(n) for n in range(GRAPH_BATCHES[-1] + 1, requests + 1)})
    far = GROWTH if open_loop else FAR_GROWTH
    return [size for kind in (graphs, eager) for size in select_sizes(kind, wanted, far)]


def select_chunk_sizes(extent: Extent) -> list[int]:
    """Return the tokens of steps with only chunks, up to the most that requests and KV allow."""
    able = (n * min(extent.context, extent.pages // n * extent.virtual_page) for n in range(1, extent.max_running + 1))
    top = min(extent.chunk, max(able))
    sizes = [s for s in sorted(CHUNK_TOKENS + BETWEEN_TOKENS) if s < top] + [top]
    own = [p for p in extent.prompts if p < top and all(abs(p - s) > SAME * s for s in sizes)]
    return sorted({*sizes, *own, *(s for s in _iter_change_sizes(extent.changes) if s < top)})


def _iter_change_sizes(changes: Iterable[int]) -> Iterator[int]:
    """Yield the padded rows on both sides of each change."""
    for rows in changes:
        yield from [size for size in list_chunk_rows(rows) if size <= rows][-1:]
        yield compute_chunk_rows(rows + 1)


def select_sizes(sizes: SequenceOf[int], wanted: Iterable[int], far: float) -> list[int]:
    """Return sizes from the largest down, each smaller by a factor, with the smallest and the wanted ones."""
    kept: list[int] = []
    for size in reversed(sizes):
        factor = GROWTH if size * NEAR_TOP >= sizes[-1] else far
        if not kept or size * factor <= kept[-1] or size == sizes[0] or size in wanted:
            kept.append(size)
    return kept[::-1]


def _iter_decode_cases(extent: Extent) -> Iterator[Case]:
    """Yield for each size the fewest and the most KV tokens, for the largest size also a value between."""
    sizes = select_row_sizes(extent.max_running, extent.targets, open_loop=extent.open_loop)
    for size in sizes:
        requests = min(size, extent.max_running)
        for context in _select_contexts(extent, requests, middle=size == sizes[-1]):
            yield Case(decodes=(Decodes(requests, context),))


def _select_contexts(extent: Extent, requests: int, pages_taken: int = 0, *, middle: bool = False) -> list[int]:
    """Return few and most KV tokens that each of `requests` requests attends to."""
    most = extent.compute_max_context(requests, pages_taken)
    if most < 1:
        return []
    found = {min(extent.virtual_page, most), most} | ({extent.context} if extent.shared else set())
    return sorted(found | ({(min(found) + most) // 2} if middle else set()))


def _iter_prefill_cases(extent: Extent, sizes: SequenceOf[int]) -> Iterator[Case]:
    """Yield for each size prompts without a prefix, with the shortest prefix, and at the end of long prompts; where
    attention dominates, also several short prompts.

    From no prefix to the shortest one, additional work begins, which is independent of its length.
    """
    once = _find_largest_size(ATTENTION_SHOWS, sizes)
    between = {*BETWEEN_TOKENS, *_iter_change_sizes(extent.changes)} - {*CHUNK_TOKENS, *extent.prompts}
    for size in sizes:
        fewest = extent.compute_min_chunks(size) or 1
        if size >= once:
            yield from _iter_chunk_cases(extent, size, max(fewest, min(SHORT_CHUNKS, extent.max_running, size)))
        yield from _iter_chunk_cases(extent, size, fewest)
        if size in between and size != sizes[-1]:
            continue
        if size >= FEW_TOKENS or size == once:
            yield from _iter_chunk_cases(extent, size, fewest, prefix=extent.virtual_page)
        if late := extent.compute_late_chunks(size):
            yield from _iter_chunk_cases(extent, size, late, prefix=extent.context)
    many = min(SHORT_CHUNKS, extent.max_running, once)
    if many > max(extent.compute_min_chunks(once) or 1, extent.compute_late_chunks(once) or 1):
        yield from _iter_chunk_cases(extent, once, many, prefix=MANY_PREFIX, use=GATHER)


def _iter_chunk_cases(extent: Extent, size: int, chunks: int, *, prefix: int = 0, use: str = LINE) -> Iterator[Case]:
    """Yield a case of `chunks` chunks with that prefix in whole pages, or the longest possible one, if it fits."""
    page = extent.virtual_page
    longest = extent.compute_max_prefix(chunks, -(-size // chunks)) if prefix else 0
    if not prefix or longest > 0:
        yield Case(chunks=_split_evenly(size, chunks, min(max(prefix // page, 1) * page, longest)), use=use)


def _iter_uneven_cases(extent: Extent, sizes: SequenceOf[int]) -> Iterator[Case]:
    """Yield cases in which one of several replicas has prompts without a prefix: they measure the saving of the others'
    padding.

    The largest size is included, because the saving beyond it is unknown.
    """
    between = {*BETWEEN_TOKENS} - {*extent.prompts, sizes[-1]}
    for size in sizes if extent.replicas > 1 else ():
        if size not in between:
            yield Case(chunks=_split_evenly(size, extent.compute_min_chunks(size) or 1), use=UNEVEN, replicas=1)


def _iter_mixed_cases(extent: Extent, sizes: SequenceOf[int]) -> Iterator[Case]:
    """Yield decode rows next to a chunk that leaves them most of the cache and all other slots."""
    largest = min(max(extent.pages // KEPT, 1) * extent.virtual_page, extent.context)
    for size in sorted({_find_largest_size(min(tokens, largest), sizes) for tokens in MIXED_TOKENS}):
        chunks = _split_evenly(size, extent.compute_min_chunks(size) or 1)
        taken = sum(c.chunks * -(-c.tokens // extent.virtual_page) for c in chunks)
        available = min(extent.max_running - sum(c.chunks for c in chunks), extent.pages - taken)
        if available < 1:
            continue
        between = max((n for n in GRAPH_BATCHES if n <= available / 3), default=1)
        for requests in sorted({1, between, available}):
            for context in _select_contexts(extent, requests, taken):
                yield Case(decodes=(Decodes(requests, context),), chunks=chunks)


def _iter_check_cases(extent: Extent, sizes: SequenceOf[int]) -> Iterator[Case]:
    """Yield cases that check the assumptions of the prediction: uneven requests, sizes and prefixes between the
    measured ones, and replicas of which some have prompts.
    """
    some, size = extent.replicas // 2, _find_largest_size(1024, sizes)
    if some > 1:
        yield Case(chunks=_split_evenly(size, extent.compute_min_chunks(size) or 1), use=CHECK, replicas=some)
    half = extent.max_running // 2
    most = extent.compute_max_context(max(2 * half, 1))
    if half and most > 8:  # noqa: PLR2004 - something to divide unevenly
        yield Case(decodes=(Decodes(half, most), Decodes(half, most // 8)), use=CHECK)
        prefix = extent.compute_max_prefix(1, size) // 2 // extent.virtual_page * extent.virtual_page
        if prefix > 0:
            yield Case(chunks=_split_evenly(size - size // 4, 1, prefix), use=CHECK)
            yield Case(
                decodes=(Decodes(half, most // 4),), chunks=_split_evenly(size - size // 4, 1, prefix), use=CHECK
            )


@dataclasses.dataclass(frozen=True)
class HotRun:
    """A case that is measured after chunks."""

    case: Case
    before: Case  # the chunks, again and again until the device has settled
    times: int = 1  # number of consecutive steps of the case; their decay determines how fast the slowdown by heat ends

    @property
    def cases(self) -> list[Case]:
        """Return a case for each of the steps."""
        return [msgspec.structs.replace(self.case, since=n) for n in range(self.times)]


def make_hot_runs(extent: Extent, largest: Case) -> list[HotRun]:
    """Return few, some and most decode rows and three sizes of chunks after `largest`, and the fewest rows after
    smaller chunks.
    """
    rows = select_row_sizes(extent.max_running, extent.targets, open_loop=extent.open_loop)
    wanted = []
    for size in (rows[0], rows[len(rows) // 2], rows[-1]):
        requests = min(size, extent.max_running)
        wanted += [Case(decodes=(Decodes(requests, c),), use=HOT) for c in _select_contexts(extent, requests)[-1:]]
    decodes = [case for case in dict.fromkeys(wanted) if extent.supports_case(case)]
    most = largest.compute_work().tokens
    sizes = [size for size in select_chunk_sizes(extent) if size <= most]
    few = _find_largest_size(HOT_TOKENS, sizes)
    tried = (_find_largest_size(FEW_TOKENS, sizes), few, _find_largest_size(int(math.sqrt(few * most)), sizes))
    smaller = {
        size: case
        for size in tried
        for case in _iter_chunk_cases(extent, size, extent.compute_min_chunks(size) or 1)
        if size < most
    }
    chunks = [*(case for size, case in smaller.items() if size >= few), largest]
    trains = decodes[:-1] or decodes
    found = [HotRun(case, largest, times=TRAIN if case in trains else 1) for case in decodes]
    found += [HotRun(msgspec.structs.replace(case, use=HOT), largest) for case in chunks]
    for before in smaller.values():
        found += [HotRun(msgspec.structs.replace(case, after=before.chunks), before) for case in decodes[:1]]
    return found


def find_fullest(cases: Iterable[Case]) -> Case:
    """Return the chunks without a prefix that have most tokens, among cases of a grid."""
    return max(filter(is_bare, cases), key=lambda case: case.compute_work().tokens)


def is_bare(case: Case) -> bool:
    """Return True if a case has only chunks, on all replicas, without a prefix."""
    return bool(case.chunks) and not case.decodes and not case.replicas and not case.compute_work().prefix


def _split_evenly(tokens: int, chunks: int, prefix: int = 0) -> tuple[Chunks, ...]:
    """Return `chunks` chunks that have `tokens` together and differ by at most one."""
    small, more = divmod(tokens, chunks)
    parts = Chunks(more, small + 1, prefix), Chunks(chunks - more, small, prefix)
    return tuple(part for part in parts if part.chunks)


def _find_largest_size(tokens: int, sizes: SequenceOf[int]) -> int:
    return max((s for s in sizes if s <= tokens), default=sizes[0])


@dataclasses.dataclass(frozen=True)
class CaseSteps:
    """Steps of one case. Both do the same work; it can be repeated as often as one likes, as no position moves."""

    first: Step  # first step, which writes its requests' token locations
    again: Step


class CaseMaker:
    """Makes the same steps on every rank. Each case begins with an empty cache."""

    def __init__(self, config: SchedulerConfig, vocab: int) -> None:
        self.config = config
        generator = np.random.Generator(np.random.PCG64(0))
        self.prompt = generator.integers(0, vocab, config.max_context, dtype=np.int32)
        self.next_page = 0
        self.numbers = itertools.count(-1, -1)  # negative numbers, as no request of a load has

    def make_steps(self, case: Case) -> CaseSteps:
        """Return the steps of a case, identical on all replicas that have work."""
        self.next_page, queries = 0, self.config.queries
        todo, writes = ReplicaStep(queries=queries), []
        slots = itertools.count(1)
        for decodes in case.decodes:
            for _ in range(decodes.requests):
                sequence = self._make_sequence(next(slots), decodes.context)
                stored = max(decodes.context, queries)
                writes.append(self._make_table_write(sequence, stored))
                sequence.computed = decodes.context
                todo.decodes.append(sequence)
                todo.slots.append(sequence.slot)
                todo.positions.append(stored - queries)
        for chunks in case.chunks:
            for _ in range(chunks.chunks):
                stop = chunks.prefix + chunks.tokens
                sequence = self._make_sequence(next(slots), stop)
                writes.append(self._make_table_write(sequence, stop))
                todo.chunks.append(Chunk(sequence, sequence.slot, chunks.prefix, stop, samples=True))
        first = dataclasses.replace(todo, table=writes)
        return CaseSteps(self._make_step(first, case.replicas), self._make_step(todo, case.replicas))

    def make_padding_step(self, rows: int) -> Step:
        """Return a decode step of `rows` padding rows."""
        sequences = [self._make_sequence(PADDING_SLOT, 1) for _ in range(rows)]
        return self._make_step(
            ReplicaStep(
                decodes=sequences,
                slots=[PADDING_SLOT] * rows,
                positions=[PADDING_POSITION] * rows,
                queries=self.config.queries,
            )
        )

    def _make_sequence(self, slot: int, tokens: int) -> Sequence:
        number = next(self.numbers)
        request = ServeRequest(number=number, prompt=self.prompt[:tokens], output_tokens=OUTPUT_TOKENS)
        return Sequence(request, -number, replica=0, slot=slot)

    def _make_table_write(self, sequence: Sequence, tokens: int) -> TableWrite:
        """Return a write of the pool's pages in turn, without the padding page, reusing pages after the last one."""
        config, page = self.config, self.config.virtual_page
        pages = np.arange(self.next_page, self.next_page - (-tokens // page)) % (config.pages - 1) + 1
        self.next_page += len(pages)
        locs = (pages[:, None] * page + np.arange(page)).ravel()[:tokens]
        return TableWrite(sequence.slot, 0, locs.astype(np.int32))

    def _make_step(self, todo: ReplicaStep, replicas: int = 0) -> Step:
        busy = replicas or self.config.replicas
        return Step(0, [todo] * busy + [ReplicaStep()] * (self.config.replicas - busy))
