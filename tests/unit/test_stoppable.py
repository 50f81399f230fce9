"""Test the output of a command that is stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcpbench.commands import point_runner
from dcpbench.commands.options import Run
from dcpbench.launch import launcher
from dcpbench.points.settings import Settings
from tests.unit import record_builder

if TYPE_CHECKING:
    from pathlib import Path


def stop(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    options = launcher.JobOptions(folder=folder, settings=Settings(), device="cpu", hardware="CPU", worker="w")
    with pytest.raises(SystemExit) as e, point_runner.handle_stop(Run(), options):
        raise KeyboardInterrupt
    assert e.value.code == 130
    return capsys.readouterr().err


def test_interrupt_message_has_the_report_command_if_there_are_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "dcpbench report" not in stop(tmp_path, capsys)
    (tmp_path / "records.jsonl").touch()
    assert "dcpbench report" not in stop(tmp_path, capsys)
    record_builder.write_records(tmp_path, [record_builder.make_ok_record(record_builder.make_point())])
    message = stop(tmp_path, capsys)
    assert f"To go on, repeat the command with: -o {tmp_path} --resume\n" in message
    assert f"For a report of what was measured: dcpbench report {tmp_path}\n" in message
