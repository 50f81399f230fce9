"""Write model folders without weights: a config.json of DeepSeek-V3's fields, and a tokenizer with one word per id."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False, "attention_dropout": 0.0,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840, "tie_word_embeddings": False, "use_cache": True, "initializer_range": 0.02,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""The published config without the layer for multi-token prediction."""
FP8_BLOCK = 128  # rows and columns of a block of fp8 weights with one scale
FP8_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}  # fmt: skip


def write_folder(folder: Path, config: Mapping[str, Any], *, fp8: bool) -> None:
    """Write config.json, with fp8 weights if `fp8`, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    quantised = {"quantization_config": FP8_BLOCKS} if fp8 else {}
    (folder / "config.json").write_text(json.dumps({**config, **quantised}, indent=1) + "\n")
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer(config["vocab_size"])))
    tokens = {"bos_token": "t0", "eos_token": "t1", "unk_token": "t0", "model_max_length": 163840}
    template = {"chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}"}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens | template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def make_tokenizer(vocab: int) -> dict[str, Any]:
    """Return tokenizer.json with the words t0, t1, … for the ids 0, 1, …, separated by blanks."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(vocab)}, "unk_token": "t0"},
    }  # fmt: skip
