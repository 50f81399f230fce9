"""Run `dcpbench bench …`: start a worker for the cases, follow it, print and write the results. No torch."""

from __future__ import annotations

import dataclasses
import datetime as dt
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.bench.cases import CASES, Asked
from dcpbench.bench.record import BenchJob, BenchRecord, BenchSettings, Event, Result
from dcpbench.errors import CapacityError, ExitCode, OutputError, UsageError, WorkerError
from dcpbench.launch import folders, launcher, package
from dcpbench.launch.jobs import Exit, Progress, code_words
from dcpbench.launch.progress import ProgressBar
from dcpbench.launch.ranks import Started
from dcpbench.launch.stopping import said_when_stopped
from dcpbench.plan.options import check_seconds
from dcpbench.plan.spec import effective
from dcpbench.plan.typed import typed_command
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import console, say
from dcpbench.show.text import counted

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from dcpbench.points.machine import Probe

WORKER = "dcpbench.bench.worker"
LONGEST_BACKLOG_US = 100_000
CPU_RANKS = 2
CPU_NOTE = (
    "CPU: correctness and synchronisations (dry run) only; a time taken here would say nothing about performance."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options common to all benches."""

    seconds: float = BenchSettings().seconds
    backlog: float = BenchSettings().backlog_us
    timeout: float = 300.0
    device: str = "auto"
    output: Path | None = None
    force: bool = False
    as_json: bool = False

    def settings(self) -> BenchSettings:
        """Return the settings. Raise UsageError for invalid times."""
        check_seconds("--seconds", self.seconds, 1)
        check_seconds("--timeout", self.timeout, 300)
        if not 0 < self.backlog <= LONGEST_BACKLOG_US:
            raise UsageError(f"--backlog {self.backlog:g}: must be 1 to {LONGEST_BACKLOG_US:,} µs; try --backlog 100.")
        return BenchSettings(seconds=self.seconds, backlog_us=self.backlog)


def run(bench: str, sizes: Mapping[str, Any], asked: Options) -> int:
    """Run a bench and return the exit code: 0, 1 with a wrong result, 4 with a failed case.

    Args:
        bench: Its name in cases.CASES.
        sizes: Options that determine the cases; with `ranks` for a bench of communication between ranks.
        asked: Common options.
    """
    settings, sizes = asked.settings(), dict(sizes)
    between_ranks, asked_ranks = "ranks" in sizes, sizes.pop("ranks", None)
    if asked_ranks is not None and asked_ranks < CPU_RANKS:
        raise UsageError(
            f"--ranks {asked_ranks}: one rank has nobody to exchange anything with; try --ranks {CPU_RANKS}."
        )
    # Bad options are refused before the machine is probed, which takes seconds.
    CASES[bench](Asked(cpu=True, ranks=asked_ranks or CPU_RANKS, typed=sizes))
    paths = _prepare(bench, asked)
    probe = _where(bench, asked.device)
    ranks = _ranks(bench, probe, asked_ranks) if between_ranks else 1
    job = BenchJob(
        bench=bench,
        device=probe.device,
        ranks=ranks,
        cases=CASES[bench](Asked(cpu=probe.device == "cpu", ranks=ranks, typed=sizes)),
        settings=settings,
        command=typed_command(),
        package=package.started(),
    )
    if job.device == "cpu":
        say(CPU_NOTE)
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    begin = time.monotonic()
    record = BenchRecord(
        bench=bench, performance=job.device != "cpu", ranks=ranks, settings=job.settings, started_at=started
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # of ranks that are just being ended
        folder = Path(name)
        with said_when_stopped("Interrupted; the worker has ended and nothing was written."):
            problem = _follow(job, folder, record, asked.timeout)
        if paths:
            (paths[0].with_suffix(".log")).write_bytes(_logs(folder))
    record.seconds = round(time.monotonic() - begin, 3)
    if record.environment is None:
        raise WorkerError(f"the bench's worker ended before its first case. {problem}")
    return _finish(record, paths, problem, asked)


def _follow(job: BenchJob, folder: Path, record: BenchRecord, timeout: float) -> str:
    """Run the job's ranks and fill the record; return why they ended early, or an empty string."""
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    record.results = [
        Result(case=case, outcome="failed", reason="not reached: the worker ended before") for case in job.cases
    ]
    names = {str(index): case.name() for index, case in enumerate(job.cases)}
    watchdog, seen, told = launcher.Watchdog(), set[str](), set[str]()
    with (
        ProgressBar(names, console(error=True), "cases") as bar,
        Started(folder, folder / "events.jsonl", job.ranks, WORKER, job.device) as ranks,
    ):
        while True:
            ended = ranks.ended()
            for line in ranks.told.lines():
                event = msgspec.json.decode(line, type=Event)
                watchdog.hear()
                seen.add(event.stage)
                _take(event, record)
                bar(_shown(event, told))
            if ended or watchdog.past_grace(lambda: bool(_gone(ranks, seen))):
                break
            limit = timeout if "case" in seen else max(timeout, launcher.PATIENCE_S)
            if watchdog.silent(limit):
                ranks.stacks()  # into their logs
                return f"It hung: nothing was heard for {limit:g} s (--timeout).{_last_words(ranks, [])}"
            time.sleep(launcher.POLL_S)
        gone = _gone(ranks, seen)
        if not gone and "end" not in seen:
            return f"Its processes were ended by another one.{_last_words(ranks, [])}"
        who = "Rank {}" if job.ranks > 1 else "It"
        dead = [f"{who.format(e.rank)} {code_words(e.code)}." for e in sorted(gone, key=lambda e: e.rank)]
        return f"{' '.join(dead)}{_last_words(ranks, [e.rank for e in gone])}" if dead else ""


def _gone(ranks: Started, seen: Container[str]) -> list[Exit]:
    """Return the ranks that ended out of turn, earliest first; exit code 0 is only valid after all work is done."""
    return [e for e in ranks.exits() if e.code or "end" not in seen]


def _take(event: Event, record: BenchRecord) -> None:
    """Add an event to the record."""
    if event.environment:
        record.environment = event.environment
    if event.stage == "limits":
        record.limits, record.without = event.limits, event.without
    if event.result:
        record.results[event.index] = event.result
    for name, value in (("syncs", event.syncs), ("graph", event.graph)):
        if value is not None:
            record.results[event.index] = msgspec.structs.replace(record.results[event.index], **{name: value})


def _shown(event: Event, told: set[str]) -> Progress:
    """Return an event in the form of the progress bar; a reason is shown once, and added to `told`."""
    key = str(event.index) if event.stage in ("case", "done", "counted", "graph") else ""
    note, r = "", event.result
    if r and event.stage == "done":
        note = r.reason or r.difference or (f"{r.time.median_us:.3g} µs" if r.time else "correct")
        if r.reason in told:
            note = "failed, as before"
        elif r.reason:
            told.add(r.reason)
    return Progress(stage=event.stage, key=key, note=note)


def _last_words(ranks: Started, first: list[int]) -> str:
    """Return the last lines of the first of these ranks, else of any, that has output."""
    log, lines = ranks.last_words(first)
    of = f" of {Path(log).stem.replace('-', ' ')}" if len(ranks.ranks) > 1 else ""
    return "\n".join([f" The last lines{of}:", *lines]) if lines else ""


def _logs(folder: Path) -> bytes:
    """Return the logs of all ranks, one after the other."""
    parts = []
    for path in sorted(folder.glob("rank-*.log")):
        parts += [f"{path.name}:\n".encode(), path.read_bytes(), b"\n"]
    return b"".join(parts)


def _where(bench: str, device: str) -> Probe:
    """Return the machine's hardware restricted to --device. Raise CapacityError if there is no such device."""
    probe = launcher.probe()
    if device == "cuda" and probe.device != "cuda":
        raise CapacityError(
            f"--device cuda, but no GPU is visible; `dcpbench env` says why. Without one, type {_on_cpu(bench)} and "
            "counts synchronisations."
        )
    return effective(probe, device)


def _ranks(bench: str, probe: Probe, asked: int | None) -> int:
    """Return the number of ranks. Raise CapacityError if there are too few GPUs."""
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
    """Return the JSON and PNG files to write, none without -o. Raise OutputError if they exist already."""
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
        say(f"{len(failed)} of {counted(len(record.results), 'case')} failed. {problem}".strip())
    if any(r.correct is False for r in record.results):
        return ExitCode.WRONG
    return ExitCode.FAILED if problem or failed else 0


def _write(record: BenchRecord, paths: list[Path]) -> None:
    from dcpbench.bench.shown.pictures import write_picture

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
