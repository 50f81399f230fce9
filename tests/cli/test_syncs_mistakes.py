"""Test `dcpbench syncs` with wrong files, missing folders, full disks and hostile names."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench import cli
from tests.unit.trace_builder import Trace

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with one trace without steps and with one range."""
    trace = Trace()
    trace.range("decode", 0, 90)
    trace.range("sample", 91, 99)
    trace.gpu("kernel", 10, 20, trace.call("cudaLaunchKernel", 1, 2))
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": trace.events}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_syncs(*args: str) -> int:
    """Return the exit code of `dcpbench syncs ARGS`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["syncs", *args])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("text", ["{}", '{"traces": [], "sites": []}', '{"$schema": "sarif", "runs": []}'])
def test_report_is_refused_as_a_baseline(here: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """With a report as the baseline all of its sites would pass, or none."""
    (here / "report.json").write_text(text)
    assert run_syncs("scan", "t.json", "--baseline", "report.json") == 2
    assert "dcpbench syncs baseline TRACE -o FILE" in capsys.readouterr().err


def test_control_characters_of_file_names_are_escaped_in_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_syncs("scan", "gone\x1b]0;.json") == 2
    err = capsys.readouterr().err
    assert "gone\\x1b]0;.json" in err
    assert "\x1b" not in err


def test_error_without_steps_lists_ranges_that_could_mark_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_syncs("scan", str(here / "t.json"), "--format", "json") == 0
    (trace,) = json.loads(capsys.readouterr().out)["traces"]
    assert any("Ranges in this trace: 'decode' (1), 'sample' (1)." in note for note in trace["coverage"]["notes"])


def test_trace_given_twice_is_counted_once_and_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy and a compressed copy of the trace have one wait in all."""
    trace = Trace().work()
    trace.call("cudaStreamSynchronize", 0, 50)
    for name, pack in (("a.json", bytes), ("b.json", bytes), ("a.json.gz", gzip.compress)):
        (here / name).write_bytes(pack(trace.text().encode()))
    assert run_syncs("scan", "a.json", "b.json", "a.json.gz", "--format", "json") == 1
    out = capsys.readouterr()
    assert json.loads(out.out)["totals"]["syncs"] == 1
    for name in ("b.json", "a.json.gz"):
        assert f"note: {name} holds the same trace as a.json and is counted once." in out.err


def test_missing_working_directory_is_one_error_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "gone").mkdir()
    os.chdir(here / "gone")
    (here / "gone").rmdir()
    assert run_syncs("scan", str(here / "t.json")) == 2
    assert "change to another one with cd" in capsys.readouterr().err


def test_full_disk_on_stdout_exits_with_an_error_without_traceback(here: Path) -> None:
    code = "from dcpbench.cli import main; main(['syncs', 'scan', 't.json'])"
    with open("/dev/full", "w") as full:  # noqa: PTH123 -- a device
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 3
    assert done.stderr.startswith("error: stdout: no space is left on its disk. Make room")
    assert "Traceback" not in done.stderr
