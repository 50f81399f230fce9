"""What `dcpbench bench …` does: has a worker run the cases, follows it, prints and writes what it found. No torch."""

from __future__ import annotations

import dataclasses
import datetime as dt
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from dcpbench.bench import processes
from dcpbench.bench.cases import Machine
from dcpbench.bench.record import BenchJob, BenchRecord, BenchSettings, Event
from dcpbench.errors import CapacityError, OutputError, UsageError, WorkerError
from dcpbench.launch import folders, launcher
from dcpbench.plan.options import check_seconds
from dcpbench.plan.spec import effective
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import console, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.bench.record import Case
    from dcpbench.points.machine import Probe

WORKER = "dcpbench.bench.worker"
LONGEST_BACKLOG_US = 100_000
WRONG, SOME_FAILED = 1, 4
CPU_RANKS = 2
CPU_NOTE = (
    "CPU: correctness and synchronisations (dry run) only; a time taken here would say nothing about performance."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What all benches share."""

    device: str = "auto"
    settings: BenchSettings = BenchSettings()  # noqa: RUF009 -- frozen
    timeout: float = 300.0
    output: Path | None = None
    force: bool = False
    as_json: bool = False
    between_ranks: bool = False
    """Whether it is a bench of what ranks send to each other."""
    ranks: int | None = None
    """How many; None: all visible GPUs."""


def options(
    *,
    seconds: float,
    timeout: float,
    device: str,
    output: Path | None,
    force: bool,
    as_json: bool,
    backlog: float = BenchSettings().backlog_us,
    between_ranks: bool = False,
    ranks: int | None = None,
) -> Options:
    """Options as typed. Raises UsageError for times that cannot pass, and for ranks that have nobody to talk to."""
    check_seconds("--seconds", seconds, 1)
    check_seconds("--timeout", timeout, 300)
    if not 0 < backlog <= LONGEST_BACKLOG_US:
        raise UsageError(f"--backlog {backlog:g}: must be 1 to {LONGEST_BACKLOG_US:,} µs; try --backlog 100.")
    if ranks is not None and ranks < CPU_RANKS:
        raise UsageError(f"--ranks {ranks}: one rank has nobody to exchange anything with; try --ranks {CPU_RANKS}.")
    settings = BenchSettings(seconds=seconds, backlog_us=backlog)
    return Options(
        device=device,
        settings=settings,
        timeout=timeout,
        output=output,
        force=force,
        as_json=as_json,
        between_ranks=between_ranks,
        ranks=ranks,
    )


def run(bench: str, cases_on: Callable[[Machine], list[Case]], asked: Options) -> int:
    """Run a bench and return the exit code: 0, 1 with a wrong result, 4 with a failed case.

    Args:
        bench: Its name in bench_worker.BENCHES.
        cases_on: Gives the cases for a machine. Raises UsageError for bad options.
        asked: What all benches share.
    """
    # Bad options are refused before the machine is asked, which takes seconds.
    cases_on(Machine(cpu=True, ranks=asked.ranks or CPU_RANKS))
    paths = _prepare(bench, asked)
    device, ranks = _where(bench, asked)
    job = BenchJob(
        bench=bench,
        device=device,
        ranks=ranks,
        cases=cases_on(Machine(cpu=device == "cpu", ranks=ranks)),
        settings=asked.settings,
        command=shlex.join(["dcpbench", *sys.argv[1:]]),
    )
    if device == "cpu":
        say(CPU_NOTE)
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    begin = time.monotonic()
    record = BenchRecord(
        bench=bench, performance=device != "cpu", ranks=ranks, settings=job.settings, started_at=started
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with _Watch(job) as watch:
                problem = processes.follow(job, folder, record, worker=WORKER, timeout=asked.timeout, watch=watch)
        except KeyboardInterrupt:
            say("\nInterrupted; the worker has ended and nothing was written.")
            sys.exit(130)
        if paths:
            (paths[0].with_suffix(".log")).write_bytes(processes.logs(folder))
    record.seconds = round(time.monotonic() - begin, 3)
    if record.environment is None:
        raise WorkerError(f"the bench's worker ended before its first case. {problem}")
    return _finish(record, paths, problem, asked)


def _where(bench: str, asked: Options) -> tuple[str, int]:
    """(device, number of ranks). Raises CapacityError where there are not as many GPUs."""
    probe = launcher.probe()
    here = f"`dcpbench bench {bench} --device cpu`, which checks correctness"
    if asked.device == "cuda" and probe.device != "cuda":
        raise CapacityError(
            f"--device cuda, but no GPU is visible; `dcpbench env` says why. Without one, type {here} and counts "
            "synchronisations."
        )
    device = effective(probe, asked.device).device
    if not asked.between_ranks:
        return device, 1
    return device, asked.ranks or CPU_RANKS if device == "cpu" else _gpus(probe, asked.ranks, here)


def _gpus(probe: Probe, ranks: int | None, here: str) -> int:
    wanted = ranks or max(probe.count, CPU_RANKS)
    if wanted > probe.count:
        fewer = f"type --ranks {probe.count}" if probe.count >= CPU_RANKS else f"with one alone, type {here}"
        raise CapacityError(f"{wanted} ranks need {wanted} GPUs, but {probe.count} visible; {fewer}.")
    return wanted


def _prepare(bench: str, options: Options) -> list[Path]:
    """The JSON and PNG to write, none without -o. Raises OutputError where they are there already."""
    if options.output is None:
        return []
    paths = [options.output / f"bench-{bench}.{kind}" for kind in ("json", "png")]
    there = [str(p) for p in paths if p.exists()]
    if there and not options.force:
        raise OutputError(f"{' and '.join(there)} would be written over; add --force, or give another folder with -o.")
    folders.make_folder(options.output)
    return paths


def _finish(record: BenchRecord, paths: list[Path], problem: str, options: Options) -> int:
    from dcpbench.bench.shown.findings import findings

    record.findings = findings(record)
    if paths:
        _write(record, paths)
    if options.as_json:
        write_json(msgspec.json.format(_without_samples(record), indent=2).decode() + "\n")
    else:
        _print(record)
    for path in (p for p in paths if p.exists()):
        print(f"Wrote {path}", file=sys.stderr if options.as_json else sys.stdout)
    failed = [r for r in record.results if r.outcome != "ok"]
    if problem or failed:
        say(f"{len(failed)} of {len(record.results)} cases failed. {problem}".strip())
    if any(r.correct is False for r in record.results):
        return WRONG
    return SOME_FAILED if problem or failed else 0


def _write(record: BenchRecord, paths: list[Path]) -> None:
    from dcpbench.bench.shown.picture import write_picture

    data, picture = paths
    try:
        data.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        if any(r.outcome == "ok" for r in record.results):
            write_picture(record, picture)
    except OSError as e:
        raise OutputError(f"cannot write into {data.parent}: {e}; give another folder with -o.") from e


def _print(record: BenchRecord) -> None:
    from dcpbench.bench.shown.findings import mark_notes
    from dcpbench.bench.shown.table import legend, table

    terminal = console()
    terminal.print(table(record, terminal.width))
    for line in [*legend(record, terminal.width), *mark_notes(record.results)]:
        terminal.print(line, soft_wrap=True, style="dim")
    for line in record.findings:
        terminal.print(f"• {line}", soft_wrap=True)


def _without_samples(record: BenchRecord) -> bytes:
    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k != "samples_us"}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return msgspec.json.encode(strip(msgspec.to_builtins(record)))


class _Watch:
    """Progress: a bar on a terminal, a line for each timed case elsewhere."""

    def __init__(self, job: BenchJob) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._job, terminal = job, console(error=True)
        self._bar: Progress | None = None
        if terminal.is_terminal:
            self._bar = Progress(
                BarColumn(30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=terminal,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=len(job.cases))

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        name = self._job.cases[event.index].name() if event.stage in ("case", "done", "counted", "graph") else ""
        if self._bar:
            self._bar.update(self._task, description=name, advance=event.stage == "done")
        elif event.stage == "done" and event.result:
            r = event.result
            note = r.reason or r.difference or (f"{r.time.median_us:.3g} µs" if r.time else "correct")
            say(f"[{event.index + 1}/{len(self._job.cases)}] {name}  {note}")
