"""Show progress while points run, and tables, in a terminal."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Self

import msgspec
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from dcpbench.launch.start_phases import COMPILING
from dcpbench.plan.grid import format_point_name, format_varied_parts
from dcpbench.points.axes import Role, format_changed_values
from dcpbench.points.names import ENGINE_NAMES
from dcpbench.points.point import select_point_axes
from dcpbench.points.sizes import format_size
from dcpbench.show.model_fit import format_no_fit, format_range
from dcpbench.show.numbers import format_duration
from dcpbench.show.text import format_capitalized, format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from rich.console import Console

    from dcpbench.launch import jobs
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.gpus import Gpu
    from dcpbench.points.point import Point
    from dcpbench.records.record import StartPhase

FINISHED = ("done", "failed", "hung")
QUIET_S = 60.0  # interval in s at which a long point reports its progress without a terminal
LONG_START_S = 30.0  # from this many seconds on, the phases of a start are printed
CPU_NOTE = "CPU: functional run — these timings do not reflect performance"


class ProgressBar:
    """Show the progress of a run from its Progress events: a live bar on a terminal, one plain line per finished point
    elsewhere.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        console: Console,
        what: str = "points",
        *,
        brief: bool = False,
        counted: bool = True,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        """Create the bar; `names` maps the keys of events to names, and `what` is their plural noun.

        With `brief`, only failed points get a line. If they are not `counted`, further points may follow. `kinds` maps the keys to kinds of points that take equally long, such as
        replays and live runs; by default all are of one kind.
        """
        self._names = dict(names)
        self._kinds = dict(kinds or dict.fromkeys(names, ""))
        self._left = Counter(self._kinds[key] for key in names)
        self._seconds: dict[str, list[float]] = {}
        self._brief, self._counted = brief, counted
        self._console = console
        self._finished = 0
        self._ended = self._spoke = time.monotonic()
        self._last = ""
        self._bar: Progress | None = None
        if console.is_terminal:
            fixed, rest = Column(no_wrap=True), Column(no_wrap=True, ratio=1)  # only the description is cut
            self._bar = Progress(
                BarColumn(min(30, console.width // 8)),
                MofNCompleteColumn(table_column=fixed),
                TextColumn(what, table_column=fixed),
                TimeElapsedColumn(table_column=fixed),
                TextColumn("{task.fields[left]}", table_column=fixed),
                TextColumn("{task.description}", table_column=rest),
                console=console,
                transient=True,
                expand=True,
            )
            self._task = self._bar.add_task("starting", total=len(names), left="")

    def add_points(self, points: Sequence[Point]) -> None:
        """Show further points, such as those of the next load of a search."""
        kinds = list_point_kinds(points)
        self._names |= format_point_names(points)
        self._kinds |= kinds
        self._left.update(kinds.values())
        if self._bar:
            self._bar.update(self._task, total=len(self._names))

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, event: jobs.Progress) -> None:
        """Show one event."""
        name = self._names.get(event.key, "")
        if event.stage not in ("failed", "hung", "again"):
            self._last = event.note or self._last
        if sum(phase.seconds for phase in event.phases) >= LONG_START_S:
            self._print(format_start(event.phases))
        if event.stage in FINISHED and name:
            self._count_finished(event.key)
            if not self._brief or event.stage != "done":
                self._print_point(event, name)
        elif event.stage == "again":
            self._print(f"{name}  AGAIN, after the others: {event.note}")
        elif event.stage == "ending":
            self._print(f"Interrupted: {event.note}")
        elif event.stage == "stopped":
            self._print(f"{format_capitalized(event.note)}.")
        elif event.note and not self._bar and time.monotonic() - self._spoke > QUIET_S:
            self._print(f"{name} {event.stage}: {event.note}")
        if self._bar:
            now = f"{name} {event.stage}".strip() + (f" · {self._last}" if self._last else "")
            self._bar.update(self._task, completed=self._finished, description=escape(now), left=self._format_eta())

    def _print_point(self, event: jobs.Progress, name: str) -> None:
        """Print a finished point, which stays on the screen, above the bar if there is one."""
        of = len(self._names)
        mark = "" if event.stage == "done" else f"{event.stage.upper()}: "
        note = f"  {mark}{event.note}" if event.note or mark else ""
        if not self._counted:
            self._print(f"{name}{note}")
            return
        eta = self._format_eta() if not self._bar and self._finished < of else ""
        self._print(f"[{self._finished}/{of}] {name}{note}{f'  ({eta})' if eta else ''}")

    def _print(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _count_finished(self, key: str) -> None:
        kind, now = self._kinds[key], time.monotonic()
        self._finished += 1
        self._left[kind] -= 1
        self._seconds.setdefault(kind, []).append(now - self._ended)
        self._ended = now

    def _format_eta(self) -> str:
        """Return the time that the other points take, by those of their kinds; empty if one of the kinds has not run yet.

        The first point of a kind also has the time for which a server starts or its steps are measured, so that it counts only if
        there is no other.
        """
        left = {kind: count for kind, count in self._left.items() if count}
        if not self._finished or not left.keys() <= self._seconds.keys():
            return ""
        each = {kind: statistics.fmean(self._seconds[kind][1:] or self._seconds[kind]) for kind in left}
        return f"about {format_duration(sum(count * each[kind] for kind, count in left.items()))} left"


def format_start(phases: Sequence[StartPhase]) -> str:
    """Return the sentence about the time until the first measured step: `First step after 95 s: 12 s starting, …`."""
    parts = ", ".join(f"{phase.seconds:.0f} s {phase.name}" for phase in phases)
    compiled = any(phase.name == COMPILING for phase in phases)
    hint = "; install flashinfer-jit-cache to have these kernels prebuilt" if compiled else ""
    return f"First step after {sum(phase.seconds for phase in phases):.0f} s: {parts}{hint}"


def format_point_names(points: Sequence[Point]) -> dict[str, str]:
    """Return the names of running points, by key."""
    more = format_varied_parts(points)
    return {p.get_key(): format_point_name(p) + more[p.get_key()] for p in points}


def list_point_kinds(points: Iterable[Point]) -> dict[str, str]:
    """Return the kind of each point, by key: points of one kind take equally long."""
    return {point.get_key(): point.load.mode if point.load else "" for point in points}


def format_plan_note(gpu: Gpu, count: int, nnodes: int) -> str:
    """Return the note that --dry-run --gpu plans for other hardware than this machine."""
    machine = f"{count} × {gpu.device}" + (f" on each of {nnodes} machines" if nnodes > 1 else "")
    known = ", known only from data sheets as dcpbench has never run on one" if gpu.on_paper else ""
    taken = (
        "FlashInfer and FlashMLA are assumed to be installed"
        if gpu.cuda
        else "it does not run CUDA, so dcpbench cannot run there"
    )
    return (
        f"A plan for {machine}{known}; not for this machine, and nothing is measured. A GPU has {format_size(gpu.memory_bytes)} as "
        f"drivers report them, and nominally {gpu.memory_bytes_s / 1e12:.3g} TB/s; {taken}."
    )


def format_no_fit_lines(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return that whole models do not fit, a line for each model, with the layers that points hold; empty if all are held."""
    held: dict[tuple[str, str], list[int]] = {}
    for r in rows:
        if not r["reason"] and r["layers"] and int(str(r["layers_held"])) < int(str(r["layers"])):
            held.setdefault((str(r["model"]), str(r["layers"])), []).append(int(str(r["layers_held"])))
    several = len({r["model"] for r in rows}) > 1
    return [
        format_capitalized(f"{format_no_fit(format_range(counts), layers)}{f' ({model})' if several else ''}.")
        for (model, layers), counts in held.items()
    ]


def make_candidates_table(rows: Sequence[dict[str, object]]) -> Table:
    """Return the table of --dry-run: the points that would run, with memory per rank, which is one GPU."""
    table = Table(title="Points, in running order", box=box.SIMPLE, title_justify="left")
    engines = list(dict.fromkeys(str(r["engine"]) for r in rows if r["engine_layout"]))
    translated = [f"{format_list([ENGINE_NAMES[name] for name in engines])} degrees"] if engines else []
    for name in ("model", "layout", *translated, "attention"):
        table.add_column(name, no_wrap=name != "attention")
    served = any(r["workload"] == "serve" for r in rows)
    table.add_column(
        "load" if served else "requests × tokens", justify="left" if served else "right", no_wrap=not served
    )
    for name in ("KV pool/rank", "weights/rank", "layers held"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        if r["reason"]:
            continue
        table.add_row(
            str(r["model"]),
            " ".join(filter(None, (str(r["layout"]), str(r["ep_text"]), "+" if r["added"] else ""))),
            *([str(r["engine_layout"] or "")] if engines else []),
            str(r["path"]),
            str(r["load_text"]),
            _format_size(r["kv_pool_bytes"]),
            _format_size(r["weights_held_bytes"]),
            f"{r['layers_held']} of {r['layers']}" if r["layers"] else "",
        )
    if any(r["added"] for r in rows):
        table.caption = "+ baseline, added by default; --no-baseline leaves it out"
        table.caption_justify = "left"
    return table


def format_rejected(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return the points that cannot run, each with its reason: `tp4, tp8 at 8 × 4,000, 64 × 4,000: …`; a layout is
    named once.
    """
    several = len({r["model"] for r in rows}) > 1
    reasons: dict[str, dict[tuple[str, str], dict[str, None]]] = {}
    for r in rows:
        if r["reason"]:
            who = (f"{r['model']} " if several else "", str(r["layout"]))
            reason = str(r["reason"]).removeprefix(f"{r['layout']}: ")
            reasons.setdefault(reason, {}).setdefault(who, {})[str(r["load_text"])] = None
    lines = []
    for reason, found in reasons.items():
        same: dict[tuple[str, str], list[str]] = {}
        for (model, layout), loads in found.items():
            same.setdefault((model, format_list(list(loads))), []).append(layout)
        points = "; ".join(f"{model}{format_list(layouts)} at {loads}" for (model, loads), layouts in same.items())
        lines.append(f"{points}: {reason}")
    return lines


def make_checks_table(checks: Sequence[jobs.Check]) -> Table:
    """Return the table of `verify`: every comparison with its error and its limit."""
    table = Table(title="Checks", box=box.SIMPLE, title_justify="left")
    for name in ("check", "layout", "attention", "dtype"):
        table.add_column(name, no_wrap=name != "attention")
    for name in ("error", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("", "detail"):
        table.add_column(name)
    for c in checks:
        verdict = Text("ok", "green") if c.ok else Text("WRONG", "red bold")
        table.add_row(
            c.name,
            f"{c.layout}·ep{c.ep}" if c.ep else c.layout,
            " ".join(format_changed_values(select_point_axes(Role.PATH, but=Role.ENGINE), msgspec.structs.asdict(c))),
            c.dtype,
            "not finite" if c.error is None else f"{c.error:.2g}",
            "not finite" if c.limit is None else f"{c.limit:.2g}",
            verdict,
            Text(c.detail),
        )
    return table


def make_probe_table(probe: Probe) -> Table:
    """Return the table of a machine: the device and the packages."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("device", f"{probe.count} × {probe.name}" if probe.count else probe.name)
    if probe.memory_bytes:
        table.add_row(
            "memory", f"{_format_size(probe.memory_bytes)} each" if probe.count else _format_size(probe.memory_bytes)
        )
    if probe.l2_bytes:
        table.add_row("L2 cache", f"{probe.l2_bytes / (1 << 20):.0f} MiB")
    if probe.capability:
        table.add_row("compute capability", probe.capability)
    for name, version in probe.packages.items():
        table.add_row(name, version or Text("missing", "yellow"))
    return table


def _format_size(value: object) -> str:
    return format_size(value) if isinstance(value, int | float) else ""
