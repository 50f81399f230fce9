"""Attention of a step's prompt chunks: over their own rows, and over the prefix that the DCP ranks have stored.

All ranks of a replica compute the KV rows of a chunk, so that its own part needs nobody. The stored prefix is gathered
layer by layer into token order and decompressed for this rank's heads. That happens in windows of bounded size, over
all chunks of the step, however long the prompts are:

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

import torch

from dcpbench.errors import CapacityError, UsageError
from dcpbench.exchange.prefix import Gatherer, Task, symmetric
from dcpbench.kernels.kv_gather import pack, request_table
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
class StoredWindow:
    """A window as the layers of a step need it."""

    rows: slice
    """Of the step's chunk rows: those that attend to it."""
    tokens: int
    stored: torch.Tensor
    """int32: this rank's rows of the KV pool that are in it, request by request in token order."""
    task: Task | None
    """How it is gathered; None where this rank has all of it."""
    attention: Ragged
    views: Views
    """Of its rows, once they are gathered."""


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """What a step prefills, for all of its layers. It stays valid, and lets others be made, until the step has run."""

    prefiller: Prefiller
    tokens: int
    """Rows of the step, behind those of its decodes."""
    own: Ragged
    windows: list[StoredWindow]

    def attend(
        self,
        q_ThX: torch.Tensor,
        key_ThX: torch.Tensor,
        value_ThW: torch.Tensor,
        w: Attention,
        index: int,
        out_ThV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Values of the chunks' tokens for this rank's heads, [T, h, V] in q's dtype, in `out` if given. Collective.

        q_ThX [T, h, nope + P] has rope applied and is not absorbed; keys and values are the same tokens', as `decompress`
        gave them. All are contiguous. The rows of layer `index` in the pool need hold the prefixes only.
        """
        if not self.windows:
            with phase("prefill"):
                return self.own.values(q_ThX, key_ThX, value_ThW, out_ThV)
        with phase("prefill"):
            o_ThV, lse_Th = self.own.run(q_ThX, key_ThX, value_ThW)
        if len(self.windows) == 1 and self.windows[0].rows == slice(0, self.tokens):
            out_ThV = o_ThV.new_empty(o_ThV.shape) if out_ThV is None else out_ThV
            more_ThV, more_Th = self._window(self.windows[0], q_ThX, w, index)
            with phase("prefill"):
                merge_into(o_ThV, lse_Th, more_ThV, more_Th, out_ThV)
            return out_ThV
        sum_ThV = o_ThV.to(torch.float32, memory_format=torch.contiguous_format)
        for window in self.windows:
            more_ThV, more_Th = self._window(window, q_ThX[window.rows], w, index)
            with phase("prefill"):
                merge_into(sum_ThV[window.rows], lse_Th[window.rows], more_ThV, more_Th)
        return sum_ThV.to(q_ThX.dtype) if out_ThV is None else out_ThV.copy_(sum_ThV)

    def _window(
        self, window: StoredWindow, q_ThX: torch.Tensor, w: Attention, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to a window by the rows of its chunks."""
        with phase("prefix_gather"):
            self.prefiller.gather(window, self.prefiller.model.kv.rows(index))
        with phase("prefill"):
            return window.attention.run(q_ThX, *window.views.decompress(w))


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
        """Buffers that every layer uses anew: keys, values, gathered rows, and what travels."""
        shape, width = self.model.shape, self.model.shape.kv_width
        most = max(self.window, self.rows)

        def empty(*size: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=self.device)

        self.keys = empty(most, self.model.heads, shape.nope + shape.rope)
        self.values = empty(most, self.model.heads, self.backend.value_width)
        self.values[..., shape.value :] = 0
        self.gathered = empty(self.window, width, dtype=self.stored)
        self.widened = empty(self.window, width) if self.stored != self.dtype else self.gathered
        self.gatherer: Gatherer | None = None
        self.travels: torch.Tensor | Peers | None = None
        if self.group.size > 1:
            self.gatherer = Gatherer(self.group, self.way, self.device)
            part = self.window // self.group.size * width * self.stored.itemsize
            if self.way == "direct":
                self.travels = symmetric(self.group, part, self.device)
            else:
                self.travels = torch.empty(part * self.group.size, dtype=torch.uint8, device=self.device)

    def plan(self, chunks: Sequence[Chunk], table_SC: torch.Tensor) -> PrefillPlan:
        """Plan the chunks of a step, at least one, from their host-side integers. Does not wait for the device.

        table_SC: int32 virtual locations by request slot and token, on the device; prefixes are looked up in it behind
        whatever was launched before, so writes of this step's entries come first, and later ones do no harm.
        """
        lengths = [chunk.tokens for chunk in chunks]
        if sum(lengths) > self.tokens:
            raise UsageError(f"a step of {sum(lengths)} prompt tokens is larger than --chunk allows, {self.tokens}.")
        assert all(chunk.start % self.unit == 0 for chunk in chunks)
        return PrefillPlan(
            prefiller=self,
            tokens=sum(lengths),
            own=self.backend.plan(lengths, lengths, causal=True),
            windows=self._stored(chunks, lengths, table_SC) if any(chunk.start for chunk in chunks) else [],
        )

    def _stored(self, chunks: Sequence[Chunk], lengths: list[int], table_SC: torch.Tensor) -> list[StoredWindow]:
        starts = list(itertools.accumulate(lengths, initial=0))
        stored = self._rows([c.slot for c in chunks], [c.start for c in chunks], table_SC)
        found, done = [], 0
        for window in windows([c.start for c in chunks], self.window):
            mine = window.tokens // self.group.size
            rows = stored[done : done + mine]
            done += mine
            found.append(
                StoredWindow(
                    rows=slice(starts[window.first], starts[window.chunks.stop]),
                    tokens=window.tokens,
                    stored=rows,
                    task=self._task(window, rows),
                    attention=self.backend.plan(lengths[window.chunks], window.lengths, causal=False),
                    views=Views.of(self, self.widened[: window.tokens]),
                )
            )
        return found

    def _rows(self, slots: list[int], prefixes: list[int], table_SC: torch.Tensor) -> torch.Tensor:
        """This rank's rows of all prefixes, request by request in token order."""
        absent = [0] * (FEWEST - len(slots))
        numbers = torch.tensor([slots + absent, prefixes + absent], dtype=torch.int32)
        if self.device.type == "cuda":
            numbers = numbers.pin_memory()
        slots_B, lengths_B = numbers.to(self.device, non_blocking=True)
        rows = torch.empty(sum(prefixes) // self.group.size, dtype=torch.int32, device=self.device)
        ends, shares = torch.empty(2, len(slots_B) + 1, dtype=torch.int32, device=self.device)
        fill_pages(rows, ends, shares, table_SC, slots_B, lengths_B, self.share)
        return rows

    def _task(self, window: Window, rows: torch.Tensor) -> Task | None:
        if self.group.size == 1:
            return None
        lengths = window.lengths + (0,) * (FEWEST - len(window.lengths))
        prefix = Prefix(lengths, self.group.size, self.share.interleave)
        table = request_table(prefix, self.device)
        return Task(prefix=prefix, table=table, rows=rows, width=self.model.shape.kv_width, dtype=self.stored)

    def gather(self, window: StoredWindow, kv_KQ: torch.Tensor) -> None:
        """A window's rows in token order into `widened`, [tokens, Q] in the dtype computed with. Collective."""
        out_SQ, kv_KQ = self.gathered[: window.tokens], kv_KQ.view(self.stored)
        if window.task is None:
            pack(out_SQ, kv_KQ, window.stored)
        else:
            assert self.gatherer is not None
            assert self.travels is not None
            self.gatherer.gather(window.task, kv_KQ, out_SQ, self.travels)
        if self.stored != self.dtype:
            wide_SQ = self.widened[: window.tokens].copy_(out_SQ.view(self.model.kv.data.dtype))
            if self.model.kv.scale != 1:
                wide_SQ.mul_(self.model.kv.scale)

    def decompressed(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last `decompress` of so many rows gave."""
        return self.keys[:rows], self.values[:rows]

    def decompress(self, row_SQ: torch.Tensor, w: Attention) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [S, h, nope + P] and values [S, h, W] of this rank's heads, until the next call."""
        return Views.of(self, row_SQ).decompress(w)


@dataclasses.dataclass(frozen=True)
class Views:
    """Rows of KV, and where their keys and values go, as products take them: made once for all layers, as making them takes
    the host longer than the products.
    """

    prefiller: Prefiller
    latent: torch.Tensor
    """[h, S, R]: of the rows, for each head; `rotated` is their rope part."""
    rotated: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    nope: torch.Tensor
    """[h, S, nope]: of the keys; `to` is where `rotated` goes."""
    to: torch.Tensor
    value: torch.Tensor
    """[h, S, V]: of the values."""

    @classmethod
    def of(cls, prefiller: Prefiller, row_SQ: torch.Tensor) -> Views:
        """Of rows that stay where they are."""
        shape = prefiller.model.shape
        keys, values = prefiller.decompressed(len(row_SQ))
        to, rotated = _in_words(keys[..., shape.nope :], row_SQ[:, None, shape.latent :])
        return cls(
            prefiller=prefiller,
            latent=row_SQ[:, : shape.latent].expand(prefiller.model.heads, -1, -1),
            rotated=rotated,
            keys=keys,
            values=values,
            nope=keys[..., : shape.nope].transpose(0, 1),
            to=to,
            value=values[..., : shape.value].transpose(0, 1),
        )

    def decompress(self, w: Attention) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        model = self.prefiller.model
        own = slice(model.groups.dcp.rank * model.heads, (model.groups.dcp.rank + 1) * model.heads)
        w_uk = w.w_uk[own] if model.wide.query else w.w_uk
        w_uv = w.w_uv[own] if model.wide.value else w.w_uv
        torch.bmm(self.latent, w_uk.transpose(1, 2), out=self.nope)
        torch.bmm(self.latent, w_uv, out=self.value)
        self.to.copy_(self.rotated)
        return self.keys, self.values


def _in_words(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same memory as int64 where all sizes and strides allow: a strided copy takes as long a word as a number."""
    count = 8 // tensors[0].dtype.itemsize
    whole = all(n % count == 0 for x in tensors for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return [x.view(torch.int64) for x in tensors] if whole else tensors
