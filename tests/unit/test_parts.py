"""Attention in two halves: what waits for what, and that a captured graph with two streams gives the same numbers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from dcpbench.engine.parts import Part, attend


class Stream:
    """Notes what was done in it, and which of its events others waited for."""

    def __init__(self, name, log):
        self.name, self.log, self.count = name, log, 0

    def record_event(self):
        self.count += 1
        self.log.append(f"{self.name} records {self.count}")
        return f"{self.name} {self.count}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch):
    """A log, the stream of the attention and the one beside it, without CUDA."""
    log = []
    here, beside = Stream("here", log), Stream("beside", log)
    current = [here]

    @contextlib.contextmanager
    def inside(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    return SimpleNamespace(log=log, beside=beside, current=current)


def halves(log, name_of):
    """Two parts whose exchanges note what they gather and where."""

    def part(index):
        def gather_q(q):
            log.append(f"gather {q} {name_of()}")
            return f"all of {q}"

        return Part(2 * index, 2, None, SimpleNamespace(gather_q=gather_q))

    return [part(0), part(1)]


def test_each_half_waits_for_what_it_reads_and_for_nothing_else(streams):
    """One half's gather and merge lie beside the other half's attention; at the end both streams join."""
    log, name_of = streams.log, lambda: streams.current[-1].name

    def partial(_, q):
        log.append(f"attend {q} {name_of()}")
        return q

    def merge(part, found):
        log.append(f"merge {part.first} {name_of()}")
        return found

    found = attend(halves(log, name_of), ["a", "b"], streams.beside, partial, merge)
    assert found == ["all of a", "all of b"]
    assert log == [
        "beside waits for here",
        "gather a beside",
        "beside records 1",
        "gather b beside",
        "beside records 2",
        "here waits for beside 1",
        "attend all of a here",
        "here records 1",
        "beside waits for here 1",
        "merge 0 beside",
        "here waits for beside 2",
        "attend all of b here",
        "here records 2",
        "beside waits for here 2",
        "merge 2 beside",
        "here waits for beside",
    ]


def test_without_a_second_stream_halves_follow_each_other(streams):
    """On the CPU: the same calls in a row, and nobody waits."""
    log = []
    parts = halves(log, lambda: "here")
    assert attend(parts, ["a", "b"], None, lambda _, q: q, lambda _, o: o) == ["all of a", "all of b"]
    assert log == ["gather a here", "gather b here"]
    assert streams.log == []


def test_a_part_has_its_rows():
    """Two of four."""
    assert torch.arange(4)[Part(2, 2, None, None).rows].tolist() == [2, 3]


@pytest.mark.gpu
def test_a_captured_graph_with_two_streams_gives_the_same_numbers():
    """Products that take a while in both streams; replayed with new inputs, and again."""
    parts = [Part(2 * i, 2, None, SimpleNamespace(gather_q=lambda q: q @ q)) for i in range(2)]
    beside = torch.cuda.Stream()
    queries = [torch.zeros(2048, 2048, device="cuda") for _ in parts]

    def step(stream):
        return attend(parts, queries, stream, lambda _, q: torch.tanh(q) @ q, lambda _, o: torch.sin(o) @ o)

    step(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(beside)
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        for q in queries:
            q.normal_(0, 0.01, generator=generator)
        graph.replay()
        for ours, alone in zip(found, step(None), strict=True):
            assert torch.equal(ours, alone)
