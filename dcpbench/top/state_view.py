"""Render a state for a terminal of any width: tables lose columns if it is narrow, and the newest entries come first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dcpbench.launch.progress import CPU_NOTE
from dcpbench.points.memory import GIB
from dcpbench.show.numbers import ABSENT, format_duration, format_integer, format_short_number, format_text
from dcpbench.top import state_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from dcpbench.top.facts import FinishedPoint
    from dcpbench.top.gpu_monitor import GpuState
    from dcpbench.top.state import State

BAR = 60  # columns of the bar at most
WIDE, NARROW = 70, 50  # columns of the terminal from which on, and below which, tables have all and least columns
FIXED_LINES = 12  # lines above and around the last points
MAX_LAST_POINTS, MIN_LAST_POINTS = 20, 3  # last points that are shown


def render_state(state: State, width: int, height: int) -> RenderableType:
    """Return the whole view, for a terminal of `width` columns and `height` lines."""
    head = Text(f"{state.kind or 'run'} in {state.folder}: ", "bold")
    head.append(state_text.format_status(state), state_text.STYLES.get(state.status, ""))
    if state.device == "cpu":
        head.append(f"\n{CPU_NOTE}", "yellow")
    parts: list[RenderableType] = [head, Text()]
    if state.total:
        bar = Table.grid()  # ends the bar's line
        bar.add_row(ProgressBar(total=state.total, completed=state.ok + state.failed, width=min(width, BAR)))
        parts.append(bar)
    # a single size would repeat the counts
    sizes = [f"tp{s.tp}: {s.finished} of {s.total}" for s in state.sizes] if len(state.sizes) > 1 else []
    parts += [
        Text(line)
        for line in (state_text.format_counts(state), state_text.format_rates(state), " · ".join(sizes))
        if line
    ]
    if state.now:
        parts += [Text(), Text(state.now.point or "no point at work", "bold"), Text(state_text.format_stage(state.now))]
    free_lines = height - FIXED_LINES - (len(state.gpus) + 3 if state.gpus else 0)
    last = state.last[-max(min(free_lines, MAX_LAST_POINTS), MIN_LAST_POINTS) :]
    if state.gpus:
        parts += [Text(), _render_gpus(state.gpus, width)]
    if last:
        parts += [Text(), _render_last_points(last, width)]
    if state.unread:
        parts += [Text(), Text(state_text.format_unread(state), "yellow")]
    return Group(*parts)


def _render_last_points(points: list[FinishedPoint], width: int) -> Table:
    """Return the table of the last points, newest first."""
    served = any(p.ttft_ms is not None for p in points)
    shown = [c for c in POINT_COLUMNS if width >= c[1] and (served or c[0] != "TTFT ms")]
    table = _make_table("last points", [heading for heading, *_ in shown])
    for p in reversed(points):
        name = Text(p.point) if p.outcome == "ok" else Text(f"{p.point}  {state_text.format_figures(p)}", "red")
        table.add_row(name, *(show(p) for _, _, show in shown))
    return table


def _render_gpus(gpus: list[GpuState], width: int) -> Table:
    shown = [c for c in GPU_COLUMNS if width >= c[1]]
    table = _make_table("GPU", [heading for heading, *_ in shown])
    for g in gpus:
        slowed = f"  slowed: {', '.join(g.throttle_reasons)}" if g.throttle_reasons else ""
        name = Text(f"{g.index}{f' {g.name}' if width >= WIDE and g.name else ''}{slowed}", "yellow" if slowed else "")
        table.add_row(name, *(show(g) for _, _, show in shown))
    return table


def _make_table(first: str, numbers: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", ratio=1)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _to_gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _format_with_limit(value: float | None, limit: float | None, show: Callable[[float | None], str]) -> str:
    return show(value) if limit is None else f"{show(value)}/{show(limit)}"


Columns = tuple[tuple[str, int, "Callable[[Any], str]"], ...]  # heading, columns of the terminal from which on, cell
POINT_COLUMNS: Columns = (
    ("tok/s", 0, lambda p: format_short_number(p.tok_s)),
    ("/GPU", WIDE, lambda p: format_short_number(p.tok_s_per_gpu)),
    ("TTFT ms", WIDE, lambda p: format_short_number(p.ttft_ms)),
    ("ITL ms", NARROW, lambda p: format_short_number(p.itl_ms)),
    ("took", WIDE, lambda p: format_duration(p.seconds)),
)
GPU_COLUMNS: Columns = (
    ("busy", 0, lambda g: ABSENT if g.utilisation is None else f"{g.utilisation} %"),
    ("SM MHz", 0, lambda g: _format_with_limit(g.sm_clock_mhz, g.sm_clock_max_mhz, format_text)),
    ("W", NARROW, lambda g: _format_with_limit(g.power_w, g.power_limit_w, format_short_number)),
    ("°C", NARROW, lambda g: format_text(g.temperature_c)),
    (
        "GiB",
        NARROW,
        lambda g: _format_with_limit(_to_gib(g.memory_used_bytes), _to_gib(g.memory_total_bytes), format_integer),
    ),
)
