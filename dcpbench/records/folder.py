"""Define the names of the files in a run's folder; launch/jobs.py, launch/torchrun.py and records/file.py describe their contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

RECORDS_FILE = "records.jsonl"
TRUNCATED_LINES_FILE = "records.truncated.txt"  # truncated last lines after a crash, moved here by the next record
CHECKS_FILE = "checks.jsonl"
FAILED_FILE = "failed.jsonl"  # records of points that `verify` could not check
GAINS_FILE = "gain-splits.json"  # gains of DCP by cause, of replayed loads (serving/run_gains.py)
LOCK_FILE = ".lock"  # locked while a run writes here; holds the process ids of the command, its jobs and their ranks
JOB_FILES = "job-*.json"
STEP_TIMES_FOLDER = "step-times"  # folder of the files of step times that were measured for replays
CASES_SUFFIX = ".cases.jsonl"  # of the files there with the cases of servers, as they are measured
HANGS_FOLDER = "hangs"  # folder of the evidence captured from hanging jobs, one subfolder TAG-N per hang


def get_job_file(folder: Path, tag: str) -> Path:
    """Return the job file of this tag."""
    return folder / JOB_FILES.replace("*", tag)


def get_job_tag(job: Path) -> str:
    """Return the tag of a job's file."""
    return job.stem.removeprefix("job-")


def get_progress_file(folder: Path, tag: str) -> Path:
    """Return the file of progress messages that the job with this tag writes."""
    return folder / f"progress-{tag}.jsonl"


def get_record_file(run: Path) -> Path:
    """Return the records file of a run: in its folder, or the given file itself."""
    return run / RECORDS_FILE if run.is_dir() else run


def find_runs(path: Path) -> list[Path]:
    """Return the run itself, or the runs directly below a folder that is none; empty if there are none."""
    if not path.is_dir() or (path / RECORDS_FILE).exists():
        return [path]
    return sorted(found.parent for found in path.glob(f"*/{RECORDS_FILE}"))


def get_run_folder(run: Path) -> Path:
    """Return the folder of a run, given by it or by its records file."""
    return run if run.is_dir() else run.parent
