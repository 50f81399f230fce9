"""Retry points (--timeout retries), and exclude points that have failed too often. No torch."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from dcpbench import errors
from dcpbench.errors import DcpbenchError
from dcpbench.records.file import iter_records
from dcpbench.records.folder import RECORDS_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, DcpbenchError)}
"""Errors that name a remedy: repeating the same command would raise them again."""
MIN_ATTEMPTS = 2  # minimum number of attempts of a point with --resume, even if --timeout retries allows fewer


def can_pass(record: Record) -> bool:
    """Return True if a retry may succeed: a job hung or broke at the point, without an error that names a remedy."""
    return record.outcome in ("failed", "hung") and "stage" in record.detail and record.detail.get("error") not in OURS


def count_failures(folder: Path) -> collections.Counter[str]:
    """Return how often each point of a run has failed in a way that may pass, by its key. Lines that cannot be read do not count.

    Raise RecordsError.
    """
    if not (folder / RECORDS_FILE).exists():
        return collections.Counter()
    found = iter_records(folder, samples=False, bad=[])
    return collections.Counter(record.point.get_key() for _, record in found if can_pass(record))


def is_set_aside(times: int, retries: int) -> bool:
    """Return True if a point that has failed `times` times is left out of a resumed run."""
    return times >= max(MIN_ATTEMPTS, 1 + retries)


def format_retry_options(times: int, retries: int) -> str:
    """Return the options to append to the command."""
    return f"--resume --timeout retries={times}" if is_set_aside(times, retries) else "--resume"
