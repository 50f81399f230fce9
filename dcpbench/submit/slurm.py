"""Runs as jobs of Slurm: the script, and the commands sbatch, scontrol and scancel. No torch."""

from __future__ import annotations

import os
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import ExitCode, UsageError
from dcpbench.launch.jobs import SECRET
from dcpbench.records.lines import Tail
from dcpbench.submit.follow import FAILED, NoAnswerError, RefusedError, State, make_end_state, run_command
from dcpbench.submit.submission import SUBMIT_FOLDER, TERM_CODE, JobSpec, SubmittedJob, save_job, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE, SCRIPT = "slurm.sh.j2", "job.sh"
WAITING, UNKNOWN = "PENDING", "Invalid job id"
HOW_IT_ENDED = {  # phrases by the final state of a job in Slurm
    "COMPLETED": "",
    "FAILED": "",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "ran into its time limit",
    "DEADLINE": "was not begun before its deadline",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "got a node that did not start",
    "PREEMPTED": "had to give way to another job",
    "OUT_OF_MEMORY": "was out of host memory",
}
MAY_GO_ON = ("TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED")


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Options for running a job on Slurm."""

    program: tuple[str, ...]  # command that starts dcpbench on a node
    directory: Path  # folder to which relative paths refer
    partition: str = ""
    account: str = ""
    options: tuple[str, ...] = ()  # further options of sbatch, as typed
    requeue: bool = True
    exclusive: bool = True
    cpus_per_node: int | None = None
    interface: str = ""
    setup: tuple[str, ...] = ()  # lines of shell that come before the command
    pyxis: str = ""
    apptainer: str = ""
    mounts: tuple[str, ...] = ()


def render_script(spec: JobSpec, cluster: Cluster) -> str:
    """Return the batch script of a job. It creates the secret of its machines at start, in a file readable only by its
    owner.
    """
    import jinja2

    env = jinja2.Environment(  # noqa: S701 -- a shell script with quoted words
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    env.filters |= {"quote": lambda text: shlex.quote(str(text)), "comment": lambda text: " ".join(text.splitlines())}
    template = env.from_string(resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        spec=spec,
        options=_make_options(spec, cluster),
        interface=cluster.interface,
        setup=cluster.setup,
        srun=_make_srun_command(spec, cluster),
        program=_make_program_command(spec, cluster),
        term_code=TERM_CODE,
    )


def submit(spec: JobSpec, cluster: Cluster) -> SubmittedJob:
    """Submit the job to Slurm. Raise UsageError if Slurm refuses it."""
    path = write_script(spec, SCRIPT, render_script(spec, cluster))
    env = {name: value for name, value in os.environ.items() if name != SECRET}
    try:
        printed = run_command(["sbatch", "--parsable", str(path)], env=env)
    except RefusedError as e:
        raise UsageError(
            f"{e}. What it was given is {path}; change the options of submit, or add to them with --sbatch."
        ) from e
    except NoAnswerError as e:
        raise UsageError(f"{e}; look with `squeue --me` whether it took the job.") from e
    number = printed.strip().partition(";")[0]
    job = SubmittedJob(kind="slurm", id=number, nodes=spec.nodes)
    save_job(spec.folder, job)
    return job


class Queue:
    """A job in Slurm's queue."""

    late_s = 2.0  # through a shared file system

    def __init__(self, job: SubmittedJob, folder: Path) -> None:
        """Follow a job; `folder` is the run's."""
        self._job, self._folder = job, folder
        self._log = Tail(get_log_path(folder, job))

    def read_output(self) -> Iterator[str]:
        """Yield new lines of its log."""
        return (line.decode("utf-8", "replace").rstrip("\r") for line in self._log.read_lines())

    def is_finished(self) -> bool:
        """Return False, because a file does not show its end."""
        return False

    def fetch_state(self) -> State:
        """Return the current state. Raise NoAnswerError if Slurm does not answer."""
        try:
            output = run_command(["scontrol", "--oneliner", "show", "job", self._job.id])
        except RefusedError as e:
            if UNKNOWN in e.message:
                return self._read_end_state()
            raise NoAnswerError(str(e)) from e
        return self.parse_state(output)

    def parse_state(self, output: str) -> State:
        """Return the state from the output of `scontrol --oneliner show job`."""
        facts = dict(re.findall(r"(?:^|\s)(JobState|Reason|Restarts|ExitCode|NodeList)=(\S*)", output))
        state, restarts = facts.get("JobState", "").partition("+")[0], int(facts.get("Restarts") or 0)
        if state in HOW_IT_ENDED:
            return self._make_end_state(state, facts.get("ExitCode", ""))
        begun = f", begun again {restarts} {'time' if restarts == 1 else 'times'}" if restarts else ""
        why = f" ({facts['Reason']})" if facts.get("Reason", "None") != "None" else ""
        where = f" on {facts['NodeList']}" if facts.get("NodeList", "(null)") not in ("(null)", "") else ""
        doing = f"is {state.lower().replace('_', ' ') or 'in the queue'}"
        held = f"; to let it go: scontrol release {self._job.id}" if "Held" in why or state == "REQUEUE_HOLD" else ""
        return State(message=f"{self._job.description} {doing}{'' if state == WAITING else where}{why}{begun}{held}")

    def cancel(self) -> None:
        """Have Slurm end it, or keep it from beginning."""
        run_command(["scancel", self._job.id])

    def delete_remains(self) -> None:
        """Delete its secret, even if its script had no time to do so."""
        (self._folder / SUBMIT_FOLDER / "secret").unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing, because its log is a file."""

    def _make_end_state(self, state: str, exit_code: str) -> State:
        code, _, number = exit_code.partition(":")
        status, killed = int(code or 0), int(number or 0)
        by = 128 + killed if killed else status
        log = f"; read {get_log_path(self._folder, self._job)}"
        if state == "COMPLETED":
            return State(message=f"{self._job.description} has ended well", ended=True)
        if state == "FAILED":
            how = f"by signal {killed}" if killed else f"with exit code {status}"
            return make_end_state(f"{self._job.description} has ended {how}{log}", by or FAILED)
        again = f"; to go on, submit it again with -o {shlex.quote(str(self._folder))} --resume"
        message = f"{self._job.description} {HOW_IT_ENDED[state]}{again if state in MAY_GO_ON else log}"
        return make_end_state(message, ExitCode.INTERRUPTED if state == "CANCELLED" else FAILED)

    def _read_end_state(self) -> State:
        """Return the state of a job that Slurm no longer knows, minutes after its end, from the exit code that the
        script has stored.
        """
        path = self._folder / SUBMIT_FOLDER / f"{self._job.id}.code"
        try:
            code = int(path.read_text())
        except (OSError, ValueError):
            return make_end_state(
                f"Slurm knows {self._job.description} no more, and how it ended was not left behind; `sacct -j {self._job.id}` "
                f"may say, or {get_log_path(self._folder, self._job)}"
            )
        return State(message=f"{self._job.description} has ended with exit code {code}", ended=True, code=code)


def get_log_path(folder: Path, job: SubmittedJob) -> Path:
    """Return the file of the job's output."""
    return folder / SUBMIT_FOLDER / f"{job.id}.log"


def _make_options(spec: JobSpec, cluster: Cluster) -> list[str]:
    """Return the options of sbatch. Options of the user come last, and take precedence."""
    log = str(spec.place).replace("%", "%%") + "/%j.log"
    given = {
        "--job-name": spec.name,
        "--nodes": spec.nodes,
        "--ntasks-per-node": 1,
        "--cpus-per-task": cluster.cpus_per_node,
        "--gpus-per-node": spec.gpus_per_node or None,
        "--mem": 0 if cluster.exclusive else None,
        "--partition": cluster.partition or None,
        "--account": cluster.account or None,
        "--time": spec.time or None,
        "--chdir": _format_directive(str(cluster.directory)),
        "--output": _format_directive(log),
        "--open-mode": "append",
    }
    alone = ["--exclusive"] if cluster.exclusive else []
    again = "--requeue" if cluster.requeue else "--no-requeue"
    return [*(f"{name}={value}" for name, value in given.items() if value is not None), *alone, again, *cluster.options]


def _format_directive(text: str) -> str:
    """Return a text in the quoting of sbatch directives."""
    return text if re.fullmatch(r"[\w./%+=:@,-]+", text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _make_srun_command(spec: JobSpec, cluster: Cluster) -> str:
    """Return the srun command: one task on each node, with all cores there; the first failure ends the others."""
    argv = [f"--nodes={spec.nodes}", f"--ntasks={spec.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    argv += ["--cpu-bind=none", "--mpi=none"]
    if cluster.cpus_per_node:
        argv.append(f"--cpus-per-task={cluster.cpus_per_node}")
    if cluster.pyxis:
        argv.append(f"--container-image={cluster.pyxis}")
        argv.append(f"--container-mounts={','.join(_list_mounts(spec, cluster))}")
        argv.append(f"--container-workdir={cluster.directory}")
    return shlex.join(argv)


def _make_program_command(spec: JobSpec, cluster: Cluster) -> str:
    argv = [*cluster.program, *spec.words]
    if cluster.apptainer:
        binds = [word for mount in _list_mounts(spec, cluster) for word in ("--bind", mount)]
        gpus = ["--nv"] if spec.gpus_per_node else []
        argv = ["apptainer", "exec", *gpus, *binds, "--pwd", str(cluster.directory), cluster.apptainer, *argv]
    return shlex.join(argv)


def _list_mounts(spec: JobSpec, cluster: Cluster) -> list[str]:
    """Return the mounts: the run's folder and the folder of relative paths, at the same places inside, and those of the
    user.
    """
    own = dict.fromkeys((str(spec.folder), str(cluster.directory)))
    return [*(f"{path}:{path}" for path in own), *cluster.mounts]
