"""Test that thousands of steps of the serving loop leave only the samples of requests in memory."""

import ctypes
import dataclasses
import gc
import sys
from types import SimpleNamespace

import pytest
import torch

from dcpbench.measuring import ranges
from dcpbench.points.point import Load, Point
from dcpbench.workloads.serve import Serving, _make_requests
from dcpbench.workloads.session import Session
from tests.unit import engine_builder as build

SHAPE = build.make_shape(layers=1, first_k_dense_replace=1)
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
RUNS, WARM, STEPS = 8, 3, 500
BLOCKS, BYTES = 250, 50_000
"""Of 2,500 steps after the warm ones: a tenth of an object, or 20 bytes, a step. A tensor of one number is two objects
and 192 bytes.
"""


MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Mallinfo(ctypes.Structure):
    """See mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def measure_held() -> tuple[int, int]:
    """Return the numbers of Python objects and of bytes from malloc in use: the resident size would jump with the gaps
    between them.
    """
    gc.collect()
    malloc = ctypes.CDLL(None).mallinfo2
    malloc.restype = Mallinfo
    info = malloc()
    return sys.getallocatedblocks(), info.uordblks + info.hblkhd


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not tell what is in use")
@pytest.mark.long
def test_thousands_of_steps_leak_no_memory():
    """Eight runs of 500 steps, with 13 pages for two requests of up to 10 each, and each prompt three times.

    So there are hits in the prefix cache, evictions and preemptions.
    """
    engine = build.make_engine(shape=SHAPE, pages=14, page_size=POINT.page_size, requests=2, context=POINT.context)
    plan = SimpleNamespace(pages=engine.allocator.pages, max_context=engine.max_context, chunk=LOAD.chunk)
    serving = Serving(Session(POINT, SHAPE, plan, engine, reduce_spec=None), "sdpa")
    alone = _make_requests([1 + 7 * i % 20 for i in range(STEPS)], 20, SHAPE.vocab)
    requests = [dataclasses.replace(r, prompt=alone[r.number // 3].prompt) for r in alone]
    counts = []
    with torch.inference_mode(), ranges.drop_ranges():
        for _ in range(RUNS):
            loop = serving.make_loop(POINT, requests, concurrency=2)
            while loop.counts.steps < STEPS:
                loop.iterate()
            loop.stop_early()
            sequences = [sample.sequence for sample in loop.traffic.samples if sample.sequence]
            assert sum(s.preemptions for s in sequences) > 0
            assert sum(s.cached > 0 for s in sequences) > 0
            del loop, sequences
            counts.append(measure_held())
    blocks, sizes = zip(*counts[WARM - 1 :], strict=True)
    assert blocks[-1] - blocks[0] < BLOCKS, blocks
    assert sizes[-1] - sizes[0] < BYTES, sizes
