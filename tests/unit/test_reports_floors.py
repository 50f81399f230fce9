"""Distance of steps from the hardware limit: sentences, table, figures and page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.records.metrics import METRIC
from dcpbench.records.record import Floor, Phases, Rates, Record
from dcpbench.reports import (
    dataframes,
    explain,
    figures,
    floors,
    overview,
    points_export,
    render_terminal_table,
    sections,
)
from dcpbench.reports.page.points import build_page_data
from dcpbench.reports.style import Style
from tests.unit import record_builder as build
from tests.unit import serve_record_builder

if TYPE_CHECKING:
    from pathlib import Path

PHASES = Phases(
    step_us=100_000,
    phase_us={"attention": 30_000, "moe": 60_000, "mlp_reduce": 4_000, "norm": 500, "lm_head": 500, "other": 1_000},
    idle_us=4_000,
    idle_fraction=0.04,
    kernels=1000,
    steps=3,
)
RATES = Rates(read_bytes_s=4.6e12, copy_bytes_s=4.3e12, matmul_flop_s=790e12)


def floored(floor_ms: float = 62.5, layout: Layout = Layout(4), **phase_us: float) -> Record:  # noqa: B008 - frozen
    """Return a record with steps of 100 ms, and these floors of phases."""
    floor = Floor(floor_ms=floor_ms, phase_floor_us=phase_us, experts="routed")
    return build.make_ok_record(
        build.make_point(layout), median_ms=100.0, noise=0.0, steps=30, phases=PHASES, rates=RATES, floor=floor
    )


NEAR = floored(80.0, Layout(4, 1, 4), attention=27_000.0, moe=51_000.0, mlp_reduce=2_000.0)
FAR = floored(attention=18_000.0, moe=42_000.0, mlp_reduce=2_000.0, norm=500.0)
"""Losses are moe 18 ms of 60, attention 12 of 30, idle all 4, mlp_reduce 2 of 4 and other all of 1. lm_head loses 0.5 of
0.5 ms, less than 1 % of the step, and norm loses nothing."""


def read(tmp_path: Path, *records: Record) -> dataframes.Frames:
    """Return frames of one run with these records."""
    return dataframes.load_frames([build.write_records(tmp_path / "run", records)])


def test_losses_are_sorted_and_small_ones_are_left_out(tmp_path):
    row = read(tmp_path, FAR).points.to_dict("records")[0]
    assert [(loss.phase, loss.lost_us) for loss in floors.list_named_losses(row, 9)] == [
        ("moe", pytest.approx(18_000)),
        ("attention", pytest.approx(12_000)),
        ("idle", pytest.approx(4_000)),
        ("mlp_reduce", pytest.approx(2_000)),
        ("other", pytest.approx(1_000)),
    ]


def test_sentence_of_one_point_has_its_ratio_and_largest_losses(tmp_path):
    """100 ms / 62.5 ms is 1.60."""
    assert floors.format_decode_sentences(read(tmp_path, FAR).points) == [
        (
            "kimi-k2: a step takes 1.60× what this machine allows (tp4 at concurrency 8 · context 4,000: 100 ms, minimum "
            "62.5). Time above the limit: moe 18.0 ms, attention 12.0 ms, idle 4.00 ms."
        )
    ]


def test_sentence_of_several_points_has_their_range_and_the_furthest(tmp_path):
    """tp4·dcp4 has a ratio of 1.25."""
    (sentence,) = floors.format_decode_sentences(read(tmp_path, FAR, NEAR).points)
    assert sentence.startswith(
        "kimi-k2: a step takes 1.25× to 1.60× what this machine allows; the worst point is tp4 at concurrency 8"
    )


def test_one_bullet_of_the_opening_names_the_ratio(tmp_path):
    """The bullet describes one point or the furthest of several, and is absent without any."""
    one = read(tmp_path / "one", FAR)
    text = "A step takes 1.60× the minimum time that the hardware allows. Most of the time above this minimum is in moe (18.0 ms) and attention (12.0 ms)."
    assert text in overview.format_bullets(one)
    both = read(tmp_path / "both", FAR, NEAR)
    [bullet] = [bullet for bullet in overview.format_bullets(both) if "hardware allows" in bullet]
    assert bullet == text.replace("1.60×", "1.25–1.60×").replace(
        "Most", "At the worst point, tp4 with 8 × 4,000 tokens, most"
    )
    assert len(overview.format_bullets(both)) <= overview.MAX_BULLETS
    other = build.msgspec.structs.replace(NEAR, point=build.msgspec.structs.replace(NEAR.point, model="deepseek-v3"))
    bullets = overview.format_bullets(read(tmp_path / "models", FAR, other))
    assert any("At the worst point, Kimi-K2, tp4 with 8 × 4,000 tokens" in bullet for bullet in bullets)
    none = read(tmp_path / "none", build.make_ok_record(build.make_point()))
    assert not any("hardware allows" in bullet for bullet in overview.format_bullets(none))


def test_table_has_every_point_with_a_floor(tmp_path):
    table = floors.build_table(read(tmp_path, FAR, NEAR, build.make_ok_record(build.make_point(concurrency=16))).points)
    assert [row[3] for row in table.rows] == ["tp4", "tp4·dcp4"]
    assert [row[4] for row in table.rows] == [
        "moe 18.0, attention 12.0, idle 4.00, mlp reduce 2.00, other 1.00",
        "moe 9.00, idle 4.00, attention 3.00, mlp reduce 2.00, other 1.00",
    ]
    assert [row[5:] for row in table.rows] == [["100.0", "62.50", "1.60×"], ["100.0", "80.00", "1.25×"]]


def test_show_and_report_have_the_sentence_and_a_definition(tmp_path):
    found = read(tmp_path, FAR)
    time = next(s for s in sections.build_sections(found, []) if s.slug == "time")
    assert time.paragraphs[0] == floors.format_decode_sentences(found.points)[0]
    assert floors.TITLE in [table.title for table in time.tables]
    assert "floor" in [row[0] for row in time.tables[-1].rows]
    table = render_terminal_table([tmp_path / "run"])
    assert any("1.60×" in str(part) for part in table.renderables)
    assert floors.format_decode_sentences(found.points)[0] in points_export.build_json(found)["findings"]


def test_report_without_floors_does_not_mention_them(tmp_path):
    """Older records have no floors."""
    found = read(tmp_path, build.make_ok_record(build.make_point()))
    assert floors.format_decode_sentences(found.points) == []
    assert floors.build_table(found.points).rows == []
    assert "floor" not in [row[0] for row in explain.build_definitions(found).rows]
    assert not any(str(column).startswith("floor_mo") for column in found.points)


def test_floor_of_0_is_ignored(tmp_path):
    assert floors.format_decode_sentences(read(tmp_path, floored(0.0, moe=0.0)).points) == []


def test_figure_has_a_thin_bar_for_each_floor(tmp_path):
    """attention begins at 0 for 18 ms, moe at 30 for 42 ms, then mlp_reduce for 2 ms and norm for 0.5 ms."""
    points = read(tmp_path, FAR).points
    figure = figures.draw_phases(points, Style.from_points(points), "title")
    bars = [p for p in figure.axes[0].patches if p.get_height() == pytest.approx(0.24)]
    assert [p.get_x() for p in bars] == pytest.approx([0, 30, 90, 94])
    assert [p.get_width() for p in bars] == pytest.approx([18, 42, 2, 0.5])


def test_page_data_has_floors_and_times_of_phases(tmp_path):
    """norm, lm_head and other are `rest`, with a floor of 0.5 ms."""
    columns = build_page_data(read(tmp_path, FAR))["columns"]
    assert (columns["phase:moe"], columns["floor:moe"]) == ([60.0], [42.0])
    assert (columns["phase:rest"], columns["floor:rest"]) == ([2.0], [0.5])
    assert columns["floor_share"] == [62.5]


def test_repeats_have_the_median_of_their_floors(tmp_path):
    """Rates of jobs differ, which gives 60, 62.5 and 66 ms."""
    points = [msgspec.structs.replace(FAR.point, repeat=n) for n in range(3)]
    records = [
        msgspec.structs.replace(FAR, point=point, floor=msgspec.structs.replace(FAR.floor, floor_ms=ms))
        for point, ms in zip(points, (60.0, 62.5, 66.0), strict=True)
    ]
    (row,) = read(tmp_path, *records).points.to_dict("records")
    assert (row["floor_ms"], row["floor_share"]) == (62.5, pytest.approx(0.625))


def served(tmp_path: Path, *shares: tuple[float | None, ...]) -> list[str]:
    """Return the sentences of served points with these shares of prompts, of the matrix rate, and of other steps."""
    names = ("prefill_floor_share", "prefill_matmul_share", "decode_floor_share")
    records = []
    for repeat, values in enumerate(shares):
        record = serve_record_builder.make_served_record(
            serve_record_builder.make_point(Layout(4), concurrency=2**repeat)
        )
        records.append(
            msgspec.structs.replace(
                record, serve=msgspec.structs.replace(record.serve, **dict(zip(names, values, strict=True)))
            )
        )
    return floors.format_served_sentences(read(tmp_path, *records).served)


def test_sentence_of_served_points_separates_steps_with_prompts(tmp_path):
    """The ratios are 1 / 0.8 = 1.25, 1 / 0.5 = 2, and 1 / 0.9 = 1.11."""
    assert served(tmp_path, (0.8, 0.55, 0.9), (0.5, 0.42, 0.9)) == [
        (
            "kimi-k2: steps with prompts take 1.25–2.00× what this machine allows (at 0.42–0.55 of its matrix rate), steps "
            "without prompts 1.11×."
        )
    ]


def test_sentence_omits_a_kind_of_step_without_a_share(tmp_path):
    assert served(tmp_path, (None, None, 0.8)) == [
        "kimi-k2: steps without prompts take 1.25× what this machine allows."
    ]
    assert served(tmp_path / "none", (None, None, None)) == []


def test_metrics_of_floors_are_read_from_a_record():
    assert METRIC["floor_ms"].get_value(FAR) == 62.5
    assert METRIC["floor_share"].get_value(FAR) == pytest.approx(0.625)
    assert METRIC["floor_share"].get_value(build.make_ok_record(build.make_point())) is None


def test_rates_and_floor_survive_encoding():
    assert msgspec.json.decode(msgspec.json.encode(FAR), type=Record) == FAR


def test_losses_are_unknown_if_floors_of_phases_do_not_add_up(tmp_path):
    """A server has other phases: only 18 of 62.5 ms belong to one of them."""
    frames = read(tmp_path, floored(attention=18_000.0))
    assert floors.list_losses(frames.points.to_dict("records")[0]) == []
    assert floors.format_decode_sentences(frames.points)[0].endswith("minimum 62.5).")
