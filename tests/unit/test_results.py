"""Committed reports in results/ equal those that `make results` writes from the raw records."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dcpbench.reports import dataframes, findings, overview, plots, points_export, report_markdown, sections

RESULTS = Path(__file__).parents[2] / "results"
LINES = [
    line.split(maxsplit=1)
    for line in (RESULTS / "reports.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def parse_command(command: str) -> tuple[list[Path], str, dict[str, bool]]:
    """Return the runs, the folder after -o, and the options of reading."""
    *words, _, out = shlex.split(command)
    return [Path(w) for w in words if w != "--as-repeats"], out, {"as_repeats": "--as-repeats" in words}


TRACKED = set(subprocess.check_output(["git", "ls-files", "."], cwd=RESULTS, text=True).split("\n"))
COMMITTED = [  # reports linked from a document; folders of other reports contain at most a picture
    (folder, command) for folder, command in LINES if f"{folder}/{parse_command(command)[1]}/points.csv" in TRACKED
]


def test_reports_linked_from_documents_are_committed() -> None:
    assert [(folder, parse_command(command)[1]) for folder, command in COMMITTED] == [
        ("decode_4xH200/decode-fp8_4xH200_2026-11-26", "report"),
        ("serving_4xH200/attention-dp-live_4xH200_2026-11-27", "report"),
    ]


@pytest.mark.parametrize(("folder", "command"), LINES, ids=[shlex.split(command)[-1] for _, command in LINES])
@pytest.mark.sample(4)
def test_every_report_can_be_written(
    folder: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text names every picture."""
    monkeypatch.chdir(RESULTS / folder)
    monkeypatch.setattr(plots.FigureWriter, "write_figure", lambda *_: b"")
    runs, _, options = parse_command(command)
    read = dataframes.load_frames(runs, **options)
    pictures = plots.draw_all(read, tmp_path / "figures")
    text = report_markdown.render(overview.format_title(read), sections.build_sections(read, pictures), tmp_path)
    assert [picture.png.name for picture in pictures if f"figures/{picture.png.name}" not in text] == []


@pytest.mark.parametrize(("folder", "command"), COMMITTED, ids=[shlex.split(command)[-1] for _, command in COMMITTED])
def test_committed_report_equals_that_of_its_records(
    folder: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures must exist, but are not drawn again, as fonts differ between machines."""
    monkeypatch.chdir(RESULTS / folder)
    monkeypatch.setattr(plots.FigureWriter, "write_figure", lambda *_: b"")
    runs, out, options = parse_command(command)
    read = dataframes.load_frames(runs, **options)
    pictures = plots.draw_all(read, tmp_path / "figures")
    title = overview.format_title(read)
    text = report_markdown.render(title, sections.build_sections(read, pictures), tmp_path)
    assert text == Path(out, "report.md").read_text(encoding="utf-8"), "run `make results` and commit what it wrote"
    points_export.write_csv(read, tmp_path / "points.csv")
    assert (tmp_path / "points.csv").read_bytes() == Path(out, "points.csv").read_bytes()
    shown: set[Any] = {picture.png.name for picture in pictures}
    assert shown == {path.name for path in Path(out, "figures").glob("*.png")}


def test_every_serving_and_decode_run_is_in_a_report() -> None:
    """Records in no report would be forgotten."""
    shown = {RESULTS / folder / run for folder, command in LINES for run in parse_command(command)[0]}
    runs = {
        path.parent for path in RESULTS.rglob("records.jsonl") if path.parents[1].name.startswith(("decode", "serving"))
    }
    assert runs - shown == set()


@pytest.mark.parametrize(("folder", "command"), LINES, ids=[shlex.split(command)[-1] for _, command in LINES])
def test_dcp_pays_in_loads_in_which_every_best_layout_has_dcp(
    folder: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways lead to the same loads: the comparison with the best other layout, and the layouts that none clearly
    beats.
    """
    monkeypatch.chdir(RESULTS / folder)
    runs, _, options = parse_command(command)
    points = findings.select_timed(dataframes.load_frames(runs, **options).everything)
    against = findings.compare_dcp_with_best(points)
    compared = against[~against["verdict"].isin(["no rival", "alone"])]
    pays = set(compared[compared["verdict"] == "higher"]["same_load"])
    best = findings.find_best_per_load(points)
    won = best[best["meets"].astype(bool) & best["same_load"].isin(set(compared["same_load"]))]
    with_dcp = [all("dcp" in label for label in labels) for labels in won["level"]]
    assert pays == set(won[with_dcp]["same_load"])


def test_dcp_pays_in_none_of_84_break_even_loads_within_slo(monkeypatch: pytest.MonkeyPatch) -> None:
    """README states this."""
    (folder, command) = next(line for line in LINES if "break-even" in line[1])
    monkeypatch.chdir(RESULTS / folder)
    runs, _, options = parse_command(command)
    against = findings.compare_dcp_with_best(findings.select_timed(dataframes.load_frames(runs, **options).everything))
    assert len(against.drop_duplicates(["model", "same_load"])) == 84
    assert not set(against["verdict"]) & {"higher", "alone"}
