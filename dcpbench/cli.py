"""Define the command line: its commands and exit codes.

Each command is a file of commands/, imported when the command is used; nothing heavy is imported here. Every DcpbenchError
ends as `error: message` with its own exit code; unexpected exceptions keep their traceback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench import __version__
from dcpbench.commands import catalogue
from dcpbench.errors import EXIT_CODES, DcpbenchError, DiskError, ExitCode, OutputError
from dcpbench.points import redaction
from dcpbench.show import streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.commands.catalogue import Entry

INTERRUPTED = "\nInterrupted. To start again, repeat the command."
REFUSED = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def __getattr__(name: str) -> object:
    """Return `app`, the Typer application with all commands, which is built when something asks for it."""
    if name == "app":
        return make_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def make_app() -> typer.Typer:
    """Return the application with all commands."""
    return _make_app(catalogue.ENTRIES)


def choose_app(args: Sequence[str]) -> typer.Typer:
    """Return an application for these arguments that imports no command without need.

    It has only the command that the arguments begin with, or, if they name no command, all commands by their summaries.
    """
    if args and args[0] in catalogue.BY_NAME:
        return _make_app([catalogue.BY_NAME[args[0]]])
    return make_app() if not catalogue.BY_NAME.keys().isdisjoint(args) else _make_app(catalogue.ENTRIES, load=False)


def _make_app(entries: Iterable[Entry], *, load: bool = True) -> typer.Typer:
    """Return an application with these commands; without `load` they are only listed in its help."""
    app = typer.Typer(
        name="dcpbench",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Benchmark parallel layouts for serving long-context models: tensor (tp), decode-context (dcp) and attention-data (dp) "
        "parallelism.\n\nStart with: dcpbench sweep --tp 8 --dcp 8\n\n"
        f"Exit codes: {' · '.join(f'{code:d} {meaning}' for code, meaning in EXIT_CODES.items())}.",
    )
    app.callback()(_root)
    for entry in entries:
        if load:
            from dcpbench.commands.command import add_command

            add_command(app, entry)
        else:
            app.command(name=entry.name, help=entry.summary, rich_help_panel=entry.panel)(_only_listed)
    return app


def _only_listed() -> None:
    raise AssertionError("a command that is only listed cannot run")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"dcpbench {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    del version


def main(args: list[str] | None = None) -> None:
    """Run a command; convert a DcpbenchError to one sentence and an exit code."""
    streams.prepare_streams()
    redaction.reset_secrets()
    redaction.register_environment()
    redaction.register_command_line(sys.argv[1:] if args is None else args)
    try:
        try:
            choose_app(sys.argv[1:] if args is None else args)(args=args, prog_name="dcpbench")
        finally:
            sys.stdout.flush()
    except DcpbenchError as e:
        from dcpbench.show.text import (
            make_printable,  # names in a message may contain control sequences
        )

        _print_and_exit("\n".join(map(make_printable, f"error: {e}".split("\n"))), e.exit_code)
    except BrokenPipeError:
        _print_and_exit("", streams.CLOSED)
    except KeyboardInterrupt:  # while the command was imported, before Typer runs
        _print_and_exit(INTERRUPTED, ExitCode.INTERRUPTED)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # Click and Rich exit with 1, which is a verdict here
            _print_and_exit("", streams.CLOSED)
        if isinstance(
            getattr(e.__context__, "__cause__", None), KeyboardInterrupt
        ):  # Typer turned it into an exit code
            _print_and_exit(INTERRUPTED, ExitCode.INTERRUPTED)
        raise
    except OSError as e:
        error = _convert_os_error(e)
        if error is None:
            raise
        _print_and_exit(f"error: {error}", error.exit_code)


def _convert_os_error(e: OSError) -> DcpbenchError | None:
    """Return an error of ours for a disk that cannot be written, and for a file that may not be used; None for others."""
    from dcpbench.records.disks import describe_disk_error, get_disk_error_number
    from dcpbench.show.text import make_printable

    name = "" if e.filename is None else make_printable(os.fsdecode(e.filename))
    if (number := get_disk_error_number(e)) is not None:
        what = name or "what the command prints, or a file"
        remedy = describe_disk_error(number)[1]
        return DiskError(f"{what} could not be written ({e.strerror}); {remedy}, then repeat the command.", number)
    if name and e.errno in REFUSED:
        return OutputError(f"{name} cannot be used ({e.strerror}); name another file or folder.")
    return None


def _print_and_exit(text: str, code: int) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed, too
        sys.stderr.write(f"{text}\n" if text else "")
    streams.drop_output()
    sys.exit(code)


if __name__ == "__main__":
    main()
