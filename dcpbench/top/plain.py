"""Two states, one line for each change between them: for a pipe, a log, or a terminal that can do no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.launch.progress import CPU_NOTE
from dcpbench.show.numbers import short_number
from dcpbench.top import words
from dcpbench.top.state import SILENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.top.state import State


def changes(before: State | None, after: State) -> Iterator[str]:
    """What to print after `before`, which is None at first. Nothing where nothing but time has passed."""
    if before is None:
        yield f"{after.kind or 'run'} in {after.folder}: {words.status(after)}"
        if after.device == "cpu":
            yield CPU_NOTE
    elif before.status != after.status:
        yield words.status(after)
    done = after.ok + after.failed
    if before is None or (before.ok + before.failed, before.total) != (done, after.total):
        new = 1 if before is None else max(done - before.ok - before.failed, 0)
        news = after.last[-new:] if new else []
        yield from (f"{p.point}: {words.figures(p)}" for p in news)
        yield " · ".join(filter(None, (words.counts(after), words.rates(after))))
    then = before.now if before else None
    if after.now and after.now.point and not (then and (then.point, then.stage) == (after.now.point, after.now.stage)):
        yield f"now: {after.now.point}, {after.now.stage}"
    if before and after.unread != before.unread:
        yield f"could not be read, and is left out: {', '.join(after.unread)}"


def snapshot(state: State) -> Iterator[str]:
    """One state in full, as `--once` prints it where there is no terminal."""
    yield from changes(None, state)
    if state.now and state.status != SILENT:
        yield words.stage(state.now)
    for g in state.gpus:
        clock, power = short_number(g.sm_clock_mhz), short_number(g.power_w)
        slowed = f", slowed: {', '.join(g.throttle_reasons)}" if g.throttle_reasons else ""
        yield f"GPU {g.index}: {clock} MHz, {power} W, {short_number(g.temperature_c)} °C{slowed}"
