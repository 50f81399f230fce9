"""Published config.json files give the bytes of their checkpoints; models that are not planned are refused by name."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dcpbench import cli
from dcpbench.errors import DcpbenchError, ModelError
from dcpbench.models import NOT_PLANNED, from_config, load_shape
from dcpbench.models.shapes import ModelShape
from dcpbench.models.weight_formats import UNQUANTISED, WeightFormat
from dcpbench.plan.validate import find_live_limit
from dcpbench.points import memory
from dcpbench.points.layout import OWN_HEADS, Layout
from dcpbench.points.roofline import Sharding, StepRows, iter_phase_works

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
    "rms_norm_eps": 1e-06, "rope_scaling": YARN | {"factor": 40}, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
R1 = V3 | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "transformers_version": "4.46.3"}
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
}  # fmt: skip
K2 = V3 | {
    "aux_loss_alpha": 0.001, "seq_aux": True, "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
    "rope_scaling": YARN | {"factor": 32, "beta_fast": 1.0}, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1,
    "vocab_size": 163840,
}  # fmt: skip
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax",
                "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
THINKING = K2 | {
    "max_position_embeddings": 262144,
    "quantization_config": INT4,
    "rope_scaling": YARN | {"factor": 64.0},
    "rms_norm_eps": 1e-05,
}
K26 = {
    "architectures": ["KimiK25ForConditionalGeneration"], "auto_map": {}, "dtype": "bfloat16", "ignore_index": -100,
    "media_placeholder_token_id": 163605, "model_type": "kimi_k25", "text_config": THINKING | {"id2label": {"0": "LABEL_0"}, "top_k": 50},
    "tie_word_embeddings": False, "use_unified_vision_chunk": True, "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
}  # fmt: skip
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 94,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94, "num_key_value_heads": 4, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN_30B = QWEN | {
    "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_hidden_layers": 48,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
    "intermediate_size": 28672, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 202752, "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1,
    "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "tie_word_embeddings": False,
    "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": True,
    "vocab_size": 151552,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "num_local_experts": 128, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "max_position_embeddings": 204800, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
    "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
    "quantization_config": FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
GLM_52 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3, "head_dim": 192, "hidden_act": "silu",
    "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_skip_topk_offset": 3, "index_topk": 2048, "index_topk_freq": 4,
    "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "moe_router_dtype": "float32", "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64, "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_interleave": True, "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
NVFP4 = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": None,
    "group_size": 16,
    "exclude_modules": [
        "lm_head", "model.embed_tokens", "model.norm", "model.layers.61*",
        *(f"model.layers.{i}.self_attn.{name}" for i in range(61) for name in ATTENTION),
        *(f"model.layers.{i}.mlp.gate" for i in range(3, 61)),
    ],
}  # fmt: skip
PUBLISHED = {
    "DeepSeek-V3": (V3, None, 688_586_727_753, "total_size of model.safetensors.index.json, with the layer for multi-token prediction"),
    "DeepSeek-R1-0528": (R1, None, 688_600_000_000, "files of deepseek-ai/DeepSeek-R1 on huggingface.co, whose sizes it has"),
    "DeepSeek-V3.2": (V32, None, 689_500_000_000, "files on huggingface.co"),
    "Kimi-K2-Instruct": (K2, None, 1_029_200_000_000, "files on huggingface.co"),
    "Kimi-K2-Thinking": (THINKING, None, 594_000_000_000, "size on huggingface.co, not verified to the byte"),
    "Kimi-K2.6": (K26, None, 595_200_000_000, "files on huggingface.co, with 0.9 GB of a vision encoder"),
    "DeepSeek-R1-0528-NVFP4-v2": (V3, NVFP4, 413_340_567_567, "files of nvidia/DeepSeek-R1-0528-NVFP4-v2, which quantises o_proj, too"),
    "Qwen3-235B-A22B": (QWEN, None, 470_200_000_000, "files on huggingface.co"),
    "Qwen3-30B-A3B": (QWEN_30B, None, 61_064_245_248, "total_size of model.safetensors.index.json"),
    "Llama-3.1-70B": (LLAMA, None, 141_107_412_992, "total_size of model.safetensors.index.json"),
    "GLM-4.6": (GLM, None, 713_600_000_000, "files on huggingface.co"),
    "gpt-oss-120b": (GPT_OSS, None, 65_248_815_744, "total_size of model.safetensors.index.json"),
    "GLM-5.2": (GLM_52, None, 1_506_700_000_000, "files on huggingface.co"),
    "MiniMax-M2.7": (MINIMAX, None, 230_200_000_000, "files on huggingface.co"),
}  # fmt: skip
"""Models with their config.json, modelopt's hf_quant_config.json, the bytes of the checkpoint, and the source of the bytes."""


def compute_checkpoint_bytes(shape: ModelShape) -> int:
    """Return the bytes of a published checkpoint's weights without vision encoders.

    A layer for multi-token prediction has copies of embedding and head.
    """
    weights, one = shape.published, Layout(1)
    assert isinstance(weights, WeightFormat)
    predicting = weights if weights.mtp else UNQUANTISED
    layer = memory.compute_draft_bytes(shape, one, 2, OWN_HEADS, predicting) + 2 * shape.vocab * shape.hidden * 2
    layers = memory.count_all_layers(shape)
    return memory.compute_weight_bytes(shape, one, 2, *layers, OWN_HEADS, weights) + shape.mtp_layers * layer


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration_gives_the_bytes_of_its_checkpoint(name: str) -> None:
    """Sizes stated in GB, file headers, and copied or omitted layers allow 1 %."""
    config, quantization, nbytes, _ = PUBLISHED[name]
    shape = from_config(config, Path(f"{name}.json"), quantization)
    assert compute_checkpoint_bytes(shape) == pytest.approx(nbytes, rel=0.01)


def test_checkpoints_with_exact_sizes_agree_to_the_byte() -> None:
    """Qwen3-30B, Llama-3.1-70B and gpt-oss-120b have no omitted tensors; the bias of a router is counted in fp32."""
    for name, biases in (("Llama-3.1-70B", 0), ("Qwen3-30B-A3B", 48 * 128 * 4), ("gpt-oss-120b", 36 * 128 * (4 - 2))):
        config, _, nbytes, _ = PUBLISHED[name]
        assert compute_checkpoint_bytes(from_config(config, Path("config.json"))) - biases == nbytes


def test_only_experts_of_kimi_k26_are_int4() -> None:
    """60 · 384 · 3 · 7168 · 2048 numbers have half a byte each, and 2 bytes for every 32 of them."""
    shape = from_config(K26, Path("kimi-k2.6.json"))
    experts = 60 * 384 * 3 * 7168 * 2048
    others = memory.compute_weight_bytes(shape, Layout(1), 2, 1, 60) - 2 * experts
    assert compute_checkpoint_bytes(shape) == others + experts // 2 + experts // 32 * 2


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str) -> str:
    """Return the output of a command that exits with 0."""
    monkeypatch.setattr(sys, "argv", ["dcpbench", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    return capsys.readouterr().out


def test_kimi_k26_fits_on_8_h200_with_tp8_dcp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank has an eighth of each expert in int4 with its scales, 71.35 GB, and 4.84 GB in bf16: eighths of shared
    experts, of a dense MLP and of the vocabulary; 8 heads; and q_a, kv_a, routers and norms. A public log of vLLM with
    Kimi-K2.6 at tp8 on 8 H200 has `Model loading took 71.16 GiB`, with the vision encoder.
    """
    (tmp_path / "config.json").write_text(json.dumps(K26))
    points = json.loads(
        run(
            monkeypatch,
            capsys,
            f"sweep --model {tmp_path} --tp 8 --dcp 8 --dry-run --gpu H200,count=8 --json --no-baseline",
        )
    )
    assert {(p["layout"], p["weights_dtype"], p["layers_held"], p["reason"]) for p in points} == {
        ("tp8·dcp8", "int4", 61, None)
    }
    experts = 60 * 384 * 3 * 7168 * 256 * 9 // 16
    others = points[0]["weights_held_bytes"] - experts
    assert experts == 71_345_111_040
    attention = 7168 * (1536 + 576) + 1536 * 8 * 192 + 2 * 8 * 128 * 512 + 8 * 128 * 7168 + 1536 + 512 + 2 * 7168
    mlps = 60 * (384 * 7168 + 3 * 7168 * 256) + 3 * 7168 * 2304
    assert others == 2 * (61 * attention + mlps + (2 * 20480 + 1) * 7168) + 60 * 384 * 4, "routers have biases in fp32"
    assert points[0]["weights_held_bytes"] / memory.GIB == pytest.approx(71.16, rel=0.005)


NASTY: list[object] = [None, True, False, 0, 1, 3, -1, 2**31, 10**400, 0.5, math.inf, math.nan, "", "x", [], [1], {}, {"a": 1}, "a" * 9000]  # fmt: skip


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(data=st.data(), name=st.sampled_from(list(PUBLISHED)))
def test_any_configuration_is_sized_or_refused_with_a_short_message(data: st.DataObject, name: str) -> None:
    """Any field may have huge, tiny, negative or non-numeric values; shapes, plans and floors raise no other exception."""
    config, quantization, _, _ = PUBLISHED[name]
    message = ""
    changes = data.draw(st.dictionaries(st.sampled_from(list(config)), st.sampled_from(NASTY), max_size=2))
    try:
        shape = from_config(config | changes, Path("config.json"), quantization)
        Layout(2).check_model(shape)
        sharding = Sharding(shape=shape, layout=Layout(2), itemsize=2, weights=shape.get_weight_format("int4"))
        step = StepRows(decodes=(9,), chunks=((5, 3),), sampled=2, tokens=6)
        assert all(work.memory_bytes >= 0 for _, _, work in iter_phase_works(sharding, step))
        assert memory.compute_page_bytes(shape, 16, 2, Layout(2)) > 0
        if isinstance(shape.published, WeightFormat):
            assert compute_checkpoint_bytes(shape) > 0
    except DcpbenchError as e:
        message = str(e)
    assert len(message) < 1200, "long values of a file are truncated"


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_model_is_run_or_planned_with_a_reason(name: str) -> None:
    """The experts of Kimi-K2-Thinking and Kimi-K2.6 are in int4, which the engine computes with."""
    config, quantization, _, _ = PUBLISHED[name]
    shape = from_config(config, Path(f"{name}.json"), quantization)
    reasons = {
        "deepseek_v32": "sparse attention",
        "glm_moe_dsa": "sparse attention",
        "gpt_oss": "no kernels for mxfp4",
        "glm4_moe": "biases in attention",
        "minimax_m2": "norms over all heads",
    }
    reason = reasons.get(config["model_type"])
    if shape.published.name == "nvfp4":
        reason = "no kernels for nvfp4"
    found = find_live_limit(shape, shape.published.name)
    assert (reason is None) == (found is None)
    assert reason is None or reason in str(found)


@pytest.mark.parametrize("kind", NOT_PLANNED)
def test_model_that_is_not_planned_is_refused_by_name(kind: str) -> None:
    """Kimi-K3's language model is nested, and its fields are not read."""
    with pytest.raises(ModelError, match=f"models with 'model_type' '{kind}' are neither planned nor run: .*attention"):
        from_config(V3 | {"model_type": kind, "text_config": V3}, Path("config.json"))


class TestSparseAttention:
    V32 = load_shape("deepseek-v3.2")

    def test_kv_of_a_token_includes_a_key_of_the_indexer_per_layer(self) -> None:
        """A row has 576 numbers of 2 bytes, or in fp8 512 + 4 scales · 4 + 64 · 2 bytes; a key has 128 bytes and a
        scale of 4 in both.
        """
        assert self.V32.compute_kv_bytes_per_token(2) == 61 * (1152 + 132)
        assert self.V32.compute_kv_bytes_per_token(1) == 61 * (656 + 132)
        assert self.V32.add_drafts(1).compute_kv_bytes_per_token(2) == 62 * (1152 + 132), (
            "the layer for drafts has an indexer"
        )

    def test_layers_may_share_an_indexer(self) -> None:
        """The first 3 of GLM-5.2's 78 layers have an indexer, and then every fourth."""
        shape = from_config(GLM_52, Path("glm.json"))
        assert shape.indexer is not None
        assert shape.indexer.layers == 3 + 19
        listed = from_config(GLM_52 | {"indexer_types": ["full", "shared"] * 39}, Path("glm.json")).indexer
        assert listed is not None
        assert listed.layers == 39
        for kinds in (["full"], [["full"]] * 78):
            with pytest.raises(ModelError, match=r"'indexer_types' is .* for each of 78 layers"):
                from_config(GLM_52 | {"indexer_types": kinds}, Path("glm.json"))

    def test_sparse_attention_is_planned_but_not_measured(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "tp8·dcp8" in run(monkeypatch, capsys, "sweep --model deepseek-v3.2 --tp 8 --dry-run --gpu H200,count=8")
        assert (
            find_live_limit(self.V32, "fp8")
            == "the engine attends to all tokens, and deepseek-v3.2 has sparse attention"
        )

    def test_decode_scores_all_keys_and_attends_to_the_best(self) -> None:
        """A decode over 10,000 tokens reads 132 bytes of each for 64 heads of 128 numbers, then 2,048 rows of 576
        numbers for 128 heads of q and o.
        """
        step = StepRows(decodes=(10_000,), sampled=1, tokens=1)
        works = iter_phase_works(Sharding(shape=self.V32, layout=Layout(1), itemsize=2), step)
        found = [(times, work.memory_bytes, work.flops) for phase, times, work in works if phase == "attention"]
        q_and_o = 128 * (576 + 512)
        assert found == [
            (61, 10_000 * 132, 2 * 10_000 * 64 * 128),
            (61, 2048 * 1152 + q_and_o * 2, 2 * 2048 * q_and_o),
        ]
