"""Build synthetic reports for tests of gate, formats and command line. None of these numbers was measured."""

from __future__ import annotations

from typing import Any

from dcpbench.syncs.sync_report import Coverage, Example, Report, Site, TraceSummary, sum_totals

NOTE = "Calls of the driver API do not show: the trace holds no cuda_sync events."


def make_coverage(**changes: Any) -> Coverage:
    """Return the coverage of a good trace."""
    fields = {
        "detector": "scan",
        "gpu_events": 100,
        "runtime_events": 300,
        "ops": 50,
        "stacks": "python_function",
        "steps_from": "ProfilerStep",
        "notes": [NOTE],
    }
    return Coverage(**{**fields, **changes})


def make_trace(path: str = "rank0.json", *, steps: int | None = 10, **changes: Any) -> TraceSummary:
    """Return a trace of ten steps; `changes` are those of its coverage."""
    return TraceSummary(
        path=path,
        rank=0,
        steps=steps,
        span_us=10_000.0,
        gpu_busy_us=9_000.0,
        gpu_idle_us=1_000.0,
        coverage=make_coverage(**changes),
    )


def make_site(fingerprint: str = "f1", **changes: Any) -> Site:
    """Return `check_all` of python/engine/kv.py: one `.all()` in each of ten steps, 30 µs of bubble each."""
    fields = {
        "fingerprint": fingerprint,
        "rule": "SYNC001",
        "kind": "scalar-read",
        "op": "aten::_local_scalar_dense",
        "op_chain": ["aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"],
        "function": "check_all",
        "file": "python/engine/kv.py",
        "line": 12,
        "line_is": "function",
        "stack": ["python/engine/kv.py(12): check_all"],
        "direction": "DtoH pinned",
        "call": "cudaStreamSynchronize",
        "threads": ["7"],
        "count": 10,
        "count_per_step": 1.0,
        "wait_us": 420.0,
        "wait_median_us": 40.0,
        "bubble_us": 300.0,
        "bytes": 10,
        "example": Example(trace="rank0.json", ts=1.5, wait_us=40.0, bubble_us=30.0),
        "traces": ["rank0.json"],
    }
    return Site(**{**fields, **changes})


def make_report(*sites: Site, traces: list[TraceSummary] | None = None) -> Report:
    """Return a report without verdicts."""
    return Report(
        traces=[make_trace()] if traces is None else traces, sites=list(sites), totals=sum_totals(list(sites))
    )


def make_report_of_all_kinds() -> Report:
    """Return a report with one site of each kind: with and without a place, allowed, in warm-up, internal, and possibly blocking."""
    return make_report(
        make_site("f1"),
        make_site(
            "f2", function="sample", rule="SYNC003", kind="copy-to-host", op="aten::copy_", line=40, bubble_us=50.0
        ),
        make_site("f3", function="load", warmup_only=True, count=1, count_per_step=0.0, bubble_us=9_000.0),
        make_site(
            "f4", own=True, function="", file="", line=None, op="", rule="SYNC008", kind="device-sync", explicit=True
        ),
        make_site("f5", function="", file="", line=None, stack=[], range="decode", bubble_us=None, wait_us=None),
        make_site(
            "f6", may_block=True, rule="SYNC005", kind="pageable-copy", function="copy", bubble_us=0.0, wait_us=5.0
        ),
    )


def make_hostile_report() -> Report:
    """Return a report with control characters for a terminal, a browser, Markdown, XML, Rich and GitHub's log."""
    return make_report(
        make_site(
            "n1",
            function="\x1b[31mred\x1b]8;;http://x\x07<script>alert(1)</script>",
            op="aten::a|b`c`\x9b2J[bold]",
            range="\u202egnp\ud800",
            file="a b/%0A::error::<&>{0}[x](y),k=v:w.py",
            kind="scalar-read",
            direction="DtoH\n::error::pwned",
            stack=["x\r\n::warning::y"],
        ),
        traces=[make_trace("\x1b]0;title\x07</testsuite>.json", notes=["::error::note\n[/red] <b>@all</b>"])],
    )
