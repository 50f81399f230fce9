"""Run commands in this process, which has imported its packages, with the fake worker in separate jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench import cli
from tests.cli import dcpbench_fake

HERE = Path(__file__).parent
ENV = os.environ | {  # environment in which dcpbench_fake.py runs as a process with quick jobs
    "PYTHONPATH": f"{HERE}:{Path(cli.__file__).parents[1]}",
    "COLUMNS": "140",
    "DCPBENCH_QUICK": "1",
}


class Typed:
    """Run commands in a folder, one after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        dcpbench_fake.install(monkeypatch.setattr, quickly=True)
        monkeypatch.chdir(folder)
        for name in ("PYTHONPATH", "COLUMNS"):
            monkeypatch.setenv(name, ENV[name])
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Return exit code, stdout and stderr of a command."""
        self._monkeypatch.setattr(sys, "argv", ["dcpbench", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = self._capsys.readouterr()
        return subprocess.CompletedProcess(words, int(end.value.code or 0), out, err)
