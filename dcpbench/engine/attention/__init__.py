"""Define the parts in which kinds of attention differ on one rank: weights, projections, decode and prompt attention. A file for each kind.

The engine walks layers in the same way for every kind (model.py). Rows of the KV pool, page tables, exchanges and the
gathering of prefixes see rows of some width, and heads with queries and outputs of some width.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from dcpbench.kernels.rope import compute_softmax_scale
from dcpbench.measuring.ranges import record_range

if TYPE_CHECKING:
    import torch

    from dcpbench.engine.decode_engine import Batch
    from dcpbench.engine.piecewise_graph import StepBuffers
    from dcpbench.kernels.attention import Backend
    from dcpbench.kernels.block_scaled import Rows
    from dcpbench.kernels.prefill import PrefillSpec
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.layout import Layout, QueryReplication

LayerWeights = Any  # attention weights of a layer; each kind has `input_norm`, `first`, `o` and `post_norm`


class AttentionKind(abc.ABC):
    """Attention of one rank, for any layer."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        dcp_rank: int,
        replicated: QueryReplication,
        dtype: torch.dtype,
        table: torch.Tensor,
    ) -> None:
        """Create the attention; `table` is make_rope_table's."""
        self.shape, self.layout, self.dcp_rank, self.replicated, self.dtype = shape, layout, dcp_rank, replicated, dtype
        self.rope_table = table
        self.scale = compute_softmax_scale(shape)
        self.heads = shape.heads // layout.attn_tp  # query heads of this rank
        self.head_width = shape.qk_head_dim  # columns of a head's query as it is projected
        self.query_width = shape.query_width  # columns of a head's query against KV rows

    @property
    def own_heads(self) -> slice:
        """Return the range of this rank's heads among those of its DCP group."""
        return slice(self.dcp_rank * self.heads, (self.dcp_rank + 1) * self.heads)

    @property
    def exchanged_width(self) -> int:
        """Return the columns of a head's partial output when it is exchanged: V if it is projected before."""
        return self.shape.v_head_dim if self.replicated.value else self.shape.output_width

    def reshape_heads(self, q_BN: torch.Tensor) -> torch.Tensor:
        """Return the queries [B, N] of the heads projected on this rank as [B, h, X]; further columns are left out."""
        heads = self.heads * (self.layout.dcp if self.replicated.query else 1)
        return q_BN[:, : heads * self.head_width].unflatten(-1, (heads, self.head_width))

    def select_own_heads(self, q_BHX: torch.Tensor) -> torch.Tensor:
        """Return the queries of this rank's heads, among those projected here."""
        return q_BHX[:, self.own_heads] if self.replicated.query else q_BHX[:, : self.heads]

    @abc.abstractmethod
    def count_query_columns(self, w: LayerWeights) -> int:
        """Return the columns of StepBuffers.q; the first ones are those of `reshape_heads`."""

    @abc.abstractmethod
    def are_queries_contiguous(self, w: LayerWeights) -> bool:
        """Return True if StepBuffers.q has queries of this rank's heads alone, contiguous."""

    @abc.abstractmethod
    def compute_qkv(
        self, x_BD: torch.Tensor | Rows, w: LayerWeights, positions_B: torch.Tensor, out: StepBuffers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q [B, h, X] of the heads projected on this rank, and the new KV row [B, Q]."""

    @abc.abstractmethod
    def rotate_queries(self, q_BhX: torch.Tensor, positions_B: torch.Tensor) -> None:
        """Apply rope to the result of `compute_qkv`, in place, unless it is applied already."""

    @abc.abstractmethod
    def compute_exchanged_queries(
        self, q_BhX: torch.Tensor, w: LayerWeights, decodes: Batch, positions_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return queries against KV rows, [B, h, query_width], in the exchange's memory.

        Without positions, `rotate_queries` has been applied.
        """

    @abc.abstractmethod
    def compute_partial(
        self, q_BHQ: torch.Tensor, w: LayerWeights, kv: torch.Tensor, decodes: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of all heads of the group over this rank's rows `kv` [pages, page_size, Q].

        It is the input of the exchange: outputs and lse [B, H].
        """

    @abc.abstractmethod
    def compute_values(self, o_hBR: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        """Return merged outputs of this rank's heads as the input of o_proj, [B, h, V]."""

    @abc.abstractmethod
    def make_backend(self, name: str, sizes: dict[str, Any]) -> Backend:
        """Return a decode backend; `sizes` are fields of DecodeSpec without those that follow from the model."""

    @abc.abstractmethod
    def compute_truth(
        self, q_hQ: torch.Tensor, rows_KQ: torch.Tensor, w: LayerWeights, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and lse of a request's own heads as the exchange merges them, computed slowly in q's dtype."""

    @abc.abstractmethod
    def make_prefill_spec(self, device: torch.device) -> PrefillSpec:
        """Return what a backend for prompts is built for."""

    @abc.abstractmethod
    def allocate_keys(self, laid_SQ: torch.Tensor, value_width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [S, heads, columns] of the rows `laid_SQ`, which `unpack_rows` fills."""

    @abc.abstractmethod
    def unpack_rows(
        self,
        laid_SQ: torch.Tensor,
        count: torch.Tensor,
        w: LayerWeights,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write keys and values of the first `count` rows; `count` is int32 [1] on the device."""

    def attend(self, q_BHQ: torch.Tensor, kv: torch.Tensor, o_BHR: torch.Tensor, lse: torch.Tensor, at: Batch) -> None:
        """Run the decode kernel of a batch."""
        with record_range("attention"):
            at.backend.run(q_BHQ, kv, o_BHR, lse)


def choose_kind(shape: ModelShape) -> type[AttentionKind]:
    """Return the kind of attention that a model has."""
    from dcpbench.engine.attention.gqa import GroupedQueryAttention
    from dcpbench.engine.attention.mla import MlaAttention

    return GroupedQueryAttention if shape.gqa else MlaAttention
