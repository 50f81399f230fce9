"""Count the marks of every chart on the pages of `make results`, of a CPU run and of imported results."""

from __future__ import annotations

import collections
import itertools
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.imports import Overrides, import_files
from dcpbench.reports import dataframes, plots, sections
from dcpbench.reports.page import render
from tests.unit import engine_files_builder, record_builder

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.browser.conftest import Visit

ROOT = Path(__file__).parents[2]
REPORTS = [
    line.split(maxsplit=1)
    for line in (ROOT / "results" / "reports.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
MAX_PANELS = 12  # in one chart; charts.js states below it how many there are
MAX_PHASE_LOADS = 3  # in the chart of phases: the first, the middle and the last
SCREEN = {"width": 400, "height": 800}  # of a phone; charts off the screen are drawn too
DRAWN = """() => new Promise((done) => {
  const root = document.documentElement;
  const look = () => { if ("drawn" in root.dataset) done(); };
  new MutationObserver(look).observe(root, { attributes: true });
  look();
})"""
"""Wait without polling, which costs a large page as much as its charts."""
COUNT = """() => Object.fromEntries([...document.querySelectorAll("figure[id^=chart-]")].map((figure) => [
  figure.id.replace("chart-", ""),
  [...figure.querySelectorAll(".panel")].map((panel) => [
    panel.querySelector(".panel-title")?.textContent ?? "",
    [...panel.querySelectorAll(".scatterlayer .point, .barlayer .point")].filter((mark) => mark.tagName === "path"
      ? mark.getAttribute("d").length > 5 : (mark.querySelector("path")?.getAttribute("d") ?? "").length > 5).length,
    [...panel.querySelectorAll(".scatterlayer .js-line")].filter((line) => line.style.strokeWidth !== "8px" && line.getAttribute("d")).length,
  ]),
]))"""
"""Return the title, the number of marks with an outline, and the number of lines (without a frontier's wide one) of each panel, by chart."""
Panel = tuple[str, int, int]  # title, expected number of marks, expected number of lines


def load_report(line: str, folder: str) -> dataframes.Frames:
    """Load the runs that a line of reports.txt names."""
    *words, _, _ = shlex.split(line)
    runs = [ROOT / "results" / folder / word for word in words if word != "--as-repeats"]
    return dataframes.load_frames(runs, as_repeats="--as-repeats" in words)


def load_cpu_run(tmp_path: Path) -> dataframes.Frames:
    return dataframes.load_frames([record_builder.write_records(tmp_path / "run", record_builder.make_cpu_sweep())])


def load_vllm_results(tmp_path: Path) -> dataframes.Frames:
    """Load four results of vLLM's benchmark, which are files in a public repository."""
    files = sorted((ROOT / "tests" / "data" / "imports" / "glm-4.7_1k1k").glob("*.json"))
    import_files(files, "vllm", tmp_path / "run", Overrides(tp=8))
    return dataframes.load_frames([tmp_path / "run"])


def load_sglang_results(tmp_path: Path) -> dataframes.Frames:
    """Load results of two data sets that are appended to one file."""
    chat = {"dataset_name": "sharegpt", "total_input_tokens": 67_500, "total_output_tokens": 57_300}
    lines = [
        *map(engine_files_builder.make_sglang_2024_result, (1, 2, 4)),
        engine_files_builder.make_sglang_2024_result(4, **chat),
    ]
    import_files(
        [engine_files_builder.write_file(tmp_path, *lines)], "sglang", tmp_path / "run", Overrides(model="llama", tp=2)
    )
    return dataframes.load_frames([tmp_path / "run"])


def load_vllm_sweep(tmp_path: Path) -> dataframes.Frames:
    """Load a sweep of four servers at two rates with three runs each."""
    for share, seqs, rate in itertools.product((0.9, 0.95), (128, 256), (8, 16)):
        server = {"gpu_memory_utilization": share, "max_num_seqs": seqs}
        engine_files_builder.write_sweep(tmp_path / "sweep", server, {"request_rate": rate}, runs=3)
    import_files([tmp_path / "sweep"], "vllm", tmp_path / "run", Overrides(tp=8))
    return dataframes.load_frames([tmp_path / "run"])


PAGES: dict[str, Callable[[Path], dataframes.Frames]] = {
    f"{folder} {shlex.split(line)[-1]}": lambda _, line=line, folder=folder: load_report(line, folder)
    for folder, line in REPORTS
} | {
    "cpu": load_cpu_run,
    "imported": load_vllm_results,
    "of sglang": load_sglang_results,
    "of a sweep": load_vllm_sweep,
}
"""Functions that load the frames of a page, by folder and report name, because several folders have a report named `report`."""


def write_page(read: dataframes.Frames, folder: Path) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
    """Write the page without pictures, and return its path, its charts and its points as rows."""
    content = sections.build_sections(read, plots.draw_all(read, folder / "figures", drawn=False))
    page = folder / "report.html"
    text = render.render_page("a report", content, read, pictures=False)
    page.write_text(text, encoding="utf-8")
    columns = json.loads(text.split('id="data">', 1)[1].split("</script>", 1)[0])["columns"]
    names = list(columns)
    points = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    charts = [chart for section in content for chart in render.list_charts([*section.first, *section.pictures])]
    shown = [{"slug": c.slug, "kind": c.kind, "workload": c.workload, "mode": c.mode} for c in charts]
    return page, [*shown, {"slug": "explore", "kind": "explore", "workload": "", "mode": ""}], points


def has(point: dict[str, Any], *names: str) -> bool:
    return all(point.get(name) is not None for name in names)


def list_panels(points: list[dict[str, Any]], *statistics: str) -> list[Panel]:
    """Return a panel for each group of comparable points, with a mark for each statistic of a point and a line for
    each series.
    """
    found: dict[str, collections.Counter[tuple[int, str]]] = collections.defaultdict(collections.Counter)
    for point in points:
        for name in statistics:
            if has(point, name):
                found[point["panel"]][point["series"], name] += 1
    return [(name, sum(s.values()), len(s)) for name, s in found.items()]


def list_phases(points: list[dict[str, Any]]) -> list[Panel]:
    """Return panels with a bar for each phase that took time, at up to three loads, and one inside it for its floor."""
    profiled = split_by_engine(points, "phase:idle")
    loads = sorted({p["concurrency"] for p in profiled})
    some = loads if len(loads) <= MAX_PHASE_LOADS else [loads[0], loads[len(loads) // 2], loads[-1]]
    spent = {
        name.removeprefix("phase:") for p in profiled for name, ms in p.items() if name.startswith("phase:") and ms
    }
    found: collections.Counter[str] = collections.Counter()
    for p in profiled:
        if p["concurrency"] in some:
            found[p["panel"]] += len(spent) + sum(bool(p.get(f"floor:{name}")) for name in spent)
    return [(name, shown, 0) for name, shown in found.items()]


def list_capacities(points: list[dict[str, Any]]) -> list[Panel]:
    """Return two panels a model and run with a bar for each layout; a capacity bounded by the sweep is left out of the second."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    several = len({p["run"] for p in points}) > 1
    for p in points:
        if has(p, "kv_tokens_per_gib"):
            where = f"{p['model']}, {p['run']}" if several and p["run"] != p["model"] else p["model"]
            found[f"{where}, tokens per GiB of KV memory on each GPU"].add(p["layout"])
            if has(p, "kv_capacity_tokens") and p.get("kv_bounded_by") != "sweep":
                found[f"{where}, tokens held in all"].add(p["layout"])
    return [(name, len(layouts), 0) for name, layouts in found.items()]


def explore(points: list[dict[str, Any]]) -> list[Panel]:
    """Return the panel of output against speed for one user, or against concurrency with a line for each series of each load if that speed is unknown."""
    if marks := sum(has(p, "tok_s_per_user", "output_tok_s_per_gpu") for p in points):
        return [("", marks, 0)]
    return [("", len(points), len({(p["series"], p["panel"]) for p in points}))]


def compute_expected_panels(chart: dict[str, Any], points: list[dict[str, Any]]) -> list[Panel]:
    """Return the panels that a chart should have."""
    own = [p for p in points if p["workload"] == (chart["workload"] or p["workload"])]
    own = [p for p in own if p["mode"] == (chart["mode"] or p["mode"])]
    loaded = [p for p in own if p.get("arrival") != "trace"]
    itl = "step_ms" if any(has(p, "step_ms") for p in loaded) else "itl_p50_ms"
    per_user, per_gpu = "tok_s_per_user", "output_tok_s_per_gpu"
    match chart["kind"]:
        case "ttft":
            found = list_panels(loaded, "ttft_p50_ms", "ttft_p99_ms")
        case "itl":
            found = list_panels(loaded, itl, "itl_p99_ms")
        case "break-even":
            found = list_panels(
                split_by_engine([p for p in loaded if p["arrival"] == "closed"], "dcp_ratio"), "dcp_ratio"
            )
        case "frontier":
            found = list_panels([p for p in own if has(p, per_user)], per_gpu)
        case "kv":
            found = list_capacities(own)
        case "phases":
            found = list_phases(own)
        case "explore":
            found = explore(own)
        case "overview":
            found = list_panels(split_by_engine(loaded, "other_ratio"), "other_ratio")
        case "throughput":
            found = list_panels(loaded, "output_tok_s")
        case kind:
            raise AssertionError(kind)
    return found


def split_by_engine(points: list[dict[str, Any]], ratio: str) -> list[dict[str, Any]]:
    """Return the points that have a ratio to another point of their engine, with a panel for each of several engines."""
    kept = [p for p in points if has(p, ratio)]
    if len({p["run"] for p in kept}) < 2:
        return kept
    return [{**p, "panel": f"{p['panel']}, {p['run']}"} for p in kept]


@pytest.mark.parametrize("name", PAGES)
def test_every_chart_has_a_mark_for_each_value_of_the_page_data(name: str, tmp_path: Path, visit: Visit) -> None:
    """Expect a mark for each point and percentile in the page's data and a line for each series, and half of the first
    chart on a phone's first screen.
    """
    path, charts, points = write_page(PAGES[name](tmp_path), tmp_path)
    page = visit(path, viewport=SCREEN)
    page.evaluate(DRAWN)
    first = page.locator(".chart").first.bounding_box()
    assert first
    assert first["y"] + first["height"] / 2 < SCREEN["height"]
    counted = page.evaluate(COUNT)
    assert list(counted) == [chart["slug"] for chart in charts]
    for chart in charts:
        wanted, found = compute_expected_panels(chart, points), counted[chart["slug"]]
        assert wanted
        assert all(marks > 0 for _, marks, _ in wanted)
        assert len(found) == min(len(wanted), MAX_PANELS), chart["slug"]
        for title, *held in found:
            candidates = [list(n) for of, *n in wanted if title in of]
            assert held in candidates, (chart["slug"], title)
        if len(wanted) <= MAX_PANELS:
            assert sorted(tuple(n) for _, *n in found) == sorted(tuple(n) for _, *n in wanted), chart["slug"]
