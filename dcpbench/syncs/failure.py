"""What a person reads when code synchronised that must not: each line with its source, why it waits, and what helps.

No torch here.
"""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING

from dcpbench.syncs.frames import relative_path
from dcpbench.syncs.rules import BY_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.sites import Sync

CONTEXT = 2
"""Source lines shown before and after the one that synchronised."""
LINES = 10
"""Lines that are shown in full; of more, the number is told."""


def text_of(syncs: Sequence[Sync]) -> str:
    """The lines that synchronised, in order of their first time, each once with its count; empty without any."""
    groups: dict[tuple[str, int | None, str, str], list[Sync]] = {}
    for sync in syncs:
        groups.setdefault((sync.file, sync.line, sync.rule, sync.op), []).append(sync)
    shown = [_block(group[0], len(group)) for group in list(groups.values())[:LINES]]
    rest = len(groups) - len(shown)
    return "\n\n".join([*shown, *([f"… and {rest} more lines."] if rest else [])])


def _block(sync: Sync, count: int) -> str:
    rule = BY_ID[sync.rule]
    where = f"{relative_path(sync.file)}:{sync.line} in {sync.function}" if sync.user else "outside any Python line"
    what = ", ".join(part for part in (sync.op or sync.call, sync.direction) if part)
    times = f", {count} times" if count > 1 else ""
    head = f"{where}: {rule.title} [{sync.rule}] ({what}){times}"
    return "\n".join([head, *_source(sync), f"  why: {rule.why}", f"  fix: {rule.fix}"])


def _source(sync: Sync) -> list[str]:
    """The line with its neighbours; nothing where the source cannot be read."""
    if sync.line is None or not linecache.getline(sync.file, sync.line):
        return []
    numbers = range(max(1, sync.line - CONTEXT), sync.line + CONTEXT + 1)
    lines = {n: text.rstrip() for n in numbers if (text := linecache.getline(sync.file, n))}
    return [f"{'>' if n == sync.line else ' '} {n:5d} | {text}".rstrip() for n, text in lines.items()]
