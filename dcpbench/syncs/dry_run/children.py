"""Track processes that the program starts. A dry run does not follow them, so it has to know which may use a GPU.

A forked child has torch. A Python interpreter leaves notes (recorder/child.py), unless it runs without the environment or
the start-up files of the program. It uses no GPU if its notes show that it began, and that it has ended without torch and
without another program that may use one. Of other programs, only those that are listed as harmless use no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing.process
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.syncs.dry_run.programs import is_python, may_use_gpu
from dcpbench.syncs.dry_run_program import CHILDREN
from dcpbench.syncs.recorder.child import BEGAN, FORKED, STARTED, SUFFIX, TORCH
from dcpbench.syncs.sync_report import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.dry_run.virtual_cuda import Patches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes:
    """Hold the notes of a Python process."""

    events: frozenset[str]
    command: str
    """Command line of the process."""
    started: tuple[str, ...]
    """Command lines of the programs that the process started, or became, and that may use a GPU."""


class Children:
    """Hold the processes that were started, in order."""

    def __init__(self) -> None:
        self._started: list[ChildProcess] = []
        self._expected: dict[int, str] = {}
        """Index of a Python process -> event that it notes unless something prevents it from leaving notes."""

    def add(self, pid: int | None, command: str, start_method: str, *, may_use_gpu: bool, expected: str = "") -> None:
        """Add a process; for a process that is already listed, the newer facts replace the older."""
        child = ChildProcess(pid=pid, command=command, start_method=start_method, may_use_gpu=may_use_gpu)
        known = next((n for n, c in enumerate(self._started) if pid is not None and c.pid == pid), len(self._started))
        self._started[known : known + 1] = [child]
        self._expected[known] = expected

    def list_processes(self) -> list[ChildProcess]:
        """Return all processes, updated from the notes that they have left so far."""
        notes = _read_notes()
        found = list(self._started)
        for n, expected in self._expected.items():
            pid = found[n].pid
            if pid in notes and expected in notes[pid].events and TORCH not in notes[pid].events and _has_ended(pid):
                found[n] = msgspec.structs.replace(found[n], may_use_gpu=False)
        unseen = {child.pid for child in found if child.may_use_gpu}
        for pid, left in notes.items():
            if pid in unseen:
                continue
            if TORCH in left.events:
                found.append(ChildProcess(pid=pid, command=left.command, start_method="a child's child"))
            found += [ChildProcess(command=command, start_method="a child's child") for command in left.started]
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
        expected = {"fork": "", "forkserver": FORKED}.get(method, BEGAN)
        name = f"{self.name} ({target})"
        children.add(self.pid, name, f"multiprocessing {method}", may_use_gpu=True, expected=expected)

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
        words = _list_arguments(None if options.get("shell") else options.get("executable"), args)
        if options.get("shell"):
            words = [os.fsdecode(options.get("executable") or "sh"), "-c", *words]
        _add_program(children, self.pid, words, _format_command(args), "subprocess", options.get("env"))

    @functools.wraps(system)
    def run_and_add(command: Any) -> int:
        code = system(command)
        children.add(
            None, os.fsdecode(command), "os.system", may_use_gpu=may_use_gpu(["sh", "-c", os.fsdecode(command)])
        )
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
    expected = BEGAN if is_python(words[0], env) else ""
    children.add(pid, command, method, may_use_gpu=may_use_gpu(words), expected=expected)


def _list_arguments(executable: Any, args: Any) -> list[str]:
    words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
    texts = [os.fsdecode(word) for word in words] or [""]
    return [os.fsdecode(executable), *texts[1:]] if executable else texts


def _format_command(args: Any) -> str:
    return os.fsdecode(args) if isinstance(args, str | bytes | os.PathLike) else shlex.join(_list_arguments(None, args))


def _read_notes() -> dict[int, Notes]:
    """Return process -> notes of the Python processes below this one."""
    folder = json.loads(os.environ.get(CHILDREN, "null"))
    found = {}
    for path in Path(folder).glob(f"*{SUFFIX}") if folder else ():
        pid = int(path.name.removesuffix(SUFFIX))
        if pid != os.getpid():
            with contextlib.suppress(OSError):
                found[pid] = _parse_notes(path.read_text(encoding="utf-8"))
    return found


def _parse_notes(text: str) -> Notes:
    """Return the notes of a file; a line that is still being written is left out."""
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    own = [line["command"] for line in lines if line["event"] != STARTED]
    started = [line["command"] for line in lines if line["event"] == STARTED and may_use_gpu(line["command"])]
    return Notes(
        events=frozenset(line["event"] for line in lines),
        command=shlex.join(own[-1]) if own else "",
        started=tuple(map(shlex.join, started)),
    )


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # the program has waited for it already, or it is the child of a server of forks
        return not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
