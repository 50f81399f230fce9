"""The processes of a job, found in /proc by a word in their environment, whatever the code under test says of them."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "DCPBENCH_TEST_MARK"
AGENT, RANK, ACCOUNT, OTHER = "agent", "rank", "account", "other"
PATIENCE_S = 60.0
"""How long a test waits for what would never come where it is broken."""


def processes(mark: str) -> dict[int, list[str]]:
    """Command line of each living process whose environment has this mark, by its id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_text().split("\0")
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found[int(folder.name)] = words
    return found


def role(words: list[str]) -> str:
    """What a process of a job is."""
    if "torch.distributed.run" in words:
        return AGENT
    if any(w.endswith("child.py") for w in words):
        return ACCOUNT
    return RANK if any(Path(w).name.startswith("job-") for w in words) else OTHER


def of_role(mark: str, wanted: str) -> list[int]:
    """Ids of the living processes with this role."""
    return sorted(pid for pid, words in processes(mark).items() if role(words) == wanted)


def wait_until(true: Callable[[], object], what: str) -> None:
    """Wait for something that comes at once, were the machine idle."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)
