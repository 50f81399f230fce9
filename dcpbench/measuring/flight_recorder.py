"""Let a rank write its diagnostics on request, independent of its main thread: torch's flight recorder and its stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import threading
from typing import TYPE_CHECKING

from torch._C import _distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


MAX_WRITER_DELAY_S = 1.0  # maximum time in s that a writer may delay the next one


def export_trace() -> bytes:
    """Return the recorder's JSON; empty if this torch has none."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    dump = dump or getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    return b"" if dump is None else bytes(dump())


def collect_stacks() -> bytes:
    """Return the Python stacks of all threads, collected by the calling one."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _write_content(file: Path, produce: Callable[[], bytes]) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # torch's, where CUDA is broken
        if content := produce():
            part = file.with_suffix(".part")
            part.write_bytes(content)
            part.replace(file)


def start_responder(pipe: Path, producers: Mapping[Path, Callable[[], bytes]]) -> None:
    """Create a named pipe; each time it is opened for writing and closed, write the result of each function to its
    file.

    A thread waits for it, without cost; empty results leave no file. File systems without pipes are ignored. A function
    that does not return within MAX_WRITER_DELAY_S, such as CUDA with a lock held by another thread, does not block the others.
    """
    try:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
    except OSError:
        return

    def handle_requests() -> None:
        while pipe.exists():
            with contextlib.suppress(OSError):
                pipe.read_bytes()  # until the other end has closed it
            for file, produce in producers.items():
                writing = threading.Thread(target=_write_content, args=(file, produce), name=file.stem, daemon=True)
                writing.start()
                writing.join(MAX_WRITER_DELAY_S)

    threading.Thread(target=handle_requests, name="flight-recorder", daemon=True).start()
