"""Test the dashboard in a real browser: from disk and from its server, fast with 20,000 points, inert with hostile
records.
"""

from __future__ import annotations

import json
import random
import re
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
import uvicorn

from dcpbench.commands import dashboard
from dcpbench.dashboard import pages, site, watching, web_server
from dcpbench.points.layout import Layout, place_experts
from dcpbench.points.names import MOE_TP
from tests.browser.pointer import point_at
from tests.unit import dashboard_builder, record_builder, serve_record_builder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Page

    Visit = Callable[..., Page]

SCREEN = {"width": 1400, "height": 1000}
PHONE = {"width": 400, "height": 800}
USABLE = "html[data-usable]"
REAL_REPORT = pages._write_page
DRAWN = "#charts .main-svg"
HOSTILE = '<img src=x onerror="globalThis.pwned=1"></script><script>globalThis.pwned=1</script>'
CHART = "document.querySelector('figure[data-measure=step_ms] .chart')"
LABELS = f"""[...{CHART}.querySelectorAll('.annotation-text-g')].map((node) => {{
  const {{ left, right, top, bottom }} = node.getBoundingClientRect();
  return {{ text: node.textContent, left, right, top, bottom }};
}})"""
READABLE = f"""{LABELS}.every((a, i, all) => {{
  const plot = {CHART}.getBoundingClientRect().top + {CHART}._fullLayout._size.t;
  const over = (b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5;
  return a.top >= {CHART}.getBoundingClientRect().top && a.bottom <= plot + 0.5 && !all.slice(i + 1).some(over);
}})"""
"""True if each label of a change lies inside the chart, above its plot, and overlaps no other label."""


@pytest.fixture(scope="module", autouse=True)
def quick_pages() -> Iterator[None]:
    """Replace the report pages of runs, which have browser tests of their own, with a file that names the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_write_page", lambda folder, run: (folder / pages.PAGE).write_text(run.slug) and "")
        yield


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site of 40 runs of 16 points, of which the first point is 5 % slower from the 26th run on."""
    folder = tmp_path_factory.mktemp("history")
    site.build(dashboard_builder.write_history(folder / "runs", count=16), folder / "site")
    return folder / "site" / "index.html"


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site of 40 runs of 8 points, all 4.8 % slower from the 13th run on and another 5 % from the 17th on."""
    folder, rng = tmp_path_factory.mktemp("neighbours"), random.Random(1)
    for run in range(40):
        slower = (1.048 if run >= 12 else 1) * (1.05 if run >= 16 else 1)
        found = [
            dashboard_builder.make_record(of, run, faster=rng.gauss(1, 0.001) / slower)
            for of in dashboard_builder.list_points(8)
        ]
        record_builder.write_records(folder / "runs" / f"run-{run:03d}", found)
    site.build(folder / "runs", folder / "site")
    return folder / "site" / "index.html"


def open_page(visit: Visit, path: Path, fragment: str = "", **options: object) -> Page:
    page = visit(path, fragment, **{"viewport": SCREEN, **options})
    page.wait_for_selector(USABLE)
    return page


def wait_until(page: Page, condition: str) -> None:
    """Wait for a condition by polling, because Playwright's own waiting needs eval, which the page's policy refuses."""
    while not page.evaluate(condition):
        page.wait_for_timeout(50)


def hover(page: Page, nth: int) -> str:
    """Return the tooltip that the page shows when the pointer is over a mark of the first chart."""
    point_at(page, page.locator("#charts .chart").first.locator(".point").nth(nth))
    return page.locator(".tip").inner_text()


def count_rows(page: Page) -> int:
    return page.locator("#table tbody tr").count()


def choose(page: Page, name: str, value: str) -> None:
    page.locator(f"#filters [name={name}]").select_option(value)


class TestOpening:
    @pytest.mark.parametrize("screen", [SCREEN, PHONE], ids=["1400px", "400px"])
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_page_opens_from_disk_without_network_and_fits_the_screen(
        self, visit: Visit, history: Path, screen: object, scheme: str
    ) -> None:
        """Open the page from disk; the fixture `visit` checks that the page requests nothing and logs no error."""
        page = open_page(visit, history, viewport=screen, color_scheme=scheme)
        assert count_rows(page) == 16
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(DRAWN)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    @pytest.mark.parametrize(("runs", "points"), [(40, 500), (1, 20_000)], ids=["40x500", "1x20000"])
    def test_page_of_20_000_points_runs_little_script_and_stays_small(
        self, visit: Visit, tmp_path: Path, runs: int, points: int
    ) -> None:
        """Limit the work until the table and its filters are usable to 20 blocks of JavaScript and 100 bytes a point,
        and to 3,000 elements in all. The browser counts the blocks, because seconds depend on the machine. A loop over
        all pairs of points would execute 20,000 blocks for each point.
        """
        site.build(dashboard_builder.write_many_runs(tmp_path / "runs", runs, points), tmp_path / "site", newest=0)
        page = open_page(visit, tmp_path / "site" / "index.html")
        profiler = page.context.new_cdp_session(page)
        profiler.send("Profiler.enable")
        profiler.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})
        page.reload()
        page.wait_for_selector(USABLE)
        counted = profiler.send("Profiler.takePreciseCoverage")["result"]
        blocks = sum(part["count"] for script in counted for f in script["functions"] for part in f["ranges"])
        loaded = page.evaluate("[...document.scripts].map((s) => s.getAttribute('src')).filter((src) => src)")
        assert count_rows(page) == 50
        assert f"of {points:,} points" in page.locator("#count").inner_text()
        assert 1_000 < blocks < 20 * 20_000
        assert sum((tmp_path / "site" / src.partition("?")[0]).stat().st_size for src in loaded) < 100 * 20_000
        assert page.evaluate("document.querySelectorAll('*').length") < 3_000

    def test_run_pages_share_the_single_plotly_file_of_the_site(
        self, visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Open a report from disk; the fixture `visit` checks that no content security policy is violated."""
        monkeypatch.setattr(pages, "_write_page", REAL_REPORT)
        site.build(dashboard_builder.write_history(tmp_path / "runs", runs=2, count=4), tmp_path / "site")
        found = [
            path for path in (tmp_path / "site").rglob("*") if path.is_file() and b"Plotly, Inc." in path.read_bytes()
        ]
        assert [path.relative_to(tmp_path / "site").as_posix() for path in found] == ["assets/plotly-basic.min.js"]
        report = tmp_path / "site" / "runs" / "run-001" / "report.html"
        page = visit(report, viewport=SCREEN)
        page.wait_for_selector("html[data-ready]")
        page.wait_for_selector(".chart .main-svg .point", state="attached")
        assert report.stat().st_size < 300_000

    def test_chart_scripts_load_only_after_a_row_is_ticked(self, visit: Visit, history: Path) -> None:
        page = open_page(visit, history)
        scripts = "[...document.scripts].map((s) => s.getAttribute('src')).filter((s) => /plotly|history/.test(s))"
        assert page.evaluate(scripts) == []
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(DRAWN)
        assert len(page.evaluate(scripts)) == 2


class TestLatestChanges:
    def test_first_screen_lists_changed_metrics_with_size_and_runs(self, visit: Visit, history: Path) -> None:
        """Check the list on the first screen, and that a click on one of its buttons shows the metric's history."""
        page = open_page(visit, history)
        summary = page.locator("#latest").inner_text()
        assert re.search(r"tp4 · 1 × 4,000 worse: .*Step time, ITL p50 \+5(\.\d)? %", summary)
        assert re.search(r" −5(\.\d)? % \(95 %: −6(\.\d)? % to −4(\.\d)? %, [\d.,]+ → [\d.,]+ tok/s/GPU\)", summary)
        assert summary.count("worse") == 2, "once in the total and once in the line"
        assert page.locator("#latest li").count() == 1
        assert page.locator("#latest li button").count() > 1
        assert "1 point changed: 1 worse." in summary
        assert "Between run-024 (2026-01-29, commit 0000024abcde) and run-025" in summary
        assert page.locator("#latest li").first.bounding_box()["y"] < SCREEN["height"] / 2
        page.get_by_role("button", name="History of Step time").first.click()
        page.wait_for_selector("figure[data-measure=step_ms] .main-svg")
        assert page.locator("#charts figure").first.get_attribute("data-measure") == "step_ms"
        assert page.locator("#table input[data-id]:checked").count() == 1

    def test_change_line_shows_the_range_of_each_metric(self, visit: Visit, tmp_path: Path) -> None:
        """Check lines of three points that became worse. A row holds the metric's number, its points, and the
        smallest, largest and most extreme ratios.
        """
        down, up = [0.8, 0.79, 0.81, 100, 80], [1.2, 1.19, 1.21, 100, 120]
        cases: dict[str, list[list[float | None]]] = {
            "A −10 % … −20 %": [[0, 3, 0.8, 0.9, *down]],
            "A −20 %": [[0, 3, 0.8, 0.8001, *down]],
            "A −20 % (1 of them)": [[0, 1, 0.8, 0.8, *down]],
            "A −10 % … −20 % (2 of them)": [[0, 2, 0.8, 0.9, *down]],
            "A +10 % … +20 %, better": [[0, 3, 1.1, 1.2, *up]],
            "A −20 % … +10 %, both ways": [[0, 3, 0.8, 1.1, *down]],
            "A 5 → 0": [[0, 3, None, None, None, None, None, 5, 0]],
            "A, B −10 % … −20 %": [[0, 3, 0.8, 0.9, *down], [1, 3, 0.8, 0.9, *down]],
            "A −10 % … −20 % · B −10 % … −30 %": [[0, 3, 0.8, 0.9, *down], [1, 3, 0.7, 0.9, *down]],
        }
        site.build(dashboard_builder.write_history(tmp_path / "runs", runs=2, count=1), tmp_path / "site")
        (path,) = (tmp_path / "site" / "data").glob("index-*.js")
        start, _, text = path.read_text().partition(",")
        index = json.loads(text.removesuffix(");\n"))
        for measure, label in zip(index["measures"], "AB", strict=False):
            measure.update({"label": label, "better": "higher"})
        groups = [
            {"line": 0, "points": 3, "model": 1, "verdict": "worse", "changes": changes} for changes in cases.values()
        ]
        step = {"before": 0, "after": 1, "points": 27, "worse": 27, "better": 0, "groups": groups, "omitted": 0}
        index["latest"] = {"steps": [step], "more": 0}
        path.write_text(f"{start},{json.dumps(index)});\n")
        lines = open_page(visit, tmp_path / "site" / "index.html").locator("#latest li").all_inner_texts()
        assert lines == [f"3 points of kimi-k2 · tp4 worse: {expected}" for expected in cases]

    def test_page_without_changes_explains_how_many_runs_a_change_needs(self, visit: Visit, tmp_path: Path) -> None:
        site.build(dashboard_builder.write_history(tmp_path / "runs", runs=3, count=2), tmp_path / "site")
        text = open_page(visit, tmp_path / "site" / "index.html").locator("#latest").inner_text()
        assert "No change is marked" in text
        assert "after 12 runs" in text
        assert "the longest history here has 3" in text


class TestSharedSettings:
    def test_settings_shared_by_all_rows_appear_once_above_the_table(self, visit: Visit, history: Path) -> None:
        """Check that the shared settings follow the filters: with one model selected, its name is among them."""
        page = open_page(visit, history)
        shared = page.locator("#shared")
        assert shared.inner_text().startswith("All rows: decode · 4 × NVIDIA H200 · ")
        assert "page 64" in shared.inner_text()
        for word in ("page 64", "NVIDIA H200", "driver"):
            assert word not in page.locator("#table").inner_text()
        assert "kimi-k2" not in shared.inner_text()
        choose(page, "model", "kimi-k2")
        assert "kimi-k2" in shared.inner_text()
        assert "kimi-k2" not in page.locator("#table tbody").inner_text()

    def test_settings_of_most_rows_appear_once_and_other_rows_name_theirs(self, visit: Visit, tmp_path: Path) -> None:
        """Use eight decode points with one variable: one has another page size too, and one lacks the variable."""
        found = []
        for i, of in enumerate(dashboard_builder.list_points(8)):
            settings = {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"} if i != 5 else {"NCCL_ALGO": "Ring"}
            where = dashboard_builder.make_environment(0, settings=settings)
            usual = place_experts(MOE_TP, of.tp)
            point = msgspec.structs.replace(of, page_size=32 if i == 2 else of.page_size, ep=usual)
            found.append(msgspec.structs.replace(dashboard_builder.make_record(of, 0, environment=where), point=point))
        record_builder.write_records(tmp_path / "runs" / "a", found)
        site.build(tmp_path / "runs", tmp_path / "site")
        page = open_page(visit, tmp_path / "site" / "index.html")
        shared = page.locator("#shared").inner_text().splitlines()
        assert shared[0].endswith("NCCL_ALGO=Ring")
        assert shared[1:] == ["Unless a decode row differs: page 64 · NCCL_NVLS_ENABLE=0"]
        settings_cells = page.locator("#table tbody td:last-child").all_inner_texts()
        assert sorted(settings_cells) == [""] * 6 + ["not NCCL_NVLS_ENABLE=0", "page 32"]

    def test_rows_with_another_precision_or_kernel_name_only_their_own(self, visit: Visit, tmp_path: Path) -> None:
        """Use eight decode points, one of them with fp8 weights and one with another kernel."""
        found = []
        for i, of in enumerate(dashboard_builder.list_points(8)):
            fp8 = {"weights_dtype": "fp8"} if i == 0 else {}
            point = msgspec.structs.replace(of, dtype="bf16", backend="triton" if i == 1 else "flashinfer", **fp8)
            found.append(msgspec.structs.replace(dashboard_builder.make_record(of, 0), point=point))
        record_builder.write_records(tmp_path / "runs" / "a", found)
        site.build(tmp_path / "runs", tmp_path / "site")
        page = open_page(visit, tmp_path / "site" / "index.html")
        shared = page.locator("#shared").inner_text().splitlines()
        assert "bf16" not in shared[0]
        assert shared[1] == "Unless a decode row differs: flashinfer · bf16"
        settings_cells = page.locator("#table tbody td:last-child").all_inner_texts()
        own = [[word for word in row.split(" · ") if not word.startswith("ep ")] for row in settings_cells]
        assert sorted(filter(any, own)) == [["fp8 weights, bf16 KV"], ["triton"]]

    def test_row_without_slo_among_rows_with_slo_shows_no_slo_once(self, visit: Visit, tmp_path: Path) -> None:
        """Use four served points, three of which have two objectives."""
        found = [
            serve_record_builder.make_served_record(serve_record_builder.make_point(concurrency=n))
            for n in (2, 4, 8, 16)
        ]
        assert found[0].serve
        assert len(found[0].serve.slo_ms) > 1
        found[0] = msgspec.structs.replace(found[0], serve=msgspec.structs.replace(found[0].serve, slo_ms={}))
        record_builder.write_records(tmp_path / "runs" / "a", found)
        site.build(tmp_path / "runs", tmp_path / "site")
        page = open_page(visit, tmp_path / "site" / "index.html")
        settings_cells = page.locator("#table tbody td:last-child").all_inner_texts()
        assert ["no SLO" in row for row in settings_cells] == [True, False, False, False]
        assert "not " not in settings_cells[0]

    def test_tables_with_long_names_fit_the_page_width(self, visit: Visit, tmp_path: Path) -> None:
        """Use long names of a run, a GPU and a workload, because text cut off at the right edge cannot be read."""
        where = dashboard_builder.make_environment(0, device="NVIDIA H100 80GB HBM3")
        served = serve_record_builder.make_served_record(
            serve_record_builder.make_point(model="deepseek-v2-lite"), environment=where
        )
        plain = [dashboard_builder.make_record(of, 0, environment=where) for of in dashboard_builder.list_points(8)]
        name = "replay-against-live_H100_2026-11-25/live-deepseek-v2-lite-closed"
        record_builder.write_records(tmp_path / "runs" / name, [served, *plain])
        site.build(tmp_path / "runs", tmp_path / "site")
        page = open_page(visit, tmp_path / "site" / "index.html")
        for box in page.locator("main .scroll").all():
            assert box.evaluate("(one) => one.scrollWidth <= one.clientWidth")

    def test_values_missing_from_a_record_are_shown_as_dashes(self, visit: Visit, tmp_path: Path) -> None:
        """Use an imported record without a context and a date; neither may appear as 0."""
        of = record_builder.make_point()
        found = dashboard_builder.make_record(of, 0)
        found = msgspec.structs.replace(found, point=msgspec.structs.replace(of, context=0), started_at="")
        record_builder.write_records(tmp_path / "runs" / "a", [found])
        site.build(tmp_path / "runs", tmp_path / "site")
        page = open_page(visit, tmp_path / "site" / "index.html")
        cells = page.locator("#table tbody tr").first.locator("td").all_inner_texts()
        assert cells[6] == "–"
        assert cells[11] == "–"
        assert "unknown" in page.locator("#filters [name=context]").inner_text()
        assert "× 0" not in page.locator("main").inner_text()


class TestFinding:
    def test_filters_search_and_metric_narrow_the_table_rows(self, visit: Visit, history: Path) -> None:
        """Filter 16 points: 2 models × 2 contexts × 4 layouts at one load."""
        page = open_page(visit, history)
        choose(page, "model", "kimi-k2")
        assert count_rows(page) == 8
        choose(page, "context", "32000")
        assert count_rows(page) == 4
        page.locator("#filters [name=q]").fill("dcp4")
        assert count_rows(page) == 1
        page.get_by_role("button", name="Clear").click()
        assert count_rows(page) == 16
        choose(page, "metric", "step_ms")
        wait_until(page, "document.querySelector('#table thead').textContent.includes('Step time')")
        page.locator("#filters [name=changed]").check()
        assert count_rows(page) == 1
        assert "+5" in page.locator("#table tbody").inner_text()

    def test_columns_sort_both_ways_by_keyboard(self, visit: Visit, history: Path) -> None:
        page = open_page(visit, history)
        value = "[...document.querySelectorAll('#table tbody tr')].map((r) => parseFloat(r.cells[8].textContent))"
        button = page.locator("#table [data-sort=value]")
        button.focus()
        page.keyboard.press("Enter")
        down = page.evaluate(value)
        assert down == sorted(down, reverse=True)
        page.keyboard.press("Enter")
        assert page.evaluate(value) == sorted(down)
        assert page.locator("th[aria-sort=ascending]").count() == 1

    def test_address_keeps_the_chosen_filters_and_rows(self, visit: Visit, history: Path) -> None:
        page = open_page(visit, history)
        choose(page, "model", "kimi-k2")
        page.locator("#table tbody input").nth(2).check()
        page.wait_for_selector(DRAWN)
        fragment = page.evaluate("location.hash")
        again = open_page(visit, history, fragment)
        again.wait_for_selector(DRAWN)
        assert count_rows(again) == 8
        assert again.locator("#table tbody input").nth(2).is_checked()

    @pytest.mark.parametrize(
        "fragment", ["#metric=__proto__&model=constructor&page=-7&p=x", "#sort=q&down=1&x=9", "#%ff"]
    )
    def test_address_with_invalid_fragment_shows_all_rows(self, visit: Visit, history: Path, fragment: str) -> None:
        assert count_rows(open_page(visit, history, fragment)) == 16


class TestHistory:
    def test_change_is_marked_and_listed_with_its_runs_and_uncertainty(self, visit: Visit, history: Path) -> None:
        page = open_page(visit, history, "#metric=step_ms&changed=true")
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(DRAWN)
        text = page.locator("figure[data-measure=step_ms] li").inner_text()
        assert "worse" in text
        assert "95 %" in text
        assert "between run-024" in text
        assert "run-025" in text
        assert page.locator("figure[data-measure=step_ms] .shapelayer path").count() == 1

    @pytest.mark.parametrize("axis", ["date", "commit", "run"])
    @pytest.mark.parametrize("screen", [SCREEN, PHONE], ids=["1400px", "400px"])
    def test_labels_of_neighbouring_changes_never_overlap(
        self, visit: Visit, neighbours: Path, screen: dict[str, int], axis: str
    ) -> None:
        """Place two changes of one history four runs apart: if they overlap, "+4.8 %" and "+5 %" read "+458 %"."""
        page = open_page(visit, neighbours, f"#metric=step_ms&x={axis}", viewport=screen)
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(DRAWN)
        wait_until(page, f"{LABELS}.length === 2 && {READABLE}")
        items = page.locator("figure[data-measure=step_ms] li > span").all_inner_texts()
        assert page.evaluate(f"{LABELS}.map((label) => label.text)") == [text.split(",")[0] for text in items]

    def test_labels_of_many_histories_never_overlap_at_any_width_nor_on_paper(
        self, visit: Visit, neighbours: Path
    ) -> None:
        """Change eight histories between the same two runs, as a new driver does, twice, and resize the page."""
        page = open_page(visit, neighbours, viewport=SCREEN, color_scheme="light")
        points = page.locator("#table input[data-id]").evaluate_all("(all) => all.map((one) => one.dataset.id)")
        page.evaluate("(to) => { location.hash = to; }", "&".join(["metric=step_ms", *(f"p={one}" for one in points)]))
        page.wait_for_selector(DRAWN)
        for width in (1400, 400, 1400):
            page.set_viewport_size({"width": width, "height": 900})
            fits = f"Math.abs({CHART}.clientWidth - {CHART}._fullLayout.width) < 1"
            wait_until(page, f"{fits} && {LABELS}.length === 16 && {READABLE}")
        page.emulate_media(color_scheme="dark")
        wait_until(page, f"{CHART}._fullLayout.paper_bgcolor === 'rgb(20, 24, 29)' && {READABLE}")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        wait_until(page, f"{CHART}._fullLayout.width === 660 && {READABLE}")

    def test_moving_labels_keeps_the_chosen_axis_range(self, visit: Visit, neighbours: Path) -> None:
        """Zoom at 400 pixels: over all dates the two labels need two rows, over ten days one row."""
        page = open_page(visit, neighbours, "#metric=step_ms", viewport=PHONE)
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(DRAWN)
        label_rows = f"new Set({LABELS}.map((label) => label.top)).size"
        wait_until(page, f"{LABELS}.length === 2 && {label_rows} === 2")
        chosen = "['2026-01-14', '2026-01-24']"
        page.evaluate(f"Plotly.relayout({CHART}, {{'xaxis.range': {chosen}}}).then(() => null)")
        wait_until(page, f"{LABELS}.length === 2 && {label_rows} === 1 && {READABLE}")
        assert page.evaluate(f"{CHART}._fullLayout.xaxis.range") == ["2026-01-14", "2026-01-24"]

    @pytest.mark.parametrize("axis", ["date", "commit", "run"])
    def test_hovering_names_run_date_and_commit(self, visit: Visit, history: Path, axis: str) -> None:
        page = open_page(visit, history)
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(DRAWN)
        page.locator("#picked [name=x]").select_option(axis)
        page.wait_for_selector(f"{DRAWN} .points path")
        text = hover(page, 3)
        assert "run-003" in text
        assert "2026-01-08" in text
        assert "0000003" in text

    def test_tooltip_stays_next_to_its_mark_inside_its_own_chart(self, visit: Visit, history: Path) -> None:
        """Check that tooltips of the left of two neighbouring charts never cover the right one."""
        page = open_page(visit, history)
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(f"{DRAWN} .points path")
        chart = page.locator("#charts .chart").first
        for nth in (1, 20, 38):
            assert hover(page, nth)
            tip, own, mark = (x.bounding_box() for x in (page.locator(".tip"), chart, chart.locator(".point").nth(nth)))
            assert tip
            assert own
            assert mark
            assert own["x"] <= tip["x"]
            assert tip["x"] + tip["width"] <= own["x"] + own["width"]
            assert tip["x"] > mark["x"] + mark["width"] or tip["x"] + tip["width"] < mark["x"]

    def test_table_below_the_chart_links_every_run_to_its_page(self, visit: Visit, history: Path) -> None:
        page = open_page(visit, history)
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(DRAWN)
        page.locator("#charts summary").click()
        assert page.locator("#charts details tbody tr").count() == 40
        page.locator("#charts details a").first.click()
        page.wait_for_load_state()
        assert page.locator("body").inner_text() == "run-039"

    def test_other_hardware_is_a_separate_line_that_can_be_added(self, visit: Visit, tmp_path: Path) -> None:
        of = record_builder.make_point(Layout(4))
        for run in range(4):
            device = "NVIDIA H200" if run < 2 else "NVIDIA B200"
            where = dashboard_builder.make_environment(run, device=device)
            record_builder.write_records(
                tmp_path / "runs" / f"{run}", [dashboard_builder.make_record(of, run, environment=where)]
            )
        site.build(tmp_path / "runs", tmp_path / "site")
        page = open_page(visit, tmp_path / "site" / "index.html")
        assert count_rows(page) == 2
        page.locator("#table tbody input").first.check()
        page.wait_for_selector(DRAWN)
        traces = "document.querySelector('#charts .chart').data.map((t) => t.x.length)"
        assert page.evaluate(traces) == [2]
        page.locator("#picked p button").click()
        wait_until(page, f"{traces}.length === 2")
        assert page.evaluate(traces) == [2, 2]

    def test_functional_cpu_runs_appear_only_on_request_and_are_watermarked(self, visit: Visit, tmp_path: Path) -> None:
        record_builder.write_records(tmp_path / "runs" / "cpu", record_builder.make_cpu_sweep())
        record_builder.write_records(
            tmp_path / "runs" / "gpu", [dashboard_builder.make_record(record_builder.make_point(), 0)]
        )
        site.build(tmp_path / "runs", tmp_path / "site")
        page = open_page(visit, tmp_path / "site" / "index.html")
        assert count_rows(page) == 1
        assert "4 functional points of CPU runs are hidden" in page.locator("#count").inner_text()
        page.locator("#filters [name=cpu]").check()
        assert count_rows(page) == 5
        page.locator("#table tbody tr", has_text="functional").first.locator("input").check()
        page.wait_for_selector(DRAWN)
        assert "CPU: functional" in page.locator("#charts .chart").first.inner_text()


def test_hostile_records_inject_nothing(visit: Visit, tmp_path: Path) -> None:
    of = record_builder.make_point(model=HOSTILE, backend=HOSTILE)
    where = dashboard_builder.make_environment(0, device=HOSTILE, driver=HOSTILE, git_commit=HOSTILE)
    record = dashboard_builder.make_record(of, 0, environment=where, warnings=[HOSTILE, "__proto__"])
    failed = record_builder.make_failed_record(record_builder.make_point(model="__proto__"), reason=HOSTILE)
    record_builder.write_records(tmp_path / "runs" / "<img src=x>", [record, failed])
    (tmp_path / "runs" / "bad <b>").mkdir()
    (tmp_path / "runs" / "bad <b>" / "records.jsonl").write_text(HOSTILE + "\n\n")
    site.build(tmp_path / "runs", tmp_path / "site")
    page = open_page(visit, tmp_path / "site" / "index.html")
    for i in range(count_rows(page)):
        page.locator("#table tbody input").nth(i).check()
    page.wait_for_selector(DRAWN)
    assert HOSTILE in hover(page, 0)
    page.locator("#skipped summary").click()
    assert page.evaluate("globalThis.pwned") is None
    assert page.locator("img").count() == 0
    assert HOSTILE in page.locator("#table").inner_text()


@pytest.fixture
def dashboard_server(tmp_path: Path) -> Iterator[tuple[watching.Watcher, str]]:
    """Serve a site of two runs, and yield its watcher and address."""
    watcher = watching.Watcher(
        dashboard_builder.write_history(tmp_path / "runs", runs=2, count=8), tmp_path / "site", print
    )
    watcher.refresh()
    with dashboard._bind_port(0) as bound:
        config = uvicorn.Config(web_server.make_app(watcher), log_level="critical", lifespan="off")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
        thread.start()
        yield watcher, f"http://127.0.0.1:{bound.getsockname()[1]}/"
        running.should_exit = True
        thread.join()


def test_served_page_follows_new_records_and_keeps_the_selection(
    visit: Visit, dashboard_server: tuple[watching.Watcher, str]
) -> None:
    watcher, address = dashboard_server
    page = visit(address, allowed=address, viewport=SCREEN)
    page.wait_for_selector(USABLE)
    choose(page, "layout", "tp4·dcp4")
    page.locator("#table tbody input").first.check()
    page.wait_for_selector(DRAWN)
    page.locator("#filters [name=q]").fill("kimi")
    more = dashboard_builder.make_record(record_builder.make_point(Layout(4, 1, 4), context=64000), 2)
    record_builder.write_records(
        watcher.root / "run-002", [more, dashboard_builder.make_record(dashboard_builder.list_points(3)[2], 2)]
    )
    watcher.refresh()
    wait_until(page, "document.querySelector('#summary').textContent.startsWith('3 runs')")
    assert count_rows(page) == 3
    assert page.locator("#filters [name=q]").input_value() == "kimi"
    assert page.evaluate("document.activeElement.name") == "q"
    wait_until(page, "document.querySelector('#charts .chart').data[0].x.length === 3")
    page.locator("#run-table a", has_text="run-002").click()
    page.wait_for_load_state()
    assert page.locator("body").inner_text() == "run-002"
