"""Results of other engines as records, so that one report shows them beside ours. Nothing heavy at the top."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.plan.options import did_you_mean
from dcpbench.points.names import ENGINES

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What the user says of results that do not say it themselves."""

    model: str | None = None
    tp: int | None = None
    dp: int | None = None
    dcp: int | None = None
    gpu: str | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Imported:
    """The run that was made."""

    path: Path
    """Its record file."""
    notes: list[str]
    """What a reader must know."""


def import_files(
    files: Sequence[Path], engine: str, output: Path | None, told: Told, *, force: bool = False
) -> Imported:
    """Make a run of result files; a run that is whole, or none.

    Raises UsageError for an unknown engine and options that cannot be, RecordsError for a file that is not the
    engine's, OutputError for a folder that cannot be written or already holds records.
    """
    if engine not in ENGINES:
        raise UsageError(f"--from {engine} is unknown{did_you_mean(engine, ENGINES)}")
    from dcpbench.imports import run

    folder = output or Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-import-{engine}"
    return Imported(*run.make(list(dict.fromkeys(files)), engine, folder, told, force=force))
