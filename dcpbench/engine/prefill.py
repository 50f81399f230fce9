"""Attention of a step's prompt chunks: over the prefix stored by the DCP ranks, and over their own rows after it.

All ranks of a replica compute the KV rows of a chunk, so its own part needs no communication. The stored prefix is
gathered layer by layer into token order. Both are placed in one buffer, decompressed for this rank's heads with MLA, and
attended to in one call, with a mask that is causal from each request's end. A part of a step is as many chunks as the
buffer holds with their prefixes:

    part 0     │ prefix 0 ········ │ chunk 0 ··· │ chunk 1 ·· │        part 1     │ prefix 2 ·· │ chunk 2 ····· │

A chunk that does not fit after its prefix forms a part of its own rows alone; its prefix follows in windows of bounded
size, for any prefix length, each attended to without a mask and merged by log-sum-exp:

    part 2     │ chunk 3 ·· │        windows    │ prefix 3 ·· │ ············· │ ····· │

A chunk begins at a multiple of page_size · dcp tokens, and so do windows: a rank's rows of a part or window are then a
slice of its rows of all prefixes, and every rank has the same number of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from dcpbench.errors import UsageError
from dcpbench.exchange.prefix import Gatherer, Task, allocate_symmetric
from dcpbench.kernels.kv_gather import copy_to_device, make_request_table
from dcpbench.kernels.kv_indices import write_pages
from dcpbench.kernels.kv_up_proj import gather_rows
from dcpbench.kernels.merge import merge_attn_states
from dcpbench.kernels.prefill import make_prefill
from dcpbench.measuring.ranges import record_range
from dcpbench.points import memory
from dcpbench.points.batches import compute_chunk_rows
from dcpbench.points.layout import Prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.engine.model import Model
    from dcpbench.kernels.prefill import Ragged
    from dcpbench.kernels.symm_mem import Peers
    from dcpbench.serving.requests import Chunk

MIN_PREFIXES = 32  # minimum prefixes for which kernels that look up, gather and order rows are compiled; absent: empty
GATHERS = ("nccl", "direct")  # ways in which prefixes come from the ranks; see exchange/prefix.py


@dataclasses.dataclass(frozen=True)
class Call:
    """Keys that some chunks of a step attend to in one call."""

    chunks: slice
    stored: list[int]  # number of tokens of each chunk's prefix in this call, following those of the call before
    own: bool  # True if the chunks' own rows follow the prefixes


def split_calls(starts: Sequence[int], stops: Sequence[int], stored: int, keys: int) -> list[list[Call]]:
    """Return the calls of each part: consecutive chunks with at most `stored` prefix tokens and `keys` tokens, or one
    in windows.
    """
    found: list[list[Call]] = []
    first = 0
    while first < len(starts):
        last = first + 1
        if starts[first] > stored or stops[first] > keys:
            lengths = [min(stored, starts[first] - at) for at in range(0, starts[first], stored)]
            one = slice(first, last)
            found.append([Call(one, [0], own=True), *(Call(one, [length], own=False) for length in lengths)])
        else:
            while (
                last < len(starts) and sum(starts[first : last + 1]) <= stored and sum(stops[first : last + 1]) <= keys
            ):
                last += 1
            found.append([Call(slice(first, last), list(starts[first:last]), own=True)])
        first = last
    return found


@dataclasses.dataclass(frozen=True)
class AttendedKeys:
    """Keys that rows of a step attend to in one call, in the form that its layers need."""

    numbers: torch.Tensor  # int32 [1 + keys]: number of keys, row of each, in the pool or the buffer gathered by `task`
    task: Task | None  # task that gathers stored rows; None without stored rows, or if this rank has all of them
    attention: Ragged


@dataclasses.dataclass(frozen=True)
class Part:
    """Chunks that attend together."""

    rows: slice  # range of the part within the chunks' rows
    seen: AttendedKeys  # own rows of the chunks after their prefixes, or own rows alone if there are windows
    windows: list[AttendedKeys]  # windows of the prefix of one chunk


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Plan of a step's prefill, for all of its layers. It stays valid until the step has run, also if others are made."""

    prefiller: Prefiller
    rows: slice  # rows of the chunks in the step, after its decodes
    parts: list[Part]

    def run_attention(
        self, q_ThX: torch.Tensor, keys: Callable[[AttendedKeys], None], out_ThV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values of the chunks' tokens for this rank's heads, [T, h, V] in q's dtype, in `out` if given.
        Collective.

        q_ThX [T, h, nope + P] has rope applied and is not absorbed; it is contiguous. `keys` is Prefiller.load_keys of
        a layer, or an equivalent function.
        """
        at = self.prefiller.keys, self.prefiller.values
        if out_ThV is None:
            out_ThV = q_ThX.new_empty(*q_ThX.shape[:2], self.prefiller.model.shape.v_head_dim)
        for part in self.parts:
            q_tX, out_tV = q_ThX[part.rows], out_ThV[part.rows]
            keys(part.seen)
            if not part.windows:
                with record_range("prefill"):
                    part.seen.attention.compute_output(q_tX, *at, out_tV)
                continue
            with record_range("prefill"):
                o_tV, lse_t = part.seen.attention.run(q_tX, *at)
                sum_tV = o_tV.to(torch.float32, memory_format=torch.contiguous_format)
            for window in part.windows:
                keys(window)
                with record_range("prefill"):
                    merge_attn_states(sum_tV, lse_t, *window.attention.run(q_tX, *at))
            out_tV.copy_(sum_tV)
        return out_ThV


class Prefiller:
    """Plan and run the attention of prompt chunks on one rank. Created once per engine, with all buffers that steps
    need.
    """

    def __init__(
        self,
        model: Model,
        *,
        backend: str,
        tokens: int,
        rows: int = 0,
        gather: str = "nccl",
    ) -> None:
        """Reserve the buffers; collective if a prefix is gathered.

        `tokens` is the maximum of chunk tokens in one step of this replica; `rows` the maximum of all rows, including
        decodes. Raise UsageError for a gather mode or backend that does not exist or cannot run, CapacityError if peers'
        memory cannot be read.
        """
        if gather not in GATHERS:
            raise UsageError(f"a prefix cannot be gathered by {gather}; choose one of {', '.join(GATHERS)}.")
        data = model.kv.data
        self.model, self.group, self.way = model, model.groups.dcp, gather
        self.device, self.dtype = data.device, model.dtype
        self.stored = torch.uint8 if data.dtype.itemsize == 1 else data.dtype  # dtype of sent pool rows: bytes for e4m3
        self.shard = dataclasses.replace(model.shard, page_size=1)
        self.unit = data.shape[2] * model.layout.dcp
        self.tokens, self.rows = tokens, compute_chunk_rows(max(tokens, rows))
        self.window = max(memory.PREFILL_WINDOW // self.unit, 1) * self.unit  # tokens of a window: whole pages
        self.backend = make_prefill(backend, model.attention.make_prefill_spec(self.device))
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        """Allocate the buffers reused by every layer: keys, values, their source rows, gathered rows, and transferred
        data.
        """
        width = self.model.kv.data.shape[-1]
        most = max(self.window, self.rows)

        def allocate_empty(*size: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self.device)

        self.laid = allocate_empty(
            most, width
        ).zero_()  # rows behind the last one are multiplied, too, with unused results
        self.keys, self.values = self.model.attention.allocate_keys(self.laid, self.backend.value_width)
        self.gatherer: Gatherer | None = None
        self.travels: torch.Tensor | Peers | None = None
        if self.group.size > 1:
            self.gatherer = Gatherer(self.group, self.way, self.device)
            self.gathered = allocate_empty(self.window, width, dtype=self.stored)
            part = self.window // self.group.size * width * self.stored.itemsize
            if self.way == "direct":
                self.travels = allocate_symmetric(self.group, part, self.device)
            else:
                self.travels = torch.empty(part * self.group.size, dtype=torch.uint8, device=self.device)

    def warm_kernels(self) -> None:
        """Run the kernels that only windows need once, so that no step of a load waits for a compiler."""
        one = self.backend.plan([1], [1], causal=False)
        q_ThX = self.keys.new_zeros(1, self.model.heads, self.keys.shape[-1])
        o_ThV, lse_Th = one.run(q_ThX, self.keys, self.values)
        merge_attn_states(o_ThV.to(torch.float32, memory_format=torch.contiguous_format), lse_Th, o_ThV, lse_Th.clone())

    def plan_chunks(self, chunks: Sequence[Chunk], table_SC: torch.Tensor, first: int = 0) -> PrefillPlan:
        """Plan the chunks of a step, at least one, from their host-side integers. Does not wait for the device.

        table_SC: int32 virtual locations by request slot and token, on the device; they are looked up after all earlier
        launches, so the lookup sees earlier writes of this step's entries, and later writes do no harm. `first`: the
        first of the chunks' rows in the step.
        """
        lengths, starts, stops = ([getattr(chunk, of) for chunk in chunks] for of in ("tokens", "start", "stop"))
        if sum(lengths) > self.tokens:
            raise UsageError(
                f"a step of {sum(lengths)} prompt tokens is larger than --prefill chunk allows, {self.tokens}."
            )
        assert all(start % self.unit == 0 for start in starts)
        rows = list(itertools.accumulate(lengths, initial=first))
        cut = split_calls(starts, stops, self.window, len(self.keys))
        stored = self._list_rows([chunk.slot for chunk in chunks], starts, table_SC)
        numbers = iter(self._make_numbers([_list_places(call, lengths, rows) for part in cut for call in part]))
        found, done = [], 0
        for part in cut:
            seen = []
            for call in part:
                mine = stored[done : done + sum(call.stored) // self.group.size]
                done += len(mine)
                seen.append(self._make_key_set(call, lengths[call.chunks], next(numbers), mine))
            at = part[0].chunks
            found.append(Part(slice(rows[at.start] - first, rows[at.stop] - first), seen[0], seen[1:]))
        return PrefillPlan(self, slice(first, rows[-1]), found)

    def _make_numbers(self, places: list[np.ndarray]) -> Sequence[torch.Tensor]:
        """Return AttendedKeys.numbers of the calls, with their stored rows numbered consecutively."""
        host = torch.from_numpy(np.concatenate([part for one in places for part in ([len(one)], one)]).astype(np.int32))
        return copy_to_device(host, self.device).split([1 + len(one) for one in places])

    def _make_key_set(
        self, call: Call, lengths: list[int], numbers: torch.Tensor, stored: torch.Tensor
    ) -> AttendedKeys:
        """Return the keys of a call; `stored` are this rank's rows of its prefixes, and `lengths` those of its chunks."""
        if len(stored) and self.group.size == 1:
            places = numbers[1:]
            torch.where(places < 0, places, stored[places.clamp(min=0)], out=places)
        keys = [before + own * call.own for before, own in zip(call.stored, lengths, strict=True)]
        return AttendedKeys(
            numbers=numbers,
            task=self._make_task(call.stored, stored) if len(stored) and self.group.size > 1 else None,
            attention=self.backend.plan(lengths, keys, causal=call.own),
        )

    def _list_rows(self, slots: list[int], lengths: list[int], table_SC: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the given number of first tokens of each request, request by request in token
        order.
        """
        rows = torch.empty(sum(lengths) // self.group.size, dtype=torch.int32, device=self.device)
        if not len(rows):
            return rows
        absent = [0] * (MIN_PREFIXES - len(slots))
        numbers = torch.tensor([slots + absent, lengths + absent], dtype=torch.int32)
        slots_B, lengths_B = copy_to_device(numbers, self.device)
        ends, shares = torch.empty(2, len(slots_B) + 1, dtype=torch.int32, device=self.device)
        write_pages(rows, ends, shares, table_SC, slots_B, lengths_B, self.shard)
        return rows

    def _make_task(self, lengths: Sequence[int], rows: torch.Tensor) -> Task:
        lengths = (*lengths, *[0] * (MIN_PREFIXES - len(lengths)))
        prefix = Prefix(lengths, self.group.size, self.shard.interleave)
        table = make_request_table(prefix, self.device)
        return Task(prefix=prefix, table=table, rows=rows, width=self.model.kv.data.shape[-1], dtype=self.stored)

    def gather_prefix(self, seen: AttendedKeys, index: int) -> None:
        """Gather the stored rows of layer `index` in token order, unconverted, valid until the next call. Collective."""
        if seen.task is None:
            return
        assert self.gatherer is not None
        assert self.travels is not None
        kv_KQ = self.model.kv.get_rows(index).view(self.stored)
        with record_range("prefix_gather"):
            self.gatherer.gather_layer(seen.task, kv_KQ, self.gathered[: seen.task.prefix.tokens], self.travels)

    def load_keys(self, seen: AttendedKeys, new_BQ: torch.Tensor, index: int) -> None:
        """Write keys and values of this rank's heads in layer `index` to `keys` and `values`. Collective; see AttendedKeys.

        New rows [B, Q] are contiguous, in the dtype of the computation, and attended to unrounded, in any storage
        format. Other ranks' rows of the layer need to cover only the prefixes.
        """
        self.gather_prefix(seen, index)
        self.unpack_gathered(seen.numbers, new_BQ, index)

    def unpack_gathered(self, numbers: torch.Tensor, new_BQ: torch.Tensor, index: int) -> None:
        """Run `load_keys` on gathered rows. The count is read on the device, and may be smaller than the size of
        `numbers`.
        """
        model, kv_KQ, w = self.model, self.model.kv.get_rows(index), self.model.weights.get_layer(index).attention
        stored_KQ = kv_KQ if self.group.size == 1 else self.gathered.view(kv_KQ.dtype)
        with record_range("prefill"):
            gather_rows(self.laid, stored_KQ, new_BQ, numbers[:1], numbers[1:], model.kv.scale)
            model.attention.unpack_rows(self.laid, numbers[:1], w, self.keys, self.values)


def _list_places(call: Call, lengths: list[int], rows: list[int]) -> np.ndarray:
    """Return the row of each key of a call in the form of kernels.kv_up_proj.gather_rows, with stored rows numbered from 0.

    `rows` holds the first row of each chunk in the step.
    """
    found, stored = [np.empty(0, dtype=np.int64)], 0
    for chunk, before in zip(range(len(lengths))[call.chunks], call.stored, strict=True):
        found.append(np.arange(stored, stored + before))
        stored += before
        if call.own:
            found.append(-1 - np.arange(rows[chunk], rows[chunk] + lengths[chunk]))
    return np.concatenate(found)
