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
from tools.syncs.corpus.score import CorpusRun, find_contradictions, format_programs, format_runs, score_detectors
from tools.syncs.speed import Speed, measure_programs

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILURE_CODE = 1
MEASURE_MODULE = "tools.syncs.corpus.measure"
RECORD_FILE = "corpus.json"
RECORD_REMEDY = "name a corpus.json that `python -m tools.syncs corpus --keep FOLDER` wrote"
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Hold the format and the place of the corpus' output."""

    as_json: bool = False
    programs: bool = False  # True for a table with a row for each program
    output: Path | None = None  # None: stdout
    force: bool = False


def run_corpus(
    records: Sequence[Path], *, keep: Path | None = None, vllm_checks: Sequence[str] = (), output_options: OutputOptions
) -> int:
    """Run the corpus, or read records of earlier runs, and print the score of each detector.

    Return 1 if scan with `cuda_sync` events misses a wait or reports a false one, if the dry run finds less than 95 %, or if the
    clock contradicts the corpus.
    """
    check_output(output_options.output, force=output_options.force)
    for text in vllm_checks:
        _validate_check(text)
    runs = [run for path in records for run in _read_record(path)] if records else _run_in_process(keep, vllm_checks)
    text = _format_runs(runs, output_options)
    if output_options.output is None:
        (write_json if output_options.as_json else sys.stdout.write)(text)
    else:
        write_output(output_options.output, text, force=output_options.force)
        sys.stderr.write(f"Wrote {output_options.output}\n")
    return FAILURE_CODE if any(find_failures(run) for run in runs) else 0


def _validate_check(text: str) -> None:
    version, _, file = text.partition("=")
    if not version or not Path(file).is_file():
        raise UsageError(
            f"--vllm-check {text!r}: name a release and its vllm/utils/gpu_sync_debug.py, as 0.33.0=gpu_sync_debug.py"
        )


def _format_runs(runs: list[CorpusRun], output_options: OutputOptions) -> str:
    if output_options.as_json:
        return msgspec.json.format(msgspec.json.encode(runs), indent=1).decode()
    return format_programs(runs) if output_options.programs else format_runs(runs)


def find_failures(run: CorpusRun) -> list[str]:
    """Return a sentence for each documented property that a run lacks."""
    found = find_contradictions(run)
    for s in score_detectors(run):
        if s.detector.startswith("scan, with cuda_sync") and (s.found, s.false) != (s.true, 0):
            found.append(f"{s.detector}: {s.found} of {s.true} found, {s.false} false")
        if s.detector == "dry run" and (s.recall < DRY_RUN_RECALL or s.false):
            found.append(f"{s.detector}: recall {s.recall:.1%}, {s.false} false")
    return found


DRY_RUN_RECALL = 0.95  # minimum share of the corpus that the dry run must find


def _run_in_process(keep: Path | None, vllm_checks: Sequence[str]) -> list[CorpusRun]:
    """Run the corpus in a separate process: it imports torch, and its detectors leave traces in the process."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise OutputError(f"{folder} cannot be created: {e.strerror}; name another folder with --keep") from None
        done = subprocess.run(
            [sys.executable, "-m", MEASURE_MODULE, str(folder), *vllm_checks], check=False, stdout=sys.stderr
        )
        if done.returncode:
            raise DcpbenchError("the corpus did not run to its end; its output is above")
        return _read_record(folder / RECORD_FILE)


def _read_record(path: Path) -> list[CorpusRun]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[CorpusRun] | CorpusRun)
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror}; {RECORD_REMEDY}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UsageError(f"{path} is not a record of a corpus run ({e}); {RECORD_REMEDY}") from None
    return found if isinstance(found, list) else [found]


def measure_speed(trace: Path, size: str, *, hta: Path | None, runs: int, keep: Path | None, as_json: bool) -> int:
    """Measure `scan`, and HTA's loader if `hta` is given, on a repeated trace, and print the result."""
    if runs < 1:
        raise UsageError(f"--runs {runs}: name at least one run")
    check_output(keep, force=False)
    with ProgressLine() as progress:
        found = measure_programs(trace, parse_size(size), hta=hta, runs=runs, keep=keep, progress=progress)
    as_text = (
        msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n" if as_json else format_speed(found)
    )
    (write_json if as_json else sys.stdout.write)(as_text)
    return 0


def parse_size(text: str) -> int:
    """Parse `140MB`, `1GB` or a plain number of bytes. Raise UsageError for other text or 0."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].lower() not in UNITS or float(found[1]) <= 0:
        raise UsageError(f"--size {text!r} is not a size; write it as 140MB or 1GB")
    return int(float(found[1]) * UNITS[found[2].lower()])


def format_speed(found: Speed) -> str:
    """Format the timings as a Markdown table."""
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
