"""Run the points of sweep, serve and verify: prepare the folder, run jobs, handle interrupts, and write the report.

This module does not import torch. Rich and reports are imported where they are used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shlex
import sys
from typing import TYPE_CHECKING, cast

import msgspec

from dcpbench.commands.doctor import report_at_start
from dcpbench.commands.options import check_output_options
from dcpbench.errors import ExitCode, LayoutError, UsageError
from dcpbench.launch import folders, launcher, retry
from dcpbench.launch.nodes import get_secret, split_endpoint
from dcpbench.launch.stopping import print_when_stopped
from dcpbench.plan import grid
from dcpbench.plan.command_line import get_typed_command
from dcpbench.plan.option_parsers import check_known, check_seconds, format_value
from dcpbench.plan.spec import DEVICES, make_planned_probe, select_device
from dcpbench.plan.used_options import check_used
from dcpbench.points.layout import MAX_RANKS, Layout
from dcpbench.records.checks import OUTCOMES
from dcpbench.records.file import RecordFile, check_point, is_last_line_cut_short
from dcpbench.records.folder import get_record_file
from dcpbench.records.metrics import SWEPT
from dcpbench.records.record import format_reason, is_functional
from dcpbench.records.runs import read_last_records, read_run
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import ProgressLine, make_console, print_stderr
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from dcpbench.commands.find_loads import LoadSearch
    from dcpbench.commands.options import Run
    from dcpbench.launch.progress import ProgressBar
    from dcpbench.plan.load_search import FoundLoad, LoadRange
    from dcpbench.plan.serve_spec import ServeLoads
    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.records.file import BadLine
    from dcpbench.records.record import Record
    from dcpbench.records.runs import Run as ReadRun

    WorkOff = Callable[[Sequence[Point], launcher.JobOptions, Run], None]
    Options = Mapping[str, object] | None

WORKER = launcher.WORKER
USUAL_GPUS = 8  # default number of GPUs of a planned machine
MAX_NAMED = 10  # maximum number of unreadable lines that are listed one by one


def record_device(run: Run, probe: Probe) -> None:
    """Report the device of this run to the calling command."""
    if part := run.caller.part:
        part.devices.add(probe.device)


def is_values_only(
    run: Run,
    tp: Sequence[int],
    dp: Sequence[int] = (1,),
    dcp: Sequence[int] = (),
    typed: Collection[str] = (),
    *,
    baseline: bool = False,
) -> bool:
    """Return whether only the values of options can be checked.

    Raise LayoutError if no layout is valid, UsageError if no layout uses one of the options `typed` (SweepSpec.typed). With `baseline`,
    each tp also runs without dp.
    """
    there = run.caller.elsewhere
    if there is None or there.points:
        return False
    errors = (
        [_find_layout_error(*degrees) for degrees in itertools.product(tp, dp, dcp or (1,))] if there.layouts else []
    )
    if errors and all(errors):
        raise next(filter(None, errors))
    if dcp:
        check_used(typed, itertools.product(tp, (*dp, 1) if baseline else dp, dcp))
    return True


def _find_layout_error(tp: int, dp: int, dcp: int) -> LayoutError | None:
    try:
        Layout(tp=tp, dp=dp, dcp=dcp)
    except LayoutError as e:
        return e
    return None


def get_probe(run: Run) -> Probe:
    """Return this machine's probe as --device selects it, or that of the machine that --gpu plans for."""
    if there := run.caller.elsewhere:
        return select_device(there.probe, run.device)
    found = (
        launcher.run_probe(WORKER)
        if run.gpu_name is None
        else make_planned_probe(run.gpu_name, _get_planned_count(run))
    )
    return select_device(found, run.device)


def measure(
    spec: SweepSpec,
    probe: Probe,
    run: Run,
    work_off: WorkOff | None = None,
    *,
    given: Options = None,
    bounds: LoadRange | None = None,
) -> int:
    """Expand a grid, then list it (--dry-run), or run it and write the report. Return the exit code.

    With `bounds`, the loads of the grid are searched between them.

    `work_off` runs the points and writes a record of each; by default torchrun jobs do. `given`: the options that describe
    the grid, by which --resume detects another grid; with None, --resume does not compare them.
    """
    from dcpbench.commands.find_loads import make_search

    record_device(run, probe)
    if is_values_only(run, spec.tp, spec.dp, spec.dcp, spec.typed, baseline=spec.baseline):
        return 0
    there = run.caller.elsewhere

    def expand(spec: SweepSpec) -> list[grid.Candidate]:
        return grid.expand_grid(
            spec,
            probe,
            there.nodes if there else run.machines.nnodes,
            submitted=there is not None,
            argv=run.caller.argv,
        )

    search = make_search(
        bounds,
        cast("ServeLoads", spec.serve),
        spec.settings,
        lambda loads, repeats: expand(dataclasses.replace(spec, serve=loads, repeats=repeats)),
        one_by_one=not spec.settings.step_times,
    )
    candidates = expand(spec) if search is None else search.share_plans(expand(spec))
    if not run.dry_run:
        grid.check_live(candidates, spec.settings)
    print_defaults(spec, candidates)
    if finish_if_planned(candidates, probe, run):
        return 0
    folder = run.output or folders.choose_folder("-".join(spec.model), spec.tp)
    options = make_work(folder, spec.settings, probe, run)
    if run.machines.node_rank:
        folders.make_folder(folder)
        print_stderr(
            f"Node {run.machines.node_rank}: joins node 0 at {run.machines.rdzv_endpoint}, which writes the records."
        )
        with handle_stop(run, options):
            launcher.run_points([], options, run.machines, lambda _: None)
        return 0
    return run_candidates(candidates, folder, options, probe, run, work_off, given=given, search=search)


def run_candidates(
    candidates: Sequence[grid.Candidate],
    folder: Path,
    options: launcher.JobOptions,
    probe: Probe,
    run: Run,
    work_off: WorkOff | None = None,
    *,
    given: Options = None,
    search: LoadSearch | None = None,
) -> int:
    """Run the runnable points into a folder, write the report, and return the exit code. `given`: see measure.

    With `search`, the points are those of the loads that it chooses; `candidates` have its lowest load.
    """
    if search is not None:
        return search.run(candidates, folder, options, probe, run, work_off or run_points)
    with folders.lock_folder(folder) as lock:
        with folders.convert_write_errors(folder):
            left = prepare_folder(candidates, folder, options, run, given)
            points = _drop_set_aside(left, folder, options.retries)
            pool_points = tuple(c.point for c in candidates if c.error is None)
            engines = tuple(dict.fromkeys(c.plan for c in candidates if c.plan))
            if run.caller.part is None:
                print_start(candidates, points, folder, probe, aside=len(left) - len(points))
                if work_off is None:
                    report_at_start(folder, cuda=probe.device == "cuda")
            (work_off or run_points)(
                points, msgspec.structs.replace(options, pool_points=pool_points, engines=engines, lock=lock), run
            )
        return finish_run(candidates, folder, probe, run)


def print_defaults(spec: SweepSpec, candidates: Sequence[grid.Candidate]) -> None:
    """Print which layouts and precisions the defaults select."""
    notes = ["" if spec.dcp else grid.format_dcp_note(candidates), grid.format_precision_note(spec, candidates)]
    if note := " ".join(filter(None, notes)):
        print_stderr(note)


def check_run(run: Run) -> None:
    """Raise UsageError if the options contradict each other."""
    m = run.machines
    check_output_options(run.output, resume=run.resume, force=run.force)
    check_seconds("--timeout", run.stall_s, 300)
    _check_isolation(run)
    _check_planned(run)
    if m.nnodes < 1:
        raise UsageError(f"--nodes {m.nnodes} is not positive; try --nodes 2, or leave it out.")
    if m.nnodes > MAX_RANKS:
        raise UsageError(
            f"--nodes {format_value(m.nnodes)} is more than the {MAX_RANKS:,} ranks that a layout can have; try --nodes 2."
        )
    if not 0 <= m.node_rank < m.nnodes:
        raise UsageError(
            f"--nodes {m.nnodes},rank={m.node_rank}: ranks go from 0 to {m.nnodes - 1}, one for each machine."
        )
    if m.nnodes > 1 and run.gpu_name is None:
        split_endpoint(m.rdzv_endpoint)
        get_secret()


def check_server_run(run: Run) -> None:
    """Raise UsageError if the options of a command that measures a server contradict each other."""
    check_output_options(run.output, resume=run.resume, force=run.force)
    check_known("device", run.device, DEVICES)
    _check_gpu_device(run)


def _check_gpu_device(run: Run) -> None:
    if run.gpu_name is not None and run.device == "cpu":
        raise UsageError(f"--gpu {run.gpu_name} and --device cpu contradict each other; leave one of them out.")


def _check_isolation(run: Run) -> None:
    limits = run.limits
    if limits.retries < 0:
        raise UsageError(f"--timeout retries={limits.retries} is negative; try retries=1, or leave it out.")
    if limits.point is not None:
        check_seconds("--timeout point", limits.point, 1800)


def _check_planned(run: Run) -> None:
    if run.gpu_count is not None and run.gpu_name is None:
        raise UsageError(
            f"--gpu count={run.gpu_count} needs a name; write for example --gpu H200,count={run.gpu_count}."
        )
    if run.gpu_name is not None:
        make_planned_probe(run.gpu_name, _get_planned_count(run))
    if run.gpu_name is not None and not run.dry_run:
        raise UsageError(
            f"--gpu {run.gpu_name} plans for another machine, on which nothing can be measured from here; add "
            "--dry-run, or leave --gpu out."
        )
    _check_gpu_device(run)


def _get_planned_count(run: Run) -> int:
    """Return the number of GPUs of a planned machine."""
    return USUAL_GPUS if run.gpu_count is None else run.gpu_count


def prepare_folder(
    candidates: Sequence[grid.Candidate],
    folder: Path,
    options: launcher.JobOptions,
    run: Run,
    given: Options,
    *,
    searched: bool = False,
) -> list[Point]:
    """Make the folder, record the rejected points once, and return the points that are still to be measured.

    With `searched`, the points stand for those that a search chooses later.
    """
    for c in candidates:
        check_point(c.point)
    folders.prepare_sweep(folder, resume=run.resume, force=run.force)
    bad: list[BadLine] = []
    known = read_last_records(folder, bad=bad)
    if run.resume:
        _print_unread_records(folder, bad)
        folders.check_same_command(folder, candidates[0].point, known.values())
        if given is not None:
            folders.check_default_grid(folder, [c.point for c in candidates], list(known.values()), given)
    if run.resume and not known and not bad and not folders.list_case_files(folder):
        print_stderr(f"{folder} holds no run yet; starting one.")
    elif run.resume and known and not searched and not any(c.point.get_key() in known for c in candidates):
        print_stderr(f"None of these points is in {folder}; to continue its run, repeat the command of that run.")
    if run.resume:
        now = folders.list_settings([c.point for c in candidates], options.settings, options.device)
        if changed := folders.check_resumed(folder, now, known.values()):
            print_stderr(changed)
    for c in candidates:
        old = known.get(c.point.get_key())
        if c.error is not None and (old is None or old.outcome != "rejected"):
            RecordFile(folder).append(c.make_rejected_record())
    measured = {key for key, record in known.items() if record.outcome == "ok"}
    return [c.point for c in candidates if c.error is None and c.point.get_key() not in measured]


def _print_unread_records(folder: Path, bad: Sequence[BadLine]) -> None:
    """Print which records of a resumed run cannot be read, so that their points are measured again."""
    if get_record_file(folder).is_file() and is_last_line_cut_short(folder):
        print_stderr(
            f"{folder}: the last record is incomplete, as its run was interrupted; its point is measured again."
        )
    print_bad_lines(bad)


def _drop_set_aside(points: list[Point], folder: Path, retries: int) -> list[Point]:
    """Return the points that have not failed too often before, and print how to retry the others."""
    failed = retry.count_failures(folder)
    aside = [p for p in points if retry.is_set_aside(failed[p.get_key()], retries)]
    if aside:
        max_times = max(failed[p.get_key()] for p in aside)
        print_stderr(
            f"{format_count(len(aside), 'point')} that failed {max_times} times {'is' if len(aside) == 1 else 'are'} set aside: the "
            f"records say why. To try {'it' if len(aside) == 1 else 'them'} again, add --timeout retries={max_times}."
        )
    return [p for p in points if p not in aside]


def run_points(points: Sequence[Point], options: launcher.JobOptions, run: Run) -> None:
    """Run the points and show how far they are."""
    with show_progress(run, points, options) as bar:
        launcher.run_points(points, _show_chosen_points(options, bar), run.machines, bar)


def _show_chosen_points(options: launcher.JobOptions, bar: ProgressBar) -> launcher.JobOptions:
    """Return the options, with which a progress bar also shows the points that a search adds to a job."""
    choose = options.choose_points
    if choose is None:
        return options

    def choose_points(point: Point) -> Sequence[Point]:
        points = choose(point)
        bar.add_points(points)
        return points

    return msgspec.structs.replace(options, choose_points=choose_points)


@contextlib.contextmanager
def show_progress(run: Run, points: Sequence[Point], options: launcher.JobOptions) -> Iterator[ProgressBar]:
    """Show a progress bar of the points on stderr; an interrupt ends the workers, then the command.

    In a search, the number of points is not known before its end.
    """
    from dcpbench.launch.progress import ProgressBar, format_point_names, list_point_kinds

    part = run.caller.part
    bar = ProgressBar(
        format_point_names(points),
        make_console(error=True),
        part.what if part else "points",
        brief=part is not None,
        counted=options.choose_points is None,
        kinds=list_point_kinds(points),
    )
    with handle_stop(run, options), bar:
        yield bar


@contextlib.contextmanager
def handle_stop(run: Run, options: launcher.JobOptions) -> Iterator[None]:
    """End the workers first on Ctrl-C, SIGTERM and a lost terminal (SIGHUP), then print what to type next."""
    folder = shlex.quote(str(options.folder))
    again = f"go on, repeat the command with: -o {folder} --resume"
    if options.kind == "verify":
        again = f"check again, repeat the command with: -o {folder} --force"
    ended = "" if options.settings.step_times else "the workers have ended and "

    def explain() -> str:
        records = get_record_file(options.folder)
        there = records.is_file() and records.stat().st_size > 0
        report = f"\nFor a report of what was measured: dcpbench report {folder}" if there else ""
        return f"Interrupted; {ended}what was measured is in {options.folder}. To {again}{report}"

    with print_when_stopped(explain if run.caller.part is None else ""):
        yield


def finish_run(
    candidates: Sequence[grid.Candidate],
    folder: Path,
    probe: Probe,
    run: Run,
    found: Sequence[FoundLoad] | None = None,
) -> int:
    """Write the report, print its path, and return an exit code: FAILED if a runnable point failed.

    `found` are the results of a search, whose exit code is NO_ANSWER if no load meets the SLO.
    """
    from dcpbench.reports import render_terminal_table, write_report
    from dcpbench.serving.run_gains import store_run_gains

    last = read_last_records(folder, bad=[])
    records = [last[c.point.get_key()] for c in candidates if c.point.get_key() in last]
    failed = [r for r in records if r.outcome in ("failed", "hung")]
    if run.caller.part is not None:
        return ExitCode.FAILED if failed else 0
    with print_when_stopped(format_no_report([folder])), ProgressLine() as line:
        with folders.convert_write_errors(folder):
            store_run_gains(folder, last.values(), line)
        paths = write_report([folder], folder / "report", watch=line)
    if run.as_json:
        summary = _make_summary(records, folder, paths, probe)
        print_json(summary if found is None else summary | {"find": [one.to_json() for one in found]})
    else:
        make_console().print(render_terminal_table([folder]))
        for one in found or ():
            make_console().print(one.format(), soft_wrap=True, markup=False, highlight=False)
    print_paths(paths, sys.stderr if run.as_json else sys.stdout)
    if failed:
        return ExitCode.FAILED
    return ExitCode.NO_ANSWER if found is not None and not any(one.highest_passing_load for one in found) else 0


def format_no_report(folders: Sequence[Path]) -> str:
    """Format the message for an interrupted report, with the command that writes it."""
    again = shlex.join(["dcpbench", "report", *map(str, folders)])
    return f"Interrupted; no report was written. The records are safe; to write it: {again}"


def print_left_out(runs: Sequence[ReadRun]) -> None:
    """Print the unreadable lines of runs, and the commands that remove them."""
    for run in runs:
        if run.path is not None and is_last_line_cut_short(run.path):
            print_stderr(f"{run.path}: the last line of its record file was cut short; it is left out.")
        print_bad_lines(run.bad_lines)


def print_bad_lines(lines: Sequence[BadLine]) -> None:
    """Print the first unreadable lines, the number of others, and the commands that remove them."""
    for bad in lines[:MAX_NAMED]:
        print_stderr(f"{bad.file}, line {bad.line} cannot be read and is left out: {bad.why}.")
    if len(lines) > MAX_NAMED:
        print_stderr(f"{format_count(len(lines) - MAX_NAMED, 'more line')} cannot be read and are left out.")
    for mend in dict.fromkeys(bad.mend for bad in lines if bad.mend):
        print_stderr(f"To take what cannot be read out, and keep a copy of the file: {mend}")


def print_if_unjudged(folders: Sequence[Path], slo: str) -> None:
    """Print a note that --slo has no effect if all finished points ran on a CPU."""
    finished = [r for folder in folders for r in read_run(folder).records if r.outcome == "ok"]
    if finished and all(is_functional(r) for r in finished):
        print_stderr(
            f"--slo {slo} has no effect here: all points ran on a CPU, and CPU latencies are not compared with objectives."
        )


def _make_summary(records: Sequence[Record], folder: Path, paths: Sequence[Path], probe: Probe) -> dict[str, object]:
    from dcpbench.serving.run_gains import read_run_gains

    counts = {o: sum(r.outcome == o for r in records) for o in OUTCOMES}
    results = []
    for r in records:
        row = {"point": msgspec.to_builtins(r.point), "layout": r.point.layout_name, "outcome": r.outcome}
        if r.metrics:
            row |= {metric.name: metric.get_value(r) for metric in SWEPT}
        if r.serve:
            row |= {"serve": msgspec.to_builtins(r.serve)}
        results.append(row | {"reason": format_reason(r) or None, "warnings": r.warnings})
    gains = read_run_gains(folder)
    return {
        "folder": str(folder),
        "device": probe.device,
        "performance": probe.device != "cpu",
        **counts,
        "report": [str(p) for p in paths],
        "results": results,
        **({"gains_by_cause": msgspec.to_builtins(gains)} if gains else {}),
    }


def finish_if_planned(candidates: Sequence[grid.Candidate], probe: Probe, run: Run) -> bool:
    """Return whether nothing is to run: after a --dry-run, which is printed, or for another machine.

    Raise the points' own error if none of them can run.
    """
    if run.dry_run:
        _print_plan(candidates, probe, run)
    grid.require_runnable(candidates, listed_above=run.dry_run and not run.as_json)
    return run.dry_run or run.caller.elsewhere is not None


def _print_plan(candidates: Sequence[grid.Candidate], probe: Probe, run: Run) -> None:
    """Print the plan of --dry-run: the runnable points, and the reason for each of the others; as JSON, with the machine."""
    rows = grid.make_table(candidates)
    if run.as_json:
        machine = {"device": probe.device, "gpus": probe.count, "name": probe.name, "memory_bytes": probe.memory_bytes}
        machine |= {"nnodes": run.machines.nnodes, "planned": msgspec.to_builtins(probe.gpu)}
        print_json([row | {"machine": machine} for row in rows])
        return
    from dcpbench.launch.progress import format_no_fit_lines, format_plan_note, format_rejected, make_candidates_table

    terminal = make_console()
    for line in format_no_fit_lines(rows):
        terminal.print(line, soft_wrap=True, markup=False)
    if probe.gpu:
        print_stderr(format_plan_note(probe.gpu, probe.count, run.machines.nnodes))
    if any(r["reason"] is None for r in rows):
        terminal.print(make_candidates_table(rows))
    for line in format_rejected(rows):
        terminal.print(f"cannot run: {line}", soft_wrap=True)


def print_start(
    candidates: Sequence[grid.Candidate],
    points: Sequence[Point],
    folder: Path,
    probe: Probe,
    *,
    cpu_note: bool = True,
    aside: int = 0,
) -> None:
    """Print which points run, which cannot and why, how many are set aside after failures, and the output folder."""
    from dcpbench.launch.progress import CPU_NOTE, format_rejected

    if probe.device == "cpu" and cpu_note:
        print_stderr(CPU_NOTE)
    for line in format_rejected(grid.make_table(candidates)):
        print_stderr(f"cannot run: {line}")
    added = sum(c.added for c in candidates if c.error is None)
    possible = sum(c.error is None for c in candidates)
    measured = possible - len(points) - aside
    skipped = (f", {measured} already measured" if measured else "") + (f", {aside} set aside" if aside else "")
    extra = f" ({added} of the grid are baselines; --no-baseline leaves them out)" if added else ""
    print_stderr(f"{format_count(len(points), 'point')} to run{skipped}{extra}. Output: {folder}")


def make_work(folder: Path, settings: Settings, probe: Probe, run: Run) -> launcher.JobOptions:
    """Return the settings that all jobs of a command share."""
    return launcher.JobOptions(
        folder=folder.absolute(),
        settings=settings,
        device=probe.device,
        hardware=probe.name,
        timeout=run.stall_s,
        point_limit=run.limits.point,
        retries=run.limits.retries,
        command=get_typed_command(),
        worker=WORKER,
    )


def print_json(value: object) -> None:
    """Print a result as JSON on stdout."""
    write_json(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_paths(paths: Sequence[Path], stream: object) -> None:
    """Print the paths of the report's pages, or of all its files if it has no page."""
    pages = [p for p in paths if p.suffix == ".html"] or list(paths)
    print(*(f"Report: {p}" for p in pages), sep="\n", file=stream)  # type: ignore[call-overload]
