"""`dcpbench top` as a user meets it: beside a real sweep of the fake worker, in a terminal, in a pipe."""

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
POINTS = [build.point(context) for context in (100, 200)]
ENTER, LEAVE, HIDE_CURSOR, SHOW_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h"
RUNNING = "2 × 200 tokens"


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run with one point measured and one at work; the process that is alive in its lock is this test's."""
    folder = tmp_path / "run"
    job = build.job(folder, POINTS, device="cpu")
    build.add_finished_point(job, folder, POINTS[0], 0, 10)
    build.add_event(job, 10, "measure", POINTS[1], "3/9 requests")
    (folder / ".lock").write_text(str(os.getpid()))
    return folder


@pytest.fixture
def ended(running: Path) -> Path:
    """The same without a process."""
    (running / ".lock").write_text("")
    return running


class Terminal:
    """A command in a terminal of 80 columns."""

    def __init__(self, *args: str, **env: str) -> None:
        self.main, self.side = pty.openpty()
        termios.tcsetwinsize(self.side, (24, 80))
        self.before = termios.tcgetattr(self.side)
        self.text = ""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *COMMAND, *args], stdin=self.side, stdout=self.side, stderr=self.side, env=ENV | env
        )

    def until(self, text: str) -> None:
        """Read until the screen has got this text, whatever codes stand between its words."""
        while text not in _plain(self.text):
            ended = self.process.poll() is not None
            if select.select([self.main], [], [], 0.1)[0]:
                self.text += os.read(self.main, 65536).decode()
            else:
                assert not ended, f"{text!r} did not come; this did: {self.text!r}"

    def type(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def end(self) -> int:
        """Read on until the process has ended; its exit code."""
        code = self.process.wait()
        os.set_blocking(self.main, False)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self.main, 65536):
                self.text += more.decode()
        return code

    def is_as_it_was(self) -> bool:
        """Whether the terminal has its modes, its first screen and its cursor."""
        last = {code: self.text.rfind(code) for code in (ENTER, LEAVE, HIDE_CURSOR, SHOW_CURSOR)}
        seen = last[LEAVE] > last[ENTER] > -1 and last[SHOW_CURSOR] > last[HIDE_CURSOR] > -1
        return seen and termios.tcgetattr(self.side) == self.before


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", text)


@pytest.fixture
def terminal() -> Iterator[list[Terminal]]:
    """Terminals that are closed afterwards."""
    opened: list[Terminal] = []
    yield opened
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.main)
        os.close(one.side)


def top(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in pipes."""
    command = [*COMMAND, "top", *map(str, args)]
    return subprocess.run(command, env=ENV | env, capture_output=True, text=True, check=False)


class TestInATerminal:
    @pytest.mark.parametrize("how", ["typed", signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
    def test_whatever_ends_it_the_terminal_is_as_it_was(
        self, running: Path, terminal: list[Terminal], how: str | signal.Signals
    ) -> None:
        """Ctrl-C is 130, as in any shell; SIGTERM 143 and SIGHUP 129. What was seen last stays."""
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

    def test_it_ends_with_the_run(self, running: Path, terminal: list[Terminal]) -> None:
        shown = Terminal("top", str(running), "--every", "0.1")
        terminal.append(shown)
        shown.until(RUNNING)
        (running / ".lock").write_text("")
        assert shown.end() == 130
        assert shown.is_as_it_was()
        assert "stopped with 1 left; go on with --resume" in " ".join(_plain(shown.text).split())

    def test_while_it_is_stopped_the_shell_has_its_terminal(self, running: Path, terminal: list[Terminal]) -> None:
        """Ctrl-Z, then `fg`."""
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

    def test_it_follows_the_size_of_its_terminal(self, running: Path, terminal: list[Terminal]) -> None:
        """At 80 columns the point at work has one line, at 30 two."""
        shown = Terminal("top", str(running), "--every", "0.1")
        terminal.append(shown)
        shown.until("tiny tp2 reference, 2 × 200 tokens")
        termios.tcsetwinsize(shown.side, (40, 30))
        folded = "tiny tp2 reference, 2 × 200".ljust(30) + "\r\ntokens"
        shown.until(folded)
        frame = _plain(shown.text).partition(folded)[2]
        assert max(len(line.rstrip("\r")) for line in frame.split("\n")) <= 30

    def test_a_terminal_that_can_do_no_more_gets_lines(self, ended: Path, terminal: list[Terminal]) -> None:
        shown = Terminal("top", str(ended), TERM="dumb")
        terminal.append(shown)
        assert shown.end() == 130
        assert "\x1b" not in shown.text
        assert "1 of 2 points · 1 left" in shown.text


class TestInAPipe:
    def test_lines_without_codes(self, ended: Path) -> None:
        """FORCE_COLOR is for colours, of which there are none here."""
        done = top(ended, FORCE_COLOR="1")
        assert done.returncode == 130
        assert done.stdout.splitlines() == [
            f"sweep in {ended}: stopped with 1 left; go on with --resume",
            "CPU: functional run — these timings do not reflect performance",
            "tiny tp2 reference, 2 × 100 tokens: 200 tok/s, ITL 10 ms",
            "1 of 2 points · 1 left · 6 points/min · 10 s so far",
        ]
        assert done.stderr == ""

    def test_one_look_at_a_run_that_goes_on_is_0(self, running: Path) -> None:
        done = top(running, "--once")
        assert done.returncode == 0
        assert "now: tiny tp2 reference, 2 × 200 tokens, measure" in done.stdout

    def test_json_is_one_object_a_look(self, ended: Path) -> None:
        """Here the run has ended, so there is one look."""
        done = top(ended, "--json")
        (line,) = done.stdout.splitlines()
        found = json.loads(line)
        assert (found["status"], found["exit_code"], found["total"], found["left"]) == ("stopped", 130, 2, 1)
        assert found["last"][0]["tok_s"] == 200

    def test_a_reader_that_goes_away_ends_it_quietly(self, running: Path) -> None:
        """As in `dcpbench top RUN --json | head -1`."""
        command = [*COMMAND, "top", str(running), "--json", "--every", "0.1"]
        with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
            assert shown.stdout
            assert shown.stderr
            assert json.loads(shown.stdout.readline())["left"] == 1
            shown.stdout.close()
            assert shown.stderr.read() == ""
            assert shown.wait() == 141, "as of any command that SIGPIPE ends"

    def test_mistakes_say_what_to_type(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for args, said in (
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
            assert said in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False], ids=["empty", "none"])
def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, *, there: bool) -> None:
    """It says so, shows the run once that has begun, and ends with it."""
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
    command = [*COMMAND, "top", str(folder), "--every", "0.1"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        assert shown.stderr
        said = shown.stderr.readline()
        assert ("holds no run" if there else "has not begun") in said
        assert "Waiting for it to begin; Ctrl-C ends this." in said
        (tmp_path / "made").mkdir()
        job = build.job(tmp_path / "made", POINTS, device="cpu")
        for number, point in enumerate(POINTS):
            build.add_finished_point(job, tmp_path / "made", point, 10 * number, 10 * number + 10)
        if there:
            folder.rmdir()
        (tmp_path / "made").rename(folder)
        assert "2 of 2" in shown.communicate(timeout=60)[0]
        assert shown.returncode == 0


def test_waiting_ends_like_any_wait(tmp_path: Path) -> None:
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
def test_beside_a_sweep_it_says_each_point_and_ends_with_its_exit_code(tmp_path: Path) -> None:
    """One point is measured, one fails, and one hangs until the sweep is interrupted: 130, for both."""
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
        assert "Waiting" in shown.stderr.readline()  # what ended before it looks is counted, not said
        sweep = subprocess.Popen([*COMMAND, "sweep", *options], env=ENV, stderr=subprocess.DEVNULL)
        said, interrupted = [], False
        for line in shown.stdout:
            said.append(line)
            if "now: tiny tp2 reference, 2 × 66 tokens, measure" in line and not interrupted:
                interrupted = True  # a second Ctrl-C would not wait
                sweep.send_signal(signal.SIGINT)
        assert shown.wait() == 130
    assert sweep.wait() == 130
    text = "".join(said)
    assert "tiny tp2 reference, 2 × 13 tokens: FAILED: rank 1: ValueError: no such row in tiny" in text
    assert "tiny tp2 reference, 2 × 50 tokens: 200 tok/s, ITL 10 ms" in text
    assert "stopped with 1 left; go on with --resume" in said[-1]
