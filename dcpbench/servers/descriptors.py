"""Limit of open files of the client: each connection to a server is one, and their number per process is limited. No
torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

SPARE = 64  # descriptors in addition to open ones and connections: pipes, logs, files of samples
SHORTAGE = (errno.EMFILE, errno.ENFILE)
OPEN_FILES = "open files"  # kind of a request that failed because the client had none left


@contextlib.contextmanager
def raise_open_file_limit(connections: int, *, certain: bool, processes: int = 1) -> Iterator[None]:
    """Raise the soft limit of open files within the block as far as `connections` connections of a process need.

    Raise UsageError if the hard limit is too low and it is `certain` that all of them will be open at once. A load that
    may need fewer is sent in any case.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = _count_open_files() + SPARE
    needed = connections + others
    if soft == resource.RLIM_INFINITY or needed <= soft:
        yield
        return
    if certain and hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{connections:,} connections at once need {needed:,} open files in a process of the client, and it may have "
            f"{hard:,} (ulimit -Hn): raise that limit, lower --concurrency, or divide the load with --client processes="
            f"{processes * -(-connections // max(hard - others, 1))}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def format_shortage() -> str:
    """Return why a connection failed because too many files are open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"the client has no open files left (it may have {soft:,}, ulimit -n), so no request was sent; raise that "
        "limit, lower --concurrency, or divide the load with --client processes."
    )


def _count_open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone are counted
    except OSError:
        return SPARE
