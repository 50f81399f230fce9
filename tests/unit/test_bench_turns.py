"""Cases of a bench that are measured together, by a worker with a fake GPU."""

import itertools
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
    """A workload with a variant `broken` that cannot be built, `wrong` with wrong results in a graph, and `lost` with
    none.
    """

    def __init__(self, *_):
        self.log = []

    def build_calls(self, case):
        """Return two calls for each pass."""
        if case.variant == "broken":
            raise ValueError("no room")
        wrong = case.variant == "wrong"

        passes = itertools.count()

        def check(run):
            """Check the eager pass, then that of the graph, which is not run."""
            if next(passes) == 0:
                run()
                return ""
            if case.variant == "lost":
                raise ValueError("gone")
            return "off by one" if wrong else ""

        return Calls(calls=[lambda: self.log.append(case.variant)] * 2, check=check)


@pytest.fixture
def groups(monkeypatch):
    """Return the sizes of groups of graphs that were timed together; the first graph takes 1 µs, the next 2, and so on."""
    found = []

    def measure_fake_times(passes, **_):
        found.append(len(passes))
        assert all(calls == 2 for _, calls in passes)
        times_us = [float(i + 1) for i in range(len(passes))]
        return [
            Timing(
                median_us=us, low_us=us, high_us=us, max_us=us, samples=9, noisy=False, unsettled=False, samples_us=[us]
            )
            for us in times_us
        ], None

    monkeypatch.setattr(module.measuring, "measure_gpu_times", measure_fake_times)
    monkeypatch.setattr(module, "capture_graph", lambda run: types.SimpleNamespace(replay=run))
    monkeypatch.setattr(module, "collect_environment", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=0))
    return found


def run_job(tmp_path, monkeypatch, cases, *, turns):
    """Return the results of a job of these cases by variant and size."""
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
    """A variant that cannot be built fails alone; one with a wrong graph is reported, and timed."""
    found = run_job(tmp_path, monkeypatch, CASES, turns=True)
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


def test_graph_that_cannot_be_checked_fails_alone(tmp_path, monkeypatch, groups):
    """The graphs that were timed with it keep their times."""
    found = run_job(tmp_path, monkeypatch, [("a", 1), ("lost", 1), ("b", 1)], turns=True)
    assert groups == [3]
    assert found["lost", 1]["outcome"] == "failed"
    assert "gone" in found["lost", 1]["reason"]
    assert [found[variant, 1]["graph"]["time"]["median_us"] for variant in "ab"] == [1, 3]


def test_each_case_is_timed_alone_without_turns(tmp_path, monkeypatch, groups):
    """Benches of several ranks run without turns."""
    run_job(tmp_path, monkeypatch, CASES, turns=False)
    assert groups == [1, 1, 1, 1]
