"""Implement `dcpbench ab`: launch two variants of sweep or serve in turn, and compare them round by round."""

import contextlib
import dataclasses
import io
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcpbench.commands import options as opt
from dcpbench.commands.caller import Caller, Part
from dcpbench.commands.command import PARSER_ERROR, Command, Group, load_command, make_panel, run_command
from dcpbench.commands.compare import JudgementOptions, OutputOptions
from dcpbench.commands.elsewhere import REAL_SERVERS
from dcpbench.errors import DcpbenchError, ExitCode, OutputError, UnusedOptionsError, UsageError
from dcpbench.plan.command_line import hide_headers, remove_settings
from dcpbench.plan.option_parsers import split_command
from dcpbench.points import redaction
from dcpbench.points.names import format_flag
from dcpbench.records.disks import convert_output_errors
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.show.numbers import format_duration
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import format_count, format_list
from dcpbench.show.whole_files import write_file

STATE_FILE = "ab.json"
WORKLOADS = ("sweep", "serve", "server")
MAX_ROUNDS = 1000
OURS = {  # options that a variant cannot have: `ab` sets them itself, or they are for several machines
    "output": "-o",
    "resume": "--resume",
    "force": "--force",
    "dry_run": "--dry-run",
    "as_json": "--json",
    "nodes": "--nodes",
}
REMOTE = tuple(format_flag(name) for name in REAL_SERVERS)

RUNS = make_panel("Variants")


class Variants(Group):
    """Hold the options that select the variants and the number of rounds."""

    a: str = RUNS("Options of variant A, as one quoted string.", default="", metavar="OPTIONS")
    b: str = RUNS("Options of variant B.", default="", metavar="OPTIONS")
    both: str = RUNS(
        "Options of both. Baselines (dcp 1, tp alone) are left out, unless --baseline is among them.",
        default="",
        metavar="OPTIONS",
    )
    workload: str = RUNS("sweep, serve or server: the command that is run.", default="sweep", metavar="NAME")
    rounds: int = RUNS(
        "Each round launches both variants once: A B, B A, A B, … Verdicts need at least 4.", default=8, metavar="N"
    )


class RoundsJudgementOptions(JudgementOptions):
    """Hold the options of the comparison, without --launch-noise: the rounds measure the scatter of launches."""

    launch_noise = None


class RoundsOutputOptions(OutputOptions):
    """Hold the output options of the comparison, without --output: it is written into the folder of the launches."""

    folder = None


class LaunchOptions(Group):
    """Hold the options for the folder of the launches, and for launches that it already holds."""

    output: Path | None = opt.OUTPUT(
        "Folder for a/, b/ and the comparison. Default: runs/DATE-TIME-ab-….", "-o", "--output", metavar="DIR"
    )
    resume: bool = opt.RESUME
    force: bool = opt.FORCE
    dry_run: bool = opt.OUTPUT("Only print the points of both variants and the order of launches.", default=False)


@dataclasses.dataclass(kw_only=True)
class State:
    """Hold the content of ab.json: the options of both variants, and the launches that have ended."""

    workload: str
    a: list[str]
    b: list[str]
    done: dict[str, int] = dataclasses.field(default_factory=dict)  # exit codes by ended launch, such as `a/round-1`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold what the dry run of a variant states."""

    arguments: list[str]
    unused: tuple[str, ...] = ()  # options of --both that have no effect here, but on the other side, and are left out
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # points, as --json prints them
    notes: list[str] = dataclasses.field(default_factory=list)
    devices: set[str] = dataclasses.field(default_factory=set)
    error: DcpbenchError | None = None  # why it cannot run


def ab(variants: Variants, judged: RoundsJudgementOptions, launches: LaunchOptions, shown: RoundsOutputOptions) -> int:
    """Alternate between two variants on this machine, so that drift affects both equally, and compare them round by round.

    Every round is a separate launch on each side, and their order alternates (A B, B A, …), which takes out whatever
    drifts evenly. Ctrl-C keeps what was measured; --resume goes on. Exit codes: those of compare, and 4 if points
    failed.

    For example:

      dcpbench ab --both "--tp 4 --dcp 4 --context 32000" --a "--exchange ag_rs" --b "--exchange symm"

      dcpbench ab --workload serve --both "--tp 4 --concurrency 32" --a "--prefill policy=mixed" --b "--prefill policy=prefill-first"

      dcpbench ab --workload server --both "--concurrency 32" --a "--url http://a:8000 --tp 8" --b "--url http://b:8000 --tp 8 --dcp 8"

      dcpbench ab --workload server --both "--engine vllm --model /models/v3 --tp 8" --a "--dcp 1" --b "--dcp 8"
    """
    from dcpbench.compare import outputs
    from dcpbench.compare.sides import find_differing_fields, read_side
    from dcpbench.launch import folders

    options, out = judged.make_options(paired=True), outputs.OutputTargets(fail_on=judged.fail_on, **vars(shown))
    outputs.check_options(options, out)
    _check_options(variants, launches)
    command = load_command(variants.workload)
    sides = {side: _parse_arguments(variants, side, command) for side in "ab"}
    _check_given(variants)
    if sides["a"] == sides["b"]:
        print_stderr("A and B are the same: this shows what differs between launches of one variant.")
    if (
        not launches.dry_run
        and variants.workload != "server"
        and any(_has_option(arguments, ["--gpu"]) for arguments in sides.values())
    ):
        raise UsageError("--gpu plans for a machine that is not this one; add --dry-run to ab, or leave --gpu out.")
    plans = _make_plans(variants, sides, command)
    sides = {side: plan.arguments for side, plan in plans.items()}
    if launches.dry_run:
        return _print_plan_json(variants, plans) if out.as_json else _print_plan(variants, plans, command)
    folder = launches.output or Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-ab-{variants.workload}"
    with folders.lock_folder(folder):
        kept = {side: hide_headers(arguments) for side, arguments in sides.items()}
        state = _load_state(folder, launches, State(workload=variants.workload, a=kept["a"], b=kept["b"]))
        _print_start(folder, plans, variants, allow_cpu=judged.allow_cpu)
        code = _launch_all(folder, state, sides, variants.rounds, command, force=launches.force)
        try:
            rounds = (f"round-{n}" for n in range(1, variants.rounds + 1))
            shared = [n for n in rounds if _has_ended_on_both(folder, state, n)]
            if not shared:
                raise UsageError(f"no round has ended on both sides, so there is nothing to compare; read {folder}.")
            a, b = (read_side([folder / side / n for n in shared]) for side in "ab")
            across = find_differing_fields(a, b)
            options = dataclasses.replace(options, across=across)
            if across:
                print_stderr(f"Points are matched without {', '.join(across)}, in which the variants differ.")
            verdict = outputs.run_comparison(a, b, options, dataclasses.replace(out, folder=folder))
        finally:
            if code == ExitCode.INTERRUPTED:
                print_stderr(_format_resume(folder))
    return code if code == ExitCode.INTERRUPTED else verdict or code


def get_order(number: int) -> tuple[str, str]:
    """Return the order of the variants in a round, counted from 1: A B, B A, A B, …, so that a linear drift cancels."""
    return ("a", "b") if number % 2 else ("b", "a")


def _launch_all(
    folder: Path, state: State, sides: Mapping[str, list[str]], rounds: int, command: Command, *, force: bool
) -> int:
    """Run every launch that has not ended yet, in order; return ExitCode.FAILED if points failed, INTERRUPTED after Ctrl-C."""
    todo = [f"{side}/round-{n}" for n in range(1, rounds + 1) for side in get_order(n)]
    left = [name for name in todo if name not in state.done]
    began = time.monotonic()
    for index, name in enumerate(left, 1):
        number = name.rpartition("-")[2]
        try:
            part = Part(f"points of {name[0].upper()}, round {number} of {rounds}")
            ended = _launch(folder / name, state.workload, sides[name[0]], command, part, force=force)
        except (KeyboardInterrupt, SystemExit) as e:
            shared = any(_has_ended_on_both(folder, state, f"round-{n}") for n in range(1, rounds + 1))
            compared = "; the rounds that have ended on both sides are compared" if shared else ""
            print_stderr(f"\nInterrupted in {name}{compared}. {'' if shared else _format_resume(folder)}".rstrip())
            if not shared:
                sys.exit(e.code if isinstance(e, SystemExit) and isinstance(e.code, int) else ExitCode.INTERRUPTED)
            return ExitCode.INTERRUPTED
        except DcpbenchError as e:
            raise type(e)(f"{name}: {e}") from e
        if ended not in (0, ExitCode.FAILED):
            raise UsageError(f"{name}: `dcpbench {state.workload}` ended with {ended}; its messages are above.")
        state.done[name] = ended
        _write_state(folder, state)
        if all(f"{side}/round-{number}" in state.done for side in "ab"):
            eta = (time.monotonic() - began) / index * (len(left) - index)
            about = f"; about {format_duration(eta)} left" if eta else ""
            print_stderr(f"Round {number} of {rounds}: {_format_round(folder, state, f'round-{number}')}{about}")
    return ExitCode.FAILED if ExitCode.FAILED in state.done.values() else 0


def _launch(folder: Path, workload: str, options: Sequence[str], command: Command, part: Part, *, force: bool) -> int:
    """Run sweep or serve in this process with these options; its output goes to stderr, as stdout is the comparison's."""
    arguments = [*options, "-o", str(folder)]
    if (folder / RECORDS_FILE).exists():
        arguments.append("--force" if force else "--resume")
    with _set_argv([workload, *arguments]), contextlib.redirect_stdout(sys.stderr):
        return run_command(command, arguments, f"dcpbench {workload}", caller=Caller(part=part))


@contextlib.contextmanager
def _set_argv(arguments: Sequence[str]) -> Iterator[None]:
    """Set sys.argv inside the block: records store the command that repeats them, which is not that of `ab`."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _check_options(variants: Variants, launches: LaunchOptions) -> None:
    if variants.workload not in WORKLOADS:
        raise UsageError(f"--workload {variants.workload}: give {' or '.join(WORKLOADS)}.")
    if not 1 <= variants.rounds <= MAX_ROUNDS:
        raise UsageError(f"--rounds {variants.rounds} cannot be; give 1 to {MAX_ROUNDS}, such as --rounds 8.")
    opt.check_output_options(launches.output, resume=launches.resume, force=launches.force)


def _check_given(variants: Variants) -> None:
    """Raise UsageError if a variant has no options."""
    missing = [side for side in "ab" if not (getattr(variants, side).strip() or variants.both.strip())]
    if len(missing) > 1:
        raise UsageError('both variants are missing; give them, such as --a "--exchange ag_rs" --b "--exchange symm".')
    if missing:
        (side,) = missing
        raise UsageError(
            f"{side.upper()} has no options and would run with defaults; add its options, "
            f'such as --{side} "--tp 1 --concurrency 8", and the common ones as --both "…".'
        )


def _parse_arguments(variants: Variants, side: str, command: Command) -> list[str]:
    """Return one side's options as arguments of the command. Raise UsageError, which names the side, if it rejects them."""
    arguments = [*split_command("--both", variants.both), *split_command(f"--{side}", getattr(variants, side))]
    if {"-h", "--help"} & set(arguments):
        raise UsageError(f"--{side} and --both take options of a run; see `dcpbench {variants.workload} --help`.")
    try:
        with command.make_context(variants.workload, list(arguments)) as context:
            typed = context.params
            given = [p.name for p in command.params if p.name in OURS and typed.get(p.name) != p.get_default(context)]
    except PARSER_ERROR as e:
        serves = variants.workload != "server" and _has_option(arguments, REMOTE)
        how = "Add --workload server." if serves else f"See `dcpbench {variants.workload} --help` for its options."
        raise UsageError(f"{_name_options(variants, side)}: {e.format_message()} {how}") from e
    if given:
        raise UsageError(f"{_name_options(variants, side)}: leave out {OURS[given[0]]}; ab sets it for every launch.")
    if "baseline" not in typed:
        return arguments
    has_baseline = typed["baseline"] is not None or (
        typed["config"] and "baseline" in _read_config(typed["config"], variants)
    )
    return arguments if has_baseline else [*arguments, "--no-baseline"]


def _name_options(variants: Variants, side: str) -> str:
    """Return the options that make up a side as typed, without secrets: `--a '--dcp 1' and --both '--tp 2'`."""
    names = (side, "both") if variants.both.strip() else (side,)
    texts = ((name, shlex.join(hide_headers(shlex.split(getattr(variants, name))))) for name in names)
    return " and ".join(f"--{name} {text!r}" for name, text in texts)


def _has_option(arguments: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether one of these options is among the arguments."""
    return any(word.partition("=")[0] in names for word in arguments)


def _read_config(path: Path, variants: Variants) -> Mapping[str, object]:
    """Return the options of a variant that its --config file sets."""
    from dcpbench.plan.serve_spec import SERVE_PARSERS
    from dcpbench.plan.spec import read_options

    return read_options(path, SERVE_PARSERS if variants.workload == "serve" else None)


def _load_state(folder: Path, launches: LaunchOptions, new: State) -> State:
    """Return the stored state of the folder, or a new one. Raise OutputError if the stored state has other options."""
    import msgspec

    from dcpbench.records.lines import UNREADABLE

    path = folder / STATE_FILE
    if path.exists() and not launches.force:
        if not launches.resume:
            raise OutputError(
                f"{folder} already holds launches of ab; add --resume to continue, --force to start over, or give another "
                "folder with -o."
            )
        try:
            old = msgspec.json.decode(path.read_bytes(), type=State)
        except (OSError, *UNREADABLE) as e:
            raise OutputError(f"{path} cannot be read ({e}); start over with --force.") from e
        if _remove_secrets(old) != _remove_secrets(dataclasses.replace(new, done=old.done)):
            raise OutputError(
                f"--resume: {folder} was begun with --a {shlex.join(old.a)!r} and --b {shlex.join(old.b)!r} of "
                f"{old.workload}; repeat these (--both counted in), or give another folder with -o."
            )
        return dataclasses.replace(new, done=old.done)
    if not launches.force and any((folder / name).exists() for name in ("a", "b", RECORDS_FILE)):
        raise OutputError(
            f"{folder} holds a run, or folders a or b, that ab did not write; give another folder with -o."
        )
    _write_state(folder, new)
    return new


def _remove_secrets(state: State) -> State:
    return dataclasses.replace(state, a=redaction.redact_values(state.a), b=redaction.redact_values(state.b))


def _write_state(folder: Path, state: State) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(_remove_secrets(state)), indent=2)
    with convert_output_errors(folder / STATE_FILE, "give another folder with -o"):
        write_file(folder / STATE_FILE, text + b"\n")


def _make_plans(variants: Variants, sides: Mapping[str, list[str]], command: Command) -> dict[str, Plan]:
    """Return the plans of both sides. An option of --both that has no effect on one side alone is left out there."""
    plans = {side: _make_plan(arguments, shlex.split(variants.both), command) for side, arguments in sides.items()}
    if set(plans["a"].unused) & set(plans["b"].unused):  # the error that names them
        return {side: _make_plan(arguments, (), command) for side, arguments in sides.items()}
    return plans


def _make_plan(arguments: list[str], both: Sequence[str], command: Command) -> Plan:
    """Return the plan of a side, without those of the options in `both` that have no effect on it."""
    unused: list[str] = []
    while True:
        plan, notes, part = io.StringIO(), io.StringIO(), Part()
        try:
            with contextlib.redirect_stdout(plan), contextlib.redirect_stderr(notes):
                run_command(command, [*arguments, "--dry-run", "--json"], caller=Caller(part=part))
        except DcpbenchError as e:
            flags = e.options if isinstance(e, UnusedOptionsError) else ()
            shared = [flag for flag in flags if remove_settings(both, [flag]) != list(both)]
            if shared:
                arguments, both = remove_settings(arguments, shared), remove_settings(both, shared)
                unused += shared
                continue
            return Plan(arguments=arguments, unused=tuple(unused), error=e)
        return Plan(
            arguments=arguments,
            unused=tuple(unused),
            rows=json.loads(plan.getvalue()),
            notes=notes.getvalue().splitlines(),
            devices=part.devices,
        )


def _check_plans(plans: Mapping[str, Plan]) -> None:
    """Raise the error of a variant that cannot run, with its side and its options."""
    for side, plan in plans.items():
        if plan.error is not None:
            raise type(plan.error)(f"--{side} {redaction.format_command_line(plan.arguments)!r}: {plan.error}")


def _print_plan(variants: Variants, plans: Mapping[str, Plan], command: Command) -> int:
    for side, plan in plans.items():
        print_stderr("\n".join(_format_side(side, plan, variants)))
        if code := run_command(command, [*plan.arguments, "--dry-run"]):
            return code
    turns = " ".join("".join(get_order(n)).upper() for n in range(1, min(variants.rounds, 10) + 1))
    print_stderr(f"{format_count(variants.rounds, 'round')}: {turns}{' …' if variants.rounds > 10 else ''}")  # noqa: PLR2004 -- as many as are shown
    return 0


def _print_plan_json(variants: Variants, plans: Mapping[str, Plan]) -> int:
    """Print the plan as JSON: the arguments and points of each variant, and the order of launches."""
    from dcpbench.commands.point_runner import print_json

    _check_plans(plans)
    found: dict[str, object] = {
        side: {
            "arguments": [variants.workload, *hide_headers(plan.arguments)],
            "left_out": plan.unused,
            "points": plan.rows,
        }
        for side, plan in plans.items()
    }
    launches = [side for n in range(1, variants.rounds + 1) for side in get_order(n)]
    print_json(found | {"rounds": variants.rounds, "launches": launches})
    return 0


def _print_start(folder: Path, plans: Mapping[str, Plan], variants: Variants, *, allow_cpu: bool) -> None:
    """Print once what all launches run, as their own dry runs state it, and a note if they run on a CPU.

    Raise the error of a variant's options before any variant is launched.
    """
    from dcpbench.launch.progress import CPU_NOTE, format_rejected

    _check_plans(plans)
    lines: list[str] = []
    for side, plan in plans.items():
        head, *left_out = _format_side(side, plan, variants)
        lines.append(f"{head}  ({format_count(sum(not row['reason'] for row in plan.rows), 'point')})")
        lines += left_out
        lines += [f"   cannot run: {line}" for line in format_rejected(plan.rows)]
        lines += [f"   {note}" for note in plan.notes]
    if any("cpu" in plan.devices for plan in plans.values()):
        judged = "" if allow_cpu else "; all of them will be UNDECIDED (--allow-cpu judges them all the same)"
        print_stderr(CPU_NOTE + judged)
    for line in lines:
        print_stderr(line)
    print_stderr(f"{format_count(variants.rounds, 'round')} of A and B in turn. Output: {folder}")


def _format_side(side: str, plan: Plan, variants: Variants) -> list[str]:
    """Return the command of a side, and a line about the options of --both that it lacks."""
    command = redaction.format_command_line(hide_headers(plan.arguments))
    left_out = f"   {format_list(plan.unused)} of --both: left out, without effect on {side.upper()}"
    return [f"{side.upper()}: dcpbench {variants.workload} {command}", *([left_out] if plan.unused else [])]


def _format_resume(folder: Path) -> str:
    return f"To go on, repeat the command with: -o {shlex.quote(str(folder))} --resume"


def _format_round(folder: Path, state: State, name: str) -> str:
    """Format the medians of one round, for the progress line. They decide no verdict."""
    from dcpbench.compare.rounds import format_round
    from dcpbench.compare.sides import read_side

    if not _has_ended_on_both(folder, state, name):
        return "no records"
    (a,), (b,) = (read_side([folder / side / name]) for side in "ab")
    return format_round(a, b)


def _has_ended_on_both(folder: Path, state: State, name: str) -> bool:
    """Return whether both launches of a round ended and left records."""
    return all(f"{side}/{name}" in state.done and (folder / side / name / RECORDS_FILE).exists() for side in "ab")
