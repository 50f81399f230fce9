"""The page of each run, made anew only where its records or dcpbench changed."""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

from dcpbench import __version__
from dcpbench.errors import DcpbenchError
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.show import web

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dcpbench.dashboard.finding import RunData

FOLDER = "runs"
PAGE = "report.html"
ASSETS = "assets"
"""Folder of the site with what its pages share."""
PLOTLY = f"../../{ASSETS}/{web.PLOTLY}"
"""From a run's page: a copy in each of them would be most of a site."""
MOST_POINTS = 3_000
"""A report draws every point; beyond these nobody reads it, and it takes minutes."""


def key(run: RunData) -> str:
    """Equal exactly where the page would be the same."""
    return hashlib.sha256(f"{run.sha256} {run.name} {__version__} {PLOTLY}".encode(errors="replace")).hexdigest()


def is_made(site: Path, run: RunData, made: Mapping[str, str]) -> bool:
    """Whether the site holds this run's page as it is to be; `made`: slug -> key of the last build."""
    return made.get(run.slug) == key(run) and (site / FOLDER / run.slug / PAGE).is_file()


def make(site: Path, run: RunData) -> str:
    """Write the run's page with a copy of its records; empty, or why there are only the records.

    The folder appears whole, in place of the one before it.
    """
    parent = site / FOLDER
    new, old = parent / f".new-{run.slug}", parent / f".old-{run.slug}"
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        (new / run.slug).mkdir(parents=True)
        try:
            shutil.copyfile(run.path, new / run.slug / RECORDS_FILE)
        except FileNotFoundError:
            return f"{run.name}: no page, because its records are gone since they were read"
        note = _report(new / run.slug, run)
        if (parent / run.slug).exists():
            (parent / run.slug).replace(old)
        (new / run.slug).replace(parent / run.slug)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
    return note


def _report(folder: Path, run: RunData) -> str:
    from dcpbench.reports import write_report

    if len(run.entries) > MOST_POINTS:
        return f"{run.name}: no page for {len(run.entries):,} points, only for up to {MOST_POINTS:,}"
    try:
        write_report([folder], folder, page_only=True, plotly=PLOTLY)
    except DcpbenchError as e:
        return f"{run.name}: no page, because {e}"
    except Exception as e:  # noqa: BLE001 - one run's page must not cost the site
        return f"{run.name}: no page, because the report failed ({type(e).__name__}: {str(e)[:200]})"
    return ""
