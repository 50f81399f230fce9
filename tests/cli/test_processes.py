"""Test that no process of a job outlives its launcher, and that the process which ended first is blamed."""

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
from dcpbench.launch import folders, jobs, launcher
from dcpbench.launch.jobs import Job, Progress
from dcpbench.launch.torchrun import RendezvousOptions, Running
from dcpbench.points.budget import plan_engines
from dcpbench.points.device_probe import Probe
from dcpbench.points.settings import Settings
from dcpbench.records.file import read_records
from dcpbench.records.folder import LOCK_FILE
from tests import as_fork
from tests.cli.job_processes import (
    ACCOUNT,
    AGENT,
    MARK_VARIABLE,
    RANK,
    find_by_role,
    find_processes,
    list_listening_addresses,
    list_open_files,
    wait_until,
)
from tests.cli.test_launcher import list_outcomes, make_point, work
from tests.cli.waiting import POLL_INTERVAL_S

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # some tests start real ranks twice
HERE = Path(__file__).parent
ROOT = Path(launcher.__file__).parents[2]
SWEEP = ("sweep", "--tp", "2", "--context", "50,66", "--concurrency", "2", "--no-baseline", "-o", "run")
BENCH = (
    "from dcpbench import cli; from dcpbench.bench import runner; runner.WORKER = 'fake_bench_worker'; "
    "cli.main(['bench', 'exchange'])"
)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a word that marks all processes of a test; those that are left are killed."""
    monkeypatch.setenv(MARK_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{ROOT}")
    yield str(tmp_path)
    for pid in find_processes(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def forked_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run agents as forks in tests that check records of a job, not its processes."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{ROOT}")
    as_fork.replace_agents(monkeypatch.setattr)


def make_job_arguments(folder: Path) -> Job:
    """Return the arguments of a job of two ranks and one point that hangs."""
    return Job(
        kind="sweep", tag="tp2-0", folder=str(folder), device="cpu", points=[make_point(2, 66)], settings=Settings()
    )


class TestKilled:
    @pytest.mark.parametrize("with_agent", [False, True], ids=["command", "command-and-agent"])
    def test_ranks_are_killed_with_their_command(self, with_agent: bool, mark: str, tmp_path: Path) -> None:
        """A command that is killed with SIGKILL cannot end its ranks, which would hang forever."""
        command = [sys.executable, str(HERE / "dcpbench_fake.py"), *SWEEP]
        run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until((tmp_path / "run" / "records.jsonl").exists, "the first point")
        wait_until(lambda: len(find_by_role(mark, RANK)) == 2, "both ranks")
        if with_agent:
            run.send_signal(signal.SIGSTOP)  # the command must not notice the death of its agent
            for pid in find_by_role(mark, AGENT):
                os.kill(pid, signal.SIGKILL)
        run.kill()
        run.wait()
        wait_until(lambda: not find_processes(mark), "no process is left")
        with folders.lock_folder(tmp_path / "run"):
            assert [r.outcome for r in read_records(tmp_path / "run")] == ["ok"]

    @pytest.mark.usefixtures("mark")
    @pytest.mark.long
    def test_killed_sweep_is_resumed_and_has_each_point_once(self, tmp_path: Path) -> None:
        """The sweep is killed after the first of two points; `python -m tools.kills` repeats this at random times."""
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

    def test_ranks_that_are_still_importing_are_killed_with_their_agent(self, mark: str, tmp_path: Path) -> None:
        """The ranks have reported no event yet, and their import takes ten minutes."""
        with Running(make_job_arguments(tmp_path), RendezvousOptions(), "importing_worker"):
            wait_until(lambda: len(find_by_role(mark, RANK)) == 2, "both ranks")
            (agent,) = find_by_role(mark, AGENT)
            os.kill(agent, signal.SIGKILL)
            wait_until(lambda: set(find_processes(mark)) <= {agent}, "no rank is left")

    @pytest.mark.long
    def test_ranks_of_a_bench_are_killed_with_their_command(self, mark: str, tmp_path: Path) -> None:
        environment = os.environ | {"DCPBENCH_FAKE": "hangs"}
        command = [sys.executable, "-c", BENCH]
        bench = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        wait_until(lambda: any("fake_bench_worker" in words for words in find_processes(mark).values()), "a rank")
        bench.kill()
        bench.wait()
        wait_until(lambda: not find_processes(mark), "no process is left")

    def test_agent_killed_between_two_points_fails_neither_point(self, mark: str, tmp_path: Path) -> None:
        """Point 300 is recorded, and 101 has not started, so it runs in another job."""

        def watch(event: Progress) -> None:
            if event.stage == "done" and event.key == make_point(2, 300).get_key():
                os.kill(find_by_role(mark, AGENT)[0], signal.SIGKILL)

        launcher.run_points([make_point(2, 300), make_point(2, 101)], work(tmp_path), RendezvousOptions(), watch)
        assert list_outcomes(read_records(tmp_path)) == [(2, 300, "ok"), (2, 101, "ok")]

    def test_agent_killed_during_a_point_is_named_in_the_reason(self, mark: str, tmp_path: Path) -> None:
        def watch(event: Progress) -> None:
            if event.stage == "measure":
                os.kill(find_by_role(mark, AGENT)[0], signal.SIGKILL)

        launcher.run_points([make_point(2, 66)], work(tmp_path), RendezvousOptions(), watch)
        (record,) = read_records(tmp_path)
        assert record.reason == "torchrun itself was ended by signal 9 (SIGKILL), and its ranks with it"
        assert not find_processes(mark)

    def test_rank_killed_together_with_its_supervisor_is_named(self, mark: str, tmp_path: Path) -> None:
        """No file states how the rank ended, but torchrun's log does."""

        def watch(event: Progress) -> None:
            if event.stage == "measure":
                os.kill(find_by_role(mark, ACCOUNT)[0], signal.SIGKILL)

        launcher.run_points([make_point(2, 66)], work(tmp_path), RendezvousOptions(), watch)
        (record,) = read_records(tmp_path)
        assert re.match(r"rank \d was killed by signal 9 \(out of memory is the usual cause", str(record.reason))
        assert record.detail["exit_code"] == "-9"

    def test_stopped_agent_is_continued_and_reported(self, mark: str, tmp_path: Path) -> None:
        """A stopped agent would not notice that its ranks have finished, and the sweep would wait for it."""
        seen: list[str] = []

        def watch(event: Progress) -> None:
            seen.append(event.stage)
            if event.stage == "measure":
                os.kill(find_by_role(mark, AGENT)[0], signal.SIGSTOP)

        launcher.run_points([make_point(2, 100)], work(tmp_path, timeout=300), RendezvousOptions(), watch)
        assert "stopped" in seen
        assert list_outcomes(read_records(tmp_path)) == [(2, 100, "ok")]


class TestLock:
    def test_every_process_of_a_job_holds_the_lock_and_is_listed(self, mark: str, tmp_path: Path) -> None:
        """The launcher's descriptor is closed and its id is not in the file, so the agent's id comes first."""
        lock = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with Running(make_job_arguments(tmp_path), RendezvousOptions(), "fake_worker", lock):
            os.close(lock)
            wait_until(lambda: len(find_by_role(mark, RANK)) == 2, "both ranks")
            (agent,), ranks = find_by_role(mark, AGENT), find_by_role(mark, RANK)
            pids = [int(word) for word in (tmp_path / LOCK_FILE).read_text().split()]
            assert (pids[0], sorted(pids[1:])) == (agent, ranks)
            for pid in (agent, *ranks):
                assert str(tmp_path / LOCK_FILE) in list_open_files(pid)
            with pytest.raises(OutputError, match=rf"still writing here; .* end it \(pid {agent}\)"):
                folders.lock_folder(tmp_path).__enter__()
        with folders.lock_folder(tmp_path):
            pass

    @pytest.mark.usefixtures("mark")
    def test_process_that_reuses_the_id_of_a_rank_is_not_killed(self, tmp_path: Path) -> None:
        """A rank's file has its start time; the other process started earlier, and outlives the job."""
        other = subprocess.Popen(["sleep", "600"])
        with Running(make_job_arguments(tmp_path), RendezvousOptions(), "fake_worker") as running:
            wait_until(lambda: len(running.find_pids()) == 2, "both ranks")
            rank = running.find_pids()[1]
            content = (tmp_path / "rank-1.pid").read_text()
            (tmp_path / "rank-1.pid").write_text(content.replace(str(rank), str(other.pid), 1))
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
    def test_rank_that_ended_first_is_blamed(self, context: int, reason: str, code: str, tmp_path: Path) -> None:
        """Rank 0 raises an error because its connection was closed; rank 1 ended without a message."""
        launcher.run_points([make_point(2, context)], work(tmp_path), RendezvousOptions(), lambda _: None)
        (record,) = read_records(tmp_path)
        assert re.fullmatch(reason, str(record.reason)), record.reason
        assert str(record.advice).startswith("Read logs/tp2-0 ")
        assert record.detail["exit_code"] == code
        closed = "RuntimeError: gloo: Connection closed by peer"
        assert record.detail.get("error_rank_0", closed) == closed  # torchrun may end rank 0 before it writes the error


class TestListening:
    @pytest.mark.long
    def test_job_on_one_machine_listens_only_on_loopback(self, mark: str, tmp_path: Path) -> None:
        """Real ranks, their store and gloo open sockets, and any process that can reach a store can change its keys."""
        seen: dict[str, set[str]] = {}

        def watch(event: Progress) -> None:
            seen.setdefault(event.stage, set()).update(list_listening_addresses(mark))

        points = [make_point(2, 16), msgspec.structs.replace(make_point(2, 16), dcp=2, exchange="ag_rs")]
        settings = Settings(seconds=0.2, profile=False)
        engines = tuple(plan_engines(points, settings, Probe(device="cpu", count=0, name="CPU")))
        real = msgspec.structs.replace(
            work(tmp_path), worker="dcpbench.worker", settings=settings, timeout=300, engines=engines
        )
        launcher.run_points(points, real, RendezvousOptions(), watch)
        assert list_outcomes(read_records(tmp_path)) == [(2, 16, "ok")] * 2
        assert seen["measure"] == {"0100007F"}
        assert set().union(*seen.values()) == {"0100007F"}

    @pytest.mark.long
    def test_ranks_of_a_bench_listen_only_on_loopback(self, mark: str, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "dcpbench.cli", "bench", "collectives", "--requests", "2", "--width", "32"]
        bench = subprocess.Popen(
            [*command, "--device", "cpu"], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        seen: set[str] = set()
        while bench.poll() is None:
            seen |= list_listening_addresses(mark)
            time.sleep(POLL_INTERVAL_S)
        assert bench.returncode == 0
        assert seen == {"0100007F"}


class TestLimits:
    def test_timeout_of_points_does_not_limit_start_and_build(self, tmp_path: Path) -> None:
        """With --timeout 12 a point may be silent for 12 s; starting, building and warm-up have at least 300 s.

        After the last point no result can be lost, so ranks have a minute to end.
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
    def test_silent_imports_are_killed_after_the_startup_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The timeout of a microsecond does not apply to imports, which are silent forever here."""
        monkeypatch.setattr(jobs, "MIN_STAGE_LIMIT_S", 2.0)
        importing = msgspec.structs.replace(work(tmp_path, timeout=1e-6), worker="importing_worker")
        with pytest.raises(WorkerError, match="gave no sign of life for 2 s before its first point, twice"):
            launcher.run_points([make_point(2, 100)], importing, RendezvousOptions(), lambda _: None)


class TestFolder:
    def test_removed_folder_ends_the_run_and_is_not_created_again(self, mark: str, tmp_path: Path) -> None:
        folder = tmp_path / "run"

        def watch(event: Progress) -> None:
            if event.stage == "measure":
                folder.rename(tmp_path / "moved")

        with (
            folders.lock_folder(folder) as lock,
            pytest.raises(OutputError, match=r"was removed or moved .* add --resume"),
        ):
            launcher.run_points(
                [make_point(2, 66), make_point(2, 101)],
                msgspec.structs.replace(work(folder), lock=lock),
                RendezvousOptions(),
                watch,
            )
        assert not folder.exists()
        assert not find_processes(mark)

    @pytest.mark.usefixtures("mark")
    def test_full_disk_raises_an_error_and_keeps_earlier_records(self, tmp_path: Path) -> None:
        """Rank 0 cannot append its record, no point is blamed, and the report can be written elsewhere."""
        points = [make_point(2, 100), make_point(2, 28), make_point(2, 101)]
        with pytest.raises(DiskError) as caught:
            launcher.run_points(points, work(tmp_path), RendezvousOptions(), lambda _: None)
        assert "no space is left on its disk. No point is to blame, and what was recorded before is safe" in str(
            caught.value
        )
        assert f"`dcpbench report {tmp_path} -o ELSEWHERE`" in str(caught.value)
        assert list_outcomes(read_records(tmp_path)) == [(2, 100, "ok")]

    def test_full_disk_during_writes_of_the_launcher_raises_the_same_error(self, tmp_path: Path) -> None:
        with pytest.raises(DiskError, match="no space is left"), folders.convert_write_errors(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (
            pytest.raises(OutputError, match="was removed or moved away"),
            folders.convert_write_errors(tmp_path / "gone"),
        ):
            (tmp_path / "gone" / "records.jsonl").open("ab")
        with pytest.raises(PermissionError), folders.convert_write_errors(tmp_path):
            raise PermissionError(errno.EACCES, "no")
