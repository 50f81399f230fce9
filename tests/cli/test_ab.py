"""Test `dcpbench ab`, which launches two variants in turn, with the fake worker in place of the real one."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dcpbench import cli
from dcpbench.commands import ab as ab_command
from dcpbench.commands.ab import Plan, State, get_order
from dcpbench.compare.comparison import Comparison
from dcpbench.points.device_probe import Probe
from dcpbench.records.file import read_records
from tests.cli.typed import ENV, Typed
from tests.cli.waiting import wait_until

HERE = Path(__file__).parent
COMMAND = [sys.executable, str(HERE / "dcpbench_fake.py"), "ab"]
VARIANTS = ["--both", "--tp 1 --concurrency 2", "--a", "--context 100"]
SAME = [*VARIANTS, "--b", "--context 100"]


@pytest.fixture
def ab(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command in this process with the fake worker."""
    return functools.partial(Typed(tmp_path, monkeypatch, capsys), "ab")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a command in this process that ends before any launch."""

    def run(*args: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("dcpbench.launch.launcher.run_probe", lambda _: Probe(device="cpu", count=0, name="CPU"))
        with pytest.raises(SystemExit) as end:
            cli.main(["ab", *args])
        return int(end.value.code or 0), capsys.readouterr().err

    return run


def test_order_of_variants_alternates_so_that_linear_drift_cancels() -> None:
    """The order is A B, B A: over two rounds both have the same mean position, (1 + 4) / 2 = (2 + 3) / 2."""
    assert "".join("".join(get_order(n)) for n in range(1, 5)) == "abbaabba"


@pytest.mark.distributed
def test_two_variants_are_launched_alternately_and_compared_per_round(ab, tmp_path: Path) -> None:
    """Each step of the fake takes 10 ms, so four rounds give SAME if CPU results may be judged."""
    both = ["--both", "--tp 2 --dcp 2 --concurrency 2 --context 100"]
    done = ab(*both, "--b", "--exchange a2a", "--rounds", "4", "-o", "out", "--allow-cpu", "--json")
    assert done.returncode == 0, done.stderr
    state = msgspec.json.decode((tmp_path / "out" / "ab.json").read_bytes(), type=State)
    assert list(state.done)[:4] == ["a/round-1", "b/round-1", "b/round-2", "a/round-2"]
    assert "Points are matched without exchange, in which the variants differ." in done.stderr
    found = json.loads(done.stdout)
    assert (found["paired"], found["across"], found["counts"]) == (True, ["exchange"], {"SAME": 2})
    record = read_records(tmp_path / "out" / "b" / "round-1")[0]
    assert record.point.exchange == "a2a"
    job = json.loads((tmp_path / "out" / "b" / "round-1" / "job-tp2-0.json").read_bytes())
    assert job["command"] == (
        "dcpbench sweep --tp 2 --dcp 2 --concurrency 2 --context 100 --exchange a2a --no-baseline -o out/b/round-1"
    )
    assert (tmp_path / "out" / "forest.png").exists()


@pytest.mark.distributed
def test_ab_prints_a_cpu_warning_the_plan_rounds_and_one_report(ab, tmp_path: Path) -> None:
    """Output of the launches is suppressed, and no baseline is added."""
    done = ab(
        "--both",
        "--tp 2 --dcp 2,4 --concurrency 2 --context 100",
        "--b",
        "--exchange a2a",
        "--rounds",
        "2",
        "-o",
        "out",
    )
    assert done.returncode == 0, done.stderr
    first, a, refused, *_ = lines = done.stderr.splitlines()
    assert first.startswith("CPU: functional run — these timings do not reflect performance; all of them will be")
    assert a == "A: dcpbench sweep --tp 2 --dcp 2,4 --concurrency 2 --context 100 --no-baseline  (1 point)"
    assert refused.startswith("   cannot run: tp2·dp1·dcp4 at 2 × 100: ")
    assert "2 rounds of A and B in turn. Output: out" in lines
    rounds = [
        line for line in lines[lines.index("2 rounds of A and B in turn. Output: out") + 1 :] if "matched" not in line
    ]
    assert [line.split(" → ")[0] for line in rounds] == ["Round 1 of 2: step time 10", "Round 2 of 2: step time 10"]
    assert [line.rpartition(", B/A ")[2].split(";")[0] for line in rounds] == ["1.000", "1.000"]
    assert {r.point.layout_name for r in read_records(tmp_path / "out" / "a" / "round-1") if r.metrics} == {"tp2·dcp2"}
    assert list((tmp_path / "out").rglob("report")) == []
    assert "✅" not in (tmp_path / "out" / "compare.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("where", ["typed", "file"])
@pytest.mark.distributed
def test_baselines_are_measured_only_for_variants_that_request_them(where: str, ab, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text("baseline = true\n", encoding="utf-8")
    more = "--baseline" if where == "typed" else "--config sweep.toml"
    done = ab("--both", f"--tp 2 --dcp 2 --concurrency 2 {more}", "--b", "--exchange a2a", "--rounds", "1", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert "--no-baseline" not in done.stderr
    assert "Round 1 of 1: step time B/A 1.000 to 1.000 in 2 points, median 1.000" in done.stderr
    assert {r.point.layout_name for r in read_records(tmp_path / "out" / "a" / "round-1")} == {"tp2", "tp2·dcp2"}


def test_interrupt_before_the_first_launch_exits_with_130(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt arrives in the inner command while it plans points; Typer turns it into an exit code."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dcpbench.plan.spec.make_spec", interrupted)
    code, err = call(*SAME, "-o", "out")
    assert code == 130
    assert err.endswith("Interrupted. To start again, repeat the command.\n")


@pytest.mark.distributed
def test_interrupt_during_a_launch_prints_one_hint(ab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch has no results and exits with 130, which is no failure of the launch."""
    monkeypatch.setattr("dcpbench.commands.point_runner.measure", lambda *_, **__: 130)
    plans = {side: Plan(arguments=[]) for side in "ab"}
    monkeypatch.setattr(ab_command, "_make_plans", lambda *_: plans)
    done = ab(*SAME, "--rounds", "2", "-o", "out")
    assert done.returncode == 130
    assert "Interrupted in a/round-1. To go on, repeat the command with: -o out --resume" in done.stderr


@pytest.mark.distributed
def test_interrupt_in_round_2_compares_round_1_and_suggests_resume(ab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt arrives in the third launch, which is B's of round 2."""
    launches = []

    def launch(folder: Path, *args: object, **more: object) -> int:
        launches.append(folder)
        if len(launches) == 3:
            raise KeyboardInterrupt
        return real(folder, *args, **more)

    real = ab_command._launch
    monkeypatch.setattr(ab_command, "_launch", launch)
    done = ab(*SAME, "--rounds", "2", "-o", "out")
    assert done.returncode == 130
    assert "Interrupted in b/round-2; the rounds that have ended on both sides are compared." in done.stderr
    assert done.stderr.splitlines()[-1] == "To go on, repeat the command with: -o out --resume"
    assert done.stderr.count("--resume") == 1
    assert "UNDECIDED" in done.stdout


@pytest.mark.distributed
@pytest.mark.long
def test_resume_continues_with_the_interrupted_launch(ab, tmp_path: Path) -> None:
    """Context 66 hangs in B until Ctrl-C; A's launch is kept, and --resume starts with B's."""
    command = [*COMMAND, *VARIANTS, "--b", "--context 66", "--rounds", "1", "-o", "out"]
    run = subprocess.Popen(command, cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_until((tmp_path / "out" / "b" / "round-1" / "rank-0.pid").exists, run)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate()
    assert run.returncode == 130
    assert err.count("--resume") == 1
    assert "Interrupted in b/round-1. To go on, repeat the command with: -o out --resume" in err
    assert "Traceback" not in err
    state = msgspec.json.decode((tmp_path / "out" / "ab.json").read_bytes(), type=State)
    assert state.done == {"a/round-1": 0}

    again = ab(*VARIANTS, "--b", "--context 66 --timeout 3", "--rounds", "1", "-o", "out", "--resume")
    assert again.returncode == 2
    assert "was begun with --a" in again.stderr


@pytest.mark.distributed
@pytest.mark.long
def test_resume_with_more_rounds_adds_rounds(ab, tmp_path: Path) -> None:
    first = ab(*SAME, "--rounds", "1", "-o", "out")
    assert first.returncode == 0, first.stderr
    assert "A and B are the same" in first.stderr
    assert "ran on a CPU" in first.stdout
    refused = ab(*SAME, "--rounds", "2", "-o", "out")
    assert refused.returncode == 2
    assert "--resume to continue, --force to start over" in refused.stderr
    more = ab(*SAME, "--rounds", "2", "-o", "out", "--resume", "--allow-cpu", "--fail-on", "slower:2%,undecided")
    assert more.returncode == 1, more.stdout  # two launches per side are too few for a verdict
    assert "Round 2 of 2: step time " in more.stderr
    assert "Round 1 of 2" not in more.stderr
    found = msgspec.json.decode((tmp_path / "out" / "compare.json").read_bytes(), type=Comparison)
    assert found.points[0].rows[0].launches == (2, 2)


@pytest.mark.distributed
@pytest.mark.long
def test_point_that_fails_only_in_b_fails_the_gate(ab) -> None:
    """Context 13 raises on rank 1, and the other point is still compared."""
    variants = ["--both", "--tp 2 --dcp 2 --concurrency 2 --no-baseline", "--a", "--context 100,13"]
    done = ab(*variants, "--b", "--context 100,13 --exchange a2a", "--rounds", "1", "-o", "out")
    assert done.returncode == 4
    assert "tiny tp2·dcp2 reference ag_rs, 2 × 100 tokens" in done.stdout
    assert "FAILED: " in done.stderr


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (["--a", "--tp 1", "--b", "--contxt 100"], "--b '--contxt 100': No such option"),
        (["--a", '--tp "1'], "--a: '--tp \"1' cannot be read: No closing quotation; close every quote"),
        (["--a", "--tp 1 -o here"], "--a '--tp 1 -o here': leave out -o"),
        (["--both", "--tp 1 -o here", "--a", "--dcp 1"], "--a '--dcp 1' and --both '--tp 1 -o here': leave out -o"),
        (["--both", "--bogus", "--a", "--tp 1"], "--a '--tp 1' and --both '--bogus': No such option: --bogus"),
        (["--a", "--resume"], "leave out --resume"),
        (["--b", "--help"], "see `dcpbench sweep --help`"),
        (["--b", "stray"], "--b 'stray'"),
        (["--a", "--tp 1"], 'such as --b "--tp 1 --concurrency 8"'),
        (["--b", "--tp 1"], 'such as --a "--tp 1 --concurrency 8"'),
        (["--workload", "bench"], "give sweep or serve"),
        (["--rounds", "0"], "such as --rounds 8"),
        (["--resume"], "--resume needs the run to continue"),
        (["--fail-on", "slow:2%"], "--fail-on slow:2%: give one of"),
    ],
)
def test_invalid_variant_raises_an_error_that_names_its_side(args: list[str], advice: str, call) -> None:
    code, err = call(*args)
    assert code == 2
    assert advice in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["a", "records.jsonl"])
def test_folder_with_other_content_is_refused(name: str, call, tmp_path: Path) -> None:
    """The folder has subfolders of the same names, or a run of sweep or serve."""
    (tmp_path / "out" / name).mkdir(parents=True)
    code, err = call(*SAME, "-o", "out")
    assert code == 2
    assert "that ab did not write" in err


def test_invalid_value_of_b_is_refused_before_a_is_launched(call, tmp_path: Path) -> None:
    code, err = call(*VARIANTS, "--b", "--exchange nonesuch", "-o", "out")
    assert code == 2
    assert "--b " in err
    assert "nonesuch" in err
    assert not (tmp_path / "out" / "a").exists()


def test_ab_without_variants_launches_no_run(call, tmp_path: Path) -> None:
    code, err = call()
    assert code == 2
    assert "--a" in err
    assert not (tmp_path / "runs").exists()


def test_dry_run_with_json_prints_one_object(ab, tmp_path: Path) -> None:
    """The object has both variants with their points, and the order of launches: A B, then B A."""
    done = ab(*SAME, "--rounds", "2", "--dry-run", "--json", "-o", "out")
    plan = json.loads(done.stdout)
    assert (done.returncode, plan["rounds"], plan["launches"]) == (0, 2, ["a", "b", "b", "a"])
    assert plan["a"]["arguments"][0] == "sweep"
    assert [row["reason"] for side in "ab" for row in plan[side]["points"]] == [None, None]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "flags", "kept"),
    [
        (("", "--tp 4 --exchange a2a", "--dcp 1", "--dcp 4"), ["--exchange"], "--tp 4 --dcp 1"),
        (
            ("", "--tp 2 --page-size rows=8,interleave=4 --collectives q-replicate=yes,all-reduce=symm", "--dp 2 --dcp 1", "--dcp 2"),
            ["--page-size interleave", "--collectives q-replicate", "--collectives all-reduce"],
            "--tp 2 --page-size rows=8 --dp 2 --dcp 1",
        ),
        (("serve", "--tp 2 --burstiness 0.5", "--concurrency 2", "--request-rate 2"), ["--burstiness"], "--tp 2 --concurrency 2"),
        (("serve", "--tp 2 --sessions think=1", "--concurrency 2", "--sessions turns=4"), ["--sessions think"], "--tp 2 --concurrency 2"),
    ],
)  # fmt: skip
def test_option_of_both_that_one_side_does_not_use_is_left_out_there(options, flags: list[str], kept: str, ab) -> None:
    """The launches of that side then have a command that runs by itself."""
    workload, both, a, b = options
    words = ("--workload", workload or "sweep", "--both", both, "--a", a, "--b", b, "--dry-run")
    done = ab(*words, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (sorted(plan["a"]["left_out"]), plan["b"]["left_out"]) == (sorted(flags), [])
    assert plan["a"]["arguments"][1:] == [*kept.split(), "--no-baseline"]
    assert plan["b"]["arguments"][1:] == [*both.split(), *b.split(), "--no-baseline"]
    assert flags[0] in ab(*words).stderr


@pytest.mark.parametrize(
    ("both", "a", "b"),
    [
        ("--tp 4 --dcp 1 --exchange a2a", "--backend reference", "--backend triton"),
        ("--tp 4", "--dcp 1 --exchange a2a", "--dcp 4 --exchange a2a"),
    ],
)
def test_option_that_no_side_uses_or_that_its_own_side_does_not_use_is_refused(both: str, a: str, b: str, call) -> None:
    code, err = call("--both", both, "--a", a, "--b", b, "--dry-run", "--json")
    assert code == 2
    assert "--exchange without a layout with --dcp > 1" in err


@pytest.mark.distributed
@pytest.mark.parametrize(("rounds", "order"), [("1", "1 round: AB"), ("3", "3 rounds: AB BA AB")])
def test_dry_run_prints_both_plans_and_launches_no_run(rounds: str, order: str, ab, tmp_path: Path) -> None:
    done = ab(*SAME, "--rounds", rounds, "--dry-run", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert order in done.stderr
    assert not (tmp_path / "out").exists()


def test_gpu_option_without_dry_run_is_refused(ab, tmp_path: Path) -> None:
    """The refusal precedes the creation of the folder, which would need --force the next time."""
    typed = ("--both", "--tp 4 --gpu=H200", "--a", "--exchange ag_rs", "--b", "--exchange a2a", "-o", "out")
    done = ab(*typed)
    assert done.returncode == 2
    assert "add --dry-run to ab, or leave --gpu out" in done.stderr
    assert not (tmp_path / "out").exists()
    planned = ab(*typed, "--dry-run")
    assert planned.returncode == 0
    assert planned.stderr.count("A plan for 8 × NVIDIA H200") == 2
