"""Run steps with prompt chunks as captured pieces: everything but the attention of chunks, for any division of rows.

    embed │ piece 0 │ decodes 0 │ chunks 0 │ piece 1 │ decodes 1 │ chunks 1 │ … │ piece L │ logits
            norm, projections, rope, KV rows, and chunks' keys and values of a layer, including those of stored
            prefixes; from piece 1 on after o_proj and MLP of the layer before

Launched kernel by kernel, most such steps keep the host busy for longer than the device. The attention of chunks
depends on plans that the host makes for each step, and stays outside the graphs; so does the gathering of prefixes from
other ranks, before each piece, and windows of prefixes that are too long for one call. The number of keys is stored on
the device, and no graph depends on it. A graph of a piece is made for a number of rows, padded (`chunk_rows`); a graph
of decodes, with their exchange, for a number of decode rows, as graphs of whole steps are. Pieces of all sizes pass
data in one set of buffers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import TYPE_CHECKING

import torch

from dcpbench.engine.model import StepInput
from dcpbench.hangs import heartbeats
from dcpbench.measuring.ranges import drop_ranges
from dcpbench.points.batches import PADDING_POSITION, list_chunk_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dcpbench.engine.decode_engine import Batch
    from dcpbench.engine.model import Model
    from dcpbench.engine.prefill import AttendedKeys, Prefiller, PrefillPlan
    from dcpbench.engine.synthetic import RouterInputs


@dataclasses.dataclass(frozen=True)
class StepBuffers:
    """Buffers for the inputs and outputs of pieces; rows as in model.py."""

    positions: torch.Tensor  # int64 [B]
    locs: torch.Tensor  # int32 [B]
    residual: torch.Tensor  # [B, D]
    q: torch.Tensor  # [B, …]: begins with q of the heads projected here
    kv: torch.Tensor  # [B, Q]: rows of a layer on their way into the pool
    values: torch.Tensor  # [B, h, V]: of a layer's attention
    last: torch.Tensor  # [B, D]: output of the last MLP
    own: torch.Tensor | None  # [B, h, X]: q of this rank's heads, contiguous; None if `q` has them in this form

    @classmethod
    def allocate(cls, model: Model, rows: int) -> StepBuffers:
        """Return buffers for up to `rows` rows."""
        w, shape, device = model.weights.get_layer(0).attention, model.shape, model.kv.data.device
        kind = model.attention

        def allocate_zeros(*size: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(rows, *size, dtype=dtype, device=device)

        return cls(
            positions=allocate_zeros(dtype=torch.int64),
            locs=allocate_zeros(dtype=torch.int32),
            residual=allocate_zeros(shape.hidden),
            q=allocate_zeros(kind.count_query_columns(w)),
            own=None if kind.are_queries_contiguous(w) else allocate_zeros(model.heads, kind.head_width),
            kv=allocate_zeros(model.kv.data.shape[-1]),
            values=allocate_zeros(model.heads, shape.v_head_dim),
            last=allocate_zeros(shape.hidden),
        )

    def slice_rows(self, rows: int) -> StepBuffers:
        """Return the part of the buffers for steps of `rows` rows."""
        every = (field.name for field in dataclasses.fields(self))
        return dataclasses.replace(
            self, **{name: one[:rows] for name in every if (one := getattr(self, name)) is not None}
        )


class Decodes:
    """Attention of a step's decode rows, the first in the buffers; run kernel by kernel until it is captured, and on
    the CPU.
    """

    def __init__(self, model: Model, buffers: StepBuffers, batch: Batch) -> None:
        """Create the attention for `batch`, which has the plan, made again for each step."""
        self.model, self.buffers, self.batch = model, buffers.slice_rows(batch.size), batch
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def run_layer(self, index: int) -> None:
        """Write the values of layer `index` to the buffers. Collective."""
        if self.graphs:
            self.graphs[index].replay()
        else:
            self._compute_layer(index)

    def _compute_layer(self, index: int) -> None:
        model, buffers, batch = self.model, self.buffers, self.batch
        w = model.weights.get_layer(index).attention
        kind = model.attention
        q_BhQ = kind.compute_exchanged_queries(kind.reshape_heads(buffers.q), w, batch)
        buffers.values.copy_(kind.compute_values(model.run_decode_attention(q_BhQ, w, index, batch), w))

    def capture_layers(self, pool: torch.cuda._POOL_HANDLE) -> None:
        """Capture every layer. One layer has run before on every rank, so that no module is loaded during capture."""
        self._compute_layer(0)
        torch.cuda.synchronize()
        graphs = []
        for index in range(self.model.shape.layers):
            with _capture_graph(pool) as graph:
                self._compute_layer(index)
            graphs.append(graph)
        self.graphs = graphs


class StepPieces:
    """The pieces of steps of one number of rows; run kernel by kernel until they are captured, and on the CPU."""

    def __init__(self, pieces: Pieces, rows: int) -> None:
        self.pieces, self.model, self.buffers = pieces, pieces.model, pieces.buffers.slice_rows(rows)
        self.batch = StepInput(
            self.buffers.positions, self.buffers.positions, self.buffers.locs, pieces.router_inputs, live=pieces.live
        )
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.left: list[tuple[torch.Tensor, torch.Tensor]] = []  # outputs of captured pieces, in the shared buffers

    def run_step(
        self,
        batch: StepInput,
        decodes: Decodes | None,
        prefill: PrefillPlan | None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Return the result of Model.run_step for rows of decodes, of chunks, and padding. `meanwhile` as in Model.walk_layers.
        Collective.
        """
        buffers, model, pieces = self.buffers, self.model, self.pieces
        first = decodes.batch.size if decodes else 0
        rows = prefill.rows if prefill else slice(first, first)
        assert rows.start == first
        kind = model.attention
        q_BhX = kind.select_own_heads(kind.reshape_heads(buffers.q)) if buffers.own is None else buffers.own
        q_ThX, out_ThV = q_BhX[rows], buffers.values[rows]
        first_seen = prefill.parts[0].seen if prefill else None

        def start_walk(
            residual_BD: torch.Tensor,
        ) -> Callable[[int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]:
            buffers.positions.copy_(batch.positions)
            buffers.locs.copy_(batch.locs)
            buffers.residual.copy_(residual_BD)
            buffers.values[rows.stop :] = 0
            if pieces.live is not None:
                assert batch.live is not None
                pieces.live.copy_(batch.live)
            if first_seen is None:
                pieces.numbers[:1] = 0
            else:
                pieces.numbers[: len(first_seen.numbers)].copy_(first_seen.numbers)
            return run_next_piece

        def run_next_piece(index: int, y_BhV: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if first_seen is not None and index < model.shape.layers:
                heartbeats.record_layer(index)
                pieces.prefiller.gather_prefix(first_seen, index)
                heartbeats.record_layer(max(index - 1, 0))  # which the piece ends first
            return self.run_piece(index, y_BhV)

        def run_attention(index: int, *_: torch.Tensor) -> torch.Tensor:
            if decodes is not None:
                decodes.run_layer(index)
            if prefill is not None:
                prefill.run_attention(
                    q_ThX, lambda seen: None if seen is first_seen else pieces.load_keys(seen, index), out_ThV
                )
            return buffers.values

        return model.walk_layers(batch, start_walk, run_attention, meanwhile)

    def run_piece(self, index: int, y_BhV: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run Model.run_piece. y and the results are in the shared buffers."""
        if not self.graphs:
            return self._compute_piece(index, y_BhV)
        self.graphs[index].replay()
        return self.left[index]

    def _compute_piece(self, index: int, y_BhV: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        model, buffers = self.model, self.buffers
        q_BHX, row_BQ = model.run_piece(index, y_BhV, batch=self.batch, residual_BD=buffers.residual, out=buffers)
        if index < model.shape.layers:
            model.attention.rotate_queries(q_BHX, buffers.positions)
            if buffers.own is not None:
                buffers.own.copy_(model.attention.select_own_heads(q_BHX))
            self.pieces.prefiller.unpack_gathered(self.pieces.numbers, row_BQ, index)
        return q_BHX, row_BQ

    def capture_pieces(self, pool: torch.cuda._POOL_HANDLE) -> None:
        """Capture every piece. One of each kind has run before on every rank, so that no module is loaded during
        capture.
        """
        layers, dense = self.model.shape.layers, self.model.shape.first_k_dense_replace
        for index in sorted({0, min(1, layers), min(dense, layers), min(dense + 1, layers), layers}):
            self._compute_piece(index, self.buffers.values if index else None)
        torch.cuda.synchronize()
        graphs, left = [], []
        for index in range(layers + 1):
            with _capture_graph(pool) as graph:
                left.append(self._compute_piece(index, self.buffers.values if index else None))
            graphs.append(graph)
        self.graphs, self.left = graphs, left


class Pieces:
    """The pieces of all steps with chunks of one rank."""

    def __init__(self, prefiller: Prefiller, router_inputs: RouterInputs | None) -> None:
        """Create the pieces for steps with as many rows as the prefiller can decompress."""
        self.prefiller, self.model, self.router_inputs = prefiller, prefiller.model, router_inputs
        self.buffers = StepBuffers.allocate(self.model, prefiller.rows)
        self.numbers, self.more = torch.zeros(2, 1 + len(prefiller.keys), dtype=torch.int32, device=prefiller.device)
        """AttendedKeys.numbers of a step's first part, and of the following call."""
        dp = self.model.layout.dp
        self.live = torch.full((dp,), prefiller.rows, device=prefiller.device) if dp > 1 else None  # StepInput.live
        self.graphs: list[torch.cuda.CUDAGraph] = []  # graphs of `load_keys`, one per layer
        self.cuts: dict[int, StepPieces] = {}
        self.decodes: dict[tuple[int, int], Decodes] = {}

    def get_pieces(self, rows: int) -> StepPieces:
        """Return the pieces of steps with `rows` rows, one of `list_chunk_rows`."""
        if rows not in self.cuts:
            self.cuts[rows] = StepPieces(self, rows)
        return self.cuts[rows]

    def get_decodes(self, batch: Batch) -> Decodes:
        """Return the attention of a batch of decodes in such steps."""
        found = self.decodes.get((batch.num_requests, batch.query_length))
        if found is None or found.batch is not batch:
            found = self.decodes[batch.num_requests, batch.query_length] = Decodes(self.model, self.buffers, batch)
        return found

    def load_keys(self, seen: AttendedKeys, index: int) -> None:
        """Run Prefiller.load_keys on rows of a step in the shared buffers. Collective."""
        self.prefiller.gather_prefix(seen, index)
        self.more[: len(seen.numbers)].copy_(seen.numbers)
        if self.graphs:
            self.graphs[index].replay()
        else:
            self.prefiller.unpack_gathered(self.more, self.buffers.kv, index)

    def _capture_keys(self, pool: torch.cuda._POOL_HANDLE) -> None:
        """Capture `load_keys` of every layer; pieces have loaded its kernels."""
        graphs = []
        for index in range(self.model.shape.layers):
            with _capture_graph(pool) as graph:
                self.prefiller.unpack_gathered(self.more, self.buffers.kv, index)
            graphs.append(graph)
        self.graphs = graphs

    def capture_all(self, batches: Sequence[Batch], alive: Callable[[], None]) -> None:
        """Capture the pieces of every size and for these batches, planned on padding rows. Collective; once.

        The largest size is captured first, and the others use its memory again.
        """
        most = len(self.buffers.positions)
        sizes = [size for size in reversed(list_chunk_rows(most)) if not self.get_pieces(size).graphs]
        if not sizes:
            return
        self.buffers.positions.fill_(PADDING_POSITION)
        self.buffers.locs.zero_()
        pool = torch.cuda.graph_pool_handle()
        gc.collect()  # unused memory is not freed during capture
        gc.disable()
        try:
            torch.cuda.synchronize()
            with drop_ranges(), torch.cuda.stream(torch.cuda.Stream(self.buffers.positions.device)):
                for size in sizes:
                    self.get_pieces(size).capture_pieces(pool)
                    alive()
                self._capture_keys(pool)
                for batch in batches:
                    self.get_decodes(batch).capture_layers(pool)
                    alive()
            torch.cuda.synchronize()
        finally:
            gc.enable()
        torch.cuda.empty_cache()  # memory that the pieces took while they ran without a graph


@contextlib.contextmanager
def _capture_graph(pool: torch.cuda._POOL_HANDLE) -> Iterator[torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    yield graph
    graph.capture_end()
