"""Keep a site up to date during runs: watch record files, and rebuild what changed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dcpbench.dashboard import discovery, pages, site
from dcpbench.errors import DcpbenchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.dashboard.discovery import RunData, Stamp

POLL_INTERVAL_S = 2.0


class Watcher:
    """Watch a folder of runs and update the site that shows it.

    Pages of runs are made on request, so that a machine that measures does not spend time on reports that are never
    read.
    """

    def __init__(self, root: Path, out: Path, on_progress: Callable[[str], None]) -> None:
        self.root = root
        self.site = out
        self.note = ""  # error of the last build; empty if it succeeded
        self._on_progress = on_progress
        self._known: dict[Stamp, RunData] = {}
        self._seen: list[Stamp] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def refresh(self) -> bool:
        """Rebuild if a record file was added, removed or changed; return True if one was; raise the errors of site.build."""
        now = discovery.list_stamps(self.root)
        if now == self._seen:
            return False
        with self._lock:
            site.build(self.root, self.site, on_progress=self._on_progress, known=self._known, newest=0)
        self._seen = now
        return True

    def follow(self) -> None:
        """Refresh until `stop`; errors are shown on the page, and the build is repeated when the records change."""
        while not self._stop.wait(POLL_INTERVAL_S):
            try:
                self.refresh()
            except UsageError as e:
                self.note = f"The page shows the last state that could be read: {e}"
            except DcpbenchError as e:
                self.note = str(e)
            else:
                self.note = ""

    def stop(self) -> None:
        """End `follow`."""
        self._stop.set()

    def make_page(self, slug: str) -> str:
        """Make a run's page if it is missing or older than its records; return why there is none, or an empty string."""
        with self._lock:
            run = next((run for run in self._known.values() if run.slug == slug), None)
            if run is None or pages.is_made(self.site, run, site.read_page_keys(self.site)):
                return ""
            note = pages.make_page(self.site, run)
            if not note:
                site.record_page(self.site, run)
            return note
