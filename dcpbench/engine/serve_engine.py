"""Run the scheduler's steps on one rank: decode rows from a graph, or with chunks of prompts in captured pieces.

    launch(k + 1)     tables, rows and kernels queue behind step k, which may still run
    wait of step k    the one wait of the loop: the tokens that step k sampled

No value from the device is needed to launch a step: the tokens that it reads are in the device's own table.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING

import numpy as np
import torch

from dcpbench.engine.model import StepInput
from dcpbench.engine.piecewise_graph import Pieces
from dcpbench.engine.request_pool import copy_async
from dcpbench.measuring.ranges import drop_ranges
from dcpbench.points.batches import (
    GRAPH_BATCHES,
    PADDING_POSITION,
    PADDING_SLOT,
    compute_batch_rows,
    compute_chunk_rows,
)
from dcpbench.syncs.allowed import allow

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.engine.decode_engine import Batch, DecodeEngine
    from dcpbench.engine.prefill import Prefiller, PrefillPlan
    from dcpbench.engine.synthetic import RouterInputs
    from dcpbench.serving.requests import ReplicaStep, Step

IN_FLIGHT = 2  # maximum number of steps with tokens in transfer: the one being read, and the one launched after it
READ = "the tokens of a step are read while the next one runs"


@dataclasses.dataclass(slots=True)
class LaunchedStep:
    """A step on its way."""

    step: Step
    tokens: torch.Tensor  # sampled tokens of this replica's `emits`, on the host; valid after `wait_tokens`
    read: torch.cuda.Event | None = None
    started: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None

    @property
    def has_arrived(self) -> bool:
        """Return True if the step's tokens are on the host, without waiting. Always False on the CPU, which runs
        synchronously.
        """
        return self.read is not None and self.read.query()

    def wait_tokens(self) -> list[int]:
        """Return the sampled token ids, once they are on the host."""
        if self.read is not None:
            with allow(READ):
                self.read.synchronize()
        return self.tokens.tolist()


@dataclasses.dataclass(frozen=True)
class TokenPlaces:
    """Places of the tokens of a step with drafts, on the device."""

    slots: torch.Tensor
    positions: torch.Tensor  # index of the next known token of each request
    rows: torch.Tensor  # row that samples it
    emitted: torch.Tensor  # rows from which the step yields a token


@dataclasses.dataclass(frozen=True)
class MixedDrafts:
    """Plan of the passes of the layer that drafts tokens in a step with chunks."""

    batch: Batch | None  # further passes over a row of each request; None if no replica samples a token
    ends: torch.Tensor  # int64 [requests]: last row of each yielding decode, then of each ending prompt, then 0s


class ServeEngine:
    """The part of a DecodeEngine that serves. All ranks launch the same steps."""

    def __init__(self, engine: DecodeEngine, prefiller: Prefiller, router_inputs: RouterInputs | None) -> None:
        """Create the server; `router_inputs`, for the rows of all replicas, replace the hidden state with synthetic
        weights, see StepInput.
        """
        self.engine, self.prefiller, self.router_inputs = engine, prefiller, router_inputs
        self.model, self.request_pool, self.device = engine.model, engine.request_pool, engine.device
        self.replica = self.model.groups.dp.rank
        self.pieces = Pieces(prefiller, router_inputs)
        self.numbers: dict[int, int] = {}  # request number of the prompt in the table of tokens, by slot
        while self.request_pool.available:  # the scheduler hands out slots
            self.request_pool.allocate_slot()
        cuda = self.device.type == "cuda"
        most = engine.largest * engine.query_length
        self.host = [torch.zeros(most, dtype=torch.int64, pin_memory=cuda) for _ in range(IN_FLIGHT)]
        self.launches = 0

    def capture_steps(
        self, alive: Callable[[], None] = lambda: None, compiling: Callable[[], None] = lambda: None
    ) -> None:
        """Capture the step of every batch size, on padding rows, and the capturable pieces of steps with chunks.

        On the CPU, only run the former. `alive` is called from time to time, and `compiling` before a wait for a compiler.
        """
        batches = []
        for size in reversed(GRAPH_BATCHES):
            if size > self.engine.largest:
                continue
            batch = self._get_batch([], [], size, self.engine.query_length)
            if self.model.weights.draft is not None:
                self.engine.plan_drafts(batch, [], [])
            batches.append(batch)
            if self.device.type == "cuda":
                self.engine.capture_step(batch)
            else:
                self.engine.run_eager(batch)
            alive()
        if self.device.type == "cuda":
            self.pieces.capture_all(batches, alive)
        if not self.prefiller.backend.is_compiled():
            compiling()
        self.prefiller.warm_kernels()  # last, as another process may be compiling them meanwhile

    def reset_slots(self) -> None:
        """Invalidate the contents of the slots before another scheduler begins."""
        self.numbers = {}

    def launch_step(self, step: Step, meanwhile: Callable[[], None] = lambda: None) -> LaunchedStep:
        """Queue a step on the device. At most IN_FLIGHT may be unread.

        A step with chunks takes the host a while to launch; `meanwhile` is then called from time to time.
        """
        mine = step.replicas[self.replica]
        self._write_tables(mine)
        kernels = self._prepare_mixed(step, mine, meanwhile) if step.has_chunks else self._prepare_decode(step, mine)
        started, ended = _make_events(2, self.device, timing=True)
        _record_event(started)
        sampled = kernels()
        _record_event(ended)
        count = len(mine.emitting_sequences)
        tokens = self.host[self.launches % IN_FLIGHT][:count]
        self.launches += 1
        tokens.copy_(sampled[:count], non_blocking=True)
        (read,) = _make_events(1, self.device, timing=False)
        _record_event(read)
        return LaunchedStep(step, tokens, read, started, ended)

    def _write_tables(self, mine: ReplicaStep) -> None:
        for write in mine.table:
            self.request_pool.set_locs(write.slot, write.start, write.locs)
        for chunk in mine.chunks:
            request = chunk.sequence.request
            if self.numbers.get(chunk.slot) != request.number:
                self.numbers[chunk.slot] = request.number
                self.request_pool.set_tokens(chunk.slot, 0, request.ids)

    def _get_batch(self, slots: list[int], positions: list[int], padded: int, queries: int) -> Batch:
        batch = self.engine.get_batch(padded, queries)
        batch.router_inputs = self.router_inputs
        return self.engine.plan_rows(*_list_decode_rows(slots, positions, queries), padded, queries)

    def _count_decode_rows(self, replica: ReplicaStep) -> int:
        """Return the rows of a replica's decodes in a step with chunks, padded as in a graph."""
        return compute_batch_rows(len(replica.decodes)) * replica.queries if replica.decodes else 0

    def _list_rows(self, mine: ReplicaStep, count: int) -> tuple[np.ndarray, list[int]]:
        """Return slot and position of each of `count` rows, int64 [2, count], and the rows with a sampled next token."""
        rows = np.empty((2, count), dtype=np.int64)
        rows[0], rows[1] = PADDING_SLOT, PADDING_POSITION
        decodes = len(mine.decodes) * mine.queries
        rows[:, :decodes] = _list_decode_rows(mine.slots, mine.positions, mine.queries)
        sampled = list(range(decodes))
        at = self._count_decode_rows(mine)
        for chunk in mine.chunks:
            rows[0, at : at + chunk.tokens] = chunk.slot
            rows[1, at : at + chunk.tokens] = np.arange(chunk.start, chunk.stop)
            at += chunk.tokens
            if chunk.samples:
                sampled.append(at - 1)
        return rows, sampled

    def _prepare_decode(self, step: Step, mine: ReplicaStep) -> Callable[[], torch.Tensor]:
        padded = max(len(r.decodes) for r in step.replicas)
        batch = self._get_batch(mine.slots, mine.positions, padded, mine.queries)
        if batch.draft_batches is not None:
            self.engine.plan_drafts(batch, mine.decodes, mine.positions)
        places = self._place_tokens(mine) if mine.queries > 1 else None

        def run_kernels() -> torch.Tensor:
            self.engine.run_step(batch)
            assert batch.next_tokens is not None
            return self._write_tokens(places, batch.next_tokens, batch.drafts) if places else batch.next_tokens

        return run_kernels

    def _prepare_mixed(
        self, step: Step, mine: ReplicaStep, meanwhile: Callable[[], None]
    ) -> Callable[[], torch.Tensor]:
        """Prepare decode rows, padded as in a graph, then chunks, then padding: the same number of rows on all
        replicas.

        Rows in excess of those of the replica alone go to no expert.
        """
        batch = None
        if mine.decodes:
            batch = self._get_batch(mine.slots, mine.positions, len(mine.decodes), mine.queries)
        places = self._place_tokens(mine) if mine.queries > 1 else None
        each = [compute_chunk_rows(self._count_decode_rows(r) + sum(c.tokens for c in r.chunks)) for r in step.replicas]
        count = max(each)
        rows, sampled = self._list_rows(mine, count)
        slots, positions = self._to_device(rows)
        live = self._to_device(np.asarray(each)) if len(each) > 1 else None
        (last,) = self._to_device(np.asarray([sampled or [0]]))
        prefill = (
            self.prefiller.plan_chunks(mine.chunks, self.request_pool.table, self._count_decode_rows(mine))
            if mine.chunks
            else None
        )
        cut = self.pieces.get_pieces(count)
        decodes = self.pieces.get_decodes(batch) if batch else None
        drafting = self._plan_mixed_drafts(step, mine, sampled) if self.model.weights.draft is not None else None

        def run_kernels() -> torch.Tensor:
            request_pool = self.request_pool
            inputs = StepInput(
                tokens=request_pool.tokens[slots, positions],
                positions=positions,
                locs=request_pool.table[slots, positions],
                router_inputs=self.router_inputs,
                logit_rows=last,
                live=live,
            )
            drafts = None
            with drop_ranges():
                logits = cut.run_step(inputs, decodes, prefill, meanwhile)
                tokens = self.model.sample_greedy(logits) if sampled else last[:0]
                if drafting:
                    following = request_pool.tokens[slots, positions + 1]  # of prompts; sampled ones are not yet there
                    following[last[: len(sampled)]] = tokens
                    drafts = self._run_mixed_drafts(drafting, inputs, following, batch, prefill)
            if not sampled:
                return tokens
            if places:
                return self._write_tokens(places, tokens, drafts)
            request_pool.tokens[slots[last], positions[last] + 1] = tokens
            return tokens

        return run_kernels

    def _plan_mixed_drafts(self, step: Step, mine: ReplicaStep, sampled: list[int]) -> MixedDrafts:
        """Plan drafts behind each decode and each prompt that ends; all replicas run as many rows. `sampled` as of `_list_rows`."""
        ended = [chunk for chunk in mine.chunks if chunk.samples]
        most = max(len(r.decodes) + sum(chunk.samples for chunk in r.chunks) for r in step.replicas)
        if not most:
            return MixedDrafts(None, torch.empty(0, dtype=torch.int64, device=self.device))
        batch = self.engine.get_batch(most, self.engine.query_length)
        starts = [*mine.positions, *(chunk.stop - 1 for chunk in ended)]
        self.engine.plan_drafts(batch, [*mine.decodes, *ended], starts)
        delivered = mine.delivered or [1] * len(mine.decodes)
        ends = [n * mine.queries + tokens - 1 for n, tokens in enumerate(delivered)]
        ends += sampled[len(mine.decodes) * mine.queries :]
        ends += [0] * (batch.num_requests - len(ends))
        return MixedDrafts(batch, self._to_device(np.asarray(ends)))

    def _run_mixed_drafts(
        self,
        drafting: MixedDrafts,
        inputs: StepInput,
        following_B: torch.Tensor,
        decodes: Batch | None,
        prefill: PrefillPlan | None,
    ) -> torch.Tensor | None:
        """Run the layer that drafts over all rows of a step with chunks, of which it stores the KV, and return the drafts behind the
        requests of `drafting`. Runs kernel by kernel. `following_B` are the tokens after those of the step. Collective.
        """
        model = self.model
        assert model.final_hidden is not None
        inputs = dataclasses.replace(inputs, tokens=following_B, logit_rows=None)
        hidden_BD = model.run_draft_layer(inputs, model.final_hidden, decodes, prefill)
        if drafting.batch is None:
            return None
        return self.engine.run_later_drafts(drafting.batch, hidden_BD[drafting.ends])

    def _place_tokens(self, mine: ReplicaStep) -> TokenPlaces:
        """Return where the tokens of a step with drafts go: of a request the one behind its accepted drafts, as the scheduler has
        counted them.
        """
        delivered = mine.delivered or [1] * len(mine.decodes)
        firsts = [n * mine.queries for n in range(len(mine.decodes))]
        sampled = [chunk for chunk in mine.chunks if chunk.samples]
        more = range(len(mine.decodes) * mine.queries, len(mine.decodes) * mine.queries + len(sampled))
        targets = [
            [*mine.slots, *(chunk.slot for chunk in sampled)],
            [*map(operator.add, mine.positions, delivered), *(chunk.stop for chunk in sampled)],
            [*(first + tokens - 1 for first, tokens in zip(firsts, delivered, strict=True)), *more],
        ]
        rows = [row for first, tokens in zip(firsts, delivered, strict=True) for row in range(first, first + tokens)]
        (emitted,) = self._to_device(np.asarray([[*rows, *more]]))
        slots, at, sampling = self._to_device(np.asarray(targets))
        return TokenPlaces(slots, at, sampling, emitted)

    def _write_tokens(
        self, places: TokenPlaces, tokens_B: torch.Tensor, drafts_BN: torch.Tensor | None
    ) -> torch.Tensor:
        """Write the next known token of each request, and its drafts if the step has any; return the tokens that the step yields."""
        table, slots, positions = self.request_pool.tokens, places.slots, places.positions
        table[slots, positions] = tokens_B[places.rows]
        if drafts_BN is not None:
            behind = positions[:, None] + torch.arange(1, 1 + drafts_BN.shape[1], device=self.device)
            table[slots[:, None], behind.clamp(max=table.shape[1] - 1)] = drafts_BN[: len(slots)]
        return tokens_B[places.emitted]

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        on_device = torch.empty(values.shape, dtype=torch.int64, device=self.device)
        copy_async(values.astype(np.int64, copy=False), on_device)
        return on_device


def _list_decode_rows(slots: list[int], positions: list[int], queries: int) -> tuple[list[int], list[int]]:
    """Return slot and position of the adjacent rows of each request."""
    return (
        [slot for slot in slots for _ in range(queries)],
        [position + n for position in positions for n in range(queries)],
    )


def _make_events(count: int, device: torch.device, *, timing: bool) -> list[torch.cuda.Event | None]:
    return [torch.cuda.Event(enable_timing=timing) if device.type == "cuda" else None for _ in range(count)]


def _record_event(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.record()
