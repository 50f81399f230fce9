"""A job of a cluster, followed to its end: what it prints, what it waits for, and how it ended. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Protocol

from dcpbench.errors import UsageError, WorkerError
from dcpbench.launch.stopping import held_back
from dcpbench.show.terminal import say
from dcpbench.show.text import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

READ_S, LOOK_S = 0.5, 5.0
"""How often output is read, and the cluster asked."""
GONE_S = 90.0
"""How long a cancelled job may take to be gone."""
ANSWER_S = 60.0
"""How long a cluster's command may take."""
FAILED = 4
"""Exit code of a job whose end says nothing else, as of a rank that failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Where a job is."""

    said: str
    """A sentence without its end, said when it changes."""
    ended: bool = False
    code: int = 0
    """Exit code, once it has ended."""
    lost: bool = False
    """Whether it ended because a machine was taken from it, so that it may go on elsewhere."""


class Silent(Exception):  # noqa: N818 -- not an error that anybody sees
    """The cluster did not answer, which may pass."""


class Queue(Protocol):
    """A job as the cluster has it."""

    late_s: float
    """How long output may come after the end."""

    def look(self) -> State:
        """Where it is now. Raises Silent."""

    def output(self) -> Iterable[str]:
        """Lines that node 0 has printed since the last call."""

    def finished(self) -> bool:
        """Whether no more of it can come."""

    def cancel(self) -> None:
        """Have the cluster end it."""

    def clean(self) -> None:
        """Remove what is left of one that has ended."""

    def close(self) -> None:
        """End what reads its output."""


def follow(queue: Queue) -> State:
    """Stay with the job until it has ended. Returns how it did."""
    try:
        state = _stay(queue)
        _last_words(queue)
    finally:
        queue.close()
    queue.clean()
    return state


def _stay(queue: Queue) -> State:
    state, looked, silent = State(said=""), 0.0, False
    while not state.ended:
        show(queue.output())
        if time.monotonic() - looked >= LOOK_S or not looked:
            looked = time.monotonic()
            try:
                found = queue.look()
                silent = False
            except Silent as e:
                if not silent:
                    say(f"{e}; asking again, the job goes on meanwhile.")
                silent, found = True, state
            if found.said != state.said:
                show(queue.output())
                say(f"{found.said.rstrip('.')}.")
            state = found
        if not state.ended:
            time.sleep(READ_S)
    return state


def cancel(queue: Queue) -> State:
    """Have the job ended, and stay until it is gone. Raises WorkerError where it is not."""
    queue.cancel()
    until = time.monotonic() + GONE_S
    while True:
        with contextlib.suppress(Silent):
            state = queue.look()
            if state.ended:
                queue.clean()
                return state
        if time.monotonic() > until:
            raise WorkerError(f"the job was not gone {GONE_S:.0f} s after it was cancelled; look for it in the queue.")
        time.sleep(READ_S)


def show(lines: Iterable[str]) -> None:
    """What the job printed, on stdout."""
    for line in lines:
        sys.stdout.write(printable(line, "\t") + "\n")
    sys.stdout.flush()


def ask(command: Sequence[str], *, sent: str = "", env: dict[str, str] | None = None, seconds: float = ANSWER_S) -> str:
    """What a command of the cluster prints. Raises UsageError where it is missing, RefusedError where it fails, Silent."""
    try:
        code, out, err = _run(command, sent, env, seconds)
    except FileNotFoundError as e:
        raise UsageError(
            f"there is no `{command[0]}` here; type this where it is, as on the cluster's login node, or add --dry-run to "
            "see what would be submitted."
        ) from e
    except subprocess.TimeoutExpired as e:
        raise Silent(f"{command[0]} gave no answer within {seconds:.0f} s") from e
    if code:
        raise RefusedError(command[0], one_line(err or out or f"exit code {code}"))
    return out


def _run(command: Sequence[str], sent: str, env: dict[str, str] | None, seconds: float) -> tuple[int, str, str]:
    """Its exit code and what it printed. It has ended however this ends, where subprocess.run leaves it behind at a Ctrl-C."""
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as ending:
        with held_back():
            process = ending.enter_context(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", env=env)
            )
            ending.callback(_ended, process)
        out, err = process.communicate(sent, timeout=seconds)
        return process.returncode, out, err


def _ended(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


class RefusedError(WorkerError):
    """A command of the cluster failed; the sentence quotes it."""

    def __init__(self, program: str, said: str) -> None:
        super().__init__(f"{program}: {said}")
        self.said = said


def _last_words(queue: Queue) -> None:
    """What comes when the job has ended already."""
    until = time.monotonic() + queue.late_s
    while time.monotonic() < until and not queue.finished():
        show(queue.output())
        time.sleep(min(READ_S, queue.late_s / 4))
