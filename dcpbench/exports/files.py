"""What an export writes: whole files or none, and never over one that it was not told to replace."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import OutputError
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FOLDER = "exports"
"""Below the first run's folder, where -o names no other place."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """Files in memory, by their place below a folder."""

    files: dict[str, bytes]
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    """Points that the format cannot carry or must not: how many, by reason."""


def as_json(value: object, *, infinity: bool = False) -> bytes:
    """A line of JSON. `infinity` lets a float be Infinity, as Python's own json does."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=infinity) + "\n").encode("utf-8", "backslashreplace")


def as_list(entries: Iterable[object]) -> bytes:
    """A JSON list with a line per entry."""
    return b"[\n" + b",\n".join(as_json(entry).rstrip(b"\n") for entry in entries) + b"\n]\n"


def as_object(entries: Mapping[str, object]) -> bytes:
    """A JSON object with a line per entry."""
    return b"{\n" + b",\n".join(as_json({name: v})[1:-2] for name, v in entries.items()) + b"\n}\n"


def places(rendered: Rendered, output: Path | None, run: Path, folder: str) -> dict[Path, bytes]:
    """Where each file goes.

    `output` is the file itself where there is one to write and `output` ends like a file, else the folder for all of
    them. Without it they go below the run: several into a folder of the format's own.
    """
    files = rendered.files
    if output is None:
        base = (run if run.is_dir() else run.parent) / FOLDER
        return {base / (folder if len(files) > 1 else "") / name: data for name, data in files.items()}
    if len(files) == 1 and output.suffix and not output.is_dir():
        return {output: next(iter(files.values()))}
    if output.exists() and not output.is_dir():
        if len(files) == 1:
            raise OutputError(f"{output} is a file without an ending; give {output}{Path(*files).suffix} or a folder.")
        raise OutputError(f"{output} is a file, and there are {len(files)} to write; give a folder with -o.")
    return {output / name: data for name, data in files.items()}


def write(files: Mapping[Path, bytes], *, force: bool) -> list[Path]:
    """Write all of them, each at once and in place of an older one; returns their paths.

    Raises OutputError where one cannot be written, or is there already and `force` does not say what to do.
    """
    there = [path for path in files if path.exists()]
    if there and not force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise OutputError(f"{there[0]}{more} would be written over; add --force, or give another place with -o.")
    for path, data in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
        except OSError as e:
            raise OutputError(f"cannot write {path} ({e.strerror or e}); give another place with -o.") from e
    return list(files)
