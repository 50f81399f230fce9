"""Test small functions at their limits: sentences, boundary values, and choices among several values."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from dcpbench import imports
from dcpbench.compare import picture
from dcpbench.dashboard import pages
from dcpbench.doctor import Report
from dcpbench.errors import RecordsError, UsageError, WorkerError
from dcpbench.exports import bench_files, prometheus
from dcpbench.hangs import dumps, finding
from dcpbench.hangs import format as hang_format
from dcpbench.hangs.dumps import Frame
from dcpbench.hangs.evidence import Rank
from dcpbench.hangs.heartbeats import INSIDE, RAISED, CollectiveEvent
from dcpbench.imports import documents, selection, vllm
from dcpbench.imports.documents import Document
from dcpbench.imports.field_names import parse_name as read_name
from dcpbench.imports.result import Result
from dcpbench.launch import hang_capture, nodes, processes, progress, ranks
from dcpbench.launch.jobs import Progress
from dcpbench.launch.launcher import _JobEnd
from dcpbench.plan.serve_spec import ServeLoads
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.budget import WholeModel
from dcpbench.points.cluster_specs import format_machine, load_machine
from dcpbench.recommend import advise, layout_choice
from dcpbench.recommend.forecast import apply_factor
from dcpbench.records.checks import MAX_ENTRIES
from dcpbench.records.lines import Tail
from dcpbench.records.metrics import METRIC
from dcpbench.records.record import Percentiles
from dcpbench.reports import explain, floors, report_markdown, terminal_tables
from dcpbench.reports.sections import Section
from dcpbench.reports.tables import Table
from dcpbench.serving import outcome
from dcpbench.serving.allocator import DcpAllocator
from dcpbench.serving.step_times import (
    MAX_REQUESTS,
    MAX_TOKENS,
    USES,
    Case,
    Chunks,
    Decodes,
    MeasuredCase,
    _find_problem,
)
from dcpbench.syncs import files
from dcpbench.syncs.sync_report import get_sort_key
from dcpbench.syncs.traces.reading import GZIP_MAGIC
from dcpbench.top import watch
from tests.unit import syncs_builder
from tests.unit import test_recommend as advised

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class TestAllocator:
    """Pages of 4 tokens, of which page 0 is padding."""

    def test_prefix_is_shared_in_existing_full_pages(self) -> None:
        """A request of 10 tokens has two full pages; sharing none, or as many as are shared already, changes nothing."""
        allocator = DcpAllocator(9, 4, 1)
        allocation = allocator.allocate(10, np.zeros(0, np.int32))
        allocator.share_pages(allocation, allocation.pages[:0])
        allocator.share_pages(allocation, allocation.pages[:2])
        allocator.share_pages(allocation, allocation.pages[:2])
        assert (allocation.shared, allocator.used_pages) == (2, 3)
        for pages_shared in (1, 3):
            with pytest.raises(
                ValueError, match=rf"^{pages_shared} full pages cannot be shared by a request of 10 tokens$"
            ):
                allocator.share_pages(allocation, allocation.pages[:pages_shared])

    @pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (2, 11)])
    def test_locations_of_tokens_outside_a_request_raise_value_error(self, start: int, stop: int) -> None:
        allocation = DcpAllocator(9, 4, 1).allocate(10, np.zeros(0, np.int32))
        assert len(allocation.compute_locs(10, 10)) == 0
        assert len(allocation.compute_locs(0, 10)) == 10
        with pytest.raises(ValueError, match=rf"^tokens {start}…{stop - 1} are not in a request of 10 tokens$"):
            allocation.compute_locs(start, stop)

    def test_request_grows_in_its_last_page_before_new_pages(self) -> None:
        allocator = DcpAllocator(5, 4, 1)
        allocation = allocator.allocate(3, np.zeros(0, np.int32))
        held = []
        for _ in range(13):
            allocator.extend(allocation, 1)
            held.append(allocator.used_pages)
        assert held == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
        with pytest.raises(ValueError, match=r"^a request cannot grow by -1 tokens$"):
            allocator.extend(allocation, -1)
        with pytest.raises(ValueError, match=r"needs no memory$"):
            allocator.allocate(4, allocation.pages[:1])


def test_row_of_a_rank_outside_calls_names_the_last_call_with_an_error() -> None:
    call = SimpleNamespace(call=SimpleNamespace(description="all_reduce"), state=RAISED, number=7)
    heartbeats = SimpleNamespace(phase="moe", layer=3, last=call, calls=())
    rank: Any = SimpleNamespace(
        name="rank 0",
        rank=0,
        heartbeats=heartbeats,
        seen=SimpleNamespace(cpu=0.5, ended="", state="S"),
        threads=(),
        flight=None,
    )
    for last, row in ((call, ["all_reduce, left with an error", "7"]), (None, ["", ""])):
        heartbeats.last = last
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hang_format, "get_open_collective", lambda _: None)
            patch.setattr(hang_format.finding, "get_position", lambda _: ("", "", "a.py:1"))
            assert hang_format._make_row(rank, None) == ["rank 0", "moe", "3", *row, "50%", "a.py:1"]


@pytest.mark.parametrize(("name", "head"), [("MainThread", "MainThread"), ("", "thread")])
def test_unnamed_thread_is_shown_as_thread(name: str, head: str) -> None:
    frames = [SimpleNamespace(location="f at a.py:1"), SimpleNamespace(location="g at b.py:2")]
    rank: Any = SimpleNamespace(threads=[SimpleNamespace(name=name, frames=frames)] * 2)
    one = f"{head}\n  f at a.py:1\n  g at b.py:2"
    assert hang_format._format_stacks(rank) == f"{one}\n\n{one}"


def test_machine_file_keeps_non_ascii_letters() -> None:
    machine = msgspec.structs.replace(load_machine("H200"), name="ünser", measured="späät", link=None)
    lines = format_machine(machine).splitlines()
    assert lines[:3] == ['name = "ünser"', 'gpu = "H200"', f"gpus_per_host = {machine.gpus_per_host}"]
    assert 'measured = "späät"' in lines


def test_find_running_without_running_jobs_names_the_latest_run(tmp_path: Path) -> None:
    for name, at in (("older", 1e9), ("newest", 2e9), ("oldest", 5e8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").write_text("0")
        os.utime(tmp_path / name / ".lock", (at, at))
    with pytest.raises(UsageError) as error:
        watch.find_running(tmp_path)
    newest = tmp_path / "newest"
    assert str(error.value).endswith(f" The last one was {newest}: dcpbench top {newest}")


def test_sites_are_sorted_by_cost_and_then_by_place() -> None:
    """The order is bubble, wait, count, file and line, unknown lines first; sites that may block follow, and the
    profiler's own are last.
    """
    plain = {"bubble_us": 5.0, "wait_us": 5.0, "count": 2, "file": "b.py", "line": 7}
    wanted = [
        syncs_builder.make_site("a", **{**plain, "bubble_us": 6.0}),
        syncs_builder.make_site("b", **{**plain, "wait_us": 6.0}),
        syncs_builder.make_site("c", **{**plain, "count": 3}),
        syncs_builder.make_site("d", **{**plain, "file": "a.py"}),
        syncs_builder.make_site("e", **{**plain, "line": None}),
        syncs_builder.make_site("f", **{**plain, "line": 1}),
        syncs_builder.make_site("g", **plain),
        syncs_builder.make_site("h", **plain),
        syncs_builder.make_site("i", **{**plain, "bubble_us": 9.0, "may_block": True}),
        syncs_builder.make_site("j", **{**plain, "bubble_us": 9.0, "own": True}),
    ]
    backwards = wanted[::-1]
    found = sorted(backwards, key=get_sort_key)
    assert [s.fingerprint for s in found] == [s.fingerprint for s in wanted]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("cancelled", "dcpbench_cancelled_requests"),
        ("output_tok_s", "dcpbench_output_tok_s"),
        ("itl_p99_ms", "dcpbench_itl_seconds"),
        ("host_plan_us", "dcpbench_host_plan_seconds"),
    ],
)
def test_gauge_name_ends_with_its_unit(metric: str, name: str) -> None:
    found = prometheus.make_gauge(METRIC[metric]).name
    assert found == name or (METRIC[metric].gauge and found == f"dcpbench_{METRIC[metric].gauge}")


def test_gauge_name_of_a_request_count_ends_with_requests() -> None:
    def make_name(**changes: str) -> str:
        return prometheus.make_gauge(dataclasses.replace(METRIC["cancelled"], gauge="", **changes)).name

    assert make_name() == "dcpbench_cancelled_requests"
    assert make_name(name="lost_requests") == "dcpbench_lost_requests"
    assert make_name(name="evicted", unit="tokens") == "dcpbench_evicted"


def test_mean_lengths_of_an_import_can_be_fractions() -> None:
    result: Any = SimpleNamespace(completed=4, input_tokens=10, output_tokens=7)
    assert Result.compute_means(result) == (2.5, 1.75)
    result.completed = 0
    assert Result.compute_means(result) is None


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (0, False),
        (MAX_NUMBER, False),
        (None, False),
        (-1, True),
        (MAX_NUMBER * 2, True),
        (True, True),
        ("x" * 50, True),
    ],
)
def test_imported_time_must_be_a_number_of_ms(value: object, wrong: bool) -> None:
    document = Document.__new__(Document)
    object.__setattr__(document, "fields", {"t": value})
    object.__setattr__(document, "where", "file.json")
    if not wrong:
        assert vllm.read_time(document, "t") == value
        return
    with pytest.raises(RecordsError) as error:
        vllm.read_time(document, "t")
    assert str(error.value) == f"file.json: t is {str(value)[:40]}, which is no time in ms. Run it again."


class TestAdvice:
    @pytest.mark.parametrize(("a", "b", "ratios"), [(True, False, True), (False, True, True), (False, False, False)])
    def test_margin_with_a_corrected_forecast_is_that_of_ratios(self, a: bool, b: bool, ratios: bool) -> None:
        """The margin is 4 % for ratios, and otherwise the sum of both bands, 21 %."""
        one, other = (
            dataclasses.replace(advised.make_forecast(100, "measured"), factor=1.1 if corrected else None)
            for corrected in (a, b)
        )
        assert layout_choice.compute_margin(one, other) == pytest.approx(0.04 if ratios else 0.21)

    @pytest.mark.parametrize(
        ("weights", "kv", "buffers", "expected"),
        [
            (
                200,
                1,
                3,
                (
                    "its weights take 200.0 GiB and its KV 1.0 GiB of each GPU, 104.0 GiB more than the 97.0 GiB for both in "
                    "addition to 3.0 GiB for the buffers of a step"
                ),
            ),
            (
                100,
                7,
                0,
                "its weights take 100.0 GiB and its KV 7.0 GiB of each GPU, 7.0 GiB more than the 100.0 GiB for both",
            ),
            (
                98,
                1,
                3,
                (
                    "its weights take 98.0 GiB and its KV 1.0 GiB of each GPU, 2.0 GiB more than the 97.0 GiB for both in "
                    "addition to 3.0 GiB for the buffers of a step"
                ),
            ),
        ],
    )
    def test_refusal_states_the_shortage_of_the_whole_model(
        self, weights: int, kv: int, buffers: int, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A GPU has 100 GiB, part of which the buffers of a step take."""
        gib = 1 << 30
        whole = WholeModel(
            weight_bytes=weights * gib,
            kv_bytes=kv * gib,
            available_bytes=(100 - buffers) * gib,
            buffer_bytes=buffers * gib,
        )
        monkeypatch.setattr(advise, "measure_whole_model", lambda *_: whole)
        query = advised.make_query("H200")
        assert advise.find_refusal(query, advised.make_point()) == advise.Refusal(advise.NO_WHOLE_MODEL, expected)
        assert advise.find_refusal(dataclasses.replace(query, cycled=True), advised.make_point()) is None
        fits = msgspec.structs.replace(whole, weight_bytes=1, kv_bytes=1)
        monkeypatch.setattr(advise, "measure_whole_model", lambda *_: fits)
        assert advise.find_refusal(query, advised.make_point()) is None


def test_idle_time_is_a_range_of_percentages_of_a_step() -> None:
    """The sentence has the lowest and the highest share of all points on a GPU."""
    plain = {"cpu": False, "host_syncs_per_step": 0.0, "idle_us": 1.0, "step_us": 2.0, "allocations_per_step": 0.0}
    points = pd.DataFrame([plain | {"idle_fraction": share} for share in (0.0151, 0.3)])
    assert "The GPU idled 1.5 % to 30 % of a profiled step." in explain.describe_phases(points)


def test_sentence_about_floors_is_empty_without_floors() -> None:
    assert floors.format_short_sentence(pd.DataFrame({"label": ["tp4"], "floor_share": [math.nan]})) == ""
    assert floors.format_short_sentence(pd.DataFrame({"floor_share": [float("nan")]})) == ""


class TestMarkdown:
    @pytest.mark.parametrize(
        ("most", "more"), [(12, ""), (7, "5 rows more in points.csv."), (1, "11 rows more in points.csv.")]
    )
    def test_markdown_table_counts_rows_that_do_not_fit(self, most: int, more: str) -> None:
        text = report_markdown._format_table(Table("t", ["a", "b"], [[str(n), "x"] for n in range(12)]), most)
        assert text.count("| x |") == most
        assert text.partition("| x |\n\n")[2].partition("\n")[0].endswith(more)
        assert ("rows more" in text) is bool(more)

    def test_markdown_tables_share_the_maximum_length(self) -> None:
        """Rows have 4 + 6 characters; two tables share the maximum, but each has at least MANY_ROWS."""

        def sections(rows: int) -> list[Section]:
            tables = [Table("t", ["a"], [["123456"]] * rows) for _ in range(2)]
            return [Section(slug="s", title="t", tables=tables)]

        most = report_markdown.MAX_CHARACTERS
        assert report_markdown._count_rows_that_fit(sections(9)) == 9
        many = most // 10
        assert report_markdown._count_rows_that_fit(sections(many)) == max(
            report_markdown.MANY_ROWS, int(most / 2 / 10)
        )
        assert report_markdown._count_rows_that_fit([]) == 0


def test_failed_page_of_a_run_returns_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a failed report nor too many points raises an error, so that the other pages are written."""
    run: Any = SimpleNamespace(name="monday", entries=range(pages.MAX_POINTS))
    reasons: list[Exception] = [UsageError("no."), ValueError("x" * 300)]

    def write(*_: object, **__: object) -> None:
        raise reasons.pop(0)

    monkeypatch.setattr("dcpbench.reports.write_report", write)
    assert pages._write_page(tmp_path, run) == "monday: no page, because no."
    assert pages._write_page(tmp_path, run) == f"monday: no page, because the report failed (ValueError: {'x' * 200})"
    run.entries = range(pages.MAX_POINTS + 1)
    assert pages._write_page(tmp_path, run) == (
        f"monday: no page for {pages.MAX_POINTS + 1:,} points, only for up to {pages.MAX_POINTS:,}"
    )


@pytest.mark.parametrize(
    ("failed", "cancelled", "rejected", "ended", "expected"),
    [
        (2, 0, 0, {}, "no output token came: 2 requests failed; the first one: f0"),
        (2, 1, 0, {}, "no output token came: 2 requests failed, 1 other cut off; the first one: f0"),
        (0, 0, 0, {}, "no request was submitted; give --num-requests 1 or more."),
        (
            0,
            3,
            0,
            {"limit_s": 1.5},
            "no output token came: 0 requests rejected and 3 cut off by --timeout load=1.5; use a longer one.",
        ),
        (
            0,
            3,
            0,
            {"limit_s": 60.0, "interrupted": True},
            (
                "no output token came: 0 requests rejected and 3 cut off: a signal ended the run before the first token. "
                "Serve the load again with --resume."
            ),
        ),
        (
            0,
            3,
            0,
            {},
            (
                "no output token came: 0 requests rejected and 3 cut off, though neither --timeout nor a signal ended the run; "
                "read the log of the server or of the run."
            ),
        ),
        (
            0,
            1,
            2,
            {"interrupted": True},
            "no output token came: 2 requests rejected and 1 cut off; the first one rejected: r0",
        ),
    ],
)
def test_explanation_of_no_tokens_names_the_first_failed_request(
    failed: int, cancelled: int, rejected: int, ended: dict[str, Any], expected: str
) -> None:
    def make_sequences(letter: str, count: int) -> list[Any]:
        return [SimpleNamespace(failed=f"{letter}{n}", rejected=f"{letter}{n}") for n in range(count)]

    found = {
        outcome.REJECTED: make_sequences("r", rejected),
        outcome.CANCELLED: make_sequences("c", cancelled),
        outcome.FAILED: make_sequences("f", failed),
    }
    assert outcome._explain_no_tokens(found, **ended) == expected


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("400", 400), ("123456789", 123_456_789), ("1234567890", None), ("uniform:1-2", None), ("", None)],
)
def test_fixed_length_is_a_number_of_up_to_nine_digits(text: str, tokens: int | None) -> None:
    assert bench_files.parse_fixed_length(text) == tokens


def test_find_alive_distinguishes_the_command_from_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process in the lock file is the command; workers alone have no known start."""
    for began, expected in (
        ([5.0, 7.0], (processes.COMMAND, 5.0)),
        ([5.0, None], (processes.COMMAND, 5.0)),
        ([None, 7.0], (processes.WORKERS, None)),
        ([None, None], (processes.NONE, None)),
        ([], (processes.NONE, None)),
    ):
        monkeypatch.setattr(processes, "_read_processes", lambda _, began=began: list(enumerate(began, 100)))
        assert processes.find_alive(tmp_path) == expected
        assert processes.find_alive_pid(tmp_path) == next(
            (100 + n for n, at in enumerate(began) if at is not None), None
        )


def test_leader_has_failure_if_a_node_reports_one_or_disconnects() -> None:
    def make_line(received: object, *, closed: bool = False) -> Any:
        return SimpleNamespace(receive=lambda _: received, closed=closed)

    leader = nodes.Leader.__new__(nodes.Leader)
    for lines, failure in (
        ([], False),
        ([make_line(None)], False),
        ([make_line(b"other"), make_line(None)], False),
        ([make_line(None), make_line(nodes.FAILED)], True),
        ([make_line(None), make_line(None, closed=True)], True),
    ):
        leader._lines = lines
        assert leader.has_failure() is failure


@pytest.mark.parametrize(
    ("places", "odd", "known"),
    [
        ("aab", {2}, True),
        ("abb", {0}, True),
        ("ab", {1}, False),
        ("aabb", {2, 3}, False),
        ("abc", {2}, False),
        ("aaabbc", {3, 4, 5}, True),
    ],
)
def test_odd_ranks_are_the_minority_and_uncertain_without_a_majority(
    places: str, odd: set[int], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a clear minority, the smallest group with the highest ranks is named."""
    monkeypatch.setattr(finding, "_get_place", lambda one: one)
    monkeypatch.setattr(finding, "_is_usual_successor", lambda *_: False)
    found, sure, _ = finding._find_odd_ranks({}, dict(enumerate(places)), 5)  # type: ignore[arg-type]
    assert (found, sure) == (odd, known)


@pytest.mark.parametrize(
    ("places", "few"), [("aab", [2]), ("aabb", None), ("ab", None), ("aaabb", [3, 4]), ("abc", None)]
)
def test_minority_of_waiting_ranks_at_another_line_is_named(places: str, few: list[int] | None) -> None:
    """Stacks alone decide; if as many ranks wait at either line, none is named."""
    ranks = {1000 + n: Rank(n, f"rank {n}") for n in range(len(places))}
    calls = {
        r: (Frame("wait", "torch/x.py", 1), Frame(place, "own.py", 2)) for r, place in zip(ranks, places, strict=True)
    }
    found = finding._find_odd_line(ranks, calls)
    assert (found and (found.kind, found.ranks, found.waiting)) == (few and ("order", few, list(range(len(places)))))


@pytest.mark.parametrize(
    ("concurrency", "held", "sent", "expected"),
    [
        (48, 8, 96, "8 of full length by KV space (48 by --concurrency) with tp4"),
        (48, 48, 96, "48 by --concurrency with tp4"),
        (96, 96, 96, "all 96 with tp4"),
        (200, 95, 96, "95 of full length by KV space (200 by --concurrency) with tp4"),
        (200, 96, 96, "all 96 with tp4"),
        (48, None, 96, "48 by --concurrency with tp4"),
    ],
)
def test_bound_of_an_open_loop_is_the_smallest_limit(
    concurrency: int, held: int | None, sent: int, expected: str
) -> None:
    row = {
        "load_arrival": "gamma",
        "instances": None,
        "concurrency": concurrency,
        "room_for": held,
        "load_requests": sent,
    }
    points = pd.DataFrame([row | {"label": "tp4"}])
    assert terminal_tables._format_bounds(points) == [f"requests at once, at most: {expected}"]
    assert terminal_tables._format_bounds(points.assign(load_arrival="closed")) == []


@pytest.mark.parametrize(
    ("median", "low", "high", "expected"),
    [
        (100.0, 99.0, 100.5, "±1.0%"),
        (100.0, 99.9, 102.0, "±2.0%"),
        (100.0, 99.96, 100.04, "<±0.1%"),
        (100.0, 99.94, 100, "±0.1%"),
        (float("nan"), 1, 1, "—"),
    ],
)
def test_scatter_is_the_larger_half_width_of_an_interval(median: float, low: float, high: float, expected: str) -> None:
    point = pd.Series({"output_tok_s": median, "output_tok_s_low": low, "output_tok_s_high": high})
    assert terminal_tables._format_half_width(point) == expected


def test_narrow_terminal_drops_columns_in_this_order() -> None:
    """Columns with the lowest number are dropped first; those without a number stay."""
    decoded = {
        "context": 1,
        "routing": "",
        "concurrency": 2,
        "output_tok_s": 3.0,
        "output_tok_s_low": 3.0,
        "output_tok_s_high": 3.0,
    }
    decoded |= {"output_tok_s_per_gpu": 1.0, "tok_s_per_user": 1.0, "itl_p50_ms": 1.0, "itl_p99_ms": 1.0}
    found = [(c.name, c.drop) for c in terminal_tables._make_decode_columns(pd.DataFrame([decoded]))]
    assert found == [
        ("context", None),
        ("conc.", None),
        ("tok/s", None),
        ("scatter", 3),
        ("/GPU", 2),
        ("/user", 0),
        ("ITL ms", None),
        ("p99", 1),
    ]
    served = decoded | {"ttft_p50_ms": 1.0, "ttft_p99_ms": 1.0, "request_goodput": 0.5, "load_arrival": "closed"}
    served |= {"kv_tokens_of_all": 655_360.0, "tokens_per_step": math.nan, "tpot_p50_ms": 1.0}
    found = [(c.name, c.drop) for c in terminal_tables._make_served_columns("closed", pd.DataFrame([served]))]
    assert found[-8:] == [
        ("tok/s", None),
        ("/GPU", 0),
        ("TTFT ms", 5),
        ("p99", 1),
        ("ITL ms", None),
        ("p99", 2),
        ("good/s", 4),
        ("KV tokens", 3),
    ]


@pytest.mark.parametrize(("columns", "width"), [(80, 10), (240, 30), (400, 30), (16, 2)])
def test_progress_bar_takes_an_eighth_of_the_terminal_up_to_30_columns(columns: int, width: int) -> None:
    console = Console(file=io.StringIO(), width=columns, force_terminal=True)
    bar = progress.ProgressBar({"a": "first"}, console)
    assert bar._bar is not None
    assert bar._bar.columns[0].bar_width == width


@pytest.mark.parametrize(
    ("words", "known"),
    [("100 7", {0: 100}), ("100 8", {}), ("100", {}), ("100 7 9", {}), ("x 7", {}), ("", {})],
)
def test_rank_process_is_identified_by_pid_and_start(
    words: str, known: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 100 began at tick 7; a process with the same id and another start is not the rank."""
    (tmp_path / "rank-0.pid").write_text(words)
    monkeypatch.setattr(ranks.subprocess_guard, "read_start_ticks", lambda pid: ("S", 7) if pid == 100 else None)
    found = ranks.Ranks(tmp_path, tmp_path / "logs", tmp_path / "progress.jsonl", range(2))
    assert found.find_pids() == known


@pytest.mark.parametrize(
    ("reach", "ticks"),
    [
        (0.01, [0.988, 0.99, 0.992, 0.994, 0.996, 0.998, 1, 1.002, 1.004, 1.006, 1.008, 1.01, 1.012]),
        (0.0101, [0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 1, 1.005, 1.01, 1.015, 1.02, 1.025, 1.03]),
        (1.25, [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5]),
        (1.3, [0.25, 0.5, 1, 2, 4]),
    ],
)
def test_forest_plot_has_round_ticks_that_match_its_range(reach: float, ticks: list[float]) -> None:
    """Each side has at least five ticks, and none is at 0 or below."""
    assert picture._choose_ticks(reach) == ticks


def test_corrected_forecast_has_the_band_of_ratios() -> None:
    """The forecast is 1.25 times 100 tok/s; 4 % for ratios and 3 % and 2 % for two kinds of calls make a factor of
    1.09.
    """
    found = apply_factor(advised.make_forecast(100.0, comm={"all-reduce": 0.03, "a2a": 0.02}), 1.25)
    assert (found.tok_s, found.low, found.high) == (125.0, pytest.approx(125 / 1.09), pytest.approx(125 * 1.09))
    slow = dataclasses.replace(advised.make_forecast(100.0), itl_ms=Percentiles(p50=10.0))
    assert apply_factor(slow, 1.25).itl_ms.p50 == 8.0
    served = dataclasses.replace(slow, point=advised.make_point(load=advised.load()))
    assert apply_factor(served, 1.25).itl_ms.p50 == 8.0


@pytest.mark.parametrize(("kept", "more"), [(MAX_ENTRIES - 1, 1), (MAX_ENTRIES, 0)])
def test_doctor_report_keeps_a_limited_number_of_findings(kept: int, more: int) -> None:
    report = Report()
    for n in range(kept):
        report.add("x", "ok", str(n))
    report.add("x", "ok", "one more")
    report.add("x", "ok", "and one")
    assert len(report.findings) == kept + more


class TestTail:
    """Test reading of a file to which another process appends."""

    def test_complete_lines_are_read_once(self, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        tail = Tail(path)
        assert (list(tail.read_lines()), tail.reset_if_replaced()) == ([], False)
        path.write_bytes(b"1\n2\n3")
        assert list(tail.read_lines()) == [b"1", b"2"]
        with path.open("ab") as file:
            file.write(b"3\n\nno\n  \n4\n")
        assert list(tail.decode_lines(lambda line: msgspec.json.decode(line, type=int))) == [33, 4]
        assert (tail.unread, list(tail.read_lines()), tail.reset_if_replaced()) == (1, [], False)

    @pytest.mark.parametrize(("new_content", "replaced"), [(b"5\n", True), (b"1\n2\n", False), (b"1\n2\n3\n", False)])
    def test_shorter_file_counts_as_replaced(self, tmp_path: Path, new_content: bytes, replaced: bool) -> None:
        path = tmp_path / "lines"
        path.write_bytes(b"1\n2\n")
        tail = Tail(path)
        assert list(tail.read_lines()) == [b"1", b"2"]
        path.write_bytes(new_content)
        assert tail.reset_if_replaced() is replaced
        assert list(tail.read_lines()) == (new_content.splitlines() if replaced else new_content.splitlines()[2:])

    def test_file_that_replaces_another_is_read_from_its_start(self, tmp_path: Path) -> None:
        path, other = tmp_path / "lines", tmp_path / "other"
        path.write_bytes(b"1\n")
        other.write_bytes(b"1\n2\n3\n")
        tail = Tail(path)
        assert list(tail.read_lines()) == [b"1"]
        other.replace(path)
        assert (tail.reset_if_replaced(), tail.reset_if_replaced()) == (True, False)
        assert list(tail.read_lines()) == [b"1", b"2", b"3"]

    def test_pipes_and_folders_are_not_read(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", tmp_path):
            assert list(Tail(path).read_lines()) == []


def test_cached_pages_of_a_request_are_freed_and_counted_once() -> None:
    """The second of two requests with the same 9 tokens frees its two full pages and takes those of the first."""
    allocator = DcpAllocator(9, 4, 1)
    first, second = (allocator.allocate(9, np.zeros(0, np.int32)) for _ in range(2))
    pages = first.pages[:2].copy()
    allocator.share_pages(first, pages[:1])
    allocator.share_pages(first, pages)
    assert (allocator.used_pages, allocator.tokens) == (6, 18)
    allocator.share_pages(second, np.array([second.pages[0], pages[1]]))
    assert (allocator.used_pages, allocator.tokens) == (5, 14)
    allocator.share_pages(second, np.array([second.pages[0], pages[1]]))
    assert (allocator.used_pages, allocator.tokens, second.shared) == (5, 14, 2)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([], ""),
        (["a"], "a"),
        ([*"abcde"], "a, b, c, d, e"),
        ([*"abcdef"], "a, b, c, d, e and 1 more"),
        ([f"{n}" for n in range(1_005)], "0, 1, 2, 3, 4 and 1,000 more"),
    ],
)
def test_format_first_names_five_and_counts_the_others(names: list[str], shown: str) -> None:
    assert selection.format_first(names) == shown


@pytest.mark.parametrize(
    ("name", "engine", "layout"),
    [
        ("tp4", "vllm", {"tp": 4, "dp": 1, "dcp": 1, "pp": 1, "pcp": 1}),
        ("tp8_dcp4", "vllm", {"tp": 8, "dp": 1, "dcp": 4, "pp": 1, "pcp": 1}),
        ("tp4_dcp3", "vllm", {}),
        ("tp4_dp2", "vllm", {"tp": 8, "dp": 2, "dcp": 1, "pp": 1, "pcp": 1}),
        ("tp4_dp2", "sglang", {}),
        ("tp4_dp1", "sglang", {"tp": 4, "dp": 1, "dcp": 1, "pp": 1, "pcp": 1}),
    ],
)
def test_layout_from_a_name_must_be_valid(name: str, engine: str, layout: dict[str, int]) -> None:
    assert imports.read_named_layout(read_name(name), engine) == layout


class TestEnd:
    """Test the state of a job in the launcher."""

    def test_point_is_past_its_limit_only_while_it_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: now)
        end = _JobEnd()
        assert (end.is_past_limit(0.0), end.is_past_limit(None)) == (False, False)
        end.update(Progress(stage="run", key="a"))
        assert (end.started, end.key, end.begun) == (True, "a", 100.0)
        now = 105.0
        end.update(Progress(stage="run", key="a"))
        assert [end.is_past_limit(limit) for limit in (None, 4.9, 5.0, 5.1)] == [False, True, False, False]
        end.update(Progress(stage="done", key="a"))
        assert (end.done, end.key, end.is_past_limit(0.0)) == ({"a"}, "", False)

    @pytest.mark.parametrize(
        ("hung_s", "over_s", "code", "hung", "failed"),
        [
            (0.0, 0.0, 0, False, False),
            (0.5, 0.0, 0, True, True),
            (0.0, 0.5, 0, True, True),
            (0.0, 0.0, 1, False, True),
            (0.0, 0.0, -1, False, True),
        ],
    )
    def test_job_has_failed_after_a_hang_or_an_exit_code(
        self, hung_s: float, over_s: float, code: int, hung: bool, failed: bool
    ) -> None:
        end = _JobEnd(hung_s=hung_s, over_s=over_s, code=code)
        assert (end.hung, end.failed, end.has_been_ended(0)) == (hung, failed, code < 0)


@pytest.mark.parametrize(
    ("waits", "flight", "inside"),
    [
        (True, None, "heartbeats"),
        (True, [], "heartbeats"),
        (True, ["flight"], "heartbeats"),
        (False, None, None),
        (False, [], None),
        (False, ["flight"], "flight"),
        (None, None, None),
        (None, ["flight"], "flight"),
    ],
)
def test_open_collective_is_that_of_the_host_or_of_the_flight_recorder(
    waits: bool | None, flight: list[str] | None, inside: str | None
) -> None:
    """Each case states if the host waits in its collectives, or None without heartbeats; an enqueued collective alone
    proves nothing.
    """

    def make_events(phase: str) -> list[CollectiveEvent]:
        one = CollectiveEvent(
            order=1, number=1, call=None, phase=phase, layer=None, state=INSIDE, began_ns=1, ended_ns=0
        )
        return [dataclasses.replace(one, phase="left", state=RAISED), one, dataclasses.replace(one, phase="later")]

    heartbeats: Any = None if waits is None else SimpleNamespace(waits=waits, collectives=make_events("heartbeats"))
    rank = Rank(0, "", heartbeats, None if flight is None else [m for name in flight for m in make_events(name)])
    found = finding.get_open_collective(rank)
    assert (found and found.phase) == inside


def test_leader_waits_for_nodes_for_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 5 s, nodes come every 2 s, one of them with another secret; the last wait is at least 1 ms, and then an
    error is raised.
    """
    now, left = [100.0], list[float]()

    class Listening:
        settimeout = left.append
        came = 0

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def accept(self) -> tuple[int, None]:
            now[0] += 2.0
            if self.came == 3:
                raise TimeoutError
            self.came += 1
            return self.came, None

    met = {1: 2, 2: None, 3: 1}
    monkeypatch.setattr(nodes, "open_listener", lambda *_: Listening())
    monkeypatch.setattr(nodes, "NodeConnection", lambda number: SimpleNamespace(number=number, close=lambda: None))
    monkeypatch.setattr(nodes, "_receive_greeting", lambda line, *_: met[line.number])
    monkeypatch.setattr(nodes, "get_secret", lambda: b"")
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    assert [connection.number for connection in nodes._wait_for_nodes("h:1", 2, 5.0)] == [3, 1]  # type: ignore[attr-defined]
    assert left == pytest.approx([5.0, 3.0, 1.0])
    left.clear()
    words = (
        r"^2 of 3 other nodes came to h:1 within 5 s; start the same command with its own rank of --nodes on each, or raise "
        r"--timeout\. 1 that came had another DCPBENCH_SECRET\.$"
    )
    with pytest.raises(WorkerError, match=words):
        nodes._wait_for_nodes("h:1", 3, 5.0)
    assert left == pytest.approx([5.0, 3.0, 1.0, 0.001])


@pytest.mark.parametrize("end", [0, 1, 5])
def test_text_length_is_modulo_4_gib_as_in_gzip(end: int, tmp_path: Path) -> None:
    """Lengths modulo 4 GiB make a trace comparable with its compressed copy."""
    path = tmp_path / "trace.json"
    path.touch()
    os.truncate(path, (1 << 32) + end)
    assert files._get_text_length(path) == end
    for size in (3, 4, 5):
        path.write_bytes((GZIP_MAGIC + b"\3\0\0")[:size])
        assert files._get_text_length(path) == (int.from_bytes(b"\x8b\3\0\0", "little") if size > 4 else size)
    assert files._get_text_length(tmp_path) == -1


def test_nccl_report_is_limited_in_time_and_to_one_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer sends one byte a second, and reading stops at the limit though the connection stays open."""
    now, left = [0.0], list[float]()

    class Talking:
        size = 1
        settimeout = left.append

        def sendall(self, data: bytes) -> None: ...

        def recv(self, most: int) -> bytes:
            now[0] += 1.0
            return b"x" * min(self.size, most)

    monkeypatch.setenv("NCCL_RAS_ADDR", "[::1]:28028")
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    connections = list[tuple[object, float]]()

    @contextlib.contextmanager
    def connected(address: object, limit_s: float) -> Iterator[Talking]:
        connections.append((address, limit_s))
        yield Talking()

    monkeypatch.setattr("socket.create_connection", connected)
    hang_capture.fetch_nccl_report(tmp_path / "slow")
    assert connections == [(("::1", 28028), hang_capture.NCCL_S)]
    assert left == pytest.approx([hang_capture.NCCL_S - n for n in range(len(left))])
    assert (tmp_path / "slow").read_bytes() == b"x" * math.ceil(hang_capture.NCCL_S)
    monkeypatch.setattr(Talking, "size", 1 << 20)
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    hang_capture.fetch_nccl_report(tmp_path / "much")
    assert (tmp_path / "much").stat().st_size == hang_capture.NCCL_BYTES


@pytest.mark.parametrize(
    ("limit", "trace", "wanted"),
    [
        (None, None, "--num-requests 80"),
        (40, None, "--num-requests 80, or none"),
        (41, None, "--num-requests 80"),
        (None, "file", "a longer file"),
        (40, "file", "--num-requests 80, or none"),
        (39, "file", "a longer file"),
    ],
)
def test_suggestion_for_more_requests_names_the_option_that_limits_them(
    limit: int | None, trace: str | None, wanted: str
) -> None:
    loads: Any = SimpleNamespace(limit=limit, count=40, trace=trace)
    assert ServeLoads.suggest_requests(loads, 80) == wanted


ONE_DECODE = Case(decodes=(Decodes(1, 1),))


@pytest.mark.parametrize(
    ("case", "more", "problem"),
    [
        (ONE_DECODE, {}, ""),
        (
            Case(decodes=(Decodes(2, MAX_TOKENS),), chunks=(Chunks(1, 1, 0), Chunks(1, MAX_TOKENS, MAX_TOKENS))),
            {},
            "",
        ),
        (
            Case(decodes=(Decodes(1, 5), Decodes(0, 7))),
            {},
            f"case.decodes counts from 1 to {MAX_TOKENS:,}, and not 1, 5, 0, 7",
        ),
        (
            Case(decodes=(Decodes(1, MAX_TOKENS + 1),)),
            {},
            f"case.decodes counts from 1 to {MAX_TOKENS:,}, and not 1, {MAX_TOKENS + 1}",
        ),
        (
            Case(chunks=(Chunks(1, 0, -1),) * 40),
            {},
            f"case.chunks counts from 1 to {MAX_TOKENS:,}, and not {'1, 0, ' * 16}1, 0",
        ),
        (
            Case(chunks=(Chunks(1, 1, 0), Chunks(1, 1, -1), Chunks(1, 1, 2), Chunks(1, 1, 3))),
            {},
            f"case.chunks has prefixes of 0 to {MAX_TOKENS:,} tokens, and not [0, -1, 2]",
        ),
        (
            Case(chunks=(Chunks(1, 1, MAX_TOKENS + 1),)),
            {},
            f"case.chunks has prefixes of 0 to {MAX_TOKENS:,} tokens, and not [{MAX_TOKENS + 1}]",
        ),
        (Case(decodes=(Decodes(MAX_REQUESTS, 1),)), {}, ""),
        (Case(decodes=(Decodes(MAX_REQUESTS + 1, 1),)), {}, f"its step has more than {MAX_REQUESTS:,} requests"),
        (Case(), {}, "its step does nothing"),
        (msgspec.structs.replace(ONE_DECODE, use="x" * 41), {}, f"case.use is {'x' * 40!r}, none of {', '.join(USES)}"),
        (ONE_DECODE, {"samples_ms": []}, "it has no samples_ms, or times that are not positive"),
        (ONE_DECODE, {"samples_ms": [1.0, 0.0]}, "it has no samples_ms, or times that are not positive"),
        (ONE_DECODE, {"samples_ms": [MAX_NUMBER]}, ""),
        (ONE_DECODE, {"samples_ms": [2 * MAX_NUMBER, 1.0]}, "it has no samples_ms, or times that are not positive"),
        (ONE_DECODE, {"host_ms": [0.0, MAX_NUMBER], "floor_ms": 0.0}, ""),
        (ONE_DECODE, {"host_ms": [1.0, -0.5]}, "its host_ms are no times"),
        (ONE_DECODE, {"host_ms": [1.0], "floor_ms": -0.5}, "its floor_ms are no times"),
        (ONE_DECODE, {"floor_ms": 2 * MAX_NUMBER}, "its floor_ms are no times"),
    ],
)
def test_measured_step_with_invalid_fields_is_refused(case: Case, more: dict[str, Any], problem: str) -> None:
    assert _find_problem(MeasuredCase(case=case, **{"samples_ms": [1.0], **more}), replicas=1) == problem


def test_parser_message_is_cut_to_100_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser_message = "".join(map(chr, range(0x4E00, 0x4E00 + 150)))
    assert documents._describe(ValueError(parser_message)) == f"is no JSON ({parser_message[:100]})."

    def refuse(_: str) -> None:
        raise ValueError(parser_message)

    monkeypatch.setattr(msgspec.json, "decode", refuse)
    path = tmp_path / "flight-0.json"
    with pytest.raises(RecordsError) as error:
        dumps.parse_flight("{}", path)
    assert str(error.value) == f"{path} is no JSON of torch's flight recorder (ValueError: {parser_message[:100]})."
