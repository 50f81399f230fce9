"""Check the system around the GPUs: limits, shared memory, disk, ports, clock, cores. No torch."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.doctor.health_report import BAD, NOTE, OK, Report
from dcpbench.points.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30
SHARED = Path("/dev/shm")  # noqa: S108 -- only looked at
SHARED_BYTES = GIB  # size of /dev/shm that NCCL's documentation requires for containers (--shm-size=1g)
DISK_BYTES, MIN_FREE_DISK_BYTES = GIB, 10 * GIB  # free bytes: below them a long sweep may fail; a note is given
OPEN_FILES, FEW_FILES = 4096, 1024  # connections to a server and between ranks, each a file
PORTS = 1000  # minimum number of ephemeral ports, on which ranks meet
SHARE_BUSY = 0.25  # share of the cores in use by others, above which host times are disturbed
TIME_ERROR, STA_UNSYNC = 5, 0x40  # constants of adjtimex(2)
MAX_CLOCK_OFFSET_US = 100_000  # maximum µs between nodes' clocks at which their logs and rank exits can be ordered
LOOPBACK = "127.0.0.1"


class Timex(ctypes.Structure):
    """Mirror the head of Linux' struct timex; the rest is not read."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


class Host:
    """Query the system; tests replace this class."""

    def read_text(self, path: str) -> str:
        """Return the contents of a file of /proc or /sys."""
        return Path(path).read_text().strip()

    def get_limit(self, which: int) -> int:
        """Return the soft limit inherited by processes started from here; RLIM_INFINITY: none."""
        return resource.getrlimit(which)[0]

    def get_free_bytes(self, folder: Path) -> int:
        """Return the free bytes of the disk under a folder."""
        return shutil.disk_usage(folder).free

    def count_cores(self) -> int:
        """Return the number of cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def get_load(self) -> float:
        """Return the mean number of running or waiting processes in the last minute."""
        return os.getloadavg()[0]

    def read_clock(self) -> tuple[bool, int]:
        """Return (True if the clock is synchronised, its largest error in µs), by adjtimex(2)."""
        found = Timex()
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.byref(found))
        if state < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return state != TIME_ERROR and not found.status & STA_UNSYNC, int(found.maxerror)

    def bind(self, host: str, port: int) -> None:
        """Check that this address is free by listening at it for a moment."""
        with socket.create_server((host, port)):
            pass

    def check_lock(self, folder: Path) -> None:
        """Take a lock on a file there."""
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_host(
    report: Report, host: Host, folder: Path, *, nnodes: int = 1, endpoint: tuple[str, int] | None = None
) -> None:
    """Run all checks; `endpoint` is the address at which nodes meet."""
    check_essentials(report, host, folder)
    _check_limits(report, host, nnodes)
    _check_locks(report, host, folder)
    _check_ports(report, host, endpoint)
    _check_clock(report, host, nnodes)
    _check_cores(report, host)


def check_essentials(report: Report, host: Host, folder: Path) -> None:
    """Check the conditions that end a run early."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    temporary = Path(tempfile.gettempdir())
    for check, where, min_bytes, usual, remedy in (
        ("shared memory", SHARED, SHARED_BYTES, SHARED_BYTES, "start the container with --shm-size=8g"),
        ("disk", place, DISK_BYTES, MIN_FREE_DISK_BYTES, "make room, or give a folder on another disk with -o"),
        ("disk", temporary, DISK_BYTES, DISK_BYTES, "make room, or set TMPDIR"),
    ):
        _check_free_space(report, host, check, where, min_bytes, usual, remedy)


def _check_free_space(
    report: Report, host: Host, check: str, folder: Path, min_bytes: int, usual: int, remedy: str
) -> None:
    free = report.read(check, lambda: host.get_free_bytes(folder), where=str(folder))
    if free is None:
        return
    what = f"{free / GIB:.1f} GiB are free"
    level = BAD if free < min_bytes else NOTE if free < usual else OK
    wanted = min_bytes if level == BAD else usual
    text = f"{what}." if level == OK else f"{what}, of the {wanted / GIB:.0f} GiB that a long run should have."
    report.add(check, level, text, "" if level == OK else f"{remedy}.", str(folder))


def _check_limits(report: Report, host: Host, nnodes: int) -> None:
    files = report.read("open files", lambda: host.get_limit(resource.RLIMIT_NOFILE))
    if files is not None:
        many = files == resource.RLIM_INFINITY or files >= OPEN_FILES
        wrong = (
            "" if many else f"a process may have {files:,} open: fewer than a measured server's many connections take."
        )
        level = BAD if files < FEW_FILES else NOTE
        report.add_verdict("open files", wrong, f"ulimit -n {16 * OPEN_FILES}", "enough.", level=level)
    size = report.read("file size", lambda: host.get_limit(resource.RLIMIT_FSIZE))
    if size is not None:
        large = size == resource.RLIM_INFINITY or size >= MIN_FREE_DISK_BYTES
        wrong = "" if large else f"a file may have {format_size(size)}: a larger record file or trace ends the run."
        level = BAD if size < DISK_BYTES else NOTE
        report.add_verdict("file size", wrong, "ulimit -f unlimited", "enough.", level=level)
    if nnodes == 1:
        return
    locked = report.read("locked memory", lambda: host.get_limit(resource.RLIMIT_MEMLOCK))
    if locked is not None:
        wrong = (
            ""
            if locked == resource.RLIM_INFINITY
            else f"limited to {format_size(locked)}: RDMA between machines fails on it."
        )
        report.add_verdict(
            "locked memory", wrong, "ulimit -l unlimited; for a container --ulimit memlock=-1.", "unlimited."
        )


def _check_locks(report: Report, host: Host, folder: Path) -> None:
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        report.add("locks", BAD, "it is a file, and a run needs a folder.", "give a folder with -o.", str(place))
        return
    try:
        host.check_lock(place)
    except OSError as e:
        what = f"a file there cannot be locked ({e.strerror}), and a run needs that."
        report.add("locks", BAD, what, "give a folder on a local disk, where you may write, with -o.", str(place))
    else:
        report.add("locks", OK, "files can be locked.", where=str(place))


def _check_ports(report: Report, host: Host, endpoint: tuple[str, int] | None) -> None:
    try:
        host.bind(LOOPBACK, 0)
    except OSError as e:
        what = f"nothing can listen on {LOOPBACK} ({e.strerror}), where ranks meet."
        report.add("ports", BAD, what, "ip link set lo up")
    else:
        report.add("ports", OK, f"ranks can meet on {LOOPBACK}.")
    span = report.read("ports", lambda: host.read_text("/proc/sys/net/ipv4/ip_local_port_range").split())
    if span is not None:
        low, high = int(span[0]), int(span[-1])
        wrong = f"the system gives away {high - low + 1:,} ports." if high - low + 1 < PORTS else ""
        remedy = "sudo sysctl net.ipv4.ip_local_port_range='32768 60999'"
        report.add_verdict("ports", wrong, remedy, f"{high - low + 1:,} free to assign.")
    if endpoint is not None:
        _check_endpoint(report, host, *endpoint)


def _check_endpoint(report: Report, host: Host, name: str, port: int) -> None:
    where = f"{name}:{port}"
    try:
        host.bind(name, port)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            report.add(
                "ports", BAD, "something listens there already.", "give another port with --nodes endpoint.", where
            )
        else:
            what = f"node 0 cannot listen there ({e.strerror or e}); right where this is another node."
            report.add("ports", NOTE, what, "give an address of node 0 with --nodes endpoint.", where)
    else:
        report.add("ports", OK, "node 0 can listen there.", where=where)


def _check_clock(report: Report, host: Host, nnodes: int) -> None:
    found = report.read("clock", host.read_clock)
    if found is None:
        return
    kept, error_us = found
    level = BAD if nnodes > 1 else NOTE
    wrong = ""
    if not kept:
        wrong = "no service synchronises it, so that times of several machines cannot be compared."
    elif error_us > MAX_CLOCK_OFFSET_US:
        wrong = f"kept, but it may be {error_us / 1e3:,.0f} ms wrong."
    remedy = "start chronyd or systemd-timesyncd, on every machine."
    report.add_verdict("clock", wrong, remedy, f"synchronised, wrong by {error_us / 1e3:,.3g} ms at most.", level=level)


def _check_cores(report: Report, host: Host) -> None:
    cores = report.read("cores", host.count_cores)
    load = report.read("cores", host.get_load)
    if cores is not None and load is not None:
        wrong = f"the load average is {load:.1f} on {cores} cores." if load > SHARE_BUSY * cores else ""
        remedy = "end other programs (`top` lists them). Steps wait for a busy host."
        report.add_verdict("cores", wrong, remedy, f"{cores}, at rest.", level=NOTE)
    _check_setting(
        report, host, "NUMA balancing", "/proc/sys/kernel/numa_balancing", "0",
        "the kernel moves memory between sockets (numa_balancing), and steps wait meanwhile.",
        "sudo sysctl kernel.numa_balancing=0",
    )  # fmt: skip
    _check_setting(
        report, host, "governor", "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance",
        "the cores save power: host times are longer, and differ.", "sudo cpupower frequency-set -g performance",
    )  # fmt: skip


def _check_setting(report: Report, host: Host, check: str, path: str, right: str, wrong: str, remedy: str) -> None:
    """Check a kernel setting by its file. It is unknown if the file is missing, as in many virtual machines."""
    found = report.read(check, lambda: host.read_text(path))
    if found is not None:
        report.add_verdict(check, "" if found == right else wrong, remedy, f"{Path(path).name} is {right}.", level=NOTE)


def check_environment(report: Report, env: Mapping[str, str]) -> None:
    """Check environment variables that slow ranks down or change the measurement."""
    found = False
    for name, values, level, what in HARMFUL_VARIABLES:
        value = env.get(name)
        if value is not None and (value.upper() in values or not values):
            found = True
            report.add("environment", level, f"{name}={value[:60]}: {what}.", f"unset {name}", name)
    if not found:
        report.add("environment", OK, "no variable that is known to hurt.")


SET = ("1", "TRUE", "ON", "YES")
HARMFUL_VARIABLES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (  # name, values (empty: any), level, effect
    ("CUDA_LAUNCH_BLOCKING", SET, BAD, "each launch waits for its kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), BAD, "each collective is checked by another before it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", SET, BAD, "each tensor is allocated by the driver"),
    ("NCCL_P2P_DISABLE", SET, BAD, "GPUs do not reach each other's memory"),
    ("NCCL_SHM_DISABLE", SET, NOTE, "ranks of one machine talk over the network"),
    ("NCCL_DEBUG", ("INFO", "TRACE"), NOTE, "NCCL writes many lines"),
    ("NCCL_ALGO", (), NOTE, "NCCL does not choose by itself, and results do not show its own choice"),
    ("NCCL_PROTO", (), NOTE, "NCCL does not choose by itself, and results do not show its own choice"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", ("1",), NOTE, "streams wait for each other"),
)
