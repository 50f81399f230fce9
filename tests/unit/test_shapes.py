"""Published sizes are right, config.json files become shapes, and what is not MLA is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from dcpbench.errors import ModelError
from dcpbench.shapes import SHAPES, from_config, load_shape

V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "intermediate_size": 18432, "first_k_dense_replace": 3, "vocab_size": 129280, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
V2 = V3 | {
    "model_type": "deepseek_v2", "hidden_size": 5120, "num_hidden_layers": 60, "n_routed_experts": 160,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "first_k_dense_replace": 1, "vocab_size": 102400, "scoring_func": "softmax", "topk_method": "group_limited_greedy",
    "topk_group": 3, "norm_topk_prob": False, "routed_scaling_factor": 16.0,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
LITE = V2 | {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None,
    "n_routed_experts": 64, "moe_intermediate_size": 1408, "intermediate_size": 10944, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
K2 = V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
    "vocab_size": 163840, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
    "max_position_embeddings": 262144, "rope_scaling": V3["rope_scaling"] | {"factor": 64, "beta_fast": 1.0},
}  # fmt: skip
CONFIGS = {"deepseek-v3": V3, "deepseek-v2": V2, "deepseek-v2-lite": LITE, "kimi-k2": K2}


def write(folder: Path, config: object) -> Path:
    """A checkpoint folder with this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_gives_the_published_shape(name: str, tmp_path: Path) -> None:
    """Two independent sources, the table in shapes.py and the fields of config.json, say the same."""
    assert load_shape(str(write(tmp_path / name, CONFIGS[name]))) == SHAPES[name]


def test_a_config_file_may_be_named_directly(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(K2))
    assert load_shape(str(path)).name == "small"


def test_r1_is_v3_under_its_own_name() -> None:
    r1 = load_shape("DeepSeek-R1")
    assert r1.name == "deepseek-r1"
    assert r1.hidden == SHAPES["deepseek-v3"].hidden


def test_one_token_of_v3_takes_70272_bytes_in_bf16() -> None:
    """576 numbers of 2 B are 1,152 B; 61 layers of them 70,272 B."""
    assert SHAPES["deepseek-v3"].kv_width == 576
    assert SHAPES["deepseek-v3"].kv_bytes_per_token(2) == 70_272


def test_rope_settings_of_transformers_5_are_read_from_rope_parameters(tmp_path: Path) -> None:
    """Newer files keep theta and scaling in one `rope_parameters`."""
    parameters = V3["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 10000.0}
    config = {k: v for k, v in V3.items() if k not in ("rope_scaling", "rope_theta")} | {"rope_parameters": parameters}
    assert load_shape(str(write(tmp_path / "deepseek-v3", config))) == SHAPES["deepseek-v3"]


def test_no_rope_scaling_means_no_yarn() -> None:
    assert from_config(V3 | {"rope_scaling": None}, Path("config.json")).yarn is None


def test_more_dense_layers_than_layers_means_all_dense() -> None:
    assert from_config(V3 | {"num_hidden_layers": 2}, Path("config.json")).first_dense == 2


def test_a_model_without_mla_is_told_apart_by_name() -> None:
    with pytest.raises(ModelError, match=r"not an MLA model \(model_type 'llama', no 'kv_lora_rank'\).*deepseek-v3"):
        from_config({"model_type": "llama", "hidden_size": 4096}, Path("config.json"))


REQUIRED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "n_routed_experts", "num_experts_per_tok",
    "n_shared_experts", "moe_intermediate_size", "intermediate_size", "vocab_size", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=f"lacks the field '{field}'"):
        from_config({k: v for k, v in V3.items() if k != field}, Path("config.json"))


@pytest.mark.parametrize("value", [0, -3, "many", 1.5, None, [64], True], ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "n_routed_experts", "kv_lora_rank"])
def test_a_size_that_is_no_positive_integer_is_refused(field: str, value: object) -> None:
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
        {"scoring_func": "softmax", "norm_topk_prob": True},
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
def test_nonsense_in_a_config_is_our_error(damage: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        from_config(V3 | damage, Path("config.json"))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"model"', "\udcff"], ids=repr)
def test_a_file_that_holds_no_configuration_is_our_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize("model", ["gpt-5", "/nowhere/at/all", ""])
def test_an_unknown_model_is_answered_with_the_known_ones(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"known models: deepseek-v2-lite, .*kimi-k2.*deepseek-r1"):
        load_shape(model)
