"""Test `dcpbench submit` with fake cluster commands that record their calls (fake_cluster/)."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.launch.jobs import SECRET
from dcpbench.submit import follow, k8s
from dcpbench.submit import slurm as slurm_queue
from tests.cli.typed import Typed

if TYPE_CHECKING:
    import subprocess

HERE = Path(__file__).parent / "fake_cluster"
SWEEP = ("--", "sweep", "--tp", "16", "--dcp", "8")
RUNNING = "JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0 NodeList=n[0-1]"
DONE = "JobState=COMPLETED Reason=None ExitCode=0:0"


class Cluster:
    """Control the answers of the fake cluster commands and read their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("sbatch", "scontrol", "scancel"):
            (folder / "bin" / name).symlink_to(HERE / "slurm.sh")
        (folder / "bin" / "kubectl").symlink_to(HERE / "kubectl")
        for name in ("get", "created", "pod"):
            (folder / name).mkdir()

    def states(self, *lines: str) -> None:
        """Set the successive answers of scontrol."""
        (self.folder / "states").write_text("".join(f"{line}\n" for line in lines))

    def gets(self, *answers: dict[str, Any]) -> None:
        """Set the successive answers of `kubectl get`."""
        for number, answer in enumerate(answers):
            (self.folder / "get" / str(number)).write_text(json.dumps(answer))

    def log(self, *lines: str) -> None:
        (self.folder / "log").write_text("".join(f"{line}\n" for line in lines))

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def created(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / "created").iterdir())]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    folder = tmp_path / "fake"
    folder.mkdir()
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    for name in ("READ_S", "POLL_INTERVAL_S"):
        monkeypatch.setattr(follow, name, 0.01)
    monkeypatch.setattr(slurm_queue.Queue, "late_s", 0.01)
    return Cluster(folder)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    folder = tmp_path / "here"
    folder.mkdir()
    return Typed(folder, monkeypatch, capsys)


def slurm(typed: Typed, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("submit", "slurm", "--nodes", "2", "--gpus-per-node", "8", *words)


class TestSlurm:
    def test_submit_prints_state_changes_and_log_until_job_ends(self, cluster: Cluster, typed: Typed) -> None:
        cluster.states("JobState=PENDING Reason=Priority Restarts=0", RUNNING, DONE)
        cluster.log("[1/2] tp16", "[2/2] tp16·dcp8 \x1b[31m")
        done = slurm(typed, *SWEEP, "-o", "run")
        assert done.returncode == 0
        assert done.stdout == "[1/2] tp16\n[2/2] tp16·dcp8 \\x1b[31m\n", "control characters are escaped"
        assert done.stderr.splitlines() == [
            f"Slurm job 7 is submitted. Run: {Path('run').absolute()}",
            "Slurm job 7 is pending (Priority).",
            "Slurm job 7 is running on n[0-1].",
            "Slurm job 7 has ended well.",
        ]

    def test_job_script_and_id_are_kept_in_run_folder(self, cluster: Cluster, typed: Typed) -> None:
        cluster.states(DONE)
        slurm(typed, *SWEEP, "-o", "run")
        assert Path("run/submit/job.sh").read_text() == (cluster.folder / "script").read_text()
        assert json.loads(Path("run/submit/job.json").read_bytes())["id"] == "7"

    @pytest.mark.parametrize(
        ("state", "code", "message"),
        [
            ("JobState=FAILED ExitCode=4:0", 4, "has ended with exit code 4; read "),
            ("JobState=FAILED ExitCode=0:9", 137, "has ended by signal 9; read "),
            ("JobState=CANCELLED ExitCode=0:15", 130, "was cancelled"),
            ("JobState=TIMEOUT ExitCode=0:15", 4, "ran into its time limit; to go on, submit it again with -o "),
            ("JobState=NODE_FAIL ExitCode=0:0", 4, "lost a node; to go on, submit it again with -o "),
            ("JobState=OUT_OF_MEMORY ExitCode=0:125", 4, "was out of host memory; read "),
        ],
        ids=lambda value: value.split("=")[1].split()[0] if isinstance(value, str) and "State" in value else "",
    )
    def test_exit_code_of_submit_is_derived_from_final_job_state(
        self, cluster: Cluster, typed: Typed, state: str, code: int, message: str
    ) -> None:
        cluster.states(RUNNING, state)
        done = slurm(typed, *SWEEP)
        assert done.returncode == code
        assert message in done.stderr

    def test_requeued_job_is_followed_until_it_ends(self, cluster: Cluster, typed: Typed) -> None:
        again = "JobState=PENDING Reason=BeginTime Restarts=1"
        cluster.states(RUNNING, again, RUNNING.replace("Restarts=0", "Restarts=1"), DONE)
        done = slurm(typed, *SWEEP)
        assert done.returncode == 0
        assert "is pending (BeginTime), begun again 1 time." in done.stderr
        assert "is running on n[0-1], begun again 1 time." in done.stderr

    def test_unreachable_slurm_controller_is_polled_again(self, cluster: Cluster, typed: Typed) -> None:
        silent = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
        cluster.states(silent, silent, RUNNING, DONE)
        done = slurm(typed, *SWEEP)
        assert done.returncode == 0
        assert done.stderr.count("Unable to contact slurm controller") == 1, "the error is printed once"

    @pytest.mark.parametrize(("left", "code"), [("2", 2), ("", 4)])
    def test_exit_code_of_purged_job_is_read_from_run_folder(
        self, cluster: Cluster, typed: Typed, left: str, code: int
    ) -> None:
        """Slurm purges a job minutes after it ends, so its script writes the exit code to a file."""
        cluster.states(RUNNING)
        slurm(typed, "--detach", *SWEEP, "-o", "run")
        if left:
            Path("run/submit/7.code").write_text(left)
        cluster.states("slurm_load_jobs error: Invalid job id specified")
        assert typed("submit", "follow", "run").returncode == code

    def test_detached_submit_returns_and_prints_follow_and_cancel_commands(
        self, cluster: Cluster, typed: Typed
    ) -> None:
        done = slurm(typed, "--detach", *SWEEP, "-o", "run")
        assert done.returncode == 0
        run = Path("run").absolute()
        assert f"dcpbench submit follow {run}" in done.stderr
        assert f"dcpbench submit cancel {run}" in done.stderr
        assert [call.split()[0] for call in cluster.calls] == ["sbatch"]

    def test_cancel_ends_job_and_removes_secret(self, cluster: Cluster, typed: Typed) -> None:
        cluster.states(RUNNING)
        slurm(typed, "--detach", *SWEEP, "-o", "run")
        Path("run/submit/secret").write_text("left by a script that was killed")
        done = typed("submit", "cancel", "run")
        assert done.returncode == 0
        assert "scancel 7" in cluster.calls
        assert not Path("run/submit/secret").exists()

    def test_error_of_sbatch_is_quoted(self, cluster: Cluster, typed: Typed) -> None:
        (cluster.folder / "refusal").write_text("sbatch: error: invalid partition specified: gpus\n")
        done = slurm(typed, "--partition", "gpus", *SWEEP)
        assert done.returncode == 2
        assert "error: sbatch: sbatch: error: invalid partition specified: gpus. What it was given is" in done.stderr

    def test_missing_sbatch_error_suggests_a_login_node(
        self, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        done = slurm(typed, *SWEEP)
        assert done.returncode == 2
        assert "there is no `sbatch` here; type this where it is" in done.stderr

    def test_run_with_unfinished_job_cannot_be_submitted_again(self, cluster: Cluster, typed: Typed) -> None:
        cluster.states(RUNNING)
        slurm(typed, "--detach", *SWEEP, "-o", "run")
        done = slurm(typed, *SWEEP, "-o", "run")
        assert done.returncode == 2
        assert "has not ended; wait for it with `dcpbench submit follow" in done.stderr
        assert len([call for call in cluster.calls if call.startswith("sbatch")]) == 1

    def test_folder_with_records_needs_resume_before_job_is_queued(self, cluster: Cluster, typed: Typed) -> None:
        Path("run").mkdir()
        Path("run/records.jsonl").write_text("{}\n")
        done = slurm(typed, *SWEEP, "-o", "run")
        assert done.returncode == 2
        assert "already holds records; add --resume" in done.stderr
        assert cluster.calls == []

    def test_file_as_run_is_refused_with_the_option_to_change(self, cluster: Cluster, typed: Typed) -> None:
        Path("run").touch()
        done = slurm(typed, *SWEEP, "-o", "run")
        assert (done.returncode, cluster.calls) == (2, [])
        assert "cannot be used as output folder (Not a directory); give another with -o" in done.stderr

    def test_secret_in_user_environment_is_not_passed_to_job(
        self, cluster: Cluster, typed: Typed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """sbatch passes the environment on, and each job creates its own secret."""
        monkeypatch.setenv(SECRET, "mine")
        slurm(typed, "--detach", *SWEEP)
        assert SECRET not in (cluster.folder / "environment").read_text()


def pod(index: int, state: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return a pod as `kubectl get` describes it."""
    return {
        "kind": "Pod",
        "metadata": {"name": f"job-{index}-x", "annotations": {k8s.INDEX: str(index)}},
        "status": {"containerStatuses": [{"name": "dcpbench", "state": state}], **status},
    }


def job_and_pods(*pods: dict[str, Any], **condition: str) -> dict[str, Any]:
    """Return an answer of `kubectl get job,pods`."""
    conditions = [{"status": "True", **condition}] if condition else []
    return {"items": [{"kind": "Job", "metadata": {}, "status": {"conditions": conditions}}, *pods]}


RUNS: dict[str, Any] = {"running": {}}
ENDED = "2026-01-01T00:00:09Z"


def make_terminated_state(code: int, at: str = ENDED) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "finishedAt": at}}


def kubernetes(typed: Typed, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("submit", "k8s", "--image", "here/dcpbench:1", "--nodes", "2", "--gpus-per-node", "8", *words)


class TestKubernetes:
    def test_run_is_fetched_before_finished_pod_is_released(self, cluster: Cluster, typed: Typed) -> None:
        (cluster.folder / "pod" / "records.jsonl").write_text("records\n")
        cluster.log(
            "2026-01-01T00:00:01Z [1/2] tp16",
            "2026-01-01T00:00:02Z [2/2] tp16·dcp8",
            f"2026-01-01T00:00:03Z {k8s.ENDED} 0",
        )
        cluster.gets(
            job_and_pods(pod(0, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})),
            job_and_pods(pod(0, RUNS), pod(1, RUNS)),
            job_and_pods(pod(0, RUNS), pod(1, make_terminated_state(0))),
            job_and_pods(pod(0, make_terminated_state(0)), pod(1, make_terminated_state(0)), type="Complete"),
        )
        done = kubernetes(typed, *SWEEP, "-o", "run")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["[1/2] tp16", "[2/2] tp16·dcp8", f"{k8s.ENDED} 0"], (
            "each line is printed once"
        )
        assert "has 0 of 2 pods running: node 0: ImagePullBackOff: no such image." in done.stderr
        assert Path("run/records.jsonl").read_text() == "records\n"
        assert (cluster.folder / "let-go").exists(), "the pod was released"
        assert (cluster.folder / "deleted").exists(), "the job was deleted"

    def test_service_and_secret_are_owned_by_the_job(self, cluster: Cluster, typed: Typed) -> None:
        """Kubernetes deletes owned objects with the Job, either on request or a day after the Job has ended."""
        cluster.gets(job_and_pods(type="Complete"))
        kubernetes(typed, *SWEEP)
        job, service, secret = cluster.created()
        assert [part["kind"] for part in (job, service, secret)] == ["Job", "Service", "Secret"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "given", "uid": "a-uid"}
        assert service["metadata"]["ownerReferences"] == secret["metadata"]["ownerReferences"] == [owner]
        assert job["spec"]["ttlSecondsAfterFinished"] == 86_400

    def test_secret_is_passed_to_kubectl_by_stdin_only(self, cluster: Cluster, typed: Typed) -> None:
        cluster.gets(job_and_pods(type="Complete"))
        done = kubernetes(typed, *SWEEP, "-o", "run")
        value = base64.b64decode(cluster.created()[2]["data"][SECRET]).decode()
        assert len(value) == 32
        kept = "".join(path.read_text() for path in Path("run").rglob("*") if path.is_file())
        for shown in (done.stdout, done.stderr, kept, *cluster.calls, json.dumps(cluster.created()[:2])):
            assert value not in shown

    def test_first_failed_pod_is_reported_as_the_cause(self, cluster: Cluster, typed: Typed) -> None:
        """Kubernetes terminates node 0 (exit code 143) after node 1 has failed, so node 1 is the cause."""
        cluster.log("2026-01-01T00:00:01Z no room")
        pods = (
            pod(0, make_terminated_state(143, "2026-01-01T00:00:08Z")),
            pod(1, make_terminated_state(3, "2026-01-01T00:00:02Z")),
        )
        cluster.gets(job_and_pods(*pods, type="Failed", reason="BackoffLimitExceeded"))
        done = kubernetes(typed, *SWEEP)
        assert done.returncode == 3
        assert "has failed with exit code 3, that of node 1." in done.stderr
        assert "The last lines of node 1:\n2026-01-01T00:00:01Z no room" in done.stderr

    @pytest.mark.parametrize("restarts", ["0", "1"])
    def test_job_with_an_evicted_pod_is_resubmitted_up_to_restarts(
        self, cluster: Cluster, typed: Typed, restarts: str
    ) -> None:
        """The second job resumes the run and has a new name, because the first job may still exist."""
        drained = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        lost = pod(1, make_terminated_state(143), conditions=[drained])
        cluster.gets(
            job_and_pods(pod(0, make_terminated_state(143)), lost, type="Failed"), job_and_pods(type="Complete")
        )
        (cluster.folder / "keeps-answers").touch()
        done = kubernetes(typed, "--claim", "runs", "--restarts", restarts, *SWEEP)
        assert "lost the pod of node 1 (EvictionByEvictionAPI)." in done.stderr
        jobs = [part for part in cluster.created() if part["kind"] == "Job"]
        words = [job["spec"]["template"]["spec"]["containers"][0]["args"] for job in jobs]
        if restarts == "0":
            assert done.returncode == 4
            assert "To go on: submit it again with -o" in done.stderr
            assert ["--resume" in w for w in words] == [False]
        else:
            assert done.returncode == 0
            assert ["--resume" in w for w in words] == [False, True]
            assert jobs[0]["metadata"]["name"] != jobs[1]["metadata"]["name"]

    def test_run_is_fetched_after_node_0_has_terminated(self, cluster: Cluster, typed: Typed) -> None:
        """Node 0 is still running when node 1 has failed, so its final state is waited for."""
        failed = pod(1, make_terminated_state(3))
        cluster.gets(
            job_and_pods(pod(0, RUNS), failed, type="Failed"),
            job_and_pods(
                pod(0, make_terminated_state(143)),
                failed | {"status": pod(1, make_terminated_state(3, "1970"))["status"]},
                type="Failed",
            ),
        )
        cluster.log(f"2026-01-01T00:00:03Z {k8s.ENDED} 143")
        done = kubernetes(typed, *SWEEP, "-o", "run")
        assert done.returncode == 3
        assert "has failed, and 1 of its pods is ending." in done.stderr
        assert done.stderr.index("is ending") < done.stderr.index("The run was fetched.")

    def test_records_are_fetched_before_cancelled_job_is_deleted(self, cluster: Cluster, typed: Typed) -> None:
        (cluster.folder / "interrupts").touch()
        (cluster.folder / "pod" / "records.jsonl").write_text("records\n")
        cluster.gets(job_and_pods(pod(0, RUNS), pod(1, RUNS)))
        done = kubernetes(typed, *SWEEP, "-o", "run")
        assert done.returncode == 130
        assert Path("run/records.jsonl").read_text() == "records\n"
        calls = " ".join(cluster.calls)
        assert 0 < calls.index(" tar ") < calls.index(" delete ")

    def test_job_past_its_deadline_suggests_a_longer_time(self, cluster: Cluster, typed: Typed) -> None:
        cluster.gets(job_and_pods(pod(0, make_terminated_state(143)), type="Failed", reason="DeadlineExceeded"))
        done = kubernetes(typed, "--time", "30", *SWEEP)
        assert done.returncode == 4
        assert "ran into its time limit; give it more with --time." in done.stderr

    def test_reason_of_unschedulable_pod_is_printed(self, cluster: Cluster, typed: Typed) -> None:
        waits = {"kind": "Pod", "metadata": {"name": "p", "annotations": {k8s.INDEX: "1"}}}
        scheduled = {
            "type": "PodScheduled",
            "status": "False",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
        cluster.gets(
            job_and_pods(pod(0, RUNS), waits | {"status": {"conditions": [scheduled]}}), job_and_pods(type="Complete")
        )
        done = kubernetes(typed, *SWEEP)
        assert "has 1 of 2 pods running: node 1: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu." in done.stderr

    def test_job_is_deleted_if_its_secret_is_refused(self, cluster: Cluster, typed: Typed) -> None:
        (cluster.folder / "refusal-2").write_text("Error from server (Forbidden): secrets is forbidden")
        done = kubernetes(typed, *SWEEP)
        assert done.returncode == 2
        assert "secrets is forbidden" in done.stderr
        assert (cluster.folder / "deleted").exists()

    def test_namespace_and_context_are_passed_to_every_kubectl_call(self, cluster: Cluster, typed: Typed) -> None:
        cluster.gets(job_and_pods(type="Complete"))
        kubernetes(typed, "--namespace", "gpus", "--context", "big", *SWEEP)
        assert cluster.calls
        assert all(call.startswith("kubectl --namespace=gpus --context=big ") for call in cluster.calls)

    def test_cancel_deletes_job_service_and_secret(self, cluster: Cluster, typed: Typed) -> None:
        cluster.gets(job_and_pods(pod(0, RUNS), pod(1, RUNS)))
        kubernetes(typed, "--detach", "--claim", "runs", *SWEEP, "-o", "run")
        done = typed("submit", "cancel", "run")
        assert done.returncode == 0
        name = json.loads(Path("run/submit/job.json").read_bytes())["id"]
        (deleted,) = [call for call in cluster.calls if " delete " in call][:1]
        assert f"delete job,service,secret -l app.kubernetes.io/instance={name}" in deleted
        assert "--cascade=foreground --wait" in deleted

    @pytest.mark.parametrize(
        "words",
        [("--detach", *SWEEP), (*SWEEP, "-o", "run", "--resume"), ("--restarts", "1", *SWEEP)],
        ids=["detach", "resume", "restarts"],
    )
    def test_options_that_outlive_a_pod_need_a_volume_claim(
        self, cluster: Cluster, typed: Typed, words: tuple[str, ...]
    ) -> None:
        done = kubernetes(typed, *words)
        assert done.returncode == 2
        assert "add --claim" in done.stderr
        assert cluster.calls == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
@pytest.mark.parametrize("where", ["slurm", "k8s"])
def test_signal_cancels_the_submitted_job(cluster: Cluster, typed: Typed, where: str, number: int) -> None:
    cluster.states(RUNNING)
    cluster.gets(job_and_pods(pod(0, RUNS), pod(1, RUNS)))
    cluster.log()

    def interrupt() -> None:
        requests = "scontrol" if where == "slurm" else " get "
        while not any(requests in call for call in cluster.calls):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    done = slurm(typed, *SWEEP) if where == "slurm" else kubernetes(typed, *SWEEP)
    thread.join()
    assert done.returncode == (130 if number == signal.SIGINT else 143)
    assert "is cancelled. What was measured is in" in done.stderr
    assert any(("scancel 7" if where == "slurm" else " delete ") in call for call in cluster.calls)


def test_interrupt_during_sbatch_cancels_the_new_job(cluster: Cluster, typed: Typed) -> None:
    (cluster.folder / "interrupts").touch()
    cluster.states(RUNNING)
    done = slurm(typed, *SWEEP)
    assert done.returncode == 130
    assert "scancel 7" in cluster.calls


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            (),
            2,
            "the command is missing. Write sweep, serve, server or verify with its options behind --, as in: dcpbench submit",
        ),
        (("--", "report", "run"), 2, "'report' cannot be submitted"),
        (("--", "sweep", "--tq", "16"), 2, "No such option: --tq"),
        (("--", "sweep", "--tp", "16", "--nodes", "2"), 2, "leave --nodes out behind --"),
        (("--", "sweep", "--tp", "16", "--dry-run"), 2, "write it before --"),
        (("--", "sweep", "--help"), 2, "see `dcpbench sweep --help`"),
        (("--nodes", "2", "--gpus-per-node", "8", "--", "sweep"), 2, "add for example --tp 16 behind --."),
        (("--nodes", "2", "--", "sweep", "--tp", "3"), 2, "--tp 3 does not divide over --nodes 2"),
        (("--nodes", "2", "--gpus-per-node", "4", "--", "sweep", "--tp", "8,16"), 3, "or take --tp 8."),
        (("--nodes", "2", "--", "verify", "--tp", "4"), 2, "verify runs on one machine; leave --nodes 2 out."),
        (
            ("--nodes", "2", "--", "server", "--url", "http://a:1", "--tp", "8"),
            2,
            "server runs on one machine; leave --nodes 2 out.",
        ),
        (("--", "sweep", "--tp", "8", "--gpu", "H200"), 2, "write it before --"),
        (("--gpu", "L40S", "--", "sweep", "--device", "cuda"), 2, "--gpu L40S is unknown"),
        (("--nodes", "0", "--", "sweep"), 2, "--nodes 0 is not positive"),
        (("--gpus-per-node", "-1", "--", "sweep"), 2, "--gpus-per-node -1 is negative"),
        (("--name", "My Job", "--", "sweep"), 2, "--name My Job: write at most 42 of a-z"),
        (("--time", "soon", "--", "sweep"), 2, "--time soon: write minutes, HH:MM:SS"),
        (("--time=-5", "--", "sweep"), 2, "--time -5: write minutes, HH:MM:SS"),
    ],
    ids=lambda value: shlex.join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("where", [("slurm",), ("k8s", "--image", "here/dcpbench:1")], ids=["slurm", "k8s"])
def test_invalid_command_is_refused_before_it_is_queued(
    cluster: Cluster, typed: Typed, where: tuple[str, ...], words: tuple[str, ...], code: int, message: str
) -> None:
    done = typed("submit", *where, *words)
    assert message in done.stderr
    assert done.returncode == code
    assert cluster.calls == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("slurm", "--pyxis", "a", "--apptainer", "b"), "--pyxis and --apptainer contradict each other"),
        (("slurm", "--mount", "/data:/data"), "--mount is about a container; add --pyxis IMAGE"),
        (("slurm", "--cpus-per-node", "0"), "--cpus-per-node 0 is not positive; try --cpus-per-node 16"),
        (
            ("slurm", "--dcpbench", "python 'x"),
            '--dcpbench: "python \'x" cannot be read: No closing quotation; close every quote',
        ),
        (("k8s", "--image", "x", "--dcpbench", " "), "--dcpbench names no command"),
        (("slurm", "--sbatch", "qos=high"), "write an option of sbatch, such as --sbatch=--qos=high"),
        (("slurm", "--setup", "one\ntwo"), "take a line each"),
        (("k8s",), "add for example --image"),
        (("k8s", "--image", "a", "--time", "0"), "is no time at all"),
        (
            ("k8s", "--image", "a", "--pod", "no-such.yaml"),
            "--pod no-such.yaml cannot be read (No such file or directory); name a YAML file.",
        ),
    ],
    ids=lambda value: shlex.join(value) if isinstance(value, tuple) else "",
)
def test_invalid_cluster_options_are_refused(
    cluster: Cluster, typed: Typed, words: tuple[str, ...], message: str
) -> None:
    done = typed("submit", *words, "--", "sweep", "--tp", "8", "--device", "cuda")
    assert done.returncode == 2
    assert message in done.stderr
    assert cluster.calls == []


@pytest.mark.parametrize("word", ["follow", "cancel"])
def test_follow_and_cancel_refuse_a_folder_without_a_job(typed: Typed, word: str) -> None:
    Path("run").mkdir()
    done = typed("submit", word, "run")
    assert done.returncode == 2
    assert "was not submitted" in done.stderr


@pytest.mark.parametrize("words", [["slurm"], ["k8s", "--image", "here/dcpbench:1"]], ids=["slurm", "k8s"])
def test_dry_run_prints_the_job_and_creates_no_files(cluster: Cluster, typed: Typed, words: list[str]) -> None:
    done = typed("submit", *words, "--nodes", "2", "--gpus-per-node", "8", "--dry-run", *SWEEP, "-o", "run")
    assert done.returncode == 0
    assert "# dcpbench sweep --tp 16 --dcp 8\n" in done.stdout
    assert cluster.calls == []
    assert not Path("run").exists()
    assert sys.executable not in done.stdout or words == ["slurm"]


KINDS = [("slurm",), ("k8s", "--image", "here/dcpbench:1")]
PLANNED = [
    ("sweep", "--tp", "8", "--seconds", "-1"),
    ("sweep", "--tp", "eight"),
    ("sweep", "--tp", "3"),
    ("sweep", "--tp", "8", "--dcp", "3"),
    ("sweep", "--tp", "8", "--model", "nosuch"),
    ("sweep", "--exchange", "foo"),
    ("sweep", "--context", "-5"),
    ("sweep", "--page-size", "0"),
    ("sweep", "--kv-memory", "foo"),
    ("sweep", "--tp", "8", "--timeout", "-4"),
    ("serve", "--tp", "8", "--slo", "foo"),
    ("serve", "--tp", "8", "--concurrency", "5000"),
    ("server", "--tp", "8", "--client", "warm-up=9"),
    ("verify", "--tp", "8", "--dcp", "3"),
]


@pytest.mark.parametrize("words", PLANNED, ids=shlex.join)
@pytest.mark.parametrize("where", KINDS, ids=["slurm", "k8s"])
def test_errors_of_the_submitted_command_are_reported_with_its_own_message(
    typed: Typed, where: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """The submitted command is planned with as many GPUs as one node has."""
    done = typed("submit", *where, "--gpus-per-node", "8", "--dry-run", "--", *words)
    own = typed(*words, "--dry-run", "--json", "--gpu", "H200,count=8")
    assert own.returncode == done.returncode != 0
    assert done.stderr == own.stderr.replace("error: ", f"error: the submitted {words[0]}: ")


def test_grid_is_accepted_if_any_of_its_points_can_run(typed: Typed) -> None:
    assert slurm(typed, "--dry-run", "--", "sweep", "--tp", "8,16", "--dcp", "3,8").returncode == 0
    assert slurm(typed, "--dry-run", "--", "sweep", "--tp", "8,16", "--dcp", "3").returncode == 2


def test_memory_is_checked_only_if_the_gpu_type_is_given(typed: Typed) -> None:
    words = (
        "--gpus-per-node",
        "1",
        "--dry-run",
        "--",
        "sweep",
        "--tp",
        "1",
        "--context",
        "100000",
        "--concurrency",
        "512",
    )
    assert typed("submit", "slurm", *words).returncode == 0
    done = typed("submit", "slurm", "--gpu", "H100", *words)
    assert done.returncode == 3
    assert "the submitted sweep: tp1: the KV cache needs" in done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_symmetric_memory_exchange_needs_all_dcp_ranks_on_one_node(typed: Typed, nodes: int) -> None:
    gpus = 16 // nodes
    words = ("--dry-run", *SWEEP[:-1], "16", "--exchange", "symm")
    done = typed("submit", "slurm", "--nodes", str(nodes), "--gpus-per-node", str(gpus), *words)
    assert (done.returncode == 0) == (nodes == 1)
    assert (f"a machine has {gpus} of them" in done.stderr) == (nodes > 1)


AWAY = [
    (("sweep", "--model", "/models/x"), ("--tp", "eight")),
    (("sweep", "--weights", "/models/x"), ("--dcp", "3")),
    (("sweep", "--config", "/x.toml"), ("--tp", "eight")),
    (("sweep", "--emulate", "/x.toml"), ("--context", "0")),
    (("serve", "--requests", "/x.jsonl", "--concurrency", "5000"), ("--slo", "foo")),
    (("serve", "--step-times", "/x.json", "--mode", "replay"), ("--prefill", "chunk=0")),
    (("server", "--engine", "/x.toml", "--model", "a/b"), ("--tp", "eight")),
    (
        ("server", "--engine", "vllm", "--model", "a/b", "--requests", "/x.jsonl", "--concurrency", "5000"),
        ("--sessions", "branch=-1"),
    ),
    (("verify", "--checkpoint", "/models/x", "--prompts", "/x.json"), ("--backend", "foo")),
]


@pytest.mark.parametrize(("words", "wrong"), AWAY, ids=shlex.join)
@pytest.mark.parametrize("where", KINDS, ids=["slurm", "k8s"])
def test_paths_on_the_cluster_are_not_checked_but_other_options_are(
    typed: Typed, where: tuple[str, ...], words: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    there = ("submit", *where, "--gpus-per-node", "8", "--dry-run", "--")
    tp = () if "--tp" in wrong else ("--tp", "8")
    done = typed(*there, *words, *tp)
    assert done.returncode == 0, done.stderr
    assert "cannot be checked here" in done.stderr
    assert ("--requests" if "--requests" in words else words[1]) in done.stderr
    done = typed(*there, *words, *tp, *wrong)
    assert done.returncode == 2
    assert f"error: the submitted {words[0]}: {wrong[0]}" in done.stderr


@pytest.mark.parametrize("words", [("--model", "deepseek-ai/DeepSeek-V3"), ("--weights", "./nothere")], ids=shlex.join)
def test_missing_relative_path_is_an_error_for_slurm_only(typed: Typed, words: tuple[str, ...]) -> None:
    """A Slurm job starts in the current folder, whereas a pod has its own file system."""
    wrong = typed("submit", *KINDS[0], "--gpus-per-node", "8", "--dry-run", "--", "sweep", "--tp", "8", *words)
    assert wrong.returncode == 2
    assert words[1].removeprefix("./") in wrong.stderr
    assert (
        typed("submit", *KINDS[1], "--gpus-per-node", "8", "--dry-run", "--", "sweep", "--tp", "8", *words).returncode
        == 0
    )


@pytest.mark.parametrize("where", KINDS, ids=["slurm", "k8s"])
def test_local_config_file_is_checked_for_slurm_only(typed: Typed, where: tuple[str, ...]) -> None:
    """Slurm nodes share the file system, whereas a pod has only the files of its image."""
    there = ("submit", *where, "--gpus-per-node", "8", "--dry-run", "--", "sweep", "--config", "a.toml")
    Path("a.toml").write_text("tp = 8\ndcp = 3\n")
    assert typed(*there).returncode == (2 if where == KINDS[0] else 0)
    Path("a.toml").write_text('tp = 8\nweights = "/models/x"\n')
    done = typed(*there)
    assert done.returncode == 0
    assert "--config cannot be checked here" in done.stderr


def test_suggestions_name_the_options_of_submit(typed: Typed) -> None:
    Path("a.toml").write_text("tp = 32\n")
    done = slurm(typed, "--dry-run", "--", "sweep", "--config", "a.toml")
    assert done.returncode == 3
    assert "there are 16 (requested)" in done.stderr
    assert "on 4 such machines with --nodes 4; see dcpbench submit --help)" in done.stderr
    assert "Type behind --: sweep " in done.stderr
    assert "dcpbench sweep" not in done.stderr


def test_interrupted_plan_submits_no_job(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dcpbench.plan.grid.expand_grid", interrupted)
    done = slurm(typed, "--dry-run", *SWEEP)
    assert (done.returncode, done.stdout) == (130, "")


@pytest.mark.parametrize(
    "words", [("server", "--url", "http://a:1"), ("verify", "--url", "http://a:1")], ids=shlex.join
)
def test_dry_run_sends_no_request_to_the_server(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("dcpbench.servers.measure.fetch_server_info", None)
    monkeypatch.setattr("dcpbench.commands.verify_servers.compare_running", None)
    done = typed("submit", "slurm", "--dry-run", "--", *words)
    assert (done.returncode, done.stderr) == (0, "")


class TestWithoutGpus:
    """Slurm may assign GPUs that were not requested, whereas a pod gets only the GPUs that it requests."""

    @pytest.mark.parametrize(
        ("words", "gpus"),
        [
            (("--", "sweep", "--tp", "8,16"), 16),
            (("--nodes", "2", "--", "sweep", "--tp", "16"), 8),
            (("--", "serve", "--tp", "4"), 4),
            (("--", "sweep", "--tp", "16", "--emulate", "H200+rdma-400"), 1),
            (("--", "sweep", "--concurrency", "8"), 8),
        ],
        ids=lambda value: shlex.join(value) if isinstance(value, tuple) else "",
    )
    @pytest.mark.sample(3)
    def test_message_suggests_gpus_per_node(self, typed: Typed, words: tuple[str, ...], gpus: int) -> None:
        add = f"--gpus-per-node {gpus}"
        done = typed("submit", *KINDS[0], "--dry-run", *words)
        assert done.returncode == 0
        assert f"Add {add} before --" in done.stderr
        done = typed("submit", *KINDS[1], "--dry-run", *words)
        assert done.returncode == 2
        assert f"add {add} before --" in done.stderr
        done = typed("submit", *KINDS[1], *add.split(), "--dry-run", *words)
        assert (done.returncode, done.stderr) == (0, ""), "the suggested option works"

    @pytest.mark.parametrize(
        "words",
        [
            ("sweep", "--tp", "2", "--device", "cpu"),
            ("sweep", "--tp", "2", "--device", "cuda"),
            ("server", "--url", "http://a:1"),
            ("verify", "--url", "http://a:1"),
        ],
        ids=shlex.join,
    )
    @pytest.mark.parametrize("where", KINDS, ids=["slurm", "k8s"])
    def test_no_message_if_no_gpu_is_needed_or_the_device_is_given(
        self, typed: Typed, where: tuple[str, ...], words: tuple[str, ...]
    ) -> None:
        done = typed("submit", *where, "--dry-run", "--", *words)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("option", ["--gres=gpu:h200:8", "--gpus-per-task=8", "-G8", "--tres-per-node=gres/gpu:8"])
    def test_gpus_may_be_requested_with_sbatch_options(self, typed: Typed, option: str) -> None:
        done = typed("submit", "slurm", f"--sbatch={option}", "--dry-run", *SWEEP)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize(
        ("pod", "gives"),
        [
            ("containers: [{resources: {limits: {nvidia.com/mig-3g.40gb: 1}}}]", True),
            ("containers: [{resources: {claims: [{name: gpus}]}}]", True),
            ("nodeSelector: {gpu: h200}", False),
            ("containers: [{resources: {limits: {rdma/hca: 1}}}]", False),
        ],
    )
    def test_gpus_may_be_requested_in_the_pod_file(self, typed: Typed, pod: str, gives: bool) -> None:
        Path("pod.yaml").write_text(pod)
        done = typed("submit", *KINDS[1], "--pod", "pod.yaml", "--dry-run", "--", "sweep", "--tp", "1")
        assert done.returncode == (0 if gives else 2), done.stderr
        assert ("the job requests no GPU" in done.stderr) != gives
