"""A step with prompt chunks on a simulated GPU: no call synchronises, and results agree with the CPU."""

import dataclasses
from unittest import mock

import pytest
import torch

from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model, StepInput
from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.kernels.prefill import PrefillSpec, make_prefill
from dcpbench.points import memory
from dcpbench.points.layout import Layout
from dcpbench.serving.requests import Chunk
from dcpbench.syncs.dry_run import DryRun, dry_run
from tests.unit.engine_builder import make_groups, make_layers, make_shape

SHAPE = make_shape(layers=2, first_k_dense_replace=2)  # without experts, as their reference in fp32 synchronises
ONE = Layout(1)
CHUNKS = [Chunk(None, 1, 8, 20, samples=True), Chunk(None, 2, 0, 3, samples=True), Chunk(None, 3, 4, 6, samples=True)]
"""12 tokens after 8 stored ones, a prompt of 3 tokens, and 2 tokens after 4."""
WINDOWS = {6: [[6, 2], []], 12: [[]]}
"""Windows by their size: the first prompt has two of its own and the others share one call, or all share one."""
ROWS = 17 + 3  # three are padding


def step(device: torch.device, window: int, run: DryRun | None = None) -> torch.Tensor:
    """Return the logits of the last token of each chunk; prefixes are random rows."""
    source = SyntheticSource(0, torch.float32, torch.device("cpu"))
    weights = move_to(load_weights(source, SHAPE, ONE, 0, make_layers(SHAPE)), device)
    kv = KvPool(SHAPE.layers, 40, 2, SHAPE.kv_width, torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator))
    model = Model(SHAPE, ONE, make_groups(ONE, 0), weights, kv, interleave=1, max_context=24, device=device)
    with mock.patch.object(memory, "PREFILL_WINDOW", window):
        prefiller = Prefiller(model, backend="sdpa", tokens=32)
    table = torch.arange(4 * 20, dtype=torch.int32).view(4, 20).to(device)
    rows = [(c.slot, i) for c in CHUNKS for i in range(c.start, c.stop)] + [(0, 0)] * (ROWS - 17)
    slots, positions = torch.tensor(rows).T.contiguous().to(device)
    wanted = torch.tensor([11, 14, 16]).to(device)
    if run is not None:
        run.syncs.clear()
    planned = prefiller.plan_chunks(CHUNKS, table)
    assert [[len(seen.numbers) - 1 for seen in part.windows] for part in planned.parts] == WINDOWS[window]
    inputs = StepInput(positions + 7, positions, table[slots, positions], logit_rows=wanted)
    return model.run_step(inputs, None, planned)


def move_to(node, device):
    """Return weights on a device."""
    if isinstance(node, torch.Tensor):
        return node.to(device)
    if isinstance(node, list):
        return [move_to(child, device) for child in node]
    if dataclasses.is_dataclass(node):
        fields = {f.name: move_to(getattr(node, f.name), device) for f in dataclasses.fields(node)}
        return dataclasses.replace(node, **fields)
    return node


@pytest.fixture
def run():
    """Record a dry run around the test."""
    with dry_run() as seen:
        yield seen


@pytest.mark.parametrize("window", [6, 12])
def test_step_never_synchronises_and_logits_equal_those_of_the_cpu(run, window):
    """Kernels that fill tables, order rows, decompress, rotate and merge run in Triton's interpreter, on the values of
    a GPU.
    """
    found = step(torch.device("cuda", 0), window, run)
    assert [(sync.rule, sync.user) for sync in run.syncs] == []
    expected = step(torch.device("cpu"), window)
    assert (found.cpu() - expected).abs().max() < 1e-5


def test_plan_for_flash_attention_never_synchronises(run):
    spec = PrefillSpec(heads=2, width=192, value=128, scale=1.0, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    backend = make_prefill("sdpa", spec)
    assert backend.value_width == 192, "flash attention requires values as wide as keys"
    run.syncs.clear()
    planned = backend.plan([3, 1], [5, 0], causal=False)
    assert [(sync.rule, sync.user) for sync in run.syncs] == []
    assert planned.kv_ends.tolist() == [0, 5, 5]
