"""Implement `dcpbench hang`: find the rank that blocked a job that hung."""

from pathlib import Path
from typing import Annotated

import typer

from dcpbench.commands.command import register_command

app = typer.Typer(
    name="hang",
    no_args_is_help=True,
    help="Find which rank blocked a job that hung: a run of dcpbench, or any program with stack dumps.\n\n"
    "Start with: dcpbench hang explain runs/monday",
)


@register_command(app)
def explain(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR|FILES",
            help="Folder of a run with points that hung, one folder of its hangs/, dumps of py-spy, faulthandler or torch's flight recorder (JSON), or a folder of dumps.",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Also write the diagnosis as an HTML page with the stacks of all threads."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --html if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with one object for each hang.")] = False,
) -> int:
    """Print which rank is behind, its phase, layer, collective and line, and which ranks wait for it.

    A fact that the files do not contain is `unknown`. No file is unpickled.

    For example:

      dcpbench hang explain runs/monday

      for pid in $(pgrep -f my_server); do py-spy dump --pid $pid > dump-$pid.txt; done; dcpbench hang explain dump-*.txt
    """
    from dcpbench.errors import OutputError, UsageError
    from dcpbench.hangs import format as hang_format
    from dcpbench.records.disks import convert_output_errors
    from dcpbench.show.terminal import print_stderr
    from dcpbench.show.whole_files import write_file

    if "" in paths:
        raise UsageError("a path is empty; name the folder of a run, or stack dumps.")
    if html is not None and html.exists() and not force:
        raise OutputError(
            f"--html {html} would be written over; give the page a separate name, such as --html hang.html, or add --force."
        )
    hangs = hang_format.read_hangs([Path(path) for path in paths])
    if html is not None:
        with convert_output_errors(html, "give another file with --html"):
            write_file(html, hang_format.render_page(hangs).encode())
    if as_json:
        from dcpbench.commands.point_runner import print_json

        print_json([hang_format.to_json(hang) for hang in hangs])
    else:
        from dcpbench.show.terminal import make_console

        for hang in hangs:
            make_console().print(hang_format.format_text(hang), markup=False, highlight=False, soft_wrap=True)
    if html is not None:
        print_stderr(f"Wrote {html}")
    return 0


@app.callback()
def _group() -> None:
    """Keep `explain` a subcommand, although it is the only one."""
