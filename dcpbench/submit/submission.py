"""Description of a submission, and the files kept with the run. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from dcpbench.errors import OutputError, UsageError
from dcpbench.launch import folders
from dcpbench.records.lines import UNREADABLE
from dcpbench.show.whole_files import write_file

SUBMIT_FOLDER = "submit"
STATE_FILE = "job.json"
TERM_CODE = 143  # exit code of a command that SIGTERM ended


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A command of dcpbench, and the machines that it is to run on."""

    words: tuple[str, ...]  # command such as `sweep --tp 16`, without the run's folder, --resume and --force
    folder: Path  # the run's, absolute
    start: str = ""  # `--resume` or `--force` if given
    again: str = "--resume"  # option that a restarted job adds instead
    nodes: int = 1
    gpus_per_node: int | None = None
    time: str = ""  # limit, as Slurm writes it; Kubernetes gets its seconds
    name: str = "dcpbench"
    keeps: bool = True  # True if the submitting command follows the job to its end

    @property
    def typed(self) -> str:
        """Return the command for display."""
        return shlex.join(["dcpbench", *self.words])

    @property
    def place(self) -> Path:
        """Return the folder of the job's files."""
        return self.folder / SUBMIT_FOLDER


class SubmittedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that a cluster has."""

    kind: str  # `slurm` or `k8s`
    id: str  # Slurm's number, or the name of the Kubernetes Job
    nodes: int
    kubectl: tuple[str, ...] = ()  # command line of kubectl, with its namespace and context
    fetched: bool = True  # Kubernetes: whether the run is copied to this machine
    claim: str = ""  # Kubernetes: the volume that keeps it

    @property
    def description(self) -> str:
        """Return a description of the job."""
        return f"{'Slurm job' if self.kind == 'slurm' else 'Kubernetes job'} {self.id}"

    def describe_results(self, folder: Path) -> str:
        """Return a sentence, without its full stop, on the location of the results of a cancelled job."""
        if self.claim and not self.fetched:
            return f"What was measured is in the volume {self.claim}, in its folder {folder.name}"
        return f"What was measured is in {folder}"


def save_job(folder: Path, job: SubmittedJob) -> None:
    """Record the job of a run."""
    with folders.convert_write_errors(folder):
        write_file(folder / SUBMIT_FOLDER / STATE_FILE, msgspec.json.encode(job) + b"\n")


def load_job(folder: Path) -> SubmittedJob | None:
    """Return the last submitted job of a run; None without one. Raise OutputError if the file is invalid."""
    path = folder / SUBMIT_FOLDER / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=SubmittedJob)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *UNREADABLE) as e:
        raise OutputError(f"{path} cannot be read ({e}); remove it if the job is gone, and submit again.") from e


def require_job(folder: Path) -> SubmittedJob:
    """Return the job of a run. Raise UsageError if it was not submitted."""
    found = load_job(folder)
    if found is None:
        raise UsageError(
            f"{folder} was not submitted: there is no {SUBMIT_FOLDER}/{STATE_FILE}; give the folder that `dcpbench submit` "
            "printed as Run."
        )
    return found


def write_script(spec: JobSpec, name: str, text: str) -> Path:
    """Write the submitted text to the run's folder. Raise OutputError on failure."""
    folders.make_folder(spec.place)
    with folders.convert_write_errors(spec.folder):
        write_file(spec.place / name, text.encode())
    return spec.place / name
