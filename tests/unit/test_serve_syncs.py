"""Test that the serving loop waits once per step on a virtual GPU, for the tokens of the previous step."""

from types import SimpleNamespace

import pytest
import torch

from dcpbench.engine.decode_engine import DecodeEngine
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.serve_engine import READ
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.points.layout import Layout
from dcpbench.points.point import Load, Point
from dcpbench.syncs.dry_run import DryRun, dry_run, virtual_cuda
from dcpbench.workloads.serve import Serving, _is_token_read, _make_requests
from dcpbench.workloads.serving_loop import Loop
from dcpbench.workloads.session import Session
from tests.unit import engine_builder as build

SHAPE = build.make_shape(layers=2)  # one dense layer and one of experts
LOAD = Load(requests=3, input_tokens="1", output_tokens="1", chunk=8)
POINT = Point(
    model="tiny",
    workload="serve",
    tp=1,
    concurrency=2,
    context=32,
    backend="triton",
    dtype="bf16",
    page_size=4,
    load=LOAD,
)


def served(run: DryRun) -> tuple[Loop, int]:
    """Serve three prompts, the second with two chunks and one that arrives later, and return the waits."""
    device, layout = torch.device("cuda", 0), Layout(1)
    weights = load_weights(SyntheticSource(0, torch.bfloat16, device), SHAPE, layout, 0, build.make_layers(SHAPE))
    kv = KvPool(SHAPE.layers, 32, POINT.page_size, SHAPE.kv_width, torch.bfloat16, device)
    groups = build.make_groups(layout, 0)
    model = Model(SHAPE, layout, groups, weights, kv, interleave=1, max_context=POINT.context, device=device)
    engine = DecodeEngine(model, backend=POINT.backend, exchange="none", max_requests=2, max_context=POINT.context)
    plan = SimpleNamespace(pages=engine.allocator.pages, max_context=engine.max_context, chunk=LOAD.chunk)
    serving = Serving(Session(POINT, SHAPE, plan, engine, reduce_spec=None), "sdpa")
    loop = serving.make_loop(POINT, _make_requests([3, 14, 2], 3, SHAPE.vocab), concurrency=2)
    before = len(run.syncs)
    loop.run()
    return loop, before


@pytest.fixture
def small_gpu(monkeypatch):
    """Provide a virtual GPU on which Triton's interpreter runs two programs of a kernel instead of 132."""
    monkeypatch.setattr(virtual_cuda, "PROCESSORS", 2)


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # arithmetic of padding rows
def test_serving_loop_waits_only_for_the_tokens_of_the_previous_step():
    """Prefill, chunks with a stored prefix, mixed steps and decodes take everything that a step needs from the host."""
    with torch.inference_mode(mode=False), dry_run() as run:
        loop, before = served(run)
    waits = run.syncs[before:]
    assert [w.allowed for w in waits] == [READ] * loop.counts.steps
    assert all(map(_is_token_read, waits))
    assert 0 < loop.counts.decode_steps < loop.counts.steps
    assert all(s.is_finished for s in loop.traffic.samples)
