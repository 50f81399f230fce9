"""`dcpbench show`: tables that fit any terminal, what bounds an open loop, and the same for scripts."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from rich.console import Console

from dcpbench.points.layout import Layout
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


def shown(what: Any, width: int) -> list[str]:
    """Lines of a terminal that is so wide."""
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return [line.rstrip() for line in out.getvalue().splitlines()]


class TestFitting:
    """The longest word of a label has 8 columns, the numbers 5, 4 and 4, and marks 12 as words or 2 as letters."""

    def test_where_there_is_room_marks_are_words(self) -> None:
        """17 + (5 + 3) + (4 + 3) + (4 + 3) + (12 + 3): two spaces more than one between columns."""
        assert shown(TABLE, 54)[1:4:2] == [
            "layout              tok/s    p99   /GPU   warnings",
            "tp4                 1,234   12.5    308   noisy, drift",
        ]

    def test_then_labels_go_on_in_the_next_line_and_no_word_is_cut(self) -> None:
        assert shown(TABLE, 45)[3:] == [
            "tp4        1,234   12.5    308   noisy, drift",
            "tp4·dcp4   99.50      —   24.9   drift",
            "(triton)",
        ]

    def test_then_marks_are_letters(self) -> None:
        """8 + (5 + 2) + (4 + 2) + (4 + 2) + (2 + 2) = 31."""
        assert shown(TABLE, 31)[1:] == [
            "layout    tok/s   p99  /GPU",
            "───────────────────────────────",
            "tp4       1,234  12.5   308  ab",
            "tp4·dcp4  99.50     —  24.9  b",
            "(triton)",
            "warnings: a noisy, b drift",
        ]

    def test_then_columns_go_and_are_named(self) -> None:
        """8 + (5 + 1) + (4 + 1) + (2 + 1) = 22: without /GPU, which is the least important."""
        assert shown(TABLE, 22)[1:6] == [
            "layout   tok/s  p99",
            "──────────────────────",
            "tp4      1,234 12.5 ab",
            "tp4·dcp4 99.50    — b",
            "(triton)",
        ]
        assert " ".join(shown(TABLE, 22)[6:]) == "left out, as it is narrow here: /GPU warnings: a noisy, b drift"

    def test_a_word_of_any_length_does_not_push_numbers_out(self) -> None:
        table = FittedTable("t", ["m" * 100_000], [Column("tok/s", ["1,234"])])
        assert shown(table, 40)[3].endswith(" 1,234")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dataframes.Frames:
    """Decode and serve, long names, failed and rejected points."""
    records = build.gpu_sweep()[:40]
    records += [build.failed(build.point(Layout(4, 1, 4), context=9, model="a/very/long/name-of-a-model" * 4))]
    records += serve_record_builder.run()
    return dataframes.load_frames([build.write(tmp_path_factory.mktemp("mixed") / "run", records)])


@pytest.mark.parametrize("width", [40, 60, 80, 140, 200])
def test_no_number_is_cut_at_any_width(mixed: dataframes.Frames, width: int) -> None:
    """Every rate of the record stands in the table."""
    lines = shown(terminal_tables.render(mixed), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for table in (mixed.points, mixed.served):
        assert {f"{rate:,.1f}" for rate in table["output_tok_s"] if 100 <= rate < 1000} <= set(" ".join(lines).split())


class TestOpenLoops:
    @pytest.mark.parametrize(
        ("at_once", "pages", "said"),
        [
            (4, 1000, "tp4 4 by --concurrency"),
            (512, 1000, "tp4 all 16"),
            (8, 3, "tp4 3 of full length by KV space (8 by --concurrency)"),
        ],
        ids=["an option", "nothing", "KV space"],
    )
    def test_what_bounds_them_is_said(self, tmp_path: Path, at_once: int, pages: int, said: str) -> None:
        """16 requests are sent; how many are served at once is the least of that, --concurrency and KV space."""
        of = serve_record_builder.point(
            concurrency=at_once,
            changed={
                "arrival": "gamma",
                "request_rate": 2.0,
                "requests": 16,
            },
        )
        record = serve_record_builder.served(of)
        kv = build.ok(build.point()).kv
        assert kv
        record = build.msgspec.structs.replace(record, kv=build.msgspec.structs.replace(kv, capacity_requests=pages))
        text = " ".join(shown(render_terminal_table([build.write(tmp_path / "run", [record])]), 200))
        assert f"requests at once, at most: {said}" in text

    def test_a_closed_loop_has_its_clients_in_the_table(self, tmp_path: Path) -> None:
        record = serve_record_builder.served(serve_record_builder.point())
        assert "at once" not in " ".join(shown(render_terminal_table([build.write(tmp_path / "run", [record])]), 200))


class TestJson:
    def test_rows_and_findings_are_one_object(self, tmp_path: Path) -> None:
        points = [build.point(Layout(4)), build.point(Layout(4, 1, 4))]
        records = [build.ok(p, median_ms=10.0) for p in points] + [build.rejected(build.point(context=10**6))]
        found = json.loads(points_export.format_json(dataframes.load_frames([build.write(tmp_path / "run", records)])))
        assert set(found) == {"runs", "cpu", "points", "served", "others", "findings"}
        assert [(p["layout"], p["concurrency"], p["ttft_p50_ms"]) for p in found["points"]] == [
            ("tp4", 8, None),
            ("tp4·dcp4", 8, None),
        ]
        assert [o["outcome"] for o in found["others"]] == ["rejected"]
        assert found["runs"] == [{"name": "run", "records": 3, "replaced": 0, "cut_short": False, "bad_lines": []}]
        assert found["findings"]

    def test_nothing_in_it_steers_a_terminal(self, tmp_path: Path) -> None:
        records = [build.ok(build.point(model="\x1b[2J\x9b\u202e"))]
        text = points_export.format_json(dataframes.load_frames([build.write(tmp_path / "run", records)]))
        assert text.isascii()
        assert all(c.isprintable() or c == "\n" for c in text)


class TestPipes:
    def dcpbench(self, folder: Path, *args: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dcpbench.cli", "show", str(folder), *args]
        return subprocess.Popen(
            command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )

    def test_a_reader_that_goes_away_is_no_error(self, tmp_path: Path) -> None:
        """As in `dcpbench show RUN --json | head -1`, with more to say than a pipe holds."""
        folder = build.write(tmp_path / "run", build.gpu_sweep())
        with self.dcpbench(folder, "--json") as show:
            assert show.stdout
            assert show.stderr
            assert show.stdout.readline() == "{\n"
            show.stdout.close()
            assert "Traceback" not in show.stderr.read()

    def test_no_colour_means_none_even_where_codes_are_forced(self, tmp_path: Path) -> None:
        folder = build.write(tmp_path / "run", [build.ok(build.point()), build.failed(build.point(context=9))])
        with self.dcpbench(folder, NO_COLOR="1", FORCE_COLOR="1", COLUMNS="80", TERM="xterm-256color") as show:
            text, _ = show.communicate()
        codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", text) for code in found.split(";")}
        assert codes <= {"", "0", "1", "2"}


def test_the_scatter_within_a_launch_is_named_apart_from_that_between_launches(tmp_path: Path) -> None:
    """25 ms throughout leave nothing open, which is little and not nothing: 0.0 % would look like certainty."""
    record = build.ok(build.point(Layout(4)), median_ms=25, noise=0.0)
    text = shown(render_terminal_table([build.write(tmp_path / "run", [record])]), 300)
    assert "scatter" in text[2]
    assert [line for line in text if line.startswith("tp4 ") and "<±0.1%" in line]
    assert [line for line in text if line.startswith("scatter: ") and "Another launch differs by more" in line]


@pytest.mark.parametrize(("width", "between"), [(35, 3), (34, 2), (32, 2)])
def test_columns_stand_closer_where_that_makes_them_fit(width: int, between: int) -> None:
    """Names of 8 letters, numbers of 5 and 1, marks of 12: 26, and three times what is between. Below, marks are letters."""
    wide = FittedTable("t", ["tp4·dcp4"], [Column("tok/s", ["99.50"]), Column("x", ["1"])], [["noisy", "drift"]])
    assert shown(wide, width)[-1] == (" " * between).join(["tp4·dcp4", "99.50", "1", "noisy, drift"])
    assert shown(wide, 31)[-1] == "warnings: a noisy, b drift"


@pytest.mark.parametrize(
    ("cancelled", "rejected", "said"),
    [
        (0, 0, []),
        (3, 0, ["not served: 3 requests cut off, 0 that can never fit"]),
        (0, 2, ["not served: 0 requests cut off, 2 that can never fit"]),
        (1200, 2, ["not served: 1,200 requests cut off, 2 that can never fit"]),
    ],
)
def test_what_was_not_served_is_told_whichever_way(
    cancelled: int, rejected: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_tables, "_format_bounds", lambda _: [])
    plain = {"shown": "", "label": "tp4", "arrival": "closed 8", "preemptions": 0, "slo": "", "load_arrival": "closed"}
    points = pd.DataFrame([plain | {"cancelled": cancelled, "rejected": rejected}])
    assert terminal_tables._format_notes(points) == said
