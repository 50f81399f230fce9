"""Small functions at their limits: sentences, boundaries, and which of several is taken."""

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

    def test_a_prefix_is_shared_in_full_pages_that_are_there(self) -> None:
        """10 tokens fill two pages; none, or as many as are shared already, changes nothing."""
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
    def test_tokens_that_are_not_there_have_no_place(self, start: int, stop: int) -> None:
        allocation = DcpAllocator(9, 4, 1).allocate(10, np.zeros(0, np.int32))
        assert len(allocation.compute_locs(10, 10)) == 0
        assert len(allocation.compute_locs(0, 10)) == 10
        with pytest.raises(ValueError, match=rf"^tokens {start}…{stop - 1} asked of a request of 10 tokens$"):
            allocation.compute_locs(start, stop)

    def test_a_request_grows_in_its_last_page_and_then_in_new_ones(self) -> None:
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


def test_a_rank_that_left_a_call_with_an_error_says_so_where_it_is_in_none() -> None:
    call = SimpleNamespace(call=SimpleNamespace(description="all_reduce"), state=RAISED, number=7)
    beats = SimpleNamespace(phase="moe", layer=3, last=call, calls=())
    rank: Any = SimpleNamespace(
        name="rank 0", rank=0, beats=beats, seen=SimpleNamespace(cpu=0.5, ended="", state="S"), threads=(), flight=None
    )
    for last, row in ((call, ["all_reduce, left with an error", "7"]), (None, ["", ""])):
        beats.last = last
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hang_format, "get_open_collective", lambda _: None)
            patch.setattr(hang_format.finding, "get_position", lambda _: ("", "", "a.py:1"))
            assert hang_format._make_row(rank, None) == ["rank 0", "moe", "3", *row, "50%", "a.py:1"]


@pytest.mark.parametrize(("name", "head"), [("MainThread", "MainThread"), ("", "thread")])
def test_a_thread_without_a_name_is_a_thread(name: str, head: str) -> None:
    frames = [SimpleNamespace(location="f at a.py:1"), SimpleNamespace(location="g at b.py:2")]
    rank: Any = SimpleNamespace(threads=[SimpleNamespace(name=name, frames=frames)] * 2)
    one = f"{head}\n  f at a.py:1\n  g at b.py:2"
    assert hang_format._format_stacks(rank) == f"{one}\n\n{one}"


def test_the_file_of_a_machine_keeps_letters_as_they_are() -> None:
    machine = msgspec.structs.replace(load_machine("H200"), name="ünser", measured="späät", link=None)
    lines = format_machine(machine).splitlines()
    assert lines[:3] == ['name = "ünser"', 'gpu = "H200"', f"gpus_per_host = {machine.gpus_per_host}"]
    assert 'measured = "späät"' in lines


def test_where_nothing_runs_the_run_that_was_begun_last_is_named(tmp_path: Path) -> None:
    for name, at in (("older", 1e9), ("newest", 2e9), ("oldest", 5e8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").write_text("0")
        os.utime(tmp_path / name / ".lock", (at, at))
    with pytest.raises(UsageError) as error:
        watch.find_running(tmp_path)
    newest = tmp_path / "newest"
    assert str(error.value).endswith(f" The last one was {newest}: dcpbench top {newest}")


def test_sites_stand_by_what_they_cost_and_then_by_their_place() -> None:
    """A bubble before a wait, a wait before a count; a line that is not known first; what may block behind, the profiler's own last."""
    plain = {"bubble_us": 5.0, "wait_us": 5.0, "count": 2, "file": "b.py", "line": 7}
    wanted = [
        syncs_builder.site("a", **{**plain, "bubble_us": 6.0}),
        syncs_builder.site("b", **{**plain, "wait_us": 6.0}),
        syncs_builder.site("c", **{**plain, "count": 3}),
        syncs_builder.site("d", **{**plain, "file": "a.py"}),
        syncs_builder.site("e", **{**plain, "line": None}),
        syncs_builder.site("f", **{**plain, "line": 1}),
        syncs_builder.site("g", **plain),
        syncs_builder.site("h", **plain),
        syncs_builder.site("i", **{**plain, "bubble_us": 9.0, "may_block": True}),
        syncs_builder.site("j", **{**plain, "bubble_us": 9.0, "own": True}),
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
def test_a_gauge_ends_with_its_unit(metric: str, name: str) -> None:
    found = prometheus.make_gauge(METRIC[metric]).name
    assert found == name or (METRIC[metric].gauge and found == f"dcpbench_{METRIC[metric].gauge}")


def test_a_gauge_counts_requests_where_its_metric_does_and_does_not_say_so() -> None:
    def name(**of: str) -> str:
        return prometheus.make_gauge(dataclasses.replace(METRIC["cancelled"], gauge="", **of)).name

    assert name() == "dcpbench_cancelled_requests"
    assert name(name="lost_requests") == "dcpbench_lost_requests"
    assert name(name="evicted", unit="tokens") == "dcpbench_evicted"


def test_lengths_of_an_import_are_means_that_need_not_be_whole() -> None:
    of: Any = SimpleNamespace(completed=4, input_tokens=10, output_tokens=7)
    assert Result.compute_means(of) == (2.5, 1.75)
    of.completed = 0
    assert Result.compute_means(of) is None


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
def test_a_time_of_an_import_is_a_number_of_ms(value: object, wrong: bool) -> None:
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
    def test_what_was_corrected_on_either_side_is_told_apart_by_ratios(self, a: bool, b: bool, ratios: bool) -> None:
        """4 % of ratios, else both bands: 21 %."""
        one, other = (
            dataclasses.replace(advised.forecast(100, "measured"), factor=1.1 if of else None) for of in (a, b)
        )
        assert layout_choice.compute_margin(one, other) == pytest.approx(0.04 if ratios else 0.21)

    @pytest.mark.parametrize(
        ("weights", "kv", "buffers", "said"),
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
    def test_the_shortage_is_that_of_the_whole_model(
        self, weights: int, kv: int, buffers: int, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A GPU has 100 GiB, some of which the buffers of a step take."""
        gib = 1 << 30
        whole = WholeModel(
            weight_bytes=weights * gib,
            kv_bytes=kv * gib,
            available_bytes=(100 - buffers) * gib,
            buffer_bytes=buffers * gib,
        )
        monkeypatch.setattr(advise, "measure_whole_model", lambda *_: whole)
        ask = advised.ask("H200")
        assert advise.find_refusal(ask, advised.point()) == advise.Refusal(advise.NO_WHOLE_MODEL, said)
        assert advise.find_refusal(dataclasses.replace(ask, cycled=True), advised.point()) is None
        fits = msgspec.structs.replace(whole, weight_bytes=1, kv_bytes=1)
        monkeypatch.setattr(advise, "measure_whole_model", lambda *_: fits)
        assert advise.find_refusal(ask, advised.point()) is None


def test_idle_time_is_told_as_a_share_of_a_step_in_percent() -> None:
    """The least and the most of all points on a GPU."""
    plain = {"cpu": False, "host_syncs_per_step": 0.0, "idle_us": 1.0, "step_us": 2.0, "allocations_per_step": 0.0}
    points = pd.DataFrame([plain | {"idle_fraction": share} for share in (0.0151, 0.3)])
    assert "The GPU idled 1.5 % to 30 % of a profiled step." in explain.describe_phases(points)


def test_without_floors_nothing_is_said_of_them() -> None:
    assert floors.format_short_sentence(pd.DataFrame({"label": ["tp4"]})) == ""
    assert floors.format_short_sentence(pd.DataFrame({"floor_share": [float("nan")]})) == ""


class TestMarkdown:
    @pytest.mark.parametrize(
        ("most", "more"), [(12, ""), (7, "5 rows more in points.csv."), (1, "11 rows more in points.csv.")]
    )
    def test_rows_that_do_not_fit_are_counted(self, most: int, more: str) -> None:
        text = report_markdown._format_table(Table("t", ["a", "b"], [[str(n), "x"] for n in range(12)]), most)
        assert text.count("| x |") == most
        assert text.partition("| x |\n\n")[2].partition("\n")[0].endswith(more)
        assert ("rows more" in text) is bool(more)

    def test_each_table_has_its_part_of_the_whole(self) -> None:
        """Rows of 4 + 6 characters each; two tables share what there is, but each has MANY_ROWS at least."""

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


def test_a_run_whose_page_cannot_be_made_costs_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of too many points costs no other page either."""
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
    ("failed", "cancelled", "rejected", "ended", "said"),
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
                "Serve the load anew with --resume."
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
def test_where_no_token_came_the_first_that_was_refused_says_why(
    failed: int, cancelled: int, rejected: int, ended: dict[str, Any], said: str
) -> None:
    def of(letter: str, count: int) -> list[Any]:
        return [SimpleNamespace(failed=f"{letter}{n}", rejected=f"{letter}{n}") for n in range(count)]

    found = {
        outcome.REJECTED: of("r", rejected),
        outcome.CANCELLED: of("c", cancelled),
        outcome.FAILED: of("f", failed),
    }
    assert outcome._explain_no_tokens(found, **ended) == said


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("400", 400), ("123456789", 123_456_789), ("1234567890", None), ("uniform:1-2", None), ("", None)],
)
def test_a_length_that_all_requests_have_is_a_number_of_up_to_nine_digits(text: str, tokens: int | None) -> None:
    assert bench_files.parse_fixed_length(text) == tokens


def test_who_is_alive_of_a_run_is_told_by_when_the_command_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first in the lock file is the command; of workers alone nothing says when."""
    for began, said_of_it in (
        ([5.0, 7.0], (processes.COMMAND, 5.0)),
        ([5.0, None], (processes.COMMAND, 5.0)),
        ([None, 7.0], (processes.WORKERS, None)),
        ([None, None], (processes.NONE, None)),
        ([], (processes.NONE, None)),
    ):
        monkeypatch.setattr(processes, "_read_processes", lambda _, began=began: list(enumerate(began, 100)))
        assert processes.find_alive(tmp_path) == said_of_it
        assert processes.find_alive_pid(tmp_path) == next(
            (100 + n for n, at in enumerate(began) if at is not None), None
        )


def test_node_0_is_in_trouble_where_another_says_so_or_is_gone() -> None:
    def line(said: object, *, closed: bool = False) -> Any:
        return SimpleNamespace(receive=lambda _: said, closed=closed)

    leader = nodes.Leader.__new__(nodes.Leader)
    for lines, trouble in (
        ([], False),
        ([line(None)], False),
        ([line(b"other"), line(None)], False),
        ([line(None), line(nodes.FAILED)], True),
        ([line(None), line(None, closed=True)], True),
    ):
        leader._lines = lines
        assert leader.has_failure() is trouble


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
def test_the_few_differ_from_the_many_and_of_two_halves_nobody_knows(
    places: str, odd: set[int], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody is as before, it is the smallest side with the highest ranks that is named."""
    monkeypatch.setattr(finding, "_get_place", lambda one: one)
    monkeypatch.setattr(finding, "_is_usual_successor", lambda *_: False)
    found, sure, _ = finding._find_odd_ranks({}, dict(enumerate(places)), 5)  # type: ignore[arg-type]
    assert (found, sure) == (odd, known)


@pytest.mark.parametrize(
    ("places", "few"), [("aab", [2]), ("aabb", None), ("ab", None), ("aaabb", [3, 4]), ("abc", None)]
)
def test_of_ranks_that_all_wait_the_few_at_another_line_are_named(places: str, few: list[int] | None) -> None:
    """Stacks alone decide; if as many ranks wait at either line, none is named."""
    ranks = {1000 + n: Rank(n, f"rank {n}") for n in range(len(places))}
    calls = {
        r: (Frame("wait", "torch/x.py", 1), Frame(place, "own.py", 2)) for r, place in zip(ranks, places, strict=True)
    }
    found = finding._find_odd_line(ranks, calls)
    assert (found and (found.kind, found.ranks, found.waiting)) == (few and ("order", few, list(range(len(places)))))


@pytest.mark.parametrize(
    ("asked", "held", "sent", "said"),
    [
        (48, 8, 96, "tp4 8 of full length by KV space (48 by --concurrency)"),
        (48, 48, 96, "tp4 48 by --concurrency"),
        (96, 96, 96, "tp4 all 96"),
        (200, 95, 96, "tp4 95 of full length by KV space (200 by --concurrency)"),
        (200, 96, 96, "tp4 all 96"),
        (48, None, 96, "tp4 48 by --concurrency"),
    ],
)
def test_what_bounds_an_open_loop_is_the_least_of_what_is_asked_held_and_sent(
    asked: int, held: int | None, sent: int, said: str
) -> None:
    row = {"load_arrival": "gamma", "instances": None, "concurrency": asked, "room_for": held, "load_requests": sent}
    points = pd.DataFrame([row | {"label": "tp4"}])
    assert terminal_tables._format_bounds(points) == [f"requests at once, at most: {said}"]
    assert terminal_tables._format_bounds(points.assign(load_arrival="closed")) == []


@pytest.mark.parametrize(
    ("median", "low", "high", "said"),
    [
        (100.0, 99.0, 100.5, "±1.0%"),
        (100.0, 99.9, 102.0, "±2.0%"),
        (100.0, 99.96, 100.04, "<±0.1%"),
        (100.0, 99.94, 100, "±0.1%"),
        (float("nan"), 1, 1, "—"),
    ],
)
def test_scatter_is_the_wider_side_of_an_interval(median: float, low: float, high: float, said: str) -> None:
    point = pd.Series({"output_tok_s": median, "output_tok_s_low": low, "output_tok_s_high": high})
    assert terminal_tables._format_half_width(point) == said


def test_columns_go_in_this_order_where_a_terminal_is_narrow() -> None:
    """Those with the lowest number first; those without stay."""
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
    served = decoded | {"ttft_p50_ms": 1.0, "ttft_p99_ms": 1.0, "goodput_s": 0.5, "load_arrival": "closed"}
    served |= {"kv_tokens_of_all": 655_360.0, "tokens_per_step": math.nan}
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
def test_the_bar_of_a_run_takes_an_eighth_of_the_terminal_and_30_columns_at_most(columns: int, width: int) -> None:
    console = Console(file=io.StringIO(), width=columns, force_terminal=True)
    bar = progress.ProgressBar({"a": "first"}, console)
    assert bar._bar is not None
    assert bar._bar.columns[0].bar_width == width


@pytest.mark.parametrize(
    ("words", "known"),
    [("100 7", {0: 100}), ("100 8", {}), ("100", {}), ("100 7 9", {}), ("x 7", {}), ("", {})],
)
def test_a_rank_is_known_by_its_id_and_when_it_began(
    words: str, known: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process 100 began at tick 7: what has its id since is another one."""
    (tmp_path / "rank-0.pid").write_text(words)
    monkeypatch.setattr(ranks.subprocess_guard, "read_start_ticks", lambda pid: ("S", 7) if pid == 100 else None)
    of = ranks.Ranks(tmp_path, tmp_path / "logs", tmp_path / "progress.jsonl", range(2))
    assert (of.find_pids(), of.read_pids()) == (known, list(known.values()))


@pytest.mark.parametrize(
    ("reach", "ticks"),
    [
        (0.01, [0.988, 0.99, 0.992, 0.994, 0.996, 0.998, 1, 1.002, 1.004, 1.006, 1.008, 1.01, 1.012]),
        (0.0101, [0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 1, 1.005, 1.01, 1.015, 1.02, 1.025, 1.03]),
        (1.25, [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5]),
        (1.3, [0.25, 0.5, 1, 2, 4]),
    ],
)
def test_a_forest_has_round_ratios_denser_the_closer_it_looks(reach: float, ticks: list[float]) -> None:
    """Five on either side at least, none at 0 or below."""
    assert picture._choose_ticks(reach) == ticks


def test_an_estimate_that_is_corrected_has_the_band_of_ratios() -> None:
    """1.25 times 100 tok/s; 4 % of ratios and 3 and 2 % of two kinds of calls: from a 1.09th to 1.09 times."""
    found = apply_factor(advised.forecast(100.0, wire={"all-reduce": 0.03, "a2a": 0.02}), 1.25)
    assert (found.tok_s, found.low, found.high) == (125.0, pytest.approx(125 / 1.09), pytest.approx(125 * 1.09))
    slow = dataclasses.replace(advised.forecast(100.0), itl_ms=Percentiles(p50=10.0))
    assert apply_factor(slow, 1.25).itl_ms.p50 == 8.0
    served = dataclasses.replace(slow, point=advised.point(load=advised.load()))
    assert apply_factor(served, 1.25).itl_ms.p50 == 8.0


@pytest.mark.parametrize(("kept", "more"), [(MAX_ENTRIES - 1, 1), (MAX_ENTRIES, 0)])
def test_a_report_of_a_machine_takes_so_many_findings(kept: int, more: int) -> None:
    report = Report()
    for n in range(kept):
        report.add("x", "ok", str(n))
    report.add("x", "ok", "one more")
    report.add("x", "ok", "and one")
    assert len(report.findings) == kept + more


class TestTail:
    """A file that is appended to, read as it grows."""

    def test_lines_come_once_and_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        tail = Tail(path)
        assert (list(tail.read_lines()), tail.reset_if_replaced()) == ([], False)
        path.write_bytes(b"1\n2\n3")
        assert list(tail.read_lines()) == [b"1", b"2"]
        with path.open("ab") as file:
            file.write(b"3\n\nno\n  \n4\n")
        assert list(tail.decode_lines(lambda line: msgspec.json.decode(line, type=int))) == [33, 4]
        assert (tail.unread, list(tail.read_lines()), tail.reset_if_replaced()) == (1, [], False)

    @pytest.mark.parametrize(("anew", "replaced"), [(b"5\n", True), (b"1\n2\n", False), (b"1\n2\n3\n", False)])
    def test_a_shorter_file_is_another(self, tmp_path: Path, anew: bytes, replaced: bool) -> None:
        path = tmp_path / "lines"
        path.write_bytes(b"1\n2\n")
        tail = Tail(path)
        assert list(tail.read_lines()) == [b"1", b"2"]
        path.write_bytes(anew)
        assert tail.reset_if_replaced() is replaced
        assert list(tail.read_lines()) == (anew.splitlines() if replaced else anew.splitlines()[2:])

    def test_another_file_of_the_name_is_another(self, tmp_path: Path) -> None:
        path, other = tmp_path / "lines", tmp_path / "other"
        path.write_bytes(b"1\n")
        other.write_bytes(b"1\n2\n3\n")
        tail = Tail(path)
        assert list(tail.read_lines()) == [b"1"]
        other.replace(path)
        assert (tail.reset_if_replaced(), tail.reset_if_replaced()) == (True, False)
        assert list(tail.read_lines()) == [b"1", b"2", b"3"]

    def test_what_could_make_a_reader_wait_is_not_read(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", tmp_path):
            assert list(Tail(path).read_lines()) == []


def test_pages_that_the_cache_has_already_are_freed_and_their_tokens_counted_once() -> None:
    """Two requests of the same 9 tokens: the second gives its two full pages back for the first one's."""
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
def test_the_first_five_are_named(names: list[str], shown: str) -> None:
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
def test_a_layout_of_a_name_is_one_that_can_be(name: str, engine: str, layout: dict[str, int]) -> None:
    assert imports.read_named_layout(read_name(name), engine) == layout


class TestEnd:
    """What the launcher knows of a job."""

    def test_a_point_is_past_its_limit_only_while_it_is_at_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_a_job_failed_that_hung_or_ended_badly(
        self, hung_s: float, over_s: float, code: int, hung: bool, failed: bool
    ) -> None:
        end = _JobEnd(hung_s=hung_s, over_s=over_s, code=code)
        assert (end.hung, end.failed, end.has_been_ended(0)) == (hung, failed, code < 0)


@pytest.mark.parametrize(
    ("waits", "flight", "inside"),
    [
        (True, None, "beats"),
        (True, [], "beats"),
        (True, ["flight"], "beats"),
        (False, None, None),
        (False, [], None),
        (False, ["flight"], "flight"),
        (None, None, None),
        (None, ["flight"], "flight"),
    ],
)
def test_a_rank_waits_where_its_host_does_and_else_where_its_device_does(
    waits: bool | None, flight: list[str] | None, inside: str | None
) -> None:
    """`waits`: whether the host waits in its collectives; without beats None. A collective handed on says nothing by itself."""

    def inside_of(phase: str) -> list[CollectiveEvent]:
        one = CollectiveEvent(
            order=1, number=1, call=None, phase=phase, layer=None, state=INSIDE, began_ns=1, ended_ns=0
        )
        return [dataclasses.replace(one, phase="left", state=RAISED), one, dataclasses.replace(one, phase="later")]

    beats: Any = None if waits is None else SimpleNamespace(waits=waits, met=inside_of("beats"))
    rank = Rank(0, "", beats, None if flight is None else [m for name in flight for m in inside_of(name)])
    found = finding.get_open_collective(rank)
    assert (found and found.phase) == inside


def test_node_0_waits_for_others_as_long_as_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 s in all, in which two come at 2 s each, of whom one is none of ours; 1 ms at least, and then it is said."""
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
    monkeypatch.setattr(nodes, "Line", lambda number: SimpleNamespace(number=number, close=lambda: None))
    monkeypatch.setattr(nodes, "_receive_greeting", lambda line, *_: met[line.number])
    monkeypatch.setattr(nodes, "get_secret", lambda: b"")
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    assert [line.number for line in nodes._wait_for_nodes("h:1", 2, 5.0)] == [3, 1]  # type: ignore[attr-defined]
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
def test_texts_are_as_long_as_gzip_can_say(end: int, tmp_path: Path) -> None:
    """Modulo 4 GiB, so that a trace and its copy that is packed are compared."""
    path = tmp_path / "trace.json"
    path.touch()
    os.truncate(path, (1 << 32) + end)
    assert files._get_text_length(path) == end
    for size in (3, 4, 5):
        path.write_bytes((GZIP_MAGIC + b"\3\0\0")[:size])
        assert files._get_text_length(path) == (int.from_bytes(b"\x8b\3\0\0", "little") if size > 4 else size)
    assert files._get_text_length(tmp_path) == -1


def test_nccl_is_listened_to_for_a_while_and_up_to_a_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says in a second each; then it is asked no more, though it has not hung up."""
    now, left = [0.0], list[float]()

    class Talking:
        size = 1
        settimeout = left.append

        def sendall(self, said: bytes) -> None: ...

        def recv(self, most: int) -> bytes:
            now[0] += 1.0
            return b"x" * min(self.size, most)

    monkeypatch.setenv("NCCL_RAS_ADDR", "[::1]:28028")
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    asked = list[tuple[object, float]]()

    @contextlib.contextmanager
    def connected(address: object, limit_s: float) -> Iterator[Talking]:
        asked.append((address, limit_s))
        yield Talking()

    monkeypatch.setattr("socket.create_connection", connected)
    hang_capture.fetch_nccl_report(tmp_path / "slow")
    assert asked == [(("::1", 28028), hang_capture.NCCL_S)]
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
def test_more_requests_come_of_what_keeps_them_few(limit: int | None, trace: str | None, wanted: str) -> None:
    loads: Any = SimpleNamespace(limit=limit, count=40, trace=trace)
    assert ServeLoads.suggest_requests(loads, 80) == wanted


OF_ONE = Case(decodes=(Decodes(1, 1),))


@pytest.mark.parametrize(
    ("case", "more", "problem"),
    [
        (OF_ONE, {}, ""),
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
        (msgspec.structs.replace(OF_ONE, use="x" * 41), {}, f"case.use is {'x' * 40!r}, none of {', '.join(USES)}"),
        (OF_ONE, {"samples_ms": []}, "it has no samples_ms, or times that are not positive"),
        (OF_ONE, {"samples_ms": [1.0, 0.0]}, "it has no samples_ms, or times that are not positive"),
        (OF_ONE, {"samples_ms": [MAX_NUMBER]}, ""),
        (OF_ONE, {"samples_ms": [2 * MAX_NUMBER, 1.0]}, "it has no samples_ms, or times that are not positive"),
        (OF_ONE, {"host_ms": [0.0, MAX_NUMBER], "floor_ms": 0.0}, ""),
        (OF_ONE, {"host_ms": [1.0, -0.5]}, "its host_ms are no times"),
        (OF_ONE, {"host_ms": [1.0], "floor_ms": -0.5}, "its floor_ms are no times"),
        (OF_ONE, {"floor_ms": 2 * MAX_NUMBER}, "its floor_ms are no times"),
    ],
)
def test_step_times_are_of_steps_that_can_be(case: Case, more: dict[str, Any], problem: str) -> None:
    assert _find_problem(MeasuredCase(case=case, **{"samples_ms": [1.0], **more}), replicas=1) == problem


def test_of_what_a_parser_says_100_characters_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said_by = "".join(map(chr, range(0x4E00, 0x4E00 + 150)))
    assert documents._describe(ValueError(said_by)) == f"is no JSON ({said_by[:100]})."

    def refuse(_: str) -> None:
        raise ValueError(said_by)

    monkeypatch.setattr(msgspec.json, "decode", refuse)
    path = tmp_path / "flight-0.json"
    with pytest.raises(RecordsError) as error:
        dumps.parse_flight("{}", path)
    assert str(error.value) == f"{path} is no JSON of torch's flight recorder (ValueError: {said_by[:100]})."
