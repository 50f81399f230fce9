"""Grouped-query attention: query heads share KV heads, and the pool's rows hold K and V of the latter.

A rank holds the KV heads of its query heads. More ranks than KV heads hold copies of one head, and the ranks of a DCP
group, which all hold the same head, store different tokens of it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.engine.attention import AttentionKind
from dcpbench.engine.weights import join_linears
from dcpbench.kernels.gqa import GqaSpec, make_gqa_backend, split_rows
from dcpbench.kernels.gqa.reference import compute_gqa_decode
from dcpbench.kernels.linear import apply_linear
from dcpbench.kernels.prefill import PrefillSpec
from dcpbench.kernels.qk_norm_rope import split_heads
from dcpbench.measuring.ranges import record_range

if TYPE_CHECKING:
    from dcpbench.engine.decode_engine import Batch
    from dcpbench.engine.piecewise_graph import StepBuffers
    from dcpbench.engine.weights import Linear, Loader
    from dcpbench.kernels.attention import Backend
    from dcpbench.kernels.block_scaled import Rows


@dataclasses.dataclass(frozen=True)
class GqaWeights:
    """Attention weights of a layer; h query heads and j KV heads of this rank. Linear weights are [out, in]."""

    input_norm: torch.Tensor
    qkv: Linear  # q ‖ k ‖ v, [(h + 2·j)·X, D]; q of all heads of the DCP group if requested
    q_norm: torch.Tensor | None  # [X], for each head; None if heads are not normalised
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor

    @property
    def first(self) -> Linear:
        """Return the weight of the first product."""
        return self.qkv


def load_gqa(loader: Loader, prefix: str) -> GqaWeights:
    """Return the attention weights of a rank's query heads and of their KV heads."""
    s, names, get = loader.shape, loader.names, loader.source.get_tensor
    assert s.gqa is not None
    ranks, kv_heads, width = loader.layout.attn_tp, s.gqa.kv_heads, s.qk_head_dim
    first = loader.layout.get_attn_rank(loader.rank) * kv_heads // ranks
    kv_rows = slice(first * width, (first + s.count_kv_heads(ranks)) * width)
    q_heads = loader.group if loader.replicated.query else loader.own
    q = loader.linear(prefix + names.q, **loader.select_heads(q_heads, width, s.hidden))
    k, v = (loader.linear(prefix + name, (kv_heads * width, s.hidden), rows=kv_rows) for name in (names.k, names.v))
    norms = [get(prefix + name, (width,)) if s.gqa.qk_norm else None for name in (names.q_head_norm, names.k_head_norm)]
    return GqaWeights(
        input_norm=get(prefix + names.input_norm, (s.hidden,)),
        qkv=join_linears((q, k, v)),
        q_norm=norms[0],
        k_norm=norms[1],
        o=loader.load_output_projection(prefix + names.o),
        post_norm=get(prefix + names.post_norm, (s.hidden,)),
    )


class GroupedQueryAttention(AttentionKind):
    """GQA. Queries have rope from the beginning, and outputs are values."""

    def __init__(self, *context: Any) -> None:  # noqa: ANN401 - of AttentionKind
        super().__init__(*context)
        self.kv_heads = self.shape.count_kv_heads(self.layout.attn_tp)  # KV heads of this rank

    @property
    def query_columns(self) -> int:
        """Return the columns of q of the heads projected on this rank."""
        return self.heads * (self.layout.dcp if self.replicated.query else 1) * self.head_width

    def count_query_columns(self, w: GqaWeights) -> int:  # noqa: ARG002 - of AttentionKind
        """Implement AttentionKind.count_query_columns."""
        return self.query_columns

    def are_queries_contiguous(self, w: GqaWeights) -> bool:  # noqa: ARG002 - of AttentionKind
        """Implement AttentionKind.are_queries_contiguous."""
        return not self.replicated.query

    def compute_qkv(
        self, x_BD: torch.Tensor | Rows, w: GqaWeights, positions_B: torch.Tensor, out: StepBuffers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement AttentionKind.compute_qkv: q and the KV heads' k, both with norm and rope, and v."""
        qkv = apply_linear(x_BD, w.qkv)
        q_BN = qkv.new_empty(len(qkv), self.query_columns) if out is None else out.q
        row_BW = qkv.new_empty(len(qkv), qkv.shape[1] - self.query_columns) if out is None else out.kv
        q_BhX = self.reshape_heads(q_BN)
        split_heads(qkv, w.q_norm, w.k_norm, positions_B, self.rope_table, q_BhX, row_BW, eps=self.shape.rms_eps)
        return q_BhX, row_BW

    def rotate_queries(self, q_BhX: torch.Tensor, positions_B: torch.Tensor) -> None:
        """Implement AttentionKind.rotate_queries: rope is applied already."""

    def compute_exchanged_queries(
        self,
        q_BhX: torch.Tensor,
        w: GqaWeights,  # noqa: ARG002 - of AttentionKind
        decodes: Batch,
        positions_B: torch.Tensor | None = None,  # noqa: ARG002 - of AttentionKind
    ) -> torch.Tensor:
        """Implement AttentionKind.compute_exchanged_queries."""
        return decodes.exchange.get_query_buffer(decodes.size).copy_(q_BhX)

    def compute_partial(
        self,
        q_BHQ: torch.Tensor,
        w: GqaWeights,  # noqa: ARG002 - of AttentionKind
        kv: torch.Tensor,
        decodes: Batch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement AttentionKind.compute_partial."""
        o_BHX, lse_BH = decodes.exchange.get_partial_buffers(decodes.size)
        self.attend(q_BHQ, kv, o_BHX, lse_BH, decodes)
        return o_BHX, lse_BH

    def compute_values(self, o_hBR: torch.Tensor, w: GqaWeights) -> torch.Tensor:  # noqa: ARG002 - of AttentionKind
        """Implement AttentionKind.compute_values."""
        with record_range("o_proj"):
            return o_hBR.transpose(0, 1).to(self.dtype, memory_format=torch.contiguous_format)

    def make_backend(self, name: str, sizes: dict[str, Any]) -> Backend:
        """Implement AttentionKind.make_backend."""
        heads = self.heads * self.layout.dcp
        spec = GqaSpec(
            heads=heads, kv_heads=self.kv_heads, head_dim=self.head_width, scale=self.scale, dtype=self.dtype, **sizes
        )
        return make_gqa_backend(name, spec)

    def compute_truth(
        self,
        q_hQ: torch.Tensor,
        rows_KQ: torch.Tensor,
        w: GqaWeights,  # noqa: ARG002 - of AttentionKind
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement AttentionKind.compute_truth."""
        return compute_gqa_decode(q_hQ, rows_KQ, self.kv_heads, scale)

    def make_prefill_spec(self, device: torch.device) -> PrefillSpec:
        """Implement AttentionKind.make_prefill_spec."""
        return PrefillSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            width=self.head_width,
            value=self.shape.v_head_dim,
            scale=self.scale,
            dtype=self.dtype,
            device=device,
        )

    def allocate_keys(self, laid_SQ: torch.Tensor, value_width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement AttentionKind.allocate_keys: the rows are keys and values themselves."""
        assert value_width == self.shape.v_head_dim
        return split_rows(laid_SQ, self.kv_heads)

    def unpack_rows(
        self, laid_SQ: torch.Tensor, count: torch.Tensor, w: GqaWeights, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Implement AttentionKind.unpack_rows: nothing is left to do."""
