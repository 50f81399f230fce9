"""What `dcpbench bench …` does: has a worker run the cases, follows it, prints and writes what it found. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from dcpbench import folders, launch
from dcpbench.bench_records import BenchJob, BenchRecord, BenchSettings, Event, Result
from dcpbench.errors import CapacityError, OutputError, UsageError, WorkerError
from dcpbench.spec import check_seconds, effective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from dcpbench.bench_records import Case

WORKER = "dcpbench.bench_worker"
PLAIN_WIDTH = 160
"""Columns of a table in a file or a pipe."""
POLL_S = 0.05
LOG_LINES = 15
LONGEST_BACKLOG_US = 100_000
WRONG, SOME_FAILED = 1, 4
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


def options(
    *,
    seconds: float,
    backlog: float,
    timeout: float,
    device: str,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> Options:
    """Options as typed. Raises UsageError for times that cannot pass."""
    check_seconds("--seconds", seconds, 1)
    check_seconds("--timeout", timeout, 300)
    if not 0 < backlog <= LONGEST_BACKLOG_US:
        raise UsageError(f"--backlog {backlog:g}: must be 1 to {LONGEST_BACKLOG_US:,} µs; try --backlog 100.")
    settings = BenchSettings(seconds=seconds, backlog_us=backlog)
    return Options(device=device, settings=settings, timeout=timeout, output=output, force=force, as_json=as_json)


def run(bench: str, cases_on: Callable[[bool], list[Case]], asked: Options) -> int:
    """Run a bench and return the exit code: 0, 1 with a wrong result, 4 with a failed case.

    Args:
        bench: Its name in bench_worker.WORKLOADS.
        cases_on: Gives the cases, by whether this is a machine without a GPU. Raises UsageError for bad asked.
        asked: What all benches share.
    """
    cases_on(True)  # bad options are refused before the machine is asked, which takes seconds  # noqa: FBT003
    paths = _prepare(bench, asked)
    device = _device(asked.device, bench)
    job = BenchJob(
        bench=bench, device=device, cases=cases_on(device == "cpu"), settings=asked.settings,
        command=shlex.join(["dcpbench", *sys.argv[1:]]),
    )  # fmt: skip
    if device == "cpu":
        _say(CPU_NOTE)
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    begin = time.monotonic()
    record = BenchRecord(bench=bench, performance=device != "cpu", settings=job.settings, started_at=started)
    with tempfile.TemporaryDirectory() as folder:
        problem = _work(job, Path(folder), record, asked.timeout)
        if paths:
            (paths[0].with_suffix(".log")).write_bytes((Path(folder) / "worker.log").read_bytes())
    record.seconds = round(time.monotonic() - begin, 3)
    if record.environment is None:
        raise WorkerError(f"the bench's worker ended before its first case. {problem}")
    return _finish(record, paths, problem, asked)


def _device(asked: str, bench: str) -> str:
    probe = launch.probe()
    if asked == "cuda" and probe.device != "cuda":
        raise CapacityError(
            "--device cuda, but no GPU is visible; `dcpbench env` says why. Without one, type "
            f"`dcpbench bench {bench} --device cpu`, which checks correctness and counts synchronisations."
        )
    return effective(probe, asked).device


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


def _work(job: BenchJob, folder: Path, record: BenchRecord, timeout: float) -> str:
    """Run the worker and fill the record; returns why it ended early, empty where it did not."""
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    record.results = [
        Result(case=case, outcome="failed", reason="not reached: the worker ended before") for case in job.cases
    ]
    with _worker(job, folder) as worker, _Watch(job) as watch:
        heard, read = time.monotonic(), 0
        while True:
            over = worker.poll() is not None
            events, read = _events(folder / "events.jsonl", read)
            for event in events:
                heard = time.monotonic()
                _take(event, record)
                watch(event)
            if over:
                break
            if time.monotonic() - heard > timeout:
                worker.send_signal(signal.SIGUSR1)  # it writes its stacks
                time.sleep(1)
                return f"It hung: nothing was heard for {timeout:g} s (--timeout).{_tail(folder)}"
            time.sleep(POLL_S)
        return "" if worker.returncode == 0 else f"It ended with exit code {worker.returncode}.{_tail(folder)}"


@contextlib.contextmanager
def _worker(job: BenchJob, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The worker's process, which ends with this block, however that is left; SIGTERM and SIGHUP leave it, too."""
    env = dict(os.environ) | ({"TRITON_INTERPRET": "1"} if job.device == "cpu" else {})
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: sys.exit(128 + n)) for number in signals}
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(folder)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield worker
    except KeyboardInterrupt:
        _say("\nInterrupted; the worker has ended and nothing was written.")
        sys.exit(130)
    finally:
        worker.kill()
        worker.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _events(path: Path, begin: int) -> tuple[list[Event], int]:
    """Events from byte `begin` on, and where they end; a line still being written waits for the next look."""
    if not path.exists():
        return [], begin
    with path.open("rb") as f:
        f.seek(begin)
        whole = f.read().rpartition(b"\n")[0]
    lines = whole.split(b"\n") if whole else []
    return [msgspec.json.decode(line, type=Event) for line in lines], begin + (len(whole) + 1 if whole else 0)


def _take(event: Event, record: BenchRecord) -> None:
    """Put what an event says into the record."""
    if event.environment:
        record.environment = event.environment
    if event.result:
        record.results[event.index] = event.result
    for name, value in (("syncs", event.syncs), ("graph", event.graph)):
        if value is not None:
            record.results[event.index] = msgspec.structs.replace(record.results[event.index], **{name: value})


def _finish(record: BenchRecord, paths: list[Path], problem: str, options: Options) -> int:
    from dcpbench.reports.bench_findings import findings

    record.findings = findings(record)
    if paths:
        _write(record, paths)
    if options.as_json:
        sys.stdout.write(msgspec.json.format(_without_samples(record), indent=2).decode() + "\n")
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
    from dcpbench.reports.bench_picture import write_picture

    data, picture = paths
    try:
        data.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        if any(r.outcome == "ok" for r in record.results):
            write_picture(record, picture)
    except OSError as e:
        raise OutputError(f"cannot write into {data.parent}: {e}; give another folder with -o.") from e


def _print(record: BenchRecord) -> None:
    from dcpbench.reports.bench_findings import marks_told
    from dcpbench.reports.bench_table import legend, table

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
                BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
                console=console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=2 * len(job.cases))

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
            self._bar.update(self._task, description=name, advance=event.stage in ("done", "counted"))
        elif event.stage == "done" and event.result:
            r = event.result
            note = r.reason or r.difference or (f"{r.time.median_us:.3g} µs" if r.time else "correct")
            _say(f"[{event.index + 1}/{len(self._job.cases)}] {name}  {note}")


def _tail(folder: Path) -> str:
    lines = (folder / "worker.log").read_text(errors="replace").strip().splitlines()
    return "\n".join([" Its last lines:", *lines[-LOG_LINES:]]) if lines else ""


def _console(*, error: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=error)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
