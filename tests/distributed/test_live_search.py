"""Search the load of a live engine with real ranks: the loads of a layout run in one job, which builds the model once."""

from __future__ import annotations

import collections
import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench import cli, reports
from dcpbench.commands import point_runner
from dcpbench.errors import InsufficientMemoryError
from dcpbench.launch.jobs import WAITING, decode_progress, read_job
from dcpbench.plan import grid
from dcpbench.records.file import read_records
from tests.cli import dcpbench_fake
from tests.cli.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.launch.jobs import Job
    from dcpbench.points.point import Point

    Call = Callable[..., tuple[int, dict[str, Any]]]

pytestmark = pytest.mark.distributed

SERVE = ("serve", "--device", "cpu", "--model", "tiny", "--tp", "2", "--no-baseline", "--num-requests", "8")
LENGTHS = ("--input-tokens", "12", "--output-tokens", "4", "--prefill", "chunk=16")
SEARCH = ("--find", "concurrency=1-8,repeats=1", "--slo", "ttft=0.000001", "--json")
LOADS = [8, 2, 1]  # none meets the SLO, so that each load is a fourth of the one before, down to the lower bound


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command with real ranks, without its report, and return its exit code and the only result of the search."""
    monkeypatch.setattr(point_runner, "WORKER", "tests.distributed.rank")
    monkeypatch.setattr(reports, "write_report", dcpbench_fake.write_report)
    monkeypatch.setattr(reports, "render_terminal_table", dcpbench_fake.render_terminal_table)

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        with pytest.raises(SystemExit) as end:
            cli.main([*words])
        return int(end.value.code or 0), json.loads(capsys.readouterr().out)

    return run


def list_jobs(folder: Path) -> list[Job]:
    """Return the jobs of a run in the order of their start."""
    return [read_job(path) for path in sorted(folder.glob("job-*.json"))]


def list_stages(job: Job) -> list[str]:
    """Return the stages that a job has reported, each once until the next one begins."""
    events = map(decode_progress, job.get_progress_path().read_bytes().splitlines())
    return [stage for stage, _ in itertools.groupby(event.stage for event in events)]


def test_loads_of_a_layout_run_in_one_job_that_builds_the_model_once(call: Call, tmp_path: Path) -> None:
    """Two layouts, dcp 1 and 2, run three loads each, in a job each."""
    code, out = call(*SERVE, "--dcp", "1,2", *LENGTHS, *SEARCH, "-o", str(tmp_path))
    assert code == 3
    assert [[one["load"] for one in found["loads"]] for found in out["find"]] == [sorted(LOADS)] * 2

    jobs = list_jobs(tmp_path)
    assert [[(p.dcp, p.concurrency) for p in job.points] for job in jobs] == [
        [(dcp, load) for load in LOADS] for dcp in (1, 2)
    ]
    for job in jobs:
        counts = collections.Counter(list_stages(job))
        assert (counts["build"], counts["done"], counts[WAITING], counts["end"]) == (1, 3, 3, 1)
        assert not job.open

    records = read_records(tmp_path)
    assert [(r.outcome, r.point.dcp, r.point.concurrency) for r in records] == [
        ("ok", dcp, load) for dcp in (1, 2) for load in LOADS
    ]
    assert [bool(r.start) for r in records] == [True, False, False] * 2, "only the first load waits for the engine"
    assert len({(r.point.dcp, r.kv.capacity_tokens) for r in records}) == 2, "all loads of a layout have one KV pool"


def test_killed_search_is_resumed_without_repeating_loads(call: Call, tmp_path: Path) -> None:
    """The command is killed after its first load has been recorded, at the latest while it measures the second."""
    words = [*SERVE, "--dcp", "2", *LENGTHS, *SEARCH, "-o", str(tmp_path)]
    command = [sys.executable, "-m", "tests.distributed.quick_dcpbench", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        wait_until((tmp_path / "records.jsonl").exists, run)
        run.kill()
    before = [r.point.get_key() for r in read_records(tmp_path)]
    assert 1 <= len(before) < len(LOADS)

    code, out = call(*words, "--resume")
    assert code == 3
    assert [one["load"] for one in out["find"][0]["loads"]] == sorted(LOADS)
    assert [r.point.concurrency for r in read_records(tmp_path)] == LOADS
    first, second = list_jobs(tmp_path)
    assert first.open, "it was killed while more loads were to come"
    assert [p.concurrency for p in second.points] == LOADS[len(before) :]


def test_layout_that_cannot_run_the_upper_bound_has_a_job_for_each_load(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is planned for one of the loads only, as the one for the upper bound, 8 clients, takes too much memory."""
    check = grid.check_runnable

    def check_memory(point: Point, *others: object) -> None:
        if point.concurrency > max(LOADS[1:]):
            raise InsufficientMemoryError("2 GiB are missing.")
        check(point, *others)

    monkeypatch.setattr(grid, "check_runnable", check_memory)
    code, out = call(*SERVE, "--dcp", "2", *LENGTHS, *SEARCH, "-o", str(tmp_path))
    assert (code, [one["load"] for one in out["find"][0]["loads"]]) == (3, sorted(LOADS))
    assert [(r.point.concurrency, r.outcome) for r in read_records(tmp_path)] == [
        (8, "rejected"),
        (2, "ok"),
        (1, "ok"),
    ]
    assert [[p.concurrency for p in job.points] for job in list_jobs(tmp_path)] == [[2], [1]]


def test_replays_of_a_search_share_a_job(call: Call, tmp_path: Path) -> None:
    """Step times that do not cover the rows of the next load are measured again, by the same engine."""
    code, out = call(*SERVE, "--dcp", "2", *LENGTHS, *SEARCH, "--mode", "replay", "-o", str(tmp_path))
    assert (code, out["find"][0]["deterministic"]) == (3, True)
    (job,) = list_jobs(tmp_path)
    assert collections.Counter(list_stages(job))["build"] == 1
    assert [r.point.concurrency for r in read_records(tmp_path)] == LOADS
