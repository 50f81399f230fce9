"""Test `ab` over real servers: two addresses, or two configurations of an engine, in one comparison."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from dcpbench import cli
from dcpbench.records.runs import read_run
from tests.servers.test_launch import ROOT
from tools.client_accuracy import run_test_server

if TYPE_CHECKING:
    from pathlib import Path

LOAD = "--device cpu --num-requests 8 --concurrency 4 --input-tokens 20 --output-tokens 8 --client warm-up=1"


def ab(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        cli.main(["ab", *words])
    return int(end.value.code or 0), *capsys.readouterr()


@pytest.mark.long
def test_two_servers_are_measured_alternately_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B needs twice the time per token and reports another layout; rounds alternate between A first and B first."""
    out = tmp_path / "out"
    words = ["--workload", "server", "--both", LOAD, "--rounds", "2", "--allow-cpu", "--json", "-o", str(out)]
    with run_test_server("--gap-ms 20", tmp_path / "a") as a, run_test_server("--gap-ms 40", tmp_path / "b") as b:
        code, out_text, err = ab(capsys, *words, "--a", f"--url {a} --tp 1", "--b", f"--url {b} --tp 2 --dcp 2")
    assert code == 0, err
    assert "Points are matched without tp, dcp" in err
    assert f"{a}: vllm 0.32.0, model fake." in err
    (point,) = json.loads(out_text)["points"]
    (itl,) = (row for row in point["rows"] if row["metric"] == "itl_p50")
    assert itl["ratio"] == pytest.approx(2, rel=0.3)
    assert list(json.loads((out / "ab.json").read_text())["done"]) == [
        "a/round-1",
        "b/round-1",
        "b/round-2",
        "a/round-2",
    ]
    assert {str(r.point.layout) for r in read_run(out / "b" / "round-2").records} == {"tp2·dcp2"}


def test_header_values_are_sent_but_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither ab.json nor records contain the values, and --resume accepts the same options again."""
    out, secret = tmp_path / "out", "tok-0123456789abcdef"
    words = ["--workload", "server", "--both", LOAD, "--allow-cpu", "-o", str(out)]
    with run_test_server("", tmp_path / "log") as url:
        words += [
            "--a",
            f"--url {url} --header 'X-Token: {secret}'",
            "--b",
            f"--url {url} --header 'X-Token: {secret}2'",
        ]
        for rounds in ("1", "2"):
            code, out_text, err = ab(capsys, *words, "--rounds", rounds, *(["--resume"] if rounds == "2" else []))
            assert code == 0, err
            everything = out_text + err + "".join(p.read_text("latin-1") for p in out.rglob("*") if p.is_file())
            assert secret not in everything
    sent = [json.loads(line)["headers"].get("x-token") for line in (tmp_path / "log").read_text().splitlines()]
    assert set(sent) == {secret, f"{secret}2"}
    assert "X-Token: …" in (out / "ab.json").read_text()


@pytest.mark.long
def test_two_configurations_of_an_engine_are_started_alternately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch starts and ends its server, and records --gpu as a fact about it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    both = f"{LOAD.replace('--device cpu', '--gpu H200')} --model m --tp 2 --serve-cmd"
    command = f"'{sys.executable} -m tests.servers.fake_server --port {{port}} --served-model-name {{model}} -dcp {{dcp}} --refuse 9,9'"
    words = ["--workload", "server", "--both", f"{both} {command}", "--rounds", "1", "-o", "out"]
    _, _, err = ab(capsys, *words, "--a", "--dcp 1", "--b", "--dcp 2")
    assert "Round 1 of 1: output throughput" in err
    (record,) = read_run(tmp_path / "out" / "b" / "round-1").records
    assert record.outcome == "ok"
    assert record.environment is not None
    assert record.environment.device == "H200"
    assert record.server
    assert "-dcp 2" in record.server.facts["command"]


def test_url_without_workload_server_suggests_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ab(capsys, "--a", "--url http://127.0.0.1:9", "--b", "--url http://127.0.0.1:8")
    assert code == 2
    assert "No such option: --url" in err
    assert "Add --workload server." in err


def test_unreachable_server_error_names_its_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error precedes any request to the other server."""
    words = ["--workload", "server", "--both", LOAD, "-o", str(tmp_path / "out")]
    with run_test_server("", tmp_path / "a") as a:
        code, _, err = ab(capsys, *words, "--a", f"--url {a}", "--b", "--url http://127.0.0.1:9")
    assert code
    assert "--b " in err
    assert "no server answers at http://127.0.0.1:9" in err
