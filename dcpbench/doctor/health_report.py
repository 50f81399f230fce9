"""Collect the findings of an examination of a machine, including facts that could not be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from dcpbench.errors import ExitCode
from dcpbench.records.checks import MAX_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
BAD, NOTE, UNREAD, OK = "bad", "note", "unread", "ok"
LEVELS = (BAD, NOTE, UNREAD, OK)  # invalidates a measurement; worth knowing; not readable here; as expected


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one fact about the machine."""

    check: str  # subject of the check, in one or two words
    level: str  # severity, one of LEVELS
    where: str = ""  # `GPU 3`, `GPU 0 and 1`, a folder; empty: the machine
    what: str  # a sentence
    remedy: str = ""  # command or change that helps; empty if none is needed


class Report:
    """Collect findings."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, check: str, level: str, what: str, remedy: str = "", where: str = "") -> None:
        """Add a finding."""
        assert level in LEVELS
        if len(self.findings) < MAX_ENTRIES:
            self.findings.append(Finding(check=check, level=level, where=where, what=what, remedy=remedy))

    def add_verdict(
        self, check: str, wrong: str, remedy: str, right: str, *, where: str = "", level: str = BAD
    ) -> None:
        """Add a finding of this level if `wrong` is not empty, else an OK finding with `right`."""
        self.add(check, level if wrong else OK, wrong or right, remedy if wrong else "", where)

    def read(self, check: str, ask: Callable[[], T], *, where: str = "") -> T | None:
        """Return the machine's answer; on any exception add an UNREAD finding and return None."""
        try:
            return ask()
        except Exception as e:  # noqa: BLE001 - a driver fails in many ways, and each means that something is not known
            self.add(check, UNREAD, f"not known: {format_error(e)}.", where=where)
            return None

    @property
    def exit_code(self) -> int:
        """Return WRONG if something is bad, else FAILED if something could not be read, else OK."""
        levels = {finding.level for finding in self.findings}
        if BAD in levels:
            return ExitCode.WRONG
        return ExitCode.FAILED if UNREAD in levels or not levels else ExitCode.OK


def format_error(error: Exception) -> str:
    """Return a short description of an error."""
    return (str(error).strip().rstrip(".") or type(error).__name__)[:200]
