"""Attention of a step's prompt chunks: over the prefix that the DCP ranks have stored, and over their own rows behind it.

All ranks of a replica compute the KV rows of a chunk, so that its own part needs nobody. The stored prefix is gathered
layer by layer into token order. Both are laid into one buffer, decompressed for this rank's heads, and attended to in one
call, whose mask is causal from each request's end:

    keys       │ prefix 0 ········ │ chunk 0 ··· │ chunk 1 ·· │ prefix 2 ·· │ chunk 2 ····· │

Where that is more than the buffer holds, the first call is over the chunks' own rows alone, and the prefixes follow in windows
of bounded size, over all chunks of the step, however long the prompts are:

    prefixes   │ chunk 0 ········ │ chunk 1 ····················· │
    windows    │ window 0 ·· │ window 1 ·· │ window 2 ·· │ window 3│     each attended to without a mask, by the rows of
                                                                       its chunks, and merged by log-sum-exp

A chunk begins at a multiple of page_size · dcp tokens, and windows end at such, too: a rank's rows of a window are then
a slice of its rows of all prefixes, and every rank has equally many.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from dcpbench.errors import CapacityError, UsageError
from dcpbench.exchange.prefix import Gatherer, Task, symmetric
from dcpbench.kernels.keys import decompress, lay
from dcpbench.kernels.kv_gather import request_table
from dcpbench.kernels.kv_indices import fill_pages
from dcpbench.kernels.merge import merge_into
from dcpbench.kernels.prefill import PrefillSpec, make_prefill
from dcpbench.kernels.rope import softmax_scale
from dcpbench.measuring.ranges import phase
from dcpbench.points import memory
from dcpbench.points.batches import chunk_rows
from dcpbench.points.layout import Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.engine.model import Model
    from dcpbench.engine.weights import Attention
    from dcpbench.kernels.peers import Peers
    from dcpbench.kernels.prefill import Ragged
    from dcpbench.serving.requests import Chunk

FEWEST = 32
"""Prefixes that kernels which look up, gather and order rows are compiled for at least; absent ones are empty."""
GATHERS = ("nccl", "direct")
"""Ways in which prefixes come from the ranks; see exchange/prefix.py."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A piece of the stored prefixes, and who attends to it."""

    first: int
    """First of the chunks that have tokens in it."""
    lengths: tuple[int, ...]
    """Tokens of that chunk's prefix and of the following ones'; 0 for a chunk without a prefix."""

    @property
    def chunks(self) -> slice:
        """Which chunks of the step."""
        return slice(self.first, self.first + len(self.lengths))

    @property
    def tokens(self) -> int:
        """Of all its chunks."""
        return sum(self.lengths)


def windows(prefixes: Sequence[int], most: int) -> list[Window]:
    """Cut prefixes of so many tokens, one behind the other, into windows of `most` tokens; the last may be shorter."""
    found: list[Window] = []
    lengths: list[int] = []
    first, room = 0, most
    for chunk, prefix in enumerate(prefixes):
        left = prefix
        while left:
            if not lengths:
                first = chunk
            lengths += [0] * (chunk - first + 1 - len(lengths))
            lengths[-1] = min(left, room)
            left -= lengths[-1]
            room -= lengths[-1]
            if not room:
                found.append(Window(first, tuple(lengths)))
                lengths, room = [], most
    return [*found, Window(first, tuple(lengths))] if lengths else found


@dataclasses.dataclass(frozen=True)
class Seen:
    """What rows of a step attend to in one call, as its layers need it."""

    rows: slice
    """Of the chunks' rows: those that attend to it."""
    count: torch.Tensor
    """int32 [1], on the device: how many keys there are."""
    places: torch.Tensor
    """int32 [keys]: where each key's row is, see kernels.keys.lay; stored ones are in the pool, or behind a task gathered."""
    task: Task | None
    """How stored rows are gathered; None where there are none, and where this rank has all of them."""
    attention: Ragged


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """What a step prefills, for all of its layers. It stays valid, and lets others be made, until the step has run.

    In each layer come `gather`, then Prefiller.decompress for `seen`, then `attend`.
    """

    prefiller: Prefiller
    rows: slice
    """Of the step: those of its chunks, behind its decodes."""
    seen: Seen
    """By all of them: prefixes and their own rows, or these alone where there are windows."""
    windows: list[Seen]
    """Of the prefixes."""

    def gather(self, index: int) -> None:
        """Bring what other ranks have stored of `seen`; they need hold no more than the prefixes. Collective."""
        self.prefiller.gather(self.seen, index)

    def attend(
        self, q_ThX: torch.Tensor, w: Attention, index: int, out_ThV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Values of the chunks' tokens for this rank's heads, [T, h, V] in q's dtype, in `out` if given. Collective.

        q_ThX [T, h, nope + P] has rope applied and is not absorbed; it is contiguous.
        """
        keys, values = self.prefiller.keys, self.prefiller.values
        if not self.windows:
            with phase("prefill"):
                return self.seen.attention.values(q_ThX, keys, values, out_ThV)
        with phase("prefill"):
            o_ThV, lse_Th = self.seen.attention.run(q_ThX, keys, values)
            sum_ThV = o_ThV.to(torch.float32, memory_format=torch.contiguous_format)
        for window in self.windows:
            self.prefiller.gather(window, index)
            with phase("prefill"):
                self.prefiller.decompress(window.count, window.places, self.prefiller.laid[:0], w, index)
                more_ThV, more_Th = window.attention.run(q_ThX[window.rows], keys, values)
                merge_into(sum_ThV[window.rows], lse_Th[window.rows], more_ThV, more_Th)
        return sum_ThV.to(q_ThX.dtype) if out_ThV is None else out_ThV.copy_(sum_ThV)


class Prefiller:
    """Plans and attends on one rank. Made once per engine; what a step needs besides is reserved here."""

    def __init__(
        self,
        model: Model,
        *,
        backend: str,
        tokens: int,
        rows: int = 0,
        gather: str = "nccl",
        window_bytes: int | None = None,
    ) -> None:
        """Collective where a prefix is gathered. `tokens`: most chunk tokens of one step of this replica; `rows`: most
        of one step, decodes among them.

        `window_bytes` bounds what a window takes (memory.window_bytes), by default that of PREFILL_WINDOW tokens.
        Raises UsageError for a way or backend that does not exist or cannot run, CapacityError where peers' memory
        cannot be read or the bytes hold no window.
        """
        if gather not in GATHERS:
            raise UsageError(f"a prefix cannot be gathered by {gather}; choose one of {', '.join(GATHERS)}.")
        shape, data = model.shape, model.kv.data
        self.model, self.group, self.way = model, model.groups.dcp, gather
        self.device, self.dtype = data.device, model.dtype
        self.stored = torch.uint8 if data.dtype.itemsize == 1 else data.dtype
        """What rows of the pool travel as: those of e4m3 as bytes."""
        self.share = dataclasses.replace(model.share, page_size=1)
        self.unit = data.shape[2] * model.layout.dcp
        self.tokens, self.rows = tokens, chunk_rows(max(tokens, rows))
        self.window = self._window(window_bytes)
        self.backend = make_prefill(
            backend,
            PrefillSpec(
                heads=model.heads,
                width=shape.nope + shape.rope,
                value=shape.value,
                scale=softmax_scale(shape),
                dtype=self.dtype,
                device=self.device,
            ),
        )
        self._reserve()

    def _window(self, window_bytes: int | None) -> int:
        """Tokens of a window."""
        if window_bytes is None:
            return max(memory.PREFILL_WINDOW // self.unit, 1) * self.unit
        shape, layout = self.model.shape, self.model.layout
        one = memory.window_bytes(shape, layout, self.unit, self.dtype.itemsize, self.stored.itemsize)
        if window_bytes < one:
            raise CapacityError(
                f"{window_bytes} bytes hold no window of a stored prefix: {self.unit} tokens, one page on each DCP "
                f"rank, need {one}; give more memory, or a smaller --page-size."
            )
        return window_bytes // one * self.unit

    def _reserve(self) -> None:
        """Buffers that every layer uses anew: keys, values, the rows that they come from, gathered ones, and what travels."""
        shape, width = self.model.shape, self.model.shape.kv_width
        most = max(self.window, self.rows)

        def empty(*size: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self.device)

        self.keys = empty(most, self.model.heads, shape.nope + shape.rope)
        self.values = empty(most, self.model.heads, self.backend.value_width)
        self.values[..., shape.value :] = 0
        self.laid = empty(most, width)
        self.gatherer: Gatherer | None = None
        self.travels: torch.Tensor | Peers | None = None
        if self.group.size > 1:
            self.gatherer = Gatherer(self.group, self.way, self.device)
            self.gathered = empty(self.window, width, dtype=self.stored)
            self.in_order = torch.arange(self.window, dtype=torch.int32, device=self.device)
            part = self.window // self.group.size * width * self.stored.itemsize
            if self.way == "direct":
                self.travels = symmetric(self.group, part, self.device)
            else:
                self.travels = torch.empty(part * self.group.size, dtype=torch.uint8, device=self.device)

    def compile(self) -> None:
        """Have the device run once what only windows need, so that no step of a load waits for a compiler."""
        one = self.backend.plan([1], [1], causal=False)
        o_ThV, lse_Th = one.run(self.keys[:1], self.keys, self.values)
        merge_into(o_ThV.to(torch.float32, memory_format=torch.contiguous_format), lse_Th, o_ThV, lse_Th.clone())

    def plan(self, chunks: Sequence[Chunk], table_SC: torch.Tensor, first: int = 0) -> PrefillPlan:
        """Plan the chunks of a step, at least one, from their host-side integers. Does not wait for the device.

        table_SC: int32 virtual locations by request slot and token, on the device; they are looked up in it behind
        whatever was launched before, so writes of this step's entries come first, and later ones do no harm. `first`: the
        first of the chunks' rows in the step.
        """
        lengths, starts, stops = ([getattr(chunk, of) for chunk in chunks] for of in ("tokens", "start", "stop"))
        if sum(lengths) > self.tokens:
            raise UsageError(f"a step of {sum(lengths)} prompt tokens is larger than --chunk allows, {self.tokens}.")
        assert all(start % self.unit == 0 for start in starts)
        whole = sum(starts) <= self.window and sum(stops) <= len(self.keys)
        cut = [] if whole else windows(starts, self.window)
        places = _places(lengths, starts if whole else [0] * len(starts), first)
        numbers = self._numbers([len(places), *(window.tokens for window in cut)], places)
        counts, places_S = numbers[: 1 + len(cut)].split(1), numbers[1 + len(cut) :]
        slots, task = [chunk.slot for chunk in chunks], None
        if whole and any(starts):
            if self.group.size > 1:
                task = self._task(starts, self._rows(slots, starts, table_SC))
            else:
                torch.where(places_S < 0, places_S, self._rows(slots, stops, table_SC), out=places_S)
        return PrefillPlan(
            prefiller=self,
            rows=slice(first, first + sum(lengths)),
            seen=Seen(
                rows=slice(0, sum(lengths)),
                count=counts[0],
                places=places_S,
                task=task,
                attention=self.backend.plan(lengths, stops if whole else lengths, causal=True),
            ),
            windows=self._windows(cut, counts[1:], lengths, self._rows(slots, starts, table_SC)) if cut else [],
        )

    def _windows(
        self, cut: Sequence[Window], counts: Sequence[torch.Tensor], lengths: list[int], stored: torch.Tensor
    ) -> list[Seen]:
        """`stored`: this rank's rows of all prefixes."""
        starts = list(itertools.accumulate(lengths, initial=0))
        found, done = [], 0
        for window, count in zip(cut, counts, strict=True):
            mine = window.tokens // self.group.size
            rows = stored[done : done + mine]
            done += mine
            alone = self.group.size == 1
            found.append(
                Seen(
                    rows=slice(starts[window.first], starts[window.chunks.stop]),
                    count=count,
                    places=rows if alone else self.in_order[: window.tokens],
                    task=None if alone else self._task(window.lengths, rows),
                    attention=self.backend.plan(lengths[window.chunks], window.lengths, causal=False),
                )
            )
        return found

    def _numbers(self, counts: list[int], places: np.ndarray) -> torch.Tensor:
        """Both, one behind the other, on the device as int32."""
        numbers = torch.from_numpy(np.concatenate((np.asarray(counts, dtype=np.int32), places)))
        if self.device.type == "cuda":
            numbers = numbers.pin_memory()
        return numbers.to(self.device, non_blocking=True)

    def _rows(self, slots: list[int], lengths: list[int], table_SC: torch.Tensor) -> torch.Tensor:
        """This rank's rows of so many first tokens of each request, request by request in token order."""
        absent = [0] * (FEWEST - len(slots))
        numbers = torch.tensor([slots + absent, lengths + absent], dtype=torch.int32)
        if self.device.type == "cuda":
            numbers = numbers.pin_memory()
        slots_B, lengths_B = numbers.to(self.device, non_blocking=True)
        rows = torch.empty(sum(lengths) // self.group.size, dtype=torch.int32, device=self.device)
        ends, shares = torch.empty(2, len(slots_B) + 1, dtype=torch.int32, device=self.device)
        fill_pages(rows, ends, shares, table_SC, slots_B, lengths_B, self.share)
        return rows

    def _task(self, lengths: Sequence[int], rows: torch.Tensor) -> Task:
        lengths = (*lengths, *[0] * (FEWEST - len(lengths)))
        prefix = Prefix(lengths, self.group.size, self.share.interleave)
        table = request_table(prefix, self.device)
        return Task(prefix=prefix, table=table, rows=rows, width=self.model.shape.kv_width, dtype=self.stored)

    def gather(self, seen: Seen, index: int) -> None:
        """Stored rows of layer `index` in token order, as they are stored, until the next call. Collective."""
        if seen.task is None:
            return
        assert self.gatherer is not None
        assert self.travels is not None
        kv_KQ = self.model.kv.rows(index).view(self.stored)
        with phase("prefix_gather"):
            self.gatherer.gather(seen.task, kv_KQ, self.gathered[: seen.task.prefix.tokens], self.travels)

    def decompress(
        self, count: torch.Tensor, places: torch.Tensor, new_BQ: torch.Tensor, w: Attention, index: int
    ) -> None:
        """`count` keys and values of this rank's heads in layer `index`, until the next call; see Seen and kernels/keys.

        New rows [B, Q] are contiguous, in the dtype computed with, and attended to as they are, however they are stored.
        """
        model, kv_KQ = self.model, self.model.kv.rows(index)
        stored_KQ = kv_KQ if self.group.size == 1 else self.gathered.view(kv_KQ.dtype)
        own = slice(model.groups.dcp.rank * model.heads, (model.groups.dcp.rank + 1) * model.heads)
        w_uk = w.w_uk[own] if model.wide.query else w.w_uk
        w_uv = w.w_uv[own] if model.wide.value else w.w_uv
        with phase("prefill"):
            lay(self.laid, stored_KQ, new_BQ, count, places, model.kv.scale)
            decompress(self.laid, count, w_uk, w_uv, self.keys, self.values)


def _places(lengths: Sequence[int], stored: Sequence[int], first: int) -> np.ndarray:
    """Of chunks' keys, int32: so many stored rows, numbered through, and behind them the chunk's own, from `first` on as
    kernels.keys.lay wants new ones.
    """
    found = []
    row = 0
    for length, before in zip(lengths, stored, strict=True):
        found += [np.arange(row, row + before), -1 - np.arange(first, first + length)]
        row, first = row + before, first + length
    return np.concatenate(found).astype(np.int32)
