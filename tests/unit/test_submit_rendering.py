"""What `dcpbench submit` renders: a script that bash takes and a manifest that Kubernetes takes, with no secret in either."""

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

from dcpbench.commands.submit import remove_options
from dcpbench.errors import UsageError
from dcpbench.launch.jobs import SECRET
from dcpbench.submit import k8s, slurm
from dcpbench.submit.asked import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = Path(__file__).parents[1] / "data"
SCHEMAS = {v: json.loads((DATA / f"kubernetes-schema-{v}.json").read_text()) for v in ("1.29", "1.37")}
NASTY = ("sweep", "--model", "a b", '--note=it\'s $HOME `x` "y" \\ *', "$(touch stolen)", "--tp=2")
"""Words that a shell would change."""


def asked(folder: Path = Path("/shared/runs/x"), **more: Any) -> JobSpec:
    return JobSpec(**{"words": ("sweep", "--tp", "16"), "folder": folder, "nodes": 2, "name": "night"} | more)


def on_slurm(**more: Any) -> slurm.Cluster:
    return slurm.Cluster(**{"program": ("/venv/bin/dcpbench",), "directory": Path("/home/me")} | more)


def directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


class TestSlurmScript:
    def test_what_is_asked_for_stands_in_the_scripts_head(self) -> None:
        cluster = on_slurm(partition="h200", account="lab", options=("--qos=high",), cpus_per_node=64)
        assert directives(slurm.render_script(asked(gpus_per_node=8, time="4:00:00"), cluster)) == [
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

    def test_what_is_not_asked_for_is_the_clusters_to_say(self) -> None:
        found = directives(slurm.render_script(asked(), on_slurm(exclusive=False, requeue=False)))
        assert "--no-requeue" in found
        names = {option.partition("=")[0] for option in found}
        assert not names & {"--gpus-per-node", "--partition", "--account", "--time", "--mem", "--exclusive"}

    def test_a_path_with_spaces_and_percent_signs_is_one_path(self) -> None:
        """sbatch replaces %j by the job's number, and %% by %."""
        found = directives(slurm.render_script(asked(Path("/shared/50% run")), on_slurm()))
        assert '--output="/shared/50%% run/submit/%j.log"' in found

    def test_pyxis_gets_the_image_from_srun(self) -> None:
        cluster = on_slurm(pyxis="registry#dcpbench:1", mounts=("/models:/models",), program=("dcpbench",))
        script = slurm.render_script(asked(), cluster)
        assert "'--container-image=registry#dcpbench:1'" in script
        mounts = "/shared/runs/x:/shared/runs/x,/home/me:/home/me,/models:/models"
        assert f"--container-mounts={mounts} --container-workdir=/home/me" in script

    def test_apptainer_starts_the_command(self) -> None:
        script = slurm.render_script(asked(gpus_per_node=8), on_slurm(apptainer="dcp.sif", program=("dcpbench",)))
        binds = "--bind /shared/runs/x:/shared/runs/x --bind /home/me:/home/me"
        assert f"apptainer exec --nv {binds} --pwd /home/me dcp.sif dcpbench sweep --tp 16" in script

    def test_setup_comes_before_the_command(self) -> None:
        script = slurm.render_script(asked(), on_slurm(setup=("module load cuda",)))
        assert script.index("\nmodule load cuda\n") < script.index("\nsrun ")

    @pytest.mark.parametrize("nodes", [1, 2])
    @pytest.mark.parametrize("more", [{}, {"interface": "ib0"}, {"pyxis": "i"}, {"apptainer": "i"}], ids=str)
    def test_bash_takes_it(self, nodes: int, more: dict[str, str]) -> None:
        script = slurm.render_script(asked(nodes=nodes), on_slurm(setup=("true",), **more))
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


SRUN = """#!/bin/bash
# One task after the other, as the nodes of a job; `getent` is asked what node 0's address is.
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
# Writes what it was given, NUL behind each word, and ends with the code that its node is to end with.
secret=$DCPBENCH_SECRET
printf '%s\\0' "$@" > "$TOLD/words-${SLURM_NODEID:-0}"
echo "$secret" > "$TOLD/secret-${SLURM_NODEID:-0}"
stat -c %a "$TOLD/run dir/submit/secret" > "$TOLD/mode" 2> /dev/null
code=CODE_${SLURM_NODEID:-0}
exit "${!code:-0}"
"""


class Ran:
    """The script of a job, run by bash with srun and scontrol that stand in for Slurm's."""

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
        script = slurm.render_script(job, on_slurm(program=(str(folder / "program"),), directory=folder))
        path = f"{folder}:{os.environ['PATH']}"
        own = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[0-1]", "NODE_ORDER": "0 1", "TOLD": str(folder)}
        own |= {"NODE_ORDER": "0"} if job.nodes == 1 else {}
        env = os.environ | own | {"PATH": path} | env
        done = subprocess.run(["bash"], input=script, text=True, env=env, cwd=folder, check=False, capture_output=True)
        self.code, self.said = done.returncode, done.stderr

    def words(self, node: int) -> list[str]:
        return (self.folder / f"words-{node}").read_text().split("\0")[:-1]


class TestSlurmScriptAsItRuns:
    def test_each_node_gets_the_words_as_they_were_typed_and_its_own_folder(self, tmp_path: Path) -> None:
        """Port 20000 + 12345 % 12000."""
        run = tmp_path / "run dir"
        ran = Ran(tmp_path, asked(run, words=NASTY))
        assert ran.code == 0, ran.said
        meets = "2,endpoint=10.0.0.7:20345"
        assert ran.words(0) == [*NASTY, "--nodes", f"{meets},rank=0", "-o", str(run)]
        assert ran.words(1) == [*NASTY, "--nodes", f"{meets},rank=1", "-o", f"{run}/nodes/1"]
        assert not (tmp_path / "stolen").exists()

    def test_one_node_meets_nobody(self, tmp_path: Path) -> None:
        run = tmp_path / "run dir"
        ran = Ran(tmp_path, asked(run, nodes=1, words=NASTY))
        assert ran.words(0) == [*NASTY, "-o", str(run)]
        assert (tmp_path / "secret-0").read_text() == "\n"

    def test_the_secret_is_in_a_file_of_its_owner_as_long_as_the_job_runs(self, tmp_path: Path) -> None:
        run = tmp_path / "run dir"
        Ran(tmp_path, asked(run))
        first, other = ((tmp_path / f"secret-{n}").read_text().strip() for n in (0, 1))
        assert re.fullmatch("[0-9a-f]{64}", first)
        assert first == other
        assert (tmp_path / "mode").read_text() == "600\n"
        assert not (run / "submit" / "secret").exists()
        Ran(tmp_path, asked(run))
        assert (tmp_path / "secret-0").read_text().strip() != first, "each start has its own"

    @pytest.mark.parametrize(
        ("start", "restarts", "added"),
        [("", "0", []), ("--force", "0", ["--force"]), ("", "1", ["--resume"]), ("--force", "2", ["--resume"])],
        ids=["first", "first with --force", "again", "again after --force"],
    )
    def test_a_job_that_begins_again_resumes(self, tmp_path: Path, start: str, restarts: str, added: list[str]) -> None:
        """--force a second time would remove what the first start had measured."""
        ran = Ran(tmp_path, asked(tmp_path / "run dir", start=start), SLURM_RESTART_COUNT=restarts)
        words = ran.words(0)
        assert [word for word in words if word in ("--force", "--resume")] == added

    @pytest.mark.parametrize(("order", "code"), [("0 1", 4), ("1 0", 143)], ids=["node 0 first", "node 1 first"])
    def test_the_code_of_the_first_node_that_fails_is_the_jobs(self, tmp_path: Path, order: str, code: int) -> None:
        """srun itself ends with the largest, 143 of those that it ended for the failure."""
        run = tmp_path / "run dir"
        ran = Ran(tmp_path, asked(run), NODE_ORDER=order, CODE_0="4", CODE_1="143")
        assert ran.code == code
        assert (run / "submit" / "12345.code").read_text() == f"{code}\n"

    def test_an_address_that_nobody_knows_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "getent").write_text("")
        ran = Ran(tmp_path, asked(tmp_path / "run dir"), PATH=f"{tmp_path}:/usr/bin:/bin")
        assert ran.code == 0
        srun = SRUN.replace('echo "10.0.0.7 STREAM"; ', "")
        path = tmp_path / "silent"
        path.mkdir()
        (path / "srun").write_text(srun)
        (path / "srun").chmod(0o755)
        ran = Ran(tmp_path, asked(tmp_path / "run dir"), PATH=f"{path}:{tmp_path}:/usr/bin:/bin")
        assert ran.code == 2
        assert "submit again with the name of a network interface, such as --interface eth0" in ran.said


def on_kubernetes(**more: Any) -> k8s.Cluster:
    return k8s.Cluster(**{"image": "registry/dcpbench:1"} | more)


POD = {
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "team", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "pull"}],
    "containers": [{"resources": {"limits": {"rdma/hca": 1}}, "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
}
MANIFESTS = {
    "one pod on the CPU": k8s.make_manifests(asked(nodes=1), on_kubernetes()),
    "two pods with GPUs": k8s.make_manifests(asked(gpus_per_node=8, time="1-12:00:00"), on_kubernetes()),
    "with a claim, resumed": k8s.make_manifests(asked(start="--resume"), on_kubernetes(claim="runs")),
    "with more of a pod": k8s.make_manifests(asked(gpus_per_node=8), on_kubernetes(pod=POD)),
    "nobody follows": k8s.make_manifests(asked(keeps=False), on_kubernetes(claim="runs")),
}


def validate(part: dict[str, Any], version: str) -> None:
    """Hold a manifest against Kubernetes' schema of its kind, where unknown fields are errors."""
    schema = SCHEMAS[version]
    jsonschema.Draft202012Validator(
        {"$defs": schema["$defs"], "$ref": f"#/$defs/{schema['kinds'][part['kind']]}"}
    ).validate(part)


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("parts", MANIFESTS.values(), ids=MANIFESTS)
class TestSchemas:
    def test_every_manifest_is_as_kubernetes_publishes_it(self, parts: list[dict[str, Any]], version: str) -> None:
        for part in parts:
            validate(part, version)

    def test_the_schemas_notice_what_is_misspelt(self, parts: list[dict[str, Any]], version: str) -> None:
        """Else the test above would say nothing."""
        job = copy.deepcopy(parts[0])
        job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
        with pytest.raises(jsonschema.ValidationError, match="restartpolicy"):
            validate(job, version)
        job = copy.deepcopy(parts[0])
        job["spec"]["completions"] = "2"
        with pytest.raises(jsonschema.ValidationError, match="'2' is not of type 'integer'"):
            validate(job, version)


class TestManifest:
    def test_yaml_reads_as_what_was_meant(self) -> None:
        read = list(yaml.safe_load_all(k8s.format_manifests(asked(), on_kubernetes())))
        assert read == k8s.make_manifests(asked(), on_kubernetes())

    def test_it_is_an_indexed_job_with_a_pod_for_each_machine_that_ends_with_the_first_failure(self) -> None:
        spec = MANIFESTS["two pods with GPUs"][0]["spec"]
        assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
        assert spec["backoffLimit"] == 0
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        assert spec["activeDeadlineSeconds"] == 36 * 3600
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}

    def test_one_machine_needs_neither_service_nor_secret(self) -> None:
        assert [part["kind"] for part in MANIFESTS["one pod on the CPU"]] == ["Job"]
        assert SECRET not in json.dumps(MANIFESTS["one pod on the CPU"])

    def test_the_secret_is_a_reference_and_empty(self) -> None:
        """With an empty one the machines refuse to meet, so that a manifest applied by hand is not an open door."""
        job, _, secret = MANIFESTS["two pods with GPUs"]
        (env,) = [e for e in job["spec"]["template"]["spec"]["containers"][0]["env"] if e["name"] == SECRET]
        assert env["valueFrom"]["secretKeyRef"] == {"name": "night", "key": SECRET}
        assert secret["stringData"] == {SECRET: ""}

    def test_kubernetes_expands_nothing_in_the_words(self) -> None:
        """It would read $(NAME) as a variable, and takes $$ for a dollar."""
        job, *_ = k8s.make_manifests(asked(words=("sweep", "--note", "$(NODES) $$")), on_kubernetes())
        container = job["spec"]["template"]["spec"]["containers"][0]
        assert container["args"][-1] == "$$(NODES) $$$$"
        script = container["command"][2]
        assert "$$" not in script
        names = {env["name"] for env in container["env"]}
        assert not names & set(re.findall(r"\$\((\w+)\)", script))

    def test_what_is_added_to_a_pod_stands_beside_what_is_there(self) -> None:
        pod = MANIFESTS["with more of a pod"][0]["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == {"gpu": "h200"}
        assert [t["key"] for t in pod["tolerations"]] == ["nvidia.com/gpu", "team"]
        (container,) = pod["containers"]
        assert container["image"] == "registry/dcpbench:1"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
        assert container["env"][0]["name"] == "JOB"
        assert container["env"][-1] == {"name": "NCCL_DEBUG", "value": "INFO"}

    def test_aliases_in_a_part_of_a_pod_are_counted_before_they_are_followed(self, tmp_path: Path) -> None:
        """Nine anchors, each of nine aliases of the one before, stand for 9⁹ items; the fifth passes 10,000. A list can hold itself."""
        names = "abcdefghi"
        lists = [", ".join(["x" if one == "a" else f"*{chr(ord(one) - 1)}"] * 9) for one in names]
        laughs = "\n".join(f"{one}: &{one} [{items}]" for one, items in zip(names, lists, strict=True))
        for text, said in ((laughs, r"5: \*d makes more than 10,000 values"), ("x: &x [*x]", r"1: \*x holds itself")):
            (tmp_path / "pod.yaml").write_text(text)
            with pytest.raises(UsageError, match=rf"--pod .*pod\.yaml, line {said}"):
                k8s.read_pod(tmp_path / "pod.yaml")

    def test_an_alias_that_is_merged_many_times_is_refused_before_it_is_constructed(self, tmp_path: Path) -> None:
        """A merge key copies the pairs of a mapping, or of all mappings of a list."""
        lines = ["a: &a {" + ", ".join(f"k{n}: 1" for n in range(50)) + "}"]
        lines += [f"{y}: &{y}\n  <<: [{', '.join([f'*{x}'] * 9)}]" for x, y in zip("abcdefg", "bcdefgh", strict=True)]
        (tmp_path / "pod.yaml").write_text("\n".join(lines))
        with pytest.raises(UsageError, match="makes more than 10,000 values"):
            k8s.read_pod(tmp_path / "pod.yaml")

    @pytest.mark.parametrize("text", ["x" * (1 << 18), "[" * 20_000], ids=["long", "deep"])
    def test_a_part_of_a_pod_that_is_too_long_or_deep_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "pod.yaml").write_text(f"a: {text}")
        with pytest.raises(UsageError, match=r"--pod .*(more than 262,144 characters|nested too deep)"):
            k8s.read_pod(tmp_path / "pod.yaml")

    @pytest.mark.parametrize("text", ["- a", "kind: Pod", "spec: {}", "a: [", ""])
    def test_a_file_that_is_no_part_of_a_pod_is_refused(self, tmp_path: Path, text: str) -> None:
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
    def test_a_limit_is_read_as_slurm_reads_it(self, text: str, seconds: int) -> None:
        assert k8s.parse_time_limit(text) == seconds


def test_what_is_fetched_stays_inside_the_runs_folder(tmp_path: Path) -> None:
    """The pod's image is not ours: paths that lead out, and links, are left out."""
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
    """pod.sh as a pod runs it, with names that are known as soon as their file is there."""

    def __init__(self, folder: Path, program: str, words: tuple[str, ...] = (), index: int = 0, nodes: int = 1) -> None:
        (folder / "getent").write_text(f'#!/bin/sh\n[ -e "{folder}/known-$2" ]\n')
        (folder / "program").write_text(f"#!/bin/bash\n{program}\n")
        (folder / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 0.02\n")
        for name in ("getent", "program", "sleep"):
            (folder / name).chmod(0o755)
        spec = k8s.make_manifests(asked(nodes=nodes), on_kubernetes())[0]["spec"]["template"]["spec"]["containers"][0]
        env = {e["name"]: e.get("value", "10.1.2.3") for e in spec["env"]}
        env |= {"RUN_FOLDER": str(folder / "run"), "FETCHED": str(folder / "fetched"), "TOLD": str(folder)}
        env |= {"JOB_COMPLETION_INDEX": str(index), "PATH": f"{folder}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            [*spec["command"], str(folder / "program"), *words], env=env, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.lines: Iterator[str] = iter(self.process.stdout.readline, "")

    def code(self) -> int:
        """Its exit code, once it has ended."""
        with self.process:
            return self.process.wait()


TELL = 'printf "%s\\0" "$@" > "$TOLD/words"'


class TestPod:
    def test_node_0_listens_at_its_own_address_once_the_others_are_there(self, tmp_path: Path) -> None:
        pod = Pod(tmp_path, TELL, NASTY, nodes=2)
        assert next(pod.lines) == "waiting until the pod of node 1 runs\n"
        assert not (tmp_path / "words").exists()
        (tmp_path / "known-night-1.night").touch()
        assert next(pod.lines) == f"{k8s.ENDED} 0\n"
        (tmp_path / "fetched").touch()
        assert pod.code() == 0
        meets = ["--nodes", "2,rank=0,endpoint=10.1.2.3:29500"]
        assert (tmp_path / "words").read_text().split("\0")[:-1] == [*NASTY, *meets, "-o", str(tmp_path / "run")]

    def test_another_node_finds_node_0_by_its_name_and_ends_with_its_command(self, tmp_path: Path) -> None:
        (tmp_path / "known-night-0.night").touch()
        pod = Pod(tmp_path, f"{TELL}; exit 3", ("sweep",), index=1, nodes=2)
        assert pod.code() == 3
        meets = ["--nodes", "2,rank=1,endpoint=night-0.night:29500"]
        words = (tmp_path / "words").read_text().split("\0")[:-1]
        assert words == ["sweep", *meets, "-o", str(tmp_path / "run" / "nodes" / "1")]

    def test_the_pod_stays_until_its_run_was_fetched_and_ends_with_its_commands_code(self, tmp_path: Path) -> None:
        pod = Pod(tmp_path, "exit 4")
        assert next(pod.lines) == f"{k8s.ENDED} 4\n"
        assert pod.process.poll() is None
        (tmp_path / "fetched").touch()
        assert pod.code() == 4

    def test_a_signal_reaches_the_command_which_ends_in_its_own_time(self, tmp_path: Path) -> None:
        pod = Pod(tmp_path, "trap 'echo cleaning; exit 143' TERM; echo begun; while :; do sleep; done")
        assert next(pod.lines) == "begun\n"
        pod.process.send_signal(signal.SIGTERM)
        assert [next(pod.lines), next(pod.lines)] == ["cleaning\n", f"{k8s.ENDED} 143\n"]
        pod.process.send_signal(signal.SIGTERM)
        assert pod.code() == 143, "the second one ends the waiting for a fetch"


def test_options_are_taken_out_of_a_command_in_every_way_that_they_are_typed() -> None:
    words = ["--tp", "2", "-o", "a", "--output", "b", "--output=c", "-od", "--resume", "--force", "--kv-dtype", "fp8"]
    assert remove_options(words, ("-o", "--output"), ("--resume", "--force")) == ["--tp", "2", "--kv-dtype", "fp8"]
