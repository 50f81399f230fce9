"""Test regions of vLLM's `gpu_sync_allowed` in traces: waits inside are listed with their reason and are no findings."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.scan import read_traces, scan_traces
from dcpbench.syncs.traces.allowed_regions import REASON, find_regions
from tests.unit.trace_builder import Trace, compute_exit_code, select_counted

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from dcpbench.syncs.sync_report import Report

ALLOWED = "vllm/utils/gpu_sync_debug.py(108): gpu_sync_allowed"
ENTER, EXIT = "contextlib.py(132): __enter__", "contextlib.py(141): __exit__"
PROGRAM = """
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def _suppress_gpu_sync_check():
    try:
        yield
    finally:
        torch.zeros(1)


@contextmanager
def _noop_cm():
    yield


def gpu_sync_allowed(first_only=False):
    return _noop_cm() if first_only else _suppress_gpu_sync_check()


def step(x):
    x.sum().item()
    with gpu_sync_allowed():
        x.max().item()
        with nullcontext():
            x.max().item()
        with gpu_sync_allowed(first_only=True):
            x.max().item()
        x.max().item()
    x.sum().item()
    with torch.no_grad(), gpu_sync_allowed(first_only=True):
        x.max().item()
    try:
        with gpu_sync_allowed():
            x.max().item()
            raise ValueError
    except ValueError:
        x.sum().item()
    with nullcontext():
        x.sum().item()
    gpu_sync_allowed()  # without a region
    return x.sum().item()
"""


def build_trace(*, allowed: str = ALLOWED, closed: bool = True) -> Trace:
    """Build a trace of a function that waits in a region, in a block inside that region, and after it."""
    trace = Trace().work()
    trace.frame("vllm/v1/worker/gpu_model_runner.py(100): execute_model", 0, 2000)
    trace.frame(allowed, 10, 14)
    trace.frame("contextlib.py(299): helper", 11, 13)
    trace.frame(ENTER, 15, 18)
    trace.frame("vllm/utils/gpu_sync_debug.py(86): _suppress_gpu_sync_check", 16, 17)
    trace.kernel(20, 30, 200)
    trace.item(40, 220)
    trace.frame(ENTER, 300, 303)
    trace.kernel(310, 320, 500)
    trace.item(330, 520)
    trace.frame(EXIT, 600, 603)
    trace.kernel(620, 630, 700)
    trace.item(640, 720)
    if closed:
        trace.frame(EXIT, 800, 803)
    trace.kernel(820, 830, 1000)
    trace.item(840, 1020)
    return trace


def count_by_reason(report: Report) -> dict[str, int]:
    return {site.allowed: site.count for site in select_counted(report)}


def test_waits_inside_and_outside_a_region_are_two_sites(tmp_path: Path) -> None:
    """The block inside the region ends with another `__exit__`, which does not end the region: three waits are in it."""
    report = build_trace().scan(tmp_path)
    assert count_by_reason(report) == {REASON: 3, "": 1}
    assert len({site.fingerprint for site in report.sites}) == 1


def test_only_the_wait_outside_the_region_is_a_finding(tmp_path: Path) -> None:
    report = build_trace().scan(tmp_path)
    verdict = compute_verdict(report, Gate(root=tmp_path))
    assert len(verdict.findings) == 1
    assert "1 in all" in verdict.findings[0].message
    assert list(verdict.allowed.values()) == [REASON]


def test_trace_with_waits_in_regions_only_is_clean(tmp_path: Path) -> None:
    trace = build_trace()
    trace.events = [event for event in trace.events if event["ts"] < 810]
    report = trace.scan(tmp_path)
    assert count_by_reason(report) == {REASON: 3}
    assert compute_exit_code(report, tmp_path) == 0


@pytest.mark.parametrize(
    "trace",
    [build_trace(allowed="mine.py(3): gpu_sync_allowed"), build_trace(closed=False)],
    ids=["other", "not closed"],
)
def test_region_of_another_function_or_without_an_end_allows_nothing(trace: Trace, tmp_path: Path) -> None:
    report = trace.scan(tmp_path)
    assert count_by_reason(report) == {"": 4}
    assert compute_exit_code(report, tmp_path) == 1


def test_region_without_stacks_allows_nothing(tmp_path: Path) -> None:
    trace = build_trace()
    trace.events = [event for event in trace.events if event["cat"] != "python_function"]
    assert count_by_reason(trace.scan(tmp_path)) == {"": 4}


def test_region_of_one_thread_allows_nothing_on_another(tmp_path: Path) -> None:
    trace = build_trace()
    trace.frame("vllm/v1/worker/gpu_model_runner.py(100): execute_model", 0, 2000, tid=5)
    trace.kernel(40, 50, 60, tid=5)
    trace.item(60, 90, tid=5)
    assert count_by_reason(trace.scan(tmp_path)) == {REASON: 3, "": 2}


def test_sites_of_two_ranks_are_merged_by_permission(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    for path in paths:
        path.write_text(build_trace().text())
    assert count_by_reason(scan_traces(paths, root=tmp_path)) == {REASON: 6, "": 2}


def load_program(folder: Path) -> ModuleType:
    path = folder / "vllm" / "utils" / "gpu_sync_debug.py"
    path.parent.mkdir(parents=True)
    path.write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("gpu_sync_debug", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recorded_regions_contain_only_the_reads_of_the_maximum(tmp_path: Path) -> None:
    """The program computes a maximum in four regions, one within another, and a sum outside of them."""
    from torch import ones
    from torch.profiler import profile

    program = load_program(tmp_path)
    with profile(with_stack=True) as recorded:
        program.step(ones(8))
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    columns = read_traces(tmp_path / "trace.json")[0].columns
    regions, ops = find_regions(columns), columns.tables["ops"]
    assert len(regions) == 4
    starts = {
        name: ops.start[[columns.names[number] == name for number in ops.name]].tolist()
        for name in ("aten::max", "aten::sum")
    }
    inside = {
        name: sum(any(r.start <= at < r.end for r in regions) for at in at_all) for name, at_all in starts.items()
    }
    assert inside == {"aten::max": 6, "aten::sum": 0}
    assert len(starts["aten::sum"]) >= 5
