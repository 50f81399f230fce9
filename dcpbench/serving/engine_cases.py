"""Select the steps of another engine's server to measure for given loads. No torch.

They are the kinds of cases of step_cases.py that requests to a server can produce, and few enough for about 3 minutes with
prompts of 16,000 tokens and up to 32 requests. docs/replay.md lists them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from dcpbench.points.batches import GRAPH_BATCHES, pad_to_size
from dcpbench.points.names import CLOSED, SGLANG
from dcpbench.serving.step_cases import GROWTH, Extent, select_chunk_sizes, select_row_sizes, select_sizes
from dcpbench.serving.step_times import CHECK, UNALIGNED, Case, Chunks, Decodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dcpbench.points.point import Point
    from dcpbench.serving.step_times import EngineServer

FEW_CONTEXT = 256  # KV tokens of a request in the cases with few
SEVERAL, SEVERAL_FROM = 8, 2048  # prompts that share a step, and tokens of a step from which that is measured
PREFIX_SIZES = (1024, 4096)  # chunks measured behind a prefix, in addition to the longest possible one
SHORT_PREFIX = 512  # tokens of the prefix that shows what attending to any prefix costs; at most a quarter of a step
MIXED_SIZES = (512, 2048)  # tokens of steps with decodes and a chunk that are measured, in addition to the maximum
ROW_MULTIPLES = (1, 2, 4, 8)  # numbers of which the tokens of a step with prompts may have to be a multiple to be fast
ALIGNED = 2 * ROW_MULTIPLES[-1]  # measured numbers of tokens are multiples of it
WIDE = 1.5  # ratio of the most to the fewest rows of a graph from which both are measured
UNALIGNED_FROM = 512  # tokens of a step from which it is measured how much longer other numbers take


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineExtent:
    """Maximum size of the steps of another engine's server for given loads."""

    engine: EngineServer
    requests: int  # maximum number of running requests
    context: int  # maximum number of tokens of a request
    targets: tuple[int, ...] = ()  # requests that closed loops keep in flight
    open_loop: bool = False

    @classmethod
    def from_points(cls, points: Iterable[Point], engine: EngineServer) -> EngineExtent:
        """Return the extent of all points that one server serves."""
        points = list(points)
        closed = [p for p in points if p.load is not None and p.load.arrival == CLOSED]
        return cls(
            engine=engine,
            requests=min(max(p.max_requests for p in points), engine.max_requests),
            context=max(p.context for p in points),
            targets=tuple(sorted({min(p.max_requests, engine.max_requests) for p in closed})),
            open_loop=len(closed) < len(points),
        )

    def compute_max_context(self, requests: int) -> int:
        """Return the maximum number of tokens of each of `requests` requests at once."""
        kv_tokens = self.engine.kv_tokens
        return self.context if kv_tokens is None else min(self.context, kv_tokens // requests)

    def compute_max_prefix(self, tokens: int) -> int:
        """Return the prefix, in whole steps of prompts, from which a chunk of `tokens` reaches the end of the longest request.

        It is a step shorter where the server takes no request of that length.
        """
        budget, longest = self.engine.token_budget, self.engine.max_model_len
        steps = max(-(-(self.context - tokens) // budget), 1)
        while steps > 1 and longest is not None and steps * budget + tokens >= longest:
            steps -= 1
        return steps * budget

    @property
    def takes_three_steps(self) -> bool:
        """Return True if the server takes a prompt of three steps, behind which chunks with a short prefix are timed."""
        longest = self.engine.max_model_len
        return longest is None or 3 * self.engine.token_budget < longest

    @property
    def mixes(self) -> bool:
        """Return True if decodes and chunks share steps."""
        return self.engine.policy != SGLANG


def make_row_cases(extent: EngineExtent) -> list[tuple[int, Case]]:
    """Return (multiple, case) for each of ROW_MULTIPLES: a prompt whose length is a multiple of it, and of no larger one."""
    size = _align(extent.engine.token_budget)
    return [(multiple, Case(chunks=(Chunks(1, size - multiple, 0),))) for multiple in ROW_MULTIPLES if multiple < size]


def make_whole_case(extent: EngineExtent) -> Case:
    """Return the case of the longest prompt that takes one step, with which those of make_row_cases are compared."""
    return Case(chunks=(Chunks(1, _align(extent.engine.token_budget), 0),))


def make_engine_cases(extent: EngineExtent) -> list[Case]:
    """Return the cases to measure, the quickest kind first."""
    kinds = (_iter_chunk_cases(extent), _iter_decode_cases(extent), _iter_mixed_cases(extent))
    return list(dict.fromkeys(case for kind in kinds for case in kind))


def make_unaligned_cases(extent: EngineExtent) -> list[Case]:
    """Return the cases that measure how much longer steps take whose number of tokens is no multiple of row_multiple."""
    sizes = {_align(extent.engine.token_budget) >> halved for halved in range(4)}
    return [Case(chunks=(Chunks(1, size - 1, 0),), use=UNALIGNED) for size in sorted(sizes) if size >= UNALIGNED_FROM]


def _align(tokens: int) -> int:
    """Return a number of tokens rounded down to a multiple of ALIGNED, if it has that many."""
    return tokens // ALIGNED * ALIGNED or tokens


def _iter_decode_cases(extent: EngineExtent) -> Iterator[Case]:
    """Yield few and most KV tokens for each number of rows, and a check with uneven requests."""
    for rows in _list_row_sizes(extent):
        requests = min(rows, extent.requests)
        for context in _list_contexts(extent, requests):
            yield Case(decodes=(Decodes(requests, context),))
    half, most = extent.requests // 2, extent.compute_max_context(extent.requests)
    if half and most > SEVERAL * FEW_CONTEXT:
        yield Case(decodes=(Decodes(half, most), Decodes(half, most // SEVERAL)), use=CHECK)


def _list_row_sizes(extent: EngineExtent) -> list[int]:
    """Return the decode rows to measure.

    If the sizes of captured graphs are known, these are the sizes, the fewest rows of those sizes that many fewer rows are padded to,
    and the fewest and most of eager steps.
    """
    batches, requests = extent.engine.graph_batches, extent.requests
    if not batches:
        return select_row_sizes(requests, extent.targets, open_loop=extent.open_loop)
    graphs = [size for size in batches if size <= pad_to_size(requests, batches)]
    wanted = {pad_to_size(n, batches) for n in extent.targets}
    sizes = select_sizes(graphs, wanted, GROWTH)
    fewest = {below + 1 for below, size in itertools.pairwise(batches) if size in sizes and size >= WIDE * (below + 1)}
    eager = {batches[-1] + 1, requests} if requests > batches[-1] else set()
    return [*sorted({*sizes, *(n for n in fewest if n < requests)}), *sorted(eager)]


def _list_contexts(extent: EngineExtent, requests: int) -> list[int]:
    """Return few and most KV tokens of each request."""
    most = extent.compute_max_context(requests)
    return sorted({min(FEW_CONTEXT, most), most})


def _iter_chunk_cases(extent: EngineExtent) -> Iterator[Case]:
    """Yield one prompt of each size, several prompts that share a step, and chunks behind a prefix."""
    budget = extent.engine.token_budget
    prefixed = _list_prefixed_sizes(extent)
    most = Extent(requests=1, context=budget, pages=1, virtual_page=budget, chunk=budget)
    sizes = sorted({*map(_align, select_chunk_sizes(most)), *prefixed})
    for size in sizes:
        yield Case(chunks=(Chunks(1, size, 0),))
    for size in sorted({size for size in sizes if size >= SEVERAL_FROM} & {SEVERAL_FROM, _align(budget)}):
        if extent.requests >= SEVERAL:
            yield Case(chunks=(Chunks(SEVERAL, size // SEVERAL, 0),))
    for size in prefixed:
        short = {_align(min(SHORT_PREFIX, budget // 4))} if extent.takes_three_steps else set()
        for prefix in sorted({*short, budget, extent.compute_max_prefix(size)} - {0}):
            yield Case(chunks=(Chunks(1, size, prefix),))


def _list_prefixed_sizes(extent: EngineExtent) -> list[int]:
    """Return the sizes of chunks that are measured behind a prefix: some, and that of the rest of the longest prompt."""
    budget = extent.engine.token_budget
    least = min(PREFIX_SIZES[0], budget // 2 or 1)
    longest = _align(min(max(extent.context - budget, least), budget))
    return sorted({*(size for size in PREFIX_SIZES if size < longest), longest})


def _iter_mixed_cases(extent: EngineExtent) -> Iterator[Case]:
    """Yield decode rows next to a prompt, and checks.

    For an engine that does not mix them, yield one: it shows whether the engine decides a step ahead.
    """
    most_rows, budget = extent.requests - 1, extent.engine.token_budget
    if most_rows < 1:
        return
    if not extent.mixes:
        yield Case(decodes=(Decodes(1, min(FEW_CONTEXT, extent.context)),), chunks=(Chunks(1, budget // 2 or 1, 0),))
        return
    between = max((n for n in GRAPH_BATCHES if n <= most_rows / 3), default=1)
    sizes = sorted({*(size for size in MIXED_SIZES if size < budget), _align(budget)})
    for rows in sorted({1, between, most_rows}):
        for size in (size - rows for size in sizes if size > rows):
            for context in _list_contexts(extent, extent.requests):
                yield Case(decodes=(Decodes(rows, context),), chunks=(Chunks(1, size, 0),))
    yield from _iter_prefixed_mixed_cases(extent, most_rows)
    half = max(most_rows // 2, 1)
    if (size := _align(budget // 2) - half) > 0:
        context = max(extent.compute_max_context(extent.requests) // 2, min(FEW_CONTEXT, extent.context))
        yield Case(decodes=(Decodes(half, context),), chunks=(Chunks(1, size, 0),), use=CHECK)


def _iter_prefixed_mixed_cases(extent: EngineExtent, most_rows: int) -> Iterator[Case]:
    """Yield checks with the last chunk of a prompt of two steps: most decode rows and a short chunk, one row and the longest chunk.

    Each of both steps has the same decode rows.
    """
    budget, sizes = extent.engine.token_budget, _list_prefixed_sizes(extent)
    for rows, size in {most_rows: sizes[0], 1: sizes[-1]}.items():
        if extent.context > budget > rows and size > rows:
            decodes = Decodes(rows, extent.compute_max_context(extent.requests))
            yield Case(decodes=(decodes,), chunks=(Chunks(1, size - rows, budget - rows),), use=CHECK)
