"""Host waits over all points of a run, in the table, in Markdown and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.layout import Layout
from dcpbench.records.record import SyncSite
from dcpbench.reports import dataframes, sync_sites, write_report
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path


def make_site(**changes: object) -> SyncSite:
    """Return a site in the KV write, with two waits in each step."""
    defaults = {
        "found_in": "eager",
        "rule": "SYNC002",
        "kind": "data-dependent-shape",
        "call": "cudaStreamSynchronize",
        "op": "aten::nonzero",
        "function": "set_kv",
        "file": "engine/pool.py",
        "line": 12,
        "per_step": 2.0,
        "wait_us": 10.0,
        "bubble_us": 4.0,
    }
    return SyncSite(**{**defaults, **changes})  # type: ignore[arg-type]


def run(tmp_path: Path, *sites_of_points: list[SyncSite]) -> dataframes.Frames:
    """Return frames of a run with one point for each list of sites, at different concurrencies."""
    records = [
        build.make_ok_record(build.make_point(Layout(2), concurrency=8 * i), sync_sites=sites, host_syncs_per_step=2.0)
        for i, sites in enumerate(sites_of_points, 1)
    ]
    return dataframes.load_frames([build.write_records(tmp_path / "run", records)])


def test_points_with_the_same_site_are_one_row_with_the_largest_values(tmp_path: Path) -> None:
    """Two of three points have the site, 2 and 3 times per step, with 10 and 7 µs of wait and 4 and 9 µs of bubble."""
    loaded = run(tmp_path, [make_site()], [make_site(per_step=3.0, wait_us=7.0, bubble_us=9.0)], [])
    table = sync_sites.build_table(loaded)
    assert [row[1:] for row in table.rows] == [
        ["set_kv (engine/pool.py:12)", "data-dependent-shape", "aten::nonzero", "eager", "3.00", "10.0", "9.00", "2"]
    ]


def test_sites_are_sorted_by_gpu_time_lost(tmp_path: Path) -> None:
    loaded = run(tmp_path, [make_site(), make_site(function="sample", bubble_us=50.0)])
    assert [row[1].split()[0] for row in sync_sites.build_table(loaded).rows] == ["sample", "set_kv"]


def test_no_table_without_a_site(tmp_path: Path) -> None:
    assert sync_sites.build_table(run(tmp_path, [], [])).rows == []


def test_site_without_stacks_is_named_by_its_operator(tmp_path: Path) -> None:
    """Replayed steps are profiled without Python stacks."""
    (row,) = sync_sites.build_table(run(tmp_path, [make_site(function="", file="", line=None, found_in="replay")])).rows
    assert (row[1], row[3], row[4]) == ("—", "aten::nonzero", "replay")


def test_report_shows_file_and_line_of_a_site(tmp_path: Path) -> None:
    """A hostile file name is escaped."""
    folder = build.write_records(
        tmp_path / "run",
        [
            build.make_ok_record(
                build.make_point(Layout(2)), sync_sites=[make_site(file="<b>x</b>.py")], host_syncs_per_step=2.0
            )
        ],
    )
    write_report([folder], tmp_path / "report")
    assert "Where the host waited" in (tmp_path / "report" / "report.md").read_text()
    page = (tmp_path / "report" / "report.html").read_text()
    assert "&lt;b&gt;x&lt;/b&gt;.py:12" in page
    assert "<b>x</b>" not in page
