"""Test the report page opened from a file, without a network, in a real browser."""

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
    return pages.write_page(tmp_path_factory.mktemp("decode"), pages.make_decode_records())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.write_page(tmp_path_factory.mktemp("served"), pages.make_served_records())


def draw_panels(page: Page, chart: str) -> Locator:
    """Scroll to the panels of a chart, wait until all are drawn, and return them."""
    page.wait_for_selector("html[data-ready]")
    figure = page.locator(f"#chart-{chart}")
    for panel in figure.locator(".chart").all():
        panel.scroll_into_view_if_needed()
        panel.locator(".main-svg").first.wait_for()
    return figure.locator(".chart")


def count_lines(page: Page, chart: str) -> int:
    """Return the number of lines in all panels of a chart."""
    return draw_panels(page, chart).locator(".scatterlayer .trace").count()


def hover(page: Page, chart: Locator, nth: int = 0) -> str:
    """Return the tooltip that the page shows when the pointer is over a mark."""
    point_at(page, chart.locator(".point").nth(nth))
    return "\n".join(page.locator(".tip > *").all_inner_texts())


def get_column(page: Page, header: str) -> list[str]:
    """Return the first value of each cell in a column of the table of points."""
    heads = [text.strip() for text in page.locator("#every-point th").all_text_contents()]
    cells = page.locator(f"{ROWS} td:nth-child({heads.index(header) + 1})").all_text_contents()
    return [cell.split(" [")[0] for cell in cells]


def test_every_chart_has_a_panel_for_each_model_and_context(decode: Path, visit: Visit) -> None:
    """Expect four panels of two lines for two models and two contexts; KV capacity has two measures of two models."""
    page = visit(decode)
    for chart in ("throughput", "itl", "phases", "kv"):
        assert draw_panels(page, chart).count() == 4, chart
    assert count_lines(page, "throughput") == 8
    titles = page.locator("#chart-throughput .panel-title").all_text_contents()
    assert titles[0] == "deepseek-v3, context 4,000 tokens"


def test_tooltip_of_a_mark_shows_the_values_of_its_record(decode: Path, visit: Visit) -> None:
    """Point at the first mark: model deepseek-v3, context 4,000, layout tp4, concurrency 8."""
    record = record_builder.make_ok_record(record_builder.make_point(Layout(4), model="deepseek-v3", concurrency=8))
    assert record.metrics
    rate, step = record.metrics.output_tok_s, record.metrics.step_ms
    page = visit(decode)
    tooltip = hover(page, draw_panels(page, "throughput").first)
    assert f"output\n{rate.median:,.1f} tok/s [95 %: {rate.low:,.1f}–{rate.high:,.1f}]" in tooltip
    assert f"step time\n{step.median:,.2f} ms [95 %: {step.low:,.2f}–{step.high:,.2f}]" in tooltip
    assert f"output per GPU\n{record.metrics.output_tok_s_per_gpu:,.1f} tok/s/GPU" in tooltip
    assert "tp4" in tooltip


def test_warnings_common_to_all_points_are_not_repeated_for_each(tmp_path: Path, visit: Visit) -> None:
    """Use two throttled points, one of them noisy: table and tooltip show only the warning that differs."""
    records = [
        record_builder.make_ok_record(record_builder.make_point(layout), warnings=["throttled", *more], phases=None)
        for layout, more in ((Layout(4), []), (Layout(4, 1, 4), ["noisy"]))
    ]
    page = visit(pages.write_page(tmp_path, records))
    assert get_column(page, "warnings") == ["–", "noisy"]
    panel = draw_panels(page, "throughput").first
    plain, noisy = (hover(page, panel, nth) for nth in (0, 1))
    assert "warnings" not in plain
    assert "warnings\nnoisy\n" in noisy


def test_break_even_chart_shows_output_relative_to_layout_without_dcp(decode: Path, visit: Visit) -> None:
    """Compare tp4·dcp4 with tp4 for deepseek-v3 at context 4,000 and concurrency 8."""
    alone, split = (
        record_builder.make_ok_record(record_builder.make_point(layout, model="deepseek-v3", concurrency=8)).metrics
        for layout in (Layout(4), Layout(4, 1, 4))
    )
    assert alone
    assert split
    ratio = split.output_tok_s.median / alone.output_tok_s.median
    page = visit(decode)
    panels = draw_panels(page, "break-even")
    assert panels.count() == 4
    assert count_lines(page, "break-even") == 4, "tp4 has no DCP that could pay"
    tooltip = hover(page, panels.first)
    assert f"output over the same layout without DCP\n{ratio:.3g} ×" in tooltip
    assert "compared with\ntp4: " in tooltip


def test_phase_bars_contain_their_floors_and_tooltips_name_them(tmp_path: Path, visit: Visit) -> None:
    """Use a step of 100 ms with 34 ms of attention and 31 ms of MoE; their floors of 20.4 and 24.8 ms are one more
    trace of thin bars.
    """
    floor = Floor(floor_ms=60, phase_floor_us={"attention": 20_400, "moe": 24_800}, experts="routed")
    record = record_builder.make_ok_record(
        record_builder.make_point(Layout(4)), median_ms=100, noise=0, steps=30, floor=floor
    )
    page = visit(pages.write_page(tmp_path, [record]))
    chart = draw_panels(page, "phases").first
    traces = chart.locator(".barlayer .trace")
    with_floors = traces.count()
    assert traces.last.locator(".point").count() == 2
    assert "floor\n20.40 ms, 0.60 of its time" in hover(page, chart)
    page.locator("#chart-phases").get_by_role("button", name="floor", exact=True).click()
    page.wait_for_function(
        "n => document.querySelectorAll('#chart-phases .barlayer .trace').length === n", arg=with_floors - 1
    )


def test_filter_applies_to_all_charts_and_the_table_and_is_kept_in_the_address(decode: Path, visit: Visit) -> None:
    page = visit(decode)
    assert page.locator(ROWS).count() == 16
    page.locator("#filters summary").click()
    page.get_by_label("kimi-k2", exact=True).uncheck()
    page.locator(f"{ROWS} >> nth=8").wait_for(state="detached")
    assert page.locator(ROWS).count() == 8
    assert set(get_column(page, "model")) == {"deepseek-v3"}
    assert count_lines(page, "throughput") == 4
    for chart in ("throughput", "itl", "frontier", "phases", "kv"):
        assert page.locator(f"#chart-{chart} .panel").count() == 2, chart
    assert "8 of 16 points" in page.locator("#filters summary").inner_text()
    assert page.evaluate("location.hash") == "#hide.model=kimi-k2"
    page.get_by_role("button", name="Show all").click()
    page.locator(f"{ROWS} >> nth=15").wait_for()
    assert page.evaluate("location.hash") == ""


def test_filters_of_different_kinds_are_combined_with_and(decode: Path, visit: Visit) -> None:
    """Hide kimi-k2, context 4,000 and tp4, which leaves two points: concurrency 8 and 32."""
    page = visit(decode, f"#hide.model=kimi-k2&hide.context=4000&hide.layout={quote('tp4')}")
    assert get_column(page, "layout") == ["tp4·dcp4", "tp4·dcp4"]
    assert get_column(page, "concurrency") == ["8", "32"]


def test_series_can_be_switched_off_and_on_by_keyboard(decode: Path, visit: Visit) -> None:
    page = visit(decode)
    assert count_lines(page, "throughput") == 8
    switch = page.locator("#chart-throughput .switch").first
    assert switch.inner_text() == "tp4"
    switch.focus()
    page.keyboard.press("Space")
    assert switch.get_attribute("aria-pressed") == "false"
    assert count_lines(page, "throughput") == 4
    assert count_lines(page, "itl") == 8 * 2, "another chart has its own switches; p50 and p99 are separate lines"
    assert page.evaluate("location.hash") == "#off.throughput=tp4"
    page.keyboard.press("Enter")
    assert switch.get_attribute("aria-pressed") == "true"
    assert count_lines(page, "throughput") == 8


def test_p99_can_be_switched_off(decode: Path, visit: Visit) -> None:
    page = visit(decode)
    assert count_lines(page, "itl") == 16
    page.locator("#chart-itl").get_by_role("button", name="p99").click()
    assert count_lines(page, "itl") == 8


@pytest.mark.parametrize("key", ["Enter", "Space", ""], ids=["enter", "space", "click"])
def test_headers_sort_the_table(key: str, decode: Path, visit: Visit) -> None:
    """Check that the first activation sorts ascending, the second descending, and that aria-sort names the order."""
    page = visit(decode)
    header = page.locator("#every-point th", has_text="step time (ms)")
    button = header.get_by_role("button")
    for sign, order in ((1, "ascending"), (-1, "descending")):
        button.focus()
        page.keyboard.press(key) if key else button.click()
        values = [sign * float(text.replace(",", "")) for text in get_column(page, "step time (ms)")]
        assert values == sorted(values)
        assert header.get_attribute("aria-sort") == order
    assert page.evaluate("location.hash") == "#sort=-step_ms"


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "no-clipboard"])
def test_copy_button_copies_the_command_of_a_point(clipboard: bool, decode: Path, visit: Visit) -> None:
    """Copy also where a browser gives files no clipboard."""
    page = visit(decode)
    if not clipboard:
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.evaluate("globalThis.setTimeout = () => 0")  # keeps the button's label until the test has read it
    button = page.locator(".copy").first
    button.click()
    page.locator(".copy", has_text="copied").wait_for()
    page.evaluate("document.body.append(Object.assign(document.createElement('textarea'), {id: 'paste'}))")
    page.locator("#paste").focus()
    page.keyboard.press("Control+V")
    point = record_builder.make_point(Layout(4), model="deepseek-v3", context=4000, concurrency=8)
    assert page.locator("#paste").input_value() == build_command(point, {})


def test_explore_chart_uses_the_chosen_axes_and_colours(decode: Path, visit: Visit) -> None:
    page = visit(decode)
    page.get_by_label("x axis").select_option("concurrency")
    page.get_by_label("y axis").select_option("kv_capacity_tokens")
    page.get_by_label("colour by").select_option("model")
    chart = draw_panels(page, "explore")
    chart.locator(".xtitle", has_text="concurrency (requests, log scale)").wait_for()
    assert chart.locator(".ytitle").text_content() == "KV capacity (tokens)"
    assert page.locator("#chart-explore .switch").all_inner_texts() == ["deepseek-v3", "kimi-k2"]
    assert "KV capacity\n" in hover(page, chart)


def test_address_restores_filters_series_axes_and_sorting(decode: Path, visit: Visit) -> None:
    fragment = "#hide.model=kimi-k2&off.throughput=tp4&x=context&y=step_ms&colour=concurrency&sort=-output_tok_s"
    page = visit(decode, fragment)
    assert count_lines(page, "throughput") == 2
    assert page.locator("#chart-throughput .switch").first.get_attribute("aria-pressed") == "false"
    assert [page.locator(f"#pick-{name}").input_value() for name in ("x", "y", "colour")] == [
        "context",
        "step_ms",
        "concurrency",
    ]
    values = [float(text.replace(",", "")) for text in get_column(page, "output (tok/s)")]
    assert len(values) == 8
    assert values == sorted(values, reverse=True)


def test_address_with_unknown_names_shows_the_default_page(decode: Path, visit: Visit) -> None:
    page = visit(
        decode, "#hide.nothing=1&off.=x&x=__proto__&y=constructor&colour=toString&sort=-nothing&hide.model=%FF"
    )
    assert page.locator(ROWS).count() == 16
    assert page.locator("#pick-x").input_value() == "tok_s_per_user"


def test_live_and_replayed_points_never_share_a_chart_or_series(served: Path, visit: Visit) -> None:
    page = visit(served)
    for mode in ("live", "replay"):
        tooltip = hover(page, draw_panels(page, f"ttft-serve-{mode}").first)
        assert f", {mode}\n" in tooltip
    names = page.locator("#chart-explore .switch").all_inner_texts()
    assert names == ["tp4, live", "tp4, replay", "tp4·dcp4, live", "tp4·dcp4, replay"]
    page.locator("#filters summary").click()
    page.get_by_label("replay", exact=True).uncheck()
    page.get_by_text("No point that passes the filters").first.wait_for()
    assert set(get_column(page, "live or replay")) == {"live"}


def test_cpu_run_is_marked_as_functional_on_every_chart(tmp_path: Path, visit: Visit) -> None:
    page = visit(pages.write_page(tmp_path, record_builder.make_cpu_sweep()))
    assert page.locator("header .mark").inner_text().startswith("CPU: functional run")
    behind, below = (
        ".layer-below .shapelayer",
        ".xtitle",
    )  # bar charts carry the mark below their axis, where no bar covers it
    for chart in ("throughput", "itl", "frontier", "phases", "kv", "explore"):
        for panel in draw_panels(page, chart).all():
            where = panel.locator(below if chart in ("phases", "kv") else behind)
            assert any("functional run" in text for text in where.all_text_contents()), chart
