"""Correction biases that make the routers of other engines choose experts by a given distribution."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from dcpbench.engine.checkpoint_tensors import iter_checkpoint_tensors
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine_plugins.routed_weights import RoutedSource, find_bias
from dcpbench.errors import ModelError
from dcpbench.kernels.moe.routing import select_experts_reference
from dcpbench.models import load_shape
from dcpbench.points.expert_choices import load_choices
from dcpbench.points.point import Point
from dcpbench.servers.engine_log import ROUTING_VARIABLE
from dcpbench.servers.presets import PRESETS, make_environment

SMALL = dataclasses.replace(
    load_shape("deepseek-v3"), name="small", layers=4, first_k_dense_replace=1, hidden=128, heads=2, q_lora=64, experts=32, top_k=4, n_group=4,
    topk_group=2, moe_intermediate_size=32, intermediate_size=64, vocab=101, latent=32, qk_nope_head_dim=16, v_head_dim=16, qk_rope_head_dim=16,
)  # fmt: skip
ROUTING, CPU = "zipf:0.75", torch.device("cpu")


@pytest.fixture(scope="module")
def source():
    return RoutedSource(3, CPU, SMALL, ROUTING)


def count_shares(bias, rule):
    """Return the share of standard normal tokens that take each expert, and the mean number of experts that steps of 8
    tokens read.
    """
    logits = torch.randn(32768, rule.experts, generator=torch.Generator().manual_seed(7))
    _, ids = select_experts_reference(logits, bias.float(), rule)
    steps = ids.view(-1, 8 * rule.top_k)
    return np.bincount(ids.flatten(), minlength=rule.experts) / len(ids), np.mean(
        [len(step.unique()) for step in steps]
    )


def test_router_with_the_bias_chooses_experts_by_the_distribution(source):
    """Every layer agrees within 2 % of all rows, with groups, and a step reads as many experts as expected."""
    choices = load_choices(ROUTING, SMALL)
    for index, stated in enumerate(choices.shares_LE, 1):
        bias = source.get_tensor(f"model.layers.{index}.mlp.gate.e_score_correction_bias", (32,), dtype=torch.float32)
        found, read = count_shares(bias, SMALL)
        assert np.abs(found - stated).sum() / 2 / SMALL.top_k < 0.02
    assert read == pytest.approx(choices.estimate_hit(8), rel=0.03)
    assert np.abs(count_shares(torch.zeros(32), SMALL)[0] - stated).sum() / 2 / SMALL.top_k > 0.1


def test_layers_of_one_distribution_share_one_search(source):
    """Layers differ in the order of their experts; each rank of an engine finds the same bias."""
    names = [f"model.layers.{index}.mlp.gate.e_score_correction_bias" for index in (1, 2)]
    first, second = (source.get_tensor(name, (32,), dtype=torch.float32) for name in names)
    assert len(source.known) == 1
    assert torch.equal(first.sort().values, second.sort().values)
    assert not torch.equal(first, second)
    assert torch.equal(RoutedSource(3, CPU, SMALL, ROUTING).get_tensor(names[0], (32,), dtype=torch.float32), first)


def test_other_tensors_are_those_of_the_synthetic_weights(source):
    routed = dict(iter_checkpoint_tensors(source, SMALL, fp8=False))
    plain = dict(iter_checkpoint_tensors(SyntheticSource(3, torch.bfloat16, CPU), SMALL, fp8=False))
    differ = [name for name, tensor in plain.items() if not torch.equal(tensor, routed[name])]
    assert differ == [f"model.layers.{index}.mlp.gate.e_score_correction_bias" for index in (1, 2, 3)]


def test_expert_with_a_share_of_one_is_taken_by_every_token():
    shares = torch.full((32,), 3 / 31, dtype=torch.float64)
    shares[5] = 1.0
    found, _ = count_shares(find_bias(shares, SMALL), SMALL)
    assert found[5] == pytest.approx(1, abs=0.02)


def test_models_without_a_correction_bias_raise_model_error():
    with pytest.raises(ModelError, match="deepseek-v2-lite adds no correction bias"):
        RoutedSource(0, CPU, load_shape("deepseek-v2-lite"), ROUTING)


def test_server_gets_the_routing_of_its_point():
    point = Point(
        model="m", tp=2, concurrency=1, context=1, backend="vllm", dtype="bf16", weights="synthetic", routing=ROUTING
    )
    assert make_environment(PRESETS["vllm"], point)[ROUTING_VARIABLE] == ROUTING
    assert ROUTING_VARIABLE not in make_environment(PRESETS["vllm"], msgspec.structs.replace(point, routing=""))
