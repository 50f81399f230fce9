"""Run Python programs as forks of one process that has imported torch, because the import takes two seconds.

A program has its own environment, folder, arguments, standard files, `sitecustomize` and exit code, but modules may
already be imported. Tests of the start of a process need a new process.

A client connects to the socket of the server process, and sends one JSON message with three open files. It receives
the exit code as a message. Each further message from the client is the number of a signal for the program. The
program is killed when the client disconnects.
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
ADDRESS_VARIABLE = "DCPBENCH_TEST_FORKS"  # environment variable with the path of the socket
MESSAGE_BYTES = 1 << 20


class Program(NamedTuple):
    """Hold the command line `python ARGUMENTS…`; the first argument is a script or -m."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    output: str = os.devnull  # file for stdout and stderr


def run_command(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a Python command in place of `dcpbench.syncs.run.run_process`; return its exit code."""
    assert command[0] == sys.executable
    return run_programs(Program(command[1:], env))[0]


def run_programs(*programs: Program) -> list[int]:
    """Run programs concurrently until all have ended; return their exit codes in the form of `Popen.returncode`."""
    lines = []
    for arguments, env, output in programs:
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        lines.append(request_program(start_server(), arguments, env, (nothing, printed, printed)))
        os.close(nothing)
        os.close(printed)
    return [wait_for_exit_code(line) for line in lines]


def request_program(
    address: str, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[int]
) -> socket.socket:
    """Start a program with these standard files, and return the connection to its supervisor."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(address)
    message = json.dumps([list(arguments), dict(env), str(Path.cwd())]).encode()
    assert len(message) < MESSAGE_BYTES
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    socket.send_fds(line, [message], list(files))
    return line


def wait_for_exit_code(line: socket.socket) -> int:
    """Wait until the program has ended, and return its exit code."""
    with line:
        return int(line.recv(16))


@functools.cache
def start_server() -> str:
    """Start the server process on the first call, and return its address. The server ends with this process.

    Child processes find the address in their environment.
    """
    folder = tempfile.mkdtemp(prefix="forks")
    address = os.environ[ADDRESS_VARIABLE] = f"{folder}/socket"
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


def serve_requests(listener: socket.socket, parent: int) -> None:
    """Fork a supervisor for each requested program, until the parent process has ended."""
    from tests import interpreter

    for name in IMPORTED:
        importlib.import_module(name)
    interpreter.prepare_once()
    gc.collect()
    gc.freeze()  # otherwise garbage collections in a fork would copy all of this memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the server does not wait for forks, because they report their ends
    parent_end = os.pidfd_open(parent)
    while parent_end not in select.select([listener, parent_end], [], [])[0]:
        line, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            os.close(parent_end)
            supervise_program(line)
            return
        line.close()


def supervise_program(line: socket.socket) -> None:
    """Fork the requested program, pass signals on to it, and send its exit code."""
    message, files, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        line.close()
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        execute_program(*json.loads(message))
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


def execute_program(arguments: list[str], env: dict[str, str], folder: str) -> None:
    """Execute a program in this process with this environment and folder."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]  # folder in which a spawned child looks for its program
    is_module = arguments[0] == "-m"
    first = folder if is_module else str(Path(arguments[0]).absolute().parent)
    sys.path[:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules.pop("sitecustomize", None)
    if any(Path(entry, "sitecustomize.py").exists() for entry in sys.path[1:]):
        importlib.import_module("sitecustomize")
    if is_module:
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # runpy warns if the module is already imported
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        serve_requests(listening, int(sys.argv[2]))
