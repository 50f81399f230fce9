"""Build a complete site in a folder: data and index first, then the pages of runs; other programs' folders are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from typing import TYPE_CHECKING

from dcpbench import __version__
from dcpbench.dashboard import change_points, data, discovery, pages
from dcpbench.errors import OutputError, RecordsError
from dcpbench.records.disks import convert_output_errors
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.show import web
from dcpbench.show.numbers import format_percent
from dcpbench.show.terminal import make_rate_limited
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.dashboard.discovery import FoundRuns, RunData, Stamp

INDEX_EVERY_S = 10.0  # interval in which the index is written while pages are made
MAX_REASONS = 10  # runs that were left out, named by an error
FORMAT = 1
OURS = "dcpbench_dashboard"
SCRIPTS = ("points.js", "charts.js", "dashboard.js")
STYLE = "dashboard.css"
SHARED = (web.STYLE, *web.SCRIPTS, web.PLOTLY, web.LICENSE)


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """Hold the result of a build."""

    site: Path
    runs: int
    points: int  # number of lines: each point counts once per hardware, driver and conditions
    entries: int
    changes: int
    pages_made: int
    pages_kept: int
    pages_left: int  # runs without a page of their records, because only the newest runs' pages were made
    skipped: list[str]
    version: str  # version of the site's content: equal for equal runs


def build(
    root: Path,
    site: Path,
    *,
    force: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
    known: dict[Stamp, RunData] | None = None,
    newest: int | None = None,
    emptied: bool = True,
) -> BuildResult:
    """Bring the site up to date with the runs below `root`.

    `force` makes every page again. `on_progress` is called with the progress. `known` is kept between builds by a caller that
    builds often. With `newest`, only the pages of the newest so many runs are made; other pages are left as they are. The
    pages that were made stay when the build ends early. The index is written before the first page, and again every
    INDEX_EVERY_S while pages are made.

    Raises RecordsError if no run can be read, unless the site may be `emptied`; then nothing is written. Raises
    UsageError if `root` is no folder, OutputError if `site` is not ours, OutputError or DiskError if it cannot be written, and, before anything else,
    MissingPackageError without ruptures.
    """
    change_points.check_installed()
    check_folder(site)
    on_progress = make_rate_limited(on_progress)
    before = {} if force else read_page_keys(site)
    found = discovery.load_runs(root, {} if known is None else known, on_progress)
    if not (found.runs or emptied):
        left = f"the site in {site} is left as it is" if read_page_keys(site) else f"no site is written into {site}"
        reasons = [f"left out: {sentence}" for sentence in found.skipped[:MAX_REASONS]]
        if len(found.skipped) > MAX_REASONS:
            reasons.append(f"left out: {len(found.skipped) - MAX_REASONS:,} more")
        raise RecordsError(
            "\n".join([f"{root} holds no run that can be read, so {left}; name the folder of your runs.", *reasons])
        )
    with convert_output_errors(site, "give another folder with -o"):
        _prepare_folder(site)
        publisher = _Publisher(
            site, found, data.build_content(found, on_progress), _find_pages(site, found, read_page_keys(site))
        )
        publisher.publish()
        omitted = _make_pages(publisher, before, newest, on_progress)
        publisher.publish()
        _remove_unreferenced(site, publisher.files, {run.slug for run in found.runs})
    here, content = publisher.here, publisher.content
    new = sum(before.get(slug) != digest for slug, digest in here.items())
    return BuildResult(
        site,
        len(found.runs),
        content.lines,
        content.entries,
        content.changes,
        new,
        len(here) - new,
        omitted,
        publisher.skipped,
        publisher.version,
    )


def check_folder(site: Path) -> None:
    """Raise OutputError if the folder holds something that the dashboard did not write."""
    try:
        empty = not site.exists() or (site.is_dir() and not any(site.iterdir()))
    except OSError as e:
        raise OutputError(f"{site} cannot be read ({e.strerror}); give another folder with -o.") from e
    if site.exists() and not site.is_dir():
        raise OutputError(f"{site} is a file; give a folder with -o, such as -o site.")
    if not empty and _read_state(site) is None:
        raise OutputError(f"{site} is not empty and holds no dashboard; give a new folder with -o.")


def _prepare_folder(site: Path) -> None:
    """Mark the folder as the dashboard's before anything else is written to it."""
    check_folder(site)
    site.mkdir(parents=True, exist_ok=True)
    if _read_state(site) is None:
        _write_state(site, {OURS: FORMAT, "pages": {}})
    for name in (pages.FOLDER, data.FOLDER, pages.ASSETS):
        (site / name).mkdir(exist_ok=True)


def _find_pages(site: Path, found: FoundRuns, before: dict[str, str]) -> dict[str, str]:
    """Return slug -> key of the pages that the site holds, of older records too."""
    slugs = [run.slug for run in found.runs if run.slug in before]
    return {slug: before[slug] for slug in slugs if (site / pages.FOLDER / slug / pages.PAGE).is_file()}


@dataclasses.dataclass
class _Publisher:
    """Write the index of a site with the pages that exist."""

    site: Path
    found: FoundRuns
    content: data.Content
    here: dict[str, str]  # keys of the pages that the site holds, by slug
    notes: list[str] = dataclasses.field(default_factory=list)  # reasons why other runs have no page
    version: str = ""
    files: dict[str, str] = dataclasses.field(init=False)  # text of the data files by path
    _at: float = dataclasses.field(init=False)

    @property
    def skipped(self) -> list[str]:
        """Return a sentence for each run, or page, that was left out."""
        return [*self.found.skipped, *self.notes]

    def publish(self) -> None:
        """Write data files and the index."""
        slugs = [run.slug for run in self.found.runs]
        records = [slug for slug in slugs if (self.site / pages.FOLDER / slug / RECORDS_FILE).is_file()]
        self.files, index = self.content.add_index(sorted(self.here), records, self.skipped)
        here = {slug: self.here[slug] for slug in slugs if slug in self.here}
        self.version = _write_site(self.site, self.files, index, self.content.first, here)
        self._at = time.monotonic()

    def add_page(self, run: RunData) -> None:
        """Make the page of a run, and publish it with others after INDEX_EVERY_S."""
        if note := pages.make_page(self.site, run):
            self.notes.append(note)
            self.here.pop(run.slug, None)
            return
        self.here[run.slug] = pages.compute_page_key(run)
        record_page(self.site, run)  # what ends the build later does not cost this page
        if time.monotonic() - self._at >= INDEX_EVERY_S:
            self.publish()


def _make_pages(
    publisher: _Publisher, before: dict[str, str], newest: int | None, on_progress: Callable[[str], None]
) -> int:
    """Make the pages of the newest runs that are missing or older than their records, the newest run's first.

    Return the number of other runs whose page is missing or older than their records.
    """
    due = [run for run in publisher.found.runs if not pages.is_made(publisher.site, run, before)]
    first = 0 if newest is None else max(len(publisher.found.runs) - newest, 0)
    wanted = {run.slug for run in publisher.found.runs[first:]}
    made = [run for run in reversed(due) if run.slug in wanted]
    for number, run in enumerate(made, 1):
        on_progress(f"page {number} of {len(made)}: {run.name}")
        publisher.add_page(run)
    return len(due) - len(made)


def _write_site(site: Path, files: dict[str, str], index: str, first: str, here: dict[str, str]) -> str:
    """Write the data, then the page that names it, then the state file that marks the site as complete."""
    for path, text in files.items():
        _write_if_changed(site / path, text)
    texts = {name: web.read_asset(name) for name in SHARED} | {name: _read_asset(name) for name in (*SCRIPTS, STYLE)}
    for name, text in texts.items():
        _write_if_changed(site / pages.ASSETS / name, text)
    stamps = {name: hashlib.sha256(text.encode()).hexdigest()[: data.DIGEST] for name, text in texts.items()}
    page = _render_index(index, first, stamps)
    version = hashlib.sha256(page.encode()).hexdigest()[: data.DIGEST]
    _write_if_changed(site / "index.html", page)
    _write_state(site, {OURS: FORMAT, "version": version, "index": index, "pages": dict(sorted(here.items()))})
    return version


def _render_index(index: str, first: str, stamps: dict[str, str]) -> str:
    values: dict[str, object] = {
        "title": "dcpbench dashboard",
        "main": "points",
        "main_called": "points",
        "policy": web.build_content_policy(own_files=True),
        "index": index,
        "first": first,
        "styles": (web.STYLE, STYLE),
        "scripts": (*web.SCRIPTS, *SCRIPTS),
        "stamps": stamps,
        "plotly": web.PLOTLY,
        "version": __version__,
        "min_runs": change_points.MIN_RUNS,
        "min_side": change_points.MIN_SIDE,
        "min_change": format_percent(change_points.MIN_CHANGE),
    }
    return web.render_template(_read_asset("index.html.j2"), values)


def _read_asset(name: str) -> str:
    """Return the text of one of the dashboard's own assets."""
    return web.read_asset(f"assets/{name}", __package__)


def _remove_unreferenced(site: Path, files: dict[str, str], slugs: set[str]) -> None:
    """Remove data and pages that are no longer referenced."""
    for path in (site / data.FOLDER).iterdir():
        if f"{data.FOLDER}/{path.name}" not in files:
            path.unlink(missing_ok=True)
    for path in (site / pages.FOLDER).iterdir():
        if path.name not in slugs:
            shutil.rmtree(path, ignore_errors=True)


def read_page_keys(site: Path) -> dict[str, str]:
    """Return the keys (pages.compute_page_key) of the pages that the site holds, by slug."""
    found = (_read_state(site) or {}).get("pages")
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def record_page(site: Path, run: RunData) -> None:
    """Record a run's page as soon as it is made, in a build or outside of one."""
    state = _read_state(site) or {OURS: FORMAT}
    state["pages"] = dict(sorted((read_page_keys(site) | {run.slug: pages.compute_page_key(run)}).items()))
    _write_state(site, state)


def read_index_path(site: Path) -> str:
    """Return the path of the index that the site's page loads; empty before the first build."""
    return str((_read_state(site) or {}).get("index", ""))


def _read_state(site: Path) -> dict[str, object] | None:
    """Return the state of the last build; None if the folder is not the dashboard's."""
    try:
        found = json.loads((site / discovery.STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get(OURS) == FORMAT else None


def _write_state(site: Path, state: dict[str, object]) -> None:
    _write_if_changed(site / discovery.STATE_FILE, json.dumps(state, indent=1) + "\n")


def _write_if_changed(path: Path, text: str) -> None:
    """Write a file atomically; a file with the same content keeps its modification time."""
    new = text.encode("utf-8", errors="replace")
    if path.is_file() and path.stat().st_size == len(new) and path.read_bytes() == new:
        return
    write_file(path, new, durable=False)
