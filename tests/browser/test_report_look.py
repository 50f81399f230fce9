"""Test the report page's appearance and robustness: screens, themes, paper, no scripts, hostile records, too many
points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.imports import Overrides, import_files
from dcpbench.points.layout import Layout
from dcpbench.reports import write_report
from dcpbench.reports.page import render
from tests.browser import pages
from tests.browser.test_report import ROWS, draw_panels, hover
from tests.unit import engine_files_builder, record_builder, serve_record_builder
from tests.unit.serve_record_builder import TP

if TYPE_CHECKING:
    from pathlib import Path

    from tests.browser.conftest import Visit

HOSTILE = (
    '<a href="javascript:alert(1)">x</a>',
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<b>%{x}</b>",
)
EMPTY = ".chart:not(:has(.main-svg))"
CONTRAST = """() => {
  const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const c = numbers(getComputedStyle(node).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const read = walker.currentNode.data.trim() && node.checkVisibility();
    if (!read || node.closest("svg, script, style, noscript")) continue;
    const [a, b] = [luminance(numbers(getComputedStyle(node).color)), luminance(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    seen += 1;
    if (ratio < 4.5) poor.push(`${node.tagName} ${walker.currentNode.data.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return [seen, poor];
}"""


@pytest.fixture(scope="module")
def combined_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build one report with decode points, served points and a rejected point."""
    records = [
        *pages.make_decode_records()[:8],
        *pages.make_served_records(),
        record_builder.make_rejected_record(record_builder.make_point(Layout(2))),
    ]
    return pages.write_page(tmp_path_factory.mktemp("both"), records)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_page_fits_the_screen_and_all_text_has_contrast(
    width: int, theme: str, combined_report: Path, visit: Visit
) -> None:
    """Require a contrast of 4.5 to 1 with all details open and one series off."""
    page = visit(combined_report, "#off.throughput=tp4", viewport={"width": width, "height": 800}, color_scheme=theme)
    draw_panels(page, "throughput")
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    seen, poor = page.evaluate(CONTRAST)
    assert seen > 200
    assert poor == []
    paper = page.evaluate("document.querySelector('#chart-throughput .chart')._fullLayout.paper_bgcolor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[theme]


@pytest.mark.parametrize("width", [700, 1400])
def test_every_section_is_visible_in_the_navigation(width: int, combined_report: Path, visit: Visit) -> None:
    """Check wider screens: a link cut off at the right would read "Whe". On a phone the row scrolls to save height."""
    page = visit(combined_report, viewport={"width": width, "height": 800})
    draw_panels(page, "throughput")
    links = page.locator("nav li:visible")
    assert links.count() == page.locator("main section:visible").count()
    assert page.locator("nav ul").evaluate("(row) => row.scrollWidth <= row.clientWidth")


def test_no_break_space_joins_a_number_and_its_unit() -> None:
    text = render.add_no_break_spaces("up to 25 % more on 4 × H200 (TTFT ≤ 2,000 ms, ITL ≤ 150 ms): 8 of 9 loads")
    assert text == "up to 25~% more on 4~×~H200 (TTFT~≤~2,000~ms, ITL~≤~150~ms): 8 of 9 loads".replace(
        "~", render.NO_BREAK
    )


def test_series_of_one_layout_at_the_same_load_are_drawn_side_by_side(visit: Visit, tmp_path: Path) -> None:
    """Draw two exchanges at 8 and 32 requests: both marks and intervals are visible, on either side of the load."""
    points = [
        record_builder.make_point(Layout(4, 1, 4), concurrency=n, exchange=x)
        for n in (8, 32)
        for x in ("ag_rs", "symm")
    ]
    plain = [record_builder.make_point(Layout(4), concurrency=n) for n in (8, 32)]
    page = visit(pages.write_page(tmp_path, [*map(record_builder.make_ok_record, (*points, *plain))]))
    chart = draw_panels(page, "throughput").first
    at = chart.evaluate("(one) => one.data.map((trace) => trace.x)")
    assert sorted(at)[1] == [8, 32], "the mark of tp4 is at its load"
    low, _, high = sorted(x[0] for x in at)
    assert low * high == pytest.approx(64)
    assert 0.9 * 8 < low < 8 < high
    boxes = [mark.bounding_box() for mark in chart.locator(".point").all()]
    assert len(boxes) == 6
    assert all(box and box["width"] > 0 for box in boxes)


def test_legend_that_fills_a_phone_screen_follows_its_chart(visit: Visit, tmp_path: Path) -> None:
    """Use a legend with the settings of six servers, which above the chart would push it off the first screen."""
    for share in (0.85, 0.9, 0.95):
        for seqs in (128, 256):
            server = {"gpu_memory_utilization": share, "max_num_batched_tokens": 4096 + seqs, "max_num_seqs": seqs}
            engine_files_builder.write_sweep(tmp_path / "sweep", server, {"max_concurrency": 8}, runs=1)
    import_files([tmp_path / "sweep"], "vllm", tmp_path / "run", Overrides(tp=8), force=False)
    path = pages.write_run_page(tmp_path, tmp_path / "run")
    for width, after in ((400, True), (1400, False)):
        page = visit(path, viewport={"width": width, "height": 800})
        chart = draw_panels(page, "throughput-serve-live").first.bounding_box()
        legend = page.locator("#chart-throughput-serve-live .legend").bounding_box()
        assert chart
        assert legend
        assert (chart["y"] < legend["y"]) is after
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert "copy" not in page.locator("#every-point").inner_text(), "dcpbench cannot repeat an imported measurement"


def test_points_without_kv_capacity_are_named_below_all_marks(visit: Visit, tmp_path: Path) -> None:
    points = [record_builder.make_point(layout, concurrency=8) for layout in (Layout(4), Layout(4, 1, 4))]
    lost = [
        record_builder.make_rejected_record(record_builder.make_point(x, concurrency=32))
        for x in (Layout(4), Layout(4, 1, 2))
    ]
    path = pages.write_run_page(
        tmp_path, record_builder.write_records(tmp_path / "run", [*map(record_builder.make_ok_record, points), *lost])
    )
    chart = draw_panels(visit(path), "overview").first
    labels = [text.bounding_box() for text in chart.locator(".annotation-text-g").all()]
    marks = [mark.bounding_box() for mark in chart.locator(".point").all()]
    assert len(labels) == 2
    assert all(mark and label and mark["y"] + mark["height"] <= label["y"] for mark in marks for label in labels)


def test_theme_button_switches_page_and_charts_and_is_remembered(combined_report: Path, visit: Visit) -> None:
    page = visit(combined_report, color_scheme="light")
    chart = draw_panels(page, "throughput").first
    page.get_by_role("button", name="Dark theme").click()
    page.wait_for_function("document.querySelector('.chart')._fullLayout.paper_bgcolor === 'rgb(20, 24, 29)'")
    assert chart.evaluate("chart => chart._fullLayout.font.color") == "rgb(230, 233, 237)"
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_page_can_be_used_by_keyboard(combined_report: Path, visit: Visit) -> None:
    """Check that the first tab stop skips the navigation, that a filter can be opened and set, and that focus is
    visible.
    """
    page = visit(combined_report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("#filters summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    count = page.locator(ROWS).count()
    page.keyboard.press("Space")
    assert 0 < page.locator(ROWS).count() < count
    charts = page.locator(".chart")
    assert all(chart.get_attribute("role") == "img" and chart.get_attribute("aria-label") for chart in charts.all())


def test_charts_below_the_fold_are_drawn_while_the_browser_is_idle(combined_report: Path, visit: Visit) -> None:
    """Check that all charts are drawn without scrolling, so that a screenshot of the whole page has them."""
    page = visit(combined_report, idle="globalThis.requestIdleCallback = (call) => { globalThis.rest = call; };")
    page.wait_for_selector("html[data-ready]")
    page.locator(".chart .main-svg").first.wait_for()
    assert page.locator(EMPTY).count() > 3
    while not page.evaluate("'drawn' in document.documentElement.dataset"):
        page.evaluate("rest()")
    assert page.locator(EMPTY).count() == 0
    assert page.evaluate("scrollY") == 0


def test_chart_with_many_marks_is_drawn_only_when_scrolled_into_view(
    tmp_path: Path, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lower the limit from 1,000 to 3 marks in a panel: Explore has 16, and phases have a bar for each of six."""
    read_asset = render.read_own_asset
    monkeypatch.setattr(
        render, "read_own_asset", lambda name: read_asset(name).replace("MAX_IDLE = 1000", "MAX_IDLE = 3")
    )
    page = visit(pages.write_page(tmp_path, pages.make_decode_records()))
    page.wait_for_selector("html[data-drawn]")
    explore = page.locator("#chart-explore .chart")
    placeholder = "getComputedStyle(document.querySelector('#chart-explore .chart'), '::before').content"
    assert page.evaluate(placeholder) == '"16 markers, drawn when they are scrolled into view."'
    explore.scroll_into_view_if_needed()
    explore.locator(".main-svg").first.wait_for()
    assert page.evaluate(placeholder) == "none"


def test_printed_page_has_all_charts_drawn_and_all_details_open(combined_report: Path, visit: Visit) -> None:
    """Print from the dark theme, without scrolling, before the browser has been idle."""
    page = visit(combined_report, color_scheme="dark", idle="globalThis.requestIdleCallback = () => {};")
    page.wait_for_selector("html[data-ready]")
    charts = page.locator(".chart").count()
    assert page.locator(".chart .main-svg").count() < 3 * charts
    paper = page.pdf(format="A4", print_background=True)
    assert paper.count(b"/Type /Page\n") >= 5
    assert page.locator(EMPTY).count() == 0
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("Math.max(...[...document.querySelectorAll('.chart')].map((c) => c._fullLayout.width))") <= 660
    assert page.evaluate("document.querySelector('.chart')._fullLayout.paper_bgcolor") == "rgb(255, 255, 255)"
    assert not page.locator("#filters").is_visible()
    assert not page.locator(".copy").first.is_visible()


def test_page_without_scripts_shows_pictures_and_tables(tmp_path: Path, visit: Visit) -> None:
    """Check also that controls that need scripts are hidden."""
    records = [
        record_builder.make_ok_record(record_builder.make_point(layout), steps=80)
        for layout in (Layout(4), Layout(4, 1, 4))
    ]
    report, *_ = write_report([record_builder.write_records(tmp_path / "run", records)], tmp_path / "report")
    page = visit(report, java_script_enabled=False)
    pictures = page.locator("figure img")
    assert pictures.count() == len(list((tmp_path / "report" / "figures").glob("*.svg")))
    for picture in pictures.all():
        assert picture.is_visible()
        assert picture.evaluate("image => image.naturalWidth") > 200
        assert (picture.get_attribute("alt") or "").strip()
    assert page.locator("table").first.is_visible()
    for name in ("#filters", "#explore", "#theme", ".panels", ".legend"):
        assert not page.locator(name).first.is_visible(), name


def test_markup_in_record_names_is_shown_as_text(tmp_path: Path, visit: Visit) -> None:
    """Put markup into model, backend, exchange, warning and device of decode and served points; the fixture `visit`
    reports dialogs and errors.
    """
    records = []
    for name in HOSTILE:
        environment = msgspec.structs.replace(record_builder.GPU, device=name, command=name)
        fields = {"model": name, "backend": name, "exchange": name, "dtype": name}
        point = record_builder.make_point(Layout(4, 1, 4), **fields)
        records += [
            record_builder.make_ok_record(point, steps=30, environment=environment, warnings=[name]),
            msgspec.structs.replace(
                serve_record_builder.make_served_record(serve_record_builder.make_point()),
                point=serve_record_builder.make_point(**fields),
                environment=environment,
            ),
        ]
    page = visit(pages.write_page(tmp_path, records))
    panels = draw_panels(page, "throughput")
    assert {hover(page, panel).split("\n")[2].split(", context")[0] for panel in panels.all()} == set(HOSTILE)
    for chart in ("kv", "phases", "throughput-serve-live"):
        draw_panels(page, chart)
    page.get_by_label("colour by").select_option("device")
    draw_panels(page, "explore")
    assert set(HOSTILE) <= set(page.locator(f"{ROWS} td").all_inner_texts())
    assert set(HOSTILE) <= set(page.locator("#chart-explore .switch").all_inner_texts())
    assert page.locator("a:not([href^='#']), main img[src='x'], .panels a, .panels image, [onerror]").count() == 0


def test_page_with_too_many_points_names_how_many_it_shows(tmp_path: Path, visit: Visit) -> None:
    page = visit(pages.write_page(tmp_path, pages.make_decode_records(), max_points=5))
    assert page.locator(ROWS).count() == 5
    note = page.locator("#explore .mark").inner_text()
    assert note.startswith("Charts and the table of points show the first 5 of 16 points; points.csv")


def test_long_table_shows_100_rows_and_the_rest_on_request(tmp_path: Path, visit: Visit) -> None:
    """Use 120 points."""
    records = [
        record_builder.make_ok_record(record_builder.make_point(concurrency=n), steps=20, phases=None)
        for n in range(1, 121)
    ]
    page = visit(pages.write_page(tmp_path, records))
    assert page.locator(ROWS).count() == 100
    page.get_by_role("button", name="Show 20 more").click()
    assert page.locator(ROWS).count() == 120


def test_run_without_finished_points_has_a_page_with_the_refusal(tmp_path: Path, visit: Visit) -> None:
    page = visit(pages.write_page(tmp_path, [record_builder.make_rejected_record(record_builder.make_point())]))
    assert page.get_by_text("try --dcp 4").first.is_visible()
    assert not page.locator("#filters").is_visible()
    assert page.locator("#explore").count() == 0


def test_layouts_drawn_side_by_side_stay_inside_the_frame(tmp_path: Path, visit: Visit) -> None:
    """Five numbers of instances of tp4 have one colour, at two loads."""
    points = [
        serve_record_builder.make_point(TP, concurrency, {"mode": "replay"}, disaggregate=instances)
        for concurrency in (4, 8)
        for instances in ("", "2", "3", "4", "5")
    ]
    page = visit(pages.write_page(tmp_path, [serve_record_builder.make_served_record(point) for point in points]))
    chart = draw_panels(page, "throughput-serve-replay").first
    xs = chart.evaluate("(one) => one.data.flatMap((trace) => [...trace.x])")
    low, high = chart.evaluate("(one) => one._fullLayout.xaxis.range")
    assert len(set(xs)) == 10
    assert low < min(xs) < max(xs) < high
