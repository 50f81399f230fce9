"""Test `dcpbench serve` as a user runs it, with the fake worker in place of the real one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dcpbench import cli
from dcpbench.points.device_probe import Probe
from dcpbench.records.file import read_records
from dcpbench.records.record import Conditions, Environment
from dcpbench.reports.reproduce import build_command
from dcpbench.serving.step_times import Case, Chunks, Decodes, MeasuredCase, StepTimes, write_step_times
from tests.cli.typed import ENV, Typed
from tests.cli.waiting import is_gone, wait_until
from tests.unit.step_times_builder import make_path

HERE = Path(__file__).parent
GPUS = Probe(
    device="cuda",
    count=4,
    name="NVIDIA H200",
    memory_bytes=139 << 30,
    l2_bytes=60 << 20,
    packages={"flashinfer": "0.6.18"},
)
CPU = Probe(device="cpu", count=0, name="CPU", packages={"torch": "2.9", "flashinfer": None})
COMMAND = [sys.executable, str(HERE / "dcpbench_fake.py"), "serve"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `dcpbench serve` in this process with a given machine."""

    def run(*args: str, machine: Probe = CPU) -> tuple[int, str, str]:
        monkeypatch.setattr("dcpbench.launch.launcher.run_probe", lambda _: machine)
        with pytest.raises(SystemExit) as end:
            cli.main(["serve", *args])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.mark.distributed
def test_points_are_served_and_skipped_if_already_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Timestamps of the request file are out of order, which is reported; --json prints only JSON."""
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n2,9,3\n1,8,3\n0,7,3\n")
    serve = ["serve", "--tp", "2", "--dcp", "1,2", "--no-baseline", "--requests", "t.csv", "-o", "run"]
    dcpbench = Typed(tmp_path, monkeypatch, capsys)
    first = dcpbench(*serve, "--json")
    assert first.returncode == 0, first.stderr
    assert "its times were out of order; the requests are sent by time." in first.stderr
    assert "[2/2] tiny tp2·dcp2 reference ag_rs, trace times, 3 of t.csv  10 tok/s" in first.stderr
    summary = json.loads(first.stdout)
    assert summary["ok"] == 2
    assert [r["serve"]["finished"] for r in summary["results"]] == [3, 3]
    job = json.loads((tmp_path / "run" / "job-tp2-0.json").read_text())
    assert job["settings"]["trace_path"] == str(tmp_path / "t.csv")
    assert {p["workload"] for p in job["points"]} == {"serve"}

    again = dcpbench(*serve, "--resume")
    assert "0 points to run, 2 already measured" in again.stderr
    other = dcpbench(*serve, "--resume", "--slo", "ttft=5")
    assert other.returncode == 2
    assert "--slo was not given and is ttft=5" in other.stderr


def start(folder: Path, input_tokens: int, **env: str) -> subprocess.Popen[str]:
    """Start a run of 2 ranks that never end, and return when both are running."""
    command = [*COMMAND, "--tp", "2", "--input-tokens", str(input_tokens), "--output-tokens", "10", "--no-baseline"]
    run = subprocess.Popen(
        [*command, "-o", "run"], cwd=folder, env=ENV | env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    wait_until(lambda: len(list((folder / "run").glob("waits-*"))) == 2, run)
    return run


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.long
def test_interrupt_waits_for_the_record_of_finished_requests(tmp_path: Path, number: int, code: int) -> None:
    """Ranks have time to write a record after Ctrl-C from torchrun itself, and --resume serves the load again."""
    run = start(tmp_path, 120, DCPBENCH_QUICK="" if number == signal.SIGINT else "1")
    run.send_signal(number)
    _, err = run.communicate()
    assert run.returncode == code
    assert "Interrupted: writing the requests that have finished; Ctrl-C again ends at once" in err
    assert "--resume" in err
    assert "Traceback" not in err
    (record,) = read_records(tmp_path / "run")
    assert record.serve is not None
    assert (record.outcome, record.serve.finished, record.serve.cancelled) == ("failed", 1, 2)
    assert not list((tmp_path / "run").glob("rank-*.pid"))


@pytest.mark.distributed
@pytest.mark.long
def test_second_interrupt_kills_the_ranks(tmp_path: Path) -> None:
    """The ranks would write forever, so they are killed without a record."""
    run = start(tmp_path, 121)
    pids = [int(path.read_text().split()[0]) for path in (tmp_path / "run").glob("rank-*.pid")]
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    while "Interrupted: writing" not in run.stderr.readline():
        pass
    run.send_signal(signal.SIGINT)
    _, err = run.communicate()
    assert run.returncode == 130
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "records.jsonl").exists()
    assert len(pids) == 2
    wait_until(lambda: all(map(is_gone, pids)))


def test_dry_run_lists_loads_and_reasons(call) -> None:
    """tp8 has too few GPUs; the other points have a KV pool."""
    code, out, _ = call("--tp", "4,8", "--request-rate", "0.5,2", "--output-tokens", "1500", "--dry-run", machine=GPUS)
    assert code == 0
    assert "0.5 req/s, 768 × 4000→1500 tokens" in out
    assert "cannot run: tp8·dcp8 at 0.5 req/s, 768 × 4000→1500 tokens, 512 at once and 2 req/s" in out
    code, out, _ = call("--tp", "4", "--concurrency", "8", "--dry-run", "--json", machine=GPUS)
    rows = json.loads(out)
    assert [(r["layout"], r["workload"], r["load"]["arrival"], r["added"]) for r in rows] == [
        ("tp4", "serve", "closed", True),
        ("tp4·dcp4", "serve", "closed", False),
    ]


def test_long_live_run_prints_a_warning(call) -> None:
    """768 × 1,500 tokens for 8 clients are 144,000 steps, 120 min at 50 ms each; limits and replays are short."""
    _, _, err = call("--dry-run", machine=GPUS)
    assert "about 120 min for the longest load of each layout, at 50 ms per step. --mode replay" in err
    assert "takes long" not in call("--dry-run", "--timeout", "load=60", machine=GPUS)[2]
    assert "takes long" not in call("--dry-run", "--mode", "replay", machine=GPUS)[2]


def test_too_few_requests_for_p99_slo_print_a_warning(call) -> None:
    """12 requests are enough only for the median, and the default number for p99; CPU results are not judged."""
    words = ("--tp", "4", "--concurrency", "4", "--slo", "ttft=500", "--dry-run")
    _, _, err = call(*words, "--num-requests", "12", machine=GPUS)
    assert "with 12 requests the SLO is judged at p50, not at p99, which needs 662 completed requests" in err
    assert "Warning" not in call(*words, machine=GPUS)[2]
    assert "Warning" not in call(*words)[2]


def test_rate_of_inf_is_explained(call) -> None:
    code, out, err = call("--tp", "4", "--request-rate", "inf", "--output-tokens", "1500", "--dry-run", machine=GPUS)
    assert code == 0
    assert "768 clients, 768 × 4000→1500 tokens" in out
    assert "all requests are sent at once, as a closed loop with one client for each of them" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--request-rate", "0"], "--request-rate 0 is not a positive number"),
        (["--input-tokens", "-5"], "--input-tokens -5: -5 tokens"),
        (["--output-tokens", "999999"], "lower --input-tokens or --output-tokens"),
        (["--prefill", "chunk=3"], "use --prefill chunk=4 or more"),
        (["--prefill", "chunk=2x"], "--prefill chunk=2x: not a whole number; write --prefill [attention=]NAME"),
        (["--prefix-share", "50%"], "--prefix-share share=50%: not a number; write --prefix-share [share=]S,groups=N."),
        (
            ["--timeout", "load=soon"],
            "--timeout load=soon: not a number; write --timeout [stall=]S,point=S,retries=N,load=S",
        ),
        (["--slo", "ttft"], "write for example --slo ttft=500,itl=50, in ms"),
        (["--requests", "none"], "--requests none cannot be read"),
        (["--prefill", "flashinfer"], "use --prefill sdpa"),
        (["--step-times", "x"], "add --mode replay"),
        (["--mode", "replay", "--step-times", "x"], "no such file"),
        (["--kv-memory", "1KiB"], "to serve all requests, give --kv-memory"),
        (["--resume"], "--resume needs the run to continue"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_invalid_options_are_one_error_line(call, args: list[str], words: str) -> None:
    """stderr has `error: …` with a suggestion and no traceback, and stdout is empty."""
    code, out, err = call(*args)
    assert code in {2, 3}
    assert err.startswith("error: ")
    assert words in err
    assert out == ""


@pytest.fixture
def step_times(tmp_path: Path) -> Path:
    """Write step times of 10 ms for a tp2·dcp2 engine of the tiny model, up to 4 requests or 96 prompt tokens."""
    decodes = [Case(decodes=(Decodes(n, c),)) for n in (1, 4) for c in (1, 200)]
    chunks = [Case(chunks=(Chunks(1, t, p),)) for t in (1, 96) for p in (0, 200)]
    path = tmp_path / "times.json"
    write_step_times(
        path,
        StepTimes(
            path=make_path(model="tiny", tp=2, dcp=2, dtype="fp32", backend="reference", exchange="ag_rs"),
            cases=[MeasuredCase(case=case, samples_ms=[10.0]) for case in decodes + chunks],
            launch_ms=0.0,
            measuring_s=1.0,
            conditions=Conditions(weights="synthetic", layers=3, layers_held=3, full_weights_bytes_per_gpu=1),
            environment=Environment(device="CPU", device_count=0),
            warnings=["cpu"],
        ),
    )
    return path


def test_replay_takes_its_layout_from_the_step_times(call, step_times: Path, tmp_path: Path) -> None:
    """The replay needs no GPU and no job, and the file has --tp, --dcp and --backend; 4 clients send 16 × 8 tokens."""
    run = ["--mode", "replay", "--step-times", str(step_times), "-o", str(tmp_path / "run")]
    code, out, err = call(
        *run,
        "--prefill",
        "policy=prefill-first",
        "--json",
        machine=msgspec.structs.replace(CPU, name="asked for nothing"),
    )
    assert code == 0, err
    (record,) = read_records(tmp_path / "run")
    assert (record.point.tp, record.point.dcp, record.point.load.mode) == (2, 2, "replay")
    assert (record.serve.finished, record.outcome) == (16, "ok")
    assert json.loads(out)["results"][0]["serve"]["finished"] == 16
    assert not list((tmp_path / "run").glob("job-*"))


def test_instances_are_replayed_from_step_times_of_one_instance(call, step_times: Path, tmp_path: Path) -> None:
    """Each ratio has a baseline of as many combined instances; the file has no other layout as a baseline."""
    run = [
        "--mode",
        "replay",
        "--step-times",
        str(step_times),
        "--prefill",
        "policy=prefill-first",
        "-o",
        str(tmp_path / "run"),
    ]
    code, _, err = call(*run, "--disaggregate", "1:1/1P2D,gb-s=50,ms=3")
    assert code == 0, err
    records = {r.point.layout_name: r for r in read_records(tmp_path / "run")}
    assert set(records) == {f"tp2·dcp2 {of}" for of in ("1P1D", "1P2D", "×2", "×3")}
    assert {r.serve.finished for r in records.values()} == {16}
    split = records["tp2·dcp2 1P2D"].serve
    assert split.instances.transfers == 16
    assert split.output_tok_s_per_gpu == pytest.approx(split.output_tok_s / 6)
    assert "Prefill and decode on separate GPUs" in (tmp_path / "run" / "report" / "report.md").read_text()


def test_step_times_of_another_layout_are_refused(call, step_times: Path) -> None:
    code, _, err = call("--mode", "replay", "--step-times", str(step_times), "--tp", "4")
    assert code == 2
    assert "measured with --tp 2 instead of 4" in err


def test_step_times_of_another_model_are_refused(call, step_times: Path) -> None:
    """The error names both models, and precedes checks of what the kernels of this model read."""
    code, _, err = call(
        "--mode", "replay", "--step-times", str(step_times), "--model", "deepseek-v3", "--weights-dtype", "fp32"
    )
    assert code == 2
    assert "measured with --model tiny instead of deepseek-v3" in err


def test_load_beyond_the_step_times_fails_with_the_missing_range(call, step_times: Path, tmp_path: Path) -> None:
    """Chunks of prompts of 30,000 tokens have a longer prefix than the 200 measured ones."""
    run = ["--mode", "replay", "--step-times", str(step_times), "-o", str(tmp_path / "run")]
    code, _, _ = call(*run, "--input-tokens", "30000", "--output-tokens", "4")
    (record,) = read_records(tmp_path / "run")
    assert (code, record.outcome) == (4, "failed")
    assert "no step time is known" in record.reason
    assert record.detail == {"device": "CPU"}


def test_pipeline_stages_are_replayed_from_step_times_without_stages(call, step_times: Path, tmp_path: Path) -> None:
    """The report states the source of step times and the wait of a stage, and each record can be repeated."""
    run = ["--mode", "replay", "--step-times", str(step_times), "--prefill", "policy=prefill-first"]
    code, _, err = call(*run, "--stages", "1/2,micro-batches=4", "-o", str(tmp_path / "run"))
    assert code == 0, err
    records = {r.point.layout_name: r for r in read_records(tmp_path / "run")}
    assert set(records) == {"tp2·dcp2", "tp2·dcp2·pp2"}
    staged = records["tp2·dcp2·pp2"]
    assert staged.serve.stages.micro_batches == 4
    assert staged.serve.output_tok_s_per_gpu == pytest.approx(staged.serve.output_tok_s / 4)
    report = (tmp_path / "run" / "report" / "report.md").read_text()
    assert "Times of steps over stages are estimated: measured steps without stages" in report
    assert "A stage of tp2·dcp2·pp2 with 4 micro-batches waits for " in report
    assert "--stages 2,micro-batches=4" in build_command(staged.point, staged.measured_with, cpu=True)


def test_dcp_over_pcp_ranks_is_replayed_from_step_times_of_dcp_alone(call, step_times: Path, tmp_path: Path) -> None:
    """All 4 ranks of a tp2·pcp2 stage share the KV cache, and the file has step times of tp2·dcp2."""
    run = ["--mode", "replay", "--step-times", str(step_times), "--prefill", "policy=prefill-first"]
    code, _, err = call(*run, "--stages", "pp=2,pcp=2", "--dcp", "4", "-o", str(tmp_path / "run"))
    assert code == 0, err
    (record,) = read_records(tmp_path / "run")
    assert (record.outcome, record.point.layout_name) == ("ok", "tp2·dcp4·pp2·pcp2")
    assert record.serve.output_tok_s_per_gpu == pytest.approx(record.serve.output_tok_s / 8)
    code, _, err = call(*run, "--stages", "pcp=2", "--dcp", "2", "-o", str(tmp_path / "other"))
    assert code == 2
    assert "measured with --dcp 2 instead of 1" in err


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("live", "the engine runs no pipeline stages and no prefill context parallelism"),
        ("replay", "estimated from measured steps of the layout without them"),
    ],
)
def test_pipeline_stages_need_a_replay_with_step_times(call, mode: str, why: str) -> None:
    code, _, err = call("--tp", "2", "--dcp", "1", "--mode", mode, "--stages", "2")
    assert code == 2
    assert why in err
