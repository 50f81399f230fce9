"""Commands whose output cannot be taken: a closed stdout, a full disk, a reader that went away, missing characters."""

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
    from collections.abc import Iterator
    from pathlib import Path

ASCII = {"PYTHONIOENCODING": "ascii"}
NO_UTF8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "LANG": "C"}
"""A locale without UTF-8, where Python is told not to take UTF-8 all the same."""


def shell(folder: Path, line: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A line of sh, `dcpbench` in it being ours."""
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


def unread(folder: Path, args: list[str], *, stderr: bool = False) -> subprocess.CompletedProcess[bytes]:
    """The command, writing into a pipe whose other end is closed; its errors too, or read."""
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


@pytest.mark.parametrize(("redirected", "code"), [(">&-", 0), (">/dev/full", 2)])
@pytest.mark.parametrize("command", ["show RUN", "show RUN --json", "top RUN --once"])
def test_a_command_whose_output_cannot_be_taken_ends_without_a_traceback(
    tmp_path: Path, command: str, redirected: str, code: int
) -> None:
    build.write(tmp_path / "RUN", [build.ok(build.point())])
    done = shell(tmp_path, f"dcpbench {command} {redirected}")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    ["compare RUN WORSE --fail-on slower:2%", "compare RUN WORSE --json", "show RUN", "top RUN --once", "--help"],
)
def test_a_reader_that_goes_away_is_no_verdict(tmp_path: Path, command: str) -> None:
    """`head` may close before the first line: 141, as of any command that SIGPIPE ends. 1 would say that B is worse."""
    build.write(tmp_path / "RUN", [build.ok(build.point())])
    build.write(tmp_path / "WORSE", [build.ok(build.point(), median_ms=100.0)])
    done = unread(tmp_path, command.split())
    assert done.returncode == 141
    assert done.stderr == b""


def test_an_error_keeps_its_code_when_nobody_reads_it(tmp_path: Path) -> None:
    assert unread(tmp_path, ["show", "nowhere"], stderr=True).returncode == 2


def commands(group: object = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that --help leads to, by its words."""
    yield path
    group = group or typer.main.get_command(cli.app)
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


class TestAscii:
    @pytest.mark.parametrize("env", [ASCII, NO_UTF8], ids=["PYTHONIOENCODING", "locale"])
    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("show RUN", "* No SLO was given"),
            ("env", "* no GPU"),
            ("compare RUN RUN", "8 x 4,000 tokens: 746.4 -> 746.4 tok/s"),
            ("top RUN --once", "8 x 4,000 tokens"),
            ("sweep --dry-run --device cpu --tp 2 --dcp 2", "tp2.dcp2"),
            ("report RUN -o OUT", "Report: OUT/report.html"),
        ],
        ids=lambda value: value.split()[0],
    )
    def test_what_a_terminal_lacks_has_a_form_that_it_has(
        self, tmp_path: Path, env: dict[str, str], command: str, said: str
    ) -> None:
        build.write(tmp_path / "RUN", [build.ok(build.point())])
        done = shell(tmp_path, f"dcpbench {command}", **env)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert done.stdout.isascii()

    def test_json_says_the_same_in_any_encoding(self, tmp_path: Path) -> None:
        """A layout is `tp2·dcp2` for whoever parses it, and not `tp2.dcp2`."""
        line = "dcpbench sweep --dry-run --device cpu --tp 2 --dcp 2 --json"
        found, usual = (shell(tmp_path, line, **env) for env in (ASCII, {"PYTHONIOENCODING": "utf-8"}))
        assert found.stdout.isascii()
        assert not usual.stdout.isascii()
        assert json.loads(found.stdout) == json.loads(usual.stdout)

    def test_an_error_is_a_sentence_in_it(self, tmp_path: Path) -> None:
        done = shell(tmp_path, "dcpbench show größe·2", **ASCII)
        assert done.returncode == 2
        assert "groe.2" in done.stderr or "gro?e.2" in done.stderr

    @pytest.mark.parametrize("command", [*commands()], ids=lambda words: " ".join(words) or "dcpbench")
    def test_every_command_helps_in_it(self, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", screen)
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, "--help"])
        assert ended.value.code == 0
        screen.seek(0)
        assert "Usage: dcpbench" in screen.read()
