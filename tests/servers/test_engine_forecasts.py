"""Test forecasts of loads from measured step times and the policy of an engine.

The stand-in engine (step_engine.py) serves steps of 20 ms and more in real time, with vLLM's token budget.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench import cli
from dcpbench.points.names import SGLANG, VLLM
from dcpbench.records.runs import read_run
from dcpbench.reports import findings
from dcpbench.reports.dataframes import load_frames
from dcpbench.serving.step_times import StepTimes, read_step_times

if TYPE_CHECKING:
    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[2]
BUDGET = 512
ENGINE = f"{sys.executable} -m tests.servers.step_engine --port {{port}} --model {{model}} --max-num-batched-tokens {BUDGET} "
ENGINE += "--max-model-len 4000"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a started server import the stand-in engine."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def dcpbench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    return int(end.value.code or 0), *capsys.readouterr()


def measure(capsys: pytest.CaptureFixture[str], folder: Path, flags: str, *words: str) -> list[Record]:
    """Return the records of a run with a stand-in engine."""
    engine = ["--serve-cmd", f"{ENGINE} {flags}", "--model", "m", "--device", "cpu"]
    code, _, err = dcpbench(capsys, "server", *engine, *words, "-o", str(folder))
    assert code == 0, err
    return read_run(folder).records


def read_times(folder: Path) -> StepTimes:
    """Return the step times that a run has measured."""
    (file,) = folder.glob("step-times/*.json")
    return read_step_times(file)


LOADS = ["--request-rate", "inf,1.5", "--concurrency", "4,8", "--num-requests", "64"]
"""Two closed and two open loops. TTFT of an open loop depends on how far a step is when a request comes, and near saturation on every
stall of the machine that runs this test: the open loops use a third of what the engine can serve."""
ONE_LOAD = ["--concurrency", "4", "--num-requests", "48"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "ahead", "loads", "count"),
    [
        ("--asynchronous", True, LOADS, 4),
        ("", False, ONE_LOAD, 1),
        ("--asynchronous --row-multiple 4 --launch-ms 26", True, LOADS, 4),
        ("--asynchronous --begin-ms 26", True, ONE_LOAD, 1),
        ("--asynchronous --first-token-us 20", True, ONE_LOAD, 1),
    ],
    ids=["asynchronous", "synchronous", "slow rows and launches", "late begin", "late first tokens"],
)
def test_forecasts_of_unseen_loads_agree_with_the_server(
    flags: str, ahead: bool, loads: list[str], count: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Tolerances are 5 % in output and ITL p50, and 8 % in TTFT p50."""
    lengths = ["--input-tokens", "uniform:200-900", "--output-tokens", "uniform:10-40"]
    records = measure(capsys, tmp_path / "run", flags, "--mode", "live,replay", *loads, *lengths)
    modes = [record.point.load.mode for record in records if record.point.load is not None]
    assert modes == ["replay"] * count + ["live"] * count, "each load is forecast before it is served"
    engine = read_times(tmp_path / "run").engine
    assert engine is not None
    assert (engine.policy, engine.token_budget, engine.asynchronous) == (VLLM, BUDGET, ahead)
    given_us = 20 if "--first-token-us" in flags else 0
    assert engine.row_multiple == (4 if "--row-multiple" in flags else 1)
    assert engine.begin_ms == pytest.approx(26 if "--begin-ms" in flags else 0, abs=1.5)
    assert 0.8 * given_us <= engine.first_token_us <= 1.5 * given_us
    compared = findings.compare_replay_with_live(load_frames([tmp_path / "run"]).served)
    assert len(compared) == count
    for name, most in (("output_tok_s", 0.05), ("itl_p50_ms", 0.05), ("ttft_p50_ms", 0.08)):
        errors = compared[f"{name}_error"].tolist()
        assert max(map(abs, errors)) <= most, (name, errors)


@pytest.mark.long
def test_killed_measurement_of_steps_goes_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command is killed in its third case or later; the resumed one measures none of those before again."""
    folder = tmp_path / "run"
    words = ["--serve-cmd", ENGINE, "--model", "m", "--device", "cpu", "--mode", "replay", "--num-requests", "8"]
    words += ["--input-tokens", "20", "--output-tokens", "6", "--concurrency", "2", "-o", str(folder)]
    with subprocess.Popen([sys.executable, "-m", "dcpbench", "server", *words], cwd=ROOT) as process:
        while not (stored := count_lines(folder)) or stored < 3:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    before = next(folder.glob("step-times/*.cases.jsonl")).read_bytes()
    code, _, err = dcpbench(capsys, "server", *words, "--resume")
    assert code == 0, err
    found = re.search(r"(\d+) cases of an earlier measurement are taken over", err)
    assert found
    assert int(found[1]) >= 2
    file = next(folder.glob("step-times/*.cases.jsonl"))
    assert file.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert len(read_times(folder).cases) > int(found[1])


def count_lines(folder: Path) -> int:
    """Return the lines of stored cases, 0 without a file."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("step-times/*.cases.jsonl"))


@pytest.mark.long
def test_replay_from_measured_steps_needs_no_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`server` and `serve` replay the same file with equal results, and refuse options that the file determines."""
    load = ["--num-requests", "8", "--input-tokens", "20", "--output-tokens", "6", "--concurrency", "2"]
    (record,) = measure(capsys, tmp_path / "run", "--asynchronous", "--mode", "replay", *load)
    assert record.conditions is not None
    assert record.conditions.policy == VLLM
    assert record.origin == "engine vllm 0.26.0"
    file = tmp_path / "run" / record.conditions.step_times
    assert file.is_file()
    found = [record]
    for command in ("server", "serve"):
        folder = tmp_path / command
        words = [command, "--mode", "replay", "--step-times", str(file), *load, "-o", str(folder)]
        code, _, err = dcpbench(capsys, *words)
        assert code == 0, err
        found += read_run(folder).records
    assert len({one.serve.output_tok_s for one in found if one.serve is not None}) == 1
    assert [one.point.get_key() for one in found] == [record.point.get_key()] * 3
    for words, problem in (
        (["--tp", "2", "--dcp", "1"], "--tp, --dcp: these options are fixed in"),
        (["--prefill", "policy=mixed"], "--prefill policy=mixed is unknown"),
    ):
        code, _, err = dcpbench(capsys, "serve", "--mode", "replay", "--step-times", str(file), *words)
        assert (code, problem in err) == (2, True), err
    code, _, err = dcpbench(
        capsys,
        "server",
        "--mode",
        "replay",
        "--step-times",
        str(file),
        "--prefill",
        f"policy={SGLANG}",
        *load,
        "-o",
        str(tmp_path / "p"),
    )
    assert code == 0, err
    (other,) = read_run(tmp_path / "p").records
    assert other.conditions is not None
    assert other.conditions.policy == SGLANG


@pytest.mark.long
def test_engine_with_separate_prefill_is_not_replayed_with_vllm_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load = ["--num-requests", "8", "--input-tokens", "20", "--output-tokens", "6", "--concurrency", "2"]
    engine = ["--serve-cmd", f"{ENGINE} --separate", "--model", "m", "--device", "cpu"]
    code, _, _ = dcpbench(capsys, "server", *engine, "--mode", "replay", *load, "-o", str(tmp_path / "run"))
    assert code == 4
    (record,) = read_run(tmp_path / "run").records
    assert record.outcome == "failed"
    assert "add --prefill policy=sglang if the engine schedules like SGLang" in str(record.reason)
    (record,) = measure(
        capsys, tmp_path / "other", "--separate", "--mode", "replay", "--prefill", f"policy={SGLANG}", *load
    )
    assert record.outcome == "ok"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--url", "http://127.0.0.1:1", "--prefill", "policy=vllm"],
            "--prefill policy is for replays; add --mode replay",
        ),
        (["--url", "http://127.0.0.1:1", "--token-budget", "512"], "--token-budget is for replays; add --mode replay"),
        (["--url", "http://127.0.0.1:1", "--mode", "replays"], "--mode replays is unknown"),
        (["--mode", "replay", "--step-times", "none.json"], "no such file"),
        (["--mode", "live,replay", "--step-times", "none.json"], "use --mode replay alone"),
        (["--mode", "replay", "--step-times", "f.json", "--engine", "vllm"], "needs no server; leave out --engine"),
        (["--mode", "replay", "--step-times", "f.json", "--endpoint", "chat"], "leave out --endpoint"),
        (["--mode", "replay", "--step-times", "f.json", "--client", "retries=1"], "leave out --client"),
        (["--mode", "replay", "--step-times", "f.json", "--token-budget", "9"], "leave out --token-budget"),
        (["--mode", "replay", "--step-times", "f.json", "--gpu", "H200"], "leave out --gpu"),
        (["--mode", "replay", "--step-times", "f.json", "--timeout", "start=9"], "leave out --timeout start"),
        (["--mode", "replay", "--url", "http://127.0.0.1:1", "--traces", "x"], "--traces is for loads that are sent"),
        (["--mode", "replay", "--url", "http://127.0.0.1:1", "--token-budget", "0"], "is not positive"),
    ],
)
def test_contradictory_options_are_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = dcpbench(capsys, "server", *words)
    assert code == 2
    assert problem in err


def test_attention_data_parallel_is_not_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine", "vllm", "--model", "m", "--tp", "2", "--dp", "2", "--mode", "replay", "--dry-run"]
    code, out, _ = dcpbench(capsys, "server", *words, "--device", "cpu")
    assert code == 2
    assert "cannot be measured apart; use --dp 1, or --mode live" in " ".join(out.split())


def test_engine_that_dies_during_step_measurement_fails_its_points(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Failed replayed and live points name the end of the server and its log."""
    load = ["--num-requests", "4", "--input-tokens", "20", "--output-tokens", "6", "--concurrency", "2"]
    engine = ["--serve-cmd", f"{ENGINE} --dies-after 20", "--model", "m", "--device", "cpu"]
    code, _, err = dcpbench(capsys, "server", *engine, "--mode", "live,replay", *load, "-o", str(tmp_path / "run"))
    assert code == 4, err
    records = read_run(tmp_path / "run").records
    assert [record.outcome for record in records] == ["failed"] * 2
    for record in records:
        assert "the server died" in str(record.reason)
        assert "illegal memory access" in str(record.reason)
    assert not list((tmp_path / "run").glob("step-times/*.json"))
