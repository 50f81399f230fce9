"""Test `dcpbench bench` with a fake worker in all its modes, and each bench once with the real worker."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Self

import pytest

from dcpbench import cli
from dcpbench.bench import runner
from dcpbench.bench.bench_record import Case, Event, Result
from dcpbench.errors import ExitCode
from dcpbench.launch import launcher, ranks
from dcpbench.launch.version_check import Package
from dcpbench.points.device_probe import Probe
from tests import forks

if TYPE_CHECKING:
    from dcpbench.bench.bench_record import BenchRecord

HERE = Path(__file__).parent
ROOT = Path(cli.__file__).parents[1]
CPU = Probe(device="cpu", count=0, name="CPU")
GPU = Probe(device="cuda", count=1, name="NVIDIA H200")
FOUR = Probe(device="cuda", count=4, name="NVIDIA H200")
TRIES = 3
TWO = ("merge", "--heads", "8", "--requests", "3", "--dcp", "2", "--variant", "pack,combine")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run `dcpbench bench …` in this process and in an empty folder; the result is (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "WORKER", "fake_bench_worker")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )

    def run(*args: str, fake: str = "", machine: Probe = CPU) -> tuple[int, str, str]:
        monkeypatch.setenv("DCPBENCH_FAKE", fake)
        monkeypatch.setattr("dcpbench.launch.launcher.run_probe", lambda: machine)
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", *args])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_bench_prints_a_table_and_a_cpu_warning(call) -> None:
    code, out, err = call(*TWO)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "yes" in line] == ["pack", "combine"]
    assert "µs" not in out
    assert "[2/2] combine, heads 8, requests 3, dcp 2  correct" in err
    assert "CPU: correctness only" in err


def test_json_prints_only_the_record(call) -> None:
    code, out, _ = call(*TWO, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["bench"] == "merge"
    assert record["performance"] is False
    assert [r["correct"] for r in record["results"]] == [True, True]
    assert record["environment"]["device"] == "CPU"


def test_output_folder_gets_record_and_log_and_needs_force_to_overwrite(call) -> None:
    code, out, _ = call(*TWO, "-o", "out")
    assert code == 0
    assert "Wrote out/bench-merge.json" in out
    assert {p.name for p in Path("out").iterdir()} == {"bench-merge.json", "bench-merge.log"}
    code, _, err = call(*TWO, "-o", "out")
    assert code == 2
    assert "would be written over; add --force" in err
    assert call(*TWO, "-o", "out", "--force")[0] == 0
    assert call("attention", "-o", "out")[0] == 0, "another bench may use the same folder"


def test_wrong_result_exits_with_1_and_names_the_case(call) -> None:
    code, out, _ = call(*TWO, fake="wrong")
    assert code == 1
    assert "WRONG: pack, heads 8, requests 3, dcp 2: row 3 differs." in out


def test_failed_case_exits_with_4_and_keeps_the_others(call) -> None:
    code, out, err = call(*TWO, fake="failed")
    assert code == 4
    assert "failed: CapacityError: lower --tokens" in out
    assert "1 of 2 cases failed." in err


def test_dead_worker_is_reported_with_its_last_output(call) -> None:
    code, out, err = call(*TWO, fake="dies")
    assert code == 4
    assert "failed: not reached" in out
    assert "ended with exit code 1" in err
    assert "Segmentation fault" in err


def test_worker_that_fails_at_start_is_reported_with_its_log(call) -> None:
    code, _, err = call(*TWO, fake="stillborn")
    assert code == 4
    assert "error: the bench's worker ended before its first case." in err
    assert "cannot import name 'x'" in err
    assert "Traceback" not in err


def test_hung_worker_is_killed(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """--timeout limits the time without an event.

    The clock stands still until the first case is done; then each call of the clock advances it by an hour.
    """
    now = itertools.count(0, 3600)
    done: list[bool] = []
    take = runner._add_event

    def record_event(event: Event, record: BenchRecord) -> None:
        take(event, record)
        done.extend([True] * (event.stage == "done"))

    monkeypatch.setattr(runner, "_add_event", record_event)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: next(now) if done else 0))
    monkeypatch.setattr(ranks, "STACKS_WAIT_S", 0)
    code, out, err = call(*TWO, "--timeout", "2", fake="hangs")
    assert code == 4
    assert "It hung: nothing was heard for 2 s (--timeout)." in err
    assert "failed: not reached" in out


def test_bench_between_ranks_uses_all_gpus_and_records_limits(call) -> None:
    """4 GPUs run 4 ranks, with 4 exchanges at 4 batch sizes of 128 heads."""
    code, out, _ = call("exchange", "--json", machine=FOUR)
    record = json.loads(out)
    assert code == 0
    assert record["ranks"] == 4
    assert {r["case"]["sizes"]["ranks"] for r in record["results"]} == {4}
    assert [limit["name"] for limit in record["limits"]] == ["peer"]
    assert record["unmeasured"] == ["barrier: none here."]


def test_ranks_option_may_be_below_the_number_of_gpus(call) -> None:
    _, out, _ = call("collectives", "--ranks", "2", "--json", machine=FOUR)
    assert json.loads(out)["ranks"] == 2


def test_dead_rank_ends_the_other_ranks_and_is_named(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would wait for rank 1 forever."""
    monkeypatch.setattr(launcher, "GRACE_S", 0.5)
    code, out, err = call("exchange", "--variant", "ag_rs", fake="lonely")
    assert code == 4
    assert "Rank 1 ended with exit code 1. The last lines of rank 1:\nillegal memory access" in err
    assert "failed: not reached" in out


def test_rank_that_exits_early_with_0_is_noticed_before_the_timeout(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 exits after the first case, and rank 0 would wait for it for 300 s."""
    monkeypatch.setattr(launcher, "GRACE_S", 0.5)
    code, out, err = call("exchange", "--variant", "ag_rs", fake="leaves")
    assert code == 4
    assert "Rank 1 ended with exit code 0. The last lines of rank 1:\nnothing more to do" in err
    assert "failed: not reached" in out


def test_ctrl_c_ends_every_rank_and_writes_no_file(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt arrives while the launcher follows the ranks."""
    started = []

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    def start(*args, **kwargs) -> subprocess.Popen:
        started.append(popen(*args, **kwargs))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(ranks.subprocess, "Popen", start)
    monkeypatch.setattr(runner.time, "sleep", interrupted)
    code, out, err = call("exchange", "--variant", "ag_rs", "-o", "out", fake="hangs")
    assert code == 130
    assert "Interrupted; the worker has ended and nothing was written." in err
    assert out == ""
    assert list(Path("out").iterdir()) == []
    assert [process.poll() is not None for process in started] == [True, True]


def test_ctrl_c_keeps_the_cases_that_have_finished(call, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = runner._add_event

    def interrupted(event, record) -> None:
        finish(event, record)
        if event.result:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_add_event", interrupted)
    code, _, err = call(*TWO, "-o", "out")
    assert code == 130
    assert "finished are in out/bench-merge.json; to run all, repeat the command with --force." in err
    results = json.loads(Path("out/bench-merge.json").read_text())["results"]
    assert [r["outcome"] for r in results] == ["ok", "failed"]


def test_incomplete_event_line_is_read_when_complete(call) -> None:
    code, out, _ = call(*TWO, "--json", fake="half")
    assert code == 0
    assert [r["correct"] for r in json.loads(out)["results"]] == [True, True]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("merge", "--device", "gpu"), 2, "--device gpu is unknown"),
        (("merge", "--seconds", "0"), 2, "--seconds 0 is not a positive number of seconds"),
        (("merge", "--timeout", "-1"), 2, "--timeout -1 is not a positive number of seconds"),
        (("merge", "--requests", "many"), 2, "write for example --requests 1,3."),
        (("merge", "-o", "/dev/null/x"), 2, "cannot be used as output folder"),
        (("exchange", "--device", "cuda"), 3, "`dcpbench bench exchange --device cpu`, which checks correctness"),
        (("exchange", "--ranks", "1"), 2, "data is exchanged between two ranks or more; try --ranks 2."),
        (
            ("moe", "--weights", "fp8", "--group-size", "32"),
            2,
            "--group-size 32 is for int4; add --weights int4, or leave",
        ),
        (("exchange", "--ranks", "3", "--heads", "8"), 2, "--heads 8 cannot be divided among 3 ranks; try --heads 9"),
        (("exchange", "--variant", "sym"), 2, "--variant 'sym' is unknown; did you mean symm?"),
        (("collectives", "--ranks", "3", "--width", "64"), 2, "cannot be divided among 3 ranks; try --width 66."),
        (("merge", "--dcp", "3"), 2, "--heads 8 cannot be divided among 3 ranks; try --heads 9 or another --dcp."),
        (("attention", "--lengths", "odd"), 2, "--lengths 'odd' is unknown"),
        (("attention", "--backend", "flashinfr"), 2, "did you mean flashinfer?"),
        (("attention", "--layers", "0"), 2, "--layers 0 is not a positive number; try --layers 16."),
    ],
)
def test_invalid_options_print_one_error_line(args, code, message, call) -> None:
    found, out, err = call(*args)
    assert found == code
    assert message in err
    assert out == ""


def test_default_cases_on_a_gpu(call) -> None:
    """5 kernels × 5 numbers of requests, minus the order of heads of one request; the fake worker acts as a GPU."""
    _, out, _ = call("merge", "--json", machine=GPU)
    record = json.loads(out)
    assert record["performance"] is True
    assert len(record["results"]) == 24
    assert {r["case"]["sizes"]["requests"] for r in record["results"]} == {1, 8, 32, 128, 512}


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (1, (), "2 ranks need 2 GPUs, but 1 visible; with one alone, type `dcpbench bench exchange --device cpu`"),
        (4, ("--ranks", "8"), "8 ranks need 8 GPUs, but 4 visible; type --ranks 4."),
    ],
)
def test_more_ranks_than_gpus_are_refused(gpus, options, message, call) -> None:
    code, _, err = call("exchange", *options, machine=Probe(device="cuda", count=gpus, name="NVIDIA H200"))
    assert code == 3
    assert message in err


class Forked(ranks.Ranks):
    """Replace `ranks.Started` by forked ranks, which have all finished after `__enter__`."""

    def __init__(self, folder: Path, events: Path, count: int, worker: str, device: str) -> None:
        super().__init__(folder, folder, events, range(count))
        env = ranks.make_environment(device) | {"WORLD_SIZE": str(count)}
        self._programs = [
            forks.Program(("-m", worker, str(folder)), env | {"RANK": str(rank)}, str(folder / f"rank-{rank}.log"))
            for rank in self.ranks
        ]

    def __enter__(self) -> Self:
        codes = forks.run_programs(*self._programs)
        assert not any(codes), self.read_last_lines()
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, since all ranks have ended."""

    def has_ended(self) -> bool:
        """Return True, since all ranks have ended."""
        return True


@pytest.fixture
def real(call, monkeypatch: pytest.MonkeyPatch):
    """Run a bench with the real worker on the CPU, in forks that have imported torch, and return its record."""
    monkeypatch.setattr(runner, "WORKER", "dcpbench.bench.bench_worker")
    monkeypatch.setattr(runner, "Started", Forked)

    def run(*args: str, code: int = 0) -> dict:
        ended, out, err = call(*args, "--device", "cpu", "--json")
        assert ended == code, err
        return json.loads(out)

    return run


@pytest.mark.distributed
@pytest.mark.long
def test_real_exchange_bench_runs_every_exchange_on_two_ranks(real) -> None:
    """The error of a case is the largest one of all ranks, and the CPU run has no times."""
    record = real("exchange", "--heads", "4", "--requests", "3")
    assert record["ranks"] == 2
    assert [r["case"]["variant"] for r in record["results"]] == ["ag_rs", "ag_rs-bf16", "a2a", "symm"]
    for r in record["results"]:
        assert r["correct"]
        assert r["work"]["received_bytes"] == 3 * 4 // 2 * (576 * 2 + 512 * 2 + 4)
        assert r["graph"] is r["floor_us"] is None
    errors = {r["case"]["variant"]: r["error"] for r in record["results"]}
    assert errors["a2a"] < 1e-6 < errors["ag_rs-bf16"] < 1e-2, "bf16 on the wire rounds partial outputs and their sum"
    assert record["limits"] == []


@pytest.mark.distributed
@pytest.mark.long
def test_real_collectives_bench_agrees_with_fp64_sums(real) -> None:
    record = real("collectives", "--requests", "2", "--width", "32")
    assert len(record["results"]) == 5
    assert all(r["correct"] for r in record["results"])


def test_real_attention_and_merge_benches_are_correct(real) -> None:
    for bench_name in ("attention", "merge"):
        record = real(bench_name, "--requests", "2")
        assert record["results"]
        assert all(r["correct"] and r["error"] < 1e-2 for r in record["results"])


@pytest.mark.distributed
@pytest.mark.long
def test_real_kv_gather_bench_marks_cases_that_exceed_the_pool() -> None:
    """64 tokens of 1,152 bytes on 2 ranks: nccl receives 2 parts of at least 36,864 bytes, direct keeps its own part.

    The command runs in a separate process with two rank processes.
    """
    args = ["bench", "kv-gather", "--requests", "1", "--pool-bytes", "50KB", "--device", "cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "dcpbench.cli", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    found = {(r["case"]["variant"], r["case"]["sizes"]["buffer"]) for r in record["results"]}
    assert found == {("nccl", "outgrown"), ("direct", "pool"), ("nccl", "plain"), ("direct", "plain")}
    assert all(r["correct"] for r in record["results"])


def test_unavailable_backend_fails_without_affecting_others(real) -> None:
    """FlashInfer needs a GPU, whether it is installed or not; the reference is still measured."""
    results = real("attention", "--backend", "reference,flashinfer", "--requests", "1", code=4)["results"]
    assert [r["outcome"] for r in results] == ["ok", "failed"]
    assert results[1]["reason"].startswith("--backend flashinfer"), "the reason has no class name"


def test_progress_prints_each_failure_reason_once() -> None:
    case = Case(variant="pack", calls=1, sizes={})
    results = [Result(case=case, outcome="failed", reason=why) for why in ("no x", "no y", "no x")]
    seen: set[str] = set()
    notes = [runner._make_progress(Event(stage="done", index=n, result=r), seen).note for n, r in enumerate(results)]
    assert notes == ["no x", "no y", "failed, as before"]


@pytest.mark.gpu
def test_gpu_bench_records_limits_and_fractions_of_them(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct kernel reaches a positive fraction of the limit of at most 1, apart from rounding.

    The best of several tries counts, since other tests may use the GPU while limits are measured.
    """
    monkeypatch.setattr(runner, "WORKER", "dcpbench.bench.bench_worker")
    shares = []
    for _ in range(TRIES):
        code, out, _ = call("merge", "--requests", "512", "--variant", "pack", "--json", machine=GPU)
        record = json.loads(out)
        assert code == 0
        assert [limit["name"] for limit in record["limits"]] == ["copy", "matmul"]
        (result,) = record["results"]
        took_us = result["graph"]["time"]["median_us"]
        assert result["bytes_s"] == pytest.approx(result["work"]["memory_bytes"] / took_us * 1e6)
        shares.append(result["floor_us"] / took_us)
    assert 0 < min(shares) < 1.1


def test_worker_from_another_package_measures_no_case(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is patched to expect the package of another folder than the real worker imports."""
    monkeypatch.setattr(runner, "WORKER", "dcpbench.bench.bench_worker")
    monkeypatch.setattr(
        runner.version_check, "get_started_package", lambda: Package(folder="/elsewhere/dcpbench", sha256="0" * 64)
    )
    code, out, err = call(*TWO)
    assert code == ExitCode.FAILED
    assert "the bench's worker ended before its first case" in err
    assert "whose files are not those of the command, in /elsewhere/dcpbench" in err
    assert not out
