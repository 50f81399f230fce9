"""Replays and forecasts of steps that verify drafts: delivery of tokens, step times, and reports."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import UsageError
from dcpbench.models import SHAPES
from dcpbench.points.budget import plan_engine
from dcpbench.points.cluster_specs import get_limits, load_machine
from dcpbench.points.layout import Layout
from dcpbench.points.roofline import Sharding, StepRows, compute_attention_work, iter_phase_works
from dcpbench.points.settings import Settings
from dcpbench.points.speculation import Speculation
from dcpbench.recommend.estimate import load_published_steps
from dcpbench.recommend.forecast import Estimator, estimate_point, from_record
from dcpbench.records.record import Interval, SpeculationMetrics
from dcpbench.reports import answer
from dcpbench.reports.dataframes import load_frames
from dcpbench.serving.draft_steps import DraftRatios, estimate_draft_steps
from dcpbench.serving.outcome import compute_serve_metrics
from dcpbench.serving.replay import replay_from_file, replay_requests
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.step_times import Case, Chunks, Decodes, get_engine_path, write_step_times
from tests.unit import record_builder, serve_record_builder, test_replay_point
from tests.unit.serving_builder import make_config, make_request
from tests.unit.step_times_builder import make_step_times
from tests.unit.test_replay import Fixed

if TYPE_CHECKING:
    from pathlib import Path

DRAFTS = Speculation(3, (0.85, 0.6, 0.4))
LOAD = msgspec.structs.replace(test_replay_point.LOAD, requests=24)
POINT = msgspec.structs.replace(test_replay_point.POINT, load=LOAD)
DRAFTED = msgspec.structs.replace(POINT, mtp=3, acceptance="0.85/0.6/0.4")
TIMES = make_step_times(path=get_engine_path(POINT))


class TestReplay:
    def test_tokens_of_a_step_are_delivered_together(self) -> None:
        """A step of one request takes 11 ms, that of its prompt of 3 tokens 16. Step k yields 1 + accepted tokens at 16
        + 11·k ms: gaps are 11 ms before the first of them and 0 before the others; the last step yields the rest of 12.
        """
        setup = make_config(speculation=DRAFTS)
        found = replay_requests([make_request(0, 3, 12)], Scheduler(setup), 1, Fixed())  # type: ignore[arg-type]
        expected, at = [16.0], 16.0
        for step in itertools.count():
            at += 11.0
            expected += [at] * (1 + DRAFTS.count_accepted(0, 0, step))
            if len(expected) >= 12:
                break
        (sample,) = found.traffic.samples
        assert [s * 1e3 for s in sample.token_s] == pytest.approx(expected[:12])

    def test_metrics_have_assumed_acceptance_and_user_speed_from_tpot(self) -> None:
        setup = make_config(speculation=DRAFTS)
        found = replay_requests([make_request(n, 3, 20) for n in range(40)], Scheduler(setup), 2, Fixed())  # type: ignore[arg-type]
        drafts = found.counts.summarize_speculation(DRAFTS)
        serve = compute_serve_metrics(
            found.traffic.samples, gpus=1, concurrency=2, slo={}, steps=found.counts, speculation=drafts
        )
        assert drafts is not None
        assert drafts.steps == sum(found.counts.accepted)
        assert drafts.assumed == [0.85, 0.6, 0.4]
        assert drafts.tokens_per_step == pytest.approx(DRAFTS.expected_tokens, rel=0.1)
        assert serve.output_tokens == 800
        assert serve.itl_ms.p50 == 0
        assert serve.tpot_ms.p50 is not None
        assert serve.tok_s_per_user == pytest.approx(1000 / serve.tpot_ms.p50)

    def test_record_states_how_step_times_were_estimated(self, tmp_path: Path) -> None:
        """The same requests take fewer steps than without drafts."""
        write_step_times(tmp_path / "times.json", TIMES)
        served = []
        for point in (POINT, DRAFTED):
            plan = plan_engine([point], Settings(), SHAPES["deepseek-v3"], TIMES.make_probe())
            record = replay_from_file(point, plan, tmp_path / "times.json", Settings(), tmp_path)
            assert record.serve is not None
            served.append(record.serve)
        plain, drafted = served
        assert plain.speculation is None
        assert drafted.speculation is not None
        assert (
            drafted.speculation.step_times
            == "estimated: measured steps of one token times the ratio of floors at the rates of H200"
        )
        assert drafted.steps < plain.steps


class TestStepTimes:
    def test_step_time_is_scaled_by_the_ratio_of_floors(self) -> None:
        """For 8 requests with 4,096 KV tokens, the ratio is the floor of 4 rows each, with three passes of the draft layer, over the floor of one row."""
        times, how = estimate_draft_steps(TIMES, DRAFTED)
        assert how
        case = Case(decodes=(Decodes(8, 4000),))
        limits = get_limits(load_machine("H200"))
        ratio = DraftRatios(DRAFTED, limits).compute(case)
        assert 1.2 < ratio < 4
        before = {m.case: m.median_ms for m in TIMES.cases}
        ratios = DraftRatios(DRAFTED, limits)
        for measured in times.cases:
            assert measured.median_ms == pytest.approx(before[measured.case] * ratios.compute(measured.case))
        assert times.path["mtp"] == 3

    def test_steps_with_prompts_are_longer_by_the_draft_layer(self) -> None:
        """V3 has 61 layers, and prompts also fill the KV of the draft layer: 1.5 to 3 % with embedding, head and
        projection.
        """
        ratio = DraftRatios(DRAFTED, get_limits(load_machine("H200"))).compute(Case(chunks=(Chunks(1, 4096, 0),)))
        assert 1 + 1 / 61 < ratio < 1.03

    def test_measured_steps_with_drafts_are_used_unchanged(self) -> None:
        own = make_step_times(path=get_engine_path(DRAFTED))
        found, how = estimate_draft_steps(own, DRAFTED)
        assert (found is own, how) == (True, "")
        assert estimate_draft_steps(TIMES, POINT) == (TIMES, "")

    def test_steps_with_other_drafts_are_refused(self) -> None:
        own = make_step_times(path=get_engine_path(msgspec.structs.replace(DRAFTED, mtp=1, acceptance="0.9")))
        with pytest.raises(UsageError, match=r"--mtp 3: these step times are of steps with other drafts; name a file"):
            estimate_draft_steps(own, DRAFTED)


class TestFloors:
    def test_attention_reads_kv_once_for_all_rows_of_a_request(self) -> None:
        """A request with 100 KV tokens has 4 rows, the last of which sees all: 97 + 98 + 99 + 100 pairs, and 100 rows
        are read.
        """
        one = compute_attention_work(16, [100], 2)
        four = compute_attention_work(16, [97, 98, 99, 100], 2, query_length=4)
        assert four.flops == one.flops * (97 + 98 + 99 + 100) / 100
        row, query = 100 * 576 * 2, 16 * (576 + 512) * 2
        assert (one.memory_bytes, four.memory_bytes) == (row + query, row + 4 * query)

    def test_other_phases_count_a_row_for_each_token(self) -> None:
        """Products, norms, exchanges and head of 2 requests with 4 rows are those of 8 requests."""
        sharding = Sharding.from_point(DRAFTED, SHAPES["deepseek-v3"])
        drafted = StepRows(decodes=(4000, 4000), queries=4, sampled=8, tokens=8)
        plain = StepRows(decodes=(4000,) * 8, sampled=8, tokens=8)
        works = [
            [(phase, work) for phase, _, work in iter_phase_works(sharding, rows) if phase != "attention"]
            for rows in (drafted, plain)
        ]
        assert works[0] == works[1]

    def test_draft_layer_runs_over_all_rows_and_then_one_row_per_request(self) -> None:
        rows = StepRows(decodes=(4000, 4000), queries=4, sampled=8, tokens=16)
        first, *others = rows.make_draft_passes()
        assert (first.queries, first.sampled, first.tokens) == (4, 2, 16)
        assert others == [StepRows(decodes=(4000, 4000), sampled=2, tokens=4)] * 2

    def test_model_without_a_draft_layer_has_no_drafting_work(self) -> None:
        assert Sharding.from_point(DRAFTED, SHAPES["kimi-k2"]).make_draft_layer() is None
        assert Sharding.from_point(DRAFTED, SHAPES["deepseek-v3"]).make_draft_layer() is not None


class TestForecasts:
    MACHINE, STEPS = load_machine("H200"), load_published_steps()

    def test_forecast_decode_step_yields_the_expected_tokens(self) -> None:
        """Each of 8 requests gets 2.564 tokens in the time of a step: more than half of the gaps are 0, and all others
        that time.
        """
        drafted = msgspec.structs.replace(DRAFTED, load=None, workload="decode", context=4000)
        plan = plan_engine([drafted], Settings(), SHAPES["deepseek-v3"], TIMES.make_probe())
        found = estimate_point(drafted, plan, self.MACHINE, Settings(), self.STEPS, self.STEPS.terms)
        estimator = Estimator(drafted, self.MACHINE, self.STEPS.terms)
        ms = estimator.estimate_ms(estimator.make_decode_rows(8, 4000))
        assert found.tok_s == pytest.approx(2.564 * 8 / ms * 1e3)
        assert (found.itl_ms.p50, found.itl_ms.p99) == (0, ms)
        assert found.tpot_ms.p50 == pytest.approx(ms / 2.564)

    def test_drafts_lengthen_steps_more_with_dcp_than_with_tp(self) -> None:
        """DCP computes all 128 heads on each rank: four rows a request make attention bound by products, and exchanges
        four times as large.
        """

        def estimate(**changes: object) -> float:
            estimator = Estimator(
                msgspec.structs.replace(DRAFTED, load=None, **changes), self.MACHINE, self.STEPS.terms
            )
            return estimator.estimate_ms(estimator.make_decode_rows(32, 4000))

        plain = estimate(mtp=0, acceptance="", dcp=1, exchange="none")
        drafted = estimate(dcp=1, exchange="none")
        with_dcp, drafted_dcp = estimate(mtp=0, acceptance=""), estimate()
        assert 1 < drafted / plain < drafted_dcp / with_dcp

    def test_gaps_of_a_measured_step_follow_from_its_stated_acceptance(self) -> None:
        """Each of 8 requests gets 2.564 tokens in 20 ms, 1025.6 tok/s: more than half of the gaps are 0, and all others
        20 ms.
        """
        point = record_builder.make_point(Layout(4, 1, 4), concurrency=8, mtp=3, acceptance=DRAFTED.acceptance)
        step, rate = (Interval(median=x, low=0.95 * x, high=1.05 * x, samples=9) for x in (20.0, 8 * 2.564 / 0.02))
        record = record_builder.make_ok_record(point)
        assert record.metrics is not None
        metrics = msgspec.structs.replace(record.metrics, step_ms=step, output_tok_s=rate)
        found = from_record(msgspec.structs.replace(record, metrics=metrics), "run")
        assert (found.tok_s, found.low, found.high) == pytest.approx((1025.6, 974.32, 1076.88))
        assert (found.itl_ms.p50, found.itl_ms.p99, found.tpot_ms.p50) == (0, 20, pytest.approx(20 / 2.564))


class TestReports:
    def test_first_sentences_state_acceptance_and_origin_of_times(self, tmp_path: Path) -> None:
        found = SpeculationMetrics(
            draft_tokens=2,
            assumed=[0.9, 0.5],
            steps=10,
            accepted=[9, 5],
            tokens_per_step=2.4,
            step_times="estimated: x",
        )
        record = serve_record_builder.make_served_record(serve_record_builder.make_point(Layout(8, dcp=2)))
        assert record.serve is not None
        drafted = msgspec.structs.replace(
            record,
            point=msgspec.structs.replace(record.point, mtp=2, acceptance="0.9/0.5"),
            serve=msgspec.structs.replace(record.serve, speculation=found),
        )
        folders = [
            record_builder.write_records(tmp_path / name, [one]) for name, one in (("a", drafted), ("b", record))
        ]
        sentences = answer.list_draft_conditions(load_frames(folders))
        assert sentences == [
            "2 drafts a step, accepted with assumed probabilities (0.9/0.5 for successive drafts): 2.35 tokens a step on average",
            "times of steps with drafts are estimated: x",
        ]
        first = answer.format_top_sentences(load_frames([folders[0]]))
        assert any(text.startswith("2 drafts a step, accepted with assumed probabilities") for text in first)
