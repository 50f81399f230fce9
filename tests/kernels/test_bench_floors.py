"""Check that a step's floor consists of the works that benches of single operators report, so that they can be
compared.
"""

import pytest
import torch

from dcpbench.bench.bench_record import Case
from dcpbench.bench.operators.attention import Attention
from dcpbench.bench.operators.exchange import compute_work
from dcpbench.bench.operators.moe import Inputs, Sizes
from dcpbench.models import SHAPES
from dcpbench.points.layout import Layout, QueryReplication
from dcpbench.points.roofline import ExpertLoad, OperatorCost, Sharding, StepRows, iter_expert_works, iter_phase_works

V3 = SHAPES["deepseek-v3"]


def list_works(sharding: Sharding, step: StepRows, *phases: str) -> list[OperatorCost]:
    """Return the works of one layer's operators in these phases."""
    return [work for phase, _, work in iter_phase_works(sharding, step) if phase in phases]


def test_attention_work_of_a_step_equals_that_of_bench_attention():
    """Use 16 heads and 3 requests of 24 rows, as bench attention builds them, in fp32."""
    sizes = {"heads": 16, "requests": 3, "context": 24, "page": 4, "lengths": "even", "kv": "bf16"}
    calls = Attention(torch.device("cpu"), seed=0).build_calls(Case(variant="reference", calls=1, sizes=sizes))
    sharding = Sharding(shape=SHAPES["deepseek-v2-lite"], layout=Layout(1), itemsize=4)
    assert list_works(sharding, StepRows(decodes=(24,) * 3, sampled=3, tokens=3), "attention") == [calls.work]


@pytest.mark.parametrize("wide", [QueryReplication(), QueryReplication(query=True), QueryReplication(value=True)])
def test_exchange_work_of_a_layer_equals_that_of_bench_exchange(wide):
    """Use H 128, 4 ranks, 8 requests: gathered q and merged outputs together are a call of bench exchange."""
    sharding = Sharding(shape=V3, layout=Layout(4, 1, 4), itemsize=2, replicated=wide)
    step = StepRows(decodes=(4000,) * 8, sampled=8, tokens=8)
    sizes = {
        "heads": 128,
        "requests": 8,
        "ranks": 4,
        "value": V3.v_head_dim if wide.value else V3.latent,
        "q": "replicated" if wide.query else "gathered",
    }
    bench = compute_work(Case(variant="symm", calls=0, sizes=sizes))
    found = list_works(sharding, step, "q_gather", "merge")
    assert sum(work.received_bytes for work in found) == bench.received_bytes
    assert sum(work.barriers for work in found) == bench.barriers


@pytest.mark.parametrize("product", [0, 1], ids=["gate-up", "down"])
def test_expert_work_of_a_layer_equals_that_of_bench_moe(product):
    """Use tp1 and 4 tokens with 2 of 8 experts each, 5 of which have a row."""
    shape = SHAPES["tiny"]
    ids = torch.tensor([[0, 1], [0, 2], [1, 3], [7, 0]], dtype=torch.int32)
    name = ("gate-up", "down")[product]
    model = {"experts": 8, "top_k": 2, "hidden": shape.hidden, "width": shape.moe_intermediate_size}
    sizes = Sizes(product=name, requests=4, rows="uniform", **model)
    x = torch.empty(4 if sizes.gated else 8, sizes.weight[2], dtype=torch.bfloat16)
    counts = torch.bincount(ids.flatten(), minlength=8).tolist()
    inputs = Inputs(sizes=sizes, x=x, weight=x.new_empty(sizes.weight), ids=ids, counts=counts)
    sharding = Sharding(shape=shape, layout=Layout(1), itemsize=2)
    (load,) = sharding.count_expert_loads(ids.flatten().tolist())
    assert load == ExpertLoad(active_experts=5, assignments=8)
    assert list(iter_expert_works(sharding, StepRows(tokens=4), load))[product] == inputs.compute_work()
