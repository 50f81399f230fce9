"""`syncs serve`: a running server is profiled, its ranks' traces are scanned, and nothing is called clean that was not read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench import cli
from dcpbench.errors import WorkerError
from dcpbench.records.runs import read_run
from dcpbench.servers import measure
from dcpbench.servers.profile import find_waits
from tests.unit.program_traces import Program
from tools.client_accuracy import served

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data"
TRACE = DATA / "h200_stacks.trace.json.gz"
Asked = tuple[int, str, str]


@pytest.fixture
def scanned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Asked]:
    """What the command says of a server with these flags."""

    def run(flags: str, *words: str, enabled: bool = True) -> Asked:
        folder = tmp_path / "traces"
        folder.mkdir(exist_ok=True)
        (folder / "of-yesterday.json").write_text("{}")
        if enabled:
            monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(folder))
        with served(flags, tmp_path / "log") as url, pytest.raises(SystemExit) as end:
            cli.main(["syncs", "serve", "--url", url, "--traces", str(folder), "--num-requests", "2", *words])
        return int(end.value.code or 0), *capsys.readouterr()

    return run


def test_the_traces_of_all_ranks_are_scanned_and_older_files_are_not(scanned: Callable[..., Asked]) -> None:
    """Its waits are findings; what both ranks wrote alike is read once."""
    code, out, err = scanned(f"--trace {TRACE} -tp 2", "--format", "json")
    assert code == 1, err
    report = json.loads(out)
    assert [trace["rank"] for trace in report["traces"]] == [0]
    assert "rank1" in err
    assert "of-yesterday" not in out + err


def test_the_folder_of_traces_is_made_with_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "traces"
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(folder))
    with served(f"--trace {TRACE}", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["syncs", "serve", "--url", url, "--traces", str(folder), "--num-requests", "2"])
    assert end.value.code == 1, capsys.readouterr().err
    assert list(folder.glob("*.json*"))


def test_the_gate_is_scans_own(scanned: Callable[..., Asked]) -> None:
    """What is allowed passes."""
    code, _, err = scanned(f"--trace {TRACE}", "--max-per-step", "1000000")
    assert code == 0, err


def test_a_rank_that_wrote_no_trace_is_missing(scanned: Callable[..., Asked], tmp_path: Path) -> None:
    """The only trace is that of rank 0 of two and holds no wait, which says nothing about rank 1."""
    program = Program()
    for step in range(3):
        with program.range(f"ProfilerStep#{step}"):
            program.work(5)
    trace = program.write(tmp_path / "one.json", distributedInfo={"backend": "nccl", "rank": 0, "world_size": 2})
    code, _, err = scanned(f"--trace {trace}", "--format", "json")
    assert code == 3
    assert "No trace of rank 1 of 2 was read" in err


def test_a_server_that_does_not_profile_is_told_how_it_would(scanned: Callable[..., Asked]) -> None:
    """404 of /start_profile."""
    code, _, err = scanned("", enabled=False)
    assert code
    assert "It does not profile; start vLLM with --profiler-config" in err
    assert "SGLANG_TORCH_PROFILER_DIR" in err


def test_no_trace_is_never_clean(scanned: Callable[..., Asked]) -> None:
    """The server writes elsewhere."""
    code, _, err = scanned("", "--wait", "0.5")
    assert code
    assert "no trace came into" in err
    assert "within 0.5 s (--wait)" in err


def test_a_trace_without_a_gpu_is_never_clean(scanned: Callable[..., Asked], tmp_path: Path) -> None:
    """Of an engine on a CPU."""
    trace = tmp_path / "cpu.json"
    trace.write_text(
        json.dumps(
            {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}
        )
    )
    code, _, _ = scanned(f"--trace {trace}")
    assert code == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--url is missing"),
        (["--url", "http://127.0.0.1:9"], "--traces is missing"),
        (["--url", "http://127.0.0.1:9", "--traces", f"{__file__}/x"], "no folder can be made there"),
        (["--url", "ftp://x", "--traces", "."], "is no address of a server"),
        (["--url", "http://127.0.0.1:9", "--traces", ".", "--format", "pdf"], "pdf"),
    ],
)
def test_mistakes_are_sentences(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is sent."""
    with pytest.raises(SystemExit) as end:
        cli.main(["syncs", "serve", *words])
    assert end.value.code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_point_of_a_server_says_where_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its profiler writes the traces after the load, into a folder that the command makes with its parents."""
    folder = tmp_path / "traces" / "of a server"
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(folder))
    load = [
        "--device",
        "cpu",
        "--num-requests",
        "4",
        "--concurrency",
        "2",
        "--input-tokens",
        "20",
        "--output-tokens",
        "4",
    ]
    with served(f"--trace {TRACE}", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["server", "--url", url, *load, "--traces", str(folder), "-o", str(tmp_path / "run")])
    assert not end.value.code, capsys.readouterr().err
    (record,) = read_run(tmp_path / "run").records
    assert record.outcome == "ok"
    assert record.serve is not None
    assert record.serve.finished == 4
    assert record.server
    assert "not_profiled" not in record.server.facts
    assert record.host_syncs_per_step
    assert record.sync_sites
    assert {site.found_in for site in record.sync_sites} == {"engine"}
    assert record.host_syncs_per_step >= sum(site.per_step for site in record.sync_sites) - 1e-9
    assert "Where the host waited" in (tmp_path / "run" / "report" / "report.html").read_text()


def test_a_point_whose_server_does_not_profile_keeps_its_times_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not measured is null, and said."""
    load = [
        "--device",
        "cpu",
        "--num-requests",
        "4",
        "--concurrency",
        "2",
        "--input-tokens",
        "20",
        "--output-tokens",
        "4",
    ]
    with served("", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["server", "--url", url, *load, "--traces", str(tmp_path), "-o", str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert not end.value.code
    assert "was not profiled" in err
    (record,) = read_run(tmp_path / "run").records
    assert record.outcome == "ok"
    assert record.host_syncs_per_step is None
    assert record.server
    assert "It does not profile; start vLLM with" in record.server.facts["not_profiled"]


def test_an_interrupt_after_the_last_request_keeps_the_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the server is profiled ends the command and costs no request."""

    async def interrupt(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(measure, "record_traces", interrupt)
    load = [
        "--device",
        "cpu",
        "--num-requests",
        "4",
        "--concurrency",
        "2",
        "--input-tokens",
        "20",
        "--output-tokens",
        "4",
    ]
    with served(f"--trace {TRACE}", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["server", "--url", url, *load, "--traces", str(tmp_path / "t"), "-o", str(tmp_path / "run")])
    assert end.value.code == 130
    assert "The point is kept, without its profile." in capsys.readouterr().err
    (record,) = read_run(tmp_path / "run").records
    assert (record.outcome, record.reason) == ("ok", None)
    assert record.serve is not None
    assert record.serve.finished == 4
    assert record.server is not None
    assert record.server.facts["not_profiled"] == "interrupted after all requests had ended"


def test_traces_without_a_gpu_are_no_count_of_waits(tmp_path: Path) -> None:
    """Of an engine on a CPU."""
    trace = tmp_path / "cpu.json"
    trace.write_text(
        json.dumps(
            {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}
        )
    )
    with pytest.raises(WorkerError, match="GPU"):
        find_waits([trace])
