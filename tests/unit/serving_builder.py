"""Build requests for tests of schedulers, and a simulated device that executes steps and detects wrong KV.

A KV row of token i depends on all tokens before it. So the device keeps, for each row of each rank's pool, a number
made of the tokens 0 … i that it was computed from; a step must find these numbers where its request table points.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dcpbench.points import layout
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.serving.radix import Node
    from dcpbench.serving.requests import Chunk, ReplicaStep, Sequence
    from dcpbench.serving.scheduler import Replica

NOTHING = 0  # value of a row that was never written
WRONG = -1  # value of the row of a rejected draft, which must not be read


def make_request(number: int, prompt: list[int] | int, output: int = 1, arrival_s: float | None = None) -> ServeRequest:
    """Return a request; a prompt given as its length has tokens that no other request has."""
    tokens = [1000 * (number + 1) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return ServeRequest(
        number=number, prompt=np.array(tokens, dtype=np.int32), output_tokens=output, arrival_s=arrival_s
    )


def make_config(**changes: object) -> SchedulerConfig:
    """Return one replica of 8 pages and the padding page, with pages of 2 tokens on 2 ranks and chunks of 8 tokens."""
    usual: dict[str, object] = {
        "replicas": 1,
        "pages": 9,
        "page_size": 2,
        "dcp": 2,
        "max_requests": 4,
        "chunk": 8,
        "max_context": 64,
    }
    return SchedulerConfig(**(usual | changes))  # type: ignore[arg-type]


def compute_row(row: int, token: int) -> int:
    """Return the KV row of a token that follows a token with KV row `row` (NOTHING for the first token)."""
    return hash((row, token)) or 1


def sample_token(row: int) -> int:
    """Return the token that follows a token with this KV row."""
    return row % 5


@dataclasses.dataclass
class RequestState:
    """Hold the device's state of a request that was prefilled at least in part."""

    sequence: Sequence
    tokens: list[int]  # prompt and sampled tokens, as in the token table of the slot
    computed: int = 0
    preemptions: int = 0
    expected_rows: list[int] = dataclasses.field(default_factory=list)
    """KV rows that `compute_rows` has computed so far."""

    def compute_rows(self) -> list[int]:
        """Return the expected KV row of each token."""
        for token in self.tokens[len(self.expected_rows) :]:
            self.expected_rows.append(compute_row(self.expected_rows[-1] if self.expected_rows else NOTHING, token))
        return self.expected_rows


class Device:
    """Simulate the request table and the KV pools of one replica's ranks."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        shape = (config.max_requests + 1, config.max_context)
        self.table = np.full(shape, -1, dtype=np.int64)
        self.rows = config.pages * config.page_size
        self.pools = [NOTHING] * (self.rows * config.dcp)  # rows of all ranks, one rank after another
        self.places = [self.get_place(loc) for loc in range(self.rows * config.dcp)]  # places in the pools by location
        self.at: dict[int, RequestState] = {}  # states of requests by slot

    def get_place(self, loc: int) -> int:
        """Return the place in all pools of a location."""
        dcp, interleave = self.config.dcp, self.config.interleave
        row = layout.get_row(loc, dcp, interleave)
        assert 0 <= row < self.rows
        return layout.get_owner(loc, dcp, interleave) * self.rows + row

    def read(self, loc: int) -> int:
        """Return the value of a location."""
        assert loc >= 0, "a token without location"
        return self.pools[self.places[loc]]

    def run(self, todo: ReplicaStep) -> None:
        """Run one step: the table and all KV rows are written, then all rows are read, then tokens are sampled."""
        for write in todo.table:
            self.table[write.slot, write.start : write.start + len(write.locs)] = write.locs
        delivered = todo.delivered or [1] * len(todo.decodes)
        spans = [
            (self.accept(self.at[slot], tokens - 1), p, p + tokens)
            for slot, p, tokens in zip(todo.slots, todo.positions, delivered, strict=True)
        ]
        spans += [(self.get_state(chunk), chunk.start, chunk.stop) for chunk in todo.chunks]
        slots = [known.sequence.slot for known, _, _ in spans]
        assert len(set(slots)) == len(slots), "a request has one place in a step"
        rows = [known.compute_rows() for known, _, _ in spans]
        written: set[int] = set()
        for (known, start, stop), right in zip(spans, rows, strict=True):
            for token in range(start, stop):
                written.add(self.write(known, token, right[token], written))
        for known, start, stop in spans[: len(todo.decodes)]:  # rejected drafts
            for token in range(stop, start + todo.queries):
                written.add(self.write(known, token, WRONG, written))
        for (known, start, stop), right in zip(spans, rows, strict=True):
            locs = self.table[known.sequence.slot, :stop].tolist()
            assert min(locs) >= 0, "a token without location"
            assert [self.pools[self.places[loc]] for loc in locs] == right[:stop], (
                f"slot {known.sequence.slot} reads wrong KV"
            )
            assert not written.intersection(locs[:start]), "a prefix is read that this step writes"
            known.computed = stop
            if stop == len(known.tokens):
                known.tokens.append(sample_token(right[-1]))

    def accept(self, known: RequestState, drafts: int) -> RequestState:
        """Add accepted drafts, which are the tokens that single steps would sample."""
        for _ in range(drafts):
            known.tokens.append(sample_token(known.compute_rows()[-1]))
        return known

    def write(self, known: RequestState, token: int, value: int, written: set[int]) -> int:
        """Write a KV row where the table points, on the rank that owns the token; return its location."""
        dcp, interleave = self.config.dcp, self.config.interleave
        loc = int(self.table[known.sequence.slot, token])
        assert loc >= self.config.virtual_page, "neither padding nor a token without location"
        assert loc not in written, "two tokens in one place"
        assert layout.get_owner(loc, dcp, interleave) == layout.get_owner(token, dcp, interleave)
        self.pools[self.places[loc]] = value
        return loc

    def get_state(self, chunk: Chunk) -> RequestState:
        """Return the state of a chunk's request; a new request replaces the last owner of its slot."""
        sequence = chunk.sequence
        assert 1 <= chunk.slot == sequence.slot <= self.config.max_requests
        if chunk.slot not in self.at or self.at[chunk.slot].sequence is not sequence:
            self.at[chunk.slot] = RequestState(sequence, sequence.request.prompt.tolist())
        return self.at[chunk.slot]


def iter_nodes(node: Node) -> Iterator[tuple[Node, list[int], list[int]]]:
    """Iterate over all nodes below one, each with the tokens and the pages from the root to its end."""
    left = [(child, [], []) for child in node.children.values()]
    while left:
        each, tokens, pages = left.pop()
        tokens, pages = tokens + each.tokens.tolist(), pages + each.pages.tolist()
        yield each, tokens, pages
        left += [(child, tokens, pages) for child in each.children.values()]


def check_books(replica: Replica, device: Device | None = None) -> None:
    """Check that every page has one owner that may write it, all are accounted for, and the cache agrees."""
    allocator, cache = replica.allocator, replica.cache
    nodes = list(iter_nodes(cache.root))
    cached = [int(page) for node, _, _ in nodes for page in node.pages]
    own = [int(p) for s in replica.running if s.allocation for p in s.allocation.pages[s.allocation.shared :]]
    held = [*cached, *own]
    assert len(held) == len(set(held)) == allocator.used_pages == allocator.pages - 1 - allocator.free_pages
    assert all(1 <= page < allocator.pages for page in held)
    assert cache.pages == len(cached)
    assert cache.evictable == sum(len(node.pages) for node, _, _ in nodes if not node.locks)
    readers = [s.node for s in replica.running]
    for node, tokens, pages in nodes:
        assert len(node.tokens) == len(node.pages) * cache.virtual_page > 0
        assert node.locks == sum(is_above(node, reader) for reader in readers)
        if device:
            check_cached(device, tokens, pages)
    stored = sum(s.allocation.tokens - s.allocation.shared * allocator.virtual_page for s in replica.running)
    assert allocator.tokens == stored + len(cached) * allocator.virtual_page
    check_slots(replica)


def is_above(node: Node, reader: Node | None) -> bool:
    """Return True if `reader` is the node or below it."""
    while reader is not None and reader is not node:
        reader = reader.parent
    return reader is node


def check_cached(device: Device, tokens: list[int], pages: list[int]) -> None:
    """Check that the pages of the prefix cache hold the KV of its tokens."""
    size, row = device.config.virtual_page, NOTHING
    for i, token in enumerate(tokens):
        row = compute_row(row, token)
        assert device.read(pages[i // size] * size + i % size) == row, "the cache offers wrong KV"


def check_slots(replica: Replica) -> None:
    """Check that slots are free or belong to one request, slot 0 to none, and that earlier requests run before later
    ones.
    """
    inside = [*replica.running, *replica.preempted]
    slots = [*replica.slots, *(s.slot for s in inside)]
    assert sorted(slots) == list(range(1, len(slots) + 1))
    orders = [s.order for s in inside]
    assert orders == sorted(orders)
    assert all(s.allocation is None and s.node is None for s in replica.preempted)
