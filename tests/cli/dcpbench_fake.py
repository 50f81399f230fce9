"""The dcpbench command with the fake worker and without the real report: what the CLI tests start as a process."""

from __future__ import annotations

import sys
import types
from pathlib import Path

from dcpbench import cli
from dcpbench.commands import runs

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


if __name__ == "__main__":
    reports = types.ModuleType("dcpbench.reports")
    reports.__path__ = [str(Path(cli.__file__).parent / "reports")]  # its modules are the real ones
    reports.write_report, reports.terminal_table = write_report, terminal_table  # type: ignore[attr-defined]
    sys.modules["dcpbench.reports"] = reports
    runs.WORKER = "fake_worker"
    cli.main()
