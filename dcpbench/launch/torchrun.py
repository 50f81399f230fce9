"""Run one torchrun job on this machine: its command line, its progress and its end. No torch.

    FOLDER/job-TAG.json, progress-TAG.jsonl                see jobs.py
    FOLDER/rank-R.pid, error-R.json, logs/TAG/rank-R.log … see ranks.py
    FOLDER/logs/TAG/agent.log                              output of torchrun itself

The job file names the folder; a run writes no files outside it. Every process is tied to the one above it (subprocess_guard.py):
this one, torchrun's agent, one watching process per rank, the rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from dcpbench.launch import hang_capture, kernel_build, subprocess_guard
from dcpbench.launch.jobs import Exit, Job, Progress, decode_progress
from dcpbench.launch.ranks import Ranks, make_environment, read_text
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.points.point import Point

END_WAIT_S = 5.0
KEEP_WAIT_S = 25.0  # for ranks to write results after an interruption in a run of requests; torchrun ends them at 30
REAP_WAIT_S = 2.0  # time in s that torchrun has to notice that its ranks have ended
FLIGHT_RECORDER, RECORDED = "TORCH_FR_BUFFER_SIZE", 512  # torch's variable, and its default number of collectives
LOOPBACK = "127.0.0.1"
RENDEZVOUS = "rendezvous"  # file of the rendezvous of torchrun's agent, in the folder of a job's logs
ROOT_CAUSE = re.compile(  # matches the end of torchrun's log if one of its ranks ended first
    r"Root Cause \(first observed failure\):.*?\(local_rank: (\d+)\).*?exitcode\s*: (-?\d+)", re.DOTALL
)
SIGNAL_EXIT_BASE = 128  # base of exit codes that stand for signals, as subprocess_guard.py passes them on
STOPPED = "T"  # state of a process that got SIGSTOP, in proc(5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """Hold the options for the machines of a sweep; the defaults mean this machine only."""

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""


class Running(Ranks):
    """Represent a started job. Context manager: leaving it ends every process of the job in any case."""

    def __init__(self, job: Job, rendezvous: RendezvousOptions, worker: str, lock: int | None = None) -> None:
        """Start it; `lock` is the descriptor of the folder's lock, which is held until the last rank is gone."""
        here = job.points[0].world // rendezvous.nnodes
        ranks = range(rendezvous.node_rank * here, (rendezvous.node_rank + 1) * here)
        super().__init__(Path(job.folder), job.get_log_folder(), job.get_progress_path(), ranks)
        self.job = job
        self.agent_log = self.logs / "agent.log"
        self.other_logs = [self.agent_log]
        self.started, self.begun = time.time(), time.monotonic()
        self.remove_files()
        self.logs.mkdir(parents=True, exist_ok=True)
        (self.logs / RENDEZVOUS).unlink(missing_ok=True)  # of a job of this tag that was killed
        job.get_path().write_bytes(msgspec.json.encode(job))
        with self.agent_log.open("ab") as log:
            self._agent = subprocess.Popen(
                subprocess_guard.make_tied_command(_make_command(job, worker, self.ranks)),
                stdin=subprocess.DEVNULL if lock is None else lock,
                stdout=log,
                stderr=log,
                env=_make_environment(job, rendezvous),
                start_new_session=True,
            )
        if lock is not None:
            os.write(lock, f"{self._agent.pid}\n".encode())
        self._build = kernel_build.KernelBuild(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> int | None:
        """Return the exit code of torchrun once it has ended."""
        return self._agent.poll()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of torchrun, or None if it is still running after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._agent.wait(seconds)
        return None

    def add_points(self, points: Sequence[Point]) -> None:
        """Add points to an open job that waits for them, or close it if there are none."""
        self.job = msgspec.structs.replace(self.job, points=[*self.job.points, *points], open=bool(points))
        write_file(self.job.get_path(), msgspec.json.encode(self.job), durable=False)

    def read_events(self) -> Iterator[Progress]:
        """Yield the progress written since the last call; skip damaged lines."""
        return self.event_tail.decode_lines(decode_progress)

    def is_stopped(self) -> bool:
        """Return True if torchrun's agent was stopped (SIGSTOP), so that it would never notice the end of its ranks."""
        return (subprocess_guard.read_start_ticks(self._agent.pid) or ("", 0))[0] == STOPPED

    def resume(self) -> None:
        """Resume a stopped agent."""
        self._agent.send_signal(signal.SIGCONT)

    def log_tail(self, first: Sequence[int] = ()) -> str:
        """Return the last lines of the first of these ranks, else of one that failed, else of rank 0, else of torchrun."""
        name, lines = self.read_last_lines(first)
        return "\n".join([f"{name}:", *lines]) if lines else ""

    def find_first_seen(self) -> Exit | None:
        """Return the rank that torchrun saw end first, by its log.

        It covers a rank that was killed together with its watching process, and so left no exit file.
        """
        found = ROOT_CAUSE.search(read_text(self.agent_log))
        if found is None:
            return None
        rank, code = int(found[1]), int(found[2])
        code = SIGNAL_EXIT_BASE - code if code > SIGNAL_EXIT_BASE else code
        return Exit(rank=self.ranks.start + rank, code=code, terminated=False, at=0.0)

    def kill(self, wait_s: float = END_WAIT_S) -> None:
        """End all processes of the job. torchrun ends its ranks on SIGTERM; a rank that ignores it is killed.

        Another Ctrl-C shortens the wait.
        """
        self._build.end()
        if self._agent.poll() is None:
            self._agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._agent.wait(wait_s)
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self._agent.wait(REAP_WAIT_S)
        if self._agent.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._agent.pid, signal.SIGKILL)
            self._agent.wait()
        asks = self.logs.glob(hang_capture.ASK.format("*"))
        heartbeats = self.logs.glob(hang_capture.HEARTBEATS.format("*")) if self._agent.poll() == 0 else ()
        unused = [path for path in self.list_files("stacks-{}.txt") if not path.stat().st_size]
        for path in (
            *self.list_files("rank-{}.pid"),
            self.logs / RENDEZVOUS,
            self.job.get_port_path(),
            *asks,
            *heartbeats,
            *unused,
        ):
            path.unlink(missing_ok=True)


def _make_command(job: Job, worker: str, ranks: range) -> list[str]:
    """Return the command line of torchrun, which only covers this machine; nodes.py connects machines.

    Its own rendezvous is a file. By TCP it would listen on all interfaces without access control.
    """
    logs = job.get_log_folder()
    options = {
        "--nnodes": "1",
        "--nproc-per-node": str(len(ranks)),
        "--rdzv-backend": "c10d",
        "--rdzv-conf": "store_type=file",
        "--rdzv-endpoint": str(logs / RENDEZVOUS),
        "--rdzv-id": job.tag,
        "--local-addr": LOOPBACK,
        "--max-restarts": "0",
    }
    rank = subprocess_guard.make_rank_command(
        worker, str(job.get_path()), job.folder, str(logs), ranks.start, job.points[0].world
    )
    flat = itertools.chain.from_iterable(options.items())
    return [sys.executable, "-m", "torch.distributed.run", *flat, "--no-python", *rank]


def _make_environment(job: Job, rendezvous: RendezvousOptions) -> dict[str, str]:
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun would open another store
    env = make_environment(job.device, loopback=rendezvous.nnodes == 1) | own
    env.setdefault(FLIGHT_RECORDER, str(RECORDED))
    return env
