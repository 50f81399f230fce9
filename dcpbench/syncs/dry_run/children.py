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

    def found(self) -> list[ChildProcess]:
        """Return all processes, updated from the notes that they have left so far."""
        notes = _notes()
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
    _forks(patches, children)
    _programs(patches, children)
    start = multiprocessing.process.BaseProcess.start

    @functools.wraps(start)
    def started(self: Any) -> None:
        target = getattr(self._target, "__name__", "") or type(self).__name__
        start(self)
        method = getattr(self._popen, "method", "") or type(self._popen).__module__
        noted = method != "fork" and _inherits(None) and not (sys.flags.ignore_environment or sys.flags.no_site)
        method = f"multiprocessing {method}"
        children.add(self.pid, f"{self.name} ({target})", method, may_use_gpu=True, noted=noted)

    patches.put(multiprocessing.process.BaseProcess, start=started)


def _forks(patches: Patches, children: Children) -> None:
    """Watch forks; a forked child has torch and the virtual GPU."""

    def watch(name: str, pid_of: Any) -> None:
        fork = getattr(os, name)

        @functools.wraps(fork)
        def forked() -> Any:
            result = fork()
            if pid_of(result):
                children.add(pid_of(result), shlex.join(sys.orig_argv), f"os.{name}", may_use_gpu=True)
            return result

        patches.put(os, **{name: forked})

    watch("fork", lambda pid: pid)
    watch("forkpty", lambda result: result[0])


def _programs(patches: Patches, children: Children) -> None:
    """Watch programs that are started."""
    begin, system = subprocess.Popen.__init__, os.system

    @functools.wraps(begin)
    def begun(self: Any, args: Any, *others: Any, **options: Any) -> None:
        begin(self, args, *others, **options)
        words = ["sh"] if options.get("shell") else _words(options.get("executable"), args)
        _add(children, self.pid, words, _text(args), "subprocess", options.get("env"))

    @functools.wraps(system)
    def ran(command: Any) -> int:
        code = system(command)
        children.add(None, _text(command), "os.system", may_use_gpu=False)
        return code

    patches.put(subprocess.Popen, __init__=begun)
    patches.put(os, system=ran)
    for name in ("posix_spawn", "posix_spawnp"):
        patches.put_where_there(os, **{name: _spawned(name, children)})


def _spawned(name: str, children: Children) -> Any:
    spawn = getattr(os, name, None)

    def spawned(path: Any, argv: Any, env: Any, **options: Any) -> int:
        assert spawn is not None
        pid: int = spawn(path, argv, env, **options)
        _add(children, pid, _words(path, argv), _text(argv), f"os.{name}", env)
        return pid

    return spawned


def _add(children: Children, pid: int, words: Sequence[str], command: str, method: str, env: Any) -> None:
    python = is_python(words[0], env)
    noted = python and _inherits(env) and not _is_blind(words[1:])
    children.add(pid, command, method, may_use_gpu=python or Path(words[0]).name in ELSEWHERE, noted=noted)


def _words(executable: Any, args: Any) -> list[str]:
    words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
    texts = [os.fsdecode(word) for word in words] or [""]
    return [os.fsdecode(executable), *texts[1:]] if executable else texts


def _text(args: Any) -> str:
    return os.fsdecode(args) if isinstance(args, str | bytes | os.PathLike) else shlex.join(_words(None, args))


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


def _inherits(env: Any) -> bool:
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


def _notes() -> dict[int, str]:
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
