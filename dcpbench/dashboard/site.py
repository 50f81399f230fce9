"""A whole site in a folder: refused where the folder is somebody else's, changed file by file, the first page last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from typing import TYPE_CHECKING

from dcpbench import __version__
from dcpbench.dashboard import changes, data, finding, pages
from dcpbench.errors import OutputError, RecordsError
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.show import web
from dcpbench.show.terminal import now_and_then
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.dashboard.data import DataFiles
    from dcpbench.dashboard.finding import Found, RunData, Stamp

FORMAT = 1
OURS = "dcpbench_dashboard"
SCRIPTS = ("points.js", "charts.js", "dashboard.js")
STYLE = "dashboard.css"
SHARED = (web.STYLE, *web.SCRIPTS, web.PLOTLY, web.LICENSE)


@dataclasses.dataclass(frozen=True)
class Built:
    """What a build did."""

    site: Path
    runs: int
    points: int
    """Lines: each point once for hardware, driver and conditions."""
    entries: int
    changes: int
    pages_made: int
    pages_kept: int
    skipped: list[str]
    version: str
    """Of the site's content: equal for equal runs."""


def build(
    root: Path,
    site: Path,
    *,
    force: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    known: dict[Stamp, RunData] | None = None,
    wanted: Callable[[RunData], bool] = lambda _: True,
    emptied: bool = True,
) -> Built:
    """Bring the site up to date with the runs below `root`.

    `force` makes every page again. `tell` hears how far it is. `known` is kept between builds by who builds often.
    Pages that are not `wanted` now are left as they are; those that were made stay when the build ends early. Unless it
    may be `emptied`, a site that has pages is left as it is where no run can be read, with RecordsError. Raises
    UsageError where `root` is no folder, OutputError where `site` is not ours or cannot be written, and, before it does
    anything, MissingPackageError without ruptures.
    """
    changes.make_detector()
    say = now_and_then(tell)
    before = {} if force else made(site)
    found = finding.find(root, {} if known is None else known, say)
    if not (found.runs or emptied) and made(site):
        raise RecordsError(
            f"{root} holds no run that can be read, so the site in {site} is left as it is; name the folder of your runs, or "
            "give another folder with -o."
        )
    try:
        _enter(site)
        here, notes = _pages(site, found, before, wanted, say)
        records = [run.slug for run in found.runs if (site / pages.FOLDER / run.slug / RECORDS_FILE).is_file()]
        told = dataclasses.replace(found, skipped=[*found.skipped, *notes])
        files = data.make(told, sorted(here), records, say)
        version = _write(site, files, {run.slug: here[run.slug] for run in found.runs if run.slug in here})
        _tidy(site, files, {run.slug for run in found.runs})
    except OSError as e:
        raise OutputError(f"cannot write the site into {site} ({e.strerror}); give another folder with -o.") from e
    new = sum(before.get(slug) != digest for slug, digest in here.items())
    kept = len(here) - new
    return Built(site, len(found.runs), files.lines, files.entries, files.changes, new, kept, told.skipped, version)


def check(site: Path) -> None:
    """Raises OutputError where the folder holds something that the dashboard did not write."""
    try:
        empty = not site.exists() or (site.is_dir() and not any(site.iterdir()))
    except OSError as e:
        raise OutputError(f"{site} cannot be read ({e.strerror}); give another folder with -o.") from e
    if site.exists() and not site.is_dir():
        raise OutputError(f"{site} is a file; give a folder with -o, such as -o site.")
    if not empty and _state(site) is None:
        raise OutputError(f"{site} is not empty and holds no dashboard; give a new folder with -o.")


def _enter(site: Path) -> None:
    """Make the folder ours before anything else lies in it."""
    check(site)
    site.mkdir(parents=True, exist_ok=True)
    if _state(site) is None:
        _note(site, {OURS: FORMAT, "pages": {}})
    for name in (pages.FOLDER, data.FOLDER, pages.ASSETS):
        (site / name).mkdir(exist_ok=True)


def _pages(
    site: Path, found: Found, before: dict[str, str], wanted: Callable[[RunData], bool], say: Callable[[str], None]
) -> tuple[dict[str, str], list[str]]:
    """Slug -> key of the pages that the site holds now, and why others have none."""
    here, notes = {}, []
    for number, run in enumerate(found.runs, 1):
        if pages.is_made(site, run, before):
            here[run.slug] = pages.key(run)
        elif wanted(run):
            say(f"page {number} of {len(found.runs)}: {run.name}")
            if note := pages.make(site, run):
                notes.append(note)
            else:
                here[run.slug] = pages.key(run)
                note_page(site, run)  # what ends the build later does not cost this page
        elif run.slug in before and (site / pages.FOLDER / run.slug / pages.PAGE).is_file():
            here[run.slug] = before[run.slug]
    return here, notes


def _write(site: Path, files: DataFiles, here: dict[str, str]) -> str:
    """Data first, then the page that names it, then what says that all is there."""
    for path, text in files.files.items():
        _put(site / path, text)
    texts = {name: web.read(name) for name in SHARED} | {name: _own(name) for name in (*SCRIPTS, STYLE)}
    for name, text in texts.items():
        _put(site / pages.ASSETS / name, text)
    stamps = {name: hashlib.sha256(text.encode()).hexdigest()[: data.DIGEST] for name, text in texts.items()}
    page = _page(files, stamps)
    version = hashlib.sha256(page.encode()).hexdigest()[: data.DIGEST]
    _put(site / "index.html", page)
    _note(site, {OURS: FORMAT, "version": version, "index": files.index, "pages": dict(sorted(here.items()))})
    return version


def _page(files: DataFiles, stamps: dict[str, str]) -> str:
    values: dict[str, object] = {
        "title": "dcpbench dashboard",
        "main": "points",
        "main_called": "points",
        "policy": web.policy(own_files=True),
        "index": files.index,
        "first": files.first,
        "styles": (web.STYLE, STYLE),
        "scripts": (*web.SCRIPTS, *SCRIPTS),
        "stamps": stamps,
        "plotly": web.PLOTLY,
        "version": __version__,
    }
    return web.fill(_own("index.html.j2"), values)


def _own(name: str) -> str:
    """The text of one of the dashboard's own assets."""
    return web.read(f"assets/{name}", __package__)


def _tidy(site: Path, files: DataFiles, slugs: set[str]) -> None:
    """Remove data and pages that nothing names any more."""
    for path in (site / data.FOLDER).iterdir():
        if f"{data.FOLDER}/{path.name}" not in files.files:
            path.unlink(missing_ok=True)
    for path in (site / pages.FOLDER).iterdir():
        if path.name not in slugs:
            shutil.rmtree(path, ignore_errors=True)


def made(site: Path) -> dict[str, str]:
    """Slug -> pages.key of the pages that the site holds."""
    found = (_state(site) or {}).get("pages")
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def note_page(site: Path, run: RunData) -> None:
    """Remember a run's page as soon as it is made, in a build or outside of one."""
    state = _state(site) or {OURS: FORMAT}
    state["pages"] = dict(sorted((made(site) | {run.slug: pages.key(run)}).items()))
    _note(site, state)


def index(site: Path) -> str:
    """Path of the index that the site's page loads; empty before the first build."""
    return str((_state(site) or {}).get("index", ""))


def _state(site: Path) -> dict[str, object] | None:
    """What the last build left; None where the folder is not ours."""
    try:
        found = json.loads((site / finding.STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get(OURS) == FORMAT else None


def _note(site: Path, state: dict[str, object]) -> None:
    _put(site / finding.STATE_FILE, json.dumps(state, indent=1) + "\n")


def _put(path: Path, text: str) -> None:
    """Write a file whole or not at all; one that says the same already keeps its time."""
    new = text.encode("utf-8", errors="replace")
    if path.is_file() and path.stat().st_size == len(new) and path.read_bytes() == new:
        return
    write_file(path, new, durable=False)
