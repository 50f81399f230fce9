"""Implement `dcpbench dashboard build` and `serve`: show the history of many runs as a static site or a local server."""

import contextlib
import dataclasses
import errno
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcpbench.commands.command import register_command
from dcpbench.errors import MissingPackageError, OutputError, UsageError, format_install_hint
from dcpbench.show.terminal import ProgressLine, print_stderr
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    import socket

    from dcpbench.dashboard.site import BuildResult

LOOPBACK = "127.0.0.1"
PORTS_TO_TRY = 100
NEWEST_PAGES = 100  # a page takes about 0.4 s of CPU time
INSTALL = format_install_hint("dashboard")

app = typer.Typer(
    name="dashboard",
    no_args_is_help=True,
    help="Show many runs together: the history of each point with its changes, and a page for each run.\n\n"
    "Start with: dcpbench dashboard serve runs",
)
Runs = Annotated[
    Path, typer.Argument(metavar="RUNS_DIR", show_default=False, help="Folder with runs in it, at any depth.")
]


@register_command(app)
def build(
    runs: Runs,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder of the site: new, empty or an older site.")
    ] = Path("site"),
    pages: Annotated[
        str,
        typer.Option(
            "--pages",
            metavar="N|all",
            help="Make the report pages of the newest N runs, which take most of the time. Pages of older runs that the "
            "site holds stay. The index and the histories always hold all runs.",
        ),
    ] = str(NEWEST_PAGES),
    force: Annotated[bool, typer.Option("--force", help="Make pages again also for runs that did not change.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was built as JSON.")] = False,
) -> int:
    """Write a static site, or bring it up to date.

    The site needs no server and no network: open site/index.html, or publish the folder (examples/github-pages.yml).
    Record files that cannot be read are left out, with a message for each.

    For example:

      dcpbench dashboard build runs -o site
    """
    import json

    from dcpbench.dashboard import site
    from dcpbench.show.streams import write_json

    newest = _read_page_count(pages)
    _check_apart(runs, output)
    began = time.monotonic()
    with ProgressLine() as line:
        built = site.build(runs, output, force=force, on_progress=line, newest=newest, emptied=False)
    for sentence in built.skipped:
        print_stderr(f"left out: {sentence}")
    if as_json:
        summary = dataclasses.asdict(built) | {"site": str(built.site), "seconds": round(time.monotonic() - began, 1)}
        write_json(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(_format_summary(built, output))
    return 0


def _read_page_count(text: str) -> int | None:
    """Return the value of --pages; None for all runs."""
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--pages is {text!r}; give a number of runs or all, such as --pages {NEWEST_PAGES}.")
    return int(text)


def _format_summary(built: "BuildResult", output: Path) -> str:
    """Format how many runs, points and outcomes a build found, and how many pages it wrote."""
    pages = f"{built.pages_made:,} made, {built.pages_kept:,} unchanged"
    if built.pages_left:
        pages += f", {built.pages_left:,} of older runs not made (--pages all makes them)"
    return (
        f"{format_count(built.runs, 'run')}, {format_count(built.points, 'point')} with {format_count(built.entries, 'outcome')}, "
        f"{format_count(built.changes, 'change')}; "
        f"pages of runs: {pages}\nWrote {output / 'index.html'}\n"
    )


@register_command(app)
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
) -> int:
    """Serve the site on this machine only, and update it while runs are in progress.

    Only 127.0.0.1 answers; from elsewhere, forward the port: ssh -L 8321:127.0.0.1:8321 MACHINE

    For example:

      dcpbench dashboard serve runs --open
    """
    import webbrowser

    try:
        import uvicorn

        from dcpbench.dashboard import discovery, watching, web_server
    except ImportError as e:
        raise MissingPackageError(f"the server needs {e.name}; type: {INSTALL}") from e
    discovery.list_stamps(runs)
    with _open_folder(output) as folder, _bind_port(port) as bound:
        if output is not None:
            _check_apart(runs, folder)
        watcher = watching.Watcher(runs, folder, print_stderr)
        watcher.refresh()
        url = f"http://{LOOPBACK}:{bound.getsockname()[1]}/"
        sys.stdout.write(f"Dashboard of {runs}: {url}  (this machine only; Ctrl-C ends it)\n")
        sys.stdout.flush()
        if open_browser and not webbrowser.open(url):
            print_stderr(f"no browser could be started; open {url} yourself.")
        follower = threading.Thread(target=watcher.follow, daemon=True)
        follower.start()
        config = uvicorn.Config(
            web_server.make_app(watcher),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        try:
            uvicorn.Server(config).run(sockets=[bound])
        except KeyboardInterrupt:
            print_stderr("Ended.")
        finally:
            watcher.stop()
            follower.join(timeout=5)
    return 0


@contextlib.contextmanager
def _open_folder(output: Path | None) -> Iterator[Path]:
    """Yield the folder of the site: the given one, or a temporary one, which is also removed on SIGTERM."""
    if output is not None:
        yield output
        return
    import tempfile

    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    made = tempfile.mkdtemp(prefix="dcpbench-dashboard-")
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _bind_port(port: int) -> Iterator["socket.socket"]:
    """Yield a socket bound to the loopback address. If the port is not free, raise UsageError naming one that is."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((LOOPBACK, port))
            made.listen()
        except OSError as e:
            free = _find_free_port(port)
            why = "is taken" if e.errno == errno.EADDRINUSE else f"cannot be used ({e.strerror})"
            raise UsageError(f"port {port} {why}; {free} is free: --port {free}") from e
        yield made


def _find_free_port(port: int) -> int:
    """Return the next free port, or any free port if the search fails."""
    import socket

    for candidate in (*range(max(port + 1, 1024), min(port + PORTS_TO_TRY, 65536)), 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried, contextlib.suppress(OSError):
            tried.bind((LOOPBACK, candidate))
            return int(tried.getsockname()[1])
    return 0


def _check_apart(runs: Path, output: Path) -> None:
    """Raise OutputError if the site's folder holds the runs."""
    here, there = runs.resolve(), output.resolve()
    if here == there or there in here.parents:
        raise OutputError(f"{output} holds the runs themselves; give another folder with -o, such as -o site.")
