"""The launcher's decisions and files, without starting a job."""

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
from dcpbench.launch.kernel_build import KernelBuild
from dcpbench.launch.ranks import Ranks
from dcpbench.launch.torchrun import RendezvousOptions, Running
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records.file import RecordFile
from dcpbench.records.record import Record
from dcpbench.records.runs import read_last_records
from tests.unit import test_hangs

if TYPE_CHECKING:
    from pathlib import Path


def make_point(tp: int = 2, context: int = 100) -> Point:
    """Return a point with this size and context."""
    return Point(model="tiny", tp=tp, concurrency=2, context=context, backend="reference", dtype="fp32")


def make_failure(rank: int, kind: str, message: str) -> Failure:
    """Return the failure that a rank has written."""
    return Failure(rank=rank, key="", kind=kind, message=message, traceback="")


def make_job(folder: Path, device: str = "cpu", points: list[Point] | None = None) -> Job:
    """Return a job in `folder`."""
    return Job(
        kind="sweep",
        tag="tp2-0",
        folder=str(folder),
        device=device,
        points=points or [make_point()],
        settings=Settings(),
    )


class Sleeper(Running):
    """A Running with files only: its agent never started."""

    def __init__(self, folder: Path) -> None:
        self.job = make_job(folder)
        Ranks.__init__(self, folder, self.job.get_log_folder(), self.job.get_progress_path(), range(2))
        self.logs.mkdir(parents=True)
        self.agent_log = self.logs / "agent.log"
        self.other_logs = [self.agent_log]
        self._build = KernelBuild(self.job)


@pytest.mark.parametrize(
    "collective",
    [
        ("DistBackendError", "NCCL error in: unhandled system error"),
        ("RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
        ("ConnectionResetError", "Connection reset by peer"),
        ("DistBackendError", "unhandled cuda error"),
    ],
    ids=["nccl", "gloo", "timeout", "reset", "by its kind"],
)
def test_rank_that_broke_the_collective_is_the_cause(collective: tuple[str, str]) -> None:
    """Rank 0 reports first, but only that its peer is gone; rank 1 has the error."""
    cause = make_failure(1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB")
    assert launcher.find_cause([make_failure(0, *collective), cause]) is cause


def test_first_of_several_collective_errors_is_the_cause() -> None:
    """Without any error there is no cause."""
    first = make_failure(0, "RuntimeError", "NCCL error")
    assert launcher.find_cause([first, make_failure(1, "RuntimeError", "NCCL error")]) is first
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
def test_points_share_the_cause_of_a_failed_build_or_model(
    error: str, stage: str, changed: dict[str, object], shares: bool
) -> None:
    """One of dcpbench's errors while an engine is built applies to points of that engine, an error in the model to all
    points with its weights.
    """
    failed = Record(point=make_point(), outcome="failed", detail={"error": error, "stage": stage})
    assert launcher._has_same_cause(msgspec.structs.replace(make_point(), **changed), failed) is shares


def test_last_record_of_a_point_counts(tmp_path: Path) -> None:
    """A point that failed and was then measured with --resume is measured. A folder without records has none."""
    assert read_last_records(tmp_path) == {}
    for outcome in ("failed", "ok"):
        RecordFile(tmp_path).append(Record(point=make_point(), outcome=outcome))
    assert {key: r.outcome for key, r in read_last_records(tmp_path).items()} == {make_point().get_key(): "ok"}


def test_incomplete_progress_line_is_read_after_its_end(tmp_path: Path) -> None:
    """The first half of a line is no event and is not lost; a damaged line is skipped."""
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
        ([make_failure(0, "RuntimeError", "NCCL error")], [(0, 1, 1.0), (1, -15, 2.0)], False, 1),
        ([make_failure(0, "ValueError", "x")], [(0, 1, 1.0), (1, -6, 2.0)], False, None),
        ([make_failure(0, "ValueError", "x")], [(0, 1, 1.0), (1, -6, 1.0)], False, None),
        ([make_failure(0, "ValueError", "lost a peer")], [(0, 1, 2.0), (1, -11, 1.0)], False, 1),
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
def test_first_rank_that_ended_without_a_request_is_the_cause(
    failures: list[Failure], exits: list[tuple[int, int, float]], finished: bool, blamed: int | None
) -> None:
    """Exits are (rank, exit code, time). An error counts if its rank ended first, and a rank may end with 0 after all
    points are done.
    """
    records = [Exit(rank=rank, code=code, terminated=False, at=at) for rank, code, at in exits]
    found = launcher.find_first_exit(failures, records, finished=finished)
    assert (found and found.rank) == blamed


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (7, "ended with exit code 7"),
        (0, "ended with exit code 0"),
        (-9, "was ended by signal 9 (SIGKILL)"),
        (-40, "was ended by signal 40"),
    ],
)
def test_exit_code_is_formatted_with_the_name_of_its_signal(code: int, text: str) -> None:
    """Real-time signals between the first and the last have no name."""
    assert format_exit_code(code) == text


def test_rank_ended_by_torchrun_is_not_the_cause() -> None:
    """Signal 15 to rank 0 came from torchrun, as rank 1 had ended."""
    exits = [Exit(rank=0, code=-15, terminated=True, at=1.0), Exit(rank=1, code=7, terminated=False, at=2.0)]
    found = launcher.find_first_exit([], exits, finished=False)
    assert found == exits[1]


def test_log_tail_is_that_of_the_failed_rank(tmp_path: Path) -> None:
    """The last 20 lines of rank 1 are shown, as it has an error; without logs of ranks, torchrun's own log is."""
    running = Sleeper(tmp_path)
    running.agent_log.write_text("no module named dcpbench\n")
    assert running.log_tail() == "agent.log:\nno module named dcpbench"
    (running.logs / "rank-0.log").write_text("fine\n")
    (running.logs / "rank-1.log").write_text("".join(f"line {n}\n" for n in range(30)))
    assert running.log_tail().startswith("rank-0.log:")
    (tmp_path / "error-1.json").write_bytes(msgspec.json.encode(make_failure(1, "ValueError", "x")))
    assert running.log_tail().splitlines() == ["rank-1.log:", *(f"line {n}" for n in range(10, 30))]


def test_new_job_removes_process_ids_and_errors_of_its_ranks(tmp_path: Path) -> None:
    """An old process id may belong to another process by now. Files of other nodes' ranks are kept."""
    running = Sleeper(tmp_path)
    for name in ("rank-0.pid", "error-1.json", "stacks-0.txt", "rank-2.pid"):
        (tmp_path / name).write_text("1")
    running.remove_files()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", "rank-2.pid"]


def test_empty_stack_files_are_removed_after_a_job(tmp_path: Path) -> None:
    """A rank writes its stacks only on request."""
    running = Sleeper(tmp_path)
    running._agent = SimpleNamespace(poll=lambda: 0, wait=lambda _: 0)  # type: ignore[assignment]
    for rank, text in ((0, ""), (1, "Thread 1\n")):
        (tmp_path / f"stacks-{rank}.txt").write_text(text)
    running.kill()
    assert [p.name for p in tmp_path.glob("stacks-*")] == ["stacks-1.txt"]


def test_torchrun_command_has_one_node_and_a_file_rendezvous(tmp_path: Path) -> None:
    """A TCP rendezvous would listen on all interfaces. Node 1 of two has ranks 2 and 3 of 4."""
    command = torchrun._make_command(make_job(tmp_path), "dcpbench.worker", range(2, 4))
    pairs = dict(itertools.pairwise(command))
    assert pairs["--nnodes"] == "1"
    assert pairs["--nproc-per-node"] == "2"
    assert pairs["--rdzv-conf"] == "store_type=file"
    assert pairs["--rdzv-endpoint"] == str(tmp_path / "logs" / "tp2-0" / "rendezvous")
    assert pairs["--rdzv-id"] == "tp2-0"
    assert command[-2:] == ["2", "2"], "first rank of this node, and the world size --tp 2"


def test_ranks_of_one_machine_listen_on_loopback_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of several machines choose an interface; ranks do not get the secret."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv(SECRET, "s")
    alone = torchrun._make_environment(make_job(tmp_path), RendezvousOptions())
    assert (alone["GLOO_SOCKET_IFNAME"], alone["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")
    assert SECRET not in alone
    assert "GLOO_SOCKET_IFNAME" not in torchrun._make_environment(make_job(tmp_path), RendezvousOptions(nnodes=2))


def test_cpu_ranks_get_one_thread_and_the_triton_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 ranks with all cores each would measure the scheduler of the system; a number that the user has set is kept."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert torchrun._make_environment(make_job(tmp_path), RendezvousOptions())["OMP_NUM_THREADS"] == "1"
    assert torchrun._make_environment(make_job(tmp_path), RendezvousOptions())["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in torchrun._make_environment(make_job(tmp_path, "cuda"), RendezvousOptions())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert torchrun._make_environment(make_job(tmp_path), RendezvousOptions())["OMP_NUM_THREADS"] == "3"


def test_probe_error_contains_the_output_of_the_worker() -> None:
    """A broken torch installation is reported instead of a JSON error."""
    with pytest.raises(WorkerError, match=r"(?s)could not describe this machine.*No module named"):
        launcher.run_probe("dcpbench.no_such_worker")


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":29500", "host:http", "host:0", "host:70000"])
def test_endpoint_without_host_and_port_raises_usage_error(endpoint: str) -> None:
    """The message has a valid example."""
    with pytest.raises(UsageError, match=r"10\.0\.0\.1:29500"):
        nodes.split_endpoint(endpoint)


def test_endpoint_may_be_an_ipv6_address() -> None:
    """Brackets belong to the notation, not to the address."""
    assert nodes.split_endpoint("[::1]:29500") == ("::1", 29500)


def test_lines_between_nodes_are_reassembled() -> None:
    """TCP keeps no boundaries: half a line waits, two lines are returned one by one, and a closed peer is noticed."""
    local, remote = socket.socketpair()
    connection = nodes.NodeConnection(local)
    remote.sendall(b"fir")
    assert connection.receive(0.01) is None
    remote.sendall(b"st\nsecond\n")
    assert connection.receive(1) == b"first"
    assert connection.receive(0) == b"second"
    assert not connection.closed
    remote.close()
    assert connection.receive(1) is None
    assert connection.closed
    connection.close()


def find_free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the secret that the machines of a sweep share."""
    monkeypatch.setenv(SECRET, "of this sweep")


@pytest.mark.usefixtures("secret")
def test_node_0_sends_jobs_and_receives_their_ends(tmp_path: Path) -> None:
    """The messages over a real socket are a job, `failed`, `stop`, Ended, and the end of the sweep."""
    port = find_free_port()
    received: list[bytes | None] = []

    def run_other_node() -> None:
        connection = nodes.join_leader(f"127.0.0.1:{port}", 10)
        received.append(connection.receive(10))
        connection.send(nodes.FAILED)
        received.append(connection.receive(10))
        connection.send(msgspec.json.encode(nodes.Ended(node=1, code=1, failures=[make_failure(3, "ValueError", "x")])))
        received.append(connection.receive(10))
        connection.close()

    thread = threading.Thread(target=run_other_node)
    thread.start()
    with nodes.Leader(f"127.0.0.1:{port}", 2, 10) as leader:
        leader.start(make_job(tmp_path))
        while not leader.has_failure():
            pass
        (ended,) = leader.stop()
    thread.join(10)
    assert [f.rank for f in ended.failures] == [3]
    assert msgspec.json.decode(received[0] or b"", type=Job) == make_job(tmp_path)
    assert received[1:] == [nodes.STOP, None]


@pytest.mark.usefixtures("secret")
def test_missing_nodes_raise_worker_error_on_both_sides() -> None:
    """The messages have the command to start and the port to check."""
    port = find_free_port()
    with pytest.raises(WorkerError, match="0 of 1 other nodes"):
        nodes.Leader(f"127.0.0.1:{port}", 2, 0.1)
    with pytest.raises(WorkerError, match="no answer from node 0"):
        nodes.join_leader(f"127.0.0.1:{port}", 0.1)


def test_several_machines_without_a_secret_raise_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message on both sides has the command to type."""
    monkeypatch.delenv(SECRET, raising=False)
    for start in (lambda: nodes.Leader("127.0.0.1:1", 2, 1), lambda: nodes.join_leader("127.0.0.1:1", 1)):
        with pytest.raises(UsageError, match=rf"export {SECRET}=\$\(openssl rand -hex 16\)"):
            start()


@pytest.mark.usefixtures("secret")
class TestStrangers:
    """Connections to the port of node 0 from other programs."""

    def test_connections_without_the_secret_are_refused_while_node_1_is_awaited(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An HTTP request, a Hello without proof and a Hello of another sweep are refused; then node 1 connects."""
        monkeypatch.setattr(nodes, "HELLO_WAIT_S", 2.0)
        port = find_free_port()
        refusals: list[str] = []

        def connect_strangers() -> None:
            for data in (b"GET / HTTP/1.1\r\n\r\n", b'{"node":1,"nonce":"00"}\n', b"\xff\n", b"9" * 5000):
                stranger = _connect(port)
                stranger.sendall(data)
                assert nodes.NodeConnection(stranger).receive(10), "node 0 says hello"
                while stranger.recv(1 << 16):
                    pass
                stranger.close()
            for secret in ("of another sweep", os.environ[SECRET]):
                monkeypatch.setenv(SECRET, secret)
                try:
                    nodes.join_leader(f"127.0.0.1:{port}", 10, node=1).close()
                except WorkerError as e:
                    refusals.append(str(e))

        thread = threading.Thread(target=connect_strangers)
        thread.start()
        with nodes.Leader(f"127.0.0.1:{port}", 2, 60) as leader:
            assert len(leader._lines) == 1
        thread.join(10)
        (refusal,) = refusals
        assert f"{SECRET} must be that of node 0" in refusal

    def test_node_refuses_a_node_0_without_the_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such a node 0 could make it start any job."""
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

    def test_forged_repeated_or_long_line_closes_the_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first line is accepted; sent again, its number is wrong."""
        monkeypatch.setattr(nodes, "MAX_LINE_BYTES", 100)
        repeated = nodes._compute_code(b"key", b"b", b"0", b"job") + b"job\n"
        for bad in (b"stop\n", b"0" * 64 + b"stop\n", b"9" * 1000, repeated):
            local, remote = socket.socketpair()
            connection, peer = nodes.NodeConnection(local), nodes.NodeConnection(remote)
            connection.set_key(b"key", b"a", b"b")
            peer.set_key(b"key", b"b", b"a")
            peer.send(b"job")
            assert connection.receive(10) == b"job"
            remote.sendall(bad)
            while not connection.closed:
                assert connection.receive(0.01) is None
            connection.close()
            peer.close()

    def test_node_0_listens_only_at_its_endpoint(self) -> None:
        with open_listener("127.0.0.1", 0) as listening:
            assert listening.getsockname()[0] == "127.0.0.1"
        port = find_free_port()
        with pytest.raises(WorkerError, match="0 of 1 other nodes"):
            nodes.Leader(f"127.0.0.2:{port}", 2, 0.1)
        with pytest.raises(UsageError, match=r"cannot listen there .*; give an address that it has"):
            nodes.Leader(f"192.0.2.1:{port}", 2, 0.1)


def _connect(port: int) -> socket.socket:
    """Return a connection to node 0, after waiting until it listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=30)
        except ConnectionRefusedError:
            continue


def test_probe_error_has_the_last_lines_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=3, stdout="not JSON", stderr="\n".join(f"line {n}" for n in range(100)))
    monkeypatch.setattr(launcher.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(WorkerError, match=r"\(exit code 3\)") as error:
        launcher.run_probe("worker")
    lines = str(error.value).partition("It wrote:\n")[2].splitlines()
    assert lines == [f"line {n}" for n in range(100 - launcher.LOG_LINES, 100)]


class Agent:
    """A torchrun process that ends after this number of waits."""

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
def test_torchrun_is_killed_after_five_and_two_seconds(tmp_path: Path, after: int, waits: list[float | None]) -> None:
    """Torchrun has five seconds to end its ranks and two to notice that they are gone; then its process group is
    killed.
    """
    running = Sleeper(tmp_path)
    agent = Agent(after=after)
    running._agent = agent  # type: ignore[assignment]
    (tmp_path / "rank-0.pid").write_text("1")
    running.kill()
    assert agent.waits == waits
    assert not (tmp_path / "rank-0.pid").exists()


def test_job_of_several_machines_has_the_ranks_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 of two has ranks 2 and 3 of 4; it writes its process id to the lock, and removes files of an earlier job
    of these ranks.
    """
    monkeypatch.setattr(torchrun.subprocess, "Popen", Agent)
    (tmp_path / "error-2.json").write_text("old")
    read, write = os.pipe()
    four = make_job(tmp_path, points=[make_point(tp=4)])
    running = Running(four, RendezvousOptions(nnodes=2, node_rank=1), "worker", write)
    assert running.ranks == range(2, 4)
    assert os.read(read, 100) == b"4194400\n"
    assert not (tmp_path / "error-2.json").exists()
    assert msgspec.json.decode(four.get_path().read_bytes(), type=Job) == four
    os.close(read)
    os.close(write)


def test_force_removes_jobs_without_logs(tmp_path: Path) -> None:
    """The file of a job exists before its first process."""
    one = make_job(tmp_path)
    one.get_path().write_bytes(msgspec.json.encode(one))
    (tmp_path / "hangs" / "tp2-0-0").mkdir(parents=True)
    (tmp_path / "hangs" / "tp4-0-0").mkdir(parents=True)
    RecordFile(tmp_path).append(Record(point=make_point(), outcome="failed"))
    folders.prepare_sweep(tmp_path, resume=False, force=True)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["hangs", "hangs/tp4-0-0"]


@pytest.mark.parametrize(("ends_at", "taken"), [(0.1, True), (4.9, True), (5.1, False)])
def test_lock_waits_five_seconds_for_workers_of_an_ended_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: float, taken: bool
) -> None:
    """The workers hold the lock meanwhile; it is polled every twentieth of a second."""
    now = [0.0]

    def flock(*_: object) -> None:
        if now[0] < ends_at:
            raise BlockingIOError

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    monkeypatch.setattr(folders, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(folders, "find_alive", lambda _: ("workers", None))
    if taken:
        with folders.lock_folder(tmp_path):
            assert ends_at <= now[0] < ends_at + 0.1
    else:
        with pytest.raises(OutputError, match="a run is still writing here"), folders.lock_folder(tmp_path):
            pass


def test_capture_of_a_hang_has_logs_heartbeats_and_stacks(tmp_path: Path) -> None:
    """Rank 0 is this process, with a log, heartbeats and stacks; rank 1 has ended. A second capture has another folder."""
    logs = tmp_path / "logs" / "tp2-0"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("".join(f"line {n}\n" for n in range(30)))
    (logs / "heartbeats-0.bin").write_bytes(b"heartbeats")
    ranks = SimpleNamespace(
        folder=tmp_path,
        logs=logs,
        ranks=range(2),
        find_pids=lambda: {0: os.getpid()},
        collect_stacks=lambda: {"0": "Thread 1\n", "1": ""},
        read_exits=lambda: [Exit(rank=1, code=3, terminated=False, at=1.0)],
    )
    folder, stacks = hang_capture.capture_hang(ranks)  # type: ignore[arg-type]
    assert (folder, stacks) == (tmp_path / "hangs" / "tp2-0-0", {"0": "Thread 1\n", "1": ""})
    assert (folder / "log-0.txt").read_text() == "".join(f"line {n}\n" for n in range(10, 30))
    assert (folder / "heartbeats-0.bin").read_bytes() == b"heartbeats"
    here, gone = msgspec.json.decode((folder / "ranks.json").read_bytes(), type=list[ProcessState])
    assert (here.rank, here.pid, here.state, here.ended) == (0, os.getpid(), "R", "")
    assert gone == ProcessState(rank=1, ended="ended with exit code 3")
    assert not (folder / "stacks-1.txt").exists()
    assert hang_capture.explain_hang(folder, stacks) is not None
    assert (folder / "stacks-0.txt").read_text() == "Thread 1\n"
    assert hang_capture.capture_hang(ranks)[0].name == "tp2-0-1"  # type: ignore[arg-type]


def test_default_folder_is_new_and_named_after_time_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("number", "exists", "message"),
    [
        (errno.ENOSPC, True, "no space is left on its disk"),
        (errno.EDQUOT, True, "the disk quota of this user is used up"),
        (errno.EROFS, True, "its file system is read-only"),
        (errno.EIO, True, "its disk reported an I/O error"),
        (errno.ENOENT, False, "was removed or moved away while the run was writing there"),
        (errno.ECONNRESET, True, None),
    ],
)
def test_known_write_errors_are_named(tmp_path: Path, number: int, exists: bool, message: str | None) -> None:
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    with (
        pytest.raises(DcpbenchError if message else OSError, match=message or "broken") as raised,
        folders.convert_write_errors(folder),
    ):
        raise OSError(number, "broken")
    if message and exists:
        assert isinstance(raised.value, DiskError)
        assert (raised.value.exit_code, raised.value.number) == (3, number)
        assert f"-o {folder} --resume" in str(raised.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EISDIR])
def test_unwritable_file_of_the_run_is_named(tmp_path: Path, number: int) -> None:
    """An error of another file is not converted, as only its own command can explain it."""
    message = r"records\.jsonl cannot be written \(no\)\. Let this user write there"
    with pytest.raises(OutputError, match=message), folders.convert_write_errors(tmp_path):
        raise OSError(number, "no", str(tmp_path / "records.jsonl"))
    with pytest.raises(OSError, match="elsewhere"), folders.convert_write_errors(tmp_path):
        raise OSError(number, "no", "/elsewhere")


@pytest.mark.parametrize("change", ["none", "removed", "replaced"])
def test_removed_or_replaced_folder_raises_output_error(tmp_path: Path, change: str) -> None:
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


def test_answers_of_ranks_are_kept_and_replace_missing_stacks(
    tmp_path: Path,
) -> None:
    """Rank 0 answers when its pipe is opened; rank 1, which does not read its pipe, is not awaited."""
    logs = tmp_path / "logs" / "tp2-0"
    logs.mkdir(parents=True)
    for rank in range(2):
        os.mkfifo(logs / f"flight-{rank}.ask")
    listening = threading.Event()

    def answer() -> None:
        end = os.open(logs / "flight-0.ask", os.O_RDONLY | os.O_NONBLOCK)
        listening.set()
        while not list((tmp_path / "hangs").glob("*/ranks.json")):  # the asking is over
            pass
        for name in ("device-0.json", "flight-0.json", "own-stacks-0.txt", "answered-0.json"):
            (logs / name).write_text(name)
        os.close(end)

    thread = threading.Thread(target=answer)
    thread.start()
    listening.wait()
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


@pytest.mark.parametrize(("differs", "kind"), [(True, "shape"), (False, None)])
def test_heartbeats_show_the_rank_with_another_shape(tmp_path: Path, differs: bool, kind: str | None) -> None:
    """No folder is made without a difference or without heartbeats."""
    logs = tmp_path / "logs" / "tp2-0"
    logs.mkdir(parents=True)
    ranks = SimpleNamespace(folder=tmp_path, logs=logs, ranks=range(2))
    assert hang_capture.find_difference(ranks) is None  # type: ignore[arg-type]
    job = test_hangs.Job(logs, 2)
    job.run_steps()
    for rank in range(2):
        x = test_hangs.HALF if differs and rank else test_hangs.X
        job.run_collective(rank, "all_reduce", "attn_reduce", 0, x=x, hangs=True)
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


def test_capture_tools_are_started_if_installed_and_killed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hang_capture._start_tool(["no-such-tool"], tmp_path / "none.txt") is None
    assert not (tmp_path / "none.txt").exists()
    monkeypatch.setattr(hang_capture.subprocess_guard, "make_tied_command", lambda command: command)
    echo = hang_capture._start_tool(["echo", "hello"], tmp_path / "echo.txt")
    sleep = hang_capture._start_tool(["sleep", "60"], tmp_path / "long.txt")
    assert echo is not None
    assert sleep is not None
    echo.wait()
    hang_capture._wait_for_tools([echo, None, sleep], 0.0)
    assert (tmp_path / "echo.txt").read_text() == "hello\n"
    assert (echo.returncode, sleep.returncode) == (0, -9)


@pytest.mark.parametrize(("pid", "seconds"), [(None, 1.0), (7, 2.0)])
def test_cpu_use_of_a_rank_is_its_ticks_over_time(
    monkeypatch: pytest.MonkeyPatch, pid: int | None, seconds: float
) -> None:
    """150 ticks of 10 ms in 2 s are 0.75 of a core; for an ended process it is unknown."""
    ranks = SimpleNamespace(read_exits=list)
    monkeypatch.setattr(hang_capture, "_read_cpu_ticks", lambda _: 250)
    monkeypatch.setattr(hang_capture.subprocess_guard, "read_start_ticks", lambda _: ("S", "1"))
    monkeypatch.setattr(hang_capture.os, "sysconf", lambda _: 100)
    state = hang_capture._describe_rank(ranks, 3, pid, 100, seconds)  # type: ignore[arg-type]
    if pid is None:
        assert state == ProcessState(rank=3, ended="its process was gone")
    else:
        assert state == ProcessState(rank=3, pid=7, state="S", cpu=0.75)
