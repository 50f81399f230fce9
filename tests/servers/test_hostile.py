"""Test hostile servers (hostile.py): no traceback, limited memory and time, and a record for each point."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from dcpbench.records.runs import read_run
from tests.servers.hostile import SERVERS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
POINTS, LIMIT_S, TIMEOUT_S = 2, 4.0, 2.0
LOAD = f"--concurrency 1,2 --num-requests 4 --timeout load={LIMIT_S:g} --input-tokens 20 --output-tokens 24 --client warm-up=0"
MAX_MEMORY_MB, GRACE_S = 500, 10.0
HANDFUL = (
    "completion_tokens_1e7_for_24",
    "token_id_beyond_int32",
    "continues_3500_times",
    "metrics_of_64_megabytes",
)
MIN_SERVERS = 40
LONG_EVERY = 5  # every fifth of the other servers is a long test; `make soak` runs the rest


class Ended(NamedTuple):
    """Describe how a command ended."""

    code: int
    output: str
    peak_mb: float
    seconds: float  # without the time that it waited for a core


def read_starved_s(pid: int) -> float:
    """Return how long a process was ready to run and had no core; 0 if the system does not report it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def read_peak_mb(pid: int) -> float:
    """Return the largest resident set of a process and of its children so far; 0 for those that have ended.

    `ru_maxrss` cannot be used: it begins with the resident set of the process that forked, which is that of all tests.
    """
    total_kb = 0
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (str(pid), *children):
            status = Path(f"/proc/{one}/status").read_text()
            total_kb += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total_kb / 1024


def run(url: str, options: str, folder: Path, limit_s: float) -> Ended:
    """Run `dcpbench server` against a server, and kill it after `limit_s`, of which time without a core is no part."""
    words = f"-m dcpbench server --url {url} --device cpu --timeout {TIMEOUT_S:g} {LOAD} {options}"
    began = time.monotonic()
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *words.split(), "-o", str(folder / "run")],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
    seconds = starved_s = peak_mb = 0.0
    while (ended := os.waitpid(process.pid, os.WNOHANG))[0] == 0:
        peak_mb = max(peak_mb, read_peak_mb(process.pid))
        starved_s = max(starved_s, read_starved_s(process.pid))
        seconds = time.monotonic() - began - starved_s
        if seconds > limit_s:
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)
    process.returncode = os.waitstatus_to_exitcode(ended[1])
    text = (folder / "output").read_text("utf-8", "replace")
    return Ended(process.returncode, text, peak_mb, seconds)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address of a process with all hostile servers."""
    words = [sys.executable, "-m", "tests.servers.hostile"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.kill()


@pytest.fixture(scope="module")
def usual_s(address: str, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return how long the command takes with a right server on this machine: its start, two loads and the report."""
    ended = run(f"{address}/right", "", tmp_path_factory.mktemp("right"), 300)
    assert ended.code == 0, ended.output
    return ended.seconds


def test_number_of_hostile_servers() -> None:
    assert len(SERVERS) > MIN_SERVERS


def mark_server(number: int, name: str) -> object:
    """Return a server's name, with the mark by which it is one of the long tests or one of the soak."""
    if name in HANDFUL:
        return name
    return pytest.param(name, marks=pytest.mark.soak if number % LONG_EVERY else pytest.mark.long)


@pytest.mark.parametrize("name", [mark_server(number, name) for number, name in enumerate(SERVERS)])
def test_hostile_server_causes_only_failed_requests(name: str, address: str, usual_s: float, tmp_path: Path) -> None:
    """The command prints no traceback, uses at most 500 MB, and exits 10 s after the limits of its loads.

    Time that it needs with a correct server is added to the limit.
    """
    server = SERVERS[name]
    limit_s = usual_s + POINTS * LIMIT_S + server.waits_s + GRACE_S
    ended = run(f"{address}/{name}", server.options, tmp_path, limit_s)
    sys.stdout.write(f"{name}: {ended.peak_mb:.0f} MB, {ended.seconds:.1f} s of at most {limit_s:.1f} s\n")
    assert "Traceback" not in ended.output
    assert "\x1b[2J" not in ended.output
    assert ended.code >= 0, f"killed after {limit_s:.1f} s"
    assert 0 < ended.peak_mb <= MAX_MEMORY_MB
    if server.refused:
        assert ended.code in (2, 4)
        assert server.refused in " ".join(ended.output.split())
        return
    records = read_run(tmp_path / "run").records
    assert len(records) == POINTS, "each point of the sweep has a record"
    failures = [failure.kind for record in records if record.server for failure in record.server.failures]
    if server.kind:
        assert set(failures) == {server.kind}
        assert not server.all_fail or all(record.outcome == "failed" and record.reason for record in records)
    else:
        assert failures == []
        assert all(record.outcome == "ok" and record.serve and record.serve.finished == 4 for record in records)
