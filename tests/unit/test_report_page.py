"""Data of a report's page, compared with the records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.points.layout import Layout
from dcpbench.reports import dataframes
from dcpbench.reports.page import points
from dcpbench.reports.page.points import build_page_data, build_points, format_brief
from dcpbench.reports.page.render import list_charts
from dcpbench.reports.plots import Picture
from tests.unit import record_builder, serve_record_builder

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record


def data(tmp_path: Path, records: list[Record]) -> dict[str, Any]:
    return build_page_data(dataframes.load_frames([record_builder.write_records(tmp_path / "run", records)]))


def picture(subject: str, mode: str, tmp_path: Path, alt: str = "") -> Picture:
    return Picture(subject, mode, "title", alt, tmp_path, tmp_path)


def mixed() -> list[Record]:
    """Return tp4 and tp4·dcp4 as decode points, and points served live and in replay at a rate."""
    loads = [{"mode": mode, "arrival": "gamma", "request_rate": 2.5} for mode in ("live", "replay")]
    served = [serve_record_builder.make_served_record(serve_record_builder.make_point(changed=load)) for load in loads]
    return [
        record_builder.make_ok_record(record_builder.make_point(layout)) for layout in (Layout(4), Layout(4, 1, 4))
    ] + served


def test_every_point_can_be_rebuilt_from_its_row(tmp_path: Path) -> None:
    """The command of a row must be that of its record for any dtypes of pandas columns."""
    records = mixed()
    read = dataframes.load_frames([record_builder.write_records(tmp_path / "run", records)])
    found = [*build_points(read.points), *build_points(read.served)]
    assert len(found) == len(records)
    assert set(found) == {record.point for record in records}


def test_numbers_are_those_of_the_records_in_display_units(tmp_path: Path) -> None:
    record = record_builder.make_ok_record(record_builder.make_point())
    columns = data(tmp_path, [record])["columns"]
    assert record.metrics
    assert columns["output_tok_s"] == [float(f"{record.metrics.output_tok_s.median:.7g}")]
    assert columns["step_ms_low"] == [float(f"{record.metrics.step_ms.low:.7g}")]
    assert columns["memory_peak_bytes"] == [131], "131 GiB"
    assert columns["idle_fraction"] == [1.5], "per cent"
    assert "ttft_p50_ms" not in columns, "decode has no first token"


def test_only_own_points_have_a_command(tmp_path: Path) -> None:
    own = record_builder.make_ok_record(record_builder.make_point())
    imported = msgspec.structs.replace(own, point=record_builder.make_point(concurrency=9), origin="vllm")
    commands = data(tmp_path, [own, imported])["columns"]["command"]
    assert commands[0].startswith("dcpbench sweep --model kimi-k2 --tp 1 --dp 1 --dcp 1 --concurrency 8")
    assert commands[1] is None


def test_ratio_to_the_baseline_is_that_of_the_findings(tmp_path: Path) -> None:
    """tp4·dcp4 has a ratio to tp4, which has none."""
    columns = data(tmp_path, mixed()[:2])["columns"]
    alone, split = columns["output_tok_s"]
    assert columns["dcp_ratio"] == [None, pytest.approx(split / alone, rel=1e-6)]
    assert columns["baseline"] == [None, "tp4"]


def test_number_of_points_is_limited_and_the_total_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "MAX_POINTS", 3)
    found = data(tmp_path, mixed())
    assert (found["count"], found["total"], len(found["columns"]["model"])) == (3, 4, 3)


def test_live_and_replayed_points_never_share_a_panel(tmp_path: Path) -> None:
    panels = data(tmp_path, mixed())["columns"]["panel"][2:]
    assert [panel.rpartition(", ")[2] for panel in panels] == ["live", "replay"]


@pytest.mark.parametrize(
    ("subject", "mode", "slugs"),
    [
        ("throughput", "", ["throughput"]),
        ("phases", "", ["phases"]),
        ("break-even", "", ["break-even"]),
        ("ttft", "live", ["ttft-serve-live"]),
        ("ttft", "replay", ["ttft-serve-replay"]),
        ("break-even", "replay", ["break-even-serve-replay"]),
        ("kv", "", ["kv"]),
        ("something-new", "", []),
    ],
)
def test_picture_is_replaced_by_its_chart(subject: str, mode: str, slugs: list[str], tmp_path: Path) -> None:
    """A picture that the page cannot draw as a chart is shown itself."""
    assert [chart.slug for chart in list_charts([picture(subject, mode, tmp_path)])] == slugs


def test_pictures_of_one_chart_keep_their_alternative_texts(tmp_path: Path) -> None:
    (chart,) = list_charts([picture("itl", "live", tmp_path, alt=alt) for alt in ("closed", "gamma")])
    assert chart.alts == ["closed", "gamma"]


def test_long_string_is_truncated_with_the_number_of_characters() -> None:
    assert format_brief("x" * 10, 4) == "xxxx… (6 more characters)"
    assert format_brief("x" * 4, 4) == "xxxx"


def test_long_names_are_cut_and_marked(tmp_path: Path) -> None:
    """Each point repeats its names."""
    records = [
        record_builder.make_ok_record(record_builder.make_point(concurrency=n + 1, model="m" * n)) for n in (200, 201)
    ]
    names = data(tmp_path, records)["columns"]["model"]
    assert names[0] == "m" * 200
    assert names[1] == "m" * 200 + "… (1 more character)"
