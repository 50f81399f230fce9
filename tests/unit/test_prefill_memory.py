"""Memory of a prefill step on a GPU, compared with the budget."""

import pytest
import torch

from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model, StepInput
from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.points import memory
from dcpbench.points.layout import Layout
from dcpbench.serving.requests import Chunk
from tests.unit.engine_builder import make_groups, make_layers, make_shape

SHAPE = make_shape(
    hidden=2048,
    layers=2,
    heads=16,
    q_lora=512,
    experts=16,
    top_k=4,
    moe_intermediate_size=512,
    intermediate_size=2048,
    vocab=1024,
    latent=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
)
ONE = Layout(1)
TOKENS, STORED, PAGE = 4096, 20480, 64


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "flashinfer"])
def test_prefill_step_uses_no_more_memory_than_the_budget(backend):
    """4,096 tokens of one prompt follow 20,480 stored ones, in two windows; FlashInfer's workspaces are not counted.
    The peak is relative to the memory of weights, pool and table, and includes prefill buffers.
    """
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    device, dtype = torch.device("cuda"), torch.bfloat16
    weights = load_weights(SyntheticSource(0, dtype, device), SHAPE, ONE, 0, make_layers(SHAPE))
    kv = KvPool(SHAPE.layers, (STORED + TOKENS) // PAGE, PAGE, SHAPE.kv_width, dtype, device)
    model = Model(
        SHAPE, ONE, make_groups(ONE, 0), weights, kv, interleave=1, max_context=STORED + TOKENS, device=device
    )
    table = torch.arange(STORED + TOKENS, dtype=torch.int32, device=device).unsqueeze(0)
    positions = torch.arange(STORED, STORED + TOKENS, device=device)
    inputs = StepInput(positions % SHAPE.vocab, positions, table[0, STORED:], logit_rows=positions[-1:] - STORED)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefiller = Prefiller(model, backend=backend, tokens=TOKENS)
    workspaces = 128 + 8 * 8 << 20 if backend == "flashinfer" else 0  # one for all, and one for each wrapper
    for _ in range(2):
        planned = prefiller.plan_chunks([Chunk(None, 0, STORED, STORED + TOKENS, samples=True)], table)
        logits = model.run_step(inputs, None, planned)
    used = torch.cuda.max_memory_allocated() - before - workspaces
    assert logits.isfinite().all()
    assert [len(part.windows) for part in planned.parts] == [2]
    budget = memory.compute_prefill_bytes(SHAPE, ONE, TOKENS, dtype.itemsize)
    assert used <= budget
    assert used >= 0.5 * budget, "the budget is not far too large"
