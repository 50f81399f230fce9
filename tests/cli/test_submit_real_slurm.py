"""Test `dcpbench submit slurm` with real ranks on two nodes of a real Slurm on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench.records.file import read_records
from tests.cli.two_nodes import PACKAGES, TwoNodes, list_missing_programs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
SWEEP = ("sweep", "--tp", "2", "--dcp", "1", "--model", "tiny", "--device", "cpu", "--concurrency", "2", "--no-profile")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(list_missing_programs()) and not os.environ.get("CI"),
        reason=f"there is no {', '.join(list_missing_programs())} here; on Debian: apt-get install {PACKAGES}",
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with TwoNodes(tmp_path_factory.mktemp("slurm") / "cluster") as found:
        yield found


class Submitted:
    """Run `dcpbench submit slurm` on both nodes."""

    def __init__(self, cluster: TwoNodes, run: Path, *words: str, options: tuple[str, ...] = ()) -> None:
        self.cluster, self.run = cluster, run
        command = [sys.executable, "-m", "dcpbench.cli", "submit", "slurm", "--nodes", "2", *options, "--", *words]
        self.process = subprocess.Popen(
            [*command, "-o", str(run)],
            cwd=ROOT,
            env=cluster.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ended(self) -> tuple[int, str]:
        """Return the exit code and all output of the command."""
        output, _ = self.process.communicate()
        return self.process.returncode, output

    def until(self, true: Callable[[], object]) -> None:
        """Wait for a condition while the command runs."""
        while not true():
            assert self.process.poll() is None, self.ended()
            time.sleep(0.2)

    @property
    def job(self) -> str:
        """Return the job's number in the queue."""
        (log,) = (self.run / "submit").glob("*.log")
        return log.stem


def count_records(run: Path) -> int:
    """Return the number of records of a run, which may still be running."""
    path = run / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def find_run_processes(run: Path) -> list[str]:
    """Return the command lines of live processes that name the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run) in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def find_remains(submitted: Submitted) -> list[str]:
    """Return the queue entries, processes and secret that remain of a job."""
    secret = submitted.run / "submit" / "secret"
    queued = submitted.cluster.run_command("squeue", "--noheader")
    return [*queued.splitlines(), *find_run_processes(submitted.run), *([str(secret)] if secret.exists() else [])]


def test_sweep_over_two_nodes_succeeds(cluster: TwoNodes, tmp_path: Path) -> None:
    """Each node runs one of two ranks, node 0 writes the records, and the secret is neither kept nor printed."""
    run = tmp_path / "a run"
    submitted = Submitted(cluster, run, *SWEEP, "--context", "100", "--seconds", "0.2")
    secret = run / "submit" / "secret"
    submitted.until(lambda: secret.exists() and secret.stat().st_size == 64)
    assert oct(secret.stat().st_mode & 0o777) == "0o600"
    value = secret.read_text()
    code, output = submitted.ended()
    assert code == 0, output
    assert [(r.outcome, r.point.tp) for r in read_records(run)] == [("ok", 2)]
    assert "Node 1: joins node 0 at 127.0.0.1:" in output
    assert "[1/1] tiny tp2" in output
    assert "has ended well." in output
    assert (run / "logs" / "tp2-0" / "rank-0.exit").exists()
    assert (run / "nodes" / "1" / "logs" / "tp2-0" / "rank-1.exit").exists()
    assert find_remains(submitted) == []
    kept = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert value.encode() not in kept


def test_submit_returns_the_exit_code_of_a_failed_run(cluster: TwoNodes, tmp_path: Path) -> None:
    """The model does not exist, which only the nodes notice, so both end with 2."""
    submitted = Submitted(cluster, tmp_path / "run", *SWEEP, "--weights", str(tmp_path / "no-such-model"))
    code, output = submitted.ended()
    assert code == 2, output
    assert "no-such-model" in output
    assert re.search(r"Slurm job \d+ has ended with exit code 2; read .*\.log\.", output)
    assert find_remains(submitted) == []


def test_rank_killed_on_node_1_is_recorded_by_node_0(cluster: TwoNodes, tmp_path: Path) -> None:
    """The failed point ends the command with 4, and the job and submit end with the same code."""
    run = tmp_path / "run"
    submitted = Submitted(cluster, run, *SWEEP, "--context", "100", "--seconds", "60")
    pid = run / "nodes" / "1" / "rank-1.pid"
    progress = run / "progress-tp2-0.jsonl"
    submitted.until(lambda: progress.exists() and b"measure" in progress.read_bytes())
    os.kill(int(pid.read_text().split()[0]), signal.SIGKILL)
    code, output = submitted.ended()
    assert code == 4, output
    (record,) = read_records(run)
    assert record.outcome == "failed"
    assert "rank 1 was killed by signal 9" in str(record.reason)
    assert find_remains(submitted) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_interrupted_submit_cancels_the_job_and_keeps_its_records(
    cluster: TwoNodes, tmp_path: Path, number: int
) -> None:
    """When the first record is written, both nodes are running and minutes of points remain."""
    run = tmp_path / "run"
    submitted = Submitted(cluster, run, *SWEEP, "--context", "100,200,300", "--seconds", "60")
    submitted.until(lambda: len([p for p in find_run_processes(run) if "dcpbench.worker" in p]) >= 2)
    submitted.process.send_signal(number)
    code, output = submitted.ended()
    assert code == (130 if number == signal.SIGINT else 143), output
    assert "is cancelled. What was measured is in" in output
    assert find_remains(submitted) == []


def test_requeued_job_measures_only_the_remaining_points(cluster: TwoNodes, tmp_path: Path) -> None:
    """`scontrol requeue` restarts the job as after a lost node; each of two points has one record in the end."""
    run = tmp_path / "run"
    submitted = Submitted(cluster, run, *SWEEP, "--context", "100,200", "--seconds", "4")
    submitted.until(lambda: count_records(run) >= 1)
    cluster.run_command("scontrol", "requeue", submitted.job)
    code, output = submitted.ended()
    assert code == 0, output
    assert "begun again 1 time" in output
    assert "already measured" in output
    counts = Counter(r.point.context for r in read_records(run) if r.outcome == "ok")
    assert counts == {100: 1, 200: 1}
    assert find_remains(submitted) == []
