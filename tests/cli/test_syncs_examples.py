"""Test the pipelines under examples/: they are valid by the published schemas, and their commands work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_syncs_diff import record

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRACE = ROOT / "tests" / "data" / "h200_stacks.trace.json.gz"
EMPTY = '{"baseline_version": 1, "detector": "scan", "sites": []}'
INSTALL = "pip install dcpbench"
RECORD = "python benchmark.py --profile-to traces"


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("vendor.github-workflows", "github-actions.yml"),
        ("vendor.github-workflows", "compare.yml"),
        ("vendor.github-workflows", "syncs-diff.yml"),
        ("vendor.gitlab-ci", "gitlab-ci.yml"),
    ],
)
def test_pipelines_are_valid_by_the_published_schemas(schema: str, file: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(EXAMPLES / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def load(file: str) -> dict[str, Any]:
    """Load a pipeline, in which YAML reads the key `on` as True."""
    return yaml.safe_load((EXAMPLES / file).read_text())


def github_commands(job: str, file: str = "github-actions.yml") -> list[str]:
    return [step["run"] for step in load(file)["jobs"][job]["steps"] if "run" in step]


def gitlab_commands(job: str) -> list[str]:
    found = load("gitlab-ci.yml")[job]
    return [*found.get("before_script", []), *found["script"]]


class Checkout:
    """Simulate a repository after its recording job: a trace, a baseline, and `dcpbench` on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repo"
        (self.folder / "traces").mkdir(parents=True)
        shutil.copy(TRACE, self.folder / "traces")
        self.baseline(EMPTY)
        program = folder / "bin" / "dcpbench"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dcpbench.cli "$@"\n')
        program.chmod(0o755)
        self.env = {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "CI": "true",
        }

    def baseline(self, text: str) -> None:
        (self.folder / "syncs-baseline.json").write_text(text)

    def run(self, script: str, shell: tuple[str, ...], **env: str) -> subprocess.CompletedProcess[str]:
        """Run one script as the CI system does."""
        return subprocess.run(
            [*shell, script], cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, check=False
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create the baseline with the command in the comment above both pipelines."""
    checkout = Checkout(tmp_path_factory.mktemp("baseline"))
    done = checkout.run("dcpbench syncs baseline traces -o syncs-baseline.json --force", ("bash", "-c"))
    assert done.returncode == 0, done.stderr
    return (checkout.folder / "syncs-baseline.json").read_text()


def github(checkout: Checkout) -> tuple[list[subprocess.CompletedProcess[str]], str]:
    """Return results of the job's steps, each in its own shell until one fails, and the step summary."""
    runner = checkout.folder.parent
    env = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(checkout.folder),
        "GITHUB_REPOSITORY": "owner/repo",
        "GITHUB_REF": "refs/pull/1/merge",
        "GITHUB_EVENT_NAME": "pull_request",
        "RUNNER_OS": "Linux",
        "RUNNER_TEMP": str(runner),
        "GITHUB_STEP_SUMMARY": str(runner / "summary.md"),
    }
    (runner / "summary.md").touch()
    install, *commands = github_commands("syncs")
    assert (install, github_commands("record")) == (INSTALL, [RECORD])
    done = []
    for command in commands:
        done.append(checkout.run(command, ("bash", "-e", "-c"), **env))
        if done[-1].returncode:
            break
    return done, (runner / "summary.md").read_text()


def gitlab(checkout: Checkout) -> subprocess.CompletedProcess[str]:
    """Return the result of the job, all lines of which run in one shell that exits with the first failure."""
    env = {
        "GITLAB_CI": "true",
        "CI_PROJECT_DIR": str(checkout.folder),
        "CI_JOB_NAME": "hidden-syncs",
        "CI_PIPELINE_SOURCE": "merge_request_event",
        "CI_COMMIT_SHA": "0" * 40,
    }
    install, *commands = gitlab_commands("hidden-syncs")
    assert (install, gitlab_commands("record-trace")) == (INSTALL, [RECORD])
    return checkout.run("\n".join(commands), ("bash", "-eo", "pipefail", "-c"), **env)


@pytest.mark.parametrize(("changed", "code"), [(False, 0), (True, 1)])
def test_comparison_is_posted_before_the_check_fails(checkout: Checkout, *, changed: bool, code: int) -> None:
    """The commands after the two recordings run with a `gh` that keeps the comment."""
    runner = checkout.folder.parent / "runner"
    for branch in ("base", "branch"):
        (runner / branch).mkdir(parents=True)
        shutil.copy(TRACE, runner / branch)
    if changed:
        (runner / "base" / TRACE.name).unlink()
        (runner / "base" / "clean.json").write_text(record().text())
    posted = runner / "posted.md"
    gh = checkout.folder.parent / "bin" / "gh"
    gh.write_text(f'#!/bin/sh\nfor word; do file="$word"; done\ncp "$file" "{posted}"\n')
    gh.chmod(0o755)
    base, branch, install, *commands = github_commands("compare", "syncs-diff.yml")
    assert (base, branch) == tuple(
        f'python benchmark.py --profile-to "$RUNNER_TEMP/{name}"' for name in ("base", "branch")
    )
    assert install == INSTALL
    env = {"NUMBER": "7", "RUNNER_TEMP": str(runner)}
    done = [checkout.run(command, ("bash", "-e", "-c"), **env) for command in commands]
    assert [one.returncode for one in done] == [0, 0, code], [one.stderr for one in done]
    assert ("new or worse site" in posted.read_text()) is changed


class TestGithub:
    def test_new_sites_fail_with_annotations_a_summary_and_sarif(self, checkout: Checkout) -> None:
        """Each site is an error here, at most ten are annotated, and the summary has a row for each."""
        (sarif, scan), summary = github(checkout)
        assert (sarif.returncode, scan.returncode) == (0, 1)
        results = json.loads((checkout.folder / "syncs.sarif").read_text())["runs"][0]["results"]
        errors = [line for line in scan.stdout.splitlines() if line.startswith("::error ")]
        assert len(errors) == min(10, sum(r["level"] == "error" for r in results)) > 0
        assert all(line.startswith("::") for line in scan.stdout.splitlines())
        assert "set_kv_all" in scan.stdout
        assert sum(line.startswith(("| ❌", "| ✅")) for line in summary.splitlines()) == len(
            [r for r in results if r["level"] == "error"]
        )

    def test_sites_of_the_baseline_pass(self, checkout: Checkout, baseline: str) -> None:
        checkout.baseline(baseline)
        done, summary = github(checkout)
        assert [d.returncode for d in done] == [0, 0]
        assert "::error" not in done[-1].stdout
        assert summary.startswith("## ✅")

    def test_unreadable_trace_fails_before_the_gate(self, checkout: Checkout) -> None:
        trace = checkout.folder / "traces" / TRACE.name
        trace.write_bytes(b"no trace")
        (first,), _ = github(checkout)
        assert first.returncode != 0
        assert "is not a Kineto trace" in first.stderr
        assert not (checkout.folder / "syncs.sarif").exists()


class TestGitlab:
    @pytest.mark.long
    def test_new_sites_fail_with_junit_sarif_and_markdown(self, checkout: Checkout) -> None:
        done = gitlab(checkout)
        assert done.returncode == 1, done.stderr
        job = load("gitlab-ci.yml")["hidden-syncs"]["artifacts"]
        for name in [*job["paths"], job["reports"]["junit"]]:
            assert (checkout.folder / name).stat().st_size > 0
        suites = ET.parse(checkout.folder / "syncs.junit.xml").getroot()  # noqa: S314 -- our own
        assert int(suites.get("failures")) > 0
        assert any("set_kv_all" in case.get("name") for case in suites.iter("testcase"))

    def test_sites_of_the_baseline_pass(self, checkout: Checkout, baseline: str) -> None:
        checkout.baseline(baseline)
        done = gitlab(checkout)
        assert done.returncode == 0, done.stderr
        suites = ET.parse(checkout.folder / "syncs.junit.xml").getroot()  # noqa: S314 -- our own
        assert (suites.get("failures"), suites.get("errors")) == ("0", "0")
        assert int(suites.get("tests")) > 1
