"""The Python stack of a running program, and whose line in it made a call. No torch here."""

from __future__ import annotations

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


class Frame(NamedTuple):
    """One Python frame: absolute file, line of the call within it, bare function name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}({self.line}): {self.function}"


def walk(skip: int = 1) -> tuple[tuple[Frame, ...], Frame | None]:
    """The calling thread's Python stack, outermost first, and the user's innermost frame in it.

    Frames of the detectors (dcpbench.syncs) are left out. The user's frame is the innermost one
    outside torch, Triton, the standard library and frozen modules; None where there is no such frame.

    Args:
        skip: Frames to leave out at the inner end; 1 is this function's own.
    """
    return walk_from(sys._getframe(skip))  # noqa: SLF001  (inspect.stack reads every source file)


def walk_from(frame: FrameType | None) -> tuple[tuple[Frame, ...], Frame | None]:
    """As `walk`, for the stack that ends in `frame`, which may be another thread's."""
    frames: list[Frame] = []
    user: Frame | None = None
    outside = outside_of()
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


def outside_of() -> tuple[str, ...]:
    """Folders of the frameworks that are imported now, each with a closing separator."""
    folders = []
    for name in _FRAMEWORKS:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            folders.append(str(Path(file).parent) + os.sep)
    return tuple(folders)


def is_detector(file: str) -> bool:
    """Whether a source file belongs to dcpbench.syncs."""
    return file.startswith(_HERE)


def is_user(file: str, outside: Sequence[str]) -> bool:
    """Whether a line of this file can be blamed: not torch, not Triton, not Python's own.

    Args:
        file: `co_filename` of a frame; `<string>` and notebook cells count, frozen modules do not.
        outside: Folders from `outside_of`.
    """
    if file.startswith(("<frozen", "<__array_function__")) or is_detector(file):
        return False
    if file.startswith(tuple(outside)):
        return False
    return _is_installed(file) or not file.startswith(_STDLIB)


def _is_installed(file: str) -> bool:
    return any(part in file for part in _SITE_PACKAGES)


def caller_of(user: Frame, frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside libraries around the user's frame, where that lies in one."""
    if user not in frames or not _is_installed(user.file):
        return None
    outside = outside_of()
    inner = len(frames) - frames[::-1].index(user) - 1
    return next((f for f in frames[:inner][::-1] if is_user(f.file, outside) and not _is_installed(f.file)), None)


def relative_path(file: str, root: Path | None = None) -> str:
    """The file below the root, or the working directory, where it lies in it, else as it is."""
    relative = os.path.relpath(file, root) if Path(file).is_absolute() else file
    return file if relative.startswith("..") else relative
