"""Find and write files for the commands of `syncs`: traces by folder and glob, and results that are not overwritten."""

from __future__ import annotations

import glob
import hashlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import OutputError, TraceError, UsageError
from dcpbench.records.disks import convert_output_errors
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import format_count, make_natural_key, make_printable
from dcpbench.show.whole_files import write_output_file
from dcpbench.syncs.nsys.parquet_export import is_folder as is_export_folder
from dcpbench.syncs.nsys.per_process import is_export
from dcpbench.syncs.nsys.schema import EVENTS, STRINGS
from dcpbench.syncs.nsys.sqlite_export import find_tables
from dcpbench.syncs.traces.other_formats import GZIP_MAGIC, OTHER_SUFFIXES, REPORT_SUFFIXES
from dcpbench.syncs.traces.reading import ReadProblems, is_other_json, read_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

EXPORT_TABLES = frozenset({*EVENTS, STRINGS})
GZIP_LENGTH = 4  # bytes at the end of a gzip file that hold the length of its text
SUFFIXES = (".json", ".json.gz")
NSYS_SUFFIXES = (".sqlite", ".jsonl", ".jsonl.gz")  # suffixes of exports of nsys; what it writes as Parquet is a folder
NAMES = ", ".join(f"*{suffix}" for suffix in SUFFIXES + NSYS_SUFFIXES)
ADVICE = "give a file, a folder or a glob of Kineto traces or of exports of nsys"
PACKED = tuple(  # suffixes refused with a hint on unpacking: no file may be skipped silently
    f".json{end}" for end in (".xz", ".bz2", ".zst", ".zip", ".tar", ".tar.gz", ".tgz")
)


def select_traces(names: Sequence[str]) -> list[Path]:
    """Return the files named by files, folders and globs, as `expand_names` does, without copies; name on stderr what is left out.

    Whoever takes a file for a trace, or a copy for that of another rank, would believe a clean report.
    """

    def report_skipped(path: Path) -> None:
        print_stderr(f"note: {make_printable(str(path))} holds no events of a trace and is left out.")

    def report_repeated(path: Path, first: Path) -> None:
        this, that = make_printable(str(path)), make_printable(str(first))
        print_stderr(f"note: {this} holds the same trace as {that} and is counted once.")

    return drop_copies(expand_names(names, report_skipped), report_repeated)


def expand_names(names: Sequence[str], skipped: Callable[[Path], None] = lambda _: None) -> list[Path]:
    """Return the files named by files, folders and globs, each once, rank 2 before rank 10.

    A folder contributes the traces directly in it, or is itself an export of nsys. Other JSON in folders and among a glob's matches, such as reports,
    is left out, and `skipped` is called for each; a file that may be a damaged trace stays. Raise UsageError for a name
    that matches nothing, TraceError if its matches hold no events at all.
    """
    found: dict[Path, None] = {}
    for name in names:
        if not name:
            raise UsageError(f"The name of a trace is empty; {ADVICE}.")
        path = Path(name)
        if is_export_folder(path):
            files, missing = [path], ""
        elif path.is_dir():
            files = _filter_by_suffix(path.iterdir())
            deeper = shlex.quote(str(path / "**/*.json*"))
            missing = f"{name} holds no trace ({NAMES}); give a trace, or {deeper}."
        elif path.exists():
            files, missing = [path], ""
        elif glob.has_magic(name):
            matched = [Path(match) for match in glob.glob(name, recursive=True)]  # noqa: PTH207 -- absolute ones, too
            files = _filter_by_suffix(matched)
            folders = [p for p in matched if p.is_dir() and not is_export_folder(p)]
            files += [p for folder in folders for p in _filter_by_suffix(folder.iterdir())]
            missing = f"{name!r} matches no trace ({NAMES}) below {Path.cwd()}."
        else:
            raise UsageError(f"There is no trace {name}; {ADVICE}.")
        if not files:
            raise UsageError(missing)
        if path not in files:
            files = _select_traces(files, name, skipped)
        found |= dict.fromkeys(sorted(files, key=make_natural_key))
    unique = {path.resolve(): path for path in reversed(found)}
    return list(reversed(unique.values()))


def drop_copies(paths: Sequence[Path], repeated: Callable[[Path, Path], None]) -> list[Path]:
    """Return the files without links, copies and packed forms of an earlier one; `repeated` is called with (this, the
    earlier).
    """
    by_length: dict[int, list[Path]] = {}
    for path in paths:
        if path.is_file():  # a pipe cannot be looked at twice
            by_length.setdefault(_get_text_length(path), []).append(path)
    copies: set[Path] = set()
    for group in by_length.values():
        firsts: dict[object, Path] = {}
        for path in group if len(group) > 1 else ():
            first = firsts.setdefault(_compute_text_id(path), path)
            if first is not path:
                copies.add(path)
                repeated(path, first)
    return [path for path in paths if path not in copies]


def _get_text_length(path: Path) -> int:
    """Return the length of a file's text in bytes, modulo 2^32: gzip ends with it, so that files that differ need not
    be read.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP_MAGIC
            size = file.seek(0, 2)
            if packed and size > GZIP_LENGTH:
                file.seek(-GZIP_LENGTH, 2)
                return int.from_bytes(file.read(), "little")
            return size % (1 << 32)
    except OSError:  # the reader reports it
        return -1


def _compute_text_id(path: Path) -> object:
    """Return an object that is equal for files with the same text; the path itself if it cannot be read."""
    digest = hashlib.blake2b()
    try:
        with path.open("rb") as file:
            for chunk in read_chunks(path, file, ReadProblems()):
                digest.update(chunk)
    except (OSError, TraceError):
        return path
    return digest.digest()


def _select_traces(files: Iterable[Path], name: str, skipped: Callable[[Path], None]) -> list[Path]:
    """Return the files without those that are something else."""
    files = sorted(files, key=make_natural_key)
    others = [path for path in files if _is_other(path)]
    if len(others) == len(files):
        raise TraceError(
            f"{name} holds no Kineto trace and no export of nsys, but {format_count(len(files), 'other file')} such as {files[0].name}. "
            'Export one with torch.profiler\'s export_chrome_trace("trace.json")'
        )
    for path in others:
        skipped(path)
    return [path for path in files if path not in others]


def _is_other(path: Path) -> bool:
    """Return whether a file has the suffix of a trace and is something else."""
    if path.name.endswith(".sqlite"):
        tables = find_tables(path)
        return tables is not None and not tables & EXPORT_TABLES
    if path.name.endswith(NSYS_SUFFIXES):
        return not is_export(path) and path.stat().st_size > 0
    return path.name.endswith(SUFFIXES) and is_other_json(path)


def _filter_by_suffix(paths: Iterable[Path]) -> list[Path]:
    """Return what has the name of a trace, a packed one, or a recording that is refused, and folders that nsys wrote.

    The report of nsys next to its export is left out.
    """
    known = SUFFIXES + PACKED + NSYS_SUFFIXES + OTHER_SUFFIXES
    found = [path for path in paths if (path.is_file() and path.name.endswith(known)) or is_export_folder(path)]
    exported = {_strip_export(path) for path in found} - {None}
    return [p for p in found if not p.name.endswith(REPORT_SUFFIXES) or p.with_suffix("").name not in exported]


def _strip_export(path: Path) -> str | None:
    """Return the name of the report of which a file or folder is an export."""
    suffix = next((s for s in (*NSYS_SUFFIXES, "_pqtdir") if path.name.endswith(s)), None)
    return path.name.removesuffix(suffix) if suffix else None


def check_output(path: Path | None, *, force: bool, option: str = "-o") -> None:
    """Raise OutputError if a file cannot be written, or exists already and --force was not given.

    `option` is the one that names the file.
    """
    if path is None:
        return
    if path.is_dir():
        example = shlex.quote(str(path / "syncs.json"))
        raise OutputError(f"{path} is a folder; give a file with {option}, such as {example}.")
    if path.exists() and not force:
        raise OutputError(f"{path} exists; give another file with {option}, or --force to write over it.")
    if not path.parent.is_dir():
        raise OutputError(f"There is no folder {path.parent}; make it with mkdir -p {shlex.quote(str(path.parent))}.")
    in_place = path.is_symlink() or (path.exists() and not path.is_file())  # such as /dev/stdout
    if not in_place and not os.access(path.parent, os.W_OK):
        raise OutputError(f"No file can be made in {path.parent}; give a file in another folder with {option}.")


def check_inputs(output: Path | None, inputs: Iterable[Path]) -> None:
    """Raise OutputError if writing a file, with --force, would replace one of the files that are read."""
    if output is not None and any(output.exists() and path.exists() and output.samefile(path) for path in inputs):
        raise OutputError(f"{output} is itself read; give another file with -o.")


def write_output(path: Path, text: str, *, force: bool) -> None:
    """Write a complete file. Raise OutputError as `check_output` does, and OutputError or DiskError if writing fails."""
    check_output(path, force=force)
    with convert_output_errors(path, "give another file with -o"):
        write_output_file(path, text)
