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

from dcpbench.bench.bench_record import BenchJob, BenchRecord, BenchSettings, Event, Result
from dcpbench.bench.cases import CASES, BenchOptions
from dcpbench.errors import CapacityError, ExitCode, OutputError, UsageError, WorkerError
from dcpbench.launch import folders, launcher, version_check
from dcpbench.launch.jobs import Exit, Progress, format_exit_code
from dcpbench.launch.progress import ProgressBar
from dcpbench.launch.ranks import Started
from dcpbench.launch.stopping import print_when_stopped
from dcpbench.plan.command_line import get_typed_command
from dcpbench.plan.option_parsers import check_seconds
from dcpbench.plan.spec import select_device
from dcpbench.records.disks import convert_output_errors
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import make_console, print_stderr
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from dcpbench.points.device_probe import Probe

WORKER = "dcpbench.bench.bench_worker"
CPU_RANKS = 2
CPU_NOTE = "CPU: correctness only; a time taken here would say nothing about performance."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options common to all benches."""

    seconds: float = BenchSettings().seconds
    timeout: float = 300.0
    device: str = "auto"
    output: Path | None = None
    force: bool = False
    as_json: bool = False

    def make_settings(self) -> BenchSettings:
        """Return the settings. Raise UsageError for invalid times."""
        check_seconds("--seconds", self.seconds, 1)
        check_seconds("--timeout", self.timeout, 300)
        return BenchSettings(seconds=self.seconds)


def run_bench(bench: str, sizes: Mapping[str, Any], options: Options) -> int:
    """Run a bench and return the exit code: 0, 1 with a wrong result, 4 with a failed case.

    Args:
        bench: Its name in cases.CASES.
        sizes: Options that determine the cases; with `ranks` for a bench of communication between ranks.
        options: Common options.
    """
    settings, sizes = options.make_settings(), dict(sizes)
    between_ranks, requested_ranks = "ranks" in sizes, sizes.pop("ranks", None)
    if requested_ranks is not None and requested_ranks < CPU_RANKS:
        raise UsageError(
            f"--ranks {requested_ranks}: one rank has no peer to exchange data with; try --ranks {CPU_RANKS}."
        )
    # Bad options are refused before the machine is probed, which takes seconds.
    CASES[bench](BenchOptions(cpu=True, ranks=requested_ranks or CPU_RANKS, typed=sizes))
    paths = _prepare_outputs(bench, options)
    probe = _select_device(bench, options.device)
    ranks = _choose_rank_count(bench, probe, requested_ranks) if between_ranks else 1
    job = BenchJob(
        bench=bench,
        device=probe.device,
        ranks=ranks,
        cases=CASES[bench](BenchOptions(cpu=probe.device == "cpu", ranks=ranks, typed=sizes)),
        settings=settings,
        command=get_typed_command(),
        package=version_check.get_started_package(),
    )
    if job.device == "cpu":
        print_stderr(CPU_NOTE)
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    begin = time.monotonic()
    record = BenchRecord(
        bench=bench, performance=job.device != "cpu", ranks=ranks, settings=job.settings, started_at=started
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # of ranks that are just being ended
        folder = Path(name)
        with print_when_stopped("Interrupted; the worker has ended and nothing was written."):
            problem = _run_job(job, folder, record, options.timeout)
        if paths:
            (paths[0].with_suffix(".log")).write_bytes(_read_logs(folder))
    record.seconds = round(time.monotonic() - begin, 3)
    if record.environment is None:
        raise WorkerError(f"the bench's worker ended before its first case. {problem}")
    return _finish_run(record, paths, problem, options)


def _run_job(job: BenchJob, folder: Path, record: BenchRecord, timeout: float) -> str:
    """Run the job's ranks and fill the record; return why they ended early, or an empty string."""
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    record.results = [
        Result(case=case, outcome="failed", reason="not reached: the worker ended before") for case in job.cases
    ]
    names = {str(index): case.name() for index, case in enumerate(job.cases)}
    watchdog, seen, shown_reasons = launcher.Watchdog(), set[str](), set[str]()
    with (
        ProgressBar(names, make_console(error=True), "cases") as bar,
        Started(folder, folder / "events.jsonl", job.ranks, WORKER, job.device) as ranks,
    ):
        while True:
            ended = ranks.has_ended()
            for line in ranks.event_tail.read_lines():
                event = msgspec.json.decode(line, type=Event)
                watchdog.record_activity()
                seen.add(event.stage)
                _add_event(event, record)
                bar(_make_progress(event, shown_reasons))
            if ended or watchdog.is_past_grace(lambda: bool(_find_early_exits(ranks, seen))):
                break
            limit = timeout if "case" in seen else max(timeout, launcher.MIN_STAGE_LIMIT_S)
            if watchdog.is_silent(limit):
                ranks.collect_stacks()  # into their logs
                return f"It hung: nothing was heard for {limit:g} s (--timeout).{_get_last_lines(ranks, [])}"
            time.sleep(launcher.POLL_S)
        gone = _find_early_exits(ranks, seen)
        if not gone and "end" not in seen:
            return f"Its processes were ended by another one.{_get_last_lines(ranks, [])}"
        who = "Rank {}" if job.ranks > 1 else "It"
        dead = [f"{who.format(e.rank)} {format_exit_code(e.code)}." for e in sorted(gone, key=lambda e: e.rank)]
        return f"{' '.join(dead)}{_get_last_lines(ranks, [e.rank for e in gone])}" if dead else ""


def _find_early_exits(ranks: Started, seen: Container[str]) -> list[Exit]:
    """Return the ranks that ended out of turn, earliest first; exit code 0 is only valid after all work is done."""
    return [e for e in ranks.read_exits() if e.code or "end" not in seen]


def _add_event(event: Event, record: BenchRecord) -> None:
    """Add an event to the record."""
    if event.environment:
        record.environment = event.environment
    if event.stage == "limits":
        record.limits, record.unmeasured = event.limits, event.unmeasured
    if event.result:
        record.results[event.index] = event.result


def _make_progress(event: Event, shown_reasons: set[str]) -> Progress:
    """Return an event in the form of the progress bar; a reason is shown once, and added to `shown_reasons`."""
    key = str(event.index) if event.stage in ("case", "done") else ""
    note, r = "", event.result
    if r and event.stage == "done":
        note = r.reason or r.difference or (f"{r.time.median_us:.3g} µs" if r.time else "correct")
        if r.reason in shown_reasons:
            note = "failed, as before"
        elif r.reason:
            shown_reasons.add(r.reason)
    return Progress(stage=event.stage, key=key, note=note)


def _get_last_lines(ranks: Started, first: list[int]) -> str:
    """Return the last lines of the first of these ranks, else of any, that has output."""
    log, lines = ranks.read_last_lines(first)
    of = f" of {Path(log).stem.replace('-', ' ')}" if len(ranks.ranks) > 1 else ""
    return "\n".join([f" The last lines{of}:", *lines]) if lines else ""


def _read_logs(folder: Path) -> bytes:
    """Return the logs of all ranks, one after the other."""
    parts = []
    for path in sorted(folder.glob("rank-*.log")):
        parts += [f"{path.name}:\n".encode(), path.read_bytes(), b"\n"]
    return b"".join(parts)


def _select_device(bench: str, device: str) -> Probe:
    """Return the machine's hardware restricted to --device. Raise CapacityError if there is no such device."""
    probe = launcher.run_probe()
    if device == "cuda" and probe.device != "cuda":
        raise CapacityError(
            f"--device cuda, but no GPU is visible; `dcpbench doctor` says why. Without one, type {_suggest_cpu(bench)}."
        )
    return select_device(probe, device)


def _choose_rank_count(bench: str, probe: Probe, ranks: int | None) -> int:
    """Return the number of ranks. Raise CapacityError if there are too few GPUs."""
    if probe.device == "cpu":
        return ranks or CPU_RANKS
    wanted = ranks or max(probe.count, CPU_RANKS)
    if wanted > probe.count:
        alone = f"with one alone, type {_suggest_cpu(bench)}"
        fewer = f"type --ranks {probe.count}" if probe.count >= CPU_RANKS else alone
        raise CapacityError(f"{wanted} ranks need {wanted} GPUs, but {probe.count} visible; {fewer}.")
    return wanted


def _suggest_cpu(bench: str) -> str:
    return f"`dcpbench bench {bench} --device cpu`, which checks correctness"


def _prepare_outputs(bench: str, options: Options) -> list[Path]:
    """Return the JSON and PNG files to write, none without -o. Raise OutputError if they exist already."""
    if options.output is None:
        return []
    paths = [options.output / f"bench-{bench}.{kind}" for kind in ("json", "png")]
    there = [str(p) for p in paths if p.exists()]
    if there and not options.force:
        raise OutputError(f"{' and '.join(there)} would be written over; add --force, or give another folder with -o.")
    folders.make_folder(options.output)
    return paths


def _finish_run(record: BenchRecord, paths: list[Path], problem: str, options: Options) -> int:
    from dcpbench.bench.shown.bench_findings import describe_findings

    record.findings = describe_findings(record)
    if paths:
        _write_outputs(record, paths)
    if options.as_json:
        write_json(msgspec.json.format(_encode_without_samples(record), indent=2).decode() + "\n")
    else:
        _print_record(record)
    for path in (p for p in paths if p.exists()):
        print(f"Wrote {path}", file=sys.stderr if options.as_json else sys.stdout)
    failed = [r for r in record.results if r.outcome != "ok"]
    if problem or failed:
        print_stderr(f"{len(failed)} of {format_count(len(record.results), 'case')} failed. {problem}".strip())
    if any(r.correct is False for r in record.results):
        return ExitCode.WRONG
    return ExitCode.FAILED if problem or failed else 0


def _write_outputs(record: BenchRecord, paths: list[Path]) -> None:
    from dcpbench.bench.shown.pictures import write_picture

    data, picture = paths
    with convert_output_errors(data.parent, "give another folder with -o"):
        data.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        if any(r.outcome == "ok" for r in record.results):
            write_picture(record, picture)


def _print_record(record: BenchRecord) -> None:
    from dcpbench.bench.shown.bench_findings import format_warnings
    from dcpbench.bench.shown.bench_table import format_legend, make_table

    terminal = make_console()
    terminal.print(make_table(record, terminal.width))
    for line in [*format_legend(record, terminal.width), *format_warnings(record.results)]:
        terminal.print(line, soft_wrap=True, style="dim")
    for line in record.findings:
        terminal.print(f"• {line}", soft_wrap=True)


def _encode_without_samples(record: BenchRecord) -> bytes:
    def remove_samples(value: object) -> object:
        if isinstance(value, dict):
            return {k: remove_samples(v) for k, v in value.items() if k != "samples_us"}
        return [remove_samples(v) for v in value] if isinstance(value, list) else value

    return msgspec.json.encode(remove_samples(msgspec.to_builtins(record)))
