"""Commands whose output nobody takes: stdout closed by the shell, or on a full disk."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("redirected", "code"), [(">&-", 0), (">/dev/full", 2)])
@pytest.mark.parametrize("command", ["show RUN", "show RUN --json", "top RUN --once"])
def test_a_command_whose_output_cannot_be_taken_ends_without_a_traceback(
    tmp_path: Path, command: str, redirected: str, code: int
) -> None:
    build.write(tmp_path / "RUN", [build.ok(build.point())])
    line = f"{sys.executable} -m dcpbench.cli {command} {redirected}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
