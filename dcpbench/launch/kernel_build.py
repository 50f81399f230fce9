"""Compile kernels of FlashInfer in the background while a job starts, on each machine. No torch.

    LOGS/kernel-build.log      output of the process that compiles, workloads/prefill_build.py

Without it FlashInfer compiles at its first call, when the ranks are ready. A failure has no effect but that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from dcpbench.launch import subprocess_guard
from dcpbench.launch.ranks import make_environment
from dcpbench.models import load_shape

if TYPE_CHECKING:
    from dcpbench.launch.jobs import Job

BUILDER = "dcpbench.workloads.prefill_build"
LOG = "kernel-build.log"
FLASHINFER = "flashinfer"
END_WAIT_S = 5.0


class PrefillModule(NamedTuple):
    """Describe a module of FlashInfer by what its kernels take."""

    width: int  # columns of keys
    value: int  # columns of values
    dtype: str


def find_first_module(job: Job) -> PrefillModule | None:
    """Return the module that the first point of a job needs, or None.

    Modules of later points are not compiled early, because points before them are being measured then.
    """
    point = job.points[0]
    if job.device != "cuda" or job.kind != "sweep" or point.load is None or point.load.prefill != FLASHINFER:
        return None
    shape = load_shape(point.model)
    return PrefillModule(shape.qk_head_dim, shape.v_head_dim, point.dtype)


class KernelBuild:
    """Manage the process that compiles what the first point of a job needs."""

    def __init__(self, job: Job) -> None:
        """Start the process if the point needs FlashInfer; the folder for logs must exist."""
        self._process: subprocess.Popen[bytes] | None = None
        module = find_first_module(job)
        if module is None:
            return
        command = [sys.executable, "-m", BUILDER, *map(str, module)]
        with (job.get_log_folder() / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                subprocess_guard.make_tied_command(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=make_environment(job.device),
                start_new_session=True,
            )

    def end(self) -> None:
        """End the process and its compilers."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(END_WAIT_S)
