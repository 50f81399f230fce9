"""Test `dcpbench syncs dry-run` with child processes, and programs that use more of CUDA's API."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench.syncs import run
from dcpbench.syncs.dry_run_program import ProcessAnswer
from dcpbench.syncs.process_tree import join_reports
from dcpbench.syncs.programs import is_python, may_use_gpu
from dcpbench.syncs.recorder.child import BEGAN, ENTERED, FORKED, TERMINATED
from dcpbench.syncs.sync_report import ChildProcess, Coverage, Report, TraceSummary
from tests import forks
from tests.unit.dry_run_check import check

FAKE_GROUP = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
dist.all_gather([torch.empty_like(x) for _ in range(8)], x)
splits = torch.full((8,), 1, device="cuda")
dist.all_to_all_single(torch.empty(8, device="cuda"), torch.ones(8, device="cuda"), splits.tolist(), [1] * 8)
"""
FORK_SERVER = """
import multiprocessing

if __name__ == "__main__":
    import torch
    torch.ones(2, device="cuda") + 1
    process = multiprocessing.get_context("forkserver").Process(target=print)
    process.start()
    process.join(60)
"""
PROFILER_API = """
import torch

x = torch.ones(3, device="cuda")
torch.cuda.cudart().cudaProfilerStart()
x.sum().item()
torch.cuda.cudart().cudaProfilerStop()
"""
DATA_PARALLEL = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl", rank=0, world_size=1, init_method=f"file://{__file__}.store")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0])
model(torch.ones(2, 4, device="cuda")).sum().backward()
dist.destroy_process_group()
"""
RUNTIME = """
import torch

x = torch.ones(2, 8, device="cuda")
model = torch.cuda.make_graphed_callables(torch.nn.Linear(8, 8).cuda(), (torch.ones_like(x),))
model(x)
torch.nn.LazyLinear(4).cuda()(x)
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    torch.zeros(8, device="cuda")
torch.cuda.memory._record_memory_history()
assert torch.cuda.memory._snapshot()["segments"] == []
torch.jit.trace(torch.nn.Linear(8, 8).cuda(), x)
"""
SUBPROCESS = """
import subprocess
import sys
import torch

torch.ones(2, device="cuda") + 1
subprocess.run({command}, check=True)
"""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin programs at once."""
    monkeypatch.setattr(run, "run_process", forks.run_command)


def test_python_process_without_the_environment_is_named_with_exit_code_3(tmp_path: Path) -> None:
    code, report = check(tmp_path, SUBPROCESS.format(command="[sys.executable, '-I', '-c', 'pass']"))
    [child] = report["traces"][0]["coverage"]["children"]
    assert (code, report["verdict"]["status"]) == (3, "cannot answer")
    assert (child["may_use_gpu"], child["start_method"]) == (True, "subprocess")
    assert child["command"].endswith("-I -c pass")
    named = f"process {child['pid']} ({child['command']}, subprocess: the dry run was not on in it)"
    assert named in report["verdict"]["reasons"][0]


HARMLESS = """
import os
import subprocess
import sys
import torch

torch.ones(2, device="cuda") + 1
subprocess.run(["git", "--version"])
subprocess.run("uname -r | cut -d. -f1", shell=True)
subprocess.run([sys.executable, "-c", "import json"])
subprocess.run([sys.executable, "-c", "import subprocess; subprocess.run('true')"])
os.system("uname > /dev/null")
os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
"""


@pytest.mark.parametrize(("source", "number"), [(HARMLESS, 6), (FORK_SERVER, 1)], ids=["programs", "fork server"])
def test_children_that_use_no_gpu_leave_the_program_clean(tmp_path: Path, source: str, number: int) -> None:
    code, report = check(tmp_path, source)
    assert (code, report["verdict"]["status"]) == (0, "clean")
    assert [c["may_use_gpu"] for c in report["traces"][0]["coverage"]["children"]] == [False] * number


@pytest.mark.parametrize(
    ("source", "rules"),
    [(FAKE_GROUP, ["SYNC003"]), (PROFILER_API, ["SYNC001"])],
    ids=["fake process group", "profiler API"],
)
def test_waits_are_found_in_programs_that_use_other_apis_of_cuda(tmp_path: Path, source: str, rules: list[str]) -> None:
    code, report = check(tmp_path, source)
    assert (code, [s["rule"] for s in report["sites"]]) == (1, rules)
    assert report["traces"][0]["coverage"]["complete"]


@pytest.mark.parametrize("source", [DATA_PARALLEL, RUNTIME], ids=["DistributedDataParallel", "runtime"])
def test_programs_that_use_other_apis_of_cuda_run_to_their_end(tmp_path: Path, source: str) -> None:
    _, report = check(tmp_path, source)
    assert report["traces"][0]["coverage"]["complete"]


UNSEEN = """
import os
import subprocess
import sys
import torch

def wait(pid):
    assert os.waitpid(pid, 0)[1] == 0

torch.ones(2, device="cuda") + 1
python = sys.executable
subprocess.run(f"{python} -I -c pass", shell=True)
subprocess.run(f"true; {python} -E -c pass; {python} -c pass", shell=True)
subprocess.run(["bash", "-c", f"{python} -E -c pass"])
subprocess.run([f"{python} -I -c pass"], shell=True)
subprocess.run(["env", "-i", python, "-c", "pass"])
subprocess.run(["timeout", "60", python, "-I", "-c", "pass"])
subprocess.run(["nice", python, "-I", "-c", "pass"])
subprocess.run(["git"], executable=python, stdin=subprocess.DEVNULL, env={})
subprocess.run([python, "-c", "pass"], env={})
subprocess.run([python, "-I", "-c", "pass"], preexec_fn=os.getpid)
os.system(f"{python} -I -c pass")
wait(os.posix_spawn(python, ["git", "-I", "-c", "pass"], os.environ))
wait(os.posix_spawnp("python3", ["python3", "-E", "-c", "pass"], os.environ))
os.spawnv(os.P_WAIT, python, [python, "-I", "-c", "pass"])
"""
METHODS = ["subprocess"] * 10 + ["os.system", "os.posix_spawn", "os.posix_spawnp", "a child's child"]


def test_each_unobserved_process_is_named(tmp_path: Path) -> None:
    code, report = check(tmp_path, UNSEEN)
    children = report["traces"][0]["coverage"]["children"]
    assert (code, report["verdict"]["status"]) == (3, "cannot answer")
    assert [child["start_method"] for child in children] == METHODS
    assert [child["command"] for child in children if not child["may_use_gpu"]] == []


def test_unobserved_shell_is_named_with_exit_code_3(tmp_path: Path) -> None:
    code, report = check(
        tmp_path, SUBPROCESS.format(command="['true']") + "import os\nos.system(f'{sys.executable} -I -c pass')"
    )
    [child] = [c for c in report["traces"][0]["coverage"]["children"] if c["may_use_gpu"]]
    assert (code, report["verdict"]["status"]) == (3, "cannot answer")
    assert f"{child['command']}, os.system: the dry run was not on in it)" in report["verdict"]["reasons"][0]


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', 'pass'])",
        "import os, sys; os.execv(sys.executable, [sys.executable, '-I', '-c', 'pass'])",
        "import os, sys; os.system(f'{sys.executable} -I -c pass')",
    ],
    ids=["subprocess", "exec", "system"],
)
def test_program_started_by_a_python_child_is_named_with_exit_code_3(tmp_path: Path, source: str) -> None:
    code, report = check(tmp_path, SUBPROCESS.format(command=f"[sys.executable, '-c', {source!r}]"))
    [child] = [c for c in report["traces"][0]["coverage"]["children"] if c["may_use_gpu"]]
    assert (code, report["verdict"]["status"]) == (3, "cannot answer")
    assert child["start_method"] == "a child's child"
    assert "-I -c pass" in child["command"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nvidia-smi", "-L"], False),
        (["/sbin/ldconfig", "-p"], False),
        (["/bin/sh", "-c", "uname -r | cut -d. -f1 2>/dev/null; git rev-parse HEAD > commit"], False),
        (["sh", "-c", "git status\ncat /proc/cpuinfo"], False),
        (["bash", "-c", "[ -f a ] && gcc -v 2>&1"], False),
        (["env", "true"], True),
        (["ssh", "host", "true"], True),
        (["docker", "run", "image"], True),
        (["sudo", "true"], True),
        (["torchrun", "train.py"], True),
        (["./run.sh"], True),
        (["bash", "run.sh"], True),
        (["bash", "-lc", "true"], True),
        (["sh", "-c", "true; torchrun train.py"], True),
        (["sh", "-c", "true && (python -I a.py)"], True),
        (["sh", "-c", "true&python -I a.py"], True),
        (["sh", "-c", "true\npython -I a.py"], True),
        (["sh", "-c", "echo \\\npython -I a.py"], True),
        (["sh", "-c", "echo 'a\n'; python -I a.py"], True),
        (["sh", "-c", 'echo "$(python -I a.py)"'], True),
        (["sh", "-c", "echo `python -I a.py`"], True),
        (["sh", "-c", "cat <(python -I a.py)"], True),
        (["sh", "-c", "echo a#b; python -I a.py"], True),
        (["sh", "-c", "echo a;>b python -I a.py"], True),
        (["sh", "-c", "> a python -I a.py"], True),
        (["sh", "-c", "PATH=. git status"], True),
        (["sh", "-c", "$PROGRAM"], True),
        (["sh", "-c", "git() { python -I a.py; }; git"], True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_only_well_known_programs_cannot_use_a_gpu(words: list[str], expected: bool) -> None:
    assert may_use_gpu(words) == expected


def test_python_interpreter_is_recognised_by_name_link_target_and_shebang(tmp_path: Path) -> None:
    script = tmp_path / "tool"
    script.write_text("#!/usr/bin/env python3\n")
    script.chmod(0o755)
    assert [is_python(p) for p in ("python3.12", sys.executable, str(script), "true")] == [True, True, True, False]


@pytest.mark.parametrize(
    ("events", "expected", "is_worker", "may_use_gpu"),
    [
        ([], ENTERED, True, False),
        ([FORKED], ENTERED, True, False),
        ([FORKED, TERMINATED], ENTERED, True, False),
        ([FORKED, BEGAN], ENTERED, True, True),
        ([], ENTERED, False, True),
        ([], BEGAN, True, True),
    ],
)
def test_forked_worker_that_a_pool_ends_before_its_first_task_is_harmless(
    tmp_path: Path, events: list[str], expected: str, is_worker: bool, may_use_gpu: bool
) -> None:
    """On a busy machine one worker may do all tasks before another has begun."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    lines = [json.dumps({"event": event, "command": ["python"], "parent": 1}) for event in events]
    if lines:
        (tmp_path / f"{ended.pid}.child").write_text("\n".join(lines))
    child = ChildProcess(pid=ended.pid, command="ForkPoolWorker-2 (worker)", start_method="multiprocessing fork")
    trace = TraceSummary(path="python a.py", coverage=Coverage(detector="dry-run", ops=1, children=[child]))
    workers = [ended.pid] * is_worker
    answer = ProcessAnswer(
        pid=1, code=0, report=Report(traces=[trace]), expected={ended.pid: expected}, workers=workers
    )
    (found,) = join_reports(answer, tmp_path).traces[0].coverage.children
    assert found.may_use_gpu is may_use_gpu
