"""What `dcpbench bench …` does: has a worker run the cases, follows it, prints and writes what it found. No torch."""

from __future__ import annotations

import dataclasses
import datetime as dt
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dcpbench.bench import processes
from dcpbench.bench.cases import CASES, Machine
from dcpbench.bench.record import BenchJob, BenchRecord, BenchSettings, Event
from dcpbench.errors import CapacityError, OutputError, UsageError, WorkerError
from dcpbench.launch import folders, launcher
from dcpbench.plan.options import check_seconds
from dcpbench.plan.spec import effective
from dcpbench.show.streams import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from dcpbench.points.machine import Probe

WORKER = "dcpbench.bench.worker"
PLAIN_WIDTH = 160
"""Columns of a table in a file or a pipe."""
LONGEST_BACKLOG_US = 100_000
WRONG, SOME_FAILED = 1, 4
CPU_RANKS = 2
CPU_NOTE = (
    "CPU: correctness and synchronisations (dry run) only; a time taken here would say nothing about performance."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How every bench is run, as typed."""

    seconds: float = BenchSettings().seconds
    backlog: float = BenchSettings().backlog_us
    timeout: float = 300.0
    device: str = "auto"
    output: Path | None = None
    force: bool = False
    as_json: bool = False

    def settings(self) -> BenchSettings:
        """Raises UsageError for times that cannot pass."""
        check_seconds("--seconds", self.seconds, 1)
        check_seconds("--timeout", self.timeout, 300)
        if not 0 < self.backlog <= LONGEST_BACKLOG_US:
            raise UsageError(f"--backlog {self.backlog:g}: must be 1 to {LONGEST_BACKLOG_US:,} µs; try --backlog 100.")
        return BenchSettings(seconds=self.seconds, backlog_us=self.backlog)


def run(bench: str, sizes: Mapping[str, Any], asked: Options) -> int:
    """Run a bench and return the exit code: 0, 1 with a wrong result, 4 with a failed case.

    Args:
        bench: Its name in cases.CASES.
        sizes: What its cases are made of, as typed; with `ranks` for a bench of what ranks send to each other.
        asked: How it is run.
    """
    settings, sizes = asked.settings(), dict(sizes)
    between_ranks, asked_ranks = "ranks" in sizes, sizes.pop("ranks", None)
    if asked_ranks is not None and asked_ranks < CPU_RANKS:
        raise UsageError(
            f"--ranks {asked_ranks}: one rank has nobody to exchange anything with; try --ranks {CPU_RANKS}."
        )
    # Bad options are refused before the machine is asked, which takes seconds.
    CASES[bench](Machine(cpu=True, ranks=asked_ranks or CPU_RANKS), **sizes)
    paths = _prepare(bench, asked)
    probe = _where(bench, asked.device)
    ranks = _ranks(bench, probe, asked_ranks) if between_ranks else 1
    job = BenchJob(
        bench=bench,
        device=probe.device,
        ranks=ranks,
        cases=CASES[bench](Machine(cpu=probe.device == "cpu", ranks=ranks), **sizes),
        settings=settings,
        command=shlex.join(["dcpbench", *sys.argv[1:]]),
    )
    if job.device == "cpu":
        _say(CPU_NOTE)
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    begin = time.monotonic()
    record = BenchRecord(
        bench=bench, performance=job.device != "cpu", ranks=ranks, settings=job.settings, started_at=started
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with _Watch(job) as watch:
                problem = processes.follow(job, folder, record, worker=WORKER, timeout=asked.timeout, watch=watch)
        except KeyboardInterrupt:
            _say("\nInterrupted; the worker has ended and nothing was written.")
            sys.exit(130)
        if paths:
            (paths[0].with_suffix(".log")).write_bytes(processes.logs(folder))
    record.seconds = round(time.monotonic() - begin, 3)
    if record.environment is None:
        raise WorkerError(f"the bench's worker ended before its first case. {problem}")
    return _finish(record, paths, problem, asked)


def _where(bench: str, device: str) -> Probe:
    """The machine as --device wants it seen. Raises CapacityError where there is no such device."""
    probe = launcher.probe()
    if device == "cuda" and probe.device != "cuda":
        raise CapacityError(
            f"--device cuda, but no GPU is visible; `dcpbench env` says why. Without one, type {_on_cpu(bench)} and "
            "counts synchronisations."
        )
    return effective(probe, device)


def _ranks(bench: str, probe: Probe, asked: int | None) -> int:
    """How many ranks take part. Raises CapacityError where there are not as many GPUs."""
    if probe.device == "cpu":
        return asked or CPU_RANKS
    wanted = asked or max(probe.count, CPU_RANKS)
    if wanted > probe.count:
        alone = f"with one alone, type {_on_cpu(bench)}"
        fewer = f"type --ranks {probe.count}" if probe.count >= CPU_RANKS else alone
        raise CapacityError(f"{wanted} ranks need {wanted} GPUs, but {probe.count} visible; {fewer}.")
    return wanted


def _on_cpu(bench: str) -> str:
    return f"`dcpbench bench {bench} --device cpu`, which checks correctness"


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
        _say(f"{len(failed)} of {len(record.results)} cases failed. {problem}".strip())
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
    from dcpbench.bench.shown.findings import marks_told
    from dcpbench.bench.shown.table import legend, table

    console = _console()
    console.print(table(record, console.width))
    for line in [*legend(record, console.width), *marks_told(record.results)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True, style="dim")
    for line in record.findings:
        console.print(f"• {line}", markup=False, highlight=False, soft_wrap=True)


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

        self._job, console = job, _console(error=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=console,
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
            _say(f"[{event.index + 1}/{len(self._job.cases)}] {name}  {note}")


def _console(*, error: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=error)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
