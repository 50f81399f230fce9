"""Inspect the Python stack of a running program: which line made a call, and what that line is calling. No torch here.

An operator's own name is less specific than the call: `one_hot` ends in `_local_scalar_dense` as `item` does. It is
also the only source on what other threads do.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_HERE = str(Path(__file__).parent) + os.sep
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_SITE_PACKAGES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")} | {f"{os.sep}site-packages{os.sep}"}
)
_FRAMEWORKS = ("torch", "triton")
SUBSCRIPT, UNKNOWN = "[]", "?"


class Frame(NamedTuple):
    """Hold one Python frame: absolute file, line of the call within it, bare function name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}({self.line}): {self.function}"


def walk_stack() -> tuple[tuple[Frame, ...], Frame | None]:
    """Return the calling thread's Python stack without frames of the detectors, outermost first, and the user's
    innermost frame.

    The user's frame is outside torch, Triton, the standard library and frozen modules; None if there is none.
    """
    return walk_stack_from(sys._getframe())  # noqa: SLF001  (inspect.stack reads every source file)


def walk_stack_from(frame: FrameType | None) -> tuple[tuple[Frame, ...], Frame | None]:
    """Return the same as `walk_stack` for the stack that ends in `frame`, which may be another thread's."""
    frames: list[Frame] = []
    user: Frame | None = None
    outside = list_framework_folders()
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_detector(file):
            here = Frame(file, frame.f_lineno, frame.f_code.co_name)
            frames.append(here)
            if user is None and is_user(file, outside):
                user = here
        frame = frame.f_back
    frames.reverse()
    return tuple(frames), user


def list_framework_folders() -> tuple[str, ...]:
    """Return the folders of the frameworks that are imported now, each with a closing separator."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _FRAMEWORKS)
    return tuple(str(Path(file).parent) + os.sep for file in files if file)


def is_detector(file: str) -> bool:
    """Return True if a source file belongs to dcpbench.syncs."""
    return file.startswith(_HERE)


def is_user(file: str, outside: Sequence[str]) -> bool:
    """Return True if a line of this file belongs to the user: not torch, not Triton, not Python's own.

    `outside` has the folders of the frameworks. `<string>` and notebook cells count, frozen modules do not.
    """
    if is_detector(file) or file.startswith(("<frozen", "<__array_function__", *outside)):
        return False
    return _is_installed(file) or not file.startswith(_STDLIB)


def _is_installed(file: str) -> bool:
    return any(part in file for part in _SITE_PACKAGES)


def find_caller(user: Frame, frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame outside libraries around the user's frame if that is in a library; else None."""
    if user not in frames or not _is_installed(user.file):
        return None
    outside = list_framework_folders()
    inner = len(frames) - frames[::-1].index(user) - 1
    return next((f for f in frames[:inner][::-1] if is_user(f.file, outside) and not _is_installed(f.file)), None)


def get_relative_path(file: str, root: Path | None = None) -> str:
    """Return the file relative to the root, or the working directory, if it is inside; else unchanged."""
    relative = os.path.relpath(file, root) if Path(file).is_absolute() else file
    return file if relative.startswith("..") else relative


def find_call_name(frame: FrameType) -> str:
    """Return the bare name of the function that `frame` is calling, `[]` for an index, empty for all else.

    `x.max().item()` waiting in item gives `item`; `if t:` gives an empty string, and source that cannot be read gives
    `?`.
    """
    source = _read_source(frame)
    if source is None:
        return UNKNOWN
    try:
        node = ast.parse(b"(" + source + b")", mode="eval").body
    except (SyntaxError, ValueError):
        # A whole statement: a call would be an expression.
        return ""
    if isinstance(node, ast.Subscript):
        return SUBSCRIPT
    called = node.func if isinstance(node, ast.Call) else None
    return str(getattr(called, "attr", getattr(called, "id", "")))


def _read_source(frame: FrameType) -> bytes | None:
    """Return the text that is being executed; for an assignment to an index, its target."""
    if frame.f_lasti < 0:
        return None
    instructions = frame.f_code.co_positions()
    line, end_line, start, end = next(itertools.islice(instructions, frame.f_lasti // 2, None), (None,) * 4)
    if line is None or end_line is None or start is None or end is None:
        return None
    numbers = range(line, end_line + 1)
    lines = [linecache.getline(frame.f_code.co_filename, n, frame.f_globals).encode() for n in numbers]
    if not all(lines):
        return None
    # Columns count bytes, and the last line is cut first, as it may be the first one, too.
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines)
