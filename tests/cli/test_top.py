"""Test `dcpbench top` next to a real sweep of the fake worker, in a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench import cli
from tests.unit import top_builder as build

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ENV = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}} | {
    "PYTHONPATH": f"{HERE}:{Path(cli.__file__).parents[1]}",
    "TERM": "xterm-256color",
    "DCPBENCH_QUICK": "1",
}
"""Without a size: processes of pytest-xdist have one, and it would stand for that of the terminal."""
COMMAND = [sys.executable, str(HERE / "dcpbench_fake.py")]
POINTS = [build.make_point(context) for context in (100, 200)]
ENTER, LEAVE, HIDE_CURSOR, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h"
RUNNING = "2 × 200 tokens"


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """Create a run with one measured and one unfinished point; the live process in its lock is this test's."""
    folder = tmp_path / "run"
    job = build.write_job(folder, POINTS, device="cpu")
    build.add_finished_point(job, folder, POINTS[0], 0, 10)
    build.add_event(job, 10, "measure", POINTS[1], "3/9 requests")
    (folder / ".lock").write_text(str(os.getpid()))
    return folder


@pytest.fixture
def ended(running: Path) -> Path:
    """Create the same run without a live process."""
    (running / ".lock").write_text("")
    return running


class Terminal:
    """Run a command in a terminal of 80 columns."""

    def __init__(self, *args: str, **env: str) -> None:
        self.main, self.side = pty.openpty()
        termios.tcsetwinsize(self.side, (24, 80))
        self.before = termios.tcgetattr(self.side)
        self.text = ""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *COMMAND, *args], stdin=self.side, stdout=self.side, stderr=self.side, env=ENV | env
        )

    def until(self, text: str) -> None:
        """Read until the screen contains this text, apart from escape codes between its words."""
        while text not in _strip_escapes(self.text):
            ended = self.process.poll() is not None
            if select.select([self.main], [], [], 0.1)[0]:
                self.text += os.read(self.main, 65536).decode()
            else:
                assert not ended, f"{text!r} is not on the screen, which has {self.text!r}"

    def type(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def end(self) -> int:
        """Read until the process has ended, and return its exit code."""
        code = self.process.wait()
        os.set_blocking(self.main, False)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self.main, 65536):
                self.text += more.decode()
        return code

    def is_as_it_was(self) -> bool:
        """Return whether the terminal has its modes, its first screen and its cursor."""
        last = {code: self.text.rfind(code) for code in (ENTER, LEAVE, HIDE_CURSOR, SHOW_CURSOR)}
        seen = last[LEAVE] > last[ENTER] > -1 and last[SHOW_CURSOR] > last[HIDE_CURSOR] > -1
        return seen and termios.tcgetattr(self.side) == self.before


def _strip_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", text)


@pytest.fixture
def terminal() -> Iterator[list[Terminal]]:
    """Return a factory of terminals, which are closed after the test."""
    opened: list[Terminal] = []
    yield opened
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.main)
        os.close(one.side)


def top(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Return a function that runs the command in pipes."""
    command = [*COMMAND, "top", *map(str, args)]
    return subprocess.run(command, env=ENV | env, capture_output=True, text=True, check=False)


class TestInATerminal:
    @pytest.mark.parametrize("how", ["typed", signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
    def test_terminal_is_restored_whatever_ends_top(
        self, running: Path, terminal: list[Terminal], how: str | signal.Signals
    ) -> None:
        """Ctrl-C exits with 130 as in any shell, SIGTERM with 143 and SIGHUP with 129; the last view stays visible."""
        shown = Terminal("top", str(running))
        terminal.append(shown)
        shown.until(RUNNING)
        if isinstance(how, signal.Signals):
            shown.process.send_signal(how)
        else:
            shown.type("\x03")
        assert shown.end() == (130 if isinstance(how, str) else 128 + how)
        assert shown.is_as_it_was()
        assert RUNNING in shown.text.rpartition(LEAVE)[2]
        assert "Traceback" not in shown.text

    def test_top_exits_when_the_run_ends(self, running: Path, terminal: list[Terminal]) -> None:
        shown = Terminal("top", str(running), "--every", "0.1")
        terminal.append(shown)
        shown.until(RUNNING)
        (running / ".lock").write_text("")
        assert shown.end() == 130
        assert shown.is_as_it_was()
        assert "stopped with 1 left; go on with --resume" in " ".join(_strip_escapes(shown.text).split())

    def test_terminal_is_restored_while_top_is_stopped(self, running: Path, terminal: list[Terminal]) -> None:
        """The test sends Ctrl-Z and then SIGCONT, as `fg` does."""
        shown = Terminal("top", str(running), "--every", "0.1")
        terminal.append(shown)
        shown.until(RUNNING)
        shown.type("\x1a")
        _, status = os.waitpid(shown.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        while select.select([shown.main], [], [], 0)[0]:
            shown.text += os.read(shown.main, 65536).decode()
        assert shown.is_as_it_was()
        shown.text = ""
        shown.process.send_signal(signal.SIGCONT)
        shown.until(RUNNING)
        assert ENTER in shown.text
        shown.type("\x03")
        assert shown.end() == 130
        assert shown.is_as_it_was()

    def test_view_adapts_to_the_terminal_size(self, running: Path, terminal: list[Terminal]) -> None:
        """The running point needs one line at 80 columns, and two lines at 30."""
        shown = Terminal("top", str(running), "--every", "0.1")
        terminal.append(shown)
        shown.until("tiny tp2 reference, 2 × 200 tokens")
        termios.tcsetwinsize(shown.side, (40, 30))
        folded = "tiny tp2 reference, 2 × 200".ljust(30) + "\r\ntokens"
        shown.until(folded)
        frame = _strip_escapes(shown.text).partition(folded)[2]
        assert max(len(line.rstrip("\r")) for line in frame.split("\n")) <= 30

    def test_dumb_terminal_gets_plain_lines(self, ended: Path, terminal: list[Terminal]) -> None:
        shown = Terminal("top", str(ended), TERM="dumb")
        terminal.append(shown)
        assert shown.end() == 130
        assert "\x1b" not in shown.text
        assert "1 of 2 points · 1 left" in shown.text


class TestInAPipe:
    def test_pipe_gets_lines_without_escape_codes(self, ended: Path) -> None:
        """FORCE_COLOR requests colours, which the lines do not have."""
        done = top(ended, FORCE_COLOR="1")
        assert done.returncode == 130
        assert done.stdout.splitlines() == [
            f"sweep in {ended}: stopped with 1 left; go on with --resume",
            "CPU: functional run — these timings do not reflect performance",
            "tiny tp2 reference, 2 × 100 tokens: 200 tok/s, ITL 10 ms",
            "1 of 2 points · 1 left · 6 points/min · 10 s so far",
        ]
        assert done.stderr == ""

    def test_once_exits_with_0_while_the_run_continues(self, running: Path) -> None:
        done = top(running, "--once")
        assert done.returncode == 0
        assert "now: tiny tp2 reference, 2 × 200 tokens, measure" in done.stdout

    def test_json_prints_one_object_per_refresh(self, ended: Path) -> None:
        """The run has ended, so there is a single refresh."""
        done = top(ended, "--json")
        (line,) = done.stdout.splitlines()
        found = json.loads(line)
        assert (found["status"], found["exit_code"], found["total"], found["left"]) == ("stopped", 130, 2, 1)
        assert found["last"][0]["tok_s"] == 200

    def test_closed_pipe_ends_top_without_an_error(self, running: Path) -> None:
        """The pipe is closed as in `dcpbench top RUN --json | head -1`."""
        command = [*COMMAND, "top", str(running), "--json", "--every", "0.1"]
        with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
            assert shown.stdout
            assert shown.stderr
            assert json.loads(shown.stdout.readline())["left"] == 1
            shown.stdout.close()
            assert shown.stderr.read() == ""
            assert shown.wait() == 141, "the exit code of a command that SIGPIPE ends"

    def test_invalid_arguments_raise_an_error_with_a_suggestion(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for args, message in (
            ([tmp_path / "none", "--once"], "has not begun, as there is no such folder"),
            (
                [tmp_path, "--once"],
                f"holds no run of sweep, serve or verify yet; `dcpbench sweep -o {tmp_path}` in another",
            ),
            ([__file__], "is no folder; name a run's"),
            ([tmp_path, "--every", "0"], "--every 0 is not a positive number of seconds"),
        ):
            with pytest.raises(SystemExit) as end:
                cli.main(["top", *map(str, args)])
            assert end.value.code == 2
            assert message in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False], ids=["empty", "none"])
def test_top_waits_for_the_run_to_start(tmp_path: Path, *, there: bool) -> None:
    """A message is printed while waiting; top shows the run after its start and exits with it."""
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
    command = [*COMMAND, "top", str(folder), "--every", "0.1"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        assert shown.stderr
        line = shown.stderr.readline()
        assert ("holds no run" if there else "has not begun") in line
        assert "Waiting for it to begin; Ctrl-C ends this." in line
        (tmp_path / "made").mkdir()
        job = build.write_job(tmp_path / "made", POINTS, device="cpu")
        for number, point in enumerate(POINTS):
            build.add_finished_point(job, tmp_path / "made", point, 10 * number, 10 * number + 10)
        if there:
            folder.rmdir()
        (tmp_path / "made").rename(folder)
        assert "2 of 2" in shown.communicate(timeout=60)[0]
        assert shown.returncode == 0


def test_wait_for_a_run_ends_on_a_signal(tmp_path: Path) -> None:
    command = [*COMMAND, "top", str(tmp_path / "none"), "--every", "0.1"]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, text=True) as shown:
            assert shown.stderr
            assert "Waiting" in shown.stderr.readline()
            shown.send_signal(number)
            assert shown.wait(timeout=60) == code
            assert "Traceback" not in shown.stderr.read()


@pytest.mark.distributed
@pytest.mark.long
def test_top_prints_each_point_of_a_sweep_and_returns_its_exit_code(tmp_path: Path) -> None:
    """One point is measured, one fails, and one hangs until the sweep is interrupted, so both exit with 130."""
    options = [
        "--tp",
        "2",
        "--context",
        "50,13,66",
        "--dcp",
        "1",
        "--concurrency",
        "2",
        "--no-baseline",
        "-o",
        str(tmp_path / "run"),
    ]
    command = [*COMMAND, "top", str(tmp_path / "run"), "--every", "0.1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=ENV, stdout=pipe, stderr=pipe, text=True) as shown:
        assert shown.stdout
        assert shown.stderr
        assert "Waiting" in shown.stderr.readline()  # points that ended earlier are only counted
        sweep = subprocess.Popen([*COMMAND, "sweep", *options], env=ENV, stderr=subprocess.DEVNULL)
        lines, interrupted = [], False
        for line in shown.stdout:
            lines.append(line)
            if "now: tiny tp2 reference, 2 × 66 tokens, measure" in line and not interrupted:
                interrupted = True  # a second Ctrl-C would end it at once
                sweep.send_signal(signal.SIGINT)
        assert shown.wait() == 130
    assert sweep.wait() == 130
    text = "".join(lines)
    assert "tiny tp2 reference, 2 × 13 tokens: FAILED: rank 1: ValueError: no such row in tiny" in text
    assert "tiny tp2 reference, 2 × 50 tokens: 200 tok/s, ITL 10 ms" in text
    assert "stopped with 1 left; go on with --resume" in lines[-1]
