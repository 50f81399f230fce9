"""Test commands that cannot write their output: closed stdout, full disk, closed pipe, missing characters."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import typer

from dcpbench import cli
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ASCII = {"PYTHONIOENCODING": "ascii"}
NO_UTF8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "LANG": "C"}
"""Environment of a locale without UTF-8, in which Python's UTF-8 mode is disabled."""


def run_shell(folder: Path, line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line of sh in which `dcpbench` is this package's command."""
    line = line.replace("dcpbench", f"{sys.executable} -m dcpbench.cli")
    return subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def run_unread(folder: Path, args: list[str], *, stderr: bool = False) -> subprocess.CompletedProcess[bytes]:
    """Run the command with stdout, and optionally stderr, in a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "dcpbench.cli", *args],
            cwd=folder,
            stdout=writer,
            stderr=writer if stderr else subprocess.PIPE,
            check=False,
            timeout=200,
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(("redirected", "code"), [(">&-", 0), (">/dev/full", 3)])
@pytest.mark.parametrize("command", ["show RUN", "show RUN --json", "top RUN --once"])
def test_unwritable_output_causes_no_traceback(tmp_path: Path, command: str, redirected: str, code: int) -> None:
    build.write_records(tmp_path / "RUN", [build.make_ok_record(build.make_point())])
    done = run_shell(tmp_path, f"dcpbench {command} {redirected}")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    ["compare RUN WORSE --fail-on slower:2%", "compare RUN WORSE --json", "show RUN", "top RUN --once", "--help"],
)
def test_closed_pipe_exits_with_141_instead_of_a_verdict(tmp_path: Path, command: str) -> None:
    """`head` may close the pipe before the first line; exit code 1 would mean that B is slower."""
    build.write_records(tmp_path / "RUN", [build.make_ok_record(build.make_point())])
    build.write_records(tmp_path / "WORSE", [build.make_ok_record(build.make_point(), median_ms=100.0)])
    done = run_unread(tmp_path, command.split())
    assert done.returncode == 141
    assert done.stderr == b""


def test_error_keeps_its_exit_code_with_closed_stderr(tmp_path: Path) -> None:
    assert run_unread(tmp_path, ["show", "nowhere"], stderr=True).returncode == 2


def list_commands(group: object = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """List the arguments of every command that --help leads to."""
    yield path
    group = group or typer.main.get_command(cli.app)
    for name, command in getattr(group, "commands", {}).items():
        yield from list_commands(command, (*path, name))


EXPECTED = {  # commands, and a part of their output that is transliterated to ASCII
    "show RUN": "* No SLO was given",
    "doctor": "* no GPU",
    "compare RUN RUN": "8 x 4,000 tokens: 746.8 -> 746.8 tok/s",
    "top RUN --once": "8 x 4,000 tokens",
    "sweep --dry-run --device cpu --tp 2 --dcp 2": "tp2.dcp2",
    "report RUN -o OUT": "Report: OUT/report.html",
}
JSON = "sweep --dry-run --device cpu --tp 2 --dcp 2 --json"
ALL = """
import os, sys
from dcpbench import cli
from dcpbench.launch import launcher
from dcpbench.points.device_probe import Probe
launcher.run_probe = lambda _: Probe(device="cpu", count=0, name="CPU", problems=["no GPU is visible."])
for number, line in enumerate(sys.argv[1:]):
    if line.startswith("report"):
        from dcpbench.reports import plots
        plots.FigureWriter.write_figure = lambda _, path, *__: [path.with_suffix(e).touch() for e in (".png", ".svg")]
    for standard, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}-{number}", os.O_WRONLY | os.O_CREAT), standard)
    try:
        cli.main(line.split())
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        open(f"code-{number}", "w").write(str(end.code or 0))
"""
"""Program that runs commands one after the other in one process without drawing figures."""


def list_outputs(folder: Path, lines: Sequence[str], env: dict[str, str]) -> dict[str, tuple[int, str, str]]:
    """Return (exit code, stdout, stderr) of each of these commands by its line."""
    folder.mkdir()
    build.write_records(folder / "RUN", [build.make_ok_record(build.make_point())])
    subprocess.run([sys.executable, "-c", ALL, *lines], cwd=folder, env=os.environ | env, check=True, timeout=200)

    def read(name: str, number: int) -> str:
        return (folder / f"{name}-{number}").read_text(encoding="utf-8")

    return {line: (int(read("code", n)), read("out", n), read("err", n)) for n, line in enumerate(lines)}


class TestAscii:
    @pytest.fixture(scope="class", params=[ASCII, NO_UTF8], ids=["PYTHONIOENCODING", "locale"])
    @staticmethod
    def found(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> dict[str, tuple[int, str, str]]:
        """Return the outputs of all commands in this environment."""
        return list_outputs(tmp_path_factory.mktemp("ascii") / "all", [*EXPECTED, JSON], request.param)

    @pytest.mark.parametrize(("command", "expected"), EXPECTED.items(), ids=lambda value: value.split()[0])
    def test_characters_outside_ascii_are_transliterated(self, found, command: str, expected: str) -> None:
        code, out, err = found[command]
        assert code == 0 or command == "doctor", err  # the exit code of doctor depends on this machine
        assert expected in out
        assert out.isascii()

    @pytest.fixture(scope="class")
    @staticmethod
    def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
        """Return the JSON output in UTF-8."""
        return list_outputs(tmp_path_factory.mktemp("usual") / "all", [JSON], {"PYTHONIOENCODING": "utf-8"})[JSON][1]

    def test_json_output_does_not_depend_on_the_encoding(self, found, usual: str) -> None:
        """Parsers must get the layout `tp2·dcp2`, and not `tp2.dcp2`."""
        _, out, _ = found[JSON]
        assert out.isascii()
        assert not usual.isascii()
        assert json.loads(out) == json.loads(usual)

    def test_error_message_is_printed_in_ascii(self, tmp_path: Path) -> None:
        done = run_shell(tmp_path, "dcpbench show größe·2", **ASCII)
        assert done.returncode == 2
        assert "groe.2" in done.stderr or "gro?e.2" in done.stderr

    @pytest.mark.parametrize("command", [*list_commands()], ids=lambda words: " ".join(words) or "dcpbench")
    def test_help_of_every_command_is_printed_in_ascii(
        self, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", screen)
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, "--help"])
        assert ended.value.code == 0
        screen.seek(0)
        assert "Usage: dcpbench" in screen.read()
