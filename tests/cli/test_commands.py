"""The dcpbench command as a user meets it, with the fake worker in place of the real one."""

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
from tests.cli.waiting import is_gone, until
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
    """Runs a command in this process, with the fake worker."""
    return Typed(tmp_path, monkeypatch, capsys)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in this process on a given machine; what needs no job is quicker so."""

    def run(*args: str, machine: Probe = CPU) -> tuple[int, str, str]:
        monkeypatch.setattr("dcpbench.launch.launcher.run_probe", lambda _: machine)
        with pytest.raises(SystemExit) as end:
            cli.main(list(args))
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_resuming_a_serve_run_with_sweep_says_what_to_type(call, tmp_path: Path) -> None:
    """Not that --slo was given and now is not."""
    served = serve_record_builder.served(serve_record_builder.point(serve_record_builder.DCP))
    record_builder.write(tmp_path / "run", [served])
    code, _, err = call("sweep", "--tp", "2", "-o", str(tmp_path / "run"), "--resume")
    assert code == 2
    assert "holds a run of serve, and this is sweep; to go on with that run, type: dcpbench" in err
    assert "--slo" not in err


@pytest.mark.distributed
def test_a_sweep_measures_reports_and_goes_on_where_it_failed(dcpbench: Typed, tmp_path: Path) -> None:
    """Context 13 fails: exit 4. Then without a flag nothing is touched, --resume runs only the failed point again."""
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
def test_an_interrupt_ends_the_workers_and_says_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    """Ctrl-C, kill or a dropped ssh while a point hangs: the finished point stays recorded, no process is left.

    After Ctrl-C in a job of torchrun's own.
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

    until(at_work, run)
    run.send_signal(number)
    _, err = run.communicate()
    assert run.returncode == code
    assert "-o" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert [r.outcome for r in read_records(folder)] == ["ok"]
    until(lambda: all(map(is_gone, pids)))


@pytest.mark.distributed
def test_verify_ends_with_1_when_a_check_is_wrong(dcpbench: Typed) -> None:
    """The fake is wrong under dp: with --tp 2 these are tp2, tp2·dcp2 (right) and tp2·dp2 (wrong)."""
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
def test_verify_ends_with_4_when_nothing_is_wrong_but_a_point_failed(dcpbench: Typed) -> None:
    """Context 13 fails on rank 1: no table of checks, since there are none."""
    done = dcpbench("verify", "--tp", "2", "--dp", "1", "--dcp", "2", "--context", "13", "-o", "v")
    assert done.returncode == 4
    assert "0 checks ok, 0 wrong, 1 point failed" in done.stderr
    assert done.stdout == ""


def test_the_machine_is_read_off_the_last_line_that_the_worker_prints(dcpbench: Typed) -> None:
    """The fake prints a greeting first, as libraries do; --json is nothing but JSON."""
    found = msgspec.convert(json.loads(dcpbench("doctor", "--json").stdout)["machine"], Probe)
    assert found.packages == {"torch": "2.9", "flashinfer": None}


def test_doctor_shows_what_is_missing_for_what(call) -> None:
    """Packages with versions, and the problems as sentences."""
    machine = msgspec.structs.replace(CPU, problems=["FlashInfer is missing: --backend flashinfer cannot run."])
    _, out, _ = call("doctor", machine=machine)
    assert "flashinfer" in out
    assert "missing" in out
    assert "• FlashInfer is missing: --backend flashinfer cannot run." in out


def test_a_dry_run_lists_points_memory_and_reasons_and_writes_nothing(call, tmp_path, monkeypatch) -> None:
    """4 GPUs: tp4·dcp4 with its baseline, and tp8 rejected with the command to type."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("sweep", "--tp", "4,8", "--concurrency", "8", "--dry-run", machine=GPUS)
    assert code == 0
    assert "tp4·dcp4" in out
    assert "dp1·tp4·dcp4" in out
    assert "+ baseline, added by default" in out
    assert "GiB" in out
    assert "cannot run: tp8·dcp8 at 8 × 4,000: --tp 8 needs 8 GPUs and there are 4 (NVIDIA H200)." in out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_which_nothing_can_run_gives_each_reason_once_and_stays_a_plan(call) -> None:
    """Two loads and a layout with DCP beside one without, on a machine of 8 that is not here."""
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


def test_a_dry_run_in_json_is_one_list_on_stdout(call) -> None:
    """Bytes and reasons, for scripts."""
    code, out, _ = call("sweep", "--tp", "4,8", "--concurrency", "8", "--dry-run", "--json", machine=GPUS)
    rows = json.loads(out)
    assert code == 0
    assert [(r["layout"], r["added"], r["reason"] is None) for r in rows] == [
        ("tp4", True, True),
        ("tp4·dcp4", False, True),
        ("tp8·dcp8", False, False),
    ]


class TestPlansForAnotherMachine:
    """--dry-run --gpu: what a laptop can say of GPUs that it has not."""

    @pytest.mark.parametrize("command", ["sweep", "serve"])
    def test_a_plan_is_for_these_gpus_and_says_so(self, call, command: str) -> None:
        code, out, err = call(command, "--tp", "8", "--concurrency", "8", "--dry-run", "--gpu", "H200,count=8")
        assert code == 0
        assert "tp8·dcp8" in out
        assert "deepseek-v3" in out
        assert "A plan for 8 × NVIDIA H200; not for this machine, and nothing is measured." in err
        assert "139.7 GiB" in err or "139.8 GiB" in err

    def test_nothing_is_asked_of_this_machine(self, call, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which would start a process that loads torch, and may have none."""
        asked = []
        monkeypatch.setattr(point_runner, "select_device", lambda probe, _: asked.append(probe.name) or probe)
        assert call("sweep", "--dry-run", "--gpu", "B200", machine=None)[0] == 0
        assert asked == ["NVIDIA B200"]

    def test_a_layout_of_more_gpus_than_are_planned_is_rejected(self, call) -> None:
        _, out, _ = call("sweep", "--tp", "4,8", "--concurrency", "8", "--dry-run", "--gpu", "H100,count=4")
        assert "--tp 8 needs 8 GPUs and there are 4 (NVIDIA H100 80GB HBM3)." in out

    def test_several_machines_are_planned_without_meeting(self, call) -> None:
        """No address and no secret: 2 × 8 GPUs hold tp16."""
        code, out, err = call("sweep", "--tp", "16", "--nodes", "2", "--dry-run", "--gpu", "H200")
        assert code == 0
        assert "tp16·dcp16" in out
        assert "8 × NVIDIA H200 on each of 2 machines" in err

    def test_verify_plans_too(self, call) -> None:
        code, out, _ = call("verify", "--tp", "4", "--dcp", "4", "--dry-run", "--gpu", "H20,count=4")
        assert code == 0
        assert "tp4·dcp4" in out

    def test_json_says_which_machine(self, call) -> None:
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
    def test_what_cannot_be_planned_is_refused_with_what_to_type(self, call, args: list[str], words: str) -> None:
        code, out, err = call(*args)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert words in err

    def test_step_times_have_a_machine_of_their_own(self, call, tmp_path: Path) -> None:
        path = tmp_path / "times.json"
        path.write_text("{}")
        code, _, err = call("serve", "--mode", "replay", "--step-times", str(path), "--dry-run", "--gpu", "H200")
        assert code == 2
        assert "leave --gpu out" in err

    def test_a_full_size_model_without_gpus_names_the_plan_and_counts_in_bf16(self, call) -> None:
        """671 billion numbers of 2 bytes are 1,250 GiB; fp32 is what a CPU run would take."""
        code, _, err = call("sweep", "--model", "deepseek-v3")
        assert code == 3
        assert "about 1,250 GiB of weights in bf16" in err
        assert "dcpbench sweep --model deepseek-v3 --dry-run --gpu H200,count=8" in err

    def test_emulated_ranks_are_planned_for_the_machine_that_the_file_names(self, call, tmp_path: Path) -> None:
        """A plan for another GPU would say nothing of what is to be measured."""
        (tmp_path / "ours.toml").write_text('name = "ours"\ngpu = "H100"\ngpus_per_host = 4\n')
        code, out, _ = call("sweep", "--model", "deepseek-v3", "--emulate", str(tmp_path / "ours.toml"), "--dry-run")
        assert code == 3
        assert "--dry-run --gpu H100,count=4 --emulate" in out


class TestDcpByDefault:
    """Who types --tp alone gets DCP, and is told in the first line."""

    def first_line(self, call, *args: str) -> str:
        return call(*args, "--concurrency", "8", "--dry-run", "--gpu", "H200")[2].split("\n")[0]

    def test_tp_alone_measures_dcp_and_says_how_to_measure_tp(self, call) -> None:
        said = "DCP is measured by default: tp8·dcp8, with tp8 as baseline. For plain TP alone, add --dcp 1."
        assert self.first_line(call, "sweep", "--tp", "8", "--weights-dtype", "bf16") == said
        stored = "Weights fp8, as deepseek-v3 is published; KV bf16. For weights in bf16, add --weights-dtype bf16."
        assert self.first_line(call, "sweep", "--tp", "8") == f"{said} {stored}"

    def test_what_it_names_is_what_is_planned(self, call) -> None:
        said = self.first_line(call, "sweep", "--tp", "8", "--dp", "2", "--no-baseline", "--weights-dtype", "bf16")
        assert said == "DCP is measured by default: tp8·dp2·dcp4·ep1. For layouts without it alone, add --dcp 1."

    @pytest.mark.parametrize(
        "args", [["--tp", "8", "--dcp", "1"], ["--tp", "8", "--dcp", "8"], ["--tp", "1"]], ids=" ".join
    )
    def test_who_asked_for_it_or_gets_none_is_told_nothing(self, call, args: list[str]) -> None:
        assert "by default" not in self.first_line(call, "sweep", *args)
        said = "Weights fp8, as deepseek-v3 is published; KV bf16. For weights in bf16, add --weights-dtype bf16."
        assert self.first_line(call, "sweep", *args) == said


def test_the_command_line_overrides_the_file(call, tmp_path: Path) -> None:
    """The file says tp 2 and context 30; --tp 4 is typed."""
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
def test_a_mistake_ends_with_one_sentence_and_its_exit_code(call, args: list[str], code: int, words: str) -> None:
    """`error: …` on stderr, nothing on stdout, no traceback, the next thing to type."""
    ended, out, err = call(*args, machine=GPUS)
    assert ended == code
    assert err.startswith("error: ")
    assert words in err
    assert "Traceback" not in err
    assert out == ""


def test_an_unknown_option_is_a_usage_error_too(call) -> None:
    """Typer's own errors use the same exit code."""
    code, _, err = call("sweep", "--dcpp", "8")
    assert code == 2
    assert "--dcp" in err


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours must not look like a mistake of the user's."""

    def broken(_: object) -> Probe:
        raise ZeroDivisionError

    monkeypatch.setattr("dcpbench.launch.launcher.run_probe", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_verify_without_a_layout_takes_the_usual_six_that_the_gpus_can_hold(call) -> None:
    """On the CPU all of them; on 2 GPUs those of at most 2 ranks; --dcp 4 alone means tp 4."""
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


def test_a_layout_without_any_check_is_not_a_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Silence is not agreement: one layout of two was checked."""
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
def test_a_folder_that_takes_no_files_is_a_sentence(command: str, call) -> None:
    """It exists, and not even root can write into it."""
    code, _, err = call(command, "-o", "/proc/self", "--tp", "1")
    assert code == 2
    assert err.startswith("error: /proc/self cannot be used as output folder")


def test_so_it_is_for_a_report(call, tmp_path: Path) -> None:
    """The records are fine, the place is not."""
    RecordFile(tmp_path).append(Record(point=POINT, outcome="rejected", reason="no"))
    code, _, err = call("report", str(tmp_path), "-o", "/proc/self")
    assert code == 2
    last = err.splitlines()[-1]  # on a slow machine, progress precedes it
    assert last.startswith("error: /proc/self cannot be written")


def test_verify_leaves_the_records_of_a_sweep_alone(call, tmp_path: Path) -> None:
    """With --force, too; the way out is another folder."""
    RecordFile(tmp_path).append(Record(point=POINT, outcome="ok"))
    code, _, err = call("verify", "--tp", "1", "-o", str(tmp_path), "--force")
    assert code == 2
    assert "give verify another folder with -o" in err
    assert "--resume" not in err
    assert len(read_records(tmp_path)) == 1


def test_verify_checks_its_prompts_before_it_launches_anything(call, tmp_path: Path) -> None:
    """No folder is made, and the prompt is named."""
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


def test_resume_with_another_pool_is_refused_and_with_another_time_limit_is_told(call, tmp_path: Path) -> None:
    """The folder's job ran with 1 GiB and 10 s; nothing is left to run, so only the settings are compared."""
    settings = Settings(kv_memory_bytes=1 << 30)
    job = Job(kind="sweep", tag="tp1-0", folder=str(tmp_path), device="cpu", points=[POINT], settings=settings)
    job.get_path().write_bytes(msgspec.json.encode(job))
    RecordFile(tmp_path).append(fake_worker.record(POINT))
    typed = ["sweep", "--tp", "1", "--concurrency", "2", "--context", "100", "-o", str(tmp_path), "--resume"]
    code, _, err = call(*typed)
    assert code == 2
    assert "--kv-memory was 1073741824B and is not given" in err
    code, _, err = call(*typed, "--kv-memory", "1GiB", "--seconds", "3")
    assert code == 0
    assert "--seconds was 10 and is 3; points measured from here on have the new value." in err


def test_resume_says_when_there_is_nothing_to_go_on_with(call, tmp_path: Path, monkeypatch) -> None:
    """A folder without a run, and a run with other points."""
    monkeypatch.setattr("dcpbench.launch.launcher.run_points", lambda *_: None)
    typed = ["sweep", "--tp", "1", "--concurrency", "2", "--context", "100", "--resume", "-o"]
    assert f"{tmp_path / 'new'} holds no run yet; starting one." in call(*typed, str(tmp_path / "new"))[2]
    RecordFile(tmp_path).append(fake_worker.record(msgspec.structs.replace(POINT, context=7)))
    assert f"None of these points is in {tmp_path}" in call(*typed, str(tmp_path))[2]


def test_resume_without_options_does_not_add_the_default_grid_to_a_run(call, tmp_path: Path, monkeypatch) -> None:
    """The run holds one point of context 100 at tp 1; the default grid of the CPU is tp 8 and 2, 8 requests."""
    started: list[object] = []
    monkeypatch.setattr("dcpbench.launch.launcher.run_points", lambda points, *_: started.append(points))
    words = ["dcpbench", "sweep", "--tp", "1", "--concurrency", "2", "--context", "100", "-o", str(tmp_path)]
    job = Job(
        kind="sweep", tag="tp1-0", folder=str(tmp_path), device="cpu", points=[POINT], settings=Settings(),
        command=shlex.join(words),
    )  # fmt: skip
    job.get_path().write_bytes(msgspec.json.encode(job))
    RecordFile(tmp_path).append(fake_worker.record(POINT))
    code, _, err = call("sweep", "-o", str(tmp_path), "--resume")
    assert code == 2
    assert f"To go on with that run, type: {shlex.join(words)} --resume" in " ".join(err.split())
    assert not started
    assert len(read_records(tmp_path)) == 1
    assert call(*words[1:], "--resume")[0] == 0


@pytest.mark.parametrize(
    "more", [["--repeats", "2"], ["--seconds", "1"], ["--no-baseline"], ["--backend", "reference"]]
)
def test_resume_with_options_that_give_no_grid_does_not_add_the_default_grid_to_a_run(
    call, tmp_path: Path, monkeypatch, more: list[str]
) -> None:
    """The run has tp 1 and context 100; the default grid of the CPU has tp 8."""
    started: list[object] = []
    monkeypatch.setattr("dcpbench.launch.launcher.run_points", lambda points, *_: started.append(points))
    RecordFile(tmp_path).append(fake_worker.record(POINT))
    code, _, err = call("sweep", "-o", str(tmp_path), "--resume", *more)
    assert code == 2
    assert "no option gives a layout or a load, and the default grid of this machine is not the grid" in " ".join(
        err.split()
    )
    assert not started
    assert len(read_records(tmp_path)) == 1


def test_serve_resumed_with_options_that_give_no_grid_does_not_add_the_default_grid_to_a_run(
    call, tmp_path: Path, monkeypatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("dcpbench.launch.launcher.run_points", lambda points, *_: started.append(points))
    run = ["serve", "--model", "tiny", "-o", str(tmp_path), "--device", "cpu"]
    RecordFile(tmp_path).append(fake_worker.record(serve_record_builder.point()))
    code, _, err = call(*run, "--resume", "--repeats", "2", "--slo", "ttft=5")
    assert code == 2
    assert "no option gives a layout or a load" in " ".join(err.split())
    assert not started
    call(*run, "--resume", "--repeats", "2", "--tp", "1")
    assert started


def test_resume_with_repeats_adds_them_to_a_run_of_the_default_grid(call, tmp_path: Path, monkeypatch) -> None:
    """Each point of the default grid is measured a second time, and nothing else."""
    started: list[Point] = []

    def measure(points: list[Point], *_: object) -> None:
        started.extend(points)
        for point in points:
            RecordFile(tmp_path).append(fake_worker.record(point))

    monkeypatch.setattr("dcpbench.launch.launcher.run_points", measure)
    call("sweep", "-o", str(tmp_path))
    first = list(started)
    started.clear()
    assert call("sweep", "-o", str(tmp_path), "--resume", "--repeats", "2")[0] == 0
    assert started == [msgspec.structs.replace(point, repeat=1) for point in first]


def test_a_started_engine_is_named_with_its_experts(call) -> None:
    """vLLM and SGLang split experts over all ranks unless they get their flag; an engine file may have any flags."""
    words = ["server", "--engine", "vllm", "--model", "m", "--tp", "8", "--dp", "8", "--concurrency", "1", "--dry-run"]
    for more, name in ([], "tp8·dp8·ep1"), (["--ep", "tp"], "tp8·dp8·ep8"):
        code, out, _ = call(*words, *more, "--json")
        assert code == 0
        assert {row["layout"] for row in json.loads(out)} == {name}
        assert ("--enable-expert-parallel" in " ".join(call(*words, *more)[1:])) == bool(more)


@pytest.mark.parametrize(
    "command", ["show RUN", "show RUN --json", "report RUN", "export RUN --to csv -o OUT.csv", "compare OTHER RUN"]
)
def test_a_last_line_cut_short_is_told_in_the_terminal(command: str, call, tmp_path: Path) -> None:
    """It is left out; a file of which nothing is left is an error."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
        RecordFile(folder).append(fake_worker.record(POINT))
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


def test_show_of_a_folder_of_runs_names_them(call, tmp_path: Path) -> None:
    """`dcpbench show runs` is typed easily."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        RecordFile(tmp_path / name).append(Record(point=POINT, outcome="ok"))
    code, _, err = call("show", str(tmp_path))
    assert code == 2
    assert f"name one or several: {tmp_path / 'a'} {tmp_path / 'b'}" in err


def test_version_is_the_packages(call) -> None:
    """One line."""
    assert call("--version")[:2] == (0, f"dcpbench {__version__}\n")


@pytest.mark.parametrize("bad", [[1], [0, 1]], ids=["one of two", "both"])
def test_resume_measures_the_point_of_a_line_that_cannot_be_read_again(
    bad: list[int], dcpbench: Typed, tmp_path: Path
) -> None:
    """As an older version wrote it: sealed, with a duration below 0. The line stays, and the other records count."""
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
