"""Whole reports of made-up records, with the content that readers or attackers look for."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import msgspec
import pandas as pd
import pytest
from rich.console import Console

from dcpbench import cli
from dcpbench.errors import OutputError, RecordsError, UsageError
from dcpbench.points.layout import Layout
from dcpbench.reports import (
    dataframes,
    figures,
    findings,
    plots,
    render_terminal_table,
    report_markdown,
    sections,
    tables,
    write_report,
)
from dcpbench.reports.page import render as page_render
from dcpbench.show import web
from tests.unit import record_builder as build
from tests.unit.unsaved_figures import leave_figures_unsaved

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from dcpbench.records.record import Record

HOSTILE = "<script>alert(1)</script>\"' onload=x $\\frac{1}{ | `a` \x1b[31m [red]r[/red] \N{RIGHT-TO-LEFT OVERRIDE}"
NAMESPACE = re.compile(r"http://www\.w3\.org/[\w./]+")  # XML namespaces of SVG, which are never fetched


class Page(HTMLParser):
    """Tags, addresses, scripts and visible text of a page without running its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.alts: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "srcset", "href"}]
        self.alts += [value or "" for name, value in attrs if name == "alt"]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)
        elif self.cdata_elem != "style":
            self.text += data.replace(page_render.NO_BREAK, " ")


def report(tmp_path: Path, records: list[Record]) -> tuple[Page, Path]:
    """Write a report of one run; return its page and its folder."""
    out = tmp_path / "report"
    paths = write_report([build.write_records(tmp_path / "run", records)], out)
    assert paths[0] == out / "report.html"
    assert all(path.is_file() for path in paths)
    return Page(paths[0].read_text(encoding="utf-8")), out


def terminal(folders: list[Path], width: int = 80) -> str:
    """Return the terminal table as a pipe gets it."""
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(render_terminal_table(folders))
    return captured.get()


def small(**changes: object) -> list[Record]:
    """Return records of tp4 and tp4·dcp4 at two loads."""
    return [
        build.make_ok_record(build.make_point(layout, concurrency=load), steps=80, **changes)  # type: ignore[arg-type]
        for load in (8, 32)
        for layout in (Layout(4), Layout(4, 1, 4))
    ]


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures without rendering them."""
    leave_figures_unsaved(monkeypatch)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, Path]:
    """Write the report of `small` once."""
    return report(tmp_path_factory.mktemp("small"), small())


FIGURES = [  # of a report of `small`, without file extensions
    *(f"{kind}-kimi-k2" for kind in ("throughput", "itl", "frontier", "phases", "kv")),
    "break-even-all",
    "overview-all",
]


def test_report_has_page_markdown_table_and_figures_in_two_formats(written: tuple[Page, Path]) -> None:
    """One model has throughput, ITL, frontier, phases, KV and break-even, each as PNG and SVG."""
    _, out = written
    assert {p.name for p in out.iterdir()} == {"report.html", "report.md", "points.csv", "figures"}
    assert {p.name for p in (out / "figures").iterdir()} == {f"{n}.{e}" for n in FIGURES for e in ("png", "svg")}


@pytest.mark.usefixtures("unsaved")
def test_report_has_every_figure_as_pdf_with_the_pdf_option(tmp_path: Path) -> None:
    """The next report without the option removes them."""
    run, out = build.write_records(tmp_path / "run", small()), tmp_path / "report"
    for options, ends in ((["--pdf"], ("png", "svg", "pdf")), ([], ("png", "svg"))):
        with pytest.raises(SystemExit) as end:
            cli.main(["report", str(run), "-o", str(out), *options])
        assert not end.value.code
        assert {p.name for p in (out / "figures").iterdir()} == {f"{n}.{e}" for n in FIGURES for e in ends}


def test_page_has_no_external_address(written: tuple[Page, Path]) -> None:
    """Every address is inside the page; an XML namespace is only a name."""
    page, out = written
    assert page.addresses
    assert all(a.startswith(("data:image/svg+xml,", "#")) for a in page.addresses)
    assert not {"link", "iframe"} & set(page.tags)
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "http" not in NAMESPACE.sub("", text).replace("http-equiv", "")


def test_every_picture_has_an_alternative_text(written: tuple[Page, Path]) -> None:
    """The texts of all seven pictures name the layouts."""
    page, _ = written
    assert len(page.alts) == 7
    assert all("tp4·dcp4" in alt for alt in page.alts)


def test_reports_of_the_same_records_have_the_same_bytes(tmp_path: Path, written: tuple[Page, Path]) -> None:
    """Pages and pictures have no dates or random names, so committed results do not change by themselves."""
    _, first = written
    second = write_report([build.write_records(tmp_path / "run", small())], tmp_path / "b")
    assert {p.relative_to(tmp_path / "b"): p.read_bytes() for p in second} == {
        p.relative_to(first): p.read_bytes() for p in first.rglob("*") if p.is_file()
    }


def test_hostile_strings_are_escaped(tmp_path: Path) -> None:
    """HTML, mathematics, table bars, markup and escapes are in names, reasons, details, commands, versions and marks."""
    environment = msgspec.structs.replace(build.GPU, command=HOSTILE, torch=HOSTILE, device=HOSTILE, driver=HOSTILE)
    bad = build.make_point(Layout(4), model=HOSTILE, backend=HOSTILE, weights=HOSTILE)
    records = [
        build.make_ok_record(bad, steps=30, environment=environment, warnings=[HOSTILE]),
        msgspec.structs.replace(build.make_failed_record(bad, HOSTILE), detail={HOSTILE: HOSTILE}, warnings=[HOSTILE]),
    ]
    records[1] = msgspec.structs.replace(records[1], point=msgspec.structs.replace(bad, concurrency=9))
    page, out = report(tmp_path, records)
    own = [*map(web.read_asset, web.SCRIPTS), *map(page_render.read_own_asset, page_render.OWN_SCRIPTS)]
    assert [script for script in page.scripts if script in own] == own
    assert len(page.scripts) == len(own) + 2, "further scripts are the data and the packed plotly.js"
    assert "<script>alert(1)</script>" in page.text
    markdown = (out / "report.md").read_text(encoding="utf-8")
    fenced = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in HOSTILE)
    assert "<script>alert(1)" not in markdown.replace(f"\n{fenced}\n", "")
    figures = [path.name.replace("-", "").replace("_", "").split(".")[0] for path in (out / "figures").iterdir()]
    assert figures
    assert all(name.isalnum() for name in figures)
    printed = terminal([tmp_path / "run"])
    assert "\x1b" not in printed
    assert "[red]" in printed.replace("\n", "")


@pytest.mark.usefixtures("unsaved")
def test_model_name_cannot_write_outside_the_report(tmp_path: Path) -> None:
    """`../../x` becomes a plain file name, and two names that give the same file name do not overwrite each other."""
    points = [build.make_point(Layout(4), model=model) for model in ("../../x", "x", "...", "///")]
    records = [build.make_ok_record(point, steps=30, metrics=None, phases=None) for point in points]
    _, out = report(tmp_path, records)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "report"}
    names = {p.stem for p in (out / "figures").iterdir() if p.stem.startswith("kv")}
    assert names == {"kv-x", "kv-x-2", "kv-unnamed", "kv-unnamed-2"}


def test_log_of_a_megabyte_is_truncated_to_its_end(tmp_path: Path) -> None:
    long = msgspec.structs.replace(
        build.make_failed_record(build.make_point()), detail={"log": "x" * 1_000_000 + "END"}
    )
    page, _ = report(tmp_path, [long])
    assert "END" in page.text
    assert len(page.text) < 100_000


@pytest.mark.usefixtures("unsaved")
def test_truncated_last_line_is_reported_and_the_rest_is_used(tmp_path: Path) -> None:
    """The file has two complete lines and half a line."""
    folder = build.write_records(tmp_path / "run", small()[:2])
    with (folder / "records.jsonl").open("ab") as f:
        f.write(msgspec.json.encode(small()[2])[:200])
    page, out = report_folder(folder, tmp_path / "out")
    assert "the last line of its record file was cut short" in page.text
    assert len(pd.read_csv(out / "points.csv")) == 2


def report_folder(folder: Path, out: Path) -> tuple[Page, Path]:
    """Write a report of an existing run folder."""
    return Page(write_report([folder], out)[0].read_text(encoding="utf-8")), out


def test_report_of_rejected_points_has_reasons_and_no_figures(tmp_path: Path) -> None:
    page, out = report(
        tmp_path, [build.make_rejected_record(build.make_point(Layout(4), concurrency=load)) for load in (8, 32)]
    )
    assert "No point finished: 2 rejected for lack of memory." in page.text
    assert "31.0 GiB more per GPU" in page.text
    assert not page.alts
    assert list(pd.read_csv(out / "points.csv")["outcome"]) == ["rejected", "rejected"]
    assert "No point finished" in terminal([tmp_path / "run"]).replace("\n", " ")


def test_run_without_a_record_raises_records_error(tmp_path: Path) -> None:
    """The record file is empty if a sweep is stopped before its first point."""
    with pytest.raises(
        RecordsError, match=r"holds no record yet; wait for its run, repeat its command with -o .* --resume"
    ):
        report(tmp_path, [])


def test_impossible_degrees_are_reported_as_requested(tmp_path: Path) -> None:
    """tp4 with dcp3 is no layout, but it was requested and rejected."""
    bad = build.make_point().__class__(
        model="m", tp=4, dcp=3, concurrency=1, context=1, backend="reference", dtype="float32"
    )
    page, _ = report(tmp_path, [build.make_rejected_record(bad, "--dcp 3 does not divide --tp 4")])
    assert "tp4·dp1·dcp3" in page.text


def test_names_with_letters_missing_from_the_font_do_not_warn(tmp_path: Path) -> None:
    """Warnings are errors here; in a terminal they would hide the table."""
    page, _ = report(tmp_path, [build.make_ok_record(build.make_point(model="模型"), steps=30, phases=None)])
    assert "模型" in page.text


def test_report_of_one_point_has_no_comparison(tmp_path: Path) -> None:
    page, _ = report(tmp_path, small()[:1])
    assert "Highest throughput of each load" not in page.text
    assert "measured once" in page.text
    assert len(page.alts) == 5


@pytest.mark.usefixtures("unsaved")
def test_record_without_metrics_has_dashes_and_a_reason(tmp_path: Path) -> None:
    """The point ended successfully, but its record has nothing else."""
    bare = msgspec.structs.replace(
        small()[0],
        metrics=None,
        phases=None,
        kv=None,
        conditions=None,
        gpu=None,
        host_syncs_per_step=None,
        environment=None,
    )
    page, out = report(tmp_path, [bare])
    assert "some records hold no metrics" in page.text
    assert not page.alts
    row = (out / "report.md").read_text(encoding="utf-8").split("**Medians")[1].split("\n")[4]
    assert row.startswith("| kimi-k2 | 4,000 | 8 | tp4 | — | — | — |")


def test_point_without_a_profile_is_drawn_as_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two points ran with --no-profile: it gets a note instead of a bar of length 0."""
    monkeypatch.setattr(figures, "LINES", ())
    records = small()
    records[0] = msgspec.structs.replace(records[0], phases=None, host_syncs_per_step=None)
    page, out = report(tmp_path, records)
    assert "no profiled pass" in page.text
    assert (out / "figures" / "phases-kimi-k2.png").is_file()


def test_percentiles_with_too_few_samples_are_dashes_with_a_reason(written: tuple[Page, Path]) -> None:
    """80 steps are enough for p90 (64), but not for p95 (130) and p99 (662)."""
    page, _ = written
    assert "p90 needs" not in page.text
    assert "p95 needs 130 steps in one measurement; p99 needs 662" in page.text


@pytest.mark.usefixtures("unsaved")
def test_cpu_report_has_no_statement_about_performance(tmp_path: Path) -> None:
    """The page has the mark, and no sentence compares speeds."""
    page, out = report(tmp_path, build.make_cpu_sweep())
    assert "CPU: functional run, not performance." in page.text
    assert "No conclusion about performance can be drawn" in page.text
    assert "highest throughput" not in page.text
    assert "Throughput with DCP over" not in page.text
    assert all("functional run" in alt for alt in page.alts)
    assert "functional run" in (out / "report.md").read_text(encoding="utf-8")
    assert "CPU: functional run" in terminal([tmp_path / "run"])


@pytest.mark.usefixtures("unsaved")
def test_several_runs_are_joined_with_a_column_of_runs(tmp_path: Path) -> None:
    """Two runs of the same sweep also count as repeats."""
    a, b = (
        build.write_records(tmp_path / name, [msgspec.structs.replace(r, started_at=f"on {name}") for r in small()])
        for name in ("monday", "tuesday")
    )
    page, out = report_folders([a, b], tmp_path / "out")
    table = pd.read_csv(out / "points.csv")
    assert sorted(set(table["run"])) == ["monday", "tuesday"]
    assert "at all 4 points measured more than once" in page.text
    assert "kimi-k2, run monday:" in page.text


def report_folders(folders: list[Path], out: Path) -> tuple[Page, Path]:
    """Write one report of several folders."""
    return Page(write_report(folders, out)[0].read_text(encoding="utf-8")), out


@pytest.mark.long
def test_page_of_many_points_is_below_2_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has 136 measurements of 68 points and 8 rejections; pictures are SVG."""
    save = plots.save_figure
    monkeypatch.setattr(plots, "save_figure", lambda figure, path, *_: save(figure, path, "svg"))
    build.write_records(tmp_path / "run", build.make_gpu_sweep())
    out = tmp_path / "report"
    page, _ = report_folder(tmp_path / "run", out)
    assert (out / "report.html").stat().st_size < 2_000_000
    assert len(page.alts) == 12
    assert "Repeats differ by more than 2 % at 2 of 68 points measured more than once." in page.text


def test_terminal_table_fits_eighty_columns(tmp_path: Path) -> None:
    """No number is truncated."""
    text = terminal([build.write_records(tmp_path / "run", small())])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "tp4·dcp4" in text


@pytest.mark.usefixtures("unsaved")
def test_csv_starts_no_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    """A reason that begins with = is kept as text."""
    _, out = report(tmp_path, [build.make_rejected_record(build.make_point(), "=cmd|' /C calc'!A0")])
    assert pd.read_csv(out / "points.csv")["reason"][0] == "'=cmd|' /C calc'!A0"


def test_missing_and_unwritable_folders_raise_errors(tmp_path: Path) -> None:
    """Each error has a suggestion."""
    with pytest.raises(UsageError, match="no run folder"):
        write_report([], tmp_path)
    with pytest.raises(RecordsError, match="does not exist"):
        write_report([tmp_path / "none"], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"Not a directory.* Type `dcpbench report .*run -o ELSEWHERE`"):
        write_report(
            [build.write_records(tmp_path / "run", [build.make_ok_record(build.make_point())])], tmp_path / "file"
        )


def test_importing_reports_does_not_import_heavy_libraries() -> None:
    """The command line imports this package; pandas and matplotlib are imported when a report is written."""
    code = "import sys, dcpbench.reports; print(sorted({'pandas', 'matplotlib', 'torch', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_logarithmic_axes_of_all_figures_are_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of 8 and 32 are drawn on a logarithmic scale."""
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path, *formats: str) -> list[Path]:
        drawn[path.name] = figure
        return [path.with_suffix(f".{form}") for form in formats]

    monkeypatch.setattr(plots, "save_figure", keep)
    plots.draw_all(dataframes.load_frames([build.write_records(tmp_path / "run", small())]), tmp_path)
    labels = {
        name: {ax.get_xlabel() for ax in figure.axes if ax.get_xscale() == "log"} for name, figure in drawn.items()
    }
    logarithmic = {name.partition("-")[0]: found for name, found in labels.items() if found}
    assert logarithmic.keys() == {"overview", "throughput", "itl", "break"}
    assert all(found == {"concurrency (requests in flight, log scale)"} for found in logarithmic.values())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Markdown of one point with a pool of 3 MiB, a peak of 5 MiB, and two of NCCL's variables."""
    record = build.make_ok_record(build.make_point(Layout(2)), memory_peak_bytes=5 << 20)
    assert record.kv
    kv = msgspec.structs.replace(record.kv, pool_bytes_per_gpu=3 << 20, capacity_tokens=3000)
    settings = {"NCCL_DEBUG": "INFO", "NCCL_CUMEM_ENABLE": "0"}
    where = msgspec.structs.replace(build.GPU, settings=settings)
    folder = tmp_path_factory.mktemp("small-things")
    record = msgspec.structs.replace(record, kv=kv, environment=where, warnings=["throttled"])
    read = dataframes.load_frames([build.write_records(folder, [record])])
    return report_markdown.render("title", sections.build_sections(read, []), folder).replace("\\", "")


class TestSmallNumbers:
    """Small numbers are formatted neither as plurals nor as zero."""

    def test_count_of_one_point_is_singular(self, text: str) -> None:
        assert "(checked for 1 of 1 point)" in text
        assert "Points with a warning, of 1: 1 throttled" in text
        assert not re.search(r"\b1 points", text)

    def test_small_pool_is_not_rounded_to_zero(self, text: str) -> None:
        """3 MiB are 0.0029 GiB, 5 MiB 0.0049 GiB."""
        assert "| kimi-k2 | tp2 | kv_memory | 0.0029 |" in text
        assert re.search(r"\| kimi-k2 \| tp2 \| synthetic .*\| 0.0049 \|", text)

    def test_environment_variables_are_written_as_in_a_shell(self, text: str) -> None:
        assert "| settings | NCCL_CUMEM_ENABLE=0 NCCL_DEBUG=INFO |" in text
        assert "{" not in text


def test_busiest_rank_of_expert_parallelism_is_named_if_recorded(tmp_path: Path) -> None:
    """All ranks with tensor-parallel experts read the same amount; older records have no such column."""
    points = {ep: build.make_ok_record(build.make_point(Layout(4), ep=ep)) for ep in ("1", "tp")}
    records_by_ep = {}
    for ep, ratio in (("1", 1.0), ("tp", 1.25)):
        assert points[ep].conditions
        conditions = msgspec.structs.replace(points[ep].conditions, busiest_rank_experts=ratio)
        records_by_ep[ep] = msgspec.structs.replace(points[ep], conditions=conditions)

    def render_text(name: str, *records: Record) -> str:
        read = dataframes.load_frames([build.write_records(tmp_path / name, [*records])])
        return report_markdown.render("title", sections.build_sections(read, []), tmp_path).replace("\\", "")

    text = render_text("run", *records_by_ep.values())
    assert "the busiest rank had 1.25 × as many experts to read as the mean, and the others waited for it." in text
    assert re.search(r"experts hit \| busiest rank's experts \|", text)
    assert re.search(r"\| tp4 \(ep1\) .* \| 0.63 \| 1.00 \|", text)
    assert re.search(r"\| tp4 \(ep4\) .* \| 0.63 \| 1.25 \|", text)
    assert "busiest" not in render_text("old", points["tp"])


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "—"), (0, "0"), (3 << 20, "0.0029"), (1 << 29, "0.50"), (1 << 30, "1.0"), (20 << 30, "20.0")],
)
def test_memory_below_a_gib_keeps_its_digits(value: int | None, text: str) -> None:
    assert tables.format_gib(value) == text


def test_report_computes_each_finding_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer, tables, figures and page of a report all use them."""
    calls: list[str] = []

    def count_calls(name: str) -> None:
        original = getattr(findings, name)
        monkeypatch.setattr(findings, name, lambda points: (calls.append(name), original(points))[1])

    names = [
        "find_best_per_load",
        "find_best_per_request_length",
        "compare_dcp_with_baseline",
        "find_break_even",
        "compare_dcp_with_best",
    ]
    for name in (*names, "compare_repeats"):
        count_calls(name)
    points = [build.make_point(layout, concurrency=n) for layout in (Layout(4), Layout(4, 1, 4)) for n in (8, 16)]
    write_report(
        [build.write_records(tmp_path / "run", [build.make_ok_record(p) for p in points])],
        tmp_path / "report",
        page_only=True,
    )
    assert sorted(calls) == sorted([*names, "compare_repeats"])


def test_plotly_is_in_the_page_or_in_a_shared_file(tmp_path: Path) -> None:
    """Packed, it is most of a page. A policy allows the shared file only in pages that name it."""
    run = build.write_records(tmp_path / "run", [build.make_ok_record(build.make_point(Layout(4)))])
    alone = write_report([run], tmp_path / "alone", page_only=True)[0].read_text()
    shared = write_report([run], tmp_path / "shared", page_only=True, plotly="../plotly.js")[0].read_text()
    assert '<script type="text/plain" id="plotly">' in alone
    assert "data-plotly" not in alone.partition("<head>")[0]
    assert "script-src &#39;sha256-" in alone
    assert '<script type="text/plain" id="plotly">' not in shared
    assert '<html lang="en" data-plotly="../plotly.js">' in shared
    assert "script-src &#39;self&#39; &#39;sha256-" in shared
    assert len(shared) < len(alone) - 400_000


def test_page_only_report_has_charts_and_no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard writes such pages: pictures take most of the time of a report, and scripts draw the charts."""
    monkeypatch.setattr(plots.FigureWriter, "write_figure", lambda *_: pytest.fail("drawn"))
    run = build.write_records(
        tmp_path / "run", [build.make_ok_record(build.make_point(x)) for x in (Layout(4), Layout(4, 1, 4))]
    )
    page, table = write_report([run], tmp_path / "report", page_only=True)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted([page.name, table.name])
    text = page.read_text()
    assert 'id="chart-throughput"' in text
    assert "<img" not in text
    assert "dcpbench report" in text, "the page has the command that draws pictures"
    assert "holds the pictures" not in text


def test_first_middle_and_last_of_many_loads_are_drawn() -> None:
    assert figures._select_some([1, 2, 3, 4, 8]) == [1, 3, 8]
    assert figures._select_some([1, 2, 3]) == [1, 2, 3]
