"""The command `dcpbench top`: which run to watch, how often to look, and how to end."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import ExitCode, UsageError
from dcpbench.launch import processes
from dcpbench.records.folder import JOB_FILES, LOCK_FILE, RECORDS_FILE
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import make_console, print_stderr
from dcpbench.show.text import make_printable
from dcpbench.top.facts import Facts
from dcpbench.top.gpu_monitor import Gpus
from dcpbench.top.state import State, compute_state
from dcpbench.top.state_text import format_changes, format_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    Show = Callable[[State], None]

RUNS = Path("runs")  # default parent folder of runs of sweep and serve


def top(folder: Path | None, *, every: float = 1.0, once: bool = False, as_json: bool = False) -> int:
    """Watch a run until it ends; return the exit code of its command as far as files show it, 130 after Ctrl-C.

    `folder` None: the newest running one below RUNS. A run that has not started is waited for. `every`: seconds between
    updates. `once`: a single update, and exit code 0 while the run continues. Raise UsageError if there can be no such
    run, and with `once` if there is none.
    """
    try:
        if once:
            state = StateReader(_find_run(folder), Gpus()).read_state()
            (_print_json if as_json else _print_once)(state)
            return state.exit_code or 0
        with _handle_signals():
            reader = StateReader(_wait_for_run(folder, every), Gpus())
            with contextlib.nullcontext(_print_json) if as_json else _open_view() as show:
                while True:
                    state = reader.read_state()
                    show(state)
                    if state.exit_code is not None:
                        return state.exit_code
                    time.sleep(every)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()


class NotBegunError(UsageError):
    """The requested run does not exist yet."""


def find_running(runs: Path) -> Path:
    """Return the running run with the most recently written lock. Raise NotBegunError if none runs."""
    locks = {path.parent: path.stat().st_mtime for path in runs.glob(f"*/{LOCK_FILE}")}
    newest = sorted(locks, key=lambda folder: locks[folder], reverse=True)
    for folder in newest:
        if processes.find_alive(folder)[0]:
            return folder
    last = f" The last one was {newest[0]}: dcpbench top {newest[0]}" if newest else ""
    raise NotBegunError(f"no run below {runs}/ is running here; name one, as in: dcpbench top /data/RUN.{last}")


class StateReader:
    """Read the state of a run's folder again and again, and what was added to its files since the last time."""

    def __init__(self, folder: Path, gpus: Gpus | None = None) -> None:
        self._folder, self._facts, self._gpus = folder, Facts(folder), gpus
        self._here = False

    def read_state(self) -> State:
        """Return the state at this time."""
        alive, began = processes.find_alive(self._folder)  # before the files, so that its last writes are seen
        self._facts.read_updates()
        state = compute_state(self._facts, time.time(), alive=alive, began=began, known_here=self._here)
        self._here |= bool(alive)
        gpus = self._gpus.read_states() if self._gpus and state.device == "cuda" and alive else []
        return msgspec.structs.replace(state, gpus=gpus)


def _wait_for_run(folder: Path | None, every: float) -> Path:
    """Return the run's folder once it exists; meanwhile print what is awaited, again if that changes."""
    last_message = ""
    while True:
        try:
            return _find_run(folder)
        except NotBegunError as e:
            if str(e) != last_message:
                print_stderr(f"{make_printable(str(e))} Waiting for it to begin; Ctrl-C ends this.")
            last_message = str(e)
        time.sleep(every)


def _find_run(folder: Path | None) -> Path:
    if folder is None:
        return find_running(RUNS)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name a run's, as in: dcpbench top runs/NAME")
    if not folder.exists():
        raise NotBegunError(
            f"{folder} has not begun, as there is no such folder: a run makes it once it knows the machine, some "
            "seconds after its start."
        )
    known = (LOCK_FILE, RECORDS_FILE)
    if not any((folder / name).is_file() for name in known) and not any(folder.glob(JOB_FILES)):
        inside = sorted({str(p.parent) for name in known for p in folder.glob(f"*/{name}")})
        if inside:
            raise UsageError(f"{folder} is no run, but holds some; name one: {' '.join(inside[-3:])}")
        raise NotBegunError(
            f"{folder} holds no run of sweep, serve or verify yet; `dcpbench sweep -o {shlex.quote(str(folder))}` in another "
            "terminal begins one."
        )
    return folder


@contextlib.contextmanager
def _open_view() -> Iterator[Show]:
    """Yield a function that shows states: a live view on a terminal that supports it, else lines."""
    terminal = make_console()
    if sys.stdout.isatty() and not terminal.is_dumb_terminal:
        with _open_live_view(terminal) as show:
            yield show
        return
    before: State | None = None

    def print_changes(state: State) -> None:
        nonlocal before
        _print_lines(format_changes(before, state))
        before = state

    yield print_changes


@contextlib.contextmanager
def _open_live_view(terminal: Console) -> Iterator[Show]:
    """Show the state on the terminal's alternate screen, resized with it; the last state stays on the main screen."""
    from rich.live import Live

    from dcpbench.top.state_view import render_state

    last: State | None = None
    writing = paused = False
    with Live(console=terminal, screen=True, auto_refresh=False) as live:

        def show_state(state: State) -> None:
            nonlocal last, writing
            last = state
            writing = True
            live.update(render_state(state, terminal.width, terminal.height), refresh=True)
            stop_while_paused()

        def stop_while_paused() -> None:
            """Return screen and cursor to the shell until `fg`, once per request."""
            nonlocal writing, paused
            writing = True
            while paused:
                paused = False
                live.stop()
                signal.raise_signal(signal.SIGSTOP)
                live.start(refresh=True)
            writing = False

        def handle_pause(number: int, frame: object) -> None:
            """Handle Ctrl-Z: at once, or after the current write, because Python's files are not reentrant."""
            nonlocal paused
            del number, frame
            paused = True
            if not writing:
                stop_while_paused()

        before = signal.signal(signal.SIGTSTP, handle_pause)
        try:
            yield show_state
        finally:
            signal.signal(signal.SIGTSTP, before)
            live.stop()
            if last is not None:
                terminal.print(render_state(last, terminal.width, terminal.height))


def _print_once(state: State) -> None:
    if sys.stdout.isatty():
        from dcpbench.top.state_view import render_state

        terminal = make_console()
        terminal.print(render_state(state, terminal.width, terminal.height))
    else:
        _print_lines(format_snapshot(state))


def _print_lines(lines: Iterator[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _print_json(state: State) -> None:
    write_json(msgspec.json.encode(state).decode() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _handle_signals() -> Iterator[None]:
    """End on SIGTERM and on a lost terminal as on Ctrl-C, so that the terminal is restored."""

    def handle_signal(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, handle_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
