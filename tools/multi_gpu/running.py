"""Run parts until a deadline, and store which commands are done, so that a second call continues."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.multi_gpu.parts import Command, Part

STATE_FILE = "state.json"
MIN_TIME_SHARE = 0.5  # share of a command's estimate that must be left to start it; sweeps can be resumed
MAX_TIME_FACTOR = 1.7  # maximum time of a command over its estimate
MAX_ATTEMPTS = 2
POLL_INTERVAL_S = 0.5  # interval in s at which a command checks whether the whole run was stopped
GRACE_S = 25.0  # maximum time in s for a command to save its results after a signal
DONE, FAILED, CUT_OFF, SKIPPED = "done", "failed", "cut off", "skipped"


class Outcome(msgspec.Struct, kw_only=True):
    """Hold the outcome of a command."""

    what: str
    code: int | None = None
    seconds: float = 0.0
    attempts: int = 0
    note: str = ""
    cut: int = 0  # number of early ends, by the time limit or Ctrl-C
    device: str = ""  # GPU on which it ran, if it uses one GPU


@dataclasses.dataclass
class Runner:
    """Run commands, with logs and state in a folder."""

    folder: Path
    minutes: float
    devices: Sequence[str] = ("0",)  # GPUs as in CUDA_VISIBLE_DEVICES; commands that use one run in parallel
    begun: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STATE_FILE
        self.state = msgspec.json.decode(path.read_bytes(), type=dict[str, Outcome]) if path.exists() else {}
        self.lock, self.stop = threading.Lock(), threading.Event()

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def run(self, parts: Sequence[Part]) -> None:
        """Run all commands that are not done, in order. Consecutive commands that use one GPU run in parallel."""
        for part in parts:
            ends = time.monotonic() + MAX_TIME_FACTOR * 60 * part.minutes
            for alone, commands in itertools.groupby(part.commands, key=lambda command: command.only_one):
                if alone:
                    self.run_in_parallel(part, list(commands), ends)
                else:
                    for command in commands:
                        self.run_if_due(part, command, ends, None)

    def run_in_parallel(self, part: Part, commands: Sequence[Command], ends: float) -> None:
        """Run each command on the next free GPU."""
        free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for device in self.devices:
            free.put(device)

        def run_on_free_gpu(command: Command) -> None:
            device = free.get()
            try:
                self.run_if_due(part, command, ends, device)
            finally:
                free.put(device)

        with concurrent.futures.ThreadPoolExecutor(len(self.devices)) as pool:
            running = [pool.submit(run_on_free_gpu, command) for command in commands]
            try:
                for each in running:
                    each.result()
            except BaseException:  # Ctrl-C, or an error in this program
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def run_if_due(self, part: Part, command: Command, ends: float, device: str | None) -> None:
        """Run a command if it is not done and if enough time is left; its part has time until `ends`."""
        key = f"{part.name}/{command.name}"
        with self.lock:
            outcome = self.state.setdefault(key, Outcome(what=SKIPPED))
        if outcome.what == DONE or outcome.attempts >= MAX_ATTEMPTS:
            print_line(f"{key}: {outcome.what} after {outcome.attempts} attempts; not run again")
            return
        if missing := [word for word in command.arguments if "*" in word and not expand_pattern(word)]:
            outcome.note = f"there is no {', '.join(missing)} yet"
            print_line(f"{key}: skipped, {outcome.note}")
            return
        left = min(self.left_s, ends - time.monotonic())
        if left < MIN_TIME_SHARE * 60 * command.minutes:
            whose = "the run" if self.left_s <= ends - time.monotonic() else "this part's share"
            outcome.note = f"{max(left, 0) / 60:.1f} min of {whose} left, it takes about {command.minutes:.1f}"
            print_line(f"{key}: skipped, {outcome.note}")
        else:
            self.run_one(key, command, outcome, min(left, MAX_TIME_FACTOR * 60 * command.minutes), device)
        with self.lock:
            self.save_state()

    def run_one(self, key: str, command: Command, outcome: Outcome, limit_s: float, device: str | None) -> None:
        """Run a command for at most `limit_s` seconds, on one GPU or on all, and store its outcome."""
        log = self.folder / f"{key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command_line = command.format_command_line(device or "0")
        print_line(f"$ {command_line}    (about {command.minutes:.1f} min, {self.left_s / 60:.1f} left)")
        start = time.monotonic()
        with log.open("a") as out:
            out.write(f"$ {command_line}\n")
            out.flush()
            code, cut = run_bounded(list_arguments(command), out, limit_s, device, self.stop)
        outcome.seconds, outcome.code, outcome.note, outcome.device = (
            round(time.monotonic() - start, 1),
            code,
            "",
            device or "",
        )
        outcome.attempts += not cut
        outcome.cut += cut
        outcome.what = CUT_OFF if cut else FAILED if code else DONE
        print_line(f"{key}: {outcome.what} (exit code {code}) after {outcome.seconds:.0f} s; {log}")

    def save_state(self) -> None:
        """Write the state to its file."""
        new = self.folder / f"{STATE_FILE}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self.state), indent=1))
        new.replace(self.folder / STATE_FILE)


def list_arguments(command: Command) -> list[str]:
    """Return the argument list of a command for this Python, with patterns expanded to files as in a shell."""
    module = "dcpbench.cli" if command.program == "dcpbench" else command.program
    words = [expand_pattern(w) or [w] if "*" in w else [w] for w in command.arguments]
    return [sys.executable, "-m", module, *itertools.chain.from_iterable(words)]


def expand_pattern(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted."""
    return sorted(map(str, Path(pattern).parent.glob(Path(pattern).name)))


def run_bounded(
    arguments: list[str], out: object, limit_s: float, device: str | None, stop: threading.Event
) -> tuple[int, bool]:
    """Run a command; return its exit code, and True if it was ended early, at the limit or by `stop`."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    process = subprocess.Popen(arguments, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)  # type: ignore[call-overload]
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline and not stop.is_set():
            try:
                return process.wait(timeout=max(min(POLL_INTERVAL_S, deadline - time.monotonic()), 0.0)), False
            except subprocess.TimeoutExpired:
                pass
    except KeyboardInterrupt:
        end_process(process)
        raise
    return end_process(process), True


def end_process(process: subprocess.Popen[bytes]) -> int:
    """End the process group with increasingly strong signals, the first as by Ctrl-C; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def print_line(line: str) -> None:
    """Print a line, and flush stdout."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
