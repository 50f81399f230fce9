"""Test how `dcpbench syncs dry-run` starts a program, and how it interprets the exit of the program."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dcpbench.commands.syncs import app
from dcpbench.errors import UsageError
from dcpbench.syncs import run
from dcpbench.syncs.dry_run_program import Settings, build_environment, parse_command, suggest_dry_run
from tests import forks

PROGRAM = """
import sys
import torch
import triton
import triton.language as tl

@triton.jit
def twice(x):
    return x + x

@triton.autotune(configs=[triton.Config({"B": 16}), triton.Config({"B": 32})], key=["n"])
@triton.jit
def double(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, twice(tl.load(x + i, mask=i < n)), mask=i < n)

x = torch.arange(40.0, device="cuda")
y = torch.zeros_like(x)
double[lambda meta: (triton.cdiv(40, meta["B"]),)](x, y, 40)
if __name__ == "__main__":
    assert y.sum().item() == 1560
    sys.exit(int(sys.argv[1]))
"""


def start(*command: str) -> tuple[int, str]:
    """Return the exit code of the command, and its own output."""
    result = CliRunner().invoke(app, ["dry-run", *command])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write a script that launches a Triton kernel, reads one value, and exits with the given code."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_dry_run_command_is_suggested_only_if_dry_run_accepts_it(program: Path) -> None:
    assert f"dry-run -- python {program} 0`" in suggest_dry_run(["python", str(program), "0"])
    assert "dry-run -- torchrun --nproc-per-node 8 x.py`" in suggest_dry_run(
        ["torchrun", "--nproc-per-node", "8", "x.py"]
    )
    for command in (["mpirun", "-n", "8", str(program)], ["env", "A=1", "python", str(program)]):
        assert suggest_dry_run(command).endswith(": dcpbench syncs dry-run -- python script.py")


@pytest.mark.parametrize("way", ["script", "module", "code"])
def test_program_imports_the_package_of_the_command_and_its_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The working directory has another dcpbench, as in a checkout, where `python -m` looks first."""
    monkeypatch.setenv("PYTHONPATH", str(Path(run.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcpbench.py").write_text("raise SystemExit('another dcpbench')")
    (tmp_path / "beside.py").write_text("import torch\n\nvalue = torch.ones(1, device='cuda').item()\n")
    source = "import beside; assert beside.value == 1"
    (tmp_path / "program.py").write_text(source)
    command = {"script": ["program.py"], "module": ["-m", "program"], "code": ["-c", source]}[way]
    code, _ = start("--format", "json", "-o", "report.json", "--", "python", *command)
    assert code == 1
    assert [(s["file"], s["line"]) for s in json.loads(Path("report.json").read_text())["sites"]] == [("beside.py", 3)]


class TestParse:
    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            (["python", "-m", "pytest", "-q"], ([], "module", "pytest", ["-q"])),
            (["python3", "-u", "-W", "error", "-c", "pass", "x"], (["-u", "-W", "error"], "code", "pass", ["x"])),
            (["python", __file__, "-m", "x"], ([], "script", __file__, ["-m", "x"])),
            ([__file__], ([], "script", __file__, [])),
        ],
    )
    def test_command_is_parsed_as_python_parses_it(self, command: list[str], expected: tuple[object, ...]) -> None:
        python, flags, job = parse_command(command)
        assert python == sys.executable
        assert (flags, job.kind, job.target, job.arguments) == expected

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            ([], "There is no program"),
            (["mpirun", "x.py"], "mpirun is no Python program of torch's; use torchrun"),
            (["ls"], "ls is no Python program"),
            (["python"], "no script"),
            (["python", "-m"], "-m needs what to run"),
            (["python", "missing.py"], "missing.py is no file"),
            (["/nowhere/python3", "x.py"], "cannot|no program that can be started"),
        ],
    )
    def test_program_that_cannot_run_is_refused_before_the_start(self, command: list[str], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            parse_command(command)

    def test_module_name_error_suggests_the_command_for_modules(self) -> None:
        with pytest.raises(UsageError, match=r"write: dcpbench syncs dry-run -- python -m pytest tests -k 'a b'$"):
            parse_command(["pytest", "tests", "-k", "a b"])

    def test_program_sees_no_gpu_and_interprets_triton(self, tmp_path: Path) -> None:
        env = build_environment(Settings(folder=str(tmp_path)))
        assert (env["CUDA_VISIBLE_DEVICES"], env["TRITON_INTERPRET"]) == ("", "1")


class TestCommand:
    @pytest.fixture
    def forked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start the process of the program at once."""
        monkeypatch.setattr(run, "run_process", forks.run_command)

    def test_wait_is_a_finding_on_its_line(self, program: Path, tmp_path: Path) -> None:
        out = tmp_path / "report.json"
        code, _ = start("--root", str(tmp_path), "--format", "json", "-o", str(out), "--", "python", str(program), "0")
        report = json.loads(out.read_text())
        assert code == 1
        assert [(s["rule"], s["file"], s["line"], s["count"]) for s in report["sites"]] == [
            ("SYNC001", "program.py", PROGRAM.splitlines().index("    assert y.sum().item() == 1560") + 1, 1)
        ]
        assert report["traces"][0]["coverage"]["detector"] == "dry-run"

    @pytest.mark.usefixtures("forked")
    def test_failed_program_cannot_be_judged(self, program: Path) -> None:
        code, text = start("--", "python", str(program), "7")
        assert code == 3
        assert "exit code 7" in text

    @pytest.mark.usefixtures("forked")
    def test_killed_program_cannot_be_judged(self) -> None:
        code, text = start("--", "python", "-c", "import os; os.kill(os.getpid(), 9)")
        assert code == 3
        assert "ended before it could report" in text

    @pytest.mark.usefixtures("forked")
    def test_program_that_never_uses_the_gpu_is_not_clean(self) -> None:
        code, text = start("--", "python", "-c", "import torch; torch.ones(3).sum().item()")
        assert code == 3
        assert "nothing on the virtual GPU" in " ".join(text.split())

    @pytest.mark.usefixtures("forked")
    def test_program_with_assumed_devices_has_a_finding(self) -> None:
        code, _ = start("--assume-device", "--", "python", "-c", "import torch; torch.ones(3).sum().item()")
        assert code == 1

    @pytest.mark.usefixtures("forked")
    def test_program_that_does_not_wait_is_clean(self) -> None:
        code, _ = start("--", "python", "-c", "import torch; torch.ones(3, device='cuda').add_(1)")
        assert code == 0
