"""Test published sizes, shapes from config.json files, and refusals of unsupported models."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from dcpbench.errors import DcpbenchError, ModelError
from dcpbench.kernels.rope import compute_softmax_scale, make_rope_table
from dcpbench.models import SHAPES, from_config, get_published_precision, load_shape, weight_formats
from dcpbench.models.checkpoint_folder import check_checkpoint
from dcpbench.models.weight_formats import FORMATS, UNQUANTISED, UnknownFormat
from dcpbench.plan import validate
from dcpbench.points.budget import plan_engine
from dcpbench.points.device_probe import Probe
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings

FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
V3: dict[str, Any] = {
    "quantization_config": FP8,
    "num_nextn_predict_layers": 1,
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
V2 = V3 | {
    "quantization_config": None,
    "num_nextn_predict_layers": 0,
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "topk_group": 3,
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
LITE = V2 | {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
K2 = V3 | {
    "num_nextn_predict_layers": 0,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32, "beta_fast": 1.0},
}
K2_0905 = K2 | {"max_position_embeddings": 262144, "rope_scaling": K2["rope_scaling"] | {"factor": 64}}
CONFIGS = {"deepseek-v3": V3, "deepseek-v2": V2, "deepseek-v2-lite": LITE, "kimi-k2": K2, "kimi-k2-0905": K2_0905}


def write(folder: Path, config: object) -> Path:
    """Write a checkpoint folder with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configuration_gives_the_published_shape(name: str, tmp_path: Path) -> None:
    """The table in shapes.py and the fields of config.json are two independent sources."""
    assert load_shape(str(write(tmp_path / name, CONFIGS[name]))) == SHAPES[name]


def test_config_file_can_be_named_directly(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(K2))
    assert load_shape(str(path)).name == "small"


def test_r1_has_the_sizes_of_v3() -> None:
    r1 = load_shape("DeepSeek-R1")
    assert r1.name == "deepseek-r1"
    assert r1.hidden == SHAPES["deepseek-v3"].hidden


def test_one_token_of_v3_takes_70272_bytes_in_bf16() -> None:
    """A layer takes 576 numbers of 2 B, 1,152 B; 61 layers take 70,272 B."""
    assert SHAPES["deepseek-v3"].kv_width == 576
    assert SHAPES["deepseek-v3"].compute_kv_bytes_per_token(2) == 70_272


def test_rope_settings_of_transformers_5_are_read_from_rope_parameters(tmp_path: Path) -> None:
    """Newer files have theta and scaling in one `rope_parameters`."""
    parameters = V3["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 10000.0}
    config = {k: v for k, v in V3.items() if k not in ("rope_scaling", "rope_theta")}
    config |= {"rope_parameters": parameters}
    assert load_shape(str(write(tmp_path / "deepseek-v3", config))) == SHAPES["deepseek-v3"]


def test_no_rope_scaling_means_no_yarn() -> None:
    assert from_config(V3 | {"rope_scaling": None}, Path("config.json")).yarn is None


def test_more_dense_layers_than_layers_means_all_dense() -> None:
    assert from_config(V3 | {"num_hidden_layers": 2}, Path("config.json")).first_k_dense_replace == 2


def test_model_of_an_unknown_family_is_refused_with_its_model_type() -> None:
    with pytest.raises(ModelError, match=r"'model_type' is 'mistral', which may compute otherwise.*deepseek-v3"):
        from_config({"model_type": "mistral", "hidden_size": 4096}, Path("config.json"))


REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "intermediate_size",
    "vocab_size",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("field", REQUIRED)
def test_missing_config_field_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=f"lacks the field '{field}'"):
        from_config({k: v for k, v in V3.items() if k != field}, Path("config.json"))


@pytest.mark.parametrize("value", [0, -3, "many", 1.5, None, [64], True], ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "n_routed_experts", "kv_lora_rank"])
def test_size_that_is_no_positive_integer_is_refused(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"'{field}' is .* not a positive integer"):
        from_config(V3 | {field: value}, Path("config.json"))


@pytest.mark.parametrize(
    "damage",
    [
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_scaling": {"type": "yarn"}},
        {"rope_scaling": "yarn"},
        {"rope_theta": "big"},
        {"first_k_dense_replace": None},
        {"q_lora_rank": 0},
        {"q_lora_rank": "wide"},
        {"routed_scaling_factor": None},
        {"scoring_func": "tanh"},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"moe_layer_freq": 2},
        {"scoring_func": "softmax"},
        {"n_group": 7},
        {"num_experts_per_tok": 300},
        {"num_experts_per_tok": 129},
        {"topk_group": 9},
        {"first_k_dense_replace": -1},
        {"qk_rope_head_dim": 63},
        {"rope_scaling": V3["rope_scaling"] | {"factor": 0}},
        {"rope_scaling": V3["rope_scaling"] | {"factor": -40}},
        {"rope_scaling": V3["rope_scaling"] | {"factor": float("nan")}},
        {"rope_scaling": V3["rope_scaling"] | {"original_max_position_embeddings": 0}},
        {"rope_scaling": V3["rope_scaling"] | {"original_max_position_embeddings": -4096}},
    ],
    ids=repr,
)
def test_invalid_config_raises_model_error(damage: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        from_config(V3 | damage, Path("config.json"))


YARN = V3["rope_scaling"]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (V3 | {"model_type": "deepseek_v33", "index_topk": 2048}, "'model_type' is 'deepseek_v33', which may compute"),
        (V3 | {"model_type": "longcat_flash"}, "deepseek_v2, deepseek_v3, .*kimi_k2.* are supported"),
        (V3 | {"model_type": None}, "'model_type' is None"),
        ({k: v for k, v in V3.items() if k != "model_type"}, "lacks the field 'model_type'"),
        (V3 | {"index_topk": 2048}, "'index_topk' is 2048, and dcpbench does not know what that changes"),
        (V3 | {"mlp_only_layers": [5]}, r"'mlp_only_layers' is \[5\], .*take it out of a copy of this file"),
        (V3 | {"zero_expert_num": 128}, "'zero_expert_num' is 128"),
        (V3 | {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; only 1 is supported"),
        (V3 | {"sliding_window": 4096}, "'sliding_window' is 4096"),
        (V3 | {"use_qk_norm": True}, "'use_qk_norm' is True"),
        (V3 | {"mla_scale_q_lora": True}, "'mla_scale_q_lora' is True"),
        (V3 | {"swiglu_limit": 10.0}, "'swiglu_limit' is 10.0"),
        (V3 | {"attention_bias": True}, "'attention_bias' is True; only False is supported"),
        (V3 | {"mlp_bias": True}, "'mlp_bias' is True; only False is supported"),
        (V3 | {"use_mla": False}, "'use_mla' is False; only True is supported"),
        (V3 | {"hidden_act": "relu"}, "'hidden_act' is 'relu'; only 'silu' is supported"),
        (V3 | {"moe_layer_freq": [0, 1]}, r"'moe_layer_freq' is \[0, 1\]; only 1 is supported"),
        (V3 | {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'; deepseek_v3 has 'sigmoid'"),
        (V2 | {"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid'; deepseek_v2 has 'softmax'"),
        (V3 | {"topk_method": "greedy"}, "'topk_method' is 'greedy'; deepseek_v3 has 'noaux_tc'"),
        (V2 | {"topk_method": "noaux_tc"}, "'topk_method' is 'noaux_tc'; deepseek_v2 has 'greedy' or 'group_limited"),
        (V2 | {"topk_method": None}, "'topk_method' is None"),
        (V2 | {"rope_interleave": False}, "'rope_interleave' is False; deepseek_v2 has no other than True"),
        (V3 | {"architectures": ["DeepseekV3ForCausalLMNextN"]}, r"'architectures' is \['DeepseekV3ForCausalLMNext"),
        (V3 | {"num_key_value_heads": 8}, "'num_key_value_heads' is 8; here it must be 'num_attention_heads', 128"),
        (V3 | {"head_dim": 128}, "'head_dim' is 128; here it must be 'qk_rope_head_dim', 64"),
        (V3 | {"qk_head_dim": 128}, "'qk_head_dim' is 128; .* 192"),
        (V3 | {"num_local_experts": 8}, "'num_local_experts' is 8; here it must be 'n_routed_experts', 256"),
        (V3 | {"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types' is"),
        (V3 | {"mlp_layer_types": ["sparse"] * 61}, "'mlp_layer_types' is"),
        (V3 | {"n_group": 256, "topk_group": 128}, "'n_group' is 256 for 256 experts, one in each; .* best two"),
        (V3 | {"n_group": None}, "'n_group' is None, which is not a positive integer"),
        ({k: v for k, v in V2.items() if k != "n_group"}, "lacks the field 'n_group'"),
        (V3 | {"first_k_dense_replace": None}, "'first_k_dense_replace' is None, which is not a non-negative integer"),
        (V3 | {"first_k_dense_replace": 1.5}, "'first_k_dense_replace' is 1.5"),
        (V3 | {"n_shared_experts": -1}, "'n_shared_experts' is -1, which is not a non-negative integer"),
        (V3 | {"routed_scaling_factor": None}, "'routed_scaling_factor' is None, which is not a number"),
        (V3 | {"routed_scaling_factor": True}, "'routed_scaling_factor' is True, which is not a number"),
        (V3 | {"rms_norm_eps": None}, "'rms_norm_eps' is None, which is not a number"),
        (V3 | {"rms_norm_eps": -1e-6}, "'rms_norm_eps' is -1e-06, which is below 0"),
        (V3 | {"rope_theta": None}, "'rope_theta' is None, which is not a number"),
        (V3 | {"rope_theta": 1}, "'rope_theta' is 1; frequencies fall only where it is above 1"),
        (V3 | {"norm_topk_prob": None}, "'norm_topk_prob' is None, which is neither true nor false"),
        (V3 | {"rope_interleave": None}, "'rope_interleave' is None, which is neither true nor false"),
        (V3 | {"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no', which is neither true nor false"),
        (V3 | {"rope_scaling": YARN | {"attention_factor": "x"}}, "'attention_factor' is 'x', which is not a number"),
        (V3 | {"rope_scaling": YARN | {"factor": None}}, "'factor' is None, which is not a number"),
        (V3 | {"rope_scaling": YARN | {"beta_fast": "32"}}, "'beta_fast' is '32', which is not a number"),
        (V3 | {"rope_scaling": YARN | {"beta_slow": -1}}, "'beta_slow' is -1, which is not a positive number"),
        (V3 | {"rope_scaling": YARN | {"mscale_all_dim": -2.71}}, "'mscale_all_dim' is -2.71, which is below 0"),
        (V3 | {"rope_scaling": YARN | {"truncate": 0}}, "'truncate' is 0, which is neither true nor false"),
        (
            V3 | {"rope_scaling": YARN | {"original_max_position_embeddings": None}},
            "'original_max_position_embeddings' is None, which is not a positive integer",
        ),
        (V3 | {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is 0.5; only 1"),
        (V3 | {"rope_scaling": YARN | {"long_factor": [1.0]}}, r"rope setting 'long_factor' is \[1.0\]"),
        (V3 | {"rope_scaling": {"full_attention": YARN}}, "rope setting 'full_attention' is"),
        (
            V3 | {"rope_scaling": {"type": "linear", "factor": 2}},
            "only 'yarn' and, with grouped-query attention, 'llama3'",
        ),
        (V3 | {"hidden_size": 10**400}, r"'hidden_size' is 1000\d*\.\.\.\d*; it can be up to 2,147,483,647"),
        (V3 | {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; it can be up to 10,000"),
        (V3 | {"vocab_size": 1 << 25}, "'vocab_size' is 33554432; it can be up to 16,777,216"),
        (V3 | {"routed_scaling_factor": 10**400}, r"'routed_scaling_factor' is 1000.*, which fp32 cannot hold"),
        (V3 | {"rope_theta": float("inf")}, "'rope_theta' is inf, which fp32 cannot hold"),
        (V3 | {"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan, which fp32 cannot hold"),
        (V3 | {"rope_scaling": YARN | {"beta_fast": 1e-320}}, "'beta_fast' is 1e-320, which fp32 cannot hold"),
    ],
    ids=lambda x: None if isinstance(x, dict) else x[:40],
)
def test_unsupported_config_field_is_refused_by_name(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        from_config(config, Path("config.json"))


HARMLESS: dict[str, Any] = {
    "num_nextn_predict_layers": 1,
    "ep_size": 8,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "pretraining_tp": 2,
    "attention_dropout": 0.5,
    "initializer_range": 0.006,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "compression_config": {"format": "dense"},
    "use_cache": True,
    "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
    "_name_or_path": "x",
    "unsloth_fixed": True,
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "pad_token_id": None,
    "attention_bias": None,
    "hidden_act": "swish",
    "partial_rotary_factor": 1.0,
    "mlp_only_layers": [],
    "zero_expert_num": 0,
    "index_topk": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "head_dim": 64,
    "qk_head_dim": 192,
    "num_key_value_heads": 128,
    "num_local_experts": 256,
    "layer_types": ["full_attention"] * 61,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58,
    "use_mla": True,
    "task_specific_params": None,
    "id2label": {"0": "LABEL_0"},
}


@pytest.mark.parametrize("field", HARMLESS)
def test_config_field_without_effect_is_accepted(field: str) -> None:
    """The shape is that of V3 for any value of the field."""
    plain = from_config(V3, Path("v3.json"))
    assert from_config(V3 | {field: HARMLESS[field]}, Path("v3.json")) == plain


@pytest.mark.parametrize("left_out", ["", "fmt", "activation_scheme"])
def test_config_with_fp8_blocks_gives_published_fp8_weights(left_out: str) -> None:
    """No other field of the shape differs; the quantiser of transformers writes no `fmt`."""
    found = from_config(V3 | {"quantization_config": {k: v for k, v in FP8.items() if k != left_out}}, Path("v3.json"))
    assert found.published == FORMATS[weight_formats.FP8]
    assert dataclasses.replace(found, published=UNQUANTISED) == from_config(
        V3 | {"quantization_config": None}, Path("v3.json")
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'quant_method' is 'gptq'"),
        ({"weight_block_size": [64, 64]}, r"'weight_block_size' is \[64, 64\]"),
        ({"weight_block_size": None}, "'weight_block_size' is None"),
        ({"activation_scheme": "static"}, "'activation_scheme' is 'static'"),
        ({"fmt": "e5m2"}, "'fmt' is 'e5m2'"),
    ],
)
def test_other_quantisations_have_a_shape_but_no_sizes_or_checkpoint(
    changed: dict[str, object], named: str, tmp_path: Path
) -> None:
    """Layers can be planned in bf16 or fp8; reading the tensors raises an error with the field."""
    config = V3 | {"quantization_config": FP8 | changed}
    shape = from_config(config, Path("v3.json"))
    assert isinstance(shape.published, UnknownFormat)
    with pytest.raises(ModelError, match=r"that dcpbench cannot size .* --weights-dtype fp8 or bf16"):
        get_published_precision(shape)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=f"'quantization_config'.*{named}"):
        check_checkpoint(tmp_path, "--weights")


def test_checkpoint_with_fp8_blocks_or_without_quantisation_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for more in ({}, {"quantization_config": FP8}, {"quantization_config": None}):
        (tmp_path / "config.json").write_text(json.dumps(V3 | more))
        check_checkpoint(tmp_path, "--weights")


def test_model_can_have_no_shared_experts() -> None:
    """DeepSeek writes null, and transformers 0."""
    for none in (0, None):
        assert from_config(V3 | {"n_shared_experts": none}, Path("config.json")).shared_experts == 0


def test_missing_config_fields_have_the_defaults_of_transformers() -> None:
    """V3 has 8 groups of which 4 are taken, 3 dense layers, and weights that sum to 1, times 2.5. V2 has none of these."""
    left_out = ("n_group", "topk_group", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor")
    v3 = from_config({k: v for k, v in V3.items() if k not in left_out}, Path("v3.json"))
    assert v3 == from_config(V3, Path("v3.json"))
    v2 = from_config({k: v for k, v in LITE.items() if k not in (*left_out, "topk_method")}, Path("v2.json"))
    assert (v2.n_group, v2.topk_group, v2.first_k_dense_replace, v2.normalise, v2.routed_scaling_factor) == (
        1,
        1,
        0,
        False,
        1.0,
    )


def test_rope_theta_is_read_from_rope_settings_first() -> None:
    """The field next to the rope settings is used if they have no theta."""
    assert from_config(V3 | {"rope_scaling": YARN | {"rope_theta": 7.0}}, Path("config.json")).rope_theta == 7
    assert from_config(V3 | {"rope_theta": 9}, Path("config.json")).rope_theta == 9


def test_yarn_without_original_length_uses_the_maximum_length() -> None:
    """The 163,840 positions count as the length before stretching, as in transformers."""
    left = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    found = from_config(V3 | {"rope_scaling": left}, Path("config.json")).yarn
    assert found is not None
    assert found.original_max_position == 163_840


HOSTILE_VALUES: list[object] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    127,
    1 << 14,
    10_000,
    -1,
    2**31 - 1,
    2**31,
    2**53,
    10**400,
    -(10**400),
    0.5,
    -0.0,
    5e-324,
    1e-320,
    1e-38,
    1e38,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "x",
    "1",
    "yarn",
    "default",
    [],
    [1],
    [[[]]],
    {},
    {"a": 1},
    "\ud800",
    "a" * 10_000,
]
BASES = [{k: v for k, v in base.items() if k != "rope_scaling"} for base in (V3, V2, LITE, K2)]
FIELDS = [*V3, "rope_parameters", "head_dim", "tie_word_embeddings", "rope_interleave", "architectures", "foo"]
ROPE_FIELDS = [*YARN, "rope_theta", "attention_factor", "truncate", "rope_type", "partial_rotary_factor", "foo"]
ONE_GPU = Probe(device="cuda", count=8, name="GPU", memory_bytes=80 << 30, l2_bytes=50 << 20)
CPU = torch.device("cpu")
ON_CPU = Probe(device="cpu", count=0, name="CPU")


@hypothesis.settings(max_examples=400, deadline=None, derandomize=True)
@hypothesis.given(
    base=st.sampled_from(BASES),
    fields=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(HOSTILE_VALUES), max_size=3),
    rope=st.dictionaries(st.sampled_from(ROPE_FIELDS), st.sampled_from(HOSTILE_VALUES), max_size=2),
    probe=st.sampled_from([ONE_GPU, ON_CPU]),
    dcp=st.sampled_from([1, 2]),
    served=st.booleans(),
)
def test_any_config_is_accepted_or_raises_a_dcpbench_error(
    base: dict[str, Any], fields: dict[str, Any], rope: dict[str, Any], probe: Probe, dcp: int, served: bool
) -> None:
    """Huge, tiny, negative and invalid numbers raise no other exception in shapes, validation, memory or the rope
    table.
    """
    cpu = probe.device == "cpu"
    point = Point(
        model="m",
        tp=2,
        dcp=dcp,
        concurrency=2,
        context=9,
        exchange="ag_rs" if dcp > 1 else "none",
        backend="reference" if cpu else "triton",
        dtype="fp32" if cpu else "bf16",
        workload="serve" if served else "decode",
        load=Load(requests=2, input_tokens="8", output_tokens="1", chunk=256) if served else None,
    )
    settings = Settings()
    message = ""
    try:
        shape = from_config(base | {"rope_scaling": YARN | rope} | fields, Path("config.json"))
        scales = [
            compute_softmax_scale(shape),
            *make_rope_table(dataclasses.replace(shape, qk_rope_head_dim=64), 2, CPU).flatten().tolist(),
        ]
        assert not any(map(math.isnan, scales))
        validate.check_runnable(point, settings, shape, validate.Machine(probe=probe))
        plan = plan_engine([point], settings, shape, probe)
        assert plan.kv_bytes > 0
    except DcpbenchError as e:
        message = str(e)
    assert len(message) < 1000, "long values of a file are cut"


def test_too_deeply_nested_config_raises_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json is nested too deeply for a model configuration"):
        load_shape(str(tmp_path))


def test_name_that_no_file_can_have_is_an_unknown_model() -> None:
    with pytest.raises(ModelError, match="neither a known model nor a folder"):
        load_shape("m" * 5000)
    with pytest.raises(ModelError, match="neither a known model nor a folder"):
        load_shape("a\0b")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"model"', "\udcff"], ids=repr)
def test_file_without_a_configuration_raises_model_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize("model", ["gpt-5", "/nowhere/at/all", ""])
def test_unknown_model_error_lists_the_known_ones(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"known models: deepseek-v2-lite, .*kimi-k2.*deepseek-r1"):
        load_shape(model)
