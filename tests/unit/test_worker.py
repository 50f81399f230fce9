"""Test how a rank measures its machine before its points, and releases an engine."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from dcpbench import worker
from dcpbench.launch.start_phases import StartPhases
from dcpbench.points.layout import Layout
from dcpbench.records.record import Rates
from dcpbench.workloads.serving_loop import freeze_heap
from tests.unit import record_builder as build


@pytest.mark.parametrize(
    ("device", "kind", "stored", "measured"),
    [
        ("cuda", "sweep", {}, [(4, False)]),
        ("cuda", "sweep", {"weights_dtype": "fp8"}, [(4, True)]),
        ("cuda", "sweep", {"kv_dtype": "fp8"}, [(4, True)]),
        ("cuda", "verify", {}, []),
        ("cpu", "sweep", {}, []),
    ],
    ids=["gpus", "fp8 weights", "fp8 KV", "verify", "cpu"],
)
def test_rates_are_measured_once_before_the_points_of_a_timing_job(monkeypatch, device, kind, stored, measured):
    """Measure with all 4 ranks before an engine takes the memory, and the rate of fp8 only if a point has such weights
    or KV.
    """
    calls, seen = [], []
    points = [build.make_point(Layout(4)), build.make_point(Layout(4), **stored)]

    def rates(_, ranks, *, fp8):
        calls.append((ranks, fp8))
        return Rates(read_bytes_s=1.0)

    monkeypatch.setattr(worker.limits, "measure_rates", rates)
    monkeypatch.setattr(worker.dist, "get_world_size", lambda: 4)
    one = worker.Worker.__new__(worker.Worker)
    one.rates, one.rank, one.point = None, 1, None
    one.device, one.job = SimpleNamespace(type=device), SimpleNamespace(points=points, kind=kind, open=False)
    one.points, one.start_phases = points, StartPhases(0.0)
    one.measure = one.verify = lambda _: seen.append(one.rates)
    one.run()
    assert calls == measured
    assert seen == [Rates(read_bytes_s=1.0) if measured else None] * 2


class PieceHolder:
    """An object in a reference cycle with the pieces that hold it."""

    pieces: SimpleNamespace


def test_dropped_engine_is_freed_after_the_heap_was_frozen():
    """Free its frozen reference cycles too: otherwise a communicator waits for their graphs forever."""
    cut = PieceHolder()
    cut.pieces = SimpleNamespace(cuts=[cut])
    one = worker.Worker.__new__(worker.Worker)
    one.device, one.session = SimpleNamespace(type="cpu"), SimpleNamespace(pieces=cut.pieces)
    lives = weakref.ref(cut)
    del cut
    freeze_heap()
    one.drop_session()
    unfrozen = gc.get_freeze_count() == 0
    gc.freeze()  # as it was before, for tests behind this one
    assert unfrozen
    assert one.session is None
    assert lives() is None
