"""Implement `python -m tools.syncs corpus` and `speed`."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError, OutputError, UsageError
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import ProgressLine
from dcpbench.syncs.files import check_output, write_output
from tools.syncs.corpus.score import CorpusRun, contradictions, format_programs, markdown, score
from tools.syncs.speed import Speed, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

WRONG = 1
MEASURE = "tools.syncs.corpus.measure"
RESULT = "corpus.json"
WRITTEN_BY = "name a corpus.json that `python -m tools.syncs corpus --keep FOLDER` wrote"
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """Hold how and where the result of the corpus is written."""

    as_json: bool = False
    programs: bool = False  # a table with a row for each program
    output: Path | None = None  # None: stdout
    force: bool = False


def corpus(read: Sequence[Path], *, keep: Path | None = None, vllm_checks: Sequence[str] = (), shown: Shown) -> int:
    """Run the corpus here, or read records of earlier runs, and print how well each detector did.

    Returns 1 if scan with `cuda_sync` events misses something or is wrong, if the dry run finds less than 95 %, or if
    the clock contradicts the corpus.
    """
    check_output(shown.output, force=shown.force)
    for text in vllm_checks:
        _validate_check(text)
    runs = [run for path in read for run in _read(path)] if read else _run(keep, vllm_checks)
    text = _format(runs, shown)
    if shown.output is None:
        (write_json if shown.as_json else sys.stdout.write)(text)
    else:
        write_output(shown.output, text, force=shown.force)
        sys.stderr.write(f"Wrote {shown.output}\n")
    return WRONG if any(failed(run) for run in runs) else 0


def _validate_check(text: str) -> None:
    version, _, file = text.partition("=")
    if not version or not Path(file).is_file():
        raise UsageError(
            f"--vllm-check {text!r}: name a release and its vllm/utils/gpu_sync_debug.py, as 0.33.0=gpu_sync_debug.py"
        )


def _format(runs: list[CorpusRun], shown: Shown) -> str:
    if shown.as_json:
        return msgspec.json.format(msgspec.json.encode(runs), indent=1).decode()
    return format_programs(runs) if shown.programs else markdown(runs)


def failed(run: CorpusRun) -> list[str]:
    """Return a sentence for each documented property that a run does not have."""
    said = contradictions(run)
    for s in score(run):
        if s.detector.startswith("scan, with cuda_sync") and (s.found, s.false) != (s.true, 0):
            said.append(f"{s.detector}: {s.found} of {s.true} found, {s.false} false")
        if s.detector == "dry run" and (s.recall < DRY_RUN_RECALL or s.false):
            said.append(f"{s.detector}: recall {s.recall:.1%}, {s.false} false")
    return said


DRY_RUN_RECALL = 0.95  # minimum share of the corpus that the dry run must find


def _run(keep: Path | None, vllm_checks: Sequence[str]) -> list[CorpusRun]:
    """Run the corpus in a separate process: it imports torch, and its detectors leave traces in the process."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise OutputError(f"{folder} cannot be made: {e.strerror}; name another folder with --keep") from None
        done = subprocess.run(
            [sys.executable, "-m", MEASURE, str(folder), *vllm_checks], check=False, stdout=sys.stderr
        )
        if done.returncode:
            raise DcpbenchError("the corpus did not run to its end; what it printed is above")
        return _read(folder / RESULT)


def _read(path: Path) -> list[CorpusRun]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[CorpusRun] | CorpusRun)
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}; {WRITTEN_BY}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UsageError(f"{path} is no record of a corpus run ({e}); {WRITTEN_BY}") from None
    return found if isinstance(found, list) else [found]


def speed(trace: Path, size: str, *, hta: Path | None, runs: int, keep: Path | None, as_json: bool) -> int:
    """Time `scan` on a trace made from a real one, with HTA's loader for comparison if there is one, and print it."""
    if runs < 1:
        raise UsageError(f"--runs {runs}: name at least one run")
    check_output(keep, force=False)
    with ProgressLine() as progress:
        found = measure(trace, parse_size(size), hta=hta, runs=runs, keep=keep, progress=progress)
    as_text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n" if as_json else table(found)
    (write_json if as_json else sys.stdout.write)(as_text)
    return 0


def parse_size(text: str) -> int:
    """Parse `140MB`, `1GB` or a plain number of bytes.

    Raises:
        UsageError: It is none, or not more than 0.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].lower() not in UNITS or float(found[1]) <= 0:
        raise UsageError(f"--size {text!r} is no size; write it as 140MB or 1GB")
    return int(float(found[1]) * UNITS[found[2].lower()])


def table(found: Speed) -> str:
    """Return the timings for people, as Markdown."""
    name, megabytes, runs = Path(found.source).name, found.trace_bytes / 1e6, len(found.timings[0].runs_wall_s)
    lines = [
        f"{name} {found.copies} times: {megabytes:.0f} MB, {found.events:,} events; one core, best of {runs}",
        "",
        "| tool | seconds | MB/s | peak memory MB | of the file | times scan's time |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {t.tool} | {t.wall_s:.2f} | {megabytes / t.wall_s:.0f} | {t.peak_bytes / 1e6:.0f} "
        f"| {t.peak_bytes / found.trace_bytes:.2f} | {t.wall_s / found.timings[0].wall_s:.1f} |"
        for t in found.timings
    ]
    return "\n".join(lines) + "\n"
