"""Make the page of each run, again only if its records or dcpbench changed."""

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

    from dcpbench.dashboard.discovery import RunData

FOLDER = "runs"
PAGE = "report.html"
ASSETS = "assets"  # folder of the site with files that its pages share
PLOTLY = f"../../{ASSETS}/{web.PLOTLY}"  # from a page: copies would be most of a site
MAX_POINTS = 3_000  # maximum number of points that a page draws; more are unreadable and take minutes


def compute_page_key(run: RunData) -> str:
    """Return a key that is equal if and only if the page would be the same."""
    return hashlib.sha256(f"{run.sha256} {run.name} {__version__} {PLOTLY}".encode(errors="replace")).hexdigest()


def is_made(site: Path, run: RunData, made: Mapping[str, str]) -> bool:
    """Return True if the site holds this run's current page; `made` maps slugs to keys of the last build."""
    return made.get(run.slug) == compute_page_key(run) and (site / FOLDER / run.slug / PAGE).is_file()


def make_page(site: Path, run: RunData) -> str:
    """Write the run's page with a copy of its records; return why there are only the records, or an empty string.

    The folder is complete when it appears, and replaces the previous one.
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
        note = _write_page(new / run.slug, run)
        if (parent / run.slug).exists():
            (parent / run.slug).replace(old)
        (new / run.slug).replace(parent / run.slug)
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
    return note


def _write_page(folder: Path, run: RunData) -> str:
    from dcpbench.reports import write_report

    if len(run.entries) > MAX_POINTS:
        return f"{run.name}: no page for {len(run.entries):,} points, only for up to {MAX_POINTS:,}"
    try:
        write_report([folder], folder, page_only=True, plotly=PLOTLY)
    except DcpbenchError as e:
        return f"{run.name}: no page, because {e}"
    except Exception as e:  # noqa: BLE001 - one run's page must not cost the site
        return f"{run.name}: no page, because the report failed ({type(e).__name__}: {str(e)[:200]})"
    return ""
