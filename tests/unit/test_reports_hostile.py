"""Hostile records: some are refused with file, line and remedy, others are shown without harm."""

from __future__ import annotations

import json
import re
import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd
import pytest
from rich.console import Console

from dcpbench import cli
from dcpbench.errors import RecordsError
from dcpbench.points.layout import Layout
from dcpbench.records.file import is_last_line_cut_short, read_records
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.runs import read_run
from dcpbench.reports import (
    answer_tables,
    dataframes,
    figures,
    findings,
    plots,
    points_export,
    report_markdown,
    sections,
    style,
    terminal_tables,
)
from dcpbench.reports.tables import MAX_CELL_CHARS, MAX_ROWS
from dcpbench.show.figure_style import apply_style
from dcpbench.show.text import MAX_TEXT_CHARS
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

TP, DCP = Layout(4), Layout(4, 1, 4)
HTML = "<script>alert(1)</script>\"' onload=x $\\frac{1}{ | `a` \x1b[31m [red] \N{RIGHT-TO-LEFT OVERRIDE}</details>"


def make_line(record: Record | None = None) -> dict[str, Any]:
    """Return a record as it is written, for tests to damage."""
    found: dict[str, Any] = json.loads(
        msgspec.json.encode(record or build.make_ok_record(build.make_point(TP), steps=5))
    )
    return found


def run(folder: Path, *found: dict[str, Any] | bytes) -> Path:
    """Return the folder of a run with these complete lines."""
    folder.mkdir()
    texts = [text if isinstance(text, bytes) else json.dumps(text).encode() for text in found]
    (folder / RECORDS_FILE).write_bytes(b"".join(text + b"\n" for text in texts))
    return folder


def changed(path: str, value: object, record: Record | None = None) -> dict[str, Any]:
    """Return a line with another value at `a.b.c`."""
    found = make_line(record)
    *parents, last = path.split(".")
    at = found
    for name in parents:
        at = at[name]
    at[last] = value
    return found


def print_everything(folder: Path) -> str:
    """Return all that is printed about a run: Markdown, CSV and terminal."""
    read = dataframes.load_frames([folder])
    markdown = report_markdown.render("title", sections.build_sections(read, []), folder)
    points_export.write_csv(read, folder / "points.csv")
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal_tables.render(read))
    return markdown + (folder / "points.csv").read_text(encoding="utf-8") + captured.get()


REFUSED = {
    "nan": (json.dumps(changed("metrics.output_tok_s.median", float("nan"))).encode(), "malformed"),
    "infinity": (json.dumps(changed("seconds", float("inf"))).encode(), "malformed"),
    "beyond-double": (json.dumps(make_line()).replace('"seconds": 21.0', '"seconds": 1e999').encode(), "out of range"),
    "huge-integer": (changed("point.context", 10**30), r"point\.context is above 1e\+15"),
    "huge-float": (changed("metrics.tok_s_per_user", 1e300), r"metrics\.tok_s_per_user is above"),
    "negative-load": (changed("point.concurrency", -8), r"point\.concurrency is -8, below 0"),
    "negative-capacity": (changed("kv.capacity_tokens", -1), r"kv\.capacity_tokens is -1"),
    "zero-time": (changed("metrics.step_ms.low", 0), r"metrics\.step_ms is not in order: 0 < low 0"),
    "interval-inside-out": (changed("metrics.output_tok_s.high", 1.0), "does not hold"),
    "negative-latency": (changed("metrics.itl_ms.p50", -3.0), r"metrics\.itl_ms\.p50 is -3"),
    "served-nothing": (
        changed("serve.output_tok_s", 0, serve.make_served_record(serve.make_point(TP))),
        r"serve\.output_tok_s is 0, not above 0",
    ),
    "unknown-outcome": (changed("outcome", "great"), "outcome is 'great', none of ok, failed, hung, rejected"),
    "negative-sample": (changed("metrics.step_samples_ms", [9.0, -9.5]), r"metrics\.step_samples_ms is -9\.5, below 0"),
    "sample-of-nothing": (changed("metrics.step_samples_ms", [9.0, 0.0]), r"step_samples_ms is 0, not above 0"),
    "negative-seconds": (changed("seconds", -1e-9), r"seconds is -1e-09, below 0"),
    "negative-phase": (changed("phases.phase_us", {"moe": -0.5}), r"phases\.phase_us\.moe is -0\.5, below 0"),
    "negative-sync": (changed("host_syncs_per_step", -1), r"host_syncs_per_step is -1, below 0"),
    "negative-requests": (
        changed("point.load.requests", -5, serve.make_served_record(serve.make_point(TP))),
        r"point\.load\.requests is -5, below 0",
    ),
    "negative-steady-time": (
        changed("serve.steady_s", -2.5, serve.make_served_record(serve.make_point(TP))),
        r"serve\.steady_s is -2\.5, below 0",
    ),
    "dcp-that-does-not-divide": (
        changed("point.dcp", 3),
        r"point\.dcp 3 does not divide tp / dp = 4, so that it cannot have run",
    ),
    "dcp-beyond-its-replica": (
        changed("point.dcp", 4, build.make_ok_record(build.make_point(Layout(4, 2)), steps=5)),
        r"point\.dcp 4 does not divide tp / dp = 2",
    ),
    "dp-that-does-not-divide": (changed("point.dp", 3), r"point\.dp 3 does not divide tp 4"),
    "half-a-layout": (changed("point.tp", 0), r"point\.tp is 0, which no layout that ran has"),
    "no-dcp": (changed("point.dcp", 0), r"point\.dcp is 0, which no layout that ran has"),
    "failed-on-no-layout": (
        changed("point.dcp", 3, build.make_failed_record(build.make_point(TP))),
        r"point\.dcp 3 does not divide tp / dp = 4",
    ),
    "missing-field": (
        {name: value for name, value in make_line().items() if name != "outcome"},
        "missing required field",
    ),
    "wrong-type": (changed("point.concurrency", "eight"), "Expected `int`"),
    "no-point": (changed("point", None), "Expected `object`"),
    "thousands-of-marks": (changed("warnings", ["noisy"] * 5000), "warnings has 5,000 entries"),
    "another-version": (changed("schema_version", 99), "schema_version 99.*read it with the version that wrote it"),
    "another-version-and-fields": ({"schema_version": 99, "new": 1}, "schema_version 99"),
    "no-version-no-point": ({}, "missing required field"),
    "a-list": (b"[1, 2]", "not a JSON object"),
    "a-word": (b"hello", "not a JSON object"),
    "binary": (bytes(range(1, 10)) * 40, "not a JSON object"),
    "not-utf-8": (json.dumps(make_line()).encode().replace(b"kimi-k2", b"\xff\xfe"), "can't decode"),
    "half-a-surrogate": (json.dumps(changed("point.model", "\ud800")).encode(), "surrogate"),
    "too-deep": (b'{"schema_version": 1, "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep|recursion"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_line_is_refused_with_file_line_and_remedy(tmp_path: Path, name: str) -> None:
    """The line is the second of three, so no crash can have cut it short; a report reads the other two and names it."""
    damaged, pattern = REFUSED[name]
    folder = run(tmp_path / "run", make_line(), damaged, make_line())
    with pytest.raises(RecordsError, match=pattern) as raised:
        read_run(folder)
    message = str(raised.value)
    assert f"{folder / RECORDS_FILE}, line 2: " in message
    assert re.search("measure its point again|the version that wrote it|name a run's folder", message)
    assert len(message) < 1_000, "the message is short for any line"
    (bad,) = dataframes.load_frames([folder]).runs[0].bad_lines
    assert bad.line == 2


ACCEPTED = {
    "rejected-layout": changed("point.dcp", 3, build.make_rejected_record(build.make_point(TP))),
    "unknown-layout": changed("point", make_line()["point"] | {"tp": 0, "dp": 0, "dcp": 0}),
    "idle-time-rounded-below-0": changed("phases.idle_us", -1e-13),
    "zero": changed("seconds", -0.0),
    "negative-numbers-in-text": changed("reason", "between [-5, -6]: -7 is not -8"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_but_possible_line_is_read(tmp_path: Path, name: str) -> None:
    assert len(read_records(run(tmp_path / "run", ACCEPTED[name]))) == 1


def test_file_without_records_is_not_treated_as_cut_short(tmp_path: Path) -> None:
    """A ZIP archive has no newline at its end, and neither has half a record."""
    path = tmp_path / "results.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("records.jsonl", "{}")
    with pytest.raises(
        RecordsError,
        match=r"results\.zip is not a records file, as none of its lines is a record \(line 1: it is no record",
    ):
        dataframes.load_frames([path])


def test_last_line_is_cut_short_only_if_it_can_be_completed(tmp_path: Path) -> None:
    """Half a record is left out; a complete one without its newline counts; a wrong one is refused."""
    folder = run(tmp_path / "run", make_line())
    path, whole = folder / RECORDS_FILE, json.dumps(changed("point.concurrency", 9)).encode()
    before = path.read_bytes()
    path.write_bytes(before + whole[:99])
    assert (len(read_records(folder)), is_last_line_cut_short(folder)) == (1, True)
    path.write_bytes(before + whole)
    assert (len(read_records(folder)), is_last_line_cut_short(folder)) == (2, False)
    path.write_bytes(before + json.dumps(changed("point.concurrency", -9)).encode())
    with pytest.raises(RecordsError, match="line 2"):
        read_records(folder)


STRINGS = (
    "point.model",
    "point.backend",
    "point.weights",
    "point.dtype",
    "point.exchange",
    "environment.command",
    "environment.torch",
    "environment.device",
    "conditions.weights",
)


@pytest.mark.parametrize("field", STRINGS)
@pytest.mark.sample(3)
def test_markup_in_any_string_is_escaped(tmp_path: Path, field: str) -> None:
    """Markdown has no tag outside of a fenced command, a terminal no escape, a table no further column."""
    printed = print_everything(
        run(tmp_path / "run", make_line(), changed(field, HTML, build.make_ok_record(build.make_point(DCP), steps=5)))
    )
    assert "<script>" not in re.sub(r"```.*?```", "", printed, flags=re.DOTALL).split("\nrun,")[0].split("\nmodel,")[0]
    assert "\x1b" not in printed


@pytest.mark.parametrize("field", [*STRINGS, "reason"])
@pytest.mark.sample(3)
def test_strings_of_ten_megabytes_are_truncated_everywhere(tmp_path: Path, field: str) -> None:
    """2,000 letters and the length are kept, in tables 1,000; nothing grows with the rest."""
    record = (
        build.make_failed_record(build.make_point(DCP))
        if field == "reason"
        else build.make_ok_record(build.make_point(DCP), steps=5)
    )
    printed = print_everything(run(tmp_path / "run", make_line(), changed(field, "x" * 10_000_000, record)))
    assert len(printed) < 200_000
    assert "x" * (MAX_TEXT_CHARS + 1) not in printed
    assert "x" * 300 in printed.replace("\n", "") or field in {"point.dtype", "conditions.weights", "point.backend"}


def test_long_names_with_the_same_beginning_stay_different(tmp_path: Path) -> None:
    """A truncated name ends in a hash of the whole."""
    found = [changed("point.model", "x" * 9_000 + end) for end in "ab"]
    assert dataframes.load_frames([run(tmp_path / "run", *found)]).points["model"].nunique() == 2


def test_long_cells_are_truncated_in_every_table(tmp_path: Path) -> None:
    """A model of 1,900 letters is kept in records and in points.csv."""
    folder = run(tmp_path / "run", changed("point.model", "x" * 1_900))
    built = sections.build_sections(dataframes.load_frames([folder]), [])
    cells = [cell for section in built for table in section.tables for row in table.rows for cell in row]
    assert max(map(len, cells)) <= MAX_CELL_CHARS
    print_everything(folder)
    assert "x" * 1_900 in (folder / "points.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "damaged",
    [
        changed("metrics", None),
        changed("kv.pool_bytes_per_gpu", 0),
        changed("kv.capacity_tokens", 0),
        changed("phases.idle_us", -5.0),
        changed("phases.phase_us", {HTML: 1e9, "": 0.0}),
        changed("point.context", 0),
        changed("warnings", [HTML, "", "unheard-of"]),
        changed("measured_with", {"slo": {"ttft": 1.0, "other": 2.0}}),
        changed("started_at", "tomorrow"),
    ],
    ids=["no-metrics", "no-pool", "no-capacity", "idle", "phases", "context-0", "warnings", "slo", "date"],
)
def test_odd_values_are_shown_without_error(tmp_path: Path, damaged: dict[str, Any]) -> None:
    """There is no warning either, and the other point is shown."""
    assert "tp4·dcp4" in print_everything(
        run(tmp_path / "run", damaged, make_line(build.make_ok_record(build.make_point(DCP), steps=5)))
    )


@pytest.mark.parametrize(
    "damaged",
    [changed("point.model", HTML), changed("point.backend", "x" * 5_000), changed("point.context", 0)],
    ids=["markup", "long", "context-0"],
)
def test_figures_can_be_drawn_from_odd_values(tmp_path: Path, damaged: dict[str, Any]) -> None:
    """Titles, legends and axes of lines are drawn."""
    read = dataframes.load_frames(
        [run(tmp_path / "run", damaged, make_line(build.make_ok_record(build.make_point(DCP), steps=5)))]
    )
    with apply_style():
        for draw in (figures.draw_throughput, figures.draw_itl, figures.draw_frontier):
            draw(read.points, style.Style.from_points(read.points), "title").savefig(tmp_path / "figure.svg")
            assert (tmp_path / "figure.svg").read_text().endswith("</svg>\n")


def grid(folder: Path, contexts: int, loads: int) -> dataframes.Frames:
    """Return frames of tp4 and tp4·dcp4 at every context and load."""
    template = build.make_ok_record(build.make_point(TP), steps=2)
    return dataframes.load_frames(
        [
            build.write_records(
                folder,
                (
                    msgspec.structs.replace(template, point=build.make_point(layout, context=c, concurrency=n))
                    for c in range(1, contexts + 1)
                    for n in range(1, loads + 1)
                    for layout in (TP, DCP)
                ),
            )
        ]
    )


def test_tables_and_figures_of_too_many_points_are_reduced_with_a_note(tmp_path: Path) -> None:
    """20 contexts × 60 loads × 2 layouts = 2,400 points: 2,000 rows, 6 panels, 24 loads per line, both layouts."""
    read = grid(tmp_path / "run", 20, 60)
    built = sections.build_sections(read, [])
    tables = [table for section in built for table in section.tables]
    assert max(len(table.rows) for table in tables) == MAX_ROWS
    assert any("the first 2,000 of 2,400; points.csv has every point" in table.title for table in tables)
    shown, note = plots.sample_points(read.points)
    assert (shown["context"].nunique(), shown["concurrency"].nunique(), len(shown)) == (6, 24, 6 * 24 * 2)
    assert note == " (shown: 6 of 20 lengths, 24 of 60 loads; all in points.csv)"
    assert {1, 20} <= set(shown["context"]), "first and last are always shown"
    assert max(map(len, built[0].bullets)) < 600, "sentences count further points"
    assert all(len(table.columns) <= answer_tables.MAX_COLUMNS + 3 for table in built[0].tables)
    assert all("(shown: 9 of 60 concurrencies; points.csv has every point)" in t.title for t in built[0].tables[:2])


def test_figure_shows_all_points_up_to_its_limits(tmp_path: Path) -> None:
    """Nine lengths and 48 loads are shown; one more of each leaves 6 and 24. 12 models and 6 runs have figures of their
    own.
    """
    all_points, note = plots.sample_points(grid(tmp_path / "all", 9, 48).points)
    assert (len(all_points), note) == (9 * 48 * 2, "")
    fewer, note = plots.sample_points(grid(tmp_path / "more", 10, 49).points)
    assert (len(fewer), note) == (6 * 24 * 2, " (shown: 6 of 10 lengths, 24 of 49 loads; all in points.csv)")
    assert (plots.MAX_MODELS, plots.MAX_RUNS) == (12, 6)
    assert plots.sample_evenly([1, 2, 3], 3) == [1, 2, 3]
    assert plots.sample_evenly(list(range(11)), 3) == [0, 5, 10]


def test_figure_keeps_the_fastest_layouts(tmp_path: Path) -> None:
    """Each of 20 layouts under one load takes 1 ms longer than the one before: the first 16 are kept."""
    records = [
        msgspec.structs.replace(
            build.make_ok_record(build.make_point(TP, backend=f"b{i:02}"), steps=3, median_ms=10.0 + i)
        )
        for i in range(20)
    ]
    shown, note = plots.sample_points(dataframes.load_frames([build.write_records(tmp_path / "run", records)]).points)
    assert set(shown["backend"]) == {f"b{i:02}" for i in range(16)}
    assert "the 16 fastest of 20 layouts" in note
    shown, note = plots.sample_points(
        dataframes.load_frames([build.write_records(tmp_path / "few", records[:16])]).points
    )
    assert (len(shown), note) == (16, "")


def test_table_of_thousands_of_reasons_is_truncated(tmp_path: Path) -> None:
    """Every point failed with a different reason."""
    failed = (build.make_failed_record(build.make_point(TP, context=i), f"reason {i}") for i in range(1, 2_100))
    built = sections.build_sections(dataframes.load_frames([build.write_records(tmp_path / "run", failed)]), [])
    assert max(len(table.rows) for section in built for table in section.tables) == MAX_ROWS
    assert not findings.select_timed(dataframes.load_frames([tmp_path / "run"]).everything).size


def test_run_with_too_many_points_is_refused_with_a_suggestion(tmp_path: Path, monkeypatch) -> None:
    """The limit of 100,000 points is three here; a repeated point counts once."""
    monkeypatch.setattr(dataframes, "MAX_POINTS", 3)
    points = [make_line(build.make_ok_record(build.make_point(context=1000 + n))) for n in range(4)]
    assert len(dataframes.load_frames([run(tmp_path / "three", *points[:3], points[0])]).points) == 3
    with pytest.raises(RecordsError, match=r"four.records\.jsonl holds more than 3 points.*split -l 3"):
        dataframes.load_frames([run(tmp_path / "four", *points)])


@pytest.mark.parametrize(
    ("lengths", "loads", "shown", "note"),
    [
        (9, 48, (9, 48), ""),
        (10, 48, (6, 48), " (shown: 6 of 10 lengths; all in points.csv)"),
        (9, 49, (9, 24), " (shown: 24 of 49 loads; all in points.csv)"),
    ],
)
def test_lengths_and_loads_are_thinned_beyond_the_limits_of_a_figure(
    lengths: int, loads: int, shown: tuple[int, int], note: str
) -> None:
    pairs = [(length, load) for length in range(lengths) for load in range(1, loads + 1)]
    table = pd.DataFrame(pairs, columns=["input_typical", "concurrency"])
    table = table.assign(
        rest=table["input_typical"].astype(str),
        rest_parts=[(str(n),) for n in table["input_typical"]],
        run="r",
        label="tp4",
        output_tok_s=1.0,
    )
    few, found_note = plots.sample_points(table)
    assert ((few["rest"].nunique(), few["concurrency"].nunique()), found_note) == (shown, note)


@pytest.mark.parametrize("command", ["report", "show"])
def test_empty_record_file_is_an_error_with_a_suggestion(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(SystemExit) as e:
        cli.main([command, str(tmp_path)])
    assert e.value.code == 2
    assert (
        f"holds no record yet; wait for its run, repeat its command with -o {tmp_path} --resume"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "report").exists()
