"""Test drawn router inputs: a request has the same routing in any order and on any rank."""

import numpy as np
import pytest
import torch

from dcpbench.engine.synthetic import RouterInputs, make_routed_logits, make_router_inputs
from dcpbench.kernels.moe.routing import select_experts_reference
from dcpbench.models import load_shape
from dcpbench.points.expert_choices import load_choices


def draw(numbers, seed=0):
    """Draw two layers of width 8."""
    return make_router_inputs(numbers, layers=2, hidden=8, seed=seed, dtype=torch.float32, device=torch.device("cpu"))


def test_request_keeps_its_rows_in_any_order():
    """Attention DP gathers requests 0, 2 and then 1, 3; plain tp has them in order."""
    plain, gathered = draw([0, 1, 2, 3]), draw([0, 2, 1, 3])
    assert torch.equal(gathered, plain[:, [0, 2, 1, 3]])


def test_router_inputs_differ_by_request_layer_and_seed():
    """Equal rows would always load the same experts."""
    drawn = draw([0, 1])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[:, 0], drawn[:, 1])
    assert not torch.equal(drawn, draw([0, 1], seed=1))


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2", "kimi-k2"])
def test_every_routing_rule_selects_the_drawn_experts(model):
    """Correction biases of synthetic weights have a standard deviation of 0.01; no expert has the weight of another
    one.
    """
    shape = load_shape(model)
    drawn = load_choices("zipf:1", shape).draw(range(64), seed=0)[:2]
    logits = make_routed_logits(drawn, shape.experts, torch.device("cpu"))
    bias = torch.empty(shape.experts).normal_(0, 0.01, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        weights, ids = select_experts_reference(logits[layer], bias, shape)
        assert ids.sort(-1).values.tolist() == np.sort(drawn[layer], axis=1).tolist()
        assert weights.unique(dim=1).shape[1] == shape.top_k


def test_layers_cycle_through_few_inputs_with_separate_logits():
    """Serving keeps one router input for all layers, which have different routers."""
    hidden, logits = torch.arange(6.0).view(1, 3, 2), torch.arange(24.0).view(2, 3, 4)
    inputs = RouterInputs(hidden, logits)
    found = inputs.select_layer(1, 2)
    assert torch.equal(found[0], hidden[0, :2])
    assert torch.equal(found[1], logits[1, :2])
    assert RouterInputs(hidden).select_layer(1, 2)[1] is None
