"""Choices, limits and formatted numbers in small functions of several subpackages."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from dcpbench.compare import fail_on, picture
from dcpbench.dashboard import data, pages, site
from dcpbench.errors import RecordsError, UsageError
from dcpbench.hangs import dumps, evidence, heartbeats
from dcpbench.launch import hang_capture
from dcpbench.plan import option_parsers
from dcpbench.points import cluster_specs
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.comm_model import Call, Sample
from dcpbench.points.prompts import make_random_prompts
from dcpbench.points.settings import Settings
from dcpbench.records.record import Rates
from dcpbench.reports import explain, figures, findings, recommendation, report_markdown, tables
from dcpbench.reports.sections import Section
from dcpbench.servers import measure
from dcpbench.serving import replay, request_files
from dcpbench.serving.allocator import DcpAllocator
from dcpbench.show.numbers import format_duration
from dcpbench.syncs.gating import comments
from dcpbench.syncs.traces.columns import Columns
from dcpbench.syncs.traces.reading import SHOWN_BYTES, ReadProblems, TraceReader
from tests.unit import record_builder


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7_199, "120 min"),
        (7_200, "2 h 0 min"),
        (9_300, "2 h 35 min"),
        (10_799, "2 h 59 min"),
        (3_600_000 + 1_800, "1,000 h 30 min"),
    ],
)
def test_duration_is_formatted_in_seconds_minutes_or_hours(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("values", "some"),
    [([1], [1]), ([1, 2, 3], [1, 2, 3]), ([1, 2, 3, 4], [1, 3, 4]), ([1, 2, 3, 4, 5, 6, 7], [1, 4, 7])],
)
def test_first_middle_and_last_of_more_than_three_loads_are_drawn(values: list[int], some: list[int]) -> None:
    assert figures._select_some(values) == some


@pytest.mark.parametrize(
    ("head", "name", "active"),
    [
        ('Thread 7 (active): "main"', "main", True),
        ('Thread 7 (active+gil): "main"', "main", True),
        ('Thread 7 (idle): "main"', "main", False),
        ("Thread 7 (idle)", "", False),
        ('Thread 7: "main"', "main", None),
        ("Thread active", "", None),
    ],
)
def test_thread_header_gives_name_and_activity(head: str, name: str, active: bool | None) -> None:
    (thread,) = dumps.parse_threads(f"Process 5: python\n{head}\n    run (file.py:9)\n")
    assert (thread.process, thread.name, thread.active) == ("5: python", name, active)
    assert [(f.function, f.file, f.line) for f in thread.frames] == [("run", "file.py", 9)]


@pytest.mark.parametrize(
    ("sizes", "errors"),
    [([1], 0), ([1, 2], 0), ([1, 2, 4], 1), ([1, 1, 4], 0), ([1, 4, 4], 0), ([1, 2, 2, 4], 2), ([1, 2, 3, 4], 2)],
)
def test_left_out_errors_exist_for_sizes_between_two_others(sizes: list[int], errors: int) -> None:
    call = Call("all_reduce", tuple(Sample(4, 1, 1000 * size, 5.0 * size) for size in sizes))
    assert len(call.compute_left_out_errors()) == errors


@pytest.mark.parametrize("pages_back", [[0], [0, 1], [3], [1, 1]])
def test_freeing_padding_or_a_page_twice_raises_value_error(pages_back: list[int]) -> None:
    """A request holds pages 1 and 2 of 5."""
    allocator = DcpAllocator(5, 4, 1)
    allocation = allocator.allocate(8)
    assert sorted(allocation.pages) == [1, 2]
    allocator.share_pages(allocation, allocation.pages[:2])
    with pytest.raises(ValueError, match=r"^pages are freed that no request holds$"):
        allocator.free_evicted(np.array(pages_back, np.int32))
    allocator.free_evicted(np.array([2, 1], np.int32))
    assert allocator.used_pages == 0


def test_environment_columns_are_numbered_if_a_run_has_several() -> None:
    """There are as many columns as different environments; the first has the run's name alone."""
    first = record_builder.make_ok_record(record_builder.make_point())
    assert first.environment is not None
    records = [
        msgspec.structs.replace(first, environment=msgspec.structs.replace(first.environment, torch=version))
        for version in ("2.8", "2.8", "2.9", "2.10", "2.9")
    ]
    run = SimpleNamespace(name="run", records=records)
    table = tables.build_environment_table(
        SimpleNamespace(runs=[run, SimpleNamespace(name="other", records=records[:1])])
    )  # type: ignore[arg-type]
    assert table.columns[-3:] == ["run", "run (2)", "run (3)"]


@pytest.mark.parametrize(("smaller", "groups"), [(0.6, 1), (0.5, 1), (0.49, 2)])
def test_changes_within_a_factor_of_two_of_the_largest_are_one_group(
    smaller: float, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_compute_size", lambda size: size)
    histories: Any = [SimpleNamespace(line=SimpleNamespace(example=SimpleNamespace(layout_name="tp4")))]
    moved: Any = [data.ChangedPoint(line=0, steps={0: size}, verdict="worse") for size in (smaller, 1.0)]  # type: ignore[dict-item]
    found = data._group_similar(moved, histories)
    assert [[one.size for one in group] for group in found] == ([[1.0, smaller]] if groups == 1 else [[1.0], [smaller]])


@pytest.mark.parametrize(
    ("recorded", "exists", "kept"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_page_is_kept_if_it_is_in_the_state_and_exists(
    recorded: bool, exists: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "is_made", lambda *_: False)
    page = tmp_path / pages.FOLDER / "run" / pages.PAGE
    page.parent.mkdir(parents=True)
    if exists:
        page.touch()
    found: Any = SimpleNamespace(runs=[SimpleNamespace(slug="run", name="run")])
    before = {"run": "key"} if recorded else {}
    assert site._find_pages(tmp_path, found, before) == ({"run": "key"} if kept else {})


def test_replay_records_its_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The duration is exact to a millisecond, independent of the clock's origin."""
    clock = iter([100.0, 102.34567])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    for name in ("read_step_times", "make_point_requests"):
        monkeypatch.setattr(replay, name, lambda *_: None)
    point = record_builder.make_point()
    monkeypatch.setattr(replay, "replay_point", lambda *_, **__: record_builder.make_ok_record(point))
    record = replay.replay_from_file(point, None, tmp_path, Settings(), tmp_path)  # type: ignore[arg-type]
    assert record.seconds == 2.346


OUTER = """\
@wraps
def outer():
    a = 1
    def inner():
        return 2
"""


@pytest.mark.parametrize(
    ("after", "own"),
    [("", [1, 2, 3]), ("    b = 3\n", [1, 2, 3, 6]), ("    c = lambda: 3\n", [1, 2, 3, 6])],
)
def test_own_lines_of_a_function_exclude_nested_functions(after: str, own: list[int]) -> None:
    """The function may end with a line of a nested one; the lines of a lambda count as its own."""
    functions = [n for n in ast.walk(ast.parse(OUTER + after)) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    assert comments._list_own_lines(functions[0]) == own  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpus", "wrong"), [(-1, True), (0, True), (1, False), (8, False)])
def test_machine_without_gpus_per_host_is_invalid(gpus: int, wrong: bool) -> None:
    machine = msgspec.structs.replace(load_machine("H200"), gpus_per_host=gpus)
    message = f"gpus_per_host = {gpus}: write how many GPUs read each other's memory, such as 8."
    assert cluster_specs._describe_invalid_field(machine) == (message if wrong else "")


@pytest.mark.parametrize(("text", "fence"), [("", 3), ("a`b", 3), ("```", 4), ("a ```` b `", 5)])
def test_markdown_fence_is_longer_than_any_in_its_text(text: str, fence: int) -> None:
    text_of = report_markdown.render("title", [Section(slug="slug", title="section", commands=[text])], Path())
    assert f"\n{'`' * fence}\n{text}\n{'`' * fence}\n" in text_of


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [([8], "on 8 × H200, "), ([8, 4, 8], "on 4–8 × H200, "), ([16, 4, 1_024], "on 4–1,024 × H200, ")],
)
def test_conditions_have_the_range_of_gpu_counts(
    gpus: list[int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommendation, "_list_conditions", lambda *_: [])
    assert (
        recommendation.format_conditions(pd.DataFrame({"device": ["NVIDIA H200"] * len(gpus), "gpus": gpus}))
        == expected
    )


@pytest.mark.parametrize(
    ("idle", "expected"),
    [([0.1, 0.3], "10 % to 30 %"), ([0.012, 0.34, 0.2], "1.2 % to 34 %"), ([0.996, 1.0], "100 % to 100 %")],
)
def test_idle_fraction_is_described_as_a_range_of_percentages(idle: list[float], expected: str) -> None:
    points = pd.DataFrame(
        {"cpu": False, "idle_fraction": [*idle, np.nan], "host_syncs_per_step": np.nan, "idle_us": 1.0}
    )
    assert explain.describe_phases(points)[0] == f"The GPU idled {expected} of a profiled step."


def test_random_prompts_are_the_same_on_every_machine() -> None:
    """Records and answers of two runs with random prompts are compared."""
    shape: Any = SimpleNamespace(vocab=1000)
    assert make_random_prompts(shape, 3, 5) == ((864,), (394, 776, 911), (430, 41, 265, 988, 523))
    assert make_random_prompts(shape, 1, 2) == ((864, 394),)


def test_odd_trace_ids_are_mapped_to_distinct_negative_numbers() -> None:
    columns = Columns(ReadProblems())
    most = 1 << 62
    found = [columns._convert_odd_id(v) for v in (None, "7", -1, -2, most - 1, most, "x", -2, "x", "y")]
    assert found == [-1, 7, -1, -2, most - 1, -3, -4, -2, -4, -5]


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("", "", "X"),
        ('"name": "a', 'b"', "aXb"),
        ("." * 100, "," * 100, "." * SHOWN_BYTES + "X" + "," * (SHOWN_BYTES - 1)),
        ('"' + "." * SHOWN_BYTES, '"', "." * SHOWN_BYTES + "X"),
        ('"' + "." * (SHOWN_BYTES - 1), '"', "." * (SHOWN_BYTES - 1) + "X"),
        ("", "," * (SHOWN_BYTES - 2) + '"', "X" + "," * (SHOWN_BYTES - 2)),
        ("", "," * (SHOWN_BYTES - 1) + '"', "X" + "," * (SHOWN_BYTES - 1)),
    ],
)
def test_repaired_byte_is_recorded_with_its_surrounding_string(
    before: str, after: str, shown: str, tmp_path: Path
) -> None:
    """At most three repairs are recorded."""
    reader = TraceReader(tmp_path / "trace.json")
    reader._record_repair(f"{before}X{after}".encode(), len(before))
    assert reader.problems.repaired == [shown]
    for more in ("1", "2", "2", "3"):
        reader._record_repair(more.encode(), 0)
    assert reader.problems.repaired == [shown, "1", "2"]


@pytest.mark.parametrize("near", [None, 1.0, 0.001, 1_000.0])
def test_drawn_ratio_is_limited_to_the_range_of_the_picture(near: float | None) -> None:
    """An unknown ratio is drawn at 1."""
    most = picture.FURTHEST
    drawn = {None: 1.0, 1.0: 1.0, 0.001: 1 / most, 1_000.0: most}
    assert picture._limit_ratio(near) == drawn[near]


@pytest.mark.parametrize(
    ("before", "after", "cpu"), [(None, None, None), (None, 5, None), (5, None, None), (100, 125, 0.125), (7, 7, 0.0)]
)
def test_cpu_share_of_a_rank_needs_two_tick_counts(
    before: int | None, after: int | None, cpu: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts are 2 s apart, with 100 ticks per second."""
    monkeypatch.setattr(hang_capture, "_read_cpu_ticks", lambda _: after)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    monkeypatch.setattr(hang_capture.subprocess_guard, "read_start_ticks", lambda _: ("R", 7))
    exits = [SimpleNamespace(rank=0, code=1), SimpleNamespace(rank=1, code=-9)]
    ranks: Any = SimpleNamespace(read_exits=lambda: exits)
    seen = hang_capture._describe_rank(ranks, 2, 77, before, 2.0)
    assert (seen.rank, seen.pid, seen.state, seen.cpu, seen.ended) == (2, 77, "R", cpu, "")
    assert hang_capture._describe_rank(ranks, 0, 77, before, 2.0).ended == hang_capture.format_exit_code(1)
    gone = hang_capture._describe_rank(ranks, 2, None, before, 2.0)
    assert (gone.pid, gone.cpu, gone.ended) == (None, None, "its process was gone")
    assert hang_capture._describe_rank(ranks, 1, None, before, 2.0).ended == hang_capture.format_exit_code(-9)


def test_incompletely_written_collectives_are_skipped(tmp_path: Path) -> None:
    """The second of three collectives has an invalid phase, then an invalid state."""
    path = tmp_path / "heartbeats-0"
    writer = heartbeats.HeartbeatWriter(path, 0, 2, waits=True, members=lambda _: ("all", [0, 1]))
    for _ in range(3):
        with writer.start_collective("all_reduce", None, None):
            pass
    data = bytearray(path.read_bytes())
    assert [one.order for one in heartbeats.read_heartbeats(path).collectives] == [1, 2, 3]
    at = heartbeats.RING_AT + heartbeats.EVENT.size
    fields = heartbeats.EVENT.unpack_from(data, at)
    for place, value in ((0, 7), (4, heartbeats.NAMES), (5, heartbeats.RAISED + 1)):
        heartbeats.EVENT.pack_into(data, at, *(value if i == place else field for i, field in enumerate(fields)))
        path.write_bytes(data)
        assert [one.order for one in heartbeats.read_heartbeats(path).collectives] == [1, 3]


CLIENTS_OF_TWO = 1 / measure.CHUNKS_EACH  # ITL at which one client occupies one process


@pytest.mark.parametrize(
    ("clients", "itl_s", "arrivals", "cores", "processes"),
    [
        (8, None, [], 9, 1),
        (2, CLIENTS_OF_TWO, [], 9, 2),
        (2, CLIENTS_OF_TWO, [], 2, 1),
        (2, CLIENTS_OF_TWO * 1.01, [], 9, 2),
        (2, CLIENTS_OF_TWO * 2, [], 9, 1),
        (None, None, [3.0, 5.0, 4.0], 9, 3),
        (None, None, [3.0, 5.0, 4.0], 3, 2),
        (None, None, [3.0, 3.0], 9, 1),
        (None, None, [None, 2.0], 9, 2),
    ],
)
def test_number_of_client_processes_depends_on_chunks_and_cores(
    clients: int | None,
    itl_s: float | None,
    arrivals: list[float | None],
    cores: int,
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of an open loop have twice as many tokens as one process can take in a second, of three in 2 s."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    requests: Any = [SimpleNamespace(arrival_s=at, output_tokens=2 * measure.CHUNKS_EACH) for at in arrivals]
    assert measure.choose_processes(SimpleNamespace(clients=clients), requests, itl_s) == processes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("timestmp", "; did you mean 'timestamp'?"),
        ("input_lenght", "; did you mean 'input_length'?"),
        ("zzz", "; known are timestamp, input_length, hash_ids"),
    ],
)
def test_unknown_field_raises_error_with_nearest_known_field(typed: str, hint: str) -> None:
    known = ("timestamp", "input_length", "hash_ids")
    with pytest.raises(UsageError) as error:
        request_files._check_fields(Path("trace"), 3, {"timestamp": 1, typed: 2}, known)
    assert f"'{typed}' is not known{hint}" in str(error.value)


@pytest.mark.parametrize(
    ("concurrency", "dp", "batch", "rows"),
    [
        (3, 1, None, 4),
        (4, 1, None, None),
        (9, 2, None, 16),
        (8, 2, None, None),
        (5, 1, 5, None),
        (5, 1, 6, 6),
        (6, 2, 4, 8),
    ],
)
def test_padded_points_have_the_batch_size_of_their_graph(
    concurrency: int, dp: int, batch: int | None, rows: int | None
) -> None:
    point = {"instances": None, "load_arrival": "closed", "cuda_graph": True, "graph_batch": batch}
    points = pd.DataFrame([{**point, "concurrency": concurrency, "dp": dp}])
    assert findings.find_padded(points).get("rows", pd.Series()).tolist() == ([] if rows is None else [rows])


@pytest.mark.parametrize(("prompts", "largest"), [([None], -1), ([[0]], 0), ([None, [3, 9, 1], [4]], 9)])
def test_largest_token_id_of_a_request_file(prompts: list[list[int] | None], largest: int) -> None:
    rows: Any = [SimpleNamespace(prompt=None if ids is None else np.array(ids)) for ids in prompts]
    assert request_files.Trace(path=Path(), sha256="", rows=rows, sorted=False).largest_id == largest


@pytest.mark.parametrize(
    ("higher_is_better", "ratio", "worse"),
    [
        (False, 1.25, math.log(1.25)),
        (False, 0.8, math.log(0.8)),
        (True, 1.25, math.log(0.8)),
        (True, 0.8, math.log(1.25)),
        (True, 0.0, math.inf),
        (False, 0.0, -math.inf),
        (True, None, math.inf),
        (False, None, math.inf),
    ],
)
def test_longer_times_and_lower_rates_are_worse(higher_is_better: bool, ratio: float | None, worse: float) -> None:
    row: Any = SimpleNamespace(higher_is_better=higher_is_better)
    assert fail_on._compute_worsening(row, ratio) == pytest.approx(worse)


@pytest.mark.parametrize(
    ("higher_is_better", "share", "more", "limit"),
    [
        (True, 0.25, None, math.log(1.25)),
        (False, 0.25, None, math.log(1.25)),
        (False, None, 2.0, math.log(1.2)),
        (True, None, 2.0, math.log(1.25)),
        (True, None, 10.0, math.inf),
        (True, None, 12.0, math.inf),
    ],
)
def test_limit_of_a_rule_is_a_share_or_a_difference(
    higher_is_better: bool, share: float | None, more: float | None, limit: float
) -> None:
    """The reference is 10 units."""
    row: Any = SimpleNamespace(higher_is_better=higher_is_better, a=10.0)
    assert fail_on._compute_limit(row, SimpleNamespace(share=share, more=more)) == pytest.approx(limit)  # type: ignore[arg-type]


def test_unreadable_files_are_listed_only_if_given_by_name(tmp_path: Path) -> None:
    """A folder may hold other files."""
    folder, other = tmp_path / "folder", tmp_path / "other.txt"
    folder.mkdir()
    (folder / "dump.txt").write_text('Process 5: python\nThread 7 (idle): "main"\n    run (file.py:9)\n')
    (folder / "notes.txt").write_text("nothing\n")
    other.write_text("nothing\n")
    found = evidence.read_evidence([folder, other])
    assert found.read == ["dump.txt"]
    assert found.unread == [f"{other} is no dump of py-spy or faulthandler, and no JSON of the flight recorder."]
    with pytest.raises(
        RecordsError, match=r"other\.txt: nothing there says where a rank was\. .*other\.txt is no dump"
    ):
        evidence.read_evidence([other])


@pytest.mark.parametrize("over", [0, 1, 300])
def test_long_failure_detail_is_cut_to_its_end(over: int) -> None:
    """The limit is 600 characters."""
    detail = "".join(chr(0x4E00 + n) for n in range(tables.MAX_DETAIL_CHARS + over))
    point = {
        "run": "r",
        "model": "m",
        "layout": "tp4",
        "outcome": "failed",
        "reason": "why",
        "cause": "why",
        "message": "why",
        "detail": detail,
    }
    table = tables.build_others_table(
        pd.DataFrame([point | {"load": None, "mode": None, "context": 4000, "concurrency": 8}])
    )
    assert table.rows[0][-1] == (f"… {detail[over:]}" if over else detail)
    assert "4,000 × 8" in table.rows[0]


@pytest.mark.parametrize("sign", [1, -1])
def test_option_value_above_the_maximum_is_refused(sign: int) -> None:
    option_parsers._check_size("context", sign * option_parsers.MAX_NUMBER, "typed")
    with pytest.raises(UsageError, match=r"^--context typed is above "):
        option_parsers._check_size("context", sign * option_parsers.MAX_NUMBER * 1.01, "typed")


def test_limits_of_rates_are_in_bytes_operations_and_seconds() -> None:
    """Values that are unknown or 0 are left out."""
    known = Rates(read_bytes_s=3e12, matmul_flop_s=0.0, barrier_us=2.5)
    assert known.limits == {"read": 3e12, "barrier": pytest.approx(2.5e-6)}
