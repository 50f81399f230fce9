"""What each command does, once its options are read. No torch; Rich and reports are imported where they are used."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shlex
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from dcpbench import folders, launch
from dcpbench import sweep as grid
from dcpbench.errors import UsageError
from dcpbench.jobs import CHECKS_FILE, FAILED_FILE, Check
from dcpbench.layout import Layout, valid_layouts
from dcpbench.nodes import split_endpoint
from dcpbench.prompts import random_prompts, read_prompts
from dcpbench.records import RecordFile
from dcpbench.shapes import check_checkpoint, load_shape
from dcpbench.spec import check_seconds, effective, make_spec, read_options
from dcpbench.torchrun import Machines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from dcpbench.jobs import Probe
    from dcpbench.prompts import Prompts
    from dcpbench.records import Point, Record
    from dcpbench.spec import SweepSpec

WORKER = launch.WORKER
PLAIN_WIDTH = 140
"""Columns of a table in a file or a pipe."""
INTERRUPTED = 130
SOME_FAILED = 4
WRONG = 1
VERIFY_LAYOUTS = (
    Layout(tp=1),
    Layout(tp=2),
    Layout(tp=2, dcp=2),
    Layout(tp=4, dcp=2),
    Layout(tp=4, dcp=4),
    Layout(tp=4, dp=2, dcp=2),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Options that say how a command runs, not what it measures."""

    output: Path | None = None
    config: Path | None = None
    device: str = "auto"
    timeout: float = 300.0
    resume: bool = False
    force: bool = False
    dry_run: bool = False
    as_json: bool = False
    machines: Machines = Machines()  # noqa: RUF009 -- frozen


def sweep(given: dict[str, object], run: Run) -> int:
    """`dcpbench sweep`: returns the exit code."""
    _check_run(run)
    from_file = read_options(run.config) if run.config else {}
    probe = effective(launch.probe(WORKER), run.device)
    spec = make_spec(from_file | {name: value for name, value in given.items() if value is not None}, probe)
    candidates = grid.expand(spec, probe, run.machines.nnodes)
    if run.dry_run:
        _print_plan(candidates, run)
        grid.check_any(candidates)
        return 0
    grid.check_any(candidates)
    folder = run.output or folders.new_folder("-".join(spec.model), spec.tp)
    work = _work(folder, spec, probe, run)
    if run.machines.node_rank:
        folders.make_folder(folder)
        _say(f"Node {run.machines.node_rank}: works for node 0 at {run.machines.rdzv_endpoint}; the records are there.")
        with _stoppable(work):
            launch.run([], work, run.machines, lambda _: None)
        return 0
    with folders.locked(folder) as lock:
        points = _prepare(candidates, folder, work, run)
        pool_points = tuple(c.point for c in candidates if c.error is None)
        _announce(candidates, points, folder, probe)
        _run_points(points, dataclasses.replace(work, pool_points=pool_points, lock=lock), run)
        return _finish(candidates, folder, probe, run)


def verify(
    given: dict[str, object], run: Run, *, checkpoint: Path | None, prompts: Path | None, new_tokens: int
) -> int:
    """`dcpbench verify`: returns the exit code."""
    _check_run(run)
    probe = effective(launch.probe(WORKER), run.device)
    if checkpoint:
        check_checkpoint(checkpoint, "--checkpoint")
    elif prompts:
        raise UsageError("--prompts are for a model that can read them; give it with --checkpoint FOLDER.")
    given = {**given, "weights": str(checkpoint) if checkpoint else None, "baseline": False}
    spec = make_spec(_verify_defaults(given), probe)
    candidates = grid.expand_layouts(_verify_layouts(spec, given, probe), spec, probe)
    if run.dry_run:
        _print_plan(candidates, run)
    grid.check_any(candidates)
    if run.dry_run:
        return 0
    texts = _prompts(spec, checkpoint, prompts, new_tokens)
    folder = run.output or folders.new_folder("verify", spec.tp)
    points = [c.point for c in candidates if c.error is None]
    work = dataclasses.replace(_work(folder, spec, probe, run), kind="verify", new_tokens=new_tokens, prompts=texts)
    with folders.locked(folder) as lock:
        folders.prepare_checks(folder, force=run.force)
        _announce(candidates, points, folder, probe, cpu_note=False)
        _run_points(points, dataclasses.replace(work, lock=lock), run)
        return _print_checks(points, folder, run)


def env(*, as_json: bool) -> int:
    """`dcpbench env`: what is installed and visible, and what is missing for what."""
    probe = launch.probe(WORKER)
    if as_json:
        _print_json(msgspec.to_builtins(probe))
        return 0
    from dcpbench.terminal import env_table

    console = _console()
    console.print(env_table(probe))
    for problem in probe.problems:
        console.print(f"• {problem}", markup=False, highlight=False, soft_wrap=True)
    if not probe.problems:
        console.print("Nothing is missing.")
    return 0


def report(folders: Sequence[Path], output: Path | None, *, as_repeats: bool = False) -> int:
    """`dcpbench report`: write the report of one or several runs."""
    from dcpbench.reports import write_report

    out = output or (folders[0] if folders[0].is_dir() else folders[0].parent) / "report"
    paths = write_report(list(folders), out, as_repeats=as_repeats)
    _say_cut_short(folders)
    _print_paths(paths, sys.stdout)
    return 0


def show(folders: Sequence[Path], *, as_repeats: bool = False) -> int:
    """`dcpbench show`: the table of one or several runs in the terminal."""
    from dcpbench.reports import terminal_table

    table = terminal_table(list(folders), as_repeats=as_repeats)
    _say_cut_short(folders)
    _console().print(table)
    return 0


def _say_cut_short(folders: Sequence[Path]) -> None:
    from dcpbench.reports import cut_short

    for folder in folders:
        if cut_short(folder):
            _say(f"{folder}: the last line of its record file was cut short; it is left out.")


def _check_run(run: Run) -> None:
    m = run.machines
    if run.resume and run.force:
        raise UsageError("--resume and --force contradict each other; --resume goes on, --force starts over.")
    if run.resume and run.output is None:
        raise UsageError("--resume needs the run to go on with; for example: dcpbench sweep … -o runs/NAME --resume")
    check_seconds("--timeout", run.timeout, 300)
    if m.nnodes < 1:
        raise UsageError(f"--nnodes {m.nnodes} is not positive; try --nnodes 2, or leave it out.")
    if not 0 <= m.node_rank < m.nnodes:
        raise UsageError(
            f"--node-rank {m.node_rank} with --nnodes {m.nnodes}: ranks go from 0 to nnodes - 1, one for each machine."
        )
    if m.nnodes > 1:
        split_endpoint(m.rdzv_endpoint)


def _prepare(candidates: Sequence[grid.Candidate], folder: Path, work: launch.Work, run: Run) -> list[Point]:
    """Make the folder, record the rejected points once, and return those that are still to be measured."""
    folders.prepare_sweep(folder, resume=run.resume, force=run.force)
    known = launch.last_records(folder)
    if run.resume and not known:
        _say(f"{folder} holds no run yet; starting one.")
    elif run.resume and not any(c.point.key() in known for c in candidates):
        _say(f"None of these points is in {folder}; to go on with its run, repeat the command of that run.")
    if run.resume:
        now = folders.settings_of(candidates[0].point, work.settings, work.device)
        if changed := folders.check_resumed(folder, now):
            _say(changed)
    for c in candidates:
        old = known.get(c.point.key())
        if c.error is not None and (old is None or old.outcome != "rejected"):
            RecordFile(folder).append(c.rejected())
    measured = {key for key, record in known.items() if record.outcome == "ok"}
    return [c.point for c in candidates if c.error is None and c.point.key() not in measured]


def _run_points(points: Sequence[Point], work: launch.Work, run: Run) -> None:
    from dcpbench.terminal import Watch

    with _stoppable(work), Watch(points, _console(error=True)) as watch:
        launch.run(points, work, run.machines, watch)


@contextlib.contextmanager
def _stoppable(work: launch.Work) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a lost terminal (SIGHUP) end the workers first; the records stay valid."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as e:
        folder = shlex.quote(str(work.folder))
        again = f"go on, repeat the command with: -o {folder} --resume"
        if work.kind == "verify":
            again = f"check again, repeat the command with: -o {folder} --force"
        with contextlib.suppress(OSError):  # the terminal may be gone
            _say(f"\nInterrupted; the workers have ended and what was measured is in {work.folder}. To {again}")
        sys.exit(e.code if isinstance(e, SystemExit) else INTERRUPTED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _: object) -> None:
    """End as by Ctrl-C, once: a shell that goes away sends SIGHUP twice, and the second must not end the clean-up."""
    for repeated in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(repeated, signal.SIG_IGN)
    sys.exit(128 + number)


def _finish(candidates: Sequence[grid.Candidate], folder: Path, probe: Probe, run: Run) -> int:
    """Write the report, say where it lies, and tell by the exit code whether every point that could run did."""
    from dcpbench.reports import terminal_table, write_report

    last = launch.last_records(folder)
    records = [last[c.point.key()] for c in candidates if c.point.key() in last]
    failed = [r for r in records if r.outcome in ("failed", "hung")]
    paths = write_report([folder], folder / "report")
    if run.as_json:
        _print_json(_summary(records, folder, paths, probe))
    else:
        _console().print(terminal_table([folder]))
    _print_paths(paths, sys.stderr if run.as_json else sys.stdout)
    return SOME_FAILED if failed else 0


def _summary(records: Sequence[Record], folder: Path, paths: Sequence[Path], probe: Probe) -> dict[str, object]:
    counts = {o: sum(r.outcome == o for r in records) for o in ("ok", "failed", "hung", "rejected")}
    results = []
    for r in records:
        row = {"point": msgspec.to_builtins(r.point), "layout": grid.layout_name(r.point), "outcome": r.outcome}
        if r.metrics:
            row |= {
                "step_ms": r.metrics.step_ms.median,
                "output_tok_s": r.metrics.output_tok_s.median,
                "output_tok_s_per_gpu": r.metrics.output_tok_s_per_gpu,
                "tok_s_per_user": r.metrics.tok_s_per_user,
            }
        results.append(row | {"reason": r.reason, "marks": r.marks})
    return {
        "folder": str(folder), "device": probe.device, "performance": probe.device != "cpu", **counts,
        "report": [str(p) for p in paths], "results": results,
    }  # fmt: skip


def _print_plan(candidates: Sequence[grid.Candidate], run: Run) -> None:
    rows = grid.table(candidates)
    if run.as_json:
        _print_json(rows)
        return
    from dcpbench.terminal import candidates_table, rejected_lines

    console = _console()
    if any(r["reason"] is None for r in rows):
        console.print(candidates_table(rows))
    for line in rejected_lines(rows):
        console.print(f"cannot run: {line}", markup=False, highlight=False, soft_wrap=True)


def _announce(
    candidates: Sequence[grid.Candidate], points: Sequence[Point], folder: Path, probe: Probe, *, cpu_note: bool = True
) -> None:
    from dcpbench.terminal import CPU_NOTE, rejected_lines

    if probe.device == "cpu" and cpu_note:
        _say(CPU_NOTE)
    for line in rejected_lines(grid.table(candidates)):
        _say(f"cannot run: {line}")
    added = sum(c.added for c in candidates if c.error is None)
    possible = sum(c.error is None for c in candidates)
    skipped = f", {possible - len(points)} already measured" if possible > len(points) else ""
    extra = f" ({added} of the grid are baselines; --no-baseline leaves them out)" if added else ""
    _say(f"{_points(len(points))} to run{skipped}{extra}. Output: {folder}")


def _print_checks(points: Sequence[Point], folder: Path, run: Run) -> int:
    path = folder / CHECKS_FILE
    lines = path.read_bytes().splitlines() if path.exists() else []
    checks = [msgspec.json.decode(line, type=Check) for line in lines if line.strip()]
    failed = list(launch.last_records(folder, FAILED_FILE).values())
    silent = {str(p.layout) for p in points} - {c.layout for c in checks} - {str(r.point.layout) for r in failed}
    ok = bool(checks) and all(c.ok for c in checks) and not failed and not silent
    if run.as_json:
        broken = [{"point": msgspec.to_builtins(r.point), "reason": r.reason} for r in failed]
        _print_json({"ok": ok, "checks": msgspec.to_builtins(checks), "failed": broken, "unchecked": sorted(silent)})
    else:
        from dcpbench.terminal import checks_table

        if checks:
            _console().print(checks_table(checks))
    for r in failed:
        _say(f"{r.outcome}: {grid.point_name(r.point)}: {r.reason}")
    if silent:
        _say(f"no check was made for: {', '.join(sorted(silent))}; read {folder / 'logs'}")
    wrong = sum(not c.ok for c in checks)
    _say(f"{len(checks) - wrong} checks ok, {wrong} wrong, {_points(len(failed))} failed. Output: {folder}")
    return 0 if ok else WRONG if wrong else SOME_FAILED


def _verify_defaults(given: dict[str, object]) -> dict[str, object]:
    small = {"concurrency": "4", "context": "37"}
    return {**given, **{name: given.get(name) or value for name, value in small.items()}}


def _verify_layouts(spec: SweepSpec, given: dict[str, object], probe: Probe) -> list[Layout]:
    """The usual six that these GPUs can hold; once a degree is typed, every valid layout with it."""
    if not any(given.get(name) for name in ("tp", "dp", "dcp")):
        return [x for x in VERIFY_LAYOUTS if probe.device == "cpu" or x.tp <= probe.count]
    shape = load_shape(spec.model[0])
    dps = spec.dp if given.get("dp") else (None,)
    tps = spec.tp if given.get("tp") else (max(spec.dp) * max(spec.dcp or (1,)),)
    found = []
    for tp, dp, dcp in itertools.product(tps, dps, spec.dcp or (None,)):
        matching = [x for x in valid_layouts(shape, tp) if dp in (None, x.dp) and dcp in (None, x.dcp)]
        if not matching:
            Layout(tp=tp, dp=dp or 1, dcp=dcp or 1).check_model(shape)
        found += matching
    return found


def _prompts(spec: SweepSpec, checkpoint: Path | None, path: Path | None, new_tokens: int) -> Prompts:
    if checkpoint is None:
        return ()
    shape = load_shape(str(checkpoint))
    if path:
        return read_prompts(path, shape, new_tokens)
    return random_prompts(shape, max(spec.concurrency), max(spec.context))


def _work(folder: Path, spec: SweepSpec, probe: Probe, run: Run) -> launch.Work:
    return launch.Work(
        folder=folder.absolute(), settings=spec.settings, device=probe.device, timeout=run.timeout,
        command=shlex.join(["dcpbench", *sys.argv[1:]]), worker=WORKER,
    )  # fmt: skip


def _console(*, error: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=error)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def _points(count: int) -> str:
    return "1 point" if count == 1 else f"{count} points"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _print_paths(paths: Sequence[Path], stream: object) -> None:
    pages = [p for p in paths if p.suffix == ".html"] or list(paths)
    print(*(f"Report: {p}" for p in pages), sep="\n", file=stream)  # type: ignore[call-overload]
