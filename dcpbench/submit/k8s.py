"""Runs as Jobs of Kubernetes: the manifest, and the kubectl commands. No torch.

An indexed Job has a pod for each machine. For several machines, a headless Service gives each pod its name, and a
Secret holds their shared secret. Both are owned by the Job, so that deleting it by any means removes them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tarfile
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError, WorkerError
from dcpbench.launch import subprocess_guard
from dcpbench.launch.jobs import SECRET
from dcpbench.plan.yaml_text import load_yaml
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import LINES, fit_line, make_printable
from dcpbench.submit.follow import FAILED, NoAnswerError, RefusedError, State, make_end_state, run_command
from dcpbench.submit.submission import JobSpec, SubmittedJob, save_job, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MANIFEST = "job.yaml"
MAX_VALUES = 10_000  # of a file for --pod with its aliases written out
MAX_POD = 1 << 18  # characters of a file for --pod; Kubernetes takes a whole object of 1.5 MiB
LABEL, INDEX = "app.kubernetes.io/instance", "batch.kubernetes.io/job-completion-index"
CONTAINER, PORT = "dcpbench", 29500
RUNS, FETCHED = "/runs", "/tmp/dcpbench-fetched"  # noqa: S108 -- in the pod
ENDED = "dcpbench submit: node 0 has ended with"
FETCH_S = 600  # time in s that node 0's pod waits for its run to be fetched
TTL_AFTER_FINISHED_S = 86_400  # time in s after which Kubernetes deletes a finished Job by itself
VENDOR = "nvidia.com"
GPUS = f"{VENDOR}/gpu"
DELETED_S = 120
KINDS = "job,service,secret"
LAST_LINES = 20
LOST = ("Evicted", "NodeLost", "NodeShutdown", "Terminated", "Preempting")  # reasons that are not the command's doing


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Options for running a job on Kubernetes."""

    image: str
    program: tuple[str, ...] = ("dcpbench",)  # command that starts dcpbench in the image
    namespace: str = ""
    context: str = ""
    claim: str = ""  # PersistentVolumeClaim that keeps runs
    pod: dict[str, Any] = {}  # merged into the pod's spec

    @property
    def kubectl(self) -> tuple[str, ...]:
        """Return the command line of kubectl."""
        given = {"--namespace": self.namespace, "--context": self.context}
        return ("kubectl", *(f"{name}={value}" for name, value in given.items() if value))


def make_manifests(spec: JobSpec, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the Job and, for several machines, its Service and its still empty Secret."""
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _make_metadata(spec),
        "spec": {
            "completionMode": "Indexed",
            "completions": spec.nodes,
            "parallelism": spec.nodes,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": TTL_AFTER_FINISHED_S,
            **({"activeDeadlineSeconds": parse_time_limit(spec.time)} if spec.time else {}),
            "template": {
                "metadata": {"labels": _make_labels(spec)},
                "spec": merge_specs(_make_pod_spec(spec, cluster), cluster.pod),
            },
        },
    }
    if spec.nodes == 1:
        return [job]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _make_metadata(spec),
        "spec": {
            "clusterIP": "None",
            "selector": {LABEL: spec.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _make_metadata(spec),
        "type": "Opaque",
        "stringData": {SECRET: ""},
    }
    return [job, service, secret]


def format_manifests(spec: JobSpec, cluster: Cluster) -> str:
    """Return the manifests as YAML for kubectl."""
    parts = "---\n".join(_format_yaml(part) for part in make_manifests(spec, cluster))
    note = f"# The value of {SECRET} is made when this is submitted, and shown nowhere.\n" if spec.nodes > 1 else ""
    return f"# {' '.join(spec.typed.splitlines())}\n{note}{parts}"


def submit(spec: JobSpec, cluster: Cluster) -> SubmittedJob:
    """Submit the job to Kubernetes. Raise UsageError if it is refused, and leave no objects in that case."""
    write_script(spec, MANIFEST, format_manifests(spec, cluster))
    parts = make_manifests(spec, cluster)
    created = SubmittedJob(
        kind="k8s", id=spec.name, nodes=spec.nodes, kubectl=cluster.kubectl, fetched=spec.keeps, claim=cluster.claim
    )
    try:
        output = run_command([*cluster.kubectl, "create", "-o", "json", "-f", "-"], sent=json.dumps(parts[0]))
        owner = _parse_owner(output)
        for part in parts[1:]:
            part["metadata"]["ownerReferences"] = [owner]
            if "stringData" in part:
                value = base64.b64encode(secrets.token_hex(16).encode()).decode()
                del part["stringData"]
                part["data"] = {SECRET: value}
            run_command([*cluster.kubectl, "create", "-f", "-"], sent=json.dumps(part))
    except (RefusedError, NoAnswerError) as e:
        with contextlib.suppress(RefusedError, NoAnswerError):
            _delete_job(created)
        raise UsageError(f"{e}. What it was given is {spec.place / MANIFEST}; see `dcpbench submit k8s --help`.") from e
    save_job(spec.folder, created)
    return created


class Queue:
    """A Job as Kubernetes has it."""

    late_s = 30.0

    def __init__(self, job: SubmittedJob, folder: Path) -> None:
        """Follow a job; `folder` is the run's folder on this machine."""
        self._job, self._folder = job, folder
        self._pod = ""
        self._began = self._over = False  # True if node 0's command is known to have started, and to have ended
        self._of_all = self._read_all = False  # True for a log of an ended command; for one read to its end
        self._logs: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._last = ""
        self._has_shown_log = False
        self._fetched = not job.fetched

    def fetch_state(self) -> State:
        """Return the current state. Raise NoAnswerError if kubectl fails."""
        try:
            output = run_command([*self._job.kubectl, "get", "job,pods", "-l", f"{LABEL}={self._job.id}", "-o", "json"])
            found = json.loads(output)["items"]
        except (RefusedError, ValueError, KeyError, TypeError) as e:
            raise NoAnswerError(f"kubectl: {fit_line(str(e))}") from e
        jobs = [item for item in found if item.get("kind") == "Job"]
        pods = {_get_index(item): item for item in found if item.get("kind") == "Pod"}
        self._pod = pods[0]["metadata"]["name"] if 0 in pods else ""
        states = _get_container_status(pods.get(0, {})).get("state", {}).keys()
        self._began, self._over = bool(states & {"running", "terminated"}), "running" not in states
        if not jobs:
            return make_end_state(f"{self._job.description} is gone")
        return self._make_state(jobs[0], pods)

    def read_output(self) -> Iterator[str]:
        """Yield lines printed by node 0's pod; when it announces its end, fetch its run."""
        for line in self._read_lines():
            stamp, _, text = line.partition(" ")
            if stamp <= self._last:
                continue
            self._last = stamp
            yield text
            if text.startswith(ENDED) and not self._fetched:
                self._fetched = True
                self._fetch_run()

    def is_finished(self) -> bool:
        """Return True if the command has ended and its log was read to its end, or if it never started."""
        return self._over and (self._read_all or not self._began)

    def cancel(self) -> None:
        """Delete the job and its dependent objects, after fetching its results."""
        with contextlib.suppress(NoAnswerError):
            if not self.fetch_state().ended and self._began and not self._fetched:
                self._fetch_run()
        _delete_job(self._job)

    def delete_remains(self) -> None:
        """Delete the remains of the job."""
        with contextlib.suppress(NoAnswerError):
            _delete_job(self._job)

    def close(self) -> None:
        """End the reader of its log."""
        if self._logs is not None:
            self._logs.kill()
            self._logs.communicate()
            self._logs, self._pending = None, b""

    def _make_state(self, job: Mapping[str, Any], pods: Mapping[int, Mapping[str, Any]]) -> State:
        description = self._job.description
        ended = {c["type"]: c for c in job.get("status", {}).get("conditions", []) if c.get("status") == "True"}
        if "Complete" in ended:
            return State(message=f"{description} has ended well", ended=True)
        running = sum("running" in _get_container_status(pod).get("state", {}) for pod in pods.values())
        if "Failed" in ended and running:
            ending = f"{running} of its pods {'is' if running == 1 else 'are'} ending"
            return State(message=f"{description} has failed, and {ending}")
        if "Failed" in ended:
            return self._make_failed_state(str(ended["Failed"].get("reason", "")), pods)
        waits = [f"node {i}: {why}" for i in sorted(pods) if (why := _find_wait_reason(pods[i]))]
        doing = f"has {running} of {self._job.nodes} pods running"
        return State(message=f"{description} {doing}{': ' if waits else ''}{'; '.join(waits)}")

    def _make_failed_state(self, reason: str, pods: Mapping[int, Mapping[str, Any]]) -> State:
        """Return the state of a failed job: the command that failed first is the cause, because Kubernetes then ends
        the others.
        """
        description = self._job.description
        if reason == "DeadlineExceeded":
            return make_end_state(f"{description} ran into its time limit; give it more with --time")
        if lost := sorted(index for index, pod in pods.items() if _find_disruption(pod)):
            why = _find_disruption(pods[lost[0]])
            return make_end_state(f"{description} lost the pod of node {lost[0]} ({why})", lost=True)
        codes = sorted((*end, index) for index, pod in pods.items() if (end := _get_exit(pod)) and end[1])
        if not codes:
            return make_end_state(f"{description} has failed ({reason}), and none of its commands has ended")
        _, code, index = codes[0]
        if index and not self._has_shown_log:
            self._has_shown_log = True
            with contextlib.suppress(RefusedError, NoAnswerError):
                name = pods[index]["metadata"]["name"]
                output = run_command([*self._job.kubectl, "logs", f"--tail={LAST_LINES}", "-c", CONTAINER, name])
                print_stderr(f"The last lines of node {index}:\n{make_printable(output.rstrip(), LINES)}")
        return make_end_state(f"{description} has failed with exit code {code}, that of node {index}", code)

    def _read_lines(self) -> Iterator[str]:
        """Yield complete lines with their times. A reader that ended is restarted, without repeating lines."""
        if self._logs is None:
            if not (self._pod and self._began):
                return
            since = [f"--since-time={self._last}"] if self._last else []
            self._of_all = self._over
            command = [*self._job.kubectl, "logs", "--follow", "--timestamps", *since, "-c", CONTAINER, self._pod]
            self._logs = subprocess.Popen(
                subprocess_guard.make_tied_command(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            assert self._logs.stdout is not None
            os.set_blocking(self._logs.stdout.fileno(), False)
        assert self._logs.stdout is not None
        while data := self._read_available():
            self._pending += data
        closed = data is not None
        lines = self._pending.split(b"\n")
        self._pending = lines.pop()
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
        if closed:
            self._read_all = self._of_all
            self.close()

    def _read_available(self) -> bytes | None:
        assert self._logs is not None
        assert self._logs.stdout is not None
        try:
            return os.read(self._logs.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return None

    def _fetch_run(self) -> None:
        """Copy the run from node 0's pod, and let the pod go."""
        place = f"{RUNS}/{self._folder.name}"
        inside = [*self._job.kubectl, "exec", self._pod, "-c", CONTAINER, "--"]
        try:
            command = [*inside, "tar", "-c", "-f", "-", "-C", place, "."]
            with (
                subprocess.Popen(command, stdout=subprocess.PIPE) as packing,
                tarfile.open(fileobj=packing.stdout, mode="r|") as archive,
            ):
                unpack_files(archive, self._folder)
        except (OSError, tarfile.TarError) as e:
            by_hand = shlex.join([*self._job.kubectl, "cp", "-c", CONTAINER, f"{self._pod}:{place}", str(self._folder)])
            print_stderr(f"The run could not be fetched ({fit_line(str(e))}); try within {FETCH_S} s: {by_hand}")
            return
        print_stderr(f"The run was fetched. Run: {self._folder}")
        with contextlib.suppress(RefusedError, NoAnswerError):
            run_command([*inside, "touch", FETCHED])


def parse_time_limit(time: str) -> int:
    """Return the seconds of a limit in Slurm's format: minutes, HH:MM:SS, D-HH, D-HH:MM:SS. Raise UsageError for
    another one.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        raise UsageError(f"--time {time}: write it as Slurm does, such as 30 (minutes), 4:00:00 or 1-12:00:00.")
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, secs = (*numbers, 0, 0)[:3]
    elif len(numbers) < 3:  # noqa: PLR2004 -- minutes, and seconds
        hours, minutes, secs = 0, *(*numbers, 0)[:2]
    else:
        hours, minutes, secs = numbers
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
    if total <= 0:
        raise UsageError(f"--time {time} is no time at all; write for example --time 4:00:00.")
    return total


def merge_specs(ours: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod's spec merged with `given`: mappings by key, lists by concatenation; the first container is ours."""
    found = dict(ours)
    for key, value in given.items():
        mine = ours.get(key)
        if key == "containers" and mine and isinstance(value, list) and value and isinstance(value[0], dict):
            found[key] = [merge_specs(mine[0], value[0]), *value[1:]]
        elif isinstance(mine, dict) and isinstance(value, dict):
            found[key] = merge_specs(mine, value)
        elif isinstance(mine, list) and isinstance(value, list):
            found[key] = [*mine, *value]
        else:
            found[key] = value
    return found


def read_pod(path: Path) -> dict[str, Any]:
    """Return what --pod adds to the pod's spec. Raises UsageError unless it is a mapping in YAML of moderate size."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_POD + 1)
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise UsageError(f"--pod {path} cannot be read ({fit_line(str(reason))}); name a YAML file.") from e
    if len(text) > MAX_POD:
        raise UsageError(f"--pod {path} has more than {MAX_POD:,} characters; name a file with fields of a pod's spec.")
    found = load_yaml(text, f"--pod {path}", "fields of a pod", max_values=MAX_VALUES)
    if not isinstance(found, dict) or {"kind", "spec"} & found.keys():
        raise UsageError(
            f"--pod {path}: write fields of a pod's spec alone, such as `nodeSelector: {{gpu: h200}}`, in YAML."
        )
    if wrong := _find_non_json(found, ""):
        raise UsageError(f"--pod {path}: {wrong}, which Kubernetes cannot take.")
    return found


def _find_non_json(value: object, place: str) -> str:
    """Return the part of a YAML document that JSON cannot represent, such as a date; empty if there is none."""
    where = place or "the file"
    if isinstance(value, dict):
        if odd := next((key for key in value if not isinstance(key, str)), None):
            return f"{where} has the key {odd!r}; write it in quotes"
        items = [(f"{place}.{key}".lstrip("."), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{place}[{n}]", item) for n, item in enumerate(value)]
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{where} is {value}"
    elif value is None or isinstance(value, str | int | float):
        return ""
    else:
        kind = type(value).__name__
        return f"{where} is read as {kind}; {'leave it out' if isinstance(value, bytes) else 'write it in quotes'}"
    found = (_find_non_json(item, name) for name, item in items)
    return next(filter(None, found), "")


def has_gpu_resources(pod: Mapping[str, Any]) -> bool:
    """Return True if the additions of --pod may give a container GPUs: an NVIDIA resource, or a resource claim."""
    containers = pod.get("containers")
    for container in containers if isinstance(containers, list) else ():
        resources = container.get("resources") if isinstance(container, dict) else None
        for kind, amounts in resources.items() if isinstance(resources, dict) else ():
            if kind == "claims" or any(str(name).startswith(f"{VENDOR}/") for name in amounts or ()):
                return True
    return False


def unpack_files(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the files of an archive into a folder, and no file outside it."""
    for member in archive:
        name = PurePosixPath(member.name)
        if not member.isreg() or name.is_absolute() or ".." in name.parts:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        source = archive.extractfile(member)
        assert source is not None
        with path.open("wb") as file:
            shutil.copyfileobj(source, file)


def _make_labels(spec: JobSpec) -> dict[str, str]:
    return {"app.kubernetes.io/name": "dcpbench", LABEL: spec.name}


def _make_metadata(spec: JobSpec) -> dict[str, Any]:
    return {"name": spec.name, "labels": _make_labels(spec)}


def _make_pod_spec(spec: JobSpec, cluster: Cluster) -> dict[str, Any]:
    """Return the spec of the pods: one per machine, with all requested GPUs, without automatic restart."""
    env = {
        "JOB": spec.name,
        "NODES": str(spec.nodes),
        "PORT": str(PORT),
        "RUN_FOLDER": f"{RUNS}/{spec.folder.name}",
        "FETCH_S": str(FETCH_S if spec.keeps else 0),
        "FETCHED": FETCHED,
        "ENDED": ENDED,
    }
    secret = {"secretKeyRef": {"name": spec.name, "key": SECRET}}
    given: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in env.items()]
    given.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    several = spec.nodes > 1
    gpus = {"limits": {GPUS: spec.gpus_per_node}} if spec.gpus_per_node else {}
    start = [spec.start] if spec.start else []
    runs = {"persistentVolumeClaim": {"claimName": cluster.claim}} if cluster.claim else {"emptyDir": {}}
    script = resources.files(__package__).joinpath("pod.sh").read_text(encoding="utf-8")
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **({"subdomain": spec.name, "affinity": _make_anti_affinity(spec)} if several else {}),
        "tolerations": [{"key": GPUS, "operator": "Exists", "effect": "NoSchedule"}] if gpus else [],
        "containers": [
            {
                "name": CONTAINER,
                "image": cluster.image,
                "command": ["sh", "-c", script, "pod"],
                "args": [word.replace("$", "$$") for word in (*cluster.program, *spec.words, *start)],
                "env": [*given, *([{"name": SECRET, "valueFrom": secret}] if several else [])],
                "resources": gpus,
                "volumeMounts": [{"name": "runs", "mountPath": RUNS}, {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
            }
        ],
        "volumes": [{"name": "runs", **runs}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _make_anti_affinity(spec: JobSpec) -> dict[str, Any]:
    """Return the anti-affinity that places each pod of a job on its own machine."""
    others = {"labelSelector": {"matchLabels": {LABEL: spec.name}}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [others]}}


def _format_yaml(part: Mapping[str, Any]) -> str:
    """Return YAML with the pod's script as a block."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """YAML dumper that writes multi-line strings as blocks."""

    def render_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, render_text)
    return str(yaml.dump(part, Dumper=Dumper, sort_keys=False, width=120))


def _parse_owner(output: str) -> dict[str, Any]:
    """Return the Job as an owner reference, from the output of `kubectl create -o json`. Raise WorkerError if it is
    none.
    """
    try:
        metadata = json.loads(output)["metadata"]
        return {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    except (ValueError, KeyError, TypeError) as e:
        raise WorkerError(f"kubectl create answered with what is no Job: {fit_line(output)}") from e


def _delete_job(job: SubmittedJob) -> None:
    """Delete the Job, and wait until its pods, its Service and its Secret are gone."""
    how = ["--ignore-not-found", "--cascade=foreground", "--wait", f"--timeout={DELETED_S}s"]
    run_command([*job.kubectl, "delete", KINDS, "-l", f"{LABEL}={job.id}", *how], seconds=2 * DELETED_S)


def _get_index(pod: Mapping[str, Any]) -> int:
    number = pod.get("metadata", {}).get("annotations", {}).get(INDEX, "0")
    return int(number) if str(number).isdecimal() else 0


def _get_container_status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the status of our container, empty before it has one."""
    found = pod.get("status", {}).get("containerStatuses") or []
    return next((status for status in found if status.get("name") == CONTAINER), {})


def _get_exit(pod: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return (time, exit code) of a pod with a command that has ended; else None."""
    ended = _get_container_status(pod).get("state", {}).get("terminated")
    return (str(ended.get("finishedAt", "")), int(ended.get("exitCode", FAILED))) if ended else None


def _find_disruption(pod: Mapping[str, Any]) -> str:
    """Return why a pod lost its machine: evicted, preempted, drained. Empty if it did not."""
    status = pod.get("status", {})
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return fit_line(str(condition.get("reason") or "DisruptionTarget"))
    return str(status["reason"]) if status.get("reason") in LOST else ""


def _find_wait_reason(pod: Mapping[str, Any]) -> str:
    """Return what keeps a pod from running, as reported by Kubernetes."""
    waiting = _get_container_status(pod).get("state", {}).get("waiting", {})
    if waiting:
        return fit_line(": ".join(filter(None, (waiting.get("reason", ""), waiting.get("message", "")))))
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return fit_line(condition.get("message", "") or condition.get("reason", ""))
    return ""
