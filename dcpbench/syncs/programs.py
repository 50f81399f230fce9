"""Decide which programs cannot use PyTorch on a GPU: a list of names, and shell commands that consist of them only.

All other programs may: a wrapper such as `env` or `timeout`, a script, or a program of the user's own can start Python
in an environment in which it leaves no notes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.syncs.dry_run_program import PYTHON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_COMPILERS = "ar as c++ cc clang clang++ cuobjdump g++ gcc hipcc ld ldconfig ldd ninja nm nvcc nvdisasm objcopy objdump ptxas strip"
_MACHINE = (
    "arch arp df free getconf hostname hostnamectl ibdev2netdev ibstat ibv_devinfo ifconfig ip locale lsb_release lscpu "
    "lsmod lsof lspci netstat nproc nvidia-smi rocm-smi rocminfo sw_vers sysctl uname uptime"
)
_FILES = (
    "basename cat chmod cp curl cut date dirname du echo false file git grep gunzip gzip head id ln ls md5sum mkdir mv "
    "printf pwd readlink realpath rm rmdir sha256sum sort stat tail tee touch tr true uniq wc wget which whoami zcat"
)
_PROCESSES = "clear kill pgrep ps sleep stty tput tty"
HARMLESS = frozenset(f"{_COMPILERS} {_MACHINE} {_FILES} {_PROCESSES}".split())  # use no PyTorch and run no argument
SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
SHELL_BUILTINS = frozenset({":", "[", "cd", "exit", "test"})
_SUBSTITUTION = re.compile(r"`|[$<>]\(|\$\{[\s|]|<<")  # runs a command, or holds text that is no command, within a word
_OPERATORS = "();<>|&"
_REDIRECTIONS = frozenset({"<", ">", ">>", ">|", "<>", "<&", ">&", "&>", "&>>"})
_SHEBANG_BYTES = 256


def may_use_gpu(argv: Sequence[str]) -> bool:
    """Return False if a command, program first, cannot use PyTorch on a GPU."""
    name = Path(argv[0]).name
    if name in SHELLS and len(argv) == 3 and argv[1] == "-c":  # noqa: PLR2004  (shell, -c, command)
        return not _is_harmless_text(argv[2])
    return name not in HARMLESS


def _is_harmless_text(command: str) -> bool:
    """Return True if a shell's command certainly runs harmless programs only."""
    if _SUBSTITUTION.search(command):
        return False
    with contextlib.suppress(ValueError):  # a quotation or an escape that goes on in the next line
        parts = [part for line in command.splitlines() for part in _split_line(line)]
        return all(part[0] in SHELL_BUILTINS or not may_use_gpu(part) for part in parts)
    return False


def _split_line(line: str) -> list[list[str]]:
    """Return the words of each simple command in a line for a shell; raise ValueError if it does not end in the line.

    A quoted operator splits, too, which can only add commands. Redirections stay among the words.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
    lexer.commenters = ""
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if word not in _REDIRECTIONS and not word.strip(_OPERATORS):
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


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
