"""Write small random checkpoints with transformers, with no number that could hide an error by being 0 or 1.
transformers takes seconds to import, so it is imported only when a checkpoint is written.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ABSENT: Final = object()
VOCAB = 203  # a prime: over 2, 4 or 8 ranks the last one holds padding rows

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Fields of a V3 with 8 heads and 16 experts for up to 8 ranks; nope, value and rope widths differ, so that confusing them fails.
With weights of 0.15 the logits are of size 1 to 10."""


def make_yarn(mscale: float, mscale_all_dim: float) -> dict[str, object]:
    """Return YaRN parameters: of 8 frequencies 1 is kept, 5 are stretched and 2 lie in between; theta is not the
    default.
    """
    return {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


V3 = SIZES | {
    "q_lora_rank": 40,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_parameters": make_yarn(1.0, 0.8),
}
V2_GREEDY = SIZES | {"q_lora_rank": 40, "n_shared_experts": 2, "topk_method": "greedy"}


def write_deepseek_v3(folder: Path) -> None:
    """Write a V3: low-rank q, sigmoid routing in 4 groups with a correction bias, YaRN that scales scores and the
    table.
    """
    _write("DeepseekV3", V3, folder)


def write_deepseek_v2(folder: Path) -> None:
    """Write a V2 with V2-Lite's projection of q and softmax routing limited to 2 of 4 groups, in several files with an
    index.
    """
    own = {
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "rope_parameters": make_yarn(0.7, 0.7),
    }
    _write("DeepseekV2", SIZES | own, folder, shard="150KB")


def write_deepseek_v2_greedy(folder: Path) -> None:
    """Write a V2 with low-rank q, softmax routing without groups, plain rope, and an epsilon that latent norms do not
    share.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    _write("DeepseekV2", V2_GREEDY | {"rms_norm_eps": 0.1, "rope_parameters": rope}, folder)


GROUPED = {  # 8 query heads of 64 columns, which together are wider than the hidden state
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {  # rope scaling of Llama 3.1: of 32 frequencies some are kept, some are divided by 8, and some lie in between
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_qwen3(folder: Path, kv_heads: int, **changed: object) -> None:
    """Write a dense Qwen3: norms of heads, and an epsilon that is not the default."""
    _write("Qwen3", GROUPED | {"num_key_value_heads": kv_heads, "rms_norm_eps": 1e-3} | changed, folder)


def write_qwen3_moe(folder: Path, kv_heads: int, **changed: object) -> None:
    """Write a Qwen3-MoE: experts in every layer, softmax routing with normalised weights."""
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
    _write("Qwen3Moe", GROUPED | experts | {"num_key_value_heads": kv_heads} | changed, folder)


def write_llama(folder: Path, kv_heads: int, **changed: object) -> None:
    """Write a Llama 3.1: its scaling of rope, no norms of heads."""
    _write("Llama", GROUPED | {"num_key_value_heads": kv_heads, "rope_parameters": LLAMA3} | changed, folder)


def write_changed_deepseek_v3(folder: Path, changed: Mapping[str, object], written: Mapping[str, object]) -> None:
    """Write a V3 with `changed` fields, and a config.json in which `written` replaces values of transformers. A field
    written as ABSENT is left out. `seed` among the changed fields draws other weights.
    """
    _write("DeepseekV3", V3 | changed, folder)
    _rewrite(folder, written)


def write_changed_deepseek_v2(folder: Path, changed: Mapping[str, object], written: Mapping[str, object]) -> None:
    """Write a greedy V2 with `changed` fields, and a config.json in which `written` replaces values of transformers."""
    _write("DeepseekV2", V2_GREEDY | changed, folder)
    _rewrite(folder, written)


def write_deepseek_v3_fp8(folder: Path) -> None:
    """Write a V3 in fp8, as DeepSeek publishes it, wide enough that shards begin inside blocks."""
    wide = {"hidden_size": 160, "intermediate_size": 272, "moe_intermediate_size": 144, "q_lora_rank": 136}
    wide |= {"n_routed_experts": 8, "num_experts_per_tok": 8, "topk_group": 4}
    write_changed_deepseek_v3(folder, wide, {})
    convert_to_fp8(folder)


def convert_to_fp8(folder: Path) -> None:
    """Rewrite a checkpoint of one file as DeepSeek publishes V3: e4m3 weights with a scale for each 128 × 128 block."""
    from safetensors.torch import load_file, save_file

    from dcpbench.kernels.block_scaled import quantize_weight

    (file,) = folder.glob("*.safetensors")
    found = {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight") or "_proj_with_mqa" in name:
            scaled = quantize_weight(tensor)
            found |= {name: scaled.data, f"{name}_scale_inv": scaled.scale}
        else:
            found[name] = tensor
    save_file(found, file, {"format": "pt"})
    _rewrite(folder, {"quantization_config": FP8})


def _rewrite(folder: Path, written: Mapping[str, object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | dict(written)
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ABSENT}))


WRITERS: dict[str, Callable[[Path], None]] = {
    "v3": write_deepseek_v3,
    "v2": write_deepseek_v2,
    "v2-greedy": write_deepseek_v2_greedy,
}


def _write(kind: str, fields: Mapping[str, object], folder: Path, shard: str = "10GB") -> None:
    import transformers

    torch.manual_seed(fields.get("seed", 0))
    fields = {name: value for name, value in fields.items() if name != "seed"}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**fields))
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            elif name.endswith("e_score_correction_bias"):
                value.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
