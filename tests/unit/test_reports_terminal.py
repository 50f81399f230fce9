"""`dcpbench show`: tables for any width of a terminal, limits of open loops, and JSON for scripts."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd
import pytest
from rich.console import Console

from dcpbench.points.layout import Layout
from dcpbench.records.record import SpeculationMetrics
from dcpbench.reports import dataframes, points_export, render_terminal_table, terminal_tables
from dcpbench.reports.terminal_tables import Column, FittedTable
from tests.unit import record_builder as build
from tests.unit import serve_record_builder

if TYPE_CHECKING:
    from pathlib import Path

TABLE = FittedTable(
    "title",
    ["tp4", "tp4·dcp4 (triton)"],
    [
        Column("tok/s", ["1,234", "99.50"]),
        Column("p99", ["12.5", "—"], drop=1, full_name="ITL p99"),
        Column("/GPU", ["308", "24.9"], drop=0),
    ],
    [["noisy", "drift"], ["drift"]],
)


def print_lines(renderable: Any, width: int) -> list[str]:
    """Return the lines printed to a terminal of this width."""
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


class TestFitting:
    """The longest word of a label has 8 columns, the numbers 5, 4 and 4, and marks 12 as words or 2 as letters."""

    def test_marks_are_words_in_a_wide_terminal(self) -> None:
        """17 + (5 + 3) + (4 + 3) + (4 + 3) + (12 + 3): columns are two spaces further apart than necessary."""
        assert print_lines(TABLE, 54)[1:4:2] == [
            "layout              tok/s    p99   /GPU   warnings",
            "tp4                 1,234   12.5    308   noisy, drift",
        ]

    def test_labels_are_wrapped_between_words_first(self) -> None:
        assert print_lines(TABLE, 45)[3:] == [
            "tp4        1,234   12.5    308   noisy, drift",
            "tp4·dcp4   99.50      —   24.9   drift",
            "(triton)",
        ]

    def test_marks_are_letters_next(self) -> None:
        """8 + (5 + 2) + (4 + 2) + (4 + 2) + (2 + 2) = 31."""
        assert print_lines(TABLE, 31)[1:] == [
            "layout    tok/s   p99  /GPU",
            "───────────────────────────────",
            "tp4       1,234  12.5   308  ab",
            "tp4·dcp4  99.50     —  24.9  b",
            "(triton)",
            "warnings: a noisy, b drift",
        ]

    def test_columns_are_dropped_and_named_last(self) -> None:
        """8 + (5 + 1) + (4 + 1) + (2 + 1) = 22: without /GPU, which is the least important."""
        assert print_lines(TABLE, 22)[1:6] == [
            "layout   tok/s  p99",
            "──────────────────────",
            "tp4      1,234 12.5 ab",
            "tp4·dcp4 99.50    — b",
            "(triton)",
        ]
        assert " ".join(print_lines(TABLE, 22)[6:]) == "left out, as it is narrow here: /GPU warnings: a noisy, b drift"

    def test_very_long_word_does_not_displace_numbers(self) -> None:
        table = FittedTable("t", ["m" * 100_000], [Column("tok/s", ["1,234"])])
        assert print_lines(table, 40)[3].endswith(" 1,234")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dataframes.Frames:
    """Return frames with decode and served points, long names, failed and rejected points."""
    records = build.make_gpu_sweep()[:40]
    records += [
        build.make_failed_record(build.make_point(Layout(4, 1, 4), context=9, model="a/very/long/name-of-a-model" * 4))
    ]
    records += serve_record_builder.make_run()
    return dataframes.load_frames([build.write_records(tmp_path_factory.mktemp("mixed") / "run", records)])


@pytest.mark.parametrize("width", [40, 60, 80, 140, 200])
def test_no_number_is_truncated_at_any_width(mixed: dataframes.Frames, width: int) -> None:
    """Every rate of the records is in the table."""
    lines = print_lines(terminal_tables.render(mixed), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for table in (mixed.points, mixed.served):
        assert {f"{rate:,.1f}" for rate in table["output_tok_s"] if 100 <= rate < 1000} <= set(" ".join(lines).split())


class TestOpenLoops:
    @pytest.mark.parametrize(
        ("concurrency", "pages", "limit"),
        [
            (4, 1000, "4 by --concurrency with tp4"),
            (512, 1000, "all 16 with tp4"),
            (8, 3, "3 of full length by KV space (8 by --concurrency) with tp4"),
        ],
        ids=["an option", "nothing", "KV space"],
    )
    def test_limit_of_concurrent_requests_is_named(
        self, tmp_path: Path, concurrency: int, pages: int, limit: str
    ) -> None:
        """The smallest of 16 requests, --concurrency and KV capacity limits the requests served at once."""
        point = serve_record_builder.make_point(
            concurrency=concurrency,
            changed={
                "arrival": "gamma",
                "request_rate": 2.0,
                "requests": 16,
            },
        )
        record = serve_record_builder.make_served_record(point)
        kv = build.make_ok_record(build.make_point()).kv
        assert kv
        record = build.msgspec.structs.replace(record, kv=build.msgspec.structs.replace(kv, capacity_requests=pages))
        text = " ".join(print_lines(render_terminal_table([build.write_records(tmp_path / "run", [record])]), 200))
        assert f"requests at once, at most: {limit}" in text

    def test_closed_loop_has_no_limit_of_concurrent_requests(self, tmp_path: Path) -> None:
        record = serve_record_builder.make_served_record(serve_record_builder.make_point())
        assert "at once" not in " ".join(
            print_lines(render_terminal_table([build.write_records(tmp_path / "run", [record])]), 200)
        )


class TestJson:
    def test_rows_and_findings_are_one_object(self, tmp_path: Path) -> None:
        points = [build.make_point(Layout(4)), build.make_point(Layout(4, 1, 4))]
        records = [build.make_ok_record(p, median_ms=10.0) for p in points] + [
            build.make_rejected_record(build.make_point(context=10**6))
        ]
        found = json.loads(
            points_export.format_json(dataframes.load_frames([build.write_records(tmp_path / "run", records)]))
        )
        assert set(found) == {"runs", "cpu", "points", "served", "others", "findings"}
        assert [(p["layout"], p["concurrency"], p["ttft_p50_ms"]) for p in found["points"]] == [
            ("tp4", 8, None),
            ("tp4·dcp4", 8, None),
        ]
        assert [o["outcome"] for o in found["others"]] == ["rejected"]
        assert found["runs"] == [{"name": "run", "records": 3, "replaced": 0, "cut_short": False, "bad_lines": []}]
        assert found["findings"]

    def test_json_has_no_terminal_escapes(self, tmp_path: Path) -> None:
        records = [build.make_ok_record(build.make_point(model="\x1b[2J\x9b\u202e"))]
        text = points_export.format_json(dataframes.load_frames([build.write_records(tmp_path / "run", records)]))
        assert text.isascii()
        assert all(c.isprintable() or c == "\n" for c in text)


class TestPipes:
    def start_show(self, folder: Path, *args: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dcpbench.cli", "show", str(folder), *args]
        return subprocess.Popen(
            command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )

    def test_closed_pipe_is_no_error(self, tmp_path: Path) -> None:
        """`dcpbench show RUN --json | head -1` closes the pipe while output remains."""
        folder = build.write_records(tmp_path / "run", build.make_gpu_sweep())
        with self.start_show(folder, "--json") as show:
            assert show.stdout
            assert show.stderr
            assert show.stdout.readline() == "{\n"
            show.stdout.close()
            assert "Traceback" not in show.stderr.read()

    def test_no_color_disables_colours_even_with_force_color(self, tmp_path: Path) -> None:
        folder = build.write_records(
            tmp_path / "run",
            [build.make_ok_record(build.make_point()), build.make_failed_record(build.make_point(context=9))],
        )
        with self.start_show(folder, NO_COLOR="1", FORCE_COLOR="1", COLUMNS="80", TERM="xterm-256color") as show:
            text, _ = show.communicate()
        codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", text) for code in found.split(";")}
        assert codes <= {"", "0", "1", "2"}


def test_scatter_within_a_launch_is_explained(tmp_path: Path) -> None:
    """Steps of exactly 25 ms have a scatter below 0.1 %; 0.0 % would look like certainty."""
    record = build.make_ok_record(build.make_point(Layout(4)), median_ms=25, noise=0.0)
    text = print_lines(render_terminal_table([build.write_records(tmp_path / "run", [record])]), 300)
    assert "scatter" in text[2]
    assert [line for line in text if line.startswith("tp4 ") and "<±0.1%" in line]
    assert [line for line in text if line.startswith("scatter: ") and "Another launch differs by more" in line]


@pytest.mark.parametrize(("width", "spaces"), [(35, 3), (34, 2), (32, 2)])
def test_columns_are_closer_together_in_a_narrower_terminal(width: int, spaces: int) -> None:
    """Names of 8 letters, numbers of 5 and 1 and marks of 12 are 26 columns, plus three spaces between columns. In a
    narrower terminal marks are letters.
    """
    wide = FittedTable("t", ["tp4·dcp4"], [Column("tok/s", ["99.50"]), Column("x", ["1"])], [["noisy", "drift"]])
    assert print_lines(wide, width)[-1] == (" " * spaces).join(["tp4·dcp4", "99.50", "1", "noisy, drift"])
    assert print_lines(wide, 31)[-1] == "warnings: a noisy, b drift"


@pytest.mark.parametrize(
    ("cancelled", "unsent", "rejected", "notes"),
    [
        (0, 0, 0, []),
        (3, 0, 0, ["not served: 3 requests cut off, 0 never sent, 0 that can never fit"]),
        (0, 27, 0, ["not served: 0 requests cut off, 27 never sent, 0 that can never fit"]),
        (1200, 0, 2, ["not served: 1,200 requests cut off, 0 never sent, 2 that can never fit"]),
    ],
)
def test_note_counts_requests_that_were_not_served(
    cancelled: int, unsent: int, rejected: int, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_tables, "_format_bounds", lambda _: [])
    plain = {"shown": "", "label": "tp4", "arrival": "closed 8", "preemptions": 0, "slo": "", "load_arrival": "closed"}
    load = {"warnings": ["cut_off"] * bool(unsent), "load_requests": 30 + unsent, "submitted": 30}
    points = pd.DataFrame([plain | load | {"cancelled": cancelled, "rejected": rejected}])
    assert terminal_tables._format_notes(points) == notes


@pytest.mark.parametrize(
    ("drafts", "load", "notes"),
    [
        (0, {}, [terminal_tables.GAPS_WITH_PREFILLS]),
        (0, {"arrival": "gamma", "request_rate": 2.0}, []),
        (1, {}, [terminal_tables.GAPS_WITH_DRAFTS]),
    ],
)
def test_note_on_gaps_suits_the_load_and_drafts(
    drafts: int, load: dict[str, Any], notes: list[str], tmp_path: Path
) -> None:
    """Output is below concurrency × 1000 / ITL only in closed loops, and not where most gaps are 0."""
    record = serve_record_builder.make_served_record(
        serve_record_builder.make_point(changed=load, mtp=drafts, acceptance="0.5" * drafts)
    )
    seen = SpeculationMetrics(draft_tokens=1, tokens_per_step=1.5) if drafts else None
    record = msgspec.structs.replace(record, serve=msgspec.structs.replace(record.serve, speculation=seen))
    text = print_lines(render_terminal_table([build.write_records(tmp_path / "run", [record])]), 400)
    explained = next(line for line in text if line.startswith(terminal_tables.SERVED_OUTPUT))
    assert explained == terminal_tables.SERVED_OUTPUT + "".join(notes)
