"""Find the Python line of a blocking call, from a trace's frames or an operator's call stack: owner of the code and
file.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, NamedTuple

from dcpbench.syncs.python_frames import Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.traces.columns import Columns
    from dcpbench.syncs.traces.intervals import Ints

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_FRAME = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.*)$")
_FRAMEWORK = re.compile(  # framework paths; not every folder called triton: engines keep kernels in such
    r"(?:^|-packages/|/pytorch/)(?:torch|triton)/|/torchinductor_[^/]+/"
)
_PROFILER = re.compile(r"(?:^|/)torch/(?:profiler/|autograd/profiler)")
_LIBRARIES = re.compile(r"^.*/(?:site|dist)-packages/")
_INTERPRETER = re.compile(r"^.*/lib/python3(?:\.\d+)?t?/")
_PACKAGES = (
    "accelerate apex deepspeed diffusers flash_attn flashinfer lightning megatron numpy peft pytorch_lightning "
    "sentence_transformers sglang tensorrt_llm timm torchaudio torchvision transformer_engine transformers trl vllm "
    "xformers"
)
PACKAGES = frozenset(_PACKAGES.split())  # packages that programs call and rarely are; installed ones are added
SOURCE_FOLDERS = ("", "src", "python", "lib")  # import folders of a repository; profilers cut paths by sys.path


@functools.lru_cache(maxsize=1 << 16)
def parse_frame(name: str) -> Frame:
    """Parse `model.py(12): forward` into its parts; built-in functions and `nn.Module: Linear_0` have no file.

    The line is the first one of the function, or the call's, depending on the trace.
    """
    text = _ADDRESS.sub("", name)
    found = _FRAME.match(text)
    if found is None or found["file"].startswith("<"):
        return Frame("", 0, text)
    return Frame(found["file"].replace("\\\\", "/"), int(found["line"]), found["function"])


@functools.cache
def _list_installed_packages() -> frozenset[str]:
    """Return the names of the packages that are installed with this program."""
    folders = [Path(folder) for folder in sys.path if folder.endswith("-packages")]
    return frozenset(p.name for folder in folders if folder.is_dir() for p in folder.iterdir() if p.is_dir())


def _find_package(file: str) -> str:
    """Return the name of the package of a library's file."""
    return _LIBRARIES.sub("", file).split("/", maxsplit=1)[0]


class Repository:
    """Locate files of traces below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._known: dict[str, str] = {}

    def find_path(self, file: str) -> str:
        """Return the path below the root if the file exists there; else without the parts that differ between machines.

        A trace from another checkout has other absolute paths: the longest end of the path that exists here counts.
        """
        if file not in self._known:
            self._known[file] = self._resolve_path(file)
        return self._known[file]

    def _resolve_path(self, file: str) -> str:
        if not file:
            return ""
        library = _LIBRARIES.sub("", file)
        if library != file:
            return library
        parts = PurePosixPath(file).parts
        absolute = parts[:1] == ("/",)
        for first in range(1 if absolute else 0, len(parts) if absolute else 1):
            for folder in SOURCE_FOLDERS:
                relative = PurePosixPath(folder, *parts[first:])
                if self._has_relative(str(relative)):
                    return str(relative)
        return file

    def has_file(self, file: str) -> bool:
        """Return True if the file is below the root."""
        return self._has_relative(self.find_path(file))

    def _has_relative(self, relative: str) -> bool:
        try:
            return ".." not in PurePosixPath(relative).parts and (self.root / relative).is_file()
        except (OSError, ValueError):
            return False

    def find_user_frame(self, frames: Sequence[Frame]) -> int | None:
        """Return the index of the user's innermost frame; frames are outermost first.

        It is the innermost frame outside torch, Triton and Python's own library; else the innermost one with a file
        outside torch; None if there is none.
        """
        candidates = [i for i, f in enumerate(frames) if f.file and not _FRAMEWORK.search(f.file)]
        own = [i for i in candidates if not self._is_python(frames[i].file)]
        return next(reversed(own or candidates), None)

    def find_caller(self, frames: Sequence[Frame], at: int) -> int | None:
        """Return the index of the caller to name if the frame at `at` is in a library; else None.

        It is the innermost frame outside libraries; if there is none, as where an engine calls a library of kernels, the innermost
        one of another package.
        """
        if not self._is_library(frames[at].file):
            return None
        before = [i for i in range(at - 1, -1, -1) if frames[i].file]
        own = next((i for i in before if not self._is_library(frames[i].file)), None)
        return self._find_other_package(frames, at, before) if own is None else own

    def _find_other_package(self, frames: Sequence[Frame], at: int, before: Sequence[int]) -> int | None:
        """Return the first of these frames that is of another package than the one at `at`, and not of torch or Python."""
        package = _find_package(frames[at].file)
        return next(
            (
                i
                for i in before
                if not _FRAMEWORK.search(frames[i].file)
                and not self._is_python(frames[i].file)
                and _find_package(frames[i].file) != package
            ),
            None,
        )

    def _is_library(self, file: str) -> bool:
        """Return True if a file belongs to an installed package.

        The profiler shortens paths by the folder on sys.path, so that a package's name may be all there is.
        """
        if self.has_file(file):
            return False
        if "-packages/" in file or _FRAMEWORK.search(file) or self._is_python(file):
            return True
        return (
            "/" in file
            and not file.startswith("/")
            and file.split("/", maxsplit=1)[0] in PACKAGES | _list_installed_packages()
        )

    def _is_python(self, file: str) -> bool:
        """Return True if a file is part of Python's own library, shortened or not."""
        if file.startswith("/"):
            return bool(_INTERPRETER.match(file)) and "-packages/" not in file
        return file.split("/", maxsplit=1)[0].removesuffix(".py") in sys.stdlib_module_names and not self.has_file(file)


Stacks = Literal["python_function", "call stack", "none"]


def _split_stack(stack: str) -> tuple[str, ...]:
    """Return the frames of a call stack, outermost first."""
    return tuple(reversed([name for name in stack.split(";") if name]))


class Line(NamedTuple):
    """Describe where a call was made."""

    user: Frame | None = None  # User's frame, with its file as it lies in the repository
    line_is: Literal["call", "function"] = "function"
    stack: tuple[str, ...] = ()  # frames, outermost first
    profiler: bool = False  # True if torch's profiler made the call
    calls_synchronize: bool = False  # True if frames show a call of a function named synchronize
    called_from: str = ""  # first frame outside libraries, or of another package, if the line is in a library


class Attribution:
    """Find lines, and cache chains of frames, because a site has the same one each time."""

    def __init__(self, columns: Columns, repository: Repository, stacks: Stacks) -> None:
        self.columns, self.repository, self.stacks = columns, repository, stacks
        self._known: dict[tuple[str, ...], Line] = {}

    def find_line(self, frames: Ints, ops: Ints, own: int = -1) -> Line:
        """Return the line of a call: by its own call stack, within these rows of the Python table, or of the ops table.

        Rows are outermost first.
        """
        columns = self.columns
        if own >= 0:
            return self._find_cached(_split_stack(columns.stacks[own]), "call")
        if len(frames):
            return self._find_cached(
                tuple(columns.names[columns.tables["python"].name[row]] for row in frames), "function"
            )
        for row in ops[::-1]:
            stack = columns.tables["ops"].stack[row]
            if stack >= 0:
                names = _split_stack(columns.stacks[stack])
                return self._find_cached(names, "call" if self.stacks == "call stack" else "function")
        return Line()

    def _find_cached(self, names: tuple[str, ...], line_is: Literal["call", "function"]) -> Line:
        if names not in self._known:
            self._known[names] = self._build_line(tuple(_ADDRESS.sub("", name) for name in names), line_is)
        return self._known[names]

    def _build_line(self, stack: tuple[str, ...], line_is: Literal["call", "function"]) -> Line:
        frames = [parse_frame(text) for text in stack]
        asks = any("synchronize" in f.function for f in frames[-4:])
        at = self.repository.find_user_frame(frames)
        profiler = any(_PROFILER.search(f.file) for f in frames[0 if at is None else at + 1 :])
        if at is None:
            return Line(None, line_is, stack, profiler, asks)
        caller = self.repository.find_caller(frames, at)
        called_from = "" if caller is None else str(self._resolve_frame(frames[caller]))
        return Line(self._resolve_frame(frames[at]), line_is, stack, profiler, asks, called_from)

    def _resolve_frame(self, frame: Frame) -> Frame:
        return frame._replace(file=self.repository.find_path(frame.file))
