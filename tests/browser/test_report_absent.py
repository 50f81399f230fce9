"""Test report pages of incomplete results: imported files with any subset of metrics, and charts that fail."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.imports import Overrides, import_files
from dcpbench.reports.page import render
from tests.browser import pages
from tests.unit import engine_files_builder as files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from playwright.sync_api import Page

    from tests.browser.conftest import Visit

LATENCIES = ("ttft", "tpot", "itl", "e2el")
SUBSETS = [names for n in range(5) for names in itertools.combinations(LATENCIES, n)]
SCREEN = {"width": 400, "height": 300}  # small, so that little is painted; charts off the screen are drawn too
MARKS = """() => {
  const marks = {};
  for (const figure of document.querySelectorAll("figure[id^=chart-]")) {
    marks[figure.id.replace("chart-", "")] = figure.querySelectorAll(".chart .point").length;
  }
  return marks;
}"""


def make_vllm_result(concurrency: int, kept: Sequence[str], *, percentiles: bool) -> dict[str, Any]:
    """Return the result file of `vllm bench serve --percentile-metrics KEPT` without details: eight requests, all
    finished.
    """
    plain = files.remove_details(
        files.make_vllm_result(
            max_concurrency=concurrency, num_prompts=8, completed=8, mean_e2el_ms=550.0, median_e2el_ms=550.0
        )
    )
    named = {n: v for n, v in plain.items() if n.endswith("_ms")}
    statistics = ("mean", "median", "p99") if percentiles else ("mean", "median")
    found = {f"{s}_{name}_ms": 30.0 + concurrency for name in kept for s in statistics}
    return {n: v for n, v in plain.items() if n not in named} | found


def import_results(folder: Path, kept: Sequence[str], *, percentiles: bool) -> Path:
    """Import two such results, with 8 and 32 clients of one layout, and return the path of their page."""
    folder.mkdir(parents=True)
    file = files.write_file(folder, *(make_vllm_result(n, kept, percentiles=percentiles) for n in (8, 32)))
    import_files([file], "vllm", folder / "run", Overrides(tp=8))
    return pages.write_run_page(folder, folder / "run")


def wait_for_charts(page: Page) -> None:
    """Wait until all charts of the page are drawn."""
    page.wait_for_selector("html[data-drawn]")
    assert page.locator(".chart:not(:has(.main-svg))").count() == 0


def list_expected(kept: Sequence[str], *, percentiles: bool) -> tuple[dict[str, int], list[str], list[str]]:
    """Return the marks of each chart, the names offered as axes, and the messages about missing charts. Two results
    give two marks of a median, and two more of p99. Speed for one user is 1000 / the median of TPOT.
    """
    each = 4 if percentiles else 2
    marks = {"throughput-serve-live": 2, "explore": 2}
    marks |= {f"{name}-serve-live": each for name in ("ttft", "itl") if name in kept}
    marks |= {"frontier-serve-live": 2} if "tpot" in kept else {}
    axes = [f"{n.upper()} {p} (ms)" for n in ("itl", "ttft", "tpot", "e2el") if n in kept for p in ("p50", "p99")]
    axes = [a for a in axes if percentiles or "p99" not in a]
    missing = [f"{name.upper()} is not drawn" for name in ("ttft", "itl") if name not in kept]
    missing += [] if "tpot" in kept else ["Throughput per GPU against speed per user is not drawn"]
    return marks, axes, missing


def test_charts_are_drawn_for_every_subset_of_metrics_in_a_result(tmp_path: Path, visit: Visit) -> None:
    """Test all subsets of the four latencies with percentiles; none, each and all without. A missing chart is named
    with the reason.
    """
    cases = {f"{'+'.join(kept) or 'none'} p99": (kept, True) for kept in SUBSETS}
    cases |= {"+".join(kept) or "none": (kept, False) for kept in SUBSETS if len(kept) in (0, 1, len(LATENCIES))}
    page: Page | None = None
    found, wanted = {}, {}
    for name, (kept, percentiles) in cases.items():
        path = import_results(tmp_path / name.replace(" ", "-"), kept, percentiles=percentiles)
        if page is None:
            page = visit(path, viewport=SCREEN)
        else:
            page.goto(path.as_uri())
        wait_for_charts(page)
        picks = page.locator("#pick-y option").all_text_contents()
        paragraphs = page.locator("section > p").all_text_contents()
        wanted[name] = list_expected(kept, percentiles=percentiles)
        sentences = [s.split(":")[0] for s in paragraphs if "is not drawn" in s]
        found[name] = (page.evaluate(MARKS), [p for p in picks if p[:4] in ("TTFT", "TPOT", "E2EL", "ITL ")], sentences)
    assert found == wanted


class TestBrokenCharts:
    """Check that an error in one chart leaves the others intact."""

    @pytest.fixture
    def broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Return a function that makes a page of served points with more code appended to its scripts."""

        def make(more: str) -> Path:
            read_asset = render.read_own_asset
            monkeypatch.setattr(
                render, "read_own_asset", lambda name: read_asset(name) + (more if name == "charts.js" else "")
            )
            return pages.write_page(tmp_path, pages.make_served_records())

        return make

    def test_chart_that_cannot_be_built_shows_the_error_in_its_place(self, broken: Any, visit: Visit) -> None:
        path = broken('dcp.charts.ttft = () => { throw new Error("made up"); };')
        page = visit(path, viewport=SCREEN)
        wait_for_charts(page)
        message = page.locator("#chart-ttft-serve-live .panels").inner_text()
        assert "This chart could not be drawn (made up)" in message
        marks = page.evaluate(MARKS)
        assert [n for n, count in marks.items() if not count] == ["ttft-serve-live", "ttft-serve-replay"]
        assert page.locator("#every-point tbody tr").count() == 8

    def test_chart_that_fails_while_drawing_shows_the_error_in_its_place(self, broken: Any, visit: Visit) -> None:
        """Make Plotly refuse the layout, then switch the theme, which draws all charts again."""
        path = broken("""
            const kind = dcp.charts.ttft;
            dcp.charts.ttft = (...given) => {
              const made = kind(...given);
              for (const panel of made.panels) panel.layout = { get xaxis() { throw new Error("made up"); } };
              return made;
            };""")
        page = visit(path, viewport=SCREEN, color_scheme="light")
        page.wait_for_selector("html[data-ready][data-drawn]")
        page.get_by_role("button", name="Dark theme").click()
        message = page.locator("#chart-ttft-serve-live .panels").inner_text()
        assert "This chart could not be drawn (made up)" in message
        marks = page.evaluate(MARKS)
        assert [n for n, count in marks.items() if not count] == ["ttft-serve-live", "ttft-serve-replay"]
        paper = "document.querySelector('#chart-itl-serve-live .chart')._fullLayout.paper_bgcolor"
        assert page.evaluate(paper) == "rgb(20, 24, 29)"
