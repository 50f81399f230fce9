"""Check one test for synchronisation, live or by a dry run; the fixture `cuda_syncs` returns the result."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import CapacityError
from dcpbench.syncs.gating.config import Allow, find_config, find_root
from dcpbench.syncs.gating.gate import Gate, apply_permissions
from dcpbench.syncs.sites import format_syncs, group_into_sites
from dcpbench.syncs.sync_report import Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.syncs.dry_run import DryRun
    from dcpbench.syncs.live import Watch
    from dcpbench.syncs.sites import Sync


def resolve_mode(mode: str) -> tuple[str, str]:
    """Return the detector that `auto`, `live`, `dry-run` or `off` selects on this machine, and the reason."""
    if mode == "off":
        return "off", "not checked"
    if mode == "dry-run":
        return "dry-run", "found by a dry run, as requested"
    import torch

    if torch.cuda.is_available():
        return "live", f"seen live on {torch.cuda.get_device_name()}"
    if mode == "live":
        raise CapacityError("cuda_sync_mode = live needs a CUDA device, and there is none; use auto or dry-run.")
    return "dry-run", "found by a dry run, as there is no CUDA device"


class SyncCheck:
    """Hold what synchronises in a test function, without its fixtures."""

    def __init__(self, mode: str, *, threads: str, allow: Sequence[str], root: Path | None = None) -> None:
        """Resolve the mode; `allow` are globs over `module.function`, as for `dcpbench syncs scan --allow`.

        What pyproject.toml and comments in the repository around `root` allow is allowed here, too. Raise UsageError if that
        pyproject.toml cannot be used.
        """
        self.mode, self.reason = resolve_mode(mode)  # `live`, `dry-run` or `off`, and the reason
        self._threads = threads
        self._thread = 0  # `threading.get_ident()` of the thread that runs the test
        here = (root or Path.cwd()).resolve()
        repository = find_root(here)
        marked = [Allow(function=glob, or_range=True, reason="the test's mark", source="allow") for glob in allow]
        self._gate = Gate(root=repository, allow=(*marked, *find_config(here, repository).allow))
        self._stack = contextlib.ExitStack()
        self._watch: Watch | None = None
        self._run: DryRun | None = None
        self._first = self._first_op = 0
        self._last: int | None = None
        self._ops = 0
        self.unmeasured: list[str] = []  # dry run, with fixtures: operators without a measurement of waits

    @property
    def syncs(self) -> list[Sync]:
        """Return the synchronisations of the test function so far, without those that are allowed or only may block."""
        if self._watch is not None:
            seen = self._watch.syncs
        elif self._run is not None:
            seen = self._run.syncs[self._first : self._last]
            seen = [s for s in seen if self._threads == "all" or s.thread_id == self._thread]
        else:
            seen = []
        seen = [s for s in seen if not (s.may_block or s.allowed)]
        sites = [site for s in seen for site in group_into_sites([s], root=self._gate.root)]
        apply_permissions(sites, self._gate)
        return [s for s, site in zip(seen, sites, strict=True) if not site.allowed]

    @property
    def count(self) -> int:
        """Return the number of synchronisations so far."""
        return len(self.syncs)

    @property
    def unused(self) -> bool:
        """Return True if the test function put nothing on the virtual GPU, so that its count proves nothing."""
        return self._run is not None and self._last is not None and not self._ops and not self.count

    def text(self) -> str:
        """Return every line that synchronised, with its source, the reason and the usual fix."""
        return format_syncs(self.syncs)

    def report(self) -> Report:
        """Return all synchronisations, allowed or not, as `dcpbench syncs` shows them; for a dry run including the
        fixtures.
        """
        if self._watch is not None:
            return self._watch.report()
        return self._run.report(program="test") if self._run is not None else Report()

    def start(self) -> None:
        """Start before the test's fixtures are set up."""
        if self.mode == "dry-run":
            from dcpbench.syncs.dry_run import dry_run

            self._run = self._stack.enter_context(dry_run())

    def stop(self) -> None:
        """Stop after the test's fixtures were torn down."""
        self._stack.close()

    @contextlib.contextmanager
    def record_call(self) -> Iterator[None]:
        """Watch while the test function runs."""
        self._thread = threading.get_ident()
        if self.mode == "live":
            from dcpbench.syncs.live import Watch

            self._watch = Watch(threads="all" if self._threads == "all" else "current")
            with self._watch:
                yield
            return
        if self._run is not None:
            self._first, self._first_op = len(self._run.syncs), self._run.ops
        try:
            yield
        finally:
            if self._run is not None:
                self._last, self._ops = len(self._run.syncs), self._run.ops - self._first_op
                self.unmeasured = sorted(self._run.unmeasured)
