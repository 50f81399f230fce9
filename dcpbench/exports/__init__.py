"""Records in the formats of other tools, one file for each; nothing heavy is imported before one is asked for."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.plan.options import did_you_mean
from dcpbench.show.text import counted

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence
    from pathlib import Path

FORMATS = {
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
"""What --to can be, and the module that renders it."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written, and what was not."""

    paths: list[Path]
    note: str
    """A sentence about points that were left out; empty if none was."""


def export(folders: Sequence[Path], to: str, output: Path | None, *, force: bool = False) -> Exported:
    """Write the points of these runs in a format; all of its files, or none.

    Raises UsageError for an unknown format and where the format can carry no point of them, RecordsError for runs or
    samples that cannot be read, OutputError where a file cannot be written or is there already.
    """
    if to not in FORMATS:
        raise UsageError(f"--to {to} is unknown{did_you_mean(to, tuple(FORMATS))}")
    from dcpbench.exports import files, measured

    points = measured.read(folders)
    rendered = importlib.import_module(f"dcpbench.exports.{FORMATS[to]}").render(points)
    note = _left_out(rendered.left_out, len(points))
    if not rendered.files:
        why = note or "the runs hold no point."
        raise UsageError(f"nothing to write as {to}: {why} --to csv and --to parquet carry every point.")
    places = files.places(rendered, output, folders[0], to)
    return Exported(files.write(places, force=force), note)


def _left_out(reasons: Counter[str], of: int) -> str:
    """A sentence such as `9 of 72 points left out: 7 decode steps, which have no requests; 2 did not run`."""
    if not reasons:
        return ""
    why = "; ".join(f"{n} {why}" for why, n in reasons.items())
    return f"{reasons.total()} of {counted(of, 'point')} left out: {why}."
