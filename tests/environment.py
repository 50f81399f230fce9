"""Prepare the environment of the suite: keep the variables that locate programs and hardware, and remove or set all others.

The package, PyTorch, NCCL, Triton, Rich, Typer, Click, Python's HTTP client, git and Slurm read hundreds of variables
(FORCE_COLOR, NO_COLOR, COLUMNS, GITHUB_ACTIONS, http_proxy, SLURM_RESTART_COUNT, TORCH_DISTRIBUTED_DEBUG, NCCL_DEBUG,
PYTHONWARNINGS and others), and each new version can read more. A list of those that stay is short and does not grow
with them. A test that needs a variable sets it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

KEPT = frozenset({
    # where programs, libraries and the user's files are
    "HOME",
    "LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TEMP",
    "TMP",
    "TMPDIR",
    "USER",
    "VIRTUAL_ENV",
    # compilers and caches of kernels
    "CC",
    "CPATH",
    "CUDA_CACHE_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
    "C_INCLUDE_PATH",
    "TRITON_CACHE_DIR",
    # which GPUs there are
    "CUDA_DEVICE_ORDER",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_VISIBLE_DEVICES",
    # asked of the suite itself
    "CI",  # a test of pages fails without a browser instead of being skipped
    "DCPBENCH_MUTATION_LOG",
    "DCPBENCH_TEST_FORKS",
    "UPDATE_OUTPUTS",
})  # fmt: skip
KEPT_PREFIXES = (
    "COVERAGE_",
    "COV_CORE_",
    "LD_",  # the loader: LD_LIBRARY_PATH, LD_PRELOAD
    "NVIDIA_",  # the container's devices
    "PLAYWRIGHT_",
    "PYTEST_",
    "XDG_",
)
SET = {
    "LC_ALL": "C.UTF-8",
    "TERM": "xterm-256color",
    "TZ": "UTC",
}
UMASK = 0o022


def prepare(environment: MutableMapping[str, str]) -> None:
    """Leave in an environment what is kept, and set what the suite sets."""
    for name in list(environment):
        if name not in KEPT and not name.startswith(KEPT_PREFIXES):
            del environment[name]
    environment.update(SET)


def prepare_process() -> None:
    """Prepare this process, from which all others of the suite inherit."""
    prepare(os.environ)
    time.tzset()
    os.umask(UMASK)
