"""The report's page where results do not say everything: other tools' files in all their subsets, and broken charts."""

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
SCREEN = {"width": 400, "height": 300}  # little to paint: charts are drawn wherever they are
MARKS = """() => {
  const marks = {};
  for (const figure of document.querySelectorAll("figure[id^=chart-]")) {
    marks[figure.id.replace("chart-", "")] = figure.querySelectorAll(".chart .point").length;
  }
  return marks;
}"""


def vllm(concurrency: int, kept: Sequence[str], *, percentiles: bool) -> dict[str, Any]:
    """What `vllm bench serve --percentile-metrics KEPT` leaves without details of eight requests that all finished."""
    plain = files.without_details(
        files.vllm(max_concurrency=concurrency, num_prompts=8, completed=8, mean_e2el_ms=550.0, median_e2el_ms=550.0)
    )
    named = {n: v for n, v in plain.items() if n.endswith("_ms")}
    statistics = ("mean", "median", "p99") if percentiles else ("mean", "median")
    found = {f"{s}_{name}_ms": 30.0 + concurrency for name in kept for s in statistics}
    return {n: v for n, v in plain.items() if n not in named} | found


def imported(folder: Path, kept: Sequence[str], *, percentiles: bool) -> Path:
    """The page of two such results, at 8 and at 32 clients of one layout."""
    folder.mkdir(parents=True)
    file = files.file(folder, *(vllm(n, kept, percentiles=percentiles) for n in (8, 32)))
    import_files([file], "vllm", folder / "run", Overrides(tp=8))
    return pages.page_of(folder, folder / "run")


def settled(page: Page) -> None:
    """Wait until each place for a chart in the page is drawn."""
    page.wait_for_selector("html[data-drawn]")
    assert page.locator(".chart:not(:has(.main-svg))").count() == 0


def expected(kept: Sequence[str], *, percentiles: bool) -> tuple[dict[str, int], list[str], list[str]]:
    """Marks of each chart, what can be picked as an axis, and what is said to be missing.

    Two results are two marks of a median, and two more of p99. Speed for one user is 1000 / the median of ITL.
    """
    each = 4 if percentiles else 2
    marks = {"throughput-serve-live": 2, "explore": 2}
    marks |= {f"{name}-serve-live": each for name in ("ttft", "itl") if name in kept}
    marks |= {"frontier-serve-live": 2} if "itl" in kept else {}
    axes = [f"{n.upper()} {p} (ms)" for n in ("itl", "ttft", "tpot", "e2el") if n in kept for p in ("p50", "p99")]
    axes = [a for a in axes if percentiles or "p99" not in a]
    missing = [f"{name.upper()} is not drawn" for name in ("ttft", "itl") if name not in kept]
    missing += [] if "itl" in kept else ["Throughput per GPU against speed per user is not drawn"]
    return marks, axes, missing


def test_every_chart_that_can_has_its_marks_whatever_a_result_file_says(tmp_path: Path, visit: Visit) -> None:
    """All subsets of the four latencies with percentiles; none, each and all without. What is not drawn is named with its reason."""
    cases = {f"{'+'.join(kept) or 'none'} p99": (kept, True) for kept in SUBSETS}
    cases |= {"+".join(kept) or "none": (kept, False) for kept in SUBSETS if len(kept) in (0, 1, len(LATENCIES))}
    page: Page | None = None
    found, due = {}, {}
    for name, (kept, percentiles) in cases.items():
        path = imported(tmp_path / name.replace(" ", "-"), kept, percentiles=percentiles)
        if page is None:
            page = visit(path, viewport=SCREEN)
        else:
            page.goto(path.as_uri())
        settled(page)
        picks = page.locator("#pick-y option").all_text_contents()
        said = page.locator("section > p").all_text_contents()
        due[name] = expected(kept, percentiles=percentiles)
        sentences = [s.split(":")[0] for s in said if "is not drawn" in s]
        found[name] = (page.evaluate(MARKS), [p for p in picks if p[:4] in ("TTFT", "TPOT", "E2EL", "ITL ")], sentences)
    assert found == due


class TestBrokenCharts:
    """What is wrong with one chart stays there."""

    @pytest.fixture
    def broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Makes a page of served points whose scripts go on with some more."""

        def make(more: str) -> Path:
            own = render.read_own_asset
            monkeypatch.setattr(
                render, "read_own_asset", lambda name: own(name) + (more if name == "charts.js" else "")
            )
            return pages.page(tmp_path, pages.served())

        return make

    def test_a_chart_that_cannot_be_made_says_so_in_its_place(self, broken: Any, visit: Visit) -> None:
        path = broken('dcp.charts.ttft = () => { throw new Error("made up"); };')
        page = visit(path, viewport=SCREEN)
        settled(page)
        said = page.locator("#chart-ttft-serve-live .panels").inner_text()
        assert "This chart could not be drawn (made up)" in said
        marks = page.evaluate(MARKS)
        assert [n for n, count in marks.items() if not count] == ["ttft-serve-live", "ttft-serve-replay"]
        assert page.locator("#every-point tbody tr").count() == 8

    def test_a_chart_that_fails_while_it_is_drawn_says_so_too(self, broken: Any, visit: Visit) -> None:
        """Plotly refuses a layout at once, or later; the theme, which draws all again, is no other."""
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
        said = page.locator("#chart-ttft-serve-live .panels").inner_text()
        assert "This chart could not be drawn (made up)" in said
        marks = page.evaluate(MARKS)
        assert [n for n, count in marks.items() if not count] == ["ttft-serve-live", "ttft-serve-replay"]
        paper = "document.querySelector('#chart-itl-serve-live .chart')._fullLayout.paper_bgcolor"
        assert page.evaluate(paper) == "rgb(20, 24, 29)"
