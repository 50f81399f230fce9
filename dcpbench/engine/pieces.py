"""Steps with chunks in captured pieces: all that lies between the attentions of two layers, however rows are divided.

    embed │ piece 0 │ attention 0 │ piece 1 │ attention 1 │ … │ piece L │ logits
            norm, projections and KV rows of a layer, from piece 1 on behind o_proj and MLP of the layer before

Launched kernel by kernel, such a step keeps the host busy for longer than most keep the device. Attention goes by plans
that the host makes for each step, and stays outside. Rows are padded (`chunk_rows`), and what pieces and attention hand
to each other lies in one room for steps of all sizes.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING

import torch

from dcpbench.engine.model import StepInput
from dcpbench.measuring.ranges import quiet
from dcpbench.points.batches import PADDING_POSITION, chunk_row_sizes, chunk_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.engine.model import Model


@dataclasses.dataclass(frozen=True)
class Room:
    """Where pieces read and leave what outlives them; rows as in model.py."""

    positions: torch.Tensor
    """int64 [B]"""
    locs: torch.Tensor
    """int32 [B]"""
    residual: torch.Tensor
    """[B, D]"""
    q: torch.Tensor
    """[B, …]: what the last projection before q gives."""
    kv: torch.Tensor
    """[B, Q]: rows of a layer on their way into the pool."""
    values: torch.Tensor
    """[B, h, V]: of a layer's attention."""
    last: torch.Tensor
    """[B, D]: output of the last MLP."""

    @classmethod
    def of(cls, model: Model, rows: int) -> Room:
        """For up to so many rows."""
        w, shape, device = model.weights.layer(0).attention, model.shape, model.kv.data.device

        def zeros(*size: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(rows, *size, dtype=dtype, device=device)

        return cls(
            positions=zeros(dtype=torch.int64),
            locs=zeros(dtype=torch.int32),
            residual=zeros(shape.hidden),
            q=zeros(len((w.qkv_a if w.q_b is None else w.q_b).data)),
            kv=zeros(shape.kv_width),
            values=zeros(model.heads, shape.value),
            last=zeros(shape.hidden),
        )

    def first(self, rows: int) -> Room:
        """The part for steps of so many rows."""
        return Room(*(getattr(self, field.name)[:rows] for field in dataclasses.fields(self)))


class Cut:
    """The pieces of steps of one number of rows; run kernel by kernel until they are captured, and on the CPU."""

    def __init__(self, model: Model, room: Room, router_inputs: torch.Tensor | None) -> None:
        self.model, self.room = model, room
        self.batch = StepInput(room.positions, room.positions, room.locs, router_inputs)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.left: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What captured pieces leave, in the room."""

    def begin(self, batch: StepInput, residual_BD: torch.Tensor, used: int) -> None:
        """A step of `batch`, whose rows but for the first `used` are padding."""
        room = self.room
        room.positions.copy_(batch.positions)
        room.locs.copy_(batch.locs)
        room.residual.copy_(residual_BD)
        room.values[used:] = 0

    def run(self, index: int, y_BhV: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See Model.piece; y is in the room."""
        if not self.graphs:
            return self._piece(index, y_BhV)
        self.graphs[index].replay()
        return self.left[index]

    def _piece(self, index: int, y_BhV: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.piece(index, y_BhV, batch=self.batch, residual_BD=self.room.residual, out=self.room)

    def capture(self, pool: torch.cuda._POOL_HANDLE) -> None:
        """Capture every piece. One of each kind has run before on every rank: nothing is loaded meanwhile."""
        layers, dense = self.model.shape.layers, self.model.shape.first_dense
        for index in sorted({0, min(1, layers), min(dense, layers), min(dense + 1, layers), layers}):
            self._piece(index, self.room.values if index else None)
        torch.cuda.synchronize()
        graphs, left = [], []
        for index in range(layers + 1):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            left.append(self._piece(index, self.room.values if index else None))
            graph.capture_end()
            graphs.append(graph)
        self.graphs, self.left = graphs, left


class Pieces:
    """The pieces of all steps with chunks of one rank."""

    def __init__(self, model: Model, rows: int, router_inputs: torch.Tensor | None) -> None:
        """`rows`: most of a step of this replica."""
        self.model, self.router_inputs = model, router_inputs
        self.room = Room.of(model, chunk_rows(rows))
        self.cuts: dict[int, Cut] = {}

    def of(self, rows: int) -> Cut:
        """Those of steps of so many rows, one of `chunk_row_sizes`."""
        if rows not in self.cuts:
            self.cuts[rows] = Cut(self.model, self.room.first(rows), self.router_inputs)
        return self.cuts[rows]

    def capture(self, alive: Callable[[], None] = lambda: None) -> None:
        """Capture them for every size, the largest first, whose memory the others use again. Collective; once."""
        most = len(self.room.positions)
        sizes = [size for size in reversed(chunk_row_sizes(most)) if not self.of(size).graphs]
        if not sizes:
            return
        self.room.positions.fill_(PADDING_POSITION)
        self.room.locs.zero_()
        pool = torch.cuda.graph_pool_handle()
        gc.collect()  # what is no longer used is not freed while a graph is captured
        gc.disable()
        try:
            torch.cuda.synchronize()
            with quiet(), torch.cuda.stream(torch.cuda.Stream(self.room.positions.device)):
                for size in sizes:
                    self.of(size).capture(pool)
                    alive()
            torch.cuda.synchronize()
        finally:
            gc.enable()
        torch.cuda.empty_cache()  # what the pieces took while they ran without a graph
