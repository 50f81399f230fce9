"""What a report opens with: its title, the sentence that answers, and the ratios of its first chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.records.formulas import decode_metrics
from dcpbench.reports import frames, overview
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

TP, DCP = Layout(4), Layout(4, 1, 4)


def read(folder: Path, *records: Record) -> frames.Frames:
    return frames.load([build.write(folder / "run", list(records))])


def steps(layout: Layout, concurrency: int, ms: float) -> Record:
    of = build.point(layout, concurrency=concurrency)
    return msgspec.structs.replace(build.ok(of, steps=1), metrics=decode_metrics([ms], concurrency, of.tp))


@pytest.fixture
def crossing(tmp_path: Path) -> frames.Frames:
    """tp4 gives 8 / 40 ms = 200 tok/s over 160; at 32, tp4·dcp4 gives 800 over 640."""
    return read(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 50), steps(TP, 32, 50), steps(DCP, 32, 40))


def test_each_layout_is_set_against_the_best_other_one(crossing: frames.Frames) -> None:
    """200 / 160 is 1.25, and 160 / 200 is 0.8."""
    rows = overview.against_others(crossing)
    assert rows["who"].tolist() == ["tp4", "tp4·dcp4"] * 2
    assert rows["ratio"].tolist() == pytest.approx([1.25, 0.8, 0.8, 1.25])


def test_the_sentence_says_which_layout_to_take_and_from_which_load_on(crossing: frames.Frames) -> None:
    said = overview.sentence(crossing)
    assert "take tp4, and tp4·dcp4 from 32 requests of 4,000 tokens in flight on" in said
    assert "in 2 of 2 loads, up to 25 % ahead" in said


def test_layouts_that_are_level_are_both_named(tmp_path: Path) -> None:
    found = read(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 40))
    assert "take tp4 or tp4·dcp4: best or level in 1 of 1 load" in overview.sentence(found)


def test_one_layout_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    found = read(tmp_path, steps(TP, 8, 40))
    assert overview.against_others(found).empty
    assert overview.sentence(found).startswith("No load was run with two layouts (tp4)")


def test_the_title_names_model_layouts_and_hardware(crossing: frames.Frames) -> None:
    title = overview.title(crossing)
    assert "tp4, tp4·dcp4 · 4 ×" in title
