"""Test `serve --find` and `server --find`, which search the highest load that satisfies an SLO."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dcpbench import cli
from dcpbench.launch.jobs import read_job
from dcpbench.points.device_probe import Probe
from dcpbench.records.file import read_records
from dcpbench.records.folder import get_record_file
from dcpbench.serving.step_cases import Extent
from dcpbench.serving.step_times import write_step_times
from tests.cli.typed import Typed
from tests.unit.step_times_builder import make_path, make_step_times

CPU = Probe(device="cpu", count=0, name="CPU", packages={"torch": "2.9", "flashinfer": None})
LOAD = ["--num-requests", "96", "--input-tokens", "uniform:40-80", "--output-tokens", "uniform:10-30"]
SLOTS = 8
ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in this process on a machine without GPUs."""
    monkeypatch.setattr("dcpbench.launch.launcher.run_probe", lambda _: CPU)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([*args])
        return int(end.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def replay(tmp_path: Path) -> list[str]:
    """Return the command of replays of a tp2·dcp2 engine of the tiny model with up to 64 requests."""
    path = make_path(model="tiny", tp=2, dcp=2, dtype="fp32", backend="reference", exchange="ag_rs")
    extent = Extent(requests=64, context=128, pages=4200, virtual_page=2, chunk=96, targets=(8, 64), prompts=(60,))
    write_step_times(tmp_path / "times.json", make_step_times(extent, path=path, device="CPU"))
    return ["serve", "--mode", "replay", "--step-times", str(tmp_path / "times.json"), *LOAD]


def test_search_finds_the_limit_of_a_grid_and_writes_a_run(call, replay: list[str], tmp_path: Path) -> None:
    """The SLO is the latency of 20 clients, and the grid has all numbers of clients around it."""
    grid = ",".join(map(str, range(14, 30)))
    assert call(*replay, "--concurrency", grid, "-o", str(tmp_path / "grid"))[0] == 0
    itl = {r.point.concurrency: r.serve.itl_ms.p99 for r in read_records(tmp_path / "grid")}
    slo = f"itl={itl[20] * 1.0001:.6f}"
    limit = next(n for n in range(14, 29) if itl[n + 1] > itl[20] * 1.0001)

    folder = tmp_path / "run"
    code, out, err = call(*replay, "--find", "concurrency=1-64", "--slo", slo, "-o", str(folder), "--json")
    assert code == 0, err
    assert "Searching from 1 to 64 clients for the highest load that meets the SLO" in err
    (found,) = json.loads(out)["find"]
    assert found["limit"]["load"] == limit
    assert found["limit"]["objectives"][0]["met"]
    assert not found["fails"]["objectives"][0]["met"]
    assert (found["within_tolerance"], found["deterministic"]) == (True, True)
    records = read_records(folder)
    assert found["runs"] == len(records) <= 12
    assert {r.point.repeat for r in records} == {0}
    assert call("report", str(folder))[0] == 0
    assert call("show", str(folder))[0] == 0

    file = get_record_file(folder)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]))
    code, out, err = call(*replay, "--find", "concurrency=1-64", "--slo", slo, "-o", str(folder), "--resume")
    assert code == 0, err
    assert f"the highest load that meets the SLO is {limit} clients (ITL p99 " in out
    assert [r.point.concurrency for r in read_records(folder)] == [r.point.concurrency for r in records]
    assert err.count(" tok/s, TTFT ") == len(records) - 3


def test_search_without_a_solution_exits_with_3(call, replay: list[str], tmp_path: Path) -> None:
    code, out, _ = call(*replay, "--find", "rate=0.1-4", "--slo", "ttft=1", "-o", str(tmp_path / "run"))
    assert code == 3
    assert "no load meets the SLO; the lowest is 0.1 requests/s (TTFT p90 " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--find", "rate"], "add for example --slo"),
        (["--find", "rate", "--slo", "ttft=9", "--request-rate", "2"], "--find rate and --request-rate contradict"),
        (["--find", "concurrency=1-500", "--slo", "ttft=9"], "requests (96); write concurrency=1-96, or use"),
        (["--find", "concurrency=97-500", "--slo", "ttft=9"], "requests (96); use --num-requests 5000."),
        (["--find", "users", "--slo", "ttft=9"], "searches for one of concurrency and rate"),
    ],
)
def test_invalid_search_is_refused(call, replay: list[str], words: list[str], message: str) -> None:
    code, _, err = call(*replay, *words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("command", "words", "remedy"),
    [
        ("serve", "--find rate --slo ttft=9,itl=9,tpot=9 --output-tokens 1", "itl or tpot; write --slo ttft=9"),
        ("serve", "--find rate --slo itl=9 --output-tokens 1,8", "itl; leave out --slo"),
        ("serve", "--slo itl=9 --output-tokens uniform:1-1", "itl; leave out --slo"),
        ("server --url http://127.0.0.1:9", "--find rate --slo tpot=9 --output-tokens 1", "tpot; leave out --slo"),
    ],
)
def test_objective_between_tokens_of_answers_with_one_token_is_refused(
    call, command: str, words: str, remedy: str
) -> None:
    code, _, err = call(*command.split(), *words.split())
    assert code == 2
    assert f"answers of --output-tokens 1 have one token, without {remedy}, or use longer answers." in err


@pytest.mark.distributed
def test_live_loads_run_several_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake worker has the same latencies for every load."""
    dcpbench = Typed(tmp_path, monkeypatch, capsys)
    serve = ["serve", "--tp", "2", "--dcp", "2", "--no-baseline", "--num-requests", "16", "-o", "run"]
    found = dcpbench(*serve, "--find", "concurrency=2-8,repeats=2", "--slo", "ttft=100000", "--json")
    assert found.returncode == 0, found.stderr
    (result,) = json.loads(found.stdout)["find"]
    assert result["limit"]["load"] == 8
    assert (result["limit"]["runs"], result["limit"]["runs_held"]) == (2, 2)
    assert not result["deterministic"]
    records = read_records(tmp_path / "run")
    assert {r.point.concurrency for r in records if r.outcome == "ok"} >= {8}
    assert {r.point.repeat for r in records} == {0, 1}
    assert len(list((tmp_path / "run").glob("job-*.json"))) == 1


@pytest.mark.distributed
def test_search_goes_on_in_another_job_after_a_rank_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests of 44 tokens fail once in the fake worker, in the first job of a run.

    The second repeat is measured in a second job, then the failed one again, then the loads that are chosen next.
    """
    dcpbench = Typed(tmp_path, monkeypatch, capsys)
    serve = ["serve", "--tp", "2", "--dcp", "2", "--no-baseline", "--num-requests", "64", "--timeout", "retries=1"]
    lengths = ["--input-tokens", "40", "--output-tokens", "4", "-o", "run"]
    found = dcpbench(*serve, *lengths, "--find", "concurrency=8-64,repeats=2", "--slo", "ttft=100000", "--json")
    assert found.returncode == 0, found.stderr
    records = [(r.point.concurrency, r.point.repeat, r.outcome) for r in read_records(tmp_path / "run")]
    assert records[:3] == [(8, 0, "failed"), (8, 1, "ok"), (8, 0, "ok")]
    assert records[3:] == [(load, repeat, "ok") for load in (32, 64, 16) for repeat in (0, 1)]
    first, second = (read_job(tmp_path / "run" / f"job-tp2-{number}.json") for number in range(2))
    assert {p.concurrency for p in first.points} == {8}
    assert len(second.points) == len(records) - 1
    assert json.loads(found.stdout)["find"][0]["limit"]["load"] == 64


def find_on_server(call, folder: Path, find: str, *words: str) -> dict[str, Any]:
    """Return the result of a search on the stand-in engine with SLOTS slots, which is started once."""
    engine = f"{sys.executable} -m tests.servers.step_engine --port {{port}} --model {{model}} --max-num-seqs {SLOTS}"
    engine += " --max-num-batched-tokens 512 --time-factor 0.4"
    server = [
        "server",
        "--serve-cmd",
        engine,
        "--model",
        "m",
        "--device",
        "cpu",
        "--input-tokens",
        "10",
        "--find",
        find,
    ]
    code, out, err = call(*server, *words, "-o", str(folder), "--json")
    assert code == 0, err
    assert len(list(folder.glob("**/*.log"))) == 1
    (found,) = json.loads(out)["find"]
    assert not found["deterministic"]
    return found


def test_one_server_serves_all_loads_of_a_search(call, tmp_path: Path) -> None:
    words = ["--num-requests", "16", "--output-tokens", "4", "--slo", "ttft=60000"]
    found = find_on_server(call, tmp_path / "run", "concurrency=2-6,repeats=2", *words)
    assert [one["load"] for one in found["loads"]] == [6.0]
    assert (found["limit"]["runs"], found["limit"]["runs_held"], found["fails"]) == (2, 2, None)


@pytest.mark.long
def test_limit_of_a_server_is_its_number_of_slots(call, tmp_path: Path) -> None:
    """The stand-in engine has 8 slots and a step of 10 ms.

    With up to 8 clients a request waits for the running step and its own, 20 ms. With 9 clients one always waits, so
    a request waits on average for 1/9 of the 41 steps of another, 45 ms.
    """
    words = ["--num-requests", "150", "--output-tokens", "40", "--slo", "ttft=35"]
    found = find_on_server(call, tmp_path / "run", "concurrency=6-12,repeats=1", *words)
    assert (found["limit"]["load"], found["fails"]["load"]) == (SLOTS, SLOTS + 1)
