"""Define TensorNames: the names of the tensors in a checkpoint. No torch."""

from __future__ import annotations

import dataclasses

SCALE = "_scale_inv"  # suffix of the name of an fp8 weight that gives the name of its scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Hold the names of a checkpoint's tensors; the defaults are those of DeepSeek-V2 and V3.

    `{}` stands for the index of a layer or an expert. Names between `layer` and `down` follow the prefix of a layer; `gate`, `up` and
    `down` follow that of an MLP. Synthetic weights are seeded by names, and drawn as an embedding or a bias where the name
    contains `embed` or ends with `bias`.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: str = "model.layers.{}."  # prefix of a layer
    input_norm: str = "input_layernorm.weight"
    q: str = "self_attn.q_proj.weight"  # projection of q without q-LoRA
    q_a: str = "self_attn.q_a_proj.weight"
    q_norm: str = "self_attn.q_a_layernorm.weight"
    q_b: str = "self_attn.q_b_proj.weight"
    k: str = "self_attn.k_proj.weight"  # k and v of grouped-query attention, with q in `q`; or `.bias`
    v: str = "self_attn.v_proj.weight"
    q_head_norm: str = "self_attn.q_norm.weight"
    k_head_norm: str = "self_attn.k_norm.weight"
    kv_a: str = "self_attn.kv_a_proj_with_mqa.weight"
    kv_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_b: str = "self_attn.kv_b_proj.weight"
    o: str = "self_attn.o_proj.weight"
    post_norm: str = "post_attention_layernorm.weight"
    dense: str = "mlp."  # prefix of a dense MLP
    router: str = "mlp.gate.weight"
    routing_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{}."  # prefix of an expert
    shared: str = "mlp.shared_experts."  # prefix of the shared experts, which are one MLP
    embedding_norm: str = "enorm.weight"  # norm of the embedding of a token, in a layer that drafts tokens (MTP)
    hidden_norm: str = "hnorm.weight"  # norm of the hidden state before that token; `join` projects both together
    join: str = "eh_proj.weight"
    draft_norm: str = "shared_head.norm.weight"  # norm before the LM head
    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"


DEEPSEEK_NAMES = TensorNames()
