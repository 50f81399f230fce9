"""A step of a model on one rank, layer by layer.

Rows of a step: decode rows, which attend over the DCP ranks' shards; then the tokens of prompt chunks, which attend to
gathered rows (prefill.py); and padding rows, which do not attend. Kinds of attention are in attention/.

Letters as in kernels/__init__.py. With attention DP, B is this replica's rows and T = dp·B all replicas'.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, cast

import torch

from dcpbench.engine.attention import choose_kind
from dcpbench.engine.weights import Moe
from dcpbench.exchange.symmetric_all_reduce import SymmetricAllReduce
from dcpbench.hangs import heartbeats
from dcpbench.kernels import moe
from dcpbench.kernels.block_scaled import Rows, needs_quantized_input, quantize_rows
from dcpbench.kernels.kv_indices import DcpShard
from dcpbench.kernels.kv_write import write_kv
from dcpbench.kernels.linear import apply_linear
from dcpbench.kernels.moe.busiest import rotate_busiest_first
from dcpbench.kernels.norm import Mark, add_rms_norm, normalize_for
from dcpbench.kernels.rope import make_rope_table
from dcpbench.measuring.ranges import record_range
from dcpbench.points.layout import OWN_HEADS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.engine.attention import LayerWeights
    from dcpbench.engine.decode_engine import Batch
    from dcpbench.engine.groups import Groups
    from dcpbench.engine.kv_pool import KvPool
    from dcpbench.engine.piecewise_graph import StepBuffers
    from dcpbench.engine.prefill import PrefillPlan
    from dcpbench.engine.synthetic import RouterInputs
    from dcpbench.engine.weights import ExpertLinear, Mlp, Weights
    from dcpbench.exchange.symmetric_all_reduce import AllReduce
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.layout import Layout, QueryReplication

    RouterInput = tuple[torch.Tensor, torch.Tensor | None]

QUERY, KV_ROW, VALUES, ATTENTION, MLP = "query", "KV row", "values", "attention", "MLP"
OBSERVED = (QUERY, KV_ROW, VALUES, ATTENTION, MLP)
"""Names under which `Model.observed` collects a layer's intermediate results: q [B, h, X] as `compute_qkv` gives it, KV rows
[B, Q] before they are stored, attention outputs [B, h, V], and the outputs [B, D] of o_proj and of the MLP, both summed
over the ranks."""


@dataclasses.dataclass(frozen=True)
class StepInput:
    """Device tensors of one step, [B] but for the last two; fixed buffers under a captured graph."""

    tokens: torch.Tensor  # int64
    positions: torch.Tensor  # int64: index of the new token in its request
    locs: torch.Tensor  # int32: virtual KV location of the new token; padding rows have 0, or -1 for none
    router_inputs: RouterInputs | None = None  # routers' input instead of the hidden state (synthetic.py), if set
    logit_rows: torch.Tensor | None = None  # int64: rows that need logits; None: all
    live: torch.Tensor | None = None  # int64 [dp]: each replica's rows that go to experts, before padding; None: all


class Model:
    """Weights, groups and KV pool of one rank, and the step over them."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        groups: Groups,
        weights: Weights,
        kv: KvPool,
        *,
        interleave: int,
        max_context: int,
        device: torch.device,
        replicated: QueryReplication = OWN_HEADS,
    ) -> None:
        self.shape, self.layout, self.groups, self.weights, self.kv = shape, layout, groups, weights, kv
        self.interleave, self.replicated = interleave, replicated
        self.dtype = weights.embed.dtype  # dtype of the computation, independent of how weights and KV are stored
        self.shard = DcpShard(rank=groups.dcp.rank, dcp=layout.dcp, interleave=interleave, page_size=kv.data.shape[2])
        self.all_reduce: AllReduce = groups.attn.all_reduce  # sums over the ranks of an attention replica
        self.heads = shape.heads // layout.attn_tp
        table = make_rope_table(shape, max_context, device)
        self.attention = choose_kind(shape)(shape, layout, groups.dcp.rank, replicated, self.dtype, table)
        self.stands_for = 1  # expert-parallel ranks that this one represents; it is the busiest of them in each layer
        self.marks: torch.Tensor | None = None  # int32 [1]: last norm that the device began; None if it is not recorded
        self.chosen_experts: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Set to a list to collect each MoE layer's routing (logits_TE, ids_Tk) during an eager step."""
        self.final_hidden: torch.Tensor | None = None  # [B, D] of the last step after the final norm, if a layer drafts
        self.observed: dict[str, list[torch.Tensor]] | None = None  # lists by OBSERVED; collected in eager steps

    def run_step(self, batch: StepInput, decodes: Batch | None, prefill: PrefillPlan | None = None) -> torch.Tensor:
        """Return the logits of this rank's vocabulary rows, [B or wanted rows, V_local] in the model's dtype.
        Collective.

        `decodes` is the plan of the first rows, if they decode; `prefill` that of the rows after them.
        """
        return self.walk_layers(
            batch,
            lambda residual_BD: functools.partial(self.run_piece, batch=batch, residual_BD=residual_BD),
            lambda index, q_Bh, row_BQ: self.run_attention(q_Bh, row_BQ, index, batch.positions, decodes, prefill),
        )

    def walk_layers(
        self,
        batch: StepInput,
        begin: Callable[[torch.Tensor], Callable[[int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]],
        attention: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Run a step with pieces and attention supplied by the caller; return the same as `run_step`. Collective.

        `begin` maps the residual [B, D] to a function that runs pieces as `run_piece` does; `attention` maps a layer, q and
        KV rows to values. `meanwhile` is called after each layer has been launched.
        """
        heartbeats.record_step(heartbeats.LAUNCH)
        run = begin(self.embed_tokens(batch.tokens))
        heartbeats.record_layer(0)
        q_Bh, row_BQ = run(0, None)
        for index in range(self.shape.layers):
            heartbeats.record_layer(index)
            y_BhV = attention(index, q_Bh, row_BQ)
            q_Bh, row_BQ = run(index + 1, y_BhV)
            meanwhile()
        x_BD, residual_BD = q_Bh, row_BQ
        heartbeats.record_layer(heartbeats.NO_LAYER)
        with record_range("lm_head"):
            drafts, wanted = self.weights.draft is not None, batch.logit_rows
            if wanted is not None and not drafts:
                x_BD, residual_BD = x_BD[wanted], residual_BD[wanted]
            last = self.make_mark(2 * self.shape.layers + 1)
            final = add_rms_norm(x_BD, residual_BD, self.weights.final_norm, self.shape.rms_eps, last)
            if drafts:
                self.final_hidden = final
                final = final if wanted is None else final[wanted]
            return apply_linear(final, self.weights.lm_head)

    def run_draft_layer(
        self, batch: StepInput, hidden_BD: torch.Tensor, decodes: Batch | None, prefill: PrefillPlan | None = None
    ) -> torch.Tensor:
        """Return the hidden states [B, D] from which the tokens after those of `batch` are drafted, behind the norm before
        the LM head. Collective.

        `hidden_BD` are the hidden states of the tokens before those of `batch`, at `batch.positions`: of the model, or of
        the pass of this layer for the draft before. Both are behind a final norm, as SGLang has them;
        DeepSeek-V3's report (arXiv 2412.19437) does not state it. `decodes` and `prefill` are as in `run_step`.
        """
        draft, index = self.weights.draft, self.shape.layers
        assert draft is not None
        token_BD, eps = self.embed_tokens(batch.tokens), self.shape.rms_eps
        with record_range("norm"):
            parts = (
                normalize_for(None, token_BD, None, draft.embedding_norm, eps),
                normalize_for(None, hidden_BD, None, draft.hidden_norm, eps),
            )
        with record_range("qkv_proj"):
            residual_BD = apply_linear(torch.cat(cast("tuple[torch.Tensor, ...]", parts), dim=-1), draft.join)
        q_Bh, row_BQ = self.begin_layer(index, None, batch, residual_BD)
        y_BhV = self.run_attention(q_Bh, row_BQ, index, batch.positions, decodes, prefill)
        x_BD = self.finish_layer(index, y_BhV, batch, residual_BD)
        with record_range("norm"):
            return add_rms_norm(x_BD, residual_BD, draft.final_norm, eps)

    def compute_logits(self, final_BD: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's vocabulary rows."""
        with record_range("lm_head"):
            return apply_linear(final_BD, self.weights.lm_head)

    def run_piece(
        self,
        index: int,
        y_BhV: torch.Tensor | None,
        *,
        batch: StepInput,
        residual_BD: torch.Tensor,
        out: StepBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model between the attention of layer `index` - 1, with output values y, and the attention of layer
        `index`.

        Return q [B, h, X] of layer `index` and its KV rows [B, Q], which are also written to the pool. After the last layer, return the MLP's output and the residual, [B, D] each, not yet added. Results
        are written to `out` if given.
        """
        x_BD = None
        if y_BhV is not None:
            x_BD = self.finish_layer(index - 1, y_BhV, batch, residual_BD)
            if index == self.shape.layers:
                return (x_BD if out is None else out.last.copy_(x_BD)), residual_BD
        return self.begin_layer(index, x_BD, batch, residual_BD, out)

    def finish_layer(
        self, index: int, y_BhV: torch.Tensor, batch: StepInput, residual_BD: torch.Tensor
    ) -> torch.Tensor:
        """Return the output [B, D] of a layer's MLP from the output of its attention; the residual gets the latter."""
        w = self.weights.get_layer(index)
        self.record_result(VALUES, y_BhV)
        with record_range("o_proj"):
            x_BD = apply_linear(y_BhV.flatten(1), w.attention.o)
        with record_range("attn_reduce"):
            x_BD = self.reduce_hidden(x_BD)
        self.record_result(ATTENTION, x_BD)
        feeds, routed = None if self.layout.dp > 1 else w.mlp.gate_up, isinstance(w.mlp, Moe)
        normed = self.apply_norm(x_BD, residual_BD, w.attention.post_norm, 2 * index + 2, feeds, keep=routed)
        del x_BD  # its memory is the MLP's
        x_BD = self.run_mlp(normed, w.mlp, self.get_router_input(batch, index), batch.live)
        self.record_result(MLP, x_BD)
        return x_BD

    def begin_layer(
        self,
        index: int,
        x_BD: torch.Tensor | None,
        batch: StepInput,
        residual_BD: torch.Tensor,
        out: StepBuffers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and KV rows of a layer, see `run_piece`; x is the output of the MLP before, None without one."""
        w = self.weights.get_layer(index).attention
        normed = self.apply_norm(x_BD, residual_BD, w.input_norm, 2 * index + 1, w.first, keep=False)
        with record_range("qkv_proj"):
            q_Bh, row_BQ = self.attention.compute_qkv(normed, w, batch.positions, out)
        self.record_result(QUERY, self.attention.select_own_heads(q_Bh))
        self.record_result(KV_ROW, row_BQ)
        with record_range("kv_write"):
            write_kv(self.kv.get_rows(index), row_BQ, batch.locs, self.shard, self.kv.scale)
        return q_Bh, row_BQ

    def record_result(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of an intermediate result, one of OBSERVED, if results are collected."""
        if self.observed is not None:
            self.observed[name].append(tensor.clone())

    def reduce_hidden(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of a replica. Steps with more rows than the symmetric memory holds use NCCL."""
        if isinstance(self.all_reduce, SymmetricAllReduce) and not self.all_reduce.supports_size(x_BD):
            return self.groups.attn.all_reduce(x_BD)
        return self.all_reduce(x_BD)

    def embed_tokens(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Return rows of the embedding; each rank of a replica holds a part of the vocabulary."""
        with record_range("embed"):
            table = self.weights.embed
            local_B = tokens_B - self.groups.attn.rank * table.shape[0]
            mine_B = (local_B >= 0) & (local_B < table.shape[0])
            x_BD = table[local_B.clamp(0, table.shape[0] - 1)] * mine_B.unsqueeze(-1)
            return self.reduce_hidden(x_BD)

    def apply_norm(
        self,
        x_BD: torch.Tensor | None,
        residual_BD: torch.Tensor,
        weight_D: torch.Tensor,
        number: int,
        feeds: ExpertLinear | None,
        *,
        keep: bool,
    ) -> torch.Tensor | Rows:
        """Add the last block's output to the residual, if there was one, and normalise; norms are numbered from 1 on.

        For a product with `feeds`, and with `keep` for others, too, if that one takes quantised rows.
        """
        with record_range("norm"):
            x_BD, added_to = (residual_BD, None) if x_BD is None else (x_BD, residual_BD)
            return normalize_for(feeds, x_BD, added_to, weight_D, self.shape.rms_eps, self.make_mark(number), keep=keep)

    def make_mark(self, number: int) -> Mark | None:
        """Return the marker that norm `number` of a step writes; see hangs/evidence.py. Norms of drafts write none."""
        return None if self.marks is None or number > 2 * self.shape.layers + 1 else Mark(self.marks, number)

    def run_attention(
        self,
        q_Bh: torch.Tensor,
        row_BQ: torch.Tensor,
        index: int,
        positions_B: torch.Tensor,
        decodes: Batch | None,
        prefill: PrefillPlan | None,
    ) -> torch.Tensor:
        """Return the attention of all rows: the values of this rank's heads, [B, h, V], for a layer with its KV rows in
        the pool.
        """
        w, kind = self.weights.get_layer(index).attention, self.attention
        values, rows = [], decodes.size if decodes else 0
        if prefill is not None:
            with record_range("qkv_proj"):
                kind.rotate_queries(q_Bh, positions_B)
        if decodes is not None:
            with record_range("qkv_proj"):
                q_BhQ = kind.compute_exchanged_queries(q_Bh[:rows], w, decodes, None if prefill else positions_B[:rows])
            values.append(kind.compute_values(self.run_decode_attention(q_BhQ, w, index, decodes), w))
        if prefill is not None:
            assert prefill.rows.start == rows
            q_ThX = kind.select_own_heads(q_Bh[prefill.rows]).contiguous()
            values.append(prefill.run_attention(q_ThX, lambda seen: prefill.prefiller.load_keys(seen, row_BQ, index)))
        with record_range("o_proj"):
            return self.append_padding(values, len(q_Bh))

    def append_padding(self, values: list[torch.Tensor], rows: int) -> torch.Tensor:
        """Return values of all rows, [B, h, V], with zeros for padding rows after the others."""
        used = sum(len(y_BhV) for y_BhV in values)
        if rows > used:
            values = [*values, self.weights.embed.new_zeros(rows - used, self.heads, self.shape.v_head_dim)]
        return values[0] if len(values) == 1 else torch.cat(values)

    def run_decode_attention(self, q_BhQ: torch.Tensor, w: LayerWeights, index: int, decodes: Batch) -> torch.Tensor:
        """Return the merged output of this rank's heads, [h, B, R]; [h, B, V] if it is projected first. `q_BhQ` is the
        exchange's.
        """
        exchange = decodes.exchange
        return exchange.merge_partials(*self.compute_partial(exchange.gather_q(q_BhQ), w, index, decodes))

    def compute_partial(
        self, q_BHQ: torch.Tensor, w: LayerWeights, index: int, decodes: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of all heads of the group over this rank's rows, as input of the exchange: outputs and lse
        [B, H].
        """
        return self.attention.compute_partial(q_BHQ, w, self.kv.data[index], decodes)

    def get_router_input(self, batch: StepInput, index: int) -> RouterInput | None:
        """Return the synthetic router input of a layer, if the batch has one."""
        moe_index = index - self.shape.first_k_dense_replace
        if batch.router_inputs is None or moe_index < 0:
            return None
        return batch.router_inputs.select_layer(moe_index, len(batch.positions) * self.layout.dp)

    def run_mlp(
        self, x_BD: torch.Tensor | Rows, w: Mlp | Moe, router: RouterInput | None, live: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the dense MLP or experts over all tokens of the layout, summed over tp, for this replica's tokens."""
        x_TD = x_BD
        if self.layout.dp > 1:
            assert isinstance(x_BD, torch.Tensor)
            with record_range("dp_gather"):
                x_TD = self.groups.dp.all_gather(x_BD).flatten(0, 1)
        y_TD = self.run_experts(x_TD, w, router, live) if isinstance(w, Moe) else self.run_dense_mlp(x_TD, w)
        with record_range("mlp_reduce"):
            # Without attention DP a replica is all ranks; with it, each replica keeps its own tokens first.
            return self.reduce_hidden(y_TD if self.layout.dp == 1 else self.groups.dp.reduce_scatter(y_TD))

    def run_dense_mlp(self, x_TD: torch.Tensor | Rows, w: Mlp) -> torch.Tensor:
        """Return this rank's slice of a dense MLP."""
        with record_range("dense_mlp"):
            return apply_linear(moe.silu_mul(apply_linear(x_TD, w.gate_up), w.down), w.down)

    def run_experts(
        self, x_TD: torch.Tensor | Rows, w: Moe, router: RouterInput | None, live: torch.Tensor | None
    ) -> torch.Tensor:
        """Return this rank's experts, or its slice of all of them, and its slice of the shared expert, which processes
        all rows.
        """
        plain_TD = x_TD.plain if isinstance(x_TD, Rows) else x_TD
        assert plain_TD is not None
        with record_range("moe"):
            if needs_quantized_input(w.gate_up) and not isinstance(x_TD, Rows):
                x_TD = Rows(quantize_rows(plain_TD), plain_TD.dtype, plain_TD)  # once for both kinds of experts
            if w.shared is None:
                shared_TD = torch.zeros_like(plain_TD)
            else:
                shared_TD = apply_linear(
                    moe.silu_mul(apply_linear(x_TD, w.shared.gate_up), w.shared.down), w.shared.down
                )
            router_TD, routed_TE = router or (plain_TD, None)
            logits_TE = moe.compute_router_logits(router_TD, w.router)
            if routed_TE is not None:
                logits_TE = routed_TE
            weights_Tk, ids_Tk = moe.select_experts(logits_TE, w.bias, self.shape, live)
            if self.chosen_experts is not None:
                self.chosen_experts.append((logits_TE, ids_Tk))
            if self.stands_for > 1:
                ids_Tk = rotate_busiest_first(ids_Tk, self.shape.experts, self.stands_for)
            return moe.apply_experts(x_TD, w.gate_up, w.down, weights_Tk, ids_Tk, w.first, shared_TD)

    def sample_greedy(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the token of the largest logit over the replica's ranks, [B] int64; the smallest id wins a tie."""
        with record_range("lm_head"):
            rows, attn = logits_BV.shape[1], self.groups.attn
            live = self.shape.vocab - attn.rank * rows
            if live < rows:  # the last rank's rows past the vocabulary
                logits_BV[:, max(live, 0) :] = float("-inf")
            best_B, id_B = logits_BV.float().max(dim=-1)
            pair_B2 = torch.stack((best_B, (id_B + attn.rank * rows).float()), dim=-1)
            pair_NB2 = attn.all_gather(pair_B2)  # ids below 2^24 survive fp32
            winner_B = pair_NB2[..., 0].argmax(dim=0)
            return pair_NB2[..., 1].gather(0, winner_B.unsqueeze(0)).squeeze(0).long()

    def gather_logits(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return all ranks' logits, [B, vocab]; for comparisons, not part of a timed step."""
        parts = self.groups.attn.all_gather(logits_BV.contiguous())
        return parts.transpose(0, 1).flatten(1)[:, : self.shape.vocab]
