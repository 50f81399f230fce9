"""Torch's flight recorder of this rank, written as JSON when somebody asks for it, whatever its main thread is at."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from torch._C import _distributed_c10d

if TYPE_CHECKING:
    from pathlib import Path


def answer(pipe: Path, file: Path) -> None:
    """Make a named pipe; whenever somebody opens it for writing and closes it, the recorder's JSON is put into `file`.

    A thread waits for it, at no cost. Nothing is offered where the file system has no pipes, or torch writes no JSON.
    """
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None) or getattr(
        _distributed_c10d, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return
    try:
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
    except OSError:
        return

    def wait() -> None:
        while True:
            with contextlib.suppress(OSError):
                pipe.read_bytes()  # until whoever asks has closed it
                part = file.with_suffix(".part")
                part.write_bytes(dump())
                part.replace(file)
            if not pipe.exists():
                return

    threading.Thread(target=wait, name="flight-recorder", daemon=True).start()
