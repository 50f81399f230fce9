"""A state in words and numbers, the same on a terminal and in a line; and the lines of a pipe, a log or a poor terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.launch.jobs import WAITING
from dcpbench.launch.progress import CPU_NOTE
from dcpbench.show.numbers import format_duration, format_short_number
from dcpbench.show.text import format_count
from dcpbench.top import state as st

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.top.facts import FinishedPoint
    from dcpbench.top.state import Activity, Estimate, State

STYLES = {
    st.STARTING: "cyan",
    st.RUNNING: "green",
    st.FINISHING: "green",
    st.SILENT: "yellow",
    st.ORPHANED: "red",
    st.ELSEWHERE: "yellow",
    st.ENDED: "green",
    st.STOPPED: "red",
}


def format_status(state: State) -> str:
    """Return the activity of the run, or how it ended."""
    silent = format_duration(state.now.silent_s) if state.now else ""
    if state.status == st.SILENT and state.now:
        return f"no sign of life for {silent}; dcpbench ends such a job after {format_duration(state.now.timeout_s)}"
    if state.status == st.ELSEWHERE:
        return f"no process of the run on this machine; last sign of life {silent} ago"
    if state.status == st.ENDED:
        return f"ended, {state.failed} failed" if state.failed else "ended"
    if state.status == st.STOPPED:
        left = "" if state.left is None else f" with {state.left} left; go on with --resume"
        return f"stopped{left}{f' ({state.problem})' if state.problem else ''}"
    return {
        st.FINISHING: "all points have ended; the report is being written",
        st.ORPHANED: "its command is gone; its workers are not",
    }.get(state.status, state.status)


def format_counts(state: State) -> str:
    """Return `12 of 34 points · 1 failed · 2 rejected · 22 left`."""
    finished = state.ok + state.failed
    among = finished if state.total is None else state.total
    of = "" if state.total is None else f"{finished} of "
    parts = [of + format_count(among, "point")]
    parts += [f"{n} {word}" for n, word in ((state.failed, "failed"), (state.rejected, "rejected")) if n]
    return " · ".join([*parts, *([f"{state.left} left"] if state.left else [])])


def format_rates(state: State) -> str:
    """Return points per minute, time spent and time left, as far as known."""
    rate = state.points_per_minute
    parts = [f"{format_short_number(rate)} points/min"] if rate else []
    parts += [f"{format_duration(state.elapsed_s)} so far"] if state.elapsed_s is not None else []
    parts += [format_time_left(state.eta)] if state.eta else []
    return " · ".join(parts)


def format_time_left(eta: Estimate) -> str:
    """Return `about 9 min left (7 min to 12 min)`; with few points, their number."""
    if not eta.seconds:
        return "the last point takes longer than others did"
    text = f"about {format_duration(eta.seconds)} left"
    if eta.low is None or eta.high is None:
        return f"{text}, by {format_count(eta.points, 'point')} alone"
    low, high = format_duration(eta.low), format_duration(eta.high)
    return text if low == high else f"{text} ({low} to {high})"


def format_stage(now: Activity) -> str:
    """Return `measure for 8 s · 123/480 requests`."""
    words = {"start": "starting a job", "end": "between jobs", "done": "between points", WAITING: "between loads"}
    return f"{words.get(now.stage, now.stage)} for {format_duration(now.stage_s)}{f' · {now.note}' if now.note else ''}"


def format_figures(point: FinishedPoint) -> str:
    """Return `1,234 tok/s, ITL 3.4 ms`, or the reason why there are no numbers."""
    if point.outcome != "ok":
        return f"{point.outcome.upper()}: {point.reason}" if point.reason else point.outcome.upper()
    figures = (("{} tok/s", point.tok_s), ("TTFT {} ms", point.ttft_ms), ("ITL {} ms", point.itl_ms))
    return ", ".join(form.format(format_short_number(n)) for form, n in figures if n is not None) or "ok"


def format_changes(before: State | None, after: State) -> Iterator[str]:
    """Yield the lines to print after the state `before`, None at first. Yield none if only time has passed."""
    if before is None:
        yield f"{after.kind or 'run'} in {after.folder}: {format_status(after)}"
        if after.device == "cpu":
            yield CPU_NOTE
    elif before.status != after.status:
        yield format_status(after)
    done = after.ok + after.failed
    if before is None or (before.ok + before.failed, before.total) != (done, after.total):
        new = 1 if before is None else max(done - before.ok - before.failed, 0)
        news = after.last[-new:] if new else []
        yield from (f"{p.point}: {format_figures(p)}" for p in news)
        yield " · ".join(filter(None, (format_counts(after), format_rates(after))))
    then = before.now if before else None
    if after.now and after.now.point and not (then and (then.point, then.stage) == (after.now.point, after.now.stage)):
        yield f"now: {after.now.point}, {after.now.stage}"
    if after.unread != (before.unread if before else {}):
        yield format_unread(after)


def format_unread(state: State) -> str:
    """Return the number of unreadable lines by file."""
    lines = ", ".join(f"{name}: {count}" for name, count in state.unread.items())
    return f"lines that could not be read, and are left out: {lines}"


def format_snapshot(state: State) -> Iterator[str]:
    """Yield the lines of one complete state, for `--once` without a terminal."""
    yield from format_changes(None, state)
    if state.now and state.status != st.SILENT:
        yield format_stage(state.now)
    for g in state.gpus:
        clock, power = format_short_number(g.sm_clock_mhz), format_short_number(g.power_w)
        slowed = f", slowed: {', '.join(g.throttle_reasons)}" if g.throttle_reasons else ""
        yield f"GPU {g.index}: {clock} MHz, {power} W, {format_short_number(g.temperature_c)} °C{slowed}"
