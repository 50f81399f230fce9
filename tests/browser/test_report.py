"""The report's page as a reader has it: opened from a file, without a network, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from dcpbench.points.layout import Layout
from dcpbench.records.record import Floor
from dcpbench.reports.reproduce import build_command
from tests.browser import pages
from tests.browser.pointer import point_at
from tests.unit import record_builder

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Locator, Page

    from tests.browser.conftest import Visit

ROWS = "#every-point tbody tr"


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.page(tmp_path_factory.mktemp("decode"), pages.decode())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.page(tmp_path_factory.mktemp("served"), pages.served())


def drawn(page: Page, chart: str) -> Locator:
    """The panels of a chart, scrolled to, once all are drawn."""
    page.wait_for_selector("html[data-ready]")
    figure = page.locator(f"#chart-{chart}")
    for panel in figure.locator(".chart").all():
        panel.scroll_into_view_if_needed()
        panel.locator(".main-svg").first.wait_for()
    return figure.locator(".chart")


def lines(page: Page, chart: str) -> int:
    """Lines in all panels of a chart."""
    return drawn(page, chart).locator(".scatterlayer .trace").count()


def hover(page: Page, chart: Locator, nth: int = 0) -> str:
    """What the page says of a mark when a pointer comes over it."""
    point_at(page, chart.locator(".point").nth(nth))
    return "\n".join(page.locator(".tip > *").all_inner_texts())


def column(page: Page, header: str) -> list[str]:
    """The cells below a header of the table of points, first value of each."""
    heads = [text.strip() for text in page.locator("#every-point th").all_text_contents()]
    cells = page.locator(f"{ROWS} td:nth-child({heads.index(header) + 1})").all_text_contents()
    return [cell.split(" [")[0] for cell in cells]


def test_every_chart_is_drawn_with_a_panel_for_what_lines_must_not_share(decode: Path, visit: Visit) -> None:
    """Two models and two contexts are four panels of two lines; KV capacity has two measures of two models."""
    page = visit(decode)
    for chart in ("throughput", "itl", "phases", "kv"):
        assert drawn(page, chart).count() == 4, chart
    assert lines(page, "throughput") == 8
    titles = page.locator("#chart-throughput .panel-title").all_text_contents()
    assert titles[0] == "deepseek-v3, context 4,000 tokens"


def test_a_pointer_over_a_mark_shows_the_numbers_of_the_record(decode: Path, visit: Visit) -> None:
    """deepseek-v3 comes first, at context 4,000; its first line is tp4, whose first mark is concurrency 8."""
    record = record_builder.ok(record_builder.point(Layout(4), model="deepseek-v3", concurrency=8))
    assert record.metrics
    rate, step = record.metrics.output_tok_s, record.metrics.step_ms
    page = visit(decode)
    said = hover(page, drawn(page, "throughput").first)
    assert f"output\n{rate.median:,.1f} tok/s [95 %: {rate.low:,.1f}–{rate.high:,.1f}]" in said
    assert f"step time\n{step.median:,.2f} ms [95 %: {step.low:,.2f}–{step.high:,.2f}]" in said
    assert f"output per GPU\n{record.metrics.output_tok_s_per_gpu:,.1f} tok/s/GPU" in said
    assert "tp4" in said


def test_marks_that_all_points_have_stand_beside_none(tmp_path: Path, visit: Visit) -> None:
    """Both points are throttled and one is noisy: neither the table nor a tooltip says more than that."""
    records = [
        record_builder.ok(record_builder.point(layout), warnings=["throttled", *more], phases=None)
        for layout, more in ((Layout(4), []), (Layout(4, 1, 4), ["noisy"]))
    ]
    page = visit(pages.page(tmp_path, records))
    assert column(page, "warnings") == ["–", "noisy"]
    panel = drawn(page, "throughput").first
    plain, noisy = (hover(page, panel, nth) for nth in (0, 1))
    assert "warnings" not in plain
    assert "warnings\nnoisy\n" in noisy


def test_where_dcp_pays_is_a_ratio_to_the_same_layout_without_it(decode: Path, visit: Visit) -> None:
    """The made-up steps of deepseek-v3 at context 4,000 and concurrency 8: tp4·dcp4 over tp4."""
    alone, split = (
        record_builder.ok(record_builder.point(layout, model="deepseek-v3", concurrency=8)).metrics
        for layout in (Layout(4), Layout(4, 1, 4))
    )
    assert alone
    assert split
    ratio = split.output_tok_s.median / alone.output_tok_s.median
    page = visit(decode)
    panels = drawn(page, "break-even")
    assert panels.count() == 4
    assert lines(page, "break-even") == 4, "tp4 has no DCP that could pay"
    said = hover(page, panels.first)
    assert f"output over the same layout without DCP\n{ratio:.3g} ×" in said
    assert "compared with\ntp4: " in said


def test_phases_have_their_floors_inside_them_and_say_them(tmp_path: Path, visit: Visit) -> None:
    """100 ms a step of which attention takes 34 and moe 31; their floors are 20.4 and 24.8, thin bars of one trace more."""
    floor = Floor(floor_ms=60, phase_floor_us={"attention": 20_400, "moe": 24_800}, experts="routed")
    record = record_builder.ok(record_builder.point(Layout(4)), median_ms=100, noise=0, steps=30, floor=floor)
    page = visit(pages.page(tmp_path, [record]))
    chart = drawn(page, "phases").first
    traces = chart.locator(".barlayer .trace")
    with_floors = traces.count()
    assert traces.last.locator(".point").count() == 2
    assert "floor\n20.40 ms, 0.60 of its time" in hover(page, chart)
    page.locator("#chart-phases").get_by_role("button", name="floor", exact=True).click()
    page.wait_for_function(
        "n => document.querySelectorAll('#chart-phases .barlayer .trace').length === n", arg=with_floors - 1
    )


def test_a_filter_acts_on_all_charts_and_on_the_table_and_is_remembered(decode: Path, visit: Visit) -> None:
    page = visit(decode)
    assert page.locator(ROWS).count() == 16
    page.locator("#filters summary").click()
    page.get_by_label("kimi-k2", exact=True).uncheck()
    page.locator(f"{ROWS} >> nth=8").wait_for(state="detached")
    assert page.locator(ROWS).count() == 8
    assert set(column(page, "model")) == {"deepseek-v3"}
    assert lines(page, "throughput") == 4
    for chart in ("throughput", "itl", "frontier", "phases", "kv"):
        assert page.locator(f"#chart-{chart} .panel").count() == 2, chart
    assert "8 of 16 points" in page.locator("#filters summary").inner_text()
    assert page.evaluate("location.hash") == "#hide.model=kimi-k2"
    page.get_by_role("button", name="Show all").click()
    page.locator(f"{ROWS} >> nth=15").wait_for()
    assert page.evaluate("location.hash") == ""


def test_filters_of_one_kind_are_joined_by_and_with_those_of_another(decode: Path, visit: Visit) -> None:
    """Without kimi-k2, context 4,000 and tp4 there are two points: concurrency 8 and 32."""
    page = visit(decode, f"#hide.model=kimi-k2&hide.context=4000&hide.layout={quote('tp4')}")
    assert column(page, "layout") == ["tp4·dcp4", "tp4·dcp4"]
    assert column(page, "concurrency") == ["8", "32"]


def test_a_series_is_switched_off_and_on_by_keyboard(decode: Path, visit: Visit) -> None:
    page = visit(decode)
    assert lines(page, "throughput") == 8
    switch = page.locator("#chart-throughput .switch").first
    assert switch.inner_text() == "tp4"
    switch.focus()
    page.keyboard.press("Space")
    assert switch.get_attribute("aria-pressed") == "false"
    assert lines(page, "throughput") == 4
    assert lines(page, "itl") == 8 * 2, "another chart has its own switches; p50 and p99 are lines of their own"
    assert page.evaluate("location.hash") == "#off.throughput=tp4"
    page.keyboard.press("Enter")
    assert switch.get_attribute("aria-pressed") == "true"
    assert lines(page, "throughput") == 8


def test_p99_can_be_switched_off(decode: Path, visit: Visit) -> None:
    page = visit(decode)
    assert lines(page, "itl") == 16
    page.locator("#chart-itl").get_by_role("button", name="p99").click()
    assert lines(page, "itl") == 8


@pytest.mark.parametrize("key", ["Enter", "Space", ""], ids=["enter", "space", "click"])
def test_headers_sort_the_table(key: str, decode: Path, visit: Visit) -> None:
    """Up first, then down; the header says so."""
    page = visit(decode)
    header = page.locator("#every-point th", has_text="step time (ms)")
    button = header.get_by_role("button")
    for turn, said in ((1, "ascending"), (-1, "descending")):
        button.focus()
        page.keyboard.press(key) if key else button.click()
        values = [turn * float(text.replace(",", "")) for text in column(page, "step time (ms)")]
        assert values == sorted(values)
        assert header.get_attribute("aria-sort") == said
    assert page.evaluate("location.hash") == "#sort=-step_ms"


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "no-clipboard"])
def test_the_command_of_a_point_is_copied(clipboard: bool, decode: Path, visit: Visit) -> None:
    """Also where a browser gives files no clipboard."""
    page = visit(decode)
    if not clipboard:
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.evaluate("globalThis.setTimeout = () => 0")  # what the button says stays until somebody has read it
    button = page.locator(".copy").first
    button.click()
    page.locator(".copy", has_text="copied").wait_for()
    page.evaluate("document.body.append(Object.assign(document.createElement('textarea'), {id: 'paste'}))")
    page.locator("#paste").focus()
    page.keyboard.press("Control+V")
    of = record_builder.point(Layout(4), model="deepseek-v3", context=4000, concurrency=8)
    assert page.locator("#paste").input_value() == build_command(of, {})


def test_a_reader_picks_axes_and_colours(decode: Path, visit: Visit) -> None:
    page = visit(decode)
    page.get_by_label("x axis").select_option("concurrency")
    page.get_by_label("y axis").select_option("kv_capacity_tokens")
    page.get_by_label("colour by").select_option("model")
    chart = drawn(page, "explore")
    chart.locator(".xtitle", has_text="concurrency (requests, log scale)").wait_for()
    assert chart.locator(".ytitle").text_content() == "KV capacity (tokens)"
    assert page.locator("#chart-explore .switch").all_inner_texts() == ["deepseek-v3", "kimi-k2"]
    assert "KV capacity\n" in hover(page, chart)


def test_an_address_brings_back_what_was_chosen(decode: Path, visit: Visit) -> None:
    said = "#hide.model=kimi-k2&off.throughput=tp4&x=context&y=step_ms&colour=concurrency&sort=-output_tok_s"
    page = visit(decode, said)
    assert lines(page, "throughput") == 2
    assert page.locator("#chart-throughput .switch").first.get_attribute("aria-pressed") == "false"
    assert [page.locator(f"#pick-{name}").input_value() for name in ("x", "y", "colour")] == [
        "context",
        "step_ms",
        "concurrency",
    ]
    values = [float(text.replace(",", "")) for text in column(page, "output (tok/s)")]
    assert len(values) == 8
    assert values == sorted(values, reverse=True)


def test_an_address_that_names_nothing_known_is_harmless(decode: Path, visit: Visit) -> None:
    page = visit(
        decode, "#hide.nothing=1&off.=x&x=__proto__&y=constructor&colour=toString&sort=-nothing&hide.model=%FF"
    )
    assert page.locator(ROWS).count() == 16
    assert page.locator("#pick-x").input_value() == "tok_s_per_user"


def test_live_and_replay_are_never_one_chart_nor_one_series(served: Path, visit: Visit) -> None:
    page = visit(served)
    for mode in ("live", "replay"):
        said = hover(page, drawn(page, f"ttft-serve-{mode}").first)
        assert f", {mode}\n" in said
    names = page.locator("#chart-explore .switch").all_inner_texts()
    assert names == ["tp4, live", "tp4, replay", "tp4·dcp4, live", "tp4·dcp4, replay"]
    page.locator("#filters summary").click()
    page.get_by_label("replay", exact=True).uncheck()
    page.get_by_text("No point that passes the filters").first.wait_for()
    assert set(column(page, "live or replay")) == {"live"}


def test_a_cpu_run_is_marked_on_every_chart(tmp_path: Path, visit: Visit) -> None:
    page = visit(pages.page(tmp_path, record_builder.cpu_sweep()))
    assert page.locator("header .mark").inner_text().startswith("CPU: functional run, not performance")
    behind, below = ".layer-below .shapelayer", ".xtitle"  # what bars would cover stands below their axis
    for chart in ("throughput", "itl", "frontier", "phases", "kv", "explore"):
        for panel in drawn(page, chart).all():
            where = panel.locator(below if chart in ("phases", "kv") else behind)
            assert any("functional run" in text for text in where.all_text_contents()), chart
