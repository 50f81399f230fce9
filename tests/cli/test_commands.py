"""Test dcpbench commands as a user runs them, with the fake worker in place of the real one."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dcpbench import __version__, cli
from dcpbench.commands import options, point_runner, verify
from dcpbench.launch.jobs import Check, Job
from dcpbench.plan.grid import expand_layouts
from dcpbench.plan.spec import make_spec
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records import checksums
from dcpbench.records.file import RecordFile, read_records
from dcpbench.records.record import Record
from dcpbench.show.text import format_count
from tests.cli import fake_worker
from tests.cli.typed import ENV, Typed
from tests.cli.waiting import is_gone, wait_until
from tests.unit import record_builder, serve_record_builder
from tests.unit.test_shapes import V3

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
POINT = Point(model="tiny", tp=1, concurrency=2, context=100, backend="reference", dtype="fp32")


@pytest.fixture
def dcpbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Run a command in this process with the fake worker."""
    return Typed(tmp_path, monkeypatch, capsys)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in this process with a given machine; commands without a job are quicker this way."""

    def run(*args: str, machine: Probe = CPU) -> tuple[int, str, str]:
        for name in ("run_probe", "run_torch_probe"):
            monkeypatch.setattr(f"dcpbench.launch.launcher.{name}", lambda _: machine)
        with pytest.raises(SystemExit) as end:
            cli.main(list(args))
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_sweep_that_resumes_a_serve_run_suggests_the_serve_command(call, tmp_path: Path) -> None:
    """The message must not complain that --slo was given before and is missing now."""
    served = serve_record_builder.make_served_record(serve_record_builder.make_point(serve_record_builder.DCP))
    record_builder.write_records(tmp_path / "run", [served])
    code, _, err = call("sweep", "--tp", "2", "-o", str(tmp_path / "run"), "--resume")
    assert code == 2
    assert "holds a run of serve, and this is sweep; to go on with that run, type: dcpbench" in err
    assert "--slo" not in err


@pytest.mark.distributed
def test_sweep_writes_a_report_and_resume_repeats_failed_points(dcpbench: Typed, tmp_path: Path) -> None:
    """Context 13 fails, so the sweep exits with 4; another run needs a flag, and --resume repeats the failed point."""
    sweep = [
        "sweep",
        "--tp",
        "2",
        "--dcp",
        "2",
        "--context",
        "100,13",
        "--concurrency",
        "2",
        "--no-baseline",
        "-o",
        "run",
    ]
    first = dcpbench(*sweep)
    assert first.returncode == 4
    assert "Report: run/report/report.html" in first.stdout
    assert "CPU: functional run — these timings do not reflect performance" in first.stderr
    assert "[1/2] tiny tp2·dcp2 reference ag_rs, 2 × 13 tokens  FAILED: rank 1: ValueError" in first.stderr
    assert "[2/2] tiny tp2·dcp2 reference ag_rs, 2 × 100 tokens  step 10.0 ms" in first.stderr
    failed, ok = read_records(tmp_path / "run")
    assert (failed.outcome, failed.detail["device"], ok.outcome) == ("failed", "CPU", "ok")

    again = dcpbench(*sweep)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert "--force" in again.stderr

    resumed = dcpbench(*sweep, "--resume", "--json")
    assert "1 point to run, 1 already measured" in resumed.stderr
    assert [r.point.context for r in read_records(tmp_path / "run")] == [13, 100, 13]
    summary = json.loads(resumed.stdout)
    assert (summary["ok"], summary["failed"], summary["performance"]) == (1, 1, False)
    assert [r.get("step_ms") for r in summary["results"]] == [None, 10.0]


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_ends_the_workers_and_suggests_resume(tmp_path: Path, number: int, code: int) -> None:
    """Ctrl-C, kill or a dropped ssh connection while a point hangs keeps the finished point and leaves no process.

    The job of the Ctrl-C case runs under torchrun itself.
    """
    env = ENV | {"DCPBENCH_QUICK": "" if number == signal.SIGINT else "1"}
    command = [sys.executable, str(HERE / "dcpbench_fake.py"), "sweep", "--tp", "2", "--context", "50,66"]
    command += ["--concurrency", "2", "--no-baseline", "-o", "run"]
    run = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    folder = tmp_path / "run"
    pids: list[int] = []

    def at_work() -> bool:
        pids[:] = [int(words[0]) for p in folder.glob("rank-*.pid") if (words := p.read_text().split())]
        return len(pids) == 2 and (folder / "records.jsonl").exists()

    wait_until(at_work, run)
    run.send_signal(number)
    _, err = run.communicate()
    assert run.returncode == code
    assert "-o" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert [r.outcome for r in read_records(folder)] == ["ok"]
    wait_until(lambda: all(map(is_gone, pids)))


@pytest.mark.distributed
def test_verify_exits_with_1_if_a_check_is_wrong(dcpbench: Typed) -> None:
    """The fake is wrong for dp > 1: --tp 2 gives tp2 and tp2·dcp2 (right) and tp2·dp2 (wrong)."""
    wrong = dcpbench("verify", "--tp", "2", "--json", "-o", "v")
    assert wrong.returncode == 1
    found = json.loads(wrong.stdout)
    assert [(c["layout"], c["ok"]) for c in found["checks"]] == [
        ("tp2", True),
        ("tp2·dcp2", True),
        ("tp2·dp2", False),
    ]
    right = dcpbench("verify", "--tp", "2", "--dp", "1", "-o", "v", "--force")
    assert right.returncode == 0
    assert "2 checks ok, 0 wrong, 0 points failed" in right.stderr


@pytest.mark.distributed
def test_verify_exits_with_4_if_only_a_point_failed(dcpbench: Typed) -> None:
    """Context 13 fails on rank 1; no table is printed because there are no checks."""
    done = dcpbench("verify", "--tp", "2", "--dp", "1", "--dcp", "2", "--context", "13", "-o", "v")
    assert done.returncode == 4
    assert "0 checks ok, 0 wrong, 1 point failed" in done.stderr
    assert done.stdout == ""


def test_machine_is_read_from_the_last_line_of_the_worker(dcpbench: Typed) -> None:
    """The fake prints a greeting first, as some libraries do; --json prints only JSON."""
    found = msgspec.convert(json.loads(dcpbench("doctor", "--json").stdout)["machine"], Probe)
    assert found.packages == {"torch": "2.9", "flashinfer": None}


def test_doctor_lists_packages_and_problems(call) -> None:
    machine = msgspec.structs.replace(CPU, problems=["FlashInfer is missing: --backend flashinfer cannot run."])
    _, out, _ = call("doctor", machine=machine)
    assert "flashinfer" in out
    assert "missing" in out
    assert "• FlashInfer is missing: --backend flashinfer cannot run." in out


def test_dry_run_lists_points_and_memory_and_writes_no_file(call, tmp_path, monkeypatch) -> None:
    """With 4 GPUs, tp4·dcp4 and its baseline can run, and tp8 is rejected with the reason."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("sweep", "--tp", "4,8", "--concurrency", "8", "--dry-run", machine=GPUS)
    assert code == 0
    assert "tp4·dcp4" in out
    assert "dp1·tp4·dcp4" in out
    assert "+ baseline, added by default" in out
    assert "GiB" in out
    assert "cannot run: tp8·dcp8 at 8 × 4,000: --tp 8 needs 8 GPUs and there are 4 (NVIDIA H200)." in out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_without_possible_points_prints_each_reason_once(call) -> None:
    """Two loads and two layouts, with and without DCP, are planned for a machine with 8 GPUs."""
    words = "sweep --tp 16 --dcp 1,16 --concurrency 8,16 --dry-run --gpu H200,count=8"
    code, out, err = call(*words.split())
    assert code == 3
    assert out.count("cannot run: tp16·dcp16 at 8 × 4,000 and 16 × 4,000: --tp 16 needs 16 GPUs") == 1
    instead = "dcpbench sweep --model deepseek-v3 --tp 8 --dcp 8 --dry-run --gpu H200,count=8 --concurrency 8,16"
    assert f"Type instead: {instead} (or" in out
    assert err.endswith("error: None of these points can run; the plan says why, and what to type instead.\n")
    assert "--tp 16 needs" not in err
    code, _, err = call(*words.split(), "--json")
    assert (code, err.count("--tp 16 needs 16 GPUs")) == (3, 1)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("--exchange a2a --seconds 5", " --seconds 5"),
        ("--page-size rows=64,interleave=16", " --page-size rows=64"),
        ("--page-size=interleave=16", ""),
        ("--collectives all-reduce=symm,q-replicate=yes", ""),
    ],
)
def test_suggested_smaller_layout_has_no_options_that_it_does_not_use(call, options: str, kept: str) -> None:
    """One GPU has neither exchanges nor all-reduces, so that the suggestion would be refused with their options."""
    _, out, _ = call(*f"sweep --tp 8 --dcp 8 --dry-run --gpu H200,count=1 {options}".split())
    instead = f"sweep --model deepseek-v3 --tp 1 --dcp 1 --dry-run --gpu H200,count=1{kept}"
    assert f"Type instead: dcpbench {instead} (or" in out
    code, _, err = call(*instead.split())
    assert code == 0, err


def test_dry_run_with_json_prints_one_list(call) -> None:
    code, out, _ = call("sweep", "--tp", "4,8", "--concurrency", "8", "--dry-run", "--json", machine=GPUS)
    rows = json.loads(out)
    assert code == 0
    assert [(r["layout"], r["added"], r["reason"] is None) for r in rows] == [
        ("tp4", True, True),
        ("tp4·dcp4", False, True),
        ("tp8·dcp8", False, False),
    ]


class TestPlansForAnotherMachine:
    """Test --dry-run --gpu, which plans for GPUs that this machine lacks."""

    @pytest.mark.parametrize("command", ["sweep", "serve"])
    def test_plan_names_the_given_gpus(self, call, command: str) -> None:
        code, out, err = call(command, "--tp", "8", "--concurrency", "8", "--dry-run", "--gpu", "H200,count=8")
        assert code == 0
        assert "tp8·dcp8" in out
        assert "deepseek-v3" in out
        assert "A plan for 8 × NVIDIA H200; not for this machine, and nothing is measured." in err
        assert "139.7 GiB" in err or "139.8 GiB" in err

    def test_retries_of_points_are_accepted(self, call) -> None:
        """The advice on failed points names this key of `--timeout` for both commands."""
        for command in ("sweep", "serve"):
            code, _, err = call(command, "--dry-run", "--gpu", "H200,count=8", "--timeout", "retries=2", machine=None)
            assert code == 0, err

    def test_plan_does_not_probe_this_machine(self, call, monkeypatch: pytest.MonkeyPatch) -> None:
        """A probe would start a process that imports torch, which may not be installed."""
        probed = []
        monkeypatch.setattr(point_runner, "select_device", lambda probe, _: probed.append(probe.name) or probe)
        assert call("sweep", "--dry-run", "--gpu", "B200", machine=None)[0] == 0
        assert probed == ["NVIDIA B200"]

    def test_layout_with_more_gpus_than_planned_is_rejected(self, call) -> None:
        _, out, _ = call("sweep", "--tp", "4,8", "--concurrency", "8", "--dry-run", "--gpu", "H100,count=4")
        assert "--tp 8 needs 8 GPUs and there are 4 (NVIDIA H100 80GB HBM3)." in out

    def test_several_machines_are_planned_without_rendezvous(self, call) -> None:
        """tp16 fits on 2 × 8 GPUs, and neither an address nor a secret is needed."""
        code, out, err = call("sweep", "--tp", "16", "--nodes", "2", "--dry-run", "--gpu", "H200")
        assert code == 0
        assert "tp16·dcp16" in out
        assert "8 × NVIDIA H200 on each of 2 machines" in err

    def test_verify_accepts_dry_run_for_other_gpus(self, call) -> None:
        code, out, _ = call("verify", "--tp", "4", "--dcp", "4", "--dry-run", "--gpu", "H20,count=4")
        assert code == 0
        assert "tp4·dcp4" in out

    def test_json_plan_names_the_machine(self, call) -> None:
        typed = ("sweep", "--tp", "4", "--dcp", "4", "--concurrency", "8", "--dry-run", "--json")
        (row, *_) = json.loads(call(*typed, "--gpu", "H200,count=4")[1])
        assert (row["machine"]["name"], row["machine"]["gpus"]) == ("NVIDIA H200", 4)
        assert row["machine"]["planned"]["memory_bytes_s"] == 4.8e12
        (row, *_) = json.loads(call(*typed, machine=GPUS)[1])
        assert (row["machine"]["name"], row["machine"]["planned"]) == ("NVIDIA H200", None)

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["sweep", "--gpu", "H200"], "add --dry-run, or leave --gpu out"),
            (["serve", "--gpu", "H200,count=8"], "add --dry-run, or leave --gpu out"),
            (["sweep", "--gpu", "count=8", "--dry-run"], "write for example --gpu H200,count=8"),
            (["sweep", "--gpu", "H200,count=0", "--dry-run"], "--gpu count=0 is not positive; try count=8"),
            (["sweep", "--gpu", "H20O", "--dry-run"], "did you mean H20? Known: A100, "),
            (["sweep", "--gpu", "H200", "--device", "cpu", "--dry-run"], "contradict each other"),
        ],
        ids=lambda x: "_".join(x) if isinstance(x, list) else "",
    )
    def test_invalid_gpu_options_raise_an_error_with_a_suggestion(self, call, args: list[str], words: str) -> None:
        code, out, err = call(*args)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert words in err

    def test_gpu_option_contradicts_step_times(self, call, tmp_path: Path) -> None:
        path = tmp_path / "times.json"
        path.write_text("{}")
        code, _, err = call("serve", "--mode", "replay", "--step-times", str(path), "--dry-run", "--gpu", "H200")
        assert code == 2
        assert "leave --gpu out" in err

    def test_full_size_model_without_gpus_suggests_a_dry_run(self, call) -> None:
        """671 billion parameters of 2 bytes (bf16) are 1,250 GiB, although a CPU run would use fp32."""
        code, _, err = call("sweep", "--model", "deepseek-v3")
        assert code == 3
        assert "about 1,250 GiB of weights in bf16" in err
        assert "dcpbench sweep --model deepseek-v3 --dry-run --gpu H200,count=8" in err

    def test_suggested_plan_of_an_emulation_uses_the_gpu_of_its_file(self, call, tmp_path: Path) -> None:
        """The emulated machine is measured, so a plan for other GPUs would not apply."""
        (tmp_path / "ours.toml").write_text('name = "ours"\ngpu = "H100"\ngpus_per_host = 4\n')
        code, out, _ = call("sweep", "--model", "deepseek-v3", "--emulate", str(tmp_path / "ours.toml"), "--dry-run")
        assert code == 3
        assert "--dry-run --gpu H100,count=4 --emulate" in out


class TestDcpByDefault:
    """With --tp alone DCP is measured, and the first line of the output states it."""

    def first_line(self, call, *args: str) -> str:
        return call(*args, "--concurrency", "8", "--dry-run", "--gpu", "H200")[2].split("\n")[0]

    def test_tp_alone_measures_dcp_and_suggests_dcp_1(self, call) -> None:
        message = "DCP is measured by default: tp8·dcp8, with tp8 as baseline. For plain TP alone, add --dcp 1."
        assert self.first_line(call, "sweep", "--tp", "8", "--weights-dtype", "bf16") == message
        stored = "Weights fp8, as deepseek-v3 is published; KV bf16. For weights in bf16, add --weights-dtype bf16."
        assert self.first_line(call, "sweep", "--tp", "8") == f"{message} {stored}"

    def test_first_line_names_the_planned_layout(self, call) -> None:
        line = self.first_line(call, "sweep", "--tp", "8", "--dp", "2", "--no-baseline", "--weights-dtype", "bf16")
        assert line == "DCP is measured by default: tp8·dp2·dcp4·ep1. For layouts without it alone, add --dcp 1."

    @pytest.mark.parametrize(
        "args", [["--tp", "8", "--dcp", "1"], ["--tp", "8", "--dcp", "8"], ["--tp", "1"]], ids=" ".join
    )
    def test_no_message_with_explicit_dcp_or_a_single_gpu(self, call, args: list[str]) -> None:
        assert "by default" not in self.first_line(call, "sweep", *args)
        message = "Weights fp8, as deepseek-v3 is published; KV bf16. For weights in bf16, add --weights-dtype bf16."
        assert self.first_line(call, "sweep", *args) == message


def test_command_line_overrides_the_config_file(call, tmp_path: Path) -> None:
    """The file has tp 2 and context 30, and the command line has --tp 4."""
    path = tmp_path / "sweep.yaml"
    path.write_text("tp: 2\ncontext: [30]\nno-baseline: true\nconcurrency: 2\n")
    _, out, _ = call("sweep", "--config", str(path), "--tp", "4", "--dry-run", "--json")
    assert [(r["tp"], r["context"], r["added"]) for r in json.loads(out)] == [(4, 30, False)]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["sweep", "--tp", "8", "--dcp", "8"], 3, "Type instead: dcpbench sweep --model deepseek-v3 --tp 4 --dcp 4"),
        (["sweep", "--dcp", "3"], 2, "--dcp 3 does not divide --tp 4"),
        (["sweep", "--model", "gpt-2"], 2, "known models: "),
        (["sweep", "--tp", "x"], 2, "--tp x: not a whole number"),
        (["sweep", "--resume"], 2, "--resume needs the run to continue"),
        (["sweep", "--resume", "--force", "-o", "x"], 2, "contradict each other"),
        (["sweep", "--timeout", "0"], 2, "--timeout 0 is not a positive number of seconds; try --timeout 300"),
        (["sweep", "--timeout", "nan"], 2, "--timeout nan is not"),
        (["verify", "--timeout", "inf"], 2, "--timeout inf is not"),
        (["sweep", "--seconds", "inf"], 2, "--seconds inf is not"),
        (["sweep", "--concurrency", "513"], 2, "--concurrency can be up to 512"),
        (["sweep", "--backend", "reference"], 2, "use --backend triton"),
        (["sweep", "--weights-dtype", "fp32"], 2, "use --weights-dtype bf16"),
        (["verify", "--prompts", "p.json"], 2, "--checkpoint FOLDER"),
        (["sweep", "--tp", ""], 2, "--tp is empty; write for example --tp 4,8"),
        (["sweep", "--model", ""], 2, "--model is empty; write for example --model deepseek-v3,kimi-k2"),
        (["sweep", "--kv-memory", "10"], 2, "--kv-memory 10 has no unit; write for example --kv-memory 100GiB"),
        (["sweep", "--backend", "flashinfr"], 2, "is unknown; did you mean flashinfer? Known: "),
        (["sweep", "--backend", "xyz"], 2, "--backend xyz is unknown. Known: "),
        (["sweep", "--nodes", "0"], 2, "--nodes 0 is not positive"),
        (["sweep", "--nodes", "2"], 2, "write HOST:PORT of node 0"),
        (["sweep", "--nodes", "2,endpoint=10.0.0.1:29500"], 2, "export DCPBENCH_SECRET="),
        (["sweep", "--nodes", "2,rank=2"], 2, "ranks go from 0 to 1"),
        (["sweep", "--device", "tpu"], 2, "--device tpu is unknown"),
        (["sweep", "--context", "4000000", "--concurrency", "1"], 2, "--context can be up to 163839"),
        (["sweep", "--context", "160000", "--concurrency", "512"], 3, "largest --concurrency that fits is"),
        (["sweep", "--config", "none.toml"], 2, "cannot be read"),
        (["verify", "--tp", "4", "--dcp", "3"], 2, "--dcp 3 does not divide --tp 4"),
        (["verify", "--checkpoint", "none"], 2, "--checkpoint none: no such folder"),
    ],
    ids=lambda x: "_".join(x)[:50] if isinstance(x, list) else "",
)
def test_invalid_arguments_print_one_error_line(call, args: list[str], code: int, words: str) -> None:
    """stderr has `error: …` with a suggestion and no traceback, and stdout is empty."""
    ended, out, err = call(*args, machine=GPUS)
    assert ended == code
    assert err.startswith("error: ")
    assert words in err
    assert "Traceback" not in err
    assert out == ""


def test_unknown_option_is_a_usage_error(call) -> None:
    """Errors of Typer have the same exit code."""
    code, _, err = call("sweep", "--dcpp", "8")
    assert code == 2
    assert "--dcp" in err


def test_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of dcpbench must not be reported like a mistake of the user."""

    def broken(_: object) -> Probe:
        raise ZeroDivisionError

    monkeypatch.setattr("dcpbench.launch.launcher.run_torch_probe", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_verify_without_a_layout_checks_default_layouts_that_fit(call) -> None:
    """The CPU runs all six, 2 GPUs run those of at most 2 ranks, and --dcp 4 alone implies tp 4."""
    layouts = {}
    for name, args, machine in (
        ("cpu", [], CPU),
        ("two", [], msgspec.structs.replace(GPUS, count=2)),
        ("dcp4", ["--dcp", "4"], CPU),
    ):
        code, out, _ = call("verify", "--dry-run", "--json", *args, machine=machine)
        assert code == 0
        layouts[name] = [r["layout"] for r in json.loads(out)]
    assert layouts == {
        "cpu": ["tp1", "tp2", "tp2·dcp2", "tp4·dcp2", "tp4·dcp4", "tp4·dp2·dcp2·ep1"],
        "two": ["tp1", "tp2", "tp2·dcp2"],
        "dcp4": ["tp4·dcp4"],
    }


def test_layout_without_any_check_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only one of two layouts was checked, so verify exits with 4."""
    probe = CPU
    spec = make_spec({"concurrency": "4", "context": "37"}, probe)
    layouts = [Layout(tp=1), Layout(tp=2)]
    points = [c.point for c in expand_layouts(layouts, spec, probe)]
    check = Check(
        name="attention",
        layout="tp1",
        ep=1,
        backend="reference",
        exchange="none",
        dtype="fp32",
        error=0.0,
        limit=1.0,
        ok=True,
    )
    (tmp_path / "checks.jsonl").write_bytes(msgspec.json.encode(check) + b"\n")
    assert verify._print_checks(points[:1], tmp_path, options.Run()) == 0
    assert verify._print_checks(points, tmp_path, options.Run()) == 4
    assert "no check ran for: tp2·ep1" in capsys.readouterr().err
    both = [c.point for c in expand_layouts(layouts[1:], make_spec({"ep": "1,tp"}, probe), probe)]
    two = msgspec.structs.replace(check, layout="tp2", ep=2)
    (tmp_path / "checks.jsonl").write_bytes(msgspec.json.encode(two) + b"\n")
    assert verify._print_checks(both, tmp_path, options.Run()) == 4
    assert "no check ran for: tp2·ep1;" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sweep", "verify"])
def test_output_folder_without_write_access_is_a_usage_error(command: str, call) -> None:
    """/proc/self exists, and not even root can create files in it."""
    code, _, err = call(command, "-o", "/proc/self", "--tp", "1")
    assert code == 2
    assert err.startswith("error: /proc/self cannot be used as output folder")


def test_report_into_a_folder_without_write_access_is_a_usage_error(call, tmp_path: Path) -> None:
    RecordFile(tmp_path).append(Record(point=POINT, outcome="rejected", reason="no"))
    code, _, err = call("report", str(tmp_path), "-o", "/proc/self")
    assert code == 2
    last = err.splitlines()[-1]  # on a slow machine, progress is printed before the error
    assert last.startswith("error: /proc/self cannot be written")


def test_verify_refuses_the_folder_of_a_sweep(call, tmp_path: Path) -> None:
    """The folder is refused even with --force, and another one is suggested."""
    RecordFile(tmp_path).append(Record(point=POINT, outcome="ok"))
    code, _, err = call("verify", "--tp", "1", "-o", str(tmp_path), "--force")
    assert code == 2
    assert "give verify another folder with -o" in err
    assert "--resume" not in err
    assert len(read_records(tmp_path)) == 1


def test_verify_checks_prompts_before_it_creates_the_folder(call, tmp_path: Path) -> None:
    for name in ("model.safetensors", "prompts.json"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(json.dumps(V3))
    (tmp_path / "prompts.json").write_text("[[1], [129280]]")
    prompts = ("--prompts", str(tmp_path / "prompts.json"))
    code, _, err = call(
        "verify", "--checkpoint", str(tmp_path), *prompts, "--tp", "1", "-o", str(tmp_path / "v"), machine=GPUS
    )
    assert code == 2
    assert "prompt 2: 129280 is no token" in err
    assert not (tmp_path / "v").exists()


def test_resume_refuses_another_kv_memory_and_reports_other_seconds(call, tmp_path: Path) -> None:
    """The previous job used 1 GiB and 10 s; no point is left to run, so only settings are compared."""
    settings = Settings(kv_memory_bytes=1 << 30)
    job = Job(kind="sweep", tag="tp1-0", folder=str(tmp_path), device="cpu", points=[POINT], settings=settings)
    job.get_path().write_bytes(msgspec.json.encode(job))
    RecordFile(tmp_path).append(fake_worker.make_record(POINT))
    typed = ["sweep", "--tp", "1", "--concurrency", "2", "--context", "100", "-o", str(tmp_path), "--resume"]
    code, _, err = call(*typed)
    assert code == 2
    assert "--kv-memory was 1073741824B and is not given" in err
    code, _, err = call(*typed, "--kv-memory", "1GiB", "--seconds", "3")
    assert code == 0
    assert "--seconds was 10 and is 3; points measured from here on have the new value." in err


def test_resume_reports_a_missing_run_or_other_points(call, tmp_path: Path, monkeypatch) -> None:
    """The first folder has no run, and the second one has a run with other points."""
    monkeypatch.setattr("dcpbench.launch.launcher.run_points", lambda *_: None)
    typed = ["sweep", "--tp", "1", "--concurrency", "2", "--context", "100", "--resume", "-o"]
    assert f"{tmp_path / 'new'} holds no run yet; starting one." in call(*typed, str(tmp_path / "new"))[2]
    RecordFile(tmp_path).append(fake_worker.make_record(msgspec.structs.replace(POINT, context=7)))
    assert f"None of these points is in {tmp_path}" in call(*typed, str(tmp_path))[2]


def test_resume_without_options_suggests_the_original_command(call, tmp_path: Path, monkeypatch) -> None:
    """The run has one point at tp 1 and context 100, which is not in the default grid of the CPU (tp 8 and 2)."""
    started: list[object] = []
    monkeypatch.setattr("dcpbench.launch.launcher.run_points", lambda points, *_: started.append(points))
    words = ["dcpbench", "sweep", "--tp", "1", "--concurrency", "2", "--context", "100", "-o", str(tmp_path)]
    job = Job(
        kind="sweep", tag="tp1-0", folder=str(tmp_path), device="cpu", points=[POINT], settings=Settings(),
        command=shlex.join(words),
    )  # fmt: skip
    job.get_path().write_bytes(msgspec.json.encode(job))
    RecordFile(tmp_path).append(fake_worker.make_record(POINT))
    code, _, err = call("sweep", "-o", str(tmp_path), "--resume")
    assert code == 2
    assert f"To go on with that run, type: {shlex.join(words)} --resume" in " ".join(err.split())
    assert not started
    assert len(read_records(tmp_path)) == 1
    assert call(*words[1:], "--resume")[0] == 0


@pytest.mark.parametrize(
    "more", [["--repeats", "2"], ["--seconds", "1"], ["--no-baseline"], ["--backend", "reference"]]
)
def test_resume_without_grid_options_does_not_add_the_default_grid(
    call, tmp_path: Path, monkeypatch, more: list[str]
) -> None:
    """The run has tp 1 and context 100; the default grid of the CPU has tp 8."""
    started: list[object] = []
    monkeypatch.setattr("dcpbench.launch.launcher.run_points", lambda points, *_: started.append(points))
    RecordFile(tmp_path).append(fake_worker.make_record(POINT))
    code, _, err = call("sweep", "-o", str(tmp_path), "--resume", *more)
    assert code == 2
    assert "no option gives a layout or a load, and the default grid of this machine is not the grid" in " ".join(
        err.split()
    )
    assert not started
    assert len(read_records(tmp_path)) == 1


def test_serve_resume_without_grid_options_does_not_add_the_default_grid(call, tmp_path: Path, monkeypatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("dcpbench.launch.launcher.run_points", lambda points, *_: started.append(points))
    run = ["serve", "--model", "tiny", "-o", str(tmp_path), "--device", "cpu"]
    RecordFile(tmp_path).append(fake_worker.make_record(serve_record_builder.make_point()))
    code, _, err = call(*run, "--resume", "--repeats", "2", "--slo", "ttft=5")
    assert code == 2
    assert "no option gives a layout or a load" in " ".join(err.split())
    assert not started
    call(*run, "--resume", "--repeats", "2", "--tp", "1")
    assert started


def test_resume_with_repeats_repeats_a_run_of_the_default_grid(call, tmp_path: Path, monkeypatch) -> None:
    """Each point of the default grid is measured a second time, and no other point runs."""
    started: list[Point] = []

    def measure(points: list[Point], *_: object) -> None:
        started.extend(points)
        for point in points:
            RecordFile(tmp_path).append(fake_worker.make_record(point))

    monkeypatch.setattr("dcpbench.launch.launcher.run_points", measure)
    call("sweep", "-o", str(tmp_path))
    first = list(started)
    started.clear()
    assert call("sweep", "-o", str(tmp_path), "--resume", "--repeats", "2")[0] == 0
    assert started == [msgspec.structs.replace(point, repeat=1) for point in first]


def test_layout_of_a_started_engine_has_its_expert_parallel_degree(call) -> None:
    """vLLM uses tensor-parallel experts (ep1) unless --enable-expert-parallel is passed."""
    words = ["server", "--engine", "vllm", "--model", "m", "--tp", "8", "--dp", "8", "--concurrency", "1", "--dry-run"]
    for more, name in ([], "tp8·dp8·ep1"), (["--ep", "tp"], "tp8·dp8·ep8"):
        code, out, _ = call(*words, *more, "--json")
        assert code == 0
        assert {row["layout"] for row in json.loads(out)} == {name}
        assert ("--enable-expert-parallel" in " ".join(call(*words, *more)[1:])) == bool(more)


@pytest.mark.parametrize(
    "command", ["show RUN", "show RUN --json", "report RUN", "export RUN --to csv -o OUT.csv", "compare OTHER RUN"]
)
def test_truncated_last_record_is_reported_on_stderr(command: str, call, tmp_path: Path) -> None:
    """The truncated line is ignored; a file with no other line is an error."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
        RecordFile(folder).append(fake_worker.make_record(POINT))
    records = RecordFile(run)
    line = records.path.read_bytes()
    records.path.write_bytes(line + line[:20])
    words = [
        {"RUN": str(run), "OTHER": str(other), "OUT.csv": str(tmp_path / "out.csv")}.get(word, word)
        for word in command.split()
    ]
    code, _, err = call(*words)
    (tmp_path / "out.csv").unlink(missing_ok=True)
    assert code == 0
    assert err.count("the last line of its record file was cut short; it is left out") == 1
    records.path.write_bytes(line[:20])
    code, _, err = call(*words)
    assert code == 2
    nothing = "holds no records yet" if command.startswith("compare") else "holds only a part of one record"
    assert nothing in err


def test_show_of_a_parent_folder_lists_its_runs(call, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        RecordFile(tmp_path / name).append(Record(point=POINT, outcome="ok"))
    code, _, err = call("show", str(tmp_path))
    assert code == 2
    assert f"name one or several: {tmp_path / 'a'} {tmp_path / 'b'}" in err


def test_version_option_prints_the_package_version(call) -> None:
    assert call("--version")[:2] == (0, f"dcpbench {__version__}\n")


@pytest.mark.parametrize("bad", [[1], [0, 1]], ids=["one of two", "both"])
def test_resume_repeats_points_with_an_unreadable_record(bad: list[int], dcpbench: Typed, tmp_path: Path) -> None:
    """The record has a valid checksum and a negative duration; its line stays, and the other records count."""
    sweep = ("sweep", "--tp", "1", "--concurrency", "2,4", "--context", "100", "--no-baseline", "-o", "run")
    assert dcpbench(*sweep).returncode == 0
    path = tmp_path / "run" / "records.jsonl"
    records = read_records(path)
    lines = path.read_bytes().splitlines()
    for place in bad:
        wrong = msgspec.structs.replace(records[place], seconds=-5.0)
        lines[place] = checksums.add_checksum(msgspec.json.encode(wrong))
    path.write_bytes(b"\n".join(lines) + b"\n")
    done = dcpbench(*sweep, "--resume")
    assert done.returncode == 0
    for place in bad:
        assert (
            f"run/records.jsonl, line {place + 1} cannot be read and is left out: seconds is -5, below 0.\n"
            in done.stderr
        )
    assert f"{format_count(len(bad), 'point')} to run" in done.stderr
    assert path.read_bytes().splitlines()[:2] == lines
    assert len(path.read_bytes().splitlines()) == 2 + len(bad)


def test_resume_reports_an_incomplete_last_record(dcpbench: Typed, tmp_path: Path) -> None:
    """A kill or a full disk cuts the last line short."""
    sweep = ("sweep", "--tp", "1", "--concurrency", "2,4", "--context", "100", "--no-baseline", "-o", "run")
    note = "run: the last record is incomplete, as its run was interrupted; its point is measured again.\n"
    assert dcpbench(*sweep).returncode == 0
    path = tmp_path / "run" / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    done = dcpbench(*sweep, "--resume")
    assert (done.returncode, done.stderr.count(note)) == (0, 1)
    assert "1 point to run, 1 already measured" in done.stderr
    again = dcpbench(*sweep, "--resume")
    assert (again.returncode, note in again.stderr) == (0, False)
