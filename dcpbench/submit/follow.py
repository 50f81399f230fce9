"""Follow a job of a cluster to its end: its output, the reasons for its waiting, and its exit. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Protocol

from dcpbench.errors import UsageError, WorkerError
from dcpbench.launch.stopping import delay_signals
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import fit_line, make_printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

READ_S, POLL_INTERVAL_S = 0.5, 5.0  # intervals in s at which output is read, and the cluster is queried
CANCEL_TIMEOUT_S = 90.0  # maximum time in s for a cancelled job to disappear
ANSWER_S = 60.0  # time-out in s of a cluster's command
FAILED = 4  # exit code of a job that ended without a more specific one, as after a failed rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """State of a job."""

    message: str  # sentence without its full stop, printed when it changes
    ended: bool = False
    code: int = 0  # exit code, once it has ended
    lost: bool = False  # True if it ended because it lost a machine, so that it may continue elsewhere


def make_end_state(message: str, code: int = FAILED, *, lost: bool = False) -> State:
    """Return the state of a job that has ended without success."""
    return State(message=message, ended=True, code=code, lost=lost)


class NoAnswerError(Exception):
    """The cluster did not answer, which may pass."""


class Queue(Protocol):
    """A job as the cluster has it."""

    late_s: float  # time in s during which output may arrive after the end

    def fetch_state(self) -> State:
        """Return the current state. Raise NoAnswerError if the cluster does not answer."""

    def read_output(self) -> Iterable[str]:
        """Return the lines printed by node 0 since the last call."""

    def is_finished(self) -> bool:
        """Return True if no more output can arrive."""

    def cancel(self) -> None:
        """Have the cluster end it."""

    def delete_remains(self) -> None:
        """Remove the remains of a job that has ended."""

    def close(self) -> None:
        """Stop reading its output."""


def follow_job(queue: Queue) -> State:
    """Follow the job until it has ended; return its final state."""
    try:
        state = _wait_until_ended(queue)
        _print_late_output(queue)
    finally:
        queue.close()
    queue.delete_remains()
    return state


def _wait_until_ended(queue: Queue) -> State:
    state, looked, silent = State(message=""), 0.0, False
    while not state.ended:
        print_output(queue.read_output())
        if time.monotonic() - looked >= POLL_INTERVAL_S or not looked:
            looked = time.monotonic()
            try:
                found = queue.fetch_state()
                silent = False
            except NoAnswerError as e:
                if not silent:
                    print_stderr(f"{e}; asking again, the job goes on meanwhile.")
                silent, found = True, state
            if found.message != state.message:
                print_output(queue.read_output())
                print_stderr(f"{found.message.rstrip('.')}.")
            state = found
        if not state.ended:
            time.sleep(READ_S)
    return state


def cancel_job(queue: Queue) -> State:
    """Cancel the job and wait until it is gone. Raise WorkerError if it remains."""
    queue.cancel()
    until = time.monotonic() + CANCEL_TIMEOUT_S
    while True:
        with contextlib.suppress(NoAnswerError):
            state = queue.fetch_state()
            if state.ended:
                queue.delete_remains()
                return state
        if time.monotonic() > until:
            raise WorkerError(f"the job still existed {CANCEL_TIMEOUT_S:.0f} s after cancellation; see the queue.")
        time.sleep(READ_S)


def print_output(lines: Iterable[str]) -> None:
    """Print lines of the job's output on stdout."""
    for line in lines:
        sys.stdout.write(make_printable(line, "\t") + "\n")
    sys.stdout.flush()


def run_command(
    command: Sequence[str], *, sent: str = "", env: dict[str, str] | None = None, seconds: float = ANSWER_S
) -> str:
    """Return the output of a cluster command. Raise UsageError if it is missing, RefusedError if it fails, NoAnswerError on a
    time-out.
    """
    try:
        code, out, err = _run_process(command, sent, env, seconds)
    except FileNotFoundError as e:
        raise UsageError(
            f"there is no `{command[0]}` here; type this where it is, as on the cluster's login node, or add --dry-run to "
            "see what would be submitted."
        ) from e
    except subprocess.TimeoutExpired as e:
        raise NoAnswerError(f"{command[0]} gave no answer within {seconds:.0f} s") from e
    if code:
        raise RefusedError(command[0], fit_line(err or out or f"exit code {code}"))
    return out


def _run_process(command: Sequence[str], sent: str, env: dict[str, str] | None, seconds: float) -> tuple[int, str, str]:
    """Return the exit code and the output of a command.

    The process always ends with this function; subprocess.run would leave it behind on Ctrl-C.
    """
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as ending:
        with delay_signals():
            process = ending.enter_context(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", env=env)
            )
            ending.callback(_kill_process, process)
        out, err = process.communicate(sent, timeout=seconds)
        return process.returncode, out, err


def _kill_process(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


class RefusedError(WorkerError):
    """A command of the cluster failed; the sentence quotes it."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(f"{program}: {message}")
        self.message = message


def _print_late_output(queue: Queue) -> None:
    """Print output that arrives after the end of the job."""
    until = time.monotonic() + queue.late_s
    while time.monotonic() < until and not queue.is_finished():
        print_output(queue.read_output())
        time.sleep(min(READ_S, queue.late_s / 4))
