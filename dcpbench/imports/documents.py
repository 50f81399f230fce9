"""Read the JSON objects of result files, each with its place, and list the parts that cannot be read."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from dcpbench.errors import RecordsError
from dcpbench.show.text import make_natural_key

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_BYTES = 4 << 30  # of a file that is read into memory
SUFFIXES = (".json", ".jsonl")
SWEEPS = ("SERVE-", "BENCH-")  # prefixes of folder names with which `vllm bench sweep` names a set of parameters
ROWS = "benchmarks"  # field of an InferenceX sweep that holds its rows
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escape of half a surrogate pair in JSON


@dataclasses.dataclass(frozen=True)
class Document:
    """Hold one JSON object of a file."""

    where: str  # `results/a.json`, or `results/a.jsonl, line 3`
    fields: dict[str, Any]
    listed: bool = False  # true if the file is a list, as summaries of several results are
    folders: tuple[str, ...] = ()  # names of folders around the file that may hold parameters: `SERVE--max_num_seqs=4`
    file: str = ""
    found: bool = False  # true if a folder was given and not the file itself, so that the file may be something else


@dataclasses.dataclass(frozen=True)
class Contents:
    """Hold the documents of one or more files, and an error for each part that cannot be read."""

    documents: list[Document]
    errors: list[RecordsError]


def gather_documents(paths: Iterable[Path]) -> Contents:
    """Read files, and all result files below folders, in the order of the numbers in their names; each file once.

    Unreadable parts of files below a folder are returned as errors. Raise RecordsError for an unreadable file that was
    named itself, and for a folder without any result file.
    """
    found: dict[Path, Contents] = {}
    for path in paths:
        files = _list_files(path) if path.is_dir() else [path]
        if not files:
            raise RecordsError(f"{path} holds no *{' or *'.join(SUFFIXES)}; give the folder of results, or a file.")
        for file in files:
            if (key := file.resolve()) not in found:
                found[key] = _read_below(path, file, key)
    return Contents(
        [document for contents in found.values() for document in contents.documents],
        [error for contents in found.values() for error in contents.errors],
    )


def _read_below(path: Path, file: Path, resolved: Path) -> Contents:
    """Read a file that is `path`, or lies below it."""
    contents = read_file(file)
    if contents.errors and path == file:
        raise contents.errors[0]
    around = [name for name in resolved.parent.parts if name.startswith(SWEEPS)]
    below = file.parent.relative_to(path).parts if path != file else ()
    folders = tuple(dict.fromkeys([*around, *below]))
    placed = [
        dataclasses.replace(document, folders=folders, file=str(file), found=path != file)
        for document in contents.documents
    ]
    return Contents(placed, contents.errors)


def _list_files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    shown = (path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(shown, key=make_natural_key)


def read_file(path: Path) -> Contents:
    """Read a file with one object, a list of objects, or an object per line. Infinity is a number, as Python writes it.

    A file, an entry or a line that cannot be read is an error in the result.
    """
    try:
        text = _read_text(path)
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        try:
            entries = _list_entries(path, _parse(text))
        except ValueError as e:
            if len(lines) == 1 or not _is_object(lines[0][1]):
                raise RecordsError(f"{path} {_describe(e)} Run the benchmark again, or leave this file out.") from e
            entries = [(f"{path}, line {number}", line, False) for number, line in lines]
            return _collect(entries, parse_lines=True)
    except RecordsError as e:
        return Contents([], [e])
    return _collect(entries, parse_lines=False)


def _list_entries(path: Path, found: object) -> list[tuple[str, object, bool]]:
    """Return the place and value of each entry, and whether the file is a list. Raise RecordsError for an empty list."""
    if isinstance(found, dict) and isinstance(found.get(ROWS), list):
        found = found[ROWS]
    if not isinstance(found, list):
        return [(str(path), found, False)]
    if not found:
        raise RecordsError(
            f"{path} holds an empty list, and no result. Run the benchmark again, or leave this file out."
        )
    return [(f"{path}, entry {number}", entry, True) for number, entry in enumerate(found, 1)]


def _collect(entries: Iterable[tuple[str, Any, bool]], *, parse_lines: bool) -> Contents:
    """Make a document of each entry; `parse_lines` if entries are still text."""
    contents = Contents([], [])
    for where, entry, listed in entries:
        try:
            value = _parse_line(where, entry) if parse_lines else entry
        except RecordsError as e:
            contents.errors.append(e)
            continue
        if isinstance(value, dict):
            contents.documents.append(Document(where, value, listed))
        else:
            contents.errors.append(
                RecordsError(f"{where} holds no JSON object with results; name a result file of the benchmark.")
            )
    return contents


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordsError(f"{path} is larger than 4 GiB; save the results without generated texts.")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise RecordsError(f"{path} cannot be read ({e.strerror}); name a result file of the benchmark.") from e
    except UnicodeDecodeError as e:
        raise RecordsError(f"{path} is no text ({e.reason} at byte {e.start}), and so no result of a benchmark.") from e
    if not text.strip():
        raise RecordsError(f"{path} is empty; the benchmark may have been interrupted. Run it again.")
    return text


def _parse_line(where: str, line: str) -> object:
    try:
        return _parse(line)
    except ValueError as e:
        raise RecordsError(
            f"{where} {_describe(e)} Remove that line to import the others, or run its benchmark again."
        ) from e


def _parse(text: str) -> object:
    """Parse JSON. Raise ValueError, which json also raises for numbers that are too long."""
    try:
        found = json.loads(text)
        if SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    except UnicodeEncodeError as e:
        raise ValueError("a text holds half a character") from e
    return found


def _is_object(line: str) -> bool:
    try:
        return isinstance(_parse(line), dict)
    except ValueError:
        return False


def _describe(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        place = "is cut short" if at_end else f"is no JSON at character {error.pos + 1:,}"
        return f"{place} ({error.msg.lower()})."
    return f"is no JSON ({str(error)[:100]})."
