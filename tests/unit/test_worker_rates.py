"""When a job measures its machine: once, on GPUs, before its first point."""

from types import SimpleNamespace

import pytest

from dcpbench import worker
from dcpbench.points.layout import Layout
from dcpbench.records.record import Rates
from tests.unit import record_builder as build


@pytest.mark.parametrize(
    ("device", "kind", "weights", "measured"),
    [
        ("cuda", "sweep", "", [(4, False)]),
        ("cuda", "sweep", "fp8", [(4, True)]),
        ("cuda", "verify", "", []),
        ("cpu", "sweep", "", []),
    ],
    ids=["gpus", "fp8", "verify", "cpu"],
)
def test_rates_are_measured_once_before_the_points_of_a_job_that_times_steps(
    monkeypatch, device, kind, weights, measured
):
    """By all 4 ranks together, when no engine has taken the memory yet; the rate of fp8 where one point has such weights."""
    asked, seen = [], []
    points = [build.point(Layout(4)), build.point(Layout(4), weights_dtype=weights)]

    def rates(_, ranks, *, fp8):
        asked.append((ranks, fp8))
        return Rates(read_bytes_s=1.0)

    monkeypatch.setattr(worker.limits, "rates", rates)
    monkeypatch.setattr(worker.dist, "get_world_size", lambda: 4)
    one = worker.Worker.__new__(worker.Worker)
    one.rates, one.rank, one.point = None, 1, None
    one.device, one.job = SimpleNamespace(type=device), SimpleNamespace(points=points, kind=kind)
    one.measure = one.verify = lambda _: seen.append(one.rates)
    one.run()
    assert asked == measured
    assert seen == [Rates(read_bytes_s=1.0) if measured else None] * 2
