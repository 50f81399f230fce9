"""The launcher's judgement and its files, without starting a job."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import subprocess
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import DcpbenchError, DiskError, OutputError, UsageError, WorkerError
from dcpbench.hangs.evidence import ProcessState
from dcpbench.launch import folders, hang_capture, launcher, nodes, torchrun
from dcpbench.launch.jobs import SECRET, Exit, Failure, Job, Progress, format_exit_code, open_listener
from dcpbench.launch.ranks import Ranks
from dcpbench.launch.torchrun import Machines, Running
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records.file import RecordFile
from dcpbench.records.record import Record
from dcpbench.records.runs import read_last_records
from tests.unit import test_hangs

if TYPE_CHECKING:
    from pathlib import Path


def point(tp: int = 2, context: int = 100) -> Point:
    """A point that differs by what a test needs."""
    return Point(model="tiny", tp=tp, concurrency=2, context=context, backend="reference", dtype="fp32")


def failure(rank: int, kind: str, message: str) -> Failure:
    """What rank `rank` left behind."""
    return Failure(rank=rank, key="", kind=kind, message=message, traceback="")


def job(folder: Path, device: str = "cpu", points: list[Point] | None = None) -> Job:
    """A job in `folder`."""
    return Job(
        kind="sweep", tag="tp2-0", folder=str(folder), device=device, points=points or [point()], settings=Settings()
    )


class Sleeper(Running):
    """A Running whose agent never started: its files alone are looked at."""

    def __init__(self, folder: Path) -> None:
        self.job = job(folder)
        Ranks.__init__(self, folder, self.job.get_log_folder(), self.job.get_progress_path(), range(2))
        self.logs.mkdir(parents=True)
        self.agent_log = self.logs / "agent.log"


@pytest.mark.parametrize(
    "collective",
    [
        ("DistBackendError", "NCCL error in: unhandled system error"),
        ("RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
        ("ConnectionResetError", "Connection reset by peer"),
        ("DistBackendError", "unhandled cuda error"),
    ],
    ids=["nccl", "gloo", "timeout", "reset", "by its kind alone"],
)
def test_the_rank_that_broke_the_collective_is_blamed_not_those_that_noticed(collective: tuple[str, str]) -> None:
    """Rank 0 reports first, but only that somebody is gone; rank 1 knows why."""
    cause = failure(1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")
    assert launcher.find_cause([failure(0, *collective), cause]) is cause


def test_with_collective_errors_only_the_first_is_blamed() -> None:
    """Better than nothing; and nothing where nobody left an error."""
    first = failure(0, "RuntimeError", "NCCL error")
    assert launcher.find_cause([first, failure(1, "RuntimeError", "NCCL error")]) is first
    assert launcher.find_cause([]) is None


@pytest.mark.parametrize(
    ("error", "stage", "changed", "shares"),
    [
        ("CapacityError", "build", {"context": 200}, True),
        ("CapacityError", "measure", {"context": 200}, False),
        ("RuntimeError", "build", {"context": 200}, False),
        ("CapacityError", "build", {"backend": "triton"}, False),
        ("CapacityError", "build", {"dcp": 2}, False),
        ("ModelError", "measure", {"tp": 4, "backend": "triton"}, True),
        ("ModelError", "measure", {"weights": "/other"}, False),
        ("ModelError", "measure", {"model": "other"}, False),
    ],
    ids=str,
)
def test_points_share_a_cause_that_another_job_would_only_meet_again(
    error: str, stage: str, changed: dict[str, object], shares: bool
) -> None:
    """One of our errors while an engine is built is that engine's; one in the model, every point's of its weights."""
    failed = Record(point=point(), outcome="failed", detail={"error": error, "stage": stage})
    assert launcher._has_same_cause(msgspec.structs.replace(point(), **changed), failed) is shares


def test_the_last_record_of_a_point_counts(tmp_path: Path) -> None:
    """Failed, then measured with --resume: measured. A folder without records has none."""
    assert read_last_records(tmp_path) == {}
    for outcome in ("failed", "ok"):
        RecordFile(tmp_path).append(Record(point=point(), outcome=outcome))
    assert {key: r.outcome for key, r in read_last_records(tmp_path).items()} == {point().get_key(): "ok"}


def test_a_progress_line_still_being_written_waits_for_its_end(tmp_path: Path) -> None:
    """The first half of a line is not an event, and is not lost either; a damaged line is passed over."""
    running = Sleeper(tmp_path)
    line = msgspec.json.encode(Progress(stage="start")) + b"\n"
    path = running.job.get_progress_path()
    path.write_bytes(line + line[:9])
    assert [e.stage for e in running.read_events()] == ["start"]
    assert list(running.read_events()) == []
    path.write_bytes(line + line + b"{not json}\n" + line)
    assert [e.stage for e in running.read_events()] == ["start", "start"]


@pytest.mark.parametrize(
    ("failures", "exits", "finished", "blamed"),
    [
        ([], [(0, 1, 2.0), (1, -9, 1.0)], False, 1),
        ([failure(0, "RuntimeError", "NCCL error")], [(0, 1, 1.0), (1, -15, 2.0)], False, 1),
        ([failure(0, "ValueError", "x")], [(0, 1, 1.0), (1, -6, 2.0)], False, None),
        ([failure(0, "ValueError", "x")], [(0, 1, 1.0), (1, -6, 1.0)], False, None),
        ([failure(0, "ValueError", "lost a peer")], [(0, 1, 2.0), (1, -11, 1.0)], False, 1),
        ([], [(0, 0, 1.0), (1, 0, 2.0)], True, None),
        ([], [(1, 0, 1.0)], False, 1),
        ([], [(0, 0, 1.0), (1, -11, 2.0)], True, 1),
    ],
    ids=[
        "first",
        "before-a-collective",
        "after-an-error",
        "with-an-error",
        "before-an-error",
        "all-done",
        "too-early",
        "at-the-end",
    ],
)
def test_the_first_rank_that_ended_untold_is_blamed(
    failures: list[Failure], exits: list[tuple[int, int, float]], finished: bool, blamed: int | None
) -> None:
    """(rank, exit code, time): an error comes first where its rank did, and a rank may end with 0 once all is done."""
    told = [Exit(rank=rank, code=code, asked=False, at=at) for rank, code, at in exits]
    found = launcher.find_first_gone(failures, told, finished=finished)
    assert (found and found.rank) == blamed


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (7, "ended with exit code 7"),
        (0, "ended with exit code 0"),
        (-9, "was ended by signal 9 (SIGKILL)"),
        (-40, "was ended by signal 40"),
    ],
)
def test_a_signal_is_named_where_it_has_a_name(code: int, words: str) -> None:
    """Real-time signals between the first and the last have none."""
    assert format_exit_code(code) == words


def test_a_rank_that_torchrun_ended_is_not_to_blame() -> None:
    """Signal 15 to rank 0 came from torchrun, as rank 1 had ended."""
    exits = [Exit(rank=0, code=-15, asked=True, at=1.0), Exit(rank=1, code=7, asked=False, at=2.0)]
    found = launcher.find_first_gone([], exits, finished=False)
    assert found == exits[1]


def test_the_log_shown_is_that_of_the_rank_that_failed(tmp_path: Path) -> None:
    """Rank 1 left an error: its last 20 lines, not rank 0's; without logs, torchrun's own."""
    running = Sleeper(tmp_path)
    running.agent_log.write_text("no module named dcpbench\n")
    assert running.log_tail() == "agent.log:\nno module named dcpbench"
    (running.logs / "rank-0.log").write_text("fine\n")
    (running.logs / "rank-1.log").write_text("".join(f"line {n}\n" for n in range(30)))
    assert running.log_tail().startswith("rank-0.log:")
    (tmp_path / "error-1.json").write_bytes(msgspec.json.encode(failure(1, "ValueError", "x")))
    assert running.log_tail().splitlines() == ["rank-1.log:", *(f"line {n}" for n in range(10, 30))]


def test_a_new_job_forgets_process_ids_and_errors_of_the_last_one(tmp_path: Path) -> None:
    """A process id left behind may belong to somebody else by now. Files of other nodes' ranks stay."""
    running = Sleeper(tmp_path)
    for name in ("rank-0.pid", "error-1.json", "stacks-0.txt", "rank-2.pid"):
        (tmp_path / name).write_text("1")
    running.remove_files()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", "rank-2.pid"]


def test_a_job_that_ended_leaves_no_file_of_stacks_that_is_empty(tmp_path: Path) -> None:
    """Only a rank that was asked writes its stacks."""
    running = Sleeper(tmp_path)
    running._agent = SimpleNamespace(poll=lambda: 0, wait=lambda _: 0)  # type: ignore[assignment]
    for rank, text in ((0, ""), (1, "Thread 1\n")):
        (tmp_path / f"stacks-{rank}.txt").write_text(text)
    running.kill()
    assert [p.name for p in tmp_path.glob("stacks-*")] == ["stacks-1.txt"]


def test_torchrun_knows_of_one_machine_and_meets_in_a_file(tmp_path: Path) -> None:
    """A TCP rendezvous would listen on all interfaces. Node 1 of two has ranks 2 and 3 of 4."""
    command = torchrun._make_command(job(tmp_path), "dcpbench.worker", range(2, 4))
    pairs = dict(itertools.pairwise(command))
    assert pairs["--nnodes"] == "1"
    assert pairs["--nproc-per-node"] == "2"
    assert pairs["--rdzv-conf"] == "store_type=file"
    assert pairs["--rdzv-endpoint"] == str(tmp_path / "logs" / "tp2-0" / "rendezvous")
    assert pairs["--rdzv-id"] == "tp2-0"
    assert command[-2:] == ["2", "2"], "the first rank here, and how many there are on all: --tp 2"


def test_ranks_of_one_machine_listen_on_loopback_where_nobody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of several machines choose an interface; the secret of these is not for ranks."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv(SECRET, "s")
    alone = torchrun._make_environment(job(tmp_path), Machines())
    assert (alone["GLOO_SOCKET_IFNAME"], alone["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")
    assert SECRET not in alone
    assert "GLOO_SOCKET_IFNAME" not in torchrun._make_environment(job(tmp_path), Machines(nnodes=2))


def test_cpu_ranks_get_one_thread_and_tritons_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 ranks with all cores each would measure the scheduler; a number that the user set stays."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert torchrun._make_environment(job(tmp_path), Machines())["OMP_NUM_THREADS"] == "1"
    assert torchrun._make_environment(job(tmp_path), Machines())["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in torchrun._make_environment(job(tmp_path, "cuda"), Machines())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert torchrun._make_environment(job(tmp_path), Machines())["OMP_NUM_THREADS"] == "3"


def test_the_probe_of_a_worker_that_cannot_start_says_what_it_wrote() -> None:
    """A broken torch installation is reported, not a JSON error."""
    with pytest.raises(WorkerError, match=r"(?s)could not describe this machine.*No module named"):
        launcher.run_probe("dcpbench.no_such_worker")


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":29500", "host:http", "host:0", "host:70000"])
def test_an_endpoint_that_is_not_host_and_port_is_a_usage_error(endpoint: str) -> None:
    """The message shows a valid one."""
    with pytest.raises(UsageError, match=r"10\.0\.0\.1:29500"):
        nodes.split_endpoint(endpoint)


def test_an_endpoint_may_be_an_ipv6_address() -> None:
    """Brackets belong to the notation, not to the address."""
    assert nodes.split_endpoint("[::1]:29500") == ("::1", 29500)


def test_lines_between_nodes_survive_being_cut_and_joined() -> None:
    """TCP keeps no boundaries: half a line waits, two lines come one by one, a closed peer is noticed."""
    ours, theirs = socket.socketpair()
    line = nodes.Line(ours)
    theirs.sendall(b"fir")
    assert line.receive(0.01) is None
    theirs.sendall(b"st\nsecond\n")
    assert line.receive(1) == b"first"
    assert line.receive(0) == b"second"
    assert not line.closed
    theirs.close()
    assert line.receive(1) is None
    assert line.closed
    line.close()


def free_port() -> int:
    """A port of the loopback interface that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machines of a sweep share."""
    monkeypatch.setenv(SECRET, "of this sweep")


@pytest.mark.usefixtures("secret")
def test_node_0_hands_jobs_to_the_others_and_hears_how_they_ended(tmp_path: Path) -> None:
    """Job, `failed`, `stop`, Ended, and the end of the sweep, over a real socket."""
    port = free_port()
    got: list[bytes | None] = []

    def other() -> None:
        line = nodes.join_leader(f"127.0.0.1:{port}", 10)
        got.append(line.receive(10))
        line.send(nodes.FAILED)
        got.append(line.receive(10))
        line.send(msgspec.json.encode(nodes.Ended(node=1, code=1, failures=[failure(3, "ValueError", "x")])))
        got.append(line.receive(10))
        line.close()

    thread = threading.Thread(target=other)
    thread.start()
    with nodes.Leader(f"127.0.0.1:{port}", 2, 10) as leader:
        leader.start(job(tmp_path))
        while not leader.has_failure():
            pass
        (ended,) = leader.stop()
    thread.join(10)
    assert [f.rank for f in ended.failures] == [3]
    assert msgspec.json.decode(got[0] or b"", type=Job) == job(tmp_path)
    assert got[1:] == [nodes.STOP, None]


@pytest.mark.usefixtures("secret")
def test_a_node_that_never_comes_and_a_node_0_that_never_answers_are_named() -> None:
    """Both sides give up with the command to start and the port to check."""
    port = free_port()
    with pytest.raises(WorkerError, match="0 of 1 other nodes"):
        nodes.Leader(f"127.0.0.1:{port}", 2, 0.1)
    with pytest.raises(WorkerError, match="no answer from node 0"):
        nodes.join_leader(f"127.0.0.1:{port}", 0.1)


def test_without_a_secret_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides say what to type."""
    monkeypatch.delenv(SECRET, raising=False)
    for start in (lambda: nodes.Leader("127.0.0.1:1", 2, 1), lambda: nodes.join_leader("127.0.0.1:1", 1)):
        with pytest.raises(UsageError, match=rf"export {SECRET}=\$\(openssl rand -hex 16\)"):
            start()


@pytest.mark.usefixtures("secret")
class TestStrangers:
    """Whoever reaches the port of node 0."""

    def test_what_has_not_the_secret_is_sent_away_and_the_others_are_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bytes of nobody, a Hello without proof, one of another sweep; then node 1 comes."""
        monkeypatch.setattr(nodes, "HELLO_WAIT_S", 2.0)
        port = free_port()
        told: list[str] = []

        def come() -> None:
            for data in (b"GET / HTTP/1.1\r\n\r\n", b'{"node":1,"nonce":"00"}\n', b"\xff\n", b"9" * 5000):
                stranger = _connect(port)
                stranger.sendall(data)
                assert nodes.Line(stranger).receive(10), "node 0 says hello"
                while stranger.recv(1 << 16):
                    pass
                stranger.close()
            for secret in ("of another sweep", os.environ[SECRET]):
                monkeypatch.setenv(SECRET, secret)
                try:
                    nodes.join_leader(f"127.0.0.1:{port}", 10, node=1).close()
                except WorkerError as e:
                    told.append(str(e))

        thread = threading.Thread(target=come)
        thread.start()
        with nodes.Leader(f"127.0.0.1:{port}", 2, 60) as leader:
            assert len(leader._lines) == 1
        thread.join(10)
        (refusal,) = told
        assert f"{SECRET} must be that of node 0" in refusal

    def test_a_node_does_not_work_for_a_node_0_without_the_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would start whatever job it is told to."""
        monkeypatch.setattr(nodes, "HELLO_WAIT_S", 2.0)
        with socket.create_server(("127.0.0.1", 0)) as server:

            def lead() -> None:
                connection = server.accept()[0]
                hello = nodes.Hello(node=0, nonce="00")
                connection.sendall(msgspec.json.encode(hello) + b"\n" + msgspec.json.encode(hello) + b"\n")
                while connection.recv(1 << 16):
                    pass
                connection.close()

            thread = threading.Thread(target=lead)
            thread.start()
            with pytest.raises(WorkerError, match="did not take this node for one of its sweep"):
                nodes.join_leader(f"127.0.0.1:{server.getsockname()[1]}", 10)
            thread.join(10)

    def test_a_line_that_is_forged_repeated_or_too_long_closes_the_connection(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first line is taken; sent once more, its number is wrong."""
        monkeypatch.setattr(nodes, "MAX_LINE_BYTES", 100)
        repeated = nodes._compute_code(b"key", b"b", b"0", b"job") + b"job\n"
        for bad in (b"stop\n", b"0" * 64 + b"stop\n", b"9" * 1000, repeated):
            ours, theirs = socket.socketpair()
            line, peer = nodes.Line(ours), nodes.Line(theirs)
            line.set_key(b"key", b"a", b"b")
            peer.set_key(b"key", b"b", b"a")
            peer.send(b"job")
            assert line.receive(10) == b"job"
            theirs.sendall(bad)
            while not line.closed:
                assert line.receive(0.01) is None
            line.close()
            peer.close()

    def test_node_0_listens_at_its_endpoint_alone(self) -> None:
        with open_listener("127.0.0.1", 0) as listening:
            assert listening.getsockname()[0] == "127.0.0.1"
        port = free_port()
        with pytest.raises(WorkerError, match="0 of 1 other nodes"):
            nodes.Leader(f"127.0.0.2:{port}", 2, 0.1)
        with pytest.raises(UsageError, match=r"cannot listen there .*; give an address that it has"):
            nodes.Leader(f"192.0.2.1:{port}", 2, 0.1)


def _connect(port: int) -> socket.socket:
    """A connection to node 0, which may not be up yet."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=30)
        except ConnectionRefusedError:
            continue


def test_of_what_a_worker_wrote_the_last_lines_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=3, stdout="not JSON", stderr="\n".join(f"line {n}" for n in range(100)))
    monkeypatch.setattr(launcher.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(WorkerError, match=r"\(exit code 3\)") as error:
        launcher.run_probe("worker")
    wrote = str(error.value).partition("It wrote:\n")[2].splitlines()
    assert wrote == [f"line {n}" for n in range(100 - launcher.LOG_LINES, 100)]


class Agent:
    """Torchrun as a process that ends, or sees that its ranks are gone, once it was asked so often."""

    pid = 4_194_400  # beyond all ids

    def __init__(self, *_: object, after: int = 1, **__: object) -> None:
        self.after, self.waits = after, list[float | None]()

    def poll(self) -> int | None:
        return 0 if self.after <= 0 else None

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        self.waits.append(timeout)
        self.after -= 1
        if self.after > 0:
            raise subprocess.TimeoutExpired("torchrun", timeout or 0)
        return 0


@pytest.mark.parametrize(("after", "waits"), [(1, [5.0, 2.0]), (2, [5.0, 2.0]), (3, [5.0, 2.0, None])])
def test_torchrun_has_five_seconds_to_end_its_ranks_and_two_to_see_that_they_are_gone(
    tmp_path: Path, after: int, waits: list[float | None]
) -> None:
    """Then it is killed, with all that is in its group."""
    running = Sleeper(tmp_path)
    agent = Agent(after=after)
    running._agent = agent  # type: ignore[assignment]
    (tmp_path / "rank-0.pid").write_text("1")
    running.kill()
    assert agent.waits == waits
    assert not (tmp_path / "rank-0.pid").exists()


def test_a_job_of_several_machines_has_the_ranks_of_this_one_and_tells_its_lock_who_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 of two has ranks 2 and 3 of 4; what an earlier job of these ranks left is gone."""
    monkeypatch.setattr(torchrun.subprocess, "Popen", Agent)
    (tmp_path / "error-2.json").write_text("old")
    read, write = os.pipe()
    four = job(tmp_path, points=[point(tp=4)])
    running = Running(four, Machines(nnodes=2, node_rank=1), "worker", write)
    assert running.ranks == range(2, 4)
    assert os.read(read, 100) == b"4194400\n"
    assert not (tmp_path / "error-2.json").exists()
    assert msgspec.json.decode(four.get_path().read_bytes(), type=Job) == four
    os.close(read)
    os.close(write)


def test_starting_over_removes_jobs_whose_logs_were_never_written(tmp_path: Path) -> None:
    """A job's file is there before its first process."""
    one = job(tmp_path)
    one.get_path().write_bytes(msgspec.json.encode(one))
    (tmp_path / "hangs" / "tp2-0-0").mkdir(parents=True)
    (tmp_path / "hangs" / "tp4-0-0").mkdir(parents=True)
    RecordFile(tmp_path).append(Record(point=point(), outcome="failed"))
    folders.prepare_sweep(tmp_path, resume=False, force=True)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["hangs", "hangs/tp4-0-0"]


@pytest.mark.parametrize(("ends_at", "taken"), [(0.1, True), (4.9, True), (5.1, False)])
def test_workers_of_a_command_that_is_gone_have_five_seconds_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: float, taken: bool
) -> None:
    """The lock is theirs meanwhile; it is looked for every twentieth of a second."""
    now = [0.0]

    def flock(*_: object) -> None:
        if now[0] < ends_at:
            raise BlockingIOError

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    slept = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(folders, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept))
    monkeypatch.setattr(folders, "find_alive", lambda _: ("workers", None))
    if taken:
        with folders.lock_folder(tmp_path):
            assert ends_at <= now[0] < ends_at + 0.1
    else:
        with pytest.raises(OutputError, match="a run is still writing here"), folders.lock_folder(tmp_path):
            pass


def test_what_is_taken_down_of_a_job_that_hangs(tmp_path: Path) -> None:
    """Its rank 0 is this process, with a log, beats and stacks; rank 1 has ended. A second time is another folder."""
    logs = tmp_path / "logs" / "tp2-0"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("".join(f"line {n}\n" for n in range(30)))
    (logs / "beats-0.bin").write_bytes(b"beats")
    ranks = SimpleNamespace(
        folder=tmp_path,
        logs=logs,
        ranks=range(2),
        find_pids=lambda: {0: os.getpid()},
        collect_stacks=lambda: {"0": "Thread 1\n", "1": ""},
        read_exits=lambda: [Exit(rank=1, code=3, asked=False, at=1.0)],
    )
    folder, stacks = hang_capture.capture_hang(ranks)  # type: ignore[arg-type]
    assert (folder, stacks) == (tmp_path / "hangs" / "tp2-0-0", {"0": "Thread 1\n", "1": ""})
    assert (folder / "log-0.txt").read_text() == "".join(f"line {n}\n" for n in range(10, 30))
    assert (folder / "beats-0.bin").read_bytes() == b"beats"
    here, gone = msgspec.json.decode((folder / "ranks.json").read_bytes(), type=list[ProcessState])
    assert (here.rank, here.pid, here.state, here.ended) == (0, os.getpid(), "R", "")
    assert gone == ProcessState(rank=1, ended="ended with exit code 3")
    assert not (folder / "stacks-1.txt").exists()
    assert hang_capture.explain_hang(folder, stacks) is not None
    assert (folder / "stacks-0.txt").read_text() == "Thread 1\n"
    assert hang_capture.capture_hang(ranks)[0].name == "tp2-0-1"  # type: ignore[arg-type]


def test_a_folder_that_nobody_named_is_new_and_says_when_and_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders.time, "strftime", lambda _: "2026-11-25-120000")
    first = folders.choose_folder("deepseek-ai/DeepSeek V3._", [4, 8])
    assert str(first) == "runs/2026-11-25-120000-deepseek-ai_DeepSeek_V3-tp4-8"
    first.mkdir(parents=True)
    second = folders.choose_folder("deepseek-ai/DeepSeek V3._", [4, 8])
    assert second.name == f"{first.name}-2"
    second.mkdir()
    assert folders.choose_folder("deepseek-ai/DeepSeek V3._", [4, 8]).name == f"{first.name}-3"


@pytest.mark.parametrize(
    ("number", "there", "said"),
    [
        (errno.ENOSPC, True, "no space is left on its disk"),
        (errno.EDQUOT, True, "the disk quota of this user is used up"),
        (errno.EROFS, True, "its file system is read-only"),
        (errno.EIO, True, "its disk reported an I/O error"),
        (errno.ENOENT, False, "was removed or moved away while the run was writing there"),
        (errno.ECONNRESET, True, None),
    ],
)
def test_what_keeps_a_run_from_writing_is_named_where_it_is_known(
    tmp_path: Path, number: int, there: bool, said: str | None
) -> None:
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
    with (
        pytest.raises(DcpbenchError if said else OSError, match=said or "broken") as raised,
        folders.convert_write_errors(folder),
    ):
        raise OSError(number, "broken")
    if said and there:
        assert isinstance(raised.value, DiskError)
        assert (raised.value.exit_code, raised.value.number) == (3, number)
        assert f"-o {folder} --resume" in str(raised.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EISDIR])
def test_a_file_of_the_run_that_may_not_be_written_is_named(tmp_path: Path, number: int) -> None:
    """For another file, only its own command knows what to do."""
    said = r"records\.jsonl cannot be written \(no\)\. Let this user write there"
    with pytest.raises(OutputError, match=said), folders.convert_write_errors(tmp_path):
        raise OSError(number, "no", str(tmp_path / "records.jsonl"))
    with pytest.raises(OSError, match="elsewhere"), folders.convert_write_errors(tmp_path):
        raise OSError(number, "no", "/elsewhere")


@pytest.mark.parametrize("change", ["none", "removed", "replaced"])
def test_a_folder_must_stay_the_one_that_was_locked(tmp_path: Path, change: str) -> None:
    with folders.lock_folder(tmp_path / "run") as lock:
        if change != "none":
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        if change == "replaced":
            folders.make_folder(tmp_path / "run")
            (tmp_path / "run" / ".lock").touch()
        if change == "none":
            folders.check_not_removed(tmp_path / "run", lock)
        else:
            with pytest.raises(OutputError, match="was removed or moved away"):
                folders.check_not_removed(tmp_path / "run", lock)


def test_what_a_rank_says_when_it_is_asked_is_kept_and_its_own_stacks_stand_in_for_those_no_signal_brought(
    tmp_path: Path,
) -> None:
    """It answers as its pipe is opened; of a rank nobody reads from nothing is waited for."""
    logs = tmp_path / "logs" / "tp2-0"
    logs.mkdir(parents=True)
    for rank in range(2):
        os.mkfifo(logs / f"flight-{rank}.ask")
    listens = threading.Event()

    def answer() -> None:
        end = os.open(logs / "flight-0.ask", os.O_RDONLY | os.O_NONBLOCK)
        listens.set()
        while not list((tmp_path / "hangs").glob("*/ranks.json")):  # the asking is over
            pass
        for name in ("device-0.json", "flight-0.json", "own-stacks-0.txt", "answered-0.json"):
            (logs / name).write_text(name)
        os.close(end)

    thread = threading.Thread(target=answer)
    thread.start()
    listens.wait()
    ranks = SimpleNamespace(
        folder=tmp_path,
        logs=logs,
        ranks=range(2),
        find_pids=lambda: {0: os.getpid(), 1: os.getpid()},
        collect_stacks=lambda: {"0": "", "1": "by signal"},
        read_exits=list,
    )
    folder, stacks = hang_capture.capture_hang(ranks)  # type: ignore[arg-type]
    thread.join()
    assert stacks == {"0": "own-stacks-0.txt", "1": "by signal"}
    kept = {path.name: path.read_text() for path in folder.iterdir() if path.name != "ranks.json"}
    assert kept == {
        "device-0.json": "device-0.json",
        "flight-0.json": "flight-0.json",
        "stacks-0.txt": "own-stacks-0.txt",
        "stacks-1.txt": "by signal",
    }
    assert sorted(path.name for path in logs.iterdir()) == ["flight-0.ask", "flight-1.ask"]


@pytest.mark.parametrize(("odd", "kind"), [(True, "shape"), (False, None)])
def test_ranks_of_a_job_that_broke_are_told_apart_by_their_beats(tmp_path: Path, odd: bool, kind: str | None) -> None:
    """Without a difference no folder is made; nor is one where there are no beats."""
    logs = tmp_path / "logs" / "tp2-0"
    logs.mkdir(parents=True)
    ranks = SimpleNamespace(folder=tmp_path, logs=logs, ranks=range(2))
    assert hang_capture.find_difference(ranks) is None  # type: ignore[arg-type]
    beating = test_hangs.Job(logs, 2)
    beating.steps()
    for rank in range(2):
        x = test_hangs.HALF if odd and rank else test_hangs.X
        beating.run_collective(rank, "all_reduce", "attn_reduce", 0, x=x, hangs=True)
    (logs / "rank-1.log").write_text("last words\n")
    found = hang_capture.find_difference(ranks)  # type: ignore[arg-type]
    if kind is None:
        assert found is None
        assert not (tmp_path / "hangs").exists()
    else:
        assert found is not None
        assert (found[0], found[1].kind, found[1].ranks) == (tmp_path / "hangs" / "tp2-0-0", kind, [1])
        assert (found[0] / "log-1.txt").read_text() == "last words\n"
        assert json.loads((found[0] / "finding.json").read_bytes())["kind"] == kind


def test_tools_that_are_there_are_started_and_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hang_capture._start_tool(["no-such-tool"], tmp_path / "none.txt") is None
    assert not (tmp_path / "none.txt").exists()
    monkeypatch.setattr(hang_capture.subprocess_guard, "make_tied_command", lambda command: command)
    said = hang_capture._start_tool(["echo", "hello"], tmp_path / "said.txt")
    long = hang_capture._start_tool(["sleep", "60"], tmp_path / "long.txt")
    assert said is not None
    assert long is not None
    said.wait()
    hang_capture._wait_for_tools([said, None, long], 0.0)
    assert (tmp_path / "said.txt").read_text() == "hello\n"
    assert (said.returncode, long.returncode) == (0, -9)


@pytest.mark.parametrize(("pid", "seconds"), [(None, 1.0), (7, 2.0)])
def test_how_busy_a_rank_was_is_its_ticks_over_the_time(
    monkeypatch: pytest.MonkeyPatch, pid: int | None, seconds: float
) -> None:
    """150 ticks of 10 ms in 2 s are 0.75 of a core; of one that is gone nothing is known."""
    ranks = SimpleNamespace(read_exits=list)
    monkeypatch.setattr(hang_capture, "_read_cpu_ticks", lambda _: 250)
    monkeypatch.setattr(hang_capture.subprocess_guard, "read_start_ticks", lambda _: ("S", "1"))
    monkeypatch.setattr(hang_capture.os, "sysconf", lambda _: 100)
    seen = hang_capture._describe_rank(ranks, 3, pid, 100, seconds)  # type: ignore[arg-type]
    if pid is None:
        assert seen == ProcessState(rank=3, ended="its process was gone")
    else:
        assert seen == ProcessState(rank=3, pid=7, state="S", cpu=0.75)
