"""Test `dcpbench top` over several polls: time passes and files change while it sleeps."""

from __future__ import annotations

import io
import json
import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from dcpbench.errors import UsageError
from dcpbench.launch.processes import COMMAND, NONE
from dcpbench.top import watch
from tests.unit import top_builder as build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TWO = [build.make_point(context) for context in (100, 200)]
NAME = "tiny tp2 reference, 2 ×"


class FakeTime:
    """Advance the time and execute one action at each sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.alive, self.slept = build.BEGAN + 1.0, COMMAND, list[float]()
        self.actions: list[Callable[[], object]] = []
        monkeypatch.setattr(watch, "time", SimpleNamespace(time=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(watch.processes, "find_alive", lambda _: (self.alive, build.BEGAN if self.alive else None))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += 10.0
        self.actions.pop(0)()

    def end_command(self) -> None:
        """Let the command's process disappear."""
        self.alive = NONE


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Replace the time functions by a FakeTime."""
    return FakeTime(monkeypatch)


def test_top_follows_a_run_to_its_end_and_returns_its_exit_code(
    tmp_path: Path, fake_time: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    job = build.write_job(tmp_path, TWO)
    build.add_event(job, 1, "measure", TWO[0])
    fake_time.actions = [
        lambda: build.add_finished_point(job, tmp_path, TWO[0], 1, 10),
        lambda: None,
        lambda: build.add_record(
            tmp_path, TWO[1], start=11, outcome="failed", reason="rank 1: ValueError: no such row"
        ),
        fake_time.end_command,
    ]
    assert watch.top(tmp_path, every=2.5) == 4
    assert fake_time.slept == [2.5] * 4
    assert capsys.readouterr().out.splitlines() == [
        f"sweep in {tmp_path}: running",
        "0 of 2 points · 2 left · 1 s so far",
        f"now: {NAME} 100 tokens, measure",
        f"{NAME} 100 tokens: 200 tok/s, ITL 10 ms",
        "1 of 2 points · 1 left · 6 points/min · 11 s so far · about 9 s left, by 1 point alone",
        "all points have ended; the report is being written",
        f"{NAME} 200 tokens: FAILED: rank 1: ValueError: no such row",
        "2 of 2 points · 1 failed · 5.71 points/min · 21 s so far",
        "ended, 1 failed",
    ]


def test_json_output_has_a_line_for_each_poll(
    tmp_path: Path, fake_time: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    job = build.write_job(tmp_path, TWO[:1])
    fake_time.actions = [lambda: build.add_finished_point(job, tmp_path, TWO[0], 1, 10), fake_time.end_command]
    assert watch.top(tmp_path, as_json=True) == 0
    states = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(state["status"], state["ok"]) for state in states] == [("starting", 0), ("finishing", 1), ("ended", 1)]


@pytest.mark.parametrize("as_json", [False, True])
def test_once_prints_a_snapshot_and_exits_with_0_during_a_run(
    tmp_path: Path, fake_time: FakeTime, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    job = build.write_job(tmp_path, TWO)
    build.add_finished_point(job, tmp_path, TWO[0], 1, 10)
    assert watch.top(tmp_path, once=True, as_json=as_json) == 0
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["status"] == "running"
    else:
        assert out.splitlines()[0] == f"sweep in {tmp_path}: running"
    assert fake_time.slept == []
    fake_time.end_command()
    fake_time.now += 100
    assert watch.top(tmp_path, once=True) == 130


def test_top_waits_for_a_run_to_begin_and_prints_the_reason_once(
    tmp_path: Path, fake_time: FakeTime, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    fake_time.actions = [
        lambda: None,
        run.mkdir,
        lambda: None,
        lambda: build.add_record(run, TWO[0], start=0),
        fake_time.end_command,
    ]
    fake_time.actions[3] = lambda: (
        build.add_finished_point(build.write_job(run, TWO[:1]), run, TWO[0], 0, 10),
        fake_time.end_command(),
    )
    assert watch.top(run) == 0
    out, err = capsys.readouterr()
    messages = " ".join(err.split())
    assert messages.count("Waiting for it to begin; Ctrl-C ends this.") == 2
    assert "run has not begun, as there is no such folder" in messages
    assert "holds no run of sweep, serve or verify yet; `dcpbench sweep -o " in messages
    assert "ended" in out


def test_path_that_cannot_be_a_run_raises_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file is no folder; name a run's"):
        watch.top(tmp_path / "file")
    for name in "dacb":
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    with pytest.raises(UsageError, match=rf"holds some; name one: {tmp_path}/b {tmp_path}/c {tmp_path}/d$"):
        watch.top(tmp_path)
    (tmp_path / "old" / "run").mkdir(parents=True)
    (tmp_path / "old" / "run" / "records.jsonl").touch()
    with pytest.raises(UsageError, match=r"old is no run, but holds some; name one: .*/old/run$"):
        watch.top(tmp_path / "old")
    (tmp_path / "folder" / "records.jsonl").mkdir(parents=True)
    with pytest.raises(watch.NotBegunError, match="folder holds no run"):
        watch.top(tmp_path / "folder", once=True)
    with pytest.raises(watch.NotBegunError, match="there is no such folder"):
        watch.top(tmp_path / "none", once=True)


def test_top_without_a_folder_watches_the_newest_running_run(
    tmp_path: Path, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "monday"
    run.mkdir(parents=True)
    build.write_job(run, TWO)
    (run / ".lock").touch()
    assert watch.top(None, once=True) == 0
    assert capsys.readouterr().out.startswith("sweep in runs/monday: ")
    fake_time.end_command()
    with pytest.raises(
        UsageError, match=r"no run below runs/ .* The last one was runs/monday: dcpbench top runs/monday"
    ):
        watch.top(None, once=True)


def test_ctrl_c_returns_130_and_other_signals_exit_with_128_plus_number(tmp_path: Path, fake_time: FakeTime) -> None:
    """Check also that the previous signal handlers are restored."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    build.write_job(tmp_path, TWO)

    def interrupt() -> None:
        raise KeyboardInterrupt

    fake_time.actions = [interrupt]
    assert watch.top(tmp_path) == 130
    for number in (signal.SIGTERM, signal.SIGHUP):
        fake_time.actions = [lambda number=number: os.kill(os.getpid(), number)]
        with pytest.raises(SystemExit) as end:
            watch.top(tmp_path)
        assert end.value.code == 128 + number
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_live_view_leaves_its_last_screen_on_the_terminal(tmp_path: Path) -> None:
    """Leave the last state after the alternate screen is closed, and restore the handler of Ctrl-Z."""
    job = build.write_job(tmp_path, TWO)
    out = io.StringIO()
    terminal = Console(file=out, width=100, height=20, force_terminal=True)
    before = signal.getsignal(signal.SIGTSTP)
    with watch._open_live_view(terminal) as show:
        assert signal.getsignal(signal.SIGTSTP) != before
        show(build.make_state(tmp_path, 1))
        build.add_finished_point(job, tmp_path, TWO[0], 1, 10)
        show(build.make_state(tmp_path, 11))
    assert signal.getsignal(signal.SIGTSTP) == before
    screen, _, left = out.getvalue().rpartition("\x1b[?1049l")
    assert "0 of 2 points" in screen
    assert "1 of 2 points" in left


class StoppedTerminal(io.StringIO):
    """A terminal that receives Ctrl-Z during a write, and fails on a reentrant write."""

    def __init__(self) -> None:
        super().__init__()
        self.pending_stops = 0
        self.busy = False

    def write(self, text: str) -> int:
        assert not self.busy, "reentrant call"
        self.busy = True
        if self.pending_stops:
            self.pending_stops -= 1
            os.kill(os.getpid(), signal.SIGTSTP)
        self.busy = False
        return super().write(text)


def test_live_view_stopped_during_a_write_stops_after_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop once more while the screen is restored."""
    build.write_job(tmp_path, TWO)
    out, stopped = StoppedTerminal(), []

    def stop(number: int) -> None:
        stopped.append(number)
        if len(stopped) == 1:
            out.pending_stops = 1

    monkeypatch.setattr(signal, "raise_signal", stop)
    with watch._open_live_view(Console(file=out, width=100, height=20, force_terminal=True)) as show:
        show(build.make_state(tmp_path, 1))
        out.pending_stops = 1
        show(build.make_state(tmp_path, 2))
        assert stopped == [signal.SIGSTOP] * 2
        assert out.getvalue().count("\x1b[?1049h") == 3, "the alternate screen is opened once and restored twice"
