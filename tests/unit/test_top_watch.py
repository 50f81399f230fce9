"""The command `dcpbench top` from look to look: time goes on, and files change, as it sleeps."""

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

TWO = [build.point(context) for context in (100, 200)]
NAME = "tiny tp2 reference, 2 ×"


class Passing:
    """Time that passes, and what happens meanwhile: one thing at each sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.alive, self.slept = build.BEGAN + 1.0, COMMAND, list[float]()
        self.happens: list[Callable[[], object]] = []
        monkeypatch.setattr(watch, "time", SimpleNamespace(time=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(watch.processes, "find_alive", lambda _: (self.alive, build.BEGAN if self.alive else None))

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += 10.0
        self.happens.pop(0)()

    def ends(self) -> None:
        """The command is gone."""
        self.alive = NONE


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Passing:
    """See Passing."""
    return Passing(monkeypatch)


def test_a_run_is_followed_to_its_end_and_its_exit_code_is_the_commands(
    tmp_path: Path, passing: Passing, capsys: pytest.CaptureFixture[str]
) -> None:
    job = build.job(tmp_path, TWO)
    build.add_event(job, 1, "measure", TWO[0])
    passing.happens = [
        lambda: build.add_finished_point(job, tmp_path, TWO[0], 1, 10),
        lambda: None,
        lambda: build.record(tmp_path, TWO[1], start=11, outcome="failed", reason="rank 1: ValueError: no such row"),
        passing.ends,
    ]
    assert watch.top(tmp_path, every=2.5) == 4
    assert passing.slept == [2.5] * 4
    assert capsys.readouterr().out.splitlines() == [
        f"sweep in {tmp_path}: running",
        "0 of 2 points · 2 left · 1 s so far",
        f"now: {NAME} 100 tokens, measure",
        f"{NAME} 100 tokens: 200 tok/s, ITL 10 ms",
        "1 of 2 points · 1 left · 6 points/min · 11 s so far · about 9 s left, by 1 point alone",
        "all points have ended; the report is being written",
        f"{NAME} 200 tokens: FAILED: rank 1: ValueError: no such row",
        "2 of 2 points · 1 failed · 5.71 points/min · 31 s so far",
        "ended, 1 failed",
    ]


def test_in_json_each_look_is_a_line(tmp_path: Path, passing: Passing, capsys: pytest.CaptureFixture[str]) -> None:
    job = build.job(tmp_path, TWO[:1])
    passing.happens = [lambda: build.add_finished_point(job, tmp_path, TWO[0], 1, 10), passing.ends]
    assert watch.top(tmp_path, as_json=True) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(state["status"], state["ok"]) for state in told] == [("starting", 0), ("finishing", 1), ("ended", 1)]


@pytest.mark.parametrize("as_json", [False, True])
def test_one_look_ends_well_while_the_run_goes_on(
    tmp_path: Path, passing: Passing, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    job = build.job(tmp_path, TWO)
    build.add_finished_point(job, tmp_path, TWO[0], 1, 10)
    assert watch.top(tmp_path, once=True, as_json=as_json) == 0
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["status"] == "running"
    else:
        assert out.splitlines()[0] == f"sweep in {tmp_path}: running"
    assert passing.slept == []
    passing.ends()
    passing.now += 100
    assert watch.top(tmp_path, once=True) == 130


def test_a_run_that_has_not_begun_is_waited_for_and_what_is_waited_for_is_said_once(
    tmp_path: Path, passing: Passing, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    passing.happens = [
        lambda: None,
        run.mkdir,
        lambda: None,
        lambda: build.record(run, TWO[0], start=0),
        passing.ends,
    ]
    passing.happens[3] = lambda: (build.add_finished_point(build.job(run, TWO[:1]), run, TWO[0], 0, 10), passing.ends())
    assert watch.top(run) == 0
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert said.count("Waiting for it to begin; Ctrl-C ends this.") == 2
    assert "run has not begun, as there is no such folder" in said
    assert "holds no run of sweep, serve or verify yet; `dcpbench sweep -o " in said
    assert "ended" in out


def test_what_can_never_be_a_run_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file is no folder; name a run's"):
        watch.top(tmp_path / "file")
    for name in "dacb":
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    with pytest.raises(UsageError, match=rf"holds some; name one: {tmp_path}/b {tmp_path}/c {tmp_path}/d$"):
        watch.top(tmp_path)
    with pytest.raises(watch.NotBegunError, match="there is no such folder"):
        watch.top(tmp_path / "none", once=True)


def test_without_a_folder_the_newest_running_run_is_watched(
    tmp_path: Path, passing: Passing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "monday"
    run.mkdir(parents=True)
    build.job(run, TWO)
    (run / ".lock").touch()
    assert watch.top(None, once=True) == 0
    assert capsys.readouterr().out.startswith("sweep in runs/monday: ")
    passing.ends()
    with pytest.raises(
        UsageError, match=r"no run below runs/ .* The last one was runs/monday: dcpbench top runs/monday"
    ):
        watch.top(None, once=True)


def test_ctrl_c_ends_it_as_a_shell_tells_it_and_other_signals_by_their_number(tmp_path: Path, passing: Passing) -> None:
    """The handlers of before are there again."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    build.job(tmp_path, TWO)

    def interrupted() -> None:
        raise KeyboardInterrupt

    passing.happens = [interrupted]
    assert watch.top(tmp_path) == 130
    for number in (signal.SIGTERM, signal.SIGHUP):
        passing.happens = [lambda number=number: os.kill(os.getpid(), number)]
        with pytest.raises(SystemExit) as end:
            watch.top(tmp_path)
        assert end.value.code == 128 + number
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_live_view_leaves_what_was_seen_last_on_the_terminal(tmp_path: Path) -> None:
    """Behind the second screen, which is left; Ctrl-Z means what it meant before."""
    job = build.job(tmp_path, TWO)
    out = io.StringIO()
    terminal = Console(file=out, width=100, height=20, force_terminal=True)
    before = signal.getsignal(signal.SIGTSTP)
    with watch._open_live_view(terminal) as show:
        assert signal.getsignal(signal.SIGTSTP) != before
        show(build.state(tmp_path, 1))
        build.add_finished_point(job, tmp_path, TWO[0], 1, 10)
        show(build.state(tmp_path, 11))
    assert signal.getsignal(signal.SIGTSTP) == before
    screen, _, left = out.getvalue().rpartition("\x1b[?1049l")
    assert "0 of 2 points" in screen
    assert "1 of 2 points" in left


class Writing(io.StringIO):
    """A terminal at which Ctrl-Z is typed while a screen is written, whose file refuses to be written to meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.typed = 0
        self.busy = False

    def write(self, text: str) -> int:
        assert not self.busy, "reentrant call"
        self.busy = True
        if self.typed:
            self.typed -= 1
            os.kill(os.getpid(), signal.SIGTSTP)
        self.busy = False
        return super().write(text)


def test_a_live_view_that_is_stopped_while_it_writes_gives_way_behind_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also gives way if Ctrl-Z is typed once more while the screen comes back."""
    build.job(tmp_path, TWO)
    out, stopped = Writing(), []

    def stop(number: int) -> None:
        stopped.append(number)
        if len(stopped) == 1:
            out.typed = 1

    monkeypatch.setattr(signal, "raise_signal", stop)
    with watch._open_live_view(Console(file=out, width=100, height=20, force_terminal=True)) as show:
        show(build.state(tmp_path, 1))
        out.typed = 1
        show(build.state(tmp_path, 2))
        assert stopped == [signal.SIGSTOP] * 2
        assert out.getvalue().count("\x1b[?1049h") == 3, "the second screen begins, and comes back twice"
