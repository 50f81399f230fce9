"""Merging of repeats, comparisons, and verdicts of reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pandas as pd
import pytest

from dcpbench.errors import UsageError
from dcpbench.points.layout import Layout
from dcpbench.points.names import UNKNOWN
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.reports import answer, dataframes, findings
from dcpbench.reports.figures import find_frontier
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

TP, DCP, DP = Layout(4), Layout(4, 1, 4), Layout(4, 4)


def exact(point: Point, *steps: float, **changes: object) -> Record:
    """Return a record with exactly these step times."""
    record = build.make_ok_record(point, steps=1, **changes)  # type: ignore[arg-type]
    return msgspec.structs.replace(record, metrics=compute_decode_metrics(list(steps), point.concurrency, point.tp))


def loaded(tmp_path: Path, *records: Record) -> dataframes.Frames:
    """Return frames of records that were written and read again."""
    return dataframes.load_frames([build.write_records(tmp_path / "run", records)])


def test_repeats_become_one_row_with_median_envelope_and_spread(tmp_path: Path) -> None:
    """Medians 10 and 11 ms: 10.5; the intervals 9-11 and 10-12 span 9-12; the spread is 1 / 10.5 = 9.5 %."""
    first, second = build.make_point(TP), build.make_point(TP, repeat=1)
    read = loaded(tmp_path, exact(first, 9, 10, 11), exact(second, 10, 11, 12))
    (row,) = read.points.to_dict("records")
    assert (row["step_ms"], row["step_ms_low"], row["step_ms_high"]) == (10.5, 9, 12)
    assert row["repeats"] == 2
    assert row["samples"] == 6
    assert row["spread"] == pytest.approx(1 / 10.5)


def test_runs_as_repeats_are_merged_into_one_run(tmp_path: Path) -> None:
    """Medians 10 and 11 ms in two folders: one row, two repeats, 1 / 10.5 apart; a point that both reject is listed
    once.
    """
    rejected = build.make_rejected_record(build.make_point(DCP))
    folders = [
        build.write_records(tmp_path / "monday", [exact(build.make_point(TP), 10), rejected]),
        build.write_records(tmp_path / "tuesday", [exact(build.make_point(TP), 11), rejected]),
    ]
    read = dataframes.load_frames(folders, as_repeats=True)
    (row,) = read.points.to_dict("records")
    assert (row["run"], row["repeats"], row["step_ms"]) == ("monday + tuesday", 2, 10.5)
    assert row["spread"] == pytest.approx(1 / 10.5)
    assert len(read.others) == 1
    assert len(dataframes.load_frames(folders).points) == 2, "separate runs without the option"


def test_copy_of_a_run_is_no_repeat(tmp_path: Path) -> None:
    """The same samples at the same time were measured once, whatever the name of the folder."""
    folders = [build.write_records(tmp_path / name, [exact(build.make_point(TP), 10)]) for name in ("monday", "copy")]
    (row,) = dataframes.load_frames(folders, as_repeats=True).points.to_dict("records")
    assert row["repeats"] == 1


def test_points_of_different_gpus_in_one_file_are_not_compared(tmp_path: Path) -> None:
    """A run may be resumed on another machine. Without an environment, a rejected point belongs to the first GPU."""
    other = msgspec.structs.replace(build.GPU, device="NVIDIA H100")
    slow, dcp = (
        msgspec.structs.replace(exact(point, 11), environment=other)
        for point in (build.make_point(TP, repeat=1), build.make_point(DCP))
    )
    folder = build.write_records(
        tmp_path / "run", [exact(build.make_point(TP), 10), slow, dcp, build.make_rejected_record(build.make_point(DP))]
    )
    read = dataframes.load_frames([folder])
    h200, h100 = "run (NVIDIA H200)", "run (NVIDIA H100)"
    assert sorted(zip(read.points["run"], read.points["layout"], read.points["repeats"], strict=True)) == [
        (h100, "tp4", 1),
        (h100, "tp4·dcp4", 1),
        (h200, "tp4", 1),
    ]
    assert list(read.others["run"]) == [h200]


def test_runs_of_different_environments_are_refused_as_repeats(tmp_path: Path) -> None:
    """The first difference is named; a record without an environment, such as a rejected one, does not matter."""
    other = msgspec.structs.replace(build.GPU, nccl="2.99", triton="9")
    slow = msgspec.structs.replace(exact(build.make_point(TP), 11), environment=other)
    folders = [
        build.write_records(
            tmp_path / "monday", [build.make_rejected_record(build.make_point(DCP)), exact(build.make_point(TP), 10)]
        ),
        build.write_records(tmp_path / "tuesday", [slow]),
    ]
    with pytest.raises(UsageError, match=r"nccl is 2\.27 in monday and 2\.99 in tuesday"):
        dataframes.load_frames(folders, as_repeats=True)
    assert len(dataframes.load_frames(folders).points) == 2


@pytest.mark.parametrize(("backend", "repeats"), [("triton", 2), ("flashinfer", 2), ("flashmla", 0), ("auto", 0)])
def test_flashmla_versions_must_match_for_points_that_may_use_it(backend: str, repeats: int, tmp_path: Path) -> None:
    """Only one of two machines has FlashMLA; `auto` may have tried it."""
    folders = []
    for name, version in (("with", "1.0.0"), ("without", None)):
        record = exact(build.make_point(TP, backend=backend), 10 if version else 11)
        environment = msgspec.structs.replace(build.GPU, flash_mla=version)
        folders.append(build.write_records(tmp_path / name, [msgspec.structs.replace(record, environment=environment)]))
    if repeats:
        (row,) = dataframes.load_frames(folders, as_repeats=True).points.to_dict("records")
        assert row["repeats"] == repeats
    else:
        with pytest.raises(UsageError, match=r"flash_mla is 1\.0\.0 in with and None in without"):
            dataframes.load_frames(folders, as_repeats=True)


def test_point_measured_again_counts_once_with_its_last_record(tmp_path: Path) -> None:
    """After --resume the failure is no longer listed, and the run counts one replaced record."""
    read = loaded(tmp_path, build.make_failed_record(build.make_point(TP)), exact(build.make_point(TP), 10))
    assert len(read.points) == 1
    assert read.others.empty
    assert read.runs[0].replaced == 1


def test_points_are_sorted_by_context_concurrency_and_layout(tmp_path: Path) -> None:
    points = [build.make_point(lay, context=c, concurrency=n) for c in (9, 5) for n in (32, 8) for lay in (DCP, TP)]
    read = loaded(tmp_path, *(exact(p, 10) for p in points))
    assert list(read.points["context"]) == [5] * 4 + [9] * 4
    assert list(read.points["concurrency"][:4]) == [8, 8, 32, 32]
    assert list(read.points["layout"][:2]) == ["tp4", "tp4·dcp4"]


def test_labels_name_the_backend_only_if_several_ran(tmp_path: Path) -> None:
    assert list(
        loaded(tmp_path / "1", exact(build.make_point(TP), 1), exact(build.make_point(DCP), 1)).points["label"]
    ) == [
        "tp4",
        "tp4·dcp4",
    ]
    two = loaded(tmp_path / "2", exact(build.make_point(TP), 1), exact(build.make_point(TP, backend="triton"), 1))
    assert list(two.points["label"]) == ["tp4 (flashinfer)", "tp4 (triton)"]


def test_labels_name_options_of_an_exchange_only_if_they_differ(tmp_path: Path) -> None:
    """With one exchange and the same q replication in all points the labels have no options; baselines never have any."""
    plain, wide = build.make_point(DCP, exchange="a2a"), build.make_point(DCP, exchange="a2a", q_replicate=True)
    same = loaded(tmp_path / "1", exact(build.make_point(TP), 1), exact(wide, 1))
    assert list(same.points["label"]) == ["tp4", "tp4·dcp4"]
    two = loaded(tmp_path / "2", exact(build.make_point(TP), 1), exact(plain, 1), exact(wide, 1))
    assert list(two.points["label"]) == ["tp4", "tp4·dcp4", "tp4·dcp4 (+q-replicate)"]
    three = loaded(tmp_path / "3", *(exact(p, 1) for p in (build.make_point(TP), build.make_point(DCP), plain, wide)))
    assert set(three.points["variant"]) == {"", "ag_rs", "a2a", "a2a +q-replicate"}
    reduced = loaded(tmp_path / "4", exact(build.make_point(TP), 1), exact(build.make_point(TP, all_reduce="symm"), 1))
    assert set(reduced.points["variant"]) == {"nccl all-reduce", "symm all-reduce"}


def test_runs_with_the_same_name_are_named_by_their_path(tmp_path: Path) -> None:
    """Names have as many folders as necessary; a run with a unique name keeps it."""
    places = ("a/run", "b/run", "alone", "x/c/same", "y/c/same")
    folders = [build.write_records(tmp_path / place, [exact(build.make_point(TP), 1)]) for place in places]
    assert set(dataframes.load_frames(folders).points["run"]) == set(places)


def test_best_layout_is_clear_with_separate_intervals_and_two_percent_lead(
    tmp_path: Path,
) -> None:
    """Steps of 10 against 11 ms are 10 % ahead, 10 against 10.1 ms 1 %; the intervals of 9-11-12 and 10-12-13 ms
    overlap.
    """
    read = loaded(
        tmp_path,
        exact(build.make_point(TP, context=1), 10),
        exact(build.make_point(DCP, context=1), 11),
        exact(build.make_point(TP, context=2), 10),
        exact(build.make_point(DCP, context=2), 10.1),
        exact(build.make_point(TP, context=3), 9, 11, 12),
        exact(build.make_point(DCP, context=3), 10, 12, 13),
        exact(build.make_point(TP, context=4), 10),
    )
    best = findings.find_best_per_load(findings.select_timed(read.everything))
    assert list(best["context"]) == [1, 2, 3], "a single layout has no best"
    assert list(best["clear"]) == [True, False, False]
    assert best["lead"][0] == pytest.approx(1.1)
    assert list(best["level"]) == [["tp4"], ["tp4", "tp4·dcp4"], ["tp4", "tp4·dcp4"]]
    (sentence,) = [s for s in answer.format_top_sentences(read) if "Best layout" in s]
    assert "Context 1: tp4 at 8 (1.10× the next); context 2: level: tp4 and tp4·dcp4 at 8" in sentence
    assert "context 3: tp4 and tp4·dcp4 (not distinguishable) at 8" in sentence


def test_dcp_is_compared_with_the_same_layout_without_it(tmp_path: Path) -> None:
    """20 ms with tp4, 10 ms [9, 11] with dcp4: 2 times, from 20/11 = 1.82 to 20/9 = 2.22. dp4 is not its baseline."""
    read = loaded(
        tmp_path,
        exact(build.make_point(TP), 20),
        exact(build.make_point(DCP), 9, 10, 11),
        exact(build.make_point(DP), 5),
    )
    (row,) = findings.compare_dcp_with_baseline(findings.select_timed(read.everything)).to_dict("records")
    assert "index" not in row
    assert row["baseline"] == "tp4"
    assert row["ratio"] == pytest.approx(2)
    assert (row["low"], row["high"]) == (pytest.approx(20 / 11), pytest.approx(20 / 9))
    assert row["verdict"] == "higher"


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [((10,), "higher"), ((30,), "lower"), ((19.9,), "no clear difference"), ((10, 18, 25), "no clear difference")],
)
def test_dcp_verdicts_need_more_than_noise(tmp_path: Path, steps: tuple[float, ...], verdict: str) -> None:
    """Ratios to 20 ms are 2.0, 0.67, 1.005 (less than repeats may differ), and 1.11 with an interval from 0.8 to 2."""
    read = loaded(tmp_path, exact(build.make_point(TP), 20), exact(build.make_point(DCP), *steps))
    assert findings.compare_dcp_with_baseline(findings.select_timed(read.everything))["verdict"][0] == verdict


def test_dcp_point_with_rejected_baseline_is_named_and_not_compared(tmp_path: Path) -> None:
    """A layout with DCP that ran alone is a finding, not an infinite ratio."""
    read = loaded(tmp_path, build.make_rejected_record(build.make_point(TP)), exact(build.make_point(DCP), 10))
    (row,) = findings.compare_dcp_with_baseline(findings.select_timed(read.everything)).to_dict("records")
    assert row["verdict"] == "no baseline"
    sentences = " ".join(answer.format_top_sentences(read))
    assert "1 point with DCP ran under loads at which tp4 was rejected" in sentences


def test_baseline_that_was_not_tried_is_not_named_as_rejected(tmp_path: Path) -> None:
    """An interrupted run tried tp4 only at 4,000 tokens, not at 8,000."""
    interrupted, longer = build.make_rejected_record(build.make_point(TP)), build.make_point(DCP, context=8000)
    read = loaded(tmp_path, interrupted, exact(build.make_point(DCP), 10), exact(longer, 12))
    text = " ".join(answer.format_top_sentences(read))
    assert "1 point with DCP ran under loads at which tp4 was rejected (concurrency 8 · context 4,000)" in text


def test_kv_capacity_is_compared_per_gib(tmp_path: Path) -> None:
    """The dcp4 pool is half as large and holds 2 times as many tokens: 4 times per GiB."""
    plain, split = exact(build.make_point(TP), 10), exact(build.make_point(DCP), 10)
    assert plain.kv
    small = msgspec.structs.replace(
        plain.kv, pool_bytes_per_gpu=plain.kv.pool_bytes_per_gpu // 2, capacity_tokens=plain.kv.capacity_tokens * 2
    )
    table = findings.compute_kv_by_layout(loaded(tmp_path, plain, msgspec.structs.replace(split, kv=small)).points)
    assert list(table["kv_ratio"]) == [1, pytest.approx(4)]


def test_sentence_counts_repeats_that_disagree(tmp_path: Path) -> None:
    """100 and 103 ms: 3 / 101.5 = 2.96 %, more than 2 %; 100 and 101 ms agree."""
    read = loaded(
        tmp_path,
        *(exact(build.make_point(TP, repeat=i), ms) for i, ms in enumerate((100, 103))),
        *(exact(build.make_point(DCP, repeat=i), ms) for i, ms in enumerate((100, 101))),
    )
    table = findings.compare_repeats(read)
    assert sorted(table["apart"]) == [pytest.approx(1 / 100.5), pytest.approx(3 / 101.5)]
    assert findings.format_repeats_sentence(table["apart"]) == (
        "Repeats differ by more than 2 % at 1 of 2 points measured more than once."
    )


def test_sentence_gives_the_difference_of_repeats_that_agree(tmp_path: Path) -> None:
    """100 and 101 ms: 1 / 100.5 = 0.995 %, printed as 1 %."""
    read = loaded(tmp_path, *(exact(build.make_point(TP, repeat=i), ms) for i, ms in enumerate((100, 101))))
    assert findings.format_repeats_sentence(findings.compare_repeats(read)["apart"]) == (
        "Repeats agree within 1 % at the one point measured more than once."
    )


def test_copied_run_is_not_compared_with_its_original(tmp_path: Path) -> None:
    """Every point of a copy would agree with its original within 0 %."""
    record = exact(build.make_point(TP), 10)
    a, b = (build.write_records(tmp_path / name, [record]) for name in "ab")
    assert findings.compare_repeats(dataframes.load_frames([a, b])).empty


def test_runs_on_different_hardware_are_not_compared_as_repeats(tmp_path: Path) -> None:
    """The same point ran on an H200 and on a CPU."""
    a = build.write_records(tmp_path / "a", [exact(build.make_point(TP), 10)])
    b = build.write_records(tmp_path / "b", [exact(build.make_point(TP), 99, environment=build.CPU)])
    assert findings.compare_repeats(dataframes.load_frames([a, b])).empty


def test_cpu_points_are_excluded_from_comparisons(tmp_path: Path) -> None:
    """CPU points have a mark, or a device if the mark is missing."""
    read = loaded(
        tmp_path, build.make_cpu_record(build.make_point(TP)), exact(build.make_point(DCP), 10, environment=build.CPU)
    )
    assert read.cpu
    assert findings.select_timed(read.everything).empty


def test_frontier_has_points_that_no_other_beats_in_both_rates(tmp_path: Path) -> None:
    """tp4: 8 requests at 10 ms (100 tok/s/user, 200/GPU), 32 at 20 ms (50, 400). dcp4: 8 at 16 ms (62, 125), which tp4
    beats.
    """
    read = loaded(
        tmp_path,
        exact(build.make_point(TP, concurrency=8), 10),
        exact(build.make_point(TP, concurrency=32), 20),
        exact(build.make_point(DCP, concurrency=8), 16),
    )
    assert list(find_frontier(read.points)["concurrency"]) == [8, 32]


@pytest.mark.parametrize(
    ("name", "own", "printed"),
    [
        ("chunk", [2048, 4096], [True, True, False]),
        ("chunk", [2048, 2048], [False, False, False]),
        ("requests", [2048, 4096], [False, False, False]),
        ("kv_memory_gib", [8.0, 16.0], [True, True, True]),
        ("kv_memory_gib", [8.0, 8.0], [False, False, True]),
    ],
)
def test_values_that_differ_between_own_points_are_printed_next_to_imports(
    name: str, own: list[float], printed: list[bool]
) -> None:
    """Two own points are listed with an import that does not state the value; the number of requests of an import does
    not matter.
    """
    table = pd.DataFrame(
        {
            "origin": ["dcpbench", "dcpbench", "vllm"],
            "model": "m",
            "mode": "",
            "shape": "1000/100",
            "run": "r",
            "label": ["a", "b", "c"],
            "arrival": ["8", "8", "8"],
            f"load_{name}": [*own, 0],
        }
    )
    assert dataframes._find_printed(table, name).tolist() == printed


@pytest.mark.parametrize(
    ("placed", "labels"),
    [
        ([(8, "1"), (1, "tp")], ["", ""]),
        ([(8, "tp"), (8, "1"), (1, "1")], ["ep8", "ep1", ""]),
        ([(8, "tp"), (8, UNKNOWN)], ["", ""]),
        ([(8, "8"), (4, "tp")], ["", ""]),
    ],
)
def test_expert_placement_is_printed_only_if_it_differs(placed: list[tuple[int, str]], labels: list[str]) -> None:
    """Points are (tp, ep); a single rank and an unknown placement have no label, and no point has one if all others
    agree.
    """
    tps, eps = zip(*placed, strict=True)
    table = pd.DataFrame({"tp": tps, "dp": [1] * len(tps), "ep": eps})
    assert (dataframes._format_experts(table) or [""] * len(tps)) == labels


@pytest.mark.parametrize(
    ("low", "ratio", "high", "verdict"),
    [
        (1.0, 1.05, 1.1, "no clear difference"),
        (1.001, 1.05, 1.1, "above"),
        (1.001, 1.02, 1.1, "no clear difference"),
        (1.001, 1.0201, 1.1, "above"),
        (0.9, 0.95, 1.0, "no clear difference"),
        (0.9, 0.95, 0.999, "below"),
        (0.9, 0.9804, 0.999, "no clear difference"),
        (0.9, 0.9803, 0.999, "below"),
        (float("nan"), float("nan"), float("nan"), "without"),
    ],
)
def test_ratio_is_clear_with_interval_beyond_1_and_two_percent_lead(
    low: float, ratio: float, high: float, verdict: str
) -> None:
    """An interval that ends at 1 and a lead of exactly 2 % are not clear, nor is 1 / 1.02 = 0.98039 on the other side.
    One launch band is enough to widen the margin.
    """
    table = pd.DataFrame(
        {"low": [low], "ratio": [ratio], "high": [high], "launch_band": 0.02, "over_launch_band": 0.02}
    )
    widened = findings.compute_verdicts(
        table.assign(over_launch_band=0.2), above="above", below="below", without="without"
    )
    assert widened.tolist() == ["without" if verdict == "without" else "no clear difference"]
    assert findings.compute_verdicts(table, above="above", below="below", without="without").tolist() == [verdict]


WAVE = {
    "instances": None,
    "load_requests": 33,
    "concurrency": 8,
    "room_for": 8,
    "preemptions": 0,
    "decode_batch": 7.1,
    "load_arrival": "closed",
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, True),
        ({"load_requests": 32}, False),
        ({"room_for": 7}, False),
        ({"preemptions": 1}, False),
        ({"preemptions": float("nan")}, True),
        ({"decode_batch": 7.2}, False),
        ({"load_arrival": "poisson"}, False),
        ({"instances": "1P2D"}, False),
    ],
    ids=str,
)
def test_last_wave_is_named_if_only_it_left_clients_idle(change: dict[str, object], named: bool) -> None:
    """One request of 33 is left for 8 clients, of which on average 7.1 had requests: below 0.9 · 8 = 7.2."""
    found = findings.find_last_waves(pd.DataFrame([WAVE | change]))
    assert found["left"].tolist() == ([1] if named else [])


@pytest.mark.parametrize(
    ("apart", "sentence"),
    [
        ([], "Every point was measured once, so the difference between repeats is unknown."),
        ([0.02], "Repeats agree within 2 % at the one point measured more than once."),
        ([0.021], "Repeats differ by more than 2 % at 1 of 1 point measured more than once."),
        ([0.01, 0.02], "Repeats agree within 2 % at both points measured more than once."),
        ([0.03, 0.02, 0.5], "Repeats differ by more than 2 % at 2 of 3 points measured more than once."),
    ],
)
def test_repeats_agree_up_to_two_percent(apart: list[float], sentence: str) -> None:
    assert findings.format_repeats_sentence(apart) == sentence
