"""Read `[tool.dcpbench.syncs]` of pyproject.toml: permissions to synchronise, each with a reason, and defaults of the
gate.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import sys
import tomllib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn

from dcpbench.errors import UsageError
from dcpbench.syncs.site_text import list_dotted_names
from dcpbench.syncs.steps import check_step_range

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dcpbench.syncs.sync_report import Site

FILE = "pyproject.toml"
TABLE = "[tool.dcpbench.syncs]"
GLOBS = ("function", "range", "file")
KEYS = ("allow", "max-per-step", "max-bubble-us", "baseline", "dry-run-baseline", "step-range")
MAX_REASON_CHARS = 300
EXAMPLE = '{ function = "engine.sampler.*", reason = "tokens leave the GPU here", expires = 2026-12-31 }'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allow:
    """Describe a permission to synchronise; empty globs match everything, and all others must match."""

    function: str = ""  # glob for `module.function`, for the function alone, and for the range if `or_range` is set
    range: str = ""
    file: str = ""
    reason: str
    expires: dt.date | None = None  # last day on which it counts
    source: str  # place of the permission's definition, for messages
    or_range: bool = False

    def matches(self, site: Site) -> bool:
        """Return True if the permission covers the site."""
        names = [*list_dotted_names(site), *([site.range] if self.or_range and site.range else [])]
        return (
            (not self.function or any(fnmatchcase(name, self.function) for name in names))
            and (not self.range or (bool(site.range) and fnmatchcase(site.range, self.range)))
            and (not self.file or (bool(site.file) and fnmatchcase(site.file, self.file)))
        )

    def format_name(self) -> str:
        """Return the permission as it is written in its source, for messages."""
        if self.or_range:  # of an option or a mark
            return f"{self.source} {self.function!r}"
        globs = [(key, getattr(self, key)) for key in GLOBS]
        return f"{self.source} " + ", ".join(f'{key} = "{value}"' for key, value in globs if value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Hold a project's settings for synchronisations from its pyproject.toml."""

    allow: tuple[Allow, ...] = ()
    max_per_step: float | None = None
    max_bubble_us: float | None = None
    baseline: Path | None = None
    dry_run_baseline: Path | None = None
    step_range: str | None = None


def find_root(start: Path) -> Path:
    """Return the root of the repository around `start`: the folder with `.git`, else with pyproject.toml, else `start`
    itself.
    """
    around = ((folder, mark) for mark in (".git", FILE) for folder in (start, *start.parents))
    return next((folder for folder, mark in around if (folder / mark).exists()), start)


def find_config(start: Path, root: Path) -> Config:
    """Return the settings nearest to `start`, searching upwards to `root`, then in `root`; defaults if there are none.

    Raise UsageError if a file cannot be read or has invalid settings.
    """
    upwards = [folder for folder in (start, *start.parents) if folder.is_relative_to(root)]
    for folder in dict.fromkeys([*upwards, root]):
        table = _read_table(folder / FILE)
        if table is not None:
            return _parse_config(table, folder / FILE)
    return Config()


def _read_table(path: Path) -> Mapping[str, object] | None:
    """Return the dcpbench table of a file; None if the file or the table is missing."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror}).") from e
    except RecursionError as e:
        raise UsageError(f"{path} is not TOML: it is nested too deep.") from e
    except ValueError as e:  # of TOML, of UTF-8, and of numbers that Python does not read
        raise UsageError(f"{path} is not TOML: {str(e)[:MAX_REASON_CHARS].rstrip('.')}.") from e
    for key in ("tool", "dcpbench"):
        inner = content.get(key)
        if not isinstance(inner, dict):
            return None
        content = inner
    table = content.get("syncs")
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{path}: tool.dcpbench.syncs must be a table; write {TABLE} above its keys.")
    return table


def _parse_config(table: Mapping[str, object], path: Path) -> Config:
    where = f"{path} {TABLE}"
    _check_keys(table, KEYS, where)
    entries = table.get("allow", [])
    if not isinstance(entries, list):
        raise UsageError(f"{where}: allow must be a list of tables, such as allow = [{EXAMPLE}].")
    step_range = _parse_text(table, "step-range", where) or None
    check_step_range(step_range, f"{where}: step-range")
    return Config(
        allow=tuple(_parse_allow(entry, where, f"allow[{n}]") for n, entry in enumerate(entries)),
        max_per_step=_parse_number(table, "max-per-step", where),
        max_bubble_us=_parse_number(table, "max-bubble-us", where),
        baseline=_parse_path(table, "baseline", path),
        dry_run_baseline=_parse_path(table, "dry-run-baseline", path),
        step_range=step_range,
    )


def _parse_path(table: Mapping[str, object], key: str, path: Path) -> Path | None:
    """Return a path that is relative to the folder of pyproject.toml; None without the key."""
    text = _parse_text(table, key, f"{path} {TABLE}")
    return path.parent / text if text else None


def _parse_allow(entry: object, table: str, source: str) -> Allow:
    """Return the entry `source` of the list; raise UsageError with the accepted form."""
    where = f"{table}: {source}"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} must be a table, such as {EXAMPLE}.")
    _check_keys(entry, (*GLOBS, "reason", "expires"), where)
    globs: dict[str, Any] = {key: _parse_text(entry, key, where) for key in GLOBS}
    if not any(globs.values()):
        raise UsageError(f"{where} allows nothing: give function, range or file, such as {EXAMPLE}.")
    reason = _parse_text(entry, "reason", where).strip()
    if not reason:
        raise UsageError(f"{where} has no reason: say why this may synchronise, such as {EXAMPLE}.")
    expires = entry.get("expires")
    if expires is not None and (isinstance(expires, dt.datetime) or not isinstance(expires, dt.date)):
        raise UsageError(f"{where}: expires must be a date without quotes, such as expires = 2026-12-31.")
    return Allow(**globs, reason=reason, expires=expires, source=source)


def _parse_text(table: Mapping[str, object], key: str, where: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        _raise_usage_error(where, key, f'a text in quotes, such as {key} = "…"')
    return value


def _parse_number(table: Mapping[str, object], key: str, where: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        _raise_usage_error(where, key, f"a number that is not negative, such as {key} = 2")
    if value > sys.float_info.max:
        _raise_usage_error(where, key, f"a number that a limit can be, such as {key} = 2")
    return float(value)


def _raise_usage_error(where: str, key: str, should: str) -> NoReturn:
    raise UsageError(f"{where}: {key} must be {should}.")


def _check_keys(table: Mapping[str, object], known: Sequence[str], where: str) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        listed = ("key " if len(unknown) == 1 else "keys ") + ", ".join(unknown)[:MAX_REASON_CHARS]
        raise UsageError(f"{where}: unknown {listed}; it knows {', '.join(known)}.")
