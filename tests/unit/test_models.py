"""Each family reads its own published models from a config.json, and states what engines and checkpoints call them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dcpbench import models
from dcpbench.errors import ModelError
from dcpbench.models import ALIASES, FAMILIES, REPOSITORIES, SHAPES, from_config, kimi_k2, kimi_k25, load_shape
from dcpbench.models.checkpoint_folder import check_checkpoint
from dcpbench.models.family import Family
from dcpbench.models.mla_config import FP8_BLOCKS
from dcpbench.models.shapes import FP8, ModelShape, Yarn
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
    with pytest.raises(ModelError, match=f"which may compute otherwise; {supported} are supported|is not an MLA model"):
        from_config(config, Path("config.json"))


def test_every_name_of_a_published_model_is_loaded_and_has_a_repository() -> None:
    """All but `tiny`, which has no checkpoint."""
    for name in REPOSITORIES:
        assert load_shape(name).name == name
    assert {*SHAPES, *ALIASES} - {*REPOSITORIES} == {"tiny"}
    assert len(set(REPOSITORIES.values())) == len(REPOSITORIES)


def test_what_is_no_mla_model_is_answered_with_the_families() -> None:
    with pytest.raises(
        ModelError, match=r"give a DeepSeek-V2/V3/R1 or Kimi-K2.* configuration, or one of: deepseek-v2-l"
    ):
        from_config({"model_type": "llama"}, Path("config.json"))


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
            ({"text_config": {"hidden_size": 4096}}, "is not an MLA model .*V3/R1 or Kimi-K2.*/Nested configuration"),
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
