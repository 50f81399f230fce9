"""Implement `dcpbench submit …`: run a command as a job of a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcpbench.commands import elsewhere
from dcpbench.commands.command import PARSER_ERROR, Group, load_command, make_panel, register_command
from dcpbench.errors import CapacityError, DcpbenchError, OutputError, UsageError
from dcpbench.plan.command_line import remove_options
from dcpbench.plan.option_parsers import split_command
from dcpbench.points import redaction
from dcpbench.points.names import MOE_TP, format_flag
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.submit.follow import Queue, State
    from dcpbench.submit.submission import JobSpec, SubmittedJob

app = typer.Typer(
    name="submit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run sweep, serve, server or verify as a job of Slurm or Kubernetes, on one or several machines."
    "\n\nStart with: dcpbench submit slurm --nodes 2 --gpus-per-node 8 --dry-run -- sweep --tp 16 --dcp 8"
    "\n\nExit codes: that of the submitted command · 2 options or a cluster that cannot be used · 4 the job was "
    "ended by its time limit or a lost node · 130 cancelled.",
)
LINES = ("sbatch", "setup")  # options that take a line each, which is checked with them
RUNNABLE = ("sweep", "serve", "server", "verify")
WHERE = ("nodes",)  # options of a command that the job sets itself
GPU_OPTION = re.compile(r"-G|.*gpu")  # pattern of sbatch options that may request GPUs
NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")

JOB = make_panel("The job")
CLUSTER = make_panel("The cluster")
CONTAINERS = make_panel("Containers")

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND",
        help="sweep, serve, server or verify with its options, including -o and --resume.",
        show_default=False,
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, as it was printed.")]


class Job(Group):
    """Hold the options for machines, time limit and name of the job."""

    nodes: int = JOB("Number of machines. tp counts the GPUs of all of them.", default=1, metavar="N")
    gpus_per_node: int | None = JOB("GPUs to request on each machine. Default: none.", metavar="N")
    gpu: str | None = JOB(
        "Type of these GPUs, as in sweep's --gpu: points must fit their memory and have kernels for them. Default: "
        "unknown; everything else is checked.",
        metavar="NAME",
    )
    time: str | None = JOB("Limit of the job: minutes, HH:MM:SS or D-HH:MM:SS. Default: the cluster's.", metavar="TIME")
    name: str = JOB("Name of the job in the queue.", default="dcpbench", metavar="NAME")
    detach: bool = JOB(
        "Return once the job is submitted; `dcpbench submit follow RUN` shows its output. Default: wait until it has ended; "
        "Ctrl-C cancels it.",
        default=False,
    )
    dry_run: bool = JOB("Print what would be submitted, and submit nothing.", default=False)


class Slurm(Group):
    """Hold the options that are passed to Slurm."""

    partition: str | None = CLUSTER("sbatch's --partition. Default: the cluster's.", metavar="NAME")
    account: str | None = CLUSTER("sbatch's --account. Default: yours.", metavar="NAME")
    sbatch: list[str] | None = CLUSTER(
        "Another option of sbatch, such as --sbatch=--qos=high; repeat for several.", metavar="OPTION"
    )
    requeue: bool = CLUSTER(
        "Restart a job that lost a node, was preempted, or was requeued with `scontrol requeue`; it measures the remaining points.",
        default=True,
    )
    exclusive: bool = CLUSTER(
        "Allow no other jobs on its machines; their load would distort the measurement.", default=True
    )
    cpus_per_node: int | None = CLUSTER(
        "Cores on each machine, for clusters where --no-exclusive jobs get one. Default: the cluster's.", metavar="N"
    )
    interface: str | None = CLUSTER(
        "Network interface between the machines, such as ib0: node 0 listens at its address, and gloo and NCCL use "
        "it. Default: the address that Slurm has for node 0.",
        metavar="NAME",
    )
    setup: list[str] | None = CLUSTER(
        "A line of shell before the command, such as --setup 'module load cuda'; repeat for several.", metavar="LINE"
    )
    dcpbench: str | None = CLUSTER(
        "Command that starts dcpbench on the machines. Default: the path of this one; in a container, dcpbench.",
        metavar="COMMAND",
    )


class SlurmContainers(Group):
    """Hold the options for the job's container."""

    pyxis: str | None = CONTAINERS("Image for Slurm's plug-in pyxis (enroot).", metavar="IMAGE")
    apptainer: str | None = CONTAINERS("Image for apptainer.", metavar="IMAGE")
    mount: list[str] | None = CONTAINERS(
        "Folder of the machine to mount into the container, in addition to the run's and the current folder. Repeat for several.",
        metavar="PATH:PATH",
    )


class Kubernetes(Group):
    """Hold the options that are passed to Kubernetes."""

    image: str = CLUSTER("Image with dcpbench in it, and with sh and tar.", default="", metavar="IMAGE")
    namespace: str | None = CLUSTER("kubectl's --namespace. Default: that of the context.", metavar="NAME")
    context: str | None = CLUSTER("kubectl's --context. Default: the current one.", metavar="NAME")
    claim: str | None = CLUSTER(
        "PersistentVolumeClaim that keeps runs, for --resume and --detach; several machines must be able to mount it "
        "(ReadWriteMany). Default: none, and the run is copied here before its pods end.",
        metavar="NAME",
    )
    restarts: int = CLUSTER(
        "Maximum number of times to submit a job that lost a node (evicted, preempted, drained) again, for the remaining points; "
        "needs --claim.",
        default=0,
        metavar="N",
    )
    pod: Path | None = CLUSTER(
        "YAML file with more fields of the pod's spec: nodeSelector, tolerations, imagePullSecrets, …", metavar="FILE"
    )
    dcpbench: str = CLUSTER("Command that starts dcpbench in the image.", default="dcpbench", metavar="COMMAND")


@register_command(app, rich_help_panel="Submit", context_settings={"allow_interspersed_args": False})
def slurm(job: Job, cluster: Slurm, containers: SlurmContainers, words: Words = None) -> int:
    """Submit a run to Slurm, follow it until it ends, and exit with its exit code.

    The job has one task on each machine, which starts its ranks with torchrun. The run's folder and dcpbench (or its
    container) must be available on all machines. Ctrl-C cancels the job.

    For example:

      dcpbench submit slurm --nodes 2 --gpus-per-node 8 --partition h200 --time 4:00:00 -- sweep --tp 16 --dcp 8

      dcpbench submit slurm --nodes 2 --gpus-per-node 8 --pyxis registry/dcpbench:1 -- sweep --tp 16 --dcp 8

      dcpbench submit slurm --gpus-per-node 8 --detach -- serve --tp 8 --dcp 8 --concurrency 8,32 -o runs/monday
    """
    from dcpbench.submit import slurm as queue

    _check_containers(containers)
    _check_one_line(vars(cluster) | vars(containers))
    for option, value in (("--partition", cluster.partition), ("--account", cluster.account)):
        if value and any(c.isspace() for c in value):
            raise UsageError(f"{option} {value!r} holds a blank; give the name as `sinfo` or `sacctmgr` shows it.")
    if cluster.cpus_per_node is not None and cluster.cpus_per_node < 1:
        raise UsageError(f"--cpus-per-node {cluster.cpus_per_node} is not positive; try --cpus-per-node 16.")
    lines = [*(cluster.sbatch or []), *(cluster.setup or [])]
    if any("\n" in line for line in lines):
        raise UsageError("--sbatch and --setup take a line each; repeat the option for several.")
    for option in cluster.sbatch or []:
        if not option.startswith("-"):
            raise UsageError(f"--sbatch {option}: write an option of sbatch, such as --sbatch=--qos=high.")
    spec = _parse_submission(
        words or [],
        job,
        TargetCluster(
            "slurm",
            shared=not (containers.pyxis or containers.apptainer),
            otherwise=any(GPU_OPTION.match(option) for option in cluster.sbatch or []),
        ),
    )
    settings = queue.Cluster(
        program=_find_program(cluster.dcpbench, inside=bool(containers.pyxis or containers.apptainer)),
        directory=Path.cwd(),
        partition=cluster.partition or "",
        account=cluster.account or "",
        options=tuple(cluster.sbatch or ()),
        requeue=cluster.requeue,
        exclusive=cluster.exclusive,
        cpus_per_node=cluster.cpus_per_node,
        interface=cluster.interface or "",
        setup=tuple(cluster.setup or ()),
        pyxis=containers.pyxis or "",
        apptainer=containers.apptainer or "",
        mounts=tuple(containers.mount or ()),
    )
    if job.dry_run:
        sys.stdout.write(queue.render_script(spec, settings))
        return 0
    return _run_submission(spec, lambda spec: queue.submit(spec, settings))


@register_command(app, rich_help_panel="Submit", context_settings={"allow_interspersed_args": False})
def k8s(job: Job, cluster: Kubernetes, words: Words = None) -> int:
    """Submit a run to Kubernetes, follow it until it ends, copy its folder here, and exit with its exit code.

    The run is an indexed Job with one pod on each machine, which starts its ranks with torchrun. Paths among the options
    of the run refer to the image. Ctrl-C deletes the Job and all its resources.

    For example:

      dcpbench submit k8s --image registry/dcpbench:1 --nodes 2 --gpus-per-node 8 -- sweep --tp 16 --dcp 8

      dcpbench submit k8s --image registry/dcpbench:1 --gpus-per-node 8 --claim runs --detach -- sweep --tp 8 --dcp 8
    """
    from dcpbench.submit import k8s as queue

    _check_one_line(vars(cluster))
    if not cluster.image:
        raise UsageError("Kubernetes needs an image with dcpbench in it; add for example --image registry/dcpbench:1.")
    pod = queue.read_pod(cluster.pod) if cluster.pod else {}
    spec = _parse_submission(
        words or [], job, TargetCluster("k8s", shared=False, otherwise=queue.has_gpu_resources(pod))
    )
    if spec.time:
        queue.parse_time_limit(spec.time)
    if cluster.restarts < 0:
        raise UsageError(f"--restarts {cluster.restarts} is negative; try --restarts 1, or leave it out.")
    if cluster.restarts and job.detach:
        raise UsageError("--restarts needs this command to wait until the job ends; leave --detach out.")
    kept = {"--detach": job.detach, "--resume": spec.start == "--resume", "--restarts": cluster.restarts}
    if not cluster.claim and any(kept.values()):
        which = next(option for option, given in kept.items() if given)
        raise UsageError(
            f"{which} needs a volume that keeps the run when its pods are gone; add --claim with the name of a "
            "PersistentVolumeClaim."
        )
    settings = queue.Cluster(
        image=cluster.image,
        program=_split_program(cluster.dcpbench),
        namespace=cluster.namespace or "",
        context=cluster.context or "",
        claim=cluster.claim or "",
        pod=pod,
    )
    if job.dry_run:
        sys.stdout.write(queue.format_manifests(spec, settings))
        return 0
    return _run_submission(spec, lambda spec: queue.submit(spec, settings), cluster.restarts)


@register_command(app, rich_help_panel="Afterwards")
def follow(run: Run) -> int:
    """Show the output of a submitted run from its beginning until it ends, and exit with its exit code.

    Ctrl-C stops the output; the job goes on.

    For example: dcpbench submit follow runs/monday
    """
    from dcpbench.launch.stopping import print_when_stopped
    from dcpbench.submit.follow import follow_job
    from dcpbench.submit.submission import require_job

    folder = run.absolute()
    job = require_job(folder)
    with print_when_stopped(f"{job.description} goes on. To end it: {_format_command('cancel', folder)}"):
        return follow_job(_make_queue(job, folder)).code


@register_command(app, rich_help_panel="Afterwards")
def cancel(run: Run) -> int:
    """Cancel a submitted run, and wait until all its resources are removed. Its records are kept.

    For example: dcpbench submit cancel runs/monday
    """
    from dcpbench.submit.follow import cancel_job
    from dcpbench.submit.submission import require_job

    folder = run.absolute()
    job = require_job(folder)
    queue = _make_queue(job, folder)
    if queue.fetch_state().ended:
        print_stderr(f"{job.description} has ended already.")
        queue.delete_remains()
        return 0
    cancel_job(queue)
    print_stderr(f"{job.description} is cancelled. {job.describe_results(folder)}")
    return 0


def _check_one_line(options: Mapping[str, object]) -> None:
    """Raise UsageError if an option has a control character, which would start another line of the submitted script."""
    for name, value in options.items():
        texts = value if isinstance(value, list) else [value]
        if name in LINES:
            continue
        if any(isinstance(text, str) and any(c < " " for c in text) for text in texts):
            raise UsageError(f"{format_flag(name)} holds a line break or another control character; leave it out.")


def _run_submission(spec: JobSpec, submit: Callable[[JobSpec], SubmittedJob], restarts: int = 0) -> int:
    """Submit the job and, unless detached, follow it. Submit it again up to `restarts` times if it loses a machine."""
    import msgspec

    _check_folder(spec)
    state = _follow_job(spec, submit)
    while state is not None and state.lost and restarts:
        restarts -= 1
        again = f"{spec.name}-again-{restarts}"
        state = _follow_job(msgspec.structs.replace(spec, start=spec.again, name=again), submit)
    if state is not None and state.lost:
        print_stderr(f"To go on: submit it again with -o {shlex.quote(str(spec.folder))} --resume")
    return 0 if state is None else state.code


def _follow_job(spec: JobSpec, submit: Callable[[JobSpec], SubmittedJob]) -> State | None:
    """Submit a job and return its final state, or None if detached. An interrupt cancels the job."""
    from dcpbench.launch.stopping import delay_signals, print_when_stopped
    from dcpbench.submit.follow import cancel_job, follow_job

    queue: Queue | None = None
    with print_when_stopped(""):
        try:
            with delay_signals():  # whoever interrupts it now has a job that must be known to be cancelled
                job = submit(spec)
                queue = _make_queue(job, spec.folder)
            print_stderr(f"{job.description} is submitted. Run: {spec.folder}")
            if spec.keeps:
                return follow_job(queue)
            print_stderr(f"To see how far it is: {_format_command('follow', spec.folder)}")
            print_stderr(f"To end it: {_format_command('cancel', spec.folder)}")
        except (KeyboardInterrupt, SystemExit):
            if queue is not None:
                print_stderr(
                    f"\nCancelling {job.description}. If this is interrupted, too: {_format_command('cancel', spec.folder)}"
                )
                cancel_job(queue)
                print_stderr(f"{job.description} is cancelled. {job.describe_results(spec.folder)}")
            raise
    return None


def _make_queue(job: SubmittedJob, folder: Path) -> Queue:
    from dcpbench.submit import k8s as of_kubernetes
    from dcpbench.submit import slurm as of_slurm

    kinds: dict[str, Callable[[SubmittedJob, Path], Queue]] = {"slurm": of_slurm.Queue, "k8s": of_kubernetes.Queue}
    return kinds[job.kind](job, folder)


def _format_command(what: str, folder: Path) -> str:
    return shlex.join(["dcpbench", "submit", what, str(folder)])


def _check_folder(spec: JobSpec) -> None:
    """Raise OutputError if the folder holds records that would be lost, or if its last job has not ended."""
    from dcpbench.launch import folders
    from dcpbench.submit.follow import NoAnswerError
    from dcpbench.submit.submission import load_job

    folders.check_free(spec.folder, goes_on=bool(spec.start))
    job = load_job(spec.folder)
    if job is None:
        return
    try:
        ended = _make_queue(job, spec.folder).fetch_state().ended
    except NoAnswerError as e:
        raise OutputError(f"{spec.folder} was submitted before, and {e}; try again, or give another folder.") from e
    if not ended:
        raise OutputError(
            f"{job.description} of {spec.folder} has not ended; wait for it with `{_format_command('follow', spec.folder)}`, end it with "
            f"`{_format_command('cancel', spec.folder)}`, or give another folder with -o."
        )


@dataclasses.dataclass(frozen=True)
class TargetCluster:
    """Describe the cluster to which a command is submitted."""

    kind: str  # kind of the cluster: `slurm` or `k8s`
    shared: bool  # True if the job sees this machine's files
    otherwise: bool  # True if the job may get GPUs without --gpus-per-node


def _parse_submission(argv: Sequence[str], job: Job, where: TargetCluster) -> JobSpec:
    """Parse and validate the submitted command. Raise UsageError, or the error that the command itself would raise."""
    from dcpbench.submit.submission import SUBMIT_FOLDER, JobSpec

    example = f"dcpbench submit {where.kind} --nodes 2 --gpus-per-node 8 -- sweep --tp 16 --dcp 8"
    argv = argv[1:] if argv[:1] == ["dcpbench"] else argv
    if not argv or argv[0] not in RUNNABLE:
        problem = f"{argv[0]!r} cannot be submitted." if argv else "the command is missing."
        raise UsageError(f"{problem} Write {format_list(RUNNABLE, 'or')} with its options behind --, as in: {example}")
    if job.nodes < 1:
        raise UsageError(f"--nodes {job.nodes} is not positive; try --nodes 1.")
    if job.gpus_per_node is not None and job.gpus_per_node < 0:
        raise UsageError(f"--gpus-per-node {job.gpus_per_node} is negative; leave it out for none.")
    if not NAME.fullmatch(job.name):
        raise UsageError(f"--name {job.name}: write at most 42 of a-z, 0-9 and -, beginning with a letter.")
    if job.time is not None and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", job.time):
        raise UsageError(f"--time {job.time}: write minutes, HH:MM:SS or D-HH:MM:SS, such as --time 4:00:00.")
    if redaction.redact_values(list(argv)) != list(argv):
        raise UsageError(
            f"the command contains a key, and it is stored in {SUBMIT_FOLDER}/ of the run and shown by the cluster: "
            f"{redaction.format_command_line(argv)}. Set it in the environment of the job instead, as VLLM_API_KEY for vLLM, or "
            "in the [env] of an engine's file that the machines of the job have."
        )
    runs, typed, given = _parse_command(argv)
    _check_command(argv[0], typed, given, job)
    _check_plan(runs, argv, typed, job, where)
    _check_gpus(typed, job, where)
    output = typed["output"]
    folder = Path(output) if output else Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{argv[0]}-{where.kind}"
    start = "--resume" if typed.get("resume") else "--force" if typed.get("force") else ""
    return JobSpec(
        words=(argv[0], *remove_options(argv[1:], ("-o", "--output"), ("--resume", "--force"))),
        folder=folder.absolute(),
        start=start,
        again="--resume" if "resume" in typed else "--force",
        nodes=job.nodes,
        gpus_per_node=job.gpus_per_node,
        time=job.time or "",
        name=job.name if where.kind == "slurm" else f"{job.name}-{time.strftime('%m%d-%H%M%S')}",
        keeps=not job.detach,
    )


def _parse_command(argv: Sequence[str]) -> tuple[Any, Mapping[str, Any], set[str]]:
    """Return the command, its options by name, and the names of given options. Raise UsageError if it rejects them."""
    runs = load_command(argv[0])
    if {"-h", "--help"} & set(argv):
        raise UsageError(f"see `dcpbench {argv[0]} --help` for its options, and leave --help out here.")
    try:
        with runs.make_context(argv[0], list(argv[1:])) as parsed:
            typed = dict(parsed.params)
            given = {p.name for p in runs.params if typed.get(p.name) != p.get_default(parsed)}
    except PARSER_ERROR as e:
        raise UsageError(
            f"{shlex.join(argv)}: {e.format_message().rstrip('.')}. See `dcpbench {argv[0]} --help`."
        ) from e
    return runs, typed, given


def _check_command(name: str, typed: Mapping[str, Any], given: set[str], job: Job) -> None:
    """Raise UsageError if the command cannot run on the machines of the job."""
    if here := [option for option in WHERE if option in given]:
        raise UsageError(f"leave --{here[0]} out behind --; submit sets it on each machine.")
    if "dry_run" in given:
        raise UsageError(
            "--dry-run behind -- would submit a job that prints a plan; write it before -- to see what is submitted, or "
            f"`dcpbench {name} … --gpu H200 --dry-run` for the plan."
        )
    if "gpu" in given and name != "server":
        raise UsageError(f"--gpu {typed['gpu'].name} behind -- only plans and measures nothing; write it before --.")
    if job.nodes > 1 and "nodes" not in typed:
        raise UsageError(f"{name} runs on one machine; leave --nodes {job.nodes} out.")
    if job.nodes > 1 and not typed.get("tp") and not typed.get("config"):
        example = _find_largest_tp(typed, job, job.nodes * (job.gpus_per_node or 1))
        raise UsageError(
            f"--nodes {job.nodes} needs --tp; add {f'for example --tp {example}' if example else 'it'} behind --."
        )
    _check_tp(typed, job)


def _check_tp(typed: Mapping[str, Any], job: Job) -> None:
    for tp in _parse_tps(typed):
        if tp % job.nodes:
            raise UsageError(f"--tp {tp} does not divide over --nodes {job.nodes}; take a multiple of it.")
        there = job.nodes * (job.gpus_per_node or tp)
        if tp > there and not typed.get("emulate") and typed.get("device") != "cpu":
            raise CapacityError(
                f"--tp {tp} takes {tp} GPUs, and --nodes {job.nodes} with --gpus-per-node {job.gpus_per_node} have {there}; "
                f"ask for more{f', or take --tp {smaller}' if (smaller := _find_largest_tp(typed, job, there)) else ''}."
            )


def _find_largest_tp(typed: Mapping[str, Any], job: Job, gpus: int) -> int:
    """Return the largest tp up to a number of GPUs that divides over the nodes and that the models can have; 0 if there is none."""
    from dcpbench.models import load_shape
    from dcpbench.points.layout import list_valid_layouts

    shapes: list[ModelShape | None] = [None]  # of a model that only the machines of the job have
    for name in str(typed.get("model") or "deepseek-v3").split(","):
        with contextlib.suppress(DcpbenchError):
            shapes.append(load_shape(name.strip()))
    ep = str(typed.get("ep") or MOE_TP).split(",")[0]
    tps = range(gpus - gpus % job.nodes, 0, -job.nodes)
    return next((tp for tp in tps if all(list_valid_layouts(shape, tp, ep) for shape in shapes)), 0)


def _parse_tps(typed: Mapping[str, Any]) -> list[int]:
    """Return the values of --tp that are numbers."""
    return [int(word) for word in str(typed.get("tp") or "").split(",") if word.strip().isdecimal()]


def _check_gpus(typed: Mapping[str, Any], job: Job, where: TargetCluster) -> None:
    """Warn, or raise UsageError, if the command uses GPUs and the job requests none.

    A Slurm node may have GPUs without a request, so that is a warning; a Kubernetes pod has only those that it requests.
    """
    from dcpbench.commands.point_runner import USUAL_GPUS

    asks_server = typed.get("url") or typed.get("step_times")
    if job.gpus_per_node or where.otherwise or asks_server or typed.get("device") != "auto":
        return
    tps = [1] if typed.get("emulate") else _parse_tps(typed)
    add = (
        f"--gpus-per-node {-(-max(tps) // job.nodes)} before --"
        if tps
        else f"--gpus-per-node {USUAL_GPUS} before --, say"
    )
    cpu = "--device cpu behind -- for a functional run on the CPU"
    cuda = "--device cuda behind -- where"
    if where.kind == "k8s":
        raise UsageError(
            f"the job requests no GPU, so it would run on the CPU; add {add}, {cpu}, or {cuda} pods "
            "get GPUs in another way."
        )
    print_stderr(
        f"The job requests no GPU; without one it runs on the CPU. Add {add}; {cpu}; or {cuda} the partition provides GPUs."
    )


def _check_plan(runs: Any, argv: Sequence[str], typed: Mapping[str, Any], job: Job, where: TargetCluster) -> None:  # noqa: ANN401 -- a Typer command
    """Raise the error that the command would raise on the cluster, and print which options could not be checked."""
    away = elsewhere.find_absent_options(runs, typed, shared=where.shared)
    checked = elsewhere.check_command(runs, argv, typed, _make_machines(typed, job), away)
    if away:
        options = format_list([format_flag(name) for name in away])
        print_stderr(f"{options} cannot be checked here, as only the machines of the job have the files. {checked}")


def _make_machines(typed: Mapping[str, Any], job: Job) -> elsewhere.Machines:
    """Return the machines that the job requests. Without a request for GPUs, those that its layouts need, or a CPU."""
    from dcpbench.commands.point_runner import USUAL_GPUS
    from dcpbench.points.device_probe import Probe

    max_tp = max(_parse_tps(typed), default=0)
    count = job.gpus_per_node or -(-max_tp // job.nodes)
    usual = count or USUAL_GPUS
    gpus = elsewhere.make_known_probe(job.gpu, usual) if job.gpu else elsewhere.make_unknown_probe(usual)
    cpu = Probe(device="cpu", count=0, name="CPU")
    maybe_none = not job.gpus_per_node and typed.get("device") == "auto"
    return elsewhere.Machines(probes=[gpus, cpu] if maybe_none else [gpus], nodes=job.nodes, counted=bool(count))


def _check_containers(containers: SlurmContainers) -> None:
    if containers.pyxis and containers.apptainer:
        raise UsageError("--pyxis and --apptainer contradict each other; leave one of them out.")
    if containers.mount and not (containers.pyxis or containers.apptainer):
        raise UsageError("--mount is about a container; add --pyxis IMAGE or --apptainer IMAGE, or leave it out.")


def _split_program(typed: str) -> tuple[str, ...]:
    """Return the words of --dcpbench. Raise UsageError if there are none."""
    words = split_command("--dcpbench", typed)
    if not words:
        raise UsageError(
            "--dcpbench names no command; write for example --dcpbench /opt/venv/bin/dcpbench, or leave it out."
        )
    return tuple(words)


def _find_program(typed: str | None, *, inside: bool) -> tuple[str, ...]:
    """Return the command that starts dcpbench on a machine. Raise UsageError if that is another installation."""
    from dcpbench.launch import version_check

    if typed is not None:
        return _split_program(typed)
    if inside:
        return ("dcpbench",)
    script = Path(sys.executable).with_name("dcpbench")
    if not script.exists():
        return (sys.executable, "-m", "dcpbench.cli")
    mine, other = str(version_check.get_folder()), version_check.find_script_folder()
    if other != mine:
        raise UsageError(
            f"the job would run {script}, which belongs to the dcpbench in {other or 'a deleted folder'}; this command belongs to "
            f"the one in {mine}. Submit with that program (`{script} submit …`), or name another with --dcpbench 'PROGRAM'."
        )
    return (str(script),)
