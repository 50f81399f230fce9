"""`dcpbench dashboard build` and `serve`: their options alone. Nothing heavy is imported at the top."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="dashboard",
    no_args_is_help=True,
    help="Show many runs together: the history of every point with its changes, and a page per run.\n\n"
    "Start with: dcpbench dashboard serve runs",
)
Runs = Annotated[
    Path, typer.Argument(metavar="RUNS_DIR", show_default=False, help="Folder with runs in it, at any depth.")
]


@app.command()
def build(
    runs: Runs,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder of the site: new, empty or an older site.")
    ] = Path("site"),
    force: Annotated[
        bool, typer.Option("--force", help="Make the pages of all runs again, also of those that did not change.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was built as JSON.")] = False,
) -> None:
    """Write a static site, or bring it up to date.

    The site needs no server and no network: open site/index.html, or publish the folder (examples/github-pages.yml).
    Record files that cannot be read are left out, each with a sentence.

    For example:

      dcpbench dashboard build runs -o site
    """
    from dcpbench.dashboard import commands

    raise typer.Exit(commands.build(runs, output, force=force, as_json=as_json))


@app.command()
def serve(
    runs: Runs,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port on 127.0.0.1; 0 takes any free one.")
    ] = 8321,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser on this machine.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder of the site, to keep it. Default: a temporary one."),
    ] = None,
) -> None:
    """Show the site on this machine alone, and bring it up to date while runs are at work.

    Only 127.0.0.1 answers; from elsewhere, forward the port: ssh -L 8321:127.0.0.1:8321 MACHINE

    For example:

      dcpbench dashboard serve runs --open
    """
    from dcpbench.dashboard import commands

    raise typer.Exit(commands.serve(runs, output, port=port, open_browser=open_browser))
