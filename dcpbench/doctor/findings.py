"""What an examination of a machine finds, and what it could not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from dcpbench.errors import ExitCode
from dcpbench.records.checks import MAX_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
BAD, NOTE, UNREAD, OK = "bad", "note", "unread", "ok"
LEVELS = (BAD, NOTE, UNREAD, OK)
"""Spoils or ends a measurement; worth knowing; not said by the machine, so that nobody knows; read, and as it should be."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing about the machine."""

    check: str
    """What was looked at, in one or two words."""
    level: str
    """Of LEVELS."""
    where: str = ""
    """`GPU 3`, `GPU 0 and 1`, a folder; empty: the machine."""
    what: str
    """A sentence."""
    remedy: str = ""
    """What to type or to change; empty where nothing needs it."""


class Report:
    """Findings as they are made."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, check: str, level: str, what: str, remedy: str = "", where: str = "") -> None:
        """One more."""
        assert level in LEVELS
        if len(self.findings) < MAX_ENTRIES:
            self.findings.append(Finding(check=check, level=level, where=where, what=what, remedy=remedy))

    def judge(self, check: str, wrong: str, remedy: str, right: str, *, where: str = "", level: str = BAD) -> None:
        """A finding of this level where `wrong` says something, else what is right."""
        self.add(check, level if wrong else OK, wrong or right, remedy if wrong else "", where)

    def read(self, check: str, ask: Callable[[], T], *, where: str = "") -> T | None:
        """What the machine answers; None, and told as unread, where it does not, whatever it raises."""
        try:
            return ask()
        except Exception as e:  # noqa: BLE001 - a driver fails in many ways, and each means that something is not known
            self.add(check, UNREAD, f"not known: {said(e)}.", where=where)
            return None

    @property
    def exit_code(self) -> int:
        """WRONG if something is bad, else FAILED if something could not be read, else OK."""
        levels = {finding.level for finding in self.findings}
        if BAD in levels:
            return ExitCode.WRONG
        return ExitCode.FAILED if UNREAD in levels or not levels else ExitCode.OK


def said(error: Exception) -> str:
    """An error in few words."""
    return (str(error).strip().rstrip(".") or type(error).__name__)[:200]
