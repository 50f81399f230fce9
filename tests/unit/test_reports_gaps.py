"""What a report says of layouts whose kernels follow each other after unequal gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.reports import answer, dataframes, kernel_gaps, overview
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

TP4, DCP4 = Layout(4), Layout(4, 1, 4)


def step(layout: Layout, ms: float, idle_us: float, kernels: int = 2000, **changes: object) -> Record:
    """A step of so many kernels with so much idle time between them."""
    record = build.ok(build.point(layout, **changes), median_ms=ms, noise=1e-5)
    assert record.phases is not None
    return msgspec.structs.replace(
        record, phases=msgspec.structs.replace(record.phases, idle_us=idle_us, kernels=kernels)
    )


def loaded(folder: Path, *records: Record) -> dataframes.Frames:
    """Frames of a run of these."""
    build.write(folder, records)
    return dataframes.load_frames([folder])


def test_the_load_where_gaps_set_layouts_apart_most_is_named(tmp_path: Path) -> None:
    """0.07 and 0.37 µs: 600 µs are 3 % of 20 ms at 8 requests, and 1.5 % of 40 ms at 32."""
    found = loaded(
        tmp_path,
        step(TP4, 20.0, 140.0),
        step(DCP4, 22.0, 740.0),
        step(TP4, 40.0, 140.0, concurrency=32),
        step(DCP4, 44.0, 740.0, concurrency=32),
    )
    said = kernel_gaps.describe_unequal_gaps(found.findings.points)
    assert "0.07 µs with tp4 and 0.37 with tp4·dcp4 at 8 requests of 4,000 tokens: 3 % of a step" in said
    assert said in overview.format_bullets(found)[-1]
    assert said in answer.describe_trust(found, [])


@pytest.mark.parametrize(
    ("idle_us", "kernels"),
    [
        pytest.param(330.0, 2000, id="less than 1 % of a step"),
        pytest.param(5000.0, 2000, id="the GPU waits for something else"),
        pytest.param(740.0, 0, id="a profiled pass that saw no kernel"),
        pytest.param(740.0, 10571, id="more kernels, with equal gaps"),
    ],
)
def test_what_is_no_such_difference_is_not_spoken_of(tmp_path: Path, idle_us: float, kernels: int) -> None:
    """Two steps take 20 ms, the other with gaps of 0.07 µs."""
    found = loaded(tmp_path, step(TP4, 20.0, 140.0), step(DCP4, 20.0, idle_us, kernels))
    assert kernel_gaps.describe_unequal_gaps(found.findings.points) == ""


def test_two_exchanges_of_a_layout_are_told_apart(tmp_path: Path) -> None:
    """They were measured one behind the other, too."""
    found = loaded(tmp_path, step(DCP4, 20.0, 140.0), step(DCP4, 20.0, 740.0, exchange="symm"))
    assert "0.07 µs with tp4·dcp4 (ag_rs) and 0.37 with tp4·dcp4 (symm)" in kernel_gaps.describe_unequal_gaps(
        found.findings.points
    )


def test_layouts_under_different_loads_are_not_set_against_each_other(tmp_path: Path) -> None:
    """They are not compared."""
    found = loaded(tmp_path, step(TP4, 20.0, 140.0), step(DCP4, 22.0, 740.0, concurrency=32))
    assert kernel_gaps.describe_unequal_gaps(found.findings.points) == ""
