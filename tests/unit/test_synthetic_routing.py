"""Drawn router inputs: the same request is routed alike wherever and in whatever order it is computed."""

import torch

from dcpbench.engine.synthetic import make_router_inputs


def draw(numbers, seed=0):
    """Two layers of width 8."""
    return make_router_inputs(numbers, layers=2, hidden=8, seed=seed, dtype=torch.float32, device=torch.device("cpu"))


def test_a_request_keeps_its_rows_in_any_order():
    """Attention DP gathers requests 0, 2 and then 1, 3; plain tp has them in order."""
    plain, gathered = draw([0, 1, 2, 3]), draw([0, 2, 1, 3])
    assert torch.equal(gathered, plain[:, [0, 2, 1, 3]])


def test_requests_layers_and_seeds_differ():
    """Equal rows would load the same experts again and again."""
    drawn = draw([0, 1])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[:, 0], drawn[:, 1])
    assert not torch.equal(drawn, draw([0, 1], seed=1))
