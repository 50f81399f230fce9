"""Test that failed points are counted over all commands on a folder, and set aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.commands import point_runner
from dcpbench.launch import retry
from dcpbench.points.point import Point
from dcpbench.records.file import RecordFile
from dcpbench.records.record import Record

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

POINTS = [Point(model="tiny", tp=1, concurrency=c, context=8, backend="reference", dtype="fp32") for c in (1, 2, 3)]


def fail(folder: Path, point: Point, **detail: str) -> None:
    """Add the record of a failed attempt."""
    RecordFile(folder).append(Record(point=point, outcome="failed", reason="it broke", detail=detail))


def test_only_failures_worth_a_retry_are_counted(tmp_path: Path) -> None:
    """Leave out an interrupt, which has no stage, and dcpbench's own errors, which name the fix instead."""
    assert not retry.count_failures(tmp_path)
    fail(tmp_path, POINTS[0], stage="measure", error="RuntimeError")
    fail(tmp_path, POINTS[0], stage="measure")
    fail(tmp_path, POINTS[1], stage="build", error="CapacityError")
    fail(tmp_path, POINTS[1])
    assert retry.count_failures(tmp_path) == {POINTS[0].get_key(): 2}


def test_point_that_failed_twice_is_set_aside_with_the_retry_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        fail(tmp_path, POINTS[0], stage="measure")
    fail(tmp_path, POINTS[1], stage="measure")
    assert point_runner._drop_set_aside(POINTS, tmp_path, retries=0) == POINTS[1:]
    assert capsys.readouterr().err == (
        "1 point that failed 2 times is set aside: the records say why. To try it again, add --timeout retries=2.\n"
    )
    assert point_runner._drop_set_aside(POINTS, tmp_path, retries=2) == POINTS
