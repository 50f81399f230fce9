"""The command line as it was typed, with some options put in the place of others. No torch."""

from __future__ import annotations

import contextvars
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

line: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("line", default=())
"""The command and its words; empty where none was typed."""


def retyped(command: str, given: Mapping[str, str], others: Sequence[str] = ()) -> str:
    """What was typed for this command, with options that are `given` (of a switch: empty) and without some `others`.

    Without a command line, or on that of another command: the options that are given alone.
    """
    typed = line.get()
    kept = _without(typed[1:], {*given, *others}) if typed[:1] == (command,) else []
    put = (word for option, value in given.items() for word in (option, value) if word)
    return shlex.join(["dcpbench", command, *put, *kept])


def _without(words: Sequence[str], options: set[str]) -> list[str]:
    """Words without those of options, and without their values."""
    kept, dropped = [], False
    for word in words:
        if word.startswith("-"):
            dropped = word.partition("=")[0] in options
        if not dropped:
            kept.append(word)
    return kept
