"""Marks of points in reports, and by how much clocks were lowered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.points.layout import Layout
from dcpbench.records.record import Emulated, Gpu
from dcpbench.reports import (
    answer,
    dataframes,
    explain,
    overview,
    point_warnings,
    render_terminal_table,
    sections,
    tables,
)
from dcpbench.reports.page import render
from dcpbench.reports.page.points import build_page_data
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve
from tests.unit.test_reports_terminal import print_lines

if TYPE_CHECKING:
    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[2]
TP, DCP = Layout(4), Layout(4, dcp=4)
LOWERED = Gpu(sm_clock_mhz_min=1485, sm_clock_mhz_max=1980, throttle_reasons=["sw_power_cap"])
"""Clocks of 1,485 of 1,980 MHz are 25 % lower."""


def ok(layout: Layout, *marks: str, gpu: Gpu | None = None, concurrency: int = 8) -> Record:
    record = build.make_ok_record(build.make_point(layout, concurrency=concurrency), warnings=list(marks))
    return msgspec.structs.replace(record, gpu=gpu)


def trust(read: dataframes.Frames) -> str:
    return answer.describe_trust(read, [])


def test_mark_of_some_points_is_shown_per_point_with_the_clock_drop(tmp_path: Path) -> None:
    """1 - 1,485 / 1,980 = 25 %."""
    records = [ok(TP, "throttled", gpu=LOWERED), ok(DCP)]
    read = dataframes.load_frames([build.write_records(tmp_path / "run", records)])
    assert point_warnings.format_distinct_warnings(read.points) == ["throttled −25 %", ""]
    assert build_page_data(read)["columns"]["telling"] == ["throttled −25 %", None]
    assert "1 throttled (by the power limit: lowest SM clock 25 % below the highest, 1,485 of 1,980 MHz)." in trust(
        read
    )


def test_points_on_gpus_next_to_cpu_points_are_counted_apart(tmp_path: Path) -> None:
    """Only the point on GPUs has a warning that counts, and its times do reflect performance."""
    cpu = build.make_ok_record(build.make_point(TP), environment=build.CPU, warnings=["cpu", "noisy"])
    folders = [build.write_records(tmp_path / name, [r]) for name, r in (("gpu", ok(TP, "drift")), ("cpu", cpu))]
    read = dataframes.load_frames(folders)
    assert trust(read).endswith("Points with a warning, of 1 on GPUs: 1 drift.")
    page = render.render_page("Title", sections.build_sections(read, []), read)
    assert '<p class="mark">CPU: 1 of 2 points are a functional run. No conclusion' in page


def test_mark_of_all_points_is_shown_once(tmp_path: Path) -> None:
    """Clocks drop by 25 % and 1 - 1,782 / 1,980 = 10 %; only `noisy` differs between the points."""
    less = msgspec.structs.replace(LOWERED, sm_clock_mhz_min=1782)
    records = [ok(TP, "throttled", gpu=LOWERED), ok(DCP, "throttled", "noisy", gpu=less)]
    folder = build.write_records(tmp_path / "run", records)
    read = dataframes.load_frames([folder])
    assert point_warnings.format_distinct_warnings(read.points) == ["", "noisy"]
    columns = build_page_data(read)["columns"]
    assert columns["telling"] == [None, "noisy"]
    assert columns["warnings"] == [["throttled"], ["noisy", "throttled"]], "filters have all warnings"
    reason = "by the power limit: lowest SM clock 10–25 % below the highest, 1,485 of 1,980 MHz at worst"
    assert f"Points with a warning, of 2: all throttled ({reason}), 1 noisy." in trust(read)
    text = print_lines(render_terminal_table([folder]), 200)
    assert "warnings of all 2 points: throttled" in text
    assert f"throttled: {reason}" in text
    assert not [line for line in text if line.startswith("tp4 ") and "throttled" in line]
    (points,) = [s for s in sections.build_sections(read, []) if s.slug == "points"]
    assert [
        bullet
        for bullet in points.bullets
        if bullet.startswith("throttled (all 2 points, so it is not repeated per point):")
    ]


def test_mark_that_invalidates_a_number_is_always_shown_per_point(tmp_path: Path) -> None:
    read = dataframes.load_frames(
        [build.write_records(tmp_path / "run", [ok(lay, "graph_differs") for lay in (TP, DCP)])]
    )
    assert point_warnings.format_distinct_warnings(read.points) == ["graph_differs", "graph_differs"]


def test_throttled_replay_has_no_clock_drop(tmp_path: Path) -> None:
    """The mark of a replay is that of the steps it replays."""
    points = [serve.make_point(TP, c) for c in (8, 32)]
    loads = [msgspec.structs.replace(p.load, mode="replay") for p in points if p.load]
    records = [
        serve.make_served_record(msgspec.structs.replace(p, load=load), warnings=["throttled"], gpu=None)
        for p, load in zip(points, loads, strict=True)
    ]
    read = dataframes.load_frames([build.write_records(tmp_path / "run", records)])
    sentence = "all throttled (the lowest SM clock is unknown at 2 points, as a replay has no clocks of its own)."
    assert sentence in trust(read)


def test_caveat_counts_replays_with_throttled_step_times(tmp_path: Path) -> None:
    """A live point has the reason of its lower clocks; one of two replays is marked, as its steps were, and has no
    reason.
    """
    live = serve.make_point(TP, 8)
    assert live.load is not None
    replays = [
        msgspec.structs.replace(serve.make_point(TP, n), load=msgspec.structs.replace(live.load, mode="replay"))
        for n in (8, 32)
    ]
    records = [
        serve.make_served_record(live, warnings=["throttled"], gpu=LOWERED),
        serve.make_served_record(replays[0], warnings=["throttled"], gpu=None),
        serve.make_served_record(replays[1], warnings=[], gpu=None),
    ]

    def get_caveat(name: str, shown: list[Record]) -> list[str]:
        return overview.list_caveats(dataframes.load_frames([build.write_records(tmp_path / name, shown)]))

    assert (
        get_caveat("all", records)[-1]
        == "clocks limited at 2 of 3 points (1 by their step times), marked throttled in the tables"
    )
    assert (
        get_caveat("live", [records[0], records[2]])[-1]
        == "clocks limited by power at 1 of 2 points, marked throttled in the tables"
    )
    assert (
        get_caveat("marked", records[:2])[-1]
        == "clocks limited at 2 of 2 points (1 by their step times), marked throttled in the tables"
    )
    assert (
        get_caveat("replays", [records[1]])[-1]
        == "clocks limited (by their step times), marked throttled in the tables"
    )
    assert (
        get_caveat("one", records[1:])[-1]
        == "clocks limited at 1 of 2 points (by their step times), marked throttled in the tables"
    )


def test_caveats_name_dummy_weights_and_slow_prompt_attention(tmp_path: Path) -> None:
    """Points on a CPU have no FlashInfer to compare with."""
    fast = {"prefill": "flashinfer"}
    records = [
        serve.make_served_record(serve.make_point(TP, 8, fast), warnings=["dummy_weights"]),
        serve.make_served_record(serve.make_point(TP, 32, fast), warnings=[]),
        serve.make_served_record(serve.make_point(TP, 48, {"prefill": "sdpa"}), warnings=[]),
    ]

    def list_caveats(name: str, shown: list[Record]) -> str:
        return "; ".join(overview.list_caveats(dataframes.load_frames([build.write_records(tmp_path / name, shown)])))

    every = list_caveats("every", records)
    assert "dummy weights of the engine at 1 of 3 points: every token takes the same few experts" in every
    assert "prompts are computed by sdpa at 1 of 3 points, which takes longer than FlashInfer" in every
    assert "dummy" not in list_caveats("fast", records[1:2])
    assert "sdpa" not in list_caveats("fast again", records[:2])
    on_cpu = [msgspec.structs.replace(records[2], warnings=["cpu"], environment=build.CPU)]
    assert "sdpa" not in list_caveats("cpu", on_cpu)


def test_caveat_of_a_forecast_has_its_upper_bound_of_ttft(tmp_path: Path) -> None:
    """TTFT p50 is 100 and 200 ms, and 120 and 260 ms with longer steps. Older records have no upper bound, and on a CPU
    it is equal.
    """

    def get_caveat(name: str, *ends_ms: tuple[float | None, float | None]) -> str:
        records = []
        for clients, (p50, high) in zip((8, 32), ends_ms, strict=False):
            point = msgspec.structs.replace(serve.make_point(TP, clients), emulate="H200")
            record = serve.make_served_record(point, warnings=["emulated"])
            assert record.serve is not None
            ttft_ms = msgspec.structs.replace(record.serve.ttft_ms, p50=p50)
            emulated = Emulated(
                machine="H200", calls=1, comm_us=1.0, comm_low_us=1.0, comm_high_us=1.0, ttft_p50_ms_high=high
            )
            metrics = msgspec.structs.replace(record.serve, ttft_ms=ttft_ms)
            records.append(msgspec.structs.replace(record, serve=metrics, emulated=emulated))
        found = overview.list_caveats(dataframes.load_frames([build.write_records(tmp_path / name, records)]))
        return next(text for text in found if text.startswith("forecast"))

    caveat = "forecast: one rank ran, its communication modelled as of H200"
    assert get_caveat("both", (100.0, 120.0), (200.0, 260.0)) == (
        f"{caveat}; TTFT p50 up to 30% longer where steps are as long as they may be"
    )
    assert get_caveat("older", (100.0, None), (None, None)) == caveat
    assert get_caveat("cpu", (100.0, 100.0)) == caveat


def test_clock_drop_of_repeats_is_the_largest(tmp_path: Path) -> None:
    """Clocks of the repeats drop by 10 % and 25 %."""
    less = msgspec.structs.replace(LOWERED, sm_clock_mhz_min=1782)
    records = [ok(TP, "throttled", gpu=gpu) for gpu in (less, LOWERED)]
    records[1] = msgspec.structs.replace(records[1], point=msgspec.structs.replace(records[1].point, repeat=1))
    read = dataframes.load_frames([build.write_records(tmp_path / "run", records)])
    assert read.points["clock_fall"].tolist() == [0.25]


def test_documentation_has_every_mark() -> None:
    """The table of docs/metrics.md has the marks that reports explain, and no others."""
    section = (ROOT / "docs" / "metrics.md").read_text().partition("\n## Warnings\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \| .+ \|$", section, re.MULTILINE)
    assert sorted(documented) == sorted(explain.WARNINGS)


def test_documentation_has_the_limits_of_tables() -> None:
    """The page shows fewer rows than report.md."""
    text = " ".join((ROOT / "docs" / "reading-a-report.md").read_text().split())
    assert f"Tables have at most {tables.MAX_ROWS:,} rows in `report.md` and {render.MAX_ROWS:,} in the page." in text
