"""Test the table of faults (table.py): the run survives each, its cause is named, and --resume completes the run."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench.launch import launcher
from dcpbench.records.file import read_records
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.repair import repair_file
from tests.cli.job_processes import MARK_VARIABLE, find_processes, wait_until
from tests.faults.table import CASES, DAMAGES, MEASURE, SOME_FAILED, Case

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent
CLI, ROOT = HERE.parent / "cli", Path(launcher.__file__).parents[2]
CONTEXTS = (301, 302, 303)
SWEEP = ("sweep", "--tp", "2", "--context", "301,302,303", "--concurrency", "2", "--no-baseline", "-o", "run")


def run_sweep(folder: Path, *words: str, fault: str = "never:0::") -> tuple[int, str]:
    """Run the command, wait until none of its processes is left, and return its exit code and stderr."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, CLI, ROOT))),
        "DCPBENCH_FAULT": fault,
        MARK_VARIABLE: str(folder),
    }
    command = [sys.executable, str(HERE / "command.py"), *SWEEP, *words]
    with (folder / "stderr.txt").open("wb+") as stderr:
        code = subprocess.call(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
        stderr.seek(0)
        text = stderr.read().decode()
    wait_until(lambda: not find_processes(str(folder)), "no process is left")
    return code, text


def list_good_contexts(run: Path) -> list[int]:
    """Return the contexts of measured points in order, once for each good record."""
    return sorted(record.point.context for record in read_records(run) if record.outcome == "ok")


def list_params() -> list[object]:
    """Return all cases: the short ones of the moment MEASURE for `make test`, the other short ones as long tests, and the rest for `make soak`."""
    found = []
    for case in CASES:
        mark = () if case.short and case.moment == MEASURE else pytest.mark.long if case.short else pytest.mark.soak
        found.append(pytest.param(case, id=case.name, marks=mark))
    return found


@pytest.mark.parametrize("case", list_params())
def test_run_survives_a_fault_and_names_its_cause(case: Case, tmp_path: Path) -> None:
    code, stderr = run_sweep(tmp_path, fault=f"{case.moment}:{case.rank}:{case.whom}:{case.what}")
    run = tmp_path / "run"
    if (tmp_path / "moved").exists():
        assert "was removed or moved" in stderr
        (tmp_path / "moved").rename(run)
    assert (run / "fault-done").exists(), "the fault has happened"
    assert code in case.ends, stderr
    if code == SOME_FAILED:
        (failed,) = (record for record in read_records(run) if record.outcome != "ok")
        assert failed.point.context == 302
        assert re.search(case.reason, str(failed.reason)), failed.reason
    again, again_stderr = run_sweep(tmp_path, "--resume")
    assert again == 0, again_stderr
    assert list_good_contexts(run) == list(CONTEXTS)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.soak
def test_damaged_records_are_repaired_and_measured_again(damage: str, tmp_path: Path) -> None:
    """Damage the second of three records; after the repair the same command measures only the missing points."""
    assert run_sweep(tmp_path)[0] == 0
    path = tmp_path / "run" / RECORDS_FILE
    one, two, three = path.read_bytes().splitlines(keepends=True)
    middle = len(two) // 2
    path.write_bytes(
        {
            "flipped": one + two[:middle] + bytes([two[middle] ^ 4]) + two[middle + 1 :] + three,
            "cut": one + two + three[:middle],
            "nuls": one + bytes(len(two)) + three,
            "joined": one + two.rstrip() + three,
            "removed": one + three,
            "garbage": one + b"{garbage\n" + three,
        }[damage]
    )
    repair_file(tmp_path / "run")
    kept = collections.Counter(list_good_contexts(tmp_path / "run"))
    assert max(kept.values()) == 1
    code, stderr = run_sweep(tmp_path, "--resume")
    assert code == 0, stderr
    assert list_good_contexts(tmp_path / "run") == list(CONTEXTS)


def test_table_has_at_least_sixty_distinct_cases() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert len(names) + len(DAMAGES) >= 60
