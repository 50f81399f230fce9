"""Runs parts under a deadline, and remembers what is done, so that a second call goes on."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tools.multi_gpu.parts import Command, Part

STATE = "state.json"
LEAST_SHARE = 0.5
"""A command is begun where this share of its estimate is left: sweeps keep what they have measured."""
MOST = 1.7
"""A command may take so many times its estimate."""
ATTEMPTS = 2
GRACE_S = 25.0
"""How long a command may take to keep what it has, once it was told to end."""
DONE, FAILED, CUT, SKIPPED = "done", "failed", "cut off", "skipped"


class Ran(msgspec.Struct, kw_only=True):
    """What became of a command."""

    what: str
    code: int | None = None
    seconds: float = 0.0
    attempts: int = 0
    note: str = ""
    cut: int = 0
    """How often it ran out of time."""


@dataclasses.dataclass
class Runner:
    """A folder and its state."""

    folder: Path
    minutes: float
    begun: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STATE
        self.state = msgspec.json.decode(path.read_bytes(), type=dict[str, Ran]) if path.exists() else {}

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return 60 * self.minutes - (time.monotonic() - self.begun)

    def run(self, parts: Sequence[Part]) -> None:
        """All commands that are not done, in order."""
        for part in parts:
            ends = time.monotonic() + MOST * 60 * part.minutes
            for command in part.commands:
                key = f"{part.name}/{command.name}"
                ran = self.state.setdefault(key, Ran(what=SKIPPED))
                if ran.what == DONE or ran.attempts >= ATTEMPTS:
                    say(f"{key}: {ran.what}, {ran.attempts} times; not run again")
                    continue
                left = min(self.left_s, ends - time.monotonic())
                if left < LEAST_SHARE * 60 * command.minutes:
                    of = "the run" if self.left_s <= ends - time.monotonic() else "this part's share"
                    ran.note = f"{max(left, 0) / 60:.1f} min of {of} left, it takes about {command.minutes:.1f}"
                    say(f"{key}: skipped, {ran.note}")
                else:
                    self.one(key, command, ran, min(left, MOST * 60 * command.minutes))
                self.save()

    def one(self, key: str, command: Command, ran: Ran, limit_s: float) -> None:
        """Run a command, at most so long."""
        log = self.folder / f"{key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        say(f"$ {command.said}    (about {command.minutes:.1f} min, {self.left_s / 60:.1f} left)")
        start = time.monotonic()
        with log.open("a") as out:
            out.write(f"$ {command.said}\n")
            out.flush()
            code, cut = bounded(argv(command), out, limit_s, only_one=command.only_one)
        ran.seconds, ran.code, ran.note = round(time.monotonic() - start, 1), code, ""
        ran.attempts += not cut
        ran.cut += cut
        ran.what = CUT if cut else FAILED if code else DONE
        say(f"{key}: {ran.what} (exit code {code}) after {ran.seconds:.0f} s; {log}")

    def save(self) -> None:
        """Replace the state by the present one."""
        new = self.folder / f"{STATE}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self.state), indent=1))
        new.replace(self.folder / STATE)


def argv(command: Command) -> list[str]:
    """Its words for this Python."""
    module = "dcpbench.cli" if command.program == "dcpbench" else command.program
    return [sys.executable, "-m", module, *command.words]


def bounded(words: list[str], out: object, limit_s: float, *, only_one: bool) -> tuple[int, bool]:
    """Exit code, and whether it was ended for the time; its own processes are ended, first as Ctrl-C does."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if only_one else {})
    process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)  # type: ignore[call-overload]
    try:
        return process.wait(timeout=limit_s), False
    except subprocess.TimeoutExpired:
        pass
    except KeyboardInterrupt:
        end(process)
        raise
    return end(process), True


def end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code, once it has ended by what it was told."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def say(line: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
