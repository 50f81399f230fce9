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
from dcpbench.submit.asked import SUBMIT_FOLDER, TERM_CODE, Asked, Submitted, keep, write_script
from dcpbench.submit.follow import FAILED, RefusedError, Silent, State, ask

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE, SCRIPT = "slurm.sh.j2", "job.sh"
INTERRUPTED = ExitCode.INTERRUPTED
WAITING, UNKNOWN = "PENDING", "Invalid job id"
HOW_IT_ENDED = {
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
"""Phrases by the final state of a job in Slurm."""
MAY_GO_ON = ("TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED")


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Options for running a job on Slurm."""

    program: tuple[str, ...]
    """Command that starts dcpbench on a node."""
    directory: Path
    """Folder to which relative paths refer."""
    partition: str = ""
    account: str = ""
    options: tuple[str, ...] = ()
    """Further options of sbatch, as typed."""
    requeue: bool = True
    exclusive: bool = True
    cpus_per_node: int | None = None
    interface: str = ""
    setup: tuple[str, ...] = ()
    """Lines of shell that come before the command."""
    pyxis: str = ""
    apptainer: str = ""
    mounts: tuple[str, ...] = ()


def script(asked: Asked, cluster: Cluster) -> str:
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
        asked=asked,
        options=_options(asked, cluster),
        interface=cluster.interface,
        setup=cluster.setup,
        srun=_srun(asked, cluster),
        program=_program(asked, cluster),
        term_code=TERM_CODE,
    )


def submit(asked: Asked, cluster: Cluster) -> Submitted:
    """Submit the job to Slurm. Raise UsageError if Slurm refuses it."""
    path = write_script(asked, SCRIPT, script(asked, cluster))
    env = {name: value for name, value in os.environ.items() if name != SECRET}
    try:
        printed = ask(["sbatch", "--parsable", str(path)], env=env)
    except RefusedError as e:
        raise UsageError(
            f"{e}. What it was given is {path}; change the options of submit, or add to them with --sbatch."
        ) from e
    except Silent as e:
        raise UsageError(f"{e}; look with `squeue --me` whether it took the job.") from e
    number = printed.strip().partition(";")[0]
    job = Submitted(kind="slurm", id=number, nodes=asked.nodes)
    keep(asked.folder, job)
    return job


class Queue:
    """A job in Slurm's queue."""

    late_s = 2.0
    """Through a shared file system."""

    def __init__(self, job: Submitted, folder: Path) -> None:
        """Follow a job; `folder` is the run's."""
        self._job, self._folder = job, folder
        self._log = Tail(log_of(folder, job))

    def output(self) -> Iterator[str]:
        """Yield new lines of its log."""
        return (line.decode("utf-8", "replace").rstrip("\r") for line in self._log.lines())

    def finished(self) -> bool:
        """Return False, because a file does not show its end."""
        return False

    def look(self) -> State:
        """Return the current state. Raise Silent if Slurm does not answer."""
        try:
            told = ask(["scontrol", "--oneliner", "show", "job", self._job.id])
        except RefusedError as e:
            if UNKNOWN in e.said:
                return self._forgotten()
            raise Silent(str(e)) from e
        return self.state(told)

    def state(self, told: str) -> State:
        """Return the state from the output of `scontrol --oneliner show job`."""
        facts = dict(re.findall(r"(?:^|\s)(JobState|Reason|Restarts|ExitCode|NodeList)=(\S*)", told))
        state, restarts = facts.get("JobState", "").partition("+")[0], int(facts.get("Restarts") or 0)
        if state in HOW_IT_ENDED:
            return self._ended(state, facts.get("ExitCode", ""))
        begun = f", begun again {restarts} {'time' if restarts == 1 else 'times'}" if restarts else ""
        why = f" ({facts['Reason']})" if facts.get("Reason", "None") != "None" else ""
        where = f" on {facts['NodeList']}" if facts.get("NodeList", "(null)") not in ("(null)", "") else ""
        doing = f"is {state.lower().replace('_', ' ') or 'in the queue'}"
        held = f"; to let it go: scontrol release {self._job.id}" if "Held" in why or state == "REQUEUE_HOLD" else ""
        return State(said=f"{self._job.said} {doing}{'' if state == WAITING else where}{why}{begun}{held}")

    def cancel(self) -> None:
        """Have Slurm end it, or keep it from beginning."""
        ask(["scancel", self._job.id])

    def clean(self) -> None:
        """Delete its secret, even if its script had no time to do so."""
        (self._folder / SUBMIT_FOLDER / "secret").unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing, because its log is a file."""

    def _ended(self, state: str, exit_code: str) -> State:
        code, _, number = exit_code.partition(":")
        status, killed = int(code or 0), int(number or 0)
        by = 128 + killed if killed else status
        log = f"; read {log_of(self._folder, self._job)}"
        if state == "COMPLETED":
            return State(said=f"{self._job.said} has ended well", ended=True)
        if state == "FAILED":
            how = f"by signal {killed}" if killed else f"with exit code {status}"
            return State(said=f"{self._job.said} has ended {how}{log}", ended=True, code=by or FAILED)
        go_on = (
            f"; to go on, submit it again with -o {shlex.quote(str(self._folder))} --resume"
            if state in MAY_GO_ON
            else log
        )
        code_of = INTERRUPTED if state == "CANCELLED" else FAILED
        return State(said=f"{self._job.said} {HOW_IT_ENDED[state]}{go_on}", ended=True, code=code_of)

    def _forgotten(self) -> State:
        """Return the state of a job that Slurm no longer knows, minutes after its end, from the exit code that the
        script has stored.
        """
        path = self._folder / SUBMIT_FOLDER / f"{self._job.id}.code"
        try:
            code = int(path.read_text())
        except (OSError, ValueError):
            return State(
                said=f"Slurm knows {self._job.said} no more, and how it ended was not left behind; `sacct -j {self._job.id}` "
                f"may say, or {log_of(self._folder, self._job)}",
                ended=True,
                code=FAILED,
            )
        return State(said=f"{self._job.said} has ended with exit code {code}", ended=True, code=code)


def log_of(folder: Path, job: Submitted) -> Path:
    """Return the file of the job's output."""
    return folder / SUBMIT_FOLDER / f"{job.id}.log"


def _options(asked: Asked, cluster: Cluster) -> list[str]:
    """Return the options of sbatch. Options of the user come last, and take precedence."""
    log = str(asked.place).replace("%", "%%") + "/%j.log"
    given = {
        "--job-name": asked.name,
        "--nodes": asked.nodes,
        "--ntasks-per-node": 1,
        "--cpus-per-task": cluster.cpus_per_node,
        "--gpus-per-node": asked.gpus_per_node or None,
        "--mem": 0 if cluster.exclusive else None,
        "--partition": cluster.partition or None,
        "--account": cluster.account or None,
        "--time": asked.time or None,
        "--chdir": _quoted(str(cluster.directory)),
        "--output": _quoted(log),
        "--open-mode": "append",
    }
    alone = ["--exclusive"] if cluster.exclusive else []
    again = "--requeue" if cluster.requeue else "--no-requeue"
    return [*(f"{name}={value}" for name, value in given.items() if value is not None), *alone, again, *cluster.options]


def _quoted(text: str) -> str:
    """Return a text in the quoting of sbatch directives."""
    return text if re.fullmatch(r"[\w./%+=:@,-]+", text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _srun(asked: Asked, cluster: Cluster) -> str:
    """Return the srun command: one task on each node, with all cores there; the first failure ends the others."""
    words = [f"--nodes={asked.nodes}", f"--ntasks={asked.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    words += ["--cpu-bind=none", "--mpi=none"]
    if cluster.cpus_per_node:
        words.append(f"--cpus-per-task={cluster.cpus_per_node}")
    if cluster.pyxis:
        words.append(f"--container-image={cluster.pyxis}")
        words.append(f"--container-mounts={','.join(_mounts(asked, cluster))}")
        words.append(f"--container-workdir={cluster.directory}")
    return shlex.join(words)


def _program(asked: Asked, cluster: Cluster) -> str:
    words = [*cluster.program, *asked.words]
    if cluster.apptainer:
        binds = [word for mount in _mounts(asked, cluster) for word in ("--bind", mount)]
        gpus = ["--nv"] if asked.gpus_per_node else []
        words = ["apptainer", "exec", *gpus, *binds, "--pwd", str(cluster.directory), cluster.apptainer, *words]
    return shlex.join(words)


def _mounts(asked: Asked, cluster: Cluster) -> list[str]:
    """Return the mounts: the run's folder and the folder of relative paths, at the same places inside, and those of the
    user.
    """
    own = dict.fromkeys((str(asked.folder), str(cluster.directory)))
    return [*(f"{path}:{path}" for path in own), *cluster.mounts]
