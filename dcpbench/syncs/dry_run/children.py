"""Track processes that the program starts. A dry run does not follow them, so it has to know which may use a GPU.

A forked child has torch. A Python interpreter leaves a note once it imports torch (recorder/child.py), unless it runs
without the environment or the start-up files of the program. Programs that launch others elsewhere may start anything.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing.process
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.syncs.dry_run_program import CHILDREN, LAUNCHERS, PYTHON
from dcpbench.syncs.model import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.syncs.dry_run.virtual_cuda import Patches

ELSEWHERE = LAUNCHERS | {"mpiexec", "ssh", "sudo", "docker", "podman", "sbatch", "kubectl"}
"""Programs that start others with another environment, or on another machine."""
_BLIND_FLAGS = frozenset("IES")  # flags with which Python ignores its environment or its start-up files
_SHEBANG_BYTES = 256


class Children:
    """Hold the processes that were started, in order."""

    def __init__(self) -> None:
        self._started: list[ChildProcess] = []
        self._noted: set[int] = set()
        """Indices of those that leave a note once they import torch."""

    def add(self, pid: int | None, command: str, start_method: str, *, may_use_gpu: bool, noted: bool = False) -> None:
        """Add a process; for a process that is already listed, the newer facts replace the older."""
        child = ChildProcess(pid=pid, command=command, start_method=start_method, may_use_gpu=may_use_gpu)
        known = next((n for n, c in enumerate(self._started) if pid is not None and c.pid == pid), len(self._started))
        self._started[known : known + 1] = [child]
        self._noted.discard(known)
        if noted:
            self._noted.add(known)

    def list_processes(self) -> list[ChildProcess]:
        """Return all processes, updated from the notes that they have left so far."""
        notes = _read_notes()
        found = list(self._started)
        for n in self._noted:
            pid = found[n].pid
            if pid is not None and pid not in notes and _has_ended(pid):
                found[n] = msgspec.structs.replace(found[n], may_use_gpu=False)
        known = {child.pid for child in found}
        for pid, command in notes.items():
            if pid not in known and pid != os.getpid():
                found.append(ChildProcess(pid=pid, command=command, start_method="a child's child", may_use_gpu=True))
        return found


def install_children(patches: Patches, children: Children) -> None:
    """Watch the functions that start processes until `patches.restore()`."""
    _apply_fork_patches(patches, children)
    _apply_program_patches(patches, children)
    start = multiprocessing.process.BaseProcess.start

    @functools.wraps(start)
    def start_and_add(self: Any) -> None:
        target = getattr(self._target, "__name__", "") or type(self).__name__
        start(self)
        method = getattr(self._popen, "method", "") or type(self._popen).__module__
        noted = method != "fork" and _can_leave_note(None) and not (sys.flags.ignore_environment or sys.flags.no_site)
        method = f"multiprocessing {method}"
        children.add(self.pid, f"{self.name} ({target})", method, may_use_gpu=True, noted=noted)

    patches.set_attributes(multiprocessing.process.BaseProcess, start=start_and_add)


def _apply_fork_patches(patches: Patches, children: Children) -> None:
    """Watch forks; a forked child has torch and the virtual GPU."""

    def apply_patch(name: str, get_pid: Any) -> None:
        fork = getattr(os, name)

        @functools.wraps(fork)
        def fork_and_add() -> Any:
            result = fork()
            if get_pid(result):
                children.add(get_pid(result), shlex.join(sys.orig_argv), f"os.{name}", may_use_gpu=True)
            return result

        patches.set_attributes(os, **{name: fork_and_add})

    apply_patch("fork", lambda pid: pid)
    apply_patch("forkpty", lambda result: result[0])


def _apply_program_patches(patches: Patches, children: Children) -> None:
    """Watch programs that are started."""
    begin, system = subprocess.Popen.__init__, os.system

    @functools.wraps(begin)
    def init_and_add(self: Any, args: Any, *others: Any, **options: Any) -> None:
        begin(self, args, *others, **options)
        words = ["sh"] if options.get("shell") else _list_arguments(options.get("executable"), args)
        _add_program(children, self.pid, words, _format_command(args), "subprocess", options.get("env"))

    @functools.wraps(system)
    def run_and_add(command: Any) -> int:
        code = system(command)
        children.add(None, _format_command(command), "os.system", may_use_gpu=False)
        return code

    patches.set_attributes(subprocess.Popen, __init__=init_and_add)
    patches.set_attributes(os, system=run_and_add)
    for name in ("posix_spawn", "posix_spawnp"):
        patches.set_existing(os, **{name: _make_spawn(name, children)})


def _make_spawn(name: str, children: Children) -> Any:
    spawn = getattr(os, name, None)

    def spawn_and_add(path: Any, argv: Any, env: Any, **options: Any) -> int:
        assert spawn is not None
        pid: int = spawn(path, argv, env, **options)
        _add_program(children, pid, _list_arguments(path, argv), _format_command(argv), f"os.{name}", env)
        return pid

    return spawn_and_add


def _add_program(children: Children, pid: int, words: Sequence[str], command: str, method: str, env: Any) -> None:
    python = is_python(words[0], env)
    noted = python and _can_leave_note(env) and not _is_blind(words[1:])
    children.add(pid, command, method, may_use_gpu=python or Path(words[0]).name in ELSEWHERE, noted=noted)


def _list_arguments(executable: Any, args: Any) -> list[str]:
    words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
    texts = [os.fsdecode(word) for word in words] or [""]
    return [os.fsdecode(executable), *texts[1:]] if executable else texts


def _format_command(args: Any) -> str:
    return os.fsdecode(args) if isinstance(args, str | bytes | os.PathLike) else shlex.join(_list_arguments(None, args))


def is_python(program: str, env: Mapping[str, str] | None = None) -> bool:
    """Return True if a program is a Python interpreter, or a script that names one in its first line."""
    path = shutil.which(program, path=(os.environ if env is None else env).get("PATH"))
    if PYTHON.fullmatch(Path(program).name) or (path and os.path.realpath(path) == os.path.realpath(sys.executable)):
        return True
    with contextlib.suppress(OSError):
        if path and Path(path).is_file():
            with Path(path).open("rb") as file:
                first = file.read(_SHEBANG_BYTES).partition(b"\n")[0]
            return first.startswith(b"#!") and b"python" in first
    return False


def _can_leave_note(env: Any) -> bool:
    """Return True if a child in this environment, by default that of this process, leaves a note."""
    given = os.environ if env is None else {os.fsdecode(k): os.fsdecode(v) for k, v in env.items()}
    return CHILDREN in given and given.get("PYTHONPATH", "") == os.environ.get("PYTHONPATH", "")


def _is_blind(arguments: Sequence[str]) -> bool:
    """Return True if Python's own flags, which precede its script, make it ignore the environment or start-up files."""
    for word in arguments:
        if not word.startswith("-") or word in {"-", "-c", "-m"}:
            return False
        if not word.startswith("--") and _BLIND_FLAGS & set(word[1:]):
            return True
    return False


def _read_notes() -> dict[int, str]:
    """Return process -> command of those that have imported torch."""
    folder = json.loads(os.environ.get(CHILDREN, "null"))
    notes = {}
    for path in Path(folder).glob("*.child") if folder else ():
        with contextlib.suppress(OSError, ValueError, KeyError):
            note = json.loads(path.read_text(encoding="utf-8"))
            notes[int(note["pid"])] = shlex.join(note["command"])
    return notes


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # the program has waited for it already
        return True
