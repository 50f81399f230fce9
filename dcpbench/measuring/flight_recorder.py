"""What a rank says of itself when somebody asks, whatever its main thread is at: torch's flight recorder, its stacks."""

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


EACH_S = 1.0
"""How long each thing that is said may keep the next ones."""


def recorded() -> bytes:
    """The recorder's JSON; empty where this torch writes none."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    dump = dump or getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    return b"" if dump is None else bytes(dump())


def stacks() -> bytes:
    """Python stacks of all threads, by the one that asks."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _write(file: Path, say: Callable[[], bytes]) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # torch's, where CUDA is broken
        if said := say():
            part = file.with_suffix(".part")
            part.write_bytes(said)
            part.replace(file)


def answer(pipe: Path, says: Mapping[Path, Callable[[], bytes]]) -> None:
    """Make a named pipe; whenever somebody opens it for writing and closes it, each file gets what is said then.

    A thread waits for it, at no cost; what is empty leaves no file. Nothing is offered where the file system has no pipes.
    What does not answer in EACH_S, as CUDA where a thread holds its lock, keeps nobody else from answering.
    """
    try:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
    except OSError:
        return

    def wait() -> None:
        while pipe.exists():
            with contextlib.suppress(OSError):
                pipe.read_bytes()  # until whoever asks has closed it
            for file, say in says.items():
                writing = threading.Thread(target=_write, args=(file, say), name=file.stem, daemon=True)
                writing.start()
                writing.join(EACH_S)

    threading.Thread(target=wait, name="flight-recorder", daemon=True).start()
