"""The dcpbench command with the fake worker and without the real report: what the CLI tests start as a process.

With DCPBENCH_QUICK in the environment jobs are those of quick_torchrun.py instead of torchrun.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench import cli
from dcpbench.commands import runs
from dcpbench.launch import torchrun

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent


def write_report(folders: list[Path], out: Path) -> list[Path]:
    """Stand-in of reports.write_report."""
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    page.write_text(" ".join(map(str, folders)))
    return [page, out / "points.csv"]


def terminal_table(folders: list[Path]) -> str:
    """Stand-in of reports.terminal_table."""
    return f"table of {len(folders)} run"


def quick(*job: object, command: Callable[..., list[str]] = torchrun._command) -> list[str]:
    """The command line of a job without torch."""
    return ["quick_torchrun" if word == "torch.distributed.run" else word for word in command(*job)]


if __name__ == "__main__":
    reports = types.ModuleType("dcpbench.reports")
    reports.__path__ = [str(Path(cli.__file__).parent / "reports")]  # its modules are the real ones
    reports.write_report, reports.terminal_table = write_report, terminal_table  # type: ignore[attr-defined]
    sys.modules["dcpbench.reports"] = reports
    runs.WORKER = "fake_worker"
    if os.environ.get("DCPBENCH_QUICK"):
        torchrun._command = quick
    cli.main()
