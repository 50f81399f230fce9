"""What 10,000 steps of the serving loop leave in memory: nothing but the samples of the requests."""

import dataclasses
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dcpbench.measuring import ranges
from dcpbench.points.point import Load, Point
from dcpbench.workloads.serve import Serving, _requests
from dcpbench.workloads.session import Session
from tests.unit import engine_builder as build

SHAPE = build.shape_like_tiny(layers=1, first_dense=1)
LOAD = Load(requests=1, input_tokens="1", output_tokens="1", chunk=16)
POINT = Point(
    model="tiny",
    workload="serve",
    tp=1,
    concurrency=2,
    context=64,
    backend="reference",
    dtype="fp32",
    page_size=4,
    load=LOAD,
)
RUNS, STEPS = 10, 1_000
PAGE_BYTES = 4096
GROWTH_BYTES = 700_000
"""Of 8,000 steps, 87 bytes each: a tensor, an event or a list entry with what it holds is more."""


def resident_bytes() -> int:
    """Of this process, as the kernel counts it."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the kernel tells no process its size here")
def test_ten_thousand_steps_leave_nothing_behind():
    """Ten runs of 1,000 steps, with 13 pages for two requests of up to 10 each, and each prompt three times.

    So there are hits in the prefix cache, evictions and preemptions.
    """
    engine = build.engine(shape=SHAPE, pages=14, page_size=POINT.page_size, requests=2, context=POINT.context)
    plan = SimpleNamespace(pages=engine.allocator.pages, max_context=engine.max_context, chunk=LOAD.chunk)
    serving = Serving(Session(POINT, SHAPE, plan, engine, reduce_spec=None), "sdpa")
    alone = _requests([1 + 7 * i % 20 for i in range(STEPS)], 20, SHAPE.vocab)
    requests = [dataclasses.replace(r, prompt=alone[r.number // 3].prompt) for r in alone]
    sizes = []
    with torch.inference_mode(), ranges.quiet():
        for _ in range(RUNS):
            loop = serving.loop(POINT, requests, concurrency=2)
            while loop.counts.steps < STEPS:
                loop.iterate()
            loop.cut()
            sequences = [sample.sequence for sample in loop.traffic.samples if sample.sequence]
            assert sum(s.preemptions for s in sequences) > 0
            assert sum(s.cached > 0 for s in sequences) > 0
            del loop, sequences
            sizes.append(resident_bytes())
    assert max(sizes[2:]) - sizes[1] < GROWTH_BYTES, sizes
