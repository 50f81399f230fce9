"""Test that each command answers invalid arguments with one sentence that ends with what to type instead."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dcpbench import __main__ as entry
from dcpbench import cli

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create files and folders of the wrong kind, and return their folder."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "records.jsonl").mkdir(parents=True)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "file").write_text("hello\n")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "records.jsonl").write_text('{"schema_version": 99}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def typed(*words: str) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "records check odd",
            "odd/records.jsonl is no run, as its records.jsonl is a folder; name the folder of a run",
        ),
        ("report odd", "odd is no run, as its records.jsonl is a folder; name the folder of a run"),
        ("show foreign", "schema_version 99, while this dcpbench reads 1. Not written by this version"),
        ("sweep --config none.toml", "--config none.toml cannot be read (No such file or directory); name a TOML"),
        ("sweep --config empty", "--config empty cannot be read (Is a directory); name a TOML"),
        (
            "serve --requests none.csv",
            "cannot be read (No such file or directory); name a file that holds lines such as",
        ),
        ("serve --requests empty", "--requests empty is not a regular file, and it is read several times; name a file"),
        ("import list.json --from vllm", "holds an empty list, and no result. Run the benchmark again"),
        ("recommend --machine H200 -o file", "file is not a folder; name another one with -o."),
        (
            "dashboard build empty -o site",
            "empty holds no run that can be read, so no site is written into site; name the folder",
        ),
        ("dashboard build foreign -o site", "foreign holds no run that can be read, so no site is written into site"),
        ("bench collectives --ranks 7", "--width 64 cannot be divided among 7 ranks; try --width 70."),
        ("bench attention --context 9999999999", "'9999999999' is above 999,999,999; write for example"),
        ("sweep --dry-run --kv-memory 999TiB", "write for example --kv-memory 100GiB"),
        (
            "dashboard build empty -o site --json",
            "empty holds no run that can be read, so no site is written into site",
        ),
    ],
)
@pytest.mark.sample(3)
def test_invalid_arguments_are_refused_with_a_suggestion(
    line: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del folder
    assert typed(*line.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "serve --url http://127.0.0.1:8000 --tp 8",
            (
                "--url is an option of `dcpbench server`, which measures vLLM, SGLang and other servers. "
                "Type: dcpbench server --url http://127.0.0.1:8000 --tp 8\n"
            ),
        ),
        (
            "serve --kv-memory 4GiB --engine=vllm --model m",
            (
                "That command has no --kv-memory. Type: dcpbench server --engine=vllm --model m\n"
                "Or leave out --engine to stay with `dcpbench serve`.\n"
            ),
        ),
        ("serve --serve-cmd x{port}", "Type: dcpbench server --serve-cmd 'x{port}'\n"),
        ("serve --client realtime=no", "Type: dcpbench server --client realtime=no\n"),
        ("server --backend triton", "Type: dcpbench serve --backend triton\n"),
    ],
)
def test_option_of_serve_or_server_suggests_the_other_command(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(*line.split()) == 2
    assert message in capsys.readouterr().err


def test_option_that_no_command_has_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("serve", "--no-such-option") == 2
    assert "No such option: --no-such-option" in capsys.readouterr().err


def test_missing_engine_is_reported_once_before_any_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process is started, and no folder is created."""
    monkeypatch.setenv("PATH", str(folder))
    assert typed("server", "--engine", "vllm", "--model", "x", "--tp", "2") == 5
    assert "vllm cannot be started: there is no program vllm here; install it" in capsys.readouterr().err
    assert not (folder / "runs").exists()


class TestCtrlC:
    def test_interrupted_command_without_results_prints_a_message(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The exit code is 130; commands with results report themselves what they kept."""

        def interrupted(_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("dcpbench.commands.point_runner.print_json", interrupted)
        assert typed("machines", "--json") == 130
        assert capsys.readouterr().err == "\nInterrupted. To start again, repeat the command.\n"

    def test_interrupt_during_imports_exits_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Interrupts:
            def find_spec(self, name: str, *_: object) -> None:
                if name == "dcpbench.cli":
                    raise KeyboardInterrupt

        monkeypatch.delitem(sys.modules, "dcpbench.cli")
        monkeypatch.delattr("dcpbench.cli")
        monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
        with pytest.raises(SystemExit) as end:
            entry.main()
        assert end.value.code == 130


def test_python_m_dcpbench_runs_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dcpbench", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("dcpbench ")


@pytest.mark.parametrize(
    ("line", "unused"),
    [
        ("sweep --tp 2 --dcp 1 --exchange a2a --dry-run", "--exchange"),
        ("sweep --tp 2 --dcp 1 --page-size rows=8,interleave=4 --dry-run", "--page-size interleave"),
        ("sweep --tp 1 --collectives all-reduce=symm --dry-run", "--collectives all-reduce"),
        ("serve --tp 2 --dcp 1 --exchange a2a --dry-run", "--exchange"),
        ("verify --tp 1 --exchange a2a --dry-run", "--exchange"),
        ("verify --engine vllm --model m --tp 2 --dcp 1 --exchange a2a --dry-run", "--exchange"),
        ("sweep --engine vllm --model m --tp 2 --dcp 1 --page-size interleave=4 --dry-run", "--page-size interleave"),
        (
            "sweep --engine vllm --model m --tp 2 --dcp 1 --collectives q-replicate=yes --dry-run",
            "--collectives q-replicate",
        ),
        ("server --engine vllm --model m --tp 2 --exchange a2a --dry-run", "--exchange"),
        ("server --url http://127.0.0.1:9 --tp 2 --exchange a2a --dry-run", "--exchange"),
        ("submit slurm --dry-run sweep --tp 2 --dcp 1 --exchange a2a", "--exchange"),
        ("recommend --machine H200 --gpus 1 --exchange a2a", "--exchange"),
    ],
)
def test_option_that_no_layout_uses_is_refused(line: str, unused: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(*line.split()) == 2
    err = capsys.readouterr().err
    assert f"{unused} without a layout with" in err
    assert err.endswith("or leave it out.\n")


@pytest.mark.parametrize(
    "line",
    [
        "sweep --tp 4 --dcp 1,2 --exchange a2a --page-size rows=8,interleave=4 --dry-run",
        "sweep --tp 2 --dp 2 --collectives all-reduce=symm --dry-run",
        "submit slurm --dry-run --dcpbench dcpbench -- sweep --model /absent/model --tp 2 --dp 2 --dcp 1 --collectives all-reduce=symm",
        "server --engine vllm --model m --tp 2 --dcp 1,2 --exchange a2a --dry-run",
    ],
)
def test_option_that_one_layout_uses_is_accepted(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The second layout of the second and third command is its baseline, tp2 without dp."""
    assert typed(*line.split()) == 0, capsys.readouterr().err


def test_experts_of_a_model_without_experts_cannot_be_placed(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        typed(*["sweep", "--model", "qwen3-8b", "--tp", "2", "--dcp", "1", "--ep", "tp", "--gpu", "H200", "--dry-run"])
        == 2
    )
    assert "--ep tp: qwen3-8b has no experts; leave --ep out." in " ".join(capsys.readouterr().out.split())
    assert typed(*["recommend", "--model", "qwen3-8b", "--machine", "H200", "--routing", "zipf:1"]) == 2
    assert "--routing zipf:1: qwen3-8b has no experts; leave --routing out." in capsys.readouterr().err
