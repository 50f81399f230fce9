"""`dcpbench compare`: which points are compared, and what is said of them."""

from __future__ import annotations

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
    compared,
    emulated,
    forecast_steps,
    launch,
    of_launches,
    write_launches,
)
from tests.unit.kept_runs import RESULTS, RUNS

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.compare.comparison import Comparison, PointResult
    from dcpbench.records.record import Record

DECODE = RESULTS / "decode_4xH200/decode-deepseek-v3-kimi-k2_4xH200_2026-11-20"


def with_ends(record: Record, share: float) -> dict[str, float]:
    """Ends of a served forecast, so far below and above what it says."""
    found = record.serve
    values = {"output_tok_s": found.output_tok_s, "ttft_p50_ms": found.ttft_ms.p50, "itl_p50_ms": found.itl_ms.p50}
    return {f"{n}_{end}": v * by for n, v in values.items() for end, by in (("low", 1 - share), ("high", 1 + share))}


def rows(c: Comparison) -> dict[str, str]:
    """Verdict by metric, of one point."""
    (point,) = c.points
    return {row.metric: row.verdict for row in point.rows}


class TestRealRecords:
    def test_two_passes_of_one_sweep_are_not_called_different(self) -> None:
        """run1 and run2 ran the same 55 points one after the other; launches moved whole layouts by up to 0.85 %."""
        found = judge_sides(read_side([DECODE / "run1"]), read_side([DECODE / "run2"]), Options(launch_noise=0.02))
        assert len(found.points) == 55
        assert found.tests == 55
        assert set(found.counts) <= {"SAME", "UNDECIDED"}
        assert len(found.only_a) == 9
        unknown = judge_sides(read_side([DECODE / "run1"]), read_side([DECODE / "run2"]), Options())
        assert unknown.tests == 0
        assert {row.verdict for p in unknown.points for row in p.rows if row.sampled} == {"UNDECIDED"}

    def test_a_run_is_no_faster_than_itself(self) -> None:
        found = judge_sides(read_side([DECODE / "run1"]), read_side([DECODE / "run1"]), Options())
        assert set(found.counts) <= {"SAME", "UNDECIDED"}
        assert any("with themselves" in note for note in found.notes)

    def test_a_run_and_a_copy_of_it_are_called_that(self, tmp_path: Path) -> None:
        """Else a table without differences would be taken for a change that did none."""
        shutil.copytree(DECODE / "run2", tmp_path / "copy")
        two, copy = read_side([DECODE / "run2"]), read_side([tmp_path / "copy"])
        said = "as copies of one run do: they are compared with themselves, which says nothing about a change."
        assert f"A and B hold the same records, {said}" in judge_sides(two, copy, Options()).notes

        (one,), measured = read_side([DECODE / "run1"]), [r for r in two[0].records if r.outcome == "ok"]
        build.write(tmp_path / "both", [*one.records, *measured[:3]])
        found = judge_sides(read_side([tmp_path / "both"]), copy, Options())
        assert f"A and B hold the same records of 3 of {len(found.points)} points, {said}" in found.notes
        assert not any("same records" in note for note in judge_sides([one], two, Options()).notes)

    @pytest.mark.parametrize("folder", RUNS, ids=lambda p: p.name)
    @pytest.mark.sample(5)
    def test_every_run_that_is_kept_can_be_compared_with_itself(self, folder: Path) -> None:
        """Decode, live and replay, with and without files of samples."""
        found = judge_sides(read_side([folder]), read_side([folder]), Options())
        assert not {"FASTER", "SLOWER", "MORE", "FEWER"} & set(found.counts)

    def test_a_live_run_is_not_compared_with_its_replay(self) -> None:
        (one,) = read_side([RESULTS / "serving_4xH200/serving-deepseek-v3-kimi-k2_4xH200_2026-11-21" / "v3-pressure"])
        by_mode = {r.point.load.mode: [r] for r in one.records}
        a, b = ([Run(mode, one.folder, by_mode[mode])] for mode in ("live", "replay"))
        with pytest.raises(
            UsageError, match=r"no measured point in common: A has .*, live, B has .*, replay;"
        ) as refused:
            judge_sides(a, b, Options())
        assert "replay, replay" not in str(refused.value)
        assert str(refused.value).endswith("; measure the same points in both.")

    def test_points_that_differ_are_compared_with_the_option_that_is_named(self) -> None:
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
    def test_points_of_one_side_are_listed_and_so_are_those_that_failed(self, tmp_path: Path) -> None:
        p = [build.point(Layout(4), concurrency=n) for n in (8, 16, 32)]
        found = compared(
            tmp_path, [build.ok(p[0]), build.ok(p[1])], [build.ok(p[0]), build.failed(p[1]), build.ok(p[2])]
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
        a = [build.ok(build.point(repeat=n), median_ms=10) for n in range(3)]
        found = compared(tmp_path, a, a[:1])
        assert found.points[0].rows[0].repeats == (3, 1)

    def test_what_resume_measured_again_replaces_what_was_there(self, tmp_path: Path) -> None:
        old, new = (build.ok(build.point(), median_ms=ms, started_at=f"{ms}") for ms in (20, 10))
        found = compared(tmp_path, [build.failed(build.point()), old, new], [new])
        assert found.points[0].rows[0].ratio == 1

    def test_folders_of_a_folder_are_launches_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        for n in (10, 9, 1):
            build.write(tmp_path / f"round-{n}", [build.ok(build.point())])
        assert [x.folder.name for x in read_side([tmp_path])] == ["round-1", "round-9", "round-10"]

    def test_a_folder_named_twice_and_a_copied_record_count_once(self, tmp_path: Path) -> None:
        one = build.write(tmp_path / "one", [build.ok(build.point())])
        copy = build.write(tmp_path / "copy", [build.ok(build.point())])
        other = build.write(tmp_path / "other", [build.ok(build.point(), started_at="later")])
        assert len(read_side([one, one])) == 1
        found = judge_sides(read_side([one, copy]), read_side([other]), Options())
        assert found.points[0].rows[0].launches == (1, 1)

    def test_replays_by_the_same_step_times_are_one_measurement(self, tmp_path: Path) -> None:
        """However often a file is replayed, it was measured once."""
        of = serving.point(changed={"mode": "replay"})

        def replay(name: str, moment: str) -> Path:
            record = serving.served(of)
            conditions = msgspec.structs.replace(record.conditions, step_times="v3/step-times/x.json")
            return build.write(
                tmp_path / name, [msgspec.structs.replace(record, conditions=conditions, started_at=moment)]
            )

        found = judge_sides(read_side([replay("1", "a"), replay("2", "b")]), read_side([replay("3", "c")]), Options())
        assert {row.launches for row in found.points[0].rows if row.sampled} == {(1, 1)}

    def test_variants_are_matched_across_the_field_that_they_differ_in(self, tmp_path: Path) -> None:
        a = [build.ok(build.point(Layout(4, 1, 4), exchange="ag_rs")), build.ok(build.point(Layout(4)))]
        b = [build.ok(build.point(Layout(4, 1, 4), exchange="symm")), build.ok(build.point(Layout(4)))]
        assert len(compared(tmp_path, a, b).points) == 1
        left, right = read_side([tmp_path / "a"]), read_side([tmp_path / "b"])
        assert sides.find_differing_fields(left, right) == ["exchange"]
        found = judge_sides(left, right, Options(across=("exchange",)))
        assert [(p.name, p.other_name) for p in found.points if p.other_name] == [
            (
                "kimi-k2 tp4·dcp4 ep4 flashinfer ag_rs, 8 × 4,000 tokens",
                "kimi-k2 tp4·dcp4 ep4 flashinfer symm, 8 × 4,000 tokens",
            )
        ]

    def test_a_point_that_could_be_compared_with_several_is_refused(self, tmp_path: Path) -> None:
        a = [build.ok(build.point(Layout(4, 1, 4), exchange=x)) for x in ("ag_rs", "symm")]
        with pytest.raises(UsageError, match="several points of A are the same"):
            compared(tmp_path, a, a, across=("exchange",))
        with pytest.raises(UsageError, match="--across exchang: no point has that"):
            compared(tmp_path, a, a, across=("exchang",))

    def test_a_variant_of_the_load_can_be_left_out_too_and_the_mode_cannot(self, tmp_path: Path) -> None:
        a = [serving.served(serving.point(changed={"policy": "mixed"}))]
        b = [serving.served(serving.point(changed={"policy": "prefill-first"}))]
        assert len(compared(tmp_path, a, b, across=("policy",)).points) == 1
        with pytest.raises(UsageError, match="no point has that"):
            compared(tmp_path, a, b, across=("mode",))

    def test_nothing_in_common_says_what_each_side_has(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"A has kimi-k2 tp4.*B has kimi-k2 tp2"):
            compared(tmp_path, [build.ok(build.point(Layout(4)))], [build.ok(build.point(Layout(2)))])

    def test_a_folder_without_records_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RecordsError, match="name the folder of a run"):
            read_side([tmp_path])


class TestVerdicts:
    def test_b_is_faster_where_all_launches_say_so(self, tmp_path: Path) -> None:
        found = of_launches(tmp_path, 4, faster=1.05)
        assert found.counts["FASTER"] == 4
        row = found.points[0].rows[0]
        assert row.ratio == pytest.approx(1 / 1.05, abs=0.01)
        assert row.high < 1
        assert row.differs
        assert row.judged

    def test_b_is_slower_and_the_same(self, tmp_path: Path) -> None:
        assert of_launches(tmp_path / "x", 4, faster=0.95).counts["SLOWER"] == 4
        same = of_launches(tmp_path / "y", 6)
        assert same.points[0].rows[0].verdict == "SAME"
        assert 0.99 < same.points[0].rows[0].low < 1 < same.points[0].rows[0].high < 1.01

    @pytest.mark.parametrize(("launches", "missing"), [(1, 3), (2, 2), (3, 1)])
    def test_fewer_than_four_launches_are_not_judged_however_far_apart(
        self, launches: int, missing: int, tmp_path: Path
    ) -> None:
        """A difference of 30 % between launches that scatter by 0.2 %: nothing has shown that it is not chance."""
        found = of_launches(tmp_path, launches, faster=1.3)
        sampled = [row for p in found.points for row in p.rows if row.sampled]
        assert {row.verdict for row in sampled} == {"UNDECIDED"}
        assert {(row.judged, row.low, row.p_differs) for row in sampled} == {(False, None, None)}
        assert {(row.missing_launches, row.more_launches) for row in sampled} == {((missing, missing), missing)}
        assert f"{launches:,} of B cannot show how launches scatter; verdicts need 4 of each side" in sampled[0].reason
        assert "add them with --with-a RUN and --with-b RUN; or let `dcpbench ab` launch" in found.notes[0]
        assert found.tests == 0
        assert of_launches(tmp_path / "given", launches, faster=1.3, launch_noise=0.02).counts["FASTER"] == 4

    def test_one_launch_against_many_is_not_judged_by_the_scatter_of_the_many(self, tmp_path: Path) -> None:
        """Six launches of 0.3 % say nothing about one of a side that scatters by 2 %: it needs three more."""
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
        """Ten repeats that agree to 0.01 %, and 3 % apart: undecided, unless the user knows that launches are equal."""

        def side(ms: float) -> list[Record]:
            return [build.ok(build.point(repeat=n), median_ms=ms, noise=1e-4) for n in range(10)]

        found = compared(tmp_path, side(10), side(10.3))
        assert rows(found)["step_time"] == "UNDECIDED"
        equal = compared(tmp_path, side(10), side(10.3), launch_noise=0.0)
        assert rows(equal)["step_time"] == "SLOWER"

    def test_an_undecided_row_says_how_many_launches_would_decide_it(self, tmp_path: Path) -> None:
        a = write_launches(tmp_path / "a", 4, seed=1, cv=0.01)
        b = write_launches(tmp_path / "b", 4, seed=5, cv=0.01, faster=1.02)
        found = judge_sides(read_side([a]), read_side([b]), Options(metrics=("step_time",)))
        open_rows = [row for p in found.points for row in p.rows if row.verdict == "UNDECIDED"]
        assert open_rows
        for row in open_rows:
            assert row.judged
            assert row.more_launches is None or f"about {row.more_launches} more launch" in row.reason
            assert row.reason

    def test_counts_need_no_statistics(self, tmp_path: Path) -> None:
        """One more sync a step is one more; memory within the margin is the same."""
        p = build.point()
        b = build.ok(p, host_syncs_per_step=1.0, memory_peak_bytes=int((131 << 30) * 1.005))
        found = rows(compared(tmp_path, [build.ok(p)], [b]))
        assert (found["syncs"], found["memory"], found["kv_capacity"]) == ("MORE", "SAME", "SAME")

    def test_a_cpu_claims_nothing_unless_it_is_asked_to(self, tmp_path: Path) -> None:
        p = build.point(model="tiny")
        a, b = [build.on_cpu(p, median_ms=10)], [build.on_cpu(p, median_ms=20)]
        found = compared(tmp_path, a, b)
        assert found.cpu
        assert not found.performance
        assert [(r.verdict, r.reason) for r in found.points[0].rows if r.metric == "step_time"] == [
            ("UNDECIDED", CPU_REASON)
        ]
        assert rows(compared(tmp_path, a, b, allow_cpu=True, launch_noise=0.02))["step_time"] == "SLOWER"

    @pytest.mark.parametrize(
        ("unsure", "verdict"), [((0.0, 0.0), "FASTER"), ((0.02, 0.02), "FASTER"), ((0.3, 0.3), "UNDECIDED")]
    )
    @pytest.mark.parametrize("both", [False, True], ids=["one side", "both sides"])
    def test_a_verdict_on_a_forecast_holds_for_its_ends(
        self, unsure: tuple[float, float], verdict: str, both: bool, tmp_path: Path
    ) -> None:
        """10 ms that become 8: with ends of 30 % either may be the faster one, and no launch more decides it."""
        a, b = forecast_steps(10, unsure if both else (0.0, 0.0)), forecast_steps(8, unsure)
        found = compared(tmp_path, [a], [b], metrics=("step_time",), launch_noise=0.02)
        assert found.forecast
        assert found.points[0].forecast == ["a", "b"]
        (row,) = found.points[0].rows
        assert (row.verdict, row.reason) == (verdict, WITHIN_ENDS if verdict == "UNDECIDED" else "")
        assert row.more_launches is None
        (plain,) = (
            compared(
                tmp_path / "plain",
                [forecast_steps(10, (0, 0))],
                [forecast_steps(8, (0, 0))],
                metrics=("step_time",),
                launch_noise=0.02,
            )
            .points[0]
            .rows
        )
        below, above = (1 - unsure[0]), (1 + unsure[1])
        low, high = below / (above if both else 1), above / (below if both else 1)
        assert (row.low, row.high) == (pytest.approx(plain.low * low), pytest.approx(plain.high * high))
        assert row.ratio == plain.ratio == pytest.approx(0.8)

    def test_nor_is_one_whose_nearer_end_is_within_the_margin(self, tmp_path: Path) -> None:
        """10 ms that become 9.7, or 9.95 at the end: a ratio within the margin of 1 %."""
        (row,) = (
            compared(
                tmp_path,
                [forecast_steps(10, (0, 0))],
                [forecast_steps(9.7, (0.026, 0.026))],
                metrics=("step_time",),
                launch_noise=0.0005,
            )
            .points[0]
            .rows
        )
        assert (row.verdict, row.reason) == ("UNDECIDED", WITHIN_ENDS)

    def test_a_forecast_is_not_called_the_same_within_its_ends(self, tmp_path: Path) -> None:
        """Sides that agree to the digit and may be 5 % off each."""
        sure, unsure = (
            compared(
                tmp_path / f"{share}",
                *[[forecast_steps(10, (share, share))]] * 2,
                metrics=("step_time",),
                launch_noise=0.001,
            )
            for share in (0.0, 0.05)
        )
        assert rows(sure) == {"step_time": "SAME"}
        assert [(r.verdict, r.reason) for r in unsure.points[0].rows] == [("UNDECIDED", WITHIN_ENDS)]

    def served_launches(self, folder: Path, ends: float | None) -> PointResult:
        """Four launches of a forecast, its ends so far off, and of what was measured, half as fast again."""
        for side, on, by in (("a", "H200", 1.0), ("b", "", 1.5)):
            for n in range(4):
                record = serving.served(
                    serving.point(changed={"mode": "replay"}, emulate=on), faster=by * (1 + 0.001 * n)
                )
                known = {} if ends is None else with_ends(record, ends)
                wire = emulated(**known) if on else None
                build.write(
                    folder / side / f"{n}", [msgspec.structs.replace(record, emulated=wire, started_at=f"{side}{n}")]
                )
        a, b = read_side([folder / "a"]), read_side([folder / "b"])
        (point,) = judge_sides(a, b, Options(across=("emulate",))).points
        return point

    def test_what_a_forecast_has_no_ends_for_is_not_judged(self, tmp_path: Path) -> None:
        """Only output, TTFT p50 and ITL p50 of served loads have ends; other metrics stay unjudged, even if the other side was measured."""
        point = self.served_launches(tmp_path, 0.01)
        assert point.forecast == ["a"]
        judged = {row.metric for row in point.rows if row.low is not None}
        assert judged == {"tok_s", "ttft_p50", "itl_p50"}
        for row in point.rows:
            if row.sampled:
                assert (row.reason == NO_ENDS) == (row.metric not in judged)
                assert row.verdict == ("FASTER" if row.metric in judged else "UNDECIDED"), row.metric
        assert point.without_ends == [row.title for row in point.rows if row.sampled and row.metric not in judged]
        assert {row.verdict for row in point.rows if not row.sampled} == {"SAME"}, (
            "capacity is counted, and no forecast"
        )

    def test_a_forecast_of_before_there_were_ends_is_not_judged_at_all(self, tmp_path: Path) -> None:
        assert {row.reason for row in self.served_launches(tmp_path, None).rows if row.sampled} == {NO_ENDS}

    def test_a_metric_that_one_side_lacks_is_named_and_not_invented(self, tmp_path: Path) -> None:
        p = build.point()
        found = compared(tmp_path, [build.ok(p)], [build.ok(p, host_syncs_per_step=None)])
        assert "syncs" not in rows(found)
        assert list(map(str, found.points[0].not_compared)) == ["host syncs (absent in B)"]

    def test_served_points_without_samples_beside_them_say_so(self, tmp_path: Path) -> None:
        of = serving.point()
        found = compared(tmp_path, [serving.served(of)], [serving.served(of, faster=1.5)], launch_noise=0.02)
        row = next(r for r in found.points[0].rows if r.metric == "tok_s")
        assert row.verdict == "UNDECIDED"
        assert row.low is None
        assert (row.judged, row.reason) == (False, NO_SAMPLES)

    def test_requests_beside_the_records_say_how_well_one_launch_knows_its_numbers(self, tmp_path: Path) -> None:
        """B's 60 requests are those of A, each 1.2 times as long: what is left is the assumed noise of launches."""
        of = serving.point()

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
            file = write_samples(tmp_path / name, of, rows)
            record = serving.served(of)
            metrics = msgspec.structs.replace(
                record.serve, samples_file=file, ttft_ms=Latencies(p50=2000 * factor, samples=60)
            )
            record = msgspec.structs.replace(record, serve=metrics, started_at=name)
            return read_side([build.write(tmp_path / name, [record])])

        found = judge_sides(side("a", 1.0), side("b", 1.2), Options(metrics=("ttft_p50",), launch_noise=0.02))
        (row,) = found.points[0].rows
        assert row.verdict == "SLOWER"
        assert row.low == pytest.approx(1.2 * math.exp(-1.96 * 0.02), rel=1e-3)
        assert row.high == pytest.approx(1.2 * math.exp(1.96 * 0.02), rel=1e-3)

    def test_served_points_of_several_launches_need_no_samples(self, tmp_path: Path) -> None:
        """Throughput is higher and latencies lower: all of it FASTER."""
        of = serving.point()
        for side, by in (("a", 1.0), ("b", 1.2)):
            for n in range(4):
                record = serving.served(of, faster=by * (1 + 0.001 * n))
                build.write(tmp_path / side / f"{n}", [msgspec.structs.replace(record, started_at=f"{side}{n}")])
        found = judge_sides(read_side([tmp_path / "a"]), read_side([tmp_path / "b"]), Options())
        verdicts = rows(found)
        assert verdicts["tok_s"] == verdicts["itl_p50"] == verdicts["e2el_p50"] == "FASTER"

    def test_metrics_can_be_chosen_so_that_fewer_tests_are_corrected_for(self, tmp_path: Path) -> None:
        found = compared(tmp_path, [build.ok(build.point())], [build.ok(build.point())], metrics=("slower", "memory"))
        assert set(rows(found)) == {"step_time", "memory"}

    def test_rounds_that_drift_alike_are_told_apart_only_in_pairs(self, tmp_path: Path) -> None:
        """Each round is 3 % slower than the one before; B is 2 % faster in every one."""
        rng = np.random.default_rng(3)
        for n in range(6):
            for side, by in (("a", 1.0), ("b", 1.02)):
                build.write(tmp_path / side / f"round-{n}", launch(rng, "normal", cv=0.001, faster=by / 1.03**n))
        a, b = read_side([tmp_path / "a"]), read_side([tmp_path / "b"])
        assert judge_sides(a, b, Options(metrics=("step_time",))).counts == {"UNDECIDED": 4}
        assert judge_sides(a, b, Options(metrics=("step_time",), paired=True)).counts == {"FASTER": 4}
        with pytest.raises(UsageError, match="as many launches of A as of B, not 6 and 5"):
            judge_sides(a, b[:5], Options(paired=True))


class TestDifferences:
    def test_what_was_not_the_same_is_listed_with_both_values(self, tmp_path: Path) -> None:
        p = build.point()
        env = msgspec.structs.replace(build.GPU, driver="580.2", settings={"NCCL_ALGO": "Ring", "API_TOKEN": "s3cret"})
        a = build.ok(p)
        b = build.ok(
            p, environment=env, warnings=["throttled"], gpu=msgspec.structs.replace(a.gpu, sm_clock_mhz_min=1500)
        )
        found = compared(tmp_path, [a], [b])
        told = {d.what: (d.a, d.b) for d in found.differences}
        assert told["driver"] == ("570.1", "580.2")
        assert told["NCCL_ALGO"] == ("none", "Ring")
        assert told["lowest SM clock"] == ("1830 MHz", "1500 MHz")
        assert told["warnings"] == ("none", "throttled")
        assert "torch" not in told
        assert "s3cret" not in str(found.differences)


def test_the_margin_of_same_is_said_in_percent(tmp_path: Path) -> None:
    """0.02 is 2 %."""
    one = [build.ok(build.point(Layout(4)), steps=20)]
    assert "SAME: within 2 %." in comparison_text.format_method(
        compared(tmp_path, one, one, margin=0.02, launch_noise=0.02)
    )
