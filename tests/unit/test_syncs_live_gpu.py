"""Test properties of live detection that need a GPU. The corpus in tools.syncs.corpus tests more of them."""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from dcpbench.syncs import watch
from dcpbench.syncs.live import callbacks
from dcpbench.syncs.rules import ALLOCATION
from dcpbench.syncs.sync_report import Report
from tools.syncs.corpus.inputs import make_inputs
from tools.syncs.corpus.programs import PROGRAMS, Program

pytestmark = pytest.mark.gpu
UNSEEN = {ALLOCATION.id}  # rules of waits that no live detector sees; docs/syncs-live.md says so


@pytest.fixture
def x() -> torch.Tensor:
    """Return 4 ones on the GPU, after all work has finished."""
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    return x


def list_ids(rules: tuple) -> list[str]:
    return sorted(rule.id for rule in rules if rule.id not in UNSEEN)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_corpus_program_has_exactly_its_expected_rules(program: Program) -> None:
    device = torch.device("cuda")
    program.run(make_inputs(device))
    inputs = make_inputs(device)
    with watch(threads="all") as seen:
        program.run(inputs)
    assert sorted(sync.rule for sync in seen.syncs) == list_ids(program.expected)
    assert all(sync.function for sync in seen.syncs)


def test_wait_has_the_line_of_its_call(x: torch.Tensor) -> None:
    with watch() as seen:
        x.add(1)
        x[0].item()
    assert [(s.rule, s.op, s.bytes) for s in seen.syncs] == [("SYNC001", "aten::_local_scalar_dense", 4)]
    assert Path(__file__).read_text().splitlines()[seen.syncs[0].line - 1].strip() == "x[0].item()"


def test_torch_calls_the_callbacks_for_waits() -> None:
    """A failure means that torch has changed its private callbacks, so that nothing can be watched."""
    reported: list[str] = []
    callbacks.set_listener(reported.append)
    torch.cuda.synchronize()
    assert reported == [callbacks.DEVICE]


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_watch_restores_the_debug_mode(x: torch.Tensor, mode: int) -> None:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        with watch():
            x + 1
        assert torch.cuda.get_sync_debug_mode() == mode
    finally:
        torch.cuda.set_sync_debug_mode(0)


def test_debug_mode_errors_are_raised_and_counted(x: torch.Tensor) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with watch() as seen, pytest.raises(RuntimeError, match="synchronizing"):
            x[0].item()
    finally:
        torch.cuda.set_sync_debug_mode(0)
    assert [s.rule for s in seen.syncs] == ["SYNC001"]


def test_wait_in_a_backward_pass_has_the_line_that_runs_it() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, grad):
            grad.sum().item()
            return grad * 2

    x = torch.ones(4, device="cuda", requires_grad=True)
    y = Reads.apply(x).sum()
    with watch() as seen:
        y.backward()
    assert [(s.rule, s.function) for s in seen.syncs] == [("SYNC001", "backward")]


def test_two_threads_count_separately(x: torch.Tensor) -> None:
    barrier, counts = threading.Barrier(2), {}

    def watched(times: int) -> None:
        with watch() as seen:
            barrier.wait()
            for _ in range(times):
                x[0].item()
            barrier.wait()
        counts[times] = seen.count

    threads = [threading.Thread(target=watched, args=(n,)) for n in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {1: 1, 5: 5}


def test_graph_can_be_captured_and_replayed_under_a_watch(x: torch.Tensor) -> None:
    """The capture waits for the device explicitly in torch.cuda.graph; a replay does not wait."""
    graph = torch.cuda.CUDAGraph()
    y = x + 1
    with watch():
        with torch.cuda.graph(graph):
            y.copy_(x * 3)
        with watch() as replay:
            graph.replay()
    torch.cuda.synchronize()
    assert replay.count == 0
    assert y.tolist() == [3.0] * 4


def test_compiled_code_stays_compiled(x: torch.Tensor) -> None:
    compiled = torch.compile(lambda x: x * 2 + 1)
    compiled(x)
    with watch() as seen:
        compiled(x)
    assert seen.count == 0


def test_run_finds_the_line_of_a_program(tmp_path: Path) -> None:
    """Three of five steps are recorded; each reads one value after the model."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4).cuda()\n"
        "x = torch.ones(2, 4, device='cuda')\n"
        "def step():\n"
        "    return model(x).sum().item()\n"
        "for _ in range(6): step()\n"
    )
    code = "import sys; from dcpbench.cli import main; sys.argv[0] = 'dcpbench'; main()"
    options = ["syncs", "run", "--warmup", "2", "--steps", "3", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options, "--", sys.executable, "program.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    program_sites = [site for site in report.sites if not site.own]
    assert [(s.rule, s.function, s.count, s.count_per_step) for s in program_sites] == [("SYNC001", "step", 3, 1.0)]
    assert report.traces[0].steps == 3


def test_run_without_steps_records_from_the_first_use_of_cuda(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import torch\nx = torch.ones(4, device='cuda')\nx.cpu()\n")
    code = "import sys; from dcpbench.cli import main; sys.argv[0] = 'dcpbench'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "syncs", "run", "--format", "json", "--", sys.executable, "program.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    report = msgspec.json.decode(done.stdout, type=Report)
    assert "SYNC003" in [site.rule for site in report.sites if not site.own], done.stderr
    assert [site.count_per_step for site in report.sites] == [None] * len(report.sites)
