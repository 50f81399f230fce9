"""Which of several is taken, at which limit another rule begins, and what numbers a sentence rests on: small functions."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from dcpbench.dashboard import data, pages, site
from dcpbench.errors import LayoutError
from dcpbench.hangs import dumps
from dcpbench.points import machines
from dcpbench.points.layout import Layout
from dcpbench.points.machines import described
from dcpbench.points.settings import Settings
from dcpbench.points.shapes import SHAPES
from dcpbench.points.wire import Call, Sample
from dcpbench.reports import explain, figures, markdown, rule, tables
from dcpbench.reports.sections import Section
from dcpbench.serving import replay
from dcpbench.serving.allocator import DcpAllocator
from dcpbench.show.numbers import span
from dcpbench.syncs.gating import comments
from tests.unit import record_builder


@pytest.mark.parametrize(
    ("seconds", "said"),
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
def test_spans_of_time(seconds: float, said: str) -> None:
    assert span(seconds) == said


@pytest.mark.parametrize(
    ("values", "some"),
    [([1], [1]), ([1, 2, 3], [1, 2, 3]), ([1, 2, 3, 4], [1, 3, 4]), ([1, 2, 3, 4, 5, 6, 7], [1, 4, 7])],
)
def test_of_more_than_three_loads_the_first_the_middle_and_the_last_are_drawn(
    values: list[int], some: list[int]
) -> None:
    assert figures._some(values) == some


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
def test_a_thread_of_a_dump_works_or_waits(head: str, name: str, active: bool | None) -> None:
    (thread,) = dumps.threads(f"Process 5: python\n{head}\n    run (file.py:9)\n")
    assert (thread.process, thread.name, thread.active) == ("5: python", name, active)
    assert [(f.function, f.file, f.line) for f in thread.frames] == [("run", "file.py", 9)]


@pytest.mark.parametrize(
    ("sizes", "without"),
    [([1], 0), ([1, 2], 0), ([1, 2, 4], 1), ([1, 1, 4], 0), ([1, 4, 4], 0), ([1, 2, 2, 4], 2), ([1, 2, 3, 4], 2)],
)
def test_a_size_is_known_without_a_sample_where_it_lies_between_two_others(sizes: list[int], without: int) -> None:
    call = Call("all_reduce", tuple(Sample(4, 1, 1000 * size, 5.0 * size) for size in sizes))
    assert len(call.errors_without()) == without


@pytest.mark.parametrize("pages_back", [[0], [0, 1], [3], [1, 1]])
def test_padding_is_nobodys_and_no_page_is_given_back_twice(pages_back: list[int]) -> None:
    """Of pages 1 and 2 that a request holds, of 5."""
    allocator = DcpAllocator(5, 4, 1)
    allocation = allocator.alloc(8)
    assert sorted(allocation.pages) == [1, 2]
    allocator.share(allocation, allocation.pages[:2])
    with pytest.raises(ValueError, match=r"^pages are given back that nobody holds$"):
        allocator.give_back(np.array(pages_back, np.int32))
    allocator.give_back(np.array([2, 1], np.int32))
    assert allocator.used_pages == 0


def test_columns_of_an_environment_are_numbered_where_a_run_has_several() -> None:
    """And as many as differ; the first has the run's name alone."""
    first = record_builder.ok(record_builder.point())
    assert first.environment is not None
    records = [
        msgspec.structs.replace(first, environment=msgspec.structs.replace(first.environment, torch=version))
        for version in ("2.8", "2.8", "2.9", "2.10", "2.9")
    ]
    run = SimpleNamespace(name="run", records=records)
    table = tables.environment(SimpleNamespace(runs=[run, SimpleNamespace(name="other", records=records[:1])]))  # type: ignore[arg-type]
    assert table.columns[-3:] == ["run", "run (2)", "run (3)"]


@pytest.mark.parametrize(("smaller", "groups"), [(0.6, 1), (0.5, 1), (0.49, 2)])
def test_changes_within_a_factor_of_two_of_the_largest_are_one_group(
    smaller: float, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_size", lambda size: size)
    histories: Any = [SimpleNamespace(line=SimpleNamespace(example=SimpleNamespace(layout_name="tp4")))]
    moved: Any = [data.Moved(line=0, steps={0: size}, verdict="worse") for size in (smaller, 1.0)]  # type: ignore[dict-item]
    found = data._alike(moved, histories)
    assert [[one.size for one in group] for group in found] == ([[1.0, smaller]] if groups == 1 else [[1.0], [smaller]])


@pytest.mark.parametrize(("known", "there", "kept"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_page_stays_that_was_made_before_and_is_there(
    known: bool, there: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "is_made", lambda *_: False)
    page = tmp_path / pages.FOLDER / "run" / pages.PAGE
    page.parent.mkdir(parents=True)
    if there:
        page.touch()
    found: Any = SimpleNamespace(runs=[SimpleNamespace(slug="run", name="run")])
    before = {"run": "key"} if known else {}
    assert site._pages(tmp_path, found, before, lambda _: False, print) == ({"run": "key"} if kept else {}, [])


def test_a_replay_says_how_long_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a millisecond, whatever the clock began at."""
    clock = iter([100.0, 102.34567])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    for name in ("read_step_times", "requests_of"):
        monkeypatch.setattr(replay, name, lambda *_: None)
    of = record_builder.point()
    monkeypatch.setattr(replay, "replay_point", lambda *_, **__: record_builder.ok(of))
    record = replay.replay_from_file(of, None, tmp_path, Settings(), tmp_path)  # type: ignore[arg-type]
    assert record.seconds == 2.346


OUTER = """\
@wraps
def outer():
    a = 1
    def inner():
        return 2
"""


@pytest.mark.parametrize(
    ("behind", "own"),
    [("", [1, 2, 3]), ("    b = 3\n", [1, 2, 3, 6]), ("    c = lambda: 3\n", [1, 2, 3, 6])],
)
def test_a_functions_own_lines_are_those_of_no_function_in_it(behind: str, own: list[int]) -> None:
    """Its last line may be that of one; a lambda's are its, too."""
    functions = [n for n in ast.walk(ast.parse(OUTER + behind)) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    assert comments._own_lines(functions[0], functions) == own  # type: ignore[arg-type]


@pytest.mark.parametrize(("gpus", "wrong"), [(-1, True), (0, True), (1, False), (8, False)])
def test_a_host_has_a_gpu(gpus: int, wrong: bool) -> None:
    machine = msgspec.structs.replace(described("H200"), gpus_per_host=gpus)
    said = f"gpus_per_host = {gpus}: write how many GPUs read each other's memory, such as 8."
    assert machines._wrong(machine) == (said if wrong else "")


def test_ranks_that_heads_can_be_split_over_are_named_up_to_64() -> None:
    shape = dataclasses.replace(SHAPES["kimi-k2"], heads=64 * 65)
    with pytest.raises(LayoutError) as error:
        Layout(7).check_model(shape)
    assert str(error.value) == (
        f"{shape.name} has 4160 heads, which tp7 would split over 7 ranks; tp/dp can be 1, 2, 4, 5, 8, 10, 13, 16, 20, 26, "
        "32, 40, 52, 64."
    )


@pytest.mark.parametrize(("text", "fence"), [("", 3), ("a`b", 3), ("```", 4), ("a ```` b `", 5)])
def test_a_fence_is_longer_than_any_in_its_text(text: str, fence: int) -> None:
    text_of = markdown.render("title", [Section(slug="slug", title="section", commands=[text])], Path())
    assert f"\n{'`' * fence}\n{text}\n{'`' * fence}\n" in text_of


@pytest.mark.parametrize(
    ("gpus", "said"), [([8], "on 8 × H200, "), ([8, 4, 8], "on 4–8 × H200, "), ([16, 4, 1_024], "on 4–1,024 × H200, ")]
)
def test_gpus_are_named_from_the_fewest_to_the_most(
    gpus: list[int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "_rests_on", lambda _: [])
    assert rule.where(pd.DataFrame({"device": ["NVIDIA H200"] * len(gpus), "gpus": gpus})) == said


@pytest.mark.parametrize(
    ("idle", "said"),
    [([0.1, 0.3], "10 % to 30 %"), ([0.012, 0.34, 0.2], "1.2 % to 34 %"), ([0.996, 0.998], "1e+02 % to 1e+02 %")],
)
def test_how_much_of_a_step_the_gpu_idled(idle: list[float], said: str) -> None:
    points = pd.DataFrame(
        {"cpu": False, "idle_fraction": [*idle, np.nan], "host_syncs_per_step": np.nan, "idle_us": 1.0}
    )
    assert explain.phases(points)[0] == f"The GPU idled {said} of a profiled step."
