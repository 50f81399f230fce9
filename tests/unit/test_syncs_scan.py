"""Test `scan` on a trace of an H200 with synchronisations counted by hand, and on variants of that trace."""

from __future__ import annotations

import collections
import gzip
import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench.syncs.scan import scan_traces

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.sync_report import Report, Site

TRACE = Path(__file__).parents[1] / "data" / "h200_stacks.trace.json.gz"
RAW: dict[str, Any] = json.loads(gzip.decompress(TRACE.read_bytes()))
STEPS = 3
PER_STEP = {
    ("set_kv_all", "aten::_local_scalar_dense"): 1,  # if not valid_mask.all()
    ("set_kv_all", "aten::nonzero"): 2,  # buffer[loc[mask]] = x[mask], for keys and for indices
    ("set_kv_mask", "aten::nonzero"): 2,  # the published fix, which filters always
    ("step", "aten::_local_scalar_dense"): 1,  # int(n[1])
}
"""Counts from the raw events: 18 cudaStreamSynchronize, each after a DtoH copy, six in each of three steps. The only
cudaDeviceSynchronize is called by torch/profiler."""


def list_events(category: str) -> list[dict[str, Any]]:
    return [e for e in RAW["traceEvents"] if e.get("cat") == category]


def find_innermost_name(category: str, call: dict[str, Any], name: str = "") -> str:
    """Return the name of the shortest event that contains a call on its thread."""
    around = [
        e
        for e in list_events(category)
        if e["tid"] == call["tid"] and e["ts"] <= call["ts"] < e["ts"] + e["dur"] and e["name"].startswith(name)
    ]
    return str(min(around, key=lambda e: e["dur"])["name"])


def count_per_step(report: Report) -> dict[tuple[str, str], float | None]:
    """Return (function, operator) of each site of the program -> its count per step; no two sites share them."""
    sites = list_program_sites(report)
    counts = {(s.function, s.op): s.count_per_step for s in sites}
    assert len(counts) == len(sites)
    return counts


def list_program_sites(report: Report) -> list[Site]:
    return [s for s in report.sites if not s.own]


def scan_text(folder: Path, text: str | bytes, name: str = "trace.json") -> Report:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return scan_traces([path], root=folder)


@pytest.fixture(scope="module")
def report() -> Report:
    return scan_traces([TRACE], root=TRACE.parent)


class TestCountedByHand:
    def test_raw_events_have_the_counts_of_the_table(self) -> None:
        """The innermost operator and function of sync.py around each call are found by comparing times only."""
        calls = [e for e in list_events("cuda_runtime") if e["name"] == "cudaStreamSynchronize"]
        seen: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for call in calls:
            function = find_innermost_name("python_function", call, "sync.py").partition("): ")[2]
            seen[find_innermost_name("user_annotation", call), function, find_innermost_name("cpu_op", call)] += 1
        steps = {step for step, _, _ in seen}
        assert len(calls) == 18
        assert len(steps) == STEPS
        assert seen == {(step, *place): count for step in steps for place, count in PER_STEP.items()}

    def test_raw_events_have_no_other_waiting_call(self) -> None:
        """The 18 copies belong to the 18 waits; other calls launch kernels and query attributes."""
        names = collections.Counter(e["name"] for e in list_events("cuda_runtime"))
        copies = {e["args"]["correlation"] for e in list_events("cuda_runtime") if e["name"] == "cudaMemcpyAsync"}
        assert names == {
            "cudaPeekAtLastError": 72,
            "cudaLaunchKernel": 63,
            "cudaLaunchKernelExC": 12,
            "cudaFuncGetAttributes": 12,
            "cudaMemcpyAsync": 18,
            "cudaStreamSynchronize": 18,
            "cudaDeviceSynchronize": 1,
        }
        assert {e["args"]["correlation"]: e["name"] for e in list_events("gpu_memcpy")} == dict.fromkeys(
            copies, "Memcpy DtoH (Device -> Pinned)"
        )
        last = next(e for e in list_events("cuda_runtime") if e["name"] == "cudaDeviceSynchronize")
        assert find_innermost_name("python_function", last, "torch/profiler")


class TestScan:
    def test_scan_finds_exactly_the_true_sites(self, report: Report) -> None:
        assert count_per_step(report) == PER_STEP
        assert report.totals.syncs == 18
        assert report.totals.sites == 4
        assert report.traces[0].steps == STEPS
        assert not any(s.may_block or s.explicit or s.warmup_only for s in list_program_sites(report))

    def test_synchronisation_of_the_profiler_is_marked_as_own(self, report: Report) -> None:
        own = [s for s in report.sites if s.own]
        assert [(s.call, s.count, s.rule) for s in own] == [("cudaDeviceSynchronize", 1, "SYNC008")]

    def test_wait_time_is_the_duration_of_the_calls(self, report: Report) -> None:
        """Copies into pinned memory return at once; the waits are the 18 synchronisations."""
        waits = [e["dur"] for e in list_events("cuda_runtime") if e["name"] == "cudaStreamSynchronize"]
        assert report.totals.wait_us == pytest.approx(sum(waits), abs=0.1)

    def test_site_has_all_fields_that_the_trace_contains(self, report: Report) -> None:
        site = next(s for s in report.sites if s.function == "set_kv_mask")
        assert (site.rule, site.kind, site.direction) == ("SYNC002", "data-dependent-shape", "DtoH pinned")
        assert (site.file, site.line, site.line_is) == ("sync.py", 99, "function")
        assert site.op_chain == ["aten::index", "aten::nonzero"]
        assert [frame.partition("): ")[2] for frame in site.stack] == ["<module>", "step", "set_kv_mask"]
        assert site.call == "cudaStreamSynchronize"
        assert site.bytes == 6 * 4
        assert site.threads == ["thread 1023 (python3)"]
        assert site.example is not None
        assert site.example.step == 0

    def test_bubbles_do_not_exceed_the_idle_time_of_the_gpu(self, report: Report) -> None:
        trace, bubble = report.traces[0], report.totals.bubble_us
        assert bubble is not None
        assert trace.gpu_idle_us is not None
        assert 0 < bubble <= trace.gpu_idle_us


def drop_categories(*categories: str) -> dict[str, Any]:
    return {**RAW, "traceEvents": [e for e in RAW["traceEvents"] if e.get("cat") not in categories]}


def change_events(change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    return json.dumps({**RAW, "traceEvents": [change(e) for e in RAW["traceEvents"]]})


def ids_as_text(event: dict[str, Any]) -> dict[str, Any]:
    ids = ("correlation", "External id", "stream", "device", "bytes")
    args = {k: str(v) if k in ids else v for k, v in event.get("args", {}).items()}
    return {**event, "args": args, **{k: str(event[k]) for k in ("pid", "tid") if k in event}}


def some_ids_as_text(event: dict[str, Any]) -> dict[str, Any]:
    return ids_as_text(event) if event.get("cat") == "cpu_op" else event


def times_as_text(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, **{k: f"{event[k]:.3f}" for k in ("ts", "dur") if k in event}}


def times_as_integers(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event with whole microseconds, as torch wrote them until 2.2, so that nested events may begin and end
    together.
    """
    return {**event, **{k: round(event[k]) for k in ("ts", "dur") if k in event}}


def huge_ids(event: dict[str, Any]) -> dict[str, Any]:
    args = {k: v + (1 << 80) if k in ("correlation", "External id") else v for k, v in event.get("args", {}).items()}
    return {**event, "args": args}


def without_stacks(event: dict[str, Any]) -> dict[str, Any]:
    args = {k: v for k, v in event.get("args", {}).items() if k != "Call stack"}
    return {**event, "args": args, "cat": "none" if event.get("cat") == "python_function" else event.get("cat")}


def shuffle_events() -> str:
    order = list(RAW["traceEvents"])
    random.Random(3).shuffle(order)
    return json.dumps({**RAW, "traceEvents": order})


def format_as_kineto() -> str:
    """Return the text with each event on four lines, its args on more, and the closing bracket on a separate line."""
    one = [re.sub(r'"(name|pid|ts|args)":', r'\n    "\1":', json.dumps(e)) for e in RAW["traceEvents"]]
    head = json.dumps({k: v for k, v in RAW.items() if k != "traceEvents"}, indent=2)[:-2]
    return head + ',\n  "traceEvents": [\n  ' + ",\n  ".join(one) + '\n  ],\n  "traceName": "t.json"\n}\n'


def compress_in_members() -> bytes:
    text = json.dumps(RAW).encode()
    return gzip.compress(text[:100_000]) + gzip.compress(b"") + gzip.compress(text[100_000:]) + b"\0" * 512


EQUIVALENT_FORMS: dict[str, Callable[[], str | bytes]] = {
    "without cuda_sync events": lambda: json.dumps(drop_categories("cuda_sync")),
    "without flows": lambda: json.dumps(drop_categories("ac2g")),
    "ids as text": lambda: change_events(ids_as_text),
    "ids of operators as text": lambda: change_events(some_ids_as_text),
    "ids beyond 64 bits": lambda: change_events(huge_ids),
    "times as text": lambda: change_events(times_as_text),
    "events in no order": shuffle_events,
    "a bare array": lambda: json.dumps(RAW["traceEvents"]),
    "an object with the events only": lambda: json.dumps({"traceEvents": RAW["traceEvents"]}),
    "Kineto's own lines": format_as_kineto,
    "indented": lambda: json.dumps(RAW, indent=4),
    "without a blank": lambda: json.dumps(RAW, separators=(",", ":")),
    "gzip in three members and padding": compress_in_members,
    "a byte order mark": lambda: b"\xef\xbb\xbf" + json.dumps(RAW).encode(),
    "Windows lines": lambda: json.dumps(RAW, indent=1).replace("\n", "\r\n"),
    "much after the events": lambda: json.dumps({**RAW, "extra": [{"a": [[], []]}, {"b": [{}]}] * 5000}),
}


class TestVariants:
    @pytest.mark.parametrize("form", EQUIVALENT_FORMS)
    def test_sites_of_an_equivalent_trace_are_the_same(self, form: str, report: Report, tmp_path: Path) -> None:
        other = scan_text(tmp_path, EQUIVALENT_FORMS[form]())
        assert count_per_step(other) == PER_STEP
        assert {s.fingerprint for s in other.sites} == {s.fingerprint for s in report.sites}
        assert [s.own for s in other.sites].count(True) == 1
        assert other.traces[0].coverage.complete
        assert other.totals.bubble_us == pytest.approx(report.totals.bubble_us, abs=1)

    def test_sites_are_found_with_whole_microseconds(self, tmp_path: Path) -> None:
        assert count_per_step(scan_text(tmp_path, change_events(times_as_integers))) == PER_STEP

    def test_call_stacks_of_operators_are_used_without_frames(self, tmp_path: Path) -> None:
        report = scan_text(tmp_path, json.dumps(drop_categories("python_function")))
        assert count_per_step(report) == PER_STEP
        assert report.traces[0].coverage.stacks == "call stack"

    def test_sites_without_stacks_are_named_by_operator(self, tmp_path: Path) -> None:
        """The four filters of a step become one site; `.all()` and `int()` differ by their outer operator."""
        report = scan_text(tmp_path, change_events(without_stacks))
        counts = {(s.function, *s.op_chain): s.count_per_step for s in list_program_sites(report)}
        assert counts == {
            ("", "aten::index", "aten::nonzero"): 4,
            ("", "aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"): 1,
            ("", "aten::item", "aten::_local_scalar_dense"): 1,
        }
        assert [(s.call, s.own) for s in report.sites if s.own] == [("cudaDeviceSynchronize", True)]
        assert report.traces[0].coverage.stacks == "none"
        assert any("with_stack=True" in note for note in report.traces[0].coverage.notes)

    def test_waits_are_found_without_operators(self, tmp_path: Path) -> None:
        report = scan_text(tmp_path, json.dumps(drop_categories("cpu_op")))
        assert report.totals.syncs == 18
        assert {s.function: s.count_per_step for s in list_program_sites(report)} == {
            "set_kv_all": 3,
            "set_kv_mask": 2,
            "step": 1,
        }

    def test_cuda_sync_events_show_waits_without_a_call(self, tmp_path: Path) -> None:
        """A wait of the driver API has no runtime call, but its External id names the operator."""
        gone = [e for e in RAW["traceEvents"] if e["name"] not in ("cudaStreamSynchronize", "cudaDeviceSynchronize")]
        report = scan_text(tmp_path, json.dumps({**RAW, "traceEvents": gone}))
        assert count_per_step(report) == PER_STEP
        assert report.totals.syncs == 18

    def test_two_ranks_share_one_report(self, tmp_path: Path) -> None:
        """The same places are the same sites; counts are summed, and counts per step are not."""
        for rank in (0, 1):
            (tmp_path / f"rank{rank}.json").write_text(json.dumps(RAW))
        report = scan_traces([tmp_path / "rank0.json", tmp_path / "rank1.json"], root=tmp_path)
        assert count_per_step(report) == PER_STEP
        assert report.totals.syncs == 36
        assert [t.rank for t in report.traces] == [0, 1]
        assert all(len(s.traces) == 2 for s in report.sites)
