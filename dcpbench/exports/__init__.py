"""Export records in the formats of other tools, one module for each; heavy imports happen only when a format is used.

Either all files are written completely or none, and an existing file is replaced only with `force`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import OutputError, UsageError
from dcpbench.plan.option_parsers import suggest_known
from dcpbench.records.disks import convert_output_errors
from dcpbench.show.text import format_count
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dcpbench.records.runs import Run

FORMATS = {  # values of --to, and the module that renders each
    "vllm": "vllm",
    "sglang": "sglang",
    "inferencex": "inferencex",
    "gha": "gha",
    "bmf": "bmf",
    "hud": "hud",
    "prometheus": "prometheus",
    "csv": "csv_table",
    "parquet": "parquet_table",
}
FOLDER = "exports"  # default folder below the first run's folder, without -o


@dataclasses.dataclass(frozen=True)
class RenderedFiles:
    """Hold files in memory, by their path below a folder."""

    files: dict[str, bytes]
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)  # points left out, by reason


def encode_json(value: object, *, infinity: bool = False) -> bytes:
    """Return a line of JSON; `infinity` allows floats to be Infinity, as Python's own json does."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=infinity) + "\n").encode("utf-8", "backslashreplace")


def encode_json_list(entries: Iterable[object]) -> bytes:
    """Return a JSON list with a line per entry."""
    return b"[\n" + b",\n".join(encode_json(entry).rstrip(b"\n") for entry in entries) + b"\n]\n"


def encode_json_object(entries: Mapping[str, object]) -> bytes:
    """Return a JSON object with a line per entry."""
    return b"{\n" + b",\n".join(encode_json({name: v})[1:-2] for name, v in entries.items()) + b"\n}\n"


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """Hold which files were written, and which points were not."""

    paths: list[Path]
    note: str  # sentence about points that were left out; empty if none was
    runs: list[Run]


def export_runs(folders: Sequence[Path], to: str, output: Path | None, *, force: bool = False) -> ExportResult:
    """Write the points of these runs in a format: all of its files, or none.

    Raise UsageError for an unknown format and if the format can carry no point, RecordsError for runs or samples that
    cannot be read, OutputError if a file cannot be written or exists already.
    """
    if to not in FORMATS:
        raise UsageError(f"--to {to} is unknown{suggest_known(to, tuple(FORMATS))}")
    from dcpbench.exports.measured_points import MeasuredPoint
    from dcpbench.reports import dataframes

    module = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}")
    if folders and (name := getattr(module, "FILE", "")):  # before records are read, which can take minutes
        _check_free(_choose_paths({name: b""}, output, folders[0], to), force=force)
    runs = dataframes.read_runs(folders)
    points = [MeasuredPoint(run.name, run.folder, record) for run in runs for record in run.records]
    rendered = module.render(points)
    note = _format_left_out(rendered.left_out, len(points))
    if not rendered.files:
        why = note or "the runs hold no point."
        raise UsageError(f"nothing to write as {to}: {why} --to csv and --to parquet carry every point.")
    return ExportResult(_write_files(_choose_paths(rendered.files, output, folders[0], to), force=force), note, runs)


def _format_left_out(reasons: Counter[str], of: int) -> str:
    """Return a sentence such as `9 of 72 points left out: 7 of decode steps, which have no requests; 2 without a result`."""
    if not reasons:
        return ""
    why = "; ".join(f"{n} {why}" for why, n in reasons.items())
    return f"{reasons.total()} of {format_count(of, 'point')} left out: {why}."


def _choose_paths(files: Mapping[str, bytes], output: Path | None, run: Path, folder: str) -> dict[Path, bytes]:
    """Return the path of each file.

    `output` is the file itself if there is one file to write and `output` has a file extension, else the folder for all
    of them. Without `output` files go below the run's folder; several files go into a folder of the format's own.
    """
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


def _check_free(files: Iterable[Path], *, force: bool) -> None:
    """Raise OutputError if a file is there already, unless `force`."""
    there = [path for path in files if path.exists()]
    if there and not force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise OutputError(f"{there[0]}{more} would be written over; add --force, or give another place with -o.")


def _write_files(files: Mapping[Path, bytes], *, force: bool) -> list[Path]:
    """Write all files atomically, replacing older ones, and return their paths.

    Raise OutputError or DiskError if a file cannot be written, OutputError if it exists already and `force` is not set.
    """
    _check_free(files, force=force)
    for path, data in files.items():
        with convert_output_errors(path, "give another place with -o"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
    return list(files)
