"""Each family reads its own published models from a config.json, and states what engines and checkpoints call them."""

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
    from_config,
    kimi_k2,
    kimi_k25,
    load_shape,
    qwen3_moe,
)
from dcpbench.models.checkpoint_folder import check_checkpoint
from dcpbench.models.family import Family
from dcpbench.models.mla_config import FP8_BLOCKS
from dcpbench.models.shapes import FP8, Gqa, ModelShape, Yarn
from dcpbench.models.tensor_names import TensorNames

FIELDS = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "q_lora_rank": "q_lora",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "n_shared_experts": "shared_experts",
    "moe_intermediate_size": "moe_inter",
    "intermediate_size": "dense_inter",
    "first_k_dense_replace": "first_dense",
    "vocab_size": "vocab",
    "n_group": "groups",
    "topk_group": "top_groups",
    "norm_topk_prob": "normalise",
    "routed_scaling_factor": "routed_scale",
    "kv_lora_rank": "latent",
    "qk_rope_head_dim": "rope",
    "qk_nope_head_dim": "nope",
    "v_head_dim": "value",
    "rms_norm_eps": "rms_eps",
    "rope_theta": "rope_theta",
    "rope_interleave": "rope_interleaved",
    "max_position_embeddings": "max_position",
    "tie_word_embeddings": "tied",
}
PRESETS = [(family, preset) for family in FAMILIES for preset in family.presets]
V3 = SHAPES["deepseek-v3"]


def make_config(family: Family, shape: ModelShape) -> dict[str, Any]:
    """A config.json of this family with these sizes."""
    if shape.gqa:
        return make_gqa_config(family, shape, shape.gqa)
    fields: dict[str, Any] = {field: getattr(shape, name) for field, name in FIELDS.items()}
    fields |= {"topk_method": family.topk_methods[1 if shape.groups > 1 else 0] or family.topk_methods[0]}
    if isinstance(shape.yarn, Yarn):
        yarn = dataclasses.asdict(shape.yarn)
        yarn["original_max_position_embeddings"] = yarn.pop("original_max_position")
        fields["rope_scaling"] = {"type": "yarn"} | yarn
    if shape.published == FP8:
        fields["quantization_config"] = FP8_BLOCKS
    named = {"model_type": family.model_type, "architectures": list(family.architectures)}
    return named | fields if family.nested_in is None else named | {family.nested_in: fields}


GQA_FIELDS = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": "experts"},
    "llama": {},
    "glm4_moe": {
        "n_routed_experts": "experts",
        "n_shared_experts": "shared_experts",
        "first_k_dense_replace": "first_dense",
        "n_group": "groups",
        "topk_group": "top_groups",
        "routed_scaling_factor": "routed_scale",
    },
    "gpt_oss": {"num_local_experts": "experts"},
}


def make_gqa_config(family: Family, shape: ModelShape, gqa: Gqa) -> dict[str, Any]:
    """A config.json of a family with grouped-query attention."""
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps", "rope_theta")
    taken = (*usual, "max_position_embeddings", "tie_word_embeddings", "intermediate_size")
    fields: dict[str, Any] = {field: getattr(shape, FIELDS[field]) for field in taken}
    fields |= {field: getattr(shape, name) for field, name in GQA_FIELDS[family.model_type].items()}
    fields |= {"head_dim": shape.head_width, "num_key_value_heads": gqa.kv_heads, "attention_bias": gqa.qkv_bias}
    if shape.experts:
        fields |= {"num_experts_per_tok": shape.top_k}
    if shape.experts and not gqa.window_layers:
        fields |= {"moe_intermediate_size": shape.moe_inter, "norm_topk_prob": shape.normalise}
    if shape.nope:
        fields |= {"partial_rotary_factor": shape.rope / shape.head_width, "use_qk_norm": gqa.qk_norm}
    if gqa.window_layers:
        kinds = ["sliding_attention", "full_attention"] * gqa.window_layers
        fields |= {"sliding_window": gqa.window, "layer_types": kinds, "swiglu_limit": 7.0}
    if shape.published == "mxfp4":
        fields |= {"quantization_config": {"quant_method": "mxfp4"}}
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
def test_a_family_reads_its_published_sizes_from_its_own_configuration(family: Family, preset: Any) -> None:
    shape = SHAPES[preset.shape.name]
    assert from_config(make_config(family, shape), Path(f"{shape.name}.json")) == shape


@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.model_type)
def test_only_its_own_model_type_selects_a_family(family: Family) -> None:
    config = make_config(family, family.presets[0].shape if family.presets else kimi_k2.SHAPE) | {
        "model_type": f"{family.model_type}_next"
    }
    supported = ", ".join(known.model_type for known in FAMILIES)
    with pytest.raises(ModelError, match=f"which may compute otherwise; {supported} are supported"):
        from_config(config, Path("config.json"))


def test_every_name_of_a_published_model_is_loaded_and_has_a_repository() -> None:
    """All but `tiny`, which has no checkpoint."""
    for name in REPOSITORIES:
        assert load_shape(name).name == name
    assert {*SHAPES, *ALIASES} - {*REPOSITORIES} == {"tiny"}
    assert len(set(REPOSITORIES.values())) == len(REPOSITORIES)


def test_a_model_of_no_family_is_answered_with_the_families() -> None:
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
def test_grouped_query_attention_of_another_kind_is_refused(changed: dict[str, Any], message: str) -> None:
    config = make_config(qwen3_moe.FAMILY, SHAPES["qwen3-235b-a22b"])
    with pytest.raises(ModelError, match=message):
        from_config(config | changed, Path("config.json"))


NAMES = TensorNames(layer="language_model.model.layers.{}.", lm_head="language_model.lm_head.weight")
NESTED = dataclasses.replace(
    kimi_k2.FAMILY, model_type="nested_k2", nested_in="text_config", tensors=NAMES, title="Kimi-Nested"
)


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
}


@pytest.mark.parametrize(
    ("found", "published"),
    [
        (None, "bf16"),
        (FP8_BLOCKS, "fp8"),
        (INT4, "compressed-tensors, 4 bits, groups of 32"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "modelopt, NVFP4, groups of 16"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits, groups of 128"),
        ({"config_groups": [], "quant_method": ["x"]}, "['x']"),
        ("int4", "'int4'"),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_a_format_whose_size_is_unknown_is_described(found: object, published: str, nested: bool) -> None:
    """Kimi-K2.5's config.json nests the language model; its quantisation may be at either place."""
    config = make_config(kimi_k25.FAMILY, kimi_k2.SHAPE)
    del config["text_config"]["quantization_config"]
    (config["text_config"] if nested else config)["quantization_config"] = found
    shape = from_config(config, Path("kimi-k2.5.json"))
    assert (shape.published, shape.is_sized) == (published, published in ("bf16", "fp8"))
    assert (shape.experts, shape.heads) == (384, 64)


class TestNestedFields:
    @pytest.fixture(autouse=True)
    def family(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A further family, whose configuration holds the fields of the language model in `text_config`."""
        monkeypatch.setattr(models, "FAMILIES", (*FAMILIES, NESTED))

    def test_sizes_are_read_from_them(self) -> None:
        """Fields beside them, such as those of a vision model, have no effect on the sizes."""
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
    def test_an_error_names_the_missing_field(self, config: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError, match=message):
            from_config({"model_type": "nested_k2"} | config, Path("config.json"))

    def test_a_quantisation_among_them_is_refused(self, tmp_path: Path) -> None:
        """A checkpoint whose weights are stored in int4 cannot be read."""
        config = make_config(NESTED, V3)
        config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ModelError, match="'quantization_config' 'quant_method' is 'compressed-tensors'"):
            check_checkpoint(tmp_path, "--weights")
