"""Test the scripts for Slurm and manifests for Kubernetes that `dcpbench submit` renders, without secrets in them."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from dcpbench.errors import UsageError
from dcpbench.launch.jobs import SECRET
from dcpbench.plan.command_line import remove_options
from dcpbench.submit import k8s, slurm
from dcpbench.submit.submission import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = Path(__file__).parents[1] / "data"
SCHEMAS = {v: json.loads((DATA / f"kubernetes-schema-{v}.json").read_text()) for v in ("1.29", "1.37")}
QUOTED_WORDS = ("sweep", "--model", "a b", '--note=it\'s $HOME `x` "y" \\ *', "$(touch stolen)", "--tp=2")
"""Arguments that a shell would change without quotes."""


def make_job(folder: Path = Path("/shared/runs/x"), **more: Any) -> JobSpec:
    return JobSpec(**{"words": ("sweep", "--tp", "16"), "folder": folder, "nodes": 2, "name": "night"} | more)


def make_slurm_cluster(**more: Any) -> slurm.Cluster:
    return slurm.Cluster(**{"program": ("/venv/bin/dcpbench",), "directory": Path("/home/me")} | more)


def list_directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


class TestSlurmScript:
    def test_slurm_script_has_a_directive_for_each_option(self) -> None:
        cluster = make_slurm_cluster(partition="h200", account="lab", options=("--qos=high",), cpus_per_node=64)
        assert list_directives(slurm.render_script(make_job(gpus_per_node=8, time="4:00:00"), cluster)) == [
            "--job-name=night",
            "--nodes=2",
            "--ntasks-per-node=1",
            "--cpus-per-task=64",
            "--gpus-per-node=8",
            "--mem=0",
            "--partition=h200",
            "--account=lab",
            "--time=4:00:00",
            "--chdir=/home/me",
            "--output=/shared/runs/x/submit/%j.log",
            "--open-mode=append",
            "--exclusive",
            "--requeue",
            "--qos=high",
        ]

    def test_slurm_script_has_no_directive_for_unset_options(self) -> None:
        found = list_directives(slurm.render_script(make_job(), make_slurm_cluster(exclusive=False, requeue=False)))
        assert "--no-requeue" in found
        names = {option.partition("=")[0] for option in found}
        assert not names & {"--gpus-per-node", "--partition", "--account", "--time", "--mem", "--exclusive"}

    def test_slurm_script_quotes_paths_with_spaces_and_percent_signs(self) -> None:
        """The command sbatch replaces %j by the number of the job, and %% by %."""
        found = list_directives(slurm.render_script(make_job(Path("/shared/50% run")), make_slurm_cluster()))
        assert '--output="/shared/50%% run/submit/%j.log"' in found

    def test_pyxis_image_is_an_option_of_srun(self) -> None:
        cluster = make_slurm_cluster(pyxis="registry#dcpbench:1", mounts=("/models:/models",), program=("dcpbench",))
        script = slurm.render_script(make_job(), cluster)
        assert "'--container-image=registry#dcpbench:1'" in script
        mounts = "/shared/runs/x:/shared/runs/x,/home/me:/home/me,/models:/models"
        assert f"--container-mounts={mounts} --container-workdir=/home/me" in script

    def test_apptainer_runs_the_command(self) -> None:
        script = slurm.render_script(
            make_job(gpus_per_node=8), make_slurm_cluster(apptainer="dcp.sif", program=("dcpbench",))
        )
        binds = "--bind /shared/runs/x:/shared/runs/x --bind /home/me:/home/me"
        assert f"apptainer exec --nv {binds} --pwd /home/me dcp.sif dcpbench sweep --tp 16" in script

    def test_setup_lines_precede_the_command(self) -> None:
        script = slurm.render_script(make_job(), make_slurm_cluster(setup=("module load cuda",)))
        assert script.index("\nmodule load cuda\n") < script.index("\nsrun ")

    @pytest.mark.parametrize("nodes", [1, 2])
    @pytest.mark.parametrize("more", [{}, {"interface": "ib0"}, {"pyxis": "i"}, {"apptainer": "i"}], ids=str)
    def test_slurm_script_is_valid_bash(self, nodes: int, more: dict[str, str]) -> None:
        script = slurm.render_script(make_job(nodes=nodes), make_slurm_cluster(setup=("true",), **more))
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


SRUN = """#!/bin/bash
# Runs one task after the other, as the nodes of a job; `getent` prints the address of node 0.
while [ "${1#--}" != "$1" ]; do shift; done
if [ "$1" = getent ]; then echo "10.0.0.7 STREAM"; exit; fi
code=0
for SLURM_NODEID in $NODE_ORDER; do
    export SLURM_NODEID
    "$@" || { last=$?; [ $last -gt $code ] && code=$last; }
done
exit $code
"""
PROGRAM = """#!/bin/bash
# Writes its arguments, each followed by NUL, and exits with the code for its node.
secret=$DCPBENCH_SECRET
printf '%s\\0' "$@" > "$OUTPUT/words-${SLURM_NODEID:-0}"
echo "$secret" > "$OUTPUT/secret-${SLURM_NODEID:-0}"
stat -c %a "$OUTPUT/run dir/submit/secret" > "$OUTPUT/mode" 2> /dev/null
code=CODE_${SLURM_NODEID:-0}
exit "${!code:-0}"
"""


class SlurmJob:
    """Run the script of a job in bash, with substitutes for srun and scontrol."""

    def __init__(self, folder: Path, job: JobSpec, **env: str) -> None:
        for name, text in {
            "srun": SRUN,
            "program": PROGRAM,
            "scontrol": "#!/bin/sh\n[ $2 = hostnames ] && printf 'n0\\nn1\\n' || echo 'NodeAddr=n0 x'\n",
        }.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.folder = folder
        (job.place).mkdir(parents=True, exist_ok=True)
        script = slurm.render_script(job, make_slurm_cluster(program=(str(folder / "program"),), directory=folder))
        path = f"{folder}:{os.environ['PATH']}"
        own = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[0-1]", "NODE_ORDER": "0 1", "OUTPUT": str(folder)}
        own |= {"NODE_ORDER": "0"} if job.nodes == 1 else {}
        env = os.environ | own | {"PATH": path} | env
        done = subprocess.run(["bash"], input=script, text=True, env=env, cwd=folder, check=False, capture_output=True)
        self.code, self.stderr = done.returncode, done.stderr

    def words(self, node: int) -> list[str]:
        return (self.folder / f"words-{node}").read_text().split("\0")[:-1]


class TestSlurmScriptAsItRuns:
    def test_each_node_gets_the_unchanged_arguments_and_its_own_folder(self, tmp_path: Path) -> None:
        """The port is 20000 + 12345 % 12000."""
        run = tmp_path / "run dir"
        ran = SlurmJob(tmp_path, make_job(run, words=QUOTED_WORDS))
        assert ran.code == 0, ran.stderr
        nodes_option = "2,endpoint=10.0.0.7:20345"
        assert ran.words(0) == [*QUOTED_WORDS, "--nodes", f"{nodes_option},rank=0", "-o", str(run)]
        assert ran.words(1) == [*QUOTED_WORDS, "--nodes", f"{nodes_option},rank=1", "-o", f"{run}/nodes/1"]
        assert not (tmp_path / "stolen").exists()

    def test_single_node_has_no_endpoint_or_secret(self, tmp_path: Path) -> None:
        run = tmp_path / "run dir"
        ran = SlurmJob(tmp_path, make_job(run, nodes=1, words=QUOTED_WORDS))
        assert ran.words(0) == [*QUOTED_WORDS, "-o", str(run)]
        assert (tmp_path / "secret-0").read_text() == "\n"

    def test_secret_file_is_private_and_removed_after_the_job(self, tmp_path: Path) -> None:
        run = tmp_path / "run dir"
        SlurmJob(tmp_path, make_job(run))
        first, other = ((tmp_path / f"secret-{n}").read_text().strip() for n in (0, 1))
        assert re.fullmatch("[0-9a-f]{64}", first)
        assert first == other
        assert (tmp_path / "mode").read_text() == "600\n"
        assert not (run / "submit" / "secret").exists()
        SlurmJob(tmp_path, make_job(run))
        assert (tmp_path / "secret-0").read_text().strip() != first, "each start has its own"

    @pytest.mark.parametrize(
        ("start", "restarts", "added"),
        [("", "0", []), ("--force", "0", ["--force"]), ("", "1", ["--resume"]), ("--force", "2", ["--resume"])],
        ids=["first", "first with --force", "again", "again after --force"],
    )
    def test_restarted_job_resumes(self, tmp_path: Path, start: str, restarts: str, added: list[str]) -> None:
        """A second --force would remove the measurements of the first start."""
        ran = SlurmJob(tmp_path, make_job(tmp_path / "run dir", start=start), SLURM_RESTART_COUNT=restarts)
        words = ran.words(0)
        assert [word for word in words if word in ("--force", "--resume")] == added

    @pytest.mark.parametrize(("order", "code"), [("0 1", 4), ("1 0", 143)], ids=["node 0 first", "node 1 first"])
    def test_exit_code_of_the_job_is_that_of_the_first_failed_node(self, tmp_path: Path, order: str, code: int) -> None:
        """The command srun itself returns the largest code: 143, of a node that it ended after the failure."""
        run = tmp_path / "run dir"
        ran = SlurmJob(tmp_path, make_job(run), NODE_ORDER=order, CODE_0="4", CODE_1="143")
        assert ran.code == code
        assert (run / "submit" / "12345.code").read_text() == f"{code}\n"

    def test_unknown_address_error_suggests_the_interface_option(self, tmp_path: Path) -> None:
        (tmp_path / "getent").write_text("")
        ran = SlurmJob(tmp_path, make_job(tmp_path / "run dir"), PATH=f"{tmp_path}:/usr/bin:/bin")
        assert ran.code == 0
        srun = SRUN.replace('echo "10.0.0.7 STREAM"; ', "")
        path = tmp_path / "silent"
        path.mkdir()
        (path / "srun").write_text(srun)
        (path / "srun").chmod(0o755)
        ran = SlurmJob(tmp_path, make_job(tmp_path / "run dir"), PATH=f"{path}:{tmp_path}:/usr/bin:/bin")
        assert ran.code == 2
        assert "submit again with the name of a network interface, such as --interface eth0" in ran.stderr


def make_kubernetes_cluster(**more: Any) -> k8s.Cluster:
    return k8s.Cluster(**{"image": "registry/dcpbench:1"} | more)


POD = {
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "team", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "pull"}],
    "containers": [{"resources": {"limits": {"rdma/hca": 1}}, "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
}
MANIFESTS = {
    "one pod on the CPU": k8s.make_manifests(make_job(nodes=1), make_kubernetes_cluster()),
    "two pods with GPUs": k8s.make_manifests(make_job(gpus_per_node=8, time="1-12:00:00"), make_kubernetes_cluster()),
    "with a claim, resumed": k8s.make_manifests(make_job(start="--resume"), make_kubernetes_cluster(claim="runs")),
    "with more of a pod": k8s.make_manifests(make_job(gpus_per_node=8), make_kubernetes_cluster(pod=POD)),
    "without a follower": k8s.make_manifests(make_job(keeps=False), make_kubernetes_cluster(claim="runs")),
}


def validate(part: dict[str, Any], version: str) -> None:
    """Validate a manifest against Kubernetes' schema of its kind, where unknown fields are errors."""
    schema = SCHEMAS[version]
    jsonschema.Draft202012Validator(
        {"$defs": schema["$defs"], "$ref": f"#/$defs/{schema['kinds'][part['kind']]}"}
    ).validate(part)


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("parts", MANIFESTS.values(), ids=MANIFESTS)
class TestSchemas:
    def test_every_manifest_is_valid_by_the_published_schema(self, parts: list[dict[str, Any]], version: str) -> None:
        for part in parts:
            validate(part, version)

    def test_schemas_refuse_a_misspelt_field_and_a_wrong_type(self, parts: list[dict[str, Any]], version: str) -> None:
        """Otherwise, the validation of manifests would prove nothing."""
        job = copy.deepcopy(parts[0])
        job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
        with pytest.raises(jsonschema.ValidationError, match="restartpolicy"):
            validate(job, version)
        job = copy.deepcopy(parts[0])
        job["spec"]["completions"] = "2"
        with pytest.raises(jsonschema.ValidationError, match="'2' is not of type 'integer'"):
            validate(job, version)


class TestManifest:
    def test_formatted_yaml_reads_as_the_manifests(self) -> None:
        read = list(yaml.safe_load_all(k8s.format_manifests(make_job(), make_kubernetes_cluster())))
        assert read == k8s.make_manifests(make_job(), make_kubernetes_cluster())

    def test_manifest_is_an_indexed_job_that_ends_with_the_first_failure(self) -> None:
        spec = MANIFESTS["two pods with GPUs"][0]["spec"]
        assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
        assert spec["backoffLimit"] == 0
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        assert spec["activeDeadlineSeconds"] == 36 * 3600
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}

    def test_single_pod_has_neither_service_nor_secret(self) -> None:
        assert [part["kind"] for part in MANIFESTS["one pod on the CPU"]] == ["Job"]
        assert SECRET not in json.dumps(MANIFESTS["one pod on the CPU"])

    def test_manifest_has_an_empty_secret_and_a_reference_to_it(self) -> None:
        """With an empty secret the machines refuse to connect, so that a manifest applied by hand is not an open door."""
        job, _, secret = MANIFESTS["two pods with GPUs"]
        (env,) = [e for e in job["spec"]["template"]["spec"]["containers"][0]["env"] if e["name"] == SECRET]
        assert env["valueFrom"]["secretKeyRef"] == {"name": "night", "key": SECRET}
        assert secret["stringData"] == {SECRET: ""}

    def test_manifest_escapes_dollar_signs_in_arguments(self) -> None:
        """Kubernetes would expand $(NAME) as a variable, and $$ as a dollar sign."""
        job, *_ = k8s.make_manifests(make_job(words=("sweep", "--note", "$(NODES) $$")), make_kubernetes_cluster())
        container = job["spec"]["template"]["spec"]["containers"][0]
        assert container["args"][-1] == "$$(NODES) $$$$"
        script = container["command"][2]
        assert "$$" not in script
        names = {env["name"] for env in container["env"]}
        assert not names & set(re.findall(r"\$\((\w+)\)", script))

    def test_pod_option_is_merged_with_the_generated_pod(self) -> None:
        pod = MANIFESTS["with more of a pod"][0]["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == {"gpu": "h200"}
        assert [t["key"] for t in pod["tolerations"]] == ["nvidia.com/gpu", "team"]
        (container,) = pod["containers"]
        assert container["image"] == "registry/dcpbench:1"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
        assert container["env"][0]["name"] == "JOB"
        assert container["env"][-1] == {"name": "NCCL_DEBUG", "value": "INFO"}

    def test_pod_file_with_too_many_alias_values_is_refused(self, tmp_path: Path) -> None:
        """Nine anchors, each a list of nine aliases of the one before, expand to 9⁹ items; the fifth exceeds 10,000. A
        list can contain itself.
        """
        names = "abcdefghi"
        lists = [", ".join(["x" if one == "a" else f"*{chr(ord(one) - 1)}"] * 9) for one in names]
        nested_aliases = "\n".join(f"{one}: &{one} [{items}]" for one, items in zip(names, lists, strict=True))
        for text, message in (
            (nested_aliases, r"5: \*d makes more than 10,000 values"),
            ("x: &x [*x]", r"1: \*x holds itself"),
        ):
            (tmp_path / "pod.yaml").write_text(text)
            with pytest.raises(UsageError, match=rf"--pod .*pod\.yaml, line {message}"):
                k8s.read_pod(tmp_path / "pod.yaml")

    def test_pod_file_with_too_many_merge_keys_is_refused(self, tmp_path: Path) -> None:
        """A merge key copies the pairs of a mapping, or of all mappings of a list."""
        lines = ["a: &a {" + ", ".join(f"k{n}: 1" for n in range(50)) + "}"]
        lines += [f"{y}: &{y}\n  <<: [{', '.join([f'*{x}'] * 9)}]" for x, y in zip("abcdefg", "bcdefgh", strict=True)]
        (tmp_path / "pod.yaml").write_text("\n".join(lines))
        with pytest.raises(UsageError, match="makes more than 10,000 values"):
            k8s.read_pod(tmp_path / "pod.yaml")

    @pytest.mark.parametrize("text", ["x" * (1 << 18), "[" * 20_000], ids=["long", "deep"])
    def test_pod_file_that_is_too_long_or_too_deep_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "pod.yaml").write_text(f"a: {text}")
        with pytest.raises(UsageError, match=r"--pod .*(more than 262,144 characters|nested too deep)"):
            k8s.read_pod(tmp_path / "pod.yaml")

    @pytest.mark.parametrize("text", ["- a", "kind: Pod", "spec: {}", "a: [", ""])
    def test_pod_file_without_fields_of_a_pod_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "pod.yaml").write_text(text)
        with pytest.raises(UsageError, match="--pod"):
            k8s.read_pod(tmp_path / "pod.yaml")

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("30", 30 * 60),
            ("30:15", 30 * 60 + 15),
            ("4:00:00", 4 * 3600),
            ("1-12", 36 * 3600),
            ("1-12:30", 36 * 3600 + 30 * 60),
            ("1-12:30:05", 36 * 3600 + 30 * 60 + 5),
        ],
    )
    def test_time_limit_has_the_syntax_of_slurm(self, text: str, seconds: int) -> None:
        assert k8s.parse_time_limit(text) == seconds


def test_unpacking_writes_only_inside_the_run_folder(tmp_path: Path) -> None:
    """The image of the pod is not trusted: links, and paths that lead out of the folder, are left out."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("./logs/a", "../out", f"{tmp_path}/out", "in/../../out"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    packed.seek(0)
    with tarfile.open(fileobj=packed, mode="r|") as archive:
        k8s.unpack_files(archive, tmp_path / "run")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == [tmp_path / "run" / "logs" / "a"]


class Pod:
    """Run pod.sh as a pod does, with host names that resolve as soon as their file exists."""

    def __init__(self, folder: Path, program: str, words: tuple[str, ...] = (), index: int = 0, nodes: int = 1) -> None:
        (folder / "getent").write_text(f'#!/bin/sh\n[ -e "{folder}/known-$2" ]\n')
        (folder / "program").write_text(f"#!/bin/bash\n{program}\n")
        (folder / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.02\n")
        for name in ("getent", "program", "sleep"):
            (folder / name).chmod(0o755)
        spec = k8s.make_manifests(make_job(nodes=nodes), make_kubernetes_cluster())[0]["spec"]["template"]["spec"][
            "containers"
        ][0]
        env = {e["name"]: e.get("value", "10.1.2.3") for e in spec["env"]}
        env |= {"RUN_FOLDER": str(folder / "run"), "FETCHED": str(folder / "fetched"), "OUTPUT": str(folder)}
        env |= {"JOB_COMPLETION_INDEX": str(index), "PATH": f"{folder}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            [*spec["command"], str(folder / "program"), *words], env=env, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.lines: Iterator[str] = iter(self.process.stdout.readline, "")

    def code(self) -> int:
        """Return the exit code after the process has ended."""
        with self.process:
            return self.process.wait()


WRITE_ARGUMENTS = 'printf "%s\\0" "$@" > "$OUTPUT/words"'


class TestPod:
    def test_node_0_starts_once_the_other_pods_run(self, tmp_path: Path) -> None:
        pod = Pod(tmp_path, WRITE_ARGUMENTS, QUOTED_WORDS, nodes=2)
        assert next(pod.lines) == "waiting until the pod of node 1 runs\n"
        assert not (tmp_path / "words").exists()
        (tmp_path / "known-night-1.night").touch()
        assert next(pod.lines) == f"{k8s.ENDED} 0\n"
        (tmp_path / "fetched").touch()
        assert pod.code() == 0
        nodes_option = ["--nodes", "2,rank=0,endpoint=10.1.2.3:29500"]
        assert (tmp_path / "words").read_text().split("\0")[:-1] == [
            *QUOTED_WORDS,
            *nodes_option,
            "-o",
            str(tmp_path / "run"),
        ]

    def test_other_node_uses_the_name_of_node_0_and_exits_with_its_command(self, tmp_path: Path) -> None:
        (tmp_path / "known-night-0.night").touch()
        pod = Pod(tmp_path, f"{WRITE_ARGUMENTS}; exit 3", ("sweep",), index=1, nodes=2)
        assert pod.code() == 3
        nodes_option = ["--nodes", "2,rank=1,endpoint=night-0.night:29500"]
        words = (tmp_path / "words").read_text().split("\0")[:-1]
        assert words == ["sweep", *nodes_option, "-o", str(tmp_path / "run" / "nodes" / "1")]

    def test_pod_waits_for_the_fetch_and_exits_with_the_code_of_its_command(self, tmp_path: Path) -> None:
        pod = Pod(tmp_path, "exit 4")
        assert next(pod.lines) == f"{k8s.ENDED} 4\n"
        assert pod.process.poll() is None
        (tmp_path / "fetched").touch()
        assert pod.code() == 4

    def test_pod_forwards_a_signal_and_waits_for_the_command(self, tmp_path: Path) -> None:
        pod = Pod(tmp_path, "trap 'echo cleaning; exit 143' TERM; echo begun; while :; do sleep; done")
        assert next(pod.lines) == "begun\n"
        pod.process.send_signal(signal.SIGTERM)
        assert [next(pod.lines), next(pod.lines)] == ["cleaning\n", f"{k8s.ENDED} 143\n"]
        pod.process.send_signal(signal.SIGTERM)
        assert pod.code() == 143, "the second signal ends the wait for the fetch"


def test_remove_options_removes_all_forms_of_an_option() -> None:
    words = ["--tp", "2", "-o", "a", "--output", "b", "--output=c", "-od", "--resume", "--force", "--kv-dtype", "fp8"]
    assert remove_options(words, ("-o", "--output"), ("--resume", "--force")) == ["--tp", "2", "--kv-dtype", "fp8"]
