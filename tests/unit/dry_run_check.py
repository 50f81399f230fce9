"""Run `dcpbench syncs dry-run` on the source of a program."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from dcpbench.commands.syncs import app


def check(tmp_path: Path, source: str, *command: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and report of a dry run of the source, by default with `python program.py`."""
    program, out = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text(source)
    words = command or ("python", str(program))
    options = ["dry-run", "--root", str(tmp_path), "--format", "json", "-o", str(out), "--force", "--", *words]
    result = CliRunner().invoke(app, options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(out.read_text())
