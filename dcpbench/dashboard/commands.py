"""What `dcpbench dashboard build` and `serve` do, once their options are read."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.dashboard import finding, site
from dcpbench.errors import MissingPackageError, OutputError, UsageError, how_to_install
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.dashboard.site import Built

LOOPBACK = "127.0.0.1"
PORTS_TO_TRY = 100
INSTALL = how_to_install("dashboard")


def build(runs: Path, output: Path, *, force: bool, as_json: bool) -> int:
    """Write or bring up to date the site in `output`, and say what it holds; the exit code."""
    _check_apart(runs, output)
    began = time.monotonic()
    built = site.build(runs, output, force=force, tell=say)
    for sentence in built.skipped:
        say(f"left out: {sentence}")
    if as_json:
        write_json(json.dumps(_summary(built, time.monotonic() - began), indent=2, ensure_ascii=False) + "\n")
        return 0
    if not built.runs:
        say(f"{runs} holds no run that can be read; the site is empty.")
    pages = f"{built.pages_made:,} made, {built.pages_kept:,} unchanged"
    sys.stdout.write(
        f"{built.runs:,} runs, {built.points:,} points with {built.entries:,} results, {built.changes:,} changes; "
        f"pages of runs: {pages}\nWrote {output / 'index.html'}\n"
    )
    return 0


def serve(runs: Path, output: Path | None, *, port: int, open_browser: bool) -> int:
    """Show the site on this machine alone until Ctrl-C; the exit code.

    Raises MissingPackageError without starlette and uvicorn, UsageError for a port that is taken.
    """
    try:
        import uvicorn

        from dcpbench.dashboard import server, watching
    except ImportError as e:
        raise MissingPackageError(f"the server needs {e.name}; type: {INSTALL}") from e
    finding.stamps(runs)
    with _folder(output) as folder, _bound(port) as bound:
        if output is not None:
            _check_apart(runs, folder)
        watcher = watching.Watcher(runs, folder, say)
        watcher.refresh()
        url = f"http://{LOOPBACK}:{bound.getsockname()[1]}/"
        sys.stdout.write(f"Dashboard of {runs}: {url}  (this machine only; Ctrl-C ends it)\n")
        sys.stdout.flush()
        if open_browser:
            _open(url)
        follower = threading.Thread(target=watcher.follow, daemon=True)
        follower.start()
        config = uvicorn.Config(
            server.make_app(watcher),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        try:
            uvicorn.Server(config).run(sockets=[bound])
        except KeyboardInterrupt:
            say("Ended.")
        finally:
            watcher.stop()
            follower.join(timeout=5)
    return 0


@contextlib.contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """The folder of the site: the one given, or a temporary one, which SIGTERM removes as well."""
    if output is not None:
        yield output
        return
    before = signal.signal(signal.SIGTERM, _ended)
    made = tempfile.mkdtemp(prefix="dcpbench-dashboard-")
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _ended(number: int, _: object) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def _bound(port: int) -> Iterator[socket.socket]:
    """A socket of loopback alone. Raises UsageError with a port that is free where this one is not."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((LOOPBACK, port))
            made.listen()
        except OSError as e:
            free = _free(port)
            why = "is taken" if e.errno == errno.EADDRINUSE else f"cannot be used ({e.strerror})"
            raise UsageError(f"port {port} {why}; {free} is free: --port {free}") from e
        yield made


def _free(port: int) -> int:
    """The next port that nobody listens on; any free one past the last."""
    for candidate in (*range(max(port + 1, 1024), min(port + PORTS_TO_TRY, 65536)), 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried, contextlib.suppress(OSError):
            tried.bind((LOOPBACK, candidate))
            return int(tried.getsockname()[1])
    return 0


def _open(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        say(f"no browser could be started; open {url} yourself.")


def _check_apart(runs: Path, output: Path) -> None:
    """A site must not be where runs are written."""
    here, there = runs.resolve(), output.resolve()
    if here == there or there in here.parents:
        raise OutputError(f"{output} holds the runs themselves; give another folder with -o, such as -o site.")


def _summary(built: Built, seconds: float) -> dict[str, object]:
    plain = dataclasses.asdict(built)
    return plain | {"site": str(built.site), "seconds": round(seconds, 1)}
