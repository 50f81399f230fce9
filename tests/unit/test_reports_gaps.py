"""Report of layouts with different gaps between kernels."""

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
    """Return a step with this number of kernels and idle time between them."""
    record = build.make_ok_record(build.make_point(layout, **changes), median_ms=ms, noise=1e-5)
    assert record.phases is not None
    return msgspec.structs.replace(
        record, phases=msgspec.structs.replace(record.phases, idle_us=idle_us, kernels=kernels)
    )


def loaded(folder: Path, *records: Record) -> dataframes.Frames:
    """Return frames of a run with these records."""
    build.write_records(folder, records)
    return dataframes.load_frames([folder])


def test_load_with_the_largest_difference_of_gaps_is_named(tmp_path: Path) -> None:
    """Gaps are 0.07 and 0.37 µs: 600 µs are 3 % of 20 ms with 8 requests, and 1.5 % of 40 ms with 32."""
    found = loaded(
        tmp_path,
        step(TP4, 20.0, 140.0),
        step(DCP4, 22.0, 740.0),
        step(TP4, 40.0, 140.0, concurrency=32),
        step(DCP4, 44.0, 740.0, concurrency=32),
    )
    sentence = kernel_gaps.describe_unequal_gaps(found.findings.points)
    assert "0.07 µs with tp4 and 0.37 with tp4·dcp4 at 8 requests of 4,000 tokens: 3 % of a step" in sentence
    assert sentence in overview.format_bullets(found)[-1]
    assert sentence in answer.describe_trust(found, [])


@pytest.mark.parametrize(
    ("idle_us", "kernels"),
    [
        pytest.param(330.0, 2000, id="less than 1 % of a step"),
        pytest.param(5000.0, 2000, id="the GPU waits for something else"),
        pytest.param(740.0, 0, id="a profiled pass without kernels"),
        pytest.param(740.0, 10571, id="more kernels, with equal gaps"),
    ],
)
def test_small_or_unrelated_differences_of_gaps_are_not_named(tmp_path: Path, idle_us: float, kernels: int) -> None:
    """Both steps take 20 ms; one has gaps of 0.07 µs."""
    found = loaded(tmp_path, step(TP4, 20.0, 140.0), step(DCP4, 20.0, idle_us, kernels))
    assert kernel_gaps.describe_unequal_gaps(found.findings.points) == ""


def test_sentence_names_two_exchanges_of_a_layout(tmp_path: Path) -> None:
    found = loaded(tmp_path, step(DCP4, 20.0, 140.0), step(DCP4, 20.0, 740.0, exchange="symm"))
    assert "0.07 µs with tp4·dcp4 (ag_rs) and 0.37 with tp4·dcp4 (symm)" in kernel_gaps.describe_unequal_gaps(
        found.findings.points
    )


def test_gaps_of_layouts_under_different_loads_are_not_compared(tmp_path: Path) -> None:
    found = loaded(tmp_path, step(TP4, 20.0, 140.0), step(DCP4, 22.0, 740.0, concurrency=32))
    assert kernel_gaps.describe_unequal_gaps(found.findings.points) == ""
