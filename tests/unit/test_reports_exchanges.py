"""Comparison of exchanges, and the appearance of points of one layout in figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.reports import dataframes, exchanges, findings
from dcpbench.reports.figures import draw_itl, draw_phases
from dcpbench.reports.style import Style
from dcpbench.show.figure_style import MARKERS
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

DCP = Layout(4, 1, 4)
PLAIN, A2A, SYMM = (build.make_point(DCP, exchange=name) for name in ("ag_rs", "a2a", "symm"))


def exact(point: Point, *steps: float) -> Record:
    """Return a record with exactly these step times."""
    return msgspec.structs.replace(
        build.make_ok_record(point, steps=1), metrics=compute_decode_metrics(list(steps), point.concurrency, point.tp)
    )


def loaded(tmp_path: Path, *records: Record) -> dataframes.Frames:
    """Return frames of records that were written and read again."""
    return dataframes.load_frames([build.write_records(tmp_path / "run", records)])


def test_each_exchange_is_compared_with_ag_rs_of_the_same_point(tmp_path: Path) -> None:
    """ag_rs takes 10 ms, symm 9, a2a with replicated q 10, and ag_rs with projection first 12."""
    replicated = build.make_point(DCP, exchange="a2a", q_replicate=True)
    projected = build.make_point(DCP, exchange="ag_rs", project_first=True)
    read = loaded(tmp_path, exact(PLAIN, 10), exact(SYMM, 9), exact(replicated, 10), exact(projected, 12))
    found = exchanges.compare_exchanges(findings.select_timed(read.points)).set_index("with")
    assert dict(found["ratio"]) == pytest.approx({"symm": 0.9, "a2a +q-replicate": 1.0, "ag_rs +project-first": 1.2})
    assert dict(found["verdict"]) == {
        "symm": "shorter",
        "a2a +q-replicate": "no clear difference",
        "ag_rs +project-first": "longer",
    }
    [sentence] = exchanges.describe_ratios(found.reset_index(), read)
    assert "ITL over that with ag_rs, everything else being the same" in sentence
    assert all(part in sentence for part in ("symm 0.900", "a2a +q-replicate 1.000", "ag_rs +project-first 1.200"))
    assert len(exchanges.build_table(found.reset_index()).rows) == 3


def test_points_that_differ_in_more_than_the_exchange_are_not_compared(tmp_path: Path) -> None:
    """Backend, all-reduce or context differ; nothing is compared either if ag_rs did not run."""
    others = [
        build.make_point(DCP, exchange="symm", **change)
        for change in ({"backend": "triton"}, {"all_reduce": "symm"}, {"context": 5})
    ]
    read = loaded(tmp_path, exact(PLAIN, 10), *(exact(point, 9) for point in others))
    assert exchanges.compare_exchanges(findings.select_timed(read.points)).empty
    alone = loaded(tmp_path / "alone", exact(SYMM, 9), exact(A2A, 9))
    found = exchanges.compare_exchanges(findings.select_timed(alone.points))
    assert found.empty
    assert exchanges.describe_ratios(found, alone) == []
    assert exchanges.build_table(found).rows == []


def test_sentence_of_several_loads_has_the_range_of_ratios(tmp_path: Path) -> None:
    """The ratio is 0.9 at one context and 0.95 at the other."""
    longer = [msgspec.structs.replace(p, context=64000) for p in (PLAIN, SYMM)]
    read = loaded(tmp_path, exact(PLAIN, 10), exact(SYMM, 9), exact(longer[0], 20), exact(longer[1], 19))
    [sentence] = exchanges.describe_ratios(exchanges.compare_exchanges(findings.select_timed(read.points)), read)
    assert sentence.endswith("symm 0.900 to 0.950.")


def test_variants_of_one_layout_have_different_markers(tmp_path: Path) -> None:
    """Otherwise points at one concurrency, which have no line, would look the same."""
    read = loaded(tmp_path, exact(PLAIN, 10), exact(A2A, 9), exact(SYMM, 8))
    style = Style.from_points(read.points)
    figure = draw_itl(read.points, style, "title")
    lines = [line for line in figure.axes[0].get_lines() if line.get_marker() in MARKERS]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 3
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:3] == ["tp4·dcp4 a2a", "tp4·dcp4 ag_rs", "tp4·dcp4 symm"]


def test_variants_of_one_layout_have_the_same_colour(tmp_path: Path) -> None:
    """Other layouts have other colours."""
    read = loaded(tmp_path, exact(build.make_point(Layout(4)), 9), exact(PLAIN, 10), exact(SYMM, 8))
    style = Style.from_points(read.points)
    colours = [style.get_look(*line, style.runs[0])["color"] for line in style.lines]
    assert style.lines == [("tp4", ""), ("tp4·dcp4", "ag_rs"), ("tp4·dcp4", "symm")]
    assert colours[1] == colours[2] != colours[0]


def test_long_labels_of_bars_have_two_lines(tmp_path: Path) -> None:
    """Labels of two bars may differ only at their end."""
    points = [
        build.make_point(DCP, exchange=name, backend=backend, all_reduce=reduce)
        for name, backend, reduce in (("a2a", "flashinfer", "nccl"), ("symm", "triton", "symm"))
    ]
    read = loaded(tmp_path, *(exact(point, 9) for point in points))
    figure = draw_phases(read.points, Style.from_points(read.points), "title")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert any(label.replace("\n", " ").endswith("symm all-reduce)") for label in labels)
    assert all(len(line) <= 30 for label in labels for line in label.splitlines())
