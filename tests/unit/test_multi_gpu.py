"""tools/multi_gpu: its commands are accepted by dcpbench, and a second call continues."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from dcpbench.cli import main as dcpbench
from tests.unit.test_published_checkpoints import V3
from tools.multi_gpu import __main__ as tool
from tools.multi_gpu import running
from tools.multi_gpu.engine_parts import OURS, EnginePlan
from tools.multi_gpu.parts import Command, Part, Plan, make_rehearsal
from tools.multi_gpu.running import CUT_OFF, DONE, FAILED, SKIPPED, Runner

ROOT = Path(__file__).parents[2]
CALIBRATED = ROOT / "results" / "emulation_H200/emulated-against-live_2xH200_2026-11-23" / "machine.toml"
MACHINES = {2: "H100", 4: "H200", 8: "H200"}


def list_commands(gpus: int, folder: Path) -> list[Command]:
    """Return all commands of a machine with this number of GPUs."""
    return [command for part in Plan(gpus, folder, MACHINES[gpus]).list_parts() for command in part.commands]


def make_part(code: str, *, minutes: float = 1.0) -> Part:
    """Return a part with one command that runs this code with `python -m timeit`."""
    return Part("part", "what", (Command("timeit", ("-n1", "-r1", code), minutes, "one"),))


@pytest.mark.long
@pytest.mark.parametrize("gpus", MACHINES)
def test_every_sweep_and_serve_command_is_accepted_by_a_dry_run(
    gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dry-run --gpu NAME,count=N` exits with 0, with a calibration like that of a run."""
    (tmp_path / "comm").mkdir()
    shutil.copy(CALIBRATED, tmp_path / "comm" / "machine.toml")
    monkeypatch.chdir(tmp_path)
    for command in list_commands(gpus, tmp_path):
        if command.arguments[0] in ("sweep", "serve") and "--step-times" not in command.arguments:
            code = _run_dcpbench([*command.arguments, "--dry-run", "--gpu", f"{MACHINES[gpus]},count={gpus}"])
            assert code == 0, f"{command.format_command_line()}\n{capsys.readouterr().err}"


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    """Return a folder with the files of two engines, and of a model of four layers in `model`."""
    for name in ("vllm", "sglang"):
        text = f'name = "{name}"\ncommand = "{name} {{model}} --host {{host}} --port {{port}}"\nexchanges = ["ag_rs", "a2a"]\n[layout]\n'
        text += "".join(f'{degree} = "--{degree} {{{degree}}}"\n' for degree in ("tp", "dp", "dcp", "exchange"))
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(V3 | {"num_hidden_layers": 4, "num_nextn_predict_layers": 0})
    )
    return tmp_path


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_engine_comparison_is_accepted_by_a_dry_run(
    gpus: int, engines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = EnginePlan(gpus, engines / "run", engines, engines / "model", 4).list_parts()
    commands = [command for part in parts for command in part.commands]
    assert len({command.arguments[command.arguments.index("-o") + 1] for command in commands}) == len(commands)
    for command in commands:
        code = _run_dcpbench(
            [*command.arguments, "--dry-run", *([] if command.name != OURS else ["--gpu", f"H200,count={gpus}"])]
        )
        err = capsys.readouterr().err
        assert code == 0, f"{command.format_command_line()}\n{err}"
        assert "cannot run" not in err, f"{command.format_command_line()}\n{err}"


def test_first_engine_comparisons_take_at_most_25_minutes(engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most valuable parts fit into one call; a limited pool holds 1,000,000 tokens of 576 bf16 values in 4 layers."""
    words = ["-o", str(engines / "run"), "--gpus", "4", "--engines", str(engines), "--model", str(engines / "model")]
    assert tool.main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"--kv-cache-memory-bytes {1_000_000 * 576 * 2 * 4}" in printed
    first = EnginePlan(4, engines / "run", engines, engines / "model", 4).list_parts()[:3]
    assert sum(part.minutes for part in first) < 25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "none"], "has no vllm.toml and no sglang.toml"),
        (["--engines", "."], "--engines needs --model"),
        (["--engines", ".", "--model", "model", "--rehearse"], "try --dry-run"),
    ],
)
def test_invalid_engine_options_are_refused(
    words: list[str], message: str, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(engines)
    with pytest.raises(SystemExit, match=message):
        tool.main(["-o", "run", "--gpus", "2", *words, "--dry-run"])


def _run_dcpbench(words: list[str]) -> int:
    old, sys.argv = sys.argv, ["dcpbench", *words]
    try:
        return int(dcpbench() or 0)
    except SystemExit as e:
        return int(e.code or 0)
    finally:
        sys.argv = old


@pytest.mark.parametrize("gpus", MACHINES)
def test_no_two_commands_share_a_folder(gpus: int, tmp_path: Path) -> None:
    """Names of parts and of the commands in a part are unique."""
    parts = Plan(gpus, tmp_path, MACHINES[gpus]).list_parts()
    names = [f"{part.name}/{command.name}" for part in parts for command in part.commands]
    assert len(set(names)) == len(names)
    outputs = [c.arguments[c.arguments.index("-o") + 1] for p in parts for c in p.commands if "-o" in c.arguments]
    assert len(set(outputs)) == len(outputs)


@pytest.mark.parametrize("gpus", MACHINES)
def test_dry_run_prints_every_command_with_its_minutes(
    gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run executes no command and makes no folder."""
    folder = tmp_path / "run"
    assert tool.main(["-o", str(folder), "--gpus", str(gpus), "--gpu", MACHINES[gpus], "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for command in list_commands(gpus, folder):
        assert f"{command.minutes:5.1f}  {command.format_command_line()}" in printed
    assert not folder.exists()


def test_unknown_part_is_refused_with_a_list_of_parts(tmp_path: Path) -> None:
    """`--only` has a typing error."""
    with pytest.raises(SystemExit, match="no part hang; there are comm, grid"):
        tool.main(["-o", str(tmp_path), "--gpus", "2", "--only", "hang", "--dry-run"])


def test_finished_command_is_not_run_again(tmp_path: Path) -> None:
    """The code appends to a file, which has one character after two calls."""
    file = tmp_path / "file"
    part = make_part(f"open({str(file)!r}, 'a').write('x')")
    for _ in range(2):
        Runner(tmp_path, 5.0).run([part])
    assert file.read_text() == "x"
    assert Runner(tmp_path, 5.0).state["part/one"].what == DONE


def test_command_that_failed_twice_is_skipped(tmp_path: Path) -> None:
    """Three calls make two attempts; the output is in the log."""
    for _ in range(3):
        Runner(tmp_path, 5.0).run([make_part("raise ValueError('wrong')")])
    ran = Runner(tmp_path, 5.0).state["part/one"]
    assert (ran.what, ran.attempts) == (FAILED, 2)
    assert (tmp_path / "part" / "one.log").read_text().count("ValueError: wrong") == 2


def test_command_is_skipped_near_the_deadline_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 minute is left, which is less than half of the command's 3 minutes."""
    Runner(tmp_path, 1.0).run([make_part("raise ValueError", minutes=3.0)])
    assert Runner(tmp_path, 1.0).state["part/one"].what == SKIPPED
    assert "min of the run left, it takes about 3.0" in capsys.readouterr().out


def test_command_at_the_deadline_is_ended_and_can_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted command does not count as a failed attempt."""
    monkeypatch.setattr(running, "MAX_TIME_FACTOR", 1e-4)
    monkeypatch.setattr(running, "MIN_TIME_SHARE", 0.0)
    Runner(tmp_path, 5.0).run([make_part("import time; time.sleep(1000)")])
    ran = Runner(tmp_path, 5.0).state["part/one"]
    assert (ran.what, ran.attempts, ran.cut) == (CUT_OFF, 0, 1)


def test_commands_for_one_gpu_run_concurrently_on_different_gpus(tmp_path: Path) -> None:
    """Three commands run on two GPUs, and each waits until another one runs, too; the third gets the GPU that is free
    first.
    """
    code = (
        "import os, pathlib, time; here = pathlib.Path({!r}); name = {!r}\n"
        "(here / name).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "end = time.monotonic() + 60\n"
        "while len(list(here.iterdir())) < 2 and time.monotonic() < end: time.sleep(0.01)\n"
        "assert len(list(here.iterdir())) >= 2"
    )
    met = tmp_path / "met"
    met.mkdir()
    names = ("a", "b", "c")
    commands = [
        Command("timeit", ("-n1", "-r1", f"exec({code.format(str(met), name)!r})"), 2.0, name, only_one=True)
        for name in names
    ]
    runner = Runner(tmp_path / "run", 5.0, ["4", "6"])
    runner.run([Part("part", "what", tuple(commands))])
    assert [runner.state[f"part/{name}"].what for name in names] == [DONE] * 3
    assert {(met / name).read_text() for name in ("a", "b")} == {"4", "6"}
    assert (met / "c").read_text() in ("4", "6")
    assert {ran.what for ran in Runner(tmp_path / "run", 5.0).state.values()} == {DONE}


def test_command_that_cannot_start_stops_the_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be written ends the run, and no command keeps running."""
    started = []

    def run_one(_runner: Runner, key: str, *_rest: object) -> None:
        started.append(key)
        raise PermissionError(key)

    monkeypatch.setattr(Runner, "run_one", run_one)
    commands = [Command("timeit", ("pass",), 1.0, name, only_one=True) for name in "abcd"]
    with pytest.raises(PermissionError):
        Runner(tmp_path, 5.0, ["0"]).run([Part("part", "what", tuple(commands))])
    assert started[0] == "part/a"
    assert len(started) < len(commands)


def test_command_without_its_input_files_does_not_count_as_an_attempt(tmp_path: Path) -> None:
    """The command that writes the files was interrupted; the next call writes them."""
    (tmp_path / "made").mkdir()
    code = "-n1", "-r1", "pass", "-s", f"{tmp_path}/made/*.json"
    part = Part("part", "what", (Command("timeit", code, 1.0, "one"),))
    for _ in range(3):
        runner = Runner(tmp_path, 5.0)
        runner.run([part])
    ran = runner.state["part/one"]
    assert (ran.what, ran.attempts) == (SKIPPED, 0)
    assert "there is no" in ran.note


@pytest.mark.parametrize(
    ("visible", "found"), [("", ["0", "1"]), ("2,3", ["2", "3"]), ("0,1,2,3", ["0", "1"]), ("5", ["5"])]
)
def test_only_visible_gpus_are_used(visible: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert tool.list_devices(2) == found


def test_pattern_is_expanded_when_a_command_runs(tmp_path: Path) -> None:
    """A pattern without a matching file is unchanged, as in a shell."""
    (tmp_path / "v3-dcp4.json").touch()
    (tmp_path / "v3-dcp1.json").touch()
    existing, missing = f"{tmp_path}/*-dcp4*.json", f"{tmp_path}/*-dcp8*.json"
    assert running.list_arguments(Command("dcpbench", ("serve", existing, missing), 1.0, "one"))[-2:] == [
        str(tmp_path / "v3-dcp4.json"),
        missing,
    ]


def test_gpu_tests_include_every_file_with_the_mark(tmp_path: Path) -> None:
    """One file has the mark on a function and one on the whole file; a third file has none."""
    (command,) = next(part for part in Plan(2, tmp_path, "H100").list_parts() if part.name == "tests").commands
    assert {"tests/kernels/test_peers.py", "tests/unit/test_syncs_live_gpu.py"} <= set(command.arguments)
    assert "tests/unit/test_layout.py" not in command.arguments


@pytest.mark.parametrize("gpus", MACHINES)
def test_rehearsal_needs_no_gpu(gpus: int, tmp_path: Path) -> None:
    """Every command of a rehearsal uses the CPU and the tiny model, if it has a model."""
    for command in filter(None, (make_rehearsal(c, MACHINES[gpus]) for c in list_commands(gpus, tmp_path))):
        words = shlex.join(command.arguments)
        if command.program == "dcpbench":
            assert "--device cpu" in words
        without_times = re.sub(r"--step-times \S+", "", words.replace("'", ""))
        assert "deepseek" not in without_times.replace(str(tmp_path), "").split(" -o ")[0]
        assert "--gpu " not in words
