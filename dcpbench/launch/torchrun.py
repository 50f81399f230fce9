"""One torchrun job on this machine: its command line, processes, progress, logs, stacks and its end. No torch.

    FOLDER/job-TAG.json, progress-TAG.jsonl, error-R.json, stacks-R.txt         see jobs.py
    FOLDER/rank-R.pid, FOLDER/logs/TAG/rank-R.log, FOLDER/logs/TAG/rank-R.exit    see child.py
    FOLDER/logs/TAG/agent.log                                                     what torchrun itself printed

The job file names the folder; nothing else of a run is written outside it. Every process is tied to the one above it
(child.py): this one, torchrun's agent, one process for each rank that keeps account of it, the rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from dcpbench.launch import child
from dcpbench.launch.jobs import SECRET, Exit, Failure, Job, Progress, decode_progress
from dcpbench.records.lines import Tail

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOG_LINES = 20
STACKS_WAIT_S = 2.0
END_WAIT_S = 5.0
KEEP_WAIT_S = 25.0
"""How long ranks may take to write what they have when a run of requests is interrupted; torchrun ends them at 30."""
REAP_WAIT_S = 2.0
"""How long torchrun may take to see that its ranks are gone."""
LOOPBACK = "127.0.0.1"
STOPPED = "T"
"""State of a process that got SIGSTOP, in proc(5)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a sweep, as typed; the defaults mean this one alone."""

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""
    rdzv_id: str = "dcpbench"


class Running:
    """A started job. Context manager: leaving it ends every process of the job, whatever happened."""

    def __init__(self, job: Job, machines: Machines, worker: str, lock: int | None = None) -> None:
        """Start it; `lock` is the descriptor of the folder's lock, which is held until the last rank is gone."""
        self.job = job
        self.logs = job.logs()
        self.agent_log = self.logs / "agent.log"
        self.started = time.time()
        here = job.points[0].tp // machines.nnodes
        self._ranks = range(machines.node_rank * here, (machines.node_rank + 1) * here)
        self._progress = Tail(job.progress_path())
        self._forget()
        self.logs.mkdir(parents=True, exist_ok=True)
        job.path().write_bytes(msgspec.json.encode(job))
        with self.agent_log.open("ab") as log:
            self._agent = subprocess.Popen(
                child.tied(_command(job, machines, worker, self._ranks)),
                stdin=subprocess.DEVNULL if lock is None else lock,
                stdout=log,
                stderr=log,
                env=_environment(job, machines),
                start_new_session=True,
            )
        if lock is not None:
            os.write(lock, f"{self._agent.pid}\n".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> int | None:
        """Exit code of torchrun once it has ended."""
        return self._agent.poll()

    def wait(self, seconds: float) -> int | None:
        """Exit code of torchrun, or None if it is still running after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._agent.wait(seconds)
        return None

    def events(self) -> Iterator[Progress]:
        """Progress lines written since the last call; a line still being written waits for the next."""
        return self._progress.decoded(decode_progress)

    def failures(self) -> list[Failure]:
        """Exceptions that ranks of this machine have left behind, by rank."""
        found = []
        for path in self._files("error-{}.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(msgspec.json.decode(path.read_bytes(), type=Failure))
        return found

    def exits(self) -> list[Exit]:
        """How the ranks of this machine ended that have, in that order."""
        found = []
        for rank in self._ranks:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(msgspec.json.decode((self.logs / f"rank-{rank}.exit").read_bytes(), type=Exit))
        return sorted(found, key=lambda e: e.at)

    def stopped(self) -> bool:
        """Whether torchrun's agent was stopped (SIGSTOP), so that it would never hear how its ranks end."""
        return (child.start_ticks(self._agent.pid) or ("", 0))[0] == STOPPED

    def go_on(self) -> None:
        """Let a stopped agent go on."""
        self._agent.send_signal(signal.SIGCONT)

    def log_tail(self, first: Sequence[int] = ()) -> str:
        """The last lines of the first of these ranks, else of one that failed, else of rank 0, else of torchrun."""
        ranks = [*first, *(f.rank for f in self.failures()), *self._ranks]
        for path in [*(self.logs / f"rank-{r}.log" for r in ranks), self.agent_log]:
            lines = _read(path).strip().splitlines()
            if lines:
                return "\n".join([f"{path.name}:", *lines[-LOG_LINES:]])
        return ""

    def stacks(self) -> dict[str, str]:
        """Python stacks of every rank of this machine, by rank; they write them on SIGUSR1."""
        for pid in self.pids():
            _signal(pid, signal.SIGUSR1)
        time.sleep(STACKS_WAIT_S)
        return {p.stem.partition("-")[2]: _read(p) for p in self._files("stacks-{}.txt")}

    def kill(self, wait_s: float = END_WAIT_S) -> None:
        """End all processes of the job. torchrun ends its ranks on SIGTERM; a rank that ignores it is killed.

        Another Ctrl-C cuts the wait short.
        """
        if self._agent.poll() is None:
            self._agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._agent.wait(wait_s)
        for pid in self.pids():
            _signal(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self._agent.wait(REAP_WAIT_S)
        if self._agent.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._agent.pid, signal.SIGKILL)
            self._agent.wait()
        for path in (*self._files("rank-{}.pid"), self.logs / "rendezvous", self.job.port_path()):
            path.unlink(missing_ok=True)

    def pids(self) -> list[int]:
        """Ranks of this machine that are alive; not what has got the id of one since."""
        words = [_read(p).split() for p in self._files("rank-{}.pid")]
        told = [(int(w[0]), w[1]) for w in words if len(w) == 2 and w[0].isdecimal()]  # noqa: PLR2004 -- id and ticks
        return [pid for pid, ticks in told if str((child.start_ticks(pid) or ("", None))[1]) == ticks]

    def _forget(self) -> None:
        """Remove what an earlier job left: its process ids may belong to others by now."""
        for name in ("rank-{}.pid", "error-{}.json", "stacks-{}.txt"):
            for path in self._files(name):
                path.unlink(missing_ok=True)

    def _files(self, name: str) -> list[Path]:
        paths = [Path(self.job.folder) / name.format(rank) for rank in self._ranks]
        return [p for p in paths if p.exists()]


def _command(job: Job, machines: Machines, worker: str, ranks: range) -> list[str]:
    """Command line of torchrun, which knows of this machine alone; what connects machines is nodes.py's.

    Its own rendezvous is a file. By TCP it would listen on all interfaces and let anyone read and write.
    """
    logs = job.logs()
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(len(ranks)),
        "--rdzv-backend",
        "c10d",
        "--rdzv-conf",
        "store_type=file",
        "--rdzv-endpoint",
        str(logs / "rendezvous"),
        "--rdzv-id",
        f"{machines.rdzv_id}-{job.tag}",
        "--local-addr",
        LOOPBACK,
        "--max-restarts",
        "0",
        "--no-python",
        *child.of_torchrun(worker, str(job.path()), job.folder, str(logs), ranks.start, job.points[0].tp),
    ]


def _environment(job: Job, machines: Machines) -> dict[str, str]:
    env = dict(os.environ) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun would open another store
    env.pop(SECRET, None)  # of no use to ranks
    if job.device == "cpu":
        env.setdefault("OMP_NUM_THREADS", "1")
        env["TRITON_INTERPRET"] = "1"
    return env | (on_loopback() if machines.nnodes == 1 else {})


def on_loopback() -> dict[str, str]:
    """Variables by which gloo and NCCL listen on the loopback interface alone, where nobody says otherwise."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if Path("/sys/class/net/lo").exists() else ()
    return {name: "lo" for name in names if name not in os.environ}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
