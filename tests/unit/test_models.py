"""Model families: published sizes read from config.json, and names of models, tensors and repositories."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dcpbench import models
from dcpbench.errors import ModelError
from dcpbench.models import (
    ALIASES,
    FAMILIES,
    REPOSITORIES,
    SHAPES,
    deepseek_v3,
    from_config,
    kimi_k2,
    kimi_k25,
    load_shape,
    qwen3_moe,
)
from dcpbench.models.checkpoint_folder import check_checkpoint
from dcpbench.models.family import Family
from dcpbench.models.quantization_config import FP8_BLOCKS
from dcpbench.models.shapes import Gqa, ModelShape, Yarn
from dcpbench.models.tensor_names import TensorNames
from dcpbench.models.weight_formats import FP8, UNQUANTISED, UnknownFormat, WeightFormat

FIELDS = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "q_lora_rank": "q_lora",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "n_shared_experts": "shared_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "intermediate_size": "intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "vocab_size": "vocab",
    "n_group": "n_group",
    "topk_group": "topk_group",
    "norm_topk_prob": "normalise",
    "routed_scaling_factor": "routed_scaling_factor",
    "kv_lora_rank": "latent",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "v_head_dim": "v_head_dim",
    "rms_norm_eps": "rms_eps",
    "rope_theta": "rope_theta",
    "rope_interleave": "rope_interleaved",
    "max_position_embeddings": "max_position",
    "tie_word_embeddings": "tie_word_embeddings",
    "num_nextn_predict_layers": "mtp_layers",
}
PRESETS = [(family, preset) for family in FAMILIES for preset in family.presets]
V3 = SHAPES["deepseek-v3"]


def make_config(family: Family, shape: ModelShape) -> dict[str, Any]:
    """Return a config.json of this family with these sizes."""
    if shape.gqa:
        return make_gqa_config(family, shape, shape.gqa)
    fields: dict[str, Any] = {field: getattr(shape, name) for field, name in FIELDS.items()}
    fields |= {"topk_method": family.topk_methods[1 if shape.n_group > 1 else 0] or family.topk_methods[0]}
    if isinstance(shape.yarn, Yarn):
        yarn = dataclasses.asdict(shape.yarn)
        yarn["original_max_position_embeddings"] = yarn.pop("original_max_position")
        fields["rope_scaling"] = {"type": "yarn"} | yarn
    if shape.indexer:
        fields |= {
            "index_n_heads": shape.indexer.heads,
            "index_head_dim": shape.indexer.width,
            "index_topk": shape.indexer.top_k,
        }
    if shape.published.name == FP8:
        fields["quantization_config"] = FP8_BLOCKS
    named = {"model_type": family.model_type, "architectures": list(family.architectures)}
    return named | fields if family.nested_in is None else named | {family.nested_in: fields}


GPT_OSS_BF16 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
GQA_FIELDS = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": "experts"},
    "llama": {},
    "glm4_moe": {
        "n_routed_experts": "experts",
        "n_shared_experts": "shared_experts",
        "first_k_dense_replace": "first_k_dense_replace",
        "n_group": "n_group",
        "topk_group": "topk_group",
        "num_nextn_predict_layers": "mtp_layers",
        "routed_scaling_factor": "routed_scaling_factor",
    },
    "gpt_oss": {"num_local_experts": "experts"},
    "minimax_m2": {"num_local_experts": "experts"},
}


def make_gqa_config(family: Family, shape: ModelShape, gqa: Gqa) -> dict[str, Any]:
    """Return a config.json of a family with grouped-query attention."""
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps", "rope_theta")
    taken = (*usual, "max_position_embeddings", "tie_word_embeddings", "intermediate_size")
    fields: dict[str, Any] = {field: getattr(shape, FIELDS[field]) for field in taken}
    fields |= {field: getattr(shape, name) for field, name in GQA_FIELDS[family.model_type].items()}
    fields |= {"head_dim": shape.qk_head_dim, "num_key_value_heads": gqa.kv_heads, "attention_bias": gqa.qkv_bias}
    if shape.experts:
        fields |= {"num_experts_per_tok": shape.top_k}
    if gqa.qk_norm_over_heads:
        fields |= {
            "rotary_dim": shape.qk_rope_head_dim,
            "intermediate_size": shape.moe_intermediate_size,
            "use_qk_norm": gqa.qk_norm,
        }
        left_out = ["gate", "e_score_correction_bias", "lm_head"]
        fields |= {"quantization_config": FP8_BLOCKS | {"fmt": "float8_e4m3fn", "modules_to_not_convert": left_out}}
    elif shape.experts and not gqa.window_layers:
        fields |= {"moe_intermediate_size": shape.moe_intermediate_size, "norm_topk_prob": shape.normalise}
    if shape.qk_nope_head_dim and not gqa.qk_norm_over_heads:
        fields |= {"partial_rotary_factor": shape.qk_rope_head_dim / shape.qk_head_dim, "use_qk_norm": gqa.qk_norm}
    if gqa.window_layers:
        kinds = ["sliding_attention", "full_attention"] * gqa.window_layers
        fields |= {"sliding_window": gqa.window, "layer_types": kinds, "swiglu_limit": 7.0}
    if shape.published.name == "mxfp4":
        fields |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS_BF16}}
    if shape.yarn:
        fields["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
        fields["rope_scaling"] |= {"original_max_position_embeddings": 4096}
    if shape.llama3_rope:
        scaling = dataclasses.asdict(shape.llama3_rope)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        fields["rope_scaling"] = {"rope_type": "llama3"} | scaling
    return {"model_type": family.model_type, "architectures": list(family.architectures)} | fields


@pytest.mark.parametrize(("family", "preset"), PRESETS, ids=lambda x: getattr(x, "model_type", None))
def test_published_sizes_are_read_from_a_configuration(family: Family, preset: Any) -> None:
    shape = SHAPES[preset.shape.name]
    assert from_config(make_config(family, shape), Path(f"{shape.name}.json")) == shape


@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.model_type)
def test_unknown_model_type_raises_model_error(family: Family) -> None:
    config = make_config(family, family.presets[0].shape if family.presets else kimi_k2.SHAPE) | {
        "model_type": f"{family.model_type}_other"
    }
    supported = ", ".join(known.model_type for known in FAMILIES)
    with pytest.raises(ModelError, match=f"which may compute otherwise; {supported} are supported"):
        from_config(config, Path("config.json"))


def test_every_published_model_can_be_loaded_and_has_a_repository() -> None:
    """Only `tiny` has no checkpoint."""
    for name in REPOSITORIES:
        assert load_shape(name).name == name
    assert {*SHAPES, *ALIASES} - {*REPOSITORIES} == {"tiny"}
    assert len(set(REPOSITORIES.values())) == len(REPOSITORIES)


def test_model_without_a_family_raises_error_with_all_families() -> None:
    with pytest.raises(
        ModelError, match=r"Give a configuration of DeepSeek-V2, .*Kimi-K2, .* or gpt-oss, or one of: deepseek-v2-l"
    ):
        from_config({"model_type": "mistral"}, Path("config.json"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_key_value_heads": 5}, "'num_key_value_heads' is 5, which does not divide 64 attention heads"),
        ({"use_sliding_window": True}, "'use_sliding_window' is True; only False is supported"),
        ({"mlp_only_layers": [3]}, r"'mlp_only_layers' is \[3\]; only \[\] is supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks the field 'low_freq_factor'"),
        ({"layer_types": ["sliding_attention"] * 94}, "'layer_types' is .*94 times 'full_attention'"),
        ({"head_dim": 0}, "'head_dim' is 0, which is not a positive integer"),
        ({"index_topk": 2048}, "'index_topk' is 2048, and dcpbench does not know what that changes"),
    ],
)
def test_unsupported_grouped_query_attention_is_refused(changed: dict[str, Any], message: str) -> None:
    config = make_config(qwen3_moe.FAMILY, SHAPES["qwen3-235b-a22b"])
    with pytest.raises(ModelError, match=message):
        from_config(config | changed, Path("config.json"))


NAMES = TensorNames(layer="language_model.model.layers.{}.", lm_head="language_model.lm_head.weight")
NESTED = dataclasses.replace(
    kimi_k2.FAMILY, model_type="nested_k2", nested_in="text_config", tensors=NAMES, title="Kimi-Nested"
)


def make_int4(ignore: list[str], **weights: object) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors, as in Kimi-K2-Thinking and later models."""
    described = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True, "type": "int"} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": described, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": ignore}


KIMI_BF16 = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
ALL = {"qkv", "q_b", "o", "dense", "shared", "experts"}


def read_format(
    found: object, family: Family = kimi_k25.FAMILY, *, nested: bool = True
) -> WeightFormat | UnknownFormat:
    """Return the format of Kimi-K2's shape with this `quantization_config`."""
    config = make_config(family, kimi_k2.SHAPE)
    fields = config["text_config"] if family.nested_in else config
    del fields["quantization_config"]
    (fields if nested else config)["quantization_config"] = found
    return from_config(config, Path("kimi.json")).published


@pytest.mark.parametrize(
    ("found", "name", "columns", "scale_bits", "parts"),
    [
        (None, "bf16", None, 0, set()),
        (FP8_BLOCKS, "fp8", 128, 32, ALL),
        (FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}, "fp8", 128, 32, ALL),
        (make_int4(KIMI_BF16), "int4", 32, 16, {"experts"}),
        (make_int4(["lm_head"], group_size=128, symmetric=False), "int4", 128, 20, ALL),
        (NVFP4 | {"ignore": ["lm_head", "model.layers.*.self_attn*", "model.embed_tokens"]}, "nvfp4", 16, 8, ALL - {"qkv", "q_b", "o"}),
        (NVFP4 | {"exclude_modules": ["model.layers.*.self_attn*"]}, "nvfp4", 16, 8, ALL),
        (NVFP4 | {"ignore": [f"model.layers.{i}.self_attn.{name}*" for i in range(61) for name in ("q_", "kv_")]}, "nvfp4", 16, 8, ALL - {"qkv", "q_b"}),
        (make_int4([], num_bits=4, type="float", strategy="tensor_group", group_size=16), "nvfp4", 16, 8, ALL),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, "mxfp4", 32, 8, ALL - {"qkv", "q_b", "o"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [True, False])
def test_known_format_has_the_parts_that_the_configuration_includes(
    found: object, name: str, columns: int, scale_bits: int, parts: set[str], nested: bool
) -> None:
    """Kimi-K2.5's config.json nests the language model; its quantisation may be at either place. vLLM and SGLang read
    `exclude_modules` only in hf_quant_config.json.
    """
    one = read_format(found, nested=nested)
    assert isinstance(one, WeightFormat)
    assert (one.name, one.columns, one.scale_bits, one.parts) == (name, columns, scale_bits, parts)


@pytest.mark.parametrize(
    ("found", "described"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits, groups of 128"),
        (make_int4([], num_bits=8), "compressed-tensors, 8 bits, groups of 32"),
        (make_int4([], strategy="channel", group_size=None), "compressed-tensors, 4 bits"),
        (NVFP4 | {"quant_algo": "MIXED_PRECISION"}, "modelopt, MIXED_PRECISION, groups of 16"),
        (make_int4(["re:.*layers.5.mlp.experts.*"]), "compressed-tensors, 4 bits, groups of 32, in some layers alone"),
        ({"config_groups": [], "quant_method": ["x"]}, "['x']"),
        ("int4", "'int4'"),
    ],
)
def test_unknown_format_is_described(found: object, described: str) -> None:
    assert read_format(found) == UnknownFormat(name=described)


def test_unknown_weight_format_has_no_size() -> None:
    """The dtype of the computation is used only for unquantised weights, never for an unknown name."""
    assert V3.get_weight_format("bf16") == UNQUANTISED
    with pytest.raises(ModelError, match=r"weights in compressed-tensors have no known size; known are bf16, .* mxfp4"):
        V3.get_weight_format("compressed-tensors")


def test_invalid_regular_expression_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'re:\(' of 'quantization_config' is no regular expression"):
        read_format(make_int4(["re:("]))


def test_multi_token_prediction_layers_may_be_unquantised() -> None:
    """NVIDIA excludes layer 61 of DeepSeek-R1, which follows the last of 61 layers."""
    found = NVFP4 | {"ignore": ["model.layers.61*"]}
    one = from_config(make_config(deepseek_v3.FAMILY, V3) | {"quantization_config": found}, Path("r1.json")).published
    assert isinstance(one, WeightFormat)
    assert not one.mtp


def test_hf_quant_config_overrides_config_json(tmp_path: Path) -> None:
    """modelopt writes this file. NVIDIA's Kimi-K2.5-NVFP4 keeps the int4 settings of the original in its config.json."""
    config = make_config(kimi_k25.FAMILY, kimi_k2.SHAPE)
    config["text_config"]["quantization_config"] = make_int4(KIMI_BF16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_shape(str(tmp_path)).published.name == "int4"
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*self_attn*", "lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    found = load_shape(str(tmp_path)).published
    assert isinstance(found, WeightFormat)
    assert (found.name, found.parts) == ("nvfp4", ALL - {"qkv", "q_b", "o"})
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        ModelError, match=r"has a hf_quant_config.json, and weights that modelopt quantised are not read"
    ):
        check_checkpoint(tmp_path, "--weights")


class TestNestedFields:
    @pytest.fixture(autouse=True)
    def add_nested_family(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Add a family with the fields of the language model nested in `text_config`."""
        monkeypatch.setattr(models, "FAMILIES", (*FAMILIES, NESTED))

    def test_sizes_are_read_from_nested_fields(self) -> None:
        """Other fields, such as those of a vision model, have no effect."""
        config = make_config(NESTED, SHAPES["kimi-k2"]) | {"vision_config": {"hidden_size": 1152}}
        expected = dataclasses.replace(SHAPES["kimi-k2"], tensors=NAMES)
        assert from_config(config, Path("kimi-k2.json")) == expected

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "lacks the field 'text_config'"),
            ({"text_config": 5}, "'text_config' is 5, not an object"),
            ({"text_config": {"hidden_size": 4096}}, "lacks the field "),
        ],
    )
    def test_missing_nested_field_is_named(self, config: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            from_config({"model_type": "nested_k2"} | config, Path("config.json"))

    def test_nested_quantisation_of_a_checkpoint_is_refused(self, tmp_path: Path) -> None:
        """A checkpoint with weights in int4 cannot be read."""
        config = make_config(NESTED, V3)
        config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ModelError, match="'quantization_config' 'quant_method' is 'compressed-tensors'"):
            check_checkpoint(tmp_path, "--weights")
