"""The answer that a report opens with: what it names, by how much, under which SLO, and how sure it is."""

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


def step(of: Point, *steps: float, **changes: Any) -> Record:
    """A decode record with exactly these step times."""
    return msgspec.structs.replace(
        build.ok(of, steps=1, **changes), metrics=compute_decode_metrics(list(steps), of.concurrency, of.tp)
    )


def served(of: Point, tok_s: float, ttft: dict[str, float], itl: dict[str, float], **changes: Any) -> Record:
    """A served record with this rate and these latencies."""
    made = serve.served(of)
    assert made.serve
    changes = {"slo_ms": {}} | changes
    times = {"ttft_ms": Latencies(samples=99, **ttft), "itl_ms": Latencies(samples=99, **itl)}
    return msgspec.structs.replace(
        made, serve=msgspec.structs.replace(made.serve, output_tok_s=tok_s, **times, **changes)
    )


def read(tmp_path: Path, *records: Record, slo: dict[str, float] | None = None) -> dataframes.Frames:
    """One run with these records."""
    return dataframes.load_frames([build.write(tmp_path / "run", records)], slo=slo)


def said(found: dataframes.Frames, words: str) -> str:
    """The one opening sentence with these words."""
    (sentence,) = [s for s in answer.format_top_sentences(found) if words in s]
    return sentence


class TestClientsInStep:
    """Closed loops of requests of one length: docs/serving.md."""

    def read(self, tmp_path: Path, *points: Point, **changed: object) -> dataframes.Frames:
        """Points, the last of which has another load."""
        records = [served(point, 100, {}, {}) for point in points]
        of = records[-1].point
        other = msgspec.structs.replace(of, load=msgspec.structs.replace(of.load, **changed))
        return read(tmp_path, *records[:-1], msgspec.structs.replace(records[-1], point=other))

    def test_they_are_told_with_lengths_that_differ_by_a_tenth(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, serve.point(TP), serve.point(DCP))
        sentence = said(found, "in lock-step")
        assert sentence.startswith("Clients run in lock-step: ")
        assert sentence.endswith(
            "TTFT, ITL p99 and goodput differ where lengths differ (--output-tokens uniform:36-44)."
        )
        assert "clients run in lock-step: all their requests have one length" in overview.list_caveats(found)

    @pytest.mark.parametrize(("tokens", "apart"), [("1500", "1350-1650"), ("15", "13-17"), ("2", "1-3")])
    def test_what_to_type_has_lengths_on_both_sides(self, tokens: str, apart: str) -> None:
        option, lengths = format_varied_option(tokens).split()
        assert (option, lengths) == ("--output-tokens", f"uniform:{apart}")
        assert parse_lengths(option, lengths).low < int(tokens) < parse_lengths(option, lengths).high

    def test_answers_of_one_token_have_no_gaps(self) -> None:
        words = format_lock_step_warning("1", dp=False)
        assert "TTFT and goodput differ where" in words
        assert words.endswith("(--input-tokens uniform:LOW-HIGH).")

    def test_with_attention_dp_so_is_what_it_gives_and_the_opening_says_it(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, serve.point(DP))
        assert "ITL p99, goodput and what attention DP gives differ" in said(found, "in lock-step")
        (caveat,) = [text for text in overview.list_caveats(found) if "in lock-step" in text]
        assert caveat.endswith(", which favours attention DP: it may be behind where lengths differ")

    def test_some_are_counted(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, serve.point(TP), serve.point(TP), output_tokens="uniform:36-44")
        assert said(found, "in lock-step").startswith("Clients run in lock-step at 1 of 2 served points: ")
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
    def test_others_do_not(self, tmp_path: Path, changed: dict[str, object]) -> None:
        """Lengths that differ, requests at a rate, sessions, and clients of which none has a second request."""
        found = self.read(tmp_path, serve.point(TP), **changed)
        assert not [s for s in answer.format_top_sentences(found) if "in lock-step" in s]
        assert not [s for s in overview.list_caveats(found) if "in lock-step" in s]

    def test_one_client_has_nobody_to_be_in_step_with(self, tmp_path: Path) -> None:
        assert not [
            s for s in answer.format_top_sentences(self.read(tmp_path, serve.point(TP, 1))) if "in lock-step" in s
        ]


class TestSlo:
    def test_without_one_the_best_is_the_highest_throughput_and_that_is_said(self, tmp_path: Path) -> None:
        found = read(tmp_path, step(build.point(TP), 10), step(build.point(DCP), 20))
        assert answer.format_top_sentences(found)[0].startswith("No SLO was given")
        assert findings.find_best_per_load(findings.select_rivals(found))["label"].tolist() == ["tp4"]

    def test_the_best_is_the_fastest_of_those_that_meet_it(self, tmp_path: Path) -> None:
        """tp4 gives 200 tok/s with gaps of 60 ms; tp4·dcp4 100 with 50. At 55 ms only the slower one is left."""
        point, other = serve.point(TP), serve.point(DCP)
        records = [
            served(point, 200, {"p50": 9, "p99": 9}, {"p50": 40, "p99": 60}),
            served(other, 100, {"p50": 9, "p99": 9}, {"p50": 50, "p99": 50}),
        ]
        found = read(tmp_path, *records, slo={"itl": 55.0})
        (row,) = findings.find_best_per_load(findings.select_rivals(found)).to_dict("records")
        assert (row["label"], row["meets"]) == ("tp4·dcp4", True)
        assert found.served.set_index("label")["slo_result"].to_dict() == {
            "tp4": "misses: ITL p99 60.0 ms",
            "tp4·dcp4": "meets",
        }
        assert "400 in · 40 out: only tp4·dcp4 at 8." in said(found, "Best layout")
        assert answer.format_top_sentences(found)[0] == "SLO (--slo): ITL ≤ 55 ms at p99."

    def test_rivals_are_held_against_the_highest_percentile_that_all_of_them_have(self, tmp_path: Path) -> None:
        """tp4 has p99 = 80 ms, tp4·dcp4 no more than p90 = 45 ms: both are judged by p90, 40 and 45."""
        records = [
            served(serve.point(TP), 200, {"p50": 9}, {"p50": 30, "p90": 40, "p99": 80}),
            served(serve.point(DCP), 100, {"p50": 9}, {"p50": 30, "p90": 45}),
        ]
        found = read(tmp_path, *records, slo={"itl": 50.0})
        assert set(found.served["slo_result"]) == {"meets at p90"}
        assert (
            answer.format_top_sentences(found)[0]
            == "SLO (--slo): ITL ≤ 50 ms at p90 (not at p99, which needs 662 samples)."
        )

    def test_a_value_within_two_percent_of_its_limit_is_narrow(self, tmp_path: Path) -> None:
        """50 ms against 50.5 and 49.5: as far as repeats may differ."""
        record = step(build.point(TP), 50.0)
        for limit, words in (
            (50.5, "meets narrowly at p50"),
            (49.5, "misses narrowly: ITL p50 50.0 ms"),
            (60.0, "meets at p50"),
        ):
            (row,) = read(tmp_path / str(limit), record, slo={"itl": limit}).points.to_dict("records")
            assert row["slo_result"] == words

    def test_where_none_meets_it_what_came_nearest_is_named(self, tmp_path: Path) -> None:
        """60 and 90 ms against 50: 1.2 and 1.8 times the limit."""
        found = read(tmp_path, step(build.point(TP), 90), step(build.point(DCP), 60), slo={"itl": 50.0})
        assert "none within the SLO at 8" in said(found, "Best layout")
        assert said(found, "No point meets the SLO").endswith(
            "nearest is tp4·dcp4 at concurrency 8 · context 4,000 (misses: ITL p50 60.0 ms)."
        )

    def test_decode_has_no_first_token_to_wait_for(self, tmp_path: Path) -> None:
        found = read(tmp_path, step(build.point(TP), 40), slo={"ttft": 1.0, "itl": 50.0})
        assert answer.format_top_sentences(found)[0].endswith("These points have no TTFT.")
        assert found.points["slo_result"].tolist() == ["meets at p50"]

    def test_an_slo_that_bounds_nothing_at_hand_is_none(self, tmp_path: Path) -> None:
        """Decode steps have neither a first token nor a whole request; where ITL is bounded, too, that is in force."""
        none = "No SLO was given (set one with --slo ttft=2000,itl=60, in ms), so the best is the highest output throughput."
        record, itl = step(build.point(TP), 40), "ITL ≤ 50 ms at p50"
        for number, (slo, words) in enumerate(
            [
                ({"ttft": 1.0}, f"{none} --slo ttft bounds nothing that these points have."),
                ({"ttft": 1.0, "e2el": 9.0}, f"{none} --slo ttft,e2el bounds nothing that these points have."),
                (
                    {"itl": 50.0, "tpot": 9.0},
                    f"SLO (--slo): {itl} (not at p99, which needs 662 samples). These points have no TPOT.",
                ),
                ({}, none),
            ]
        ):
            assert answer.format_top_sentences(read(tmp_path / str(number), record, slo=slo))[0] == words

    def test_an_objective_of_some_points_is_in_force_for_them(self, tmp_path: Path) -> None:
        """The served point has a TTFT and both have an ITL; nothing has a TPOT."""
        with_ttft = served(serve.point(TP), 100, {"p50": 9, "p99": 9}, {"p50": 40, "p99": 60}, tpot_ms=Latencies())
        found = read(tmp_path, step(build.point(TP), 40), with_ttft, slo={"ttft": 2000.0, "itl": 50.0, "tpot": 9.0})
        assert answer.format_top_sentences(found)[0] == (
            "SLO (--slo): TTFT ≤ 2,000 ms at p99, ITL ≤ 50 ms at p99 or p50 (lower where not at p99, which needs 662 samples). "
            "These points have no TPOT."
        )

    def test_points_that_were_measured_without_an_slo_are_named_beside_those_with_one(self, tmp_path: Path) -> None:
        """kimi-k2 had to answer within 50 ms, deepseek-v3 in whatever time it took."""
        itl = {"p50": 40, "p99": 60}
        records = [
            served(serve.point(TP), 100, {}, itl, slo_ms={"itl": 50.0}),
            served(serve.point(TP, model="deepseek-v3"), 100, {}, itl),
        ]
        assert answer.format_top_sentences(read(tmp_path, *records))[0] == (
            "SLO (as the runs were measured with): deepseek-v3 live: none; kimi-k2 live: ITL ≤ 50 ms at p99."
        )

    def test_the_objectives_of_the_run_hold_where_none_are_given(self, tmp_path: Path) -> None:
        record = served(serve.point(TP), 9, {"p50": 9}, {"p50": 60}, slo_ms={"itl": 50.0})
        assert "as the runs were measured with" in answer.format_top_sentences(read(tmp_path / "own", record))[0]
        given = read(tmp_path / "given", record, slo={"itl": 70.0})
        assert "(--slo): ITL ≤ 70 ms" in answer.format_top_sentences(given)[0]

    def test_objectives_that_points_do_not_share_are_none(self, tmp_path: Path) -> None:
        records = [served(serve.point(TP, c), 9, {"p50": 9}, {"p50": 60}, slo_ms={"itl": 50.0 + c}) for c in (8, 32)]
        assert answer.format_top_sentences(read(tmp_path, *records))[0].startswith("No SLO was given")

    def test_a_cpu_run_meets_and_misses_nothing(self, tmp_path: Path) -> None:
        found = read(tmp_path, *build.cpu_sweep(), slo={"itl": 1e-6})
        assert set(found.points["slo_result"]) == {""}
        said = "No point is held against --slo itl=1e-06: latencies of a CPU say nothing."
        assert [s for s in answer.format_top_sentences(found) if "slo" in s.lower()] == [said]
        assert overview.format_answer(found).endswith(said)
        assert "slo" not in overview.format_answer(read(tmp_path / "without", *build.cpu_sweep())).lower()

    def test_the_objectives_of_a_run_on_a_cpu_judge_nothing_either(self, tmp_path: Path) -> None:
        record = served(serve.point(TP), 9, {"p50": 9}, {"p50": 60}, slo_ms={"itl": 50.0})
        record = msgspec.structs.replace(record, warnings=["cpu"])
        said = "No point is held against the SLO of the run: latencies of a CPU say nothing."
        assert said in answer.format_top_sentences(read(tmp_path, record))

    @pytest.mark.parametrize(("records", "told"), [(build.cpu_sweep(), True), ([step(build.point(TP), 40)], False)])
    def test_the_command_says_that_an_slo_changes_nothing_on_a_cpu(
        self, records: list[Record], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Beside the path of the report, as who typed it waits for its effect."""
        point_runner.print_if_unjudged([build.write(tmp_path / "run", records)], "itl=60")
        assert ("--slo itl=60 has no effect here" in capsys.readouterr().err) is told

    def test_names_that_are_no_objectives_are_refused_as_serve_does(self, tmp_path: Path) -> None:
        from dcpbench.commands.options import OneAnswer
        from dcpbench.commands.report import report

        with pytest.raises(UsageError, match="not one of ttft, itl"):
            report([tmp_path], answer=OneAnswer(slo="latency=5"))


class TestMost:
    def test_the_most_within_the_slo_is_compared_with_the_most_of_the_other_kind(self, tmp_path: Path) -> None:
        """tp4 meets 50 ms at 8 (40 ms: 200 tok/s), tp4·dcp4 at 32, too (50 ms: 640): 3.2 times as much."""
        records = [
            step(build.point(TP, concurrency=8), 40),
            step(build.point(TP, concurrency=32), 70),
            step(build.point(DCP, concurrency=8), 45),
            step(build.point(DCP, concurrency=32), 50),
        ]
        found = read(tmp_path, *records, slo={"itl": 50.0})
        assert "640 tok/s with tp4·dcp4 at concurrency 32, 3.20 times the most without DCP (200, tp4" in said(
            found, "The most within"
        )

    def test_each_layout_has_one_number_with_its_load(self, tmp_path: Path) -> None:
        """Within 50 ms tp4 has 8 requests in 40 ms = 200 tok/s, tp4·dcp4 32 in 50 ms = 640, tp4·dp4·ep4 none."""
        times = [(TP, 8, 40), (TP, 32, 70), (DCP, 8, 45), (DCP, 32, 50), (DP, 8, 60)]
        records = [step(build.point(lay, concurrency=n), ms) for lay, n, ms in times]
        most = answer_tables.build_grids(read(tmp_path, *records, slo={"itl": 50.0}))[0]
        assert most.title.startswith("Maximum output tok/s within the SLO, at which concurrency of those that ran")
        assert dict(zip(most.columns, most.rows[0], strict=True)) == {
            "load": "context 4,000",
            "tp4": "200 at 8",
            "tp4·dcp4": "640 at 32",
            "tp4·dp4·ep4": "none",
        }

    def test_without_an_slo_there_is_no_most_within_it(self, tmp_path: Path) -> None:
        found = read(tmp_path, *(step(build.point(lay), 40) for lay in (TP, DCP)))
        assert not [table for table in answer_tables.build_grids(found) if table.title.startswith("Maximum")]


class TestJumps:
    """What throughput does between two concurrencies that the layout has no part in."""

    def read(self, tmp_path: Path, batch: float, requests: int = 96) -> dataframes.Frames:
        """tp4·dp4·ep4 with 24, 40 and 48 clients, of which so large a share is in flight."""
        records = []
        for n in (24, 40, 48):
            record = served(serve.point(DP, n, {"requests": requests}), 100, {}, {}, preemptions=0)
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

    def test_requests_that_run_as_more_in_a_graph_are_named(self, tmp_path: Path) -> None:
        """6 and 10 on each of 4 replicas run in graphs of 8 and 12; 48 are 12 on each."""
        told = answer.explain_jumps(self.read(tmp_path, 1.0).findings.points)
        assert "tp4·dp4·ep4 runs 24 as 32 and 40 as 48. Output jumps from there to the next size." in told
        assert "multiple" not in told

    def test_a_last_wave_that_is_not_full_is_named(self, tmp_path: Path) -> None:
        """96 are 40 + 40 + 16, and twice 48: at 80 % of 40 clients 32 are in flight."""
        told = answer.explain_jumps(self.read(tmp_path, 0.8).findings.points)
        assert "96 requests are no multiple of 40: the last 16 run alone, on average 32 of 40 are in flight" in told
        assert "multiple of 48" not in told

    def test_a_last_wave_of_one_request_is_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        points = self.read(tmp_path, 0.8).findings.points
        waves = findings.find_last_waves(points).assign(load_requests=81, left=1)
        monkeypatch.setattr(findings, "find_last_waves", lambda _: waves)
        assert "81 requests are no multiple of 40: the last one runs alone, on average" in answer.explain_jumps(points)

    def test_decode_fills_its_graphs_or_says_how_many_rows_they_have(self, tmp_path: Path) -> None:
        """A record of 8 requests in a graph of 12 rows."""
        for name, rows, told in (("full", 8, ""), ("padded", 12, "tp4 runs 8 as 12")):
            record = step(build.point(TP, concurrency=8), 40)
            assert record.conditions
            conditions = msgspec.structs.replace(record.conditions, cuda_graph=True, graph_batch=rows)
            found = read(tmp_path / name, msgspec.structs.replace(record, conditions=conditions))
            assert told in answer.explain_jumps(found.findings.points)
            assert bool(answer.explain_jumps(found.findings.points)) is bool(told)


class TestBreakEven:
    def test_decode_has_one_for_each_layout_and_context(self, tmp_path: Path) -> None:
        """Over 20 ms: 25 at context 1 (0.8); at context 2 19.9 of 8 requests (level), and 16 of 32 (1.25)."""
        times = {(1, 8): 25.0, (1, 32): 25.0, (2, 8): 19.9, (2, 32): 16.0}
        records = [
            step(build.point(layout, context=c, concurrency=n), 20.0 if layout == TP else ms)
            for (c, n), ms in times.items()
            for layout in (TP, DCP)
        ]
        found = read(tmp_path, *records)
        assert "Context 1: tp4·dcp4 never up to 32 (at most 0.80×, at 32); context 2: from concurrency 32 on" in said(
            found, "starts to pay"
        )

    def test_exchanges_are_named_by_themselves(self, tmp_path: Path) -> None:
        """symm 1.25 times from 8 on, a2a level."""
        records = [step(build.point(TP), 20)] + [
            step(build.point(DCP, exchange=exchange), ms) for exchange, ms in (("symm", 16), ("a2a", 20))
        ]
        told = said(read(tmp_path, *records), "starts to pay")
        assert "Where tp4·dcp4 starts to pay" in told
        assert (
            "a2a never up to 8 (at most 1.00×, at 8), from concurrency 8, the lowest tried, on (symm 1.25× there)"
            in told
        )

    def test_a_ratio_says_how_far_it_may_be_off(self, tmp_path: Path) -> None:
        """20 ms over 9, 10, 11: 2, from 20/11 = 1.82 to 20/9 = 2.22."""
        found = read(tmp_path, step(build.point(TP), 20), step(build.point(DCP), 9, 10, 11))
        assert "tp4·dcp4 2.00× [1.82–2.22]" in said(found, "starts to pay")


class TestPays:
    """DCP pays where it is clearly above the best layout without DCP on as many GPUs, both within the SLO."""

    def read(self, tmp_path: Path, rates: dict[Layout, float], late: tuple[Layout, ...] = ()) -> dataframes.Frames:
        """One load of these rates; the gaps of those that are late miss an SLO of 50 ms."""
        records = [
            served(serve.point(lay), rate, {"p50": 9, "p99": 9}, {"p50": 9, "p99": 99 if lay in late else 9})
            for lay, rate in rates.items()
        ]
        return read(tmp_path, *records, slo={"itl": 50.0} if late else None)

    def test_what_is_above_plain_tp_and_level_with_attention_dp_does_not_pay(self, tmp_path: Path) -> None:
        """150 over 100 tok/s of tp4 is 1.5 times, and over 150 of tp4·dp4·ep4 it is 1.0."""
        found = self.read(tmp_path, {TP: 100, DCP: 150, DP: 150})
        assert said(found, "DCP pays").endswith(
            "DCP pays in 0 of 1 load, in output tok/s over the best layout without DCP. 400 in · 40 out: nowhere "
            "(at most 1.00× tp4·dp4·ep4, tp4·dcp4 at 8)."
        )
        assert said(found, "Compared with").endswith(
            "Compared with tp4 alone: where DCP is ahead in output tok/s. 400 in · 40 out: from concurrency 8, the lowest "
            "tried, on (tp4·dcp4 1.50× there)."
        )
        assert not [s for s in answer.format_top_sentences(found) if "starts to pay" in s]

    def test_what_is_above_the_best_other_layout_pays_by_that(self, tmp_path: Path) -> None:
        """150 over 120 tok/s is 1.25 times."""
        found = self.read(tmp_path, {TP: 100, DCP: 150, DP: 120})
        assert "DCP pays in 1 of 1 load, in" in said(found, "DCP pays")
        assert said(found, "DCP pays").endswith("400 in · 40 out: tp4·dcp4 at 8 (1.25× tp4·dp4·ep4).")

    def test_what_misses_the_slo_does_not_pay_however_fast_it_is(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, {TP: 100, DCP: 300}, late=(DCP,))
        assert said(found, "DCP pays").endswith(
            "DCP pays in 0 of 1 load, in output tok/s within the SLO over the best layout without DCP. 400 in · 40 "
            "out: nowhere, as no layout with DCP meets the SLO."
        )
        assert "Compared with tp4 alone, whether or not the SLO is met: where DCP is ahead" in said(
            found, "Compared with"
        )

    def test_what_alone_meets_the_slo_pays_though_others_are_faster(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, {TP: 300, DP: 200, DCP: 100}, late=(TP, DP))
        assert said(found, "DCP pays").endswith("tp4·dcp4 at 8 (no layout without DCP meets the SLO).")

    def test_a_faster_layout_that_misses_the_slo_is_no_rival(self, tmp_path: Path) -> None:
        """120 over 100 of tp4; tp4·dp4·ep4 has 300 with gaps that nobody wants."""
        found = self.read(tmp_path, {TP: 100, DCP: 120, DP: 300}, late=(DP,))
        (row,) = findings.compare_dcp_with_best(findings.select_rivals(found)).to_dict("records")
        assert (row["rival"], row["ratio"], row["verdict"]) == ("tp4", 1.2, "higher")
        assert "(tp4·dcp4 1.20× there)" in said(found, "Where DCP starts to pay, in output tok/s over tp4")

    def test_more_gpus_and_another_dtype_are_no_rivals(self, tmp_path: Path) -> None:
        """tp8 has twice the GPUs; what fp8 would give says nothing of bf16."""
        points = [(serve.point(TP), 100), (serve.point(DCP), 150), (serve.point(Layout(8)), 400)]
        points.append((serve.point(DP, dtype="fp8"), 400))
        found = read(tmp_path, *(served(p, rate, {}, {}) for p, rate in points))
        (row,) = findings.compare_dcp_with_best(findings.select_rivals(found)).to_dict("records")
        assert (row["rival"], row["ratio"], row["verdict"]) == ("tp4 (bfloat16)", 1.5, "higher")

    def test_points_whose_rivals_did_not_run_are_not_counted(self, tmp_path: Path) -> None:
        """There is no layout without DCP at 8; at 32 there is, and it is slower."""
        points = [(serve.point(DCP, 8), 100), (serve.point(DCP, 32), 150), (serve.point(DP, 32), 100)]
        found = read(tmp_path, *(served(p, rate, {}, {}) for p, rate in points))
        assert "DCP pays in 1 of 1 load, in" in said(found, "DCP pays")
        alone = read(tmp_path / "alone", served(*points[0], {}, {}))
        assert not [s for s in answer.format_top_sentences(alone) if "pays" in s]

    def test_loads_in_a_row_are_one_clause_and_lengths_with_one_answer_another(self, tmp_path: Path) -> None:
        """The ratios at 400 tokens are 1.2 and 1.5 at 8 and 16, 0.8 at 32; at 800 and 1,600 tokens it is 0.5."""
        rates = {("400", 8): 120, ("400", 16): 150, ("400", 32): 80, ("800", 8): 50, ("1600", 8): 50}
        records = [
            served(serve.point(lay, n, {"input_tokens": tokens}), rate, {}, {})
            for (tokens, n), with_dcp in rates.items()
            for lay, rate in ((DP, 100), (DCP, with_dcp), (TP, 40))
        ]
        assert said(read(tmp_path, *records), "DCP pays").endswith(
            "DCP pays in 2 of 5 loads, in output tok/s over the best layout without DCP. 400 in: tp4·dcp4 at 8–16 "
            "(1.20–1.50× tp4·dp4·ep4); 800 in, 1,600 in: nowhere (at most 0.50× tp4·dp4·ep4, tp4·dcp4 at 8)."
        )


class TestOpening:
    def test_it_is_at_most_nine_sentences_and_the_others_stand_below(self, tmp_path: Path) -> None:
        """Two models × two layouts in four runs are eight times what must be said of one."""
        points = [build.point(lay, model=m) for m in ("a", "b") for lay in (TP, DCP)]
        hours = {
            f"run-{h}": [step(p, 9 + p.dcp, started_at=f"2026-11-21T0{h}:00:00Z") for p in points] for h in range(4)
        }
        found = dataframes.load_frames(
            [build.write(tmp_path / name, run) for name, run in hours.items()], slo={"itl": 12.0}
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

    def test_sections_come_in_the_order_of_a_decision(self, tmp_path: Path) -> None:
        told = sections.build_sections(read(tmp_path, *(step(build.point(x), 9) for x in (TP, DCP))), [])
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
        assert [s.slug for s in told] == order

    def test_definitions_stand_with_the_tables(self, tmp_path: Path) -> None:
        told = sections.build_sections(read(tmp_path, *(step(build.point(x), 9) for x in (TP, DCP))), [])
        titles = {s.slug: [t.title for t in s.tables] for s in told}
        assert all("What the words mean" in titles[slug] for slug in ("answer", "kv", "time", "method"))

    def test_live_and_replay_are_answered_apart(self, tmp_path: Path) -> None:
        """The replay of the other layout, three times as fast, beats no live run."""
        live, slow = serve.point(TP), serve.point(DCP)
        assert slow.load
        replay = msgspec.structs.replace(slow, load=msgspec.structs.replace(slow.load, mode="replay"))
        records = [served(p, rate, {}, {}) for p, rate in ((live, 100), (slow, 90), (replay, 300))]
        best = findings.find_best_per_load(findings.select_rivals(read(tmp_path, *records)))
        assert best[["mode", "label"]].to_numpy().tolist() == [["live", "tp4"]]


class TestTables:
    def test_the_best_of_each_load_is_a_grid(self, tmp_path: Path) -> None:
        """200 over 160 tok/s is 1.25 times; at 32 both give 640."""
        records = [
            step(build.point(lay, concurrency=n), ms)
            for lay, n, ms in ((TP, 8, 40), (DCP, 8, 50), (TP, 32, 50), (DCP, 32, 50))
        ]
        found = read(tmp_path, *records)
        best, over = answer_tables.build_grids(found)
        assert best.columns == ["load", "concurrency 8", "32"]
        assert best.rows == [["context 4,000", "tp4: 200, 1.25×", "tp4 ≈ tp4·dcp4: 640"]]
        assert over.rows == [["context 4,000", "tp4·dcp4", "▼ 0.80×", "≈ 1.00×"]]

    def test_where_the_same_layout_without_dcp_did_not_run_others_may_have(self, tmp_path: Path) -> None:
        """tp4·dcp4 has 50 over 40 ms of tp4 at 8; at 32 tp4 was rejected, and tp4·dp4·ep4 needs 40 ms, too; at 48 none ran."""
        ran = [(TP, 8, 50), (DCP, 8, 40), (DCP, 32, 50), (DP, 32, 40), (DCP, 48, 50)]
        records = [step(build.point(lay, concurrency=n), ms) for lay, n, ms in ran]
        _, over = answer_tables.build_grids(read(tmp_path, *records))
        assert over.rows == [["context 4,000", "tp4·dcp4", "▲ 1.25×", "no tp4; 0.80× tp4·dp4·ep4", "no tp4"]]

    def test_long_tables_are_folded_in_markdown(self) -> None:
        """GitHub folds what stands in details, and shows a table after an empty line."""
        short, long = (Table("Title", ["a"], [["1"]] * n) for n in (3, 30))
        assert report_markdown._format_table(short, 99).startswith("**Title**")
        folded = report_markdown._format_table(long, 99)
        assert folded.startswith("<details><summary>Title (30 rows)</summary>\n\n| a |")
        assert folded.endswith("\n\n</details>")

    def test_markdown_stays_below_what_github_shows(self, tmp_path: Path) -> None:
        """Rows that are left out are counted."""
        section = sections.Section(slug="s", title="s", tables=[Table("t", ["a"], [["x" * 900]] * 2_000)])
        text = report_markdown.render("title", [section], tmp_path)
        assert len(text.encode()) < 1_000_000
        assert "rows more in points.csv" in text


class TestShapes:
    def test_lengths_are_told_apart_by_what_differs(self) -> None:
        parts = [("4,000 in", "500 out"), ("8,000 in", "500 out")]
        rows = pd.DataFrame({"rest": [" · ".join(texts) for texts in parts], "rest_parts": parts})
        assert list(make_short_shapes(rows).values()) == ["4,000 in", "8,000 in"]
        assert find_shared_shape(rows) == "500 out"
        assert make_short_shapes(rows[:1]) == {"4,000 in · 500 out": "4,000 in · 500 out"}
        assert find_shared_shape(rows[:1]) == ""


@pytest.mark.parametrize(("inside", "fence"), [("no ticks", 3), ("a ```` b", 5), ("`", 3), ("a ``` b", 4)])
def test_a_fence_is_longer_than_any_run_of_backticks_in_it(inside: str, fence: int, tmp_path: Path) -> None:
    text = report_markdown.render("title", [sections.Section(slug="slug", title="Title", commands=[inside])], tmp_path)
    assert f"\n{'`' * fence}\n{inside}\n{'`' * fence}\n" in text
    assert "`" * (fence + 1) not in text
