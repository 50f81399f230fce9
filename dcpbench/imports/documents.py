"""The JSON objects of a result file, each with where it stands, or what is wrong with the file in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from dcpbench.errors import RecordsError
from dcpbench.show.text import natural

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MOST_BYTES = 4 << 30
"""Of a file that is read into memory."""
SUFFIXES = (".json", ".jsonl")
SWEEPS = ("SERVE-", "BENCH-")
"""How `vllm bench sweep` names the folder of a set of parameters."""
ROWS = "benchmarks"
"""Where a whole sweep of InferenceX has its rows."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON spells halves of characters, which mostly come in pairs."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One JSON object of a file."""

    where: str
    """`results/a.json`, or `results/a.jsonl, line 3`."""
    fields: dict[str, Any]
    listed: bool = False
    """Whether the file is a list, as summaries are of what lies beside them."""
    folders: tuple[str, ...] = ()
    """Names of the folders around it that may say something of it, as `SERVE--max_num_seqs=4` does."""
    file: str = ""
    found: bool = False
    """Whether a folder was given and not the file, so that it may be something else."""


def gather(paths: Iterable[Path]) -> list[Document]:
    """Of files, and of all files below folders, in the order of the numbers in their names; no file twice.

    Raises RecordsError as `read`, and for a folder without any.
    """
    documents: dict[Path, list[Document]] = {}
    for path in paths:
        files = _inside(path) if path.is_dir() else [path]
        if not files:
            raise RecordsError(f"{path} holds no *{' or *'.join(SUFFIXES)}; give the folder of results, or a file.")
        for file in files:
            if (key := file.resolve()) not in documents:
                around = [name for name in key.parent.parts if name.startswith(SWEEPS)]
                below = file.parent.relative_to(path).parts if path != file else ()
                folders = tuple(dict.fromkeys([*around, *below]))
                documents[key] = [
                    dataclasses.replace(d, folders=folders, file=str(file), found=path != file) for d in read(file)
                ]
    return [document for found in documents.values() for document in found]


def _inside(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    shown = (path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(shown, key=natural)


def read(path: Path) -> list[Document]:
    """A file with one object, a list of objects, or an object per line.

    Infinity is a number here, as Python writes and reads it. Raises RecordsError for anything else.
    """
    text = _text(path)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise RecordsError(f"{path} is empty; the benchmark may have been interrupted. Run it again.")
    try:
        found = _parse(text)
    except ValueError as e:
        if len(lines) == 1 or not _is_object(lines[0][1]):
            raise RecordsError(f"{path} {_wrong(e)} Run the benchmark again, or leave this file out.") from e
        return [_document(f"{path}, line {number}", _line(path, number, line)) for number, line in lines]
    if isinstance(found, dict) and isinstance(found.get(ROWS), list):
        found = found[ROWS]
    if isinstance(found, list):
        if not found:
            raise RecordsError(
                f"{path} holds an empty list, and no result. Run the benchmark again, or leave this file out."
            )
        entries = enumerate(found, 1)
        return [dataclasses.replace(_document(f"{path}, entry {n}", entry), listed=True) for n, entry in entries]
    return [_document(str(path), found)]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise RecordsError(f"{path} is larger than 4 GiB; save the results without generated texts.")
        return path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise RecordsError(f"{path} cannot be read ({e.strerror}); name a result file of the benchmark.") from e
    except UnicodeDecodeError as e:
        raise RecordsError(f"{path} is no text ({e.reason} at byte {e.start}), and so no result of a benchmark.") from e


def _line(path: Path, number: int, line: str) -> object:
    try:
        return _parse(line)
    except ValueError as e:
        raise RecordsError(
            f"{path}, line {number} {_wrong(e)} Remove that line to import the others, or run its benchmark again."
        ) from e


def _parse(text: str) -> object:
    """Raises ValueError, as which json reports numbers that are too long, too."""
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


def _wrong(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        at_end = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        place = "is cut short" if at_end else f"is no JSON at character {error.pos + 1:,}"
        return f"{place} ({error.msg.lower()})."
    return f"is no JSON ({str(error)[:100]})."


def _document(where: str, found: object) -> Document:
    if not isinstance(found, dict):
        raise RecordsError(f"{where} holds a {type(found).__name__}, not a JSON object with results.")
    return Document(where, found)
