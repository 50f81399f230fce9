"""Cases of a bench that are measured together, by a worker whose GPU is made up."""

import json
import types

import pytest
import torch

from dcpbench.bench import bench_worker as module
from dcpbench.bench.bench_record import BenchJob, Case, Timing
from dcpbench.bench.bench_worker import Bench, BenchWorker
from dcpbench.bench.operators.calls import Calls

STAND_IN = types.SimpleNamespace(type="cuda")


class Workload:
    """Its variant `broken` cannot be built; `wrong` gives wrong results once it is a graph, and `lost` none."""

    def __init__(self, *_):
        self.log = []

    def build_calls(self, case):
        """Two calls a pass."""
        if case.variant == "broken":
            raise ValueError("no room")
        wrong = case.variant == "wrong"

        def check_graph(_):
            if case.variant == "lost":
                raise ValueError("gone")
            return "off by one" if wrong else ""

        run = [lambda: self.log.append(case.variant)] * 2
        return Calls(calls=run, check=lambda run: run() or "", check_graph=check_graph)


@pytest.fixture
def groups(monkeypatch):
    """Return which graphs were timed together, each as the calls of a pass; the first takes 1 µs, the next 2, and so on."""
    found = []

    def gpu_times(passes, **_):
        found.append(len(passes))
        assert all(calls == 2 for _, calls in passes)
        of = [float(i + 1) for i in range(len(passes))]
        return [
            Timing(
                median_us=us, low_us=us, high_us=us, max_us=us, samples=9, noisy=False, unsettled=False, samples_us=[us]
            )
            for us in of
        ], None

    monkeypatch.setattr(module.measuring, "measure_gpu_times", gpu_times)
    monkeypatch.setattr(module, "capture_graph", lambda run: types.SimpleNamespace(replay=run))
    monkeypatch.setattr(module, "collect_environment", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=0))
    return found


def measured(tmp_path, monkeypatch, cases, *, turns):
    """Results by variant and size, of a job of such cases."""
    monkeypatch.setitem(module.BENCHES, "made-up", Bench(workload=Workload, turns=turns))
    job = BenchJob(
        bench="made-up",
        device="cuda",
        cases=[Case(variant=variant, sizes={"n": n}, calls=0) for variant, n in cases],
    )
    BenchWorker(job, tmp_path, 0, STAND_IN).run_job()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    done = {line["index"]: line["result"] for line in lines if line["stage"] == "done"}
    assert sorted(done) == list(range(len(cases)))
    assert [line["index"] for line in lines if line["stage"] == "case"] == list(range(len(cases)))
    return {(r["case"]["variant"], r["case"]["sizes"]["n"]): r for r in done.values()}


CASES = [("a", 1), ("b", 1), ("a", 2), ("broken", 2), ("wrong", 2)]


def test_variants_of_a_size_are_timed_together(tmp_path, monkeypatch, groups):
    """One that cannot be built has failed alone; one whose graph is wrong is told so, and timed all the same."""
    found = measured(tmp_path, monkeypatch, CASES, turns=True)
    assert groups == [2, 2]
    assert [found[key]["graph"]["time"]["median_us"] for key in (("a", 1), ("b", 1), ("a", 2), ("wrong", 2))] == [
        1,
        2,
        1,
        2,
    ]
    assert found["broken", 2]["outcome"] == "failed"
    assert "no room" in found["broken", 2]["reason"]
    assert found["a", 2]["correct"]
    assert not found["wrong", 2]["correct"]
    assert found["wrong", 2]["difference"] == "replayed graph: off by one"


def test_a_graph_that_cannot_be_checked_has_failed_alone(tmp_path, monkeypatch, groups):
    """Those that were timed with it have their times."""
    found = measured(tmp_path, monkeypatch, [("a", 1), ("lost", 1), ("b", 1)], turns=True)
    assert groups == [3]
    assert found["lost", 1]["outcome"] == "failed"
    assert "gone" in found["lost", 1]["reason"]
    assert [found[variant, 1]["graph"]["time"]["median_us"] for variant in "ab"] == [1, 3]


def test_without_turns_each_is_timed_alone(tmp_path, monkeypatch, groups):
    """As benches of several ranks are."""
    measured(tmp_path, monkeypatch, CASES, turns=False)
    assert groups == [1, 1, 1, 1]
