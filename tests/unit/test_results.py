"""The reports under results/: what is committed is what `make results` makes of the raw records."""

from __future__ import annotations

import shlex
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


def arguments(typed: str) -> tuple[list[Path], str, dict[str, bool]]:
    """The runs, the folder after -o, and how they are read."""
    *words, _, out = shlex.split(typed)
    return [Path(w) for w in words if w != "--as-repeats"], out, {"as_repeats": "--as-repeats" in words}


COMMITTED = [  # reports that a document links; the folder of another holds a picture at most
    (folder, typed) for folder, typed in LINES if (RESULTS / folder / arguments(typed)[1] / "points.csv").is_file()
]


def test_the_reports_that_documents_link_are_committed() -> None:
    assert [(folder, arguments(typed)[1]) for folder, typed in COMMITTED] == [
        ("decode_4xH200/decode-fp8_4xH200_2026-11-26", "report"),
        ("serving_4xH200/attention-dp-live_4xH200_2026-11-27", "report"),
    ]


@pytest.mark.parametrize(("folder", "typed"), LINES, ids=[shlex.split(typed)[-1] for _, typed in LINES])
@pytest.mark.sample(4)
def test_every_report_can_be_written(folder: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names every picture."""
    monkeypatch.chdir(RESULTS / folder)
    monkeypatch.setattr(plots.FigureWriter, "write_figure", lambda *_: b"")
    runs, _, how = arguments(typed)
    read = dataframes.load_frames(runs, **how)
    pictures = plots.draw_all(read, tmp_path / "figures")
    text = report_markdown.render(overview.format_title(read), sections.build_sections(read, pictures), tmp_path)
    assert [picture.png.name for picture in pictures if f"figures/{picture.png.name}" not in text] == []


@pytest.mark.parametrize(("folder", "typed"), COMMITTED, ids=[shlex.split(typed)[-1] for _, typed in COMMITTED])
def test_a_committed_report_says_what_its_records_say(
    folder: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word; the figures are there, and are not drawn again, as fonts differ from one machine to the next."""
    monkeypatch.chdir(RESULTS / folder)
    monkeypatch.setattr(plots.FigureWriter, "write_figure", lambda *_: b"")
    runs, out, how = arguments(typed)
    read = dataframes.load_frames(runs, **how)
    pictures = plots.draw_all(read, tmp_path / "figures")
    title = overview.format_title(read)
    text = report_markdown.render(title, sections.build_sections(read, pictures), tmp_path)
    assert text == Path(out, "report.md").read_text(encoding="utf-8"), "run `make results` and commit what it wrote"
    points_export.write_csv(read, tmp_path / "points.csv")
    assert (tmp_path / "points.csv").read_bytes() == Path(out, "points.csv").read_bytes()
    shown: set[Any] = {picture.png.name for picture in pictures}
    assert shown == {path.name for path in Path(out, "figures").glob("*.png")}


def test_every_serving_and_decode_run_stands_in_a_report() -> None:
    """A folder of records that nothing shows would be forgotten."""
    shown = {RESULTS / folder / run for folder, typed in LINES for run in arguments(typed)[0]}
    runs = {
        path.parent for path in RESULTS.rglob("records.jsonl") if path.parents[1].name.startswith(("decode", "serving"))
    }
    assert runs - shown == set()


@pytest.mark.parametrize(("folder", "typed"), LINES, ids=[shlex.split(typed)[-1] for _, typed in LINES])
def test_dcp_pays_in_the_loads_in_which_every_best_layout_has_it(
    folder: str, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ways to the same loads: against the best other layout, and among the layouts that none clearly beats."""
    monkeypatch.chdir(RESULTS / folder)
    runs, _, how = arguments(typed)
    points = findings.select_rivals(dataframes.load_frames(runs, **how))
    against = findings.compare_dcp_with_best(points)
    compared = against[~against["verdict"].isin(["no rival", "alone"])]
    pays = set(compared[compared["verdict"] == "higher"]["same_load"])
    best = findings.find_best_per_load(points)
    won = best[best["meets"].astype(bool) & best["same_load"].isin(set(compared["same_load"]))]
    with_dcp = [all("dcp" in label for label in labels) for labels in won["level"]]
    assert pays == set(won[with_dcp]["same_load"])


def test_within_its_slo_dcp_pays_in_none_of_the_84_loads_of_the_break_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """README says so."""
    (folder, typed) = next(line for line in LINES if "break-even" in line[1])
    monkeypatch.chdir(RESULTS / folder)
    runs, _, how = arguments(typed)
    against = findings.compare_dcp_with_best(findings.select_rivals(dataframes.load_frames(runs, **how)))
    assert len(against.drop_duplicates(["model", "same_load"])) == 84
    assert not set(against["verdict"]) & {"higher", "alone"}
