"""The decode engine of one rank: pools, requests, padded batches, and steps run eagerly or from a CUDA graph.

A step writes and reads the last `query_length` tokens of each request. Above 1 all but the first of them are drafts, which
the step verifies: it counts those that are equal to the tokens sampled before them (`Batch.accepted`). Rows of a request
are adjacent; the exchange and the layers see one row of each token.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from dcpbench.engine.model import Model, StepInput
from dcpbench.engine.request_pool import RequestPool, copy_async
from dcpbench.errors import CapacityError
from dcpbench.exchange import ExchangeSpec, make_exchange
from dcpbench.hangs import heartbeats
from dcpbench.kernels.attention import Shards
from dcpbench.kernels.kv_indices import compute_local_lengths, write_pages
from dcpbench.kernels.synthetic_kv import fill_request
from dcpbench.measuring.timing import capture_graph
from dcpbench.points import layout as arithmetic
from dcpbench.points.batches import PADDING_POSITION, PADDING_SLOT, compute_batch_rows
from dcpbench.serving.allocator import DcpAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.engine.synthetic import RouterInputs
    from dcpbench.exchange import Exchange
    from dcpbench.kernels.attention import Backend
    from dcpbench.serving.allocator import Allocation


class HasSlot(Protocol):
    """A request, of this engine or of a scheduler, or a chunk of its prompt."""

    @property
    def slot(self) -> int:
        """Return its slot in the table of requests."""


@dataclasses.dataclass
class Request:
    """A request in flight on this replica."""

    slot: int
    allocation: Allocation

    @property
    def length(self) -> int:
        """Return the number of tokens with a KV location, including the one that the next step writes."""
        return self.allocation.tokens


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A graph and the tensors it writes; an eager step in between leaves its results elsewhere."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    next_tokens: torch.Tensor
    accepted: torch.Tensor | None


class Batch:
    """Fixed buffers, attention plan and graph of one padded number of requests and one query length."""

    def __init__(
        self, num_requests: int, query_length: int, backend: Backend, exchange: Exchange, device: torch.device
    ) -> None:
        self.num_requests, self.query_length = num_requests, query_length
        self.backend, self.exchange = backend, exchange
        self.size = num_requests * query_length  # rows of a step
        self.rows = torch.zeros(2, self.size, dtype=torch.int64, device=device)  # slot, token index: all that changes
        self.slots, self.positions = self.rows
        self.logits: torch.Tensor | None = None
        self.next_tokens: torch.Tensor | None = None  # [B] int64, sampled last; without drafts also in the table
        self.accepted: torch.Tensor | None = None  # [requests] int64, accepted by the last step; None: no drafts
        self.router_inputs: RouterInputs | None = None  # set before the first step: a graph holds its address
        self.draft_batches: list[Batch] | None = None  # one row per request; None without (`plan_drafts`)
        self.drafts: torch.Tensor | None = None  # [requests, N] int64, drafted by the last step; None: it did not draft
        self.captured: CapturedStep | None = None


class DecodeEngine:
    """Requests of one attention replica, as one of its ranks sees them. Every rank makes the same calls."""

    def __init__(
        self,
        model: Model,
        *,
        backend: str,
        exchange: str,
        max_requests: int,
        max_context: int,
        query_length: int = 1,
    ) -> None:
        """Create the engine for steps of up to `query_length` tokens of a request."""
        self.model = model
        self.device = model.kv.data.device
        self.largest = compute_batch_rows(max_requests)  # most requests of a step, with padding
        self.query_length = query_length
        self.exchange_cache: dict[str, Exchange] = {}
        self.batches: dict[tuple[int, int], Batch] = {}  # by padded number of requests and query length
        self.select_path(backend, exchange)
        _, pages, self.page_size, _ = model.kv.data.shape
        self.max_context = max_context
        self.request_pool = RequestPool(max_requests, max_context, self.device)
        self.allocator = DcpAllocator(pages, self.page_size, model.layout.dcp, model.interleave)

    def select_path(self, backend: str, exchange: str) -> None:
        """Switch to this backend and exchange; batches, with their plans and graphs, are made again. Collective.

        Raise the same DcpbenchError on all ranks if the exchange cannot work here; nothing is changed in that case.
        """
        if exchange not in self.exchange_cache:
            self.exchange_cache[exchange] = make_exchange(exchange, self.model.groups.dcp, self._make_exchange_spec())
        if self.batches and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no running graph may read the memory that is freed here
        self.backend_name, self.exchange, self.batches = backend, self.exchange_cache[exchange], {}

    def add_request(self, tokens: int) -> Request:
        """Return a new request with capacity for `tokens` tokens. Raise CapacityError if slots or pages run out."""
        slot = self.request_pool.allocate_slot()
        try:
            allocation = self.allocator.allocate(tokens)
        except CapacityError:
            self.request_pool.free_slot(slot)
            raise
        self.request_pool.set_locs(slot, 0, allocation.compute_locs(0, tokens))
        return Request(slot=slot, allocation=allocation)

    def write_random_kv(self, request: Request, number: int, seed: int) -> None:
        """Fill the KV rows of all tokens of a request with random numbers instead of a prefill, the same in every
        layout.

        `number` identifies the request within the whole layout.
        """
        self.write_random_locs(self.request_pool.table[request.slot, : request.length], number, seed)

    def write_random_locs(self, locs: torch.Tensor, number: int, seed: int) -> None:
        """Fill virtual locations, int32, with random KV rows, the same as those of request `number`."""
        fill_request(self.model.kv.get_all_rows(), locs, self.model.shard, request=number, seed=seed)

    def append_token(self, request: Request) -> None:
        """Allocate one more token."""
        self.allocator.extend(request.allocation, 1)
        self.request_pool.set_locs(
            request.slot, request.length - 1, request.allocation.compute_locs(request.length - 1, request.length)
        )

    def remove_request(self, request: Request) -> None:
        """End a request."""
        self.allocator.free(request.allocation)
        self.request_pool.free_slot(request.slot)

    def get_batch(self, num_requests: int, query_length: int = 1) -> Batch:
        """Return the buffers for a replica with up to `num_requests` requests, created on first use."""
        key = (compute_batch_rows(num_requests), query_length)
        if key not in self.batches:
            self.batches[key] = Batch(*key, self._make_backend(*key), self.exchange, self.device)
        return self.batches[key]

    def _make_backend(self, num_requests: int, query_length: int) -> Backend:
        model = self.model
        sizes = {
            "batch": num_requests * query_length,
            "query_length": query_length,
            "page_size": self.page_size,
            "max_pages": self.allocator.count_pages(self.max_context),
            "device": self.device,
            "kv_dtype": model.kv.data.dtype,
            "kv_scale": model.kv.scale,
        }
        return model.attention.make_backend(self.backend_name, sizes)

    def plan_drafts(self, batch: Batch, requests: Sequence[HasSlot], starts: Sequence[int]) -> None:
        """Plan the draft passes of `batch`: after each step the MTP layer drafts `query_length - 1` tokens per request.

        The first pass of that layer has all rows of the step; each further pass one row of each request, at the positions
        behind `starts`: those of the last tokens that the step has accepted. They have KV locations.
        """
        if batch.draft_batches is None:
            batch.draft_batches = [
                Batch(batch.num_requests, 1, self._make_backend(batch.num_requests, 1), self.exchange, self.device)
                for _ in range(batch.query_length - 2)
            ]
        for number, draft_batch in enumerate(batch.draft_batches, 1):
            self._fill_batch(draft_batch, [r.slot for r in requests], [start + number for start in starts])

    def run_drafts(self, batch: Batch) -> None:
        """Draft tokens from the hidden states and sampled tokens of the last step of `batch`: `batch.drafts`."""
        model, hidden = self.model, self.model.final_hidden
        assert batch.accepted is not None
        assert batch.next_tokens is not None
        assert batch.draft_batches is not None
        assert hidden is not None
        last_R = torch.arange(batch.num_requests, device=self.device) * batch.query_length + batch.accepted
        hidden = model.run_draft_layer(self._make_input(batch, batch.next_tokens), hidden, batch)[last_R]
        batch.drafts = self.run_later_drafts(batch, hidden)

    def run_later_drafts(self, batch: Batch, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return the drafts [requests, N] behind the first pass of the layer that drafts, which gave these hidden states of each
        request's last token. Runs the further passes that `plan_drafts` has planned for `batch`.
        """
        model = self.model
        assert batch.draft_batches is not None
        drafts = [model.sample_greedy(model.compute_logits(hidden_RD))]
        for draft_batch in batch.draft_batches:
            hidden_RD = model.run_draft_layer(self._make_input(draft_batch, drafts[-1]), hidden_RD, draft_batch)
            drafts.append(model.sample_greedy(model.compute_logits(hidden_RD)))
        return torch.stack(drafts, dim=1)

    def _make_input(self, batch: Batch, tokens_B: torch.Tensor) -> StepInput:
        locs = self.request_pool.table[batch.slots, batch.positions]
        return StepInput(tokens_B, batch.positions, locs, batch.router_inputs)

    def _make_exchange_spec(self) -> ExchangeSpec:
        model, kind = self.model, self.model.attention
        return ExchangeSpec(
            batch=self.largest * self.query_length,
            heads=model.heads * model.layout.dcp,
            width=kind.query_width,
            value=kind.exchanged_width,
            dtype=model.dtype,
            device=self.device,
            q_replicate=model.replicated.query,
            project_first=model.replicated.value,
        )

    def plan_step(self, requests: list[Request], padded: int | None = None, query_length: int = 1) -> Batch:
        """Prepare the next step of `requests`, which writes the last `query_length` tokens of each. See `plan_rows`."""
        slots = [r.slot for r in requests for _ in range(query_length)]
        positions = [p for r in requests for p in range(r.length - query_length, r.length)]
        return self.plan_rows(slots, positions, padded, query_length)

    def plan_rows(
        self, slots: Sequence[int], positions: Sequence[int], padded: int | None = None, query_length: int = 1
    ) -> Batch:
        """Prepare the next step from host-side integers only; rows past the given ones are padding.

        A row reads token `positions[b]` of the request in `slots[b]` and writes its KV row. A request has `query_length`
        adjacent rows, of successive tokens. With attention DP all replicas must run the same number of rows: `padded` is
        the maximum number of requests of any replica.
        """
        batch = self.get_batch(padded or len(slots) // query_length, query_length)
        self._fill_batch(batch, slots, positions)
        return batch

    def _fill_batch(self, batch: Batch, slots: Sequence[int], positions: Sequence[int]) -> None:
        query_length = batch.query_length
        padding = batch.size - len(slots)
        slots = [*slots, *[PADDING_SLOT] * padding]
        positions = [*positions, *[PADDING_POSITION] * padding]
        copy_async(np.asarray((slots, positions), dtype=np.int64), batch.rows)
        tables = batch.backend.tables
        if tables is None:
            batch.backend.plan(self._make_shards(slots, positions, query_length))
        else:
            last = slice(query_length - 1, None, query_length)  # of each request
            slots_B, lengths_B = batch.slots[last].contiguous(), batch.positions[last] + 1
            write_pages(
                tables.pages, None, tables.lengths, self.request_pool.table, slots_B, lengths_B, self.model.shard
            )
            if query_length > 1:
                tables.row_lengths.copy_(compute_local_lengths(batch.positions + 1, self.model.shard))
            batch.backend.plan_on_device()

    def _make_shards(self, slots: Sequence[int], positions: Sequence[int], query_length: int) -> Shards:
        """Return the pages and lengths that this rank attends to, for backends that plan on the host."""
        shard, page = self.model.shard, self.allocator.virtual_page
        lengths = [arithmetic.compute_local_length(p + 1, shard.rank, shard.dcp, shard.interleave) for p in positions]
        last = slice(query_length - 1, None, query_length)  # of each request
        ends = zip(slots[last], positions[last], strict=True)
        return Shards(pages=[self.request_pool.host[s, : p + 1 : page] // page for s, p in ends], lengths=lengths)

    def run_eager(self, batch: Batch) -> None:
        """Run one eager step: logits and next tokens of the planned batch, which become the requests' tokens.

        With drafts, the table of tokens stays as it is, so that a step can be repeated. The step then drafts
        the next tokens, too, if `plan_drafts` has planned it.
        """
        tokens = self.request_pool.tokens[batch.slots, batch.positions]
        batch.logits = self.model.run_step(self._make_input(batch, tokens), batch)
        batch.next_tokens = self.model.sample_greedy(batch.logits)
        if batch.query_length == 1:
            self.request_pool.tokens[batch.slots, batch.positions + 1] = batch.next_tokens
        else:
            batch.accepted = count_accepted(tokens, batch.next_tokens, batch.query_length)
            if batch.draft_batches is not None:
                self.run_drafts(batch)

    def capture_step(self, batch: Batch) -> None:
        """Capture the step as a CUDA graph, once per batch.

        Every kernel has run on every rank before: a rank that loads modules while others wait in a captured collective
        causes a hang (vLLM #46145).
        """
        if batch.captured is not None:
            return
        for _ in range(2):
            self.run_eager(batch)
        torch.cuda.synchronize()
        graph = capture_graph(lambda: self.run_eager(batch))
        assert batch.logits is not None
        assert batch.next_tokens is not None
        batch.captured = CapturedStep(graph, batch.logits, batch.next_tokens, batch.accepted)

    def run_step(self, batch: Batch) -> None:
        """Run one planned step, with the captured graph if there is one."""
        if batch.captured is None:
            self.run_eager(batch)
            return
        heartbeats.record_step(heartbeats.REPLAY)
        batch.captured.graph.replay()
        batch.logits, batch.next_tokens = batch.captured.logits, batch.captured.next_tokens
        batch.accepted = batch.captured.accepted


def count_accepted(tokens_B: torch.Tensor, next_B: torch.Tensor, query_length: int) -> torch.Tensor:
    """Return the accepted drafts of each request: those before the first one that differs from the token sampled before it."""
    drafts, sampled = (rows.view(-1, query_length) for rows in (tokens_B, next_B))
    return (drafts[:, 1:] == sampled[:, :-1]).long().cumprod(dim=1).sum(dim=1)
