"""Capture the evidence of a hanging job before it is ended: HANGS/TAG-N/, with the files listed in hangs/evidence.py.
No torch.

The files that ranks write to LOGS themselves are described in hangs/heartbeats.py and measuring/flight_recorder.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.hangs import evidence, finding
from dcpbench.hangs.evidence import GPUS_FILE, NCCL_FILE, SEEN_FILE, ProcessState
from dcpbench.launch import subprocess_guard
from dcpbench.launch.jobs import format_exit_code
from dcpbench.launch.ranks import LOG_LINES, read_text
from dcpbench.records.folder import HANGS_FOLDER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.hangs.finding import Finding
    from dcpbench.launch.ranks import Ranks

ASK_S, SPY_S, GPUS_S, NCCL_S = 2.0, 5.0, 3.0, 3.0  # time limits in s: for answers of ranks, py-spy, nvidia-smi, NCCL
NCCL_ADDRESS, NCCL_REQUEST, NCCL_BYTES = "localhost:28028", b"verbose status\n", 1 << 20
"""Default address at which NCCL (RAS, from 2.24 on) reports the state of its jobs on this machine, unless NCCL_RAS_ADDR
is set; the request; the maximum number of bytes read.
"""
GPUS = (
    "index",
    "name",
    "utilization.gpu",
    "memory.used",
    "clocks.sm",
    "power.draw",
    "ecc.errors.uncorrected.volatile.total",
)
UNINTERRUPTIBLE = "D"  # state letter of uninterruptible sleep
FINDING_FILE = "finding.json"
HEARTBEATS, ASK = "heartbeats-{}.bin", "flight-{}.ask"
DEVICE, STACKS, FLIGHT, SIGNALS = "device-{}.json", "own-stacks-{}.txt", "flight-{}.json", "signals-{}.json"
"""Files that a rank writes, in this order, when its pipe ASK is opened and closed. The stacks are a fallback if its
main thread is blocked in a driver, where no signal reaches it.
"""
ANSWERED = "answered-{}.json"  # file written after all others, so that missing ones are not waited for
# All of them are files of a rank in its job's folder of logs.


def capture_hang(ranks: Ranks) -> tuple[Path, dict[str, str]]:
    """Return (folder of the captured evidence, Python stacks by rank). Every source has a time limit; failed ones are
    left out.
    """
    folder = _make_folder(ranks)
    pids = ranks.find_pids()
    before, began = {rank: _read_cpu_ticks(pid) for rank, pid in pids.items()}, time.monotonic()
    asleep = {rank for rank, pid in pids.items() if _read_state(pid) == UNINTERRUPTIBLE}
    gpus = _start_tool(["nvidia-smi", f"--query-gpu={','.join(GPUS)}", "--format=csv"], folder / GPUS_FILE)
    nccl = threading.Thread(target=fetch_nccl_report, args=(folder / NCCL_FILE,), daemon=True)
    if gpus is not None:  # without a GPU there is no NCCL that could answer
        nccl.start()
    requested_ranks = [rank for rank in pids if _send_request(ranks.logs / ASK.format(rank))]
    stacks = ranks.collect_stacks()
    spent = max(time.monotonic() - began, 1e-3)
    seen = [
        _describe_rank(ranks, rank, pids.get(rank), before.get(rank), spent, uninterruptible=rank in asleep)
        for rank in ranks.ranks
    ]
    spies = [
        _start_tool(["py-spy", "dump", "--native", "--pid", str(p)], folder / f"py-spy-{r}.txt")
        for r, p in pids.items()
    ]
    (folder / SEEN_FILE).write_bytes(msgspec.json.encode(seen))
    for rank in ranks.ranks:
        _copy_log_and_heartbeats(ranks, rank, folder)
    until = time.monotonic() + ASK_S
    for rank in requested_ranks:
        answered = ranks.logs / ANSWERED.format(rank)
        while not answered.exists() and time.monotonic() < until:
            time.sleep(0.05)
        answered.unlink(missing_ok=True)
        own = ranks.logs / STACKS.format(rank)
        stacks[str(rank)] = stacks.get(str(rank)) or read_text(own)
        own.unlink(missing_ok=True)
        for name in (DEVICE, FLIGHT, SIGNALS):
            source = ranks.logs / name.format(rank)
            with contextlib.suppress(OSError):
                shutil.move(source, folder / source.name)
    _save_stacks(folder, stacks)
    _wait_for_tools(spies, SPY_S)
    _wait_for_tools([gpus], GPUS_S)
    if gpus is not None:
        nccl.join(NCCL_S)
    return folder, stacks


def fetch_nccl_report(to: Path) -> None:
    """Write NCCL's report on its jobs on this machine to a file; no file if NCCL is too old, disabled or silent."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", NCCL_ADDRESS).rpartition(":")
    until, report = time.monotonic() + NCCL_S, b""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), NCCL_S) as line,
    ):
        line.sendall(NCCL_REQUEST)
        while len(report) < NCCL_BYTES and (left := until - time.monotonic()) > 0:
            line.settimeout(left)
            if not (more := line.recv(1 << 16)):
                break
            report += more
    if report:
        to.write_bytes(report)


def explain_hang(folder: Path, stacks: Mapping[str, str]) -> Finding | None:
    """Return the finding from the evidence in a folder, and store it there; None if nothing could be read.

    `stacks` also holds those of ranks on other machines.
    """
    _save_stacks(folder, stacks)
    try:
        found = finding.find_cause(evidence.read_evidence([folder]))
    except RecordsError:
        return None
    (folder / FINDING_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return found


def _save_stacks(folder: Path, stacks: Mapping[str, str]) -> None:
    for rank, text in stacks.items():
        if text:
            (folder / f"stacks-{rank}.txt").write_text(text)


def find_difference(ranks: Ranks) -> tuple[Path, Finding] | None:
    """Return the folder with evidence and the finding if ranks of an ended job began different collectives.

    The heartbeat files are evaluated; None if they show no difference.
    """
    left = [path for rank in ranks.ranks if (path := ranks.logs / HEARTBEATS.format(rank)).exists()]
    try:
        found = finding.find_mismatch(evidence.read_evidence(left)) if left else None
    except RecordsError:
        return None
    if found is None:
        return None
    folder = _make_folder(ranks)
    for rank in ranks.ranks:
        _copy_log_and_heartbeats(ranks, rank, folder)
    return folder, explain_hang(folder, {}) or found


def _make_folder(ranks: Ranks) -> Path:
    name = ranks.logs.name
    folder = next(f for n in itertools.count() if not (f := ranks.folder / HANGS_FOLDER / f"{name}-{n}").exists())
    folder.mkdir(parents=True)
    return folder


def _copy_log_and_heartbeats(ranks: Ranks, rank: int, folder: Path) -> None:
    if lines := read_text(ranks.logs / f"rank-{rank}.log").splitlines():
        (folder / f"log-{rank}.txt").write_text("\n".join(lines[-LOG_LINES:]) + "\n")
    with contextlib.suppress(OSError):
        shutil.copyfile(ranks.logs / HEARTBEATS.format(rank), folder / HEARTBEATS.format(rank))


def _read_cpu_ticks(pid: int) -> int | None:
    """Return the CPU time of a process's main thread in clock ticks."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/task/{pid}/stat", "rb") as file:  # noqa: PTH123 -- no path of a user
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12])
    return None


def _read_state(pid: int) -> str:
    """Return the state of a process in the letters of proc(5); empty if it is gone."""
    return (subprocess_guard.read_start_ticks(pid) or ("", 0))[0]


def _describe_rank(
    ranks: Ranks, rank: int, pid: int | None, before: int | None, seconds: float, *, uninterruptible: bool = False
) -> ProcessState:
    ended = next((format_exit_code(e.code) for e in ranks.read_exits() if e.rank == rank), "")
    if pid is None:
        return ProcessState(rank=rank, ended=ended or "its process was gone")
    after, state = _read_cpu_ticks(pid), _read_state(pid)
    cpu = None
    if before is not None and after is not None:
        cpu = round((after - before) / os.sysconf("SC_CLK_TCK") / seconds, 3)
    uninterruptible = uninterruptible and state == UNINTERRUPTIBLE
    wchan = read_text(Path(f"/proc/{pid}/wchan")).strip("0\n") if uninterruptible else ""
    return ProcessState(
        rank=rank, pid=pid, state=state, cpu=cpu, ended=ended, uninterruptible=uninterruptible, wchan=wchan
    )


def _send_request(pipe: Path) -> bool:
    """Open a rank's pipe and close it; return False if the pipe has no reader."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _start_tool(command: list[str], to: Path) -> subprocess.Popen[bytes] | None:
    """Start a tool that may be there, with its output in a file."""
    path = shutil.which(command[0])
    if path is None:
        return None
    with to.open("wb") as out, contextlib.suppress(OSError):
        return subprocess.Popen(
            subprocess_guard.make_tied_command([path, *command[1:]]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return None


def _wait_for_tools(started: list[subprocess.Popen[bytes] | None], seconds: float) -> None:
    """Wait for the processes, and kill those that have not ended in time."""
    until = time.monotonic() + seconds
    for process in filter(None, started):
        try:
            process.wait(max(until - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
