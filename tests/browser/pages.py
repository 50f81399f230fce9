"""Build report pages of synthetic records, with a placeholder instead of each matplotlib picture, which would take
seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from dcpbench.points.layout import Layout
from dcpbench.reports import dataframes, plots, sections
from dcpbench.reports.page import points
from dcpbench.reports.page.points import MAX_POINTS
from dcpbench.reports.page.render import render_page
from dcpbench.reports.plots import Picture
from tests.unit import record_builder, serve_record_builder

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from dcpbench.records.record import Record

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><rect width="40" height="30"/></svg>'
DECODE = [(subject, "") for subject in ("break-even", "throughput", "itl", "frontier", "phases", "kv")]
SERVED = [(subject, mode) for mode in ("live", "replay") for subject in ("throughput", "ttft", "itl")]


def write_page(folder: Path, records: list[Record], *, max_points: int = MAX_POINTS) -> Path:
    """Write the report page of the records, with a grey box for each picture, and return its path."""
    run = record_builder.write_records(folder / "run", records)
    picture = folder / "picture.svg"
    picture.write_text(SVG)
    read = dataframes.load_frames([run])
    subjects = (DECODE if len(read.points) else []) + (SERVED if len(read.served) else [])
    pictures = [Picture(*of, " ".join(of), f"alt of {' '.join(of)}", picture, picture) for of in subjects]
    out = folder / "report.html"
    with mock.patch.object(points, "MAX_POINTS", max_points):
        out.write_text(render_page("a run", sections.build_sections(read, pictures), read), encoding="utf-8")
    return out


def write_run_page(folder: Path, run: Path) -> Path:
    """Write the report page of a run with the charts of a report and a grey box for each picture, and return its path."""

    def box(_: plots.FigureWriter, path: Path, title: str, points: pd.DataFrame, draw: Any) -> None:
        del title, points, draw
        path.with_suffix(".svg").write_text(SVG)

    read = dataframes.load_frames([run])
    with mock.patch.object(plots.FigureWriter, "write_figure", box):
        content = sections.build_sections(read, plots.draw_all(read, folder / "figures"))
    out = folder / "report.html"
    out.write_text(render_page("a run", content, read), encoding="utf-8")
    return out


def make_decode_records() -> list[Record]:
    """Return records of two models, two contexts and two concurrencies on tp4 and tp4·dcp4: 16 points."""
    return [
        record_builder.make_ok_record(
            record_builder.make_point(layout, model=model, context=context, concurrency=concurrency)
        )
        for model in ("kimi-k2", "deepseek-v3")
        for context in (4000, 32000)
        for concurrency in (8, 32)
        for layout in (Layout(4), Layout(4, 1, 4))
    ]


def make_served_records() -> list[Record]:
    """Return served records of tp4 and tp4·dcp4 at two concurrencies, live and replayed: 8 points."""
    return [
        serve_record_builder.make_served_record(serve_record_builder.make_point(layout, concurrency, {"mode": mode}))
        for mode in ("live", "replay")
        for concurrency in (8, 32)
        for layout in (serve_record_builder.TP, serve_record_builder.DCP)
    ]
