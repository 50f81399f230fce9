"""Test that variables of the user's shell change no test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import environment

ROOT = Path(__file__).parents[2]
HOSTILE = {
    "COLUMNS": "40",
    "CUDA_LAUNCH_BLOCKING": "1",
    "FORCE_COLOR": "1",
    "GITHUB_ACTIONS": "true",
    "GITHUB_STEP_SUMMARY": "/nowhere/summary.md",
    "GIT_DIR": "/nowhere",
    "LANG": "tr_TR.UTF-8",
    "LC_ALL": "tr_TR.UTF-8",
    "MPLBACKEND": "TkAgg",
    "NCCL_DEBUG": "INFO",
    "NO_COLOR": "1",
    "OPENAI_API_KEY": "sk-of-the-user",
    "PYTHONWARNINGS": "ignore",
    "RANK": "3",
    "SLURM_RESTART_COUNT": "2",
    "TERM": "dumb",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TZ": "Asia/Tokyo",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}


def test_only_listed_variables_are_kept() -> None:
    kept = {
        "PATH": "/bin",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "1",
        "LD_LIBRARY_PATH": "/lib",
        "PYTEST_XDIST_WORKER": "gw0",
    }
    found = kept | HOSTILE
    environment.prepare(found)
    assert found == kept | environment.SET


def test_test_runs_without_the_variables_of_the_shell(tmp_path: Path) -> None:
    """The suite's conftest is loaded before the test file, in a new process with all variables."""
    test = tmp_path / "test_environment.py"
    test.write_text("import os, time\n\ndef test_names():\n    print('NAMES', time.tzname[0], *sorted(os.environ))\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    done = subprocess.run(
        [*command, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), str(test)],
        cwd=ROOT,
        env=os.environ | HOSTILE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("NAMES"))
    _, zone, *names = line.split()
    assert zone == "UTC"
    assert not (HOSTILE.keys() - environment.SET.keys()) & set(names)
