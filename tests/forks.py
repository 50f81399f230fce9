"""Programs that begin at once: forks of one process that has imported torch, which takes a process two seconds.

A program has its environment, folder, arguments, `sitecustomize` and exit code as a process of its own has; only what it
imports may be there already. What is told of a process's very start needs one of its own.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IMPORTED = (
    "torch",
    "torch._inductor.config",  # torch's profiler asks it something
    "triton.language",
    "dcpbench.bench.worker",
    "dcpbench.syncs.dry_run.main",
)


class Program(NamedTuple):
    """`python ARGUMENTS…`, the first of which is a script or -m."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    output: str = os.devnull
    """File to which it prints."""


def start(command: Sequence[str], env: Mapping[str, str]) -> int:
    """In place of `dcpbench.syncs.run.start`, for a command of Python's."""
    assert command[0] == sys.executable
    return run(Program(command[1:], env))[0]


def run(*programs: Program) -> list[int]:
    """Run these beside each other to their ends; their exit codes, as `Popen.returncode` has them."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    asked = [(list(p.arguments), dict(p.env), p.output, str(Path.cwd())) for p in programs]
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    codes: list[int] = json.loads(server.stdout.readline())
    return codes


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that is forked, which ends with this one."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Fork for each program asked for on stdin, and answer with their exit codes."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a fork's collections touch, and so copy, all of this memory
    for line in sys.stdin:
        pids = []
        for arguments, env, output, folder in json.loads(line):
            pid = os.fork()
            if pid == 0:
                become(arguments, env, output, folder)
                return
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


def become(arguments: list[str], env: dict[str, str], output: str, folder: str) -> None:
    """Be a program in this process, to its end."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]  # where a spawned child looks for its program
    nothing = os.open(os.devnull, os.O_RDONLY)
    printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, standard in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(descriptor, standard)
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
    serve()
