"""Define defects of an engine, to test which of them `dcpbench verify` finds.

The name of a function is that of its defect. It patches the engine with its argument, a function like setattr. The defects in
IN_GROUPS need ranks that exchange partial attention; all others work in one process.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.engine import attention, model
from dcpbench.engine.attention import mla
from dcpbench.engine.decode_engine import DecodeEngine
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.kernels import moe
from dcpbench.kernels.block_scaled import Scaled
from dcpbench.workloads import session

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.engine.weights import Layer, Weights

    Patch = Callable[[object, str, object], None]


def _change_shape(patch: Patch, **changed: Any) -> None:
    """Make the model compute with other fields of its shape than those of its checkpoint."""
    make = Model.__init__

    def init(self: Model, shape: Any, *arguments: Any, **options: Any) -> None:
        make(self, dataclasses.replace(shape, **changed), *arguments, **options)

    patch(Model, "__init__", init)


def _change_rule(patch: Patch, **changed: Any) -> None:
    """Make the router follow another rule than that of the checkpoint."""
    route = moe.select_experts
    patch(
        moe,
        "select_experts",
        lambda logits, bias, rule, live=None: route(logits, bias, dataclasses.replace(rule, **changed), live),
    )


def _change_layer(patch: Patch, change: Callable[[Layer], Layer]) -> None:
    """Give the middle MoE layer other weights than those of the checkpoint."""
    load = session.load_weights

    def changed(*arguments: Any, **options: Any) -> Weights:
        weights = load(*arguments, **options)
        middle = len(weights.moe) // 2
        weights.moe[middle] = change(weights.moe[middle])
        return weights

    patch(session, "load_weights", changed)


def _scale_weight(weight: torch.Tensor | Scaled, factor: torch.Tensor | float) -> torch.Tensor | Scaled:
    """Return a weight, multiplied by `factor` in the part that has its shape."""
    if not isinstance(weight, Scaled):
        return weight * factor
    if isinstance(factor, torch.Tensor):
        return dataclasses.replace(weight, data=(weight.data.float() * factor).to(weight.data.dtype))
    return dataclasses.replace(weight, scale=weight.scale * factor)


def _make_ones_like(weight: torch.Tensor | Scaled) -> torch.Tensor:
    data = weight.data if isinstance(weight, Scaled) else weight
    return torch.ones(data.shape, dtype=torch.float32 if isinstance(weight, Scaled) else data.dtype)


def no_yarn(patch: Patch) -> None:
    """Compute rope frequencies without YaRN."""
    table = model.make_rope_table
    patch(model, "make_rope_table", lambda shape, *rest: table(dataclasses.replace(shape, yarn=None), *rest))


def no_mscale(patch: Patch) -> None:
    """Omit the factor of mscale_all_dim in the softmax scale."""
    patch(attention, "compute_softmax_scale", lambda shape: (shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5)


def routed_scale_of_1(patch: Patch) -> None:
    """Omit routed_scaling_factor."""
    _change_rule(patch, routed_scaling_factor=1.0)


def rope_in_halves(patch: Patch) -> None:
    """Rotate the pairs (i, i + P/2) instead of (2i, 2i + 1)."""
    _change_shape(patch, rope_interleaved=False)


def one_expert_too_few(patch: Patch) -> None:
    """Choose 3 instead of 4 experts."""
    route = moe.select_experts

    def fewer(logits: Any, bias: Any, rule: Any, live: Any = None) -> Any:
        return route(logits, bias, dataclasses.replace(rule, top_k=rule.top_k - 1), live)

    patch(moe, "select_experts", fewer)


def no_shared_expert(patch: Patch) -> None:
    """Omit the shared experts."""
    experts = Model.run_experts
    patch(Model, "run_experts", lambda self, x, w, *rest: experts(self, x, dataclasses.replace(w, shared=None), *rest))


def experts_swapped(patch: Patch) -> None:
    """Swap the first matrices of two experts of one layer."""

    def change(layer: Layer) -> Layer:
        order = torch.arange(layer.mlp.router.shape[0])
        order[:2] = order[:2].flip(0)
        weight = layer.mlp.gate_up
        if isinstance(weight, Scaled):
            weight = dataclasses.replace(weight, data=weight.data[order], scale=weight.scale[order])
        else:
            weight = weight[order]
        return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, gate_up=weight))

    _change_layer(patch, change)


def large_epsilon(patch: Patch) -> None:
    """Compute norms with an epsilon of 0.01."""
    _change_shape(patch, rms_eps=1e-2)


def no_router_bias(patch: Patch) -> None:
    """Choose experts without the correction bias."""
    route = moe.select_experts
    patch(moe, "select_experts", lambda logits, bias, *rest: route(logits, torch.zeros_like(bias), *rest))


def no_group_limit(patch: Patch) -> None:
    """Choose experts from all groups."""
    _change_rule(patch, n_group=1)


def weights_not_normalised(patch: Patch) -> None:
    """Do not normalise the weights of chosen experts."""
    _change_rule(patch, normalise=False)


def kv_scale_twice(patch: Patch) -> None:
    """Apply the scale of the KV cache twice in attention."""
    patch(KvPool, "scale", 0.25)
    make = mla.make_backend
    patch(
        mla,
        "make_backend",
        lambda name, spec: make(name, dataclasses.replace(spec, kv_scale=spec.kv_scale**2)),
    )


def wrong_row_of_a_page(patch: Patch) -> None:
    """Shift the columns of the last row of each page by one."""
    write = model.write_kv

    def wrong(kv: torch.Tensor, new: torch.Tensor, locs: torch.Tensor, share: Any, scale: float) -> None:
        last = (locs // share.dcp % share.page_size == share.page_size - 1).unsqueeze(-1)
        write(kv, torch.where(last, new.roll(1, dims=-1), new), locs, share, scale)

    patch(model, "write_kv", wrong)


def token_not_attended(patch: Patch) -> None:
    """Omit one position in its own attention."""
    shards = DecodeEngine._make_shards
    position = 5

    def fewer(self: DecodeEngine, slots: Any, positions: Any, query_length: int) -> Any:
        return shards(self, slots, [p - (p == position) for p in positions], query_length)

    patch(DecodeEngine, "_make_shards", fewer)


def lse_of_base_2(patch: Patch) -> None:
    """Return the log-sum-exp to base 2 on the second rank of a DCP group."""
    run = Model.compute_partial

    def partial(self: Model, *arguments: Any) -> Any:
        out, lse = run(self, *arguments)
        if self.groups.dcp.rank == 1:
            lse *= math.log2(math.e)
        return out, lse

    patch(Model, "compute_partial", partial)


def head_without_output(patch: Patch) -> None:
    """Omit the last head in o_proj of one layer."""

    def change(layer: Layer) -> Layer:
        keep = _make_ones_like(layer.attention.o)
        keep[:, -layer.attention.w_uv.shape[2] :] = 0
        return dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, o=_scale_weight(layer.attention.o, keep))
        )

    _change_layer(patch, change)


def wrong_block_scale(patch: Patch) -> None:
    """Enlarge the first 128 × 128 block of o_proj of one layer by a quarter."""

    def change(layer: Layer) -> Layer:
        weight = layer.attention.o
        if isinstance(weight, Scaled):
            scale = weight.scale.clone()
            scale[0, 0] *= 1.25
            weight = dataclasses.replace(weight, scale=scale)
        else:
            weight = weight.clone()
            weight[:128, :128] *= 1.25
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, o=weight))

    _change_layer(patch, change)


def layer_skipped(patch: Patch) -> None:
    """Omit one layer."""

    def change(layer: Layer) -> Layer:
        shared = dataclasses.replace(layer.mlp.shared, down=_scale_weight(layer.mlp.shared.down, 0.0))
        mlp = dataclasses.replace(layer.mlp, down=_scale_weight(layer.mlp.down, 0.0), shared=shared)
        attention = dataclasses.replace(layer.attention, o=_scale_weight(layer.attention.o, 0.0))
        return dataclasses.replace(layer, mlp=mlp, attention=attention)

    _change_layer(patch, change)


def no_query_norm(patch: Patch) -> None:
    """Do not normalise the query latent."""
    split = mla.split_latent

    def plain(qkv: torch.Tensor, q_norm: Any, kv_norm: torch.Tensor, *rest: Any, **options: Any) -> Any:
        split(qkv, q_norm, kv_norm, *rest, **options)
        return qkv[:, : len(q_norm)]

    patch(mla, "split_latent", plain)


def gate_for_up(patch: Patch) -> None:
    """Compute silu of up instead of gate in dense layers and shared experts."""
    product = moe.silu_mul
    patch(moe, "silu_mul", lambda x, feeds=None: product(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), feeds))


def residual_of_before(patch: Patch) -> None:
    """Add the output of attention after the MLP instead of before it."""
    norm = Model.apply_norm

    def before(
        self: Model, x: Any, residual: torch.Tensor, weight: Any, number: int, *rest: Any, **options: Any
    ) -> Any:
        if x is None or number % 2:
            return norm(self, x, residual, weight, number, *rest, **options)
        result = norm(self, None, residual, weight, number, *rest, **options)
        residual += x
        return result

    patch(Model, "apply_norm", before)


def key_of_last_position(patch: Patch) -> None:
    """Rotate rope keys by one position too few."""
    split = mla.split_latent

    def shifted(qkv: Any, q_norm: Any, kv_norm: Any, positions: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return split(qkv, q_norm, kv_norm, (positions - 1).clamp(min=0), *rest, **options)

    patch(mla, "split_latent", shifted)


def second_best_token(patch: Patch) -> None:
    """Sample the token with the second largest logit."""
    greedy = Model.sample_greedy

    def second(self: Model, logits: torch.Tensor) -> torch.Tensor:
        best = greedy(self, logits.clone())
        others = logits.clone()
        first = self.groups.attn.rank * logits.shape[1]
        mine = (best >= first) & (best < first + logits.shape[1])
        others[mine, best[mine] - first] = float("-inf")
        return greedy(self, others)

    patch(Model, "sample_greedy", second)


def head_of_other_norm(patch: Patch) -> None:
    """Use ones as the weight of the last norm."""
    load = session.load_weights

    def changed(*arguments: Any, **options: Any) -> Weights:
        weights = load(*arguments, **options)
        return dataclasses.replace(weights, final_norm=torch.ones_like(weights.final_norm))

    patch(session, "load_weights", changed)


FIVE = (no_yarn, no_mscale, routed_scale_of_1, rope_in_halves, one_expert_too_few)
DEFECTS: dict[str, Callable[[Patch], None]] = {
    defect.__name__: defect
    for defect in (
        *FIVE,
        no_shared_expert,
        experts_swapped,
        large_epsilon,
        no_router_bias,
        no_group_limit,
        weights_not_normalised,
        kv_scale_twice,
        wrong_row_of_a_page,
        token_not_attended,
        lse_of_base_2,
        head_without_output,
        wrong_block_scale,
        layer_skipped,
        no_query_norm,
        gate_for_up,
        residual_of_before,
        key_of_last_position,
        second_best_token,
        head_of_other_norm,
    )
}
IN_GROUPS = ("lse_of_base_2",)  # defects that need a DCP group
