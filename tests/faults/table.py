"""List injected faults, the moment of each, and the expected outcome.

The sweep has three points on two ranks. For each fault, the same command with --resume then ends with 0, each point has
one good record, and no process is left.
"""

from __future__ import annotations

import itertools
import signal
from typing import NamedTuple

IMPORTING, BUILD, MEASURE, RECORD, RECORDED, END = "importing", "build", "measure", "record", "recorded", "end"
MOMENTS = (IMPORTING, BUILD, MEASURE, RECORD, RECORDED, END)
"""Moments of a rank: before the first point; while it builds a point's engine; while it measures the point; after half of
the record is written; before it reports the written record; after all points.
"""
RANK_0_MOMENTS = (RECORD, RECORDED)  # moments of rank 0, which writes the records
COMMAND, AGENT, ACCOUNT, RANK = "command", "agent", "account", "rank"
ALL_MEASURED, SOME_FAILED, REFUSED, NO_DISK = 0, 4, 2, 3


class Case(NamedTuple):
    """Hold a fault, its moment, and its expected outcome."""

    whom: str  # process that the fault hits
    what: str  # number of a signal, or another KIND of faulty.py
    moment: str
    ends: tuple[int, ...]  # accepted exit codes of the first command
    reason: str = ""  # regular expression for the reason in the record of the failed point
    short: bool = False  # True if `make test` or `make test-long` includes it

    @property
    def rank(self) -> int:
        """Rank on which the fault happens."""
        return 0 if self.moment in RANK_0_MOMENTS else 1

    @property
    def name(self) -> str:
        """Name in lists and test ids."""
        return (
            f"{self.whom}-{signal.Signals(int(self.what)).name if self.what.isdecimal() else self.what}-{self.moment}"
        )


def _list_kills() -> list[Case]:
    """Return the cases in which a signal ends one process of a run at one moment."""
    found = []
    for whom, number, moment in itertools.product((COMMAND, AGENT, ACCOUNT, RANK), (9, 15, 2), MOMENTS):
        if whom == AGENT and number == signal.SIGINT:
            continue  # the agent has a separate session, which gets no Ctrl-C
        if whom == COMMAND:
            ends, reason = ((-number,) if number == signal.SIGKILL else (128 + number,)), ""
        elif moment in (BUILD, MEASURE, RECORD):
            ends, reason = (SOME_FAILED,), KILL_REASONS.get((whom, number), "")
        else:
            ends, reason = (ALL_MEASURED,), ""
        short = (whom, number, moment) in SHORT_CASES
        found.append(Case(whom, str(number), moment, ends, reason, short))
    return found


KILL_REASONS = {
    (RANK, 9): r"rank \d was killed by signal 9",
    (RANK, 15): r"rank \d was ended by signal 15 \(SIGTERM\), sent by another process",
    (RANK, 2): r"rank \d was ended by signal 2 \(SIGINT\), sent by another process",
    (ACCOUNT, 9): r"rank \d was killed by signal 9",
    (ACCOUNT, 15): r"rank \d was ended by signal 15 \(SIGTERM\), sent by another process",
    (ACCOUNT, 2): r"rank \d was ended by signal 2 \(SIGINT\), sent by another process",
    (AGENT, 9): r"torchrun itself was ended by signal 9 \(SIGKILL\)",
}
SHORT_CASES = {
    (COMMAND, 9, MEASURE),
    (AGENT, 9, BUILD),
    (ACCOUNT, 9, RECORDED),
    (ACCOUNT, 9, BUILD),
    (RANK, 9, MEASURE),
    (RANK, 15, RECORD),
}


def _list_rank_errors() -> list[Case]:
    """Return the cases in which a rank ends by itself."""
    found = []
    for what, reason in (
        ("raise", "rank 1: ValueError: no such row"),
        ("out-of-memory", "rank 1: OutOfMemoryError: CUDA out of memory"),
        ("illegal-access", "rank 1: AcceleratorError: CUDA error: an illegal memory access"),
        ("exit-0", "rank 1 ended with exit code 0 before its points were done"),
        ("exit-7", "rank 1 ended with exit code 7 and without an error message"),
        (str(int(signal.SIGSEGV)), r"rank 1 was ended by signal 11 \(SIGSEGV\), native code crashed"),
        (str(int(signal.SIGABRT)), r"rank 1 was ended by signal 6 \(SIGABRT\), native code crashed"),
    ):
        found += [Case(RANK, what, moment, (SOME_FAILED,), reason) for moment in (BUILD, MEASURE)]
    return found


def _list_disk_faults() -> list[Case]:
    """Return the cases of a full disk or a moved run folder. No point fails, and the command's message has a remedy."""
    return [
        *(Case(RANK, "full", moment, (NO_DISK,)) for moment in (BUILD, MEASURE)),
        *(
            Case(RANK, "moved", moment, (REFUSED,), short=moment == MEASURE)
            for moment in (IMPORTING, BUILD, MEASURE, END)
        ),
    ]


CASES = [*_list_kills(), *_list_rank_errors(), *_list_disk_faults()]
DAMAGES = ("flipped", "cut", "nuls", "joined", "removed", "garbage")  # damage to a file of records between two commands
