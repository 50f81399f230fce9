"""The opening of a report: title, answer, bullets, and the ratios of its first chart. Output is concurrency / step
time: 8 requests at 40 ms a step give 200 tok/s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd
import pytest

from dcpbench.imports import Overrides, import_files
from dcpbench.plan import grid
from dcpbench.plan.spec import make_planned_probe, make_spec
from dcpbench.points.layout import Layout
from dcpbench.points.names import REPLAY
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.records.record import WRONG_RESULTS, is_rejected_for_memory
from dcpbench.reports import answer, answer_tables, dataframes, figures, overview, sections, tables
from tests.unit import engine_files_builder as files
from tests.unit import record_builder as build
from tests.unit import serve_record_builder as serve

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record

TP, DCP2, DCP, DP = Layout(4), Layout(4, 1, 2), Layout(4, 1, 4), Layout(4, 4)
GPUS = "On 4 × H200, "
HELD = "GPU memory holds 19 of 61 layers, which run repeatedly"
AROUND_40 = (38, 39, 39.5, 40, 40.5, 41, 42)
IMPORTED = "These figures are what the imported files measured: "


def read(folder: Path, *records: Record, **slo: float) -> dataframes.Frames:
    return dataframes.load_frames([build.write_records(folder / "run", list(records))], slo=slo)


def steps(layout: Layout, concurrency: int, *ms: float, **changes: Any) -> Record:
    point = build.make_point(layout, concurrency=concurrency, **changes)
    return msgspec.structs.replace(
        build.make_ok_record(point, steps=1), metrics=compute_decode_metrics(list(ms), concurrency, point.tp)
    )


def get_answer(folder: Path, *records: Record, **slo: float) -> str:
    return overview.format_answer(read(folder, *records, **slo))


@pytest.fixture
def crossing(tmp_path: Path) -> dataframes.Frames:
    """tp4 is ahead at 8 requests: 8 / 40 ms = 200 tok/s over 160; tp4·dcp4 at 32: 800 over 640."""
    return read(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 50), steps(TP, 32, 50), steps(DCP, 32, 40))


def test_each_layout_is_compared_with_the_best_other_one(crossing: dataframes.Frames) -> None:
    """200 / 160 is 1.25, and 160 / 200 is 0.8."""
    rows = crossing.findings.against_others
    assert rows["who"].tolist() == ["tp4", "tp4·dcp4"] * 2
    assert rows["ratio"].tolist() == pytest.approx([1.25, 0.8, 0.8, 1.25])


class TestWhichLayoutToTake:
    """The rule of which layout to take, as a sentence."""

    def test_rule_names_loads_gains_and_rivals(self, crossing: dataframes.Frames) -> None:
        """Loads of one length are ordered by their requests."""
        assert overview.format_answer(crossing) == (
            f"{GPUS}take tp4 up to 8 requests of 4,000 tokens in flight, and tp4·dcp4 from 32 on: tp4 gives 25 % more output than "
            f"tp4·dcp4, and tp4·dcp4 gives 25 % more output than tp4. This choice is best or level in both loads. {HELD}."
        )

    def test_rule_names_last_load_of_one_layout_and_first_of_the_next(self, tmp_path: Path) -> None:
        """Each layout is a quarter ahead in three loads."""
        loads = [(n, *((40, 50) if n < 20 else (50, 40))) for n in (4, 8, 16, 24, 32, 64)]
        records = [steps(layout, n, ms) for n, *both in loads for layout, ms in zip((TP, DCP), both, strict=True)]
        assert get_answer(tmp_path, *records) == (
            f"{GPUS}take tp4 up to 16 requests of 4,000 tokens in flight, and tp4·dcp4 from 24 on: tp4 gives up to 25 % more output than "
            f"tp4·dcp4, and tp4·dcp4 gives up to 25 % more output than tp4. This choice is best or level in all 6 loads. {HELD}."
        )

    def test_loads_of_several_lengths_are_ordered_by_tokens_in_flight(self, tmp_path: Path) -> None:
        """8 × 4,000 = 32,000; 32 × 32,000 = 8 × 128,000 = 1,024,000 tokens. The gains are 200 / 160 = 1.25 and at most
        150 / 125 = 1.2.
        """
        heavy = [
            steps(layout, n, ms, context=context)
            for n, context in ((32, 32_000), (8, 128_000))
            for layout, ms in ((TP, 120), (DCP, 100))
        ]
        assert (
            "take tp4 up to 32,000 tokens in flight (8 requests of 4,000), and tp4·dcp4 from 1.02 million on (32 requests of 32,000 or 8 of 128,000): tp4 gives "
            "25 % more output than tp4·dcp4, and tp4·dcp4 gives up to 20 % more output than tp4. This choice is best or level in all 3 loads."
        ) in get_answer(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 50), *heavy)

    def test_rule_of_a_single_layout_names_all_loads_tried(self, tmp_path: Path) -> None:
        """50 / 40 and 44 / 40: 25 % and 10 %."""
        records = [
            steps(TP, 8, 40),
            steps(DCP, 8, 50),
            steps(TP, 32, 40, context=9000),
            steps(DCP, 32, 44, context=9000),
        ]
        assert get_answer(tmp_path, *records) == (
            f"{GPUS}take tp4 at every load tried (8–32 requests of 4,000–9,000 tokens): tp4 gives up to 25 % more output than "
            f"tp4·dcp4. This choice is best or level in both loads. {HELD}."
        )

    def test_level_layouts_are_named_together_with_their_lead(self, tmp_path: Path) -> None:
        """tp4 and tp4·dcp4 give 200 tok/s, tp4·dp4·ep4 160."""
        assert get_answer(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 40), steps(DP, 8, 50)) == (
            f"{GPUS}take tp4 or tp4·dcp4, which are level, at 8 requests of 4,000 tokens: tp4 and tp4·dcp4 give 25 % more output than "
            f"tp4·dp4·ep4. Only this load was compared. {HELD}."
        )

    def test_variant_is_named_if_its_layout_ran_in_several(self, tmp_path: Path) -> None:
        records = [steps(TP, 8, 50), steps(DCP, 8, 45), steps(DCP, 8, 40, exchange="symm")]
        assert (
            "take tp4·dcp4 (symm) at 8 requests of 4,000 tokens: tp4·dcp4 gives 25 % more output than tp4."
            in get_answer(tmp_path, *records)
        )

    def test_exceptions_of_the_rule_are_named_with_their_lead(self, tmp_path: Path) -> None:
        """tp4 is best in 4 of 5 loads; at 16 requests tp4·dcp4 gives 50 / 45 = 11 % more."""
        records = [
            record
            for n, tp, dcp in ((4, 40, 50), (8, 40, 50), (16, 50, 45), (32, 40, 50), (48, 40, 50))
            for record in (steps(TP, n, tp), steps(DCP, n, dcp))
        ]
        text = get_answer(tmp_path, *records)
        assert "at most of the loads tried (" in text
        assert (
            ". This choice is best or level in 4 of 5 loads; in the other load the best is tp4·dcp4, by 11 %." in text
        )

    def test_alternating_winners_give_no_rule(self, tmp_path: Path) -> None:
        """The best layout changes between each two of six loads, so any rule with one change is right in four at most."""
        records = [
            record
            for i, n in enumerate((1, 2, 4, 8, 16, 32))
            for record in (steps(TP, n, 40 + 10 * (i % 2)), steps(DCP, n, 50 - 10 * (i % 2)))
        ]
        assert (
            "no layout is to be taken throughout: of 6 loads, best or level is tp4 in 3 and tp4·dcp4 in 3."
            in get_answer(tmp_path, *records)
        )

    def test_models_with_different_winners_have_separate_rules(self, tmp_path: Path) -> None:
        records = [
            steps(layout, n, 40 if (layout == TP) == (model == "kimi-k2") else 50, model=model)
            for model in ("deepseek-v3", "kimi-k2")
            for n in (8, 32)
            for layout in (TP, DCP)
        ]
        text = get_answer(tmp_path, *records)
        assert "for DeepSeek-V3, take tp4·dcp4 at every load tried (8–32 requests of 4,000 tokens)" in text
        assert ". For Kimi-K2, take tp4 at every load tried" in text

    @pytest.mark.parametrize(
        ("models", "more"), [(4, ""), (5, ". 1 more models are below"), (6, ". 2 more models are below")]
    )
    def test_sentence_has_rules_of_at_most_four_models(self, models: int, more: str, tmp_path: Path) -> None:
        records = [
            steps(layout, n, 40 if (layout == TP) == bool(i % 2) else 50, model=f"model-{i}")
            for i in range(models)
            for n in (8, 32)
            for layout in (TP, DCP)
        ]
        text = get_answer(tmp_path, *records)
        assert text.count(". For model-") == 3
        assert ("more models" in text) == bool(more)
        assert more in text

    def test_layouts_on_different_numbers_of_gpus_have_separate_rules(self, tmp_path: Path) -> None:
        """Layouts on 4 GPUs are not compared with layouts on 8."""
        four = [steps(TP, 8, 40), steps(DCP, 8, 50)]
        eight = [steps(Layout(8), 8, 30), steps(Layout(8, 1, 8), 8, 20)]
        text = get_answer(tmp_path, *four, *eight)
        assert text.startswith(
            f"{GPUS}take tp4 at 8 requests of 4,000 tokens: tp4 gives 25 % more output than tp4·dcp4. "
        )
        assert f". {HELD}. On 8 × H200, take tp8·dcp8 at 8 requests" in text

    @pytest.mark.parametrize(
        ("held", "note"),
        [
            ((19, 19), "GPU memory holds 19 of 61 layers, which run repeatedly"),
            (
                (7, 4),
                "GPU memory holds 7 (DeepSeek-V3) and 4 (Kimi-K2) of 61 layers, which run repeatedly",
            ),
            ((61, 60), "GPU memory holds 60 of Kimi-K2's 61 layers, which run repeatedly"),
        ],
    )
    def test_held_layers_are_named_for_their_models(self, tmp_path: Path, held: tuple[int, int], note: str) -> None:
        """The line below, on how to read the numbers, does not repeat them."""
        records = [
            msgspec.structs.replace(record, conditions=msgspec.structs.replace(record.conditions, layers_held=layers))
            for model, layers in zip(("deepseek-v3", "kimi-k2"), held, strict=True)
            for layout in (TP, DCP)
            if (record := steps(layout, 8, 40, model=model)).conditions
        ]
        frames = read(tmp_path, *records)
        text = overview.format_answer(frames)
        assert text.startswith(f"{GPUS}take ")
        assert text.endswith(f". {note}.")
        assert "layers held" not in sections.build_sections(frames, [])[0].aside

    def test_replay_is_named_with_the_gpus(self, tmp_path: Path) -> None:
        records = [serve.make_served_record(serve.make_point(layout, changed={"mode": REPLAY})) for layout in (TP, DCP)]
        assert get_answer(tmp_path, *records, itl=60).startswith("On 4 × H200 (replayed, not served live), take tp4")


class TestSlo:
    """Rules for loads at which some layout meets the SLO, and for other loads."""

    def test_rule_ends_at_the_last_load_within_the_slo(self, tmp_path: Path) -> None:
        """At 48 requests both layouts take more than 60 ms; from 16 on tp4 does."""
        records = [steps(TP, 8, 40), steps(DCP, 8, 50), steps(TP, 16, 70), steps(DCP, 16, 50)]
        records += [steps(TP, 32, 80), steps(DCP, 32, 55), steps(TP, 48, 90), steps(DCP, 48, 70)]
        assert get_answer(tmp_path, *records, itl=60) == (
            f"{GPUS}take tp4 up to 8 requests of 4,000 tokens in flight, and tp4·dcp4 from 16 to 32: tp4 gives 25 % more output "
            "than tp4·dcp4, and tp4·dcp4 is the only layout within the SLO there. This choice is best or level in all 3 loads within the SLO (ITL ≤ 60 ms); at "
            f"1 more load no layout meets it. {HELD}."
        )

    def test_nearest_layout_is_named_if_none_meets_the_slo(self, tmp_path: Path) -> None:
        assert get_answer(
            tmp_path, steps(TP, 8, 40), steps(DCP, 8, 50), steps(TP, 32, 80), steps(DCP, 32, 90), itl=30
        ) == (
            f"{GPUS}no layout is to be taken: at any of 2 loads none is within the SLO (ITL ≤ 30 ms); nearest is tp4 at 8 "
            f"requests of 4,000 tokens (ITL p50 40.0 ms). {HELD}."
        )


class TestNoAnswer:
    """Results that do not allow any rule."""

    def test_single_layout_gives_no_rule(self, tmp_path: Path) -> None:
        found = read(tmp_path, steps(TP, 8, 40))
        assert found.findings.against_others.empty
        assert overview.format_answer(found) == (
            f"On 4 × H200 ({HELD}), only tp4 ran, so no layout can be recommended: at most 200 output tok/s, with tp4 at 8 "
            "requests of 4,000 tokens."
        )

    @pytest.mark.parametrize(
        ("itl", "ending"),
        [
            (60.0, "at most 640 output tok/s within the SLO, with tp4 at 32 requests of 4,000 tokens."),
            (45.0, "at most 200 output tok/s within the SLO, with tp4 at 8 requests of 4,000 tokens."),
            (30.0, "; no point meets the SLO: nearest is tp4 at 8 requests of 4,000 tokens (misses: ITL p50 40.0 ms)."),
        ],
    )
    def test_single_layout_has_its_maximum_output_within_the_slo(self, tmp_path: Path, itl: float, ending: str) -> None:
        """8 requests at 40 ms give 200 tok/s, 32 at 50 ms give 640."""
        assert get_answer(tmp_path, steps(TP, 8, 40), steps(TP, 32, 50), itl=itl).endswith(ending)

    def test_point_without_the_objective_is_not_within_the_slo(self, tmp_path: Path) -> None:
        """A decode step has no TTFT to compare with the SLO; the served point misses it."""
        point = serve.make_served_record(serve.make_point(TP))
        text = get_answer(tmp_path, point, steps(TP, 32, 50), ttft=1.0)
        assert "within the SLO" not in text
        assert "; no point meets the SLO (misses: TTFT" in text

    def test_single_point_that_misses_the_slo_is_named_once(self, tmp_path: Path) -> None:
        assert get_answer(tmp_path, steps(TP, 8, 40), itl=30.0).endswith(
            "at most 200 output tok/s, with tp4 at 8 requests of 4,000 tokens; no point meets the SLO (misses: ITL p50 40.0 ms)."
        )

    def test_layouts_under_different_loads_give_no_rule(self, tmp_path: Path) -> None:
        text = get_answer(tmp_path, steps(TP, 8, 40), steps(DCP, 32, 40))
        assert (
            "no two layouts (tp4 and tp4·dcp4) on as many GPUs ran under one load, so no layout can be recommended"
            in text
        )

    def test_layouts_of_two_runs_are_compared_by_one_command(self, tmp_path: Path) -> None:
        runs = [
            build.write_records(tmp_path / name, [steps(layout, 8, 40)]) for name, layout in (("a", TP), ("b", DCP))
        ]
        text = overview.format_answer(dataframes.load_frames(runs))
        assert "on as many GPUs ran under one load of one run, so no layout can be recommended" in text
        assert text.endswith(" To compare them, measure them with one command.")

    def test_single_layouts_on_different_numbers_of_gpus_give_no_rule(self, tmp_path: Path) -> None:
        text = get_answer(tmp_path, steps(TP, 8, 40), steps(Layout(8), 8, 30))
        assert (
            "no two layouts (tp4 and tp8) on as many GPUs ran under one load, so no layout can be recommended" in text
        )

    def test_only_layout_that_fits_is_named_with_the_rejected_one(self, tmp_path: Path) -> None:
        text = get_answer(tmp_path, steps(DCP, 8, 40), build.make_rejected_record(build.make_point(TP)))
        assert "only tp4·dcp4 ran, as tp4 has too little memory: at most 200 output tok/s" in text

    def test_rejection_at_another_load_is_no_reason_for_a_single_layout(self, tmp_path: Path) -> None:
        text = get_answer(
            tmp_path, steps(TP, 8, 40), build.make_rejected_record(build.make_point(TP, concurrency=4096))
        )
        assert "only tp4 ran, so no layout can be recommended: at most 200 output tok/s" in text

    def test_open_loops_name_the_fastest_layout_per_rate(self, tmp_path: Path) -> None:
        """Both layouts keep up with 2 requests/s, so neither gives more output."""
        rate = {"arrival": "gamma", "request_rate": 2.0}
        text = get_answer(
            tmp_path, *(serve.make_served_record(serve.make_point(layout, changed=rate)) for layout in (TP, DCP))
        )
        assert "of 1 load with requests at a rate, the fastest is no layout clearly in 1: at most" in text

    def test_run_without_finished_points_names_the_failures(self, tmp_path: Path) -> None:
        text = get_answer(
            tmp_path, build.make_failed_record(build.make_point(TP)), build.make_rejected_record(build.make_point(DCP))
        )
        assert text == (
            "No point finished (1 failed and 1 rejected for lack of memory), so no layout can be recommended. "
            "The reason at 1 of 2 points: rank 3 exited with code 1; read logs/rank-3.txt."
        )

    def test_failed_run_names_its_hardware_and_the_most_common_reason(self, tmp_path: Path) -> None:
        """Two of three points share a reason, each with its own log; the first point failed for another reason."""
        reasons = ["rank 0: ValueError: no", *(2 * ["rank 1 ended with exit code 7"])]
        records = [
            msgspec.structs.replace(
                build.make_failed_record(build.make_point(DCP, concurrency=n), reason),
                advice=f"Read logs/tp4-{n} in the run's folder",
                detail={"device": "NVIDIA H200"},
            )
            for n, reason in enumerate(reasons, 1)
        ]
        found = read(tmp_path, *records)
        assert overview.format_title(found).endswith("tp4·dcp4 · 4 × NVIDIA H200 · no point finished")
        text = overview.format_answer(found)
        assert text.startswith("No point finished on 4 × NVIDIA H200 (3 failed), so no layout")
        assert text.endswith("The reason at 2 of 3 points: rank 1 ended with exit code 7.")
        rows = tables.build_others_table(found.others).rows
        assert [row[3] for row in rows] == ["4,000 × 2, 4,000 × 3", "4,000 × 1"]
        assert tables.build_runs_table(found).rows[0][1] == "NVIDIA H200"

    def test_hung_points_share_a_reason_with_different_positions_of_ranks(self, tmp_path: Path) -> None:
        """The sentence has the shared cause, the table the whole reason of each point."""
        cause = "no sign of life for 300 s in stage 'measure'"
        records = [
            msgspec.structs.replace(
                build.make_failed_record(build.make_point(DCP, concurrency=n), f"{cause}: rank {n} is behind"),
                cause=cause,
                outcome="hung",
                detail={},
            )
            for n in (1, 2)
        ]
        found = read(tmp_path, *records)
        assert overview.format_answer(found).endswith("The reason: no sign of life for 300 s in stage 'measure'.")
        assert [row[3] for row in tables.build_others_table(found.others).rows] == ["4,000 × 1", "4,000 × 2"]

    def test_failed_run_on_a_cpu_is_marked_as_cpu(self, tmp_path: Path) -> None:
        record = msgspec.structs.replace(build.make_failed_record(build.make_point(DCP)), warnings=["cpu"])
        found = read(tmp_path, record)
        assert overview.format_answer(found).startswith("No point finished on a CPU (1 failed)")
        assert found.cpu

    def test_cpu_run_has_no_answer_about_speed(self, tmp_path: Path) -> None:
        found = read(tmp_path, *build.make_cpu_sweep())
        assert overview.format_answer(found) == (
            "Functional run on a CPU: it shows that tp8 and tp8·dcp8 can run. Its times do not reflect GPU performance."
        )
        assert overview.format_bullets(found) == []

    def test_cpu_points_among_others_are_excluded_from_the_answer(self, tmp_path: Path) -> None:
        found = read(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 50), *build.make_cpu_sweep())
        text = overview.format_answer(found)
        assert answer.format_top_sentences(found)[0] == (
            "CPU: 4 of 6 points are a functional run. No conclusion about performance can be drawn from their times."
        )
        assert text.startswith(f"{GPUS}take tp4 at 8 requests")
        assert text.endswith(f". {HELD}. 4 points ran on a CPU, so their times do not reflect GPU performance.")


class TestImports:
    """Answers of results imported from other tools."""

    def import_and_get_answer(self, folder: Path, *results: dict[str, Any], **options: Any) -> str:
        import_files(
            [files.write_file(folder, *results)], "inferencex", folder / "run", Overrides(**options), force=False
        )
        return overview.format_answer(dataframes.load_frames([folder / "run"]))

    def test_imports_of_one_layout_give_no_rule(self, tmp_path: Path) -> None:
        text = self.import_and_get_answer(tmp_path, files.make_inferencex_row())
        assert text.startswith(f"{IMPORTED}1 result of InferenceX on ")
        assert "output tok/s (" in text
        assert text.endswith("no layout can be recommended.")

    def test_own_points_are_answered_separately_from_imports(self, tmp_path: Path) -> None:
        import_files(
            [files.write_file(tmp_path, files.make_inferencex_row())],
            "inferencex",
            tmp_path / "theirs",
            Overrides(),
            force=False,
        )
        own = build.write_records(tmp_path / "ours", [steps(TP, 8, 40), steps(DCP, 8, 50)])
        text = overview.format_answer(dataframes.load_frames([tmp_path / "theirs", own]))
        assert text.startswith(f"{IMPORTED}1 result of InferenceX on ")
        assert (
            ", in addition to 2 points of dcpbench. They are of one layout, so no layout can be recommended. " in text
        )
        assert f" Of dcpbench's own points: {GPUS}take tp4 at 8 requests of 4,000 tokens: tp4 gives 25 % more" in text

    def test_title_names_the_source_of_imports(self, tmp_path: Path) -> None:
        import_files(
            [files.write_file(tmp_path, files.make_inferencex_row())],
            "inferencex",
            tmp_path / "theirs",
            Overrides(),
            force=False,
        )
        own = build.write_records(tmp_path / "ours", [steps(TP, 8, 40)])
        assert overview.format_title(dataframes.load_frames([tmp_path / "theirs"])).endswith(
            " · imported from InferenceX"
        )
        assert overview.format_title(dataframes.load_frames([tmp_path / "theirs", own])).endswith(
            " · some imported from InferenceX"
        )
        assert "imported" not in overview.format_title(dataframes.load_frames([own]))

    def test_repeats_are_counted_as_results(self, tmp_path: Path) -> None:
        files.write_sweep(tmp_path / "sweep", {"max_num_seqs": 4}, {}, runs=3)
        import_files([tmp_path / "sweep"], "vllm", tmp_path / "run", Overrides(), force=False)
        assert f"{IMPORTED}3 results of vllm bench serve" in overview.format_answer(
            dataframes.load_frames([tmp_path / "run"])
        )

    def test_imports_on_a_cpu_have_no_answer_about_speed(self, tmp_path: Path) -> None:
        import_files(
            [files.write_file(tmp_path, files.make_vllm_result())],
            "vllm",
            tmp_path / "run",
            Overrides(gpu="CPU"),
            force=False,
        )
        text = overview.format_answer(dataframes.load_frames([tmp_path / "run"]))
        assert text.startswith(f"{IMPORTED}1 result of vllm bench serve on CPU")
        assert text.endswith("They ran on a CPU, so their times do not reflect GPU performance.")

    def test_imports_of_two_layouts_under_one_load_give_a_rule(self, tmp_path: Path) -> None:
        """Two layouts have the same result, each from one launch."""
        for name, dcp in (("tp", 1), ("dcp", 8)):
            path = files.write_file(tmp_path, files.make_vllm_result(max_concurrency=8), name=f"{name}.json")
            import_files([path], "vllm", tmp_path / name, Overrides(tp=8, dcp=dcp, gpu="NVIDIA H200"), force=False)
        read = dataframes.load_frames([tmp_path / "tp", tmp_path / "dcp"], as_repeats=True)
        text = overview.format_answer(read)
        assert text.startswith(f"{IMPORTED}2 results of vllm bench serve on 8 × NVIDIA H200, at most ")
        assert ". By these, take tp8 or tp8·dcp8, which are not distinguishable, at 8 requests of " in text
        assert text.endswith(". Only this load was compared, in one launch each.")


class TestDcpAhead:
    """The line in the chart and the bullet share one rule by intervals, findings.compare_dcp_with_best."""

    def test_level_layouts_with_dcp_are_both_ahead_of_tp(self, tmp_path: Path) -> None:
        """The best other layout of each has DCP, too, and does not count."""
        found = read(tmp_path, steps(TP, 8, 50), steps(DCP2, 8, 40), steps(DCP, 8, 40))
        rows = found.findings.against_others
        assert dict(zip(rows["who"], rows["pays"], strict=True)) == {"tp4": False, "tp4·dcp2": True, "tp4·dcp4": True}
        assert figures._find_first_ahead(rows) == 8
        assert overview.format_bullets(found)[0].startswith(
            "At the one load compared DCP is clearly ahead of the best layout without it, by at most 25 %"
        )

    def test_medians_within_their_intervals_are_not_ahead(self, tmp_path: Path) -> None:
        """41 / 40 ms is 2.5 %, and the intervals overlap."""
        found = read(tmp_path, steps(TP, 8, *(1 + ms for ms in AROUND_40)), steps(DCP, 8, *AROUND_40))
        rows = found.findings.against_others
        assert rows["ratio"].max() == pytest.approx(1.025)
        assert not rows["pays"].any()
        assert figures._find_first_ahead(rows) is None
        assert "DCP is not clearly ahead" in overview.format_bullets(found)[0]

    def test_first_load_with_dcp_ahead_is_in_chart_and_bullet(self, crossing: dataframes.Frames) -> None:
        assert figures._find_first_ahead(crossing.findings.against_others) == 32
        assert overview.format_bullets(crossing)[0] == (
            "At 1 of 2 loads DCP is clearly ahead of the best layout without it, by at most 25 % (Kimi-K2, tp4·dcp4 at 32 "
            "requests of 4,000 tokens)."
        )

    def test_best_ratio_is_named_if_dcp_is_never_ahead(self, tmp_path: Path) -> None:
        """The ratios are 40 / 50 = 0.8 and 40 / 44 = 0.91."""
        found = read(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 50), steps(TP, 32, 40), steps(DCP, 32, 44))
        assert overview.format_bullets(found)[0] == (
            "At none of 2 loads is DCP clearly ahead of the best layout without it; nearest is 0.91× (Kimi-K2, tp4·dcp4 at "
            "32 requests of 4,000 tokens)."
        )


@pytest.mark.parametrize(("share", "named"), [(1.0, True), (0.985, True), (0.975, False), (0.5, False)])
def test_layout_without_dcp_is_named_if_its_kv_capacity_is_equal(share: float, named: bool, tmp_path: Path) -> None:
    """Layouts are compared by KV tokens per GiB: DCP holds four times as many as tp4, replicas a share of that."""
    plain, *split = (steps(layout, 8, 40) for layout in (TP, DCP, DP))
    assert plain.kv
    held = plain.kv.capacity_tokens
    kept = [
        msgspec.structs.replace(record, kv=msgspec.structs.replace(plain.kv, capacity_tokens=int(held * times)))
        for record, times in zip(split, (4, 4 * share), strict=True)
    ]
    (bullet,) = [line for line in overview.format_bullets(read(tmp_path, plain, *kept)) if "KV memory" in line]
    also = ", as does tp4·dp4·ep4" if named else ""
    assert bullet == f"tp4·dcp4 holds 4.00× the tokens of tp4 in the same KV memory{also}."


class TestNoRoom:
    """Points that the plan rejected for memory."""

    def test_only_points_rejected_for_memory_are_marked_so(self) -> None:
        """tp4 lacks memory for 48 requests of 128,000 tokens; tp8 lacks GPUs, and --dcp 3 is no layout."""
        probe = make_planned_probe("H200", 4)
        options = {"tp": (4, 8), "dcp": (1, 3), "context": (128_000,), "concurrency": (48,)}
        records = [c.make_rejected_record() for c in grid.expand_grid(make_spec(options, probe), probe) if c.error]
        found = {(r.point.tp, r.point.dcp): is_rejected_for_memory(r) for r in records}
        assert found == {(4, 1): True, (4, 3): False, (8, 1): False, (8, 3): False}

    def test_bullet_names_the_lowest_rejected_load_of_layouts(self, tmp_path: Path) -> None:
        lost = [
            build.make_rejected_record(build.make_point(x, context=128_000, concurrency=n))
            for x in (TP, DCP2)
            for n in (32, 48)
        ]
        found = read(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 50), *lost)
        assert (
            "Does not fit into memory: tp4 and tp4·dcp2 from 32 requests of 128,000 tokens on."
            in overview.format_bullets(found)
        )


def test_title_names_layouts_and_hardware(crossing: dataframes.Frames) -> None:
    title = overview.format_title(crossing)
    assert "tp4, tp4·dcp4 · 4 ×" in title


@pytest.mark.parametrize(
    ("devices", "hardware"),
    [
        (["NVIDIA H200", None], "4–8 × NVIDIA H200"),
        (["NVIDIA H200", float("nan")], "4–8 × NVIDIA H200"),
        (["NVIDIA H200", "?"], "4–8 × NVIDIA H200, ?"),
        ([None, None], ""),
        (["NVIDIA H200", "NVIDIA H100"], "4–8 × NVIDIA H200, NVIDIA H100"),
    ],
)
def test_results_without_a_gpu_name_add_nothing_to_the_hardware(devices: list[object], hardware: str) -> None:
    """Next to other results the missing name may be NaN."""
    table = pd.DataFrame({"device": pd.Series(devices, dtype=object), "cpu": False, "gpus": [4, 8]})
    assert overview.format_table_hardware(table) == hardware


@pytest.mark.parametrize(
    ("context", "mode", "length"),
    [(4000, "decode", " of 4,000 tokens"), (4000, "live", " of up to 4,000 tokens"), (0, "live", "")],
)
def test_rejected_points_are_named_by_fewest_requests_of_each_length(
    monkeypatch: pytest.MonkeyPatch, context: int, mode: str, length: str
) -> None:
    """An unknown length is left out."""
    rows = [{"context": context, "mode": mode, "layout": f"tp{tp}", "concurrency": n} for tp in (4, 8) for n in (48, 8)]
    monkeypatch.setattr(overview, "select_rejected_for_memory", lambda _: pd.DataFrame(rows))
    assert overview._describe_rejections(None) == f"Does not fit into memory: tp4 and tp8 from 8 requests{length} on."  # type: ignore[arg-type]


@pytest.mark.parametrize(("lengths", "more"), [(3, ""), (4, "; and 1 more"), (6, "; and 3 more")])
def test_at_most_three_rejected_loads_are_named(monkeypatch: pytest.MonkeyPatch, lengths: int, more: str) -> None:
    """Each length of requests is one load."""
    lost = pd.DataFrame(
        [{"context": 1000 * n, "mode": "decode", "layout": "tp4", "concurrency": 8} for n in range(1, lengths + 1)]
    )
    monkeypatch.setattr(overview, "select_rejected_for_memory", lambda _: lost)
    named = "; ".join(f"tp4 from 8 requests of {n},000 tokens on" for n in (1, 2, 3))
    assert overview._describe_rejections(None) == f"Does not fit into memory: {named}{more}."  # type: ignore[arg-type]


def test_best_layout_is_named_for_each_number_of_gpus(tmp_path: Path) -> None:
    """tp2·dcp2 has 160 tok/s over 133, and tp4·dcp4 has 267 over 200; tp8 is alone on 8 GPUs."""
    layouts = ((Layout(2), 60), (Layout(2, 1, 2), 50), (TP, 40), (DCP, 30), (Layout(8), 20))
    report = read(tmp_path, *(steps(layout, 8, ms) for layout, ms in layouts))
    best = "context 4,000 on 2 GPUs: tp2·dcp2 at 8 (1.20× the next); context 4,000 on 4 GPUs: tp4·dcp4 at 8 (1.33×"
    assert best in " ".join(answer.format_top_sentences(report)).replace("C", "c")
    assert answer_tables.build_grids(report)[0].columns == ["load", "GPUs", "concurrency 8"]
    assert overview.format_bullets(report)[0].startswith("At 2 of 2 loads DCP is clearly ahead")


def test_highest_output_within_slo_is_compared_on_as_many_gpus(tmp_path: Path) -> None:
    layouts = ((Layout(2), 40), (Layout(2, 1, 2), 30), (TP, 20), (DCP, 25))
    report = read(tmp_path, *(steps(layout, 8, ms) for layout, ms in layouts), itl=60)
    assert report.findings.best_within_slo[["gpus", "label", "other"]].to_numpy().tolist() == [
        [2, "tp2·dcp2", "tp2"],
        [4, "tp4", "tp4·dcp4"],
    ]


@pytest.mark.parametrize("warning", WRONG_RESULTS)
def test_points_with_wrong_results_are_never_recommended(tmp_path: Path, warning: str) -> None:
    """tp4·dcp4 would be ahead with 267 tok/s; tp4 has 200 and tp4·dp4 178."""
    wrong = msgspec.structs.replace(steps(DCP, 8, 30), warnings=[warning])
    report = read(tmp_path, steps(TP, 8, 40), wrong, steps(DP, 8, 45))
    assert "take tp4 at" in overview.format_answer(report)
    note = f"1 of 3 points computed wrong results ({warning}) and is not compared"
    assert overview.list_caveats(report)[0] == note
    assert f"{note}." in answer.format_top_sentences(report)
    alone = read(tmp_path / "alone", wrong)
    assert overview.format_answer(alone).startswith("1 of 1 point computed wrong results")


def test_loads_without_a_gain_interrupt_a_range_of_loads(tmp_path: Path) -> None:
    """DCP pays at 8, 32 and 48, but not at 16, where attention DP has 400 tok/s over 320."""
    loads = ((8, 40, 50), (16, 50, 40), (32, 40, 50), (48, 40, 50))
    found = [steps(*of) for n, dcp, dp in loads for of in ((TP, n, 80), (DCP, n, dcp), (DP, n, dp))]
    gain = answer.describe_dcp_gain(read(tmp_path, *found).findings.against_best)
    assert "tp4·dcp4 at 8 (1.25× tp4·dp4·ep4), tp4·dcp4 at 32–48 (1.25× tp4·dp4·ep4)" in gain


def test_loads_are_joined_for_each_number_of_drafts(tmp_path: Path) -> None:
    drafts: list[dict[str, Any]] = [{}, {"mtp": 1, "acceptance": "0.8"}]
    found = [steps(*of, **more) for n in (8, 16) for more in drafts for of in ((TP, n, 50), (DCP, n, 40))]
    gain = answer.describe_dcp_gain(read(tmp_path, *found).findings.against_best)
    with_drafts = "(mtp1, acceptance 0.8)"
    assert f"tp4·dcp4 at 8–16 (1.25× tp4), tp4·dcp4 {with_drafts} at 8–16 (1.25× tp4 {with_drafts})." in gain


def test_sentence_on_best_layouts_follows_the_loads_of_each_number_of_gpus(tmp_path: Path) -> None:
    """The best layout never changes along the loads, on 2 nor on 4 GPUs."""
    layouts = ((Layout(2), 50), (Layout(2, 1, 2), 40), (TP, 30), (DCP, 20))
    report = read(tmp_path, *(steps(layout, n, ms) for n in (8, 16, 24, 32, 48) for layout, ms in layouts))
    text = answer.describe_best(report.findings.best)
    assert "on 2 GPUs: tp2·dcp2 at 8–48 (1.25× the next)" in text
    assert "on 4 GPUs: tp4·dcp4 at 8–48 (1.50× the next)" in text


def test_layouts_are_compared_on_the_same_emulated_machine(tmp_path: Path) -> None:
    """On an H100 all steps take 1.6 times as long as on an H200, so that each layout is faster there."""
    machines = (("H100", 1.6), ("H200", 1.0))
    found = [steps(x, 8, ms * by, emulate=name) for name, by in machines for x, ms in ((TP, 50), (DCP, 40))]
    best = read(tmp_path, *found).findings.best
    assert best["label"].tolist() == ["tp4·dcp4 (emulated on H100)", "tp4·dcp4 (emulated on H200)"]
    assert best["lead"].tolist() == pytest.approx([1.25, 1.25])


@pytest.mark.parametrize(
    ("changes", "warnings", "why"),
    [
        ({}, ["graph_differs"], "only tp4 ran without wrong results, so"),
        (
            {"mtp": 1, "acceptance": "0.8"},
            [],
            "no two layouts (tp4 and tp4·dcp4) on as many GPUs ran under one load with equal drafts, so",
        ),
        ({"emulate": "H100"}, [], "ran under one load with equal emulated machines, so"),
        ({"kv_dtype": "fp8"}, [], "ran under one load with equal precision, so"),
    ],
    ids=["wrong", "drafts", "machine", "precision"],
)
def test_sentence_without_a_comparison_states_why(
    changes: dict[str, Any], warnings: list[str], why: str, tmp_path: Path
) -> None:
    """Both layouts ran on 4 GPUs under the same load."""
    other = msgspec.structs.replace(steps(DCP, 8, 30, **changes), warnings=warnings)
    assert why in overview.format_answer(read(tmp_path, steps(TP, 8, 40), other))


def test_sentence_names_its_model_if_others_have_nothing_to_compare(tmp_path: Path) -> None:
    alone = steps(TP, 8, 40, model="deepseek-v3")
    text = get_answer(tmp_path, steps(TP, 8, 40), steps(DCP, 8, 30), alone)
    assert "for Kimi-K2, take tp4·dcp4" in text


@pytest.mark.parametrize(("faster", "how"), [(39.6, "level"), (36.4, "not distinguishable")])
def test_overlapping_intervals_beyond_the_launch_band_are_not_level(tmp_path: Path, faster: float, how: str) -> None:
    """Steps of 36 to 44 ms overlap both. 40 / 39.6 is 1 %, which is within 2 %; 40 / 36.4 is 10 %."""
    spread = (-4, -3, 0, 3, 4)
    found = [steps(layout, 8, *(ms + x for x in spread)) for layout, ms in ((TP, 40), (DCP, faster))]
    report = read(tmp_path, *found)
    assert f"take tp4·dcp4 or tp4, which are {how}, at" in overview.format_answer(report)
    assert how in answer.describe_best(report.findings.best)
    assert how in answer_tables.build_best_table(report.findings.best, "decode").rows[0][2]


def test_layouts_are_compared_at_equal_drafts(tmp_path: Path) -> None:
    """Drafts of an assumed acceptance double the output of tp4; without drafts, tp4·dcp4 is 25 % ahead."""
    drafted = steps(TP, 8, 25, mtp=1, acceptance="0.8")
    report = read(tmp_path, steps(TP, 8, 50), steps(DCP, 8, 40), drafted)
    assert "take tp4·dcp4 at 8 requests of 4,000 tokens: tp4·dcp4 gives 25 % more" in overview.format_answer(report)
    assert report.findings.best["label"].tolist() == ["tp4·dcp4"]
    both = read(tmp_path / "both", *report.records, steps(DCP, 8, 20, mtp=1, acceptance="0.8"))
    assert both.findings.best["lead"].tolist() == pytest.approx([1.25, 1.25])
    assert len(answer_tables.build_grids(both)[0].rows) == 2
