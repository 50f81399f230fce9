"""Compare tensors that engine plugins load with the shards that dcpbench's engine reads from the same source."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from dcpbench.engine.checkpoint import CheckpointSource
from dcpbench.engine.checkpoint_tensors import iter_checkpoint_tensors
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import Moe, load_weights
from dcpbench.engine_plugins import fill_model
from dcpbench.engine_plugins.vllm import LOAD_FORMAT
from dcpbench.errors import ModelError
from dcpbench.models import FAMILIES, load_shape
from dcpbench.models.shapes import Gqa
from dcpbench.models.tensor_names import TensorNames
from dcpbench.points.layout import Layout
from dcpbench.points.memory import Layers
from dcpbench.points.names import MOE_EP, MOE_TP
from tests.unit.engine_builder import collect_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dcpbench.models.shapes import ModelShape

SHAPE = dataclasses.replace(
    load_shape("deepseek-v3"),
    layers=3, first_k_dense_replace=1, hidden=256, heads=4, q_lora=128, experts=4, top_k=2, n_group=1, topk_group=1,
    moe_intermediate_size=256, intermediate_size=512, vocab=203, latent=128, qk_nope_head_dim=64, v_head_dim=64, qk_rope_head_dim=16,
)  # fmt: skip
"""Model shape for which the shards of two ranks end inside blocks of 128 × 128 numbers and inside the 256 that are drawn together."""
GROUPED = dataclasses.replace(  # the same with grouped-query attention
    load_shape("qwen3-30b-a3b"),
    layers=2, hidden=256, heads=4, gqa=Gqa(kv_heads=2, qk_norm=True), experts=4, top_k=2, moe_intermediate_size=256, vocab=203, qk_rope_head_dim=96, v_head_dim=96,
)  # fmt: skip


def make_source(device: str = "cpu") -> SyntheticSource:
    return SyntheticSource(5, torch.bfloat16, torch.device(device))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("tp", "ep"), [(1, MOE_EP), (2, MOE_TP), (2, MOE_EP), (4, MOE_TP)])
@pytest.mark.parametrize("shape", [SHAPE, GROUPED], ids=["mla", "gqa"])
def test_shards_read_from_a_checkpoint_equal_drawn_shards(
    tmp_path: Path, shape: ModelShape, tp: int, ep: str, *, fp8: bool
) -> None:
    """Write all tensors as one file, and compare bitwise. With 4 ranks, two ranks each hold a copy of a KV head."""
    tensors = dict(iter_checkpoint_tensors(make_source(), shape, fp8=fp8))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    layers = Layers(shape.first_k_dense_replace, shape.layers - shape.first_k_dense_replace)
    for rank in range(tp):
        drawn, read = (
            load_weights(s, shape, Layout(tp=tp), rank, layers, ep=ep, fp8=fp8)
            for s in (make_source(), CheckpointSource(tmp_path, torch.bfloat16, torch.device("cpu")))
        )
        pairs = list(zip(collect_tensors(drawn), collect_tensors(read), strict=True))
        assert len(pairs) > 20
        assert all(a.dtype == b.dtype and torch.equal(a.float(), b.float()) for a, b in pairs)


def test_family_may_define_its_own_tensor_names(tmp_path: Path) -> None:
    """Check that a checkpoint has only the family's names, and that a rank finds its weights under them."""
    given = {
        field.name: f"own.{field.name}.{'{}.' if '{}' in field.default else ''}"
        for field in dataclasses.fields(TensorNames)
    }
    shape = dataclasses.replace(SHAPE, tensors=TensorNames(**given))
    tensors = dict(iter_checkpoint_tensors(make_source(), shape, fp8=False))
    assert all(name.startswith(("own.layer.", "own.embedding.", "own.final_norm.", "own.lm_head.")) for name in tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    found = load_weights(
        CheckpointSource(tmp_path, torch.bfloat16, torch.device("cpu")), shape, Layout(tp=1), 0, Layers(1, 2)
    )
    assert torch.equal(found.lm_head, tensors["own.lm_head."])
    mlp = found.moe[1].mlp
    assert isinstance(mlp, Moe)
    down = tensors["own.layer.2.own.expert.3.own.down."]
    assert isinstance(mlp.down, torch.Tensor)
    assert torch.equal(mlp.down[3], down)


def test_default_dtype_of_the_loading_engine_changes_no_tensor() -> None:
    """Load under the model's dtype as torch's default, as vLLM and SGLang do; scales and routing bias stay fp32."""
    expected = dict(iter_checkpoint_tensors(make_source(), SHAPE, fp8=True))
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = dict(iter_checkpoint_tensors(make_source(), SHAPE, fp8=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected.keys() == found.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in expected.items())


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "kimi-k2"])
def test_mla_tensor_names_and_shapes_equal_those_of_transformers(model: str) -> None:
    """Compare with a transformers model of the same sizes, except for experts, which it keeps in one tensor."""
    transformers = pytest.importorskip("transformers")
    published = load_shape(model)
    small = _shrink(published)
    kind = "V3" if published.routing == "sigmoid" else "V2"
    config = getattr(transformers, f"Deepseek{kind}Config")(
        vocab_size=small.vocab, hidden_size=small.hidden, intermediate_size=small.intermediate_size,
        moe_intermediate_size=small.moe_intermediate_size, num_hidden_layers=small.layers, first_k_dense_replace=small.first_k_dense_replace,
        num_attention_heads=small.heads, num_key_value_heads=small.heads, n_routed_experts=small.experts,
        num_experts_per_tok=small.top_k, kv_lora_rank=small.latent, q_lora_rank=small.q_lora,
        qk_rope_head_dim=small.qk_rope_head_dim, qk_nope_head_dim=small.qk_nope_head_dim, v_head_dim=small.v_head_dim,
        n_shared_experts=small.shared_experts, n_group=1, topk_group=1,
    )  # fmt: skip
    with torch.device("meta"):
        theirs = getattr(transformers, f"Deepseek{kind}ForCausalLM")(config).state_dict()
    found = {name: tuple(t.shape) for name, t in iter_checkpoint_tensors(make_source(), small, fp8=False)}
    assert {n: s for n, s in found.items() if ".experts." not in n} == {
        n: tuple(t.shape) for n, t in theirs.items() if ".experts." not in n
    }
    routed = (small.layers - small.first_k_dense_replace) * small.experts * 3
    assert sum(".experts." in name for name in found) == routed


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-8b", "llama-3.1-8b"])
def test_gqa_tensor_names_and_shapes_equal_those_of_transformers(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    published = load_shape(model)
    layers = {"layers": 2, "first_k_dense_replace": 0 if published.experts else 2}
    small = dataclasses.replace(
        published, hidden=64, heads=4, intermediate_size=64, vocab=203, qk_rope_head_dim=16, v_head_dim=16, **layers
    )
    if published.experts:
        small = dataclasses.replace(small, experts=4, top_k=2, moe_intermediate_size=32)
    assert small.gqa is not None
    small = dataclasses.replace(small, gqa=dataclasses.replace(small.gqa, kv_heads=2))
    family = next(f for f in FAMILIES if any(model in preset.repositories for preset in f.presets))
    config = getattr(transformers, family.transformers_config)(
        vocab_size=small.vocab, hidden_size=small.hidden, intermediate_size=small.intermediate_size, head_dim=16,
        moe_intermediate_size=small.moe_intermediate_size, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_experts=small.experts, num_experts_per_tok=small.top_k,
    )  # fmt: skip
    with torch.device("meta"):
        theirs = getattr(transformers, family.architectures[0])(config).state_dict()
    found = {name: tuple(t.shape) for name, t in iter_checkpoint_tensors(make_source(), small, fp8=False)}
    assert {n: s for n, s in found.items() if ".experts." not in n} == {
        n: tuple(t.shape) for n, t in theirs.items() if ".experts." not in n
    }
    assert sum(".experts." in name for name in found) == 2 * small.experts * 3


def test_plugin_loads_the_tensors_of_the_model_config(tmp_path: Path) -> None:
    """Expect fp8 tensors with scales for an fp8 configuration. In memory vLLM has rewritten the rope fields, SGLang
    has added `context_len`, and an option has reduced the number of layers.
    """
    transformers = pytest.importorskip("transformers")
    loaded: dict[str, torch.Tensor] = {}

    class Engine(torch.nn.Linear):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            loaded.update(weights)

    config = {
        "model_type": "deepseek_v3", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 64, "vocab_size": 203, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    in_memory = transformers.AutoConfig.from_pretrained(tmp_path)
    in_memory.update({"context_len": 140_000, "num_hidden_layers": 2, "rope_parameters": {"rope_type": "unheard"}})
    fill_model(Engine(1, 1), in_memory)
    assert "model.layers.2.input_layernorm.weight" not in loaded
    weight = loaded["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert (weight.dtype, tuple(weight.shape)) == (torch.float8_e4m3fn, (256, 256))
    assert tuple(loaded["model.layers.1.mlp.experts.3.down_proj.weight_scale_inv"].shape) == (2, 2)
    assert loaded["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert LOAD_FORMAT == "dcpbench"
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="this model has others: compressed-tensors"):
        fill_model(Engine(1, 1), in_memory)


def _shrink(shape: ModelShape) -> ModelShape:
    return dataclasses.replace(
        shape, layers=2, first_k_dense_replace=1, hidden=64, heads=4, q_lora=shape.q_lora and 32, experts=4, top_k=2, n_group=1,
        topk_group=1, moe_intermediate_size=32, intermediate_size=64, vocab=203, latent=32, qk_nope_head_dim=16, v_head_dim=16, qk_rope_head_dim=16,
    )  # fmt: skip
