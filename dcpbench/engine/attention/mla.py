"""Multi-head latent attention: decodes in absorbed form, prompts with decompressed keys and values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.engine.attention import AttentionKind
from dcpbench.engine.weights import join_linears
from dcpbench.kernels.attention import AttentionSpec, make_backend
from dcpbench.kernels.attention.reference import compute_mla_decode
from dcpbench.kernels.block_scaled import dequantize_weight
from dcpbench.kernels.kv_up_proj import decompress_latents
from dcpbench.kernels.linear import apply_linear
from dcpbench.kernels.prefill import PrefillSpec
from dcpbench.kernels.qkv_norm_rope import split_latent
from dcpbench.kernels.rope import apply_rope
from dcpbench.kernels.value_proj import project_values
from dcpbench.measuring.ranges import record_range

if TYPE_CHECKING:
    from dcpbench.engine.decode_engine import Batch
    from dcpbench.engine.piecewise_graph import StepBuffers
    from dcpbench.engine.weights import Linear, Loader
    from dcpbench.kernels.attention import Backend
    from dcpbench.kernels.block_scaled import Rows

LATENT_EPS = 1e-6  # norms inside attention; not `rms_norm_eps`, as in transformers and DeepSeek's own code


@dataclasses.dataclass(frozen=True)
class MlaWeights:
    """Attention weights of a layer; h heads of this rank. Linear weights are [out, in]."""

    input_norm: torch.Tensor
    qkv_a: Linear  # q_a ‖ kv_a, [q_lora + Q, D]; without q-LoRA q ‖ kv_a, [h·(nope + P) + Q, D]
    q_norm: torch.Tensor | None
    q_b: Linear | None
    kv_norm: torch.Tensor
    w_uk: torch.Tensor  # [h, nope, R]: absorbs k's decompression into q; all heads of the DCP group if requested
    w_uv: torch.Tensor  # [h, R, V]: decompresses the latent output; all heads of the DCP group if requested
    o: Linear
    post_norm: torch.Tensor

    @property
    def first(self) -> Linear:
        """Return the weight of the first product."""
        return self.qkv_a


def load_mla(loader: Loader, prefix: str) -> MlaWeights:
    """Return the attention weights of a rank's heads; tensors shared by all heads are held whole."""
    s, names, get, linear = loader.shape, loader.names, loader.source.get_tensor, loader.linear
    q_heads = loader.group if loader.replicated.query else loader.own
    v_heads = loader.group if loader.replicated.value else loader.own
    kv_a = linear(prefix + names.kv_a, (s.kv_width, s.hidden))
    q_norm = q_b = None
    if s.q_lora is None:
        q = linear(prefix + names.q, **loader.select_heads(q_heads, s.qk_head_dim, s.hidden))
    else:
        q = linear(prefix + names.q_a, (s.q_lora, s.hidden))
        q_norm = get(prefix + names.q_norm, (s.q_lora,))
        q_b = linear(prefix + names.q_b, **loader.select_heads(q_heads, s.qk_head_dim, s.q_lora))
    loaded = loader.group if loader.replicated.query or loader.replicated.value else loader.own
    kv_b = _load_kv_up_projection(loader, prefix + names.kv_b, loaded)
    uk, uv = kv_b.unflatten(0, (len(loaded), s.qk_nope_head_dim + s.v_head_dim)).split(
        (s.qk_nope_head_dim, s.v_head_dim), dim=1
    )
    return MlaWeights(
        input_norm=get(prefix + names.input_norm, (s.hidden,)),
        qkv_a=join_linears((q, kv_a)),
        q_norm=q_norm,
        q_b=q_b,
        kv_norm=get(prefix + names.kv_norm, (s.latent,)),
        w_uk=_select_rows(q_heads, uk, loaded).contiguous(),
        w_uv=_select_rows(v_heads, uv, loaded).transpose(1, 2).contiguous(),
        o=loader.load_output_projection(prefix + names.o),
        post_norm=get(prefix + names.post_norm, (s.hidden,)),
    )


def _load_kv_up_projection(loader: Loader, name: str, heads: range) -> torch.Tensor:
    """Return the rows of some heads in the model's dtype; of fp8 weights as their e4m3 numbers and scales give them."""
    shape = loader.shape
    rows = loader.select_heads(heads, shape.qk_nope_head_dim + shape.v_head_dim, shape.latent)
    if not loader.fp8:
        return loader.source.get_tensor(name, **rows)
    return dequantize_weight(loader.source.get_scaled(name, **rows)).to(loader.source.dtype)


def _select_rows(heads: range, part: torch.Tensor, loaded: range) -> torch.Tensor:
    """Return the rows of `heads` from a tensor of the rows of the heads `loaded`."""
    return part[heads.start - loaded.start : heads.stop - loaded.start]


class MlaAttention(AttentionKind):
    """MLA. A query against KV rows is absorbed, [R + P]; a partial output is latent, [R], or projected to values."""

    def count_query_columns(self, w: MlaWeights) -> int:
        """Implement AttentionKind.count_query_columns: the output of the last projection before q."""
        return len((w.qkv_a if w.q_b is None else w.q_b).data)

    def are_queries_contiguous(self, w: MlaWeights) -> bool:
        """Implement AttentionKind.are_queries_contiguous. Without q-LoRA columns of KV follow q."""
        return w.q_b is not None and not self.replicated.query

    def compute_qkv(
        self, x_BD: torch.Tensor | Rows, w: MlaWeights, positions_B: torch.Tensor, out: StepBuffers | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement AttentionKind.compute_qkv: q before rope and absorption, and latent ‖ rope key."""
        s = self.shape
        q_out = None if out is None else out.q
        qkv = apply_linear(x_BD, w.qkv_a, None if w.q_b is not None else q_out)
        row_BQ = qkv.new_empty(len(qkv), s.kv_width) if out is None else out.kv
        latent = split_latent(
            qkv,
            w.q_norm,
            w.kv_norm,
            positions_B,
            self.rope_table,
            row_BQ,
            eps=LATENT_EPS,
            interleaved=s.rope_interleaved,
            feeds=w.q_b,
        )
        q = qkv if latent is None or w.q_b is None else apply_linear(latent, w.q_b, q_out)
        return self.reshape_heads(q), row_BQ

    def rotate_queries(self, q_BhX: torch.Tensor, positions_B: torch.Tensor) -> None:
        """Implement AttentionKind.rotate_queries; X = nope + P."""
        q_BhP = q_BhX[..., self.shape.qk_nope_head_dim :]
        apply_rope(q_BhP, positions_B, self.rope_table, q_BhP, interleaved=self.shape.rope_interleaved)

    def compute_exchanged_queries(
        self, q_BhX: torch.Tensor, w: MlaWeights, decodes: Batch, positions_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Implement AttentionKind.compute_exchanged_queries: absorbed queries, [B, h, R + P]."""
        s = self.shape
        q_nope, q_rope = q_BhX.split((s.qk_nope_head_dim, s.qk_rope_head_dim), dim=-1)
        q_BhQ = decodes.exchange.get_query_buffer(decodes.size)
        torch.bmm(q_nope.transpose(0, 1), w.w_uk, out=q_BhQ[..., : s.latent].transpose(0, 1))
        if positions_B is None:
            q_BhQ[..., s.latent :] = q_rope
        else:
            apply_rope(q_rope, positions_B, self.rope_table, q_BhQ[..., s.latent :], interleaved=s.rope_interleaved)
        return q_BhQ

    def compute_partial(
        self, q_BHQ: torch.Tensor, w: MlaWeights, kv: torch.Tensor, decodes: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement AttentionKind.compute_partial."""
        out, lse_BH = decodes.exchange.get_partial_buffers(decodes.size)
        o_BHR = q_BHQ.new_empty(*q_BHQ.shape[:2], self.shape.latent) if self.replicated.value else out
        self.attend(q_BHQ, kv, o_BHR, lse_BH, decodes)
        if self.replicated.value:
            with record_range("o_proj"):
                torch.bmm(o_BHR.transpose(0, 1), w.w_uv, out=out.transpose(0, 1))
        return out, lse_BH

    def compute_values(self, o_hBR: torch.Tensor, w: MlaWeights) -> torch.Tensor:
        """Implement AttentionKind.compute_values."""
        with record_range("o_proj"):
            if self.replicated.value:
                return o_hBR.transpose(0, 1).to(self.dtype, memory_format=torch.contiguous_format)
            return project_values(o_hBR, w.w_uv, self.dtype)

    def make_backend(self, name: str, sizes: dict[str, Any]) -> Backend:
        """Implement AttentionKind.make_backend."""
        heads = self.heads * self.layout.dcp
        spec = AttentionSpec(
            heads=heads,
            latent=self.shape.latent,
            rope=self.shape.qk_rope_head_dim,
            scale=self.scale,
            dtype=self.dtype,
            **sizes,
        )
        return make_backend(name, spec)

    def compute_truth(
        self, q_hQ: torch.Tensor, rows_KQ: torch.Tensor, w: MlaWeights, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement AttentionKind.compute_truth."""
        truth_hR, lse_h = compute_mla_decode(q_hQ, rows_KQ, self.shape.latent, scale)
        if self.replicated.value:
            truth_hR = torch.bmm(truth_hR.unsqueeze(1), w.w_uv[self.own_heads].to(q_hQ.dtype)).squeeze(1)
        return truth_hR, lse_h

    def make_prefill_spec(self, device: torch.device) -> PrefillSpec:
        """Implement AttentionKind.make_prefill_spec."""
        width, value = self.head_width, self.shape.v_head_dim
        return PrefillSpec(
            heads=self.heads, width=width, value=value, scale=self.scale, dtype=self.dtype, device=device
        )

    def allocate_keys(self, laid_SQ: torch.Tensor, value_width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement AttentionKind.allocate_keys: buffers, in which columns behind V are 0."""
        keys = laid_SQ.new_empty(len(laid_SQ), self.heads, self.head_width)
        values = laid_SQ.new_empty(len(laid_SQ), self.heads, value_width)
        values[..., self.shape.v_head_dim :] = 0
        return keys, values

    def unpack_rows(
        self,
        laid_SQ: torch.Tensor,
        count: torch.Tensor,
        w: MlaWeights,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Implement AttentionKind.unpack_rows: decompress rows for this rank's heads."""
        w_uk = w.w_uk[self.own_heads] if self.replicated.query else w.w_uk
        w_uv = w.w_uv[self.own_heads] if self.replicated.value else w.w_uv
        decompress_latents(laid_SQ, count, w_uk, w_uv, keys, values)
