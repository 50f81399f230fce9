"""Implement `dcpbench records check` and `repair`: find unreadable lines in a run's records, and remove them."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands import options as opt
from dcpbench.commands.command import register_command
from dcpbench.errors import ExitCode
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import format_count, make_printable

if TYPE_CHECKING:
    from dcpbench.records.repair import Audit, Fault

app = typer.Typer(
    name="records",
    no_args_is_help=True,
    help="Check the records of runs line by line, and remove damaged lines.\n\n"
    "Start with: dcpbench records check runs/monday",
)
MAX_FAULTS = 10  # maximum number of unreadable lines that are listed one by one
Run = Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="A run's folder, or its records.jsonl.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")]


@register_command(app)
def check(runs: opt.Runs, as_json: AsJson = False) -> int:
    """Check every line of the records; nothing is changed.

    Each line has a checksum, which detects any flipped bit. Exit codes: 1 if a line cannot be read, 2 if there are no
    records. While a run is in progress, its last line may be incomplete.

    Example: dcpbench records check runs/monday
    """
    import msgspec

    from dcpbench.commands.point_runner import print_json
    from dcpbench.records.repair import audit_file, require_records

    found = [audit_file(run) for run in runs]
    if as_json:
        print_json([msgspec.to_builtins(one) for one in found])
    else:
        for one in found:
            print("\n".join(map(make_printable, _format_audit(one))))  # noqa: T201 - the answer
    for one in found:
        require_records(one)
    return ExitCode.WRONG if any(one.faults for one in found) else 0


@register_command(app)
def repair(
    run: Run,
    as_json: AsJson = False,
    strange: Annotated[
        bool,
        typer.Option(
            "--strange",
            help="Also take out undamaged lines that this version cannot read: of another version, or "
            "rewritten by another program.",
        ),
    ] = False,
) -> int:
    """Remove unreadable lines from a run's records, and keep a copy of the original file.

    Readable records are never lost: their lines stay byte for byte, and complete records inside a damaged line get lines
    of their own. The command is refused while a run is writing. To measure the removed points again, repeat the run's
    command with --resume.

    Example: dcpbench records repair runs/monday
    """
    import msgspec

    from dcpbench.commands.point_runner import print_json
    from dcpbench.launch.folders import lock_folder
    from dcpbench.records import repair as repairing
    from dcpbench.records.file import require_record_file
    from dcpbench.records.folder import get_run_folder

    require_record_file(run)
    with lock_folder(get_run_folder(run), repairing.COPY_FIRST):
        done = repairing.repair_file(run, strange=strange)
    if as_json:
        print_json(msgspec.to_builtins(done))
        return 0
    for fault in done.left:
        print_stderr(f"line {fault.line}, {fault.kind}: left unchanged ({fault.why}); --strange removes it, too")
    if not done.taken_out:
        can = "the other" if done.left else "all"
        print_stderr(f"{done.file}: {can} {format_count(done.kept, 'record')} can be read; nothing was changed.")
        return 0
    for fault in done.taken_out:
        saved = f"; {format_count(fault.whole_records, 'record')} inside it kept" if fault.whole_records else ""
        print_stderr(f"line {fault.line}, {fault.kind}: taken out ({fault.length_bytes:,} bytes){saved}")
    print_stderr(
        f"{done.file}: {format_count(done.kept, 'record')} kept. The file as it was: {done.backup}. To measure again what is "
        "missing, repeat the run's command with --resume."
    )
    return 0


def _format_whole_records(fault: "Fault") -> str:
    return (
        f" Repair keeps {format_count(fault.whole_records, 'whole record')} inside it." if fault.whole_records else ""
    )


def _format_audit(found: "Audit") -> list[str]:
    from dcpbench.records.checks import format_repair_command
    from dcpbench.records.repair import STRANGE

    lines = _format_faults(found)
    without = f", {found.unsealed:,} of them without a checksum" if found.unsealed else ""
    lines.append(
        f"{found.file}: {format_count(found.records, 'record')} of {format_count(found.points, 'point')} can be read{without}."
    )
    if found.samples_missing:
        lines.append(
            f"{found.file}: {format_count(len(found.samples_missing), 'file')} of requests not in its folder, such as "
            f"{found.samples_missing[0]}; copy the whole folder of a run."
        )
    lines += found.advice
    if found.faults and (found.records or any(fault.whole_records for fault in found.faults)):
        strange = any(fault.kind == STRANGE for fault in found.faults)
        command = format_repair_command(Path(found.file), strange=strange)
        lines.append(f"To take out what cannot be read, and keep a copy: {command}")
    return lines


def _format_faults(found: "Audit") -> list[str]:
    """Format the first unreadable lines with their errors, and the number of others by kind."""
    lines = [
        f"{found.file}, line {fault.line}: {fault.kind}: {fault.why}.{_format_whole_records(fault)}"
        for fault in found.faults[:MAX_FAULTS]
    ]
    more = Counter(fault.kind for fault in found.faults[MAX_FAULTS:])
    if more:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in more.items())
        lines.append(
            f"{found.file}: {format_count(more.total(), 'more line')} cannot be read ({kinds}); --json has all."
        )
    return lines
