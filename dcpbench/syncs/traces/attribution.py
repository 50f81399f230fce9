"""The Python line of a blocking call, from a trace's frames or from an operator's call stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dcpbench.syncs.traces.python_lines import Frame, Repository, is_profiler, parse_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcpbench.syncs.traces.columns import Columns

    Ints = NDArray[Any]

Stacks = Literal["python_function", "call stack", "none"]


class Line(NamedTuple):
    """Where a call was made."""

    file: str
    function: str
    line: int | None
    line_is: Literal["call", "function", ""]
    stack: tuple[str, ...]
    """Frames, outermost first."""
    profiler: bool
    """Torch's profiler made the call."""
    asks: bool
    """Frames show that something named synchronize is called."""
    called_from: str = ""
    """First frame outside libraries, where the line itself lies in one."""


NOWHERE = Line("", "", None, "", (), profiler=False, asks=False)


class Attribution:
    """Finds lines; remembers chains of frames, as a site has the same one each time."""

    def __init__(self, columns: Columns, repository: Repository, stacks: Stacks) -> None:
        self.columns, self.repository, self.stacks = columns, repository, stacks
        self._known: dict[tuple[str, ...], Line] = {}

    def line(self, frames: Ints, ops: Ints) -> Line:
        """Line of a call within these rows of the Python table, or of the ops table; outermost first."""
        columns = self.columns
        if len(frames):
            return self._of(tuple(columns.names[columns.tables["python"].name[row]] for row in frames), "function")
        for row in ops[::-1]:
            stack = columns.tables["ops"].stack[row]
            if stack >= 0:
                names = [name for name in columns.stacks[stack].split(";") if name]
                return self._of(tuple(reversed(names)), "call" if self.stacks == "call stack" else "function")
        return NOWHERE

    def _of(self, names: tuple[str, ...], line_is: Literal["call", "function"]) -> Line:
        if names not in self._known:
            self._known[names] = self._find([parse_frame(name) for name in names], line_is)
        return self._known[names]

    def _find(self, frames: list[Frame], line_is: Literal["call", "function"]) -> Line:
        stack = tuple(f.text for f in frames)
        asks = any("synchronize" in f.function for f in frames[-4:])
        at = self.repository.user_frame(frames)
        if at is None:
            return Line("", "", None, "", stack, any(is_profiler(f) for f in frames), asks)
        user = frames[at]
        profiler = any(is_profiler(f) for f in frames[at + 1 :])
        caller = self.repository.caller(frames, at)
        called_from = "" if caller is None else self._told(frames[caller])
        return Line(
            self.repository.path(user.file), user.function, user.line, line_is, stack, profiler, asks, called_from
        )

    def _told(self, frame: Frame) -> str:
        return f"{self.repository.path(frame.file)}({frame.line}): {frame.function}"
