"""What `dcpbench ab` does: two variants of sweep or serve, launched in turn, then compared round by round. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from dcpbench.commands.runs import INTERRUPTED, SOME_FAILED
from dcpbench.compare import commands
from dcpbench.compare.sides import differing, read_side
from dcpbench.errors import DcpbenchError, OutputError, UsageError
from dcpbench.launch import folders
from dcpbench.records.file import RECORDS_FILE
from dcpbench.show.numbers import span
from dcpbench.show.terminal import say
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcpbench.compare.judging import Options

STATE_FILE = "ab.json"
WORKLOADS = ("sweep", "serve")
MOST_ROUNDS = 1000
OURS = {
    "output": "-o",
    "resume": "--resume",
    "force": "--force",
    "dry_run": "--dry-run",
    "as_json": "--json",
    "nnodes": "--nnodes",
    "node_rank": "--node-rank",
}
"""Options that a variant cannot have, as `ab` gives them itself, or works on one machine."""

PARSER_ERROR: Any = typer.BadParameter.__base__
"""What a parser raises for any option that it cannot take; its module differs between versions of Typer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of `ab` that say what is run."""

    workload: str = "sweep"
    a: str = ""
    b: str = ""
    both: str = ""
    rounds: int = 8
    output: Path | None = None
    resume: bool = False
    force: bool = False
    dry_run: bool = False


class State(msgspec.Struct, kw_only=True):
    """What ab.json holds: what is run, and which launches have ended."""

    workload: str
    a: list[str]
    b: list[str]
    done: dict[str, int] = {}
    """Exit code of each launch that ended, such as `a/round-1`."""


def ab(wanted: Wanted, options: Options, out: commands.Out, known: Mapping[str, Any]) -> int:
    """`dcpbench ab`: returns the exit code. `known` are the commands of this command line, by name.

    Raises UsageError for options that neither side's command can take, and OutputError for a folder in use.
    """
    commands.check(options, out)
    sides = {side: _arguments(wanted, side, known) for side in "ab"}
    if not (sides["a"] or sides["b"]):
        raise UsageError('what differs? Give both variants, such as --a "--exchange ag_rs" --b "--exchange symm".')
    if sides["a"] == sides["b"]:
        say("A and B are the same: this shows what differs between launches of one variant.")
    if wanted.dry_run:
        return _plan(wanted, sides, known)
    folder = wanted.output or Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-ab-{wanted.workload}"
    with folders.locked(folder):
        state = _state(folder, wanted, sides)
        _check_values(wanted.workload, sides, known)
        code = _launch_all(folder, state, wanted, known)
        launches = [_complete(folder, state, side, wanted.rounds) for side in "ab"]
        shared = [n for n in launches[0] if n in launches[1]]
        if not shared:
            raise UsageError(f"no round has ended on both sides, so there is nothing to compare; read {folder}.")
        a, b = (read_side([folder / side / n for n in shared]) for side in "ab")
        across = differing(a, b)
        options = dataclasses.replace(options, across=across, paired=True)
        if across:
            say(f"Points are matched without {', '.join(across)}, in which the variants differ.")
        verdict = commands.conclude(a, b, options, dataclasses.replace(out, folder=folder))
    return code if code == INTERRUPTED else verdict or code


def order(number: int) -> tuple[str, str]:
    """Who goes first in a round, counted from 1: A B, B A, A B, …, so that an even drift cancels over two rounds."""
    return ("a", "b") if number % 2 else ("b", "a")


def _launch_all(folder: Path, state: State, wanted: Wanted, known: Mapping[str, Any]) -> int:
    """Every launch that has not ended yet, in order; SOME_FAILED where points failed, INTERRUPTED after Ctrl-C."""
    todo = [f"{side}/round-{n}" for n in range(1, wanted.rounds + 1) for side in order(n)]
    left = [name for name in todo if name not in state.done]
    began, code = time.monotonic(), 0
    for index, name in enumerate(left):
        eta = (time.monotonic() - began) / index * (len(left) - index) if index else None
        about = f", about {span(eta)} left" if eta else ""
        say(f"== {name.upper()[0]}, round {name.rpartition('-')[2]} of {wanted.rounds} ({_done(state, todo)}{about})")
        try:
            ended = _launch(folder / name, state, name[0], known, force=wanted.force)
        except (KeyboardInterrupt, SystemExit) as e:
            say(f"Interrupted in {name}. To go on, repeat the command with: -o {shlex.quote(str(folder))} --resume")
            number = e.code if isinstance(e, SystemExit) and isinstance(e.code, int) else INTERRUPTED
            if not _any_round(state):
                sys.exit(number)
            return INTERRUPTED
        except DcpbenchError as e:
            raise type(e)(f"{name}: {e}") from e
        if ended not in (0, SOME_FAILED):
            raise UsageError(f"{name}: `dcpbench {state.workload}` ended with {ended}; its messages are above.")
        state.done[name] = ended
        _write(folder, state)
    return SOME_FAILED if SOME_FAILED in (code, *state.done.values()) else code


def _launch(folder: Path, state: State, side: str, known: Mapping[str, Any], *, force: bool) -> int:
    """Run sweep or serve in this process, as typed; what it prints goes to stderr, as stdout is the comparison's."""
    arguments = [*getattr(state, side), "-o", str(folder)]
    holds = (folder / RECORDS_FILE).exists()
    arguments += ["--force"] if holds and force else ["--resume"] if holds else []
    with _as_typed([state.workload, *arguments]), contextlib.redirect_stdout(sys.stderr):
        ended = known[state.workload].main(arguments, prog_name=f"dcpbench {state.workload}", standalone_mode=False)
    return int(ended or 0)


@contextlib.contextmanager
def _as_typed(arguments: Sequence[str]) -> Iterator[None]:
    """Records name the command that would repeat them, which is not that of `ab`."""
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _arguments(wanted: Wanted, side: str, known: Mapping[str, Any]) -> list[str]:
    """One side's options as the command's own parser takes them. Raises UsageError, which names the side."""
    if wanted.workload not in WORKLOADS:
        raise UsageError(f"--workload {wanted.workload}: give {' or '.join(WORKLOADS)}.")
    if not 1 <= wanted.rounds <= MOST_ROUNDS:
        raise UsageError(f"--rounds {wanted.rounds} cannot be; give 1 to {MOST_ROUNDS}, such as --rounds 8.")
    if wanted.resume and wanted.force:
        raise UsageError("--resume and --force contradict each other; --resume goes on, --force starts over.")
    if wanted.resume and wanted.output is None:
        raise UsageError("--resume needs the run to go on with; add for example -o runs/NAME.")
    text = getattr(wanted, side)
    try:
        arguments = [*shlex.split(wanted.both), *shlex.split(text)]
    except ValueError as e:
        raise UsageError(f"--{side} or --both: {e}; close every quote.") from e
    if {"-h", "--help"} & set(arguments):
        raise UsageError(f"--{side} and --both take options of a run; see `dcpbench {wanted.workload} --help`.")
    command = known[wanted.workload]
    try:
        with command.make_context(wanted.workload, list(arguments)) as context:
            typed = context.params
            given = [p.name for p in command.params if p.name in OURS and typed.get(p.name) != p.get_default(context)]
    except PARSER_ERROR as e:
        raise UsageError(
            f"--{side} {text!r}: {e.format_message()} See `dcpbench {wanted.workload} --help` for its options."
        ) from e
    if given:
        raise UsageError(f"--{side} {text!r}: leave {OURS[given[0]]} out; ab itself says where and how often to run.")
    return arguments


def _state(folder: Path, wanted: Wanted, sides: Mapping[str, list[str]]) -> State:
    """What the folder holds already, or a new beginning. Raises OutputError where the two do not go together."""
    path = folder / STATE_FILE
    new = State(workload=wanted.workload, a=sides["a"], b=sides["b"])
    if path.exists() and not wanted.force:
        if not wanted.resume:
            raise OutputError(
                f"{folder} already holds launches of ab; add --resume to go on, --force to start over, or give another "
                "folder with -o."
            )
        try:
            old = msgspec.json.decode(path.read_bytes(), type=State)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise OutputError(f"{path} cannot be read ({e}); start over with --force.") from e
        if (old.workload, old.a, old.b) != (new.workload, new.a, new.b):
            raise OutputError(
                f"--resume: {folder} was begun with --a {shlex.join(old.a)!r} and --b {shlex.join(old.b)!r} of "
                f"{old.workload}; repeat these (--both counted in), or give another folder with -o."
            )
        return old
    if not wanted.force and any((folder / side).exists() for side in "ab"):
        raise OutputError(f"{folder} holds folders a or b that are not of ab; give another folder with -o.")
    _write(folder, new)
    return new


def _write(folder: Path, state: State) -> None:
    try:
        write_file(folder / STATE_FILE, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    except OSError as e:
        raise OutputError(f"{folder / STATE_FILE} cannot be written ({e.strerror}); give another folder.") from e


def _plan(wanted: Wanted, sides: Mapping[str, list[str]], known: Mapping[str, Any]) -> int:
    for side, arguments in sides.items():
        say(f"== {side.upper()}: dcpbench {wanted.workload} {shlex.join(arguments)}")
        code = known[wanted.workload].main([*arguments, "--dry-run"], standalone_mode=False)
        if code:
            return int(code)
    turns = " ".join("".join(order(n)).upper() for n in range(1, min(wanted.rounds, 10) + 1))
    say(f"{wanted.rounds} rounds: {turns}{' …' if wanted.rounds > 10 else ''}")  # noqa: PLR2004 -- as many as are shown
    return 0


def _check_values(workload: str, sides: Mapping[str, list[str]], known: Mapping[str, Any]) -> None:
    """Raise what a variant's options are wrong by before the other one has run for nothing: a dry run, not shown."""
    for side, arguments in sides.items():
        nowhere = io.StringIO()
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                known[workload].main([*arguments, "--dry-run"], standalone_mode=False)
        except DcpbenchError as e:
            raise type(e)(f"--{side} {shlex.join(arguments)!r}: {e}") from e


def _complete(folder: Path, state: State, side: str, rounds: int) -> list[str]:
    """Rounds of a side that ended and left records."""
    names = [f"round-{n}" for n in range(1, rounds + 1)]
    return [n for n in names if f"{side}/{n}" in state.done and (folder / side / n / RECORDS_FILE).exists()]


def _any_round(state: State) -> bool:
    return any(name.startswith("a/") and f"b/{name[2:]}" in state.done for name in state.done)


def _done(state: State, todo: Sequence[str]) -> str:
    return f"{sum(name in state.done for name in todo)} of {len(todo)} launches done"
