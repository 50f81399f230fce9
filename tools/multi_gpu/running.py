"""Run parts under a deadline, and record which are done, so that a second call continues."""

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

STATE = "state.json"
LEAST_SHARE = 0.5  # minimum share of a command's estimate that must be left to begin it: sweeps can be resumed
MOST = 1.7  # maximum factor of a command's time over its estimate
ATTEMPTS = 2
POLL_INTERVAL_S = 0.5  # interval in s between checks of whether the complete run was ended
GRACE_S = 25.0  # maximum time in s for a command to save its results after it was signalled to end
DONE, FAILED, CUT, SKIPPED = "done", "failed", "cut off", "skipped"


class Ran(msgspec.Struct, kw_only=True):
    """Hold the outcome of a command."""

    what: str
    code: int | None = None
    seconds: float = 0.0
    attempts: int = 0
    note: str = ""
    cut: int = 0  # number of times that it was ended early, by its time limit or Ctrl-C
    device: str = ""  # GPU on which it ran, if it takes one GPU


@dataclasses.dataclass
class Runner:
    """Hold a folder and its state."""

    folder: Path
    minutes: float
    devices: Sequence[str] = ("0",)  # GPUs as in CUDA_VISIBLE_DEVICES; commands that take one run in parallel
    begun: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STATE
        self.state = msgspec.json.decode(path.read_bytes(), type=dict[str, Ran]) if path.exists() else {}
        self.lock, self.stop = threading.Lock(), threading.Event()

    @property
    def left_s(self) -> float:
        """Return the seconds to the deadline."""
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def run(self, parts: Sequence[Part]) -> None:
        """Run all commands that are not done, in order; commands that take one GPU run in parallel with their
        neighbours.
        """
        for part in parts:
            ends = time.monotonic() + MOST * 60 * part.minutes
            for alone, commands in itertools.groupby(part.commands, key=lambda command: command.only_one):
                if alone:
                    self.side_by_side(part, list(commands), ends)
                else:
                    for command in commands:
                        self.take(part, command, ends, None)

    def side_by_side(self, part: Part, commands: Sequence[Command], ends: float) -> None:
        """Run each command on the next free GPU."""
        free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for device in self.devices:
            free.put(device)

        def on_one(command: Command) -> None:
            device = free.get()
            try:
                self.take(part, command, ends, device)
            finally:
                free.put(device)

        with concurrent.futures.ThreadPoolExecutor(len(self.devices)) as pool:
            running = [pool.submit(on_one, command) for command in commands]
            try:
                for each in running:
                    each.result()
            except BaseException:  # Ctrl-C, or what is wrong here
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def take(self, part: Part, command: Command, ends: float, device: str | None) -> None:
        """Run a command of a part that has until `ends`, if it is not done and there is time."""
        key = f"{part.name}/{command.name}"
        with self.lock:
            ran = self.state.setdefault(key, Ran(what=SKIPPED))
        if ran.what == DONE or ran.attempts >= ATTEMPTS:
            say(f"{key}: {ran.what}, {ran.attempts} times; not run again")
            return
        if missing := [word for word in command.words if "*" in word and not files(word)]:
            ran.note = f"there is no {', '.join(missing)} yet"
            say(f"{key}: skipped, {ran.note}")
            return
        left = min(self.left_s, ends - time.monotonic())
        if left < LEAST_SHARE * 60 * command.minutes:
            of = "the run" if self.left_s <= ends - time.monotonic() else "this part's share"
            ran.note = f"{max(left, 0) / 60:.1f} min of {of} left, it takes about {command.minutes:.1f}"
            say(f"{key}: skipped, {ran.note}")
        else:
            self.one(key, command, ran, min(left, MOST * 60 * command.minutes), device)
        with self.lock:
            self.save()

    def one(self, key: str, command: Command, ran: Ran, limit_s: float, device: str | None) -> None:
        """Run a command for at most `limit_s`, on one GPU or on all."""
        log = self.folder / f"{key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        said = command.said(device or "0")
        say(f"$ {said}    (about {command.minutes:.1f} min, {self.left_s / 60:.1f} left)")
        start = time.monotonic()
        with log.open("a") as out:
            out.write(f"$ {said}\n")
            out.flush()
            code, cut = bounded(argv(command), out, limit_s, device, self.stop)
        ran.seconds, ran.code, ran.note, ran.device = round(time.monotonic() - start, 1), code, "", device or ""
        ran.attempts += not cut
        ran.cut += cut
        ran.what = CUT if cut else FAILED if code else DONE
        say(f"{key}: {ran.what} (exit code {code}) after {ran.seconds:.0f} s; {log}")

    def save(self) -> None:
        """Replace the saved state by the present one."""
        new = self.folder / f"{STATE}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self.state), indent=1))
        new.replace(self.folder / STATE)


def argv(command: Command) -> list[str]:
    """Return the command's arguments for this Python, with patterns expanded to files, as in a shell."""
    module = "dcpbench.cli" if command.program == "dcpbench" else command.program
    words = [files(w) or [w] if "*" in w else [w] for w in command.words]
    return [sys.executable, "-m", module, *itertools.chain.from_iterable(words)]


def files(pattern: str) -> list[str]:
    """Return the files that match a pattern, in order."""
    return sorted(map(str, Path(pattern).parent.glob(Path(pattern).name)))


def bounded(
    words: list[str], out: object, limit_s: float, device: str | None, stop: threading.Event
) -> tuple[int, bool]:
    """Return the exit code, and True if it was ended early; its own processes are ended, first as by Ctrl-C."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
    process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)  # type: ignore[call-overload]
    until = time.monotonic() + limit_s
    try:
        while time.monotonic() < until and not stop.is_set():
            try:
                return process.wait(timeout=max(min(POLL_INTERVAL_S, until - time.monotonic()), 0.0)), False
            except subprocess.TimeoutExpired:
                pass
    except KeyboardInterrupt:
        end(process)
        raise
    return end(process), True


def end(process: subprocess.Popen[bytes]) -> int:
    """End a process with increasingly strong signals, and return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def say(line: str) -> None:
    """Print a line to stdout at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
