"""`dcpbench compare`: matching of points, verdicts and their reasons."""

from __future__ import annotations

import dataclasses
import math
import shutil
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from dcpbench.compare import comparison_text, sides
from dcpbench.compare.judging import CPU_REASON, NO_ENDS, NO_SAMPLES, WITHIN_ENDS, Options, judge_sides
from dcpbench.compare.sides import read_side
from dcpbench.errors import RecordsError, UsageError
from dcpbench.points.layout import Layout
from dcpbench.records.record import Latencies
from dcpbench.records.runs import Run
from dcpbench.serving.outcome import Row
from dcpbench.serving.samples import write_samples
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serving
from tests.unit.compare_builder import (
    compare_launches,
    compare_records,
    make_emulated,
    make_forecast,
    make_launch,
    write_launches,
)
from tests.unit.kept_runs import RESULTS, RUNS

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.compare.comparison import Comparison, PointResult
    from dcpbench.records.record import Record

DECODE = RESULTS / "decode_4xH200/decode-deepseek-v3-kimi-k2_4xH200_2026-11-20"


def make_ends(record: Record, share: float) -> dict[str, float]:
    """Return ends of a served forecast, this share below and above its values."""
    found = record.serve
    values = {"output_tok_s": found.output_tok_s, "ttft_p50_ms": found.ttft_ms.p50, "itl_p50_ms": found.itl_ms.p50}
    return {f"{n}_{end}": v * by for n, v in values.items() for end, by in (("low", 1 - share), ("high", 1 + share))}


def get_verdicts(c: Comparison) -> dict[str, str]:
    """Return the verdict of each metric of the only point."""
    (point,) = c.points
    return {row.metric: row.verdict for row in point.rows}


class TestRealRecords:
    def test_two_passes_of_one_sweep_do_not_differ(self) -> None:
        """run1 and run2 ran the same 55 points one after the other; launches moved whole layouts by up to 0.85 %."""
        found = judge_sides(read_side([DECODE / "run1"]), read_side([DECODE / "run2"]), Options(launch_noise=0.02))
        assert len(found.points) == 55
        assert found.tests == 55
        assert set(found.counts) <= {"SAME", "UNDECIDED"}
        assert len(found.only_a) == 9
        unknown = judge_sides(read_side([DECODE / "run1"]), read_side([DECODE / "run2"]), Options())
        assert unknown.tests == 0
        assert {row.verdict for p in unknown.points for row in p.rows if row.sampled} == {"UNDECIDED"}

    def test_run_does_not_differ_from_itself(self) -> None:
        found = judge_sides(read_side([DECODE / "run1"]), read_side([DECODE / "run1"]), Options())
        assert set(found.counts) <= {"SAME", "UNDECIDED"}
        assert any("with themselves" in note for note in found.notes)

    def test_copy_of_a_run_is_reported_in_notes(self, tmp_path: Path) -> None:
        """Otherwise a table without differences could be read as a change without effect."""
        shutil.copytree(DECODE / "run2", tmp_path / "copy")
        two, copy = read_side([DECODE / "run2"]), read_side([tmp_path / "copy"])
        advice = "as copies of one run do: they are compared with themselves, which says nothing about a change."
        assert f"A and B hold the same records, {advice}" in judge_sides(two, copy, Options()).notes

        (one,), measured = read_side([DECODE / "run1"]), [r for r in two[0].records if r.outcome == "ok"]
        build.write_records(tmp_path / "both", [*one.records, *measured[:3]])
        found = judge_sides(read_side([tmp_path / "both"]), copy, Options())
        assert f"A and B hold the same records of 3 of {len(found.points)} points, {advice}" in found.notes
        assert not any("same records" in note for note in judge_sides([one], two, Options()).notes)

    @pytest.mark.parametrize("folder", RUNS, ids=lambda p: p.name)
    @pytest.mark.sample(5)
    def test_every_committed_run_can_be_compared_with_itself(self, folder: Path) -> None:
        """The runs are decode, live and replay, with and without files of samples."""
        found = judge_sides(read_side([folder]), read_side([folder]), Options())
        assert not {"FASTER", "SLOWER", "MORE", "FEWER"} & set(found.counts)

    def test_live_run_and_its_replay_have_no_points_in_common(self) -> None:
        (one,) = read_side([RESULTS / "serving_4xH200/serving-deepseek-v3-kimi-k2_4xH200_2026-11-21" / "v3-pressure"])
        by_mode = {r.point.load.mode: [r] for r in one.records}
        a, b = ([Run(mode, one.folder, by_mode[mode])] for mode in ("live", "replay"))
        with pytest.raises(
            UsageError, match=r"no measured point in common: A has .*, live, B has .*, replay;"
        ) as refused:
            judge_sides(a, b, Options())
        assert "replay, replay" not in str(refused.value)
        assert str(refused.value).endswith("; measure the same points in both.")

    def test_error_names_the_across_option_that_makes_points_comparable(self) -> None:
        """Answers of another length are another context, too; the nearest of B's points is the one to compare with."""
        at = RESULTS / "serving_4xH200/clients-in-step_4xH200_2026-11-27" / "v3" / "4gib"
        runs = [read_side([at / f"tp4-dcp4-{name}"])[0] for name in ("alike", "near")]
        a, b = ([Run(r.name, r.folder, [x for x in r.records if x.point.concurrency == 48])] for r in runs)
        with pytest.raises(UsageError, match="to compare these two, add --across ") as refused:
            judge_sides(a, b, Options())
        across = str(refused.value).rpartition("--across ")[2].removesuffix(".").split(",")
        assert "output_tokens" in across
        assert len(judge_sides(a, b, Options(across=tuple(across))).points) == 1


class TestMatching:
    def test_points_of_one_side_and_failed_points_are_listed(self, tmp_path: Path) -> None:
        p = [build.make_point(Layout(4), concurrency=n) for n in (8, 16, 32)]
        found = compare_records(
            tmp_path,
            [build.make_ok_record(p[0]), build.make_ok_record(p[1])],
            [build.make_ok_record(p[0]), build.make_failed_record(p[1]), build.make_ok_record(p[2])],
        )
        assert [x.name for x in found.points] == ["kimi-k2 tp4 ep4 flashinfer, 8 × 4,000 tokens"]
        assert found.only_b == ["kimi-k2 tp4 ep4 flashinfer, 32 × 4,000 tokens"]
        (broken,) = found.broken
        assert (broken.side, broken.outcome, broken.name) == (
            "b",
            "failed",
            "kimi-k2 tp4 ep4 flashinfer, 16 × 4,000 tokens",
        )

    def test_repeats_are_measurements_of_one_point(self, tmp_path: Path) -> None:
        a = [build.make_ok_record(build.make_point(repeat=n), median_ms=10) for n in range(3)]
        found = compare_records(tmp_path, a, a[:1])
        assert found.points[0].rows[0].repeats == (3, 1)

    @pytest.mark.parametrize("side", ["a", "b"])
    def test_launches_of_one_side_on_two_gpus_are_refused(self, side: str, tmp_path: Path) -> None:
        """The difference between the GPUs would count as noise of the side. A GPU has the same name without its maker."""
        folders = {name: write_launches(tmp_path / name, 4) for name in ("a", "b")}
        a, b = (read_side([folder]) for folder in folders.values())

        def move(device: str) -> None:
            found = {"a": a, "b": b}[side]
            environment = found[3].records[0].environment
            assert environment is not None
            moved = [
                msgspec.structs.replace(r, environment=msgspec.structs.replace(environment, device=device))
                for r in found[3].records
            ]
            found[3] = dataclasses.replace(found[3], records=moved)

        move("H200")
        judge_sides(a, b, Options())
        move("NVIDIA H100")
        message = rf"points of {side.upper()} ran on NVIDIA H200 in .*round-3 and on NVIDIA H100 in .*round-4"
        with pytest.raises(UsageError, match=message):
            judge_sides(a, b, Options())

    def test_sides_on_different_gpus_are_compared(self, tmp_path: Path) -> None:
        """This is how the GPUs themselves are compared; the difference is listed."""
        good = build.make_ok_record(build.make_point(Layout(4)))
        assert good.environment is not None
        other = msgspec.structs.replace(good.environment, device="NVIDIA H100")
        found = compare_records(tmp_path, [good], [msgspec.structs.replace(good, environment=other, started_at="x")])
        assert [d.b for d in found.differences if d.what == "GPU"] == ["NVIDIA H100"]

    def test_latest_record_of_a_resumed_point_counts(self, tmp_path: Path) -> None:
        old, new = (build.make_ok_record(build.make_point(), median_ms=ms, started_at=f"{ms}") for ms in (20, 10))
        found = compare_records(tmp_path, [build.make_failed_record(build.make_point()), old, new], [new])
        assert found.points[0].rows[0].ratio == 1

    def test_subfolders_are_launches_in_numerical_order(self, tmp_path: Path) -> None:
        for n in (10, 9, 1):
            build.write_records(tmp_path / f"round-{n}", [build.make_ok_record(build.make_point())])
        assert [x.folder.name for x in read_side([tmp_path])] == ["round-1", "round-9", "round-10"]

    def test_repeated_folder_and_copied_record_count_once(self, tmp_path: Path) -> None:
        one = build.write_records(tmp_path / "one", [build.make_ok_record(build.make_point())])
        copy = build.write_records(tmp_path / "copy", [build.make_ok_record(build.make_point())])
        other = build.write_records(tmp_path / "other", [build.make_ok_record(build.make_point(), started_at="later")])
        assert len(read_side([one, one])) == 1
        found = judge_sides(read_side([one, copy]), read_side([other]), Options())
        assert found.points[0].rows[0].launches == (1, 1)

    def test_copies_of_an_imported_run_count_once(self, tmp_path: Path) -> None:
        """Imports have no start time."""
        record = msgspec.structs.replace(build.make_ok_record(build.make_point()), started_at="", origin="vllm")
        sides = [
            read_side([build.write_records(tmp_path / side / str(i), [record]) for i in range(4)]) for side in "ab"
        ]
        assert judge_sides(*sides, Options()).points[0].rows[0].launches == (1, 1)

    def test_replays_with_the_same_step_times_are_one_measurement(self, tmp_path: Path) -> None:
        """The step times were measured once, independent of the number of replays."""
        point = serving.make_point(changed={"mode": "replay"})

        def replay(name: str, moment: str) -> Path:
            record = serving.make_served_record(point)
            conditions = msgspec.structs.replace(record.conditions, step_times="v3/step-times/x.json")
            return build.write_records(
                tmp_path / name, [msgspec.structs.replace(record, conditions=conditions, started_at=moment)]
            )

        found = judge_sides(read_side([replay("1", "a"), replay("2", "b")]), read_side([replay("3", "c")]), Options())
        assert {row.launches for row in found.points[0].rows if row.sampled} == {(1, 1)}

    def test_variants_are_matched_across_their_differing_field(self, tmp_path: Path) -> None:
        a = [
            build.make_ok_record(build.make_point(Layout(4, 1, 4), exchange="ag_rs")),
            build.make_ok_record(build.make_point(Layout(4))),
        ]
        b = [
            build.make_ok_record(build.make_point(Layout(4, 1, 4), exchange="symm")),
            build.make_ok_record(build.make_point(Layout(4))),
        ]
        assert len(compare_records(tmp_path, a, b).points) == 1
        left, right = read_side([tmp_path / "a"]), read_side([tmp_path / "b"])
        assert sides.find_differing_fields(left, right) == ["exchange"]
        found = judge_sides(left, right, Options(across=("exchange",)))
        assert [(p.name, p.other_name) for p in found.points if p.other_name] == [
            (
                "kimi-k2 tp4·dcp4 ep4 flashinfer ag_rs, 8 × 4,000 tokens",
                "kimi-k2 tp4·dcp4 ep4 flashinfer symm, 8 × 4,000 tokens",
            )
        ]

    def test_ambiguous_and_unknown_across_fields_are_refused(self, tmp_path: Path) -> None:
        a = [build.make_ok_record(build.make_point(Layout(4, 1, 4), exchange=x)) for x in ("ag_rs", "symm")]
        with pytest.raises(UsageError, match="several points of A become the same point"):
            compare_records(tmp_path, a, a, across=("exchange",))
        with pytest.raises(UsageError, match="--across exchang: no point has that"):
            compare_records(tmp_path, a, a, across=("exchang",))

    def test_points_can_be_matched_across_policy_and_not_across_mode(self, tmp_path: Path) -> None:
        a = [serving.make_served_record(serving.make_point(changed={"policy": "mixed"}))]
        b = [serving.make_served_record(serving.make_point(changed={"policy": "prefill-first"}))]
        assert len(compare_records(tmp_path, a, b, across=("policy",)).points) == 1
        with pytest.raises(UsageError, match="no point has that"):
            compare_records(tmp_path, a, b, across=("mode",))

    def test_error_without_common_points_lists_points_of_each_side(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"A has kimi-k2 tp4.*B has kimi-k2 tp2"):
            compare_records(
                tmp_path,
                [build.make_ok_record(build.make_point(Layout(4)))],
                [build.make_ok_record(build.make_point(Layout(2)))],
            )

    def test_folder_without_records_raises_records_error(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="name the folder of a run"):
            read_side([tmp_path])


class TestVerdicts:
    def test_verdict_is_faster_if_all_launches_are_faster(self, tmp_path: Path) -> None:
        found = compare_launches(tmp_path, 4, faster=1.05)
        assert found.counts["FASTER"] == 4
        row = found.points[0].rows[0]
        assert row.ratio == pytest.approx(1 / 1.05, abs=0.01)
        assert row.high < 1
        assert row.differs
        assert row.judged

    def test_verdict_is_slower_or_same(self, tmp_path: Path) -> None:
        assert compare_launches(tmp_path / "x", 4, faster=0.95).counts["SLOWER"] == 4
        same = compare_launches(tmp_path / "y", 6)
        assert same.points[0].rows[0].verdict == "SAME"
        assert 0.99 < same.points[0].rows[0].low < 1 < same.points[0].rows[0].high < 1.01

    @pytest.mark.parametrize(("launches", "missing"), [(1, 3), (2, 2), (3, 1)])
    def test_fewer_than_four_launches_are_not_judged(self, launches: int, missing: int, tmp_path: Path) -> None:
        """A difference of 30 % between launches that scatter by 0.2 % may still be chance."""
        found = compare_launches(tmp_path, launches, faster=1.3)
        sampled = [row for p in found.points for row in p.rows if row.sampled]
        assert {row.verdict for row in sampled} == {"UNDECIDED"}
        assert {(row.judged, row.low, row.p_differs) for row in sampled} == {(False, None, None)}
        assert {(row.missing_launches, row.more_launches) for row in sampled} == {((missing, missing), missing)}
        assert f"{launches:,} of B cannot show how launches scatter; verdicts need 4 of each side" in sampled[0].reason
        assert "add them with --with-a RUN and --with-b RUN; or let `dcpbench ab` launch" in found.notes[0]
        assert found.tests == 0
        assert compare_launches(tmp_path / "given", launches, faster=1.3, launch_noise=0.02).counts["FASTER"] == 4

    def test_single_launch_is_not_judged_by_scatter_of_the_other_side(self, tmp_path: Path) -> None:
        """Six launches of 0.3 % give no scatter for a side that scatters by 2 %: its one launch needs three more."""
        one = read_side([write_launches(tmp_path / "a", 1, seed=1, cv=0.02)])
        six = read_side([write_launches(tmp_path / "b", 6, seed=2, cv=0.003)])
        found = judge_sides(one, six, Options(metrics=("step_time",)))
        assert {row.missing_launches for p in found.points for row in p.rows} == {(3, 0)}
        assert found.counts == {"UNDECIDED": 4}
        assert (
            "measure 3 more launches of A, each with an -o of its own, and add them with --with-a RUN;"
            in found.notes[0]
        )

    def test_repeats_of_one_launch_do_not_replace_launches(self, tmp_path: Path) -> None:
        """Ten repeats that agree to 0.01 % and are 3 % apart are undecided, unless the user declares launches to be
        equal.
        """

        def side(ms: float) -> list[Record]:
            return [build.make_ok_record(build.make_point(repeat=n), median_ms=ms, noise=1e-4) for n in range(10)]

        found = compare_records(tmp_path, side(10), side(10.3))
        assert get_verdicts(found)["step_time"] == "UNDECIDED"
        equal = compare_records(tmp_path, side(10), side(10.3), launch_noise=0.0)
        assert get_verdicts(equal)["step_time"] == "SLOWER"

    def test_undecided_row_has_number_of_launches_that_would_decide_it(self, tmp_path: Path) -> None:
        a = write_launches(tmp_path / "a", 4, seed=1, cv=0.01)
        b = write_launches(tmp_path / "b", 4, seed=5, cv=0.01, faster=1.02)
        found = judge_sides(read_side([a]), read_side([b]), Options(metrics=("step_time",)))
        open_rows = [row for p in found.points for row in p.rows if row.verdict == "UNDECIDED"]
        assert open_rows
        for row in open_rows:
            assert row.judged
            assert row.more_launches is None or f"about {row.more_launches} more launch" in row.reason
            assert row.reason

    def test_counts_are_compared_without_statistics(self, tmp_path: Path) -> None:
        """One more synchronisation in a step is MORE; memory within the margin is the same."""
        p = build.make_point()
        b = build.make_ok_record(p, host_syncs_per_step=1.0, memory_peak_bytes=int((131 << 30) * 1.005))
        found = get_verdicts(compare_records(tmp_path, [build.make_ok_record(p)], [b]))
        assert (found["syncs"], found["memory"], found["kv_capacity"]) == ("MORE", "SAME", "SAME")

    def test_cpu_times_are_judged_only_with_allow_cpu(self, tmp_path: Path) -> None:
        p = build.make_point(model="tiny")
        a, b = [build.make_cpu_record(p, median_ms=10)], [build.make_cpu_record(p, median_ms=20)]
        found = compare_records(tmp_path, a, b)
        assert found.cpu
        assert not found.performance
        assert [(r.verdict, r.reason) for r in found.points[0].rows if r.metric == "step_time"] == [
            ("UNDECIDED", CPU_REASON)
        ]
        assert get_verdicts(compare_records(tmp_path, a, b, allow_cpu=True, launch_noise=0.02))["step_time"] == "SLOWER"

    @pytest.mark.parametrize(
        ("uncertainty", "verdict"), [((0.0, 0.0), "FASTER"), ((0.02, 0.02), "FASTER"), ((0.3, 0.3), "UNDECIDED")]
    )
    @pytest.mark.parametrize("both", [False, True], ids=["one side", "both sides"])
    def test_verdict_on_a_forecast_holds_at_its_ends(
        self, uncertainty: tuple[float, float], verdict: str, both: bool, tmp_path: Path
    ) -> None:
        """10 ms become 8: with ends of 30 % either side may be the faster one, and more launches do not decide it."""
        a, b = make_forecast(10, uncertainty if both else (0.0, 0.0)), make_forecast(8, uncertainty)
        found = compare_records(tmp_path, [a], [b], metrics=("step_time",), launch_noise=0.02)
        assert found.forecast
        assert found.points[0].forecast == ["a", "b"]
        (row,) = found.points[0].rows
        assert (row.verdict, row.reason) == (verdict, WITHIN_ENDS if verdict == "UNDECIDED" else "")
        assert row.more_launches is None
        (plain,) = (
            compare_records(
                tmp_path / "plain",
                [make_forecast(10, (0, 0))],
                [make_forecast(8, (0, 0))],
                metrics=("step_time",),
                launch_noise=0.02,
            )
            .points[0]
            .rows
        )
        below, above = (1 - uncertainty[0]), (1 + uncertainty[1])
        low, high = below / (above if both else 1), above / (below if both else 1)
        assert (row.low, row.high) == (pytest.approx(plain.low * low), pytest.approx(plain.high * high))
        assert row.ratio == plain.ratio == pytest.approx(0.8)

    def test_forecast_with_an_end_within_the_margin_is_undecided(self, tmp_path: Path) -> None:
        """10 ms become 9.7, or 9.95 at the end: a ratio within the margin of 1 %."""
        (row,) = (
            compare_records(
                tmp_path,
                [make_forecast(10, (0, 0))],
                [make_forecast(9.7, (0.026, 0.026))],
                metrics=("step_time",),
                launch_noise=0.0005,
            )
            .points[0]
            .rows
        )
        assert (row.verdict, row.reason) == ("UNDECIDED", WITHIN_ENDS)

    def test_equal_forecasts_with_wide_ends_are_not_same(self, tmp_path: Path) -> None:
        """The sides are equal to the digit, and each may be off by 5 %."""
        certain, uncertain = (
            compare_records(
                tmp_path / f"{share}",
                *[[make_forecast(10, (share, share))]] * 2,
                metrics=("step_time",),
                launch_noise=0.001,
            )
            for share in (0.0, 0.05)
        )
        assert get_verdicts(certain) == {"step_time": "SAME"}
        assert [(r.verdict, r.reason) for r in uncertain.points[0].rows] == [("UNDECIDED", WITHIN_ENDS)]

    def make_served_launches(self, folder: Path, ends: float | None) -> PointResult:
        """Write four launches of a forecast with these ends, and four measured ones that are 1.5 times as fast."""
        for side, on, by in (("a", "H200", 1.0), ("b", "", 1.5)):
            for n in range(4):
                record = serving.make_served_record(
                    serving.make_point(changed={"mode": "replay"}, emulate=on), faster=by * (1 + 0.001 * n)
                )
                known = {} if ends is None else make_ends(record, ends)
                modelled = make_emulated(**known) if on else None
                build.write_records(
                    folder / side / f"{n}",
                    [msgspec.structs.replace(record, emulated=modelled, started_at=f"{side}{n}")],
                )
        a, b = read_side([folder / "a"]), read_side([folder / "b"])
        (point,) = judge_sides(a, b, Options(across=("emulate",))).points
        return point

    def test_metrics_without_forecast_ends_are_not_judged(self, tmp_path: Path) -> None:
        """Only output, TTFT p50 and ITL p50 of served loads have ends; other metrics stay unjudged, even if the other
        side was measured.
        """
        point = self.make_served_launches(tmp_path, 0.01)
        assert point.forecast == ["a"]
        judged = {row.metric for row in point.rows if row.low is not None}
        assert judged == {"tok_s", "ttft_p50", "itl_p50"}
        for row in point.rows:
            if row.sampled:
                assert (row.reason == NO_ENDS) == (row.metric not in judged)
                assert row.verdict == ("FASTER" if row.metric in judged else "UNDECIDED"), row.metric
        assert point.without_ends == [row.title for row in point.rows if row.sampled and row.metric not in judged]
        assert {row.verdict for row in point.rows if not row.sampled} == {"SAME"}, (
            "capacity is counted and not forecast"
        )

    def test_forecast_without_any_ends_is_not_judged(self, tmp_path: Path) -> None:
        assert {row.reason for row in self.make_served_launches(tmp_path, None).rows if row.sampled} == {NO_ENDS}

    def test_metric_missing_on_one_side_is_listed_as_not_compared(self, tmp_path: Path) -> None:
        p = build.make_point()
        found = compare_records(
            tmp_path, [build.make_ok_record(p)], [build.make_ok_record(p, host_syncs_per_step=None)]
        )
        assert "syncs" not in get_verdicts(found)
        assert list(map(str, found.points[0].not_compared)) == ["host syncs (absent in B)"]

    def test_served_points_without_samples_are_undecided(self, tmp_path: Path) -> None:
        point = serving.make_point()
        found = compare_records(
            tmp_path,
            [serving.make_served_record(point)],
            [serving.make_served_record(point, faster=1.5)],
            launch_noise=0.02,
        )
        row = next(r for r in found.points[0].rows if r.metric == "tok_s")
        assert row.verdict == "UNDECIDED"
        assert row.low is None
        assert (row.judged, row.reason) == (False, NO_SAMPLES)

    def test_request_samples_give_the_interval_of_a_single_launch(self, tmp_path: Path) -> None:
        """B's 60 requests are those of A, each 1.2 times as long: the assumed noise of launches remains."""
        point = serving.make_point()

        def side(name: str, factor: float) -> list[Run]:
            tokens = [[n + 0.5 * factor * (1 + n % 7) + 0.01 * factor * k for k in range(40)] for n in range(60)]
            rows = [
                Row(
                    number=n,
                    outcome="finished",
                    reason=None,
                    submitted_s=float(n),
                    first_token_s=times[0],
                    end_s=times[-1],
                    input_tokens=400,
                    output_tokens=40,
                    cached_tokens=0,
                    preemptions=0,
                    replica=0,
                    token_s=times,
                    tokens=[],
                )
                for n, times in enumerate(tokens)
            ]
            file = write_samples(tmp_path / name, point, rows)
            record = serving.make_served_record(point)
            metrics = msgspec.structs.replace(
                record.serve, samples_file=file, ttft_ms=Latencies(p50=2000 * factor, samples=60)
            )
            record = msgspec.structs.replace(record, serve=metrics, started_at=name)
            return read_side([build.write_records(tmp_path / name, [record])])

        found = judge_sides(side("a", 1.0), side("b", 1.2), Options(metrics=("ttft_p50",), launch_noise=0.02))
        (row,) = found.points[0].rows
        assert row.verdict == "SLOWER"
        assert row.low == pytest.approx(1.2 * math.exp(-1.96 * 0.02), rel=1e-3)
        assert row.high == pytest.approx(1.2 * math.exp(1.96 * 0.02), rel=1e-3)

    def test_served_points_of_several_launches_need_no_samples(self, tmp_path: Path) -> None:
        """Throughput is higher and latencies are lower: all metrics are FASTER."""
        point = serving.make_point()
        for side, by in (("a", 1.0), ("b", 1.2)):
            for n in range(4):
                record = serving.make_served_record(point, faster=by * (1 + 0.001 * n))
                build.write_records(
                    tmp_path / side / f"{n}", [msgspec.structs.replace(record, started_at=f"{side}{n}")]
                )
        found = judge_sides(read_side([tmp_path / "a"]), read_side([tmp_path / "b"]), Options())
        verdicts = get_verdicts(found)
        assert verdicts["tok_s"] == verdicts["itl_p50"] == verdicts["e2el_p50"] == "FASTER"

    def test_only_chosen_metrics_are_compared(self, tmp_path: Path) -> None:
        found = compare_records(
            tmp_path,
            [build.make_ok_record(build.make_point())],
            [build.make_ok_record(build.make_point())],
            metrics=("slower", "memory"),
        )
        assert set(get_verdicts(found)) == {"step_time", "memory"}

    def test_common_drift_of_rounds_cancels_only_in_pairs(self, tmp_path: Path) -> None:
        """Each round is 3 % slower than the one before; B is 2 % faster in every one."""
        rng = np.random.default_rng(3)
        for n in range(6):
            for side, by in (("a", 1.0), ("b", 1.02)):
                build.write_records(
                    tmp_path / side / f"round-{n}", make_launch(rng, "normal", cv=0.001, faster=by / 1.03**n)
                )
        a, b = read_side([tmp_path / "a"]), read_side([tmp_path / "b"])
        assert judge_sides(a, b, Options(metrics=("step_time",))).counts == {"UNDECIDED": 4}
        assert judge_sides(a, b, Options(metrics=("step_time",), paired=True)).counts == {"FASTER": 4}
        with pytest.raises(UsageError, match="as many launches of A as of B, not 6 and 5"):
            judge_sides(a, b[:5], Options(paired=True))


class TestDifferences:
    def test_differences_of_conditions_are_listed_with_both_values(self, tmp_path: Path) -> None:
        p = build.make_point()
        env = msgspec.structs.replace(build.GPU, driver="580.2", settings={"NCCL_ALGO": "Ring", "API_TOKEN": "s3cret"})
        a = build.make_ok_record(p)
        b = build.make_ok_record(
            p, environment=env, warnings=["throttled"], gpu=msgspec.structs.replace(a.gpu, sm_clock_mhz_min=1500)
        )
        found = compare_records(tmp_path, [a], [b])
        values = {d.what: (d.a, d.b) for d in found.differences}
        assert values["driver"] == ("570.1", "580.2")
        assert values["NCCL_ALGO"] == ("none", "Ring")
        assert values["lowest SM clock"] == ("1830 MHz", "1500 MHz")
        assert values["warnings"] == ("none", "throttled")
        assert "torch" not in values
        assert "s3cret" not in str(found.differences)


def test_margin_is_stated_in_percent(tmp_path: Path) -> None:
    """A margin of 0.02 is 2 %."""
    one = [build.make_ok_record(build.make_point(Layout(4)), steps=20)]
    assert "SAME: within 2 %." in comparison_text.format_method(
        compare_records(tmp_path, one, one, margin=0.02, launch_noise=0.02)
    )
