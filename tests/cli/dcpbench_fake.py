"""Run the dcpbench command as a process with the fake worker and without the real report.

With DCPBENCH_QUICK in the environment jobs are those of quick_torchrun.py instead of torchrun.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench import cli, reports
from dcpbench.commands import point_runner
from dcpbench.launch import torchrun

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent


def write_report(folders: list[Path], out: Path, *, watch: Callable[[str], None]) -> list[Path]:  # noqa: ARG001 - a keyword of the real one
    """Replace reports.write_report."""
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    page.write_text(" ".join(map(str, folders)))
    return [page, out / "points.csv"]


def render_terminal_table(folders: list[Path]) -> str:
    """Replace reports.render_terminal_table."""
    return f"table of {len(folders)} run"


def make_quick_command(*job: object, command: Callable[..., list[str]] = torchrun._make_command) -> list[str]:
    """Return the command line of a job without torch."""
    return ["quick_torchrun" if word == "torch.distributed.run" else word for word in command(*job)]


def install(put: Callable[[object, str, object], None], *, quickly: bool) -> None:
    """Install all replacements with `put`, which has the signature of setattr."""
    put(reports, "write_report", write_report)
    put(reports, "render_terminal_table", render_terminal_table)
    put(point_runner, "WORKER", "fake_worker")
    if quickly:
        put(torchrun, "_make_command", make_quick_command)


if __name__ == "__main__":
    install(setattr, quickly=bool(os.environ.get("DCPBENCH_QUICK")))
    cli.main()
