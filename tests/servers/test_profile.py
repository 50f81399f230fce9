"""Test `syncs serve`: a running server is profiled and the traces of all ranks are scanned."""

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
from tools.client_accuracy import run_test_server

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data"
TRACE = DATA / "h200_stacks.trace.json.gz"
Asked = tuple[int, str, str]


@pytest.fixture
def scanned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Asked]:
    """Return a function that runs the command against a server with these flags."""

    def run(flags: str, *words: str, enabled: bool = True) -> Asked:
        folder = tmp_path / "traces"
        folder.mkdir(exist_ok=True)
        (folder / "of-yesterday.json").write_text("{}")
        if enabled:
            monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(folder))
        with run_test_server(flags, tmp_path / "log") as url, pytest.raises(SystemExit) as end:
            cli.main(["syncs", "serve", "--url", url, "--traces", str(folder), "--num-requests", "2", *words])
        return int(end.value.code or 0), *capsys.readouterr()

    return run


def test_traces_of_all_ranks_are_scanned_without_older_files(scanned: Callable[..., Asked]) -> None:
    """Waits of the server are findings, and a file that both ranks wrote is read once."""
    code, out, err = scanned(f"--trace {TRACE} -tp 2", "--format", "json")
    assert code == 1, err
    report = json.loads(out)
    assert [trace["rank"] for trace in report["traces"]] == [0]
    assert "rank1" in err
    assert "of-yesterday" not in out + err


def test_trace_folder_is_created_with_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made" / "traces"
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(folder))
    with run_test_server(f"--trace {TRACE}", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["syncs", "serve", "--url", url, "--traces", str(folder), "--num-requests", "2"])
    assert end.value.code == 1, capsys.readouterr().err
    assert list(folder.glob("*.json*"))


def test_limits_of_scan_apply(scanned: Callable[..., Asked]) -> None:
    """Allowed waits pass."""
    code, _, err = scanned(f"--trace {TRACE}", "--max-per-step", "1000000")
    assert code == 0, err


def test_rank_without_a_trace_is_reported(scanned: Callable[..., Asked], tmp_path: Path) -> None:
    """The only trace is that of rank 0 of two; it has no wait, which proves nothing about rank 1."""
    program = Program()
    for step in range(3):
        with program.range(f"ProfilerStep#{step}"):
            program.work(5)
    trace = program.write(tmp_path / "one.json", distributedInfo={"backend": "nccl", "rank": 0, "world_size": 2})
    code, _, err = scanned(f"--trace {trace}", "--format", "json")
    assert code == 3
    assert "No trace of rank 1 of 2 was read" in err


def test_server_without_profiler_raises_an_error_with_the_flags(scanned: Callable[..., Asked]) -> None:
    """The server answers /start_profile with 404."""
    code, _, err = scanned("", enabled=False)
    assert code
    assert "It does not profile; start vLLM with --profiler-config" in err
    assert "SGLANG_TORCH_PROFILER_DIR" in err


def test_missing_trace_is_an_error(scanned: Callable[..., Asked]) -> None:
    """The server writes its traces to another folder."""
    code, _, err = scanned("", "--wait", "0.5")
    assert code
    assert "no trace came into" in err
    assert "within 0.5 s (--wait)" in err


def test_trace_without_gpu_events_is_an_error(scanned: Callable[..., Asked], tmp_path: Path) -> None:
    """The trace is that of an engine on a CPU."""
    trace = tmp_path / "cpu.json"
    trace.write_text(
        json.dumps(
            {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}
        )
    )
    code, _, _ = scanned(f"--trace {trace}")
    assert code == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--url is missing"),
        (["--url", "http://127.0.0.1:9"], "--traces is missing"),
        (["--url", "http://127.0.0.1:9", "--traces", f"{__file__}/x"], "no folder can be made there"),
        (["--url", "ftp://x", "--traces", "."], "is no address of a server"),
        (["--url", "http://127.0.0.1:9", "--traces", ".", "--format", "pdf"], "pdf"),
    ],
)
def test_invalid_options_are_refused_before_any_request(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["syncs", "serve", *words])
    assert end.value.code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_served_point_has_the_waits_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profiler writes traces after the load into a folder that the command creates with its parents."""
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
    with run_test_server(f"--trace {TRACE}", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
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


def test_point_of_a_server_without_profiler_keeps_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Waits are null because they were not measured, and the record states why."""
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
    with run_test_server("", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["server", "--url", url, *load, "--traces", str(tmp_path), "-o", str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert not end.value.code
    assert "was not profiled" in err
    (record,) = read_run(tmp_path / "run").records
    assert record.outcome == "ok"
    assert record.host_syncs_per_step is None
    assert record.server
    assert "It does not profile; start vLLM with" in record.server.facts["not_profiled"]


def test_interrupt_after_the_last_request_keeps_the_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the server is profiled ends the command without loss of a request."""

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
    with run_test_server(f"--trace {TRACE}", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["server", "--url", url, *load, "--traces", str(tmp_path / "t"), "-o", str(tmp_path / "run")])
    assert end.value.code == 130
    assert "The point is kept, without its profile." in capsys.readouterr().err
    (record,) = read_run(tmp_path / "run").records
    assert (record.outcome, record.reason) == ("ok", None)
    assert record.serve is not None
    assert record.serve.finished == 4
    assert record.server is not None
    assert record.server.facts["not_profiled"] == "interrupted after all requests had ended"


def test_waits_are_unknown_without_gpu_events(tmp_path: Path) -> None:
    """The trace is that of an engine on a CPU."""
    trace = tmp_path / "cpu.json"
    trace.write_text(
        json.dumps(
            {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]}
        )
    )
    with pytest.raises(WorkerError, match="GPU"):
        find_waits([trace])
