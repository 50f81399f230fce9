"""Run programs as forks of one process that has imported torch, which takes two seconds in a new process. A program
has its own environment, folder, arguments, standard files, `sitecustomize` and exit code; only its imports may exist
already. A test of a process's very start needs a new process. A client requests a program at a socket with one JSON
message and three open files, and receives the exit code as a line; each line that it sends is the number of a signal
to pass on, and when it disconnects the program is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IMPORTED = (
    "torch.distributed.run",
    "torch._inductor.config",  # used by torch's profiler
    "triton.language",
    "dcpbench.worker",
    "dcpbench.bench.bench_worker",
    "dcpbench.syncs.dry_run.main",
    "transformers.models.deepseek_v2.modeling_deepseek_v2",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
)
ROOT = Path(__file__).parents[1]
ADDRESS = "DCPBENCH_TEST_FORKS"  # environment variable with the path of the socket
STANDARD = 3
MESSAGE_BYTES = 1 << 20


class Program(NamedTuple):
    """`python ARGUMENTS…`, the first of which is a script or -m."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    output: str = os.devnull  # file to which it prints


def start(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Replace `dcpbench.syncs.run.run_process` for a Python command."""
    assert command[0] == sys.executable
    return run(Program(command[1:], env))[0]


def run(*programs: Program) -> list[int]:
    """Run these programs concurrently to their ends; return their exit codes, as `Popen.returncode` has them."""
    lines = []
    for arguments, env, output in programs:
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        lines.append(ask(serving(), arguments, env, (nothing, printed, printed)))
        os.close(nothing)
        os.close(printed)
    return [answer(line) for line in lines]


def ask(address: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]) -> socket.socket:
    """Start a program with these as its standard files, and return its connection."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(address)
    message = json.dumps([list(arguments), dict(env), str(Path.cwd())]).encode()
    assert len(message) < MESSAGE_BYTES
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    socket.send_fds(line, [message], list(files))
    return line


def answer(line: socket.socket) -> int:
    """Wait for the end of the program, and return its exit code."""
    with line:
        return int(line.recv(16))


@functools.cache
def serving() -> str:
    """Return the address of the forking process, which ends with this one; its own children find it by their
    environment.
    """
    folder = tempfile.mkdtemp(prefix="forks")
    address = os.environ[ADDRESS] = f"{folder}/socket"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(address)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", str(listener.fileno()), str(os.getpid())],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    atexit.register(server.wait)
    atexit.register(server.kill)
    return address


def serve(listener: socket.socket, parent: int) -> None:
    """Fork for each program asked for, until the process that wants this has ended."""
    from tests import interpreter

    for name in IMPORTED:
        importlib.import_module(name)
    interpreter.prepare_once()
    gc.collect()
    gc.freeze()  # else a fork's collections touch, and so copy, all of this memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks are not waited for: they report their ends themselves
    wanted = os.pidfd_open(parent)
    while wanted not in select.select([listener, wanted], [], [])[0]:
        line, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.close(wanted)
            keep(line)
            return
        line.close()


def keep(line: socket.socket) -> None:
    """Fork the program that a line requests, and supervise it to its end."""
    message, files, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        line.close()
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        become(*json.loads(message))
        return
    ended = os.pidfd_open(pid)
    while ended not in (ready := select.select([ended, line], [], [])[0]):
        signal_number = line.recv(16) if ready else b""
        os.kill(pid, int(signal_number or signal.SIGKILL))
        if not signal_number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        line.send(str(code).encode())
    os._exit(0)


def become(arguments: list[str], env: dict[str, str], folder: str) -> None:
    """Be a program in this process, to its end."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]  # where a spawned child looks for its program
    is_module = arguments[0] == "-m"
    first = folder if is_module else str(Path(arguments[0]).absolute().parent)
    sys.path[:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules.pop("sitecustomize", None)
    if any(Path(entry, "sitecustomize.py").exists() for entry in sys.path[1:]):
        importlib.import_module("sitecustomize")
    if is_module:
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # runpy warns of what it runs a second time
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve(listening, int(sys.argv[2]))
