"""Opening sentences of a report: layouts, ratios, SLO, and uncertainty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd
import pytest

from dcpbench.commands import point_runner
from dcpbench.errors import UsageError
from dcpbench.points.layout import Layout
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.records.record import Latencies
from dcpbench.reports import answer, answer_tables, dataframes, findings, overview, report_markdown, sections
from dcpbench.reports.load_labels import find_shared_shape, make_short_shapes
from dcpbench.reports.tables import Table
from dcpbench.serving.load_words import format_lock_step_warning, format_varied_option, parse_lengths
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

TP, DCP, DP = Layout(4), Layout(4, 1, 4), Layout(4, 4)


def step(point: Point, *steps: float, **changes: Any) -> Record:
    """Return a decode record with exactly these step times."""
    return msgspec.structs.replace(
        build.make_ok_record(point, steps=1, **changes),
        metrics=compute_decode_metrics(list(steps), point.concurrency, point.tp),
    )


def served(point: Point, tok_s: float, ttft: dict[str, float], itl: dict[str, float], **changes: Any) -> Record:
    """Return a served record with this rate and these latencies."""
    record = serve.make_served_record(point)
    assert record.serve
    changes = {"slo_ms": {}} | changes
    times = {"ttft_ms": Latencies(samples=99, **ttft), "itl_ms": Latencies(samples=99, **itl)}
    return msgspec.structs.replace(
        record, serve=msgspec.structs.replace(record.serve, output_tok_s=tok_s, **times, **changes)
    )


def read(tmp_path: Path, *records: Record, slo: dict[str, float] | None = None) -> dataframes.Frames:
    """Return frames of one run with these records."""
    return dataframes.load_frames([build.write_records(tmp_path / "run", records)], slo=slo)


def get_sentence(found: dataframes.Frames, words: str) -> str:
    """Return the one opening sentence with these words."""
    (sentence,) = [s for s in answer.format_top_sentences(found) if words in s]
    return sentence


class TestLockStep:
    """Closed loops of requests with one length run in lock-step (docs/serving.md)."""

    def read(self, tmp_path: Path, *points: Point, **changed: object) -> dataframes.Frames:
        """Return frames of these points, of which the last one has a changed load."""
        records = [served(point, 100, {}, {}) for point in points]
        of = records[-1].point
        other = msgspec.structs.replace(of, load=msgspec.structs.replace(of.load, **changed))
        return read(tmp_path, *records[:-1], msgspec.structs.replace(records[-1], point=other))

    def test_lock_step_warning_suggests_lengths_that_differ_by_a_tenth(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, serve.make_point(TP), serve.make_point(DCP))
        sentence = get_sentence(found, "in lock-step")
        assert sentence.startswith("Clients run in lock-step: ")
        assert sentence.endswith(
            "TTFT, ITL p99 and goodput are different with varied lengths (--output-tokens uniform:36-44)."
        )
        assert "clients run in lock-step: all their requests have one length" in overview.list_caveats(found)

    @pytest.mark.parametrize(("tokens", "suggested"), [("1500", "1350-1650"), ("15", "13-17"), ("2", "1-3")])
    def test_suggested_lengths_are_on_both_sides_of_the_original(self, tokens: str, suggested: str) -> None:
        option, lengths = format_varied_option(tokens).split()
        assert (option, lengths) == ("--output-tokens", f"uniform:{suggested}")
        assert parse_lengths(option, lengths).low < int(tokens) < parse_lengths(option, lengths).high

    def test_warning_for_one_token_answers_omits_itl(self) -> None:
        warning = format_lock_step_warning("1", dp=False)
        assert "TTFT and goodput are different with" in warning
        assert warning.endswith("(--input-tokens uniform:LOW-HIGH).")

    def test_warning_with_attention_dp_mentions_its_advantage(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, serve.make_point(DP))
        assert "ITL p99, goodput and the output of attention DP are different" in get_sentence(found, "in lock-step")
        (caveat,) = [text for text in overview.list_caveats(found) if "in lock-step" in text]
        assert caveat.endswith(", which favours attention DP; with varied lengths attention DP may be slower")

    def test_some_points_in_lock_step_are_counted(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, serve.make_point(TP), serve.make_point(TP), output_tokens="uniform:36-44")
        assert get_sentence(found, "in lock-step").startswith("Clients run in lock-step at 1 of 2 served points: ")
        assert "clients run in lock-step at 1 of 2 points: all their requests have one length" in overview.list_caveats(
            found
        )

    @pytest.mark.parametrize(
        "changed",
        [
            {"input_tokens": "uniform:300-500"},
            {"output_tokens": "lognormal:40:0.5"},
            {"arrival": "gamma", "request_rate": 2.0},
            {"turns": "3"},
            {"requests": 8},
            {"input_tokens": "trace", "output_tokens": "trace", "trace": "a.jsonl"},
        ],
    )
    def test_other_loads_do_not_run_in_lock_step(self, tmp_path: Path, changed: dict[str, object]) -> None:
        """Lengths differ, requests come at a rate or in sessions, or no client has a second request."""
        found = self.read(tmp_path, serve.make_point(TP), **changed)
        assert not [s for s in answer.format_top_sentences(found) if "in lock-step" in s]
        assert not [s for s in overview.list_caveats(found) if "in lock-step" in s]

    def test_single_client_has_no_lock_step_warning(self, tmp_path: Path) -> None:
        assert not [
            s for s in answer.format_top_sentences(self.read(tmp_path, serve.make_point(TP, 1))) if "in lock-step" in s
        ]


class TestSlo:
    def test_best_is_the_highest_throughput_without_slo(self, tmp_path: Path) -> None:
        found = read(tmp_path, step(build.make_point(TP), 10), step(build.make_point(DCP), 20))
        assert answer.format_top_sentences(found)[0].startswith("No SLO was given")
        assert findings.find_best_per_load(findings.select_timed(found.everything))["label"].tolist() == ["tp4"]

    def test_best_is_the_fastest_point_that_meets_the_slo(self, tmp_path: Path) -> None:
        """tp4 gives 200 tok/s with gaps of 60 ms, tp4·dcp4 100 tok/s with 50 ms; at 55 ms only the slower one meets the
        SLO.
        """
        point, other = serve.make_point(TP), serve.make_point(DCP)
        records = [
            served(point, 200, {"p50": 9, "p99": 9}, {"p50": 40, "p99": 60}),
            served(other, 100, {"p50": 9, "p99": 9}, {"p50": 50, "p99": 50}),
        ]
        found = read(tmp_path, *records, slo={"itl": 55.0})
        (row,) = findings.find_best_per_load(findings.select_timed(found.everything)).to_dict("records")
        assert (row["label"], row["meets"]) == ("tp4·dcp4", True)
        assert found.served.set_index("label")["slo_result"].to_dict() == {
            "tp4": "misses: ITL p99 60.0 ms",
            "tp4·dcp4": "meets",
        }
        assert "400 in · 40 out: only tp4·dcp4 at 8." in get_sentence(found, "Best layout")
        assert answer.format_top_sentences(found)[0] == "SLO (--slo): ITL ≤ 55 ms at p99."

    def test_rivals_are_judged_by_the_highest_shared_percentile(self, tmp_path: Path) -> None:
        """tp4 has p99 = 80 ms, tp4·dcp4 has only p90 = 45 ms: both are judged by p90, 40 and 45 ms."""
        records = [
            served(serve.make_point(TP), 200, {"p50": 9}, {"p50": 30, "p90": 40, "p99": 80}),
            served(serve.make_point(DCP), 100, {"p50": 9}, {"p50": 30, "p90": 45}),
        ]
        found = read(tmp_path, *records, slo={"itl": 50.0})
        assert set(found.served["slo_result"]) == {"meets at p90"}
        assert (
            answer.format_top_sentences(found)[0]
            == "SLO (--slo): ITL ≤ 50 ms at p90 (not at p99, which needs 662 samples)."
        )

    def test_value_within_two_percent_of_its_limit_is_narrow(self, tmp_path: Path) -> None:
        """50 ms is compared with limits of 50.5 and 49.5 ms; repeats may differ by as much."""
        record = step(build.make_point(TP), 50.0)
        for limit, result in (
            (50.5, "meets narrowly at p50"),
            (49.5, "misses narrowly: ITL p50 50.0 ms"),
            (60.0, "meets at p50"),
        ):
            (row,) = read(tmp_path / str(limit), record, slo={"itl": limit}).points.to_dict("records")
            assert row["slo_result"] == result

    def test_nearest_point_is_named_if_none_meets_the_slo(self, tmp_path: Path) -> None:
        """60 and 90 ms are 1.2 and 1.8 times the limit of 50 ms."""
        found = read(tmp_path, step(build.make_point(TP), 90), step(build.make_point(DCP), 60), slo={"itl": 50.0})
        assert "none within the SLO at 8" in get_sentence(found, "Best layout")
        assert get_sentence(found, "No point meets the SLO").endswith(
            "nearest is tp4·dcp4 at concurrency 8 · context 4,000 (misses: ITL p50 60.0 ms)."
        )

    def test_ttft_objective_is_ignored_for_decode_points(self, tmp_path: Path) -> None:
        found = read(tmp_path, step(build.make_point(TP), 40), slo={"ttft": 1.0, "itl": 50.0})
        assert answer.format_top_sentences(found)[0].endswith("These points have no TTFT.")
        assert found.points["slo_result"].tolist() == ["meets at p50"]

    def test_slo_without_applicable_objectives_counts_as_none(self, tmp_path: Path) -> None:
        """Decode steps have no TTFT and no E2EL; an ITL objective next to others still applies."""
        none = "No SLO was given (set one with --slo ttft=2000,itl=60, in ms), so the best layout is the one with the highest output throughput."
        unused = (
            "bounds nothing that these points have, so the best layout is the one with the highest output throughput."
        )
        record, itl = step(build.make_point(TP), 40), "ITL ≤ 50 ms at p50"
        for number, (slo, sentence) in enumerate(
            [
                ({"ttft": 1.0}, f"--slo ttft {unused}"),
                ({"ttft": 1.0, "e2el": 9.0}, f"--slo ttft,e2el {unused}"),
                (
                    {"itl": 50.0, "tpot": 9.0},
                    f"SLO (--slo): {itl} (not at p99, which needs 662 samples). These points have no TPOT.",
                ),
                ({}, none),
            ]
        ):
            assert answer.format_top_sentences(read(tmp_path / str(number), record, slo=slo))[0] == sentence

    def test_objective_applies_to_the_points_that_have_it(self, tmp_path: Path) -> None:
        """The served point has a TTFT and both points have an ITL; none has a TPOT."""
        with_ttft = served(serve.make_point(TP), 100, {"p50": 9, "p99": 9}, {"p50": 40, "p99": 60}, tpot_ms=Latencies())
        found = read(
            tmp_path, step(build.make_point(TP), 40), with_ttft, slo={"ttft": 2000.0, "itl": 50.0, "tpot": 9.0}
        )
        assert answer.format_top_sentences(found)[0] == (
            "SLO (--slo): TTFT ≤ 2,000 ms at p99, ITL ≤ 50 ms at p99 or p50 (lower where not at p99, which needs 662 samples). "
            "These points have no TPOT."
        )

    def test_points_measured_without_slo_are_named_separately(self, tmp_path: Path) -> None:
        """Only kimi-k2 was measured with a limit, of 50 ms."""
        itl = {"p50": 40, "p99": 60}
        records = [
            served(serve.make_point(TP), 100, {}, itl, slo_ms={"itl": 50.0}),
            served(serve.make_point(TP, model="deepseek-v3"), 100, {}, itl),
        ]
        assert answer.format_top_sentences(read(tmp_path, *records))[0] == (
            "SLO (as the runs were measured with): deepseek-v3 live: none; kimi-k2 live: ITL ≤ 50 ms at p99."
        )

    def test_objectives_of_the_run_apply_if_none_are_given(self, tmp_path: Path) -> None:
        record = served(serve.make_point(TP), 9, {"p50": 9}, {"p50": 60}, slo_ms={"itl": 50.0})
        assert "as the runs were measured with" in answer.format_top_sentences(read(tmp_path / "own", record))[0]
        given = read(tmp_path / "given", record, slo={"itl": 70.0})
        assert "(--slo): ITL ≤ 70 ms" in answer.format_top_sentences(given)[0]

    def test_objectives_that_differ_between_points_are_ignored(self, tmp_path: Path) -> None:
        records = [
            served(serve.make_point(TP, c), 9, {"p50": 9}, {"p50": 60}, slo_ms={"itl": 50.0 + c}) for c in (8, 32)
        ]
        assert answer.format_top_sentences(read(tmp_path, *records))[0].startswith("No SLO was given")

    def test_cpu_points_are_not_judged_by_an_slo(self, tmp_path: Path) -> None:
        found = read(tmp_path, *build.make_cpu_sweep(), slo={"itl": 1e-6})
        assert set(found.points["slo_result"]) == {""}
        sentence = "No point is compared with --slo itl=1e-06: latencies on a CPU do not reflect GPU performance."
        assert [s for s in answer.format_top_sentences(found) if "slo" in s.lower()] == [sentence]
        assert overview.format_answer(found).endswith(sentence)
        assert "slo" not in overview.format_answer(read(tmp_path / "without", *build.make_cpu_sweep())).lower()

    def test_cpu_points_are_not_judged_by_objectives_of_the_run(self, tmp_path: Path) -> None:
        record = served(serve.make_point(TP), 9, {"p50": 9}, {"p50": 60}, slo_ms={"itl": 50.0})
        record = msgspec.structs.replace(record, warnings=["cpu"])
        sentence = "No point is compared with the SLO of the run: latencies on a CPU do not reflect GPU performance."
        assert sentence in answer.format_top_sentences(read(tmp_path, record))

    @pytest.mark.parametrize(
        ("records", "warns"), [(build.make_cpu_sweep(), True), ([step(build.make_point(TP), 40)], False)]
    )
    def test_command_warns_that_an_slo_has_no_effect_on_a_cpu(
        self, records: list[Record], warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The warning is printed with the path of the report, where users look for the effect of --slo."""
        point_runner.print_if_unjudged([build.write_records(tmp_path / "run", records)], "itl=60")
        assert ("--slo itl=60 has no effect here" in capsys.readouterr().err) is warns

    def test_unknown_objective_raises_usage_error(self, tmp_path: Path) -> None:
        from dcpbench.commands.options import JoinedReportOptions
        from dcpbench.commands.report import report

        with pytest.raises(UsageError, match="not one of ttft, itl"):
            report([tmp_path], answer=JoinedReportOptions(slo="latency=5"))


class TestMaximumOutput:
    def test_maximum_within_slo_is_compared_with_maximum_without_dcp(self, tmp_path: Path) -> None:
        """tp4 meets 50 ms at 8 (40 ms: 200 tok/s), tp4·dcp4 also at 32 (50 ms: 640 tok/s): 3.2 times as much."""
        records = [
            step(build.make_point(TP, concurrency=8), 40),
            step(build.make_point(TP, concurrency=32), 70),
            step(build.make_point(DCP, concurrency=8), 45),
            step(build.make_point(DCP, concurrency=32), 50),
        ]
        found = read(tmp_path, *records, slo={"itl": 50.0})
        assert "640 tok/s with tp4·dcp4 at concurrency 32, 3.20 times the most without DCP (200, tp4" in get_sentence(
            found, "Maximum output within"
        )

    def test_maximum_of_each_layout_is_listed_with_its_load(self, tmp_path: Path) -> None:
        """Within 50 ms tp4 has 8 requests in 40 ms = 200 tok/s, tp4·dcp4 32 in 50 ms = 640, tp4·dp4·ep4 none."""
        times = [(TP, 8, 40), (TP, 32, 70), (DCP, 8, 45), (DCP, 32, 50), (DP, 8, 60)]
        records = [step(build.make_point(lay, concurrency=n), ms) for lay, n, ms in times]
        most = answer_tables.build_grids(read(tmp_path, *records, slo={"itl": 50.0}))[0]
        assert most.title.startswith("Maximum output tok/s within the SLO, at which concurrency of those that ran")
        assert dict(zip(most.columns, most.rows[0], strict=True)) == {
            "load": "context 4,000",
            "tp4": "200 at 8",
            "tp4·dcp4": "640 at 32",
            "tp4·dp4·ep4": "none",
        }

    def test_no_table_of_maxima_without_an_slo(self, tmp_path: Path) -> None:
        found = read(tmp_path, *(step(build.make_point(lay), 40) for lay in (TP, DCP)))
        assert not [table for table in answer_tables.build_grids(found) if table.title.startswith("Maximum")]


class TestJumps:
    """Jumps of throughput between two concurrencies that the layout does not cause."""

    def read(self, tmp_path: Path, batch: float, requests: int = 96) -> dataframes.Frames:
        """Return frames of tp4·dp4·ep4 with 24, 40 and 48 clients, with this share of them in flight."""
        records = []
        for n in (24, 40, 48):
            record = served(serve.make_point(DP, n, {"requests": requests}), 100, {}, {}, preemptions=0)
            assert record.serve
            assert record.conditions
            assert record.kv
            record = msgspec.structs.replace(
                record,
                serve=msgspec.structs.replace(record.serve, decode_batch=batch * n),
                conditions=msgspec.structs.replace(record.conditions, cuda_graph=True, graph_batch=None),
                kv=msgspec.structs.replace(record.kv, capacity_requests=100),
            )
            records.append(record)
        return read(tmp_path, *records)

    def test_padding_to_graph_sizes_is_explained(self, tmp_path: Path) -> None:
        """6 and 10 requests on each of 4 replicas run in graphs of 8 and 12; 48 are 12 on each."""
        explanation = answer.explain_jumps(self.read(tmp_path, 1.0).findings.points)
        assert "tp4·dp4·ep4 runs 24 as 32 and 40 as 48. Output jumps from there to the next size." in explanation
        assert "multiple" not in explanation

    def test_incomplete_last_wave_is_explained(self, tmp_path: Path) -> None:
        """96 are 40 + 40 + 16, and twice 48: with 80 % of 40 clients 32 are in flight."""
        explanation = answer.explain_jumps(self.read(tmp_path, 0.8).findings.points)
        assert (
            "96 requests are no multiple of 40, so the last 16 run alone. On average 32 of 40 are in flight"
            in explanation
        )
        assert "multiple of 48" not in explanation

    def test_last_wave_of_one_request_uses_the_singular(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        points = self.read(tmp_path, 0.8).findings.points
        waves = findings.find_last_waves(points).assign(load_requests=81, left=1)
        monkeypatch.setattr(findings, "find_last_waves", lambda _: waves)
        assert "81 requests are no multiple of 40, so the last one runs alone. On average" in answer.explain_jumps(
            points
        )

    def test_decode_padding_is_explained_only_if_there_is_some(self, tmp_path: Path) -> None:
        """A record of 8 requests runs in a graph of 8 or 12 rows."""
        for name, rows, explanation in (("full", 8, ""), ("padded", 12, "tp4 runs 8 as 12")):
            record = step(build.make_point(TP, concurrency=8), 40)
            assert record.conditions
            conditions = msgspec.structs.replace(record.conditions, cuda_graph=True, graph_batch=rows)
            found = read(tmp_path / name, msgspec.structs.replace(record, conditions=conditions))
            assert explanation in answer.explain_jumps(found.findings.points)
            assert bool(answer.explain_jumps(found.findings.points)) is bool(explanation)


class TestBreakEven:
    def test_break_even_is_given_for_each_layout_and_context(self, tmp_path: Path) -> None:
        """Ratios to 20 ms: at context 1 20 / 25 = 0.8; at context 2 20 / 19.9 with 8 requests (level) and 20 / 16 =
        1.25 with 32.
        """
        times = {(1, 8): 25.0, (1, 32): 25.0, (2, 8): 19.9, (2, 32): 16.0}
        records = [
            step(build.make_point(layout, context=c, concurrency=n), 20.0 if layout == TP else ms)
            for (c, n), ms in times.items()
            for layout in (TP, DCP)
        ]
        found = read(tmp_path, *records)
        assert (
            "Context 1: tp4·dcp4 never up to 32 (at most 0.80×, at 32); context 2: from concurrency 32 on"
            in get_sentence(found, "DCP pays, in")
        )

    def test_break_even_is_given_for_each_exchange(self, tmp_path: Path) -> None:
        """symm is 1.25 times as fast from 8 on, a2a level."""
        records = [step(build.make_point(TP), 20)] + [
            step(build.make_point(DCP, exchange=exchange), ms) for exchange, ms in (("symm", 16), ("a2a", 20))
        ]
        sentence = get_sentence(read(tmp_path, *records), "pays, in")
        assert "tp4·dcp4 pays, in output tok/s over tp4, at these concurrencies" in sentence
        assert (
            "a2a never up to 8 (at most 1.00×, at 8), from concurrency 8, the lowest tried, on (symm 1.25× there)"
            in sentence
        )

    def test_ratio_has_a_confidence_interval(self, tmp_path: Path) -> None:
        """20 ms over 9, 10, 11 ms: 2, from 20/11 = 1.82 to 20/9 = 2.22."""
        found = read(tmp_path, step(build.make_point(TP), 20), step(build.make_point(DCP), 9, 10, 11))
        assert "tp4·dcp4 2.00× [1.82–2.22]" in get_sentence(found, "DCP pays, in")


class TestPays:
    """DCP pays where it is clearly above the best layout without DCP on as many GPUs, both within the SLO."""

    def read(self, tmp_path: Path, rates: dict[Layout, float], late: tuple[Layout, ...] = ()) -> dataframes.Frames:
        """Return frames of one load with these rates; layouts in `late` miss an SLO of 50 ms."""
        records = [
            served(serve.make_point(lay), rate, {"p50": 9, "p99": 9}, {"p50": 9, "p99": 99 if lay in late else 9})
            for lay, rate in rates.items()
        ]
        return read(tmp_path, *records, slo={"itl": 50.0} if late else None)

    def test_dcp_level_with_attention_dp_does_not_pay(self, tmp_path: Path) -> None:
        """150 tok/s is 1.5 times the 100 of tp4, and 1.0 times the 150 of tp4·dp4·ep4."""
        found = self.read(tmp_path, {TP: 100, DCP: 150, DP: 150})
        assert get_sentence(found, "DCP pays").endswith(
            "DCP pays in 0 of 1 load, in output tok/s over the best layout without DCP. 400 in · 40 out: nowhere "
            "(at most 1.00× tp4·dp4·ep4, tp4·dcp4 at 8)."
        )
        assert get_sentence(found, "Compared with").endswith(
            "Compared with tp4 alone, DCP is ahead in output tok/s at these concurrencies. 400 in · 40 out: from concurrency 8, the lowest "
            "tried, on (tp4·dcp4 1.50× there)."
        )
        assert not [s for s in answer.format_top_sentences(found) if "pays, in" in s]

    def test_dcp_ahead_of_the_best_other_layout_pays(self, tmp_path: Path) -> None:
        """150 / 120 tok/s is 1.25."""
        found = self.read(tmp_path, {TP: 100, DCP: 150, DP: 120})
        assert "DCP pays in 1 of 1 load, in" in get_sentence(found, "DCP pays")
        assert get_sentence(found, "DCP pays").endswith("400 in · 40 out: tp4·dcp4 at 8 (1.25× tp4·dp4·ep4).")

    def test_faster_dcp_that_misses_the_slo_does_not_pay(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, {TP: 100, DCP: 300}, late=(DCP,))
        assert get_sentence(found, "DCP pays").endswith(
            "DCP pays in 0 of 1 load, in output tok/s within the SLO over the best layout without DCP. 400 in · 40 "
            "out: nowhere, as no layout with DCP meets the SLO."
        )
        assert "Compared with tp4 alone, whether or not the SLO is met, DCP is ahead" in get_sentence(
            found, "Compared with"
        )

    def test_dcp_pays_if_only_it_meets_the_slo(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, {TP: 300, DP: 200, DCP: 100}, late=(TP, DP))
        assert get_sentence(found, "DCP pays").endswith("tp4·dcp4 at 8 (no layout without DCP meets the SLO).")

    def test_faster_layout_that_misses_the_slo_is_no_rival(self, tmp_path: Path) -> None:
        """120 / 100 tok/s of tp4 is 1.2; tp4·dp4·ep4 has 300 tok/s, but misses the SLO."""
        found = self.read(tmp_path, {TP: 100, DCP: 120, DP: 300}, late=(DP,))
        (row,) = findings.compare_dcp_with_best(findings.select_timed(found.everything)).to_dict("records")
        assert (row["rival"], row["ratio"], row["verdict"]) == ("tp4", 1.2, "higher")
        assert "(tp4·dcp4 1.20× there)" in get_sentence(found, "DCP pays, in output tok/s over tp4")

    def test_layouts_with_more_gpus_or_another_dtype_are_no_rivals(self, tmp_path: Path) -> None:
        """tp8 has twice the GPUs, and results of fp8 do not apply to bf16."""
        points = [(serve.make_point(TP), 100), (serve.make_point(DCP), 150), (serve.make_point(Layout(8)), 400)]
        points.append((serve.make_point(DP, dtype="fp8"), 400))
        found = read(tmp_path, *(served(p, rate, {}, {}) for p, rate in points))
        (row,) = findings.compare_dcp_with_best(findings.select_timed(found.everything)).to_dict("records")
        assert (row["rival"], row["ratio"], row["verdict"]) == ("tp4 (bfloat16)", 1.5, "higher")

    def test_points_without_rivals_are_not_counted(self, tmp_path: Path) -> None:
        """At 8 there is no layout without DCP; at 32 there is a slower one."""
        points = [(serve.make_point(DCP, 8), 100), (serve.make_point(DCP, 32), 150), (serve.make_point(DP, 32), 100)]
        found = read(tmp_path, *(served(p, rate, {}, {}) for p, rate in points))
        assert "DCP pays in 1 of 1 load, in" in get_sentence(found, "DCP pays")
        alone = read(tmp_path / "alone", served(*points[0], {}, {}))
        assert not [s for s in answer.format_top_sentences(alone) if "pays" in s]

    def test_consecutive_loads_and_lengths_with_equal_results_are_joined(self, tmp_path: Path) -> None:
        """The ratios at 400 tokens are 1.2 and 1.5 at 8 and 16, and 0.8 at 32; at 800 and 1,600 tokens they are 0.5."""
        rates = {("400", 8): 120, ("400", 16): 150, ("400", 32): 80, ("800", 8): 50, ("1600", 8): 50}
        records = [
            served(serve.make_point(lay, n, {"input_tokens": tokens}), rate, {}, {})
            for (tokens, n), with_dcp in rates.items()
            for lay, rate in ((DP, 100), (DCP, with_dcp), (TP, 40))
        ]
        assert get_sentence(read(tmp_path, *records), "DCP pays").endswith(
            "DCP pays in 2 of 5 loads, in output tok/s over the best layout without DCP. 400 in: tp4·dcp4 at 8–16 "
            "(1.20–1.50× tp4·dp4·ep4); 800 in, 1,600 in: nowhere (at most 0.50× tp4·dp4·ep4, tp4·dcp4 at 8)."
        )


class TestOpening:
    def test_opening_has_at_most_nine_sentences(self, tmp_path: Path) -> None:
        """Two models × two layouts in four runs give more sentences than that; the others are in the section of
        comparisons.
        """
        points = [build.make_point(lay, model=m) for m in ("a", "b") for lay in (TP, DCP)]
        hours = {
            f"run-{h}": [step(p, 9 + p.dcp, started_at=f"2026-11-21T0{h}:00:00Z") for p in points] for h in range(4)
        }
        found = dataframes.load_frames(
            [build.write_records(tmp_path / name, run) for name, run in hours.items()], slo={"itl": 12.0}
        )
        assert len(answer.format_top_sentences(found)) == answer.MAX_SENTENCES
        assert answer.format_top_sentences(found)[0].startswith("SLO")
        assert answer.format_top_sentences(found)[-1].startswith("Repeats")
        first, *others = sections.build_sections(found, [])
        assert first.folded == answer.format_top_sentences(found)
        assert len(first.bullets) <= 4
        (below,) = [s for s in others if s.slug == "comparisons"]
        assert not set(below.bullets) & set(first.folded)
        assert len([b for b in below.bullets if "Best layout" in b]) >= 1

    def test_sections_have_a_fixed_order(self, tmp_path: Path) -> None:
        built = sections.build_sections(read(tmp_path, *(step(build.make_point(x), 9) for x in (TP, DCP))), [])
        order = [
            "answer",
            "kv",
            "time",
            "syncs",
            "failures",
            "points",
            "comparisons",
            "repeats",
            "conditions",
            "run",
            "method",
            "environment",
        ]
        assert [s.slug for s in built] == order

    def test_sections_with_tables_have_definitions(self, tmp_path: Path) -> None:
        built = sections.build_sections(read(tmp_path, *(step(build.make_point(x), 9) for x in (TP, DCP))), [])
        titles = {s.slug: [t.title for t in s.tables] for s in built}
        assert all("Definitions" in titles[slug] for slug in ("answer", "kv", "time", "method"))

    def test_live_and_replayed_points_are_not_compared(self, tmp_path: Path) -> None:
        """The replay of the other layout is three times as fast as any live run."""
        live, slow = serve.make_point(TP), serve.make_point(DCP)
        assert slow.load
        replay = msgspec.structs.replace(slow, load=msgspec.structs.replace(slow.load, mode="replay"))
        records = [served(p, rate, {}, {}) for p, rate in ((live, 100), (slow, 90), (replay, 300))]
        best = findings.find_best_per_load(findings.select_timed(read(tmp_path, *records).everything))
        assert best[["mode", "label"]].to_numpy().tolist() == [["live", "tp4"]]


class TestTables:
    def test_best_layouts_are_a_grid_of_loads(self, tmp_path: Path) -> None:
        """200 / 160 tok/s is 1.25; at 32 both give 640."""
        records = [
            step(build.make_point(lay, concurrency=n), ms)
            for lay, n, ms in ((TP, 8, 40), (DCP, 8, 50), (TP, 32, 50), (DCP, 32, 50))
        ]
        found = read(tmp_path, *records)
        best, over = answer_tables.build_grids(found)
        assert best.columns == ["load", "concurrency 8", "32"]
        assert best.rows == [["context 4,000", "tp4: 200, 1.25×", "tp4 ≈ tp4·dcp4: 640"]]
        assert over.rows == [["context 4,000", "tp4·dcp4", "▼ 0.80×", "≈ 1.00×"]]

    def test_grid_of_ratios_uses_another_layout_if_tp_did_not_run(self, tmp_path: Path) -> None:
        """At 8 tp4·dcp4 takes 40 ms and tp4 50 ms; at 32 tp4 did not run, and tp4·dp4·ep4 takes 40 ms; at 48 neither
        ran.
        """
        ran = [(TP, 8, 50), (DCP, 8, 40), (DCP, 32, 50), (DP, 32, 40), (DCP, 48, 50)]
        records = [step(build.make_point(lay, concurrency=n), ms) for lay, n, ms in ran]
        _, over = answer_tables.build_grids(read(tmp_path, *records))
        assert over.rows == [["context 4,000", "tp4·dcp4", "▲ 1.25×", "no tp4; 0.80× tp4·dp4·ep4", "no tp4"]]

    def test_long_tables_are_folded_in_markdown(self) -> None:
        """GitHub folds `details`, and shows a table in it only after an empty line."""
        short, long = (Table("Title", ["a"], [["1"]] * n) for n in (3, 30))
        assert report_markdown._format_table(short, 99).startswith("**Title**")
        folded = report_markdown._format_table(long, 99)
        assert folded.startswith("<details><summary>Title (30 rows)</summary>\n\n| a |")
        assert folded.endswith("\n\n</details>")

    def test_markdown_is_truncated_below_the_limit_of_github(self, tmp_path: Path) -> None:
        """The rows left out are counted."""
        section = sections.Section(slug="s", title="s", tables=[Table("t", ["a"], [["x" * 900]] * 2_000)])
        text = report_markdown.render("title", [section], tmp_path)
        assert len(text.encode()) < 1_000_000
        assert "rows more in points.csv" in text


class TestShapes:
    def test_short_shapes_contain_only_the_differing_lengths(self) -> None:
        parts = [("4,000 in", "500 out"), ("8,000 in", "500 out")]
        rows = pd.DataFrame({"rest": [" · ".join(texts) for texts in parts], "rest_parts": parts})
        assert list(make_short_shapes(rows).values()) == ["4,000 in", "8,000 in"]
        assert find_shared_shape(rows) == "500 out"
        assert make_short_shapes(rows[:1]) == {"4,000 in · 500 out": "4,000 in · 500 out"}
        assert find_shared_shape(rows[:1]) == ""


@pytest.mark.parametrize(("inside", "fence"), [("no ticks", 3), ("a ```` b", 5), ("`", 3), ("a ``` b", 4)])
def test_code_fence_is_longer_than_backticks_inside(inside: str, fence: int, tmp_path: Path) -> None:
    text = report_markdown.render("title", [sections.Section(slug="slug", title="Title", commands=[inside])], tmp_path)
    assert f"\n{'`' * fence}\n{inside}\n{'`' * fence}\n" in text
    assert "`" * (fence + 1) not in text
