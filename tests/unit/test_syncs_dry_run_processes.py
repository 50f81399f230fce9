"""Test that `dcpbench syncs dry-run` follows the Python processes of a program in one report."""

import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dcpbench.commands.syncs import app
from dcpbench.syncs import process_tree, run
from dcpbench.syncs.dry_run.fork_gate import ForkGate
from tests import forks
from tests.unit.dry_run_check import check

ENGINE = """
import multiprocessing
import os
import sys
import torch

class EngineCore:
    def __init__(self):
        self.weight = torch.randn(16, 16, device="cuda")

    def step(self, hidden):
        hidden = torch.tanh(hidden @ self.weight)
        {planted}
        return hidden

def run_engine_core(connection):
    core = EngineCore()
    hidden = torch.randn(4, 16, device="cuda")
    while (number := connection.recv()) is not None:
        with torch.profiler.record_function(f"step {{number}}"):
            hidden = core.step(hidden)
        connection.send(number)

if __name__ == "__main__":
    ours, its = multiprocessing.Pipe()
    context = multiprocessing.get_context("{method}")
    process = context.Process(target=run_engine_core, args=(its,), name="EngineCore")
    process.start()
    for number in range(4):
        ours.send(number)
        assert ours.recv() == number
    {end}
    process.join()
    assert process.exitcode == {code}
"""
PLANTED = "hidden.argmax(-1).tolist()  # the planted wait"
STOP = "ours.send(None)"
LOST = "it ended without its report: it was killed, or crashed"
long = pytest.mark.long


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin programs at once."""
    monkeypatch.setattr(run, "run_process", forks.run_command)


def engine(*, method: str = "fork", planted: str = PLANTED, end: str = STOP, code: int = 0) -> str:
    return ENGINE.format(method=method, planted=planted, end=end, code=code)


def unseen(report: dict) -> list[dict]:
    """Return the processes that may use a GPU and were not followed."""
    children = [child for trace in report["traces"] for child in trace["coverage"]["children"]]
    return [child for child in children if child["may_use_gpu"]]


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=long)])
def test_wait_in_an_engine_core_has_its_line_and_process(tmp_path: Path, method: str) -> None:
    """Four steps wait once each. The front end uses no GPU."""
    source = engine(method=method)
    code, report = check(tmp_path, source)
    [site] = report["sites"]
    assert (code, site["rule"], site["count"], site["count_per_step"]) == (1, "SYNC003", 4, 1.0)
    assert source.splitlines()[site["line"] - 1].strip() == PLANTED
    assert site["traces"] == ["EngineCore (run_engine_core)"]
    assert [(trace["front_end"], trace["steps"]) for trace in report["traces"]] == [(True, None), (False, 4)]
    assert unseen(report) == []


def test_engine_core_without_a_wait_is_clean(tmp_path: Path) -> None:
    code, report = check(tmp_path, engine(planted="pass"))
    assert (code, report["verdict"]["status"], report["sites"]) == (0, "clean", [])
    assert report["traces"][1]["coverage"]["ops"] == 2 + 4 * 2


def test_baseline_and_diff_have_the_sites_of_the_core(tmp_path: Path) -> None:
    """The names of the sites have no process number, so that another run has the same ones."""
    baseline, before, after = (tmp_path / name for name in ("baseline.json", "before.json", "after.json"))
    program = tmp_path / "program.py"
    program.write_text(engine())
    command = ["--root", str(tmp_path), "--", "python", str(program)]
    assert CliRunner().invoke(app, ["dry-run", "--write-baseline", str(baseline), *command]).exit_code == 0
    run = ["dry-run", "--baseline", str(baseline), "--format", "json", "-o"]
    assert CliRunner().invoke(app, [*run, str(before), *command]).exit_code == 0
    program.write_text(engine(planted=f"{PLANTED}; hidden.sum().item()"))
    program.write_text(program.read_text().replace("  # the planted wait;", ";"))
    assert CliRunner().invoke(app, [*run, str(after), *command]).exit_code == 1
    assert CliRunner().invoke(app, ["diff", str(before), str(before)]).exit_code == 0
    assert CliRunner().invoke(app, ["diff", str(before), str(after)]).exit_code == 1


@pytest.mark.parametrize(
    ("method", "end", "code"),
    [
        ("fork", "process.kill()", -9),
        ("spawn", "process.kill()", -9),
        ("fork", "os.kill(process.pid, 6)", -6),
        pytest.param("forkserver", "process.kill()", -9, marks=long),
    ],
)
def test_killed_core_is_named_and_never_clean(tmp_path: Path, method: str, end: str, code: int) -> None:
    result, report = check(tmp_path, engine(method=method, planted="pass", end=end, code=code))
    [child] = unseen(report)
    assert (result, report["verdict"]["status"]) == (3, "cannot answer")
    assert (child["command"], child["reason"]) == ("EngineCore (run_engine_core)", LOST)
    assert f"({child['command']}, multiprocessing {method}: {LOST})" in report["verdict"]["reasons"][0]


@pytest.mark.parametrize(
    ("method", "planted", "end", "code"),
    [
        ("fork", "sys.exit(7)", "pass", 7),
        ("fork", "1 / 0", "pass", 1),
        ("fork", "os._exit(5)", "pass", 5),
        ("fork", "pass", "process.terminate()", -15),
        ("spawn", "1 / 0", "pass", 1),
        pytest.param("spawn", "sys.exit(7)", "pass", 7, marks=long),
        pytest.param("spawn", "os._exit(5)", "pass", 5, marks=long),
        pytest.param("spawn", "pass", "process.terminate()", -15, marks=long),
    ],
)
def test_failed_core_keeps_its_exit_status_and_is_never_clean(
    tmp_path: Path, method: str, planted: str, end: str, code: int
) -> None:
    source = engine(method=method, planted=planted, end=end, code=code)
    if planted != "pass":
        source = source.replace("range(4)", "range(1)").replace("assert ours.recv() == number", "pass")
    result, report = check(tmp_path, source)
    assert report["traces"][0]["coverage"]["complete"]  # the program's own assertion on the exit status holds
    assert (result, report["verdict"]["status"]) == (3, "cannot answer")
    assert any("EngineCore (run_engine_core) did not run to its end" in r for r in report["verdict"]["reasons"])


POOL = """
import multiprocessing
import torch

def work(number):
    return torch.full((2,), number, device="cuda").sum().item()

if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        assert pool.map(work, range(6), chunksize=1) == [2 * n for n in range(6)]
"""
EXECUTOR = """
import concurrent.futures
import multiprocessing
import torch

def work(number):
    return torch.full((2,), number, device="cuda").sum().item()

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(work, range(6))) == [2 * n for n in range(6)]
"""


@pytest.mark.parametrize(
    ("source", "method"),
    [
        (POOL, "fork"),
        (POOL, "spawn"),
        pytest.param(POOL, "forkserver", marks=long),
        (EXECUTOR, "fork"),
        pytest.param(EXECUTOR, "spawn", marks=long),
        pytest.param(EXECUTOR, "forkserver", marks=long),
    ],
)
def test_workers_of_a_pool_are_followed(tmp_path: Path, source: str, method: str) -> None:
    """A Pool ends its workers by SIGTERM, which is the usual end."""
    code, report = check(tmp_path, source.format(method=method))
    [site] = report["sites"]
    assert (code, site["rule"], site["count"], site["function"]) == (1, "SYNC001", 6, "work")
    assert (unseen(report), report["verdict"]["reasons"]) == ([], [])


def test_worker_terminated_within_its_task_is_never_clean(tmp_path: Path) -> None:
    source = """
import multiprocessing
import time
import torch

def work(connection):
    torch.ones(2, device="cuda")
    connection.send(1)
    time.sleep(60)

if __name__ == "__main__":
    ours, its = multiprocessing.Pipe()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply_async(work, (its,))
        ours.recv()
"""
    code, report = check(tmp_path, source)
    assert (code, report["verdict"]["status"]) == (3, "cannot answer")
    assert "did not run to its end" in report["verdict"]["reasons"][0]


FORKS = """
import os
import torch

def child():
    torch.ones(2, device="cuda").sum().item()
    os._exit(0)

torch.ones(2, device="cuda") + 1
for fork in (os.fork, lambda: os.forkpty()[0]):
    pid = fork()
    if pid == 0:
        child()
    assert os.waitpid(pid, 0)[1] == 0
if os.fork() == 0:  # runs on to the end of the program
    torch.ones(2, device="cuda").sum().item()
else:
    assert os.wait()[1] == 0
"""


def test_forked_processes_are_followed(tmp_path: Path) -> None:
    code, report = check(tmp_path, FORKS)
    assert (code, sorted(site["count"] for site in report["sites"])) == (1, [1, 2])
    assert [trace["path"].rpartition(",")[2] for trace in report["traces"][1:]] == [
        " forked",
        " forked #2",
        " forked #3",
    ]
    assert unseen(report) == []


PROGRAMS = """
import os
import subprocess
import sys
import torch

torch.ones(2, device="cuda") + 1
worker = "import torch; torch.ones(2, device='cuda').sum().item()"
python = sys.executable
subprocess.run([python, "-c", worker], check=True)
os.spawnv(os.P_WAIT, python, [python, "-c", worker])
subprocess.run([python, "-c", f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {worker!r}])"], check=True)
subprocess.run([python, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"], check=True)
subprocess.run(["git", "--version"], preexec_fn=os.getpid, check=True)
"""


@pytest.mark.long
def test_python_subprograms_are_followed(tmp_path: Path) -> None:
    code, report = check(tmp_path, PROGRAMS)
    [site] = report["sites"]
    assert (code, site["count"], site["file"]) == (1, 4, "<string>")
    assert unseen(report) == []


QUIET = """
import os
import subprocess
import sys
import torch

torch.ones(2, device="cuda") + 1
code = "import sys; sys.exit('torch' in sys.modules or 'dcpbench' in sys.modules or 'threading' in sys.modules)"
assert subprocess.run([sys.executable, "-c", code]).returncode == 0
"""


def test_process_without_torch_loads_nothing_for_the_dry_run(tmp_path: Path) -> None:
    code, report = check(tmp_path, QUIET)
    assert (code, report["verdict"]["status"]) == (0, "clean")
    assert [child["may_use_gpu"] for child in report["traces"][0]["coverage"]["children"]] == [False]


THREADS = """
import multiprocessing
import threading
import torch

torch.set_num_threads(4)

def work():
    x = torch.randn(512, 512, device="cuda")
    (x @ x).relu().sum().item()

if __name__ == "__main__":
    work()
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            work()

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(60)
        assert process.exitcode == 0
    stop.set()
"""


def test_fork_with_busy_threads_does_not_hang(tmp_path: Path) -> None:
    code, report = check(tmp_path, THREADS)
    assert (code, unseen(report)) == (1, [])
    assert len(report["traces"]) == 1 + 8


def test_fork_waits_for_operators_of_other_threads_and_blocks_new_ones() -> None:
    gate, inside, order = ForkGate(), threading.Event(), []

    def fork() -> None:
        inside.wait()
        gate.close()
        order.append("fork")
        gate.open()

    forking = threading.Thread(target=fork)
    forking.start()
    with gate.run_operator(), gate.run_operator():
        inside.set()
        while not gate._forking:
            pass
        order.append("operator")
    with gate.run_operator():
        order.append("next operator")
    forking.join()
    assert order == ["operator", "fork", "next operator"]


LEFT = """
import subprocess
import sys
import torch

torch.ones(2, device="cuda") + 1
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"])
"""


def test_process_that_outlives_the_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "GRACE_S", 0.2)
    code, report = check(tmp_path, LEFT)
    [child] = unseen(report)
    assert (code, child["reason"]) == (3, "it still runs")


RANKS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
x = torch.full((2,), dist.get_rank() + 1.0, device="cuda")
dist.all_reduce(x)
assert x.tolist() == [3.0, 3.0]
dist.destroy_process_group()
"""


def test_ranks_of_torchrun_are_followed(tmp_path: Path) -> None:
    command = ("torchrun", "--nproc-per-node", "2", "--standalone", str(tmp_path / "program.py"))
    code, report = check(tmp_path, RANKS, *command)
    [site] = report["sites"]
    assert (code, site["count"], len(site["traces"])) == (1, 2, 2)
    assert [(trace["rank"], trace["world_size"]) for trace in report["traces"][1:]] == [(0, 2), (1, 2)]
    assert unseen(report) == []
