"""Define the errors that a user can see, with their exit codes. Each message names what to type next.

    DcpbenchError            1  something failed that is not the user's input
    ├── UsageError           2  options or input that cannot work
    │   ├── UnusedOptionsError 2  options that have no effect next to the others
    │   ├── LayoutError      2  degrees that do not divide, or a layout the model cannot take
    │   ├── ModelError       2  a config.json or checkpoint that cannot be used
    │   ├── OutputError      2  an output folder that cannot or must not be written
    │   ├── RecordsError     2  a record file that cannot be read
    │   └── TraceError       2  a profiler's trace that cannot be read
    ├── CapacityError        3  more GPUs or memory needed than there are
    │   └── InsufficientMemoryError  3  more memory needed than there is
    ├── DiskError            3  a disk that is full, read-only or broken
    ├── WorkerError          4  a rank failed, hung or was killed
    ├── SyncError            1  code synchronised with the GPU that must not
    └── MissingPackageError  5  an optional package that this option needs

`ExitCode` declares the exit codes of all commands, and EXIT_CODES their meanings.
"""

import contextlib
from collections.abc import Iterator, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Declare the exit codes of commands. A signal other than Ctrl-C adds its number to 128, as in a shell."""

    OK = 0
    WRONG = 1
    USAGE = 2
    NO_ANSWER = 3
    FAILED = 4
    MISSING_PACKAGE = 5
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


EXIT_CODES = {
    ExitCode.OK: "success",
    ExitCode.WRONG: "a check failed or found something (verify, compare, syncs, doctor, records)",
    ExitCode.USAGE: "options or input that cannot be used",
    ExitCode.NO_ANSWER: "no answer: not enough GPUs, memory or disk, undecided (verify, compare, syncs, recommend), or no load meets the SLO (--find)",
    ExitCode.FAILED: "a rank, a server, a program or some points failed, or doctor could not read something",
    ExitCode.MISSING_PACKAGE: "a package is missing",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.OUTPUT_CLOSED: "the output pipe was closed, as in `dcpbench show RUN | head -1`",
}


def format_install_hint(extra: str) -> str:
    """Return the command that installs an optional part of dcpbench, which is not on a package index."""
    return f"pip install '.[{extra}]' in the folder with dcpbench's pyproject.toml"


class DcpbenchError(Exception):
    """End a command with a message instead of a traceback; base of all errors of dcpbench."""

    exit_code = ExitCode.WRONG


class UsageError(DcpbenchError):
    """Report options or input that cannot work; the message names valid ones."""

    exit_code = ExitCode.USAGE


class UnusedOptionsError(UsageError):
    """Report options that have no effect next to the others; the message names what gives them one."""

    def __init__(self, message: str, options: Sequence[str] = ()) -> None:
        """Keep the options, each as `--exchange` or as a key such as `--page-size interleave`."""
        super().__init__(message)
        self.options = tuple(options)


class LayoutError(UsageError):
    """Report degrees that do not divide each other or the model; the message lists valid ones."""

    def __init__(self, message: str, problem: str = "") -> None:
        """Keep the problem alone, without the degrees to use instead."""
        super().__init__(message)
        self.problem = problem or message


class ModelError(UsageError):
    """Report a model name, config.json or checkpoint that cannot be used."""


class OutputError(UsageError):
    """Report an output folder that cannot be written or must not be overwritten; the message names the alternatives."""


class RecordsError(UsageError):
    """Report a record file that is missing, empty or of another format."""

    def __init__(self, problem: str, path: object = "") -> None:
        """Keep the problem, which follows the path in the message, for texts that name the file in another way."""
        super().__init__(f"{path}{problem}")
        self.problem = problem


class TraceError(UsageError):
    """Report a file that is not a profiler's trace, or is too damaged to use."""


class CapacityError(DcpbenchError):
    """Report a lack of GPUs or memory; the message states how much is missing."""

    exit_code = ExitCode.NO_ANSWER


class InsufficientMemoryError(CapacityError):
    """Report weights or KV cache that do not fit; the message states how much memory is missing."""

    def __init__(self, message: str, problem: str = "") -> None:
        """Keep the problem alone, which the message states with the layout and what to type instead."""
        super().__init__(message)
        self.problem = problem or message


class DiskError(DcpbenchError):
    """Report a disk that is full, read-only or broken; the message states how to go on once it can be written."""

    exit_code = ExitCode.NO_ANSWER

    def __init__(self, message: str, number: int | None = None) -> None:
        """Keep the error number of the operating system, for the process that started this one."""
        super().__init__(message)
        self.number = number


class WorkerError(DcpbenchError):
    """Report a torchrun job that failed or hung; the message names the log to read."""

    exit_code = ExitCode.FAILED


class SyncError(DcpbenchError):
    """Report code that synchronised with the GPU where that is not allowed; the message shows the lines."""


class MissingPackageError(DcpbenchError):
    """Report a missing optional package; the message states how to install it."""

    exit_code = ExitCode.MISSING_PACKAGE


@contextlib.contextmanager
def explain_missing_library(option: str, library: str, package: str, instead: str) -> Iterator[None]:
    """Raise MissingPackageError for an ImportError in the block, with another value of the option to use instead."""
    try:
        yield
    except ImportError as e:
        raise MissingPackageError(
            f"{option} {library} needs {package} ({e}); {format_install_hint(library)}, or use {option} {instead}."
        ) from e
