"""Track processes that the program starts, and which of them may use a GPU.

A forked child has torch. A Python interpreter leaves notes (recorder/child.py), unless it runs without the environment or
the start-up files of the program. Of other programs, only those that are listed as harmless use no GPU. process_tree.py
compares this with the notes and reports that the processes have left.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from dcpbench.syncs.programs import is_python, may_use_gpu
from dcpbench.syncs.recorder.child import BEGAN, ENTERED, FORKED
from dcpbench.syncs.sync_report import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.dry_run import DryRun
    from dcpbench.syncs.dry_run.virtual_cuda import Patches


class Children:
    """Hold the processes that were started, in order."""

    def __init__(self) -> None:
        self.started: list[ChildProcess] = []
        self.expected: dict[int, str] = {}  # Python process -> event that it notes unless it is prevented
        self.workers: list[int] = []  # workers of a multiprocessing.Pool

    def add(self, pid: int | None, command: str, start_method: str, *, may_use_gpu: bool, expected: str = "") -> None:
        """Add a process; for a process that is already listed, the newer facts replace the older."""
        child = ChildProcess(pid=pid, command=command, start_method=start_method, may_use_gpu=may_use_gpu)
        known = next((n for n, c in enumerate(self.started) if pid is not None and c.pid == pid), len(self.started))
        self.started[known : known + 1] = [child]
        if pid is not None:
            self.expected[pid] = expected


def install_children(patches: Patches, run: DryRun) -> None:
    """Watch the functions that start processes until `patches.restore()`."""
    _apply_fork_patches(patches, run)
    _apply_program_patches(patches, run)
    start = multiprocessing.process.BaseProcess.start

    @functools.wraps(start)
    def start_and_add(self: Any) -> None:
        target = getattr(self._target, "__name__", "") or type(self).__name__
        works_for_pool = getattr(self._target, "__module__", "") == "multiprocessing.pool"
        start(self)
        if works_for_pool:
            run.children.workers.append(self.pid)
        method = getattr(self._popen, "method", "") or type(self._popen).__module__
        expected = {"fork": ENTERED, "forkserver": FORKED}.get(method, BEGAN)
        name = f"{self.name} ({target})"
        run.children.add(self.pid, name, f"multiprocessing {method}", may_use_gpu=True, expected=expected)

    patches.set_attributes(multiprocessing.process.BaseProcess, start=start_and_add)


def _apply_fork_patches(patches: Patches, run: DryRun) -> None:
    """Watch forks; a forked child has torch and the virtual GPU."""

    def apply_patch(name: str, get_pid: Any) -> None:
        fork = getattr(os, name)

        @functools.wraps(fork)
        def fork_and_add() -> Any:
            result = fork()
            if get_pid(result):
                command = shlex.join(sys.orig_argv)
                run.children.add(get_pid(result), command, f"os.{name}", may_use_gpu=True, expected=ENTERED)
            return result

        patches.set_attributes(os, **{name: fork_and_add})

    apply_patch("fork", lambda pid: pid)
    apply_patch("forkpty", lambda result: result[0])


def _apply_program_patches(patches: Patches, run: DryRun) -> None:
    """Watch programs that are started."""
    begin, system = subprocess.Popen.__init__, os.system

    @functools.wraps(begin)
    def init_and_add(self: Any, args: Any, *others: Any, **options: Any) -> None:
        begin(self, args, *others, **options)
        argv = _list_arguments(None if options.get("shell") else options.get("executable"), args)
        if options.get("shell"):
            argv = [os.fsdecode(options.get("executable") or "sh"), "-c", *argv]
        _add_program(run, self.pid, argv, _format_command(args), "subprocess", options.get("env"))

    @functools.wraps(system)
    def run_and_add(command: Any) -> int:
        code = system(command)
        run.children.add(
            None, os.fsdecode(command), "os.system", may_use_gpu=may_use_gpu(["sh", "-c", os.fsdecode(command)])
        )
        return code

    patches.set_attributes(subprocess.Popen, __init__=init_and_add)
    patches.set_attributes(os, system=run_and_add)
    for name in ("posix_spawn", "posix_spawnp"):
        patches.set_existing(os, **{name: _make_spawn(name, run)})


def _make_spawn(name: str, run: DryRun) -> Any:
    spawn = getattr(os, name, None)

    def spawn_and_add(path: Any, argv: Any, env: Any, **options: Any) -> int:
        assert spawn is not None
        pid: int = spawn(path, argv, env, **options)
        _add_program(run, pid, _list_arguments(path, argv), _format_command(argv), f"os.{name}", env)
        return pid

    return spawn_and_add


def _add_program(run: DryRun, pid: int, argv: Sequence[str], command: str, method: str, env: Any) -> None:
    expected = BEGAN if is_python(argv[0], env) else ""
    run.children.add(pid, command, method, may_use_gpu=may_use_gpu(argv), expected=expected)


def _list_arguments(executable: Any, args: Any) -> list[str]:
    argv = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
    texts = [os.fsdecode(word) for word in argv] or [""]
    return [os.fsdecode(executable), *texts[1:]] if executable else texts


def _format_command(args: Any) -> str:
    return os.fsdecode(args) if isinstance(args, str | bytes | os.PathLike) else shlex.join(_list_arguments(None, args))
