"""Define the command line: its commands and exit codes.

Each command is a file of commands/; nothing heavy is imported here. Every DcpbenchError ends as `error: message` with
its own exit code; unexpected exceptions keep their traceback.
"""

import contextlib
import errno
import os
import sys
from typing import Annotated

import typer

from dcpbench import __version__
from dcpbench.commands import bench, dashboard, hang, records, submit, syncs
from dcpbench.commands.ab import ab
from dcpbench.commands.calibrate import calibrate
from dcpbench.commands.command import command
from dcpbench.commands.compare import compare
from dcpbench.commands.doctor import doctor
from dcpbench.commands.env import env
from dcpbench.commands.export import export
from dcpbench.commands.import_ import import_
from dcpbench.commands.machines import machines
from dcpbench.commands.recommend import recommend
from dcpbench.commands.report import report
from dcpbench.commands.serve import serve
from dcpbench.commands.show import show
from dcpbench.commands.sweep import sweep
from dcpbench.commands.top import top
from dcpbench.commands.verify import verify
from dcpbench.errors import EXIT_CODES, DcpbenchError, DiskError, ExitCode, OutputError
from dcpbench.points import redaction
from dcpbench.show import streams

app = typer.Typer(
    name="dcpbench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure how to serve long-context MLA models: tensor (tp), decode-context (dcp) and attention-data (dp) "
    "parallelism.\n\nStart with: dcpbench sweep --tp 8 --dcp 8\n\n"
    f"Exit codes: {' · '.join(f'{code:d} {meaning}' for code, meaning in EXIT_CODES.items())}.",
)
REFUSED = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
MEASURE, READ, CHECK = "Measure", "Read results", "Check"
COMMANDS = {
    MEASURE: (sweep, serve, ab, calibrate),
    READ: (recommend, compare, report, show, top, export, import_),
    CHECK: (verify, doctor, env, machines),
}
for title, members in COMMANDS.items():
    for member in members:
        command(app, name=member.__name__.rstrip("_"), rich_help_panel=title)(member)
app.add_typer(bench.app, rich_help_panel=MEASURE)
app.add_typer(submit.app, rich_help_panel=MEASURE)
app.add_typer(syncs.app, rich_help_panel=CHECK)
app.add_typer(hang.app, rich_help_panel=CHECK)
app.add_typer(dashboard.app, rich_help_panel=READ)
app.add_typer(records.app, rich_help_panel=CHECK)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"dcpbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    del version


def main(args: list[str] | None = None) -> None:
    """Run a command; convert a DcpbenchError to one sentence and an exit code."""
    streams.settle()
    redaction.forget()
    redaction.register_environment()
    redaction.register_words(sys.argv[1:] if args is None else args)
    try:
        try:
            app(args=args, prog_name="dcpbench")
        finally:
            sys.stdout.flush()
    except DcpbenchError as e:
        from dcpbench.show.text import printable  # names in a message come from others, and a terminal would obey them

        _end("\n".join(map(printable, f"error: {e}".split("\n"))), e.exit_code)
    except BrokenPipeError:
        _end("", streams.CLOSED)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # for which Click and Rich end with 1, and that is a verdict
            _end("", streams.CLOSED)
        if isinstance(
            getattr(e.__context__, "__cause__", None), KeyboardInterrupt
        ):  # which Typer made a code, in silence
            _end("\nInterrupted. To begin anew, type the same again.", ExitCode.INTERRUPTED)
        raise
    except OSError as e:
        error = _named(e)
        if error is None:
            raise
        _end(f"error: {error}", error.exit_code)


def _named(e: OSError) -> DcpbenchError | None:
    """Return an error of ours for a disk that cannot be written, and for a file that may not be used; None for others."""
    from dcpbench.records.disks import error_number
    from dcpbench.show.text import printable

    name = "" if e.filename is None else printable(os.fsdecode(e.filename))
    if (number := error_number(e)) is not None:
        what = name or "what the command prints, or a file"
        return DiskError(f"{what} could not be written ({e.strerror}); make room, or check the disk.", number)
    if name and e.errno in REFUSED:
        return OutputError(f"{name} cannot be used ({e.strerror}); name another file or folder.")
    return None


def _end(said: str, code: int) -> None:
    with contextlib.suppress(OSError):  # stderr may have no reader either
        sys.stderr.write(f"{said}\n" if said else "")
    streams.forget_output()
    sys.exit(code)


if __name__ == "__main__":
    main()
