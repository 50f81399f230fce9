"""What each command does, once its options are read. No torch; Rich and reports are imported where they are used."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import TYPE_CHECKING

import msgspec

from dcpbench.commands import runs
from dcpbench.commands.runs import (
    SOME_FAILED,
    Run,
    announce,
    check_run,
    machine,
    measure,
    no_report,
    print_json,
    print_paths,
    print_plan,
    run_points,
    told_when_stopped,
    work_of,
)
from dcpbench.errors import UsageError
from dcpbench.launch import folders, launcher
from dcpbench.launch.jobs import FAILED_FILE, read_checks
from dcpbench.plan import grid
from dcpbench.plan.spec import make_spec, read_options
from dcpbench.points.layout import Layout, valid_layouts
from dcpbench.points.prompts import random_prompts, read_prompts
from dcpbench.points.shapes import check_checkpoint, load_shape
from dcpbench.serving.load_words import parse_slo
from dcpbench.show.terminal import console, say
from dcpbench.show.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.machine import Probe
    from dcpbench.points.point import Point
    from dcpbench.points.prompts import Prompts

WRONG = 1
VERIFY_LAYOUTS = (
    Layout(tp=1),
    Layout(tp=2),
    Layout(tp=2, dcp=2),
    Layout(tp=4, dcp=2),
    Layout(tp=4, dcp=4),
    Layout(tp=4, dp=2, dcp=2),
)


def sweep(given: dict[str, object], run: Run) -> int:
    """`dcpbench sweep`: returns the exit code."""
    check_run(run)
    from_file = read_options(run.config) if run.config else {}
    probe = machine(run)
    spec = make_spec(from_file | {name: value for name, value in given.items() if value is not None}, probe)
    return measure(spec, probe, run)


def verify(
    given: dict[str, object], run: Run, *, checkpoint: Path | None, prompts: Path | None, new_tokens: int
) -> int:
    """`dcpbench verify`: returns the exit code."""
    check_run(run)
    probe = machine(run)
    if checkpoint:
        check_checkpoint(checkpoint, "--checkpoint")
    elif prompts:
        raise UsageError("--prompts are for a model that can read them; give it with --checkpoint FOLDER.")
    given = {**given, "weights": str(checkpoint) if checkpoint else None, "baseline": False}
    spec = make_spec(_verify_defaults(given), probe)
    candidates = grid.expand_layouts(_verify_layouts(spec, given, probe), spec, probe)
    if run.dry_run:
        print_plan(candidates, run)
    grid.check_any(candidates)
    if run.dry_run:
        return 0
    texts = _prompts(spec, checkpoint, prompts, new_tokens)
    folder = run.output or folders.new_folder("verify", spec.tp)
    points = [c.point for c in candidates if c.error is None]
    work = dataclasses.replace(work_of(folder, spec, probe, run), kind="verify", new_tokens=new_tokens, prompts=texts)
    with folders.locked(folder) as lock:
        with folders.writing(folder):
            folders.prepare_checks(folder, force=run.force)
            announce(candidates, points, folder, probe, cpu_note=False)
            run_points(points, dataclasses.replace(work, lock=lock), run)
        return _print_checks(points, folder, run)


def env(*, as_json: bool) -> int:
    """`dcpbench env`: what is installed and visible, and what is missing for what."""
    probe = launcher.probe(runs.WORKER)
    if as_json:
        print_json(msgspec.to_builtins(probe))
        return 0
    from dcpbench.launch.progress import env_table

    terminal = console()
    terminal.print(env_table(probe))
    for problem in probe.problems:
        terminal.print(f"• {problem}", soft_wrap=True)
    if not probe.problems:
        terminal.print("Nothing is missing.")
    return 0


def report(folders: Sequence[Path], output: Path | None, *, as_repeats: bool = False, slo: str | None = None) -> int:
    """`dcpbench report`: write the report of one or several runs."""
    from dcpbench.reports import write_report

    out = output or (folders[0] if folders[0].is_dir() else folders[0].parent) / "report"
    objectives = _objectives(slo)
    with told_when_stopped(no_report(folders)):
        paths = write_report(list(folders), out, as_repeats=as_repeats, slo=objectives)
    _say_cut_short(folders)
    print_paths(paths, sys.stdout)
    return 0


def show(folders: Sequence[Path], *, as_repeats: bool = False, slo: str | None = None, as_json: bool = False) -> int:
    """`dcpbench show`: the table of one or several runs in the terminal, or for a script."""
    from dcpbench.reports import terminal_table

    if as_json:
        from dcpbench.reports import frames, terminal_json

        read = frames.load(list(folders), as_repeats=as_repeats, slo=_objectives(slo))
        sys.stdout.write(terminal_json.dumps(read) + "\n")
        return 0
    table = terminal_table(list(folders), as_repeats=as_repeats, slo=_objectives(slo))
    _say_cut_short(folders)
    console().print(table)
    return 0


def _objectives(slo: str | None) -> dict[str, float]:
    return {} if slo is None else parse_slo(slo)


def _say_cut_short(folders: Sequence[Path]) -> None:
    from dcpbench.reports import cut_short

    for folder in folders:
        if cut_short(folder):
            say(f"{folder}: the last line of its record file was cut short; it is left out.")


def _print_checks(points: Sequence[Point], folder: Path, run: Run) -> int:
    checks = read_checks(folder)
    failed = list(launcher.last_records(folder, FAILED_FILE).values())
    silent = {str(p.layout) for p in points} - {c.layout for c in checks} - {str(r.point.layout) for r in failed}
    ok = bool(checks) and all(c.ok for c in checks) and not failed and not silent
    if run.as_json:
        broken = [{"point": msgspec.to_builtins(r.point), "reason": r.reason} for r in failed]
        print_json({"ok": ok, "checks": msgspec.to_builtins(checks), "failed": broken, "unchecked": sorted(silent)})
    else:
        from dcpbench.launch.progress import checks_table

        if checks:
            console().print(checks_table(checks))
    for r in failed:
        say(f"{r.outcome}: {grid.point_name(r.point)}: {r.reason}")
    if silent:
        say(f"no check was made for: {', '.join(sorted(silent))}; read {folder / 'logs'}")
    wrong = sum(not c.ok for c in checks)
    say(f"{len(checks) - wrong} checks ok, {wrong} wrong, {counted(len(failed), 'point')} failed. Output: {folder}")
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
