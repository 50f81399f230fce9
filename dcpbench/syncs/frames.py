"""One synchronisation as the live detector and the dry run see it, the line that caused it, and sites made of many.

No torch here: the pytest plugin imports this in every test run.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dcpbench.syncs.model import Example, Site
from dcpbench.syncs.rules import BY_ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sync:
    """One time that the host waits, or would wait, for the GPU."""

    rule: str
    """Id in rules.py, such as SYNC001."""
    op: str = ""
    """Innermost operator, `aten::_local_scalar_dense`, or the call that waits, `torch.cuda.synchronize`."""
    op_chain: tuple[str, ...] = ()
    """Operators around the wait, outermost first; the last is `op` where that is an operator."""
    frames: tuple[Frame, ...] = ()
    """The whole Python stack without the detector's own frames, outermost first."""
    user: Frame | None = None
    """Innermost frame outside torch, Triton, the standard library and the detectors."""
    thread: str = ""
    explicit: bool = False
    """Asked for by name: synchronize() of a device, stream or event."""
    direction: str = ""
    """Of the copy, as in Site."""
    call: str = ""
    """Runtime call that blocks, as in Site."""
    bytes: int | None = None
    may_block: bool = False
    """It need not wait: see `Site.may_block`."""
    allowed: str = ""
    """Reason of the innermost region of `allow` around it; empty outside of one."""
    range: str = ""
    """Innermost `record_function` range that is not a step."""
    step: int | None = None
    """Index of the step, from 0."""
    ranges: tuple[str, ...] = ()
    """All `record_function` ranges around it, outermost first, steps included."""
    at: float | None = None
    """Seconds on the host's clock (perf_counter), where a detector knows."""
    api: str = ""
    """What the program called, such as `torch.Tensor.__bool__`, where a detector knows."""
    capturing: bool = False
    """Happened while a CUDA graph was captured, where a real GPU raises an error."""

    @property
    def file(self) -> str:
        """File of the user's frame, absolute; empty where there is none."""
        return self.user.file if self.user else ""

    @property
    def line(self) -> int | None:
        """Line of the call in the user's frame."""
        return self.user.line if self.user else None

    @property
    def function(self) -> str:
        """Bare name of the user's function; `<module>` at the top of a script."""
        return self.user.function if self.user else ""

    def message(self) -> str:
        """One sentence with the line, what happens there and the usual fix."""
        rule = BY_ID[self.rule]
        where = f"{relative_path(self.file)}:{self.line} in {self.function}" if self.user else "no Python frame"
        api = f" in {self.api}" if self.api and self.api != self.op else ""
        copy = f", {self.direction}" if self.direction else ""
        capture = " This happens while a CUDA graph is captured, where CUDA raises an error." if self.capturing else ""
        return f"{where}: {rule.title} ({self.op or self.call}{api}{copy}) [{self.rule}].{capture} {rule.fix}"


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


def called_from(sync: Sync, root: Path | None = None) -> str:
    """First frame outside libraries, `file(line): function`, where the user's frame lies in one; else empty."""
    if sync.user is None or sync.user not in sync.frames or not _is_installed(sync.user.file):
        return ""
    outside = outside_of()
    inner = len(sync.frames) - sync.frames[::-1].index(sync.user) - 1
    own = (f for f in sync.frames[:inner][::-1] if is_user(f.file, outside) and not _is_installed(f.file))
    caller = next(own, None)
    return str(caller._replace(file=relative_path(caller.file, root))) if caller else ""


def sites_of(syncs: Iterable[Sync], *, steps: int = 0, trace: str = "", root: Path | None = None) -> list[Site]:
    """Groups synchronisations by fingerprint and line, in order of first occurrence.

    Args:
        syncs: What a detector saw.
        steps: How many steps ran; `Sync.step` counts them from 0. The first of three or more is warm-up.
        trace: Name for `Site.traces`, such as the program's.
        root: Repository to which files are made relative; by default the working directory.
    """
    groups: dict[tuple[str, int | None, bool, str], list[Sync]] = {}
    for sync in syncs:
        groups.setdefault((fingerprint_of(sync, root), sync.line, sync.may_block, sync.allowed), []).append(sync)
    return [_site(key[0], group, steps, trace, root) for key, group in groups.items()]


def fingerprint_of(sync: Sync, root: Path | None = None) -> str:
    """The fingerprint under which a baseline knows this synchronisation."""
    # numpy stays out of every test run that only imports the plugin.
    from dcpbench.syncs.sites import fingerprint

    return fingerprint(sync.rule, relative_path(sync.file, root), sync.function, sync.op_chain, sync.direction)


def relative_path(file: str, root: Path | None = None) -> str:
    """The file below the root, or the working directory, where it lies in it, else as it is."""
    relative = os.path.relpath(file, root) if Path(file).is_absolute() else file
    return file if relative.startswith("..") else relative


def _site(print_: str, group: Sequence[Sync], steps: int, trace: str, root: Path | None) -> Site:
    first = group[0]
    sizes = [s.bytes for s in group if s.bytes is not None]
    from dcpbench.syncs.steps import per_step

    mean, warmup_only = per_step([s.step for s in group], steps)
    return Site(
        fingerprint=print_,
        rule=first.rule,
        kind=BY_ID[first.rule].kind,
        op=first.op,
        op_chain=list(first.op_chain),
        function=first.function,
        file=relative_path(first.file, root),
        line=first.line,
        line_is="call" if first.user else "",
        stack=[str(frame) for frame in first.frames],
        called_from=called_from(first, root),
        range=first.range,
        direction=first.direction,
        call=first.call,
        threads=sorted({s.thread for s in group if s.thread}),
        count=len(group),
        count_per_step=mean,
        warmup_only=warmup_only,
        bytes=sum(sizes) if sizes else None,
        may_block=first.may_block,
        allowed=first.allowed,
        explicit=first.explicit,
        example=Example(trace=trace, step=first.step),
        traces=[trace] if trace else [],
    )
