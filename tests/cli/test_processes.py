"""No process of a job outlives the one that started it, and what ends out of turn is what gets the blame."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from dcpbench.errors import DiskError, OutputError, WorkerError
from dcpbench.launch import folders, launcher
from dcpbench.launch.jobs import Job, Progress
from dcpbench.launch.torchrun import Machines, Running
from dcpbench.points.budget import plan_engines
from dcpbench.points.device_probe import Probe
from dcpbench.points.settings import Settings
from dcpbench.records.file import read_records
from dcpbench.records.folder import LOCK_FILE
from tests import as_fork
from tests.cli.job_processes import ACCOUNT, AGENT, MARK, RANK, listening, of_role, opened, processes, wait_until
from tests.cli.test_launcher import outcomes, point, work
from tests.cli.waiting import LOOK_S

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # some start real ranks twice
HERE = Path(__file__).parent
ROOT = Path(launcher.__file__).parents[2]
SWEEP = ("sweep", "--tp", "2", "--context", "50,66", "--concurrency", "2", "--no-baseline", "-o", "run")
BENCH = (
    "from dcpbench import cli; from dcpbench.bench import runner; runner.WORKER = 'fake_bench_worker'; "
    "cli.main(['bench', 'exchange'])"
)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A word by which all processes that a test starts are found; those that are left are killed."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{ROOT}")
    yield str(tmp_path)
    for pid in processes(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def forked_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at what is recorded of a job, not at its processes."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{ROOT}")
    as_fork.agents(monkeypatch.setattr)


def job(folder: Path) -> Job:
    """Two ranks and one point that hangs."""
    return Job(kind="sweep", tag="tp2-0", folder=str(folder), device="cpu", points=[point(2, 66)], settings=Settings())


class TestKilled:
    @pytest.mark.parametrize("with_agent", [False, True], ids=["command", "command-and-agent"])
    def test_ranks_end_with_their_command(self, with_agent: bool, mark: str, tmp_path: Path) -> None:
        """Killed with -9 it cannot end them; alone in the world, these two would hang for ever."""
        command = [sys.executable, str(HERE / "dcpbench_fake.py"), *SWEEP]
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until((tmp_path / "run" / "records.jsonl").exists, "the first point")
        wait_until(lambda: len(of_role(mark, RANK)) == 2, "both ranks")
        if with_agent:
            run.send_signal(signal.SIGSTOP)  # it must not see its agent die before it dies itself
            for pid in of_role(mark, AGENT):
                os.kill(pid, signal.SIGKILL)
        run.kill()
        run.wait()
        wait_until(lambda: not processes(mark), "no process is left")
        with folders.lock_folder(tmp_path / "run"):
            assert [r.outcome for r in read_records(tmp_path / "run")] == ["ok"]

    @pytest.mark.usefixtures("mark")
    @pytest.mark.long
    def test_a_killed_sweep_of_real_ranks_is_gone_on_with_and_has_each_point_once(self, tmp_path: Path) -> None:
        """Two points, killed after the first. `python -m tools.kills` does this at random, and often."""
        command = [sys.executable, "-m", "dcpbench.cli", "sweep", "--tp", "2", "--context", "16,24", "--no-baseline"]
        command += ["--concurrency", "1", "--seconds", "0.2", "--no-profile", "--device", "cpu", "-o", "run"]
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until((tmp_path / "run" / "records.jsonl").exists, "the first point")
        run.kill()
        run.wait()
        again = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        records = [r for r in read_records(tmp_path / "run") if r.outcome == "ok"]
        assert sorted(r.point.context for r in records) == [16, 24]

    def test_ranks_that_are_still_importing_end_with_their_agent(self, mark: str, tmp_path: Path) -> None:
        """They have said nothing yet, and import for ten minutes."""
        with Running(job(tmp_path), Machines(), "importing_worker"):
            wait_until(lambda: len(of_role(mark, RANK)) == 2, "both ranks")
            (agent,) = of_role(mark, AGENT)
            os.kill(agent, signal.SIGKILL)
            wait_until(lambda: set(processes(mark)) <= {agent}, "no rank is left")

    @pytest.mark.long
    def test_the_ranks_of_a_bench_end_with_their_command(self, mark: str, tmp_path: Path) -> None:
        environment = os.environ | {"DCPBENCH_FAKE": "hangs"}
        command = [sys.executable, "-c", BENCH]
        bench = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        wait_until(lambda: any("fake_bench_worker" in words for words in processes(mark).values()), "a rank")
        bench.kill()
        bench.wait()
        wait_until(lambda: not processes(mark), "no process is left")

    def test_an_agent_that_is_killed_between_two_points_fails_neither(self, mark: str, tmp_path: Path) -> None:
        """Point 300 is recorded, and 101 has not been begun: it is begun in another job."""

        def watch(event: Progress) -> None:
            if event.stage == "done" and event.key == point(2, 300).get_key():
                os.kill(of_role(mark, AGENT)[0], signal.SIGKILL)

        launcher.run_points([point(2, 300), point(2, 101)], work(tmp_path), Machines(), watch)
        assert outcomes(read_records(tmp_path)) == [(2, 300, "ok"), (2, 101, "ok")]

    def test_an_agent_that_is_killed_at_a_point_is_named(self, mark: str, tmp_path: Path) -> None:
        def watch(event: Progress) -> None:
            if event.stage == "measure":
                os.kill(of_role(mark, AGENT)[0], signal.SIGKILL)

        launcher.run_points([point(2, 66)], work(tmp_path), Machines(), watch)
        (record,) = read_records(tmp_path)
        assert record.reason == "torchrun itself was ended by signal 9 (SIGKILL), and its ranks with it"
        assert not processes(mark)

    def test_a_rank_that_is_killed_with_what_keeps_account_of_it_is_named(self, mark: str, tmp_path: Path) -> None:
        """It leaves no file that says how it ended, and torchrun's own log does."""

        def watch(event: Progress) -> None:
            if event.stage == "measure":
                os.kill(of_role(mark, ACCOUNT)[0], signal.SIGKILL)

        launcher.run_points([point(2, 66)], work(tmp_path), Machines(), watch)
        (record,) = read_records(tmp_path)
        assert re.match(r"rank \d was killed by signal 9 \(out of memory is the usual cause", str(record.reason))
        assert record.detail["exit_code"] == "-9"

    def test_a_stopped_agent_goes_on_and_it_is_said(self, mark: str, tmp_path: Path) -> None:
        """Stopped, it would never hear that its ranks are done, and the sweep would wait for it."""
        seen: list[str] = []

        def watch(event: Progress) -> None:
            seen.append(event.stage)
            if event.stage == "measure":
                os.kill(of_role(mark, AGENT)[0], signal.SIGSTOP)

        launcher.run_points([point(2, 100)], work(tmp_path, timeout=300), Machines(), watch)
        assert "stopped" in seen
        assert outcomes(read_records(tmp_path)) == [(2, 100, "ok")]


class TestLock:
    def test_every_process_of_a_job_keeps_the_lock_and_is_named_in_it(self, mark: str, tmp_path: Path) -> None:
        """The launcher's own descriptor is closed; its process id is not in the file, so the agent's comes first."""
        lock = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with Running(job(tmp_path), Machines(), "fake_worker", lock):
            os.close(lock)
            wait_until(lambda: len(of_role(mark, RANK)) == 2, "both ranks")
            (agent,), ranks = of_role(mark, AGENT), of_role(mark, RANK)
            pids = [int(word) for word in (tmp_path / LOCK_FILE).read_text().split()]
            assert (pids[0], sorted(pids[1:])) == (agent, ranks)
            for pid in (agent, *ranks):
                assert str(tmp_path / LOCK_FILE) in opened(pid)
            with pytest.raises(OutputError, match=rf"still writing here; .* end it \(pid {agent}\)"):
                folders.lock_folder(tmp_path).__enter__()
        with folders.lock_folder(tmp_path):
            pass

    @pytest.mark.usefixtures("mark")
    def test_a_process_that_got_the_id_of_a_rank_is_left_alone(self, tmp_path: Path) -> None:
        """A rank's file says when it began; this other one began earlier, and outlives the end of the job."""
        other = subprocess.Popen(["sleep", "600"])
        with Running(job(tmp_path), Machines(), "fake_worker") as running:
            wait_until(lambda: len(running.read_pids()) == 2, "both ranks")
            (rank,) = (pid for pid in running.read_pids() if f"{pid} " in (tmp_path / "rank-1.pid").read_text())
            told = (tmp_path / "rank-1.pid").read_text()
            (tmp_path / "rank-1.pid").write_text(told.replace(str(rank), str(other.pid), 1))
        assert other.poll() is None
        other.kill()
        other.wait()


class TestBlame:
    @pytest.mark.parametrize(
        ("context", "reason", "code"),
        [
            (815, r"rank 1 was ended by signal 15 \(SIGTERM\), sent by another process", "-15"),
            (802, r"rank 1 was ended by signal 2 \(SIGINT\), sent by another process", "-2"),
            (806, r"rank 1 was ended by signal 6 \(SIGABRT\), native code crashed: .*", "-6"),
            (811, r"rank 1 was ended by signal 11 \(SIGSEGV\), native code crashed: .*", "-11"),
            (809, r"rank 1 was killed by signal 9 \(out of memory is the usual cause: .*\)", "-9"),
            (707, r"rank 1 ended with exit code 7 and without an error message", "7"),
            (700, r"rank 1 ended with exit code 0 before its points were done", "0"),
        ],
    )
    @pytest.mark.usefixtures("forked_agent")
    @pytest.mark.long
    def test_the_rank_that_ended_is_blamed_and_not_the_one_that_missed_it(
        self, context: int, reason: str, code: str, tmp_path: Path
    ) -> None:
        """Rank 0 raises that its connection was closed, with an error message; rank 1 left none."""
        launcher.run_points([point(2, context)], work(tmp_path), Machines(), lambda _: None)
        (record,) = read_records(tmp_path)
        assert re.fullmatch(reason, str(record.reason)), record.reason
        assert str(record.advice).startswith("Read logs/tp2-0 ")
        assert record.detail["exit_code"] == code
        closed = "RuntimeError: gloo: Connection closed by peer"
        assert record.detail.get("error_rank_0", closed) == closed  # torchrun may end rank 0 before it has said so


class TestListening:
    @pytest.mark.long
    def test_a_job_of_one_machine_listens_on_loopback_alone(self, mark: str, tmp_path: Path) -> None:
        """The real ranks, their store and gloo; whoever can reach a store can read and write its keys."""
        seen: dict[str, set[str]] = {}

        def watch(event: Progress) -> None:
            seen.setdefault(event.stage, set()).update(listening(mark))

        points = [point(2, 16), msgspec.structs.replace(point(2, 16), dcp=2, exchange="ag_rs")]
        settings = Settings(seconds=0.2, profile=False)
        engines = tuple(plan_engines(points, settings, Probe(device="cpu", count=0, name="CPU")))
        real = msgspec.structs.replace(
            work(tmp_path), worker="dcpbench.worker", settings=settings, timeout=300, engines=engines
        )
        launcher.run_points(points, real, Machines(), watch)
        assert outcomes(read_records(tmp_path)) == [(2, 16, "ok")] * 2
        assert seen["measure"] == {"0100007F"}
        assert set().union(*seen.values()) == {"0100007F"}

    @pytest.mark.long
    def test_the_ranks_of_a_bench_meet_on_loopback_alone(self, mark: str, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "dcpbench.cli", "bench", "collectives", "--requests", "2", "--width", "32"]
        bench = subprocess.Popen(
            [*command, "--device", "cpu"], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        seen: set[str] = set()
        while bench.poll() is None:
            seen |= listening(mark)
            time.sleep(LOOK_S)
        assert bench.returncode == 0
        assert seen == {"0100007F"}


class TestLimits:
    def test_a_short_timeout_is_none_of_imports_and_building(self, tmp_path: Path) -> None:
        """With --timeout 12 a point may be silent for 12 s; starting, building and warming up for 300 s, or more.

        Behind the last point nothing is lost any more: a minute is enough for ranks to end.
        """
        short, long = work(tmp_path, timeout=12), work(tmp_path, timeout=1000)
        silent = ("", "start", "build", "choose", "check", "capture", "done")
        assert {short.get_limit_s(stage) for stage in silent} == {300}
        assert {short.get_limit_s(stage) for stage in ("measure", "profile")} == {12}
        assert {long.get_limit_s(stage) for stage in (*silent, "measure")} == {1000}
        assert msgspec.structs.replace(short, kind="verify").get_limit_s("check") == 12
        assert short.get_limit_s("end") == long.get_limit_s("end") == 60

    @pytest.mark.usefixtures("forked_agent")
    @pytest.mark.long
    def test_imports_are_not_measured_by_the_timeout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Silent for ever, they are ended after the limit of start-up, and not after a microsecond."""
        monkeypatch.setattr(launcher, "PATIENCE_S", 2.0)
        importing = msgspec.structs.replace(work(tmp_path, timeout=1e-6), worker="importing_worker")
        with pytest.raises(WorkerError, match="gave no sign of life for 2 s before its first point, twice"):
            launcher.run_points([point(2, 100)], importing, Machines(), lambda _: None)


class TestFolder:
    def test_a_folder_that_is_removed_ends_the_run_and_is_not_made_again(self, mark: str, tmp_path: Path) -> None:
        folder = tmp_path / "run"

        def watch(event: Progress) -> None:
            if event.stage == "measure":
                folder.rename(tmp_path / "moved")

        with (
            folders.lock_folder(folder) as lock,
            pytest.raises(OutputError, match=r"was removed or moved .* add --resume"),
        ):
            launcher.run_points(
                [point(2, 66), point(2, 101)], msgspec.structs.replace(work(folder), lock=lock), Machines(), watch
            )
        assert not folder.exists()
        assert not processes(mark)

    @pytest.mark.usefixtures("mark")
    def test_a_full_disk_is_named_and_what_was_measured_is_safe(self, tmp_path: Path) -> None:
        """Rank 0 cannot append its record. No point is blamed for it, and the report can be had elsewhere."""
        points = [point(2, 100), point(2, 28), point(2, 101)]
        with pytest.raises(DiskError) as caught:
            launcher.run_points(points, work(tmp_path), Machines(), lambda _: None)
        assert "no space is left on its disk. No point is to blame, and what was recorded before is safe" in str(
            caught.value
        )
        assert f"`dcpbench report {tmp_path} -o ELSEWHERE`" in str(caught.value)
        assert outcomes(read_records(tmp_path)) == [(2, 100, "ok")]

    def test_the_launchers_own_writes_name_a_full_disk_too(self, tmp_path: Path) -> None:
        with pytest.raises(DiskError, match="no space is left"), folders.convert_write_errors(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (
            pytest.raises(OutputError, match="was removed or moved away"),
            folders.convert_write_errors(tmp_path / "gone"),
        ):
            (tmp_path / "gone" / "records.jsonl").open("ab")
        with pytest.raises(PermissionError), folders.convert_write_errors(tmp_path):
            raise PermissionError(errno.EACCES, "no")
